"""A run described in Python: `TrainerConfig`, and what else may stand where a configuration is wanted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megaverl.api.devices import Devices, device_map, parse_devices
from megaverl.api.world import as_started
from megaverl.config import Config, load_config
from megaverl.config.errors import InvalidConfig, Mistake
from megaverl.config.run import named_reward
from megaverl.config.yaml_source import COMMAND_LINE
from megaverl.errors import ConfigError

Reward = str | Callable[..., Any] | Mapping[str, Any]


@dataclass
class TrainerConfig:
    """The usual settings under their usual names; None leaves the default of the key it stands for.

    Everything else is set in `options`, under the keys of the YAML file (`megaverl keys`): nested, or dotted like
    {"actor.optimizer.clip_grad": 0.5}.

    Attributes:
        actor_model: Hugging Face folder, or org/name on a hub (model.path). Likewise critic_model, reference_model.
        reward_function: a built-in reward, "module:function", "file.py:function", or a function of an importable
            module.
        train_data, validation_data: files, patterns, folders or names of data sets.
        use_vllm: True: rollout.engine vllm; False: hf, plain transformers.
        actor_device_mapping: {"model": "cuda:0-3"}, "0-3" or [0, 1, 2, 3]: the role's ranks; likewise the others'.
        checkpoint_config: keys of the section `checkpoint`, such as {"save_interval": 10, "keep_last_k": 3,
            "async_save": True}.
        fsdp_config: refused, with what takes the place of FSDP here.
        log_with: one tracker or several: tensorboard, wandb, mlflow, swanlab, csv, jsonl.
    """

    algorithm: str = "ppo"
    actor_model: str | Path | None = None
    critic_model: str | Path | None = None
    reference_model: str | Path | None = None
    tokenizer: str | Path | None = None
    reward_function: Reward | Sequence[Reward] | None = None
    train_data: str | Path | Sequence[str | Path] | None = None
    validation_data: str | Path | Sequence[str | Path] | None = None
    total_steps: int | None = None
    prompts_per_step: int | None = None
    group_size: int | None = None
    learning_rate: float | None = None
    critic_learning_rate: float | None = None
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    rollout_tensor_parallel_size: int | None = None
    use_vllm: bool | None = None
    num_gpus: int | None = None
    actor_device_mapping: Devices = None
    critic_device_mapping: Devices = None
    reference_device_mapping: Devices = None
    reward_device_mapping: Devices = None
    rollout_device_mapping: Devices = None
    use_dynamic_batching: bool | None = None
    async_rollout: bool | None = None
    trust_remote_code: bool | None = None
    offload_folder: str | Path | None = None
    fsdp_config: Mapping[str, Any] | None = None
    checkpoint_config: Mapping[str, Any] | None = None
    log_with: str | Sequence[str] | None = None
    track_metrics: Sequence[str] | None = None
    output_dir: str | Path | None = None
    run_name: str | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """What a YAML file would hold, as nested mappings.

        Raises:
            ConfigError: lists every setting that cannot be read.
        """
        found: dict[str, Any] = {}
        mistakes = []
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is None:
                continue
            try:
                value = plain(CONVERT[name](value, name) if name in CONVERT else value, name)
            except ConfigError as error:
                mistakes.append(str(error))
                continue
            if value is not None:
                put(found, key, value)
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        for key, value in self.options.items():
            put(found, key, plain(value, key))
        return found

    def to_config(self, *, check_paths: bool = True) -> Config:
        """The checked configuration.

        Raises:
            ConfigError: lists every mistake under the key of the YAML file.
        """
        return resolve(self, check_paths=check_paths)


KEYS = {
    "algorithm": "algorithm.name",
    "actor_model": "model.path",
    "critic_model": "critic.path",
    "reference_model": "reference.path",
    "tokenizer": "model.tokenizer",
    "reward_function": "reward",
    "train_data": "data.train",
    "validation_data": "data.validation",
    "total_steps": "trainer.steps",
    "prompts_per_step": "data.prompts_per_step",
    "group_size": "algorithm.group_size",
    "learning_rate": "actor.optimizer.lr",
    "critic_learning_rate": "critic.optimizer.lr",
    "max_prompt_tokens": "data.max_prompt_tokens",
    "max_response_tokens": "rollout.sampling.max_tokens",
    "tensor_parallel_size": "actor.tp",
    "pipeline_parallel_size": "actor.pp",
    "rollout_tensor_parallel_size": "rollout.tp",
    "use_vllm": "rollout.engine",
    "num_gpus": "run.nproc",
    "actor_device_mapping": "placement.actor_devices",
    "critic_device_mapping": "placement.critic_devices",
    "reference_device_mapping": "placement.reference_devices",
    "reward_device_mapping": "placement.reward_devices",
    "rollout_device_mapping": "placement.rollout_devices",
    "use_dynamic_batching": "rollout.use_dynamic_batching",
    "async_rollout": "rollout.async_rollout",
    "trust_remote_code": "model.trust_remote_code",
    "offload_folder": "model.offload_folder",
    "fsdp_config": "fsdp_config",
    "checkpoint_config": "checkpoint",
    "log_with": "run.log_with",
    "track_metrics": "run.track_metrics",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
}


def reward_entry(value: Reward, where: str = "reward_function") -> dict[str, Any]:
    """One entry of the section `reward`.

    Raises:
        ConfigError: a function that other processes could not import.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return dict(named_reward(value))
    return {"function": importable_name(value, where)}


