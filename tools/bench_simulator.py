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
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaverl.config import load_config
from megaverl.models.architectures import weights_of
from megaverl.planner.calibrate import PROMPT, make_inputs, sampling
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import PlannedJob, find_spec, make_job
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
                measured_steps = real_steps(
                    Path(runs), keys_of(layout, inputs), layout.ranks, STEPS
                )
            print(
                f"{layout.name}: {measured_steps.operators['step'].seconds:.3f} s, others {measured_steps.others:.2f}",
                file=sys.stderr,
            )
            if measured_steps.others < before["others"]:
                measured[layout.name] = asdict(measured_steps)
            if kept is not None:
                kept.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    return measured


PUBLISHED = ROOT / "tools" / "published_steps.yaml"
HALVES = {
    "fit": "steps that constants may be fitted on",
    "check": "steps that only check",
}


def against_published(more: Sequence[Path], phases: bool) -> None:
    """Print predicted steps and ratios beside those that others have published.

    Args:
        more: files of further rows; see `read_rows`.
        phases: print each operator's seconds, too.
    """
    entries = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    every = [*entries["steps"], *entries["updates"]]
    for path in more:
        names = {entry["name"] for entry in every}
        every += [entry for entry in read_rows(path) if entry["name"] not in names]
    predictions: dict[str, Prediction] = {}
    unknown: list[str] = []
    for entry in every:
        if entry["model"] in entries["models"]:
            predictions[entry["name"]] = published(entry, entries)
        else:
            unknown.append(f"{entry['name']} ({entry['model']})")
    known = [entry for entry in every if entry["name"] in predictions]
    steps = [entry for entry in known if "seconds" in entry]
    for half, title in HALVES.items():
        rows = [
            (e["name"], predictions[e["name"]].step_seconds, e["seconds"])
            for e in steps
            if e.get("half", "check") == half
        ]
        print("\n".join(table({title: rows})), end="\n\n")
    if phases:
        _print_phases(predictions)
    _print_ratios(ratios_of(entries, steps, predictions))
    rates, updates = [], []
    for entry in known:
        name, prediction = entry["name"], predictions[entry["name"]]
        if "tflops" in entry:
            peak = hardware_of(entry, entries).tflops["bfloat16"]
            rates.append((name, prediction.update_mfu * peak, entry["tflops"]))
        elif "update_seconds" in entry:
            seconds = prediction.seconds_of("actor_update") / entry["micro_batches"]
            updates.append((name, seconds, entry["update_seconds"]))
    print("\n".join(table({"TFLOP/s of a GPU in updates": rates})), end="\n\n")
    if updates:
        print("\n".join(table({"seconds of an update": updates})), end="\n\n")
    if unknown:
        print(f"not predicted, as published_steps.yaml lacks the model: {unknown}\n")
    print("\n".join(f"{name}: {source}" for name, source in entries["sources"].items()))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read further published steps, rates and updates, in the form of `published_steps.yaml`.

    The file is a JSON list of rows with `kind` (step, rate or update), `name`, `model`, `gpus`, `value`, `unit`,
    `prompt_len`, `response_len`, `longest_response`, `megaverl_keys`, `megaverl_hardware` and, optionally, `half`. An
    update in seconds a micro-batch also has `batch_prompts`, `n` and `dp`. Rows of other kinds are left out.
    """
    rows: list[dict[str, Any]] = []
    kinds = {"step": "seconds", "rate": "tflops", "update": "update_seconds"}
    for row in json.loads(path.read_text(encoding="utf-8")):
        if row["kind"] not in kinds:
            continue
        value = kinds[row["kind"]]
        # A rank has one sample in a micro-batch of these sources.
        per_micro_batch = "micro-batch" in row.get("unit", "")
        samples = row["batch_prompts"] * row["n"] if per_micro_batch else 1
        rows.append(
            {
                "name": row["name"],
                "model": row["model"],
                "hardware": row["megaverl_hardware"].removesuffix(".yaml"),
                "gpus": row["gpus"],
                value: row["value"],
                "micro_batches": samples / row["dp"] if per_micro_batch else 1,
                "lengths": {
                    "prompt": row["prompt_len"],
                    "response": row["response_len"],
                    "longest": row["longest_response"],
                },
                "keys": row["megaverl_keys"],
                "half": row.get("half", "fit"),
            }
        )
    return rows


def _print_phases(predictions: dict[str, Prediction]) -> None:
    for name, prediction in predictions.items():
        parts = ", ".join(
            f"{phase.name} {phase.seconds:.1f}" for phase in prediction.phases
        )
        print(f"{name}: {parts}")
    print()


@dataclass(frozen=True)
class Ratio:
    """How many times as long the second of two steps takes as the first one.

    Attributes:
        change: what differs between them.
    """

    change: str
    name: str
    predicted: float
    measured: float

    @property
    def has_right_sign(self) -> bool:
        """Return whether prediction and measurement agree on which of the two is faster."""
        return (self.predicted < 1) == (self.measured < 1)

    @property
    def error(self) -> float:
        """Share by which the predicted ratio differs from the measured one."""
        return self.predicted / self.measured - 1


def ratios_of(
    entries: dict[str, Any],
    steps: Sequence[dict[str, Any]],
    predictions: dict[str, Prediction],
) -> list[Ratio]:
    """Return the ratios of `published_steps.yaml`, in its order."""
    measured = {entry["name"]: entry["seconds"] for entry in steps}
    ratios = []
    for pair in entries["ratios"]:
        first, second = pair["first"], pair["second"]
        ratios.append(
            Ratio(
                pair["change"],
                f"{first} -> {second}",
                predictions[second].step_seconds / predictions[first].step_seconds,
                measured[second] / measured[first],
            )
        )
    return ratios


def _print_ratios(ratios: Sequence[Ratio]) -> None:
    print("| change | steps | ratio: predicted | measured | error | sign |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for ratio in ratios:
        sign = "right" if ratio.has_right_sign else "wrong"
        print(
            f"| {ratio.change} | {ratio.name} | {ratio.predicted:.2f} | {ratio.measured:.2f} | {ratio.error:+.0%} "
            f"| {sign} |"
        )
    print()
    for change in dict.fromkeys(ratio.change for ratio in ratios):
        alike = [ratio for ratio in ratios if ratio.change == change]
        errors = [abs(ratio.error) for ratio in alike]
        print(
            f"{change}: {sum(r.has_right_sign for r in alike)} of {len(alike)} signs right, "
            f"{sum(error <= 0.25 for error in errors)} within 25 %, median error {statistics.median(errors):.0%}"
        )
    print()


def hardware_of(entry: dict[str, Any], entries: dict[str, Any]) -> Hardware:
    """Return the description that an entry names: megaverl's, or one of `published_steps.yaml`."""
    described = entries["hardware"].get(entry["hardware"])
    if described is None:
        return Hardware.read(entry["hardware"])
    changed = {name: value for name, value in described.items() if name != "like"}
    changed["sources"] = tuple(changed["sources"])
    return replace(Hardware.read(described["like"]), **changed)


