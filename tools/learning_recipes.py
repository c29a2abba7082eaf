"""Learning curves and tool use of recipes that run unchanged, by the command that a person would type.

`learning_curves.py --task recipes` runs this: one process, generation by transformers, and inputs made on the spot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPES = ("reasoning_gym/quickstart", "games/calculator_tool")
ONE_PROCESS = ("run.nproc=1", "actor.tp=1", "rollout.engine=hf")
SAMPLES = 256  # all held-out ones are written down, for their turns
COMMAND = "tools/learning_curves.py run --task recipes --out FOLDER"
HEADING = "## Recipes\n"
TEXT = """
Each recipe runs unchanged on one process with transformers' generation; each seed starts from other weights.
Accuracy is measured on held-out prompts at temperature 1, after the warm-up and after the last step. Tool use
is the share of held-out episodes of more than one turn, which are those that called the calculator.

The warm-up must teach the calculator's model to copy the tool's result. A model that has not learned this
unlearns the tool, because errors cost 0.1, and ends at an accuracy of 0.
"""


def run(out: Path, seeds: Sequence[int], seconds: float) -> int:
    """Run the missing recipes. Returns 0 when all are there, 1 if a run failed, 3 if time ran out."""
    start, longest = time.monotonic(), 0.0
    for seed in seeds:
        for recipe in RECIPES:
            if result_file(out, recipe, seed).exists():
                continue
            if time.monotonic() - start + longest > seconds:
                return 3
            began = time.monotonic()
            ended = subprocess.run(
                [*command(recipe), *own_settings(out, recipe, seed)], check=False
            )
            if ended.returncode:
                print(
                    f"{recipe} seed {seed}: the command ended with {ended.returncode}"
                )
                return 1
            longest = max(longest, time.monotonic() - began)
            result = {
                **measured(out / "runs" / run_name(recipe, seed)),
                "seconds": time.monotonic() - began,
            }
            result_file(out, recipe, seed).parent.mkdir(parents=True, exist_ok=True)
            result_file(out, recipe, seed).write_text(
                json.dumps(result), encoding="utf-8"
            )
    return 0


def command(recipe: str) -> list[str]:
    """Return the command as a person types it, with this interpreter."""
    from megaverl.config.yaml_source import recipe as file_of

    return [
        sys.executable,
        "-m",
        "megaverl.cli.main",
        "quickstart",
        "--config",
        str(file_of(recipe)),
        *ONE_PROCESS,
    ]


def own_settings(out: Path, recipe: str, seed: int) -> list[str]:
    name = run_name(recipe, seed)
    return [
        f"run.seed={seed}",
        f"run.dir={out / 'runs'}",
        f"run.name={name}",
        f"trainer.save_samples={SAMPLES}",
    ]


def measured(folder: Path) -> dict[str, Any]:
    """Read a run's results.

    Returns:
        `curve`: (step, accuracy) on held-out prompts; `tool_use`: (step, share of episodes of several turns), if any.
    """
    records, samples = (
        [
            json.loads(line)
            for line in (folder / name).read_text(encoding="utf-8").splitlines()
        ]
        for name in ("metrics.jsonl", "samples.jsonl")
    )
    turns: dict[int, list[int]] = {}
    for sample in samples:
        if sample["split"] == "validation" and "turns" in sample:
            turns.setdefault(sample["step"], []).append(sample["turns"])
    return {
        "curve": [
            (record["step"], record["validation/accuracy"])
            for record in records
            if "validation/accuracy" in record
        ],
        "tool_use": [
            (step, sum(count > 1 for count in counts) / len(counts))
            for step, counts in sorted(turns.items())
        ],
    }


def report(out: Path, docs: Path, seeds: Sequence[int]) -> int:
    """Replace this task's table in docs/learning_curves.md and keep the rest of the page."""
    results = {
        (recipe, seed): json.loads(
            result_file(out, recipe, seed).read_text(encoding="utf-8")
        )
        for recipe in RECIPES
        for seed in seeds
        if result_file(out, recipe, seed).exists()
    }
    if not results:
        print(f"{out} holds no results: run them first")
        return 2
    page = docs / "learning_curves.md"
    before = (
        page.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
        if page.exists()
        else ""
    )
    date = time.strftime(
        "%Y-%m-%d",
        time.gmtime(max(result_file(out, *key).stat().st_mtime for key in results)),
    )
    made = f"{date}, two CPU cores shared with other work, one thread:\n`OMP_NUM_THREADS=1 {COMMAND}`."
    page.write_text(
        f"{before}\n\n{HEADING}{TEXT}\n{table(results)}\n\n{made}\n".lstrip("\n"),
        encoding="utf-8",
    )
    print(table(results))
    return 0


def table(results: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Return the Markdown table with a line for each recipe and seed."""
    lines = [
        "| recipe | seed | accuracy before | after | steps | tool use before | after | minutes |"
    ]
    lines.append("| --- |" + " --- |" * 7)
    for (recipe, seed), result in results.items():
        accuracy, used = (
            [f"{points[0][1]:.1%}", f"{points[-1][1]:.1%}"] if points else ["", ""]
            for points in (result["curve"], result["tool_use"])
        )
        cells = [
            recipe,
            str(seed),
            *accuracy,
            str(result["curve"][-1][0]),
            *used,
            f"{result['seconds'] / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(page: Path) -> str:
    """Return this task's section of the page, for `learning_curves_page` to keep when it writes the rest."""
    parts = (
        page.read_text(encoding="utf-8").partition(HEADING)
        if page.exists()
        else ("", "", "")
    )
    return f"\n{HEADING}{parts[2]}" if parts[1] else ""


def result_file(out: Path, recipe: str, seed: int) -> Path:
    return out / "results" / f"{run_name(recipe, seed)}.json"


def run_name(recipe: str, seed: int) -> str:
    return f"{recipe.replace('/', '_')}_{seed}"
