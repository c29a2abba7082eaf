"""`fsdp`: settings of PyTorch's FSDP2 for a role, and the import of other trainers' `fsdp_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megaverl.config.section import NonNegativeFloat, Positive, Section
from megaverl.config.wording import did_you_mean, listed, yaml_text

TRAINERS = ("megatron", "fsdp")


class FsdpConfig(Section):
    """`fsdp`: how a role with `engine: fsdp` is sharded over its ranks and computes."""

    sharding_strategy: Literal[
        "full_shard", "shard_grad_op", "hybrid_shard", "no_shard"
    ] = "full_shard"
    """State that is sharded over the ranks. full_shard: weights, gradients and optimizer state; a block's weights are
    gathered for its forward and again for its backward pass (ZeRO-3). shard_grad_op: weights stay gathered from forward
    to backward, and gradients stay whole until the last micro-batch of a step (ZeRO-2); more memory, less
    communication. hybrid_shard: full_shard inside groups of shard_size ranks, which are replicas of each other.
    no_shard: every rank holds everything."""
    shard_size: Positive | None = None
    """For hybrid_shard: number of ranks over which weights are sharded. Must divide the role's ranks. null: the ranks
    of one node."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and run the optimizer there. A block's weights are
    copied to the device for its forward and backward pass. Saves most device memory and makes steps slower."""
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which a block's weights are gathered and computed. null: model.dtype."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which gradients are summed over the ranks. 16 bits halve the traffic and lose precision. null:
    float32."""
    compile: bool = False
    """Compile each block with torch.compile. The first steps are slower."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of transformers' load-balancing loss for mixtures of experts. null: the model's own weight if its
    config.json has output_router_logits: true, else 0."""
    attention: Literal[
        "auto",
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    ] = "auto"
    """transformers' attn_implementation; any value but auto pads the rows. auto: megaverl's attention, which uses
    FlashAttention or PyTorch's kernels and also reads packed rows; for models with sinks, the choice of
    transformers."""
    liger: bool = False
    """Use Liger's fused kernels for norms, rotary embeddings and MLPs. Requires a GPU, the package liger-kernel, and an
    architecture that it supports. Not for engine: megatron: Liger replaces modules of transformers, and megatron-core
    and Transformer Engine have fused kernels of their own for the same operators."""


STRATEGIES = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "HYBRID_SHARD": "hybrid_shard",
    "NO_SHARD": "no_shard",
}
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
_PRECISION = ("param_dtype", "reduce_dtype")


def from_fsdp_config(value: Any) -> dict[str, Any]:
    """Convert an `fsdp_config`, as torch and other trainers write it, to the section `fsdp`.

    `mixed_precision` may be true (compute in bfloat16, reduce gradients in float32),
    false (float32), a dtype, or a mapping of param_dtype and reduce_dtype. Keys of
    `fsdp` itself are accepted beside it and take precedence.

    Raises:
        ValueError: names the unusable entry and what is allowed.
    """
    if not isinstance(value, Mapping):
        raise ValueError(
            f"found {yaml_text(value)}; expected a mapping such as {{sharding_strategy: FULL_SHARD}}."
        )
    known = ["mixed_precision", *FsdpConfig.model_fields]
    if unknown := [str(key) for key in value if key not in known]:
        hint = did_you_mean(unknown[0], known) or f" Known here: {listed(known)}."
        raise ValueError(f"unknown key {unknown[0]}.{hint}")
    section = {
        key: setting for key, setting in value.items() if key != "mixed_precision"
    }
    if isinstance(strategy := value.get("sharding_strategy"), str):
        name = strategy.rpartition(".")[2].upper()
        if name not in STRATEGIES:
            raise ValueError(
                f"sharding_strategy: found {yaml_text(strategy)}; allowed: {listed(STRATEGIES)}."
                f"{did_you_mean(name, STRATEGIES)}"
            )
        section["sharding_strategy"] = STRATEGIES[name]
    if (precision := value.get("mixed_precision")) is not None:
        section = {**_precision(precision), **section}
    return section


def _precision(value: Any) -> dict[str, str]:
    """Return param_dtype and reduce_dtype for a value of `mixed_precision`."""
    if value is True:
        return {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    if value is False:
        return {"param_dtype": "float32", "reduce_dtype": "float32"}
    if isinstance(value, str):
        return {
            "param_dtype": _dtype("mixed_precision", value),
            "reduce_dtype": "float32",
        }
    if not isinstance(value, Mapping) or (set(value) - set(_PRECISION)):
        raise ValueError(
            f"mixed_precision: found {yaml_text(value)}; expected true, false, a dtype, or a mapping of param_dtype "
            "and reduce_dtype."
        )
    return {
        key: _dtype(f"mixed_precision.{key}", dtype) for key, dtype in value.items()
    }


def _dtype(key: str, value: Any) -> str:
    """Return the canonical name of a dtype such as "bf16" or "torch.bfloat16"."""
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(
            f"{key}: found {yaml_text(value)}; allowed: {listed(_DTYPES)}."
        )
    return _DTYPES[name]
