"""`trainer`, `sft`, `checkpoint`: how long, how it is watched, and what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megaverl.config.data_sources import Sources
from megaverl.config.section import NonNegative, Passthrough, Positive, PositiveFloat, Section


class LoopConfig(Section):
    """`trainer`."""

    steps: Positive = Field(default=100, description="Training steps: each one rollout and its updates.")
    validate_every: NonNegative = Field(
        default=10,
        description="Steps between validations; 0: never, and the default without data.validation.",
    )
    validate_at_start: bool = Field(default=True, description="Validate before the first step as well.")
    validation_prompts: Positive | None = Field(default=None, description="How many held-out prompts. null: all.")
    validation_samples: Positive = Field(default=1, description="Responses per held-out prompt.")
    validation_sampling: Passthrough = Field(
        default_factory=dict,
        description="Fields of SamplingParams that differ in validation from rollout.sampling.",
    )
    pass_at: Annotated[list[Positive], BeforeValidator(lambda v: [v] if isinstance(v, int) else v)] = Field(
        default_factory=lambda: [1], description="The k of each pass@k; none above validation_samples."
    )
    operators: list[Annotated[str, Field(pattern=r"^.+:[A-Za-z_]\w*$")]] = Field(
        default_factory=list,
        description="Functions of your own, as module:function, that add operators to the step's flow, to watch or to "
        "change what flows: each is called with the DataFlow (megaverl flow show).",
    )
    best_metric: Literal["accuracy", "reward"] = Field(
        default="accuracy", description="Validation metric by which the best checkpoint is remembered."
    )
    save_samples: NonNegative = Field(
        default=4, description="Sample generations written to the run folder at each step."
    )
    store_rollouts: bool = Field(
        default=False, description="Store every step's responses and scores, for replay_rollouts, in dir/name/rollouts."
    )
    rollout_only: bool = Field(
        default=False, description="Generate, score and store; train nothing. Also `megaverl train --rollout-only`."
    )
    replay_rollouts: str | None = Field(
        default=None,
        min_length=1,
        description="A folder of stored rollouts to train on, without an engine. Also --replay-rollouts PATH.",
    )


class SFTConfig(Section):
    """`sft`: the warm-up by supervised fine-tuning, with the actor's grid and optimizer."""

    train: Sources = Field(default_factory=list, description="Prompt/answer pairs. Empty: data.train.")
    steps: Positive = Field(default=100, description="Optimizer steps.")
    batch_size: Positive = Field(default=32, description="Pairs in one step, over all ranks.")
    lr: PositiveFloat = Field(default=1e-5, description="Highest learning rate.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="How the learning rate falls to 0 after warm-up."
    )
    lr_warmup_steps: NonNegative = Field(default=0, description="Steps in which the learning rate rises from 0.")
    max_answer_tokens: Positive | None = Field(
        default=None,
        description="Longest answer; a longer one is an error. null: rollout.sampling.max_tokens.",
    )


class CheckpointConfig(Section):
    """`checkpoint`."""

    save_interval: NonNegative = Field(default=0, description="Steps between checkpoints; 0: only after the last step.")
    keep_last_k: Positive = Field(default=3, description="How many are kept, besides the best one and milestones.")
    keep_best: bool = Field(default=True, description="Keep the one with the best validation as well.")
    milestone_interval: NonNegative = Field(
        default=0, description="Checkpoints of every so many steps are kept for good; 0: none."
    )
    async_save: bool = Field(
        default=True,
        description="Training waits for a copy in host memory only, which is as large as the checkpoint; writing goes "
        "on beside it.",
    )
    on_write_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="A checkpoint that cannot be written: stop ends the run, continue says so and goes on. "
        "The ones before it are kept either way.",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto: the newest of this run folder, if any. latest: the same, and it must be there. "
        "never: start anew. Or a checkpoint folder. Also `megaverl train --resume`.",
    )
    export_hf: bool = Field(default=True, description="Write a Hugging Face folder at the end.")
