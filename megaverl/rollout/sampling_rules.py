"""Adaptive sampling: how a prompt's responses are drawn depends on its length, by the rules of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaverl.rollout.engine import Sampling, SamplingOptions, of_each

if TYPE_CHECKING:
    from megaverl.config.rollout import RolloutConfig, SamplingRule


def sampling_options(given: Mapping[str, Any], **changes: Any) -> SamplingOptions:
    """The configuration's sampling fields, with changes, as the engine takes them."""
    return SamplingOptions(**{**given, **changes})


def sampling_of(config: RolloutConfig, lengths: Sequence[int]) -> Sampling:
    """How responses to prompts of these lengths are drawn: all alike, or, with adaptive sampling, each its own way."""
    plain = sampling_options(config.sampling)
    if not config.adaptive_sampling:
        return plain
    ways = [sampling_options(config.sampling, **rule.changes) for rule in config.sampling_rules]
    found = []
    for length in lengths:
        number = first_rule(config.sampling_rules, length)
        found.append(plain if number is None else ways[number])
    return found


def first_rule(rules: Sequence[SamplingRule], length: int) -> int | None:
    """The number of the first rule that holds for a prompt of so many tokens."""
    return next((number for number, rule in enumerate(rules) if rule.holds(length)), None)


def drawing(sampling: Sampling, count: int) -> dict[str, torch.Tensor]:
    """What a batch must say of how its samples were drawn, so that the trainer computes log-probs of the same
    distributions: nothing where one temperature says it all.

    Args:
        sampling: of all, or of each; where there are several agents, of each of the first one's.
        count: samples of the batch.
    """
    if isinstance(sampling, SamplingOptions) and not sampling.top_k:
        return {}
    ways = of_each(sampling, count)
    ways = list(ways) * (count // len(ways))
    return {
        "temperatures": torch.tensor([way.temperature or 1.0 for way in ways], dtype=torch.float32),
        "top_ks": torch.tensor([way.top_k for way in ways], dtype=torch.int64),
    }
