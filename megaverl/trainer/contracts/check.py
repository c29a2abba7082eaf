"""Every kind of plug-in, the key that names it, and its contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megaverl.errors import ConfigError
from megaverl.plugins import load_object
from megaverl.trainer.contracts.promise import Promise, PromiseResult, keep


class Kind(NamedTuple):
    """key: where a configuration names it. what: what it is, in a few words."""

    key: str
    what: str


KINDS = {
    "reward": Kind("reward.N.function", "a function: prompt, response, reference, extra -> number"),
    "environment": Kind("environment.name", "a class derived from megaverl.rollout.environments.Environment or Game"),
    "generation": Kind("rollout.function", "a function: generate, prompts, sampling, seeds -> responses"),
    "filter": Kind("algorithm.rollout_filter", "a function: batch, scores -> true or false for each sample"),
    "loss": Kind("algorithm.policy_loss", "a function: log_probs, old_log_probs, advantages, weights -> LossOutput"),
    "advantage": Kind("algorithm.advantage", "a function of what it names of a batch -> Advantages"),
    "data": Kind("data.train.N.path", "a function without arguments -> rows"),
    "tracker": Kind("run.log_with", "a class: RunInfo -> write(step, seconds, metrics), close()"),
}


def check(kind: str, name: str, options: Mapping[str, Any] | None = None) -> Iterator[PromiseResult]:
    """Try the contract of `kind` on what `name` leads to.

    Args:
        options: keyword arguments, as `options` in the configuration gives them; for a reward also `batched`.

    Raises:
        ConfigError: there is no such kind, or nothing under this name.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}.")
    load_object(name, KINDS[kind].key)
    yield from keep(_promises(kind)(name, dict(options or {})))


def _promises(kind: str) -> Callable[[str, dict[str, Any]], Iterator[Promise]]:
    """Imported when they are wanted: some need torch."""
    if kind in ("loss", "advantage", "filter"):
        from megaverl.trainer.contracts import training

        return {
            "loss": training.loss_promises,
            "advantage": training.advantage_promises,
            "filter": training.filter_promises,
        }[kind]
    if kind in ("data", "tracker"):
        from megaverl.trainer.contracts import outside

        return {"data": outside.data_promises, "tracker": outside.tracker_promises}[kind]
    from megaverl.trainer.contracts import episodes

    if kind == "reward":
        return lambda name, options: episodes.reward_promises(
            name, options, batched=bool(options.pop("batched", False))
        )
    return {"environment": episodes.environment_promises, "generation": episodes.generation_promises}[kind]
