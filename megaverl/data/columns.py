"""Which columns of a row are read, and as what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaverl.data.prompts import Message, Tools, check_prompt
from megaverl.errors import DataError


class RowColumns(NamedTuple):
    """A row, taken apart: prompt, reference answer, tools, and all further columns, for the reward."""

    prompt: str | list[Message]
    reference: Any
    tools: Tools | None
    extra: dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """Names of columns; `a.b` reaches into a nested one.

    Attributes:
        answer: None: there is none.
        tools: what the chat template is shown; a row need not have it.
        default_tools: of rows that have none.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    tools: str = "tools"
    default_tools: Tools | None = None

    def read(self, row: Mapping[str, Any], where: str) -> RowColumns:
        """The row's columns, checked.

        Raises:
            DataError: one that must be there is not, or is of a wrong type.
        """
        prompt = check_prompt(_column(row, self.prompt, where, "data.prompt_key"), where, self.prompt)
        reference = None if self.answer is None else _column(row, self.answer, where, "data.answer_key")
        tools = self.default_tools
        if row.get(self.tools):
            tools = check_tools(row[self.tools], f"{where}: {self.tools!r}")
        own = (self.prompt, self.answer, self.tools)
        return RowColumns(prompt, reference, tools, {key: value for key, value in row.items() if key not in own})


def check_tools(value: Any, where: str) -> Tools:
    """Tools as chat templates take them: a list of JSON schemas of functions; as text, JSON of such.

    Raises:
        DataError: says what was found.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error}).") from error
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if (
            not isinstance(value, list)
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise DataError(
                f'{where}: expected a list of tools like {{"type": "function", "function": {{"name": "...", '
                f'"parameters": {{...}}}}}}; found {tool!r:.80}.'
            )
    return list(value)


def load_tools(path: str | Path) -> Tools:
    """The tools in a JSON file (`data.tools`).

    Raises:
        DataError: it is not there, or not such a list.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"data.tools: {path} cannot be read ({error}).") from error
    return check_tools(text, f"data.tools: {path}")


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of `key`, or of the path `a.b`; None where there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _column(row: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    """The value of `key` (or of the path `a.b`), which must be there and not null."""
    value = value_at(row, key)
    if value is None and key in row:
        raise DataError(f"{where}: {key!r} is null. Fill it in, remove the row, or name another column with {setting}.")
    if value is None:
        raise DataError(
            f"{where}: no {key!r} in this row; its keys: {', '.join(map(repr, row)) or 'none'}. "
            f"Add it, or name the right column with {setting}."
        )
    return value
