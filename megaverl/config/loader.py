"""`load_config`: turn a file and overrides into a checked Config, or raise one error with all mistakes.

Two forms of a configuration are read. The flat form, as other trainers write it, is
translated to this project's keys:

    algorithm: {name: ppo, clip_range: 0.2, value_loss_coef: 0.5}
    model: {pretrain_model_path: models/small, reward_function: exact_match}
    data: {train_path: train.jsonl, batch_size_per_gpu: 8}
    engine: {actor_type: vllm, critic_type: megatron, num_gpus: 4}
    placement: {actor_devices: [0, 1, 2], critic_devices: [3]}

`actor_type` names either the engine that generates (vllm, hf) or the one that trains
(megatron, fsdp). `fsdp_config` configures FSDP and selects it. Both forms may be mixed
in one file, but a key set in both is a mistake.
"""

from __future__ import annotations

import copy
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megaverl.config.checks import cross_mistakes
from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.fsdp import TRAINERS, from_fsdp_config
from megaverl.config.grids import CLAIMS, REINFORCING
from megaverl.config.key_types import FLAT_NAMES
from megaverl.config.lengths import fitted_lengths
from megaverl.config.passthrough import PLACES, passthrough_mistakes
from megaverl.config.roles import INHERITED
from megaverl.config.schema import Config
from megaverl.config.section import BOUNDS, all_keys, keys_of, section_at
from megaverl.config.signatures import place_of
from megaverl.config.successors import value_hint
from megaverl.config.wording import did_you_mean, listed, yaml_text
from megaverl.config.yaml_source import (
    BASE,
    MISSING,
    Key,
    Override,
    YamlSource,
    put,
    read_source,
    refuse_impossible,
    take,
    value_at,
)
from megaverl.errors import ConfigError

Command = Literal[
    "train", "sft", "dpo", "reward", "generate", "eval", "quickstart", "tinker"
]


# Keys that may be `auto`. Their values are chosen for the run's ranks before the
# configuration is checked.
AUTO_KEYS = (
    *(f"actor.{size}" for size in ("tp", "pp", "vpp", "cp", "ep", "etp")),
    "actor.micro_batch_tokens",
    "actor.activation_checkpointing",
    "rollout.tp",
)
AUTO = "auto"
# Function that builds the configuration with settings (key -> value) merged in, as if
# the user had written them.
Make = Callable[[Mapping[str, Any]], Config]
# Function that chooses values for `auto` keys: (make, keys, ranks) -> (key -> value,
# what was chosen and why).
Choose = Callable[[Make, tuple[str, ...], int], tuple[dict[str, Any], str]]


def load_any(path: str, overrides: list[str]) -> Config:
    """Load a configuration for the first of train, sft, dpo and reward that accepts it, without checking files.

    Raises:
        ConfigError: no command accepts it; lists the mistakes for `train`.
    """
    commands: tuple[Command, ...] = ("train", "sft", "dpo", "reward")
    refusals: list[ConfigError] = []
    for command in commands:
        try:
            return load_config(path, overrides, command=command, check_paths=False)
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def load_config(
    path: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[Override] | None = None,
    *,
    command: Command = "train",
    check_paths: bool = True,
    world_size: int | None = None,
    choose: Choose | None = None,
) -> Config:
    """Read, merge, resolve and check the configuration of one run, before anything is built.

    Args:
        path: YAML file, or its content as a mapping, or None for the defaults. The flat form is accepted.
        overrides: `key=value` with dotted keys, or pairs of a key and a value. Later ones win, mappings merge, lists
            replace. The key's type decides how text is read: a text key takes it literally, lists and mappings are
            YAML.
        command: command that the configuration must be complete for.
        check_paths: False skips every check that needs the model folder or data files, as for a recipe that is viewed
            on another machine.
        world_size: number of ranks. None: torchrun's WORLD_SIZE, or `run.nproc`, or unknown (with `--role`).
        choose: chooses values for `auto` keys. None: `auto` is refused.

    Raises:
        InvalidConfig: (a ConfigError) lists every mistake with key, place, the value found and what is allowed.
    """
    source, choice = _read(path, overrides or [], command)
    chosen, reason = _choose(source, choose, world_size)
    config, mistakes = validate(source)
    foreign, warnings = passthrough_mistakes(source.values, source.place)
    warnings += source.warnings
    mistakes = _first_of_each_key([*source.mistakes, *mistakes, *foreign])
    world_size = world_size or _world_size(config)
    # Checks across sections run on a configuration in which refused keys have their
    # defaults. Drop what they report about such keys.
    mistakes += _not_moot(
        cross_mistakes(config, command, check_paths, world_size), mistakes, source
    )
    if mistakes:
        raise InvalidConfig(mistakes, source.name)
    if command in REINFORCING:
        warnings += config.algorithm.advice("algorithm")
    # Kept in the configuration, for the run that prints them, and for a resumed run
    # that plans its layout again.
    config.note(
        warnings,
        [line for line in (choice, reason) if line],
        chosen,
        _make_of(source),
        source.place,
    )
    return config


