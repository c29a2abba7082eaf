"""Changes to vLLM's CPU build that make a response independent of its batch. Not imported on CUDA.

vLLM's own batch-invariant mode is for GPUs. Each change here takes effect only inside `batch_invariant`, and computes
as the trainer does there. `platform/batch_invariant.py` has the arithmetic and the reasons.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megaverl.platform import batch_invariant
from megaverl.platform.batch_invariant import is_batch_invariant
from megaverl.platform.cuda_on_cpu import Adaptation, adaptation, replaces

ADAPTATIONS: list[Adaptation] = []
_adapts = functools.partial(adaptation, ADAPTATIONS)

# As in `models/vocab_parallel.py`: e^-10000 is 0 in float32.
NEGLIGIBLE = -1e4


@_adapts("products in tiles")
def _multiply_in_tiles() -> None:
    """oneDNN chooses its kernel by the number of tokens."""
    from vllm.model_executor.layers import utils

    @replaces(utils, "dispatch_cpu_unquantized_gemm")
    def choose(pack: Any, layer: torch.nn.Module, remove_weight: bool) -> None:
        if is_batch_invariant() and not layer.weight.is_meta and layer.weight.ndim == 2:
            # Kept for the engine's lifetime: an engine is built and packed inside `batch_invariant` or outside.
            layer.cpu_linear = batch_invariant.linear  # type: ignore[assignment]
        else:
            pack(layer, remove_weight)


@_adapts("norms of the trainer")
def _norm_as_the_trainer() -> None:
    """vLLM's kernel adds squares in another order than the trainer."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    @replaces(RMSNorm, "forward_cpu")
    def norm(
        forward: Any, self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Any:
        if not is_batch_invariant():
            return forward(self, x, residual)
        x = x if residual is None else x + residual
        inverse = batch_invariant.inverse_rms(x, self.variance_epsilon, torch.float32)
        normed = (x * inverse).mul_(self.weight).to(x.dtype)
        return normed if residual is None else (normed, x)


@_adapts("SiLU of exact parts")
def _gate_by_exact_parts() -> None:
    """PyTorch's SiLU computes the last elements of a tensor differently from those before them."""
    from vllm.model_executor.layers.activation import SiluAndMul

    @replaces(SiluAndMul, "forward_cpu")
    def gate(forward: Any, self: Any, x: torch.Tensor) -> Any:
        if not is_batch_invariant():
            return forward(self, x)
        gate, up = x.chunk(2, dim=-1)
        return batch_invariant.silu(gate).mul_(up)


@_adapts("rotary embeddings in separate operations")
def _rotate_in_separate_operations() -> None:
    """vLLM's kernel fuses multiplication and addition, which the trainer's operators round separately."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    @replaces(RotaryEmbedding, "forward_cpu")
    def rotate(
        forward: Any,
        self: Any,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> Any:
        if is_batch_invariant():
            return self.forward_native(positions, query, key)
        return forward(self, positions, query, key)


@_adapts("attention by blocks of keys")
def _attend_by_blocks() -> None:
    """vLLM's kernel splits keys over threads by the lengths of all sequences of a batch."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def store(
        update: Any,
        self: Any,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not is_batch_invariant():
            update(self, layer, key, value, kv_cache, slot_mapping)
            return
        keys, values = _split_cache(kv_cache)
        block, place = _divmod_slots(slot_mapping, keys.shape[2])
        count = len(slot_mapping)
        # A cache keeps one layout for the engine's lifetime, since an engine always runs in one mode.
        keys[block, :, place] = key[:count]
        values[block, :, place] = value[:count]

    @replaces(CPUAttentionBackendImpl, "forward")
    def attend(
        forward: Any,
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        if not is_batch_invariant() or attn_metadata is None:
            result: torch.Tensor = forward(
                self,
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                **options,
            )
            return result
        window = self.sliding_window if self.sliding_window > 0 else None
        _attend_requests(query, kv_cache, attn_metadata, output, self.scale, window)
        return output


def _divmod_slots(
    slots: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block and the place in it of each slot of the cache, [tokens] int64 each."""
    slots = slots.long()
    return slots // block_size, slots % block_size


def _split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [blocks, kv_heads, tokens of a block, d], from [blocks, kv_heads, tokens, 2 * d]."""
    return kv_cache.chunk(2, dim=-1)  # type: ignore[return-value]


def _attend_requests(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Write the attention of all requests of a batch to `output`.

    Requests with equally many new tokens are computed together, which are all that decode.

    Args:
        query: [tokens, heads, d], the new tokens of one request after another.
        window: number of keys that a query sees, its own included. None: all before it.
        output: [tokens, heads, d] or [tokens, heads * d].
    """
    keys, values = _split_cache(kv_cache)
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    by_count: dict[int, list[int]] = {}
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end > start:
            by_count.setdefault(end - start, []).append(request)
    written = output.view(len(output), query.shape[1], -1)
    for count, requests in by_count.items():
        longest = max(lengths[request] for request in requests)
        num_blocks = -(-longest // keys.shape[2])
        # [requests, blocks] -> [requests, kv_heads, keys, d]
        table = metadata.block_table[requests, :num_blocks].long()
        k, v = (
            cache[table].transpose(1, 2).flatten(2, 3)[:, :, :longest]
            for cache in (keys, values)
        )
        tokens = (
            torch.tensor([starts[request] for request in requests])[:, None]
            + torch.arange(count)[None]
        )
        ends = torch.tensor([lengths[request] for request in requests])
        look = _visible(ends, count, longest, window)
        # Cache blocks that no request has written may contain NaN, which a weight of zero would spread.
        unused = torch.arange(longest) >= ends[:, None]
        k, v = (x.masked_fill(unused[:, None, :, None], 0.0) for x in (k, v))
        q = query[tokens].transpose(1, 2)
        out = batch_invariant.attend(q, k, v, look, scale)
        written[tokens] = out.transpose(1, 2)


def _visible(
    ends: torch.Tensor, count: int, longest: int, window: int | None
) -> torch.Tensor:
    """Return the keys that the last `count` tokens of each request see, [requests, 1, count, longest] bool."""
    last = (ends[:, None] - count + torch.arange(count))[:, None, :, None]
    columns = torch.arange(longest)
    seen = columns <= last
    return seen if window is None else seen & (columns > last - window)


@_adapts("log-probs of the trainer")
def _normalise_as_the_trainer() -> None:
    """PyTorch's log-softmax adds exponentials in another order than the trainer, which never has all logits at once."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    original = Sampler.compute_logprobs

    def compute(logits: torch.Tensor) -> torch.Tensor:
        if is_batch_invariant():
            return _log_softmax(logits)
        log_probs: torch.Tensor = original(logits)
        return log_probs

    Sampler.compute_logprobs = staticmethod(compute)

    @replaces(TopKTopPSampler, "forward_cpu")
    def draw(forward: Any, self: Any, *args: Any, **options: Any) -> Any:
        if not is_batch_invariant() or self.logprobs_mode != "processed_logprobs":
            return forward(self, *args, **options)
        # Logits after top-k and top-p, in place of their log-softmax.
        self.logprobs_mode = "processed_logits"
        try:
            drawn, logits = forward(self, *args, **options)
        finally:
            self.logprobs_mode = "processed_logprobs"
        return drawn, _log_softmax(logits)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probs of all tokens. Actor and engine have the same tensor-parallel size."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    num_shards = get_tensor_model_parallel_world_size()
    return batch_invariant.log_softmax(logits, NEGLIGIBLE, num_shards)
