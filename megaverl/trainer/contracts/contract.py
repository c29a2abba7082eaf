"""Contract of a kind of plug-in: a list of promises, each tested separately on the user's object.

Each kind has a configuration key that names its plug-ins.
"""

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
    """Kind of a plug-in.

    Attributes:
        key: configuration key that names a plug-in of this kind.
        summary: short description of its signature or class.
    """

    key: str
    summary: str


# The promises of each kind are a function in `kinds`, which is imported on demand
# because it needs torch.
KINDS = {
    "reward": Kind(
        "reward.N.function", "a function: prompt, response, reference, extra -> number"
    ),
    "environment": Kind(
        "environment.name",
        "a class derived from megaverl.rollout.environments.Environment or Game",
    ),
    "generation": Kind(
        "rollout.function",
        "a function: generate, prompts, sampling, seeds -> responses",
    ),
    "filter": Kind(
        "algorithm.rollout_filter",
        "a function: batch, scores -> true or false for each sample",
    ),
    "loss": Kind(
        "algorithm.policy_loss",
        "a function: log_probs, old_log_probs, advantages, weights -> LossOutput",
    ),
    "preference": Kind(
        "preference.loss",
        "a function of log-probs of pairs, or of single responses -> LossOutput",
    ),
    "advantage": Kind(
        "algorithm.advantage", "a function of what it names of a batch -> Advantages"
    ),
    "data": Kind("data.train.N.path", "a function without arguments -> rows"),
    "tracker": Kind(
        "run.log_with", "a class: RunInfo -> write(step, seconds, metrics), close()"
    ),
}


@dataclass(frozen=True)
class PromiseResult:
    """Result of testing one promise.

    Attributes:
        promise: condition that was tested.
        problem: description of the violation, or empty if the promise holds.
    """

    promise: str
    problem: str = ""


class Broken(Exception):
    """Exception of a violated promise. The message says what was found and what to change."""


def check(
    kind: str, name: str, options: Mapping[str, object] | None = None
) -> Iterator[PromiseResult]:
    """Test the contract of `kind` on the object that `name` refers to. Yield a result for each promise.

    Args:
        options: keyword arguments, like `options` in the configuration. For a reward also `batched`, and `row`, the
            columns of a row.

    Raises:
        ConfigError: the kind does not exist, or `name` refers to nothing.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}.")
    load_object(name, KINDS[kind].key)
    promises: Callable[[str, dict[str, Any]], Iterable[Promise]] = getattr(
        import_module("megaverl.trainer.contracts.kinds"), f"{kind}_promises"
    )
    yield from keep(promises(name, dict(options or {})))


class _Raised(Exception):
    """Exception with the text of an error that the user's code raised."""


def _raised(error: BaseException) -> _Raised:
    return _Raised(f"{describe(error)}{where_raised(error)}")


def keep(promises: Iterable[Promise]) -> Iterator[PromiseResult]:
    """Test every promise and yield its result. A violated promise does not stop the others."""
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
