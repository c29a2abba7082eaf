"""Rows cut over context-parallel ranks: what each rank has, and attention as if each sequence were computed alone."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.prefix_tree import PrefixTree
from megaverl.models.build import why_not_cut
from megaverl.models.context_attention import (
    ContextAttention,
    CutPacking,
    Part,
    own_places,
    pack_for_engine,
    pack_part,
    pack_part_varlen,
)
from megaverl.models.packing import MicroBatch, Pack, Predicting, pack, spread
from tests.models.test_packing import (
    GROUPS,
    HEADS,
    KV_HEADS,
    attention,
    attention_config,
    drawn,
    in_chunks,
    of_prompts,
    sequences_of,
    varlen,
    with_sinks,
)

SIZES = st.sampled_from([2, 3, 4])


def test_each_rank_has_an_early_and_a_late_chunk() -> None:
    assert [own_places(8, Part(rank, 2)).tolist() for rank in (0, 1)] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5],
    ]


def of_a_rank(
    window: int | None, rank: int, size: int, **options: Any
) -> ContextAttention:
    """With keys and values that are gathered already; `tests/workers` gather them between ranks."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    groups = SimpleNamespace(cp=group, tp=None)
    attends = ContextAttention(
        attention_config(window, **options), 1, None, "self", pg_collection=groups
    )
    attends._whole_row = lambda key, value: (key, value)  # type: ignore[method-assign]
    with_sinks(attends)
    return attends


