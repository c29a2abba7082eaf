"""Page of a report: one self-contained HTML file for one or several runs, written or served."""

from __future__ import annotations

import hmac
import os
import re
import socket
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megaverl.errors import DataError
from megaverl.monitoring.report.charts import (
    NUM_COLOURS,
    ROLES,
    busy_shares,
    gantt,
    idle_share,
    line_chart,
    windows,
)
from megaverl.monitoring.report.run_folder import (
    POINTS,
    RunRecord,
    Series,
    buckets,
    duration,
    ends,
    median,
    read_run,
    short,
    suite_folders,
)
from megaverl.monitoring.report.summaries import (
    MAIN_CURVES,
    memory_parts,
    observations,
    settings,
    shown_samples,
    time_parts,
)
from megaverl.version import __version__

TEMPLATES = Path(__file__).parent / "page"
REFRESH_SECONDS = 30  # interval in which a browser reloads a served page
FEW_POINTS = POINTS // 2  # points of each small curve
# Metrics between 0 and 1.
SHARES = re.compile(r"accuracy|pass@|fraction|_frac$|_share$|_rate$")


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Read the runs and write one page.

    Args:
        folders: folders of runs, which are shown side by side in this order.
        output: file to replace atomically.

    Raises:
        DataError: a folder is not a run's, or has a damaged file.
    """
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(output.name + ".part")
    part.write_text(render(runs), encoding="utf-8")
    os.replace(part, output)
    return output


class ReportServer(ThreadingHTTPServer):
    """Server of the page of runs that may still be running. The page is made again when there are new steps.

    Args:
        token: secret at the end of the address (?token=...). None: anyone who reaches the port can read the page.
    """

    daemon_threads = True

    def __init__(
        self, folders: Sequence[Path], host: str, port: int, token: str | None
    ) -> None:
        super().__init__((host, port), _PageHandler)
        self.folders, self.token = list(folders), token
        self._lock = threading.Lock()
        self._made: tuple[list[float], bytes] = ([], b"")

    @property
    def address(self) -> str:
        """Address for a browser."""
        host = str(self.server_address[0])
        # The server listens on every interface, so show the machine's name.
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.server_port}/" + (
            f"?token={self.token}" if self.token else ""
        )

    def page(self) -> bytes:
        """Return the current page.

        Raises:
            DataError: a folder is not a run's, or has a damaged file.
        """
        with self._lock:
            files = [folder / "metrics.jsonl" for folder in self.folders]
            times = [path.stat().st_mtime if path.is_file() else 0.0 for path in files]
            if times != self._made[0]:
                self._made = (
                    times,
                    render([read_run(folder) for folder in self.folders]).encode(),
                )
            return self._made[1]


class _PageHandler(BaseHTTPRequestHandler):
    """Handler of one connection to the report."""

    server: ReportServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        token = parse_qs(url.query).get("token", [""])[0]
        if self.server.token is not None and not hmac.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return self._answer(
                403,
                b"The address must end in ?token=..., as printed by megaverl report --serve.",
            )
        if url.path != "/":
            return self._answer(404, b"The report is at /.")
        try:
            return self._answer(200, self.server.page())
        except DataError as error:
            return self._answer(503, str(error).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        kind = "text/html" if status == 200 else "text/plain"
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Refresh", str(REFRESH_SECONDS))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Suppress the access log."""


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "duration": duration,
        "percent": lambda share: f"{share:.0%}",
    }
    return environment.get_template("page.html").render(
        title=" · ".join(run.name for run in runs),
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "script.js").read_text(encoding="utf-8"),
        runs=_each(runs),
        evaluations=_evaluations(runs),
        main_curves=_main_curves(runs),
        families=_families(runs),
        settings=settings(runs),
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _evaluations(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return the cells of the table of suites, a heading and a line for each metric. Empty without any results.

    Runs are compared with the first one that has results, paired over prompts.
    """
    if not any(suite_folders(run.folder) for run in runs):
        return []
    # Imported here because the statistics load torch, which no other part of a report
    # needs.
    from megaverl.monitoring.evaluations import cells_of, read_suites, table_rows

    results = {
        run.name: read_suites(run.folder) for run in runs if suite_folders(run.folder)
    }
    first = next(iter(results))
    rows = [
        (name, row)
        for name, suites in results.items()
        for row in table_rows(
            list(suites.values()), None if name == first else results[first]
        )
    ]
    heading, *lines = cells_of([row for _, row in rows])
    return [
        ["run", *heading],
        *([name, *line] for (name, _), line in zip(rows, lines, strict=True)),
    ]


def _each(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    colours: dict[str, int] = {}
    return [_run(number, run, colours) for number, run in enumerate(runs)]


def _run(number: int, run: RunRecord, colours: dict[str, int]) -> dict[str, Any]:
    """Return everything that the template shows for one run."""
    started = (
        datetime.fromtimestamp(run.first, UTC).strftime("%Y-%m-%d %H:%M UTC")
        if run.first
        else "–"
    )
    roles = {role: place for place, role in enumerate(ROLES)}
    return {
        "name": run.name,
        "colour": number % NUM_COLOURS,
        "command": run.command or "?",
        "started": started,
        "took": duration(run.last - run.first),
        "tiles": _tiles(run),
        "times": time_parts(run, colours),
        "memory": memory_parts(run),
        "busy": [(busy, roles.get(busy.role, len(ROLES))) for busy in busy_shares(run)],
        "idle": idle_share(run),
        "gantts": [
            (title, gantt(run, begin, end)) for title, begin, end in windows(run)
        ],
        "samples": shown_samples(run),
        "versions": run.versions,
        "warnings": [*observations(run), *run.warnings],
        "yaml": yaml.safe_dump(
            run.config, sort_keys=False, allow_unicode=True, width=110
        )
        if run.config
        else "",
    }


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return (label, number, remark) of the tiles that summarise the run."""
    planned = run.planned_steps
    tiles = [("steps", str(run.num_steps), f"of {planned}" if planned else "")]
    for label, name in (
        ("reward", "reward/mean"),
        ("held-out accuracy", "validation/accuracy"),
    ):
        if name in run.metrics:
            before, after = ends(run.metrics[name])
            tiles.append((label, short(after), f"from {short(before)}"))
    for label, name in (("loss", "sft/loss"), ("loss", "loss")):
        if name in run.metrics:
            before, after = ends(run.metrics[name])
            tiles.append((label, short(after), f"from {short(before)}"))
    if "train/step_time_ms" in run.metrics:
        tiles.append(
            (
                "a step",
                duration(median(run.metrics["train/step_time_ms"].values) / 1e3),
                "median",
            )
        )
    if "train/tokens_per_sec" in run.metrics:
        tiles.append(
            (
                "tokens/s",
                short(median(run.metrics["train/tokens_per_sec"].values)),
                "median",
            )
        )
    if memory := memory_parts(run):
        tiles.append(
            ("memory", f"{short(memory[0].peak / 1024)} GiB", f"peak, {memory[0].name}")
        )
    return tiles


def _main_curves(runs: Sequence[RunRecord]) -> list[str]:
    charts = []
    for title, names in MAIN_CURVES:
        name = next(
            (name for name in names if any(name in run.metrics for run in runs)), None
        )
        if name is not None:
            scale = 1e-3 if name.endswith("_ms") else 1.0
            charts.append(_chart(f"{title}", name, runs, POINTS, scale))
    return charts


def _families(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Group all metrics by the part before their slash."""
    names = sorted({name for run in runs for name in run.metrics})
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(
            name.partition("/")[0] if "/" in name else "other", []
        ).append(name)
    return [
        (
            family,
            [
                _chart(name.partition("/")[2] or name, name, runs, FEW_POINTS)
                for name in metric_names
            ],
        )
        for family, metric_names in families.items()
    ]


def _chart(
    title: str, name: str, runs: Sequence[RunRecord], points: int, scale: float = 1.0
) -> str:
    curves = []
    for run in runs:
        scaled = []
        for bucket in buckets(run.metrics.get(name, Series()), points):
            mean, low, high = (
                bucket.mean * scale,
                bucket.low * scale,
                bucket.high * scale,
            )
            scaled.append(bucket._replace(mean=mean, low=low, high=high))
        curves.append((run.name, scaled))
    return line_chart(title, curves, is_share=bool(SHARES.search(name)))
