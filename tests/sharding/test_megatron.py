"""Megatron's layout: against its published rules written as reshapes, and against the real GPTModel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import GridError
from megaverl.models.architectures import weights_of
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_config import WITH_DELTA_NET
from megaverl.sharding.model_spec import ARCHITECTURES
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import WHOLE_IN_MEGATRON
from tests.launcher import Launcher
from tests.sharding.specs import (
    DENSE,
    ROUTED,
    element_ids,
    fill,
    make_experts,
    make_spec,
    separated,
    specs,
)

NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
# Names of norms over heads where they are not Qwen3's.
HEAD_NORMS = {"HunYuanDenseV1ForCausalLM": ("query_layernorm", "key_layernorm")}
NORMS_AFTER = ("post_self_attn_layernorm", "post_mlp_layernorm")
# Names of an MLP's projections where they are not Llama's.
UNGATED = {"Starcoder2ForCausalLM": ("mlp.c_fc", "mlp.c_proj")}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    tp = draw(st.sampled_from([1, 2, 4]))
    spec = draw(specs([tp], DENSE))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if spec.num_layers % n == 0]))
    padded = -(-spec.vocab_size // tp) * tp + tp * draw(st.integers(0, 3))
    return spec, GridShape(tp=tp, pp=pp, dp=draw(st.integers(1, 2))), padded


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_parameter_holds_what_megatron_would_cut(case: tuple[Any, ...]) -> None:
    """Build each fused parameter whole, as Megatron's converters do, and cut it: the layout says the same."""
    spec, shape, padded = case
    weights = weights_of(spec)
    ids = element_ids(weights)
    separate = separated(ids, spec)
    layers_per_stage = spec.num_layers // shape.pp
    layouts = megatron_layouts(weights, spec, shape, padded_vocab_size=padded)
    for rank in range(shape.world_size):
        coords = shape.coords(rank)
        tensors = fill(layouts(rank), ids)

        def rows(array: np.ndarray, tp: int = coords.tp) -> np.ndarray:
            return np.split(array, shape.tp, axis=0)[tp]

        for local in range(layers_per_stage):
            layer = f"model.layers.{coords.pp * layers_per_stage + local}."
            here = f"decoder.layers.{local}."
            for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
                q, k, v = (
                    separate[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"
                )
                groups = [
                    a.reshape(spec.num_kv_heads, -1, *a.shape[1:]) for a in (q, k, v)
                ]
                fused = np.concatenate(groups, axis=1).reshape(-1, *q.shape[1:])
                assert (
                    tensors.pop(f"{here}self_attention.linear_qkv.{kind}")
                    == rows(fused)
                ).all()
            up_name, down_name = UNGATED.get(
                spec.architecture, ("mlp.up_proj", "mlp.down_proj")
            )
            first = [rows(separate[f"{layer}{up_name}.weight"])]
            if spec.is_gated:
                first.insert(0, rows(separate[f"{layer}mlp.gate_proj.weight"]))
            assert (
                tensors.pop(f"{here}mlp.linear_fc1.weight") == np.concatenate(first)
            ).all()
            summed = {
                "self_attention.linear_proj": "self_attn.o_proj",
                "mlp.linear_fc2": down_name,
            }
            for theirs, name in summed.items():
                weight = ids[f"{layer}{name}.weight"]
                columns = np.split(weight, shape.tp, axis=1)[coords.tp]
                assert (tensors.pop(f"{here}{theirs}.weight") == columns).all()
                if spec.linear_bias:
                    bias = ids[f"{layer}{name}.bias"]
                    assert (tensors.pop(f"{here}{theirs}.bias") == bias).all()
            if spec.linear_bias:
                bias = rows(ids[f"{layer}{up_name}.bias"])
                assert (tensors.pop(f"{here}mlp.linear_fc1.bias") == bias).all()
            norms = dict(NORMS)
            if not spec.norms_before:
                norms = {}
            elif spec.parallel_layers:
                del norms["pre_mlp_layernorm"]
            elif spec.architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
                norms["pre_mlp_layernorm"] = "pre_feedforward_layernorm"
            if spec.qk_norm:
                theirs_of_heads = HEAD_NORMS.get(
                    spec.architecture, ("q_norm", "k_norm")
                )
                norms |= {
                    f"self_attention.{part}_layernorm": f"self_attn.{name}"
                    for part, name in zip("qk", theirs_of_heads, strict=True)
                }
            if spec.architecture == "Glm4ForCausalLM":
                norms |= dict(zip(NORMS_AFTER, NORMS_AFTER, strict=True))
            elif spec.norms_after:
                theirs_after = (
                    "post_attention_layernorm",
                    "post_feedforward_layernorm",
                )
                norms |= dict(zip(NORMS_AFTER, theirs_after, strict=True))
            kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
            for theirs, name in norms.items():
                for kind in kinds:
                    assert (
                        tensors.pop(f"{here}{theirs}.{kind}")
                        == ids[f"{layer}{name}.{kind}"]
                    ).all()

        def vocabulary(name: str) -> np.ndarray:
            return rows(np.pad(ids[name], ((0, padded - spec.vocab_size), (0, 0))))

        last = coords.pp == shape.pp - 1
        if coords.pp == 0:
            assert (
                tensors.pop("embedding.word_embeddings.weight")
                == vocabulary("model.embed_tokens.weight")
            ).all()
        if last:
            if spec.norm == "layer":
                bias = tensors.pop("decoder.final_layernorm.bias")
                assert (bias == ids["model.norm.bias"]).all()
            assert (
                tensors.pop("decoder.final_layernorm.weight")
                == ids["model.norm.weight"]
            ).all()
        if last and not spec.tie_embeddings:
            assert (
                tensors.pop("output_layer.weight") == vocabulary("lm_head.weight")
            ).all()
        if last and spec.tie_embeddings and shape.pp > 1:
            assert (
                tensors.pop("output_layer.weight")
                == vocabulary("model.embed_tokens.weight")
            ).all()
        assert not tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if name in WITH_DELTA_NET]
)
def test_rows_of_gated_delta_nets_and_output_gates(architecture: str, tp: int) -> None:
    """In Megatron by key heads and by groups of query heads; in vLLM part by part, or as in Qwen3-Next's files."""
    spec = make_spec(architecture)
    net = spec.delta_net
    assert net is not None and net.layers[:2] == (True, False)
    weights = weights_of(spec)
    ids = element_ids(weights)
    inside, attention = "model.layers.0.linear_attn.", "model.layers.1.self_attn."
    q, k, v = net.key_width, net.key_width, net.value_width

    def array(name: str) -> np.ndarray:
        return ids[f"{inside}{name}"]

    def by_head(*parts: np.ndarray) -> np.ndarray:
        """Rows of all parts of one key head after the other."""
        heads = [part.reshape(net.num_key_heads, -1, *part.shape[1:]) for part in parts]
        return np.concatenate(heads, axis=1).reshape(-1, *parts[0].shape[1:])

    taps = np.split(array("conv1d.weight"), [q, q + k])
    whole = {"conv1d.weight": by_head(*taps)}
    if architecture == "Qwen3NextForCausalLM":
        of_engine = {
            name: [array(name)] for name in ("in_proj_qkvz.weight", "in_proj_ba.weight")
        }
        whole |= {name: part for name, [part] in of_engine.items()}
    else:
        qkv = np.split(array("in_proj_qkv.weight"), [q, q + k])
        of_engine = {
            "in_proj_qkvz.weight": [*qkv, array("in_proj_z.weight")],
            "in_proj_ba.weight": [array(f"in_proj_{x}.weight") for x in "ba"],
        }
        whole |= {name: by_head(*parts) for name, parts in of_engine.items()}
    of_engine["conv1d.weight"] = taps
    gated = ids[f"{attention}q_proj.weight"]
    gated = gated.reshape(spec.num_kv_heads, -1, 2, spec.head_dim, spec.hidden_size)
    keys, values = (
        ids[f"{attention}{x}_proj.weight"].reshape(
            spec.num_kv_heads, -1, spec.hidden_size
        )
        for x in "kv"
    )
    groups = [
        gated[:, :, half].reshape(spec.num_kv_heads, -1, spec.hidden_size)
        for half in (0, 1)
    ]
    fused = np.concatenate([*groups, keys, values], axis=1)
    whole_qkv = fused.reshape(-1, spec.hidden_size)
    assert v == taps[2].shape[0]
    megatron = megatron_layouts(weights, spec, GridShape(tp=tp), padded_vocab_size=64)
    engine = vllm_layouts(weights, spec, tp)
    for rank in range(tp):
        tensors = fill(megatron(rank), ids)
        for name, rows in whole.items():
            local = f"decoder.layers.0.self_attention.{name}"
            assert (tensors[local] == np.split(rows, tp)[rank]).all(), name
        local = "decoder.layers.1.self_attention.linear_qkv.weight"
        assert (tensors[local] == np.split(whole_qkv, tp)[rank]).all()
        tensors = fill(engine(rank), ids)
        for name, parts in of_engine.items():
            rows = np.concatenate([np.split(part, tp)[rank] for part in parts])
            assert (tensors[f"{inside}{name}"] == rows).all(), name


