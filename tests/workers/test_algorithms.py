"""Policy losses with their corrections give the same loss and gradient norm on 1x1x1 and 2x2x1, for other splits."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaverl.algorithms import policy_losses, preference_losses
from megaverl.distributed.grid import GridShape
from megaverl.errors import ConfigError
from megaverl.models.packing import pack
from megaverl.models.tiny import make_tiny_folder
from megaverl.workers.teacher import Teacher
from tests.launcher import Launcher

# The second mini-batch starts from what the first has learned: a wrong gradient shows
# in its loss.
COMMON = {
    "num_mini_batches": 2,
    "entropy_coef": 0.01,
    "loss_aggregation": "seq_mean_token_mean",
}
STRAIGHT_THROUGH = {"in": "loss", "kind": "k1", "coef": 0.1, "straight_through": True}
PARTS: dict[str, dict[str, Any]] = {
    "gspo": {"correction": {"kind": "sequence_mask", "high": 1.1}, "clip_range": 0.02},
    "gmpo": {"correction": {"kind": "geometric_mask", "low": 0.9, "high": 1.1}},
    "cispo": {
        "correction": {
            "kind": "token_truncate",
            "high": 1.1,
            "also": [
                {"kind": "reject", "high": 0.02, "options": {"over": "max"}},
                {"kind": "off_policy_mask", "high": 0.01},
            ],
        }
    },
    "sapo": {
        "correction": {"kind": "token_mask"},
        "loss_aggregation": "fixed_length",
        "loss_length": 9,
        "kl": {"in": "loss", "coef": 0.1, "score_function": True},
    },
    "importance_sampling": {
        "correction": {"kind": "sequence_truncate", "high": 1.1},
        "kl": {"in": "loss", "coef": 0.1, "importance_weighted": True},
    },
    "ppo_clip": {"top_entropy": 0.5, "positive_coef": 0.5, "entropy_target": 5.0},
    "policy_gradient": {"loss_aggregation": "token_sum"},
    "clip_cov": {"policy_loss_options": {"fraction": 0.3, "covariance_low": -1.0}},
    "kl_cov": {"policy_loss_options": {"fraction": 0.3}, "kl": STRAIGHT_THROUGH},
}
TWICE = {"gpg"}  # policy_gradient under another name
OTHERS: dict[str, dict[str, Any]] = {
    name: {} for name in policy_losses if name not in {*PARTS, *TWICE}
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    name: {**COMMON, "policy_loss": name, **part}
    for name, part in {**PARTS, **OTHERS}.items()
}
ON_TWO_RANKS = ("vespo", "dro")  # which read what gspo does: one split and one grid
OWN = {
    "token_selector": "tests.workers.own:every_other",
    "policy_loss_options": {"offset": 1},
}
ALGORITHMS["own_selector"] = {**COMMON, "policy_loss": "clip_cov", **OWN}
# A teacher over the whole vocabulary: alone, and beside a policy loss, with logits that
# are never whole.
TAUGHT = {"divergence": "reverse_kl", "coef": 2.0, "top_k": 20}
ALGORITHMS["gkd"] = {
    "name": "gkd",
    "num_mini_batches": 2,
    "distillation": {"options": {"beta": 0.3}},
}
ALGORITHMS["taught"] = {
    **COMMON,
    "name": "grpo",
    "distillation": TAUGHT,
    "chunked": True,
}

# Of losses that read the same, one: a grid shows in what they are given.
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.5, "label_smoothing": 0.1},
    "ipo": {"beta": 0.5},
    "simpo": {},
    "orpo": {"lam": 0.5},
    "kto": {"undesirable_weight": 0.5},
}
# These in a world that is cheaper: one model, which stays as it is.
RELATIVES: dict[str, dict[str, Any]] = {
    "hinge": {},
    "wpo": {},
    "aot": {},
    "aot_unpaired": {},
    "bco": {},
}


def test_all_that_preference_losses_read_is_given_to_one_of_them() -> None:
    read = {
        name: frozenset(preference_losses.get(name).inputs)
        for name in preference_losses
    }
    assert {
        reads
        for name, reads in read.items()
        if not any(reads <= read[other] for other in LOSSES | RELATIVES)
    } == set()


def updates(
    launch: Launcher,
    folder: Path,
    shape: dict[str, int],
    tokens: int,
    what: str = "updates",
) -> dict[str, Any]:
    size = GridShape(**shape).world_size
    given: dict[str, Any] = {"losses": LOSSES}
    if what == "updates":
        chosen = {
            name: each
            for name, each in ALGORITHMS.items()
            if size < 4 or name not in ON_TWO_RANKS
        }
        given = {"algorithms": chosen, "teacher": folder.parent / "teacher"}
    options = {"folder": folder, "shape": shape, "micro_batch_tokens": tokens, **given}
    results = launch.world(size, f"tests.workers.algorithm_ranks:{what}", **options)
    assert all(result == results[0] for result in results[1:]), (
        "every rank says the same"
    )
    return results[0]


def test_same_loss_and_gradient_on_every_grid_and_for_every_split(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path / "model", "Qwen3ForCausalLM")
    make_tiny_folder(tmp_path / "teacher", "LlamaForCausalLM", seed=1)
    expected = updates(launch, folder, {}, 1000)
    norms = torch.tensor(expected.pop("score_norms"))
    for shape, tokens in (({"tp": 2, "pp": 2}, 14), ({"cp": 2}, 32)):
        found = updates(launch, folder, shape, tokens)
        torch.testing.assert_close(
            torch.tensor(found.pop("score_norms")), norms, atol=1e-5, rtol=0
        )
        for name, metrics in found.items():
            assert metrics == pytest.approx(expected[name], abs=2e-5, rel=2e-5), (
                shape,
                name,
            )
    assert 0.4 < expected["own_selector"]["selected_fraction"] < 0.7
    for name in ("clip_cov", "kl_cov"):
        assert 0.0 < expected[name]["selected_fraction"] < 0.5
    assert 0.0 < expected["cispo"]["rejected_fraction"] < 1.0
    assert 4.0 < expected["ppo_clip"]["positive_loss"] < 5.5
    for name in ("gspo", "gmpo", "cispo", "importance_sampling"):
        assert 0.0 < expected[name]["correction_fraction"] < 1.0
    assert (
        expected["gkd"]["distillation_divergence"] > 0
        and expected["gkd"]["grad_norm"] > 0
    )


def test_pairs_too(launch: Launcher, tmp_path: Path) -> None:
    """Pairs stay together however they are split, and a reward model's score is that of the last token."""
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM")
    expected = updates(launch, folder, {}, 1000, "pair_updates")
    known = {name: torch.tensor(expected.pop(name)) for name in ("scores", "values")}
    for shape, tokens in (({"tp": 2, "pp": 2}, 28), ({"cp": 2}, 40)):
        found = updates(launch, folder, shape, tokens, "pair_updates")
        for name, values in known.items():
            torch.testing.assert_close(
                torch.tensor(found.pop(name)), values, atol=3e-5, rtol=0
            )
        for name, reports in found.items():
            for report, wanted in zip(reports, expected[name], strict=True):
                # Before anything is learned, of ties.
                for which in ("preference_accuracy", "implicit_accuracy"):
                    report.pop(which, None), wanted.pop(which, None)
                assert report == pytest.approx(wanted, abs=3e-5, rel=3e-5), (
                    shape,
                    name,
                )
    assert expected["dpo"][0]["margin"] == pytest.approx(0.0, abs=1e-5), (
        "policy and reference count the same tokens"
    )
    for name in (*LOSSES, "single"):
        assert expected[name][1]["loss"] < expected[name][0]["loss"], f"{name} learns"
    for name in ("implicit", "answers"):
        assert expected[name][1]["loss"] < expected[name][0]["loss"], f"{name} learns"
    assert expected["two_heads"][1]["loss"] < expected["two_heads"][0]["loss"]
    assert expected["reward_model"][2]["loss"] < expected["reward_model"][1]["loss"]


