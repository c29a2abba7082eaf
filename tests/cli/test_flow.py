"""`megaverl flow show`: the trainer's own flow, without any role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.cli.main import main as megaverl


def main(arguments: list[str]) -> int:
    """`megaverl flow`"""
    return megaverl(["flow", *arguments])


CONFIG = str(Path(__file__).parents[2] / "configs" / "gsm8k_smollm2" / "ppo.yaml")


def test_the_flow_of_ppo_is_shown_stage_by_stage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["show", "--config", CONFIG, "--format", "json"]) == 0
    flow = json.loads(capsys.readouterr().out)
    names = [operator["name"] for operator in flow["operators"]]
    assert (
        names[0] == "rollout"
        and names[-1] == "reshard"
        and {"values", "critic_update"} <= set(names)
    )
    assert any({"reward", "values"} <= set(stage) for stage in flow["stages"]), (
        "these can run side by side"
    )
    assert flow["moves"] == []
    assert main(["show", "--config", CONFIG]) == 0
    assert "rollouts -> scores" in capsys.readouterr().out
    assert main(["show", "--config", CONFIG, "--format", "mermaid"]) == 0
    assert "rollout -- rollouts --> reward" in capsys.readouterr().out


def test_a_flow_without_a_critic_and_with_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = "placement={actor: [0, 1], rollout: [2]}"
    arguments = [
        "show",
        "--config",
        CONFIG,
        "--nproc=3",
        places,
        "algorithm.name=grpo",
        "algorithm.group_size=2",
    ]
    assert main([*arguments, "actor={tp: 1, pp: 1}", "rollout.tp=1"]) == 0
    text = capsys.readouterr().out
    assert "critic" not in text
    assert "rollouts: ranks 2 -> 0-1, for " in text


def test_operators_of_ones_own_are_where_their_values_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One takes the reward's scores and gives others, which the actor gets; one looks at them."""
    own = Path(__file__).parents[1] / "trainer" / "api" / "own_loop.py"
    arguments = [
        "show",
        "--config",
        CONFIG,
        "--nproc=2",
        "actor={tp: 1, pp: 1}",
        "placement={reward: 0, actor: 1}",
    ]
    assert (
        main(
            [*arguments, f"trainer.operators=['{own}:add_operators']", "--format=json"]
        )
        == 0
    )
    flow = json.loads(capsys.readouterr().out)
    operators = {operator["name"]: operator for operator in flow["operators"]}
    assert (
        operators["double"]["ranks"]
        == operators["look"]["ranks"]
        == operators["reward"]["ranks"]
    )
    order = list(operators)
    assert (
        order.index("reward")
        < order.index("double")
        < min(order.index("look"), order.index("advantages"))
    )
    assert main([*arguments, f"trainer.operators=['{own}:add_operator']"]) == 2
    assert "did you mean 'add_operators'" in capsys.readouterr().err


def test_a_program_is_no_flow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--config", CONFIG, "trainer.program=own.py:step"]) == 2
    assert "the step is own.py:step, a function and no flow" in capsys.readouterr().err


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--config", CONFIG, "actor.tpp=2"]) == 2
    assert "actor.tpp" in capsys.readouterr().err
