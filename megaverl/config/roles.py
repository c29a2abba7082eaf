"""Sections of the roles, and of `placement`, `coordinator`, `environment` and `reshard`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from megaverl.config.errors import ConfigIssue, conflict_issues
from megaverl.config.fsdp import FsdpConfig
from megaverl.config.moment_dtypes import (
    BFLOAT16_STEP,
    FSDP_DTYPES,
    MOMENT_FIELDS,
    MOMENTS,
    SWITCH,
)
from megaverl.config.section import (
    MOST,
    Fraction,
    Function,
    GridSize,
    Issues,
    LearningRate,
    Minutes,
    NonNegative,
    NonNegativeFloat,
    Passthrough,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Several,
    Text,
    is_number,
    known_or_own,
    over,
    rule,
)
from megaverl.config.wording import did_you_mean, listed, yaml_text
from megaverl.distributed.placement import ROLES, Wanted, parse_wanted
from megaverl.errors import ConfigError
from megaverl.rollout.environments import agents_of, check_options, environment_names
from megaverl.rollout.server_api import SGLANG_SAMPLING, is_loopback, url_problem
from megaverl.sharding.quantization import FORMATS, GROUP_FORMATS

# Fields that decide which rank holds which part of a model, and how it is computed.
LAID_OUT_BY = ("engine", "tp", "pp", "cp", "ep", "etp", "vpp", "megatron", "fsdp")
SHARED_BY_REFERENCE = (
    *LAID_OUT_BY,
    "micro_batch_tokens",
    "pack_samples",
    "chunked_logits",
)
SHARED_BY_CRITIC = (
    *SHARED_BY_REFERENCE,
    "ddp",
    "activation_checkpointing",
    "gradient_accumulation",
    "offload",
)
# Role -> fields whose defaults are the actor's values.
INHERITED = {
    "critic": SHARED_BY_CRITIC,
    "reference": SHARED_BY_REFERENCE,
    "reward_model": SHARED_BY_CRITIC,
    "draft": SHARED_BY_CRITIC,
}
# Fields that only one engine reads. A role does not inherit them from an actor with
# another engine.
OF_ONE_ENGINE = (*LAID_OUT_BY, "ddp")
ENGINES = ("vllm", "hf", "server")
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 256}
ACTOR_OPTIMIZER: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 1e-6,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
}
CRITIC_OPTIMIZER: dict[str, Any] = {**ACTOR_OPTIMIZER, "lr": 1e-5}
DRAFT_OPTIMIZER: dict[str, Any] = {**ACTOR_OPTIMIZER, "lr": 1e-4}
SCHEDULER: dict[str, Any] = {"lr_decay_style": "constant", "lr_warmup_steps": 0}

# Fields of OptimizerConfig that have an effect with torch's AdamW and gradient
# clipping.
ADAMW_FIELDS = (
    "optimizer",
    "lr",
    "min_lr",
    "weight_decay",
    "clip_grad",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    *MOMENT_FIELDS,
)
# Grid sizes that FSDP does not have, and the groups of ranks that they stand for.
MEGATRON_SIZES = {
    "pp": "pipeline-parallel",
    "ep": "expert-parallel",
    "etp": "expert-tensor-parallel",
    "vpp": "virtual pipeline",
}
# Sampling fields that mean the same if a response is continued in a second request.
# Others, such as min_tokens, count within one request.
CONTINUABLE = {
    *SAMPLING,
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "logit_bias",
}
# Sampling fields that SGLang's servers accept. All but SGLANG_SAMPLING are known to
# vLLM's servers, too.
SGLANG_KNOWS = {*SAMPLING, "top_k", "stop_token_ids", "ignore_eos", *SGLANG_SAMPLING}

Place = int | str | list[int | str] | dict[str, Any] | None
_DEVICES = "_devices"


class GridConfig(Section):
    """Engine and parallel grid of a role. The data-parallel size is the number of ranks divided by the other sizes."""

    engine: Literal["megatron", "fsdp"] = "megatron"
    """Training engine. megatron: Megatron-core, with all kinds of parallelism, for the architectures listed by
    `megaverl models`. fsdp: the Hugging Face model under PyTorch's FSDP2, for any architecture that transformers
    builds, without pp and ep: transformers' models are not written in stages, and FSDP2 shards experts like all other
    weights."""
    tp: GridSize = 1
    """Tensor-parallel size: the matrices of every layer are split over this many ranks. These ranks communicate in
    every layer, so keep tp within a node."""
    pp: GridSize = 1
    """Pipeline-parallel size: the layers are split into this many stages. Stages exchange only activations, so pp can
    cross nodes. Stages idle at the start and end of an update unless there are many micro-batches."""
    cp: GridSize = 1
    """Context-parallel size: sequences are split over this many ranks, and each rank holds 1/cp of a micro-batch's
    tokens. Use it if the activations of one sample do not fit on one rank. Weights are not split; with engine: fsdp
    these ranks shard them too."""
    ep: GridSize = 1
    """Expert-parallel size: the experts of a layer are distributed over this many ranks, which exchange tokens in every
    layer. Only for mixtures of experts."""
    etp: GridSize | None = None
    """Tensor-parallel size inside an expert. null: tp."""
    vpp: GridSize | None = None
    """Number of model chunks (virtual stages) per pipeline rank. More chunks shorten the idle time of the pipeline and
    need more communication. Requires pp above 1. null: one chunk."""
    micro_batch_tokens: Positive = 4096
    """Maximum number of prompt and response tokens in one micro-batch. This is a hard limit and must hold the longest
    sample. Larger values are faster and need more activation memory. The result does not depend on it."""
    pack_samples: bool = True
    """Concatenate the samples of a micro-batch into one row without padding, and compute once what several samples
    share: an equal prompt, or the turns that conversations of an agent have in common. Under Transformer Engine, rows
    are padded with a log message if neither FlashAttention nor cuDNN supports packed rows."""
    chunked_logits: bool = False
    """Compute log-probs from hidden states, some response tokens at a time, so that the logits are never materialised
    as a whole. Saves memory for long samples and large vocabularies. The backward pass computes the logits again."""
    megatron: Passthrough = {}
    """Fields of megatron-core's TransformerConfig, under their own names."""
    fsdp: FsdpConfig = FsdpConfig()
    """Settings of engine: fsdp."""

    @rule
    def check_engine(self, at: str) -> Issues:
        """Refuse settings that the role's engine does not read."""
        if self.engine == "megatron":
            reason = f"{at}.engine is megatron, which does not read it. Leave it out, or set {at}.engine: fsdp."
            yield from self.fsdp.unused(
                f"{at}.fsdp", reason, involves=(f"{at}.engine",)
            )
            return
        for name, groups in MEGATRON_SIZES.items():
            size = getattr(self, name)
            if size not in (1, None):
                reason = f"has no {groups} groups: it cuts weights over all ranks"
                yield unread_by_fsdp(at, name, f"found {size}", reason)
        for name in self.megatron:
            reason = "trains the Hugging Face model, not megatron-core's"
            yield unread_by_fsdp(at, f"megatron.{name}", "is set", reason)
        for size in ("tp", "cp"):
            if self.fsdp.compile and getattr(self, size) > 1:
                yield _only_without(size, at, "fsdp.compile")
        if (
            self.fsdp.shard_size is not None
            and self.fsdp.sharding_strategy != "hybrid_shard"
        ):
            text = f"is set, and sharding_strategy is {self.fsdp.sharding_strategy}. Leave it out, or use hybrid_shard."
            key = f"{at}.fsdp.shard_size"
            yield ConfigIssue(key, text, involves=(f"{at}.fsdp.sharding_strategy",))

    @rule
    def check_virtual_stages(self, at: str) -> Issues:
        """Refuse virtual pipeline stages without a pipeline."""
        if (
            self.engine == "megatron"
            and self.vpp is not None
            and self.vpp > 1
            and self.pp == 1
        ):
            text = f"found {self.vpp}; virtual stages need {at}.pp above 1, which is 1."
            yield ConfigIssue(f"{at}.vpp", text, involves=(f"{at}.pp",))

    @rule
    def check_fp8_recipe(self, at: str) -> Issues:
        """Refuse scales of 8-bit products that depend on earlier steps."""
        if (
            self.megatron.get("fp8") is not None
            and self.megatron.get("fp8_recipe") == "delayed"
        ):
            text = "found 'delayed', whose scales come from the steps before: scoring would depend on them, and a "
            text += "checkpoint does not hold them. Use tensorwise (the default here), blockwise or mxfp8."
            yield ConfigIssue(f"{at}.megatron.fp8_recipe", text)


