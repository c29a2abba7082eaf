"""Hit a run at every point of a step and of a save, start it again, and compare its files with an untouched run's.

    python tools/fault_campaign.py                          # 28 kill points: about three minutes on two cores
    python tools/fault_campaign.py --kind term              # the same points with SIGTERM: save and leave
    python tools/fault_campaign.py --kind stop --points "reward,byte 5,000"
    python tools/fault_campaign.py --engine vllm --points "actor update,reshard, rank 1"
    python tools/fault_campaign.py --engine server          # instead of ranks, servers that generate for the run
    python tools/fault_campaign.py --trainer fsdp           # actor, critic and reference under FSDP2
    python tools/fault_campaign.py --partial                # the same points of a run that keeps unfinished responses
    python tools/fault_campaign.py --in-flight              # points of one whose engine takes weights inside a step
    python tools/fault_campaign.py --overlap                # points of one whose weights travel meanwhile
    python tools/fault_campaign.py --relayed                # points of one whose engines pass weights on, on four nodes
    python tools/fault_campaign.py --changes                # points of one that writes changes for a vLLM server

The run is PPO on two ranks, actor and critic on grids of their own over both, with everything that has a state
(adaptive KL, schedules, validation with a best score, checkpoints at every step, milestones). For every point a line:
how the ranks ended and when, where the run went on from, and whether weights, optimizer states, random states,
metrics and samples are those of the untouched run to the bit. Ends with 1 if any point is not.

--engine server: the run must go on without a start in between, whichever server is lost, and end with the same bits.

--kind      kill, stop (SIGSTOP), term, usr1, exception or stall. The other ranks of a stopped one end after 30 s,
            those of a stalled one after run.timeout_minutes, here 9 s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.config.fsdp import TRAINERS
from tests.faults.injector import Fault, Kind
from tests.faults.points import (
    CHANGES_POINTS,
    CHANGES_RANKS,
    IN_FLIGHT,
    IN_FLIGHT_POINTS,
    OVERLAP,
    OVERLAP_POINTS,
    PARTIAL,
    PARTIAL_POINTS,
    POINTS,
    RELAYED,
    RELAYED_POINTS,
    RELAYED_RANKS,
    SHORT_WAIT,
    finish,
    hit,
    of_kind,
    resumed_from,
    run_on,
    with_server,
)
from tests.faults.runs import Remains, differences, remains
from tests.faults.server_points import SERVER_POINTS, ServerPoint, run_on_servers
from tests.launcher import Launcher, free_port
from tests.rollout.vllm_serve import vllm_servers
from tests.trainer.conftest import make_inputs

ALL_POINTS = (
    POINTS
    | PARTIAL_POINTS
    | IN_FLIGHT_POINTS
    | OVERLAP_POINTS
    | RELAYED_POINTS
    | CHANGES_POINTS
)
KINDS = ("kill", "stop", "term", "usr1", "exception", "stall")
COLUMNS = "{:26} {:>4} {:>5} {:>12} {:>7}   {:24} {:>7}   {}"
DEADLINE = 240.0  # seconds for one run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="kill", help="what happens at each point"
    )
    parser.add_argument(
        "--engine",
        choices=("hf", "vllm", "server"),
        default="hf",
        help="rollout.engine",
    )
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        default="megatron",
        help="actor.engine, and the other roles'",
    )
    parser.add_argument("--partial", action="store_true", help="with rollout.partial")
    parser.add_argument(
        "--in-flight",
        action="store_true",
        help="with rollout.in_flight_updates, an engine of its own",
    )
    parser.add_argument("--overlap", action="store_true", help="with reshard.overlap")
    parser.add_argument(
        "--relayed",
        action="store_true",
        help="with a fan-out over four nodes (reshard.fan_out)",
    )
    parser.add_argument(
        "--changes",
        action="store_true",
        help="with a vLLM server that reads changed weights from a folder",
    )
    names = [*ALL_POINTS, *SERVER_POINTS]
    parser.add_argument(
        "--points", metavar="NAMES", help=f"some of: {'; '.join(names)}"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep all runs here")
    options = parser.parse_args(argv)
    points: Mapping[str, Fault | ServerPoint]
    points, settings = POINTS, []
    if options.engine == "server":
        points = SERVER_POINTS
    elif options.partial:
        points, settings = POINTS | PARTIAL_POINTS, PARTIAL
    elif options.in_flight:
        points, settings = IN_FLIGHT_POINTS, IN_FLIGHT
    elif options.overlap:
        points, settings = OVERLAP_POINTS, OVERLAP
    elif options.relayed:
        points, settings = RELAYED_POINTS, RELAYED
    elif options.changes:
        points = CHANGES_POINTS
    chosen = [
        name for name in points if options.points is None or name in options.points
    ]
    if options.engine == "server" and options.trainer != "megatron":
        parser.error("--trainer: the points of --engine server are of a Megatron actor")
    special = (
        options.engine == "server",
        options.partial,
        options.in_flight,
        options.overlap,
        options.relayed,
        options.changes,
    )
    if sum(special) > 1:
        parser.error(
            "--partial, --in-flight, --overlap, --relayed, --changes and --engine server are runs of their own; use "
            "one of them"
        )
    if not chosen:
        parser.error(
            f"--points: found {options.points!r}; there are: {'; '.join(points)}"
        )
    nodes = RELAYED_RANKS if options.relayed else None
    folder = (
        Path(options.keep)
        if options.keep
        else Path(tempfile.mkdtemp(prefix="megaverl_faults_"))
    )
    (folder / "inputs").mkdir(parents=True)
    inputs = make_inputs(folder / "inputs")
    try:
        if options.engine == "server":
            return campaign_of_servers(chosen, inputs)
        if options.changes:
            return campaign_of_changes(chosen, options.kind, inputs, options.trainer)
        return campaign(
            chosen,
            options.kind,
            options.engine,
            inputs,
            options.trainer,
            settings,
            nodes,
        )
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def campaign(
    chosen: Sequence[str],
    kind: Kind,
    engine: str,
    inputs: Path,
    trainer: str = "megatron",
    settings: Sequence[str] = (),
    nodes: int | None = None,
) -> int:
    """Try the chosen points and return the exit status.

    Args:
        inputs: what `make_inputs` made; the runs are written beside it.
        nodes: as in `hit`.
    """
    folder = inputs.parent
    more = [f"rollout.engine={engine}", *settings] + (
        [SHORT_WAIT] if kind == "stall" else []
    )
    more += (
        ["actor.engine=fsdp", "actor.tp=1", "critic.pp=1"] if trainer == "fsdp" else []
    )
    start, bad = time.monotonic(), []
    with Launcher() as launch:
        ended = run_on(
            launch, inputs, folder / "untouched", *more, nodes=nodes, deadline=DEADLINE
        )
        if any(ended.codes):
            print(
                f"the run fails before anything happens to it: {ended.codes}\n{ended.output[0]}"
            )
            return 1
        expected = remains(folder / "untouched" / "run")
        title = f"{len(chosen)} points, {kind}, engine {engine}, trainer {trainer}"
        print(f"{title}; an untouched run takes {max(ended.seconds):.1f} s", flush=True)
        print(
            COLUMNS.format(
                "point",
                "rank",
                "step",
                "exit codes",
                "within",
                "goes on from",
                "seconds",
                "the same?",
            )
        )
        for number, name in enumerate(chosen):
            fault = of_kind(ALL_POINTS[name], kind)
            if not _try(
                launch,
                inputs,
                folder / f"{number:02}",
                name,
                fault,
                expected,
                more,
                nodes,
            ):
                bad.append(name)
    print(
        f"{len(chosen) - len(bad)} of {len(chosen)} end bit-identical ({time.monotonic() - start:.0f} s)"
    )
    return 1 if bad else 0


def campaign_of_changes(
    chosen: Sequence[str], kind: Kind, inputs: Path, trainer: str
) -> int:
    """Try the chosen points of a run that writes changes for a vLLM server, and return the exit status."""
    port = str(free_port())
    os.environ["POOL_TOKEN"] = "secret"  # of the server, and of all ranks
    with vllm_servers(inputs, inputs / "model", [port], token_env="POOL_TOKEN"):
        settings = with_server(f"http://127.0.0.1:{port}", "POOL_TOKEN")
        return campaign(
            chosen, kind, "server", inputs, trainer, settings, CHANGES_RANKS
        )


def campaign_of_servers(chosen: Sequence[str], inputs: Path) -> int:
    """Try the chosen points of a run with servers and return the exit status."""
    folder = inputs.parent
    start, bad = time.monotonic(), []
    with Launcher() as launch:
        ended, _ = run_on_servers(launch, inputs, folder / "untouched", ServerPoint())
        if any(ended.codes):
            print(
                f"the run fails before anything happens to it: {ended.codes}\n{ended.output[0]}"
            )
            return 1
        expected = remains(folder / "untouched" / "run")
        print(
            f"{len(chosen)} points, two servers; an untouched run takes {max(ended.seconds):.1f} s"
        )
        for number, name in enumerate(chosen):
            ended, (first, _, third) = run_on_servers(
                launch, inputs, folder / f"{number:02}", SERVER_POINTS[name]
            )
            wrong = [f"exit codes {ended.codes}"] if any(ended.codes) else []
            wrong = wrong or differences(
                remains(folder / f"{number:02}" / "run"), expected
            )
            point = SERVER_POINTS[name]
            if (point.first is not None) != first.dead or (
                point.third is not None
            ) != third.dead:
                wrong.append("it did not happen")
            if point.joins and point.third is None and not third.calls["/generate"]:
                wrong.append("nobody asked who joined")
            bad += [name] if wrong else []
            verdict = "bit-identical" if not wrong else "NO: " + "; ".join(wrong)
            print(f"{name:28} {max(ended.seconds):5.1f} s   {verdict}", flush=True)
    print(
        f"{len(chosen) - len(bad)} of {len(chosen)} end bit-identical ({time.monotonic() - start:.0f} s)"
    )
    return 1 if bad else 0


def _try(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    name: str,
    fault: Fault,
    expected: Remains,
    more: Sequence[str],
    nodes: int | None = None,
) -> bool:
    """Hit the run at one point, finish it, and print the line."""
    remains = hit(launch, inputs, runs, fault, *more, nodes=nodes)
    resumed, wrong = finish(launch, inputs, runs, expected, *more, nodes=nodes)
    wrong = remains.wrong + wrong
    codes = " ".join(map(str, remains.ended.codes))
    source = resumed_from(resumed) or "the start"
    step = fault.step or "-"
    spread = f"{remains.ended.spread:.1f} s"
    verdict = "bit-identical" if not wrong else "NO: " + "; ".join(wrong)
    print(
        COLUMNS.format(
            name,
            fault.rank,
            step,
            codes,
            spread,
            source,
            f"{max(resumed.seconds):.1f}",
            verdict,
        ),
        flush=True,
    )
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
