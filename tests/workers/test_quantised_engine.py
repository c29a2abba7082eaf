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
