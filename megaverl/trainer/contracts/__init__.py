"""What a part of the user's own must keep to, as tests that they can run on it: `megaverl check-plugin`. Every kind of
plug-in, the key that names it, and its contract: promises that are tried one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from megaverl.errors import ConfigError
from megaverl.plugins import load_object
from megaverl.user_code import describe, user_code, where_raised

Promise = tuple[str, Callable[[], None]]


class Kind(NamedTuple):
    """key: where a configuration names it. what: what it is, in a few words."""

    key: str
    what: str


# The promises of each are a function of `kinds`, imported when they are wanted, as some need torch.
KINDS = {
    "reward": Kind("reward.N.function", "a function: prompt, response, reference, extra -> number"),
    "environment": Kind("environment.name", "a class derived from megaverl.rollout.environments.Environment or Game"),
    "generation": Kind("rollout.function", "a function: generate, prompts, sampling, seeds -> responses"),
    "filter": Kind("algorithm.rollout_filter", "a function: batch, scores -> true or false for each sample"),
    "loss": Kind("algorithm.policy_loss", "a function: log_probs, old_log_probs, advantages, weights -> LossOutput"),
    "preference": Kind("preference.loss", "a function of log-probs of pairs, or of single responses -> LossOutput"),
    "advantage": Kind("algorithm.advantage", "a function of what it names of a batch -> Advantages"),
    "data": Kind("data.train.N.path", "a function without arguments -> rows"),
    "tracker": Kind("run.log_with", "a class: RunInfo -> write(step, seconds, metrics), close()"),
}


@dataclass(frozen=True)
class PromiseResult:
    """promise: what must hold. problem: why it does not; empty where it does."""

    promise: str
    problem: str = ""


class Broken(Exception):
    """A promise that does not hold; the message says what was found and what to change."""


def check(kind: str, name: str, options: Mapping[str, object] | None = None) -> Iterator[PromiseResult]:
    """Try the contract of `kind` on what `name` leads to.

    Args:
        options: keyword arguments, as `options` in the configuration gives them; for a reward also `batched`, and
            `row`, the columns of a row.

    Raises:
        ConfigError: there is no such kind, or nothing under this name.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}.")
    load_object(name, KINDS[kind].key)
    promises: Callable[[str, dict[str, Any]], Iterable[Promise]] = getattr(
        import_module("megaverl.trainer.contracts.kinds"), f"{kind}_promises"
    )
    yield from keep(promises(name, dict(options or {})))


class _Raised(Exception):
    """What the user's part raised, as text."""


def _raised(error: BaseException) -> _Raised:
    return _Raised(f"{describe(error)}{where_raised(error)}")


def keep(promises: Iterable[Promise]) -> Iterator[PromiseResult]:
    """Try every promise; one that is broken does not stop the others."""
    for words, attempt in promises:
        try:
            with user_code(_raised, keep=Broken):
                attempt()
        except Broken as broken:
            yield PromiseResult(words, str(broken))
        except _Raised as raised:
            yield PromiseResult(words, str(raised))
        else:
            yield PromiseResult(words)
