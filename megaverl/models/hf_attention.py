"""Attention for transformers' models: causal rows, and packed ones, by the kernels that Megatron's layers use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megaverl.errors import ModelError
from megaverl.models.attention import attend_packed, attend_rows
from megaverl.models.packing import Pack, Packing, pack, pack_varlen
from megaverl.platform import flash_attention
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "megaverl"  # as transformers' `attn_implementation`
# Arguments of transformers' attention functions that `attend` does not compute.
NOT_COMPUTED = {"softcap": "attention's scores are capped", "s_aux": "attention has sinks"}
SLIDING, FULL = "sliding_attention", "full_attention"  # transformers' kinds of layers


@dataclass
class _Call:
    """What a layer asked of `attend`."""

    problem: str
    window: int | None
    head_dims: tuple[int, int]


@dataclass
class _Current:
    """What this process computes now: one model at a time. (A context variable would not reach the thread in which
    autograd computes layers again.)"""

    packing: Packing | None = None
    calls: list[_Call] | None = field(default=None)


_current = _Current()


@contextmanager
def packed(packing: Packing | None) -> Iterator[None]:
    """Inside, forward and backward passes read rows that are packed so; None: each row is one sequence."""
    before, _current.packing = _current.packing, packing
    try:
        yield
    finally:
        _current.packing = before


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
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [b, heads, s, d], keys and values [b, kv_heads, s, d] -> [b, s, heads, d]."""
    if _current.calls is not None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        problem = next((text for name, text in NOT_COMPUTED.items() if more.get(name) is not None), "")
        problem = problem or ("" if causal and attention_mask is None else "attention is not causal")
        problem = problem or ("attention has dropout" if dropout else "")
        _current.calls.append(_Call(problem, sliding_window, (query.shape[-1], value.shape[-1])))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    if _current.packing is None:
        return attend_rows(query, key, value, None, scaling, sliding_window).transpose(1, 2), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [t, heads, d]
    out = attend_packed(q, k, v, _current.packing, scaling, sliding_window)
    return out.view(1, len(q), query.shape[1], value.shape[-1]), None


def register() -> None:
    """Make `attend` known to transformers. There is no function for masks: it gets none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class RowReading:
    """How a model reads rows.

    Attributes:
        padded_because: why it reads no packed rows; empty: it does.
        attention: the `attn_implementation` to compute with; None: transformers' choice.
        pack: how samples are laid into a row.
    """

    padded_because: str = ""
    attention: str | None = NAME
    pack: Pack | None = None


def row_reading(model: PreTrainedModel, num_blocks: int, dtype: torch.dtype) -> RowReading:
    """Found by a forward pass of `model`, which is on the meta device and was made with `NAME`.

    A packed row needs layers that mix tokens in attention alone, and there as `attend` does it.

    Raises:
        AttributeError: its code asks for what this version of transformers does not have.
    """
    calls: list[_Call] = []
    _current.calls = calls
    was_training = model.training
    model.train()
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        # A model's own code may raise anything. An AttributeError it would raise with data too.
        with torch.no_grad(), user_code(lambda error: ModelError(describe(error)), keep=AttributeError):
            model(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
    except ModelError as error:
        return RowReading(f"its forward pass does not run without data ({error})", None)
    finally:
        _current.calls = None
        model.train(was_training)
    problem = next((call.problem for call in calls if call.problem), "")
    if problem:
        return RowReading(problem, None if problem == "attention has dropout" else "eager")
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    if any(kind not in (SLIDING, FULL) for kind in kinds) or len(calls) != num_blocks or _has_state(model):
        return RowReading("its layers mix tokens in other ways than attention", None)
    if sum(call.window is not None for call in calls) < kinds.count(SLIDING):
        return RowReading("its layers do not say how far their attention looks", None)
    if not _takes_positions(model):
        return RowReading("its tokens' positions cannot be given", None)
    (width, of_values), *_ = (call.head_dims for call in calls)
    varlen = width == of_values and not flash_attention.why_not_for(dtype, width)
    return RowReading(pack=pack_varlen if varlen else pack)


def _has_state(model: PreTrainedModel) -> bool:
    """Whether layers carry something from token to token: recurrent ones, convolutions over the sequence."""
    return bool(getattr(model, "_is_stateful", False)) or any(isinstance(m, torch.nn.Conv1d) for m in model.modules())


def _takes_positions(model: PreTrainedModel) -> bool:
    import inspect

    return "position_ids" in inspect.signature(type(model).forward).parameters
