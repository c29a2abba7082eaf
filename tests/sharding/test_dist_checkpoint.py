"""The layout of a distributed checkpoint: the arrays of a model without parallelism, stacked as its keys say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.sharding.megatron import (
    checkpoint_layout,
    megatron_layouts,
    stores_each_layer,
)
from megaverl.sharding.model_spec import ModelSpec
from tests.sharding.specs import element_ids, fill, make_spec

PADDED = 64
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def arrays(spec: ModelSpec, **options: Any) -> dict[str, np.ndarray]:
    weights = weights_of(spec)
    return fill(
        checkpoint_layout(weights, spec, padded_vocab_size=PADDED, **options),
        element_ids(weights),
    )


def alone(spec: ModelSpec) -> dict[str, np.ndarray]:
    """The same elements, parameter by parameter."""
    weights = weights_of(spec)
    return fill(
        megatron_layouts(weights, spec, GridShape(), padded_vocab_size=PADDED)(0),
        element_ids(weights),
    )


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
)
@pytest.mark.parametrize("engine", [True, False])
def test_layers_of_one_kind_are_stacked(architecture: str, engine: bool) -> None:
    spec = make_spec(architecture)
    assert not stores_each_layer(spec)
    found, expected = arrays(spec, transformer_engine=engine), alone(spec)
    for name, array in expected.items():
        if not name.startswith("decoder.layers."):
            assert (found.pop(name) == array).all()
    for name in [
        name.removeprefix("decoder.layers.0.")
        for name in expected
        if name.startswith("decoder.layers.0.")
    ]:
        stacked = np.stack(
            [
                expected[f"decoder.layers.{layer}.{name}"]
                for layer in range(spec.num_layers)
            ]
        )
        assert (
            found.pop(f"decoder.layers.{NORMS.get(name, name)}") == stacked
        ).all(), name
    assert not found


def test_with_experts_each_layer_has_keys_of_its_own_and_experts_are_stacked() -> None:
    spec = make_spec("DeepseekV3ForCausalLM")
    assert stores_each_layer(spec) and spec.moe is not None
    found, expected = arrays(spec, transformer_engine=False), alone(spec)
    assert (
        found["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape[0]
        == spec.moe.num_experts
    )
    for name, array in expected.items():
        before, _, after = name.partition("mlp.experts.local_experts.")
        if after:
            expert, _, rest = after.partition(".")
            held = found[f"{before}mlp.experts.experts.{rest}"][int(expert)]
        else:
            held = found.pop(name)
        assert (held == array).all(), name
    left = {name.partition(".mlp.")[2] for name in found}
    assert left == {
        "experts.experts.linear_fc1.weight",
        "experts.experts.linear_fc2.weight",
    }
    assert len(found) == 2 * (spec.num_layers - spec.moe.num_dense_layers)


LATENT = "self_attention."


@pytest.mark.parametrize(
    ("architecture", "with_engine", "without"),
    [
        ("Qwen2ForCausalLM", set(), set()),
        (
            "MixtralForCausalLM",
            {"pre_mlp_layernorm.weight"},
            {"mlp.linear_fc1.layer_norm_weight"},
        ),
        (
            "DeepseekV3ForCausalLM",
            {
                LATENT + f"linear_{part}_up_proj.layer_norm_weight"
                for part in ("q", "kv")
            },
            {LATENT + f"{part}_layernorm.weight" for part in ("q", "kv")},
        ),
    ],
)
def test_names_of_norms_with_and_without_transformer_engine(
    architecture: str, with_engine: set[str], without: set[str]
) -> None:
    spec = make_spec(architecture)
    both = [set(arrays(spec, transformer_engine=engine)) for engine in (True, False)]
    assert set(arrays(spec)) == both[0], "a run's own names, unless said otherwise"
    for one, other, names in ((*both, with_engine), (*both[::-1], without)):
        assert {
            key.removeprefix("decoder.layers.1.")
            for key in one - other
            if ".layers.1." in key
        } == names


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_keys_of_an_existing_checkpoint_are_taken_as_they_are(
    architecture: str,
) -> None:
    """Whether its layers are stacked, and by which spec its norms are named; others stay as a run writes them."""
    spec = make_spec(architecture)
    own = arrays(spec, prefix="actor.")
    assert all(key.startswith("actor.") for key in own)
    assert arrays(spec, prefix="actor.", present=set(own)).keys() == own.keys()
    experts = spec.moe.num_experts if spec.moe else 0
    other: dict[str, np.ndarray] = {}
    for name, array in alone(spec).items():
        layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
        if not name.startswith("decoder.layers."):
            other[name] = array
            continue
        expert, _, last = rest.removeprefix("mlp.experts.local_experts.").partition(".")
        index = [int(layer)]
        if rest.startswith("mlp.experts.local_experts."):
            rest, index = f"mlp.experts.experts.{last}", [int(layer), int(expert)]
        if spec.moe:  # stacked, where a run would not
            shape = (spec.num_layers, experts)[: len(index)]
            other.setdefault(
                f"decoder.layers.{rest}", np.zeros((*shape, *array.shape), int)
            )[tuple(index)] = array
        else:
            other[f"decoder.layers.{layer}.{rest}"] = array
    found = arrays(spec, present=set(other))
    assert found.keys() == other.keys()
    for key, array in other.items():
        assert (found[key] == array).all(), key
    assert arrays(spec, present=set()).keys() == arrays(spec).keys()
