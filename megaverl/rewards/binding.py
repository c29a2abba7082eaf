"""Bind a reward function's parameters to values of a sample: by their names, or else by their number.

Names are those of this project, of TRL (`completions`, `prompts`, `completion_ids`, a
parameter for each column) and of verl (`data_source`, `solution_str`, `ground_truth`,
`extra_info`). A parameter named like a column of the data gets that column, and
`**kwargs` the columns that no parameter takes.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

VALUES = ("prompt", "response", "reference", "extra")
TOKEN_IDS, LOG_METRIC, LOG_EXTRA, TRAINER_STATE = (
    "token_ids",
    "log_metric",
    "log_extra",
    "trainer_state",
)
# Prompt and response in TRL's form for functions of lists: messages, if the row's
# prompt is a conversation.
TRL_PROMPT, TRL_RESPONSE = "prompt or its messages", "response or its messages"
_OF_TRL = {("prompts", "prompt"): TRL_PROMPT, ("completions", "response"): TRL_RESPONSE}
COLUMN = "column "  # prefix of a value's name that stands for a column

# Names that are never a column: TRL calls every function with them, and verl with
# `solution_str`.
FIXED = {
    "prompt": ("prompt", "prompts"),
    "response": (
        "response",
        "responses",
        "completion",
        "completions",
        "solution_str",
        "solution_strs",
    ),
    TOKEN_IDS: ("completion_ids", "completions_ids"),
    LOG_METRIC: ("log_metric",),
    LOG_EXTRA: ("log_extra",),
    TRAINER_STATE: ("trainer_state",),
}
# Values that are the same for all samples.
OF_THE_RUN = (LOG_METRIC, LOG_EXTRA, TRAINER_STATE)
# Other names of the four values, in the singular. A column with such a name takes
# precedence.
NAMES = {
    "prompt": ("prompt", "question", "query", "instruction", "problem", "input"),
    "response": (
        *(
            "response",
            "sampled_response",
            "model_response",
            "completion",
            "output",
            "model_output",
        ),
        *("generation", "generated_text", "prediction", "solution_str"),
    ),
    "reference": (
        *(
            "reference",
            "reference_answer",
            "ground_truth",
            "answer",
            "correct_answer",
            "expected_answer",
        ),
        *("gold_answer", "expected", "target", "label", "gold"),
    ),
    "extra": ("extra", "extra_info", "info", "metadata", "row"),
}
# Number of parameters without a default and with unknown names -> values that they get.
BY_COUNT = {
    1: ("response",),
    2: ("response", "reference"),
    3: ("prompt", "response", "reference"),
    4: VALUES,
}
# TRL's trainer keeps its environments in the process that computes rewards. Here, when
# rewards are computed, an episode is over, and its environment was on another rank.
NOT_GIVEN = ("environments",)
WHY_NOT_GIVEN = (
    "is not given: environments are closed before rewards are computed. Return the reward from the environment's step, "
    "as Outcome(reward=...), or give the parameter a default"
)
HOW = (
    "A parameter is bound by its name: "
    + "; ".join(f"{names[0]} (or {', '.join(names[1:])})" for names in NAMES.values())
    + f"; {', '.join((*FIXED[TOKEN_IDS][:1], *OF_THE_RUN))}; or the name of a column of the data. If no "
    "name is known, parameters are bound by their number: 1 is the response, 2 are response and reference, 3 are "
    "prompt, response and reference, 4 have extra as well. **kwargs gets the other columns. A first parameter named "
    "sample is the whole RewardSample. Other parameters with a default, or named in the options, are options"
)

_FIXED_OF = {name: value for value, names in FIXED.items() for name in names}
_VALUE_OF = {name: value for value, names in NAMES.items() for name in names}


@dataclass(frozen=True)
class RowNames:
    """Names of the data's columns, as far as they are known.

    Attributes:
        extra: columns beside prompt and answer; None: unknown yet, so any name may be a column.
        prompt, answer: columns of the prompt and of the reference answer (`data.prompt_key`, `data.answer_key`).
    """

    extra: frozenset[str] | None = None
    prompt: str = "prompt"
    answer: str | None = "answer"

    def value_of(self, name: str) -> str | None:
        """Return the value that a column of this name holds, or None if there is no such column."""
        if name == self.answer:
            return "reference"
        if name == self.prompt:
            return "prompt"
        return (
            f"{COLUMN}{name}" if self.extra is not None and name in self.extra else None
        )


@dataclass(frozen=True)
class Binding:
    """The values that a function is called with.

    Attributes:
        positional: values of parameters that can only be given by position.
        keywords: parameter -> value.
        rest: whether `**kwargs` gets the columns that no parameter takes.
        taken: names that `**kwargs` must not get: those of parameters and options.
    """

    positional: tuple[str, ...]
    keywords: dict[str, str]
    rest: bool = False
    taken: frozenset[str] = frozenset()

    def arguments(
        self, value_of: Callable[[str], Any], columns: Collection[str]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the call's arguments.

        Args:
            value_of: returns a value by its name.
            columns: columns of the row, or of the rows, beside prompt and answer.
        """
        keywords = {name: value_of(value) for name, value in self.keywords.items()}
        if self.rest:
            keywords |= {
                name: value_of(f"{COLUMN}{name}")
                for name in columns
                if name not in self.taken
            }
        return [value_of(value) for value in self.positional], keywords

    def described(
        self, function: Callable[..., Any], options: Collection[str]
    ) -> dict[str, str]:
        """Return parameter -> the value that it is bound to, in words."""
        positional = iter(self.positional)
        sources = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in options:
                sources[parameter.name] = "an option"
            elif parameter.kind is Parameter.VAR_KEYWORD:
                sources[f"**{parameter.name}"] = "the other columns"
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                sources[f"*{parameter.name}"] = ", ".join(positional) or "nothing"
            elif (
                parameter.kind is Parameter.POSITIONAL_ONLY
                and parameter.name not in self.keywords
            ):
                sources[parameter.name] = next(positional, "its default")
            else:
                sources[parameter.name] = self.keywords.get(
                    parameter.name, "its default"
                )
        return sources


