"""A real Megatron-core actor and a real vLLM engine in the same processes: shared storage, and versions in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import SamplingOptions
from megaverl.rollout.hf_engine import HFEngine
from tests.launcher import Launcher

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": 256,
    "num_hidden_layers": 2,
}
PROMPTS = [[2 + i, 7, 5 * i + 3, 11, 4] * (1 + i % 3) for i in range(6)]


def expected(folder: str) -> list[list[int]]:
    """Greedy answers of plain transformers."""
    engine = HFEngine(folder, dtype=torch.float32, max_model_len=64)
    found = engine.generate(
        PROMPTS,
        SamplingOptions(max_tokens=8, temperature=0.0, ignore_eos=True),
        [0] * 6,
    )
    return [answer.token_ids for answer in found]


@pytest.mark.parametrize(
    ("grid", "tp", "dtype"),
    [({"tp": 2}, 2, "float32"), ({"tp": 1, "pp": 2}, 1, "float32")],
)
def test_generations_have_one_version_whole(
    launch: Launcher, tmp_path: Path, grid: dict[str, int], tp: int, dtype: str
) -> None:
    first = str(make_tiny_folder(tmp_path / "first", **SIZES))
    second = str(make_tiny_folder(tmp_path / "second", seed=1, **SIZES))
    by_version = {"first": expected(first), "second": expected(second)}
    assert by_version["first"] != by_version["second"]
    options = {
        "folder": first,
        "other_folder": second,
        "grid": grid,
        "tp": tp,
        "prompts": PROMPTS,
        "dtype": dtype,
    }
    for found in launch.world(2, "tests.workers.rollout_ranks:versions", **options):
        assert "no version has been moved yet" in found["unset"]
        assert (
            "shares storage with the source, which has changed since version 1"
            in found["between"]
        )
        for key, version in {
            "first": "first",
            "second": "second",
            "asleep": "second",
            "asleep_again": "second",
            "overlapped_second": "second",
            "overlapped_first": "first",
        }.items():
            assert [answer["token_ids"] for answer in found[key]] == by_version[
                version
            ], key
        assert found["version"] == 2
        assert (found["began_early"], found["under_way"]) == (False, True)
        assert "version 2 is being written over version 1" in found["on_its_way"]
        # the cache is there from a request to its answers, and never beside what a
        # reshard needs
        brought, asked = ["wake weights", "reshard"], ["wake kv_cache", "sleep 1"]
        assert found["events"] == [
            "sleep 1",
            *brought,
            *asked,
            *brought,
            *asked,
            *brought,
            "wake kv_cache",
        ]
        assert (
            "slept without its weights, and the actor's have changed since version 3"
            in found["asleep_changed"]
        )
        assert found["asleep_version"] == 4, (
            "bringing the same weights once more makes no version"
        )
        stats = found["stats"]
        assert stats["bytes_aliased"] > 0 and found["adopted_in_pool"] == [
            found["adopted"]
        ] != [0]
        if grid == {"tp": 2}:
            assert found["adopted"] == found["parameters"], (
                "equal layouts: every parameter is the actor's"
            )
            assert (
                stats["bytes_local"],
                stats["bytes_received"],
                stats["num_messages"],
            ) == (0, 0, 0)
