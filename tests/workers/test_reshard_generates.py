"""An engine that took its weights from an actor says what a fresh one says that loaded the exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_config import (
    ATTENTION_BESIDE_MAMBA,
    MAMBA_LAYERS,
    WITH_CHUNKS,
)
from tests.launcher import Launcher
from tests.sharding.specs import ALWAYS_TIED

# vLLM's CPU attention has no kernel for heads below 32 dimensions
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": 150,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
}
# Of which vLLM's CPU build has kernels. It computes them in bfloat16, so logits are small.
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "initializer_range": 0.02,
}
MORE = {
    # not a multiple of the 32 to which vLLM's CPU kernel pads the width of an expert
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 48},
    # tied and scaled embeddings: weaker layers would say the last token of a prompt
    # again and again
    "GemmaForCausalLM": {"initializer_range": 0.3},
    # vLLM's kernel of latent attention knows this size of a latent alone
    "DeepseekV3ForCausalLM": LATENT,
    # Of which vLLM's CPU kernel wants multiples of 32 on a rank.
    "GptOssForCausalLM": {"intermediate_size": 128},
    # Norms after layers make their outputs large beside small embeddings.
    "Gemma3ForCausalLM": {"initializer_range": 0.01, "sliding_window": 6},
    # Without norms of queries and keys: scores that the cap changes.
    "Gemma2ForCausalLM": {
        "initializer_range": 0.03,
        "query_pre_attn_scalar": 1,
        "attn_logit_softcapping": 1.0,
        "sliding_window": 6,
    },
    "Cohere2ForCausalLM": {"initializer_range": 0.3},
    "GraniteForCausalLM": {"attention_multiplier": 0.2},
    "GraniteMoeForCausalLM": {"attention_multiplier": 0.2},
    "Exaone4ForCausalLM": {"sliding_window": 6},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16},
    # vLLM's chunks are multiples of a block of its cache.
    "Llama4ForCausalLM": {"attention_chunk_size": 32, "floor_scale": 24},
    # Code that neither the trainer nor the engine may look for.
    "InternLM3ForCausalLM": {"auto_map": {"AutoConfig": "absent.InternLM3Config"}},
    "MiMoForCausalLM": {"auto_map": {"AutoConfig": "absent.MiMoConfig"}},
    "BailingMoeV2ForCausalLM": {"auto_map": {"AutoConfig": "absent.Config"}},
    # As in most published models: all ranks of the engine have a copy of the only group.
    "FalconH1ForCausalLM": {"mamba_n_groups": 1, "mamba_rms_norm": False},
    "Qwen3NextForCausalLM": DELTA_NETS | {"moe_intermediate_size": 48},
    "Qwen3_5ForCausalLM": DELTA_NETS,
    "Qwen3_5MoeForCausalLM": DELTA_NETS | {"moe_intermediate_size": 48},
} | dict.fromkeys(("DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"), LATENT)
DENSE = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Phi3ForCausalLM",
    "Glm4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "MinistralForCausalLM",
    "CwmForCausalLM",
    "GraniteForCausalLM",
    "ArceeForCausalLM",
    "NemotronForCausalLM",
    "Starcoder2ForCausalLM",
    "Olmo2ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Cohere2ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "InternLM3ForCausalLM",
    "MiMoForCausalLM",
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
)
WITH_EXPERTS = (
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Qwen2MoeForCausalLM",
)
# One engine of each: their experts are like those above, and norms span all heads, the
# router adds a bias to softmax scores, or files hold q, k and v in one array.
MORE_WITH_EXPERTS = (
    "OlmoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "BailingMoeV2ForCausalLM",
)
GRIDS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"dp": 2}]
EXPERT_GRIDS: list[dict[str, int]] = [
    {"tp": 2},
    {"pp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
]
PROMPTS = [[2 + i, 7, 5 * i + 3, 11, 4] * (1 + i % 3) for i in range(8)]
# With a common beginning that is longer than a block of vLLM's cache, and than a chunk of
# Mamba layers or of attention.
LONG_PROMPTS = [
    [(7 * i * i + 3 * i + 1) % 140 + 5 for i in range(85 + number % 3)] + [number]
    for number in range(8)
]


def two_folders(path: Path, architecture: str, **config: Any) -> tuple[Path, Path]:
    """The same model with old and with new weights; large ones, so that no two tokens are as likely."""
    tied = architecture in ALWAYS_TIED
    sizes = {"initializer_range": 0.1, **SIZES, **MORE.get(architecture, {}), **config}
    old, new = (
        make_tiny_folder(
            path / name, architecture, seed=seed, tie_embeddings=tied, **sizes
        )
        for seed, name in enumerate(("old", "new"))
    )
    return old, new


def write_adapter(folder: Path, old: Path, new: Path) -> Path:
    """A peft adapter for all linear layers of `old`, with which `new` is to be the merged model. Returns `folder`."""
    generator = torch.Generator().manual_seed(0)
    weights, factors = load_file(old / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            a, b = (
                torch.randn(size, generator=generator) * 0.1
                for size in ((4, weight.shape[1]), (len(weight), 4))
            )
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            weight += 8 / 4 * b @ a
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8})
    )
    return folder


def check(
    launch: Launcher,
    path: Path,
    architecture: str,
    grids: list[dict[str, Any]],
    tp: int,
    *,
    num_ranks: int = 2,
    with_adapter: bool = False,
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    tolerance: float = 1e-3,
    **vllm: Any,
) -> None:
    """Args: with_adapter: the new weights are the old ones with an adapter; the last grid's actor has it unmerged."""
    old, new = two_folders(path, architecture, dtype=dtype, **(config or {}))
    adapter = write_adapter(path / "adapter", old, new) if with_adapter else None
    exports = [path / f"exported{number}" for number in range(len(grids))]
    needs_long = (*MAMBA_LAYERS, *ATTENTION_BESIDE_MAMBA, *WITH_CHUNKS)
    prompts = LONG_PROMPTS if architecture in needs_long else PROMPTS
    ranks = launch.world(
        num_ranks,
        "tests.workers.reshard_ranks:reshard_and_generate",
        old_folder=old,
        new_folder=new,
        shapes=grids,
        exports=exports,
        tp=tp,
        vllm=vllm,
        prompts=prompts,
        adapter=adapter,
        dtype=dtype,
    )
    weights = load_file(new / "model.safetensors")
    for export in exports:
        exported = load_file(export / "model.safetensors")
        assert exported.keys() == weights.keys()
        rounded = 1e-6 if with_adapter and export == exports[-1] else 0.0
        for name, weight in weights.items():
            torch.testing.assert_close(
                exported[name], weight, atol=rounded, rtol=0, msg=f"{export} {name}"
            )
    expected = launch.world(
        num_ranks,
        "tests.workers.reshard_ranks:generate_afresh",
        folder=exports[-1],
        tp=tp,
        vllm=vllm,
        prompts=prompts,
        dtype=dtype,
    )[0]
    assert len({tuple(response) for response in expected}) == len(PROMPTS)
    for found in ranks:
        for grid, result in zip(grids, found, strict=True):
            assert result["new"] == expected, grid
            assert result["old"] != expected, grid
            assert result["difference"] < tolerance, grid