def test_what_follows_from_all_pairs_does_not_depend_on_split_or_grid(
    launch: Launcher, tmp_path: Path
) -> None:
    """Ranks, weights and means of the whole mini-batch, of two models that differ; and
    the recipe of online DPO (arXiv 2402.04792, algorithm 1): of each group the best
    response is preferred to the worst, by DPO's loss.
    """
    paths = [
        make_tiny_folder(tmp_path / name, "Qwen3ForCausalLM", seed=seed)
        for seed, name in enumerate("ab")
    ]
    given = {
        "folder": paths[0],
        "other": paths[1],
        "losses": {name: {"beta": 0.5} for name in RELATIVES},
    }
    expected, split = (
        launch.world(
            GridShape(**shape).world_size,
            "tests.workers.algorithm_ranks:preference_losses_at_rest",
            shape=shape,
            micro_batch_tokens=tokens,
            **given,
        )
        for shape, tokens in (({}, 1000), ({"tp": 2}, 28))
    )
    policy, reference = expected[0].pop("answers")
    margins = [
        (policy[a] - reference[a]) - (policy[b] - reference[b])
        for a, b in ((1, 0), (3, 4))
    ]
    online = sum(math.log(1 + math.exp(-0.1 * margin)) for margin in margins) / 2
    assert expected[0]["online_dpo"]["loss"] == pytest.approx(online, abs=1e-5)
    assert expected[0]["online_dpo"]["samples"] == 4 and min(map(abs, margins)) > 0.1
    for rank in split:
        rank.pop("answers")
        for name, metrics in rank.items():
            assert metrics == pytest.approx(expected[0][name], abs=2e-5, rel=2e-5), name
    hinge, wpo, unpaired = (
        expected[0][name] for name in ("hinge", "wpo", "aot_unpaired")
    )
    assert (
        hinge["margin"] == pytest.approx(unpaired["margin"])
        and 0.01 < wpo["pair_weight"] <= 1.0
    )
    assert min(metrics["grad_norm"] for metrics in expected[0].values()) > 1e-3


def test_a_teacher_with_another_vocabulary_is_refused() -> None:
    def of(size: int, pack: Any = pack, multiple: int = 4) -> Any:
        return SimpleNamespace(
            spec=SimpleNamespace(vocab_size=size), pack=pack, token_multiple=multiple
        )

    teacher = Teacher(of(7, multiple=6), "reverse_kl", {}, temperature=1.0)
    teacher.check_student(student := of(7))
    assert student.pack and student.token_multiple == 12
    Teacher(of(7, pack=None), "reverse_kl", {}, temperature=1.0).check_student(student)
    assert student.pack is None, "both read the same rows"
    with pytest.raises(
        ConfigError,
        match="reference.path: the teacher has a vocabulary of 7 tokens.*one of 8",
    ):
        teacher.check_student(of(8))
