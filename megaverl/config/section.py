"""What all sections share (strict, read-only, every key described), and how their keys are shown to a person."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from megaverl.config.signatures import class_fields


class Section(BaseModel):
    """A mapping of the configuration file.

    `strict`: a string is no number and a number is no boolean: a slip is reported, not guessed at.
    An integer is accepted where a float is asked for.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_by_name=True, validate_by_alias=True, allow_inf_nan=False
    )
    # Whether a text may stand in the place of the mapping.
    may_be_text: ClassVar[bool] = False

    def changed(self, *names: str) -> dict[str, Any]:
        """What stands at those of `names` (or of all fields) that are not at their defaults."""
        fields = type(self).model_fields
        defaults = {name: fields[name].get_default(call_default_factory=True) for name in names or fields}
        return {name: value for name, other in defaults.items() if (value := getattr(self, name)) != other}


# One may stand alone: `data.train=train.jsonl` is `data.train=[train.jsonl]`.
AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)

# A mapping handed to another library under that library's own names; `passthrough.py` checks it.
Passthrough = dict[str, Any]

# Limits of a number, as a message names them.
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

# Numbers become 32-bit tensors, arguments of C and durations: what exceeds these is a slip.
MOST = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]
# A size of a parallel grid.
GridSize = Annotated[int, Field(ge=1, le=65_536)]
# Things of which each one is made: responses of a prompt, turns, ranks of an adapter.
Several = Annotated[int, Field(ge=1, le=65_536)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
# From half a second to a year: a shorter one ends a run that is well.
Minutes = Annotated[float, Field(ge=0.01, le=525_600)]
Seconds = Annotated[float, Field(ge=0.01, le=31_536_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Paths = Annotated[list[Text], AS_LIST]
# The user's own, module:function.
Function = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]


def over(defaults: dict[str, Any]) -> BeforeValidator:
    """The user's mapping laid over `defaults`, key by key; anything else is left for pydantic to refuse."""
    return BeforeValidator(lambda value: {**defaults, **value} if isinstance(value, dict) else value)


def known_or_own(names: Sequence[str], own: str) -> AfterValidator:
    """One of `names`, or the user's own, written as `own` says; refused in pydantic's words for a Literal."""

    def check(value: str) -> str:
        if value not in names and not all(value.rpartition(":")[::2]):
            raise PydanticCustomError("literal_error", "unknown name", {"expected": ", ".join([*names, own])})
        return value

    return AfterValidator(check)


class KeyDescription(NamedTuple):
    """`default` is written as in YAML."""

    key: str
    type: str
    default: str
    meaning: str


def described_keys(section: type[BaseModel], prefix: str = "") -> Iterator[KeyDescription]:
    """Every key that holds a value; the entries of a list are called N."""
    meanings = field_meanings(section)
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _model_of(field.annotation)
        if inner is not None:
            yield from described_keys(inner, f"{key}.N." if get_origin(field.annotation) is list else f"{key}.")
        else:
            default = "(must be given)" if field.is_required() else json.dumps(_default(field))
            yield KeyDescription(key, type_text(field.annotation), default, meanings[name])


def field_meanings(section: type[BaseModel]) -> dict[str, str]:
    """What is written below each field, in one line."""
    fields = class_fields(section.__module__, section.__name__) or {}
    return {name: " ".join(field.description.split()) for name, field in fields.items()}


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included, the inside of lists not."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        inner = _model_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from all_keys(inner, key + ".")


def section_at(root: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section at a key path, in which a list's entry is its index; None where there is none."""
    section: type[BaseModel] | None = root
    for part in path:
        if section is None:
            return None
        if not part.isdigit():
            field = next((f for name, f in section.model_fields.items() if (f.alias or name) == part), None)
            section = _model_of(field.annotation) if field else None
    return section


def keys_of(section: type[BaseModel] | None) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def type_text(annotation: Any) -> str:
    """A type in the file's words: `int`, `list of text`, `ppo | grpo`, `number or null`."""
    plain = {int: "int", float: "number", str: "text", bool: "true | false", type(None): "null", Any: "anything"}
    if annotation in plain:
        return plain[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(part) for part in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    return "mapping" if origin is dict else str(annotation)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_of(part))), None)