def unread_by_fsdp(at: str, name: str, setting: str, reason: str) -> ConfigIssue:
    """Return a mistake for a field of the role `at` that FSDP does not read."""
    text = f"{setting}, and {at}.engine is fsdp, which {reason}. Leave it out, or set {at}.engine: megatron."
    return ConfigIssue(f"{at}.{name}", text, involves=(f"{at}.engine",))


def _only_without(size: str, at: str, name: str) -> ConfigIssue:
    """Return a mistake for a field that FSDP combines with no tensor- or context-parallel ranks (`size`)."""
    text = f"is set, and engine: fsdp has it with {at}.{size}=1 alone. Leave one of both out."
    return ConfigIssue(f"{at}.{name}", text, involves=(f"{at}.{size}",))


class LoraConfig(Section):
    """`lora`: low-rank adapters (arXiv 2106.09685) are trained and the base weights stay frozen."""

    rank: Several = 16
    """Rank of the adapters (peft's r). Memory of adapters and their optimizer state grows with it."""
    alpha: PositiveFloat = 32.0
    """The product of the factors is scaled by alpha / rank (peft's lora_alpha)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the input of an adapter during training (peft's lora_dropout)."""
    targets: str | list[str] = Field(default="all-linear", min_length=1)
    """Layers that get an adapter (peft's target_modules): Hugging Face module names or their endings, such as q_proj;
    all-linear; or a regular expression for whole names. In a mixture of experts only attention and layers with
    a state can have adapters."""
    path: Text | None = None
    """Folder of a peft adapter to start from. null: new adapters."""


class OffloadConfig(Section):
    """`offload`: what is moved out of device memory while the role does not need it."""

    parameters: bool = False
    """Offload the weights between the stages that use them. The engine then cannot share the actor's storage, so every
    reshard copies."""
    optimizer: bool = False
    """Offload master weights and moments between updates. They are loaded for the optimizer steps of an update."""
    gradients: bool = False
    """Free the gradient buffers between updates. Nothing is copied, because they start at zero."""
    folder: Text | None = None
    """Offload to memory-mapped files in this folder. null: to pinned host memory; without an accelerator nothing is
    moved."""


def _all_or_some(value: Any) -> Any:
    """Expand `offload: true` (or false) to all its switches."""
    return (
        {name: value for name in ("parameters", "optimizer", "gradients")}
        if isinstance(value, bool)
        else value
    )


