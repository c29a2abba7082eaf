#!/usr/bin/env python3
"""Compare predicted step times with measured ones of two tiny models on this machine, or with published ones.

    megaverl plan --calibrate here.json
    python tools/bench_simulator.py --hardware here.json --measured measured.json
    python tools/bench_simulator.py --published

Every layout runs some steps with the real trainer (Megatron-core, gloo). The median of the quieter half is compared,
and a layout is measured again if other programs were busy even then. measured.json keeps the measurements, so that a
second call only predicts. `--published` compares with other projects' numbers for named models and clusters. Takes ten
minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaverl.config import load_config
from megaverl.planner.calibrate import PROMPT, make_inputs, sampling
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import find_spec, make_job
from megaverl.planner.simulator import Prediction, simulate
from megaverl.planner.trial_steps import real_steps
from megaverl.sharding.model_spec import ModelSpec

STEPS, RESPONSE = 12, 40
QUIET = 0.05  # processors of other programs, above which a layout is measured again
MODELS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    "large": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8},
}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
KEYS = (
    "data={max_prompt_tokens: 16, prompts_per_step: 8}",
    "algorithm={name: grpo, group_size: 4, num_mini_batches: 2, kl: {in: loss, kind: k3, coef: 0.001}}",
    "actor.micro_batch_tokens=256",
    "reference.micro_batch_tokens=256",
    "reward=exact_match",
)


@dataclass(frozen=True)
class Layout:
    """A model, its parallel sizes and the number of ranks."""

    model: str
    ranks: int
    grid: str = ""
    placement: str = ""

    @property
    def name(self) -> str:
        return " ".join(
            part
            for part in (self.model, f"{self.ranks} ranks", self.grid, self.placement)
            if part
        )

    @property
    def keys(self) -> list[str]:
        sizes = [
            f"{part[:2]}={part[2:]}"
            for part in self.grid.split()
            if not part.startswith("dp")
        ]
        roles = ["actor"] if self.placement else ["actor", "reference"]
        keys = [f"{role}.{size}" for role in roles for size in sizes]
        if self.placement:
            keys.append("placement={actor: 0, rollout: 1}")
        return keys + (
            ["rollout.async_rollout=true"] if self.placement == "asynchronous" else []
        )


LAYOUTS = (
    Layout("small", 1),
    Layout("small", 2, "tp2"),
    Layout("small", 2, "pp2"),
    Layout("small", 2, "dp2"),
    Layout("small", 2, "cp2"),
    Layout("small", 4, "tp2 pp2"),
    Layout("small", 2, "", "split"),
    Layout("large", 1),
    Layout("large", 2, "tp2"),
    Layout("large", 2, "pp2"),
    Layout("large", 2, "dp2"),
    Layout("large", 2, "cp2"),
    Layout("large", 4, "dp4"),
    Layout("large", 2, "", "split"),
    Layout("large", 2, "", "asynchronous"),
)


def keys_of(layout: Layout, inputs: Path) -> list[str]:
    made = make_inputs(inputs / layout.model, MODELS[layout.model] | HEADS)
    return [*KEYS, *sampling("hf", RESPONSE), *made, *layout.keys]


def predict(layout: Layout, inputs: Path, hardware: Hardware) -> Prediction:
    config = load_config(
        None, keys_of(layout, inputs), check_paths=False, world_size=layout.ranks
    )
    job = make_job(config, find_spec(config), layout.ranks, hardware.machine())
    return simulate(job, hardware, lengths=LengthDistribution.fixed(PROMPT, RESPONSE))


Kept = dict[str, dict[str, Any]]


def measure(
    layouts: Iterable[Layout],
    inputs: Path,
    kept: Path | None,
    seconds: float,
    attempts: int,
) -> Kept:
    """Return each layout's measured operator times, and the number of processors that other programs used meanwhile.

    Args:
        kept: file of measurements, which are not repeated unless other programs were busy.
        seconds: time after which no further layout is started.
        attempts: tries of a layout while other programs are busy; 0 measures nothing.
    """
    measured: Kept = (
        json.loads(kept.read_text(encoding="utf-8"))
        if kept is not None and kept.is_file()
        else {}
    )
    end = time.monotonic() + seconds
    # Those that are not there come first, then the most disturbed.
    none: dict[str, Any] = {"others": float("inf")}
    for layout in sorted(
        layouts, key=lambda candidate: -measured.get(candidate.name, none)["others"]
    ):
        for _ in range(attempts):
            before = measured.get(layout.name, none)
            if before["others"] <= QUIET or time.monotonic() > end:
                break
            with tempfile.TemporaryDirectory() as runs:
                one = real_steps(
                    Path(runs), keys_of(layout, inputs), layout.ranks, STEPS
                )
            print(
                f"{layout.name}: {one.operators['step'].seconds:.3f} s, others {one.others:.2f}",
                file=sys.stderr,
            )
            if one.others < before["others"]:
                measured[layout.name] = asdict(one)
            if kept is not None:
                kept.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    return measured


PUBLISHED = ROOT / "tools" / "published_steps.yaml"


def against_published() -> None:
    """Print predicted steps beside those that others have published, from `published_steps.yaml`."""
    entries = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    models = entries["models"]
    steps = [
        (entry["name"], published(entry, models).step_seconds, entry["seconds"])
        for entry in entries["steps"]
    ]
    print("\n".join(table({"seconds of a step": steps})), end="\n\n")
    rates = []
    for entry in entries["updates"]:
        peak = Hardware.read(entry["hardware"]).tflops["bfloat16"]
        rates.append(
            (entry["name"], published(entry, models).update_mfu * peak, entry["tflops"])
        )
    print("\n".join(table({"TFLOP/s of a GPU in updates": rates})), end="\n\n")
    print("\n".join(f"{name}: {source}" for name, source in entries["sources"].items()))


def published(entry: dict[str, Any], models: dict[str, Any]) -> Prediction:
    """Predict a published step with the entry's hardware, model, settings and lengths."""
    hardware, lengths = Hardware.read(entry["hardware"]), entry["lengths"]
    config = load_config(
        None,
        [
            "model={path: absent, dtype: bfloat16}",
            "data.train=absent.jsonl",
            "reward=exact_match",
            *entry["keys"],
        ],
        check_paths=False,
        world_size=entry["gpus"],
    )
    spec = ModelSpec.from_config(models[entry["model"]])
    job = make_job(config, spec, entry["gpus"], hardware.machine())
    spread = LengthDistribution.lognormal(
        lengths["prompt"], lengths["response"], lengths["longest"]
    )
    return simulate(job, hardware, lengths=spread)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation. Assumes that no two values are equal."""
    places = [
        [sorted(values).index(value) for value in values] for values in (one, other)
    ]
    return statistics.correlation(*places)


Row = tuple[str, float, float]


def summary(rows: Sequence[Row]) -> str:
    """Return the median and worst error and the rank correlation of rows (name, predicted, measured)."""
    errors = [abs(predicted / measured - 1) for _, predicted, measured in rows]
    both = [row[1] for row in rows], [row[2] for row in rows]
    return (
        f"error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}; rank correlation "
        f"{rank_correlation(*both):.2f}, of {len(rows)}"
    )


def table(columns: dict[str, Sequence[Row]]) -> list[str]:
    """Return the lines of a table: each row's name, then predicted, measured and error of each column."""
    lines = [
        "| | "
        + " | ".join(f"{name}: predicted | measured | error" for name in columns)
        + " |"
    ]
    lines.append("| --- |" + " ---: | ---: | ---: |" * len(columns))
    for rows in zip(*columns.values(), strict=True):
        cells = [
            f"{predicted:.3g} | {measured:.3g} | {predicted / measured - 1:+.0%}"
            for _, predicted, measured in rows
        ]
        lines.append(f"| {rows[0][0]} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{name}: {summary(rows)}" for name, rows in columns.items())]