def layered(
    path: str | Path | None, overrides: Sequence[Override] | None = None
) -> Make:
    """Return a function that builds the configuration with further settings merged in. Keys set to `auto` are left out.

    Raises:
        InvalidConfig: lists every mistake that shows before a layout is chosen.
    """
    source, _ = _read(path, overrides or [], "train")
    _take_auto(source)
    _, mistakes = validate(source)
    mistakes = _first_of_each_key(
        [
            *source.mistakes,
            *mistakes,
            *passthrough_mistakes(source.values, source.place)[0],
        ]
    )
    if mistakes:
        raise InvalidConfig(mistakes, source.name)
    return _make_of(source)


def _make_of(source: YamlSource) -> Make:
    """Return a function that builds the configuration of `source` with further settings merged in."""

    def make(settings: Mapping[str, Any]) -> Config:
        values = copy.deepcopy(source.values)
        for key, value in settings.items():
            put(values, key.split("."), copy.deepcopy(value))
        return Config.model_validate(values)

    return make


def _take_auto(source: YamlSource) -> tuple[str, ...]:
    """Remove the keys that are `auto` from the source, and return them."""
    keys = tuple(
        key for key in AUTO_KEYS if value_at(source.values, key.split(".")) == AUTO
    )
    for key in keys:
        take(source.values, key.split("."))
    return keys


def _choose(
    source: YamlSource, choose: Choose | None, world_size: int | None
) -> tuple[dict[str, Any], str]:
    """Choose values for `auto` keys and put them into the source.

    Returns them by key, and the reason. Mistakes are recorded.
    """
    keys = _take_auto(source)
    if not keys:
        return {}, ""
    config, mistakes = validate(source)
    world_size = world_size or _world_size(config)
    if mistakes or source.mistakes:
        # These mistakes are reported, and the rest of the configuration is checked
        # without a choice.
        return {}, ""
    if choose is None:
        source.add(
            keys[0],
            "is auto, which `megaverl train` and `megaverl plan --auto` decide on. Give a value here.",
        )
    elif world_size is None:
        source.add(
            keys[0],
            "is auto, and the number of ranks is not known. Give it: --nproc N, or run.nproc.",
        )
    else:
        try:
            settings, reason = choose(_make_of(source), keys, world_size)
        except ConfigError as error:
            source.add(keys[0], f"is auto. {error}")
            return {}, ""
        for key, value in settings.items():
            put(source.values, key.split("."), value)
        return settings, reason
    return {}, ""


def _read(
    path: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[Override],
    command: Command,
) -> tuple[YamlSource, str]:
    """Read the file and the overrides, and fill in lengths that fit the model's context.

    Returns:
        The source, and a sentence about the chosen lengths, empty if none were chosen.
    """
    # Inherited sections have no defaults of their own: their values may come from the actor.
    defaults = {
        section: value
        for section, value in Config().to_dict().items()
        if section not in INHERITED
    }
    source = read_source(path, overrides, defaults)
    translate(source)
    lengths, choice = fitted_lengths(source.values, command)
    # Read again with the chosen lengths as defaults, since a `${...}` elsewhere may
    # refer to one of them.
    if lengths:
        for key, length in lengths.items():
            put(defaults, key.split("."), length)
        source = read_source(path, overrides, defaults)
        translate(source)
        for key, length in lengths.items():
            put(source.values, key.split("."), length)
    refuse_impossible(source, source.values)
    return source, choice


