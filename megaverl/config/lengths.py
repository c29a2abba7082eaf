"""Lengths of prompts and responses: chosen to fit the model's context, and checked against it and the micro-batches."""

from __future__ import annotations

from typing import Any

from megaverl.config.errors import ConfigIssue
from megaverl.config.grids import used_roles
from megaverl.config.roles import SAMPLING
from megaverl.config.run import DataConfig
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.wording import yaml_text
from megaverl.config.yaml_source import MISSING
from megaverl.errors import ModelError
from megaverl.sharding.model_spec import ModelSpec

PROMPT = "data.max_prompt_tokens"
RESPONSE = "rollout.sampling.max_tokens"
# Lengths that `fitted_lengths` may lower if the user sets none.
DEFAULTS: dict[str, int] = {
    PROMPT: DataConfig.model_fields["max_prompt_tokens"].default,
    RESPONSE: SAMPLING["max_tokens"],
}
# Command that learns responses from data -> the key for their length, which takes
# precedence over RESPONSE.
OWN_RESPONSE = {
    "sft": "sft.max_answer_tokens",
    "dpo": "preference.max_response_tokens",
    "reward": "preference.max_response_tokens",
}


def fitted_lengths(values: dict[str, Any], command: str) -> tuple[dict[str, int], str]:
    """Choose lengths that fit the model's context, for those of PROMPT and RESPONSE that are not set.

    If neither is set, they share the context 2 : 1. If one is set, the other gets the
    rest, at most its default.

    Args:
        values: values of the file and the overrides. If they are wrong, or name no folder of a model, nothing is
            chosen.

    Returns:
        The chosen lengths by key, and a sentence for the user; both empty if the defaults fit.
    """
    prompt = _at(values, PROMPT)
    response = _at(values, RESPONSE)
    command_limit = _at(values, OWN_RESPONSE.get(command, RESPONSE))
    limit = (
        response if command_limit is None or command_limit is MISSING else command_limit
    )
    known_lengths = [
        length for length in (prompt, response, limit) if length is not MISSING
    ]
    context = _context(_at(values, "model.path"))
    if context is None or not all(
        isinstance(length, int) and length > 0 for length in known_lengths
    ):
        return {}, ""
    fitted = {}
    if prompt is MISSING:
        left = context - (0 if limit is MISSING else limit)
        both = limit is MISSING and sum(DEFAULTS.values()) > context
        fitted[PROMPT] = prompt = (
            context * 2 // 3 if both else min(DEFAULTS[PROMPT], left)
        )
    if limit is MISSING:
        fitted[RESPONSE] = min(DEFAULTS[RESPONSE], context - prompt)
    chosen = {key: length for key, length in fitted.items() if length != DEFAULTS[key]}
    if not chosen or min(chosen.values()) < 1:
        return {}, ""
    shown = " and ".join(f"{key}={length}" for key, length in chosen.items())
    return (
        chosen,
        f"{shown}, not given, chosen to fit the model's context of {context} tokens",
    )


def length_issues(config: Config, command: str, spec: ModelSpec | None) -> Issues:
    """Yield a mistake if the longest sample exceeds the model's context or a role's micro-batch."""
    max_tokens = config.rollout.sampling["max_tokens"]
    if (
        not isinstance(max_tokens, int)
        or isinstance(max_tokens, bool)
        or max_tokens < 1
    ):
        yield ConfigIssue(
            RESPONSE,
            f"found {yaml_text(max_tokens)}; expected an integer of at least 1.",
        )
        return
    response = RESPONSE
    length = max_tokens
    if command in OWN_RESPONSE:
        section, _, name = OWN_RESPONSE[command].partition(".")
        if (command_limit := getattr(getattr(config, section), name)) is not None:
            response = OWN_RESPONSE[command]
            length = command_limit
    longest = config.data.max_prompt_tokens + length
    both = f"{PROMPT}={config.data.max_prompt_tokens} + {response}={length} = {longest}"
    if spec and longest > spec.max_positions:
        yield ConfigIssue(
            PROMPT,
            f"{both} exceeds the model's context of {spec.max_positions} tokens. Lower one of the two.",
            involves=("model.path", PROMPT, response),
        )
    roles = used_roles(config, command)
    for role in roles:
        cap = getattr(config, role).micro_batch_tokens
        # An inherited cap is reported for the actor alone, if the command builds one.
        is_inherited = (
            role != "actor"
            and "actor" in roles
            and cap == config.actor.micro_batch_tokens
        )
        if cap < longest and not is_inherited:
            yield ConfigIssue(
                f"{role}.micro_batch_tokens",
                f"found {cap}, less than the longest sample, which must fit: {both} tokens.",
                involves=(PROMPT, response),
            )


def _at(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or MISSING.

    A value that is not a mapping is returned for every key inside it.
    """
    for part in key.split("."):
        if not isinstance(values, dict):
            return values
        if part not in values:
            return MISSING
        values = values[part]
    return values


def _context(folder: Any) -> int | None:
    """Return the context length of the model in a folder, or None if there is no readable model."""
    try:
        return (
            ModelSpec.outline(folder).max_positions
            if folder and isinstance(folder, str)
            else None
        )
    except ModelError:
        return None
