"""Commands that inspect: `report`, `watch` and `trace` show a run, `doctor` checks this machine."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaverl.cli.options import Subcommand, UsageError, add_json
from megaverl.errors import FAILED

REPORT = """\
Write one HTML page about a run: curves, time and memory of each stage, a timeline of the ranks, samples with their
rewards, configuration, versions and warnings. The page loads nothing from elsewhere.

  megaverl report runs/quickstart                     writes runs/quickstart/report.html
  megaverl report runs/a runs/b --output compare.html two runs side by side
  megaverl report runs/quickstart --serve             serve the page at http://127.0.0.1:8000/, updated
"""
WATCH = """\
Show a running job in the terminal: curves, the time of each stage of the last step, and what each rank does.

  megaverl watch runs/quickstart
  megaverl watch runs/quickstart --once               show it once, for a script or a log

q or Ctrl-C ends the display. The job continues.
"""
TRACE = """\
Write one trace of all ranks of a step. Steps in `run.profile.steps` have operators and kernels; other steps have only
stages. Open it at https://ui.perfetto.dev (nothing is uploaded) or in chrome://tracing.

  megaverl train ... run.profile.steps=12             records step 12
  megaverl trace runs/NAME --step 12                  writes runs/NAME/trace_12.json.gz
"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DOCTOR = """\
Check this machine: versions, devices, kernels, network and storage; try an all-reduce of two ranks and generate one
token. Every line that warns or fails says how to fix it. Attach the output to bug reports.

  megaverl doctor                     all checks
  megaverl doctor --gpu               also driver, ECC, clocks, NVLink, InfiniBand, and NCCL's rates between all GPUs
  megaverl doctor --json > doctor.json
  megaverl doctor --no-trials         start no processes
  megaverl doctor --timeout 120       for a slow or busy machine

Exit code: 0 if nothing fails, else 1.
"""


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run (run.dir/run.name)",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="default: report.html in the (first) run's folder",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the page instead of writing it, and update it",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="with --serve (%(default)s); other addresses need the printed token",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="with --serve (%(default)s; 0: any free port)",
    )


def _report(arguments: argparse.Namespace) -> int:
    """Write the report page of one or several runs, or serve it."""
    from megaverl.monitoring.report import write_report

    if arguments.serve:
        return _serve(arguments)
    name = "report.html" if len(arguments.runs) == 1 else "comparison.html"
    try:
        written = write_report(
            arguments.runs, arguments.output or arguments.runs[0] / name
        )
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(f"{written} ({written.stat().st_size / 1e6:.2f} MB)")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    """Serve the report page until Ctrl-C. Beyond the loopback interface, a random token protects it."""
    from megaverl.monitoring.report import ReportServer

    if arguments.output is not None:
        raise UsageError(
            "--output: a page that is served is not written. Leave one of the two out."
        )
    token = None if arguments.host in LOOPBACK else secrets.token_urlsafe(24)
    try:
        server = ReportServer(arguments.runs, arguments.host, arguments.port, token)
    except OSError as error:
        print(
            f"error: {arguments.host}:{arguments.port}: {error}. Choose another --port.",
            file=sys.stderr,
        )
        return FAILED
    with server:
        # Building the page once reports a folder that is not a run's before the server
        # starts.
        server.page()
        print(f"{server.address} (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run (run.dir/run.name)"
    )
    parser.add_argument("--once", action="store_true", help="show it once and exit")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="interval of updates (%(default)s)",
    )


def _watch(arguments: argparse.Namespace) -> int:
    """Show a run in the terminal until `q` or Ctrl-C; once if the output is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    from megaverl.monitoring.report import RunView

    console = Console(highlight=False, markup=False)
    view = RunView(arguments.run)
    view.update()
    if arguments.once or not console.is_terminal:
        console.print(view.render(console.width))
        return 0
    seconds = max(0.1, arguments.every)
    with (
        suppress(KeyboardInterrupt),
        _single_keys(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        live.update(view.render(console.width), refresh=True)
        while not _is_key_pressed("q", seconds):
            view.update()
            live.update(view.render(console.width), refresh=True)
    console.print(view.render(console.width))
    return 0


@contextmanager
def _single_keys() -> Iterator[None]:
    """Deliver each key of the terminal at once and without echo, inside this block.

    Otherwise a key arrives only after Enter.
    """
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_key_pressed(key: str, seconds: float) -> bool:
    """Wait up to `seconds`, and return True at once when `key` is pressed. Other keys are ignored."""
    deadline = time.monotonic() + seconds
    if not sys.stdin.isatty():
        # Without a terminal there are no keys to wait for.
        time.sleep(seconds)
        return False
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            typed = os.read(sys.stdin.fileno(), 64)
            # An empty read is the end of input: the terminal is gone.
            if not typed or key in typed.decode(errors="replace").lower():
                return True
    return False


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run (run.dir/run.name)"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="counted from 1; default: the last that was profiled",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="default: trace_N.json.gz in the run's folder",
    )


def _trace(arguments: argparse.Namespace) -> int:
    """Write one trace of all ranks of a profiled step, and print what its collectives took."""
    from megaverl.monitoring.profiler import collective_lines, write_step_trace

    try:
        written, skipped = write_step_trace(
            arguments.run, arguments.step, arguments.output
        )
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(
        f"{written} ({written.stat().st_size / 1e6:.2f} MB): open it at https://ui.perfetto.dev"
    )
    if lines := collective_lines(arguments.run, arguments.step):
        print("\n".join(["what went into collectives:", *lines]))
    for path in skipped:
        where = (
            "https://pytorch.org/memory_viz"
            if path.suffix == ".pickle"
            else "https://www.speedscope.app"
        )
        print(f"{path}: open it at {where}")
    return 0


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "the findings as JSON")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="check GPUs and links, and measure NCCL between them",
    )
    parser.add_argument(
        "--no-trials", action="store_true", help="start no other processes"
    )
    parser.add_argument(
        "--no-generation", action="store_true", help="do not try the engine"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="limit for each trial (90)"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="folder in which runs would be written",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    """Examine this machine, and print the findings."""
    # The trials start ranks of their own, which must not take this process's place in a
    # torchrun job for theirs.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    if importlib.util.find_spec("torch") is None:
        # `doctor` has to work before the installation does: without torch the modules
        # below cannot be imported.
        fix = "pip install 'megaverl[megatron,vllm]' (without a GPU 'megaverl[cpu]'), or ./launch/bootstrap.sh"
        absent = {"name": "torch", "status": "fail", "found": "absent", "fix": fix}
        report = {"healthy": False, "sections": {"versions": [absent]}}
        print(
            json.dumps(report, indent=2)
            if arguments.json
            else f"versions\n  FAIL  torch  absent\n    -> {fix}"
        )
        return FAILED
    from megaverl.monitoring.doctor import as_dict, as_text
    from megaverl.monitoring.doctor.examine import examine

    trials = not arguments.no_trials
    generate = not arguments.no_generation
    options = {"trials": trials, "generate": generate, "gpu": arguments.gpu}
    if arguments.timeout is not None:
        options["timeout"] = arguments.timeout
    findings = list(examine(arguments.run_dir, **options))
    print(
        json.dumps(as_dict(findings), indent=2) if arguments.json else as_text(findings)
    )
    return FAILED if any(finding.status == "fail" for finding in findings) else 0


COMMANDS = {
    "report": Subcommand(REPORT, _report_options, _report),
    "watch": Subcommand(WATCH, _watch_options, _watch),
    "trace": Subcommand(TRACE, _trace_options, _trace),
    "doctor": Subcommand(DOCTOR, _doctor_options, _doctor),
}
