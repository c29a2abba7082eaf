"""Values that the program of the server sends to the workers, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens with a target at every position.

    Attributes:
        tokens: input tokens of each row.
        targets: for each input token, the token whose log-prob is computed after it.
        inputs: inputs of the loss by name, shaped as `targets`.
    """

    tokens: list[list[int]]
    targets: list[list[int]]
    inputs: dict[str, list[list[float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class LossRequest:
    """Loss of a request: a name of `SUMMED_LOSSES`, and the options that differ from their defaults."""

    name: str
    options: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedWeights:
    """Adapters to sample or score with.

    Attributes:
        folder: their folder in peft's format. "": the base model, without adapters.
        version: time at which they were saved, since a name may be used again.
    """

    folder: str = ""
    version: float = 0.0


@dataclass(frozen=True)
class PromptRows:
    """Prompts to sample from, one response each.

    Attributes:
        ignores_eos: only `stop_tokens` end a response.
    """

    prompts: list[list[int]]
    seeds: list[int]
    max_tokens: list[int]
    temperatures: list[float]
    top_ps: list[float]
    top_ks: list[int]
    stop_tokens: list[list[int]]
    ignores_eos: list[bool]


@dataclass(frozen=True)
class CallOutcome:
    """Result of one call.

    Attributes:
        error: why the call was refused, for the client. Empty: it was not.
        log_probs: log-prob of each target or sampled token, by row.
        tokens: sampled tokens, by row.
        stopped: whether each response ended at a stop token.
        numbers: metrics by name.
    """

    error: str = ""
    log_probs: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
