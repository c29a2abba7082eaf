"""Settings that differ between a checkpoint and a resumed run: used, kept or refused, and never without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaverl.config import Config, load_config
from megaverl.config.resuming import RULES, STAGES, changes, refusals, table

MODEL_AND_DATA = [
    "model.path=m",
    "data.train=t.jsonl",
    "reward=exact_match",
    "preference.train=p.jsonl",
]

# megatron-core does not shard sgd's state.
WHOLE = ["actor.ddp.use_distributed_optimizer=false"]


def config_of(*overrides: str, command: Any = "train") -> Config:
    return load_config(
        None, [*MODEL_AND_DATA, *overrides], command=command, check_paths=False
    )


def compared(before: list[str], now: list[str], stage: str = "train") -> dict[str, str]:
    command = {"reward_model": "reward"}.get(stage, stage)
    old, new = config_of(*before, command=command), config_of(*now, command=command)
    return {
        change.key: change.outcome
        for change in changes(json.loads(json.dumps(old.to_dict())), new, stage)
    }


STREAMED = {"data.shuffle_buffer": "refused"}


@pytest.mark.parametrize(
    ("stage", "before", "now", "expected"),
    [
        ("train", [], [], {}),
        (
            "train",
            ["run.name=a", "checkpoint.resume=auto"],
            ["run.name=b", "checkpoint.resume=never"],
            {},
        ),
        ("train", ["trainer.steps=4"], ["trainer.steps=8"], {"trainer.steps": "used"}),
        (
            "sft",
            ["sft.steps=4"],
            ["sft.steps=8", "trainer.steps=7"],
            {"sft.steps": "used"},
        ),
        (
            "sft",
            ["sft.batch_size=4"],
            ["sft.batch_size=8"],
            {"sft.batch_size": "refused"},
        ),
        (
            "dpo",
            ["preference.batch_size=4"],
            ["preference.batch_size=8"],
            {"preference.batch_size": "refused"},
        ),
        (
            "reward_model",
            ["preference.lr=1.0e-3"],
            ["preference.lr=2.0e-3"],
            {"preference.lr": "used"},
        ),
        ("train", ["run.seed=1"], ["run.seed=2"], {"run.seed": "refused"}),
        ("sft", ["run.seed=1"], ["run.seed=2"], {"run.seed": "refused"}),
        ("train", [], ["data.system_prompt=Be brief."], {"data.system_prompt": "used"}),
        ("train", [], ["data.chat_template=none"], {"data.chat_template": "used"}),
        ("train", [], ["rollout.sampling.top_k=5"], {"rollout.sampling.top_k": "used"}),
        ("train", ["rollout.sampling.top_k=5"], [], {"rollout.sampling.top_k": "used"}),
        (
            "train",
            [],
            ["reward={name: exact_match, weight: 0.5}"],
            {"reward.0.weight": "used"},
        ),
        (
            "train",
            [],
            ["reward=[{name: exact_match}, {name: positions}]"],
            {"reward": "used"},
        ),
        ("train", [], ["actor.optimizer.lr=1.0e-4"], {"actor.optimizer.lr": "used"}),
        (
            "train",
            [],
            ["actor.optimizer.adam_beta1=0.8"],
            {"actor.optimizer.adam_beta1": "used"},
        ),
        (
            "train",
            WHOLE,
            [*WHOLE, "actor.optimizer.optimizer=sgd"],
            {"actor.optimizer.optimizer": "refused"},
        ),
        ("train", [], ["model.path=elsewhere"], {"model.path": "kept"}),
        ("train", [], ["critic.path=elsewhere"], {"critic.path": "kept"}),
        (
            "train",
            [],
            ["actor.scheduler.lr_decay_style=cosine"],
            {"actor.scheduler.lr_decay_style": "used"},
        ),
        ("train", [], ["data.shuffle_buffer=7"], {"data.shuffle_buffer": "used"}),
        (
            "train",
            ["data.streaming=true"],
            ["data.streaming=true", "data.shuffle_buffer=7"],
            STREAMED,
        ),
    ],
)
def test_what_becomes_of_a_change(
    stage: str, before: list[str], now: list[str], expected: dict[str, str]
) -> None:
    assert compared(before, now, stage) == expected


KL = "algorithm.kl={{in: reward, kind: k1, coef: {}, target: {}}}"


def test_state_that_adapts_comes_from_the_checkpoint() -> None:
    assert compared([KL.format(0.1, 0.5)], [KL.format(0.2, 0.5)]) == {
        "algorithm.kl.coef": "kept"
    }
    assert compared([KL.format(0.1, "null")], [KL.format(0.2, "null")]) == {
        "algorithm.kl.coef": "used"
    }
    assert compared([KL.format(0.1, "null")], [KL.format(0.1, 0.5)]) == {
        "algorithm.kl.target": "refused"
    }
    assert compared([KL.format(0.1, 0.4)], [KL.format(0.1, 0.5)]) == {
        "algorithm.kl.target": "used"
    }


def test_a_refusal_says_what_was_and_what_is_and_what_to_do() -> None:
    found = changes(config_of("run.seed=1").to_dict(), config_of("run.seed=2"), "train")
    [mistake] = refusals(found, "step_00000004")
    assert str(mistake) == (
        "run.seed: was 1 in step_00000004, is 2. The seed determines the order of the rows and every random draw. "
        "Set it back, or start a new run from the saved weights: another run.name, or checkpoint.resume=never."
    )


def test_keys_that_the_older_version_did_not_have_are_left_out() -> None:
    before = config_of().to_dict()
    del before["data"]["system_prompt"], before["alerts"]
    before["gone"] = {"key": 1}
    assert (
        changes(
            before,
            config_of("data.system_prompt=Be brief.", "trainer.steps=7"),
            "train",
        )
        != []
    )
    assert [
        change.key
        for change in changes(before, config_of("data.system_prompt=x"), "train")
    ] == []


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [
        ([], ["actor.ddp.use_distributed_optimizer=false"], "refused"),
        (["actor.ddp.use_distributed_optimizer=false"], [], "refused"),
        # As it was, in words.
        ([], ["actor.ddp.use_distributed_optimizer=true"], "used"),
        (["actor.freeze=[a]"], ["actor.freeze=[a, b]"], "used"),
        ([], ["actor.freeze=[a]"], "used"),
        (["actor.freeze=[a]"], [], "refused"),
        (["actor.freeze=[a]"], ["actor.freeze=[b]"], "refused"),
        (["actor.freeze=[a, b]"], ["actor.freeze=[b]"], "refused"),
        (["model.dtype=float32"], ["model.dtype=bfloat16"], "used"),
    ],
)
def test_optimizers_states_decide(
    before: list[str], now: list[str], outcome: str
) -> None:
    fsdp = ["actor.engine=fsdp"] if "freeze" in str([before, now]) else []
    found = changes(
        config_of(*fsdp, *before).to_dict(), config_of(*fsdp, *now), "train"
    )
    assert {
        change.outcome for change in found if change.key.startswith(("actor", "model"))
    } == {outcome}


def test_what_shapes_responses() -> None:
    now = config_of(
        "rollout.sampling.temperature=0.5",
        "data.system_prompt=x",
        "trainer.steps=7",
        "algorithm.group_size=2",
    )
    found = changes(config_of().to_dict(), now, "train")
    assert {change.key for change in found if change.shapes_responses} == {
        "rollout.sampling.temperature",
        "data.system_prompt",
        "algorithm.group_size",
    }


def test_the_page_on_checkpoints_has_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    assert table() in page.read_text(encoding="utf-8"), "python tools/write_docs.py"


def test_every_rule_names_keys_that_there_are() -> None:
    from fnmatch import fnmatchcase

    from megaverl.config.section import described_keys

    known = {entry.key.replace(".N.", ".0.") for entry in described_keys(Config)}
    known |= {
        f"actor.optimizer.{name}"
        for name in ("optimizer", "initial_loss_scale", "use_distributed_optimizer")
    }
    known |= {"actor.ddp.use_distributed_optimizer", "actor.freeze.0"}
    known.add("rollout.vllm.speculative_config.model")
    for rule in RULES:
        assert set(rule.stages) <= set(STAGES)
        for pattern in rule.keys:
            assert any(fnmatchcase(key, pattern) for key in known), pattern
