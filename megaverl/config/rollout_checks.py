"""`rollout`: rules of sampling that never hold or leave nothing to learn, bounds with no number between them."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config.errors import ConfigIssue
from megaverl.config.rollout import RolloutConfig
from megaverl.config.schema import Config

_KEY = "rollout.sampling_rules"


def sampling_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Every mistake in how samples are drawn by the length of their prompt, and in how many are drawn at once."""
    rollout = config.rollout
    yield from _bounds(rollout)
    if not rollout.adaptive_sampling:
        if rollout.sampling_rules != RolloutConfig().sampling_rules:
            yield ConfigIssue(_KEY, "is set, but rollout.adaptive_sampling is false. Use adaptive_sampling: true.")
        return
    if not rollout.sampling_rules:
        yield ConfigIssue(_KEY, "is empty, and rollout.adaptive_sampling is set. Give rules, or leave both out.")
    if rollout.function is not None:
        yield ConfigIssue(
            "rollout.adaptive_sampling",
            "is set, and rollout.function draws in its own way. Use one of the two.",
            involves=("rollout.function",),
        )
    yield from _rules(config)


def _bounds(rollout: RolloutConfig) -> Iterator[ConfigIssue]:
    if rollout.use_dynamic_batching and rollout.min_sequences > rollout.max_sequences:
        yield ConfigIssue(
            "rollout.min_sequences",
            f"found {rollout.min_sequences}, more than rollout.max_sequences={rollout.max_sequences}. Lower it, or "
            "raise the other.",
            involves=("rollout.max_sequences",),
        )
    if rollout.engine == "vllm" and rollout.use_dynamic_batching and rollout.memory_budget_mb is not None:
        yield ConfigIssue(
            "rollout.memory_budget_mb",
            "is set, and vLLM has a cache of its own, of the size that rollout.vllm.gpu_memory_utilization (on a CPU "
            "kv_cache_memory_bytes) says. Leave it out.",
            involves=("rollout.engine",),
        )
    for name in ("min_sequences", "max_sequences", "memory_budget_mb"):
        if not rollout.use_dynamic_batching and getattr(rollout, name) != getattr(RolloutConfig(), name):
            yield ConfigIssue(
                f"rollout.{name}", "is set, but rollout.use_dynamic_batching is false. Use use_dynamic_batching: true."
            )


def _rules(config: Config) -> Iterator[ConfigIssue]:
    rules, group_size = config.rollout.sampling_rules, config.algorithm.group_size
    for number, rule in enumerate(rules):
        key = f"{_KEY}.{number}"
        if not rule.changes:
            yield ConfigIssue(key, "changes nothing. Give temperature, top_k, or both.")
        if rule.under is not None and rule.over is not None and rule.under <= rule.over + 1:
            yield ConfigIssue(key, f"holds for no prompt: under {rule.under} and over {rule.over} tokens.")
        if rule.under is rule.over is None and number < len(rules) - 1:
            yield ConfigIssue(key, "holds for every prompt, so that no rule after it is looked at. Put it last.")
        if rule.temperature == 0 and group_size > 1:
            yield ConfigIssue(
                f"{key}.temperature",
                f"found 0; with algorithm.group_size={group_size} all responses of a greedy prompt are the same, and "
                "teach nothing. Give rollout.sampling_rules whose temperatures are above 0, such as "
                "[{over: 512, temperature: 0.7, top_k: 50}].",
                involves=("algorithm.group_size", "algorithm.name"),
            )