def importable_name(function: Callable[..., Any], where: str) -> str:
    """`module:name` or `file.py:name`, by which every rank finds a function.

    Raises:
        ConfigError: a lambda, a function inside another, or one typed at a prompt.
    """
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise ConfigError(
            f"{where}: {function!r} cannot be imported by other processes. Define it at the top level of a file and "
            "give the function, or its name as file.py:function."
        )
    if module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ConfigError(f"{where}: {name} was typed at a prompt. Put it into a file and name file.py:{name}.")
    return f"{Path(file).resolve()}:{name}"


def _rewards(value: Any, where: str) -> list[dict[str, Any]]:
    entries = value if isinstance(value, list | tuple) else [value]
    return [reward_entry(entry, where) for entry in entries]


def _several(value: Any, where: str) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str | Path | Mapping):
        raise ConfigError(f"{where}: found {value!r}; expected text, or a list of such.")
    return [value]


def _engine(value: Any, where: str) -> str:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: found {value!r}; expected True (vLLM) or False (plain transformers).")
    return "vllm" if value else "hf"


def _section(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f'{where}: found {value!r}; expected a mapping such as {{"save_interval": 10}}.')
    return dict(value)


def plain(value: Any, where: str) -> Any:
    """A value as a YAML file has it; paths become text.

    Raises:
        ConfigError: one that no file could hold, such as a model instead of its folder.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner, f"{where}.{key}") for key, inner in value.items()}
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
    "train_data": _several,
    "validation_data": _several,
    "log_with": _several,
    "track_metrics": _several,
    "use_vllm": _engine,
    "checkpoint_config": _section,
    **{name: parse_devices for name in KEYS if name.endswith("_device_mapping")},
}


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Lay `value` under a dotted key; mappings are merged, anything else is replaced."""
    *parents, last = key.split(".")
    for part in parents:
        inner = values.get(part)
        values[part] = dict(inner) if isinstance(inner, Mapping) else {}
        values = values[part]
    if isinstance(value, Mapping) and isinstance(values.get(last), Mapping):
        for inner_key, inner in value.items():
            put(values[last], inner_key, inner)
    else:
        values[last] = value


Description = Config | TrainerConfig | Mapping[str, Any] | str | Path


def resolve(description: Description, overrides: Sequence[str] = (), *, check_paths: bool = True) -> Config:
    """A checked configuration from whatever describes one: a file, a mapping, a TrainerConfig, or a Config.

    Where it says nothing of `placement`, what `set_device_map` was told counts.

    Raises:
        ConfigError: lists every mistake.
    """
    if isinstance(description, Config):
        if not overrides:
            return description
        description = description.to_dict()
    if isinstance(description, TrainerConfig):
        description = description.values()
    if not isinstance(description, str | Path | Mapping):
        raise ConfigError(
            f"config: found a {type(description).__name__}; expected a YAML file, a mapping, a TrainerConfig or a "
            "Config."
        )
    if isinstance(description, Mapping) and device_map() and not description.get("placement"):
        description = {**description, "placement": device_map()}
    try:
        with as_started():
            config = load_config(description, list(overrides), check_paths=check_paths)
            if config.placement.is_given or not device_map():
                return config
            more = [f"placement.{key}={ranks}" for key, ranks in device_map().items()]
            return load_config(description, [*overrides, *more], check_paths=check_paths)
    except InvalidConfig as error:
        source = str(description) if isinstance(description, str | Path) else "what was given"
        raise InvalidConfig(map(_of_a_program, error.mistakes), source) from None


def _of_a_program(mistake: Mistake) -> Mistake:
    """The same, where no command line was typed: with the setting of `TrainerConfig` that the key is."""
    if mistake.where not in ("", COMMAND_LINE):
        return mistake
    names = [name for name, key in KEYS.items() if f"{mistake.key}.".startswith(f"{key}.")]
    return replace(mistake, where=f"`{names[0]}` in Python" if names else "")


def get_ppo_config(**settings: Any) -> TrainerConfig:
    """A TrainerConfig for PPO, to be changed and handed to a trainer: `get_ppo_config(actor_model="models/small")`.

    Raises:
        ConfigError: a setting that there is not.
    """
    known = {each.name for each in fields(TrainerConfig)}
    if unknown := [name for name in settings if name not in known]:
        from megaverl.config.errors import did_you_mean

        hints = "".join(did_you_mean(name, known) for name in unknown)
        raise ConfigError(
            f"get_ppo_config: no setting {', '.join(unknown)}.{hints} Other keys go into options={{...}}."
        )
    return TrainerConfig(**{"algorithm": "ppo", **settings})
