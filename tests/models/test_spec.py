"""What a model is, read from config.json as transformers 4 and 5 write it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaverl.errors import ModelError
from megaverl.models.spec import ARCHITECTURES, ModelSpec

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def spec(without: str = "", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({key: value for key, value in (CONFIG | changes).items() if key != without})


def test_dimensions_are_carried_over() -> None:
    found = spec()
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (3, 48, 96)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (6, 2, 8)
    assert (found.vocab_size, found.max_positions, found.norm_eps) == (101, 512, 1e-6)


def test_what_may_be_left_out() -> None:
    found = spec(without="num_key_value_heads")
    assert (found.num_kv_heads, found.tie_embeddings, found.rope_theta, found.rope_scaling) == (6, False, 10000.0, None)
    assert spec(num_key_value_heads=None, head_dim=None).head_dim == 8
    assert spec(head_dim=32).head_dim == 32
    assert spec(tie_word_embeddings=True).tie_embeddings


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "qk_norm"),
    [("LlamaForCausalLM", False, False), ("Qwen2ForCausalLM", True, False), ("Qwen3ForCausalLM", False, True)],
)
def test_what_the_architecture_decides(architecture: str, qkv_bias: bool, qk_norm: bool) -> None:
    found = spec(architectures=[architecture])
    assert (found.qkv_bias, found.qk_norm) == (qkv_bias, qk_norm)


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),  # transformers 4
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),  # transformers 5
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            5e5,
            {"type": "linear", "factor": 2.0},
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, 5e5, LLAMA3 | {"rope_theta": 5e5}),
    ],
)
def test_rotary_settings_of_either_transformers(
    written: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    found = spec(**written)
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_the_installed_transformers_is_read_back() -> None:
    import transformers

    for architecture in ARCHITECTURES:
        config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
            **{key: value for key, value in CONFIG.items() if key != "architectures"},
            architectures=[architecture],
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            head_dim=8,
        )
        found = ModelSpec.from_config(config.to_dict())
        assert (found.architecture, found.rope_theta, found.rope_scaling) == (architecture, 1e6, None)
        assert (found.norm_eps, found.head_dim, found.num_kv_heads) == (1e-6, 8, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported. Supported: LlamaForCausalLM"),
        ({"architectures": None}, "None is not supported"),
        ({"architectures": []}, "None is not supported"),
        ({"hidden_size": "48"}, "hidden_size is '48'; expected a whole number above 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; expected a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu is computed"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}, "a window of 128 tokens"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rms_norm_eps", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: the key '{key}' is missing"):
        spec(without=key)


def test_a_sliding_window_that_is_not_used_is_none() -> None:
    """As Qwen2.5's folders write it."""
    assert spec(use_sliding_window=False, sliding_window=128, max_window_layers=2).num_layers == 3
    assert spec(use_sliding_window=True, sliding_window=128, max_window_layers=3).num_layers == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not found. `model.path` must name"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "expected a JSON object"),
    ],
)
def test_a_folder_that_is_none(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_folder(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert said in str(caught.value)


def test_a_folder_is_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    code = (
        "import sys; from megaverl.models.spec import ModelSpec; "
        "print(ModelSpec.from_folder(sys.argv[1]).num_heads, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "6 False\n", done.stderr