class TrainedConfig(GridConfig):
    """Grid, optimizer, scheduler and memory settings of a role that is trained."""

    lora: LoraConfig | None = None
    """Train only low-rank adapters. Needs no gradients, master weights and moments of the base weights. null: train all
    weights."""
    freeze: list[Text] = []
    """Patterns of weights that are not trained, such as visual.*. They match names in the model's folder, with or
    without a leading model. With engine: megatron, weights that megatron-core keeps in one parameter (q, k and v; gate
    and up) are frozen together, and every pipeline stage needs a weight to train. A resumed run may add patterns but
    not remove any."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that the forward pass keeps for the backward pass. none: everything. selective: not the insides of
    the attention core and of the MLP or experts. full: only the inputs of layers; costs about a third more time. Fields
    of `megatron` (recompute_*) take precedence."""
    gradient_accumulation: Positive = 1
    """Minimum number of micro-batches per optimizer step. micro_batch_tokens may require more. The result does not
    depend on it."""
    offload: Annotated[OffloadConfig, BeforeValidator(_all_or_some)] = OffloadConfig()
    """State that is moved out of device memory while the role does not need it. true: parameters, optimizer and
    gradients. Saves memory between stages and costs transfer time in every step."""
    scheduler: Annotated[Passthrough, over(SCHEDULER)] = SCHEDULER
    """Arguments of megatron-core's OptimizerParamScheduler. Their unit is the optimizer step, not the training step."""
    ddp: Passthrough = {}
    """Fields of megatron-core's DistributedDataParallelConfig."""

    if TYPE_CHECKING:
        # Every trained role has this field, each with its own defaults.
        optimizer: Passthrough

    @rule
    def check_training_engine(self, at: str) -> Issues:
        """Refuse settings of training that the role's engine does not read."""
        if self.engine == "megatron":
            return
        for name in self.ddp:
            reason = f"reads {at}.fsdp instead of megatron-core's DDP"
            yield unread_by_fsdp(at, f"ddp.{name}", "is set", reason)
        for name in self.optimizer:
            if name not in ADAMW_FIELDS:
                reason = f"steps with torch's AdamW, which reads {listed(ADAMW_FIELDS)}"
                yield unread_by_fsdp(at, f"optimizer.{name}", "is set", reason)
        kind = self.optimizer.get("optimizer", "adam")
        if kind != "adam":
            reason = "steps with torch's AdamW: use adam"
            yield unread_by_fsdp(
                at, "optimizer.optimizer", f"found {yaml_text(kind)}", reason
            )
        if self.lora is not None and self.tp > 1:
            yield _only_without("tp", at, "lora")

    def optimizer_issues(self, at: str, num_updates: int) -> Issues:
        """Yield mistakes in the optimizer and the scheduler. A command that trains the role asks for them.

        Args:
            at: the role.
            num_updates: optimizer steps in the whole run.
        """
        lr = self.optimizer.get("lr")
        min_lr = self.optimizer.get("min_lr")
        if lr is None or not (is_number(lr) and lr > 0):
            yield ConfigIssue(
                f"{at}.optimizer.lr",
                f"found {yaml_text(lr)}; expected a number above 0.",
            )
        elif min_lr is not None and is_number(min_lr) and not 0 <= min_lr <= lr:
            text = f"found {min_lr}; expected from 0 to {at}.optimizer.lr={lr}."
            yield ConfigIssue(f"{at}.optimizer.min_lr", text)
        yield from self.optimizer_field_issues(at)
        yield from self._scheduler_issues(f"{at}.scheduler", num_updates)

    def optimizer_field_issues(self, at: str) -> Issues:
        """Yield fields of `optimizer` and `ddp` that cannot be combined, or that the engine lacks. Leaves out `lr`."""
        # megatron-core has these fields in both classes, and reads one or the other.
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            if name not in self.optimizer or name not in self.ddp:
                continue
            if self.optimizer[name] != self.ddp[name]:
                shown = yaml_text(self.optimizer[name])
                text = f"found {yaml_text(self.ddp[name])}, but {at}.optimizer.{name} is {shown}."
                yield ConfigIssue(
                    f"{at}.ddp.{name}", text, involves=(f"{at}.optimizer.{name}",)
                )
        is_sharded = self.ddp.get("use_distributed_optimizer", True)
        if (
            self.engine == "megatron"
            and self.optimizer.get("optimizer") == "sgd"
            and is_sharded
        ):
            text = f"found 'sgd', which megatron-core does not shard. Set {at}.ddp.use_distributed_optimizer: false, "
            involves = (f"{at}.ddp.use_distributed_optimizer",)
            yield ConfigIssue(
                f"{at}.optimizer.optimizer", f"{text}or use adam.", involves=involves
            )
        if self.engine == "megatron":
            yield from self._muon_issues(at)
        yield from self._moment_issues(at)

    def _muon_issues(self, at: str) -> Issues:
        """Yield fields of Muon without it, and fields that megatron-core's Muon refuses or does not read."""
        involves = (f"{at}.optimizer.optimizer",)
        if self.optimizer.get("optimizer", "adam") != "muon":
            for name in self.optimizer:
                if name.startswith("muon_"):
                    text = f"is set, and only Muon reads it. Leave it out, or set {at}.optimizer.optimizer: muon."
                    yield ConfigIssue(f"{at}.optimizer.{name}", text, involves=involves)
            return
        for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if self.optimizer.get(name):
                text = "is true, which megatron-core supports with adam only. Leave it out, or use adam."
                yield ConfigIssue(f"{at}.optimizer.{name}", text, involves=involves)

    def _moment_issues(self, at: str) -> Issues:
        """Yield dtypes of Adam's moments that have no effect, that FSDP does not have, or that lose what is added."""
        is_on = bool(self.optimizer.get(SWITCH))
        for name in MOMENTS:
            key = f"{name}_dtype"
            written = str(self.optimizer.get(key, "float32")).removeprefix("torch.")
            if written in ("float32", "fp32"):
                continue
            shown = yaml_text(self.optimizer[key])
            if not is_on:
                text = f"found {shown}, which has an effect with {SWITCH} only. Set {at}.optimizer.{SWITCH}: true."
                involves = (f"{at}.optimizer.{SWITCH}",)
                yield ConfigIssue(f"{at}.optimizer.{key}", text, involves=involves)
            elif self.engine == "fsdp" and written not in FSDP_DTYPES:
                why = f"has moments in {listed(sorted(set(FSDP_DTYPES.values())))}"
                yield unread_by_fsdp(at, f"optimizer.{key}", f"found {shown}", why)
        beta = self.optimizer.get("adam_beta2", 0.999)
        written = str(self.optimizer.get("exp_avg_sq_dtype")).removeprefix("torch.")
        is_lost = is_number(beta) and 1 - beta < BFLOAT16_STEP
        if is_on and written in ("bfloat16", "bf16") and is_lost:
            text = (
                f"found {written} with adam_beta2={beta}: rounding to bfloat16 loses changes below 1/256, so second "
                f"moments would never decay. Set {at}.optimizer.adam_beta2 to 0.99 or less, or use uint8 or float32."
            )
            involves = (f"{at}.optimizer.adam_beta2",)
            yield ConfigIssue(
                f"{at}.optimizer.exp_avg_sq_dtype", text, involves=involves
            )

    def _scheduler_issues(self, at: str, num_updates: int) -> Issues:
        """Yield mistakes in the scheduler that megatron-core would only refuse by an assertion, after startup."""
        scheduler = self.scheduler
        warmup = scheduler.get("lr_warmup_steps", 0)
        decay = scheduler.get("lr_decay_steps", num_updates)
        # `passthrough.py` refuses counts that are no integers.
        if isinstance(warmup, int) and isinstance(decay, int) and 0 < warmup >= decay:
            source = (
                "lr_decay_steps"
                if "lr_decay_steps" in scheduler
                else "the run's optimizer steps"
            )
            text = f"found {warmup}; expected below {source}, {decay}."
            yield ConfigIssue(
                f"{at}.lr_warmup_steps", text, involves=("trainer.steps",)
            )
        if scheduler.get("lr_decay_style") == "WSD":
            missing = [
                name
                for name in ("wsd_decay_steps", "lr_wsd_decay_style")
                if scheduler.get(name) is None
            ]
            if missing:
                yield ConfigIssue(at, f"lr_decay_style WSD needs {listed(missing)}.")
        weight_decay = self.optimizer.get("weight_decay", 0.0)
        start = scheduler.get("start_wd", weight_decay)
        end = scheduler.get("end_wd", weight_decay)
        if start != end and scheduler.get("wd_incr_style", "constant") == "constant":
            text = f"found constant, but start_wd={start} and end_wd={end} differ."
            yield ConfigIssue(f"{at}.wd_incr_style", text)


