"""A vLLM engine's memory: weights, KV cache, workspace, as vLLM divides its share of the GPU.

Rules (vLLM 0.32, `v1/worker/gpu_worker.py`, `v1/kv_cache_interface.py`): the engine may use
`gpu_memory_utilization` of the whole GPU, and asks at its start that this much be free; what weights and the
profiled forward pass leave of it becomes cache, in pages of `block_size` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec

UTILIZATION = 0.92  # vLLM's default of gpu_memory_utilization
BATCHED_TOKENS = 16384  # its default of max_num_batched_tokens, offline, on GPUs of 70 GiB and more
NUM_SEQS = 1024  # its default of max_num_seqs there


@dataclass(frozen=True)
class EngineBytes:
    """One rank of an engine.

    Attributes:
        budget: all that the engine takes.
        weights: of its own, before any is aliased.
        workspace: activations of the largest batch, an estimate of what vLLM profiles.
        cache: the KV cache; negative where weights and workspace alone exceed the budget.
        bytes_per_token: of the cache.
        sequences: responses asked of the engine at once.
        longest: tokens of the longest sequence.
    """

    budget: float
    weights: int
    workspace: float
    cache: float
    bytes_per_token: int
    sequences: int
    longest: int

    @property
    def tokens(self) -> int:
        return max(0, int(self.cache // self.bytes_per_token))

    @property
    def concurrency(self) -> float:
        """Sequences of full length that the cache holds at once."""
        return self.tokens / self.longest


def kv_bytes_per_token(spec: ModelSpec, tp: int, itemsize: int) -> int:
    """Over all layers, on one rank: keys and values of its heads; under MLA the latent, on every rank."""
    if spec.mla is not None:
        return spec.num_layers * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim) * itemsize
    heads = max(1, spec.num_kv_heads // tp)
    return spec.num_layers * 2 * heads * spec.head_dim * itemsize


def engine_bytes(
    spec: ModelSpec,
    layout: Layout,
    tp: int,
    fields: Mapping[str, Any],
    *,
    itemsize: int,
    memory: float,
    sequences: int,
    longest: int,
) -> EngineBytes:
    """What an engine of `tp` ranks holds on each.

    Args:
        layout: of one of its ranks.
        fields: `rollout.vllm`.
        memory: of the GPU, bytes.
        sequences, longest: responses per engine and step, and the context they may need.
    """
    weights = sum(whole(shape).numel for shape in layout.local_shapes.values()) * itemsize
    budget = memory * float(fields.get("gpu_memory_utilization", UTILIZATION))
    cache_itemsize = 1 if str(fields.get("kv_cache_dtype", "auto")).startswith("fp8") else itemsize
    workspace = _workspace(spec, tp, fields, itemsize)
    cache = budget - weights - workspace
    if fields.get("kv_cache_memory_bytes"):  # then vLLM asks for that much, whatever the utilization
        cache = float(fields["kv_cache_memory_bytes"])
        budget = cache + weights + workspace
    per_token = kv_bytes_per_token(spec, tp, cache_itemsize)
    return EngineBytes(budget, weights, workspace, cache, per_token, sequences, longest)


def _workspace(spec: ModelSpec, tp: int, fields: Mapping[str, Any], itemsize: int) -> float:
    """Activations of the widest point of a layer for a full batch, and the sampler's float32 logits three times."""
    tokens = int(fields.get("max_num_batched_tokens") or BATCHED_TOKENS)
    seqs = int(fields.get("max_num_seqs") or NUM_SEQS)
    width = 3 * spec.ffn_hidden_size / tp
    if spec.moe is not None:
        width = max(width, spec.moe.experts_per_token * (spec.hidden_size + 3 * spec.moe.ffn_hidden_size / tp))
    return tokens * itemsize * (3 * spec.hidden_size + width) + 3 * 4 * seqs * spec.vocab_size
