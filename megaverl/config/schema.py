"""`Config`: the configuration of one run, as pure data. It imports no torch and reads no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, PrivateAttr, model_validator

from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.evaluation import EvaluationConfig
from megaverl.config.roles import (
    INHERITED,
    LAID_OUT_BY,
    OF_ONE_ENGINE,
    ActorConfig,
    CoordinatorConfig,
    CriticConfig,
    DraftConfig,
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
from megaverl.config.serving import TinkerConfig
from megaverl.config.signatures import signature_of
from megaverl.config.watching import AlertConfig
from megaverl.errors import ConfigError
from megaverl.sharding.draft_head import HEAD_METHODS

try:
    from yaml import CSafeDumper as SafeDumper
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeDumper  # type: ignore[assignment]

# Inputs of a preference loss that come from the reference model.
FROZEN = (
    "ref_chosen_log_probs",
    "ref_rejected_log_probs",
    "chosen_log_ratios",
    "rejected_log_ratios",
    "ref_log_probs",
    "reference_kl",
)


class MadeBy:
    """Origin of a configuration. All origins compare equal, so configurations with equal values are equal.

    Attributes:
        make: builds the configuration again with other settings.
        place: returns where a key was written: "file, line n", "command line", or "" for a default.
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
    """Configuration of one run. `load_config` makes it and runs the checks that span sections."""

    run: RunConfig = RunConfig()
    """Name, folder, seed, processes and logging of the run."""
    model: ModelConfig = ModelConfig()
    """The model that training starts from."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm: how rewards become gradients."""
    actor: ActorConfig = ActorConfig()
    """The policy that is trained."""
    critic: CriticConfig = CriticConfig()
    """The value model (ppo)."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy of a KL penalty, or a teacher."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of responses."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Multi-turn episodes: tools and games."""
    reshard: ReshardConfig = ReshardConfig()
    """Transfer of weights from the actor to the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Assignment of roles to ranks. Empty: every role runs on all ranks."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    """When an update is applied, skipped, or ends the run."""
    data: DataConfig = DataConfig()
    """Prompts for training and validation."""
    reward: Annotated[list[RewardConfig], BeforeValidator(rewards_as_list)] = []
    """Rewards, summed with their weights."""
    reward_modules: Paths = []
    """Modules, or path/to/file.py, that register rewards (@register_reward). They are imported before rewards are
    looked up by name. Also as reward.modules beside one reward."""
    trainer: LoopConfig = LoopConfig()
    """Number of steps, validation, and a step of your own."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Published data sets for `megaverl eval`."""
    sft: SFTConfig = SFTConfig()
    """Supervised fine-tuning: `megaverl sft`, and the warm-up of the quickstart."""
    preference: PreferenceConfig = PreferenceConfig()
    """Training on pairs of responses: `megaverl dpo`, `megaverl reward`."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A reward model that is trained: PRIME, `megaverl reward`, `mix`."""
    draft: DraftConfig = DraftConfig()
    """Training of the draft model of speculative decoding."""
    tinker: TinkerConfig = TinkerConfig()
    """The server of `megaverl serve tinker`."""
    mix: list[MixConfig] = []
    """Additional updates in a training step."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    alerts: list[AlertConfig] = []
    """Alerts: conditions, and where to send a message when one is met."""

    _warnings: tuple[str, ...] = PrivateAttr(default=())
    _choices: tuple[str, ...] = PrivateAttr(default=())
    _chosen: dict[str, Any] = PrivateAttr(default_factory=dict)
    _made_by: MadeBy = PrivateAttr(default_factory=lambda: MadeBy())

    @model_validator(mode="before")
    @classmethod
    def _fill_what_depends_on_other_sections(cls, raw: Any) -> Any:
        """Fill in defaults that depend on another section: inherited grids, and no validation without data for it."""
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        for role, shared in INHERITED.items():
            actor = _mapping(raw.get("actor"))
            section = raw.get(role, {})
            if isinstance(section, dict):
                actor_engine = actor.get("engine", "megatron")
                # Settings of one engine make no sense for a role that runs on another.
                not_inherited = (
                    ()
                    if section.get("engine", actor_engine) == actor_engine
                    else OF_ONE_ENGINE
                )
                raw[role] = {
                    **{
                        key: actor[key]
                        for key in shared
                        if key in actor and key not in not_inherited
                    },
                    **section,
                }
        validates = _mapping(raw.get("data")).get("validation") or _mapping(
            raw.get("evaluation")
        ).get("tasks")
        if not validates and isinstance(raw.get("trainer", {}), dict):
            raw["trainer"] = {"validate_every": 0, **raw.get("trainer", {})}
        return raw

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings: checks that could not run, and harmless settings that are probably not meant."""
        return self._warnings

    @property
    def choices(self) -> tuple[str, ...]:
        """Settings that were chosen automatically and differ from their defaults, each with the reason."""
        return self._choices

    @property
    def chosen(self) -> dict[str, Any]:
        """Values that were chosen for keys set to `auto`, by key."""
        return self._chosen

    def layered(self, settings: Mapping[str, Any]) -> Config:
        """Return the configuration with `settings` (key -> value) merged in, as if the user had written them.

        Runs no checks.

        Raises:
            ConfigError: the configuration was not made by `load_config`.
        """
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
        """Record warnings, automatic choices and origin. Called once, by `load_config`."""
        self._warnings = tuple(warnings)
        self._choices = tuple(choices)
        self._chosen = chosen or {}
        self._made_by = MadeBy(make, place)

    def with_vllm(self, fields: Mapping[str, Any], reason: str) -> Config:
        """Return a copy with further fields in `rollout.vllm`, and the reason among `choices`."""
        rollout = self.rollout.model_copy(
            update={"vllm": {**self.rollout.vllm, **fields}}
        )
        copied = self.model_copy(update={"rollout": rollout})
        copied._choices = (*self._choices, reason)
        return copied

    def place(self, key: str) -> str:
        """Return where a key was written: "file, line n", "command line", or "" for a default."""
        return self._made_by.place(key)

    @property
    def uses_critic(self) -> bool:
        """Return whether the run has a separate critic model."""
        return self.estimator_reads("values") and not self.critic.share_backbone

    @property
    def aggregates_gradients(self) -> bool:
        """Return whether the coordinator's ranks hold the global model and its optimizer."""
        return self.coordinator.aggregates == "gradients"

    @property
    def shares_backbone(self) -> bool:
        """Return whether the critic is a value head on the actor's backbone."""
        return self.estimator_reads("values") and self.critic.share_backbone

    @property
    def uses_reference(self) -> bool:
        """Return whether the run has a frozen model: the reference of the KL, or a teacher."""
        return self.uses_ref_log_probs or self.algorithm.divergence_name is not None

    @property
    def uses_ref_log_probs(self) -> bool:
        """Return whether a step computes the reference's log-probs of its responses."""
        frozen = ("ref_log_probs", "implicit_rewards")
        return (
            self.algorithm.kl.place != "none"
            or any(self.estimator_reads(name) for name in frozen)
            or (
                any(entry.update == "preference" for entry in self.mix)
                and self.preference_needs_reference
            )
        )

    @property
    def preference_needs_reference(self) -> bool:
        """Return whether `preference.loss` reads values of a frozen policy."""
        return bool(
            set(FROZEN)
            & set(signature_of("preference_losses", self.preference.loss).reads)
        )

    @property
    def uses_reward_model(self) -> bool:
        """Return whether a training step uses a reward model on Megatron, trained or not."""
        return self.trains_reward_model or self.scores_by_megatron

    @property
    def trains_reward_model(self) -> bool:
        """Return whether a training step updates `reward_model`."""
        return self.estimator_reads("implicit_rewards") or self.mixes_reward_model

    @property
    def reshard_timeout(self) -> timedelta:
        """Return how long a transfer of weights waits for another rank."""
        return timedelta(
            minutes=self.reshard.timeout_minutes or self.run.timeout_minutes
        )

    @property
    def samples_in_rounds(self) -> bool:
        """Return whether steps sample in rounds of generating and scoring (dynamic sampling)."""
        return self.algorithm.dynamic_sampling.metric is not None

    @property
    def mixes_reward_model(self) -> bool:
        """Return whether an entry of `mix` trains a reward model of `reward`."""
        return any(entry.update == "reward_model" for entry in self.mix)

    @property
    def speculation(self) -> dict[str, Any]:
        """The engine's `speculative_config`, or an empty dictionary."""
        drafts = self.rollout.vllm.get("speculative_config")
        return drafts if isinstance(drafts, dict) else {}

    @property
    def draft_path(self) -> str | None:
        """Folder or hub name of the engine's draft model or head, or None without one."""
        path = self.speculation.get("model")
        return path if isinstance(path, str) and path else None

    @property
    def trains_head(self) -> bool:
        """Return whether `draft` is a head, which reads the actor's hidden states."""
        return self.draft.train and self.speculation.get("method") in HEAD_METHODS

    @property
    def scores_by_megatron(self) -> bool:
        """Return whether an entry of `reward` is a model on Megatron."""
        return any(
            entry.path is not None and entry.engine == "megatron"
            for entry in self.reward
        )

    @property
    def reference_is_actor(self) -> bool:
        """Return whether the actor without its adapters serves as the reference.

        That needs the same base model, in the same layout, on the same ranks.
        """
        actor = self.actor
        reference = self.reference
        place = self.placement
        # A teacher is asked for hidden states, an actor for logits. One pass cannot
        # give both.
        if self.algorithm.divergence_name is not None:
            return False
        alike = all(
            getattr(actor, name) == getattr(reference, name) for name in LAID_OUT_BY
        )
        here = place.reference in (None, "actor", place.actor)
        here = here and place.reference_devices in (None, place.actor_devices)
        return (
            actor.lora is not None
            and alike
            and here
            and reference.path in (None, self.model.path)
        )

    def estimator_reads(self, name: str) -> bool:
        """Return whether the advantage estimator has an input called `name`."""
        return (
            name
            in signature_of(
                "advantage_estimators", self.algorithm.advantage_name
            ).inputs
        )

    @property
    def samples_per_step(self) -> int:
        """Number of responses that one training step trains on."""
        return self.data.prompts_per_step * self.algorithm.group_size

    @property
    def rows_per_step(self) -> int:
        """Expected rows in a step's batch. An episode contributes one row for each of its conversations."""
        return ceil(self.samples_per_step * self.environment.conversations)

    @property
    def samples_at_once(self) -> int:
        """Number of responses that the engines work on at once: those of a step, or more with `rollout.partial`."""
        partial = self.rollout.partial
        wanted = self.data.prompts_per_step
        return (
            wanted if partial is None else partial.num_groups(wanted)
        ) * self.algorithm.group_size

    @property
    def total_updates(self) -> int:
        """Number of the actor's optimizer steps in the whole run."""
        return self.updates_after(self.trainer.steps)

    def updates_after(self, steps: int) -> int:
        """Return the number of the actor's optimizer steps in the first `steps` training steps."""
        further = sum(
            steps // entry.every for entry in self.mix if entry.update != "reward_model"
        )
        return (
            steps * self.algorithm.num_epochs * self.algorithm.num_mini_batches
            + further
        )

    @property
    def run_dir(self) -> Path:
        """Folder for everything that this run writes."""
        return Path(self.run.dir) / self.run.name

    @property
    def chosen_file(self) -> Path:
        """File that records the values chosen for `auto` keys, and the number of ranks that they were chosen for."""
        return self.run_dir / "chosen.json"

    @property
    def max_response_tokens(self) -> int:
        """Longest response that is sampled, in tokens."""
        return int(self.rollout.sampling["max_tokens"])

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus longest response, in tokens: the context length that every engine must hold."""
        return self.data.max_prompt_tokens + self.max_response_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers, under the key names of the file."""
        return self.model_dump(mode="json", by_alias=True)

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML. `load_config` of it gives an equal Config."""
        return yaml.dump(
            self.to_dict(),
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
            width=110,
        )


class _Dumper(SafeDumper):
    """YAML dumper without anchors: a mapping that two roles share is written out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(value: Any) -> dict[str, Any]:
    """Return `value` as a dictionary; empty if it is neither a section nor a mapping."""
    if isinstance(value, Section):
        return value.model_dump(by_alias=True)
    return value if isinstance(value, dict) else {}
