"""Packed rows: attention as if each sequence were computed alone, and every token at its place."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaverl.data.prefix_tree import PrefixTree, limits_of
from megaverl.models import build
from megaverl.models.attention import CausalAttention
from megaverl.models.context_attention import pack_part_varlen
from megaverl.models.layers import AtPositions, as_one_row
from megaverl.models.packing import LONG_BEGINNING, MicroBatch, Pack, pack, pack_varlen
from megaverl.platform import flash_attention
from tests.models.engine_stub import attend, within

HEADS, KV_HEADS, DIM = 4, 2, 8

# groups of sequences: (tokens that all of a group share, [tokens of each one's own]).
# Few different tokens, so that sequences also share parts of these.
GROUPS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.lists(
            st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=4
        ),
    ),
    max_size=4,
)
WIDTH = 20


def sequences_of(
    groups: list[tuple[int, list[list[int]]]],
) -> tuple[list[list[int]], PrefixTree]:
    """The tokens of each sequence, and their tree."""
    sequences = [[5] * common + own for common, parts in groups for own in parts]
    numbers = [number for number, (_, parts) in enumerate(groups) for _ in parts]
    return sequences, tree_of(sequences, numbers)


def tree_of(sequences: list[list[int]], groups: list[int]) -> PrefixTree:
    """The tree of sequences that share all that is equal."""
    return PrefixTree.of_tokens(sequences, [len(one) for one in sequences], groups)


def of_prompts(shared: list[int], groups: list[int]) -> PrefixTree:
    """The tree of sequences that share so many tokens with those of the same group."""
    return PrefixTree.of_prompts(groups, [count + 1 for count in shared])


def attention_config(
    window: int | None,
    *,
    sinks: bool = False,
    softcap: float | None = None,
    chunk: int | None = None,
) -> SimpleNamespace:
    return SimpleNamespace(
        attention_softcap=softcap,
        attention_chunks=(chunk,),
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=None,
        softmax_type="learnable" if sinks else "vanilla",
        num_attention_heads=HEADS,
        tensor_model_parallel_size=1,
        params_dtype=torch.float64,
    )


def attention(window: int | None, **options: Any) -> CausalAttention:
    config = attention_config(window, **options)
    return with_sinks(CausalAttention(config, 1, None, "self"))


def in_chunks(laid: Pack, chunk: int | None) -> Pack:
    """`laid` for layers with such chunks. Those for masks need not know of them."""
    if chunk is None or laid not in (pack_varlen, pack_part_varlen):
        return laid
    return partial(laid, chunk=chunk)


def with_sinks(attends: CausalAttention) -> CausalAttention:
    if attends.softmax_offset is not None:
        attends.softmax_offset.data.copy_(torch.tensor([1.0, -0.5, 0.25, 2.0]))
    return attends


def drawn(length: int, heads: int) -> torch.Tensor:
    return torch.randn(length, heads, DIM, dtype=torch.float64)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """What flash_attn_varlen_func says that it computes (flash-attn 2.8.3, flash_attn/flash_attn_interface.py)."""
    for cu, rows, longest in (
        (cu_seqlens_q, q, max_seqlen_q),
        (cu_seqlens_k, k, max_seqlen_k),
    ):
        assert (
            cu.dtype == torch.int32
            and cu[-1] == len(rows)
            and cu.diff().max() == longest
        )
    assert causal and window_size[1] <= 0
    seen = within(
        cu_seqlens_q, cu_seqlens_k, len(q), len(k), window_size, bottom_right=True
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if softcap:
        return capped_by_the_book(q, k, v, seen, scale, softcap)
    return attend(*(x.transpose(0, 1) for x in (q, k, v)), seen, scale).transpose(0, 1)


def capped_by_the_book(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """arXiv 2408.00118, section 2: [q, heads, d], of scores that a mask [q, k] leaves."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@settings(max_examples=100)
# A query that pads the later ones and sees no key.
@example(
    laid=pack,
    groups=[(0, [[0]]), (4, [[0], [0, 0], [1, 0]])],
    window=1,
    multiple_of=1,
    more={"softcap": 0.5},
    seed=0,
)
@given(
    laid=st.sampled_from([pack, pack_varlen]),
    groups=GROUPS,
    window=st.sampled_from([None, 1, 3, 100]),
    multiple_of=st.sampled_from([1, 4]),
    more=st.sampled_from(
        [{}, {"sinks": True}, {"softcap": 0.5}, {"chunk": 1}, {"chunk": 3}]
    ),
    seed=st.integers(0, 99),
)
def test_attention_over_a_packed_row_is_that_of_each_sequence(
    laid: Pack,
    groups: list[tuple[int, list[list[int]]]],
    window: int | None,
    multiple_of: int,
    more: dict[str, Any],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    if "sinks" in more:
        laid = pack  # FlashAttention 2 has none
    if "chunk" in more:
        window, laid = None, in_chunks(laid, more["chunk"])
    sequences, tree = sequences_of(groups)
    lengths = [len(tokens) for tokens in sequences]
    packing = laid(lengths, tree, width=WIDTH, multiple_of=multiple_of)
    total = len(packing.source)
    real = max(1, tree.num_tokens(range(len(lengths)), lengths))
    assert total == -(-real // multiple_of) * multiple_of

    row = [
        drawn(total, heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    with mock.patch.dict(
        sys.modules, {"flash_attn": SimpleNamespace(flash_attn_varlen_func=varlen)}
    ):
        attends = attention(window, **more)
        out = attends(
            *(x.unsqueeze(1) for x in row), None, packed_seq_params=packing
        ).squeeze(1)
    assert out.shape == (total, HEADS * DIM) and out.isfinite().all(), (
        "also what fills the row up"
    )
    weights = torch.zeros(total, HEADS * DIM, dtype=torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    padded = torch.zeros(len(sequences), WIDTH, dtype=torch.int64)
    for number, tokens in enumerate(sequences):
        padded[number, : len(tokens)] = torch.tensor(tokens)
    if sequences:
        row_tokens = padded.flatten()[packing.source]
    seen: set[int] = set()
    for number, (tokens, length) in enumerate(zip(sequences, lengths, strict=True)):
        places = packing.places[number, :length]
        seen |= set(places.tolist())
        assert row_tokens[places].tolist() == tokens
        assert packing.positions[places].tolist() == list(range(length))
        alone = attends(*(x[places].unsqueeze(1) for x in row), None).squeeze(1)
        torch.testing.assert_close(out[places], alone, rtol=1e-10, atol=1e-10)
        factor = torch.randn(length, HEADS * DIM, dtype=torch.float64)
        weights[places] += factor
        expected = expected + (factor * alone).sum()
    if not lengths:
        return
    assert seen == set(range(real)), "every token is somebody's"
    of_row = torch.autograd.grad((out * weights).sum(), row)
    for mine, theirs in zip(of_row, torch.autograd.grad(expected, row), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_is_one_more_score_of_nothing(window: int | None) -> None:
    """As arXiv 2508.10925, section 2.2, says; and its gradient."""
    torch.manual_seed(0)
    q, k, v = (
        drawn(7, heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attends = attention(window, sinks=True)
    sinks = attends.softmax_offset
    assert sinks is not None
    found = attends(*(x.unsqueeze(1) for x in (q, k, v)), None).squeeze(1)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / DIM**0.5
    behind = torch.arange(7)[:, None] - torch.arange(7)
    scores = scores.masked_fill((behind < 0) | (behind >= (window or 7)), float("-inf"))
    beside = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, 7, 1)], dim=-1)
    expected = torch.einsum(
        "hqk,khd->qhd", beside.softmax(-1)[..., :-1], values
    ).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    of_found, of_expected = (
        torch.autograd.grad((x * factor).sum(), [q, k, v, sinks])
        for x in (found, expected)
    )
    for mine, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8])
def test_attention_within_chunks(chunk: int) -> None:
    """A query sees its own key and those before it in its chunk; and the gradient of that."""
    torch.manual_seed(0)
    q, k, v = (
        drawn(7, heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    found = attention(None, chunk=chunk)(*(x.unsqueeze(1) for x in (q, k, v)), None)
    chunks = torch.tensor([place // chunk for place in range(7)])
    seen = (chunks[:, None] == chunks) & torch.ones(7, 7, dtype=torch.bool).tril()
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / DIM**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
    torch.testing.assert_close(found.squeeze(1), expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(expected)
    of_found, of_expected = (
        torch.autograd.grad((x * factor).sum(), [q, k, v])
        for x in (found.squeeze(1), expected)
    )
    for mine, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_chunks_are_sequences_for_a_kernel_of_any_lengths() -> None:
    """Counted from a sample's first token, also where that is shared with another one."""
    tree = of_prompts([4, 4, 2], [0, 0, 1])
    packing = pack_varlen([7, 6, 3], tree, width=20, multiple_of=4, chunk=3)
    assert packing.cu_seqlens_q.tolist() == [0, 7, 9, 12]
    chunked = packing.chunked
    assert chunked is not None and chunked.keys is not None
    assert chunked.cu_seqlens_q.diff().tolist() == [3, 3, 1, 2, 3]
    assert chunked.cu_seqlens_kv.diff().tolist() == [3, 3, 1, 3, 3]
    assert chunked.keys.tolist() == [*range(7), 3, 7, 8, *range(9, 12)]
    assert (chunked.max_seqlen_q, chunked.max_seqlen_kv) == (3, 3)
    moved = packing.to(torch.device("meta")).chunked
    assert moved is not None and moved.cu_seqlens_q.device.type == "meta"
    pair = of_prompts([4, 4], [0, 0])
    assert pack_varlen([7, 6], pair, width=20, chunk=7).chunked is None


@pytest.mark.parametrize("window", [None, 3])
def test_a_soft_cap_in_blocks_of_queries(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three queries at a time, the last block shorter."""
    monkeypatch.setattr("megaverl.models.attention.LARGEST_SCORES", 3 * HEADS * 7)
    torch.manual_seed(0)
    q, k, v = (
        drawn(7, heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    attends = attention(window, softcap=0.5)
    found = attends(*(x.unsqueeze(1) for x in (q, k, v)), None).squeeze(1)
    behind = torch.arange(7)[:, None] - torch.arange(7)
    seen = (behind >= 0) & (behind < (window or 7))
    expected = capped_by_the_book(q, k, v, seen, DIM**-0.5, 0.5).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    factor = torch.randn_like(found)
    of_found, of_expected = (
        torch.autograd.grad((x * factor).sum(), [q, k, v]) for x in (found, expected)
    )
    for mine, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_own_parts_look_back_at_a_beginning_that_is_computed_once() -> None:
    tree = of_prompts([4, 4, 2, 3], [0, 0, 1, 2])
    packing = pack_varlen([7, 5, 3, 4], tree, width=20, multiple_of=8)
    assert len(packing.source) == 16  # 4 + 3 + 1, 3, 4, and one that fills up
    assert packing.cu_seqlens_q.tolist() == [0, 7, 8, 11, 15, 16]
    assert packing.cu_seqlens_kv.diff().tolist() == [7, 5, 3, 4, 1]
    assert (packing.max_seqlen_q, packing.max_seqlen_kv) == (7, 7), "on the host"
    assert packing.keys is not None
    assert packing.keys.tolist() == [*range(7), *range(4), 7, *range(8, 16)]
    unshared = pack_varlen([3, 4], of_prompts([2, 2], [0, 1]), width=20)
    assert (
        unshared.keys is None
        and unshared.cu_seqlens_kv.tolist()
        == unshared.cu_seqlens_q.tolist()
        == [0, 3, 7]
    )


def test_a_branch_of_a_branch_looks_back_at_both() -> None:
    """Two branches that part after six tokens, one that goes along for five, and one that is contained in all."""
    sequences = [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 9],
        [1, 2, 3, 4, 5],
        [1, 2],
    ]
    tree = tree_of(sequences, [0] * 4)
    packing = pack_varlen([len(tokens) for tokens in sequences], tree, width=8)
    assert tree.order == [3, 2, 1, 0] and tree.shared == [0, 2, 5, 6]
    assert packing.places.tolist() == [
        [0, 1, 2, 3, 4, 5, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 0],
        [0, 1, 2, 3, 4, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
    ]
    assert packing.cu_seqlens_q.diff().tolist() == [2, 3, 2, 2]
    assert packing.cu_seqlens_kv.diff().tolist() == [2, 5, 7, 8]


@settings(max_examples=200)
@given(
    laid=st.sampled_from([pack, pack_varlen]),
    samples=st.lists(
        st.tuples(
            st.integers(1, 5), st.lists(st.integers(0, 1), min_size=5, max_size=8)
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_a_place_predicts_for_one_sample_alone(
    laid: Pack, samples: list[tuple[int, list[int]]]
) -> None:
    """Whatever responses and prompts are equal: gradients of predictions are written, not added up."""
    prompts = torch.tensor([prompt for prompt, _ in samples])
    sequences = [tokens for _, tokens in samples]
    lengths = [len(tokens) for tokens in sequences]
    tree = PrefixTree.of_tokens(
        sequences, limits_of(prompts.tolist()), [0] * len(samples)
    )
    packing = laid(lengths, tree, width=8)
    padded = torch.tensor([tokens + [0] * (8 - len(tokens)) for tokens in sequences])
    tokens = padded.flatten()[packing.source].unsqueeze(0)
    responses = torch.tensor(lengths) - prompts
    micro = MicroBatch(
        torch.arange(len(samples)), tokens, prompts, responses, packing=packing
    )
    places = micro.predicting.position.tolist()
    assert len(set(places)) == len(places) == int(responses.sum())
    drawn_tokens = [token for prompt, tokens in samples for token in tokens[prompt:]]
    assert micro.targets.tolist() == drawn_tokens
    assert tokens[0, micro.last].tolist() == [tokens[-1] for tokens in sequences]


def test_flash_attention_packs_where_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(
        dtype: torch.dtype,
        head_dim: int = 64,
        *,
        latent: bool = False,
        softmax: str = "vanilla",
        softcap: float | None = None,
        chunk: int | None = None,
    ) -> Any:
        return SimpleNamespace(
            attention_softcap=softcap,
            attention_chunks=(None, chunk),
            params_dtype=dtype,
            kv_channels=head_dim,
            multi_latent_attention=latent,
            softmax_type=softmax,
        )

    assert build.packer(config(torch.bfloat16)) is pack, "there is no CUDA device"
    monkeypatch.setattr(flash_attention, "why_not", lambda: "")
    assert build.packer(config(torch.bfloat16)) is pack_varlen
    assert (
        build.packer(config(torch.float32))
        is build.packer(config(torch.bfloat16, 264))
        is pack
    )
    assert build.packer(config(torch.bfloat16, 36)) is pack
    assert build.packer(config(torch.bfloat16, latent=True)) is pack, (
        "its values have another head size"
    )
    assert build.packer(config(torch.bfloat16, softmax="learnable")) is pack, (
        "it has no sinks"
    )
    in_chunks_of_8 = build.packer(config(torch.bfloat16, chunk=8))
    assert in_chunks_of_8 is build.packer(config(torch.bfloat16, chunk=8))
    assert isinstance(in_chunks_of_8, partial)
    assert (in_chunks_of_8.func, in_chunks_of_8.keywords) == (pack_varlen, {"chunk": 8})
    assert build.packer(config(torch.float32, chunk=8)) is pack
    for version, packs in (("2.5.9", pack), ("2.6.0", pack_varlen)):
        module = SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        assert build.packer(config(torch.bfloat16, softcap=50.0)) is packs


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens_are_one_that_nobody_asks_for(lengths: list[int]) -> None:
    tree = PrefixTree.apart(len(lengths))
    packing = pack(lengths, tree, width=4, multiple_of=2)
    assert packing.source.tolist() == [0, 0] and packing.place.tolist() == [0, 0]
    segments = pack_varlen(lengths, tree, width=4, multiple_of=2)
    assert segments.source.tolist() == [0, 0] and segments.cu_seqlens_q.tolist() == [
        0,
        1,
        2,
    ]


def test_a_forward_pass_that_fails_leaves_no_positions() -> None:
    rotary, output = AtPositions(), torch.arange(5.0)
    positions = torch.tensor([3, 0, 0, 4])
    with pytest.raises(KeyError), rotary.at(positions):
        assert rotary(None, None, output).tolist() == [3.0, 0.0, 0.0, 4.0]
        raise KeyError("in the pass")
    assert rotary.positions is None and rotary(None, None, output) is output


def test_one_row_has_the_strides_of_a_tensor_made_so() -> None:
    transposed = torch.randn(1, 6, 4).transpose(0, 1)
    assert (
        transposed.is_contiguous()
        and transposed.stride() != torch.empty(6, 1, 4).stride()
    )
    row = as_one_row(None, None, transposed)
    assert (
        row.shape == (6, 1, 4)
        and row.stride() == torch.empty(6, 1, 4).stride()
        and torch.equal(row, transposed)
    )
    several = torch.randn(2, 6, 4).transpose(0, 1)
    assert as_one_row(None, None, several) is several


def test_a_beginning_is_computed_once_where_it_is_long() -> None:
    """Long: more than so many times a sequence's own part. A short one is attended from anew by the sequence."""
    own = 4
    for common, is_long in (
        (int(own * LONG_BEGINNING), False),
        (int(own * LONG_BEGINNING) + 1, True),
    ):
        tree = of_prompts([common] * 2, [5, 5])
        packing = pack([common + 2, common + own], tree, width=20)
        assert len(packing.source) == common + own + 2
        assert packing.places[1, common] == common + 2
        assert packing.later_offsets.tolist() == [common] * is_long
        assert list(packing.later_queries.shape) == ([1, own] if is_long else [0, 0])
        assert list(packing.later_keys.shape) == (
            [1, common + own] if is_long else [0, 0]
        )
        assert list(packing.wholes.shape) == (
            [1, common + 2] if is_long else [2, common + own]
        )
        assert packing.max_seqlen_q == packing.max_seqlen_kv == common + own
        assert packing.positions.tolist() == [
            *range(common + 2),
            *range(common, common + own),
        ]


@pytest.mark.parametrize("laid", [pack, pack_varlen])
def test_a_packing_moves_whole(laid: Pack) -> None:
    packing = laid([3, 4], of_prompts([2, 2], [0, 0]), width=6, multiple_of=4)
    moved = packing.to(torch.device("meta"))
    for name, held in vars(packing).items():
        found = getattr(moved, name)
        assert (
            found.device.type == "meta"
            if isinstance(held, torch.Tensor)
            else found == held
        ), name
    assert packing.source.device.type == "cpu"
