"""Experts that get equally many tokens, as far as the host asks: numbers of tokens are values, which fake ones lack.

And Transformer Engine's `pytorch.permutation` (2.20) in plain PyTorch, by shape alone.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from tests.cuda.fake_device import HostReads


def route_evenly() -> None:
    """After megatron-core is imported: what is asked of a routing map is answered by shares of all its tokens."""
    from megatron.core.transformer.moe import token_dispatcher

    total = 0

    class Dispatcher(token_dispatcher.MoEAlltoAllTokenDispatcher):
        def _maybe_dtoh_and_synchronize(
            self, point: str, tokens_per_expert: torch.Tensor | None = None
        ) -> Any:
            nonlocal total
            total = int(self.num_out_tokens)
            return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def share(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
            return tensor
        HostReads.count("copy to the host, not waited for", waits=False)
        each, rest = divmod(total, tensor.numel())
        shares = torch.full(tensor.shape, each).flatten()
        shares[:rest] += 1
        shares = shares.view(tensor.shape)
        return shares.numpy() if as_numpy else shares

    from megatron.core.transformer.moe import moe_layer

    moe_layer.MoEAlltoAllTokenDispatcher = Dispatcher  # type: ignore[misc]
    token_dispatcher.maybe_move_tensor_to_cpu = share


def _select(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """`count` rows: which they are, only values say."""
    return tokens.index_select(
        0, torch.zeros(count, dtype=torch.int64, device=tokens.device)
    )


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> Any:
    return _select(inp, num_out_tokens), routing_map.new_zeros(
        routing_map.shape, dtype=torch.int32
    )


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
) -> Any:
    permuted, row_id_map = moe_permute(inp, routing_map, num_out_tokens)
    return permuted, _select(probs.flatten(), num_out_tokens), row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    assert restore_shape is not None and pad_offsets is None
    return _select(inp, restore_shape[0])


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_indices: torch.Tensor
) -> Any:
    return inp.clone()


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_indices: torch.Tensor,
) -> Any:
    return inp.clone(), probs.clone()


def install() -> None:
    """Before megatron-core is imported."""
    module = ModuleType("transformer_engine.pytorch.permutation")
    for function in (
        moe_permute,
        moe_permute_with_probs,
        moe_unpermute,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
    ):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = module
