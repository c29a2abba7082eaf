"""Models of Transformer Engine's layers: their names and shapes, and what they compute of packed rows.

Two real ranks, megatron-core's own classes, and `engine_stub` in place of Transformer
Engine's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.models.engine_stub import VERSION
from tests.sharding.specs import CONFIGS, NEMOTRON_EXPERTS

LATENT = "DeepseekV3ForCausalLM"
SIZES = {"with a query latent": 20, "without": None}
SEQUENCE_PARALLEL: dict[str, Any] = {
    "shape": {"tp": 2},
    "megatron": {"sequence_parallel": True},
}
# biases; a window shorter than the prompts' and responses' 12 tokens; norms of heads;
# and grids
# Weights so large that all experts are trained visibly.
EXPERTS_ALONE: dict[str, Any] = NEMOTRON_EXPERTS | {"initializer_range": 0.15}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("Qwen2ForCausalLM", SEQUENCE_PARALLEL),
    "window": (
        "MistralForCausalLM",
        {"shape": {"tp": 2}, "megatron": {"window_size": [3, 0]}},
    ),
    "stages": ("LlamaForCausalLM", {"shape": {"pp": 2}, "megatron": {}}),
    "experts": ("Qwen3MoeForCausalLM", SEQUENCE_PARALLEL),
    "no rotary embedding in some layers": ("SmolLM3ForCausalLM", SEQUENCE_PARALLEL),
    "norms after, fused files, rotated pairs": ("Glm4ForCausalLM", SEQUENCE_PARALLEL),
    "norms after alone, over all heads": ("Olmo2ForCausalLM", SEQUENCE_PARALLEL),
    "one norm for attention and MLP": ("Cohere2ForCausalLM", SEQUENCE_PARALLEL),
    "layer norms, no gates": ("Starcoder2ForCausalLM", SEQUENCE_PARALLEL),
    "two rotary bases": ("Gemma3ForCausalLM", SEQUENCE_PARALLEL),
    "soft caps": ("Gemma2ForCausalLM", SEQUENCE_PARALLEL),
    "chunks": ("Llama4ForCausalLM", SEQUENCE_PARALLEL),
    "gated delta nets": ("Qwen3_5ForCausalLM", SEQUENCE_PARALLEL),
    "norms after rotation": ("HunYuanDenseV1ForCausalLM", SEQUENCE_PARALLEL),
    "layers of one part each": ("NemotronHForCausalLM", SEQUENCE_PARALLEL),
    "experts alone": ("NemotronHForCausalLM", SEQUENCE_PARALLEL),
    "Mamba beside attention": ("FalconH1ForCausalLM", SEQUENCE_PARALLEL),
    "cut": ("Qwen2ForCausalLM", {"shape": {"cp": 2}, "megatron": {}}),
    "latent": (LATENT, SEQUENCE_PARALLEL),
    # experts with biases, gates in turn; a window in every other layer
    "sinks": (
        "GptOssForCausalLM",
        {"shape": {"tp": 2, "etp": 1}, "megatron": {"sequence_parallel": True}},
    ),
    "sinks, cut": (
        "GptOssForCausalLM",
        {"shape": {"cp": 2}, "megatron": {"cp_comm_type": "a2a"}},
    ),
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updated")


@pytest.fixture(scope="module")
def results(launch: Launcher, output: Path) -> list[dict[str, Any]]:
    latent = {
        name: make_tiny_folder(
            output / name, LATENT, **CONFIGS[LATENT] | {"q_lora_rank": rank}
        )
        for name, rank in SIZES.items()
    }
    packed = {
        name: {
            "folder": make_tiny_folder(
                output / f"{name} before",
                architecture,
                **(EXPERTS_ALONE if name == "experts alone" else {}),
            ),
            **case,
        }
        for name, (architecture, case) in PACKED.items()
    }
    return launch.world(
        2,
        "tests.models.engine_ranks:found",
        bare=True,
        latent=latent,
        packed=packed,
        output=output,
    )


def test_latent_attention_fits_its_layout_and_can_be_saved(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        found = result["latent"]
        for name in SIZES:
            assert found[name]["differs"] == [], name
            assert found[name]["refused"] == "", name
            assert bool(found[name]["counted"]) == (rank == 0), (
                "the copies count once in the gradient's norm"
            )
            assert found[name]["packs"]
        assert found["with a query latent"]["linear"] == [
            "TELayerNormColumnParallelLinear",
            "TELinear",
            "TERowParallelLinear",
        ]
        assert "TEColumnParallelLinear" in found["without"]["linear"]


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_under_transformer_engine_give_the_same_update(
    results: list[dict[str, Any]], output: Path, name: str
) -> None:
    """As our layers give, padded: log-probs and losses by the metrics, gradients by
    what an update with so large an epsilon makes of the weights.
    """
    found = results[0]["packed"][name]
    rows = found["engine packed"]["rows"]
    looks_back = any(queries < keys for queries, keys in rows)
    if name == "sinks, cut":
        assert not rows, (
            "keys and values of packed rows are sent p2p alone, those of sinks a2a alone"
        )
    elif name in ("soft caps", "chunks"):
        assert not rows, "Transformer Engine's attention has none, and ours computes it"
    else:
        # A sample cannot continue with the state of another one.
        apart = (
            "cut",
            "gated delta nets",
            "layers of one part each",
            "experts alone",
            "Mamba beside attention",
        )
        assert rows and looks_back == (name not in apart), (
            "prompts are computed once, and looked back at"
        )
    assert not found["engine padded"]["rows"]
    expected = found["local padded"]["metrics"]
    before, after = (
        load_file(output / f"{name} before/model.safetensors"),
        load_file(output / name / "local padded/model.safetensors"),
    )
    still = [key for key in after if torch.equal(after[key], before[key])]
    assert [
        key for key in still if not key.endswith("e_score_correction_bias")
    ] == [], "all others take part"
    for kind in ("engine padded", "engine packed"):
        for key, value in expected.items():
            assert found[kind]["metrics"][key] == pytest.approx(
                value, abs=1e-5, rel=1e-5
            ), (kind, key)
        weights = load_file(output / name / kind / "model.safetensors")
        assert weights.keys() == after.keys()
        for key, weight in after.items():
            torch.testing.assert_close(
                weights[key],
                weight,
                atol=1e-5,
                rtol=0,
                msg=lambda text, at=(kind, key): f"{at}: {text}",
            )


def test_adapters_under_transformer_engine_get_the_same_update(
    results: list[dict[str, Any]], output: Path
) -> None:
    metrics = results[0]["adapters"]
    for key, value in metrics["adapted local"].items():
        assert metrics["adapted engine"][key] == pytest.approx(
            value, abs=1e-5, rel=1e-5
        ), key
    before, engine, local = (
        load_file(output / name / "adapter_model.safetensors")
        for name in ("adapter", "adapted engine", "adapted local")
    )
    assert engine.keys() == local.keys() and any(".o_proj." in key for key in local)
    for key, factor in local.items():
        assert not torch.equal(factor, before[key]), key
        torch.testing.assert_close(
            engine[key],
            factor,
            atol=1e-5,
            rtol=0,
            msg=lambda text, at=key: f"{at}: {text}",
        )


def test_where_transformer_engine_takes_no_packed_rows_it_is_said(
    results: list[dict[str, Any]],
) -> None:
    found = results[0]["refused"]
    assert found["nothing"] == ""
    assert (
        "neither FlashAttention nor cuDNN's attention" in found["no kernel"]
        and "bfloat16" in found["no kernel"]
    )
    cut = found["cut"]
    assert cut["nothing"] == cut["windows sent at once"] == ""
    assert (
        "attention has a window, which megatron.cp_comm_type=p2p does not take"
        in cut["windows"]
    )
    assert "cp_comm_type=a2a+p2p is not among" in cut["groups of groups"]
    assert (
        "4 heads with 2 for keys and values on each are not multiples of 4. Use p2p"
        in cut["heads"]
    )
    assert "latent attention takes megatron.cp_comm_type=p2p alone" in cut["latent"]
    assert found["cut padded"].startswith(
        "Transformer Engine takes packed rows cut over ranks with"
    )
    assert (
        f"Transformer Engine 2.99.0 or later is needed, and {VERSION} is installed"
        in found["too old"]
    )
    assert "('attn_mask_type', 'padding_causal_bottom_right')" in found["asked"]
    assert "('qkv_layout', 'thd_thd_thd')" in found["asked"]


def test_the_stand_in_is_of_the_version_in_the_gpus_lock() -> None:
    """megatron-core asks for Transformer Engine's version in some sixty places, and builds other things by it."""
    lock = (Path(__file__).parents[2] / "requirements" / "cuda-py312.lock").read_text()
    assert (
        re.findall(
            r"^transformer-engine(?:-torch|-cu13)?==(\S+)", lock, flags=re.MULTILINE
        )
        == [VERSION] * 3
    )
