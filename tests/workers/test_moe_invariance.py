"""The result of an update of a model with experts does not depend on how experts, layers and samples are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaverl.distributed.grid import GridShape
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ModelSpec
from tests.launcher import Launcher
from tests.workers.test_parallel_invariance import ACTOR, CRITIC, assert_same, updated

SHAPES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp2 ep2": {"dp": 2, "ep": 2},
    "tp2 (sequence parallel)": {"tp": 2},
    "tp2 etp1": {"tp": 2, "etp": 1},  # each rank has all experts, and its own tokens
    "tp2 ep2 etp1": {"tp": 2, "ep": 2, "etp": 1},
    "tp2 dp2 ep2": {"tp": 2, "dp": 2, "ep": 2},
    "tp2 dp2 ep4 etp1": {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
    "pp2 dp2 ep2": {"pp": 2, "dp": 2, "ep": 2},
    "cp2 ep2": {"cp": 2, "ep": 2},
}
LOSSES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}


@pytest.fixture(
    scope="module",
    params=[
        "MixtralForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",
    ],
)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    few: dict[str, Any] = {}
    # So few experts that the few tokens of a critic reach each.
    if request.param == "Glm4MoeForCausalLM":
        few = {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "seed": 1,
        }
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), request.param, num_hidden_layers=2, **few
    )


@pytest.mark.parametrize("options", [ACTOR, CRITIC], ids=["actor", "critic"])
def test_same_update_on_every_grid(
    launch: Launcher, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = updated(launch, folder, tmp_path / "one", {}, **options)
    has_biases = ModelSpec.from_folder(folder).linear_bias
    before = load_file(folder / "model.safetensors")
    still = [
        name
        for name in before
        if name in expected[1] and torch.equal(before[name], expected[1][name])
    ]
    assert [
        name for name in still if not name.endswith("e_score_correction_bias")
    ] == [], "all others take part"
    for name, shape in SHAPES.items():
        if has_biases and shape.get("tp", 1) > 1:
            shape = shape | {"etp": 1}  # experts with biases are not cut
        assert_same(
            updated(launch, folder, tmp_path / name, shape, **options), expected
        )


def test_the_routers_losses_are_means_over_the_mini_batch(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(
        tmp_path / "model", "Qwen3MoeForCausalLM", num_hidden_layers=2
    )

    def update(
        name: str, shape: dict[str, int], **megatron: Any
    ) -> tuple[dict[str, float], dict[str, Any]]:
        results = launch.world(
            GridShape(**shape).world_size,
            "tests.workers.moe_ranks:update_equal_lengths",
            folder=folder,
            shape=shape,
            output=tmp_path / name,
            megatron=megatron,
        )
        return results[0], load_file(tmp_path / name / "model.safetensors")

    without, expected = update("without", {}), update("one", {}, **LOSSES)
    router = "model.layers.0.mlp.gate.weight"
    assert (without[1][router] - expected[1][router]).abs().max() > 1e-4
    for name, shape in (
        ("tp2", {"tp": 2}),
        ("dp2 ep2", {"dp": 2, "ep": 2}),
        ("pp2", {"pp": 2}),
        ("cp2", {"cp": 2}),
    ):
        assert_same(update(name, shape, **LOSSES), expected)
