"""The coordinator commits checkpoints: `checkpoint.commit.Committer` over all ranks of the job."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megaverl import errors
from megaverl.distributed.p2p import broadcast_json
from megaverl.distributed.worlds import Fabric
from megaverl.errors import MegaverlError


class CoordinatorCommits:
    """Reports go to the coordinator over the control group, and its word comes back.

    Every rank of the job takes part in every call.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._coordinator = fabric.placement.coordinator

    @property
    def rank(self) -> int:
        """Of the job."""
        return self._fabric.rank

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self._fabric.placement.size

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks of the job."""
        return self._fabric.control

    @property
    def planner(self) -> int:
        """The coordinator."""
        return self._coordinator

    @property
    def decides(self) -> bool:
        """Whether this rank is the coordinator."""
        return self._fabric.rank == self._coordinator

    def collect(self, report: Any) -> list[Any]:
        """Every rank's report (JSON), in the order of the job's ranks, on every rank."""
        data = torch.frombuffer(bytearray(json.dumps(report).encode()), dtype=torch.uint8)
        size, group = self._fabric.placement.size, self._fabric.control
        lengths = torch.zeros(size, dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([data.numel()]), group=group)
        width = int(lengths.max())
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: data.numel()] = data
        found = torch.zeros(size * width, dtype=torch.uint8)
        dist.all_gather_into_tensor(found, padded, group=group)
        rows = zip(found.reshape(size, width), lengths.tolist(), strict=True)
        return [json.loads(bytes(row[:length].numpy())) for row, length in rows]

    def decide(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the coordinator; its JSON result, or its error, on every rank."""
        answer: dict[str, Any] = {}
        error: Exception | None = None
        if self.decides:
            try:
                answer = {"result": function()}
            except Exception as caught:  # passed on to every rank, this one included
                error = caught
                own = isinstance(caught, MegaverlError)
                answer = {
                    "error": type(caught).__name__ if own else "MegaverlError",
                    "text": str(caught) if own else f"{type(caught).__name__}: {caught}",
                }
        answer = broadcast_json(self._fabric, self._coordinator, answer)
        if "error" in answer:
            raise getattr(errors, answer["error"], MegaverlError)(answer["text"]) from error
        return answer["result"]
