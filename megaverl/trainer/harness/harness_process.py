"""Process of a harness: its start, its deadline, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaverl.config.evaluation import HarnessTask
from megaverl.errors import HarnessError
from megaverl.monitoring.evaluations import HarnessResult, HarnessScore
from megaverl.outside import clean, read_json_file
from megaverl.processes import ending_with_parent
from megaverl.trainer.harness import harness_script

SHOWN = 600  # characters of the log that an error quotes
MAX_RESULT_BYTES = 2**30
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
# Variables by which a library in the harness would take itself for a rank of the job.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANK_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "_MEGAVERL")


@dataclass(frozen=True)
class HarnessRequest:
    """Input of a harness's process.

    Attributes:
        base_url: address of the server, without /v1.
        token: bearer token of its calls.
        model: name of the model there.
        most_tokens: most tokens of a prompt and its response together.
        limit: number of samples to evaluate, from the start. None: all.
        options: options of the harness.
        python: interpreter that has the harness. None: the one of the run.
        minutes: time after which the harness is ended.
    """

    task: HarnessTask
    base_url: str
    token: str
    model: str
    most_tokens: int
    limit: int | None
    seed: int
    options: Mapping[str, Any]
    python: str | None
    minutes: float


class HarnessProcess:
    """Running harness. Leaving the block ends it and all processes that it has started.

    The harness and the task are the user's code: they may raise, exit, hang, or write
    anything. Therefore they run in a process of their own, which hands over its results
    in a file.

    Example:
        with HarnessProcess(request, run_dir) as process:
            while process.is_running:
                process.check_deadline()
                ...  # answer its calls
            results = process.results()
    """

    def __init__(self, request: HarnessRequest, run_dir: Path) -> None:
        self._request, self._task = request, request.task
        folder = run_dir / "harness" / request.task.file_name
        folder.mkdir(parents=True, exist_ok=True)
        self._results = folder / "results.json"
        self._results.unlink(missing_ok=True)
        self.log = run_dir / "logs" / f"{request.task.file_name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        fields = {
            **asdict(request),
            "harness": request.task.harness,
            "task": request.task.task,
            "results": str(self._results),
            "folder": str(folder),
        }
        # Not in a file: it has a token.
        text = json.dumps(fields)
        python = request.python or sys.executable
        # -P: the script's folder is not a place to import from.
        command = [python, "-P", harness_script.__file__]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                ending_with_parent(command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=harness_environment(request),
                # A session of its own, so that the whole group can be ended.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        # A process that has ended already does not read. `results` tells why it ended.
        with suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._deadline = time.monotonic() + request.minutes * 60

    def __enter__(self) -> HarnessProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def is_running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.poll() is None

    def check_deadline(self, refusal: str = "") -> None:
        """Raise HarnessError if the harness has taken longer than allowed.

        Args:
            refusal: why the last refused call was refused; "": none was.
        """
        if time.monotonic() < self._deadline:
            return
        raise HarnessError(
            f"{self._task}: has not ended after {self._request.minutes:g} minutes (evaluation.harness_minutes). "
            f"It was ended.{self._context(refusal)}"
        )

    def results(self, refusal: str = "") -> list[HarnessResult]:
        """Return the results of a harness that has ended.

        Args:
            refusal: see `check_deadline`.

        Raises:
            HarnessError: the harness failed, or left no results that can be read.
        """
        code = self._process.wait()
        try:
            content = read_json_file(self._results, MAX_RESULT_BYTES, not_finite=True)
        except FileNotFoundError:
            raise HarnessError(
                f"{self._task}: the harness ended with {code} and without results."
                f"{self._context(refusal, shows_log=True)}"
            ) from None
        except (OSError, ValueError) as error:
            raise HarnessError(
                f"{self._task}: {self._results} cannot be read: {error}.{self._context(refusal)}"
            ) from error
        if isinstance(content, dict) and content.get("error"):
            raise HarnessError(
                f"{self._task}: {content['error']}{self._context(refusal)}"
            )
        try:
            return [read_result(self._task, entry) for entry in content["results"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HarnessError(
                f"{self._task}: {self._results} has not the form of results ({error!r}). Is the version of the harness "
                f"one that setup.py allows?{self._context(refusal)}"
            ) from error

    def _context(self, refusal: str, *, shows_log: bool = False) -> str:
        """Return sentences that help to find the cause of a failure."""
        text = f" The last refused call: {refusal}" if refusal else ""
        if shows_log:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - SHOWN))
                end = clean(file.read().decode(errors="replace")).strip()
            text += f" It printed last: {end}" if end else ""
        return f"{text} Its log: {self.log}"

    def _end(self) -> None:
        """End the process and its group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        # The group lives as long as any of its processes, even after its leader.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def harness_environment(request: HarnessRequest) -> dict[str, str]:
    """Return the environment of a harness's process: the one of the run, without what makes a process a rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(RANK_PREFIXES)
    }
    return {
        **kept,
        "OPENAI_BASE_URL": f"{request.base_url}/v1",
        "OPENAI_API_KEY": request.token,
        "PYTHONUNBUFFERED": "1",
    }


def read_result(task: HarnessTask, entry: Mapping[str, Any]) -> HarnessResult:
    """Return one result that a harness has written (`harness_script`).

    Raises:
        ValueError, TypeError, KeyError: the entry has another form.
    """
    samples = [
        {
            "id": str(sample["id"]),
            "values": {
                str(name): float(value) for name, value in sample["values"].items()
            },
            **{
                name: str(sample[name])
                for name in ("input", "target", "output")
                if sample.get(name) is not None
            },
        }
        for sample in entry["samples"]
    ]
    scores = []
    for score in entry["scores"]:
        stderr = score.get("stderr")
        known = stderr is not None and math.isfinite(float(stderr))
        scores.append(
            HarnessScore(
                metric=str(score["metric"]),
                value=float(score["value"]),
                stderr=float(stderr) if known else None,
            )
        )
    return HarnessResult(
        suite=f"{task.harness}:{entry['name']}",
        harness=str(entry["harness"]),
        version=str(entry["version"]),
        num_samples=int(entry["num_samples"]),
        scores=scores,
        samples=samples,
    )
