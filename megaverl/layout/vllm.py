"""vLLM's model parameters as a layout, for any tensor-parallel rank.

Rules (vLLM 0.32, `model_executor/layers/linear.py`, `vocab_parallel_embedding.py`):
- `qkv_proj` is [this rank's q rows; its k rows; its v rows]; with fewer key-value heads than ranks, each head
  is held by as many neighbouring ranks as share it;
- `gate_up_proj` is [this rank's gate rows; its up rows];
- the vocabulary is padded to a multiple of 64 and cut into equal runs of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megaverl.errors import GridError
from megaverl.layout.boxes import Box, cut
from megaverl.layout.layout import Layout, LayoutBuilder
from megaverl.layout.megatron import even_part
from megaverl.layout.weights import Split, Weight
from megaverl.models.spec import ModelSpec

# vLLM's DEFAULT_VOCAB_PADDING_SIZE; the tests compare it with the installed one.
VOCAB_PADDING = 64


def vllm_layout(weights: Sequence[Weight], spec: ModelSpec, tp_size: int, tp_rank: int) -> Layout:
    """What one tensor-parallel rank of vLLM holds, under vLLM's parameter names.

    Raises:
        GridError: heads, rows or the padded vocabulary that `rollout.tp` does not divide.
    """
    fused: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.vllm is not None:
            fused.setdefault(weight.vllm, []).append(weight)
    builder = LayoutBuilder()
    for local, members in fused.items():
        rows = None
        if members[0].split is Split.VOCAB:
            rows = _vocab_rows(members[0], tp_size)
        parts = [(weight.name, weight.shape, _part(weight, spec, tp_size, tp_rank)) for weight in members]
        builder.add_stacked(local, parts, rows)
    return builder.build()


def vllm_layouts(weights: Sequence[Weight], spec: ModelSpec, tp_size: int) -> Callable[[int], Layout]:
    """`rank -> layout` for replicas of `tp_size` neighbouring ranks; replicas share one object a tp rank."""
    layouts: dict[int, Layout] = {}

    def layout_of(rank: int) -> Layout:
        tp_rank = rank % tp_size
        if tp_rank not in layouts:
            layouts[tp_rank] = vllm_layout(weights, spec, tp_size, tp_rank)
        return layouts[tp_rank]

    return layout_of


def _vocab_rows(weight: Weight, tp_size: int) -> int:
    padded = -(-weight.shape[0] // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tp_size:
        raise GridError(
            f"{weight.name}: vLLM pads the vocabulary of {weight.shape[0]} to {padded}, which rollout.tp "
            f"{tp_size} does not divide. Choose a rollout.tp that divides {padded}."
        )
    return padded // tp_size


def _part(weight: Weight, spec: ModelSpec, tp_size: int, tp_rank: int) -> Box:
    if weight.split is Split.VOCAB:
        run = _vocab_rows(weight, tp_size)
        low = min(tp_rank * run, weight.shape[0])
        return cut(weight.shape, 0, low, min(low + run, weight.shape[0]))
    if weight.split in (Split.Q, Split.K, Split.V):
        _check_heads(weight, spec, tp_size)
    if weight.split in (Split.K, Split.V) and spec.num_kv_heads < tp_size:
        head = tp_rank // (tp_size // spec.num_kv_heads)
        run = weight.shape[0] // spec.num_kv_heads
        return cut(weight.shape, 0, head * run, (head + 1) * run)
    return even_part(weight, tp_size, tp_rank, key="rollout.tp")


def _check_heads(weight: Weight, spec: ModelSpec, tp_size: int) -> None:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise GridError(
            f"{weight.name}: {heads} heads and {kv_heads} key-value heads cannot be divided over "
            f"rollout.tp {tp_size}. Choose a rollout.tp that divides the heads, and divides the key-value "
            "heads or is a multiple of them."
        )
