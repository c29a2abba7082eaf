"""`megaverl ARGUMENTS`, whose rows of batches go as they would between devices: through
the context's group, gloo here, and between worlds by NCCL's rules: a message has no
name, and holds its sender until the receiver is there.

Every rank's log says what it sends so.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.cli.main import main
from megaverl.dataflow import DataFlow, Operator
from megaverl.distributed import job_context
from megaverl.distributed.channels import Batch, Channel
from megaverl.distributed.ragged import RaggedBatch

pack, begin = RaggedBatch.pack, Channel._begin


def told(
    rows: RaggedBatch, places: Sequence[int], device: torch.device | None = None
) -> Any:
    found = pack(rows, places, device)
    if found[2].numel():
        print(f"between devices: {', '.join(rows.tensors)}", flush=True)
    return found


def add_operators(flow: DataFlow) -> None:
    """The reference says something of its log-probs, and gets what comes of it back."""
    flow.add_operator(
        Operator(
            "of_each",
            lambda ref_log_probs: {"sums": ref_log_probs.sum(1)},
            role="reference",
        )
    )
    flow.add_operator(
        Operator("means", lambda of_each: of_each["sums"] / 2, role="actor"),
        before="advantages",
    )
    flow.add_operator(
        Operator(
            "printed", lambda means: print(means.sum()), outputs=(), role="reference"
        )
    )


def nameless(
    channel: Channel,
    group: dist.ProcessGroup,
    out: Mapping[int, torch.Tensor],
    into: Mapping[int, torch.Tensor],
) -> Batch:
    if out:
        print(f"between devices: {channel.name}", flush=True)
    begin(replace(channel, name=""), group, out, into).wait()
    return Batch(channel, (), ())  # gloo would wait for another


if __name__ == "__main__":
    job_context._for_rows = lambda group: group
    RaggedBatch.pack = told  # type: ignore[method-assign]
    Channel._begin = nameless  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
