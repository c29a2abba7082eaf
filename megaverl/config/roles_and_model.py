"""Rules that span the roles that a command builds, the model, and the length of the run."""

from __future__ import annotations

from typing import Any

from megaverl.config.errors import ConfigIssue
from megaverl.config.grids import used_roles
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.config.schema import Config
from megaverl.config.section import Issues, is_number
from megaverl.config.wording import yaml_text


def role_issues(config: Config, command: str) -> Issues:
    """Yield mistakes in the sections of the roles that a command builds.

    A mistake in values that a role inherits from the actor is reported for the actor
    alone.
    """
    roles = used_roles(config, command)
    for role in roles:
        section: GridConfig = getattr(config, role)
        issues = [*section.issues(role), *_dtype_issues(config, command, role)]
        for issue in issues:
            fields = {
                key.split(".")[1]
                for key in (issue.key, *issue.involves)
                if key.startswith(f"{role}.")
            }
            is_reported_for_actor = (
                role != "actor"
                and "actor" in roles
                and _is_inherited(config, section, fields)
            )
            if not is_reported_for_actor:
                yield issue


def _is_inherited(config: Config, section: GridConfig, fields: set[str]) -> bool:
    """Return whether a role has the actor's values of these fields."""
    if "optimizer" in fields:
        return False
    actor = config.actor
    return all(
        getattr(section, name) == getattr(actor, name, None)
        for name in fields | {"engine"}
    )


def _dtype_issues(config: Config, command: str, role: str) -> Issues:
    """Yield a mistake for a dtype that the role's engine cannot train or quantize."""
    section: GridConfig = getattr(config, role)
    dtype = config.model.dtype
    fp8 = section.megatron.get("fp8")
    if (
        section.engine == "megatron"
        and fp8 is not None
        and dtype in ("float32", "float16")
    ):
        text = f"found {yaml_text(fp8)}; weights that are quantised for products are bfloat16. Set that."
        yield ConfigIssue(f"{role}.megatron.fp8", text, involves=("model.dtype",))
    param_dtype = section.fsdp.param_dtype
    trains_reward_model = command == "reward" or config.trains_reward_model
    is_trained = isinstance(section, TrainedConfig) and (
        role != "reward_model" or trains_reward_model
    )
    if section.engine == "fsdp" and is_trained and (param_dtype or dtype) == "float16":
        text = "found 'float16'; under engine: fsdp losses are not scaled, as float16 needs. Use bfloat16."
        if param_dtype:
            yield ConfigIssue(
                f"{role}.fsdp.param_dtype", text, involves=(f"{role}.engine",)
            )
        elif role == "actor":
            yield ConfigIssue("model.dtype", text, involves=(f"{role}.engine",))


def optimizer_issues(config: Config) -> Issues:
    """Yield mistakes in the optimizers and schedulers of all roles that a training step updates."""
    trained = {
        "actor": (config.actor, True),
        "critic": (config.critic, config.uses_critic),
        "reward_model": (config.reward_model, config.trains_reward_model),
        "draft": (config.draft, config.draft.train),
    }
    for role, (section, is_trained) in trained.items():
        if is_trained:
            yield from section.optimizer_issues(role, config.total_updates)
            if section.optimizer.get("optimizer") == "muon":
                yield from _muon_issues(config, role)


def stage_optimizer_issues(config: Config, command: str) -> Issues:
    """Yield mistakes in the optimizer of the role that `megaverl sft`, `dpo` or `reward` trains.

    These commands take the learning rate and its schedule from their own section, and
    everything else from the role.
    """
    role = "reward_model" if command == "reward" else "actor"
    section: TrainedConfig = getattr(config, role)
    yield from section.optimizer_field_issues(role)
    if section.optimizer.get("optimizer") == "muon":
        yield from _muon_issues(config, role)
    stage = "sft" if command == "sft" else "preference"
    lr: float = getattr(config, stage).lr
    min_lr: Any = section.optimizer.get("min_lr")
    if is_number(min_lr) and not 0 <= min_lr <= lr:
        text = f"found {min_lr}; expected from 0 to {stage}.lr={lr}."
        involves = (f"{stage}.lr",)
        yield ConfigIssue(f"{role}.optimizer.min_lr", text, involves=involves)


def _muon_issues(config: Config, role: str) -> Issues:
    """Yield settings of the run that a role trained by Muon does not support."""
    involves = (f"{role}.optimizer.optimizer",)
    if config.model.dtype == "float16":
        text = f"found 'float16', whose loss scaling megatron-core's Muon lacks. Use bfloat16, or set {role}'s "
        yield ConfigIssue("model.dtype", f"{text}optimizer to adam.", involves=involves)
    if config.placement.actor_islands > 1:
        text = f"found {config.placement.actor_islands}; islands have been tested with adam only. Use 1, or adam."
        yield ConfigIssue("placement.actor_islands", text, involves=involves)
