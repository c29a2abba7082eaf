"""Entry point of a rank: redirects output to its log, joins the job and runs the command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megaverl.checkpoint.training_state import seed_generators
from megaverl.config import Config
from megaverl.config.absolute import with_absolute_paths
from megaverl.distributed.collectives import barrier, on_first_rank
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import ConfigError, DataError, TrainingStopped
from megaverl.monitoring.console import Console, redirect_output
from megaverl.monitoring.tracker import write_versions
from megaverl.planner.candidates import write_choice
from megaverl.planner.placed_run import with_engine_share
from megaverl.platform import platform
from megaverl.rollout import sample_seed
from megaverl.rollout.engine import sampling_options
from megaverl.trainer.job import Job, Leaving, PlacementCheck, join_job
from megaverl.trainer.preflight import check_in_ranks
from megaverl.user_code import exits_fail

if TYPE_CHECKING:
    from megaverl.data.datasets import PromptRecord
    from megaverl.data.prompts import EncodedPrompt
    from megaverl.trainer.build import Builder


def main(
    config: Config,
    command: str,
    options: Mapping[str, Any] | None = None,
    check: PlacementCheck | None = None,
    *,
    checks_files: bool = True,
) -> int:
    """Run `command` (a key of `COMMANDS`) on this rank.

    Errors are raised. The calling process shows them and exits.

    Args:
        options: options of the command line that are not part of the configuration.
        check: check of the placement before anything is built, with the same result on every rank.
        checks_files: whether to check code and data first, if the starting command has not.

    Returns:
        Exit status: 0, or the code of `Leaving` if the run has saved and left.
    """
    rank = int(os.environ.get("RANK", 0))
    config = with_absolute_paths(config)
    options = {
        name: _absolute_option(name, value) for name, value in (options or {}).items()
    }
    # From here on everything that libraries print goes to the rank's log.
    console = redirect_output(config.run_dir / "logs", rank)
    platform.start()
    job = join_job(config, command, console, check)
    if command in ("train", "quickstart") and not config.trainer.rollout_only:
        config = with_engine_share(config, job.context.placement)
    try:
        with exits_fail():
            if checks_files:
                job.connection.status("checking code and data")
                check_in_ranks(config, command, job.context.control)
            code = _do(config, command, console, job, options)
    except BaseException as error:
        # If a rank is lost, each other rank fails in its own way. Report the common
        # cause instead.
        if verdict := job.connection.explain(error):
            raise TrainingStopped(verdict) from error
        raise
    # All ranks have finished before any leaves. Otherwise the others would report it as
    # lost.
    barrier(job.context.control)
    job.connection.leave()
    if code == 0:
        job.context.messages.close()
        dist.destroy_process_group()
    return code


def _absolute_option(name: str, value: Any) -> Any:
    return (
        str(Path(value).absolute())
        if name in ("prompts", "output", "against") and value
        else value
    )


def _do(
    config: Config, command: str, console: Console, job: Job, options: dict[str, Any]
) -> int:
    seed_generators(config.run.seed)
    on_first_rank(
        lambda: prepare_folder(config.run_dir, config, command), job.context.control
    )
    for warning in config.warnings:
        console.warn(warning)
    for choice in config.choices:
        console.print(choice)
    try:
        COMMANDS[command](config, console, job, **options)
    except Leaving as leaving:
        console.print(str(leaving))
        return leaving.code
    return 0


def prepare_folder(run_dir: Path, config: Config, command: str) -> None:
    """Create the run folder and write the configuration and the versions that this command runs with.

    Raises:
        ConfigError: the folder is not writable.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / f"{command}.yaml").write_text(config.to_yaml(), encoding="utf-8")
        # A resumed run on the same number of ranks reads this choice again.
        if config.chosen:
            world = int(os.environ.get("WORLD_SIZE", "1"))
            write_choice(config, world, config.chosen)
        write_versions(run_dir)
    except OSError as error:
        raise ConfigError(
            f"run.dir: {run_dir} cannot be written ({error}). Name another folder."
        ) from error


