"""`actor`, `critic`, `reference`: the Megatron roles, their grids and what is handed to megatron-core."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megaverl.config.section import Passthrough, Positive, Section, over

# The critic and the reference take these from the actor where they do not say otherwise.
SHARED_BY_REFERENCE = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_tokens", "megatron")
SHARED_BY_CRITIC = (*SHARED_BY_REFERENCE, "ddp")

ACTOR_OPTIMIZER: dict[str, Any] = {"optimizer": "adam", "lr": 1e-6, "weight_decay": 0.0, "clip_grad": 1.0}
CRITIC_OPTIMIZER: dict[str, Any] = {**ACTOR_OPTIMIZER, "lr": 1e-5}
SCHEDULER: dict[str, Any] = {"lr_decay_style": "constant", "lr_warmup_steps": 0}


class GridConfig(Section):
    """A role's parallel grid; the data-parallel size is what is left of the world."""

    tp: Positive = Field(default=1, description="Tensor-parallel size.")
    pp: Positive = Field(default=1, description="Pipeline-parallel size.")
    cp: Positive = Field(default=1, description="Context-parallel size (GPU with Transformer Engine only).")
    ep: Positive = Field(default=1, description="Expert-parallel size.")
    etp: Positive | None = Field(default=None, description="Tensor-parallel size inside an expert. null: tp.")
    vpp: Positive | None = Field(
        default=None, description="Model chunks (virtual stages) per pipeline rank. null: one."
    )
    micro_batch_tokens: Positive = Field(
        default=4096, description="Most tokens (prompt and response) in one micro-batch: a hard cap."
    )
    megatron: Passthrough = Field(
        default_factory=dict,
        description="Fields of megatron-core's TransformerConfig, under their own names.",
    )


class TrainedConfig(GridConfig):
    """A role with an optimizer."""

    scheduler: Annotated[Passthrough, over(SCHEDULER)] = Field(
        default_factory=lambda: dict(SCHEDULER),
        description="Arguments of megatron-core's OptimizerParamScheduler; its unit is the optimizer step.",
    )
    ddp: Passthrough = Field(
        default_factory=dict, description="Fields of megatron-core's DistributedDataParallelConfig."
    )


class ActorConfig(TrainedConfig):
    """`actor`: the policy that is trained."""

    optimizer: Annotated[Passthrough, over(ACTOR_OPTIMIZER)] = Field(
        default_factory=lambda: dict(ACTOR_OPTIMIZER),
        description="Fields of megatron-core's OptimizerConfig.",
    )


class CriticConfig(TrainedConfig):
    """`critic`: the same backbone with a value head (ppo).

    What is left out of its grid, `micro_batch_tokens`, `megatron` and `ddp` is the actor's.
    """

    path: str | None = Field(default=None, description="Hugging Face folder of the backbone. null: model.path.")
    optimizer: Annotated[Passthrough, over(CRITIC_OPTIMIZER)] = Field(
        default_factory=lambda: dict(CRITIC_OPTIMIZER),
        description="Fields of megatron-core's OptimizerConfig.",
    )


class ReferenceConfig(GridConfig):
    """`reference`: the frozen policy that KL is measured against. What is left out is the actor's."""

    path: str | None = Field(default=None, description="Hugging Face folder. null: model.path.")
    offload: bool = Field(default=False, description="Keep its weights in host memory while not in use.")
