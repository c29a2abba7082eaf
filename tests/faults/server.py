"""Whole runs whose ranks start in a second instead of ten; see `tests.forked`.

with Server() as server:
    ended = server.run(["train", ...], ranks=2, environment=fault.environment(), logs=folder)
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forked import TIMED_OUT, ForkServer, Job, serve

__all__ = ["TIMED_OUT", "Ended", "Server"]

PRELOADED = (
    "megaverl.cli.train",
    "megaverl.trainer.run",
    "megaverl.trainer.rl",
    "megaverl.rollout.hf_engine",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run ended: exit codes (negative: the signal), when in seconds from the start, their output."""

    codes: list[int]
    seconds: list[float]
    output: list[str]

    @property
    def text(self) -> str:
        """What all ranks have said."""
        return "".join(self.output)

    @property
    def spread(self) -> float:
        """Seconds between the first rank's end and the last one's."""
        return max(self.seconds) - min(self.seconds)


class Server(ForkServer):
    """Starts on entering, with everything imported; ends on leaving."""

    def __init__(self) -> None:
        super().__init__("tests.faults.server", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")

    def __enter__(self) -> Server:
        super().__enter__()
        return self

    def run(
        self,
        arguments: Sequence[str],
        *,
        logs: Path,
        ranks: int = 2,
        environment: Mapping[str, str] | None = None,
        on_rank: Mapping[int, Mapping[str, str]] | None = None,
        more: Mapping[int, Sequence[str]] | None = None,
        deadline: float = 120.0,
    ) -> Ended:
        """Run `megaverl ARGUMENTS` on so many ranks until all have ended.

        Args:
            arguments: where the first is a .py file, that program is run with the others.
            environment: of all ranks, over what torchrun would give them.
            on_rank, more: what some ranks have besides: variables, arguments.
        """
        logs.mkdir(parents=True, exist_ok=True)
        job = {"arguments": list(arguments), "ranks": ranks, "environment": dict(environment or {}), "folder": logs}
        job |= {"on_rank": dict(on_rank or {}), "more": dict(more or {}), "deadline": deadline}
        return Ended(*self.ask(job))


def command(job: Job, rank: int) -> int:
    """Run megaverl's command as a rank."""
    os.environ.update(job["environment"] | job["on_rank"].get(str(rank), {}))
    arguments = job["arguments"] + job["more"].get(str(rank), [])
    if arguments[0].endswith(".py"):
        return _program(arguments)
    from tests.faults.rank import main

    return main(arguments)


def _program(arguments: list[str]) -> int:
    """As `python ARGUMENTS`, to what an interpreter does at its end."""
    sys.argv, code = arguments, 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    serve(PRELOADED, command)
