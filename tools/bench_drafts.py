"""Accepted drafts over steps of RL, and decode speed after them, with a frozen and with a trained draft model.

    python tools/bench_drafts.py [--method eagle3|mtp] [--steps 100 --out FOLDER]

A random Qwen3 and a draft model of one layer are first trained on the same rows by `megaverl sft`, until they know the
form of an answer. With `--method eagle3` or `mtp`, the drafts come from a head instead, which first trains on responses
of the policy while the policy does not change. Two runs of GRPO follow from the same weights and seed: `frozen` never
changes the draft model or head, and `trained` trains it with the policy (`draft.train`). The acceptance is
`rollout/draft_acceptance_rate`.

Then the policy of the run `trained` generates without drafts, with the draft model from before the run, and with the
trained one. The speed is that of the fastest of several rounds, because other processes only make a round slower.

A run that has ended is not repeated, and one that was interrupted is resumed: call the command again with the same
`--out`. `--only` restricts a call to one part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

PREPARE, FROZEN, TRAINED, REPORT = "prepare", "frozen", "trained", "report"
SIDES = (FROZEN, TRAINED)
DRAFT_MODEL = "draft_model"
# vLLM's method -> beginning of the names of its folders and runs.
HEADS = {"eagle3": "head", "mtp": "mtp_head"}
# A learning rate at which no weight of the policy changes in float32.
STILL = 1e-12
ACCEPTED = "rollout/draft_acceptance_rate"
REWARD = "reward/mean"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.out is not None:
        return measure(options, options.out)
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, Path(folder))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--method", choices=(DRAFT_MODEL, *HEADS), default=DRAFT_MODEL)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder that keeps models and runs")
    parser.add_argument("--only", choices=(PREPARE, *SIDES, REPORT))
    parser.add_argument("--digits", type=int, default=8, help="to reverse")
    parser.add_argument("--layers", type=int, default=8, help="of the policy")
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--group", type=int, default=8, help="responses a prompt")
    parser.add_argument("--tokens", type=int, default=3, help="drafts at a time")
    parser.add_argument("--sft-steps", type=int, default=120, help="of both models")
    parser.add_argument(
        "--head-steps", type=int, default=60, help="of a head before the runs"
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="of the policy")
    parser.add_argument("--draft-lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=20, help="of generation")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run what is missing in `folder`, and print the tables when both runs have ended."""
    prepare(options, folder)
    for side in SIDES:
        if options.only in (None, side):
            run_side(options, folder, side)
    if options.only in (None, REPORT):
        report(options, folder)
        report_speed(options, folder)
    return 0


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Create data, tokenizer and both models, and train each model on the rows' answers."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.new_heads import make_draft_head
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
        if name == "draft" and options.method in HEADS:
            continue
        if not (folder / name / "hf").is_dir():
            run("sft", folder, name, source, [stage])
    if head := HEADS.get(options.method):
        random = folder / f"{head}_random"
        if not random.is_dir():
            make_draft_head(random, folder / "policy" / "hf", method=options.method)
        train(options, folder, head, random, options.head_steps)


def prepared_draft(options: argparse.Namespace, folder: Path) -> Path:
    """Return the draft model or head that both runs start from."""
    head = HEADS.get(options.method)
    return folder / ("draft/hf" if head is None else f"{head}/hf_draft")


def run_of(options: argparse.Namespace, side: str) -> str:
    """Return the name of a run, which differs by method so that both can share the policy."""
    head = HEADS.get(options.method)
    return side if head is None else f"{head}_{side}"


def run_side(options: argparse.Namespace, folder: Path, side: str) -> None:
    """Run GRPO from the prepared policy, unless it has ended before."""
    name, draft = run_of(options, side), prepared_draft(options, folder)
    train(options, folder, name, draft, options.steps)


