"""tools/check_reshard.py: the real command on tiny models, and its plans of large ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.trainer import elastic_agent
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments, inputs  # noqa: F401  (a fixture)
from tools import check_reshard
from tools.check_reshard import add_up, kind_of


@pytest.fixture
def tiny(inputs: Path, tmp_path: Path) -> list[str]:  # noqa: F811
    """A tiny configuration whose actor and engine lie differently, on the engine that starts fastest."""
    config, *overrides = command_arguments(inputs, tmp_path / "runs")
    return [
        config.removeprefix("--config="),
        *overrides,
        "actor.tp=2",
        "rollout.engine=hf",
        "rollout.tp=1",
    ]


def test_every_weight_of_a_configuration_arrives(
    tiny: list[str], launch: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a person starts it: it finds out how many ranks it wants."""
    said = []

    def start_copies(arguments: list[str], nproc: int, log_hint: str) -> int:
        ended = launch.command(arguments, ranks=nproc, logs=tmp_path / "logs")
        said.extend(ended.output)
        return max(ended.codes)

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(elastic_agent, "start_ranks", start_copies)
    assert check_reshard.main(tiny) == 0, said
    table, nothing = said
    [fused] = [
        line
        for line in table.splitlines()
        if line.startswith("model.layers.*.self_attn.q_proj.weight")
    ]
    assert fused.endswith("equal")
    assert "DIFFERS" not in table and "tensors compared" in table and nothing == ""


def test_a_flipped_bit_is_named_and_fails(
    tiny: list[str], launch: Launcher, tmp_path: Path
) -> None:
    ended = launch.command(
        ["tools/check_reshard.py", *tiny, "--flip-a-bit"], logs=tmp_path / "logs"
    )
    assert ended.codes == [1, 1], ended.text
    assert ended.text.count("DIFFERS") == 1
    assert (
        "of the destination on rank 1 is not what the source holds on rank"
        in ended.text
    )


def test_plans_of_a_large_configuration_are_proved_without_weights(
    launch: Launcher, tmp_path: Path
) -> None:
    given = ["configs/llama3_70b/grpo_128_nodes.yaml", "--plan-only", "--world", "64"]
    ended = launch.command(["tools/check_reshard.py", *given], ranks=1, logs=tmp_path)
    assert ended.codes == [0], ended.text
    assert "64 plans are exact" in ended.text
    assert "model.layers.*.mlp.down_proj.weight" in ended.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.yaml", "--plan-only"], "no-such.yaml"),
        (
            [
                "configs/llama3_70b/grpo_128_nodes.yaml",
                "--plan-only",
                "actor.tp=7",
                "--world",
                "56",
            ],
            "actor.tp",
        ),
        (
            ["configs/llama3_70b/grpo_128_nodes.yaml", "--plan-only", "actor.tq=8"],
            "actor.tq",
        ),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    launch: Launcher, tmp_path: Path, arguments: list[str], message: str
) -> None:
    ended = launch.command(
        ["tools/check_reshard.py", *arguments], ranks=1, logs=tmp_path
    )
    assert ended.codes == [2], ended.text
    assert message in ended.text and "Traceback" not in ended.text


def test_layers_and_experts_of_one_kind_are_counted_together() -> None:
    assert (
        kind_of("model.layers.11.mlp.experts.3.up_proj.weight")
        == "model.layers.*.mlp.experts.*.up_proj.weight"
    )
    assert add_up([{"a": {"held": 1}}, {"a": {"held": 2}, "b": {"held": 3}}]) == {
        "a": {"held": 3},
        "b": {"held": 3},
    }