def _world_size(config: Config) -> int | None:
    """Return the number of ranks, or None if it is unknown until all nodes have met."""
    # Roles are claimed node by node, so the number of ranks is known only after all
    # nodes have connected.
    if os.environ.get(CLAIMS):
        return None
    if os.environ.get("WORLD_SIZE", "").isdigit():
        return int(os.environ["WORLD_SIZE"])
    return config.run.nproc


def _first_of_each_key(mistakes: list[ConfigIssue]) -> list[ConfigIssue]:
    """Return the first mistake of each key.

    A key that could not be read is null by now, which must not be reported as well.
    """
    kept: dict[str, ConfigIssue] = {}
    for mistake in mistakes:
        kept.setdefault(mistake.key, mistake)
    return list(kept.values())


def _not_moot(
    mistakes: list[ConfigIssue],
    earlier_mistakes: list[ConfigIssue],
    source: YamlSource,
) -> list[ConfigIssue]:
    """Return the mistakes that do not depend on a key which is itself wrong, with the places of their keys."""
    wrong = [mistake.key for mistake in earlier_mistakes]
    # A file could not be read, so every later mistake may be a consequence.
    if any(key.startswith("--") or key == BASE for key in wrong):
        return []
    return [
        ConfigIssue(
            mistake.key, mistake.message, source.place(mistake.key), mistake.involves
        )
        for mistake in mistakes
        if not any(
            _overlap(key, faulty)
            for key in (mistake.key, *mistake.involves)
            for faulty in wrong
        )
    ]


def _overlap(a: str, b: str) -> bool:
    """Return whether two dotted keys are equal or one contains the other."""
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "some text",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
# Name of a setting in verl, TRL, NeMo-RL or transformers -> keys for it here.
PEERS_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("learning_rate", "lr_rate"),
        (
            "actor.optimizer.lr",
            "critic.optimizer.lr",
            "reward_model.optimizer.lr",
            "sft.lr",
            "preference.lr",
        ),
    ),
    "weight_decay": ("actor.optimizer.weight_decay", "critic.optimizer.weight_decay"),
    **dict.fromkeys(
        ("max_grad_norm", "grad_clip", "clip_grad_norm"),
        ("actor.optimizer.clip_grad", "critic.optimizer.clip_grad"),
    ),
    **dict.fromkeys(
        ("lr_scheduler_type", "scheduler_type"),
        ("actor.scheduler.lr_decay_style", "sft.lr_decay_style"),
    ),
    **dict.fromkeys(("num_generations", "rollout_n"), ("algorithm.group_size",)),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), ("algorithm.num_epochs",)),
    "ppo_mini_batch_size": ("algorithm.num_mini_batches",),
    **dict.fromkeys(("cliprange", "clip_ratio", "epsilon"), ("algorithm.clip_range",)),
    **dict.fromkeys(
        ("clip_ratio_high", "epsilon_high"), ("algorithm.clip_range_high",)
    ),
    **dict.fromkeys(
        ("kl_coef", "kl_loss_coef", "init_kl_coef"), ("algorithm.kl.coef",)
    ),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "adv_estimator": ("algorithm.name",),
    **dict.fromkeys(
        ("train_batch_size", "batch_size"), ("data.prompts_per_step", "sft.batch_size")
    ),
    **dict.fromkeys(("train_files", "train_file"), ("data.train",)),
    **dict.fromkeys(("val_files", "eval_files"), ("data.validation",)),
    "max_prompt_length": ("data.max_prompt_tokens",),
    **dict.fromkeys(
        (
            "max_response_length",
            "max_new_tokens",
            "max_completion_length",
            "response_length",
        ),
        ("rollout.sampling.max_tokens",),
    ),
    **dict.fromkeys(
        ("max_steps", "total_training_steps", "num_train_steps"),
        ("trainer.steps", "sft.steps"),
    ),
    **dict.fromkeys(("save_freq", "save_steps"), ("checkpoint.save_interval",)),
    **dict.fromkeys(
        ("test_freq", "eval_steps"),
        ("trainer.validate_every", "preference.validate_every"),
    ),
    **dict.fromkeys(("experiment_name", "run_name"), ("run.name",)),
    **dict.fromkeys(("model_name_or_path", "model_name"), ("model.path",)),
    **dict.fromkeys(("n_gpus_per_node", "num_processes"), ("run.nproc",)),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("actor.tp", "critic.tp", "rollout.tp"),
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size"),
        ("actor.pp", "critic.pp"),
    ),
    **dict.fromkeys(
        (
            "context_parallel_size",
            "ulysses_sequence_parallel_size",
            "sequence_parallel_size",
            "sp_size",
        ),
        ("actor.cp", "critic.cp"),
    ),
    "use_liger": ("actor.fsdp.liger",),
    "use_remove_padding": ("actor.pack_samples", "critic.pack_samples"),
    "expert_model_parallel_size": ("actor.ep", "critic.ep"),
}
_NAME_LETTERS = "letters, digits and . _ + = , @ - only"


