"""Description of a run in Python: `TrainerConfig`, and conversion of other descriptions to a configuration."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from megaverl.config import Config, load_config
from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.run import LoopConfig, named_reward
from megaverl.config.wording import did_you_mean
from megaverl.config.yaml_source import COMMAND_LINE, Override, recipe
from megaverl.errors import ConfigError
from megaverl.trainer.api.devices import Devices, device_map, parse_devices
from megaverl.trainer.preflight import check_builds, check_packages
from megaverl.trainer.resuming import check_resume

# Settings of `get_ppo_config()` without arguments, applied to the quickstart's recipe:
# one process without vLLM, about half a minute.
SMALL_RUN: dict[str, dict[str, Any]] = {
    "run": {"name": "quickstart_ppo", "nproc": None},
    "actor": {"tp": 1, "optimizer": {"lr": 1e-3}},
    "rollout": {"engine": "hf", "sampling": {"max_tokens": 8}},
    "data": {"prompts_per_step": 16},
    "trainer": {"steps": 25},
}

# Environment variables that a job of this single process has set, because torchrun did
# not.
JOB_OF_ONE: dict[str, str] = {}

Reward = str | Callable[..., Any] | Mapping[str, Any]


@dataclass
class TrainerConfig:
    """Common settings under their usual names. None keeps the default of the corresponding key.

    All other settings go into `options` under the keys of the YAML file (`megaverl
    keys`), either nested or dotted like {"actor.optimizer.clip_grad": 0.5}.

    Attributes:
        max_steps: number of steps of the whole run. `total_steps` is an alias.
        actor_model: Hugging Face folder, or org/name on a hub (model.path). critic_model and reference_model alike.
        reward_function: a built-in reward, "module:function", "file.py:function", a function of an importable module,
            or a name that one of `reward_modules` registers (`register_reward`).
        train_data, validation_data: files, patterns, folders or names of data sets.
        use_vllm: True for rollout.engine=vllm, False for hf (plain transformers).
        actor_device_mapping: ranks of the role, as {"model": "cuda:0-3"}, "0-3" or [0, 1, 2, 3]. Other roles alike.
        checkpoint_config: keys of the section `checkpoint`, such as {"save_interval": 10, "keep_last_k": 3,
            "async_save": True}.
        fsdp_config: train with FSDP2 (actor.engine) under these settings: {"sharding_strategy": "FULL_SHARD",
            "cpu_offload": False, "mixed_precision": True}, and keys of actor.fsdp.
        log_with: one or several trackers: tensorboard, wandb, mlflow, swanlab, trackio, csv, jsonl.
        may_be_small: without a model and data, describe the small run of `get_ppo_config`.

    Example:
        config = TrainerConfig(actor_model="models/small", train_data="train.jsonl", reward_function="exact_match")
        RLTrainer(config, max_steps=100).train()
    """

    algorithm: Annotated[str, "algorithm.name"] = "ppo"
    actor_model: Annotated[str | Path | None, "model.path"] = None
    critic_model: Annotated[str | Path | None, "critic.path"] = None
    reference_model: Annotated[str | Path | None, "reference.path"] = None
    tokenizer: Annotated[str | Path | None, "model.tokenizer"] = None
    reward_function: Annotated[Reward | Sequence[Reward] | None, "reward"] = None
    reward_modules: Annotated[
        str | Path | Sequence[str | Path] | None, "reward_modules"
    ] = None
    train_data: Annotated[str | Path | Sequence[str | Path] | None, "data.train"] = None
    validation_data: Annotated[
        str | Path | Sequence[str | Path] | None, "data.validation"
    ] = None
    max_steps: Annotated[int | None, "trainer.steps"] = None
    prompts_per_step: Annotated[int | None, "data.prompts_per_step"] = None
    group_size: Annotated[int | None, "algorithm.group_size"] = None
    learning_rate: Annotated[float | None, "actor.optimizer.lr"] = None
    critic_learning_rate: Annotated[float | None, "critic.optimizer.lr"] = None
    max_prompt_tokens: Annotated[int | None, "data.max_prompt_tokens"] = None
    max_response_tokens: Annotated[int | None, "rollout.sampling.max_tokens"] = None
    tensor_parallel_size: Annotated[int | None, "actor.tp"] = None
    pipeline_parallel_size: Annotated[int | None, "actor.pp"] = None
    rollout_tensor_parallel_size: Annotated[int | None, "rollout.tp"] = None
    use_vllm: Annotated[bool | None, "rollout.engine"] = None
    num_gpus: Annotated[int | None, "run.nproc"] = None
    actor_device_mapping: Annotated[Devices, "placement.actor_devices"] = None
    critic_device_mapping: Annotated[Devices, "placement.critic_devices"] = None
    reference_device_mapping: Annotated[Devices, "placement.reference_devices"] = None
    reward_device_mapping: Annotated[Devices, "placement.reward_devices"] = None
    rollout_device_mapping: Annotated[Devices, "placement.rollout_devices"] = None
    use_dynamic_batching: Annotated[bool | None, "rollout.use_dynamic_batching"] = None
    async_rollout: Annotated[bool | None, "rollout.async_rollout"] = None
    trust_remote_code: Annotated[bool | None, "model.trust_remote_code"] = None
    offload_folder: Annotated[str | Path | None, "model.offload_folder"] = None
    fsdp_config: Annotated[Mapping[str, Any] | None, "fsdp_config"] = None
    checkpoint_config: Annotated[Mapping[str, Any] | None, "checkpoint"] = None
    log_with: Annotated[str | Sequence[str] | None, "run.log_with"] = None
    track_metrics: Annotated[Sequence[str] | None, "run.track_metrics"] = None
    output_dir: Annotated[str | Path | None, "run.dir"] = None
    run_name: Annotated[str | None, "run.name"] = None
    seed: Annotated[int | None, "run.seed"] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    may_be_small: bool = field(default=False, init=False)
    total_steps: InitVar[int | None] = None

    def __post_init__(self, total_steps: int | None) -> None:
        if total_steps is None:
            return
        if self.max_steps not in (None, total_steps):
            raise ConfigError(
                f"max_steps={self.max_steps} and total_steps={total_steps} are the same setting. Give one of them."
            )
        self.max_steps = total_steps

    def values(self) -> dict[str, Any]:
        """Return the settings as the nested mappings of a YAML file.

        Raises:
            ConfigError: lists every setting that cannot be converted.
        """
        overrides: dict[str, Any] = {}
        mistakes = []
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                value = plain(
                    CONVERT[name](value, name) if name in CONVERT else value, name
                )
            except ConfigError as error:
                mistakes.append(str(error))
                continue
            if value is not None:
                put(overrides, key, value)
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        for key, value in self.options.items():
            put(overrides, key, plain(value, key))
        return overrides

    def to_config(self, *, check_paths: bool = True) -> Config:
        """Return the checked configuration.

        Raises:
            ConfigError: lists every mistake under its key in the YAML file.
        """
        return resolve(self, check_paths=check_paths)


# `total_steps` is only an argument of the constructor (InitVar). The property makes it
# readable and writable as well.
_TOTAL_STEPS = property(
    lambda self: self.max_steps, lambda self, value: setattr(self, "max_steps", value)
)
setattr(TrainerConfig, "total_steps", _TOTAL_STEPS)  # noqa: B010 - not a field to mypy
SETTINGS = tuple(inspect.signature(TrainerConfig).parameters)
KEYS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TrainerConfig, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def reward_entry(value: Reward, where: str = "reward_function") -> dict[str, Any]:
    """Return one entry of the section `reward`.

    Args:
        where: name of the setting, for messages.

    Raises:
        ConfigError: the value is a function that other processes cannot import.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return dict(named_reward(value))
    return {"function": importable_name(value, where)}