def _train(config: Config, console: Console, job: Job) -> None:
    if config.trainer.rollout_only:
        from megaverl.trainer.rollouts_only import generate_only

        generate_only(config, console, job)
        return
    from megaverl.trainer.loop import Trainer

    Trainer(config, console, job).train()


def _sft(config: Config, console: Console, job: Job) -> None:
    from megaverl.trainer.supervised import SFTTrainer

    SFTTrainer(
        config, _offline_builder(config, config.sft.max_answer_tokens), console, job
    ).train()


def _dpo(config: Config, console: Console, job: Job) -> None:
    from megaverl.trainer.preferences import PreferenceTrainer

    builder = _offline_builder(config, config.preference.max_response_tokens)
    PreferenceTrainer(config, builder, console, job).train()


def _reward(config: Config, console: Console, job: Job) -> None:
    from megaverl.trainer.preferences import RewardModelTrainer

    builder = _offline_builder(config, config.preference.max_response_tokens)
    RewardModelTrainer(config, builder, console, job).train()


def _offline_builder(config: Config, longest: int | None) -> Builder:
    """Create the builder of a stage on rows, whose longest response replaces that of sampling.

    Args:
        longest: maximum tokens of a response in the rows, or None to keep the limit of generated responses.
    """
    from megaverl.trainer.build import Builder

    if longest is not None:
        sampling = {**config.rollout.sampling, "max_tokens": longest}
        rollout = config.rollout.model_copy(update={"sampling": sampling})
        config = config.model_copy(update={"rollout": rollout})
    return Builder(config)


def _eval(
    config: Config, console: Console, job: Job, *, against: str | None = None
) -> None:
    from megaverl.trainer.build import Builder
    from megaverl.trainer.evaluation import evaluate

    evaluate(Builder(config), console, job, against=against)


def _generate(
    config: Config,
    console: Console,
    job: Job,
    *,
    prompt: Sequence[str] | None = None,
    prompts: str | None = None,
    output: str | None = None,
) -> None:
    from megaverl.trainer.build import Builder

    builder = Builder(config)
    encoder = builder.encoder()
    records: list[PromptRecord | EncodedPrompt] = []
    images: list[Sequence[SharedItem]] = []
    if prompts:
        dataset = builder.dataset([prompts], needs_answer=False)
        rows = [dataset[i] for i in range(len(dataset))]
        records += rows
        images += [row.images or () for row in rows]
    for text in prompt or ():
        if (encoded := encoder.encode(text, "--prompt")) is not None:
            records.append(encoded)
            images.append(())
    if not records:
        raise DataError("no prompts: give --prompt TEXT or --prompts FILE.")
    rollout = builder.rollout(None)
    generations = rollout.generate(
        [record.token_ids for record in records],
        sampling_options(config.rollout.sampling),
        [sample_seed(config.run.seed, 0, i) for i in range(len(records))],
        images=images if any(images) else None,
    )
    responses = [
        builder.tokenizer.decode(generation.token_ids) for generation in generations
    ]

    def write() -> None:
        lines = (
            {
                "prompt": record.text,
                "response": response,
                "finish_reason": generation.finish_reason,
            }
            for record, response, generation in zip(
                records, responses, generations, strict=True
            )
        )
        Path(str(output)).write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines),
            encoding="utf-8",
        )

    if output:
        on_first_rank(write)
        console.print(f"{len(responses)} responses written to {output}")
    else:
        for record, response in zip(records, responses, strict=True):
            console.print(f"{record.text}\n  -> {response}\n")


def _quickstart(config: Config, console: Console, job: Job) -> None:
    from megaverl.trainer.quickstart import quickstart

    quickstart(config, console, job)


def _tinker(config: Config, console: Console, job: Job) -> None:
    from megaverl.trainer.tinker.command import serve_tinker

    serve_tinker(config, console, job)


# Options of the command line that are not part of the configuration are keywords.
COMMANDS: dict[str, Callable[..., None]] = {
    "train": _train,
    "sft": _sft,
    "dpo": _dpo,
    "reward": _reward,
    "eval": _eval,
    "generate": _generate,
    "quickstart": _quickstart,
    "tinker": _tinker,
}
