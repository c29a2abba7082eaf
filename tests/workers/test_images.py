"""Vision-language models on Megatron-core and under FSDP2: the numbers of transformers, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megaverl.models.tiny import FAMILIES, make_tiny_vision_folder
from megaverl.models.vision import rope_positions
from tests.launcher import Launcher
from tests.published import stack_experts

HERE = "tests.workers.image_ranks"
RANKS = f"{HERE}:against_transformers"


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    config = transformers.AutoConfig.from_pretrained(
        make_tiny_vision_folder(tmp_path, family, weights=False)
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[family].name}Model")(config)
    is_image = torch.zeros(2, 30, dtype=torch.bool)
    is_image[0, 3:9] = is_image[0, 11:23] = is_image[1, 0:4] = True
    grids = [[1, 4, 6], [1, 12, 4], [1, 4, 4]]
    expected, _ = model.get_rope_index(
        torch.ones(2, 30, dtype=torch.int64), is_image.int(), torch.tensor(grids)
    )
    rows = torch.arange(30).expand(2, 30)
    assert torch.equal(rope_positions(is_image, rows, grids, 2), expected)
    # end to end, with a second end of the first prompt after the first one
    packed = torch.cat([rows[0], rows[0, 25:], rows[1]])[None]
    found = rope_positions(
        torch.cat([is_image[0], torch.zeros(5).bool(), is_image[1]])[None],
        packed,
        grids,
        2,
    )
    assert torch.equal(
        found[:, 0],
        torch.cat([expected[:, 0], expected[:, 0, 25:], expected[:, 1]], dim=1),
    )


@pytest.mark.parametrize(
    ("family", "ranks", "packs", "freeze"),
    [
        ("qwen2_vl", 2, True, []),
        ("qwen2_5_vl", 1, False, ["visual.*"]),
        ("qwen3_vl", 1, True, ["visual.blocks.*", "lm_head.*"]),
        ("qwen3_5", 2, False, ["visual.blocks.*"]),
        ("qwen3_5_moe", 1, False, []),
    ],
)
def test_log_probs_and_gradients_are_those_of_transformers(
    launch: Launcher,
    tmp_path: Path,
    family: str,
    ranks: int,
    packs: bool,
    freeze: list[str],
) -> None:
    folder = str(make_tiny_vision_folder(tmp_path / "model", family))
    if family == "qwen3_5_moe":
        stack_experts(tmp_path / "model")
    # of two ranks one gets the samples with images: the other reads none
    order = [1, 1, 0, 0, 1] if ranks == 1 else [1, 2]
    for found in launch.world(
        ranks, RANKS, folder=folder, order=order, packs=packs, freeze=freeze
    ):
        assert found["log_probs"] < 5e-6
        assert found["gradients"] < 1e-4
        assert found["packed"] == packs
        frozen = {
            "visual.*": "visual.",
            "visual.blocks.*": "visual.blocks.",
            "lm_head.*": "lm_head.",
        }
        assert not any(
            frozen[pattern] in name for pattern in freeze for name in found["trained"]
        )
        assert len(found["trained"]) > 10


ON_MEGATRON = f"{HERE}:on_megatron"
# One rank reads images and the other none; rows padded and packed; stages; cut rows.
GRIDS: list[dict[str, Any]] = [
    {"packs": False},
    {"tp": 2},
    {"tp": 2, "packs": False, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
]
# Also with experts on either rank.
EXPERT_GRIDS = [*GRIDS, {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1}]


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_computes_what_transformers_computes(
    launch: Launcher, tmp_path: Path, family: str
) -> None:
    """Log-probs and gradients of rows with several images, one and none, on two ranks in five ways."""
    tied = family == "qwen2_vl"
    folder = str(
        make_tiny_vision_folder(tmp_path / "model", family, tie_embeddings=tied)
    )
    grids = EXPERT_GRIDS if "num_experts" in FAMILIES[family].text else GRIDS
    for results in launch.world(
        2, ON_MEGATRON, folder=folder, order=[1, 1, 0, 2, 1], grids=grids
    ):
        for grid, found in zip(grids, results, strict=True):
            assert found["log_probs"] < 5e-6, grid
            assert max(found["gradients"].values()) < 1e-5, (grid, found)
            assert found["packed"] == grid.get("packs", True)


HALF_ROTATED = {
    "rope_type": "default",
    "rope_theta": 1e5,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    # Time has the fewest dimensions.
    "mrope_section": [2, 3, 3],
}


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["full_attention", "full_attention"]},
        {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_key_head_dim": 5, "linear_value_head_dim": 12},
        {"rope_parameters": HALF_ROTATED, "rms_norm_eps": 1e-3},
        {"num_experts_per_tok": 4, "hidden_act": "swish"},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_configurations_of_qwen3_5(
    launch: Launcher, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = make_tiny_vision_folder(tmp_path / "model", "qwen3_5_moe", **change)
    [[found]] = launch.world(
        1, ON_MEGATRON, folder=str(folder), order=[1, 2, 0, 0], grids=[{}]
    )
    assert found["log_probs"] < 5e-6
    assert max(found["gradients"].values()) < 1e-5


FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTED = FULL | {"recompute_num_layers": 1, "tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("family", "freeze"),
    [
        ("qwen2_5_vl", []),
        ("qwen2_5_vl", ["visual.*", "*embed_tokens.*"]),
        ("qwen3_5_moe", []),
        ("qwen3_5_moe", ["visual.*", "*embed_tokens.*"]),
    ],
)
def test_megatron_recomputes_layers_behind_a_tower(
    launch: Launcher, tmp_path: Path, family: str, freeze: list[str]
) -> None:
    """Also behind a frozen embedding, whose output would otherwise require no gradient."""
    folder = str(make_tiny_vision_folder(tmp_path / "model", family))
    options = {"order": [1, 2, 0], "grids": [RECOMPUTED], "freeze": freeze}
    trained = set()
    for [found] in launch.world(2, ON_MEGATRON, folder=folder, **options):
        assert found["log_probs"] < 5e-6
        assert max(found["gradients"].values()) < 1e-5
        trained.update(found["trained"])
    assert any(".layers.1." in name for name in trained)
    for part in ("visual.", "embed_tokens."):
        assert any(part in name for name in trained) == (not freeze), part


def test_what_megatron_refuses_of_images(launch: Launcher, tmp_path: Path) -> None:
    """Rows over context-parallel ranks; layers of Qwen3-VL that another stage has, or that are recomputed."""
    qwen2 = str(make_tiny_vision_folder(tmp_path / "qwen2", "qwen2_vl", weights=False))
    qwen3 = make_tiny_vision_folder(tmp_path / "qwen3", "qwen3_vl", weights=False)
    config = json.loads((qwen3 / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    (qwen3 / "config.json").write_text(json.dumps(config))
    cases: list[dict[str, Any]] = [
        {"folder": qwen2, "cp": 2},
        {"folder": str(qwen3), "pp": 2},
        {"folder": str(qwen3), "tp": 2, **FULL, "recompute_num_layers": 1},
        {"folder": qwen2, "pp": 2, "freeze": ["visual.*", "embed_*", "layers.0.*"]},
        {"folder": qwen2, "tp": 2, "freeze": ["*.q_proj.*"]},
        {"folder": qwen2, "tp": 2, "freeze": ["tower.*"]},
    ]
    said = (
        "actor.cp=2: images of Qwen2VLForConditionalGeneration are not cut over ranks",
        "the outputs of its first 2 layers, and the first stage has 1",
        "which cannot be recomputed",
        "actor.freeze: all weights of pipeline stage 0 are frozen",
        "actor.freeze: megatron-core keeps model.layers.0.self_attn.k_proj.weight",
        "actor.freeze: 'tower.*' fits none of the model's weights",
    )
    for results in launch.world(2, f"{HERE}:refusals", cases=cases):
        for found, expected in zip(results, said, strict=True):
            assert expected in found
