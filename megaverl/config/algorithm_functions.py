"""A function that `algorithm` names, against what is known of it: its name, what it reads, its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaverl.config.annotations import fits
from megaverl.config.errors import ConfigIssue, did_you_mean, found, listed
from megaverl.config.option_ranges import out_of_order, out_of_range
from megaverl.config.registered import Registered, of_the_users_own, registered


def named_function(key: str, registry: str, name: str) -> tuple[Registered | None, list[ConfigIssue]]:
    """Its signature, None where that cannot be told; and what is wrong with its name.

    Args:
        key: under `algorithm`. registry: where it is registered, unless it is `module:function`.
    """
    key = f"algorithm.{key}"
    if ":" in name:
        try:
            return of_the_users_own(name), []
        except LookupError as error:
            return None, [ConfigIssue(key, f"found {found(name)}: {error}.")]
    known = registered(registry)
    if name not in known:
        text = f"found {found(name)}; known: {listed(sorted(known), most=40)}, or a function of your own as "
        return None, [ConfigIssue(key, f"{text}module:function.{did_you_mean(name, known)}")]
    return known[name], []


def reading_mistakes(
    key: str, name: str, function: Registered | None, given: Sequence[str], options: Sequence[str]
) -> Iterator[ConfigIssue]:
    """What a function wants and is not given: inputs, and options without a default."""
    if function is None:
        return
    key = f"algorithm.{key}"
    if unknown := [each for each in function.inputs if each not in given]:
        yield ConfigIssue(key, f"found {found(name)}, which reads {listed(unknown)}; it is given: {listed(given)}.")
    if missing := [each for each in function.required if each not in options]:
        known = f"only {listed(options)}" if options else "none"
        text = f"found {found(name)}, which needs the option {listed(missing)}, and {known} can be set. Give a default."
        yield ConfigIssue(key, text)


def option_mistakes(key: str, name: str, given: Mapping[str, Any], function: Registered) -> Iterator[ConfigIssue]:
    """Options that a function does not have, of a wrong type or out of range, and those that it needs."""
    options = function.options
    for option, value in given.items():
        if option not in options:
            known = f" It has: {listed(sorted(options))}." if options else " It has none."
            yield ConfigIssue(f"{key}.{option}", f"{name} has no such option.{did_you_mean(option, options) or known}")
        elif not fits(value, options[option]):
            yield ConfigIssue(f"{key}.{option}", f"found {found(value)}; expected {options[option].type_text}.")
        elif expected := out_of_range(option, value):
            yield ConfigIssue(f"{key}.{option}", f"found {found(value)}; expected {expected}.")
    if wrong := out_of_order(given):
        low, high = wrong
        yield ConfigIssue(f"{key}.{low}", f"found {found(given[low])}; expected below {high}, {found(given[high])}.")
    for option in function.required:
        if option not in given:
            yield ConfigIssue(f"{key}.{option}", f"is not set, and {name} needs it.", involves=("algorithm.name",))
