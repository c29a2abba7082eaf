"""Section `tinker`: the server of `megaverl serve tinker`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megaverl.config.errors import ConfigIssue
from megaverl.config.section import Issues, PositiveFloat, Section, Text, rule
from megaverl.config.wording import yaml_text

if TYPE_CHECKING:
    from megaverl.config.schema import Config

# The client accepts only keys that begin with it.
KEY_PREFIX = "tml-"
# Settings of an optimizer that clients give with each step.
OF_CLIENTS = (
    *("lr", "min_lr", "weight_decay", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
)


class TinkerConfig(Section):
    """`tinker`: a server with Tinker's API, whose clients train adapters side by side."""

    host: Text = "127.0.0.1"
    """Address of the interface that clients connect to. Any other than the loopback needs token_env."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8002
    """Port at that interface, on the node of rank 0. 0: any free port."""
    token_env: Text | None = None
    """Variable with the API key that clients must have (TINKER_API_KEY). It begins with tml-. null: any key."""
    model_name: Text | None = None
    """Name of the base model in clients' requests. null: model.path as it is written."""
    session_minutes: PositiveFloat = 10.0
    """Time without a sign of life after which a client's session is over and its adapters are freed. Saved states
    remain."""

    @rule
    def check_access(self, at: str) -> Issues:
        """Refuse an interface that does not exist or that anybody may use, and keys that clients refuse."""
        try:
            is_public = not ip_address(self.host).is_loopback
        except ValueError:
            text = f"found {yaml_text(self.host)}; expected the address of an interface, such as 127.0.0.1."
            yield ConfigIssue(f"{at}.host", text)
            return
        if is_public and self.token_env is None:
            text = "is not the loopback, so anybody in its network could train. Name a variable with an API key."
            yield ConfigIssue(f"{at}.host", text, involves=(f"{at}.token_env",))
        if self.token_env is None:
            return
        key = os.environ.get(self.token_env, "")
        if not key.startswith(KEY_PREFIX) or len(key) == len(KEY_PREFIX):
            text = (
                f"the variable {self.token_env} holds no API key. Set it to one that begins with {KEY_PREFIX}, "
                "as the client demands, on the node of rank 0."
            )
            yield ConfigIssue(f"{at}.token_env", text)

    @rule
    def check_package(self, at: str) -> Issues:
        """Refuse to serve without the client package, which describes the messages."""
        if find_spec("tinker") is None:
            yield ConfigIssue(
                at,
                "needs the package tinker, which describes the messages: pip install 'megaverl[tinker]'.",
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