# Mistral and Qwen3 whole differ from Llama whole in nothing that a cut does not show as
# well.
@pytest.mark.parametrize(
    ("architecture", "tp"),
    [(name, 2) for name in DENSE]
    + [
        (name, 1)
        for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM")
    ],
)
def test_dense(launch: Launcher, architecture: str, tp: int, tmp_path: Path) -> None:
    with_adapter = architecture == "Qwen2ForCausalLM"
    grids = (
        GRIDS
        + [{"tp": 2}] * with_adapter
        + [{"cp": 2}] * (architecture == "LlamaForCausalLM")
    )
    check(launch, tmp_path, architecture, grids, tp, with_adapter=with_adapter)


WINDOW = 6  # tokens: shorter than every prompt with its response


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MistralForCausalLM", {"sliding_window": WINDOW}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "max_window_layers": 0,
            },
        ),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": WINDOW}),
        ("CwmForCausalLM", {"sliding_window": WINDOW}),
        (
            "MinistralForCausalLM",
            {
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
    ],
)
def test_sliding_windows(
    launch: Launcher, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """The engine and every grid of the actor attend to the same tokens: one that saw all would differ by nats."""
    grids = [*GRIDS, {"cp": 2}]
    check(launch, tmp_path, architecture, grids, 2, config=config)


def test_under_fsdp(launch: Launcher, tmp_path: Path) -> None:
    tensor: dict[str, Any] = {"fsdp": "full_shard", "tp": 2}
    grids = [
        {"fsdp": "full_shard"},
        {"fsdp": "no_shard"},
        tensor,
        {"fsdp": "full_shard"},
    ]
    check(launch, tmp_path, "Qwen2ForCausalLM", grids, 2, with_adapter=True)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_with_experts(
    launch: Launcher, architecture: str, tp: int, tmp_path: Path
) -> None:
    check(launch, tmp_path, architecture, EXPERT_GRIDS, tp)


@pytest.mark.parametrize("architecture", MORE_WITH_EXPERTS)
def test_further_parts_beside_experts(
    launch: Launcher, architecture: str, tmp_path: Path
) -> None:
    check(launch, tmp_path, architecture, EXPERT_GRIDS[:3], 2)


# Llama 4's loader picks the experts of a rank out of an array of all.
@pytest.mark.parametrize("architecture", (*WITH_EXPERTS, "Llama4ForCausalLM"))
def test_an_engine_whose_ranks_hold_whole_experts(
    launch: Launcher, architecture: str, tmp_path: Path
) -> None:
    check(launch, tmp_path, architecture, EXPERT_GRIDS, 2, enable_expert_parallel=True)


def test_experts_that_files_hold_in_one_array(launch: Launcher, tmp_path: Path) -> None:
    """Granite MoE, whose factors the engine applies as well."""
    check(launch, tmp_path, "GraniteMoeForCausalLM", EXPERT_GRIDS, 2)


@pytest.mark.parametrize(
    ("architecture", "grids"),
    [
        ("Qwen3NextForCausalLM", EXPERT_GRIDS),
        ("Qwen3_5ForCausalLM", GRIDS),
        ("Qwen3_5MoeForCausalLM", EXPERT_GRIDS),
    ],
)
def test_gated_delta_nets(
    launch: Launcher, architecture: str, grids: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Convolutions, states, gates on attention's outputs; projections fused in files, and separate."""
    options: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.02}
    check(launch, tmp_path, architecture, grids, 2, **options)


def test_experts_that_files_hold_transposed_and_in_one_array(
    launch: Launcher, tmp_path: Path
) -> None:
    """gpt-oss: also sinks, windows in every other layer, YaRN, and a bias that one of the engine's ranks has alone."""
    check(
        launch,
        tmp_path,
        "GptOssForCausalLM",
        [{"tp": 2, "etp": 1}, {"pp": 2}, {"dp": 2, "ep": 2}],
        2,
    )


def test_attention_within_chunks(launch: Launcher, tmp_path: Path) -> None:
    """Llama 4: prompts of several chunks, queries scaled from the first of them on, and experts' scaled inputs."""
    check(launch, tmp_path, "Llama4ForCausalLM", [*EXPERT_GRIDS, {"cp": 2}], 2)


def test_four_ranks(launch: Launcher, tmp_path: Path) -> None:
    grids = [
        {"tp": 2, "pp": 2},
        {"pp": 2, "dp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 2},
    ]
    check(launch, tmp_path, "Qwen3MoeForCausalLM", grids, 2, num_ranks=4)


@pytest.mark.parametrize(
    "architecture",
    ["DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"],
)
def test_latent_attention_has_its_absorbed_projections_made_anew(
    launch: Launcher, architecture: str, tmp_path: Path
) -> None:
    check(launch, tmp_path, architecture, [{"tp": 2}, {"pp": 2}], 2)
