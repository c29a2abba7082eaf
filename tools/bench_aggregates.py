#!/usr/bin/env python3
"""Cost of an update's exchange between islands, with either value of `coordinator.aggregates`, in one run.

    python tools/bench_aggregates.py                                # two islands of one rank, a coordinator of one rank
    python tools/bench_aggregates.py --islands 3 --coordinators 2 --hidden 256

statistics: the coordinator's first rank sums the islands' gradients in buckets, and each island takes the same step.
gradients: the coordinator's ranks receive the gradients, take the step, and send the weights. Both sides run in
turn on the same processes. An update is timed from zeroed gradients to new weights on the slowest rank, without forward
and backward passes. On processes of one machine there is no network, so the bytes say more than the seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from megaverl.distributed.groups import Grid
    from megaverl.distributed.job_context import JobContext
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel

SIDES = ("statistics", "gradients")
OPTIMIZER = {"lr": 1e-4}


def main() -> int:
    arguments = parse()
    if arguments.as_rank is not None:
        return be_rank(Path(arguments.as_rank), arguments)
    from megaverl.models.tiny import make_tiny_folder

    with tempfile.TemporaryDirectory(prefix="megaverl_aggregates_") as name:
        folder = Path(name)
        make_tiny_folder(
            folder / "model",
            "Qwen3ForCausalLM",
            hidden_size=arguments.hidden,
            intermediate_size=3 * arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.hidden // 32,
            num_key_value_heads=arguments.hidden // 32,
        )
        ranks = arguments.islands + arguments.coordinators
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, *sys.argv[1:]]
        subprocess.run([*command, "--as-rank", name], check=True)
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    print(table(results))
    if arguments.json:
        text = json.dumps(results, indent=2) + "\n"
        Path(arguments.json).write_text(text, encoding="utf-8")
    return 0


def parse() -> argparse.Namespace:
    described = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    described.add_argument("--islands", type=int, default=2, help="of one rank each")
    described.add_argument(
        "--coordinators", type=int, default=1, help="ranks of the coordinator"
    )
    described.add_argument("--hidden", type=int, default=512)
    described.add_argument("--layers", type=int, default=4)
    described.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16"
    )
    described.add_argument("--updates", type=int, default=7, help="that are timed")
    described.add_argument("--json", metavar="FILE")
    described.add_argument("--as-rank", help=argparse.SUPPRESS)
    return described.parse_args()


def table(results: dict[str, Any]) -> str:
    """Return the figures of both sides as text."""
    lines = [
        f"{results['parameters'] / 1e6:.1f} million parameters in {results['dtype']}, {results['islands']} islands, "
        f"{results['coordinators']} ranks of the coordinator",
        f"{'':<14}{'ms an update':>14}{'received, MB: coordinator':>27}{'islands':>9}"
        f"{'optimizer, MB: each island':>28}{'each coordinator':>18}",
    ]
    for side in SIDES:
        row = results[side]
        lines.append(
            f"{side:<14}{row['seconds'] * 1e3:>14.0f}{row['by_coordinator'] / 1e6:>27.1f}"
            f"{row['by_islands'] / 1e6:>9.1f}{row['island_state'] / 1e6:>28.1f}"
            f"{row['coordinator_state'] / 1e6:>18.1f}"
        )
    return "\n".join(lines)


def be_rank(folder: Path, arguments: argparse.Namespace) -> int:
    """Measure both sides in turn. The first rank writes the results."""
    from megaverl.distributed.collectives import reduce_json
    from megaverl.distributed.grid import GridShape, Sizes
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.distributed.job_context import join
    from megaverl.distributed.placement import Node, Wanted
    from megaverl.distributed.placement_resolver import resolve
    from megaverl.distributed.store import job_store
    from megaverl.sharding.model_spec import ModelSpec

    deadline = timedelta(seconds=300)
    store, rank, size = job_store(deadline)
    grids = {"actor": None, "coordinator": Sizes(tp=arguments.coordinators)}
    coordinators = tuple(range(arguments.islands, size))
    wanted = {
        "actor": Wanted(ranks=tuple(range(arguments.islands))),
        "coordinator": Wanted(ranks=coordinators),
    }
    nodes = [Node("here", size)]
    placement = resolve(wanted, size, grids, nodes, islands=arguments.islands)
    context = join(placement, store, rank, deadline)
    spec = ModelSpec.from_folder(folder / "model")
    tp = arguments.coordinators if rank in coordinators else 1
    shape = GridShape.fit(context.role_group.size, tp=tp, role="actor")
    grid = ProcessGroupManager().grid(shape)
    results: dict[str, Any] = {
        "islands": arguments.islands,
        "coordinators": arguments.coordinators,
        "dtype": arguments.dtype,
    }
    for side in SIDES:
        model = make_model(spec, grid, arguments.dtype)
        if side == "statistics" and context.has("coordinator"):
            # The islands take one update while they prepare.
            update, state = prepare(side, context, model)
            update()
        else:
            update, state = prepare(side, context, model)
        seconds, received = measure(update, context, arguments.updates)
        figures = {"seconds": seconds, "received": received, "state": state}
        every: list[dict[str, Any]] = reduce_json(figures, list, context.control)
        turns = zip(*(row["seconds"] for row in every), strict=True)
        by_islands = sum(row["received"] for row in every[: arguments.islands])
        by_coordinator = sum(row["received"] for row in every[arguments.islands :])
        results[side] = {
            "seconds": statistics.median(max(turn) for turn in turns),
            "by_islands": by_islands,
            "by_coordinator": by_coordinator,
            "island_state": every[0]["state"],
            "coordinator_state": every[-1]["state"],
        }
        results["parameters"] = sum(math.prod(w.shape) for w in model.weights)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return 0


def make_model(spec: ModelSpec, grid: Grid, dtype: str) -> MegatronModel:
    """Create the model with equal random weights on all ranks."""
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions

    options = ModelOptions(dtype=getattr(torch, dtype), seed=0)
    return MegatronModel(spec, grid, options)


def prepare(
    side: str, context: JobContext, model: MegatronModel
) -> tuple[Callable[[], object], int]:
    """Return a function that takes one update on this rank, and the bytes of optimizer state that the rank holds."""
    from megaverl.config.roles import CoordinatorConfig, ReshardConfig
    from megaverl.trainer.global_model import (
        GlobalModel,
        GlobalModelLink,
        ReplicaIsland,
    )
    from megaverl.trainer.islands import Island, serve_update
    from megaverl.workers.gradient_replica import GradientReplica
    from megaverl.workers.optimizers import MegatronTrainable, optimizer_tensors

    is_coordinator = context.has("coordinator")
    sums = side == "statistics"
    if sums and is_coordinator:
        sums_them = context.rank == context.placement.coordinator
        return (lambda: serve_update(context) if sums_them else None), 0
    trainable: MegatronTrainable | GradientReplica
    if sums or is_coordinator:
        trainable = MegatronTrainable(
            model, optimizer=OPTIMIZER, scheduler={}, ddp={}, total_updates=99
        )
    else:
        trainable = GradientReplica(model, ddp={})
    if sums:
        trainable.islands = Island(context, trainable, CoordinatorConfig(), 0)
    else:
        link = GlobalModelLink(
            context, "actor", trainable, ReshardConfig(), context.timeout
        )
        link.send_weights()
        if isinstance(trainable, GradientReplica):
            trainable.islands = ReplicaIsland(context, trainable, link)
        else:
            GlobalModel(context, trainable, link)
    trainable.update_from_islands()
    state = 0
    if isinstance(trainable, MegatronTrainable):
        weights = {tensor.data_ptr() for tensor in model.held}
        state = sum(
            tensor.numel() * tensor.element_size()
            for tensor in optimizer_tensors(trainable.optimizer)
            if tensor.data_ptr() not in weights
        )
    return trainable.update_from_islands, state


def measure(
    update: Callable[[], object], context: JobContext, times: int
) -> tuple[list[float], float]:
    """Return the seconds of each update, and the bytes that this rank receives in one."""
    from megaverl.distributed.collectives import barrier
    from megaverl.distributed.traffic import ISLANDS, received_bytes

    before, seconds = received_bytes().get(ISLANDS, 0.0), []
    for _ in range(times):
        barrier(context.control)
        begin = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - begin)
    return seconds, (received_bytes().get(ISLANDS, 0.0) - before) / times


if __name__ == "__main__":
    sys.exit(main())
