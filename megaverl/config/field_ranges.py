"""Ranges for numbers that are passed to megatron-core and vLLM, which check few of them when a run starts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megaverl.config.section import BOUNDS, is_number

AtLeastZero = Annotated[float, Field(ge=0, le=1e9)]
AboveZero = Annotated[float, Field(gt=0, le=1e9)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
ShareOfOne = Annotated[float, Field(gt=0, le=1)]
LearningRate = Annotated[float, Field(ge=0, le=10)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=2**40)]
CountOrNone = Annotated[int, Field(ge=0, le=2**40)]
# Range for fields without an entry below. It refuses only values that no field can
# mean.
ANY_NUMBER = Annotated[float, Field(ge=-1e18, le=1e18)]

# Class name -> field name -> type whose constraints pydantic checks.
FIELD_RANGES: dict[str, dict[str, Any]] = {
    "OptimizerConfig": {
        "lr": Annotated[float, Field(gt=0, le=10)],
        **dict.fromkeys(("min_lr", "decoupled_lr", "decoupled_min_lr"), LearningRate),
        "weight_decay": Annotated[float, Field(ge=0, le=1000)],
        "clip_grad": AtLeastZero,
        **dict.fromkeys(
            ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"), BelowOne
        ),
        "adam_eps": Annotated[float, Field(gt=0, le=1)],
        **dict.fromkeys(
            ("loss_scale", "initial_loss_scale", "min_loss_scale"), AboveZero
        ),
        **dict.fromkeys(("loss_scale_window", "hysteresis"), Count),
        "muon_num_ns_steps": Annotated[int, Field(ge=1, le=100)],
        "muon_extra_scale_factor": AboveZero,
        "optimizer_offload_fraction": Annotated[float, Field(ge=0, le=1)],
    },
    "OptimizerParamScheduler": {
        "init_lr": LearningRate,
        **dict.fromkeys(("start_wd", "end_wd"), Annotated[float, Field(ge=0, le=1000)]),
        **dict.fromkeys(
            ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps"),
            CountOrNone,
        ),
    },
    "DistributedDataParallelConfig": {
        "bucket_size": Count,
        "pad_buckets_for_high_nccl_busbw": Count,
    },
    "TransformerConfig": {
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), BelowOne),
        **dict.fromkeys(
            ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
            AtLeastZero,
        ),
        **dict.fromkeys(("init_method_std", "moe_expert_capacity_factor"), AboveZero),
        "recompute_num_layers": Count,
    },
    "SamplingParams": {
        "temperature": Annotated[float, Field(ge=0, le=100)],
        "top_p": ShareOfOne,
        "top_k": Annotated[int, Field(ge=-1, le=2**31 - 1)],
        "min_p": Annotated[float, Field(ge=0, le=1)],
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), Penalty),
        "repetition_penalty": Annotated[float, Field(gt=0, le=100)],
        "max_tokens": Annotated[int, Field(ge=1, le=2**31 - 1)],
        "min_tokens": Annotated[int, Field(ge=0, le=2**31 - 1)],
    },
    "EngineArgs": {
        "gpu_memory_utilization": ShareOfOne,
        **dict.fromkeys(
            (
                "max_num_seqs",
                "max_num_batched_tokens",
                "block_size",
                "kv_cache_memory_bytes",
            ),
            Count,
        ),
        **dict.fromkeys(("cpu_offload_gb", "swap_space", "max_cpu_loras"), AtLeastZero),
    },
    "SpeculativeConfig": {
        "num_speculative_tokens": Annotated[int, Field(ge=1, le=1024)]
    },
}


def field_out_of_range(class_name: str, name: str, value: Any) -> str | None:
    """Return the allowed range in words if `value` is a number outside the range of the field `name`, else None.

    Args:
        class_name: class of megatron-core or vLLM that has the field, such as "OptimizerConfig".
    """
    if not is_number(value):
        return None
    kind = FIELD_RANGES.get(class_name, {}).get(name, ANY_NUMBER)
    try:
        TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        context = error.errors()[0].get("ctx", {})
        bounds = [
            f"{word} {context[bound]:g}"
            for bound, word in BOUNDS.items()
            if bound in context
        ]
        return " and ".join(bounds) or "a finite number"
    return None
