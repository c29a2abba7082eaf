"""Declared type of any key path: a field of a section, a field of another library's class, or an entry of a list."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from megaverl.config.passthrough import PLACES
from megaverl.config.schema import Config

Key = tuple[str, ...]

# Keys of the flat form (see `loader.py`) -> this project's key for the same setting.
FLAT_NAMES = {
    "model.pretrain_model_path": "model.path",
    "model.tokenizer_path": "model.tokenizer",
    "model.critic_model_path": "critic.path",
    "model.reference_model_path": "reference.path",
    "reward.modules": "reward_modules",
    "model.reward_function": "reward",
    "data.train_path": "data.train",
    "data.validation_path": "data.validation",
    "data.batch_size_per_gpu": "data.prompts_per_step",
    "engine.actor_type": "rollout.engine",
    "engine.num_gpus": "run.nproc",
    "engine.critic_type": "critic.engine",
    "fsdp_config": "actor.fsdp",
    "checkpoint_config": "checkpoint",
    "log_with": "run.log_with",
    "output_dir": "run.dir",
    "seed": "run.seed",
}


@cache
def type_at(path: Key) -> Any:
    """Return the type annotation of the value at the key path `path`, or Any if it is unknown.

    A list entry is addressed by its index. A name in that position addresses a key of
    the only entry, because a list of one may be written without its brackets.
    """
    # A flat key has the type of the key that it stands for.
    for name, key in FLAT_NAMES.items():
        written = tuple(name.split("."))
        if path[: len(written)] == written:
            return type_at((*key.split("."), *path[len(written) :]))
    kind: Any = Config
    for depth, part in enumerate(path):
        place = ".".join(path[:depth])
        if place in PLACES:
            field = (PLACES[place].fields() or {}).get(part)
            kind = field.type if field is not None else Any
        else:
            kind = _inside(kind, part)
    return kind


def _inside(kind: Any, part: str) -> Any:
    """Return the type of `part` (a key or an index) inside a value of type `kind`, or Any if it is unknown."""
    if (entry := list_entry(kind)) is not None:
        if part.isdigit():
            return entry
        kind = entry
    section = section_of(kind)
    if section is not None:
        fields = (
            field
            for name, field in section.model_fields.items()
            if (field.alias or name) == part
        )
        field = next(fields, None)
        # `rebuild_annotation` keeps the constraints, which do not matter here.
        return Any if field is None else field.annotation
    # A mapping such as dict[str, float] accepts any key; its values share one type.
    value_types = [
        get_args(option)[1] for option in _options(kind) if get_origin(option) is dict
    ]
    return value_types[0] if value_types else Any


def section_of(kind: Any) -> type[BaseModel] | None:
    """Return the Section class among the alternatives of the annotation `kind`, or None."""
    return next(
        (
            alternative
            for alternative in _options(kind)
            if isinstance(alternative, type) and issubclass(alternative, BaseModel)
        ),
        None,
    )


def list_entry(kind: Any) -> Any:
    """Return the type of a list's entries, or None if no alternative of the annotation `kind` is a list."""
    for option in _options(kind):
        if option is list:
            return Any
        if get_origin(option) is list:
            return get_args(option)[0]
    return None


def _options(kind: Any) -> list[Any]:
    """Return the alternatives of an annotation: members of a union, with `Annotated` stripped."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option for part in get_args(kind) for option in _options(part)]
    return [kind]
