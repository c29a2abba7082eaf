"""Rules of `megaverl serve tinker` about the sections of actor, engine and reshard."""

from __future__ import annotations

from megaverl.config.errors import ConfigIssue
from megaverl.config.schema import Config
from megaverl.config.section import Issues

# Settings of an optimizer that clients give with each step.
OF_CLIENTS = (
    *("lr", "min_lr", "weight_decay", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
)


def tinker_issues(config: Config) -> Issues:
    """Yield settings of other sections that a server of adapters cannot have."""
    actor = config.actor
    if actor.lora is None:
        text = "is null, and the server trains adapters. Set actor.lora, such as actor.lora={rank: 32}."
        yield ConfigIssue("actor.lora", text)
        return
    if actor.lora.dropout:
        text = f"found {actor.lora.dropout:g}; with dropout, clients would change each other's results. Set 0."
        yield ConfigIssue("actor.lora.dropout", text)
    if actor.lora.path is not None:
        yield ConfigIssue(
            "actor.lora.path", "is set, but clients begin with new adapters."
        )
    if actor.engine != "megatron":
        text = (
            f"found {actor.engine}; adapters of several clients need engine: megatron."
        )
        yield ConfigIssue("actor.engine", text)
    if actor.optimizer.get("optimizer", "adam") != "adam":
        text = "clients give settings of Adam. Leave it out."
        yield ConfigIssue("actor.optimizer.optimizer", text)
    defaults = (
        type(actor).model_fields["optimizer"].get_default(call_default_factory=True)
    )
    for name in OF_CLIENTS:
        if actor.optimizer.get(name) != defaults.get(name):
            text = (
                "has no effect: clients give it with each optimizer step. Leave it out."
            )
            yield ConfigIssue(f"actor.optimizer.{name}", text)
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if actor.optimizer.get(name):
            text = "found true; its state cannot change from one client's adapters to another's. Leave it out."
            yield ConfigIssue(f"actor.optimizer.{name}", text)
    if actor.changed("scheduler"):
        text = "has no effect: clients give the learning rate with each step. Leave it out."
        yield ConfigIssue("actor.scheduler", text)
    for name in actor.offload.changed("parameters", "optimizer", "gradients"):
        text = "found true; a server of adapters offloads nothing."
        yield ConfigIssue(f"actor.offload.{name}", text)
    if config.rollout.engine not in ("vllm", "hf"):
        text = f"found {config.rollout.engine}; the server samples with an engine on its own ranks: vllm or hf."
        yield ConfigIssue("rollout.engine", text)
    if config.reshard.overlap:
        text = "found true; the server sends weights between requests. Leave it out."
        yield ConfigIssue("reshard.overlap", text)
