"""Configurations of models that transformers has no class of are read without the Python files in their folders."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megaverl.errors import ConfigError, MegaverlError, ModelError, RolloutError
from megaverl.models.architectures import weights_of
from megaverl.models.hf_model import build_module
from megaverl.models.hf_shards import module_without_data
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.hf_engine import HFEngine
from megaverl.sharding.model_config import MODEL_TYPES, NOT_IN_TRANSFORMERS
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.own_configs import OWN_CONFIGS, register_config
from tests.checkpoint.convert.folders import converted


def test_the_lists_agree() -> None:
    assert tuple(OWN_CONFIGS) == NOT_IN_TRANSFORMERS
    for architecture, kind in OWN_CONFIGS.items():
        assert kind.model_type == MODEL_TYPES[architecture]
        assert CONFIG_MAPPING._mapping.get(kind.model_type) is None, (
            "transformers has a class of it by now"
        )


# The sizes in the published config.json, and billions of parameters without layers for
# multi-token prediction.
INTERNLM3_8B = {
    "architectures": ["InternLM3ForCausalLM"],
    "vocab_size": 128512,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": 151680,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
}
LING_MINI_2 = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("config", "billions"), [(INTERNLM3_8B, 8.8), (MIMO_7B, 7.6), (LING_MINI_2, 16.3)]
)
def test_sizes_of_published_models(config: dict[str, Any], billions: float) -> None:
    """Ling-mini-2.0 has the sizes that its class has by default."""
    weights = weights_of(ModelSpec.from_config(config))
    assert round(sum(prod(weight.shape) for weight in weights) / 1e9, 1) == billions


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose Python file must not run."""
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    made = make_tiny_folder(tmp_path / "model", request.param, auto_map=code)
    (made / "own.py").write_text("raise SystemExit('the code of the folder ran')")
    return made


@pytest.mark.parametrize("folder", NOT_IN_TRANSFORMERS, indirect=True)
def test_the_code_of_a_folder_does_not_run(folder: Path) -> None:
    """Neither when megaverl reads it, with torch and without, nor when transformers does for vLLM."""
    spec = ModelSpec.from_folder(folder)
    program = "from megaverl.sharding.model_spec import ModelSpec as M; import sys; print(M.from_folder(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(folder)]
    done = run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(spec)
    kept = dict(CONFIG_MAPPING._extra_content)
    try:
        register_config(spec.architecture)
        register_config(spec.architecture)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    finally:
        CONFIG_MAPPING._extra_content = kept
    assert type(config) is OWN_CONFIGS[spec.architecture]
    assert config.vocab_size == spec.vocab_size


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class InternLM3Config(LlamaConfig):
    model_type = "internlm3"

class OwnModel(LlamaForCausalLM):
    config_class = InternLM3Config
"""


def test_trusted_code_of_a_folder_builds_the_model_beside_an_engine(
    tmp_path: Path,
) -> None:
    """By its own configuration class, and by megaverl's once an engine has registered that."""
    architecture = "InternLM3ForCausalLM"
    kept = dict(CONFIG_MAPPING._extra_content)
    models = AutoModelForCausalLM._model_mapping
    kept_models = dict(models._extra_content)
    try:
        for number in range(2):
            name = f"own{number}"
            code = {"AutoConfig": f"{name}.InternLM3Config"}
            code |= {"AutoModelForCausalLM": f"{name}.OwnModel"}
            folder = make_tiny_folder(tmp_path / name, architecture, auto_map=code)
            (folder / f"{name}.py").write_text(CODE)
            model = module_without_data(folder, trust_remote_code=True)
            assert type(model).__name__ == "OwnModel"
            is_own = type(model.config) is OWN_CONFIGS[architecture]
            assert is_own == bool(number)
            register_config(architecture)
    finally:
        CONFIG_MAPPING._extra_content = kept
        models._extra_content = kept_models


@pytest.mark.parametrize("folder", NOT_IN_TRANSFORMERS, indirect=True)
def test_what_needs_a_class_of_transformers_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """FSDP2, as it is planned and built, rollout.engine=hf, and comparing logits of a conversion."""
    attempts: list[tuple[type[MegaverlError], Any]] = [
        (ModelError, lambda: build_module(folder, dtype=torch.float32, seed=None)),
        (ModelError, lambda: module_without_data(folder / "config.json")),
        (
            RolloutError,
            lambda: HFEngine(folder, dtype=torch.float32, max_model_len=8),
        ),
    ]
    for error, attempt in attempts:
        with pytest.raises(error, match="has no class of") as caught:
            attempt()
        for said in ("actor.engine=megatron", "rollout.engine=vllm"):
            assert said in str(caught.value)
    with pytest.raises(ConfigError, match="--logits: transformers"):
        converted(folder, tmp_path / "there", "megatron", logits=True)
    # And with the code of the folder, which is tried.
    with pytest.raises(ModelError, match="the code of the folder ran"):
        build_module(folder, dtype=torch.float32, seed=None, trust_remote_code=True)
