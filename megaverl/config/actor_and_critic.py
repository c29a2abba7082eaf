"""Rules that span actor and critic, for a critic that shares the actor's backbone."""

from __future__ import annotations

from megaverl.config.algorithm import BY_NAME
from megaverl.config.errors import ConfigIssue
from megaverl.config.roles import SHARED_BY_CRITIC
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.wording import yaml_text

KEY = "critic.share_backbone"


def shared_backbone_issues(config: Config) -> Issues:
    """Yield settings that cannot be combined with `critic.share_backbone`.

    These are settings of a separate critic model, and settings that would let a value
    loss alone move the policy.
    """
    critic = config.critic
    if not critic.share_backbone:
        return
    if not config.estimator_reads("values"):
        name = config.algorithm.advantage_name
        text = f"is set, but {name} has no critic. Leave it out, or use an estimator with one: advantage: gae."
        yield ConfigIssue(KEY, text, involves=BY_NAME)
        return
    if critic.path is not None:
        yield ConfigIssue(
            "critic.path",
            f"is set, and so is {KEY}: the critic uses the actor's backbone. Use one of the two.",
        )
    for name in SHARED_BY_CRITIC:
        value = getattr(critic, name)
        actors = getattr(config.actor, name)
        if value != actors:
            text = f"found {yaml_text(value)}, and with {KEY} the critic is the actor's model, whose actor.{name} is "
            yield ConfigIssue(
                f"critic.{name}",
                f"{text}{yaml_text(actors)}. Leave it out.",
                involves=(KEY,),
            )
    for name in critic.changed("lora", "optimizer", "scheduler"):
        text = f"is set, and with {KEY} there is one optimizer: set actor.{name}."
        yield ConfigIssue(f"critic.{name}", text, involves=(KEY,))
    for name in config.placement.changed("critic", "critic_devices"):
        text = f"is set, and with {KEY} the critic is the actor's model, on the actor's ranks. Use one of the two."
        yield ConfigIssue(f"placement.{name}", text, involves=(KEY,))
    warmup = config.algorithm.critic_warmup_steps
    if warmup:
        text = f"found {warmup}; with {KEY} a value loss alone would move the policy. Leave it out, or give the critic "
        yield ConfigIssue(
            "algorithm.critic_warmup_steps",
            f"{text}a model of its own.",
            involves=(KEY,),
        )