@st.composite
def expert_cases(draw: st.DrawFn) -> tuple[Any, ...]:
    """Models with experts on grids with expert, expert-tensor and virtual parallelism, split unevenly."""
    tp = draw(st.sampled_from([1, 2, 4]))
    spec = draw(specs([4], ROUTED))
    ep = draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 6) if spec.moe.num_experts % n == 0])
    )
    etp = 1 if spec.linear_bias else draw(st.sampled_from([None, 1, 2, 4]))
    pp = draw(st.integers(1, 3))
    vpp = draw(st.sampled_from([None, 1, 2])) if pp > 1 else None
    # Whatever tp is, experts fit on the ranks of a stage.
    dp = (etp or tp) * ep * draw(st.integers(1, 2))
    shape = GridShape(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp, vpp=vpp)
    cuts = sorted(
        draw(st.integers(0, spec.num_layers)) for _ in range(pp * (vpp or 1) - 1)
    )
    split = [
        stop - start
        for start, stop in zip([0, *cuts], [*cuts, spec.num_layers], strict=True)
    ]
    return spec, shape, split, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(expert_cases())
def test_every_element_is_held_by_as_many_ranks_as_replicate_it(
    case: tuple[Any, ...],
) -> None:
    spec, shape, split, engine = case
    weights = weights_of(spec)
    layouts = megatron_layouts(
        weights,
        spec,
        shape,
        padded_vocab_size=160,
        layer_split=split,
        transformer_engine=engine,
    )
    held = {weight.name: np.zeros(weight.shape, dtype=int) for weight in weights}
    for rank in range(shape.world_size):
        for piece in layouts(rank).pieces:
            held[piece.tensor][piece.box.slices] += 1
    for weight in weights:
        copies = (
            shape.expert_dp
            if weight.expert is not None or weight.is_stacked
            else shape.dp
        )
        if weight.split in WHOLE_IN_MEGATRON:
            copies *= shape.tp
        if weight.megatron_tied and shape.pp * (shape.vpp or 1) > 1:
            copies *= 2
        assert (held[weight.name] == copies).all(), weight.name


