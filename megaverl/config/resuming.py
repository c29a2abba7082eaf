"""Decide what happens to settings that were changed between a checkpoint and the run that resumes it.

A resumed run follows its own configuration. `RULES` lists the exceptions: keys whose
change is refused, and keys whose state comes from the checkpoint, so that a change has
no effect. Every other change is used from the next step on. Each change is reported,
and docs/checkpoints.md shows the same table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel

from megaverl.config.errors import ConfigIssue
from megaverl.config.schema import Config
from megaverl.config.section import section_at
from megaverl.config.wording import yaml_text

Outcome = Literal["used", "kept", "refused"]
# Training stages, under the names that checkpoints store.
STAGES = ("train", "sft", "dpo", "reward_model")

# These keys choose the checkpoint and the output folder. They differ in every resume
# that is meant.
UNREPORTED = ("checkpoint.resume", "run.name", "run.dir")

_COMMON = ("run", "model", "actor", "data", "rollout", "checkpoint", "alerts")
# Sections that each stage without rollouts reads. It reads `rollout` only for the
# longest response.
_READ = {
    "sft": (*_COMMON, "sft"),
    "dpo": (*_COMMON, "reference", "preference"),
    "reward_model": (*_COMMON, "reward_model", "preference"),
}


@dataclass(frozen=True)
class ResumeRule:
    """Outcome of changing some keys at a resume.

    Attributes:
        keys: patterns of dotted keys.
        outcome: "used", "kept" (the checkpoint's value stays) or "refused".
        reason: one or two sentences for the person who made the change.
        stages: stages in which the rule applies.
        when: the condition in words, for the documentation. Empty: always.
        holds: the same condition, as a function of the new configuration, the old value and the new value.
    """

    keys: tuple[str, ...]
    outcome: Outcome
    reason: str
    stages: tuple[str, ...] = STAGES
    when: str = ""
    holds: Callable[[Config, Any, Any], bool] = lambda config, before, now: True


def _only_adds(before: Any, now: Any) -> bool:
    """Return whether the list `now` keeps every entry of the list `before`. A changed entry counts as removed."""
    return (
        isinstance(before, list) and isinstance(now, list) and set(before) <= set(now)
    )


RULES = (
    ResumeRule(
        ("run.seed",),
        "refused",
        "The seed determines the order of the rows and every random draw.",
    ),
    ResumeRule(
        ("data.prompts_per_step", "data.shuffle", "data.streaming"),
        "refused",
        "The checkpoint stores a position in the training prompts, and this setting changes what it refers to.",
        stages=("train",),
    ),
    ResumeRule(
        ("data.shuffle_buffer",),
        "refused",
        "The checkpoint stores a position in the training prompts, and this setting changes what it refers to.",
        stages=("train",),
        when="with data.streaming",
        holds=lambda config, before, now: config.data.streaming,
    ),
    ResumeRule(
        ("sft.batch_size", "data.shuffle"),
        "refused",
        "The checkpoint stores a position in the rows, and this setting changes what it refers to.",
        stages=("sft",),
    ),
    ResumeRule(
        ("preference.batch_size", "data.shuffle"),
        "refused",
        "The checkpoint stores a position in the rows, and this setting changes what it refers to.",
        stages=("dpo", "reward_model"),
    ),
    ResumeRule(
        ("*.optimizer.optimizer",),
        "refused",
        "The checkpoint contains the state of the earlier optimizer, which another optimizer cannot read.",
        holds=lambda config, before, now: (before or "adam") != (now or "adam"),
    ),
    ResumeRule(
        ("*.ddp.use_distributed_optimizer", "*.optimizer.use_distributed_optimizer"),
        "refused",
        "megatron-core stores the state of a distributed optimizer in another format than that of an ordinary one.",
        holds=lambda config, before, now: (before is not False) != (now is not False),
    ),
    ResumeRule(
        ("*.freeze", "*.freeze.*"),
        "refused",
        "The checkpoint contains no optimizer state for weights that were frozen.",
        when="unless patterns are only added",
        holds=lambda config, before, now: not _only_adds(before, now),
    ),
    ResumeRule(
        ("model.dtype",),
        "used",
        "The checkpoint contains master weights and moments in float32, from which weights of any dtype are made.",
    ),
    ResumeRule(
        ("algorithm.kl.target",),
        "refused",
        "The checkpoint contains the state of the other KL controller (fixed or adaptive).",
        stages=("train",),
        when="from null to a number, or back",
        holds=lambda config, before, now: (before is None) != (now is None),
    ),
    ResumeRule(
        ("model.path", "model.revision", "model.hub"),
        "kept",
        "Trained weights come from the checkpoint. Only the rest, such as the tokenizer and a reference without a "
        "path, is read from the new place.",
    ),
    ResumeRule(("model.init",), "kept", "Trained weights come from the checkpoint."),
    ResumeRule(
        ("critic.path", "reward_model.path"),
        "kept",
        "Trained weights come from the checkpoint.",
    ),
    ResumeRule(
        ("draft.train",),
        "refused",
        "The checkpoint of a run with it contains the draft model and its optimizer, and that of a run without it does "
        "not.",
        stages=("train",),
        holds=lambda config, before, now: bool(before) != bool(now),
    ),
    ResumeRule(
        ("rollout.vllm.speculative_config.model",),
        "kept",
        "Trained weights come from the checkpoint.",
        stages=("train",),
        when="with draft.train",
        holds=lambda config, before, now: config.draft.train,
    ),
    ResumeRule(
        ("reward.*.path",),
        "kept",
        "Trained weights come from the checkpoint.",
        stages=("train",),
        when="with a reward model that `mix` trains",
        holds=lambda config, before, now: config.mixes_reward_model,
    ),
    ResumeRule(("*.lora.path",), "kept", "Trained adapters come from the checkpoint."),
    ResumeRule(
        ("sft.*",),
        "kept",
        "In an RL run only the quickstart's warm-up reads this section, and the warm-up is over.",
        stages=("train",),
        when="unless `mix` has an update sft",
        holds=lambda config, before, now: all(
            entry.update != "sft" for entry in config.mix
        ),
    ),
    ResumeRule(
        ("algorithm.kl.coef",),
        "kept",
        "The adaptive coefficient continues from the value in the checkpoint.",
        stages=("train",),
        when="with algorithm.kl.target",
        holds=lambda config, before, now: config.algorithm.kl.target is not None,
    ),
    ResumeRule(
        ("algorithm.entropy_coef",),
        "kept",
        "The adaptive coefficient continues from the value in the checkpoint.",
        stages=("train",),
        when="with algorithm.entropy_target",
        holds=lambda config, before, now: config.algorithm.entropy_target is not None,
    ),
    ResumeRule(
        ("*.optimizer.initial_loss_scale",),
        "kept",
        "The loss scale continues from the value in the checkpoint.",
        when="with model.dtype: float16",
    ),
)

# Keys that affect how responses are generated. Unfinished or stored responses in a
# checkpoint were generated with the old values.
SHAPES_RESPONSES = (
    "data.*",
    "rollout.sampling*",
    "rollout.adaptive_sampling",
    "rollout.function",
    "environment.*",
    "algorithm.group_size",
    "algorithm.opponent_beta",
)


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's, and what happens to it.

    Attributes:
        before: value in the checkpoint. None also if the key was not set.
        now: value in this configuration. None also if the key is not set.
        outcome: "used", "kept" or "refused".
        reason: reason, unless the outcome is "used".
    """

    key: str
    before: Any
    now: Any
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {yaml_text(self.before)} -> {yaml_text(self.now)}"

    @property
    def shapes_responses(self) -> bool:
        """Return whether responses generated before the change differ from those generated after it."""
        is_held_out = self.key.startswith("data.validation")
        return not is_held_out and any(
            fnmatchcase(self.key, pattern) for pattern in SHAPES_RESPONSES
        )


def changes(before: Mapping[str, Any], config: Config, stage: str) -> list[Change]:
    """Return every setting that differs from the checkpoint's, in the order of the configuration.

    Keys that did not exist yet in the megaverl that wrote the checkpoint are left out.

    Args:
        before: the checkpoint's configuration, as returned by `Config.to_dict`.
        config: configuration of the resumed run.
        stage: one of `STAGES`.
    """
    read = _READ.get(stage)
    result = []
    for key, old, new in _differences(before, config.to_dict(), ()):
        if key in UNREPORTED or (
            read is not None and key.partition(".")[0] not in read
        ):
            continue
        rule = _rule_for(key, old, new, config, stage)
        if rule:
            result.append(Change(key, old, new, rule.outcome, rule.reason))
        else:
            result.append(Change(key, old, new, "used"))
    return result


def refusals(differences: list[Change], checkpoint: str) -> list[ConfigIssue]:
    """Return a mistake for each change with the outcome "refused".

    Args:
        checkpoint: path of the checkpoint, for the messages.
    """
    fix = "Set it back, or start a new run from the saved weights: another run.name, or checkpoint.resume=never."
    return [
        ConfigIssue(
            change.key,
            f"was {yaml_text(change.before)} in {checkpoint}, is {yaml_text(change.now)}. {change.reason} {fix}",
        )
        for change in differences
        if change.outcome == "refused"
    ]


def _rule_for(
    key: str, before: Any, now: Any, config: Config, stage: str
) -> ResumeRule | None:
    """Return the first rule that applies to a change of `key`, or None."""
    for rule in RULES:
        matches = stage in rule.stages and any(
            fnmatchcase(key, pattern) for pattern in rule.keys
        )
        if matches and rule.holds(config, before, now):
            return rule
    return None


def _differences(
    before: Any, now: Any, path: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value before, value now) for every difference between two configurations."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        # A section has a fixed set of keys, so a key that `before` lacks is new in this
        # version and no change. A mapping for another library has arbitrary keys, and
        # each added or removed one is a change.
        is_section = _section(path) is not None
        names = [
            *now,
            *([] if is_section else [name for name in before if name not in now]),
        ]
        for name in names:
            if name in before or not is_section:
                yield from _differences(before.get(name), now.get(name), (*path, name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, (*path, str(index)))
    elif _as_json(before) != _as_json(now):
        yield ".".join(path), before, now


def _section(path: tuple[str, ...]) -> type[BaseModel] | None:
    """Return the Section class at a path, or None for a mapping that is passed to another library."""
    return section_at(Config, path)


def _as_json(value: Any) -> str:
    """Return a canonical text, so that equal values compare equal whether they come from YAML or from Python."""
    return json.dumps(value, sort_keys=True, default=str)


def table() -> str:
    """Return the rules as a Markdown table, for docs/checkpoints.md."""
    titles = {
        "refused": "refused",
        "kept": "no effect, announced",
        "used": "used from the next step on, announced",
    }
    rows = ["| changed key | at a resume | why |", "| --- | --- | --- |"]
    for rule in RULES:
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        commands = {
            "train": "train",
            "sft": "sft",
            "dpo": "dpo",
            "reward_model": "reward",
        }
        of = (
            ""
            if rule.stages == STAGES
            else f" ({', '.join(commands[stage] for stage in rule.stages)})"
        )
        condition = f", {rule.when}" if rule.when else ""
        rows.append(
            f"| {keys}{condition}{of} | {titles[rule.outcome]} | {rule.reason} |"
        )
    rows.append("| every other key | used from the next step on, announced | |")
    return "\n".join(rows)