class ActorConfig(TrainedConfig):
    """`actor`: the policy that is trained."""

    optimizer: Annotated[Passthrough, over(ACTOR_OPTIMIZER)] = ACTOR_OPTIMIZER
    """Fields of megatron-core's OptimizerConfig."""
    router_replay: Literal["off", "old_log_probs", "update"] = "off"
    """Use the experts that the engine chose for each token (R3, arXiv 2510.11370). old_log_probs: when computing old
    log-probs. update: also in the update. Costs one or two bytes per token, layer and chosen expert. Only for mixtures
    of experts on Megatron-core."""
    fake_quantization: Text | None = None
    """Quantisation-aware training: every forward pass rounds the weights of linear layers to this format and back, as
    an engine with the same rollout.vllm.quantization has them, and gradients pass through the rounding unchanged. So
    the policy that is trained is the one that is sampled. int4_g32, int4_g64, int4_g128, int4_asym_g32, int4_asym_g64,
    int4_asym_g128, mxfp8 or nvfp4. Weights, optimizer and saved folders keep their dtypes. null: no rounding."""

    @rule
    def check_fake_quantization(self, at: str) -> Issues:
        """Refuse formats that cannot be trained, and settings under which a layer would not round its weights."""
        method, key = self.fake_quantization, f"{at}.fake_quantization"
        if method is None:
            return
        if method not in GROUP_FORMATS:
            hint = did_you_mean(method, GROUP_FORMATS)
            text = f"found {yaml_text(method)}; formats that can be trained are {listed(GROUP_FORMATS)}.{hint}"
            yield ConfigIssue(key, text)
            return
        on_fsdp = self.engine == "fsdp"
        yield from conflict_issues(
            key,
            (
                (
                    f"{at}.lora",
                    self.lora is not None,
                    "adapters are merged before the engine rounds, and training would round without them",
                ),
                (
                    f"{at}.megatron.fp8",
                    self.megatron.get("fp8") is not None,
                    "products would round the rounded weights again",
                ),
                (
                    f"{at}.megatron.gradient_accumulation_fusion",
                    bool(self.megatron.get("gradient_accumulation_fusion")),
                    "it adds gradients to the weight of the product, which is not the parameter",
                ),
                (
                    f"{at}.tp",
                    on_fsdp and self.tp > 1,
                    "under engine: fsdp only whole matrices are rounded",
                ),
                (
                    f"{at}.fsdp.compile",
                    on_fsdp and self.fsdp.compile,
                    "compiled blocks would not call the rounding layers",
                ),
            ),
            at_switch=True,
        )
        if on_fsdp and method == "nvfp4":
            text = "found nvfp4; its scale of a whole matrix spans matrices that vLLM fuses (q, k, v; gate, up), which "
            text += f"are separate under engine: fsdp. Use another format, or {at}.engine: megatron."
            yield ConfigIssue(key, text, involves=(f"{at}.engine",))


class CriticConfig(TrainedConfig):
    """`critic`: the value model (ppo), with the actor's architecture and a value head.

    Settings of its engine, grid, `micro_batch_tokens`, `megatron`, `ddp` and `fsdp`
    default to the actor's.
    """

    path: Text | None = None
    """Hugging Face folder of the critic's backbone. null: model.path."""
    share_backbone: bool = False
    """Put the value head on the actor's backbone instead of training a second model. One forward pass gives logits and
    values, and actor.optimizer minimises policy loss + algorithm.value_loss_coef x value loss. Settings of a separate
    critic are then refused."""
    optimizer: Annotated[Passthrough, over(CRITIC_OPTIMIZER)] = CRITIC_OPTIMIZER
    """Fields of megatron-core's OptimizerConfig."""


class ReferenceConfig(GridConfig):
    """`reference`: the frozen policy of the KL, or a teacher. Its grid defaults to the actor's."""

    path: Text | None = None
    """Hugging Face folder of the reference or teacher. null: model.path."""
    tokenizer: Text | None = None
    """Tokenizer of the teacher, for advantage distillation: a folder, a .model file, or a name on a hub. If its tokens
    differ from the model's, teacher and student are compared in chunks of the same text. null: the tokenizer of
    path."""
    offload: bool = False
    """Keep the weights of the reference in host memory while they are not in use. Each use copies them to the
    device."""


class PlacementConfig(Section):
    """`placement`: ranks of each role. Empty: all roles share all ranks.

    An entry may be ranks (8, [0, 1], "0-7", "0-3,8-11"), {nodes: names or numbers},
    {num_ranks: N} or {num_nodes: N} from those that no other entry names, the name of
    another role (its ranks), `rest`, or `all`.
    """

    actor: Place = None
    """Ranks of the actor: numbers, "0-3,8-11", {nodes: ...}, {num_ranks: N}, {num_nodes: N}, another role, all or rest.
    null: the ranks that the other roles leave."""
    critic: Place = None
    """Ranks of the critic. null: the actor's."""
    reference: Place = None
    """Ranks of the reference. null: the actor's."""
    reward: Place = None
    """Ranks of the rewards. null: the rollout's."""
    rollout: Place = None
    """Ranks of the engines. null: the actor's; engines and training then take turns on the same devices."""
    coordinator: Place = None
    """Rank of the coordinator, which needs no GPU. null: the actor's first rank. With coordinator.aggregates:
    gradients, its coordinator.tp x coordinator.pp ranks, which need GPUs like the actor's."""
    actor_devices: list[int | str] | None = None
    """Short form of actor: a list of ranks."""
    critic_devices: list[int | str] | None = None
    """Short form of critic: a list of ranks."""
    reference_devices: list[int | str] | None = None
    """Short form of reference: a list of ranks."""
    reward_devices: list[int | str] | None = None
    """Short form of reward: a list of ranks."""
    rollout_devices: list[int | str] | None = None
    """Short form of rollout: a list of ranks."""
    actor_islands: GridSize = 1
    """Number of groups into which the actor's ranks are split. The coordinator combines their gradients or, with
    coordinator.islands_every above 1, their weights (DiLoCo). Coordinator and engines then need ranks of their own."""
    check_memory: bool = True
    """Refuse to start a run that needs more memory than its GPUs have, by the estimate of `megaverl plan`. false: start
    it anyway."""

    @property
    def is_given(self) -> bool:
        """Return whether any placement is set."""
        return bool(self.changed().keys() - {"check_memory"})

    def wanted(self) -> tuple[dict[str, Wanted], list[ConfigIssue]]:
        """Parse every role's entry. Returns the parsed entries by role, and the mistakes in the others."""
        wanted = {}
        mistakes = []
        for role in ROLES:
            short = getattr(self, role + _DEVICES, None)
            value = getattr(self, role)
            key = f"placement.{role}"
            if short is not None:
                if value is not None:
                    mistakes.append(
                        ConfigIssue(
                            key + _DEVICES, f"is set, and so is {key}. Use one of them."
                        )
                    )
                    continue
                key = key + _DEVICES
                value = short
            if value is None:
                continue
            try:
                wanted[role] = parse_wanted(value)
            except ValueError as error:
                mistakes.append(ConfigIssue(key, str(error)))
        return wanted, mistakes

    def written_key(self, key: str) -> str:
        """Return `placement.ROLE` as the user wrote it: with the suffix `_devices` if that short form was used."""
        is_short = getattr(self, key.rpartition(".")[2] + _DEVICES, None) is not None
        return key + _DEVICES if is_short else key


