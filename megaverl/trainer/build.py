"""Builder of a run's parts: roles on their grids, engines, rewards and data, from a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.algorithms import AdaptiveKL, FixedKL, KLController
from megaverl.config import Config
from megaverl.config.global_model import global_section
from megaverl.config.roles import GridConfig, ReshardConfig, TrainedConfig
from megaverl.config.run import RewardConfig
from megaverl.data.datasets import PromptDataset
from megaverl.data.images import Images
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat, load_tools
from megaverl.data.sources import Entry
from megaverl.data.streaming import Prompts, PromptStream, StreamedPrompts
from megaverl.data.tokenizers import Tokenizer, check_fits, load_tokenizer
from megaverl.distributed.collectives import together
from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.distributed.job_context import JobContext, default_group, join_some
from megaverl.distributed.traffic import name_groups
from megaverl.errors import ConfigError
from megaverl.models.architectures import weights_of
from megaverl.models.hub import ModelFiles, find_model
from megaverl.platform import platform
from megaverl.rewards import RowNames, build_reward
from megaverl.rewards.trl import TrainerState
from megaverl.rollout.engine import Engine, OnLoad, ReceivesWeights
from megaverl.rollout.server_engine import ServerEngine
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight, shapes_of
from megaverl.trainer.job import patience
from megaverl.trainer.trainer_engines import make_model, make_trainable
from megaverl.workers import RemoteWorker
from megaverl.workers.critic import ActorCritic, Critic
from megaverl.workers.draft import DraftTrainer, HeadTrainer
from megaverl.workers.fsdp_model import count_shards
from megaverl.workers.model import TrainingModel
from megaverl.workers.offload import place_for
from megaverl.workers.pairs import ImplicitRewardModel, RewardModel
from megaverl.workers.player import Player
from megaverl.workers.policy import Actor, Policy
from megaverl.workers.reward import (
    LearnedReward,
    RewardRole,
    ScoringModel,
    TransformersRewardModel,
)
from megaverl.workers.rollout import Rollout
from megaverl.workers.server_sync import ServerSync
from megaverl.workers.teacher import Teacher
from megaverl.workers.text_teacher import reference_policy
from megaverl.workers.trainable import TrainableModel
from megaverl.workers.weight_sync import (
    ActorWeights,
    WeightSync,
    adopting,
    layouts_among,
    told_layouts,
)

# Folder inside the run's folder, for servers that read weights from one.
WEIGHTS = "rollout_weights"


@dataclass
class Builder:
    """Factory of a run's parts. Shared parts are created once.

    Every method is collective over the ranks of this rank's role group, and all ranks
    call the methods in the same order.

    Attributes:
        context: connections to other role groups, if roles have separate ranks.
        groups: process groups of the grids.
        spec: dimensions of the model.
        images: reader of images in rows, or None if the model takes no images.
        folder: folder of the model's files.
        resumes: whether a checkpoint will provide the weights of trained roles, which are then not read here.
    """

    config: Config
    shared_groups: InitVar[ProcessGroupManager | None] = None
    context: JobContext | None = None
    groups: ProcessGroupManager = field(init=False)
    spec: ModelSpec = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    images: Images | None = field(init=False)
    folder: Path = field(init=False)
    resumes: bool = field(init=False, default=False)
    _files: dict[str, ModelFiles] = field(init=False, default_factory=dict)

    def __post_init__(self, shared_groups: ProcessGroupManager | None) -> None:
        config = self.config
        self.groups = shared_groups or ProcessGroupManager(
            patience(config.run.timeout_minutes)
        )
        self.folder = self.files().folder
        with together():  # each machine may have the files on its own disk
            self.spec = ModelSpec.outline(self.folder)
            self.tokenizer = load_tokenizer(
                config.model.tokenizer or self.folder,
                trust_remote_code=config.model.trust_remote_code,
            )
            check_fits(self.tokenizer, self.spec.vocab_size, model=config.model.path)
            self.images = Images.of(config.data.images, self.folder, self.tokenizer)
            if config.max_tokens > self.spec.max_positions:
                raise ConfigError(
                    f"data.max_prompt_tokens={config.data.max_prompt_tokens} plus rollout.sampling.max_tokens="
                    f"{config.rollout.sampling['max_tokens']} is more than the model's context of "
                    f"{self.spec.max_positions} tokens (max_position_embeddings). Lower one of the two."
                )

    def files(self, path: str | None = None) -> ModelFiles:
        """Return the files of `path` (by default `model.path`). Files on a hub start to download."""
        model = self.config.model
        path = path or model.path
        if path not in self._files:
            self._files[path] = find_model(
                path,
                revision=model.revision if path == model.path else None,
                hub=model.hub,
                offload_folder=model.offload_folder,
                trust_remote_code=model.trust_remote_code,
                # The engine reads a draft model's weights even if the actor starts anew.
                with_weights=model.init == "weights" or path == self._draft_path,
            )
        return self._files[path]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that models compute with."""
        return platform.dtype(self.config.model.dtype)

    @property
    def temperature(self) -> float:
        """Return the sampling temperature, at which log-probs are computed as well."""
        return float(self.config.rollout.sampling.get("temperature", 1.0))

    def grid(self, config: GridConfig, role: str) -> Grid:
        """Create the grid of a role over all ranks of its role group."""
        grid = self.groups.grid(
            GridShape.fit(dist.get_world_size(), **grid_sizes(config), role=role)
        )
        name_groups(role, grid.dimensions)
        return grid

    def model(
        self,
        config: GridConfig,
        role: str,
        *,
        path: str | None = None,
        value_head: int = 0,
        beside_logits: bool = False,
        trained: bool = False,
    ) -> TrainingModel:
        """Create a role's model with the weights of `path` (by default `model.path`), on the role's engine.

        Args:
            value_head, beside_logits: see `make_model`.
            trained: whether a checkpoint contains the model's weights.
        """
        files = self.files(path)
        from_files = self.config.model.init == "weights"
        model = make_model(
            files.folder,
            self.config,
            config,
            self.grid(config, role),
            self.groups,
            role=role,
            dtype=self.dtype,
            value_head=value_head,
            beside_logits=beside_logits,
        )
        # The checkpoint fills all weights but the vocabulary's padding, which may have
        # been smaller in it.
        if trained and self.resumes:
            model.clear_padding()
        elif from_files or path == self._draft_path is not None:
            model.load(files.folder, files.arriving())
        if model.adapters is not None and model.adapters.config.path is not None:
            model.load_adapters(model.adapters.config.path)
        return model

    def _trainable(
        self, section: TrainedConfig, role: str, total_updates: int, **options: Any
    ) -> TrainableModel:
        """Create a role's model with its optimizer.

        Args:
            total_updates: number of optimizer steps of the whole run.
            options: further arguments of `model`.
        """
        return make_trainable(
            self.model(section, role, trained=section.lora is None, **options),
            section,
            section.optimizer,
            total_updates,
            is_replica=self._is_replicated(role),
        )

    def actor(self, heads: int = 1) -> Actor:
        """Create the actor. With `critic.share_backbone` it has `heads` value heads."""
        config, shares = self.config, self.config.shares_backbone
        return (ActorCritic if shares else Actor)(
            self._trainable(
                config.actor,
                "actor",
                config.total_updates,
                value_head=heads if shares else 0,
                beside_logits=shares,
            ),
            config.algorithm,
            temperature=self.temperature,
            micro_batch_tokens=config.actor.micro_batch_tokens,
            seed=config.run.seed,
            router_replay=config.actor.router_replay,
        )

    def critic(self, heads: int = 1) -> Critic:
        """Create the critic. `heads` is the number of values per token, one for each agent."""
        config = self.config
        return Critic(
            self._trainable(
                config.critic,
                "critic",
                config.total_updates,
                path=config.critic.path,
                value_head=heads,
            ),
            config.algorithm,
            micro_batch_tokens=config.critic.micro_batch_tokens,
            seed=config.run.seed,
        )

    def global_models(self, heads: int = 1) -> dict[str, TrainableModel]:
        """Create the global models of all replicated roles, on the coordinator's ranks, by role.

        Args:
            heads: as in `actor` and `critic`.
        """
        config, models = self.config, dict[str, TrainableModel]()
        shares = config.shares_backbone
        for role in ("actor", "critic"):
            if not self._is_replicated(role):
                continue
            section: TrainedConfig = getattr(config, role)
            is_critic = role == "critic"
            grid = global_section(section, config.coordinator)
            model = self.model(
                grid,
                role,
                path=config.critic.path if is_critic else None,
                value_head=heads if is_critic or shares else 0,
                beside_logits=shares,
                trained=True,
            )
            models[role] = make_trainable(
                model, grid, section.optimizer, config.total_updates
            )
        return models

    def _is_replicated(self, role: str) -> bool:
        """Return whether islands have replicas of a role without an optimizer."""
        if not self.config.aggregates_gradients or self.context is None:
            return False
        if role not in ("actor", "critic") or (
            role == "critic" and not self.config.uses_critic
        ):
            return False
        return self.context.placement.colocated(role, "actor")

    def reference(self, actor: TrainingModel | None = None) -> Policy:
        """Create the reference policy.

        Args:
            actor: model of the actor on this rank. If the reference is the actor without its adapters, it shares this
                model.
        """
        config = self.config.reference
        if actor is not None and self.config.reference_is_actor:
            return Policy(
                actor,
                temperature=self.temperature,
                micro_batch_tokens=config.micro_batch_tokens,
                with_adapters=False,
            )
        # Logits are computed where they are compared.
        if self.config.algorithm.divergence_name is not None:
            config = config.model_copy(update={"chunked_logits": True})
        model = self.model(config, "reference", path=config.path)
        place = place_for(None)
        # On a CPU the weights already are in host memory, where offloading would put
        # them.
        if config.offload and place is not None:
            model.offload_to(place)
        with together():
            reference = reference_policy(
                self.config, model, self.files(config.path).folder, self.tokenizer
            )
        return reference

    def teach(self, actor: Actor, reference: Policy | RemoteWorker | None) -> None:
        """Give the actor its teacher if `algorithm.distillation` is configured."""
        distillation, name, heat = (
            self.config.algorithm.distillation,
            self.config.algorithm.divergence_name,
            self.temperature,
        )
        if name is not None:
            assert reference is not None
            actor.teacher = Teacher(
                reference.model,
                name,
                distillation.options,
                temperature=heat,
                top_k=distillation.top_k,
            )
            actor.teacher.check_student(actor.model)

    def rollout(
        self, actor: TrainingModel | None, engine: Engine | None = None
    ) -> Rollout:
        """Create the rollout with its engine, for ranks that also have the actor or no actor at all.

        Args:
            actor: model whose weights the engine receives, or None to read them from the model's folder.
            engine: existing engine to share with this actor, or None to create one.
        """
        world, reshard = default_group(), self.config.reshard
        if self.config.rollout.engine == "server":
            _, rollout = self._server_rollout(actor)
            assert rollout is not None, "the engines are on these ranks"
            return rollout
        if actor is None:
            return Rollout(
                engine or self._engine(weights_come=False, on_load=None), world
            )
        # The engine holds the weights of one agent at a time.
        if self.config.environment.agents == "own":
            reshard = reshard.model_copy(update={"alias": "never"})
        node_of = self._node_of
        on_load = adopting(actor, world, node_of, reshard)
        engine = engine or self._engine(weights_come=True, on_load=on_load)
        sync = WeightSync(
            ActorWeights.of(actor),
            engine.layouts(shapes_of(actor.weights)),
            engine,
            world,
            node_of=node_of,
            config=reshard,
            timeout=self.config.reshard_timeout,
            plan=on_load.plan if on_load is not None else None,
            background=dist.new_group(timeout=self.config.reshard_timeout)
            if reshard.overlap
            else None,
        )
        return Rollout(engine, world, sync)

    @staticmethod
    def _node_of(rank: int) -> int:
        """Return the node of a rank, if all roles share all ranks."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        return rank // per_node

    def _server_rollout(
        self, actor: TrainingModel | None, group: dist.ProcessGroup | None = None
    ) -> tuple[ServerSync, Rollout | None]:
        """Create this rank's part in the weight transfer to inference servers, and its client if it has one.

        Collective over the ranks of this role group.

        Args:
            actor: actor on this rank, whose weights the servers receive. None: the actor is on other ranks, or the
                servers keep the weights of the model's folder.
            group: ranks of actor and rollout, if they share none.
        """
        config, world = self.config, default_group()
        servers = config.rollout.servers
        engine: ServerEngine | None = None
        # The engines' ranks are clients of the servers: all ranks if actor and rollout
        # share them, else those without an actor.
        if group is None or actor is None:
            with together(world):
                engine = ServerEngine(
                    self.folder,
                    config.rollout,
                    run_dir=config.run_dir,
                    max_model_len=config.max_tokens,
                    stop_token_ids=self.tokenizer.stop_token_ids,
                    image_token=self._image_token,
                )
        # Only vLLM's workers can be extended by code that applies changes.
        keeps_whole = servers.transfer == "nccl" or servers.kind == "sglang"
        sync = ServerSync(
            actor,
            engine,
            world,
            group or world,
            # Each run has its own subfolder, because old contents of the folder are
            # deleted.
            folder=Path(servers.folder) / config.run.name
            if servers.folder is not None
            else config.run_dir / WEIGHTS,
            source_folder=self.folder,
            dtype=self.dtype,
            tolerance=servers.fingerprint_tolerance,
            max_tokens=config.max_tokens,
            direct=servers if servers.transfer == "direct" else None,
            delta="off" if keeps_whole else config.reshard.delta,
            check_every=config.reshard.check_every,
        )
        if group is None and actor is None:
            sync.use_folder(self.files().wait())
        return sync, Rollout(engine, world, sync) if engine is not None else None

    def remote_rollout(
        self, actor: TrainingModel | None
    ) -> tuple[WeightSync | ServerSync, Rollout | None]:
        """Create this rank's part in the weight transfer to engines on other ranks than the actor's.

        Collective over the ranks of actor and engines.

        Args:
            actor: model of this rank, or None on the engines' ranks.

        Returns:
            The weight transfer, and on the engines' ranks the rollout.
        """
        config = self.config
        # Joined before an engine starts, so that ranks without one notice its failure.
        group = self._join_transfer("weights")
        if config.rollout.engine == "server":
            return self._server_rollout(actor, group)
        engine, layouts = None, None
        if actor is None:
            section: TrainedConfig = config.actor
            if config.aggregates_gradients:
                section = global_section(config.actor, config.coordinator)
            held, weights = self._weights_elsewhere("actor", section, self.folder)
            engine = self._engine(weights_come=True, on_load=None)
            layouts = engine.layouts(shapes_of(weights))
        else:
            held = ActorWeights.of(actor)
        sync = self._sync_between(group, held, layouts, engine, config.reshard)
        return sync, Rollout(
            engine, default_group(), sync
        ) if engine is not None else None

    @property
    def _transfer_ends(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ranks that send weights and the ranks of the engines, which share none."""
        assert self.context is not None
        placement = self.context.placement
        source = placement.islands[0]
        if self.config.aggregates_gradients:
            source = placement.ranks["coordinator"]
        return source, placement.ranks["rollout"]

    def _join_transfer(self, name: str) -> dist.ProcessGroup:
        """Create a process group of exactly the ranks of actor and engines. Collective over these ranks."""
        assert self.context is not None
        source, dest = self._transfer_ends
        return join_some(self.context, name, tuple(sorted({*source, *dest})))

    def _sync_between(
        self,
        group: dist.ProcessGroup,
        held: ActorWeights,
        layouts: Callable[[int], Layout] | None,
        receiver: ReceivesWeights | None,
        reshard: ReshardConfig,
    ) -> WeightSync:
        """Create this rank's part in a weight transfer between ranks of the actor and of the engines.

        Collective over the ranks of both.

        Args:
            group: the ranks of actor and engines.
            held: weights of the sending ranks.
            layouts: index of an engine's rank -> the receiver's layout; None on ranks without an engine.
            receiver: engine of this rank or its draft model, or None.
        """
        assert self.context is not None
        placement = self.context.placement
        source, dest = self._transfer_ends
        members = sorted({*source, *dest})
        layouts = told_layouts(layouts, [members.index(rank) for rank in dest], group)
        return WeightSync(
            replace(held, layout_of=layouts_among(members, source, held.layout_of)),
            layouts_among(members, dest, layouts),
            receiver,
            default_group(),
            node_of=lambda place: placement.node_of(members[place]),
            config=reshard,
            timeout=self.config.reshard_timeout,
            group=group,
            # A transfer that overlaps with training needs its own group, because other
            # collectives use the first one meanwhile.
            background=self._join_transfer("weights in the background")
            if reshard.overlap
            else None,
        )

    def _weights_elsewhere(
        self, role: str, section: TrainedConfig, folder: Path
    ) -> tuple[ActorWeights, list[Weight]]:
        """Return weights and layouts of a model on the actor's ranks, for a rank without it.

        Args:
            folder: folder of the model's files.
        """
        assert self.context is not None
        placement = self.context.placement
        source, _ = self._transfer_ends
        spec = self.spec if folder == self.folder else ModelSpec.outline(folder)
        if section.engine == "fsdp":
            first = placement.node_of(source[0])
            per_node = sum(placement.node_of(rank) == first for rank in source)
            num_shards = count_shards(
                section.fsdp,
                len(source) // section.tp,
                per_node // section.tp,
                role,
            )
            trust = self.config.model.trust_remote_code
            return ActorWeights.fsdp_elsewhere(
                folder,
                spec,
                num_shards,
                section.tp,
                self.dtype,
                section.lora,
                trust_remote_code=trust,
            )
        shape = GridShape.fit(len(source), **grid_sizes(section), role=role)
        held = ActorWeights.elsewhere(
            spec, shape, self.dtype, section.megatron, section.lora
        )
        return held, weights_of(spec)

    def _engine(self, *, weights_come: bool, on_load: OnLoad | None) -> Engine:
        """Create the engine of this rank.

        Args:
            weights_come: whether the actor sends the weights, so that none are read.
            on_load: called when the engine loads its model, or None.
        """
        from megaverl.rollout import EngineOptions, make_engine

        config = self.config
        plays = config.algorithm.opponent_beta is not None
        return make_engine(
            config.rollout,
            # vLLM reads no weight files if the actor sends the weights, so it does not
            # wait for their download.
            self.folder
            if weights_come and config.rollout.engine == "vllm"
            else self.files().wait(),
            EngineOptions(
                seed=config.run.seed,
                dtype=self.dtype,
                max_model_len=config.max_tokens,
                stop_token_ids=tuple(self.tokenizer.stop_token_ids),
                load_weights=not weights_come,
                trust_remote_code=config.model.trust_remote_code,
                # Number of sequences that one engine serves at the same time, rounded
                # up.
                num_sequences=-(
                    -config.samples_at_once * config.rollout.tp // dist.get_world_size()
                ),
                fp32_lm_head=config.model.fp32_lm_head,
                routed_experts=config.actor.router_replay != "off",
            ),
            on_load=on_load,
            images=config.data.images if self.images is not None else None,
            tokenizer=config.model.tokenizer,
            reference_folder=self.files(config.reference.path).wait()
            if plays
            else None,
        )

    def learned_reward(self) -> TrainableModel:
        """Create the reward model of `reward` that the run trains itself."""
        config, section = self.config, self.config.reward_model
        [path] = [
            entry.path
            for entry in config.reward
            if entry.path is not None and entry.engine == "megatron"
        ]
        return self._trainable(
            section, "reward_model", config.trainer.steps, path=path, value_head=1
        )

    def implicit_reward(self) -> ImplicitRewardModel:
        """Create PRIME's reward model."""
        config, section = self.config, self.config.reward_model
        return ImplicitRewardModel(
            self._trainable(
                section, "reward_model", config.trainer.steps, path=section.path
            ),
            temperature=self.temperature,
            micro_batch_tokens=section.micro_batch_tokens,
            beta=section.beta,
        )

    def draft(self, actor: TrainingModel) -> DraftTrainer:
        """Create the draft model or head that the run trains.

        Args:
            actor: model whose hidden states a head reads.

        Raises:
            ConfigError: the model takes images.
        """
        config, section = self.config, self.config.draft
        if self.images is not None:
            raise ConfigError(
                "draft.train is true, and the model takes images, which draft models do not read. Leave it out."
            )
        trainable = self._trainable(
            section, "draft", config.total_updates, path=self._draft_path
        )
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "micro_batch_tokens": section.micro_batch_tokens,
            "seed": config.run.seed,
        }
        if config.trains_head:
            return HeadTrainer(trainable, config.algorithm, actor=actor, **options)
        return DraftTrainer(trainable, config.algorithm, **options)

    @property
    def _draft_path(self) -> str | None:
        """Return the model of `draft`, or None if the run trains none."""
        return self.config.draft_path if self.config.draft.train else None

    def draft_sync(
        self, draft: DraftTrainer | None, engine: Engine | None
    ) -> WeightSync:
        """Create this rank's part in the transfer of the draft model's weights to the engines.

        Collective over the ranks of actor and engines.

        Args:
            draft: draft model of this rank, or None on ranks without an actor.
            engine: engine of this rank, or None on ranks without one.
        """
        from megaverl.rollout.vllm_engine import VLLMEngine

        assert engine is None or isinstance(engine, VLLMEngine), "draft_issues"
        dest = None if engine is None else engine.draft
        # Captured graphs hold the addresses of the draft model's weights by now, so the
        # weights are copied. They follow the actor's in one call, without overlap.
        reshard = self.config.reshard.model_copy(
            update={"alias": "never", "overlap": False}
        )
        if draft is not None:
            held, weights = ActorWeights.of(draft.model), draft.model.weights
        else:
            folder = self.files(self._draft_path).folder
            held, weights = self._weights_elsewhere("draft", self.config.draft, folder)
        layouts = None if dest is None else dest.layouts(shapes_of(weights))
        if draft is None or layouts is None:
            group = self._join_transfer("draft weights")
            return self._sync_between(group, held, layouts, dest, reshard)
        return WeightSync(
            held,
            layouts,
            dest,
            default_group(),
            node_of=self._node_of,
            config=reshard,
            timeout=self.config.reshard_timeout,
        )

    def reward(
        self, trained: TrainableModel | None = None, *, models_are_here: bool = True
    ) -> RewardRole:
        """Create the reward role from rules, functions and reward models.

        Args:
            trained: reward model that the run trains, used instead of loading it again.
            models_are_here: False on ranks that only read the scores of the reward ranks.
        """
        config = self.config
        models = [entry for entry in config.reward if entry.path is not None]
        functions = [entry for entry in config.reward if entry.path is None]
        with together():
            may_be_empty = bool(models) or config.environment.name is not None
            row = RowNames(prompt=config.data.prompt_key, answer=config.data.answer_key)
            reward = build_reward(
                functions,
                may_be_empty=may_be_empty,
                modules=config.reward_modules,
                row=row,
            )
        learned = []
        for entry in models:
            model = (
                self._reward_model(entry, trained)
                if models_are_here
                else RemoteWorker("reward")
            )
            learned.append(LearnedReward(entry.label, entry.weight, model))
        reward.begin(TrainerState(0, config.trainer.steps, 0.0))
        # Dynamic sampling selects samples after scoring, so it is not known yet which
        # ones the records will show.
        num_shown: int | None = config.trainer.save_samples
        if num_shown and config.samples_in_rounds:
            num_shown = None
        return RewardRole(reward, self.tokenizer, default_group(), learned, num_shown)

    def _reward_model(
        self, entry: RewardConfig, trained: TrainableModel | None
    ) -> ScoringModel:
        section = self.config.reward_model
        if entry.engine == "megatron":
            model = (
                trained.model
                if trained
                else self.model(section, "reward_model", path=entry.path, value_head=1)
            )
            return RewardModel(model, micro_batch_tokens=section.micro_batch_tokens)
        folder = self.files(entry.path).wait()
        with together():
            reward_model = TransformersRewardModel(
                folder,
                self.tokenizer,
                default_group(),
                micro_batch_tokens=section.micro_batch_tokens,
                trust_remote_code=self.config.model.trust_remote_code,
            )
            if (
                reward_model.reads_text
                and self.config.environment.name is not None
                and self.encoder().uses_chat_template
            ):
                raise ConfigError(
                    f"reward '{entry.label}': {entry.path} has a tokenizer or chat template of its own, and cannot "
                    "read an environment's answers, which are written in the policy's chat template. Use a reward "
                    "model with the policy's tokenizer and template, or data.chat_template=none."
                )
        return reward_model

    def player(self) -> Player | None:
        """Create the player of episodes, or return None without an environment."""
        config = self.config
        if config.environment.name is None:
            return None
        return Player(
            config.environment,
            self.tokenizer,
            default_group(),
            max_tokens=config.max_response_tokens,
            max_prompt_tokens=config.data.max_prompt_tokens,
            chat=self.encoder().uses_chat_template,
        )

    def kl_controller(self) -> KLController:
        """Create the controller of the KL coefficient."""
        kl = self.config.algorithm.kl
        return (
            FixedKL(kl.coef)
            if kl.target is None
            else AdaptiveKL(kl.coef, kl.target, kl.gain)
        )

    def encoder(self) -> PromptEncoder:
        """Create the encoder of prompts."""
        data_format = PromptFormat.of(self.config.data)
        return PromptEncoder(self.tokenizer, data_format, self._image_token)

    @property
    def _image_token(self) -> int | None:
        return None if self.images is None else self.images.processor.token_id

    def columns(self, *, needs_answer: bool = True) -> Columns:
        """Return the columns of the data that are read."""
        data = self.config.data
        tools = None
        if data.tools is not None:
            with together():
                tools = load_tools(data.tools)
        return Columns(
            data.prompt_key,
            data.answer_key if needs_answer else None,
            data.tools_key,
            tools,
            self.images,
        )

    def dataset(
        self, sources: Sequence[Entry], *, needs_answer: bool = True
    ) -> PromptDataset:
        """Load and check all prompts of `sources`."""
        columns = self.columns(needs_answer=needs_answer)
        with together():
            return PromptDataset.load(list(sources), self.encoder(), columns)

    def prompts(self) -> Prompts:
        """Return the training prompts in the order in which steps take them."""
        data, seed = self.config.data, self.config.run.seed
        if not data.streaming:
            dataset = self.dataset(data.train)
            return PromptStream(
                dataset,
                dataset.sampler(data.prompts_per_step, seed, shuffle=data.shuffle),
            )
        columns, buffer = self.columns(), data.shuffle_buffer if data.shuffle else 1
        with together():
            return StreamedPrompts(
                data.train, self.encoder(), columns, seed=seed, shuffle_buffer=buffer
            )


def grid_sizes(config: GridConfig) -> dict[str, Any]:
    """Return the sizes of a role's grid from its section, as arguments of `GridShape.fit`."""
    return {
        name: getattr(config, name) for name in ("tp", "cp", "ep", "pp", "vpp", "etp")
    }
