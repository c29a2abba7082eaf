"""The architectures' tables against transformers' own models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaverl.errors import ModelError
from megaverl.layout.weights import Split
from megaverl.models.architectures import weights_of
from megaverl.models.spec import ARCHITECTURES, ModelSpec
from megaverl.models.tiny import TINY
from tests.layout.specs import make_spec


def huggingface_model(architecture: str, tied: bool):  # type: ignore[no-untyped-def]
    import torch
    import transformers

    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        **TINY, head_dim=8, tie_word_embeddings=tied, architectures=[architecture]
    )
    with torch.device("meta"):
        return getattr(transformers, architecture)(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_and_shapes_are_those_of_transformers(architecture: str, tied: bool) -> None:
    model = huggingface_model(architecture, tied)
    spec = ModelSpec.from_config(model.config.to_dict())
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ours = {weight.name: weight.shape for weight in weights_of(spec)}
    assert ours == theirs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_critic_ends_in_a_value_head(architecture: str) -> None:
    spec = make_spec(architecture, tie_embeddings=True)
    actor, critic = weights_of(spec), weights_of(spec, value_head=True)
    assert [weight.name for weight in critic if weight not in actor] == [
        "model.embed_tokens.weight",  # no longer tied
        "score.weight",
    ]
    head = critic[-1]
    assert (head.shape, head.split, head.stage) == ((1, spec.hidden_size), Split.REPLICATED, "last")
    assert all(weight.megatron_tied is None for weight in critic)


def test_unknown_architectures_and_biases_are_refused() -> None:
    with pytest.raises(ModelError, match="'MambaForCausalLM' has no table"):
        weights_of(replace(make_spec(), architecture="MambaForCausalLM"))
    with pytest.raises(ModelError, match="attention_bias"):
        weights_of(make_spec("LlamaForCausalLM", qkv_bias=True))