class RewardModelConfig(TrainedConfig):
    """`reward_model`: a model that scores responses and can be trained. Its grid defaults to the actor's.

    `megaverl reward` trains one on pairs of `preference`. PRIME (`algorithm.name:
    prime`) trains an implicit one on outcomes. `mix` trains one of `reward` on the
    run's own rollouts.
    """

    path: Text | None = None
    """Hugging Face folder from which the reward model starts. null: model.path."""
    loss: str = "bradley_terry"
    """Loss of a pair of responses: bradley_terry, or module:function."""
    options: Passthrough = {}
    """Options of the loss, such as center_coef."""
    beta: PositiveFloat = 0.05
    """Scale of the implicit rewards of PRIME."""
    optimizer: Annotated[Passthrough, over(CRITIC_OPTIMIZER)] = CRITIC_OPTIMIZER
    """Fields of megatron-core's OptimizerConfig."""


class DraftConfig(TrainedConfig):
    """`draft`: training of the draft model of speculative decoding. Its grid defaults to the actor's."""

    train: bool = False
    """Train the draft model or head of rollout.vllm.speculative_config on the responses of every step, so that the
    engine keeps accepting its drafts while the actor changes. It trains on the actor's ranks, with the epochs and
    mini-batches of `algorithm`, and the engine receives its weights together with the actor's. For the methods
    draft_model, eagle3 and mtp; a head needs engine: fsdp."""
    optimizer: Annotated[Passthrough, over(DRAFT_OPTIMIZER)] = DRAFT_OPTIMIZER
    """Fields of megatron-core's OptimizerConfig."""

    @rule
    def check_draft(self, at: str) -> Issues:
        """Refuse adapters."""
        if self.lora is not None:
            text = "is set, but a draft model is small: all of its weights are trained. Leave it out."
            yield ConfigIssue(f"{at}.lora", text)


class CoordinatorConfig(Section):
    """`coordinator`: rules by which updates are applied, skipped, or end the run.

    Its rank is set by `placement.coordinator`.
    """

    aggregates: Literal["statistics", "gradients"] = "statistics"
    """Form in which the coordinator receives a gradient. statistics: its norm; islands also send their gradients to be
    summed, and each holds an optimizer. gradients: the islands (placement.actor_islands) have no optimizer. The
    coordinator's ranks hold the global model and its optimizer, sum the islands' gradients, take the step, and send the
    weights to islands and engines. For dense Megatron-core models in float32 or bfloat16."""
    tp: GridSize = 1
    """With aggregates: gradients, the tensor-parallel size of the global model. The coordinator has tp x pp ranks."""
    pp: GridSize = 1
    """With aggregates: gradients, the pipeline-parallel size of the global model, which splits its layers."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if a loss or gradient is NaN or infinite. stop: end the run before any optimizer steps. skip: skip
    the update; see max_skips."""
    skip_above: dict[str, PositiveFloat] = {}
    """Gradient norm per role above which an update is skipped, such as {actor: 10.0}. Unlike clipping, a skipped update
    has no effect."""
    max_skips: NonNegative = 10
    """The run ends after more than this many skipped updates of a model in a row."""
    islands_every: Positive = 1
    """With placement.actor_islands: number of updates between exchanges. 1: gradients are summed at every update. More:
    each group takes local steps, and an outer optimizer applies the mean change (DiLoCo, arXiv 2311.08105), which holds
    two more float32 copies of the weights."""
    islands_compress: Literal["none", "bfloat16"] = "none"
    """Dtype of what islands send to the coordinator. bfloat16 halves the traffic; the rounding error is added to the
    next message."""
    outer_lr: LearningRate = 0.7
    """Learning rate of the outer optimizer, which is SGD with Nesterov momentum. Used with islands_every above 1."""
    outer_momentum: Fraction = 0.9
    """Momentum of the outer optimizer."""


class SamplingRule(Section):
    """One entry of `rollout.sampling_rules`: sampling settings for prompts of certain lengths."""

    under: Positive | None = None
    """Apply to prompts with fewer tokens than this."""
    over: NonNegative | None = None
    """Apply to prompts with more tokens than this."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Replaces rollout.sampling.temperature. 0: greedy."""
    top_k: NonNegative | None = None
    """Replaces rollout.sampling.top_k: sample from the k likeliest tokens. 0: from all."""

    def holds(self, length: int) -> bool:
        """Return whether the rule applies to prompts of `length` tokens."""
        return (self.under is None or length < self.under) and (
            self.over is None or length > self.over
        )

    @property
    def changes(self) -> dict[str, Any]:
        """Sampling fields that the rule sets, by name."""
        changed = {"temperature": self.temperature, "top_k": self.top_k}
        return {name: value for name, value in changed.items() if value is not None}

    @rule
    def check_lengths(self, at: str) -> Issues:
        """Refuse a rule that changes nothing or applies to no prompt."""
        if not self.changes:
            yield ConfigIssue(at, "changes nothing. Give temperature, top_k, or both.")
        if (
            self.under is not None
            and self.over is not None
            and self.under <= self.over + 1
        ):
            yield ConfigIssue(
                at,
                f"holds for no prompt: under {self.under} and over {self.over} tokens.",
            )


