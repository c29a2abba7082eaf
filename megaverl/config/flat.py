"""The flat form of a configuration, as other trainers write it, turned into this project's keys.

    algorithm: {name: ppo, clip_range: 0.2, value_loss_coef: 0.5}
    model: {pretrain_model_path: models/small, reward_function: exact_match}
    data: {train_path: train.jsonl, batch_size_per_gpu: 8}
    engine: {actor_type: vllm, critic_type: megatron, num_gpus: 4}
    placement: {actor_devices: [0, 1, 2], critic_devices: [3]}

Both forms may stand in one file; a key that is said twice, once in each form, is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megaverl.config.errors import did_you_mean, found, listed
from megaverl.config.yaml_source import Key, YamlSource

ENGINES = {"vllm": "vllm", "hf": "hf", "huggingface": "hf", "transformers": "hf"}
MISSING = object()


class Flat(NamedTuple):
    """A flat key: which key it is here, and what becomes of its value."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


def _engine(value: Any) -> Any:
    if value not in ENGINES:
        raise ValueError(f"found {found(value)}; allowed: {listed(ENGINES)} (who generates; training is megatron's).")
    return ENGINES[value]


def _no_fsdp(value: Any) -> Any:
    raise ValueError(
        "training is Megatron-core's, without FSDP. Leave it out. Optimizer state is split over the data-parallel "
        "ranks as it is (actor.ddp.use_distributed_optimizer), weights by actor.tp and actor.pp (tensor_parallel_size "
        "and pipeline_parallel_size in Python); actor.offload moves out what is not in use."
    )


FLAT: dict[str, Flat] = {
    "model.pretrain_model_path": Flat("model.path"),
    "model.tokenizer_path": Flat("model.tokenizer"),
    "model.critic_model_path": Flat("critic.path"),
    "model.reference_model_path": Flat("reference.path"),
    "reward.modules": Flat("reward_modules"),
    "model.reward_function": Flat("reward"),
    "data.train_path": Flat("data.train"),
    "data.validation_path": Flat("data.validation"),
    "data.batch_size_per_gpu": Flat("data.prompts_per_step"),  # times engine.num_gpus
    "engine.actor_type": Flat("rollout.engine", _engine),
    "engine.num_gpus": Flat("run.nproc"),
    "engine.critic_type": Flat(""),  # only checked
    "fsdp_config": Flat("", _no_fsdp),
    "checkpoint_config": Flat("checkpoint"),
    "log_with": Flat("run.log_with"),
    "output_dir": Flat("run.dir"),
    "seed": Flat("run.seed"),
}
PER_GPU, NUM_GPUS, CRITIC = "data.batch_size_per_gpu", "engine.num_gpus", "engine.critic_type"


def translate(source: YamlSource) -> None:
    """Put every flat key of `source.values` under its own key here; mistakes are noted, not raised.

    A key's place goes along, so that a later mistake names the line and the word that the person wrote.
    """
    engine = source.values.get("engine", {})
    _check_engine(source, engine)
    num_gpus = engine.get("num_gpus") if isinstance(engine, dict) else None
    for name, (key, convert) in FLAT.items():
        value = _take(source.values, name.split("."))
        if value is MISSING:
            continue
        try:
            value = _per_gpu(value, num_gpus) if name == PER_GPU else convert(value)
        except ValueError as error:
            source.add(name, str(error))
            continue
        if name == CRITIC:
            if value != "megatron":
                source.add(name, f"found {found(value)}; allowed: megatron, which trains actor and critic.")
            continue
        existing = _get(source.values, key.split("."))
        over = 1 if existing is MISSING else source.layer(name) - source.layer(key)
        if over == 0:
            source.add(name, f"is set, and so is {key}, which is the same. Use one of them.")
            continue
        if isinstance(value, dict) and isinstance(existing, dict):
            value = {**existing, **value} if over > 0 else {**value, **existing}
        elif over < 0:
            continue  # laid over this one
        if not put(source.values, key.split("."), value):
            source.add(name, f"is {key} here, but {key.rpartition('.')[0]} is not a mapping.")
        else:
            _move_places(source, tuple(name.split(".")), tuple(key.split(".")), over > 0)
    if source.values.get("engine") in ({}, None):
        source.values.pop("engine", None)


def _check_engine(source: YamlSource, engine: Any) -> None:
    """Names in `engine` that there are not: the section is the flat form's own, so nobody else would say so."""
    if "engine" in source.values and not isinstance(engine, dict):
        source.add("engine", f"found {found(engine)}; expected a mapping (key: value).")
        source.values.pop("engine")
        return
    known = [name.partition(".")[2] for name in FLAT if name.startswith("engine.")]
    for name in [name for name in engine if name not in known]:
        engine.pop(name)
        hint = did_you_mean(str(name), known) or f" Known here: {', '.join(known)}."
        source.add(f"engine.{name}", f"unknown key.{hint}")


def _per_gpu(value: Any, num_gpus: Any) -> int:
    """Prompts of one step."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"found {found(value)}; expected an integer of at least 1.")
    if not isinstance(num_gpus, int) or isinstance(num_gpus, bool) or num_gpus < 1:
        raise ValueError(
            f"is per GPU, and {NUM_GPUS} does not say how many there are. Set it, or data.prompts_per_step instead."
        )
    return value * num_gpus


def _get(values: Any, path: list[str]) -> Any:
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return MISSING
        values = values[part]
    return values


def _take(values: dict[str, Any], path: list[str]) -> Any:
    """What stands at `path`, taken out; and the mapping around it, if that is empty then."""
    *parents, last = path
    around = _get(values, parents)
    if not isinstance(around, dict) or last not in around:
        return MISSING
    value = around.pop(last)
    if parents and not around:
        values.pop(parents[0])
    return value


def put(values: dict[str, Any], path: list[str], value: Any) -> bool:
    """Set what stands at `path`, making the mappings around it; False where one of these is something else."""
    *parents, last = path
    around: Any = values
    for part in parents:
        if around.get(part) is None:
            around[part] = {}
        around = around[part]
        if not isinstance(around, dict):
            return False
    around[last] = value
    return True


def _move_places(source: YamlSource, old: Key, new: Key, is_over: bool) -> None:
    if len(old) == 1 and isinstance(_get(source.values, list(new)), dict):  # a whole section under another name
        for path in [path for path in source.places if path[:1] == old]:
            place = source.places.pop(path)
            if is_over or (*new, *path[1:]) not in source.places:
                source.places[(*new, *path[1:])] = place
        return
    source.forget(new)
    if where := source.places.pop(old, ""):
        source.places[new] = f"{where}, as {'.'.join(old)}"
