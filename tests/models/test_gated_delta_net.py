"""Gated delta nets: the rule by its definition, and packed rows as if each sequence were computed alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megaverl.data.prefix_tree import PrefixTree
from megaverl.models import gated_delta_net
from megaverl.models.gated_delta_net import Inputs, delta_rule
from megaverl.models.packing import Pack, pack, pack_varlen

# Shorter than the taps, exactly a chunk of 64 tokens, and several chunks.
LENGTHS = [70, 1, 3, 64, 130, 2]
HEADS, KEY_DIM, VALUE_DIM, TAPS = 3, 8, 6, 4


@pytest.fixture
def inputs() -> Inputs:
    """Of one row of all sequences, laid end to end."""
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query, key = (torch.randn(1, total, HEADS, KEY_DIM) for _ in range(2))
    value = torch.randn(1, total, HEADS, VALUE_DIM)
    # Slow decay: tokens of the sequence before would have an effect.
    decay = -0.1 * torch.rand(1, total, HEADS)
    step = torch.rand(1, total, HEADS)
    row = query, key, value, decay, step
    for x in row:
        x.requires_grad_()
    return row


def by_definition(inputs: Inputs) -> Tensor:
    """arXiv 2412.06464, eq. 10, token by token in float64: [1, s, heads, d of the values]."""
    query, key, value, decay, step = (x[0].double() for x in inputs)
    query, key = (
        x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)
    )
    state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, step, strict=True):
        state = state * g.exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - seen))
        outputs.append(torch.einsum("hk,hkv->hv", q, state) / KEY_DIM**0.5)
    return torch.stack(outputs)[None]


def sequences(row: Tensor) -> Iterator[Tensor]:
    """Each sequence of [1, t, ...] as a row of its own."""
    yield from row.split(LENGTHS, dim=1)


def packed(pack_rows: Pack) -> Any:
    """The packing of the sequences, with padding at the end of the row."""
    tree = PrefixTree.apart(len(LENGTHS))
    return pack_rows(LENGTHS, tree, width=max(LENGTHS), multiple_of=16)


def with_padding(row: Tensor) -> Tensor:
    """A row as `pack` pads it: with copies of its first token."""
    return torch.cat(
        [row, row[:, :1].expand(-1, -row.shape[1] % 16, *row.shape[2:])], 1
    )


@pytest.mark.parametrize("pack_rows", [pack, pack_varlen])
def test_the_state_restarts_at_each_sequence(inputs: Inputs, pack_rows: Pack) -> None:
    """Outputs and gradients of a packed row are those of the definition on each sequence alone."""
    row: Any = tuple(with_padding(x) for x in inputs)
    found = delta_rule(row, packed(pack_rows))[:, : sum(LENGTHS)]
    parts = zip(*(sequences(x) for x in inputs), strict=True)
    expected = torch.cat([by_definition(part) for part in parts], dim=1)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = (
        torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)
    )
    for ours, right in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-4)
    # A row that is not packed carries the state on.
    carried = delta_rule(inputs, None)
    assert (carried - found).abs().max() > 0.01


def test_rows_are_computed_side_by_side(inputs: Inputs) -> None:
    first: Any = tuple(x[:, :60] for x in inputs)
    second: Any = tuple(x[:, 70:130] for x in inputs)
    both: Any = tuple(torch.cat(pair) for pair in zip(first, second, strict=True))
    found = delta_rule(both, None)
    expected = torch.cat([by_definition(first), by_definition(second)])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_flash_linear_attention_is_told_where_sequences_begin(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with the arguments of its `chunk_gated_delta_rule`, which needs a GPU."""

    def rule(
        *row: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
    ) -> tuple[Tensor, None]:
        assert use_qk_l2norm_in_kernel and len(row[0]) == 1
        bounds = cu_seqlens.tolist()
        parts: Any = [
            tuple(x[:, start:stop] for x in (*row, g, beta))
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        return torch.cat([by_definition(part) for part in parts], dim=1), None

    monkeypatch.setattr(gated_delta_net, "_varlen_rule", lambda: rule)
    row: Any = tuple(with_padding(x) for x in inputs)
    found = delta_rule(row, packed(pack_varlen))[:, : sum(LENGTHS)]
    parts = zip(*(sequences(x) for x in inputs), strict=True)
    expected = torch.cat([by_definition(part) for part in parts], dim=1)
    torch.testing.assert_close(found, expected)
