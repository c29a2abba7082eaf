"""What tensor and expert parallelism cut into equal parts, and the sizes that are offered instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import (
    ModelSpec,
    misfits,
    shares_kv_heads,
)
from megaverl.sharding.vllm import vllm_layouts
from tests.sharding.specs import make_experts, make_spec


@given(
    kv_heads=st.integers(1, 6),
    heads_each=st.integers(1, 6),
    head_dim=st.integers(1, 8),
    ffn=st.integers(1, 24),
    tp=st.integers(1, 12),
)
def test_offered_sizes_are_those_that_fit_and_layouts_are_made_of_them(
    kv_heads: int, heads_each: int, head_dim: int, ffn: int, tp: int
) -> None:
    sizes = {
        "num_heads": kv_heads * heads_each,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    spec = make_spec(
        "LlamaForCausalLM", ffn_hidden_size=ffn, num_layers=1, vocab_size=27720, **sizes
    )
    found = misfits(spec, tp=tp)
    if found:
        [misfit] = found
        assert tp not in misfit.fitting and 1 in misfit.fitting
        assert misfit.fitting == [
            size for size in range(1, spec.num_heads + 1) if not misfits(spec, tp=size)
        ]
    else:
        layout_of = megatron_layouts(
            weights_of(spec), spec, GridShape(tp=tp), padded_vocab_size=27720
        )
        rows = sum(
            layout_of(rank).local_shapes[
                "decoder.layers.0.self_attention.linear_qkv.weight"
            ][0]
            for rank in range(tp)
        )
        assert rows == (spec.num_heads + 2 * kv_heads) * head_dim, (
            "each row is on one rank"
        )


def test_a_key_value_head_may_be_several_ranks() -> None:
    spec = make_spec("LlamaForCausalLM", num_heads=8, num_kv_heads=2)
    assert [size for size in range(1, 9) if not misfits(spec, tp=size)] == [1, 2, 4, 8]
    assert [shares_kv_heads(spec, size) for size in (1, 2, 4, 8)] == [
        False,
        False,
        True,
        True,
    ]
    layout = vllm_layouts(weights_of(spec), spec, 8)(7)
    assert (
        layout.local_shapes["model.layers.0.self_attn.qkv_proj.weight"][0]
        == 3 * spec.head_dim
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp": 4}, []),
        (
            {"tp": 1, "etp": 3},
            [
                "etp=3 does not divide the model's 8 units of an expert. Sizes that fit: 1, 2, 4, 8."
            ],
        ),
        (
            {"tp": 2, "ep": 3},
            ["ep=3 does not divide the model's 4 experts. Sizes that fit: 1, 2, 4."],
        ),
        (
            {"tp": 3},
            [
                "tp=3 does not divide the model's 4 attention heads and 16 feed-forward units and 16 units of the "
                "shared experts. Sizes that fit: 1, 2, 4."
            ],
        ),
    ],
)
def test_all_of_a_model_with_experts_and_latent_attention(
    sizes: dict[str, int], expected: list[str]
) -> None:
    architecture = "DeepseekV3ForCausalLM"
    spec: ModelSpec = make_spec(architecture, moe=make_experts(architecture))
    assert [str(misfit) for misfit in misfits(spec, **sizes)] == expected