def validate(source: YamlSource) -> tuple[Config, list[ConfigIssue]]:
    """Return the configuration with every refused key at its default, and the mistakes.

    pydantic builds nothing if one value is wrong. Refused values are removed and
    validation repeats until it succeeds, so that later checks have a configuration to
    work on.
    """
    values = source.values
    mistakes: list[ConfigIssue] = []
    while True:
        try:
            # pydantic stops a section's validators at its first refused field. So
            # refused keys are removed and the rest is validated again, until nothing is
            # refused.
            return Config.model_validate(values), mistakes
        except ValidationError as error:
            details = error.errors(include_url=False)
        known = {mistake.key for mistake in mistakes}
        for detail in details:
            path = tuple(str(part) for part in detail["loc"])
            key = ".".join(path)
            if key not in known and _written(detail["loc"], values):
                mistakes.append(
                    ConfigIssue(key, _message(detail, path), source.place(path))
                )
        pruned = values
        for detail in details:
            pruned = _without(pruned, detail["loc"])
        # Nothing is left to remove: a validator refused a default.
        if pruned == values:
            return Config(), mistakes
        values = pruned


def _written(loc: tuple[int | str, ...], values: Any) -> bool:
    """Return whether the key at `loc` was set for its own role, not inherited from the actor's section."""
    try:
        around = functools.reduce(operator.getitem, loc[:-1], values)
    except (KeyError, IndexError, TypeError):
        return False
    return not isinstance(around, dict) or loc[-1] in around or loc[0] not in INHERITED


def _message(detail: ErrorDetails, path: Key) -> str:
    """Return the message for one of pydantic's errors."""
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key." + _suggest(path)
    if kind == "missing":
        return "is missing, and has no default. Give it a value."
    if kind == "invalid_key":
        return "a key must be text."
    shown = f"found {yaml_text(detail['input'])}"
    if kind == "literal_error":
        allowed = str(context["expected"])
        names = [name.strip("'") for name in allowed.replace(" or ", ", ").split(", ")]
        hint = (
            did_you_mean(detail["input"], names)
            if isinstance(detail["input"], str)
            else ""
        )
        hint = value_hint(path, detail["input"]) or hint
        if path == ("algorithm", "name") and isinstance(detail["input"], str):
            hint = place_of(detail["input"]) or hint
        return f"{shown}; allowed: {', '.join(names)}.{hint}"
    if kind == "folder_name":
        return f"{shown}, which {detail['msg']}."
    if kind == "string_pattern_mismatch":
        is_function = "[A-Za-z_]" in str(context.get("pattern"))
        return f"{shown}; expected {'module:function or file.py:function' if is_function else _NAME_LETTERS}."
    if kind in _EXPECTED:
        hint = (
            f" auto is for {', '.join(AUTO_KEYS)}." if detail["input"] == AUTO else ""
        )
        return f"{shown}; expected {_EXPECTED[kind]}.{hint}"
    bounds = [
        f"{word} {context[name]}" for name, word in BOUNDS.items() if name in context
    ]
    return (
        f"{shown}; expected {' and '.join(bounds)}."
        if bounds
        else f"{shown}: {detail['msg']}."
    )


