"""A quantised engine that takes its weights from an actor holds what one does that quantised the folder itself."""

from __future__ import annotations

from pathlib import Path

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.workers.test_reshard_generates import SIZES


def test_reshards_quantise_as_vllm_does(launch: Launcher, tmp_path: Path) -> None:
    # no part of a rank is whole blocks of 128
    sizes = SIZES | {
        "hidden_size": 192,
        "intermediate_size": 320,
        "initializer_range": 0.1,
    }
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM", dtype="bfloat16", **sizes)
    arguments = {
        "folder": folder,
        "shape": {"tp": 2},
        "tp": 2,
        "quantization": "fp8_per_block",
        "load_too": True,
    }
    for found in launch.world(
        2, "tests.workers.quantised_ranks:reshard_and_generate", **arguments
    ):
        assert found["differ"] == [] and found["responses"] == found["afresh"]
        assert found["odd"] == [] and 0 < found["merged"] < 0.05
    arguments |= {"shape": {"dp": 2}, "tp": 1, "quantization": "fp8", "load_too": False}
    for found in launch.world(
        2, "tests.workers.quantised_ranks:reshard_and_generate", **arguments
    ):
        assert found["odd"] == [] and 0 < found["merged"] < 0.05


def test_groups_land_as_vllm_loads_them(launch: Launcher, tmp_path: Path) -> None:
    """Ranks have columns of other matrices than whole, and kernels have orders of their own."""
    sizes = SIZES | {
        "hidden_size": 256,
        "intermediate_size": 320,
        "head_dim": 64,
        "initializer_range": 0.1,
    }
    folder = make_tiny_folder(tmp_path, "Qwen2ForCausalLM", dtype="bfloat16", **sizes)
    for world, methods in (
        ({"tp": 2, "pp": 1}, ["int4_g32", "nvfp4"]),
        ({"pp": 2, "tp": 1}, ["int4_asym_g32", "mxfp8"]),
    ):
        out = tmp_path / f"tp{world['tp']}"
        out.mkdir()
        for found in launch.world(
            2,
            "tests.workers.quantised_ranks:reshard_groups",
            folder=folder,
            out=str(out),
            shape=world,
            tp=2 if "nvfp4" in methods else 1,
            methods=methods,
        ):
            for method, result in found.items():
                assert result["differ"] == [], method
                assert result["responses"] == result["afresh"], method
                assert result["changed"] and len(result["kernels"]) == 1
                assert result["compared"] == (world["pp"] == 2), method


def test_a_rounding_actor_trains_what_is_sampled(
    launch: Launcher, tmp_path: Path
) -> None:
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    sizes |= {"initializer_range": 0.2}
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM", **sizes)
    for shape, tp, methods in (
        ({"tp": 2}, 1, ["int4_g32", "nvfp4"]),
        ({"fsdp": "full_shard"}, 2, ["int4_asym_g32", "mxfp8"]),
    ):
        for found in launch.world(
            2,
            "tests.workers.quantised_ranks:train_what_is_sampled",
            folder=folder,
            shape=shape,
            tp=tp,
            methods=methods,
        ):
            for method, result in found.items():
                assert result["rounded"] < 1e-4 < 1e-2 < result["plain"], method
                assert result.get("gradients", 0.0) < 1e-4, method
