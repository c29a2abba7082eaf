"""Live view of a run in the terminal: progress, curves, the times of the last step, and which ranks wait for which."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaverl.distributed.heartbeat import Heartbeat
from megaverl.errors import DataError
from megaverl.monitoring.curves import sparkline
from megaverl.monitoring.report.run_folder import (
    duration,
    short,
    with_settings,
)
from megaverl.monitoring.report.summaries import MAIN_CURVES, NOT_A_STAGE
from megaverl.outside import read_json, read_json_file

OLD = 10.0  # seconds after which the ranks' last reports are ignored
MOST_RANKS = 16  # with more ranks, equal ones are grouped


@dataclass
class RunView:
    """A run's folder that is read repeatedly; each time only new records of metrics.jsonl are read.

    Raises:
        DataError: the folder does not exist.
    """

    folder: Path
    values: defaultdict[str, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    step: int = 0
    first: float = 0.0
    last: float = 0.0
    _read: int = 0
    _identity: int = 0

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise DataError(
                f"{self.folder}: no such folder. Give the folder of a run, such as runs/quickstart."
            )

    def update(self) -> None:
        """Read the records that were written since the last call."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        status = path.stat()
        # The file was replaced: the run began again, or was resumed.
        if status.st_ino != self._identity or status.st_size < self._read:
            self.values.clear()
            self.step, self.first, self._read, self._identity = 0, 0.0, 0, status.st_ino
        with path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._take(read_json(line, not_finite=True))

    def _take(self, record: dict[str, Any]) -> None:
        self.step, self.last = int(record.pop("step")), float(record.pop("time", 0.0))
        self.first = self.first or self.last
        for name, value in record.items():
            self.values[name].append(float(value))

    def ranks(self) -> dict[int, Heartbeat]:
        """Return the ranks' last reports; empty if they are old, or if all ranks have left."""
        try:
            content = read_json_file(self.folder / "ranks.json", not_finite=True)
            beats = {
                int(rank): Heartbeat.from_json(json.dumps(beat))
                for rank, beat in content["ranks"].items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        is_over = time.time() - content["time"] > OLD or all(
            beat.left for beat in beats.values()
        )
        return {} if is_over else beats

    def render(self, width: int = 100) -> RenderableType:
        """Return everything there is to show, for a terminal of this width."""
        ranks = self.ranks()
        parts: list[RenderableType] = [self._head(bool(ranks)), self._curves(width)]
        if times := self._times(max(10, width - 40)):
            parts += [Text("\nwhere the last step's time went", style="bold"), times]
        if ranks:
            parts += [Text("\nranks", style="bold"), _table_of(ranks)]
        return Group(*parts)

    def _head(self, is_running: bool) -> Text:
        run = with_settings(self.folder)
        planned = run.planned_steps
        text = f"{run.name}: step {self.step}" + (f" of {planned}" if planned else "")
        elapsed = self.last - self.first
        if is_running and planned and self.step > 1 and elapsed > 0:
            text += (
                f", {duration(elapsed / (self.step - 1) * (planned - self.step))} left"
            )
        text += f", {duration(elapsed)} since the first" if elapsed else ""
        if self.last and is_running:
            text += f"; the last step ended {duration(time.time() - self.last)} ago"
        return Text(text + ("" if is_running else "; no rank is running"), style="bold")

    def _curves(self, width: int) -> Table:
        """Return a row for each main curve: label, last value, the curve, and its least and greatest value."""
        rows: list[tuple[str, str, list[float], str]] = []
        for title, names in MAIN_CURVES:
            name = next((name for name in names if name in self.values), None)
            if name is None:
                continue
            is_time = name.endswith("_ms")
            values = (
                [value / 1e3 for value in self.values[name]]
                if is_time
                else self.values[name]
            )
            text = duration if is_time else short
            finite = [value for value in values if math.isfinite(value)]
            ends = f"{text(min(finite))} to {text(max(finite))}" if finite else ""
            label = title.replace("seconds per", "time per") if is_time else title
            rows.append((label, text(values[-1]), values, ends))
        table = Table.grid(padding=(0, 2))
        # A label that is too long wraps to the next line.
        table.add_column()
        for _ in range(3):
            table.add_column(no_wrap=True)
        labels = max((len(label) for label, *_ in rows), default=0)
        numbers = max((len(value) + len(ends) for _, value, _, ends in rows), default=0)
        curve_width = max(10, width - labels - numbers - 8)
        for label, value, values, ends in rows:
            table.add_row(label, value, sparkline(values, curve_width), ends)
        return table

    def _times(self, width: int) -> Table | None:
        last = {}
        for name, values in self.values.items():
            if name.startswith("time/") and values:
                stage = name.removeprefix("time/").removesuffix("_ms")
                last[stage] = values[-1]
        whole = last.get("step", 0.0)
        if not whole:
            return None
        table = Table.grid(padding=(0, 2))
        for name, value in sorted(last.items(), key=lambda item: -item[1]):
            if name not in NOT_A_STAGE:
                table.add_row(
                    name,
                    duration(value / 1e3),
                    f"{value / whole:.0%}",
                    "█" * round(width * value / whole),
                )
        return table


def _table_of(ranks: Mapping[int, Heartbeat]) -> Table:
    """Return a table of each rank's stage and the ranks that it waits for. Others wait for ranks that are at work."""
    table = Table.grid(padding=(0, 2))
    alike = Counter((beat.doing, beat.waits_for) for beat in ranks.values())
    if len(ranks) > MOST_RANKS:
        for (doing, waits), count in alike.most_common():
            which = [
                rank
                for rank, beat in ranks.items()
                if (beat.doing, beat.waits_for) == (doing, waits)
            ]
            named = ", ".join(map(str, which[:8])) + (", ..." if count > 8 else "")
            table.add_row(f"{count} ranks", doing, _waiting(waits), named)
        return table
    for rank, beat in sorted(ranks.items()):
        seconds = duration(beat.waited if beat.waits_for else beat.seconds)
        table.add_row(
            f"rank {rank}",
            beat.doing,
            f"{_waiting(beat.waits_for)} {seconds}",
            beat.collective,
        )
    return table


def _waiting(waits_for: str) -> str:
    return {"": "works", "device": "waits for its device", "ranks": "waits for others"}[
        waits_for
    ]
