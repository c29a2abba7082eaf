"""Base class of all configuration sections with its rules, shared number types, and descriptions of every key."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from megaverl.config.errors import ConfigIssue
from megaverl.config.signatures import class_fields

Issues = Iterator[ConfigIssue]
Rule = TypeVar("Rule", bound=Callable[[Any, str], Issues])
_IS_RULE = "_is_configuration_rule"


def rule(method: Rule) -> Rule:
    """Mark a method of a Section as a rule about the section's own fields.

    The method takes the dotted key of its section and yields a mistake for everything
    that is wrong. A rule that needs another section, a file or the number of ranks is a
    function of `checks.py` or of a module that it names.

    Example:
        class KLConfig(Section):
            coef: NonNegativeFloat = 0.0

            @rule
            def check_coef(self, at: str) -> Issues:
                if self.place != "none" and self.coef == 0:
                    yield ConfigIssue(f"{at}.coef", "found 0.0; expected above 0.")
    """
    setattr(method, _IS_RULE, True)
    return method


class Section(BaseModel):
    """One mapping of the configuration file, as a strict and read-only pydantic model.

    Strict means that text is not converted to a number, nor a number to a boolean, so a
    slip is reported. Only an integer is accepted for a float.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )
    # True for sections that may be written as one text, such as `model: org/name`.
    may_be_text: ClassVar[bool] = False

    def changed(self, *names: str) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults, by name.

        Args:
            names: fields to look at. None given: all fields.
        """
        fields = type(self).model_fields
        defaults = {
            name: fields[name].get_default(call_default_factory=True)
            for name in names or fields
        }
        return {
            name: value
            for name, default in defaults.items()
            if (value := getattr(self, name)) != default
        }

    def issues(self, at: str) -> Issues:
        """Yield what the rules of this section, and of the sections inside it, find wrong.

        Args:
            at: dotted key of this section.
        """
        for name in _rule_names(type(self)):
            yield from getattr(self, name)(at)
        for name, field in type(self).model_fields.items():
            key = f"{at}.{field.alias or name}"
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from value.issues(key)
            elif isinstance(value, list):
                yield from entry_issues(value, key)

    def unused(
        self, at: str, reason: str, *names: str, involves: tuple[str, ...] = ()
    ) -> Issues:
        """Yield a mistake for each field that is set although another key takes away its effect.

        Args:
            at: dotted key of this section.
            reason: the other key with its value, and what to do.
            names: fields to look at. None given: all fields.
            involves: keys of other sections that the mistake depends on.
        """
        for name in self.changed(*names):
            yield ConfigIssue(
                f"{at}.{name}", f"is set, but {reason}", involves=involves
            )


@cache
def _rule_names(section: type[Section]) -> tuple[str, ...]:
    """Return the names of a section's rules, those of its base classes first."""
    names = {name: None for base in reversed(section.__mro__) for name in vars(base)}
    return tuple(
        name for name in names if hasattr(getattr(section, name, None), _IS_RULE)
    )


def entry_issues(entries: Sequence[Any], at: str) -> Issues:
    """Yield what the rules of the sections in a list find wrong. `at` is the list's dotted key."""
    for index, entry in enumerate(entries):
        if isinstance(entry, Section):
            yield from entry.issues(f"{at}.{index}")


# A single text is accepted in place of a list: `data.train=train.jsonl` means
# `data.train=[train.jsonl]`.
AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)

# Mapping that is passed to another library under that library's own names;
# `passthrough.py` checks it.
Passthrough = dict[str, Any]

# Pydantic's names of constraints -> words for messages.
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

# Numbers end up in 32-bit tensors, C arguments and durations. Anything above these
# limits is a slip.
MOST = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e9)]
# Size of one dimension of a parallel grid.
GridSize = Annotated[int, Field(ge=1, le=65_536)]
# Count of things that are each built or run: responses to a prompt, turns, the rank of
# an adapter.
Several = Annotated[int, Field(ge=1, le=65_536)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
# Durations from 0.6 s (minutes) or 10 ms (seconds) to one year. A shorter timeout would
# end a healthy run.
Minutes = Annotated[float, Field(ge=0.01, le=525_600)]
Seconds = Annotated[float, Field(ge=0.01, le=31_536_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Paths = Annotated[list[Text], AS_LIST]
# Function of the user, written module:function.
Function = Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or a float. Booleans, which are ints in Python, are not numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def over(defaults: dict[str, Any]) -> BeforeValidator:
    """Return a validator that merges the user's mapping over `defaults`, key by key.

    Other values are left for pydantic to refuse.
    """
    return BeforeValidator(
        lambda value: {**defaults, **value} if isinstance(value, dict) else value
    )


def known_or_own(names: Sequence[str], plugin_form: str) -> AfterValidator:
    """Return a validator that accepts one of `names`, or a user's plug-in with a colon in it.

    Anything else fails with pydantic's error type for a Literal, so messages read
    alike.

    Args:
        plugin_form: how a plug-in is written, such as "module:function", for the message.
    """

    def check(value: str) -> str:
        if value not in names and not all(value.rpartition(":")[::2]):
            raise PydanticCustomError(
                "literal_error",
                "unknown name",
                {"expected": ", ".join([*names, plugin_form])},
            )
        return value

    return AfterValidator(check)


class KeyDescription(NamedTuple):
    """One row of `megaverl keys`. `default` is written as in YAML."""

    key: str
    type: str
    default: str
    meaning: str


def described_keys(
    section: type[BaseModel], prefix: str = ""
) -> Iterator[KeyDescription]:
    """Yield a description of every key that holds a value. N stands for the index of a list entry."""
    meanings = field_meanings(section)
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        inner = _model_of(field.annotation)
        if inner is not None:
            yield from described_keys(
                inner,
                f"{key}.N." if get_origin(field.annotation) is list else f"{key}.",
            )
        else:
            default = (
                "(must be given)"
                if field.is_required()
                else json.dumps(_default(field))
            )
            yield KeyDescription(
                key, type_text(field.annotation), default, meanings[name]
            )


def field_meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the documentation below each field, joined into one line, by field name."""
    fields = class_fields(section.__module__, section.__name__) or {}
    return {name: " ".join(field.description.split()) for name, field in fields.items()}


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key, sections included. Keys inside list entries are left out."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield key
        inner = _model_of(field.annotation)
        if inner is not None and get_origin(field.annotation) is not list:
            yield from all_keys(inner, key + ".")


def section_at(root: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the Section class at a key path, or None if there is none. A list entry is addressed by its index."""
    section: type[BaseModel] | None = root
    for part in path:
        if section is None:
            return None
        if not part.isdigit():
            field = next(
                (
                    f
                    for name, f in section.model_fields.items()
                    if (f.alias or name) == part
                ),
                None,
            )
            section = _model_of(field.annotation) if field else None
    return section


def keys_of(section: type[BaseModel] | None) -> list[str]:
    """Return the keys of a section as the file writes them, or an empty list for None."""
    return (
        [field.alias or name for name, field in section.model_fields.items()]
        if section
        else []
    )


def type_text(annotation: Any) -> str:
    """Return a type as a user reads it: `int`, `list of text`, `ppo | grpo`, `number or null`."""
    plain = {
        int: "int",
        float: "number",
        str: "text",
        bool: "true | false",
        type(None): "null",
        Any: "anything",
    }
    if annotation in plain:
        return plain[annotation]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
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
    """Return the first pydantic model inside an annotation, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (model for part in get_args(annotation) if (model := _model_of(part))), None
    )
