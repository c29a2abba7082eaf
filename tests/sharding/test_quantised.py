"""Which weights of an engine are quantised, and the parts in which they land."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.models.architectures import weights_of
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import (
    held_bytes,
    landing_parts,
    matrices,
    quantised_tensors,
    vllm_layouts,
)
from tests.sharding.specs import PLAIN, make_spec, specs


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1, 2, 4]).flatmap(
        lambda tp: st.tuples(st.just(tp), specs([tp], PLAIN))
    ),
    st.integers(1, 2000),
    st.booleans(),
)
def test_parts_hold_every_matrix_once_and_whole(
    case: tuple[int, ModelSpec], most: int, expert_parallel: bool
) -> None:
    tp, spec = case
    expert_parallel &= spec.moe is not None and spec.moe.num_experts >= tp
    weights = weights_of(spec)
    layout_of = vllm_layouts(
        weights, spec, tp, expert_parallel=expert_parallel, quantization="fp8_per_block"
    )
    layouts = [layout_of(rank) for rank in range(tp)]
    parts = landing_parts(layouts, most)
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(
        w.name for w in weights if w.vllm in quantised_tensors(weights)
    )
    for layout in layouts:
        held = matrices(layout)
        assert sum(held.values()) == sum(
            prod(layout.local_shapes[name]) for name in layout.quantised
        )
        for part in parts:
            mine = [numel for tensors, numel in held.items() if tensors & part]
            assert all(tensors <= part for tensors in held if tensors & part)
            assert sum(mine) <= most or len(mine) == 1


def test_ranks_with_experts_of_their_own_fill_parts_together() -> None:
    spec = make_spec("Qwen3MoeForCausalLM")
    layout_of = vllm_layouts(
        weights_of(spec), spec, 4, expert_parallel=True, quantization="fp8_per_tensor"
    )
    layouts = [layout_of(rank) for rank in range(4)]
    # of each rank's one expert a layer one matrix a part: as many parts as a rank has
    # matrices, not all ranks together
    assert len(landing_parts(layouts, 1)) == max(
        len(matrices(layout)) for layout in layouts
    )
    one = layouts[0]
    quantised = sum(prod(one.local_shapes[name]) for name in one.quantised)
    rest = sum(
        prod(shape)
        for name, shape in one.local_shapes.items()
        if name not in one.quantised
    )
    assert held_bytes(one, 2) == 2 * rest + quantised + 4 * len(matrices(one))


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_embeddings_norms_and_routers_stay(architecture: str) -> None:
    spec = make_spec(architecture)
    weights = weights_of(spec)
    stay = {w.vllm for w in weights} - quantised_tensors(weights).keys()
    matrices_that_stay = {
        w.vllm for w in weights if w.vllm in stay and len(w.shape) == 2
    }
    routers = {
        f"model.layers.{i}.mlp.gate.weight"
        for i in range(4)
        if spec.moe and i >= spec.moe.num_dense_layers
    }
    assert matrices_that_stay == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        *routers,
    }