@settings(max_examples=40, deadline=None)
@given(expert_cases())
def test_experts_are_those_that_megatron_would_cut(case: tuple[Any, ...]) -> None:
    spec, shape, split, engine = case
    weights = weights_of(spec)
    ids = element_ids(weights)
    layouts = megatron_layouts(
        weights,
        spec,
        shape,
        padded_vocab_size=160,
        layer_split=split,
        transformer_engine=engine,
    )
    block, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
    is_llama4 = spec.architecture == "Llama4ForCausalLM"
    if spec.architecture in ("MixtralForCausalLM", "MiniMaxM2ForCausalLM"):
        block, parts = "block_sparse_moe", ("w1", "w3", "w2")
    elif spec.architecture == "GraniteMoeForCausalLM":
        block = "block_sparse_moe"
    elif is_llama4:
        block = "feed_forward"
        ids |= _one_by_one(ids)
    starts = [0, *np.cumsum(split)]
    num_local = spec.moe.num_experts // shape.ep
    for rank in range(shape.world_size):
        at = shape.coords(rank)
        tensors = {
            name: array
            for name, array in fill(layouts(rank), ids).items()
            if ".mlp." in name
        }
        for chunk in range(shape.vpp or 1):
            stage = chunk * shape.pp + at.pp
            prefix = f"chunk{chunk}." if (shape.vpp or 1) > 1 else ""
            for layer in filter(
                spec.moe.is_in, range(starts[stage], starts[stage + 1])
            ):
                here = f"{prefix}decoder.layers.{layer - starts[stage]}.mlp."
                there = f"model.layers.{layer}.{block}."
                if spec.architecture == "GraniteMoeForCausalLM":
                    _pop_stacked_in_order(
                        tensors,
                        ids,
                        here,
                        there,
                        range(at.ep * num_local, (at.ep + 1) * num_local),
                        engine,
                        (shape.expert_tp, at.etp),
                    )
                    continue
                if spec.architecture == "GptOssForCausalLM":
                    _pop_stacked(
                        tensors,
                        ids,
                        here,
                        there,
                        range(at.ep * num_local, (at.ep + 1) * num_local),
                        engine,
                    )
                    continue
                for i in range(num_local):
                    gate, up, down = (
                        ids[f"{there}experts.{at.ep * num_local + i}.{part}.weight"]
                        for part in parts
                    )
                    gate, up = (
                        np.split(array, shape.expert_tp)[at.etp] for array in (gate, up)
                    )
                    names = [
                        f"experts.local_experts.{i}.linear_fc{n}.weight" for n in (1, 2)
                    ]
                    if engine:
                        names = [f"experts.linear_fc{n}.weight{i}" for n in (1, 2)]
                    assert (
                        tensors.pop(here + names[0]) == np.concatenate([gate, up])
                    ).all()
                    assert (
                        tensors.pop(here + names[1])
                        == np.split(down, shape.expert_tp, axis=1)[at.etp]
                    ).all()
                router = ids[there + ("router" if is_llama4 else "gate") + ".weight"]
                assert (tensors.pop(here + "router.weight") == router).all()
                if spec.moe.shared_ffn_hidden_size:
                    is_one = spec.moe.shared_gate or is_llama4
                    name = "shared_expert" if is_one else "shared_experts"
                    shared = [ids[f"{there}{name}.{part}.weight"] for part in parts]
                    gate, up = (
                        np.split(array, shape.tp)[at.tp] for array in shared[:2]
                    )
                    assert (
                        tensors.pop(here + "shared_experts.linear_fc1.weight")
                        == np.concatenate([gate, up])
                    ).all()
                    down = np.split(shared[2], shape.tp, axis=1)[at.tp]
                    assert (
                        tensors.pop(here + "shared_experts.linear_fc2.weight") == down
                    ).all()
                if spec.moe.shared_gate:
                    gate = ids[there + "shared_expert_gate.weight"]
                    assert (
                        tensors.pop(here + "shared_experts.gate_weight") == gate
                    ).all()
                if spec.moe.router_bias:
                    bias = "gate.e_score_correction_bias"
                    if spec.architecture == "MiniMaxM2ForCausalLM":
                        bias = "e_score_correction_bias"
                    elif spec.architecture == "Ernie4_5_MoeForCausalLM":
                        bias = "moe_statics.e_score_correction_bias"
                    elif spec.architecture == "BailingMoeV2ForCausalLM":
                        bias = "gate.expert_bias"
                    assert (
                        tensors.pop(here + "router.expert_bias") == ids[there + bias]
                    ).all()
        assert not [name for name in tensors if "expert" in name or "router" in name]