def _suggest(path: Key) -> str:
    """Return a suggestion for an unknown key: a similar key of the same section, or the same name elsewhere."""
    *parents, name = path
    siblings = keys_of(section_at(Config, parents)) + [BASE] * (not parents)
    hint = did_you_mean(name, siblings)
    # A name from another trainer is no typing error of ours, so it comes before similar
    # spellings.
    if candidates := PEERS_NAMES.get(name.lower()):
        return f" Did you mean `{_placed(candidates, parents)}`?"
    exact = [key for key in all_keys(Config) if key.rsplit(".", 1)[-1] == name]
    exact += [
        f"{place}.{name}"
        for place, target in PLACES.items()
        if name in target.settable()
    ]
    nearby = [
        key for key in exact if parents and key.startswith(parents[0] + ".")
    ] or exact
    if nearby:
        return f" Did you mean `{nearby[0]}`?"
    return hint or (f" Known here: {', '.join(siblings)}." if siblings else "")


def _placed(candidates: tuple[str, ...], parents: Sequence[str]) -> str:
    """Return the first of the keys `candidates` that lies in the section of `parents`, else the first of all."""
    return next(
        (key for key in candidates if parents and key.startswith(f"{parents[0]}.")),
        candidates[0],
    )


def _without(values: dict[str, Any], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """Return a copy of `values` without the key at `loc`, or without the nearest removable key around it.

    List entries are not removed one by one, because other messages refer to entries by
    index; the whole list is removed.
    """
    values = copy.deepcopy(values)
    around: Any = values
    removable: tuple[dict[str, Any], str] | None = None
    for part in loc:
        if isinstance(around, dict) and part in around:
            removable = (around, str(part))
            around = around[part]
        elif isinstance(around, list) and isinstance(part, int) and part < len(around):
            around = around[part]
        elif isinstance(around, dict) and loc[0] in INHERITED and len(loc) > 1:
            # The role inherited this value: it goes away when the actor's own is
            # removed.
            return values
        else:
            # From here on pydantic's path names what it converted the value to, not
            # what the user wrote.
            break
    if removable is not None:
        del removable[0][removable[1]]
    return values


ENGINES = {
    "vllm": "vllm",
    "hf": "hf",
    "huggingface": "hf",
    "transformers": "hf",
    "server": "server",
}


class Flat(NamedTuple):
    """Translation of a flat key.

    Attributes:
        key: this project's key.
        convert: converts the value.
        others: value -> another key that it belongs to.
    """

    key: str
    convert: Callable[[Any], Any] = lambda value: value
    others: Mapping[str, str] = {}


def _engine(value: Any) -> Any:
    """Return the value of `engine.actor_type` under this project's name.

    Raises:
        ValueError: an unknown engine.
    """
    if value in TRAINERS:
        return value
    if value not in ENGINES:
        raise ValueError(
            f"found {yaml_text(value)}; allowed: {listed(ENGINES)} (who generates); {listed(TRAINERS)} (who trains)."
        )
    return ENGINES[value]


def _trainer(value: Any) -> Any:
    """Return the value of `engine.critic_type`, checked.

    Raises:
        ValueError: an unknown engine.
    """
    if value not in TRAINERS:
        raise ValueError(f"found {yaml_text(value)}; allowed: {listed(TRAINERS)}.")
    return value


FSDP = "fsdp_config"
_CONVERTED = {
    "engine.actor_type": Flat(
        "rollout.engine", _engine, dict.fromkeys(TRAINERS, "actor.engine")
    ),
    "engine.critic_type": Flat("critic.engine", _trainer),
    FSDP: Flat("actor.fsdp", from_fsdp_config),
}
FLAT: dict[str, Flat] = {
    name: _CONVERTED.get(name, Flat(key)) for name, key in FLAT_NAMES.items()
}
# prompts_per_step is the product of these two.
PER_GPU = "data.batch_size_per_gpu"
NUM_GPUS = "engine.num_gpus"


def translate(source: YamlSource) -> None:
    """Move every flat key of `source.values` to this project's key. Mistakes are recorded, not raised.

    Recorded places move along, so that a later mistake names the line and the word that
    the user wrote.
    """
    engine = source.values.get("engine", {})
    _check_engine(source, engine)
    num_gpus = engine.get("num_gpus") if isinstance(engine, dict) else None
    # Looked at before the loop takes the key away.
    selects_fsdp = FSDP in source.values
    for name, flat in FLAT.items():
        value = take(source.values, name.split("."))
        if value is MISSING:
            continue
        key = flat.others.get(value, flat.key) if isinstance(value, str) else flat.key
        try:
            value = (
                _per_gpu(value, num_gpus) if name == PER_GPU else flat.convert(value)
            )
        except ValueError as error:
            source.add(name, str(error))
            continue
        existing = value_at(source.values, key.split("."))
        # > 0: the flat key was written in a later layer and wins. 0: both stand in the
        # same file.
        over = 1 if existing is MISSING else source.layer(name) - source.layer(key)
        if over == 0:
            source.add(
                name, f"is set, and so is {key}, which is the same. Use one of them."
            )
            continue
        if isinstance(value, dict) and isinstance(existing, dict):
            value = {**existing, **value} if over > 0 else {**value, **existing}
        elif over < 0:
            # A value that was written under the new name has priority.
            continue
        if not put(source.values, key.split("."), value):
            source.add(
                name, f"is {key} here, but {key.rpartition('.')[0]} is not a mapping."
            )
        else:
            _move_places(
                source, tuple(name.split(".")), tuple(key.split(".")), over > 0
            )
    if selects_fsdp and value_at(source.values, ("actor", "engine")) is MISSING:
        put(source.values, ("actor", "engine"), "fsdp")
    if source.values.get("engine") in ({}, None):
        source.values.pop("engine", None)


def _check_engine(source: YamlSource, engine: Any) -> None:
    """Report unknown keys in `engine`. The section exists in the flat form only, so no schema would refuse them."""
    if "engine" in source.values and not isinstance(engine, dict):
        source.add(
            "engine", f"found {yaml_text(engine)}; expected a mapping (key: value)."
        )
        source.values.pop("engine")
        return
    known = [name.partition(".")[2] for name in FLAT if name.startswith("engine.")]
    for name in [name for name in engine if name not in known]:
        engine.pop(name)
        hint = did_you_mean(str(name), known) or f" Known here: {', '.join(known)}."
        source.add(f"engine.{name}", f"unknown key.{hint}")


def _per_gpu(value: Any, num_gpus: Any) -> int:
    """Return the prompts of one step from those per GPU.

    Raises:
        ValueError: the value is no positive integer, or the number of GPUs is missing.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"found {yaml_text(value)}; expected an integer of at least 1."
        )
    if not isinstance(num_gpus, int) or isinstance(num_gpus, bool) or num_gpus < 1:
        raise ValueError(
            f"is per GPU, and {NUM_GPUS} does not say how many there are. Set it, or data.prompts_per_step instead."
        )
    return value * num_gpus


def _move_places(source: YamlSource, old: Key, new: Key, is_over: bool) -> None:
    """Move the recorded places of a key, or of a whole section, to its new name."""
    # A whole section was moved, so all places below it move as well.
    if len(old) == 1 and isinstance(value_at(source.values, new), dict):
        for path in [path for path in source.places if path[:1] == old]:
            place = source.places.pop(path)
            if is_over or (*new, *path[1:]) not in source.places:
                source.places[(*new, *path[1:])] = place
        return
    # The value now comes from the flat key alone.
    source.forget(new)
    if where := source.places.pop(old, ""):
        source.places[new] = f"{where}, as {'.'.join(old)}"
