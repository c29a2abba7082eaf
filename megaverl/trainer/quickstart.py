"""Quickstart: a tiny model learns from scratch to reverse numbers, with the same code as a 70B run.

If the recipe names an environment of the package, or its own rows, the model learns
that task instead. Tokenizer, model and data are created locally. A short supervised
warm-up teaches the format of an answer, and PPO the task.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import torch.distributed as dist

from megaverl.checkpoint.choice import likely_source
from megaverl.config import Config
from megaverl.data.sources import open_source
from megaverl.data.tasks import make_task, write_rows
from megaverl.data.tokenizers import load_tokenizer, train_sentencepiece
from megaverl.distributed.collectives import on_first_rank
from megaverl.monitoring.backends import read_metrics
from megaverl.monitoring.console import Console
from megaverl.monitoring.curves import plot_curves, text_curve
from megaverl.rollout.environments.games import EXAMPLES, example
from megaverl.trainer.build import Builder
from megaverl.trainer.job import Job
from megaverl.trainer.loop import Trainer
from megaverl.trainer.saving import export_model
from megaverl.trainer.supervised import warm_up
from megaverl.version import __version__

TASK = {"name": "reverse", "num_digits": 5, "num_train": 16384, "num_held_out": 256}
# Qwen3 with a head size of 32, the smallest that vLLM's CPU attention supports.
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def prepare(config: Config) -> None:
    """Create the inputs of the run from `run.seed`: data, tokenizer and a randomly initialized model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(config.run.dir) / config.run.name / "inputs"
    tokenizer = load_tokenizer(_prepare_data(config, folder))
    model_config = Qwen3Config(
        **MODEL,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    # Restored afterwards, so that the run's own random numbers do not depend on whether
    # the model was created here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        Qwen3ForCausalLM(model_config).save_pretrained(str(folder / "model"))
    tokenizer.save(folder / "model")


def make_inputs(config: Config) -> None:
    """Create the inputs once on each machine. The first process creates them while the others wait."""
    folder = Path(config.run.dir) / config.run.name / "inputs"
    marker, wanted = (
        folder / "made_of.json",
        json.dumps([__version__, config.run.seed, TASK, MODEL]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    # A lock works between processes of one machine, before any process group exists.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
            return
        marker.unlink(missing_ok=True)
        prepare(config)
        marker.write_text(wanted, encoding="utf-8")


def _prepare_data(config: Config, folder: Path) -> Path:
    """Write the rows of the task or environment, unless the configuration names its own. Train a tokenizer on them.

    Returns:
        Path of the tokenizer.
    """
    name = config.environment.name
    if any(Path(source.path).parent != folder for source in config.data.train):
        return _tokenizer_of_characters(config, folder / "tokenizer.model")
    if name not in EXAMPLES:
        task = make_task(**TASK, seed=config.run.seed)  # type: ignore[arg-type]
        task.save(folder)
        return task.train_tokenizer(folder / "tokenizer.model")
    rows = example(name, config.run.seed)
    write_rows(folder / "train.jsonl", rows.train)
    write_rows(folder / "held_out.jsonl", rows.held_out)
    write_rows(folder / "warm_up.jsonl", rows.warm_up)
    return train_sentencepiece(rows.texts(), folder / "tokenizer.model", vocab_size=64)


def _tokenizer_of_characters(config: Config, path: Path) -> Path:
    """Train a tokenizer on the characters of the configured rows. The common beginning of all prompts is one symbol."""
    sources = [
        open_source(source) for source in (*config.data.train, *config.sft.train)
    ]
    rows = [source[index] for source in sources for index in range(len(source))]
    prompts = [str(row[config.data.prompt_key]) for row in rows]
    beginning = os.path.commonprefix(prompts)
    texts = [prompt.removeprefix(beginning) for prompt in prompts] + [
        str(row[config.data.answer_key]) for row in rows
    ]
    symbols = [beginning] if beginning else []
    num_special = 4
    size = num_special + len(symbols) + len(set().union(*texts))
    return train_sentencepiece(texts, path, vocab_size=size, symbols=symbols)


def quickstart(config: Config, console: Console, job: Job) -> None:
    """Run warm-up and training, then print accuracy before and after, the curve, and the output paths.

    A run that resumes from a checkpoint skips the warm-up.
    """
    builder = Builder(config)
    warm = config.run_dir / "inputs" / "warm"
    if not on_first_rank(lambda: _goes_on(config, warm)):
        export_model(warm_up(config, builder, console, job), builder, warm)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(warm)})}
    )
    trainer = Trainer(config, console, job, Builder(config, builder.groups))
    trainer.train()
    if dist.get_rank() == 0:
        _report(trainer, console)


def _goes_on(config: Config, warm: Path) -> bool:
    """Return whether the run resumes from a checkpoint and has the model of its warm-up."""
    source = likely_source(config.checkpoint.resume, config.run_dir)
    return source is not None and (warm / "config.json").is_file()


def _report(trainer: Trainer, console: Console) -> None:
    """Print the results of the whole run, including the parts before interruptions."""
    records = [
        (int(record["step"]), record)
        for record in read_metrics(trainer.run_dir / "metrics.jsonl")
    ]

    def series(name: str) -> list[tuple[int, float]]:
        return [(step, metrics[name]) for step, metrics in records if name in metrics]

    held_out, training = series("validation/accuracy"), series("reward/accuracy")
    has_accuracy = bool(training)
    if not has_accuracy:  # no response can count as correct
        held_out, training = series("validation/reward"), series("reward/mean")
    metric, low, high = (
        ("accuracy", 0.0, 1.0) if has_accuracy else ("reward", None, None)
    )
    shown = "{:.1%}" if has_accuracy else "{:.3f}"
    picture = plot_curves(
        {"held out": held_out, "training": training},
        trainer.run_dir / "curve.png",
        metric,
    )
    console.print(
        text_curve(training, f"{metric} on training prompts", low=low, high=high)
    )
    if held_out:  # empty with trainer.validate_every=0
        console.print(
            f"{metric} on held-out prompts: {shown.format(held_out[0][1])} before, "
            f"{shown.format(held_out[-1][1])} after {held_out[-1][0]} steps of {trainer.config.algorithm.name}"
        )
    console.print(f"curve: {picture}")
    if trainer.config.checkpoint.export_hf:
        per_agent = (
            " for each agent" if trainer.config.environment.agents == "own" else ""
        )
        console.print(
            f"model: {trainer.run_dir / 'hf'} (Hugging Face folder{per_agent})"
        )
    console.print(f"everything else: megaverl report {trainer.run_dir}")
