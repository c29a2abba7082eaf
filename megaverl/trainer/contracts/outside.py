"""Contracts of what connects a run with the outside: sources of data, trackers."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megaverl.data.examine import examine
from megaverl.data.prompts import Columns
from megaverl.data.sources import open_source
from megaverl.monitoring.backends import Backend, RunInfo, make_backend
from megaverl.trainer.contracts.promise import Broken, Promise

LOOKED_AT = 1000


def data_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Of a source of data (`data.train`). Options: prompt_key, answer_key."""
    columns = Columns(str(options.get("prompt_key", "prompt")), str(options.get("answer_key", "answer")) or None)

    def readable() -> None:
        problems = examine(open_source(name), None, columns).errors
        if problems:
            raise Broken(f"{problems[0]} ({len(problems)} rows in all)")

    def same() -> None:
        first, second = open_source(name), open_source(name)
        if first.fingerprint != second.fingerprint or len(first) != len(second):
            raise Broken("opened twice, it is not the same (fingerprint, length): a run could not be resumed.")
        for number in range(min(len(first), LOOKED_AT)):
            if first[number] != second[number]:
                raise Broken(f"row {number + 1} differs between two readings.")

    def by_number() -> None:
        rows = open_source(name)
        last = len(rows) - 1
        before = rows[last]
        rows[0]
        if rows[last] != before:
            raise Broken("a row depends on which one was read before: rows are asked for in any order.")

    def plain() -> None:
        rows = open_source(name)
        for number in range(min(len(rows), LOOKED_AT)):
            try:
                json.dumps(rows[number])
            except (TypeError, ValueError) as error:
                raise Broken(
                    f"{rows.where(number)}: {error}. Columns are text, numbers, lists and mappings."
                ) from error

    yield "every row has a prompt and an answer", readable
    yield "the same rows each time it is opened", same
    yield "rows by number, in any order", by_number
    yield "plain values", plain


def tracker_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Of a tracker (`run.log_with`)."""

    def make(folder: str, resume_step: int | None = None) -> Backend:
        return make_backend(name, RunInfo(Path(folder), "a-run", "megaverl", {"seed": 1}, resume_step))

    def used(resume: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for start in (None, 2) if resume else (None,):
                tracker = make(folder, start)
                for step in (1, 2) if start is None else (3,):
                    tracker.write(step, 1.8e9 + step, {"reward/mean": 0.5, "validation/pass@1": 1.0})
                tracker.close()

    def odd() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tracker = make(folder)
            tracker.write(1, 1.8e9, {"a": math.nan, "b": math.inf})
            tracker.write(2, 1.8e9, {"c": 1.0})
            tracker.write(2, 1.8e9, {"validation/accuracy": 1.0})
            tracker.close()

    yield "it is made, written to and closed", used
    yield "a resumed run", lambda: used(resume=True)
    yield "numbers that are not finite, other metrics later, two records of one step", odd
