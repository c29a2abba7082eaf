"""Functions of the user's own inside a step: how responses are generated, and which of them train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaverl.data.batch import RolloutBatch
from megaverl.errors import ConfigError, DataError
from megaverl.plugins import load_object
from megaverl.rollout.engine import Generation, SamplingOptions, check_generations
from megaverl.workers.reward import Scores

# prompts (token ids), sampling, seeds -> one response each
Generate = Callable[[Sequence[Sequence[int]], SamplingOptions, Sequence[int]], list[Generation]]


def generate_by(
    name: str,
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    seeds: Sequence[int],
) -> list[Generation]:
    """Responses by the function that `rollout.function` names.

    It is called as function(generate, prompts, sampling, seeds) on every rank alike, may call `generate` as often as it
    likes, and returns one `Generation` for each prompt: what it returns is what trains.

    Raises:
        ConfigError: there is no such function. RolloutError: what it returns is not one response per prompt.
    """
    function = load_object(name, "rollout.function")
    found = list(_called(function, "rollout.function", name, generate, prompts, sampling, seeds))
    check_generations(found, len(prompts))
    return found


def kept_by(name: str, batch: RolloutBatch, scores: Scores) -> torch.Tensor:
    """[B] bool: the samples that the function named by `algorithm.rollout_filter` keeps.

    It is called as function(batch, scores), and returns true for what is to train. A sample that it drops still counts
    in the rewards of its group.

    Raises:
        ConfigError: there is no such function. DataError: it returned something else, or dropped everything.
    """
    found = _called(load_object(name, "algorithm.rollout_filter"), "algorithm.rollout_filter", name, batch, scores)
    try:
        keep = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"algorithm.rollout_filter: {name} returned {type(found).__name__}: {error}") from error
    if keep.shape != (len(batch),) or keep.dtype != torch.bool:
        raise DataError(
            f"algorithm.rollout_filter: {name} returned {keep.dtype} of shape {list(keep.shape)}; expected bool of "
            f"shape [{len(batch)}], true for each sample that is to train."
        )
    if not bool(keep.any()):
        raise DataError(
            f"algorithm.rollout_filter: {name} dropped all {len(batch)} samples: nothing is left to train on."
        )
    return keep


def _called(function: Any, key: str, name: str, *arguments: Any) -> Any:
    if not callable(function):
        raise ConfigError(f"{key}: {name} is {type(function).__name__}; expected a function.")
    try:
        return function(*arguments)
    except Exception as error:  # whatever the user's function raises
        error.add_note(f"in {name}, which {key} names")
        raise
