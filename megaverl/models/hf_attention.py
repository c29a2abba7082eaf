"""Attention for transformers' models on causal and packed rows, with the kernels that Megatron's layers use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaverl.errors import ModelError
from megaverl.models.attention import attend_packed, attend_rows
from megaverl.models.context_attention import (
    Part,
    attend_packed_part,
    attend_rows_part,
    gather_row,
    pack_part,
    pack_part_varlen,
)
from megaverl.models.packing import Pack, Packing, Window, pack, pack_varlen
from megaverl.platform import flash_attention
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Name under which transformers selects this attention (`attn_implementation`).
NAME = "megaverl"
# Arguments of transformers' attention functions that `attend` does not support ->
# reason for a message.
NOT_COMPUTED = {
    "s_aux": "attention has sinks",
}
# Names of layer kinds in transformers' `layer_types`.
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass
class _Call:
    """Arguments with which one layer called `attend` during the trial pass."""

    problem: str
    window: int | None
    head_dims: tuple[int, int]
    softcap: float | None


@dataclass
class _Current:
    """State of this process's current forward or backward pass. One model runs at a time.

    A context variable would not do: autograd recomputes checkpointed layers in a thread
    of its own.
    """

    packing: Packing | None = None
    # Ranks that hold the parts of a row. None: a rank has whole rows.
    context_group: dist.ProcessGroup | None = None
    calls: list[_Call] | None = field(default=None)


_current = _Current()


@contextmanager
def packed(
    packing: Packing | None, context_group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Make forward and backward passes inside read rows packed as `packing` says. None: each row is one sequence.

    Args:
        context_group: ranks that hold the parts of each row (`context_attention.py`). None: this rank has whole rows.
    """
    before = _current.packing, _current.context_group
    _current.packing, _current.context_group = packing, context_group
    try:
        yield
    finally:
        _current.packing, _current.context_group = before


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature of transformers' attention functions.

    Args:
        query: [b, heads, s, d].
        key, value: [b, kv_heads, s, d].

    Returns:
        [b, s, heads, d], and None in place of attention weights.
    """
    # Trial pass of `row_reading` on the meta device: record the request and return the
    # right shape.
    if _current.calls is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        problem = next(
            (text for name, text in NOT_COMPUTED.items() if more.get(name) is not None),
            "",
        )
        problem = problem or (
            "" if causal and attention_mask is None else "attention is not causal"
        )
        problem = problem or ("attention has dropout" if dropout else "")
        _current.calls.append(
            _Call(problem, sliding_window, (query.shape[-1], value.shape[-1]), softcap)
        )
        # The right shape on the meta device, so that the pass goes on.
        return query.new_empty(
            query.shape[0], query.shape[2], query.shape[1], value.shape[-1]
        ), None
    window = None if sliding_window is None else Window(sliding_window)
    if (group := _current.context_group) is not None:
        return _attend_part(query, key, value, group, scaling, window, softcap), None
    if _current.packing is None:
        rows = attend_rows(query, key, value, None, scaling, window, softcap=softcap)
        return rows.transpose(1, 2), None
    # A packed row has a batch of one.
    # [t, heads, d]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend_packed(q, k, v, _current.packing, scaling, window, softcap=softcap)
    return out.view(1, len(q), query.shape[1], value.shape[-1]), None


def _attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float | None,
    window: Window | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute `attend` of a context-parallel rank's part of each row. Collective over the group."""
    # [b, kv_heads, s / cp, d] -> [s, b, kv_heads, d]
    k, v = gather_row(key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3), group)
    packing = _current.packing
    if packing is None:
        part = Part(group.rank(), group.size())
        k, v = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
        rows = attend_rows_part(query, k, v, part, scale, window, softcap=softcap)
        return rows.transpose(1, 2)
    q = query[0].transpose(0, 1)
    out = attend_packed_part(
        q, k[:, 0], v[:, 0], packing, scale, window, softcap=softcap
    )
    return out.view(1, len(q), query.shape[1], value.shape[-1])


def register() -> None:
    """Register `attend` with transformers. No mask function is registered, so it receives no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class RowReading:
    """Way in which a model reads rows of tokens.

    Attributes:
        padded_because: why it cannot read packed rows. Empty: it can.
        attention: the `attn_implementation` to build the model with. None: transformers' choice.
        pack: function that packs samples into a row.
    """

    padded_because: str = ""
    attention: str | None = NAME
    pack: Pack | None = None

    def pack_of(self, part: Part) -> Pack | None:
        """Return the function that packs samples into a row for a context-parallel rank."""
        if part.size == 1 or self.pack is None:
            return self.pack
        return partial(
            pack_part_varlen if self.pack is pack_varlen else pack_part, part=part
        )


def row_reading(
    model: PreTrainedModel, num_blocks: int, dtype: torch.dtype
) -> RowReading:
    """Find out how a model reads rows, by a forward pass without data.

    Packed rows require that layers mix tokens only in attention, and only in the way
    that `attend` computes.

    Args:
        model: on the meta device, built with the attention implementation `NAME`.
        num_blocks: number of decoder blocks, each of which must call `attend` once.
        dtype: dtype of the computation, which decides whether FlashAttention can be used.

    Raises:
        AttributeError: the model's code uses something that this version of transformers lacks.
    """
    # A class may say so by itself.
    if reason := getattr(model, "padded_because", ""):
        return RowReading(reason, None)
    calls: list[_Call] = []
    _current.calls = calls
    was_training = model.training
    # In evaluation mode dropout would stay unnoticed.
    model.train()
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        # A model's own code may raise anything. An AttributeError would be raised with
        # data too, so it is passed on.
        with (
            torch.no_grad(),
            user_code(lambda error: ModelError(describe(error)), keep=AttributeError),
        ):
            model(
                input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False
            )
    except ModelError as error:
        return RowReading(f"its forward pass does not run without data ({error})", None)
    finally:
        _current.calls = None
        model.train(was_training)
    # The first problem is reported. Dropout is supported by transformers' own kernels,
    # other problems only by the plain one.
    problem = next((call.problem for call in calls if call.problem), "")
    if problem:
        return RowReading(
            problem, None if problem == "attention has dropout" else "eager"
        )
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    # Llama 4 counts the tokens of a row for this, also if positions are given.
    if getattr(config, "attn_temperature_tuning", False):
        return RowReading("its queries are scaled by their place in a row", None)
    # State or other mixing would carry tokens of one sample over to the next in a
    # packed row.
    if (
        any(kind not in (SLIDING, FULL) for kind in kinds)
        or len(calls) != num_blocks
        or _has_state(model)
    ):
        return RowReading("its layers mix tokens in other ways than attention", None)
    if sum(call.window is not None for call in calls) < kinds.count(SLIDING):
        return RowReading("its layers do not say how far their attention looks", None)
    if not _takes_positions(model):
        return RowReading("its tokens' positions cannot be given", None)
    # All layers have the same head sizes and the same soft cap.
    width, of_values = calls[0].head_dims
    varlen = width == of_values and not flash_attention.why_not_for(
        dtype, width, calls[0].softcap
    )
    return RowReading(pack=pack_varlen if varlen else pack)


def _has_state(model: PreTrainedModel) -> bool:
    """Return whether layers carry state from token to token: recurrent layers, or convolutions over the sequence."""
    if getattr(model, "_is_stateful", False):
        return True
    return any(isinstance(module, torch.nn.Conv1d) for module in model.modules())


def _takes_positions(model: PreTrainedModel) -> bool:
    """Return whether the model's forward pass accepts position ids."""
    import inspect

    return "position_ids" in inspect.signature(type(model).forward).parameters
