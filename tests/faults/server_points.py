"""Servers that are lost while a run uses them: in a request, while they read weights, and while they join.

Each server is `tests.rollout.sglang_server`'s: a sample comes out the same whoever
draws it, so the run must end with the bits of one that nothing happened to, and without
a start in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megaverl.cli.main import main as megaverl
from tests.faults.runs import arguments
from tests.launcher import Ended, Launcher
from tests.rollout.sglang_server import SGLangLike

GENERATE, UPDATE = "/generate", "/update_weights_from_disk"


@dataclass(frozen=True)
class ServerPoint:
    """What befalls the servers of a run.

    Attributes:
        first: the request, and the how manieth of its kind, at which the first of two servers dies.
        joins: a third one is added while the run generates.
        third: the request at which that one dies.
    """

    first: tuple[str, int] | None = None
    joins: bool = False
    third: tuple[str, int] | None = None


SERVER_POINTS = {
    "server lost in generate": ServerPoint((GENERATE, 15)),
    "server lost in an update": ServerPoint((UPDATE, 3)),
    "server joins": ServerPoint(joins=True),
    "server lost while it joins": ServerPoint(joins=True, third=(UPDATE, 1)),
    "server lost, another joins": ServerPoint((UPDATE, 3), joins=True),
}


def run_on_servers(
    launch: Launcher, inputs: Path, runs: Path, point: ServerPoint, *more: str
) -> tuple[Ended, Sequence[SGLangLike]]:
    """Run the faults' PPO on two servers, and let the point happen to them; the run, and the servers."""
    run = runs / "run"
    with ExitStack() as stack:
        joins = stack.enter_context(
            SGLangLike(inputs / "model", happenings=_dies(point.third))
        )

        def add(_: SGLangLike) -> None:
            assert megaverl(["rollout-pool", "add", str(run), joins.url]) == 0

        happenings = _dies(point.first)
        if point.joins:
            happenings[(GENERATE, 12)] = add
        one = stack.enter_context(SGLangLike(inputs / "model", happenings=happenings))
        two = stack.enter_context(SGLangLike(inputs / "model"))
        servers = {
            "kind": "sglang",
            "urls": [one.url, two.url],
            "poll_seconds": 0.05,
            "wait_seconds": 60.0,
        }
        rollout = {
            "engine": "server",
            "use_dynamic_batching": False,
            "servers": servers,
        }
        given = arguments(inputs, runs, f"rollout={json.dumps(rollout)}", *more)
        return launch.command(given, logs=runs / "output"), (one, two, joins)


def _dies(
    when: tuple[str, int] | None,
) -> dict[tuple[str, int], Callable[[SGLangLike], None]]:
    return {} if when is None else {when: SGLangLike.die}