def train(
    options: argparse.Namespace, folder: Path, name: str, draft: Path, steps: int
) -> None:
    """Run GRPO with a draft model or head, unless it has ended before.

    The run named in `HEADS` trains the head and no policy, and runs of the side `frozen` train
    the policy alone.
    """
    if (folder / name / "hf").is_dir():
        return
    drafts = f"{{method: {options.method}, model: {draft}, num_speculative_tokens: {options.tokens}}}"
    settings = [
        f"algorithm={{name: grpo, group_size: {options.group}}}",
        f"actor.optimizer.lr={STILL if name in HEADS.values() else options.lr}",
        f"rollout.sampling={{temperature: 1.0, max_tokens: {options.digits + 4}}}",
        "reward=[{name: exact_match}, {name: positions}]",
        f"trainer={{steps: {steps}, validate_every: 0}}",
        "checkpoint={save_interval: 20, keep_last_k: 1, resume: unfinished}",
    ]
    settings.append(f"rollout.vllm.speculative_config={drafts}")
    if not name.endswith(FROZEN):
        engine = ", engine: fsdp" if options.method in HEADS else ""
        optimizer = f"optimizer: {{lr: {options.draft_lr}}}"
        settings.append(f"draft={{train: true, {optimizer}{engine}}}")
    settings.append(f"data.prompts_per_step={options.prompts}")
    run("train", folder, name, "policy/hf", settings, seed=options.seed)


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

    print(
        f"GRPO on reversing {options.digits} digits, {options.prompts} x {options.group} responses a step; a policy of "
        f"{options.layers} layers, a {options.method} of one, {options.tokens} drafts at a time"
    )
    print(f"{'':12}{'accepted, %':>24}{'mean reward':>24}")
    print(f"{'steps':12}{FROZEN:>12}{TRAINED:>12}{FROZEN:>12}{TRAINED:>12}")
    records = {
        side: list(read_metrics(folder / run_of(options, side) / "metrics.jsonl"))
        for side in SIDES
    }
    count = min(10, options.steps)
    starts = [(options.steps - count) * quarter // 4 for quarter in range(5)]
    for first in starts:
        part = {
            side: [row for row in rows if first < row["step"] <= first + count]
            for side, rows in records.items()
        }
        accepted = [100 * mean(part[side], ACCEPTED) for side in SIDES]
        rewards = [mean(part[side], REWARD) for side in SIDES]
        print(
            f"{f'{first + 1}-{first + count}':12}{accepted[0]:12.1f}{accepted[1]:12.1f}"
            f"{rewards[0]:12.3f}{rewards[1]:12.3f}"
        )


def report_speed(options: argparse.Namespace, folder: Path) -> None:
    """Generate with the trained policy, and print tokens a second without drafts and with each draft model."""
    drafts = {
        "none": None,
        FROZEN: prepared_draft(options, folder),
        TRAINED: folder / run_of(options, TRAINED) / "hf_draft",
    }
    start_one_rank()
    speeds: dict[tuple[str, int], float] = {}
    accepted: dict[tuple[str, int], float] = {}
    # Twice, so that other processes slow down all of them or none.
    for name, path in [*drafts.items()] * 2:
        for count, speed, share in decode(options, folder, path):
            speeds[name, count] = max(speed, speeds.get((name, count), 0.0))
            accepted[name, count] = share
    print(f"{'drafts':12}{'sequences':>12}{'tokens/s':>12}{'accepted, %':>14}")
    for (name, count), speed in speeds.items():
        print(f"{name:12}{count:12}{speed:12.0f}{100 * accepted[name, count]:14.1f}")


def decode(
    options: argparse.Namespace, folder: Path, draft: Path | None
) -> list[tuple[int, float, float]]:
    """Generate answers to the held-out prompts with one engine, for several numbers of sequences at once.

    Returns:
        Number of sequences, tokens a second in the fastest round, and share of accepted drafts (0 without drafts).
    """
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.rollout.engine import SamplingOptions, SavedWork
    from megaverl.rollout.vllm_engine import VLLMEngine
    from megaverl.rollout.vllm_options import VLLMOptions

    policy = folder / run_of(options, TRAINED) / "hf"
    tokenizer = load_tokenizer(policy)
    lines = (folder / "held_out.jsonl").read_text().splitlines()
    prompts = [
        tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=True)
        for line in lines
    ]
    speculation: dict[str, Any] = {
        "method": options.method,
        "model": str(draft),
        "num_speculative_tokens": options.tokens,
    }
    engine = VLLMEngine(
        policy,
        RolloutConfig(vllm={"speculative_config": speculation} if draft else {}),
        VLLMOptions(
            seed=options.seed,
            dtype=torch.float32,
            max_model_len=32 + options.digits + 4,
            stop_token_ids=tuple(tokenizer.stop_token_ids),
            num_sequences=64,
        ),
    )
    sampling = SamplingOptions(max_tokens=options.digits + 4, temperature=1.0)
    measured = []
    for count in (1, 8, 64):
        best, engine.saved_work = 0.0, SavedWork()
        # The first round warms up.
        for number in range(1 + options.rounds):
            chosen = [
                prompts[(number * count + i) % len(prompts)] for i in range(count)
            ]
            started = time.perf_counter()
            answers = engine.generate(chosen, sampling, range(count))
            seconds = time.perf_counter() - started
            tokens = sum(len(answer.token_ids) for answer in answers)
            best = max(best, tokens / seconds if number else 0.0)
        work = engine.saved_work
        share = work.accepted_tokens / max(1, work.draft_tokens)
        measured.append((count, best, share))
    engine.close()
    return measured


def mean(records: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(record[name] for record in records)


if __name__ == "__main__":
    sys.exit(main())