@pytest.mark.parametrize("more", [{}, {"sinks": True}, {"chunk": 5}, {"chunk": 1}])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_a_row_of_one_sequence_is_attended_from_by_its_ranks(
    window: int | None, more: dict[str, Any]
) -> None:
    window = None if "chunk" in more else window
    q, k, v = (
        torch.randn(12, 2, heads, 8, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    expected = attention(window, **more)(q, k, v, None)
    for rank in range(3):
        own = own_places(12, Part(rank, 3))
        torch.testing.assert_close(
            of_a_rank(window, rank, 3, **more)(q[own], k, v, None), expected[own]
        )


@settings(max_examples=100)
@given(
    laid=st.sampled_from([pack_part, pack_part_varlen]),
    groups=GROUPS,
    window=st.sampled_from([None, 1, 3, 100]),
    size=SIZES,
    more=st.sampled_from([{}, {"sinks": True}, {"chunk": 1}, {"chunk": 3}]),
    seed=st.integers(0, 99),
)
def test_the_ranks_outputs_are_those_of_the_whole_row(
    laid: Pack,
    groups: list[tuple[int, list[list[int]]]],
    window: int | None,
    size: int,
    more: dict[str, Any],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    if "sinks" in more:
        laid = pack_part
    if "chunk" in more:
        window, laid = None, in_chunks(laid, more["chunk"])
    sequences, tree = sequences_of(groups)
    lengths = [len(tokens) for tokens in sequences]
    options = {"width": 20, "multiple_of": 2 * size}
    whole = pack(lengths, tree, **options)
    total = len(whole.source)
    row = [
        drawn(total, heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    q, k, v = (x.unsqueeze(1) for x in row)
    attends_whole = attention(window, **more)
    expected = attends_whole(q, k, v, None, packed_seq_params=whole).squeeze(1)
    outputs, places = [], []
    for rank in range(size):
        packing = laid(lengths, tree, **options, part=Part(rank, size))
        own = packing.local_places
        assert own is not None and torch.equal(own, own_places(total, Part(rank, size)))
        assert torch.equal(packing.source, whole.source) and torch.equal(
            packing.positions, whole.positions[own]
        )
        assert torch.equal(packing.places, whole.places)
        with mock.patch.dict(
            sys.modules, {"flash_attn": SimpleNamespace(flash_attn_varlen_func=varlen)}
        ):
            attends = of_a_rank(window, rank, size, **more)
            outputs.append(
                attends(q[own], k, v, None, packed_seq_params=packing).squeeze(1)
            )
        places.append(own)
    order = torch.cat(places).argsort()
    found = torch.cat(outputs)[order]
    real = whole.positions > 0
    real |= torch.arange(total) < tree.num_tokens(range(len(lengths)), lengths)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)
    factor = torch.randn_like(found) * real[:, None]
    by_ranks = torch.autograd.grad((found * factor).sum(), row, retain_graph=True)
    for mine, theirs in zip(
        by_ranks, torch.autograd.grad((expected * factor).sum(), row), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(0, 9), max_size=4), size=SIZES)
def test_transformer_engine_gets_each_sequence_cut_by_itself(
    lengths: list[int], size: int
) -> None:
    """As its `attn_forward_func_with_cp` wants it, each a multiple of 2 cp."""
    tree = PrefixTree.apart(len(lengths))
    parts = [
        pack_for_engine(
            lengths,
            tree,
            width=20,
            multiple_of=6 * size,
            part=Part(rank, size),
        )
        for rank in range(size)
    ]
    first = parts[0]
    total, begins = len(first.source), first.cu_seqlens_q.tolist()
    assert total % (6 * size) == 0 and begins[-1] == total and first.keys is None
    assert (
        first.max_seqlen_q
        == first.max_seqlen_kv
        == int(first.cu_seqlens_q.diff().max())
    )
    assert first.cu_seqlens_kv is first.cu_seqlens_q, "the device need not compare them"
    for rank, packing in enumerate(parts):
        each = [
            own_places(end - begin, Part(rank, size))
            for begin, end in zip(begins, begins[1:], strict=False)
        ]
        assert packing.positions.tolist() == torch.cat(each).tolist()
        assert packing.local_places is not None
        assert packing.local_places.tolist() == [
            b + p for b, own in zip(begins, each, strict=False) for p in own.tolist()
        ]
    assert sorted(
        place for packing in parts for place in packing.local_places.tolist()
    ) == list(range(total))
    laid = [number for number, length in enumerate(lengths) if length]
    for number, begin in zip(laid, begins, strict=False):
        assert first.source[begin : begin + lengths[number]].tolist() == [
            number * 20 + at for at in range(lengths[number])
        ]
        assert first.places[number, : lengths[number]].tolist() == list(
            range(begin, begin + lengths[number])
        )


@pytest.mark.parametrize("packed", [True, False])
def test_the_ranks_response_tokens_are_those_of_the_micro_batch(packed: bool) -> None:
    prompts, responses = torch.tensor([3, 4]), torch.tensor([1, 4])
    padded = torch.arange(16).view(2, 8) + 100
    packing = (
        pack([4, 8], PrefixTree.apart(2), width=8, multiple_of=4) if packed else None
    )
    tokens = (
        padded.flatten()[packing.source].unsqueeze(0) if packing is not None else padded
    )
    whole = MicroBatch(torch.arange(2), tokens, prompts, responses, packing=packing)
    assert whole.targets.tolist() == [103, 112, 113, 114, 115]
    output = torch.randn(*tokens.shape, 1)
    found, ends = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 1)
    for rank in (0, 1):
        own = own_places(tokens.shape[1], Part(rank, 2))
        part = whole.cut(own)
        assert part.tokens.shape == (len(tokens), tokens.shape[1] // 2)
        assert isinstance(part.predicting, Predicting) and 0 < len(part.targets) < 5
        mine = output[:, own]
        _, row, position = part.predicting
        assert torch.equal(
            spread(mine[row, position, 0], part),
            spread(output[whole.predicting.row, whole.predicting.position, 0], whole)
            * part.predicted,
        )
        found += spread(part.targets, part)
        ends += part.at_the_end(mine)
        moved = part.to(torch.device("meta"))
        assert (
            moved.targets.device.type
            == moved.predicted.device.type
            == moved.last.device.type
            == "meta"
        )
    assert torch.equal(found, spread(whole.targets, whole))
    assert torch.equal(ends, whole.at_the_end(output))


def test_a_part_of_a_row_moves_whole() -> None:
    packing = pack_part(
        [3, 4], of_prompts([2, 2], [0, 0]), width=6, multiple_of=4, part=Part(1, 2)
    )
    assert isinstance(packing, CutPacking)
    moved = packing.to(torch.device("meta"))
    assert moved.local_places is not None and moved.local_places.device.type == "meta"
    assert {half.place.device.type for half in moved.halves} == {
        "meta"
    } and packing.halves[0].place.device.type == "cpu"


def test_what_cannot_be_cut_is_said() -> None:
    def config(cp: int, **fields: object) -> SimpleNamespace:
        plain = {
            "attention_dropout": 0.0,
            "softmax_type": "vanilla",
            "window_size": None,
            "cp_comm_type": None,
        }
        return SimpleNamespace(context_parallel_size=cp, **plain | fields)

    assert why_not_cut(config(2)) == why_not_cut(config(1, attention_dropout=0.1)) == ""
    assert "attention has dropout" in why_not_cut(config(2, attention_dropout=0.1))
    assert "megatron.cp_comm_type=p2p is how Transformer Engine's" in why_not_cut(
        config(2, cp_comm_type="p2p")
    )
    assert "it has no soft cap on scores" in why_not_cut(
        config(2, cp_comm_type="p2p", attention_softcap=50.0)
    )
