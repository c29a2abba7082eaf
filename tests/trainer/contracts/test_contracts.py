"""Every contract: a part that keeps to it, and parts that break it, each with words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.algorithms import preference_losses
from megaverl.cli.main import main as megaverl
from megaverl.errors import ConfigError
from megaverl.trainer.contracts import KINDS, check


def main(arguments: list[str]) -> int:
    """`megaverl check-plugin`"""
    return megaverl(["check-plugin", *arguments])


PLUGINS = "tests.trainer.contracts.plugins:"
GOOD = [
    ("reward", "reward"),
    ("loss", "loss"),
    ("preference", "pairs"),
    ("advantage", "advantage"),
    ("filter", "keep"),
    ("generation", "best_of_two"),
    ("environment", "Echo"),
    ("data", "rows"),
    ("tracker", "Tracker"),
]
BAD = [
    ("reward", "reward_nan", "finite"),
    ("reward", "reward_random", "Draw nothing at random"),
    ("loss", "loss_mean", "the weights hold the global denominator"),
    ("loss", "loss_poisoned", "NaN where the weight is 0"),
    ("loss", "loss_unmasked", "multiply by `weights`"),
    ("preference", "pairs_reversed", "its sign"),
    ("preference", "pairs_poisoned", "NaN where the weight is 0"),
    ("advantage", "advantage_unmasked", "multiply by response_mask"),
    ("advantage", "advantage_ordered", "use group_ids"),
    ("advantage", "advantage_bare", "expected Advantages"),
    ("filter", "keep_nothing", "no sample is left to train on"),
    ("filter", "keep_floats", "expected bool of shape [12]"),
    ("generation", "only_one", "1 responses for 4 prompts"),
    ("environment", "Moody", "draw from Start.seed only"),
    ("environment", "Mute", "encode text with self.codec"),
    ("environment", "rows", "not a class derived from Environment"),
    ("data", "rows_without_answers", "no 'answer' in this row"),
    ("data", "rows_random", "opened twice, it is not the same"),
    ("tracker", "Picky", "ValueError"),
]


def test_every_kind_has_a_good_and_a_bad_one() -> None:
    assert {kind for kind, _ in GOOD} == {kind for kind, *_ in BAD} == set(KINDS)


@pytest.mark.parametrize(("kind", "name"), GOOD)
def test_what_keeps_to_its_contract(kind: str, name: str) -> None:
    found = list(check(kind, PLUGINS + name))
    assert len(found) >= 3 and [kept for kept in found if kept.problem] == []


@pytest.mark.parametrize(("kind", "name", "words"), BAD)
def test_what_breaks_it(kind: str, name: str, words: str) -> None:
    assert words in "\n".join(kept.problem for kept in check(kind, PLUGINS + name))


def test_built_in_losses_and_advantages_keep_to_the_same_contracts() -> None:
    from megaverl.trainer.contracts import keep
    from megaverl.trainer.contracts.kinds import (
        advantage_promises,
        loss_promises,
        preference_promises,
    )

    for name in ("ppo_clip", "gspo", "cispo"):
        assert [kept for kept in keep(loss_promises(name, {})) if kept.problem] == []
    for name in preference_losses:
        assert [
            kept for kept in keep(preference_promises(name, {})) if kept.problem
        ] == [], name
    for name in ("gae", "grpo", "rloo", "remax"):
        assert [
            kept for kept in keep(advantage_promises(name, {})) if kept.problem
        ] == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def score(prompt, response, reference, extra, *, worth):\n    return worth * (response == reference)\n"
    )
    assert main(["reward", f"{own}:score", "worth=2.5"]) == 0
    assert capsys.readouterr().out.endswith("own.py:score: all holds\n")
    assert main(["reward", f"{own}:score"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["reward", f"{PLUGINS}reward_batch", "batched=true"]) == 1
    assert "scores 0.0 among others and 1.0 alone" in capsys.readouterr().out
    assert main(["loss", f"{own}:nothing"]) == 2
    assert "has no 'nothing'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown kind 'rewards'"):
        list(check("rewards", "x:y"))
