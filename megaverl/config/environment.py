"""`environment`: episodes of several turns, with tools or with other agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megaverl.config.errors import ConfigIssue, did_you_mean, found, listed
from megaverl.config.section import Passthrough, Positive, Section
from megaverl.errors import ConfigError
from megaverl.rollout.environments import agents_of, check_options, environment_names

if TYPE_CHECKING:
    from megaverl.config.schema import Config


class EnvironmentConfig(Section):
    """`environment`: what answers the model's turns."""

    name: str | None = Field(
        default=None,
        min_length=1,
        description="tools, guess, signals, or a class of your own as module:object. null: one response to "
        "each prompt.",
    )
    options: Passthrough = Field(default_factory=dict, description="Keyword arguments of the environment.")
    agents: Literal["shared", "own"] = Field(
        default="shared",
        description="Of a game. shared: one actor plays everybody, and the critic has a value head for each. own: each "
        "agent has an actor and a critic of its own (IPPO); they take turns on one engine.",
    )
    max_turns: Positive = Field(default=8, description="Most turns of an agent in one episode.")
    max_turn_tokens: Positive | None = Field(
        default=None,
        description="Most tokens of one turn; rollout.sampling.max_tokens is for all turns and answers of an episode "
        "together. null: that over max_turns.",
    )


def _own_agents(config: Config) -> Iterator[ConfigIssue]:
    """What needs one actor."""
    if config.environment.name in environment_names() and len(agents_of(str(config.environment.name))) == 1:
        yield ConfigIssue(
            "environment.agents", f"found 'own', but {config.environment.name} has one agent only. Leave it out."
        )
    for name, used in (
        ("trainer.replay_rollouts", config.trainer.replay_rollouts is not None),
        ("trainer.rollout_only", config.trainer.rollout_only),
        ("actor.lora", config.actor.lora is not None),
        ("mix", bool(config.mix)),
        ("algorithm.advantage", config.estimator_reads("implicit_rewards")),
    ):
        if used:
            yield ConfigIssue(
                name, "does not go with environment.agents=own, which has no one actor. Use agents: shared."
            )


def environment_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """What makes no sense in `environment`, and between it and the rest."""
    environment = config.environment
    if environment.name is None:
        for key, field in EnvironmentConfig.model_fields.items():
            if getattr(environment, key) != field.get_default(call_default_factory=True):
                yield ConfigIssue(f"environment.{key}", "is set, but environment.name is null. Name an environment.")
        return
    total = config.rollout.sampling["max_tokens"]
    turn = environment.max_turn_tokens
    if turn is not None and isinstance(total, int) and turn > total:
        yield ConfigIssue(
            "environment.max_turn_tokens",
            f"found {turn}, more than rollout.sampling.max_tokens={total}, which all turns together have.",
            involves=("rollout.sampling.max_tokens",),
        )
    if turn is None and isinstance(total, int) and total < environment.max_turns:
        yield ConfigIssue(
            "environment.max_turns",
            f"found {environment.max_turns}, more than rollout.sampling.max_tokens={total}: no token for each turn.",
            involves=("rollout.sampling.max_tokens",),
        )
    if environment.agents == "own":
        yield from _own_agents(config)
    if config.estimator_reads("greedy_rewards"):
        yield ConfigIssue(
            "environment.name",
            f"found {found(environment.name)}, but {config.algorithm.advantage_name} takes a greedy response for its "
            "baseline, and there is none of an episode. Use another estimator, such as turn_grpo or grpo.",
            involves=("algorithm.name", "algorithm.advantage"),
        )
    if ":" in environment.name:  # not imported by a check: a user's module may need what a rank has
        return
    names = environment_names()
    if environment.name not in names:
        hint = did_you_mean(environment.name, names)
        yield ConfigIssue(
            "environment.name",
            f"found {found(environment.name)}; there are: {listed(names)}, or a class of your own as "
            f"module:object.{hint}",
        )
        return
    try:
        check_options(environment.name, environment.options)
    except ConfigError as error:
        yield ConfigIssue("environment.options", str(error))