def importable_name(function: Callable[..., Any], where: str) -> str:
    """Return `module:name` or `file.py:name`, by which every rank can import a function.

    Raises:
        ConfigError: the function is a lambda, is nested in another, or was typed at a prompt.
    """
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    # A lambda or nested function has a qualified name that is no attribute of its
    # module.
    if (
        module is None
        or not name.isidentifier()
        or getattr(module, name, None) is not function
    ):
        raise ConfigError(
            f"{where}: {function!r} cannot be imported by other processes. Define it at the top level of a file and "
            "give the function, or its name as file.py:function."
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(
            f"{where}: {name} was typed at a prompt. Put it into a file and name file.py:{name}."
        )
    return f"{Path(file).resolve()}:{name}"


def _rewards(value: Any, where: str) -> list[dict[str, Any]]:
    entries = value if isinstance(value, list | tuple) else [value]
    return [reward_entry(entry, where) for entry in entries]


def _several(value: Any, where: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str | Path | Mapping):
        raise ConfigError(
            f"{where}: found {value!r}; expected text, or a list of such."
        )
    return [value]


def _engine(value: Any, where: str) -> str:
    if not isinstance(value, bool):
        raise ConfigError(
            f"{where}: found {value!r}; expected True (vLLM) or False (plain transformers)."
        )
    return "vllm" if value else "hf"


def _section(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f'{where}: found {value!r}; expected a mapping such as {{"save_interval": 10}}.'
        )
    return dict(value)


def plain(value: Any, where: str) -> Any:
    """Return a value in the form of a YAML file. Paths become text.

    Raises:
        ConfigError: a file cannot contain the value, such as a model object instead of its folder.
    """
    if isinstance(value, Mapping):
        return {
            str(key): plain(inner, f"{where}.{key}") for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(inner, where) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(
        f"{where}: found a {type(value).__name__}; expected text (a folder, org/name), a number, a list or a mapping: "
        "every rank reads it out of a file."
    )


CONVERT: dict[str, Callable[[Any, str], Any]] = {
    "reward_function": _rewards,
    "reward_modules": _several,
    "train_data": _several,
    "validation_data": _several,
    "log_with": _several,
    "track_metrics": _several,
    "use_vllm": _engine,
    "checkpoint_config": _section,
    **{name: parse_devices for name in KEYS if name.endswith("_device_mapping")},
}


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `value` under a dotted key in place. Mappings are merged, other values are replaced."""
    *parents, last = key.split(".")
    for part in parents:
        inner = values.get(part)
        # Copy the mapping, so that the caller's is not changed.
        values[part] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[part]
    if isinstance(value, Mapping) and isinstance(values.get(last), Mapping):
        for inner_key, inner in value.items():
            put(values[last], inner_key, inner)
    else:
        values[last] = value


Description = Config | TrainerConfig | Mapping[str, Any] | str | Path


def resolve(
    description: Description,
    overrides: Sequence[Override] = (),
    *,
    check_paths: bool = True,
) -> Config:
    """Return the checked configuration of a YAML file, a mapping, a TrainerConfig or a Config.

    A configuration without its own `placement` gets that of `set_device_map`.

    Raises:
        ConfigError: lists every mistake.
    """
    if isinstance(description, Config):
        if not overrides:
            return description
        description = description.to_dict()
    if isinstance(description, TrainerConfig):
        values = description.values()
        if description.may_be_small and not _names_inputs(values):
            # Settings of the user override those of the small run.
            description, overrides = (
                recipe("quickstart"),
                [*as_overrides(SMALL_RUN), *as_overrides(values), *overrides],
            )
            if check_paths:
                _make_inputs(load_config(description, overrides, check_paths=False))
        else:
            description = values
    if not isinstance(description, str | Path | Mapping):
        raise ConfigError(
            f"config: found a {type(description).__name__}; expected a YAML file, a mapping, a TrainerConfig or a "
            "Config."
        )
    if (
        isinstance(description, Mapping)
        and device_map()
        and not description.get("placement")
    ):
        description = {**description, "placement": device_map()}
    try:
        with as_started():
            config = load_config(description, list(overrides), check_paths=check_paths)
            # A `placement` in a file has precedence over `set_device_map`, and is known
            # only after loading.
            if config.placement.is_given or not device_map():
                return config
            more = [f"placement.{key}={ranks}" for key, ranks in device_map().items()]
            return load_config(
                description, [*overrides, *more], check_paths=check_paths
            )
    except InvalidConfig as error:
        source = (
            str(description)
            if isinstance(description, str | Path)
            else "what was given"
        )
        raise InvalidConfig(map(name_python_setting, error.mistakes), source) from None


def _make_inputs(config: Config) -> None:
    """Create the inputs of `get_ppo_config`'s small run, if this environment can run it.

    Raises:
        ConfigError: packages are missing, or the run cannot resume from its checkpoint with these settings.
    """
    with as_started():
        check_builds()
        check_packages(config, "train")
        # Ranks compare their settings with the checkpoint's collectively, later.
        if "RANK" not in os.environ:
            check_resume(config, "train")
    from megaverl.trainer.quickstart import make_inputs

    make_inputs(config)


def name_python_setting(mistake: ConfigIssue) -> ConfigIssue:
    """Return a mistake that names the setting of `TrainerConfig` instead of a command-line option."""
    if mistake.where not in ("", COMMAND_LINE):
        return mistake
    names = [
        name for name, key in KEYS.items() if f"{mistake.key}.".startswith(f"{key}.")
    ]
    return replace(mistake, where=f"`{names[0]}` in Python" if names else "")


def _names_inputs(values: Mapping[str, Any]) -> bool:
    """Return whether a model or training data is named, under either key of the YAML file."""
    named = {"model": ("path", "pretrain_model_path"), "data": ("train", "train_path")}
    sections = [(values.get(section), keys) for section, keys in named.items()]
    return any(
        isinstance(section, str) or any(key in section for key in keys)
        for section, keys in sections
        if section
    )


def as_overrides(values: Mapping[str, Any], inside: str = "") -> list[Override]:
    """Return nested mappings as dotted keys and values, so that only these keys count as set by the user."""
    overrides: list[Override] = []
    for key, value in values.items():
        # A mapping whose keys are no identifiers is a value, not a nested section.
        if (
            isinstance(value, Mapping)
            and value
            and all(name.isidentifier() for name in value)
        ):
            overrides += as_overrides(value, f"{inside}{key}.")
        else:
            overrides.append((f"{inside}{key}", value))
    return overrides


def refuse_unknown(names: Iterable[str], caller: str = "") -> None:
    """Check that all names are fields of `TrainerConfig`.

    Args:
        caller: start of the message.

    Raises:
        ConfigError: lists the unknown names, with similar ones.
    """
    if unknown := [name for name in names if name not in SETTINGS]:
        hints = "".join(did_you_mean(name, SETTINGS) for name in unknown)
        raise ConfigError(
            f"{caller}no setting {', '.join(unknown)}.{hints} Keys of the YAML file go into options={{...}}."
        )


def get_ppo_config(**settings: Any) -> TrainerConfig:
    """Return a TrainerConfig for PPO, such as `get_ppo_config(actor_model="models/small")`.

    Without a model and data it describes a small run of the quickstart's task, in one
    process and without vLLM. Tokenizer, model and data are then created in the run's
    folder. `max_steps` is always set to a number.

    Raises:
        ConfigError: a setting does not exist.
    """
    refuse_unknown(settings, "get_ppo_config: ")
    config = TrainerConfig(**{"algorithm": "ppo", **settings})
    config.may_be_small = True
    if config.max_steps is None:
        values = config.values()
        default = (
            LoopConfig.model_fields["steps"].default
            if _names_inputs(values)
            else SMALL_RUN["trainer"]["steps"]
        )
        config.max_steps = values.get("trainer", {}).get("steps", default)
    return config


@contextmanager
def as_started() -> Iterator[None]:
    """Hide the environment variables that a job of this single process has set.

    They describe only this job and must not influence the configuration of the next
    trainer.
    """
    hidden = {name: os.environ.pop(name) for name in JOB_OF_ONE if name in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden
