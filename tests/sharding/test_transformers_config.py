"""A key that config.json leaves out has the default of transformers' own configuration class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from megaverl.errors import ModelError
from megaverl.sharding.model_config import EXPERT_KEYS
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.sharding.transformers_config import is_model_type, read_by_transformers

ROOT = Path(__file__).parents[2]


def defaults_of(architecture: str) -> Any:
    return getattr(transformers, architecture).config_class()


# Fields of the spec, and transformers' attribute of the same meaning.
SAME = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
SAME_OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
SAME_OF_GROUPS = {
    "num_dense_layers": "first_k_dense_replace",
    "num_groups": "n_group",
    "groups_per_token": "topk_group",
    "scaling": "routed_scaling_factor",
    "normalize_weights": "norm_topk_prob",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_without_any_key_is_the_class_without_arguments(architecture: str) -> None:
    expected = defaults_of(architecture)
    # Mistral's default is a window of 4,096 tokens, which is refused
    written = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    spec = ModelSpec.from_config({"architectures": [architecture], **written})
    assert {name: getattr(spec, name) for name in SAME} == {n: getattr(expected, key) for n, key in SAME.items()}
    rope = dict(expected.rope_parameters)
    assert spec.rope_theta == rope.pop("rope_theta")
    assert spec.rotary_fraction == rope.pop("partial_rotary_factor", 1.0)
    assert spec.rope_scaling == (None if rope["rope_type"] == "default" else rope)
    if spec.mla is None:
        head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
        assert (spec.head_dim, spec.num_kv_heads) == (head_dim, expected.num_key_value_heads)
    else:
        assert [getattr(spec.mla, key) for key in SAME_OF_LATENTS] == [getattr(expected, k) for k in SAME_OF_LATENTS]
    if spec.moe is not None:
        keys = EXPERT_KEYS[architecture]
        assert spec.moe.num_experts == getattr(expected, keys.number)
        assert spec.moe.ffn_hidden_size == getattr(expected, keys.width)
        assert spec.moe.experts_per_token == expected.num_experts_per_tok
        if keys.by_sigmoid:
            assert {name: getattr(spec.moe, name) for name in SAME_OF_GROUPS} == {
                name: getattr(expected, key) for name, key in SAME_OF_GROUPS.items()
            }
            assert spec.moe.shared_ffn_hidden_size == expected.n_shared_experts * expected.moe_intermediate_size
    if architecture == "GptOssForCausalLM":
        assert spec.sliding_window == expected.sliding_window


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_key_left_out_is_the_same_as_its_default(architecture: str) -> None:
    """Leave out each key of a whole file in turn."""

    def read(config: dict[str, Any]) -> ModelSpec | str:
        try:
            return ModelSpec.from_config(config)
        except ModelError as error:
            return str(error).replace(" (transformers' default)", "")

    defaults = json.loads(json.dumps(defaults_of(architecture).to_dict()))
    full = {**defaults, "architectures": [architecture], "num_attention_heads": 16, "num_key_value_heads": 16}
    full |= {"sliding_window": 2**20} if architecture == "MistralForCausalLM" else {}
    assert isinstance(read(full), ModelSpec)
    # of these, transformers computes the default from other keys of the file
    computed = {"head_dim", "layer_types"} | ({"num_key_value_heads"} if architecture == "LlamaForCausalLM" else set())
    for key in sorted(defaults.keys() - computed):
        without = {name: value for name, value in full.items() if name != key}
        assert read(without) == read({**full, key: defaults[key]}), key


def test_a_process_without_torch_reads_the_same() -> None:
    config = {"architectures": ["GptOssForCausalLM"], "rope_theta": 1e5, "hidden_size": 64}
    code = (
        "import sys, json; from megaverl.sharding.transformers_config import read_by_transformers as read; "
        "print(json.dumps(read('gpt_oss', json.loads(sys.argv[1])))); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == read_by_transformers("gpt_oss", config)


def test_what_transformers_does_not_know() -> None:
    assert is_model_type("llama") and is_model_type("gpt_oss")
    assert not any(map(is_model_type, ("llamas", "../models", "", None, 7)))
    with pytest.raises(ModelError, match="a.json: transformers cannot read it: KeyError: 'llamas'"):
        read_by_transformers("llamas", {}, "a.json")


def test_an_outline_has_the_defaults_of_its_class() -> None:
    outline = ModelSpec.outline_of({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100})
    expected = transformers.Olmo2Config()
    assert (outline.vocab_size, outline.hidden_size, outline.num_layers) == (100, expected.hidden_size, 32)
    assert outline.max_positions == expected.max_position_embeddings
    assert outline.tie_embeddings == expected.tie_word_embeddings
