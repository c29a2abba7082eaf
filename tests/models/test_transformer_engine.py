"""Models as they are built where Transformer Engine is: with its layers' names and shapes, which compute nothing."""

from __future__ import annotations

from pathlib import Path

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.sharding.specs import CONFIGS

ARCHITECTURE = "DeepseekV3ForCausalLM"


def test_latent_attention_fits_its_layout_and_can_be_saved(launch: Launcher, tmp_path: Path) -> None:
    sizes = {"with a query latent": 20, "without": None}
    folders = {
        name: make_tiny_folder(tmp_path / name, ARCHITECTURE, **CONFIGS[ARCHITECTURE] | {"q_lora_rank": rank})
        for name, rank in sizes.items()
    }
    results = launch.world(2, "tests.models.engine_ranks:latent_attention", bare=True, folders=folders)
    for rank, found in enumerate(results):
        for name in sizes:
            assert found[name]["differs"] == [], name
            assert found[name]["refused"] == "", name
            assert bool(found[name]["counted"]) == (rank == 0), "the copies count once in the gradient's norm"
        assert found["with a query latent"]["linear"] == [
            "TELayerNormColumnParallelLinear",
            "TELinear",
            "TERowParallelLinear",
        ]
        assert "TEColumnParallelLinear" in found["without"]["linear"]