class ServersConfig(Section):
    """`rollout.servers`: inference servers that were started separately, for `rollout.engine: server`."""

    kind: Literal["vllm", "sglang"] = "vllm"
    """API of the servers. vllm: `vllm serve` in its development mode. sglang: SGLang's server."""
    urls: list[Text] = []
    """Base URLs of the servers, such as http://10.0.0.5:8000."""
    dns: Text | None = None
    """URL whose host name resolves to one address per server, such as a headless service of Kubernetes. It is resolved
    again during the run. null: none."""
    file: Text | None = None
    """File that is read again during the run. Each line is a URL that joins the pool, or a minus sign and a URL that
    leaves it. null: rollout_servers.txt in the run's folder, which `megaverl rollout-pool` writes."""
    token_env: Text | None = None
    """Environment variable, on every rank, that holds the servers' token. null: no token, for servers on the loopback
    interface."""
    folder: Text | None = None
    """Shared folder, at the same path for the actor's ranks, the first rollout rank and every server. Versions of the
    weights are written there as Hugging Face folders, or as changes (reshard.delta), unless transfer is direct. null:
    rollout_weights in the run's folder."""
    transfer: Literal["folder", "direct", "nccl"] = "folder"
    """How weights reach the servers. folder: servers read the shared folder. direct: every rank of the actor sends its
    shards into place, to all of vLLM's servers at once, without a folder. nccl: the first rollout rank, which needs a
    GPU, sends the folder's weights to one server after the other; vLLM's servers then need not see the folder."""
    max_requests: Positive = 64
    """Maximum number of concurrent requests per server, from all ranks together."""
    routing: Literal["prefix", "load"] = "load"
    """Rule that assigns requests to servers. prefix: the server that has read most of the prompt's beginning, among
    servers with few requests, so that later turns and the samples of a group find it in its cache. load: the server
    with the fewest requests."""
    timeout_seconds: Seconds = 600.0
    """Maximum time for one response. After that the server counts as lost and another one is asked."""
    load_timeout_seconds: Seconds = 600.0
    """Maximum time for a server to read new weights."""
    retries: Annotated[int, Field(ge=0, le=10_000)] = 5
    """How many further servers are asked for a response if servers are lost, before the run stops."""
    wait_seconds: Seconds = 600.0
    """How long the run waits while no server is usable, before it stops."""
    poll_seconds: Seconds = 2.0
    """Interval at which the pool is read again and lost servers are tried again."""
    fingerprint_tolerance: PositiveFloat | None = None
    """Maximum mean difference, in nats, between the log-probs of a server and of the actor on 16 tokens. null: 1e-3 in
    float32, else 0.1."""

    def address_issues(self, at: str) -> Issues:
        """Yield mistakes in the servers' addresses and endpoints, for `rollout.engine: server`."""
        addresses = {f"{at}.urls.{number}": url for number, url in enumerate(self.urls)}
        if self.dns is not None:
            addresses[f"{at}.dns"] = self.dns
        for key, url in addresses.items():
            if problem := url_problem(url):
                yield ConfigIssue(key, problem)
            elif self.token_env is None and not is_loopback(url):
                text = f"is null, and {url} is not on the loopback: anybody in its network could use the server. Start "
                text += (
                    "it with a token, and name the environment variable that has it."
                )
                yield ConfigIssue(f"{at}.token_env", text, involves=(key,))
        if self.dns is not None and urlsplit(self.dns).scheme == "https":
            text = "found https; a certificate is of a name, not of the addresses behind it."
            yield ConfigIssue(f"{at}.dns", text)
        if self.kind == "sglang" and self.transfer != "folder":
            text = f"found '{self.transfer}', which SGLang's servers are not sent weights by. Use transfer: folder."
            yield ConfigIssue(f"{at}.transfer", text, involves=(f"{at}.kind",))
        if self.transfer == "direct" and self.folder is not None:
            text = "is set, and transfer: direct writes no folder. Leave it out, or use transfer: folder."
            yield ConfigIssue(f"{at}.folder", text, involves=(f"{at}.transfer",))


class PartialConfig(Section):
    """`rollout.partial`: a step takes the groups that finish first and continues the others after the update."""

    over_sample: Annotated[float, Field(ge=1, le=1000)] = 2.0
    """Groups in progress for each group that a step takes. Larger values wait less for long responses, train on older
    tokens, and hold more responses on every rank. 1: none are left over. rollout.partial: true uses all defaults."""
    chunk_tokens: Positive = 64
    """Maximum number of tokens by which every unfinished response grows in one round. Groups are checked for completion
    after each round. The order is counted in rounds, not in time, so runs are reproducible."""
    when_stale: Literal["finish", "restart"] = "finish"
    """Treatment of a response that max_staleness does not allow to wait any longer. finish: the step waits for its
    group and trains on it. restart: its tokens are discarded and the prompt is answered again, which long responses may
    never survive."""

    def num_groups(self, wanted: int) -> int:
        """Return the number of groups in progress if a step takes `wanted` groups."""
        return math.ceil(self.over_sample * wanted)


def _true_or_none(value: Any) -> Any:
    """Expand `partial: true` to all defaults, and `false` to None."""
    if value is True:
        return {}
    return None if value is False else value


