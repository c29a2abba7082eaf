"""Saving memory changes no number: activation checkpointing, offload, adapters that share the reference's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

RANKS = "tests.workers.memory_ranks:"
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", tie_embeddings=True
    )


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_bit_for_bit_the_same(
    launch: Launcher, folder: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    offload = {
        "parameters": True,
        "optimizer": True,
        "gradients": True,
        "folder": str(tmp_path),
    }
    variants: list[dict[str, Any]] = [
        {},
        {"checkpointing": "selective"},
        {"checkpointing": "full"},
        {
            "checkpointing": "full",
            "overrides": {"recompute_method": "block", "recompute_num_layers": 1},
        },
        {"offload": offload},
        {"offload": offload, "checkpointing": "full"},
    ]
    given = [{"lora": lora, **variant} for variant in variants]
    shape = {"tp": 2} if lora else {"pp": 2}
    for found in launch.world(
        2, f"{RANKS}two_steps", folder=folder, shape=shape, variants=given
    ):
        assert found == [[True, True, True]] * len(variants)


def test_every_kind_of_update_with_offload(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """Preferences, a reward model, PRIME's and supervised answers train what comes back, as policies do."""
    offload = {
        "parameters": True,
        "optimizer": True,
        "gradients": True,
        "folder": str(tmp_path),
    }
    for found in launch.world(
        2,
        f"{RANKS}every_kind_of_update",
        folder=folder,
        shape={"dp": 2},
        offload=offload,
    ):
        assert found == dict.fromkeys(
            ("preference", "reward_model", "implicit", "answers"), True
        )


def test_sixteen_bits_with_offload(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """There the optimizer has master weights of its own, and float32 copies of the gradients."""
    offload = {"optimizer": True, "gradients": True, "folder": str(tmp_path)}
    variants = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "offload": offload}]
    for found in launch.world(
        2, f"{RANKS}two_steps", folder=folder, shape={"dp": 2}, variants=variants
    ):
        assert found == [[True, True, True]] * 2


def test_what_is_away_takes_no_memory(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    kinds = ("weights", "gradients", "optimizer", "optimizer at first")
    held, away, adapters = (
        launch.world(
            2,
            f"{RANKS}bytes_here",
            folder=folder,
            shape={"tp": 2},
            dtype="bfloat16",
            **variant,
        )[0]
        for variant in (
            {},
            {
                "offload": {
                    "parameters": True,
                    "optimizer": True,
                    "gradients": True,
                    "folder": str(tmp_path),
                }
            },
            {"lora": LORA},
        )
    )
    assert all(held[kind] > 30_000 for kind in kinds)
    # The first update adds nothing to it but counts of steps.
    for found in (held, adapters):
        assert 0.99 < found["optimizer at first"] / found["optimizer"] <= 1
    assert away == dict.fromkeys(kinds, 0)
    assert all(adapters[kind] < held[kind] / 2 for kind in ("gradients", "optimizer"))
    assert list(tmp_path.iterdir()) == [], "files without a name"


def test_more_micro_batches(launch: Launcher, folder: Path) -> None:
    """The order of additions changes, and nothing else."""
    counts = launch.world(
        2, f"{RANKS}micro_batch_counts", folder=folder, least=[1, 2, 5, 100]
    )[0]
    assert counts == [1, 2, 5, 6]


def test_reference_and_resume_of_adapters(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """On the same grid bit for bit, dropout's draws included; on another one the adapters are all there."""
    other = make_tiny_folder(
        tmp_path / "other", "Qwen3ForCausalLM", tie_embeddings=True, seed=1
    )
    for found in launch.world(
        2,
        f"{RANKS}reference_and_resume",
        folder=folder,
        shapes=[{"tp": 2}, {"pp": 2, "vpp": 2}],
        checkpoints=tmp_path / "checkpoints",
        other_folder=other,
    ):
        assert found["reference"]
        assert found["resumed"][0] == [True, True]
        assert "CheckpointError" in found["refused"]
        assert "actor.lora.base is" in found["refused"]
        assert all(".lora_" in name for name in found["stored"]), (
            "of the base model, nothing"
        )
        assert len(found["stored"]) == 4 * 4 * 7 * 2, (
            "each factor, its master copy and two moments"
        )


def test_adapters_of_parts_of_rows(launch: Launcher, folder: Path) -> None:
    """Each context-parallel rank drops what it draws for its own tokens; without dropout nothing differs."""
    first, second = launch.world(
        2, f"{RANKS}adapters_of_parts", folder=folder, lora=LORA
    )
    for layer, dropped in first["dropped"].items():
        assert set(dropped) == {0.0, 2.0} and dropped != second["dropped"][layer], layer
    assert first["next"] == second["next"], (
        "they stay alike for what is drawn of whole samples"
    )
    for found in (first, second):
        whole, cut = found["updates"]
        assert cut == pytest.approx(whole, abs=1e-5, rel=1e-5)
