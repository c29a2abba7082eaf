"""Adaptive sampling: rules of the configuration that choose the sampling options of a prompt by its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaverl.rollout.engine import Sampling, SamplingOptions, sampling_options

if TYPE_CHECKING:
    from megaverl.config.roles import RolloutConfig


def sampling_of(config: RolloutConfig, lengths: Sequence[int]) -> Sampling:
    """Return the sampling of prompts with these lengths: equal for all, or by rule under adaptive sampling."""
    plain = sampling_options(config.sampling)
    if not config.adaptive_sampling:
        return plain
    by_rule = [
        (rule, sampling_options(config.sampling, **rule.changes))
        for rule in config.sampling_rules
    ]

    def options_at(length: int) -> SamplingOptions:
        """Return the options of the first rule that holds."""
        for rule, options in by_rule:
            if rule.holds(length):
                return options
        return plain

    return [options_at(length) for length in lengths]