class RolloutConfig(Section):
    """`rollout`: the inference engine and how it generates responses."""

    engine: Annotated[str, known_or_own(ENGINES, "module:function")] = "vllm"
    """Generation engine. vllm: inside the training processes. hf: plain transformers, slow, for tests and comparison.
    server: external servers of vLLM or SGLang (rollout.servers). Or module:function of your own, see
    docs/extend/engine.md."""
    tp: GridSize = 1
    """Tensor-parallel size of an engine. The rollout ranks hold ranks / tp engines. Smaller values give more throughput
    if the model fits. With the actor's tp, weights may be shared instead of copied."""
    sampling: Annotated[Passthrough, over(SAMPLING)] = SAMPLING
    """Fields of vLLM's SamplingParams, under their own names. top_p and penalties are applied only by the engine, so
    the trainer's log-probs then differ from the engine's."""
    adaptive_sampling: bool = False
    """Choose temperature and top_k by the length of the prompt, by sampling_rules. Log-probs of engine and trainer are
    then those of each sample's own distribution."""
    sampling_rules: list[SamplingRule] = [
        SamplingRule(under=64, temperature=0),
        SamplingRule(over=512, temperature=0.7, top_k=50),
    ]
    """For adaptive_sampling: the first rule that matches a prompt applies; if none does, rollout.sampling. A greedy
    rule is refused with algorithm.group_size above 1."""
    function: Function | None = None
    """Your own way to generate, as module:function. It gets the engine's generate function, prompts, sampling and
    seeds, and returns the responses that train. null: one call of the engine."""
    vllm: Passthrough = {}
    """Fields of vLLM's EngineArgs, under their own names."""
    servers: ServersConfig = ServersConfig()
    """Settings of rollout.engine: server."""
    sleep: bool = False
    """Free the engine's cache, and the weights it does not share, while training (vLLM's sleep mode; no effect on a
    CPU). The next reshard writes those weights again."""
    logprob_tolerance: PositiveFloat | None = None
    """Maximum difference, in nats, between the engine's and the trainer's log-probs of any token, at the first
    comparison after a start. A larger one stops the run. null: 1e-3 in float32 on a CPU, and 0 on a CPU with
    batch_invariant. Otherwise the run warns if mean or 99.9th percentile exceed what rounding explains, and stops at a
    mean above 0.125 in bfloat16 (0.25 with experts, 0.5 with an 8-bit engine, an eighth of these in float16)."""
    batch_invariant: bool = False
    """Compute each response independently of the other requests of its batch. On a CPU the trainer's log-probs then
    equal the engine's to the bit, for the models and settings in docs/tuning.md; others are refused. On GPUs vLLM's
    batch-invariant mode is used, and the trainer keeps its kernels."""
    async_rollout: bool = False
    """Generate the samples of the next steps while the actor trains. Samples are then off-policy; see max_staleness and
    algorithm.correction. Engines need ranks of their own (placement.rollout). In a loop of a Python program
    (`PPOTrainer`) the next step is generated during `update`, and max_staleness is at most 1."""
    max_staleness: NonNegative = 1
    """With async_rollout: maximum number of updates between the weights that generate a step and the weights it trains.
    0: no generation ahead. With partial: the same limit for the oldest token of a sample. Larger values wait less and
    train on older samples."""
    partial: Annotated[PartialConfig | None, BeforeValidator(_true_or_none)] = None
    """true, or settings: a step takes the groups that finish first. Unfinished responses are kept with their log-probs
    and continue after the update. Samples may then have tokens of several weight versions; use algorithm.correction.
    null: a step waits for all its responses."""
    in_flight_updates: bool = False
    """With async_rollout: engines take new weights in the middle of generation, without waiting for responses to end.
    Responses continue, and their keys and values are computed again."""
    in_flight_tokens: Positive | None = None
    """With in_flight_updates: number of tokens of each response before the update. null: half of
    rollout.sampling.max_tokens."""
    use_dynamic_batching: bool = False
    """Choose the number of concurrent sequences before every generation, from the memory for their keys and values:
    vLLM's free cache, or memory_budget_mb. Reported as rollout/sequences_in_flight."""
    min_sequences: Positive = 1
    """With use_dynamic_batching: minimum number of concurrent sequences."""
    max_sequences: Positive = 256
    """With use_dynamic_batching: maximum number of concurrent sequences."""
    memory_budget_mb: Positive | None = None
    """With use_dynamic_batching and rollout.engine=hf: memory for keys and values. null: half of the free memory of the
    device that has the least. It is measured again if less than that is free, and kept on resume."""

    @rule
    def check_dynamic_batching(self, at: str) -> Issues:
        """Refuse limits of dynamic batching that contradict each other, or that nothing reads."""
        if not self.use_dynamic_batching:
            reason = (
                f"{at}.use_dynamic_batching is false. Use use_dynamic_batching: true."
            )
            yield from self.unused(
                at, reason, "min_sequences", "max_sequences", "memory_budget_mb"
            )
            return
        if self.min_sequences > self.max_sequences:
            text = f"found {self.min_sequences}, more than {at}.max_sequences={self.max_sequences}. Lower it, or raise "
            yield ConfigIssue(
                f"{at}.min_sequences",
                f"{text}the other.",
                involves=(f"{at}.max_sequences",),
            )
        if self.engine == "vllm" and self.memory_budget_mb is not None:
            text = f"is set, and vLLM has a cache of its own, of the size that {at}.vllm.gpu_memory_utilization (on a "
            text += "CPU kv_cache_memory_bytes) says. Leave it out."
            yield ConfigIssue(
                f"{at}.memory_budget_mb", text, involves=(f"{at}.engine",)
            )

    @rule
    def check_adaptive_sampling(self, at: str) -> Issues:
        """Refuse sampling rules that are not used, and rules after one that holds for every prompt."""
        rules = self.sampling_rules
        if not self.adaptive_sampling:
            reason = f"{at}.adaptive_sampling is false. Use adaptive_sampling: true."
            yield from self.unused(at, reason, "sampling_rules")
            return
        if not rules:
            text = f"is empty, and {at}.adaptive_sampling is set. Give rules, or leave both out."
            yield ConfigIssue(f"{at}.sampling_rules", text)
        if self.function is not None:
            text = (
                f"is set, and {at}.function draws in its own way. Use one of the two."
            )
            yield ConfigIssue(
                f"{at}.adaptive_sampling", text, involves=(f"{at}.function",)
            )
        for index, entry in enumerate(rules[:-1]):
            if entry.under is None and entry.over is None:
                text = "holds for every prompt, so that no rule after it is looked at. Put it last."
                yield ConfigIssue(f"{at}.sampling_rules.{index}", text)

    @rule
    def check_servers(self, at: str) -> Issues:
        """Refuse settings of servers without servers, and settings that servers do not have."""
        if self.engine != "server":
            reason = f"{at}.engine is {self.engine}. Use engine: server."
            yield from self.servers.unused(f"{at}.servers", reason)
            return
        yield from self.servers.address_issues(f"{at}.servers")
        reasons = {
            "tp": "servers lay their models out themselves: start them with --tensor-parallel-size (SGLang: --tp).",
            "vllm": "servers have options of their own: start them with these.",
            "sleep": "servers have devices of their own.",
            "use_dynamic_batching": "servers choose by themselves; see rollout.servers.max_requests.",
        }
        for name, reason in reasons.items():
            yield from self.unused(
                at, f"{at}.engine is server: {reason} Leave it out.", name
            )

    def sampling_issues(self, at: str, sampling: Passthrough) -> Issues:
        """Yield sampling fields at the key `at` that the engine does not support."""
        if self.engine == "server" and self.servers.kind == "sglang":
            for name in sampling.keys() - SGLANG_KNOWS:
                text = f"is not among what SGLang's server is asked for: {listed(sorted(SGLANG_KNOWS))}. Leave it out."
                yield ConfigIssue(
                    f"{at}.{name}", text, involves=("rollout.servers.kind",)
                )
        if self.vllm.get("speculative_config"):
            key = "rollout.vllm.speculative_config"
            for name in ("min_p", "logit_bias"):
                if sampling.get(name):
                    text = f"is set, and vLLM does not know it together with {key}. Leave one of the two out."
                    yield ConfigIssue(f"{at}.{name}", text, involves=(key,))

    @rule
    def check_partial(self, at: str) -> Issues:
        """Refuse more groups in progress than `max_staleness` lets finish in time."""
        partial = self.partial
        limit = self.max_staleness
        if (
            partial is not None
            and partial.when_stale == "finish"
            and partial.over_sample > limit + 1
        ):
            text = f"found {partial.over_sample}; a group that begins is to be taken at most {limit} steps later "
            text += f"({at}.max_staleness), so no more than {limit + 1} groups for each of a step can be in progress. "
            text += f"Lower it, or raise {at}.max_staleness."
            yield ConfigIssue(
                f"{at}.partial.over_sample", text, involves=(f"{at}.max_staleness",)
            )
        if partial is not None:
            yield from self._continuation_issues(at, f"{at}.partial")

    @rule
    def check_in_flight_updates(self, at: str) -> Issues:
        """Refuse updates in the middle of generation where the engines are not ahead of training."""
        key = f"{at}.in_flight_updates"
        if not self.in_flight_updates:
            yield from self.unused(
                at, "in_flight_updates is false. Use true.", "in_flight_tokens"
            )
            return
        yield from self._continuation_issues(at, key)
        if not self.async_rollout or not self.max_staleness:
            text = "is set, and the engines are not ahead of training. Use async_rollout: true and a max_staleness of "
            yield ConfigIssue(
                key,
                f"{text}at least 1.",
                involves=(f"{at}.async_rollout", f"{at}.max_staleness"),
            )

    def _continuation_issues(self, at: str, switch: str) -> Issues:
        """Yield settings whose responses cannot be continued after an update.

        Args:
            at: dotted key of this section.
            switch: the key that asks for the continuation.
        """
        has_function = self.function is not None
        conflicts = (
            (
                f"{at}.function",
                has_function,
                "a function of your own returns whole responses",
            ),
            (
                f"{at}.engine",
                self.engine == "server",
                "servers are not asked to go on with a response",
            ),
        )
        yield from conflict_issues(switch, conflicts, at_switch=True)
        for name in sorted(self.sampling.keys() - CONTINUABLE):
            text = f"looks at a whole response, and with {switch} one may be made in parts. Leave one of the two out."
            yield ConfigIssue(f"{at}.sampling.{name}", text, involves=(switch,))

    @rule
    def check_quantization(self, at: str) -> Issues:
        """Refuse a quantization of weights that the engine cannot apply to weights from the actor."""
        method = self.vllm.get("quantization")
        if method is None or (isinstance(method, str) and method in FORMATS):
            return
        hint = did_you_mean(method, FORMATS) if isinstance(method, str) else ""
        text = f"found {yaml_text(method)}; weights that come from an actor can be {listed(FORMATS)}.{hint}"
        yield ConfigIssue(f"{at}.vllm.quantization", text)

    @rule
    def check_sampling(self, at: str) -> Issues:
        """Refuse sampling fields that the engine does not support."""
        yield from self.sampling_issues(f"{at}.sampling", self.sampling)


