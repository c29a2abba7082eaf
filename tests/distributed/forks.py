"""Ranks in a tenth of a second: a process that has imported torch forks the ranks of one job after another.

    with Server() as server:
        ended = server.run("tests.distributed.ranks:exchange", ranks=4, seed=3)

Each rank calls the function with the keyword arguments, in an environment as torchrun would set it, with no process
group made. See `tests.forked`.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked import ForkServer, Job, serve

PRELOADED = ("megaverl.distributed.worlds", "megaverl.coordinator", "megaverl.config.schema")


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended.

    Attributes:
        codes: exit codes; negative: the signal.
        seconds: from the start to each rank's end.
        results: what the function returned, None where it raised or was ended.
        output: what each rank wrote, with the traceback.
    """

    codes: list[int]
    seconds: list[float]
    results: list[Any]
    output: list[str]

    def check(self) -> list[Any]:
        """The results; an AssertionError with the output of a rank that failed."""
        for rank, code in enumerate(self.codes):
            assert code == 0, f"rank {rank} ended with {code}\n{self.output[rank]}"
        return self.results


class Server(ForkServer):
    """Starts on entering, with everything imported; ends on leaving."""

    def __init__(self) -> None:
        super().__init__("tests.distributed.forks")

    def __enter__(self) -> Server:
        super().__enter__()
        return self

    def run(self, target: str, *, ranks: int, deadline: float = 60.0, **kwargs: Any) -> Ended:
        """Call `target` ("module:function") on so many ranks, until all have ended."""
        with tempfile.TemporaryDirectory(prefix="megaverl_forks_") as folder:
            job = {"target": target, "ranks": ranks, "kwargs": kwargs, "folder": folder, "deadline": deadline}
            codes, seconds, output = self.ask(job)
            found = [Path(folder, f"rank_{rank}.json") for rank in range(ranks)]
            results = [json.loads(path.read_text()) if path.exists() else None for path in found]
        return Ended(codes, seconds, results, output)


def call(job: Job, rank: int) -> int:
    """Call the job's function, and leave what it returns."""
    module, function = job["target"].split(":")
    result = getattr(importlib.import_module(module), function)(**job["kwargs"])
    Path(job["folder"], f"rank_{rank}.json").write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    serve(PRELOADED, call)
