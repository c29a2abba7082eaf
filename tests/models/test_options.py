"""From a model's dimensions to megatron-core's configuration, and what it cannot be cut into."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError
from megaverl.models import options
from megaverl.models.options import (
    CPU_OPTIONS,
    check_divides,
    fused_options,
    padded_vocab_size,
    rope_options,
    token_multiple,
    transformer_config,
    yarn_options,
)
from megaverl.platform import Platform, platform
from megaverl.sharding.model_config import yarn_attention_factor
from megaverl.sharding.model_spec import ModelSpec
from tests.sharding.specs import make_spec

platform.adapt_megatron()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_the_padded_vocabulary_is_the_next_multiple(
    vocab_size: int, tp_size: int
) -> None:
    padded = padded_vocab_size(vocab_size, tp_size)
    assert padded >= vocab_size
    assert padded % 64 == 0 and padded % tp_size == 0
    smaller = [
        size
        for size in range(vocab_size, padded)
        if size % 64 == 0 and size % tp_size == 0
    ]
    assert smaller == []


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"),
    [(64, 1, 64), (65, 2, 128), (151936, 8, 151936), (100, 3, 192)],
)
def test_examples_of_padding(vocab_size: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tp) == padded


@pytest.mark.parametrize(
    ("fp8", "recipe", "sequence_parallel", "shape", "multiple"),
    [
        (None, None, False, {"tp": 2}, 1),
        (None, None, True, {"tp": 2}, 2),
        ("hybrid", "tensorwise", False, {"tp": 2}, 16),
        ("hybrid", "tensorwise", True, {"tp": 4}, 64),
        ("e4m3", "mxfp8", True, {"tp": 2, "cp": 2}, 128),
    ],
)
def test_rows_are_as_long_as_kernels_in_8_bits_want(
    fp8: str | None,
    recipe: str | None,
    sequence_parallel: bool,
    shape: dict[str, int],
    multiple: int,
) -> None:
    config: Any = SimpleNamespace(
        fp8=fp8, fp8_recipe=recipe, sequence_parallel=sequence_parallel
    )
    assert token_multiple(config, GridShape(**shape)) == multiple


def test_8_bits_are_refused_where_no_kernel_is() -> None:
    with pytest.raises(
        ModelError,
        match=r"megatron\.fp8=hybrid needs .* needs a GPU and is not here. Leave it out",
    ):
        transformer_config(make_spec(), GridShape(), torch.float32, {"fp8": "hybrid"})


def test_what_tp_and_pp_do_not_divide_comes_at_once() -> None:
    spec = replace(
        make_spec(), num_heads=12, num_kv_heads=6, ffn_hidden_size=96, num_layers=4
    )
    check_divides(spec, GridShape(tp=6, pp=4), "actor")
    with pytest.raises(ModelError) as caught:
        check_divides(spec, GridShape(tp=4, pp=8), "critic")
    assert str(caught.value).splitlines() == [
        "critic.tp=4 does not divide the model's 6 key-value heads. Sizes that fit: 1, 2, 3, 6, 12.",
        "critic.pp=8 x vpp=1 is more than the 4 layers",
    ]


@given(st.integers(1, 24), st.integers(1, 12), st.integers(1, 48))
def test_every_tp_that_is_offered_fits(
    kv_heads: int, heads_per_kv: int, ffn: int
) -> None:
    spec = replace(
        make_spec(),
        num_heads=kv_heads * heads_per_kv,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
    )
    with pytest.raises(ModelError) as caught:
        check_divides(spec, GridShape(tp=289), "actor")  # 17 * 17 divides none of them
    for line in str(caught.value).splitlines():
        offered = [
            int(size)
            for size in line.split("Sizes that fit: ")[1].rstrip(".").split(", ")
        ]
        assert 1 in offered
        for size in offered:
            check_divides(spec, GridShape(tp=size), "actor")


def test_virtual_stages_need_layers() -> None:
    spec = replace(make_spec(), num_layers=6)
    check_divides(spec, GridShape(pp=2, vpp=3), "actor")
    with pytest.raises(
        ModelError, match=r"actor\.pp=2 x vpp=4 is more than the 6 layers"
    ):
        check_divides(spec, GridShape(pp=2, vpp=4), "actor")


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, {}),
        ({"rope_type": "linear", "factor": 2}, {"seq_len_interpolation_factor": 2.0}),
        # `build_model` scales these frequencies.
        (LLAMA3, {}),
        ({"rope_type": "yarn", "factor": 4.0}, {"position_embedding_type": "yarn"}),
    ],
)
def test_rotary_embeddings(
    scaling: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    spec = replace(make_spec(), rope_theta=5e5, rope_scaling=scaling)
    assert (
        rope_options(spec)
        == {"position_embedding_type": "rope", "rotary_base": 5e5} | expected
    )


def test_yarns_attention_factor_is_megatron_cores() -> None:
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        _yarn_get_concentration_factor,
    )

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for keys in (
        {},
        {"attention_factor": 0.7},
        {"mscale": 0.7},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
    ):
        options = yarn_options(replace(make_spec(), rope_scaling=yarn | keys))
        found = _yarn_get_concentration_factor(
            4.0, options["yarn_mscale"], options["yarn_mscale_all_dim"]
        )
        assert found == pytest.approx(yarn_attention_factor(yarn | keys), rel=1e-12)


def test_the_configuration_says_what_the_model_is() -> None:
    spec = replace(make_spec("Qwen3ForCausalLM"), head_dim=16, norm_eps=3e-6)
    config = transformer_config(spec, GridShape(tp=2, pp=2, dp=1), torch.bfloat16)
    assert (config.kv_channels, config.layernorm_epsilon, config.normalization) == (
        16,
        3e-6,
        "RMSNorm",
    )
    assert config.num_query_groups == spec.num_kv_heads
    assert (
        config.qk_layernorm and not config.add_qkv_bias and not config.add_bias_linear
    )
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (
        2,
        2,
    )
    assert config.bf16 and config.params_dtype is torch.bfloat16
    assert config.calculate_per_token_loss, (
        "losses come normalised: gradients are summed"
    )
    if not platform.is_cuda:
        assert all(
            getattr(config, name) == value for name, value in CPU_OPTIONS.items()
        )


def test_the_users_fields_win_but_not_over_the_grid() -> None:
    given_fields = {"attention_dropout": 0.25, "tensor_model_parallel_size": 7}
    config = transformer_config(
        make_spec(), GridShape(tp=2), torch.float32, given_fields
    )
    assert config.attention_dropout == 0.25
    assert config.tensor_model_parallel_size == 2


def test_what_only_an_attention_without_a_soft_cap_has_is_refused() -> None:
    spec = make_spec("Gemma2ForCausalLM")
    config = transformer_config(
        spec, GridShape(), torch.float32, {"window_size": [3, 0]}
    )
    assert config.attention_softcap == spec.attention_softcap
    refused: list[dict[str, Any]] = [
        {"attention_dropout": 0.1},
        {"window_size": [3, 3]},
    ]
    for overrides in refused:
        (key,) = overrides
        with pytest.raises(ModelError, match=f"megatron.{key}: this model caps"):
            transformer_config(spec, GridShape(), torch.float32, overrides)


def test_what_megatron_core_refuses_is_passed_on() -> None:
    refused = {
        "recompute_granularity": "full",
        "recompute_method": "sideways",
        "recompute_num_layers": 1,
    }
    with pytest.raises(
        ModelError, match=r"TransformerConfig refuses these options: .*sideways"
    ):
        transformer_config(make_spec(), GridShape(), torch.float32, refused)


@pytest.mark.parametrize(
    "field",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        {"offload_modules": ["attn_norm"]},
    ],
)
def test_a_norm_that_attention_and_mlp_share_is_kept(
    field: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_check_needs", lambda overrides: None)
    with pytest.raises(ModelError, match="read the same norm's output"):
        transformer_config(
            make_spec("Cohere2ForCausalLM"), GridShape(), torch.float32, field
        )


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"fp8": "hybrid"}, "layers with a state are multiplied in model.dtype"),
        ({"attention_dropout": 0.1}, "trained without dropout only"),
        ({"hetereogenous_dist_checkpoint": False}, "cannot store in one array"),
    ],
)
def test_what_mamba_layers_do_not_follow_is_refused(
    field: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "_check_needs", lambda overrides: None)
    spec = make_spec("NemotronHForCausalLM")
    with pytest.raises(ModelError, match=said):
        transformer_config(spec, GridShape(), torch.float32, field)


def test_a_fused_router_that_would_leave_the_bias_out_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "_check_needs", lambda overrides: None)
    with pytest.raises(ModelError, match="adds a bias to softmax scores"):
        transformer_config(
            make_spec("Ernie4_5_MoeForCausalLM"),
            GridShape(),
            torch.float32,
            {"moe_router_fusion": True},
        )


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("spec", "overrides", "off"),
    [
        (make_spec(), {}, set()),
        (replace(make_spec(), activation="gelu_tanh"), {}, {"bias_activation_fusion"}),
        (make_spec(), {"use_te_activation_func": True}, {"bias_activation_fusion"}),
        (
            replace(make_spec(), activation="clamped_swiglu", linear_bias=True),
            {},
            {"bias_dropout_fusion"},
        ),
        (replace(make_spec(), rope_scaling=YARN), {}, {"apply_rope_fusion"}),
        (replace(make_spec(), rope_axes=(0,)), {}, {"apply_rope_fusion"}),
        (
            replace(make_spec(), rope_scaling=YARN | {"attention_factor": 1.0}),
            {},
            set(),
        ),
    ],
)
def test_what_a_model_allows_is_fused_on_a_gpu(
    spec: ModelSpec,
    overrides: dict[str, Any],
    off: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "platform", Platform(is_cuda=True))
    monkeypatch.setattr(options, "uses_transformer_engine", lambda: True)
    found = fused_options(spec, overrides)
    assert {name for name, value in found.items() if not value} == off and len(
        found
    ) == 3
    monkeypatch.setattr(options, "uses_transformer_engine", lambda: False)
    # As where its layers are there.
    monkeypatch.setattr(options, "_check_needs", lambda overrides: None)
    config = transformer_config(spec, GridShape(), torch.bfloat16, overrides)
    expected = found | {"apply_rope_fusion": False}
    assert {name: getattr(config, name) for name in found} == expected, (
        "its kernel is Transformer Engine's"
    )
    plain = transformer_config(
        spec, GridShape(), torch.bfloat16, overrides | {"bias_dropout_fusion": False}
    )
    assert plain.bias_dropout_fusion is False, "what is given wins"


def test_a_fused_rotary_embedding_with_one_table_is_refused_for_images() -> None:
    spec = replace(make_spec(), rope_axes=(0,))
    with pytest.raises(ModelError, match="takes one table for all. Leave the key out"):
        transformer_config(
            spec, GridShape(), torch.float32, {"apply_rope_fusion": True}
        )


def test_a_fused_rotary_embedding_that_leaves_out_yarns_factor_is_refused() -> None:
    """megatron-core hands Transformer Engine's kernel for packed rows no factor: logits would be others."""
    spec = replace(make_spec(), rope_scaling=YARN)
    with pytest.raises(
        ModelError,
        match=r"apply_rope_fusion=true: YaRN multiplies .* by 1\.347, .* Leave the key out",
    ):
        transformer_config(
            spec, GridShape(), torch.float32, {"apply_rope_fusion": True}
        )
    source = inspect.getsource(rope_utils.apply_rotary_pos_emb)
    packed = source[source.index("return fused_apply_rotary_pos_emb_thd(") :]
    assert "mscale" not in packed[: packed.index(")\n    #")], (
        "it takes the factor now: the refusal can go"
    )


def test_a_sequence_that_is_split_over_one_rank_is_whole() -> None:
    """A reference with a smaller grid inherits the actor's fields."""
    fields = {"sequence_parallel": True}
    assert not transformer_config(
        make_spec(), GridShape(), torch.float32, fields
    ).sequence_parallel
    assert transformer_config(
        make_spec(), GridShape(tp=2), torch.float32, fields
    ).sequence_parallel
