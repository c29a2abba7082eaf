"""What all sections of the configuration share: strict, no unknown keys, read-only, every key described."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A mapping of the configuration file.

    `strict`: a string is no number and a number is no boolean: a slip is reported, not guessed at.
    An integer is accepted where a float is asked for.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_by_name=True,
        validate_by_alias=True,
        allow_inf_nan=False,
    )


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# One path may stand alone: `data.train=train.jsonl` is `data.train=[train.jsonl]`.
Paths = Annotated[list[str], BeforeValidator(_as_list)]

# A mapping handed to another library under that library's own names; `installed.py` checks it.
Passthrough = dict[str, Any]

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def over(defaults: dict[str, Any]) -> BeforeValidator:
    """The user's mapping laid over `defaults`, key by key; anything else is left for pydantic to refuse."""
    return BeforeValidator(lambda value: {**defaults, **value} if isinstance(value, dict) else value)
