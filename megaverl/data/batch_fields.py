"""Schema of a RolloutBatch's tensors: name, dtype, dimensions, padding and meaning."""

from __future__ import annotations

import difflib
from typing import NamedTuple

import torch

from megaverl.errors import DataError


class Field(NamedTuple):
    """Declaration of a tensor.

    Attributes:
        dtype: stored dtype.
        axes: dimensions after the batch: "S" prompt, "R" response.
        fill: value of padding.
        meaning: description for messages and documentation.
    """

    dtype: torch.dtype
    axes: str = ""
    fill: int | float | bool = 0
    meaning: str = ""


FIELDS: dict[str, Field] = {
    "input_ids": Field(torch.int64, "S", 0, "prompt tokens, right-padded"),
    "prompt_lengths": Field(torch.int64, "", 0, "tokens in the prompt"),
    "generated_ids": Field(torch.int64, "R", 0, "response tokens, right-padded"),
    "response_lengths": Field(
        torch.int64, "", 0, "tokens in the response, whoever wrote them"
    ),
    "response_mask": Field(
        torch.bool, "R", False, "the tokens that train: those that the policy generated"
    ),
    "rollout_log_probs": Field(
        torch.float32, "R", 0.0, "log-probs that the engine reported"
    ),
    "weight_versions": Field(
        torch.int64,
        "R",
        -1,
        "version of the weights that each token was generated with",
    ),
    "temperatures": Field(
        torch.float32,
        "",
        1.0,
        "temperature at which a sample was drawn; greedy ones count as 1",
    ),
    "top_ks": Field(
        torch.int64,
        "",
        0,
        "how many of the likeliest tokens each of its tokens was drawn from; 0: all",
    ),
    "old_log_probs": Field(
        torch.float32, "R", 0.0, "log-probs of the actor at the start of the update"
    ),
    "ref_log_probs": Field(torch.float32, "R", 0.0, "log-probs of the reference"),
    "entropies": Field(
        torch.float32, "R", 0.0, "entropy of the actor's distribution, nats"
    ),
    "values": Field(torch.float32, "R", 0.0, "the critic's value before each token"),
    "last_values": Field(
        torch.float32, "", 0.0, "the value after a response that was cut off"
    ),
    "advantages": Field(torch.float32, "R", 0.0, "credit of each token"),
    "returns": Field(torch.float32, "R", 0.0, "targets of the critic"),
    "token_rewards": Field(torch.float32, "R", 0.0, "reward of each token"),
    "turn_ids": Field(
        torch.int64, "R", 0, "number of the turn, of the policy's own tokens"
    ),
    "turn_rewards": Field(
        torch.float32, "R", 0.0, "an environment's reward of a turn, at its last token"
    ),
    "rewards": Field(torch.float32, "", 0.0, "score of each response"),
    "margins": Field(
        torch.float32,
        "",
        0.0,
        "how much better the better response of a sample's pair is",
    ),
    "desirable": Field(
        torch.bool, "", False, "whether more of such responses is wanted (KTO)"
    ),
    "agent_ids": Field(
        torch.int64,
        "",
        0,
        "number of the agent whose sample it is, in a game of several",
    ),
    "episode_ids": Field(
        torch.int64, "", -1, "number of the episode; its conversations share it"
    ),
    "prompt_numbers": Field(
        torch.int64,
        "",
        -1,
        "the same for equal prompts, where a rank has not all of them",
    ),
    "group_ids": Field(
        torch.int64, "", -1, "index of the prompt; its responses share it"
    ),
}

REQUIRED = ("input_ids", "prompt_lengths", "generated_ids", "response_mask")


def declare_field(name: str, field: Field) -> None:
    """Add a custom tensor to the schema, so that batches can carry it.

    Raises:
        DataError: the name is taken by another field, or an axis is neither "S" nor "R".
    """
    if FIELDS.get(name, field) != field:
        raise DataError(
            f"batch field '{name}' is already declared as {FIELDS[name]}; choose another name"
        )
    if not name.isidentifier() or set(field.axes) - set("SR"):
        raise DataError(
            f"batch field '{name}' must be an identifier with axes out of 'S' and 'R', found {field}"
        )
    FIELDS[name] = field


def field_of(name: str) -> Field:
    """Return the declaration of `name`.

    Raises:
        DataError: there is no such field. Names the closest ones.
    """
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise DataError(
            f"a batch has no field '{name}'{hint} (known: {', '.join(FIELDS)}; or declare_field())"
        )
    return FIELDS[name]
