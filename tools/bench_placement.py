#!/usr/bin/env python3
"""Compare a step's time without a placement and with one that names the same ranks.

    python tools/bench_placement.py --ranks 2 --steps 30 --repeats 3 --against FOLDER

FOLDER is another checkout of this repository, such as one from before placement existed, whose steps are timed as well.
The sides take turns, so other load on the machine disturbs all alike; the first steps of a run are left out. There is
no threshold: the spread between repeats shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaverl.processes import ending_with_parent

WARM_UP = 3  # steps
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
SETTINGS = [
    "rollout={engine: hf, sampling: {max_tokens: 24}}",
    "data={max_prompt_tokens: 16, prompts_per_step: 8}",
    "algorithm={name: ppo, num_mini_batches: 2}",
    "checkpoint={save_interval: 0, export_hf: false}",
    "reward=exact_match",
]


def make_inputs(folder: Path) -> None:
    """Write a small model with its tokenizer, and prompts."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    task = make_task("reverse", num_digits=3, num_train=256, num_held_out=16)
    task.save(folder)
    tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
    special: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(folder / "model", "Qwen3ForCausalLM", **MODEL, **special)
    tokenizer.save(folder / "model")


def step_times(
    root: Path, inputs: Path, runs: Path, ranks: int, steps: int, more: Sequence[str]
) -> list[float]:
    """Run the checkout at `root` and return the milliseconds of each step after the first ones."""
    arguments = [
        *SETTINGS,
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        f"run={{name: run, dir: {runs}, nproc: {ranks}, log_with: jsonl}}",
        f"trainer={{steps: {steps}, validate_every: 0}}",
        *more,
    ]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megaverl.cli.train", *arguments]
    command = ending_with_parent(command)
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{root}: {done.stdout}{done.stderr}")
    records = map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines())
    return [
        record["train/step_time_ms"]
        for record in records
        if "train/step_time_ms" in record
    ][WARM_UP:]


def report(times: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return one line for each side: its fastest repeat's median, the ratio to the first side's, and all medians.

    The fastest repeat is compared, since other work on the machine disturbs it least.
    """
    lines = []
    medians = {
        side: [statistics.median(run) for run in runs] for side, runs in times.items()
    }
    first = min(next(iter(medians.values())))
    for side, repeat_medians in medians.items():
        repeats = ", ".join(f"{median:.1f}" for median in repeat_medians)
        lines.append(
            f"{side:24} {min(repeat_medians):8.1f} ms a step  {min(repeat_medians) / first:.3f} x  (repeats: {repeats})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--against", type=Path, help="another checkout, to be timed beside"
    )
    options = parser.parse_args()
    named = f"placement={{actor: 0-{options.ranks - 1}, rollout: actor, critic: actor}}"
    sides: dict[str, tuple[Path, list[str]]] = {}
    if options.against is not None:
        sides["the other checkout"] = (options.against.resolve(), [])
    sides |= {"no placement": (ROOT, []), "the same ranks, named": (ROOT, [named])}
    times: dict[str, list[list[float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder))
        for repeat in range(options.repeats):
            for number, (side, (root, more)) in enumerate(sides.items()):
                runs = Path(folder) / f"runs_{repeat}_{number}"
                times[side].append(
                    step_times(
                        root, Path(folder), runs, options.ranks, options.steps, more
                    )
                )
    print(report(times))


if __name__ == "__main__":
    main()
