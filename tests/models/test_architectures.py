"""The architectures' tables against transformers' own models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.tiny import (
    FAMILIES,
    TINY,
    TINY_MORE,
    make_tiny_folder,
    make_tiny_vision_folder,
)
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.sharding.weight import Split
from megaverl.weights.stored import read_folder
from tests.references import REFERENCES, load_reference
from tests.sharding.specs import CONFIGS, UNTIED, make_spec


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_and_shapes_are_those_that_transformers_saves(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    """Its modules may hold experts fused; its files hold them one by one, under the names of the first releases."""
    folder = make_tiny_folder(
        tmp_path, architecture, tie_embeddings=tied, **CONFIGS.get(architecture, {})
    )
    saved = folder
    if architecture in REFERENCES:  # whose folder was made from the table itself
        saved = tmp_path / "saved"
        load_reference(folder).save_pretrained(saved)
    theirs = {name: tensor.shape for name, tensor in read_folder(saved).items()}
    ours = {
        weight.name: weight.shape
        for weight in weights_of(ModelSpec.from_folder(folder))
    }
    assert ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_of_models_with_images(family: str, tmp_path: Path) -> None:
    folder = make_tiny_vision_folder(tmp_path, family)
    theirs = {name: tensor.shape for name, tensor in read_folder(folder).items()}
    weights = weights_of(ModelSpec.from_folder(folder))
    assert {weight.name: weight.shape for weight in weights} == theirs


def test_the_text_part_of_a_folder_of_llama_4(tmp_path: Path) -> None:
    """As docs/extend/architecture.md writes it, out of a folder with a vision tower."""
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    tower |= {"image_size": 28, "patch_size": 14, "hidden_size": 32}
    tower |= dict.fromkeys(
        ("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32
    )
    text = TINY | TINY_MORE["Llama4ForCausalLM"] | {"head_dim": 8}
    config = transformers.Llama4Config(
        text_config=text, vision_config=tower, image_token_index=3
    )
    whole = transformers.Llama4ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype="auto"
    ).save_pretrained(tmp_path / "text")
    stored = read_folder(tmp_path / "text")
    weights = weights_of(ModelSpec.from_folder(tmp_path / "text"))
    assert {weight.name: weight.shape for weight in weights} == {
        name: tensor.shape for name, tensor in stored.items()
    }
    with pytest.raises(ModelError, match="vision tower"):
        ModelSpec.from_folder(tmp_path / "whole")


def test_latent_attention_without_a_query_latent(tmp_path: Path) -> None:
    architecture = "DeepseekV3ForCausalLM"
    folder = make_tiny_folder(
        tmp_path, architecture, **{**CONFIGS[architecture], "q_lora_rank": None}
    )
    weights = weights_of(ModelSpec.from_folder(folder))
    assert {weight.name: weight.shape for weight in weights} == {
        name: tensor.shape for name, tensor in read_folder(folder).items()
    }
    assert not any(
        weight.vllm and "fused_qkv_a_proj" in weight.vllm for weight in weights
    )


def test_a_layer_lists_its_experts_one_by_one() -> None:
    weights = weights_of(make_spec("DeepseekV3ForCausalLM"))
    routed = [weight for weight in weights if weight.expert is not None]
    assert {weight.stage for weight in routed} == {1, 2, 3}, "the first layer is dense"
    assert [weight.expert for weight in routed if weight.stage == 1] == [0] * 3 + [
        1
    ] * 3 + [2] * 3 + [3] * 3
    assert routed[5].name == "model.layers.1.mlp.experts.1.down_proj.weight"
    assert routed[5].megatron == "mlp.experts.local_experts.{}.linear_fc2.weight"
    assert routed[5].transformer_engine == "mlp.experts.linear_fc2.weight{}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_critic_ends_in_a_value_head(architecture: str) -> None:
    spec = make_spec(architecture, tie_embeddings=True)
    actor, critic = weights_of(spec), weights_of(spec, value_head=True)
    changed = [weight.name for weight in critic if weight not in actor]
    # No longer tied.
    embedding = [] if architecture in UNTIED else [actor[0].name]
    assert changed == [*embedding, "score.weight"]
    head = critic[-1]
    assert (head.shape, head.split, head.stage) == (
        (1, spec.hidden_size),
        Split.REPLICATED,
        "last",
    )
    assert all(weight.megatron_tied is None for weight in critic)


def test_unknown_architectures_and_biases_are_refused() -> None:
    with pytest.raises(ModelError, match="'MambaForCausalLM' has no table"):
        weights_of(replace(make_spec(), architecture="MambaForCausalLM"))
    with pytest.raises(ModelError, match="attention_bias"):
        weights_of(make_spec("LlamaForCausalLM", qkv_bias=True))
