"""The result of an update does not depend on TP, PP, DP, virtual stages or the micro-batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaverl.distributed.grid import GridShape
from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

SHAPES = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "dp4": {"dp": 4},
    "cp2": {"cp": 2},
    "cp2 tp2": {"cp": 2, "tp": 2},
    "cp2 pp2": {"cp": 2, "pp": 2},
    "cp2 dp2": {"cp": 2, "dp": 2},
}
ACTOR = {
    "loss_aggregation": "token_mean",
    "entropy_coef": 0.01,
    "kl": {"in": "loss", "kind": "k3", "coef": 0.1},
    "num_mini_batches": 2,
    "num_epochs": 2,
}
CRITIC = {"critic": True, "num_mini_batches": 2}
# An actor that is its own critic. Without a clip of values: at first all are zero, and
# as close to it on either side.
SHARED = {**ACTOR, "shared": True, "value_loss_coef": 0.5, "value_clip_range": None}
OWN_LOSS = {
    "value_loss": "tests.workers.own:squared",
    "value_loss_options": {"scale": 0.3},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"),
        "Qwen3ForCausalLM",
        tie_embeddings=request.param,
    )


def updated(
    launch: Launcher, folder: Path, output: Path, shape: dict[str, int], **options: Any
) -> tuple[dict[str, float], dict]:
    """(metrics, weights) after an update on `shape`."""
    num_ranks = GridShape(**shape).world_size
    results = launch.world(
        num_ranks,
        "tests.workers.ranks:update",
        folder=folder,
        shape=shape,
        output=output,
        **options,
    )
    return results[0], load_file(output / "model.safetensors")


def assert_same(
    found: tuple[dict[str, float], dict], expected: tuple[dict[str, float], dict]
) -> None:
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    assert found[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        torch.testing.assert_close(
            found[1][name], weight, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_same_update_where_ranks_share_a_key_value_head(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """The tiny model has two."""
    expected = updated(launch, folder, tmp_path / "one", {}, **ACTOR)
    assert_same(updated(launch, folder, tmp_path / "tp4", {"tp": 4}, **ACTOR), expected)


@pytest.mark.parametrize("options", [SHARED, CRITIC], ids=["shared", "critic"])
def test_same_update_on_every_grid(
    launch: Launcher, folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = updated(launch, folder, tmp_path / "one", {}, **options)
    before = load_file(folder / "model.safetensors")
    moved = [
        name
        for name in before
        if name in expected[1] and not torch.equal(before[name], expected[1][name])
    ]
    assert len(moved) == len([name for name in before if name in expected[1]]), (
        "every weight takes part"
    )
    for name, shape in SHAPES.items():
        assert_same(
            updated(launch, folder, tmp_path / name, shape, **options), expected
        )


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "seq_mean_token_sum"])
def test_same_update_for_every_micro_batch_size(
    launch: Launcher, folder: Path, tmp_path: Path, aggregation: str
) -> None:
    options = {**ACTOR, "loss_aggregation": aggregation}
    expected = updated(
        launch, folder, tmp_path / "one", {}, micro_batch_tokens=1000, **options
    )
    for tokens in (14, 30):
        assert_same(
            updated(
                launch,
                folder,
                tmp_path / str(tokens),
                {"dp": 2},
                micro_batch_tokens=tokens,
                **options,
            ),
            expected,
        )


def test_samples_packed_with_their_prompt_once_give_what_padded_rows_do(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    for number, options in enumerate((SHARED, CRITIC)):
        given = {**options, "same_prompts": 3}
        padded = updated(
            launch,
            folder,
            tmp_path / f"padded{number}",
            {},
            pack_samples=False,
            **given,
        )
        for name, shape in {"one": {}, "dp2": {"dp": 2}, "cp2": {"cp": 2}}.items():
            assert_same(
                updated(launch, folder, tmp_path / f"{name}{number}", shape, **given),
                padded,
            )
        cut = updated(
            launch,
            folder,
            tmp_path / f"cut{number}",
            {"cp": 2},
            pack_samples=False,
            **given,
        )
        assert_same(cut, padded)


@pytest.mark.parametrize("pack_samples", [True, False], ids=["packed", "padded"])
def test_the_value_after_a_response_that_was_cut_off(
    launch: Launcher, folder: Path, pack_samples: bool
) -> None:
    """It is what the critic says before the token that would have come next; 0 after a response that has ended."""
    for shape in ({}, {"pp": 2}, {"dp": 2}, {"cp": 2}):
        size = GridShape(**shape).world_size
        given = {"folder": folder, "shape": shape, "pack_samples": pack_samples}
        for found in launch.world(size, "tests.workers.ranks:last_values", **given):
            expected = [*found["left out"][:4], 0.0, found["left out"][5]]
            assert found["last True"] == pytest.approx(expected, abs=1e-5) and all(
                found["left out"]
            )
            assert found["last False"] == [0.0] * 6


def test_mini_batches_share_prompts(launch: Launcher, folder: Path) -> None:
    """A prompt of 3 to 5 tokens, all but the last of which two of its three samples find computed."""
    (found,) = launch.world(1, "tests.workers.ranks:tokens_of_updates", folder=folder)
    saved = [each - packed for packed, each, _ in found]
    assert [num_samples for *_, num_samples in found] == [6] * 4
    assert saved[0] + saved[1] == saved[2] + saved[3], "whole groups, in either epoch"
    assert all(2 * 2 * 2 <= few <= 2 * 2 * 4 for few in saved), "two groups in each"


def test_log_probs_from_hidden_states_give_the_same(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    expected = updated(launch, folder, tmp_path / "whole", {"tp": 2, "pp": 2}, **SHARED)
    parallel = {"megatron": {"sequence_parallel": True}}
    for name, options in {
        "pp": {},
        "pp with sequence parallel": parallel,
        "cp with sequence parallel": parallel,
    }.items():
        chunked = {**SHARED, "chunked_logits": True, **options}
        assert_same(
            updated(launch, folder, tmp_path / name, {"tp": 2, name[:2]: 2}, **chunked),
            expected,
        )


def test_sequence_parallel_gives_the_same(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    for options in ({**SHARED, **OWN_LOSS}, {**CRITIC, **OWN_LOSS}):
        expected = updated(
            launch, folder, tmp_path / f"one{len(options)}", {}, **options
        )
        assert any(name.endswith("own_error") for name in expected[0])
        parallel = {"megatron": {"sequence_parallel": True}, **options}
        assert_same(
            updated(
                launch,
                folder,
                tmp_path / f"sp{len(options)}",
                {"tp": 2, "pp": 2},
                **parallel,
            ),
            expected,
        )


def test_an_update_that_is_not_finite_changes_nothing(
    launch: Launcher, folder: Path
) -> None:
    for unchanged in launch.world(
        4, "tests.workers.ranks:update_that_is_not_finite", folder=folder
    ):
        assert unchanged
        assert all(unchanged)


def test_an_update_follows_its_decision(launch: Launcher, folder: Path) -> None:
    """A skipped update changes no weight, and the schedule waits. An applied one is clipped as in megatron-core."""
    found = launch.world(1, "tests.workers.ranks:as_decided", folder=folder)[0]
    assert found["same"] and found["far"]["own"] == pytest.approx(0.1 * 1e-3, rel=1e-3)
    assert found["found"]["own"] == found["found"]["applied"] == [0.1, 1, 0.0, 4, 3, 0]
    lr, *counts = found["found"]["later"]
    assert lr == pytest.approx(0.1 * 6 / 10) and counts == [5, 0.0, 4, 3, 0]
    assert found["far"]["later"] == pytest.approx(
        found["far"]["own"] * 6 / 10, rel=1e-2
    )
    assert (
        found["found"]["skipped"] == [lr, 4, 1.0, 4, 2, 2]
        and found["far"]["skipped"] == 0.0
    )
    assert found["reported"] == [["actor", 0, 3, True, True]] * 2


def test_a_shared_backbone_takes_the_step_of_both_losses(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """As long as the value head is zero, the backbone's gradient is the policy's, and the head's that of a critic."""
    losses = {"loss_aggregation": "token_mean", "value_loss_coef": 0.5}
    metrics, weights = updated(
        launch, folder, tmp_path / "shared", {}, shared=True, **losses
    )
    alone = [
        updated(launch, folder, tmp_path / str(critic), {}, critic=critic, **losses)
        for critic in (False, True)
    ]
    head = weights.pop("score.weight")
    norms = [found["grad_norm"] for found, _ in alone]
    assert metrics["grad_norm"] == pytest.approx(
        (norms[0] ** 2 + norms[1] ** 2) ** 0.5, rel=1e-5
    )
    assert metrics["loss"] == pytest.approx(alone[0][0]["loss"], rel=1e-5)
    assert metrics["critic/loss"] == pytest.approx(alone[1][0]["loss"], rel=1e-5)
    before = load_file(folder / "model.safetensors")
    assert weights.keys() == alone[0][1].keys() == before.keys()
    clipped = [1 / max(1.0, norm) for norm in (metrics["grad_norm"], *norms)]
    for name, weight in weights.items():
        ours, theirs = (after - before[name] for after in (weight, alone[0][1][name]))
        torch.testing.assert_close(
            ours / clipped[0], theirs / clipped[1], atol=1e-3, rtol=0.05
        )
    torch.testing.assert_close(
        head / clipped[0],
        alone[1][1]["score.weight"] / clipped[2],
        atol=1e-3,
        rtol=0.05,
    )
    for found in launch.world(2, "tests.workers.ranks:one_pass", folder=folder):
        assert (
            found["passes"][0] == found["passes"][1]
            and found["same"] == [True, True]
            and found["heads"]
        )
        assert found["last"], "the values after them too"
