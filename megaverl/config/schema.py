"""`Config`: one run, all of it. Pure data: no torch, no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, PrivateAttr, model_validator

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.roles import (
    INHERITED,
    LAID_OUT_BY,
    OF_ONE_ENGINE,
    ActorConfig,
    CoordinatorConfig,
    CriticConfig,
    EnvironmentConfig,
    PlacementConfig,
    ReferenceConfig,
    ReshardConfig,
    RewardModelConfig,
    RolloutConfig,
)
from megaverl.config.run import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    MixConfig,
    ModelConfig,
    PreferenceConfig,
    RewardConfig,
    RunConfig,
    SFTConfig,
    rewards_as_list,
)
from megaverl.config.section import Paths, Section
from megaverl.config.signatures import signature_of
from megaverl.config.watching import AlertConfig
from megaverl.errors import ConfigError

# What a preference loss reads of the reference.
FROZEN = (
    "ref_chosen_log_probs",
    "ref_rejected_log_probs",
    "chosen_log_ratios",
    "rejected_log_ratios",
    "ref_log_probs",
    "reference_kl",
)


class MadeBy:
    """Origin of a configuration: two configurations with the same values are equal, whatever their origins are.

    Attributes:
        make: makes the configuration again with other settings.
        place: where a key was written: "file, line n", "command line", or "" for a default.
    """

    def __init__(
        self,
        make: Callable[[Mapping[str, Any]], Config] | None = None,
        place: Callable[[str], str] = lambda key: "",
    ) -> None:
        self.make = make
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MadeBy)

    __hash__ = None  # type: ignore[assignment]


class Config(Section):
    """A whole run. Made by `load_config`, which also checks what one section alone cannot know."""

    run: RunConfig = RunConfig()
    """Name, folder, seed, processes."""
    model: ModelConfig = ModelConfig()
    """What training starts from."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The value model (ppo)."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy (with a KL)."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Several turns: tools, games."""
    reshard: ReshardConfig = ReshardConfig()
    """Weights, from actor to engine."""
    placement: PlacementConfig = PlacementConfig()
    """Which role has which ranks. Empty: every role has all."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """Which updates are applied, skipped, or the end."""
    data: DataConfig = DataConfig()
    """Prompts."""
    reward: Annotated[list[RewardConfig], BeforeValidator(rewards_as_list)] = []
    """Rewards, summed with their weights."""
    reward_modules: Paths = []
    """Modules, or path/to/file.py, that register rewards (@register_reward); imported before names are looked up. Also
    as reward.modules beside one reward."""
    trainer: LoopConfig = LoopConfig()
    """Steps and validation."""
    sft: SFTConfig = SFTConfig()
    """`megaverl sft`."""
    preference: PreferenceConfig = PreferenceConfig()
    """Pairs of responses: `megaverl dpo`, `megaverl reward`."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A reward that is trained: PRIME, `megaverl reward`, `mix`."""
    mix: list[MixConfig] = []
    """Further updates in a training step."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    alerts: list[AlertConfig] = []
    """What is told, and where to, when it happens."""

    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _choices: tuple[str, ...] = PrivateAttr(default=())
    _chosen: dict[str, Any] = PrivateAttr(default_factory=dict)
    _made_by: MadeBy = PrivateAttr(default_factory=lambda: MadeBy())

    @model_validator(mode="before")
    @classmethod
    def _fill_what_depends_on_other_sections(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        for role, shared in INHERITED.items():
            actor, own = _mapping(raw.get("actor")), raw.get(role, {})
            if isinstance(own, dict):
                theirs = actor.get("engine", "megatron")
                left = () if own.get("engine", theirs) == theirs else OF_ONE_ENGINE
                raw[role] = {**{key: actor[key] for key in shared if key in actor and key not in left}, **own}
        if not _mapping(raw.get("data")).get("validation") and isinstance(raw.get("trainer", {}), dict):
            raw["trainer"] = {"validate_every": 0, **raw.get("trainer", {})}
        return raw

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be checked, and why; what may not be meant."""
        return self._warnings

    @property
    def choices(self) -> tuple[str, ...]:
        """Settings that nobody gave and that are not their defaults, with the reason."""
        return self._choices

    @property
    def chosen(self) -> dict[str, Any]:
        """Key -> value, for those that were `auto`."""
        return self._chosen

    def layered(self, settings: Mapping[str, Any]) -> Config:
        """With settings (key -> value) laid over what was written, as if they had been written too; without checks."""
        if self._made_by.make is None:
            raise ConfigError("this configuration was not made by load_config.")
        return self._made_by.make(settings)

    def note(
        self,
        warnings: list[str],
        choices: list[str],
        chosen: dict[str, Any] | None = None,
        make: Callable[[Mapping[str, Any]], Config] | None = None,
        place: Callable[[str], str] = lambda key: "",
    ) -> None:
        self._warnings, self._choices, self._chosen = tuple(warnings), tuple(choices), chosen or {}
        self._made_by = MadeBy(make, place)

    def with_vllm(self, fields: Mapping[str, Any], why: str) -> Config:
        """Return a copy with further fields in `rollout.vllm`, and the reason among `choices`."""
        rollout = self.rollout.model_copy(update={"vllm": {**self.rollout.vllm, **fields}})
        copied = self.model_copy(update={"rollout": rollout})
        copied._choices = (*self._choices, why)
        return copied

    def place(self, key: str) -> str:
        """Return where a key was written: "file, line n", "command line", or "" for a default."""
        return self._made_by.place(key)

    @property
    def uses_critic(self) -> bool:
        """Whether there is a critic with a model of its own."""
        return self.estimator_reads("values") and not self.critic.share_backbone

    @property
    def shares_backbone(self) -> bool:
        """Whether the actor is its own critic."""
        return self.estimator_reads("values") and self.critic.share_backbone

    @property
    def uses_reference(self) -> bool:
        """Whether there is a frozen model: what KL is measured against, or a teacher."""
        return self.uses_ref_log_probs or self.algorithm.divergence_name is not None

    @property
    def uses_ref_log_probs(self) -> bool:
        """Whether a step asks the reference for log-probs of its responses."""
        frozen = ("ref_log_probs", "implicit_rewards")
        return (
            self.algorithm.kl.place != "none"
            or any(self.estimator_reads(name) for name in frozen)
            or (any(entry.update == "preference" for entry in self.mix) and self.preference_needs_reference)
        )

    @property
    def preference_needs_reference(self) -> bool:
        """Whether `preference.loss` compares with a frozen policy."""
        return bool(set(FROZEN) & set(signature_of("preference_losses", self.preference.loss).reads))

    @property
    def uses_reward_model(self) -> bool:
        """Whether a training step has a reward model on Megatron, trained or not."""
        return self.trains_reward_model or self.scores_by_megatron

    @property
    def trains_reward_model(self) -> bool:
        """Whether a training step updates `reward_model`."""
        return self.estimator_reads("implicit_rewards") or self.mixes_reward_model

    @property
    def mixes_reward_model(self) -> bool:
        """Whether `mix` trains one of the reward models of `reward`."""
        return any(each.update == "reward_model" for each in self.mix)

    @property
    def scores_by_megatron(self) -> bool:
        """Whether a reward model of `reward` is on Megatron."""
        return any(entry.path is not None and entry.engine == "megatron" for entry in self.reward)

    @property
    def reference_is_actor(self) -> bool:
        """The actor without its adapters is the reference: the same model in the same layout on the same ranks."""
        actor, reference, place = self.actor, self.reference, self.placement
        if self.algorithm.divergence_name is not None:  # of a teacher hidden states are read, of an actor logits
            return False
        alike = all(getattr(actor, name) == getattr(reference, name) for name in LAID_OUT_BY)
        here = place.reference in (None, "actor", place.actor)
        here = here and place.reference_devices in (None, place.actor_devices)
        return actor.lora is not None and alike and here and reference.path in (None, self.model.path)

    def estimator_reads(self, name: str) -> bool:
        """Whether the advantage estimator has an input called `name`."""
        return name in signature_of("advantage_estimators", self.algorithm.advantage_name).inputs

    @property
    def samples_per_step(self) -> int:
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def rows_per_step(self) -> int:
        """Of a step's batch, as far as it is known before: each conversation of an episode is one."""
        return ceil(self.samples_per_step * self.environment.conversations)

    @property
    def samples_at_once(self) -> int:
        """Responses that the engines are asked for together: those of a step, and with `rollout.partial` more."""
        partial, wanted = self.rollout.partial, self.data.prompts_per_step
        return (wanted if partial is None else partial.num_groups(wanted)) * self.algorithm.group_size

    @property
    def total_updates(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        return self.updates_after(self.trainer.steps)

    def updates_after(self, steps: int) -> int:
        """Return the number of the actor's optimizer steps in the first `steps` training steps."""
        further = sum(steps // entry.every for entry in self.mix if entry.update != "reward_model")
        return steps * self.algorithm.num_epochs * self.algorithm.num_mini_batches + further

    @property
    def run_dir(self) -> Path:
        """Where everything that this run leaves behind goes."""
        return Path(self.run.dir) / self.run.name

    @property
    def chosen_file(self) -> Path:
        """What was chosen for keys that are `auto`, and for how many ranks."""
        return self.run_dir / "chosen.json"

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus longest response: the context that every engine must hold."""
        return self.data.max_prompt_tokens + int(self.rollout.sampling["max_tokens"])

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, under the names of the file."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config` of it gives the same Config."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """No anchors: a mapping that two roles share is written out for each."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Section):
        return value.model_dump(by_alias=True)
    return value if isinstance(value, dict) else {}
