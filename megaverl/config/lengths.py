"""Lengths of prompts and responses against the model's context: chosen where not given, checked where given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaverl.config.errors import ConfigIssue, found
from megaverl.config.grids import used_roles
from megaverl.config.rollout import SAMPLING
from megaverl.config.run import DataConfig
from megaverl.config.schema import Config
from megaverl.config.yaml_source import MISSING
from megaverl.errors import ModelError
from megaverl.sharding.model_spec import ModelSpec

PROMPT, RESPONSE = "data.max_prompt_tokens", "rollout.sampling.max_tokens"
DEFAULTS: dict[str, int] = {
    PROMPT: DataConfig.model_fields["max_prompt_tokens"].default,
    RESPONSE: SAMPLING["max_tokens"],
}
# Of commands that learn responses from rows: the key that goes before RESPONSE.
OWN_RESPONSE = {
    "sft": "sft.max_answer_tokens",
    "dpo": "preference.max_response_tokens",
    "reward": "preference.max_response_tokens",
}


def fitted_lengths(values: dict[str, Any], command: str) -> tuple[dict[str, int], str]:
    """Those of PROMPT and RESPONSE that are not given, where their defaults exceed the model's context.

    Two that are not given share it 2 : 1; one gets what the other leaves, and no more than its default.

    Args:
        values: of the file and the overrides. Where they are wrong, or name no folder of a model, nothing is chosen.

    Returns: the lengths by key, and a sentence for the person; both empty where the defaults do.
    """
    prompt, response = _at(values, PROMPT), _at(values, RESPONSE)
    own = _at(values, OWN_RESPONSE.get(command, RESPONSE))
    limit = response if own is None or own is MISSING else own
    given = [length for length in (prompt, response, limit) if length is not MISSING]
    context = _context(_at(values, "model.path"))
    if context is None or not all(isinstance(length, int) and length > 0 for length in given):
        return {}, ""
    fitted = {}
    if prompt is MISSING:
        left = context - (0 if limit is MISSING else limit)
        both = limit is MISSING and sum(DEFAULTS.values()) > context
        fitted[PROMPT] = prompt = context * 2 // 3 if both else min(DEFAULTS[PROMPT], left)
    if limit is MISSING:
        fitted[RESPONSE] = min(DEFAULTS[RESPONSE], context - prompt)
    chosen = {key: length for key, length in fitted.items() if length != DEFAULTS[key]}
    if not chosen or min(chosen.values()) < 1:
        return {}, ""
    shown = " and ".join(f"{key}={length}" for key, length in chosen.items())
    return chosen, f"{shown}, not given, chosen to fit the model's context of {context} tokens"


def length_mistakes(config: Config, command: str, spec: ModelSpec | None) -> Iterator[ConfigIssue]:
    """A longest sample that the model's context or a role's micro-batch does not hold."""
    max_tokens = config.rollout.sampling["max_tokens"]
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        yield ConfigIssue(RESPONSE, f"found {found(max_tokens)}; expected an integer of at least 1.")
        return
    response, length = RESPONSE, max_tokens
    if command in OWN_RESPONSE:
        section, _, name = OWN_RESPONSE[command].partition(".")
        if (own := getattr(getattr(config, section), name)) is not None:
            response, length = OWN_RESPONSE[command], own
    longest = config.data.max_prompt_tokens + length
    both = f"{PROMPT}={config.data.max_prompt_tokens} + {response}={length} = {longest}"
    if spec and longest > spec.max_positions:
        yield ConfigIssue(
            PROMPT,
            f"{both} exceeds the model's context of {spec.max_positions} tokens. Lower one of the two.",
            involves=("model.path", PROMPT, response),
        )
    actors_cap = config.actor.micro_batch_tokens
    for role in used_roles(config, command):
        cap = getattr(config, role).micro_batch_tokens
        if cap < longest and (role == "actor" or cap != actors_cap):  # an inherited cap is the actor's mistake
            yield ConfigIssue(
                f"{role}.micro_batch_tokens",
                f"found {cap}, less than the longest sample, which must fit: {both} tokens.",
                involves=(PROMPT, response),
            )


def _at(values: Any, key: str) -> Any:
    """What stands at a dotted key; MISSING where nothing does, though a mapping is there that could hold it."""
    for part in key.split("."):
        if not isinstance(values, dict):
            return values
        if part not in values:
            return MISSING
        values = values[part]
    return values


def _context(folder: Any) -> int | None:
    """Positions of the model in a folder; None where there is none that can be read."""
    try:
        return ModelSpec.from_folder(folder).max_positions if folder and isinstance(folder, str) else None
    except ModelError:
        return None