def bind(
    function: Callable[..., Any],
    options: Collection[str],
    *,
    batched: bool,
    row: RowNames | None = None,
) -> Binding:
    """Decide which value each parameter of a reward function gets.

    Args:
        options: names of the parameters that get their values from the configuration.
        batched: whether the function takes lists.
        row: names of the data's columns.

    Raises:
        ValueError: a parameter cannot be bound; names it and the reason.
    """
    row = row or RowNames()
    for name in NOT_GIVEN:
        if row.value_of(name) is None and _needs_keyword(function, name):
            raise ValueError(
                f"{name}, which the function reads from its keyword arguments, {WHY_NOT_GIVEN}"
            )
    named: list[Parameter] = []
    takes_positional = False
    takes_rest = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in options:
            continue
        if parameter.kind is Parameter.VAR_POSITIONAL:
            takes_positional = True
        elif parameter.kind is Parameter.VAR_KEYWORD:
            takes_rest = True
        else:
            named.append(parameter)
    # `def score(*args)` does not name its parameters, so it gets all four values.
    if not named and takes_positional:
        return Binding(VALUES, {})
    needed = [parameter for parameter in named if parameter.default is Parameter.empty]
    _check_needed(needed, row, batched=batched)
    chosen = _bind_needed(needed, row, batched=batched)
    for parameter in named:
        if parameter.default is Parameter.empty:
            continue
        # A function of single samples has no lists to log.
        if parameter.name == LOG_EXTRA and not batched:
            continue
        if value := _optional_value(parameter, chosen, row, batched=batched):
            chosen[parameter.name] = value
    if not chosen and not takes_rest:
        raise ValueError(
            f"the function has no parameters; expected some of {', '.join(VALUES)}"
        )
    taken = frozenset({*(parameter.name for parameter in named), *options})
    if takes_rest:
        chosen |= _extra_keywords(chosen, taken, row, batched=batched)
    if batched:
        chosen = {
            name: _OF_TRL.get((name, value), value) for name, value in chosen.items()
        }
    positional_names = [
        parameter.name
        for parameter in named
        if parameter.kind is Parameter.POSITIONAL_ONLY and parameter.name in chosen
    ]
    positional = tuple(chosen[name] for name in positional_names)
    keywords = {
        name: value for name, value in chosen.items() if name not in positional_names
    }
    return Binding(positional, keywords, takes_rest, taken | keywords.keys())


