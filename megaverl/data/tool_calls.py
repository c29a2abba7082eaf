"""Tool calls in messages: removal of filled-in nulls, and conversion between the two forms of arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaverl.data.row_values import parse_text, plain_value


def without_nulls(call: Any) -> Any:
    """Remove null fields of a call, which file formats fill in.

    Nulls among its arguments come from the model and stay.
    """
    if not isinstance(call, Mapping):
        return call
    kept = {key: value for key, value in call.items() if value is not None}
    if isinstance(kept.get("function"), Mapping):
        kept["function"] = {
            key: value for key, value in kept["function"].items() if value is not None
        }
    return kept


def tool_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the arguments of all tool calls in a conversation."""
    return [
        _function_of(call).get("arguments")
        for message in messages
        for call in _calls_of(message)
    ]


def with_arguments(
    messages: Sequence[dict[str, Any]], where: str, *, as_text: bool
) -> list[dict[str, Any]]:
    """Return the conversation with arguments of tool calls as JSON text, or as the mappings that such text holds.

    Text that is not a JSON object stays unchanged.

    Args:
        where: the row, for messages.
        as_text: True converts mappings to text, False text to mappings.

    Raises:
        DataError: the text holds what JSON cannot, such as half of a surrogate pair.
    """
    return [
        {
            **message,
            "tool_calls": [
                _changed_call(call, where, as_text) for call in message["tool_calls"]
            ],
        }
        if any(_calls_of(message))
        else message
        for message in messages
    ]


def _changed_call(call: Any, where: str, as_text: bool) -> Any:
    """Return a call with converted arguments."""
    if not isinstance(call, Mapping) or "arguments" not in _function_of(call):
        return call
    function = dict(_function_of(call))
    arguments = function["arguments"]
    if as_text and isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        function["arguments"] = _parsed(arguments, where)
    return (
        {**call, "function": function}
        if isinstance(call.get("function"), Mapping)
        else function
    )


def _parsed(arguments: str, where: str) -> Any:
    """Return the mapping in JSON text, or the text itself if it holds no mapping."""
    try:
        parsed = parse_text(arguments)
    except ValueError:
        return arguments
    return (
        plain_value(parsed, where, "arguments")
        if isinstance(parsed, dict)
        else arguments
    )


def _calls_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the well-formed tool calls of a message."""
    calls = message.get("tool_calls")
    return (
        (call for call in calls if isinstance(call, Mapping))
        if isinstance(calls, list)
        else iter(())
    )


def _function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a call that has name and arguments.

    OpenAI nests it under "function", some data sets do not.
    """
    function = call.get("function")
    return function if isinstance(function, Mapping) else call