def published(entry: dict[str, Any], entries: dict[str, Any]) -> Prediction:
    """Predict a published step with the entry's hardware, model, settings and lengths."""
    hardware, lengths = hardware_of(entry, entries), entry["lengths"]
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
    spec = ModelSpec.from_config(entries["models"][entry["model"]])
    # The estimates of a step need no layouts.
    job = make_job(config, spec, entry["gpus"], hardware.machine(), deal_later=True)
    spread = LengthDistribution.lognormal(
        lengths["prompt"],
        lengths["response"],
        lengths["longest"],
        at_limit=lengths.get("at_limit"),
    )
    # An operator that the source's run does not have takes no time.
    absent = dict.fromkeys(entry.get("absent", ()), 0.0)
    return simulate(
        job,
        hardware,
        lengths=spread,
        factors=absent,
        moving_seconds=refit_seconds(entry, entries, job, hardware),
    )


def refit_seconds(
    entry: dict[str, Any],
    entries: dict[str, Any],
    job: PlannedJob,
    hardware: Hardware,
) -> float | None:
    """Return the seconds in which the entry's project sends weights to engines, in bfloat16.

    None: the project does not publish them, so that megaverl's reshard is predicted.
    """
    refit = entries["refits"].get(entry.get("source"))
    if refit is None:
        return None
    nbytes = 2 * sum(math.prod(weight.shape) for weight in weights_of(job.spec))
    if not job.placement.colocated("actor", "rollout"):
        return float(nbytes / 1e9 / refit["separate"])
    offload = refit["offload"].get(entry["model"], 0.0)
    return float(
        nbytes / 1e9 / refit["colocated"]
        + offload * refit["host_gb_s"] / hardware.host_gb_s
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; nan for fewer than two values. Assumes that no two values are equal."""
    if len(first) < 2:
        return float("nan")
    places = [
        [sorted(values).index(value) for value in values] for values in (first, second)
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
                real_phase = real.get(phase.name, {"seconds": 0.0, "work": 0.0})
                used += real_phase["work"] * len(phase.ranks)
                if phases:
                    print(
                        f"  {layout.name:24}{phase.name:16}{phase.seconds:8.3f} {real_phase['seconds']:8.3f} s",
                        end="",
                    )
                    print(f"{real_phase['work']:8.3f} s of a processor")
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
        "--published",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="beside what others have published: published_steps.yaml, and further rows of JSON files",
    )
    arguments = parser.parse_args()
    if arguments.published is not None:
        against_published(arguments.published, arguments.phases)
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
