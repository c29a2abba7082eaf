"""`critic.share_backbone`: what cannot be beside it, since actor and critic are then one model."""

from __future__ import annotations

from collections.abc import Iterator

from megaverl.config.errors import ConfigIssue, found
from megaverl.config.roles import SHARED_BY_CRITIC, CriticConfig
from megaverl.config.schema import Config

KEY = "critic.share_backbone"
_OF_THE_ACTOR = ("lora", "optimizer", "scheduler")


def shared_critic_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Every setting of a critic with a model of its own, and what would move the policy by the values alone."""
    critic, actor, algorithm = config.critic, config.actor, config.algorithm
    if not critic.share_backbone:
        return
    if not config.estimator_reads("values"):
        yield ConfigIssue(
            KEY,
            f"is set, but {algorithm.advantage_name} has no critic. Leave it out, or use an estimator with one: "
            "advantage: gae.",
            involves=("algorithm.name", "algorithm.advantage"),
        )
        return
    if critic.path is not None:
        yield ConfigIssue("critic.path", f"is set, and so is {KEY}: the backbone is the actor's. Use one of the two.")
    for name in SHARED_BY_CRITIC:
        if getattr(critic, name) != getattr(actor, name):
            yield ConfigIssue(
                f"critic.{name}",
                f"found {found(getattr(critic, name))}, and with {KEY} the critic is the actor's model, whose "
                f"actor.{name} is {found(getattr(actor, name))}. Leave it out.",
                involves=(KEY,),
            )
    for name in _OF_THE_ACTOR:
        if getattr(critic, name) != CriticConfig.model_fields[name].get_default(call_default_factory=True):
            yield ConfigIssue(
                f"critic.{name}", f"is set, and with {KEY} there is one optimizer: set actor.{name}.", involves=(KEY,)
            )
    for key in ("critic", "critic_devices"):
        if getattr(config.placement, key) is not None:
            yield ConfigIssue(
                f"placement.{key}",
                f"is set, and with {KEY} the critic is the actor's model, on the actor's ranks. Use one of the two.",
                involves=(KEY,),
            )
    if algorithm.critic_warmup_steps:
        yield ConfigIssue(
            "algorithm.critic_warmup_steps",
            f"found {algorithm.critic_warmup_steps}; with {KEY} a value loss alone would move the policy. Leave it "
            "out, or give the critic a model of its own.",
            involves=(KEY,),
        )