def _check_needed(needed: Sequence[Parameter], row: RowNames, *, batched: bool) -> None:
    """Refuse parameters without a default that a function of single samples cannot get, and misplaced samples.

    Raises:
        ValueError: names the parameters and the reason.
    """
    if not batched:
        lists = [
            parameter.name for parameter in needed if _is_list(parameter.name, row)
        ]
        if lists:
            raise ValueError(
                f"{', '.join(lists)} holds whole lists, which needs batched: true"
            )
        if any(parameter.name == LOG_EXTRA for parameter in needed):
            raise ValueError(
                f"{LOG_EXTRA} holds whole lists, which needs batched: true"
            )
    for parameter in needed:
        # A function whose first parameter is the sample is called without a binding, so
        # here it stands elsewhere.
        if (
            parameter.name in ("sample", "samples")
            and row.value_of(parameter.name) is None
        ):
            raise ValueError("sample stands first, or, with batched: true, samples")


def _needs_keyword(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function reads `kwargs[name]` and does nothing else with that name, such as testing for it."""
    # The signature does not tell which keys of **kwargs a function reads; its bytecode
    # does. A key that is missing would otherwise only fail in the first step of the
    # run.
    parameters = inspect.signature(function).parameters.values()
    rest_names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is Parameter.VAR_KEYWORD
    ]
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not rest_names or code is None:
        return False
    instructions = list(dis.get_instructions(code))
    uses = [
        place
        for place, instruction in enumerate(instructions)
        if instruction.argval == name and instruction.opname == "LOAD_CONST"
    ]
    # A second use may be a test such as `name in kwargs`, after which a missing key is
    # not read.
    if len(uses) != 1:
        return False
    (place,) = uses
    if place == 0 or place + 1 == len(instructions):
        return False
    # `kwargs[name]` loads kwargs, then the name, then subscripts. Python 3.14 has one
    # operation for all operators.
    container = instructions[place - 1]
    operation = instructions[place + 1]
    is_subscript = operation.opname == "BINARY_SUBSCR" or (
        operation.opname,
        operation.argrepr,
    ) == ("BINARY_OP", "[]")
    return is_subscript and container.argval == rest_names[0]


def value_of(name: str) -> str | None:
    """Return which of `VALUES` a parameter of this name stands for, in singular or plural; None if it is unknown."""
    return _VALUE_OF.get(name) or _VALUE_OF.get(name.removesuffix("s"))


def _is_list(name: str, row: RowNames) -> bool:
    """Return whether a name is the plural of sample, prompt or response.

    `references` is not one of these names, since one row may have several references.
    """
    if row.value_of(name) is not None:
        return False
    return name == "samples" or (
        name not in _VALUE_OF and value_of(name) in ("prompt", "response")
    )


def _bind_needed(
    needed: list[Parameter], row: RowNames, *, batched: bool
) -> dict[str, str]:
    """Bind the parameters without a default."""
    chosen: dict[str, str] = {}
    for parameter in needed:
        value = _value(parameter.name, row, batched=batched)
        if value:
            chosen[parameter.name] = value
    _prefer_columns(chosen, row)
    unknown = [parameter for parameter in needed if parameter.name not in chosen]
    refused = [parameter.name for parameter in unknown if parameter.name in NOT_GIVEN]
    if refused:
        raise ValueError(f"{', '.join(refused)} {WHY_NOT_GIVEN}")
    positional = [
        parameter
        for parameter in needed
        if parameter.kind is not Parameter.KEYWORD_ONLY
    ]
    # The number of parameters means something only if no name does.
    if positional and all(parameter in unknown for parameter in positional):
        chosen |= _by_count(positional, chosen)
        unknown = [parameter for parameter in unknown if parameter.name not in chosen]
    if unknown and row.extra is not None:
        known_columns = {*row.extra, row.prompt}
        if row.answer:
            known_columns.add(row.answer)
        columns = ", ".join(sorted(known_columns))
        names = ", ".join(parameter.name for parameter in unknown)
        raise ValueError(f"cannot bind {names}: the data has the columns {columns}")
    # The columns are unknown yet, so assume that the names are columns. Calling the
    # function will show it.
    chosen |= {parameter.name: f"{COLUMN}{parameter.name}" for parameter in unknown}
    values = [value for value in chosen.values() if not value.startswith(COLUMN)]
    if len(set(values)) < len(values):
        twice = ", ".join(
            name for name, value in chosen.items() if values.count(value) > 1
        )
        raise ValueError(f"cannot bind {twice}: they mean the same")
    return chosen


def _value(name: str, row: RowNames, *, batched: bool) -> str | None:
    """Return the value that a parameter's name stands for, or None if the name is unknown."""
    if value := _FIXED_OF.get(name):
        return value
    singular = name.removesuffix("s") if batched else name
    return row.value_of(name) or row.value_of(singular) or value_of(name)


def _prefer_columns(chosen: dict[str, str], row: RowNames) -> None:
    """Bind a fixed name to its column if another name means the same: `completions` beside a column `response`."""
    for name, value in list(chosen.items()):
        synonyms = [
            other for other, same in chosen.items() if other != name and same == value
        ]
        if synonyms and name in (row.extra or ()) and not name.startswith("completion"):
            chosen[name] = f"{COLUMN}{name}"


def _by_count(positional: list[Parameter], chosen: Mapping[str, str]) -> dict[str, str]:
    """Bind parameters with unknown names by their number."""
    if len(positional) not in BY_COUNT:
        raise ValueError(
            f"{len(positional)} parameters, but only {len(VALUES)} values: {', '.join(VALUES)}"
        )
    values = dict(
        zip(
            (parameter.name for parameter in positional),
            BY_COUNT[len(positional)],
            strict=True,
        )
    )
    if set(values.values()) & set(chosen.values()):
        raise ValueError(f"cannot bind {', '.join(values)}")
    return values


def _optional_value(
    parameter: Parameter, chosen: Mapping[str, str], row: RowNames, *, batched: bool
) -> str | None:
    """Return the value of a parameter with a default: the column of its name, or a
    value that its name asks for, or None.
    """
    name = parameter.name
    if name in (*FIXED[TOKEN_IDS], *OF_THE_RUN):
        return _FIXED_OF[name]
    value = _value(name, row, batched=batched)
    if value is None or (value.startswith(COLUMN) and _FIXED_OF.get(name) is None):
        return value
    if name == row.answer and value not in chosen.values():
        return value
    waits = parameter.default is None or value == name
    return value if waits and value not in chosen.values() else None


def _extra_keywords(
    chosen: Mapping[str, str], taken: Collection[str], row: RowNames, *, batched: bool
) -> dict[str, str]:
    """Return the values of `**kwargs` beside the columns: the answer under its column's name, and TRL's names."""
    more: dict[str, str] = {}
    if row.answer is not None and "reference" not in chosen.values():
        more[row.answer] = "reference"
    is_of_trl = (
        not chosen
        or {*FIXED["prompt"], *FIXED["response"], *FIXED[TOKEN_IDS]} & chosen.keys()
    )
    if batched and is_of_trl:
        more |= {
            "prompts": "prompt",
            "completions": "response",
            "completion_ids": TOKEN_IDS,
        }
        more |= {name: name for name in OF_THE_RUN}
    elif not chosen:
        more |= {"prompt": "prompt", "response": "response", "reference": "reference"}
    return {name: value for name, value in more.items() if name not in taken}


def missing_columns(binding: Binding, columns: Sequence[str]) -> list[str]:
    """List the columns that a function needs and that `columns` lacks."""
    missing = []
    for value in (*binding.positional, *binding.keywords.values()):
        if not value.startswith(COLUMN):
            continue
        column = value.removeprefix(COLUMN)
        if column not in columns:
            missing.append(column)
    return missing
