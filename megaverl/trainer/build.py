"""From a configuration to roles on their grids."""

from __future__ import annotations

import os
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.algorithms import AdaptiveKL, FixedKL, KLController
from megaverl.config import Config
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.data.datasets import PromptDataset
from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.tokenizers import Tokenizer, check_fits, load_tokenizer
from megaverl.errors import ConfigError
from megaverl.models.hub import ModelFiles, find_model
from megaverl.models.spec import ModelSpec
from megaverl.parallel.collectives import together
from megaverl.parallel.grid import GridShape
from megaverl.parallel.groups import Grid, ProcessGroupManager, default_group
from megaverl.platform import platform
from megaverl.rewards import build_reward
from megaverl.roles.critic import Critic
from megaverl.roles.megatron_model import MegatronModel
from megaverl.roles.policy import Actor, Policy
from megaverl.roles.reward import RewardRole
from megaverl.roles.rollout import Rollout, adopting
from megaverl.roles.trainable import TrainableModel
from megaverl.trainer.watchdog import patience


@dataclass
class Builder:
    """Makes the parts of a run, each when it is asked for; what several share is made once.

    Every rank takes part in every call, in the same order.
    """

    config: Config
    shared_groups: InitVar[ProcessGroupManager | None] = None
    groups: ProcessGroupManager = field(init=False)
    spec: ModelSpec = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    folder: Path = field(init=False)
    _files: dict[str, ModelFiles] = field(init=False, default_factory=dict)

    def __post_init__(self, shared_groups: ProcessGroupManager | None) -> None:
        config = self.config
        self.groups = shared_groups or ProcessGroupManager(patience(config.run.timeout_minutes))
        self.folder = self.files().folder
        with together():  # the files may lie on each machine's own disk
            self.spec = ModelSpec.from_folder(self.folder)
            self.tokenizer = load_tokenizer(
                config.model.tokenizer or self.folder, trust_remote_code=config.model.trust_remote_code
            )
            check_fits(self.tokenizer, self.spec, model=config.model.path)
            if config.max_tokens > self.spec.max_positions:
                raise ConfigError(
                    f"data.max_prompt_tokens={config.data.max_prompt_tokens} plus rollout.sampling.max_tokens="
                    f"{config.rollout.sampling['max_tokens']} is more than the model's context of "
                    f"{self.spec.max_positions} tokens (max_position_embeddings). Lower one of the two."
                )

    def files(self, path: str | None = None) -> ModelFiles:
        """The files of a model, of `model.path` unless another is named; those on a hub begin to arrive."""
        model = self.config.model
        path = path or model.path
        if path not in self._files:
            self._files[path] = find_model(
                path,
                revision=model.revision if path == model.path else None,
                hub=model.hub,
                offload_folder=model.offload_folder,
                trust_remote_code=model.trust_remote_code,
                with_weights=model.init == "weights",
            )
        return self._files[path]

    @property
    def dtype(self) -> torch.dtype:
        name = self.config.model.dtype
        return platform.default_dtype if name == "auto" else getattr(torch, name)

    @property
    def temperature(self) -> float:
        return float(self.config.rollout.sampling.get("temperature", 1.0))

    def grid(self, config: GridConfig, role: str) -> Grid:
        """The role's grid over the whole world."""
        shape = GridShape.fit(
            dist.get_world_size(),
            tp=config.tp,
            cp=config.cp,
            ep=config.ep,
            pp=config.pp,
            vpp=config.vpp,
            etp=config.etp,
            role=role,
        )
        return self.groups.grid(shape)

    def model(
        self, config: GridConfig, role: str, *, path: str | None = None, value_head: bool = False
    ) -> MegatronModel:
        """A Megatron-core model with the weights of `path` (or of `model.path`)."""
        files = self.files(path)
        model = MegatronModel(
            ModelSpec.from_folder(files.folder),
            self.grid(config, role),
            dtype=self.dtype,
            seed=self.config.run.seed,
            overrides=config.megatron,
            value_head=value_head,
            role=role,
        )
        if self.config.model.init == "weights":
            model.load(files.folder, files.arriving())
        return model

    def trainable(
        self, model: MegatronModel, config: TrainedConfig, optimizer: dict[str, Any], total_updates: int
    ) -> TrainableModel:
        """`model` with its optimizer."""
        return TrainableModel(
            model, optimizer=optimizer, scheduler=config.scheduler, ddp=config.ddp, total_updates=total_updates
        )

    @property
    def total_updates(self) -> int:
        algorithm = self.config.algorithm
        return self.config.trainer.steps * algorithm.num_epochs * algorithm.num_mini_batches

    def actor(self) -> Actor:
        config = self.config
        model = self.model(config.actor, "actor")
        return Actor(
            self.trainable(model, config.actor, config.actor.optimizer, self.total_updates),
            config.algorithm,
            temperature=self.temperature,
            micro_batch_tokens=config.actor.micro_batch_tokens,
            seed=config.run.seed,
        )

    def critic(self) -> Critic:
        config = self.config
        model = self.model(config.critic, "critic", path=config.critic.path, value_head=True)
        return Critic(
            self.trainable(model, config.critic, config.critic.optimizer, self.total_updates),
            config.algorithm,
            micro_batch_tokens=config.critic.micro_batch_tokens,
            seed=config.run.seed,
        )

    def reference(self) -> Policy:
        config = self.config.reference
        model = self.model(config, "reference", path=config.path)
        return Policy(
            model, temperature=self.temperature, micro_batch_tokens=config.micro_batch_tokens, offload=config.offload
        )

    def rollout(self, actor: MegatronModel | None) -> Rollout:
        """The engine; with an actor its weights come from there, else from the model folder."""
        from megaverl.rollout import make_engine

        config = self.config
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        world, reshard = default_group(), config.reshard

        def node_of(rank: int) -> int:
            return rank // ranks_per_node

        engine = make_engine(
            config.rollout,
            self.folder if actor is not None and config.rollout.engine == "vllm" else self.files().wait(),
            seed=config.run.seed,
            dtype=self.dtype,
            max_model_len=config.max_tokens,
            stop_token_ids=self.tokenizer.stop_token_ids,
            load_weights=actor is None,
            trust_remote_code=config.model.trust_remote_code,
            num_sequences=-(-config.samples_per_step * config.rollout.tp // dist.get_world_size()),
            on_load=adopting(actor, world, node_of, reshard) if actor else None,
        )
        layouts = engine.layouts(actor.weights, self.spec) if actor else None
        timeout = timedelta(minutes=reshard.timeout_minutes or config.run.timeout_minutes)
        return Rollout(engine, layouts, actor, world, node_of, reshard, timeout)

    def reward(self) -> RewardRole:
        with together():
            reward = build_reward(self.config.reward)
        return RewardRole(reward, self.tokenizer, default_group())

    def kl_controller(self) -> KLController:
        kl = self.config.algorithm.kl
        return FixedKL(kl.coef) if kl.target is None else AdaptiveKL(kl.coef, kl.target, kl.gain)

    def encoder(self) -> PromptEncoder:
        data = self.config.data
        return PromptEncoder(
            self.tokenizer,
            PromptFormat(
                chat_template=data.chat_template,
                system_prompt=data.system_prompt,
                max_tokens=data.max_prompt_tokens,
                too_long=data.too_long,
            ),
        )

    def dataset(self, paths: list[str], *, needs_answer: bool = True) -> PromptDataset:
        data = self.config.data
        with together():
            dataset = PromptDataset.load(
                paths,
                self.encoder(),
                prompt_key=data.prompt_key,
                answer_key=data.answer_key if needs_answer else None,
            )
        return dataset

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run.dir) / self.config.run.name
