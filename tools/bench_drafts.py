"""Accepted drafts and decode speed over steps of RL, with a frozen and with a trained draft model, and without drafts.

    python tools/bench_drafts.py [--steps 100 --out FOLDER]

A random Qwen3 and a draft model of one layer are first trained on the same rows by `megaverl sft`, until they know
the form of an answer. Three runs of GRPO follow from the same weights and seed: `frozen` never
changes the draft model, `trained` trains it with the policy (`draft.train`), and `none` generates without
drafts. The acceptance is `rollout/draft_acceptance_rate`, the speed `rollout/throughput_tokens_per_sec`.

A run that has ended is not repeated, and one that was interrupted is resumed: call the command again with the
same `--out`. `--only` restricts a call to one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PREPARE, FROZEN, TRAINED, NONE = "prepare", "frozen", "trained", "none"
SIDES = (FROZEN, TRAINED, NONE)
ACCEPTED = "rollout/draft_acceptance_rate"
SPEED = "rollout/throughput_tokens_per_sec"
ACCURACY = "reward/accuracy"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.out is not None:
        return measure(options, options.out)
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, Path(folder))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder that keeps models and runs")
    parser.add_argument("--only", choices=(PREPARE, *SIDES))
    parser.add_argument("--digits", type=int, default=8, help="to reverse")
    parser.add_argument("--layers", type=int, default=8, help="of the policy")
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--group", type=int, default=8, help="responses a prompt")
    parser.add_argument("--tokens", type=int, default=3, help="drafts at a time")
    parser.add_argument("--sft-steps", type=int, default=120, help="of both models")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the policy")
    parser.add_argument("--draft-lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run what is missing in `folder`, and print the table when all runs have ended."""
    prepare(options, folder)
    for side in SIDES if options.only is None else (options.only,):
        if side != PREPARE:
            run_side(options, folder, side)
    if all((folder / side / "hf").is_dir() for side in SIDES):
        report(options, folder)
    return 0


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Create data, tokenizer and both models, and train each model on the rows' answers."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    if not (folder / "random").is_dir():
        task = make_task(
            "reverse", num_digits=options.digits, num_train=8192, seed=options.seed
        )
        folder.mkdir(parents=True, exist_ok=True)
        task.save(folder)
        tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "intermediate_size": 256,
            "head_dim": 32,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        for name, layers in (("draft_random", 1), ("random", options.layers)):
            make_tiny_folder(
                folder / name,
                "Qwen3ForCausalLM",
                num_hidden_layers=layers,
                max_position_embeddings=128,
                tie_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                vocab_size=tokenizer.vocab_size,
                **sizes,
            )
            tokenizer.save(folder / name)
    stage = f"sft={{steps: {options.sft_steps}, batch_size: 64, lr: 1.0e-3, max_answer_tokens: {options.digits + 4}}}"
    for source, name in (("random", "policy"), ("draft_random", "draft")):
        if not (folder / name / "hf").is_dir():
            run("sft", folder, name, source, [stage])


def run_side(options: argparse.Namespace, folder: Path, side: str) -> None:
    """Run GRPO from the prepared policy, unless it has ended before."""
    if (folder / side / "hf").is_dir():
        return
    drafts = f"{{model: {folder / 'draft' / 'hf'}, num_speculative_tokens: {options.tokens}}}"
    settings = [
        f"algorithm={{name: grpo, group_size: {options.group}}}",
        f"actor.optimizer.lr={options.lr}",
        f"rollout.sampling={{temperature: 1.0, max_tokens: {options.digits + 4}}}",
        "reward=[{name: exact_match}, {name: positions}]",
        f"trainer={{steps: {options.steps}, validate_every: 0}}",
        "checkpoint={save_interval: 20, keep_last_k: 1, resume: unfinished}",
    ]
    if side != NONE:
        settings.append(f"rollout.vllm.speculative_config={drafts}")
    if side == TRAINED:
        settings.append(f"draft={{train: true, optimizer: {{lr: {options.draft_lr}}}}}")
    settings.append(f"data.prompts_per_step={options.prompts}")
    run("train", folder, side, "policy/hf", settings, seed=options.seed)


def run(
    command: str,
    folder: Path,
    name: str,
    model: str,
    settings: list[str],
    seed: int = 0,
) -> None:
    """Run a megaverl command on one rank, with its output in `NAME.log`.

    Raises:
        RuntimeError: the command failed.
    """
    log = folder / f"{name}.log"
    arguments = [
        f"model.path={folder / model}",
        f"data.train={folder / 'train.jsonl'}",
        "data.max_prompt_tokens=32",
        "data.chat_template=none",
        f"run={{name: {name}, dir: {folder}, nproc: 1, seed: {seed}, log_with: jsonl}}",
        *settings,
    ]
    with log.open("a") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "megaverl", command, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        lines = log.read_text().splitlines()[-15:]
        raise RuntimeError("\n".join([f"{name} failed; see {log}", *lines]))


def report(options: argparse.Namespace, folder: Path) -> None:
    """Print means over ten steps at the start, in the middle and at the end of the runs."""
    from megaverl.monitoring.backends import read_metrics

    records = {
        side: list(read_metrics(folder / side / "metrics.jsonl")) for side in SIDES
    }
    print(
        f"GRPO on reversing {options.digits} digits, {options.prompts} x {options.group} responses a step; a policy of "
        f"{options.layers} layers, a draft model of one, {options.tokens} drafts at a time"
    )
    print(f"{'steps':12}{'accepted, %':>24}{'tokens a second':>30}{'accuracy, %':>24}")
    print(
        f"{'':12}{FROZEN:>12}{TRAINED:>12}{FROZEN:>12}{TRAINED:>9}{NONE:>9}{FROZEN:>15}{TRAINED:>9}"
    )
    count = min(10, options.steps)
    middle = (options.steps - count) // 2
    for first in (0, middle, options.steps - count):
        part = {
            side: [row for row in rows if first < row["step"] <= first + count]
            for side, rows in records.items()
        }
        accepted = [100 * mean(part[side], ACCEPTED) for side in (FROZEN, TRAINED)]
        speed = [mean(part[side], SPEED) for side in SIDES]
        right = [100 * mean(part[side], ACCURACY) for side in (FROZEN, TRAINED)]
        print(
            f"{f'{first + 1}-{first + count}':12}{accepted[0]:12.1f}{accepted[1]:12.1f}"
            f"{speed[0]:12.0f}{speed[1]:9.0f}{speed[2]:9.0f}{right[0]:15.1f}{right[1]:9.1f}"
        )


def mean(records: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(record[name] for record in records)


if __name__ == "__main__":
    sys.exit(main())
