"""The declared type of every key: of a section's field, of a field handed to another library, of a list's entry."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from megaverl.config.passthrough import PLACES
from megaverl.config.schema import Config

Key = tuple[str, ...]

# Names of the flat form (`flat_form.py`) and the key that each one is.
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
    """Return the annotation of the value at a key path; Any where none is known.

    A list's entry is an index; a name in its place is a key of the only entry, which may stand without the list.
    """
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
    if (entry := list_entry(kind)) is not None:
        if part.isdigit():
            return entry
        kind = entry
    section = section_of(kind)
    if section is not None:
        fields = (field for name, field in section.model_fields.items() if (field.alias or name) == part)
        field = next(fields, None)
        # `rebuild_annotation` keeps the constraints, which do not matter here.
        return Any if field is None else field.annotation
    value_types = [get_args(option)[1] for option in _options(kind) if get_origin(option) is dict]
    return value_types[0] if value_types else Any


def section_of(kind: Any) -> type[BaseModel] | None:
    """Return the section among the alternatives of a type."""
    return next((each for each in _options(kind) if isinstance(each, type) and issubclass(each, BaseModel)), None)


def list_entry(kind: Any) -> Any:
    """Return the type of a list's entries, or None if no alternative of `kind` is a list."""
    for option in _options(kind):
        if option is list:
            return Any
        if get_origin(option) is list:
            return get_args(option)[0]
    return None


def _options(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option for part in get_args(kind) for option in _options(part)]
    return [kind]