def _pop_stacked_in_order(
    tensors: dict[str, np.ndarray],
    ids: dict[str, np.ndarray],
    here: str,
    there: str,
    held: range,
    engine: bool,
    part: tuple[int, int],
) -> None:
    """Granite MoE's: two arrays of all experts, of which each is cut by `part` (ranks, this rank)."""
    ranks, rank = part
    for i, expert in enumerate(held):
        gate, up = np.split(ids[f"{there}input_linear.weight"][expert], 2)
        gate, up = (np.split(array, ranks)[rank] for array in (gate, up))
        down = ids[f"{there}output_linear.weight"][expert]
        down = np.split(down, ranks, axis=1)[rank]
        names = [f"experts.local_experts.{i}.linear_fc{n}.weight" for n in (1, 2)]
        if engine:
            names = [f"experts.linear_fc{n}.weight{i}" for n in (1, 2)]
        assert (tensors.pop(here + names[0]) == np.concatenate([gate, up])).all()
        assert (tensors.pop(here + names[1]) == down).all()
    router = ids[f"{there}router.layer.weight"]
    assert (tensors.pop(f"{here}router.weight") == router).all()


def _one_by_one(ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The matrices of Llama 4's experts, `[out, in]`, under the names that other models' files have."""
    matrices = {}
    for name, array in ids.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            continue
        parts = {"down_proj": ("down",), "gate_up_proj": ("gate", "up")}[kind]
        for number, expert in enumerate(array):
            for part, columns in zip(
                parts, np.split(expert, len(parts), axis=1), strict=True
            ):
                matrices[f"{stem}.{number}.{part}_proj.weight"] = columns.T
    return matrices


def _pop_stacked(
    tensors: dict[str, np.ndarray],
    ids: dict[str, np.ndarray],
    here: str,
    there: str,
    held: range,
    engine: bool,
) -> None:
    """gpt-oss's: one array of all experts, each transposed."""
    for i, expert in enumerate(held):
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            for kind, array in (("weight", name), ("bias", f"{name}_bias")):
                local = f"experts.local_experts.{i}.linear_fc{number}.{kind}"
                local = f"experts.linear_fc{number}.{kind}{i}" if engine else local
                assert (
                    tensors.pop(here + local)
                    == ids[f"{there}experts.{array}"][expert].T
                ).all()
    for kind in ("weight", "bias"):
        assert (
            tensors.pop(f"{here}router.{kind}") == ids[f"{there}router.{kind}"]
        ).all()


def test_ranks_that_hold_the_same_share_one_layout() -> None:
    spec = make_spec("Qwen3MoeForCausalLM")
    shape = GridShape(tp=2, pp=2, dp=4, ep=2, etp=1)
    layouts = megatron_layouts(weights_of(spec), spec, shape, padded_vocab_size=64)
    same: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(shape.world_size):
        at = shape.coords(rank)
        same.setdefault(id(layouts(rank)), set()).add((at.pp, at.tp, at.ep, at.etp))
    assert all(len(places) == 1 for places in same.values())
    assert len(same) == len(set.union(*same.values()))


def layer_numbers(
    shape: GridShape, rank: int, layer_split: list[int] | None
) -> dict[str, list[int]]:
    spec = make_spec(num_layers=8)
    layout = megatron_layouts(
        weights_of(spec), spec, shape, padded_vocab_size=64, layer_split=layer_split
    )(rank)
    found: dict[str, list[int]] = {}
    for piece in layout.pieces:
        if piece.tensor.endswith("down_proj.weight"):
            prefix, number = piece.local.split("decoder.layers.")
            numbers = found.setdefault(prefix, [])
            assert int(number.split(".")[0]) == len(numbers), (
                "local layer numbers count from zero"
            )
            numbers.append(int(piece.tensor.split(".")[2]))
    return found


def test_uneven_stages() -> None:
    shape = GridShape(pp=3)
    assert [layer_numbers(shape, rank, [2, 3, 3]) for rank in range(3)] == [
        {"": [0, 1]},
        {"": [2, 3, 4]},
        {"": [5, 6, 7]},
    ]


def test_virtual_stages_go_round_the_pipeline() -> None:
    """megatron-core: stage 0 holds [0, 1] and [4, 5] of 8 layers with pp 2 and vpp 2."""
    shape = GridShape(pp=2, vpp=2)
    assert layer_numbers(shape, 0, None) == {"chunk0.": [0, 1], "chunk1.": [4, 5]}
    assert layer_numbers(shape, 1, None) == {"chunk0.": [2, 3], "chunk1.": [6, 7]}


def test_transformer_engine_keeps_the_norms_in_the_linear_layers() -> None:
    spec = make_spec()
    layout = megatron_layouts(
        weights_of(spec),
        spec,
        GridShape(),
        padded_vocab_size=64,
        transformer_engine=True,
    )(0)
    holders = {piece.tensor: piece.local for piece in layout.pieces}
    assert (
        holders["model.layers.1.input_layernorm.weight"]
        == "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    )
    assert (
        holders["model.layers.1.post_attention_layernorm.weight"]
        == "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    )


def test_a_critic_has_a_value_head_and_nothing_tied() -> None:
    spec = make_spec(tie_embeddings=True)
    weights = weights_of(spec, value_head=True)
    layout = megatron_layouts(
        weights, spec, GridShape(tp=2, pp=2), padded_vocab_size=64
    )(3)
    assert layout.local_shapes["output_layer.weight"] == (1, spec.hidden_size)
    assert [p.tensor for p in layout.pieces if p.local == "output_layer.weight"] == [
        "score.weight"
    ]


@pytest.mark.parametrize(
    ("changes", "shape", "padded", "message"),
    [
        (
            {"num_heads": 3, "num_kv_heads": 3},
            GridShape(tp=2),
            64,
            "tp=2 does not divide the model's 3 attention heads and 3 key-value heads. Sizes",
        ),
        (
            {"ffn_hidden_size": 15},
            GridShape(tp=2),
            64,
            "tp=2 does not divide the model's 15 feed-forward units. Sizes that fit: 1.",
        ),
        ({}, GridShape(tp=4), 54, "padded vocabulary 54 must be a multiple of tp 4"),
        ({}, GridShape(), 48, "at least 50"),
        (
            {"num_layers": 3},
            GridShape(pp=2),
            64,
            "3 layers cannot be divided evenly over 2 pipeline stages",
        ),
        (
            {"architecture": "Qwen3MoeForCausalLM"},
            GridShape(dp=3, ep=3),
            64,
            "ep=3 does not divide the model's 4 experts. Sizes that fit: 1, 2, 4.",
        ),
        (
            {"architecture": "MixtralForCausalLM"},
            GridShape(dp=3, etp=3),
            64,
            "etp=3 does not divide the model's 8 units of an expert. Sizes that fit: 1, 2, 4, 8.",
        ),
        (
            {"architecture": "DeepseekV3ForCausalLM", "num_heads": 6},
            GridShape(tp=4),
            64,
            "6 attention heads",
        ),
        # the fused rows are cut evenly, also where neighbours share a key-value head
        (
            {"num_kv_heads": 1, "head_dim": 1},
            GridShape(tp=4),
            64,
            "tp=4 does not divide the model's 1 key-value heads",
        ),
        (
            {"num_heads": 6, "head_dim": 1, "ffn_hidden_size": 6},
            GridShape(tp=6),
            66,
            "tp=6 does not divide the model's 2 key-value heads",
        ),
    ],
)
def test_what_the_grid_does_not_divide_is_named(
    changes: dict[str, Any], shape: GridShape, padded: int, message: str
) -> None:
    spec = make_spec(**changes)
    with pytest.raises(GridError, match=message):
        megatron_layouts(weights_of(spec), spec, shape, padded_vocab_size=padded)(0)


def test_what_heads_do_not_divide_experts_may() -> None:
    """etp cuts the experts alone: three ranks share 9 rows, beside 4 heads that no one cuts."""
    spec = make_spec("MixtralForCausalLM", moe=make_experts("MixtralForCausalLM", 4, 9))
    weights = weights_of(spec)
    for rank in range(3):
        layout = megatron_layouts(
            weights, spec, GridShape(dp=3, etp=3), padded_vocab_size=64
        )(rank)
        assert layout.local_shapes[
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
        ] == (6, 8)
        assert layout.local_shapes[
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"
        ] == (8, 3)
        assert layout.local_shapes[
            "decoder.layers.0.self_attention.linear_proj.weight"
        ] == (8, 8)


def test_all_that_the_grid_does_not_divide_is_named_at_once() -> None:
    spec = make_spec(
        "DeepseekV3ForCausalLM",
        num_heads=3,
        moe=make_experts("DeepseekV3ForCausalLM", 3, 7),
    )
    with pytest.raises(GridError) as caught:
        megatron_layouts(
            weights_of(spec), spec, GridShape(tp=2, dp=4, ep=2), padded_vocab_size=51
        )(0)
    for said in (
        "3 attention heads",
        "7 units of an expert",
        "3 experts",
        "vocabulary 51 must be a multiple of tp 2",
    ):
        assert said in str(caught.value)


def test_a_wrong_layer_split_is_named() -> None:
    spec = make_spec()
    with pytest.raises(GridError, match="sum to 4 layers"):
        megatron_layouts(
            weights_of(spec),
            spec,
            GridShape(pp=2),
            padded_vocab_size=64,
            layer_split=[2, 3],
        )(0)


@pytest.mark.parametrize(
    ("num_ranks", "grid"),
    [
        (1, {}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"tp": 4}),
        (4, {"tp": 2, "pp": 2, "vpp": 2}),
        (4, {"tp": 2, "dp": 2, "ep": 2}),
        (4, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}),
        (4, {"dp": 4, "ep": 2, "etp": 2}),
    ],
)
def test_the_real_model_has_these_parameters(
    launch: Launcher, num_ranks: int, grid: dict[str, int]
) -> None:
    """Names and shapes of GPTModel's own parameters, on every rank of a real grid."""
    variants = [
        {"architecture": architecture, "tie_embeddings": tied, "value_head": head}
        for architecture in (ROUTED if "ep" in grid else ARCHITECTURES)
        for tied, head in ((False, False), (True, False), (True, True))
        # experts with biases are not cut
        if architecture != "GptOssForCausalLM"
        or grid.get("etp", grid.get("tp", 1)) == 1
        # embeddings and heads are alike in all architectures
        if not tied or architecture in ("Qwen2ForCausalLM", "Qwen3MoeForCausalLM")
    ]
    results = launch.world(
        num_ranks,
        "tests.sharding.ranks:compare_with_gpt_model",
        grid=grid,
        variants=variants,
    )
    for rank, differences in enumerate(results):
        found = [
            (variant, wrong)
            for variant, wrong in zip(variants, differences, strict=True)
            if wrong
        ]
        assert found == [], f"rank {rank}"
