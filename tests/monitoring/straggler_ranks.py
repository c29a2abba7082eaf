"""Ranks that work and wait for each other in every stage, one of them with more work."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaverl.monitoring.stragglers import ProcessorMeter, Stragglers
from megaverl.monitoring.timeline import Timeline


def steps(slow: int) -> Any:
    rank, timeline, said = dist.get_rank(), Timeline(), []
    found = Stragglers(
        ProcessorMeter(timeline),
        "all alike",
        every=2,
        log=lambda text: said.append(text),
    )
    metrics = []
    matrix = torch.eye(256)
    matrix = matrix @ matrix  # what the first one costs is no rank's fault
    for step in range(2):
        found.begin(step)
        for stage, times in (
            ("rollout", 20),
            ("actor_update", 400 if rank == slow else 50),
        ):
            with timeline.span(stage):
                for _ in range(times):
                    matrix = matrix @ matrix
                dist.all_reduce(torch.ones(1))
        metrics.append(found.compare(step + 1))
    return metrics, said
