#!/usr/bin/env python3
"""Compare the layout that `megaverl plan --auto` chooses with all others that can run, as measured on this machine.

    megaverl plan --calibrate here.json
    python tools/bench_auto.py --hardware here.json --measured layouts.json --starts 3 --seconds 240

There are twelve settings: three tiny models, one with experts, on 2 and on 4 ranks, with many and with few samples.
Every grid that the rules allow for the actor runs some steps of the real trainer (Megatron-core, gloo), and the quieter
half of the steps counts. With --starts N, layouts that come near the best one of their setting are started N times, in
turns, and the median of their starts counts. Measurements are kept in layouts.json: with --seconds a call stops in
time, and the next call continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaverl.config.checks import cross_mistakes
from megaverl.config.loader import layered
from megaverl.planner.calibrate import PROMPT, make_inputs, sampling
from megaverl.planner.candidates import Candidates, SearchSpace, Settings, shown
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import find_spec
from megaverl.planner.search import LayoutSearch
from megaverl.planner.trial_steps import real_steps

STEPS, NEAR = 10, 1.1
# Times the best: what is further off after its first start is not started again.
AGAIN = 1.35
SEARCHED = ("actor.tp", "actor.pp", "actor.ep")
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "narrow": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    | HEADS,
    "wide": {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 4}
    | HEADS,
    "experts": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_experts": 4,
    }
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    | HEADS,
}
# prompts of a step, responses to each, tokens of a response
LOADS = {"many samples": (8, 4, 32), "few samples": (4, 2, 16)}


@dataclass(frozen=True)
class Setting:
    """A model on a number of ranks, with a number of samples to train on."""

    model: str
    ranks: int
    load: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.load}"

    def keys(self, inputs: Path) -> list[str]:
        """Return the run's settings except those that the search varies."""
        prompts, group, tokens = LOADS[self.load]
        kind = (
            "Qwen3MoeForCausalLM"
            if "num_experts" in MODELS[self.model]
            else "Qwen3ForCausalLM"
        )
        return [
            f"data={{max_prompt_tokens: 16, prompts_per_step: {prompts}}}",
            f"algorithm={{name: grpo, group_size: {group}, num_mini_batches: 2, kl: {{in: loss, coef: 0.001}}}}",
            "actor.micro_batch_tokens=256",
            "reference.micro_batch_tokens=256",
            "reward=exact_match",
            *sampling("hf", tokens),
            *make_inputs(inputs / self.model, MODELS[self.model], kind=kind),
        ]

    def search(self, inputs: Path, hardware: Hardware) -> LayoutSearch:
        make = layered(None, self.keys(inputs))
        lengths = LengthDistribution.fixed(PROMPT, LOADS[self.load][2])
        spec = find_spec(make({}))
        return LayoutSearch(
            make,
            spec,
            self.ranks,
            hardware,
            keys=SEARCHED,
            lengths=lengths,
            further=False,
        )


SETTINGS = [
    Setting(model, ranks, load)
    for ranks in (2, 4)
    for load in LOADS
    for model in MODELS
]


def layouts(search: LayoutSearch) -> dict[str, Settings]:
    """Return every layout that a run would accept, as {name: settings}."""
    candidates = Candidates(
        search.config, search.spec, SearchSpace(search.world, search.world, SEARCHED)
    )
    every = [
        rungs[0] | engine
        for rungs, engines in candidates.groups()
        for engine in engines
    ]
    valid = [
        settings
        for settings in every
        if not cross_mistakes(search.make(settings), "train", False, search.world)
    ]
    return {name_of(settings): settings for settings in valid}


def name_of(settings: Settings) -> str:
    """Return a layout's name: its parallel sizes except those that are 1."""
    sizes = {
        key.removeprefix("actor."): value
        for key, value in shown(settings).items()
        if key in SEARCHED
    }
    return (
        " ".join(f"{key}{value}" for key, value in sizes.items() if value != 1)
        or "dp alone"
    )


# setting -> layout -> seconds of a step, of each start.
Measured = dict[str, dict[str, list[float]]]


def measure(
    inputs: Path, kept: Path, seconds: float, starts: int, hardware: Hardware
) -> Measured:
    """Measure the layouts that `kept` does not have yet, and return all times:
    {setting: {layout: seconds of each start}}.
    """
    measured: Measured = (
        json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    )
    end = time.monotonic() + seconds
    for start in range(starts):
        for setting in SETTINGS:
            here = measured.setdefault(setting.name, {})
            every = layouts(setting.search(inputs, hardware))
            near = [
                name
                for name in every
                if not start
                or here[name][0] < AGAIN * min(seconds[0] for seconds in here.values())
            ]
            for name in near:
                if len(here.get(name, ())) > start:
                    continue
                if time.monotonic() > end:
                    return measured
                chosen = [
                    f"{key}={json.dumps(value)}" for key, value in every[name].items()
                ]
                with tempfile.TemporaryDirectory() as runs:
                    steps = real_steps(
                        Path(runs),
                        [*setting.keys(inputs), *chosen],
                        setting.ranks,
                        STEPS,
                    )
                here.setdefault(name, []).append(steps.operators["step"].seconds)
                kept.write_text(json.dumps(measured, indent=1), encoding="utf-8")
                print(
                    f"{setting.name}: {name} {here[name][-1]:.3f} s, others {steps.others:.2f}",
                    flush=True,
                )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hardware", required=True, help="what megaverl plan --calibrate has written"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        required=True,
        help="a file that keeps what is measured",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="begin no layout after so many: a second call goes on",
    )
    parser.add_argument(
        "--starts", type=int, default=1, help="of each layout that comes near the best"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="each layout's seconds, predicted and measured",
    )
    arguments = parser.parse_args()
    hardware = Hardware.read(arguments.hardware)
    near, whole = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(
            Path(folder),
            arguments.measured,
            arguments.seconds,
            arguments.starts,
            hardware,
        )
        print("| | layouts | chosen | s a step | best | s a step | above the best |")
        print("| --- | ---: | --- | ---: | --- | ---: | ---: |")
        for setting in SETTINGS:
            search = setting.search(Path(folder), hardware)
            every = layouts(search)
            if set(every) - set(measured.get(setting.name, {})):
                continue
            median_seconds = {
                name: statistics.median(measured[setting.name][name]) for name in every
            }
            chosen = name_of(search.best(1).choices[0].settings)
            best = min(median_seconds, key=lambda name: median_seconds[name])
            whole, near = (
                whole + 1,
                near + (median_seconds[chosen] <= NEAR * median_seconds[best]),
            )
            above = median_seconds[chosen] / median_seconds[best] - 1
            row = [
                setting.name,
                str(len(every)),
                chosen,
                f"{median_seconds[chosen]:.3g}",
                best,
                f"{median_seconds[best]:.3g}",
                f"{above:.0%}",
            ]
            print(f"| {' | '.join(row)} |")
            for name, settings in every.items() if arguments.all else ():
                job = search._job(settings)
                assert job is not None
                print(
                    f"    {name:16}{search._predict(job).step_seconds:8.3f}{median_seconds[name]:8.3f}"
                )
    print(f"\nwithin {NEAR - 1:.0%} of the best: {near} of {whole} settings")


if __name__ == "__main__":
    main()