class FaultsConfig(Section):
    """`environment.faults`: what follows when an environment or the network fails through no fault of the policy.

    Exceptions in an environment's code, lost connections, time-outs and processes that
    died are such faults.
    """

    retries: Annotated[int, Field(ge=0, le=1000)] = 3
    """Further attempts at an episode, from its beginning, with the same draws. An episode that fails at all of them is
    left out: it has no reward, and counts in no baseline and no loss."""
    backoff_seconds: NonNegativeFloat = 1.0
    """Wait before the first further attempt. Each later wait is twice as long, up to 60 s. The other episodes wait,
    too, because all request their turns together."""
    replacements: Annotated[int, Field(ge=0, le=1000)] = 1
    """Episodes with other draws in the place of one that keeps failing, where fewer than 2 of a group would be left."""
    pause_above: Fraction = 0.5
    """Share of the last 64 attempts that failed, above which the run pauses and says so. The attempts that follow a
    pause do not count as retries. 1: never."""
    pause_seconds: NonNegativeFloat = 60.0
    """Length of a pause. The pauses of a step count towards run.timeout_minutes, like its generation."""
    pauses: Annotated[int, Field(ge=0, le=100_000)] = 5
    """Pauses without a finished episode in between, after which the run ends. It can be started again, from its last
    checkpoint."""


class EnvironmentConfig(Section):
    """`environment`: tools or games that answer the model's turns."""

    name: Text | None = None
    """Environment of multi-turn episodes: tools, gateway, guess, signals, gymnasium, textarena, openenv, verifiers,
    harbor, nemo_gym, or module:object. null: single responses."""
    options: Passthrough = {}
    """Keyword arguments of the environment."""
    agents: Literal["shared", "own"] = "shared"
    """Actors that play the agents of a game. shared: one actor plays all, and the critic has a value head for each.
    own: each agent has its own actor and critic (IPPO), which take turns on one engine; this multiplies the models'
    memory."""
    max_turns: Several = 8
    """Maximum number of turns of an agent in one episode."""
    conversations: Annotated[float, Field(ge=1, le=65_536)] = 1.0
    """Mean number of conversations in an episode (rollout/conversations_mean). Each one is a row. Only the planner uses
    it, to estimate memory and time."""
    max_turn_tokens: Positive | None = None
    """Maximum number of tokens in one turn. rollout.sampling.max_tokens limits all turns and answers of an episode
    together. null: that limit divided by max_turns."""
    faults: FaultsConfig = FaultsConfig()

    @rule
    def check_name(self, at: str) -> Issues:
        """Refuse an unknown environment, its options, and settings without an environment."""
        if self.name is None:
            yield from self.unused(at, f"{at}.name is null. Name an environment.")
            return
        # A user's environment is not imported here: its module may need things that
        # only a started rank has.
        if ":" in self.name:
            return
        names = environment_names()
        if self.name not in names:
            text = f"found {yaml_text(self.name)}; there are: {listed(names)}, or a class of your own as module:object."
            yield ConfigIssue(f"{at}.name", f"{text}{did_you_mean(self.name, names)}")
            return
        if self.agents == "own" and len(agents_of(self.name)) == 1:
            text = f"found 'own', but {self.name} has one agent only. Leave it out."
            yield ConfigIssue(f"{at}.agents", text)
        try:
            check_options(self.name, self.options)
        except ConfigError as error:
            yield ConfigIssue(f"{at}.options", str(error))


class ReshardConfig(Section):
    """`reshard`: transfer of the actor's weights to the engines."""

    bucket_mb: Annotated[int, Field(ge=1, le=1_048_576)] = 64
    """Size in MiB of the send buffer and of the receive buffer. This is all the extra memory of a reshard. Larger
    buffers need fewer messages."""
    alias: Literal["auto", "never"] = "auto"
    """auto: an engine's weight is the actor's own storage if layout and dtype agree, which saves a copy and its memory.
    never: always copy; required if the actor's weights are offloaded between steps."""
    ipc: Literal["auto", "never"] = "auto"
    """auto: processes of one node read each other's memory (CUDA IPC, or process_vm_readv on a CPU) if all of them can,
    which is tested before the first transfer. never: use the process group for all transfers."""
    overlap: bool = False
    """Send weights to the engines while the critic updates. The critic's update then follows the actor's. With
    actor.ddp.overlap_param_gather, weights are sent bucket by bucket. Refused with rollout.async_rollout, rollout.sleep
    and actor.offload.parameters."""
    fan_out: Literal["auto", "never"] = "auto"
    """auto: weights enter each node once, and the ranks that received them send them on to other nodes and ranks, if
    this relieves the busiest link between nodes. never: every rank fetches its weights from the actor's ranks. Has no
    effect on one node or with reshard.folder."""
    delta: Literal["auto", "on", "off"] = "auto"
    """on: after the first reshard, send only the elements that changed, as positions
    and values, wherever that takes fewer bytes. Each rank of the actor keeps a copy of
    what it sends. auto: the same between nodes, for weights in 16 bits, unless
    actor.offload.parameters is set; stops comparing while changes take more than half
    of the bytes. off: always send whole weights. Engines receive the same bits in every
    case. Also for vLLM's servers: those that read a shared folder apply its changes.
    Has no effect with actor.lora, on the matrices of quantised engines
    (rollout.vllm.quantization), and on engines that drop their weights while they sleep
    (rollout.sleep on the actor's ranks)."""
    check_every: Annotated[int, Field(ge=-1, le=MOST)] = 0
    """Compare fingerprints of all weights on both sides after every this many reshards. 0: only after the first
    reshard. -1: never. For servers that apply a folder's changes: after every this many versions that are changes."""
    timeout_minutes: Minutes | None = None
    """How long a rank waits for another one in a reshard before it stops. null: run.timeout_minutes."""
    folder: Text | None = None
    """Shared folder for transferring weights between nodes without a fast network. null: weights are sent over the
    network."""

    @property
    def may_fan_out(self) -> bool:
        """Return whether a plan may use a fan-out. Files of a shared folder reach every node without one."""
        return self.fan_out == "auto" and self.folder is None
