"""Fields of megatron-core and vLLM that megaverl sets itself: the name, and what to write instead."""

from __future__ import annotations

_FROM_MODEL = "It comes from the model's config.json."
_DTYPE = "Use model.dtype."
_HOOK = "The training step installs its own."
_NO_TEXT = "megaverl hands vLLM token ids and takes token ids back."

MEGATRON: dict[str, str] = {
    "tensor_model_parallel_size": "Use {role}.tp.",
    "pipeline_model_parallel_size": "Use {role}.pp.",
    "virtual_pipeline_model_parallel_size": "Use {role}.vpp.",
    "context_parallel_size": "Use {role}.cp.",
    "expert_model_parallel_size": "Use {role}.ep.",
    "expert_tensor_parallel_size": "Use {role}.etp.",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
        ),
        _FROM_MODEL,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), _DTYPE),
    "calculate_per_token_loss": "Losses cover the global batch; see algorithm.loss_aggregation.",
    "variable_seq_lengths": "Micro-batches are cut to their longest sample; see {role}.micro_batch_tokens.",
    "transformer_impl": "Transformer Engine is used where it is installed and a GPU is there.",
    **dict.fromkeys(
        (
            "timers",
            "grad_scale_func",
            "finalize_model_grads_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
        ),
        _HOOK,
    ),
}

OPTIMIZER: dict[str, str] = {
    **dict.fromkeys(("params_dtype", "bf16", "fp16"), _DTYPE),
    "timers": _HOOK,
}

SCHEDULER: dict[str, str] = {
    "optimizer": "It is the role's own optimizer.",
    "max_lr": "Use {role}.optimizer.lr.",
    "min_lr": "Use {role}.optimizer.min_lr.",
    "use_checkpoint_opt_param_scheduler": "See checkpoint.resume.",
    "override_opt_param_scheduler": "See checkpoint.resume.",
}

DDP: dict[str, str] = {
    "average_in_collective": "Losses are normalised over the global batch, so gradients are summed.",
    **dict.fromkeys(
        ("use_megatron_fsdp", "use_custom_fsdp"),
        "megaverl reshards from Megatron's own layout, not from FSDP's.",
    ),
    **dict.fromkeys(
        (
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "suggested_communication_unit_size",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "gradient_reduce_div_fusion",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
        ),
        "Only Megatron's FSDP reads it, and that is not used. {role}.ddp.use_distributed_optimizer, which is on unless "
        "it is set to false, shards the optimizer over the data-parallel ranks.",
    ),
}

SAMPLING: dict[str, str] = {
    "n": "Use algorithm.group_size, or trainer.validation_samples.",
    "seed": "Use run.seed; each sample draws from (run.seed, step, sample).",
    "logprobs": "The sampled token's log-probability is always taken.",
    "prompt_logprobs": "The log-probabilities of prompts are not used.",
    "flat_logprobs": "The sampled token's log-probability is always taken.",
    "logprob_token_ids": "The sampled token's log-probability is always taken.",
    **dict.fromkeys(("stop", "bad_words"), _NO_TEXT + " Use rollout.sampling.stop_token_ids."),
    **dict.fromkeys(
        ("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        _NO_TEXT,
    ),
    **dict.fromkeys(("output_kind", "skip_clone", "output_text_buffer_length", "stream_interval"), _NO_TEXT),
}

_ONE_ENGINE = "Replicas come from the world's size and rollout.tp."
_IN_PLACE = "Weights are updated in place, in the model's own dtype."

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
    "async_scheduling": "Every rank of an engine must schedule alike.",
    "enable_sleep_mode": "Use rollout.sleep.",
    **dict.fromkeys(("quantization", "quantization_config", "enable_lora"), _IN_PLACE),
    **dict.fromkeys(
        (
            "pipeline_parallel_size",
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
        ),
        _ONE_ENGINE,
    ),
}