def against_measured(
    hardware: Hardware, kept: Path | None, seconds: float, attempts: int, phases: bool
) -> None:
    """Print the predicted and measured steps of this machine's layouts."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        measured = measure(LAYOUTS, inputs, kept, seconds, attempts)
        steps, work = [], []
        for layout in LAYOUTS:
            if layout.name not in measured:
                continue
            predicted, real = (
                predict(layout, inputs, hardware),
                measured[layout.name]["operators"],
            )
            steps.append((layout.name, predicted.step_seconds, real["step"]["seconds"]))
            used = 0.0
            for phase in predicted.phases:
                one = real.get(phase.name, {"seconds": 0.0, "work": 0.0})
                used += one["work"] * len(phase.ranks)
                if phases:
                    print(
                        f"  {layout.name:24}{phase.name:16}{phase.seconds:8.3f} {one['seconds']:8.3f} s",
                        end="",
                    )
                    print(f"{one['work']:8.3f} s of a processor")
            work.append((layout.name, predicted.processor_seconds, used))
    disturbed = max(measurement["others"] for measurement in measured.values())
    print("\n".join(table({"seconds of a step": steps, "processor seconds": work})))
    print(
        f"other programs had {disturbed:.2f} processors at most while this was measured"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", help="what megaverl plan --calibrate has written")
    parser.add_argument(
        "--measured", type=Path, help="a file that keeps what is measured"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="begin no layout after so many: a second call goes on",
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=3,
        help="so often is a layout measured beside other programs; 0: not at all",
    )
    parser.add_argument(
        "--phases", action="store_true", help="each operator's seconds, too"
    )
    parser.add_argument(
        "--published", action="store_true", help="beside what others have published"
    )
    arguments = parser.parse_args()
    if arguments.published:
        against_published()
    elif arguments.hardware is None:
        parser.error("--hardware FILE is needed: megaverl plan --calibrate FILE")
    else:
        hardware = Hardware.read(arguments.hardware)
        against_measured(
            hardware,
            arguments.measured,
            arguments.seconds,
            arguments.attempts,
            arguments.phases,
        )


if __name__ == "__main__":
    main()
