"""`megaverl dpo` and `megaverl reward`: what their configuration must hold, and what is refused with its reason."""

from __future__ import annotations

import pytest

from megaverl.config import Config, smallest_world
from megaverl.config.signatures import source_file

OWN = "losses_of_pairs_for_test"
LOSSES = """
def of_weather(chosen_log_probs, weather, weights): ...
def with_slope(chosen_log_probs, rejected_log_probs, *, slope: float): ...
def of_single(log_probs, desirable, weather): ...
def of_some(log_probs, desirable, weights): ...
def of_ranks(chosen_rewards, rejected_rewards, margins): ...
def without_margins(chosen_rewards, rejected_rewards): ...
"""


@pytest.fixture
def own_losses(tmp_path, monkeypatch) -> None:
    """A module `OWN`, which a check reads and does not import."""
    source_file.cache_clear()
    (tmp_path / f"{OWN}.py").write_text(f"{LOSSES}\nraise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def pairs(tmp_path) -> list[str]:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    return [f"preference.train={tmp_path / 'pairs.jsonl'}"]


def test_which_roles_a_loss_needs(load, pairs):
    for name, reference in (
        ("dpo", True),
        ("ipo", True),
        ("kto", True),
        ("simpo", False),
        ("orpo", False),
    ):
        config: Config = load(*pairs, f"preference.loss={name}", command="dpo")
        assert config.preference_needs_reference == reference
    config = load(*pairs, "actor={tp: 2, pp: 2}", "reward_model.pp=1", command="reward")
    assert (config.reward_model.tp, config.reward_model.pp) == (2, 1), (
        "the rest is the actor's"
    )
    assert smallest_world(config, "reward") == 2


@pytest.mark.parametrize(
    ("command", "overrides", "key", "said"),
    [
        ("dpo", ["preference.train=[]"], "preference.train", "is empty"),
        (
            "dpo",
            ["actor.optimizer.optimizer=sgd"],
            "actor.optimizer.optimizer",
            "does not shard",
        ),
        (
            "reward",
            ["reward_model.optimizer.exp_avg_dtype=bf16"],
            "reward_model.optimizer.exp_avg_dtype",
            "use_precision_aware_optimizer",
        ),
        (
            "dpo",
            ["actor.optimizer.min_lr=1e-3", "preference.lr=1e-4"],
            "actor.optimizer.min_lr",
            "expected from 0 to preference.lr=0.0001",
        ),
        (
            "dpo",
            ["preference.train=nowhere.jsonl"],
            "preference.train.0",
            "does not exist",
        ),
        ("dpo", ["preference.loss=dop"], "preference.loss", "Did you mean `dpo`?"),
        (
            "dpo",
            ["preference.options.bta=0.1"],
            "preference.options.bta",
            "Did you mean `beta`?",
        ),
        (
            "dpo",
            ["preference.options.beta=0"],
            "preference.options.beta",
            "found 0; expected above 0",
        ),
        (
            "dpo",
            ["preference.loss=kto", "preference.batch_size=1"],
            "preference.batch_size",
            "at least 2 rows",
        ),
        (
            "dpo",
            ["preference.options.label_smoothing=0.5"],
            "preference.options.label_smoothing",
            "at least 0 and below 0.5",
        ),
        (
            "dpo",
            ["preference.options.beta=high"],
            "preference.options.beta",
            "found 'high'; expected float",
        ),
        (
            "dpo",
            ["preference.margin_key=margin"],
            "preference.margin_key",
            "no preference loss reads a margin",
        ),
        (
            "dpo",
            ["preference.lr_warmup_steps=100"],
            "preference.lr_warmup_steps",
            "below preference.steps=100",
        ),
        (
            "reward",
            ["preference.validate_every=5"],
            "preference.validate_every",
            "preference.validation is empty",
        ),
        (
            "reward",
            ["reward_model.loss=bradley"],
            "reward_model.loss",
            "Did you mean `bradley_terry`?",
        ),
        (
            "reward",
            ["reward_model.options.centre=1"],
            "reward_model.options.centre",
            "Did you mean `center_coef`?",
        ),
        *(
            (
                command,
                ["reward_model.options.center_coef=-0.5"],
                "reward_model.options.center_coef",
                "at least 0",
            )
            for command in ("reward", "train", "dpo", "generate")
        ),
        (
            "reward",
            ["reward_model.lr=1"],
            "reward_model.lr",
            "reward_model.optimizer.lr",
        ),
        (
            "reward",
            ["actor.tp=5"],
            "reward_model.tp",
            "Sizes that fit: 1, 2, 3, 6, 12.",
        ),
        (
            "reward",
            ["actor={engine: fsdp, pp: 2}"],
            "reward_model.pp",
            "has no pipeline-parallel groups",
        ),
        (
            "reward",
            ["actor.micro_batch_tokens=767"],
            "reward_model.micro_batch_tokens",
            "found 767",
        ),
        (
            "reward",
            ["actor.megatron={fp8: e4m3, fp8_recipe: delayed}"],
            "reward_model.megatron.fp8_recipe",
            "delayed",
        ),
        (
            "dpo",
            [f"preference.loss={OWN}:of_weather"],
            "preference.loss",
            "reads weather; it is given: chosen_log_pro",
        ),
        (
            "dpo",
            [f"preference.loss={OWN}:of_ranks"],
            "preference.loss",
            "reads chosen_rewards, rejected_rewards, marg",
        ),
        (
            "dpo",
            [f"preference.loss={OWN}:with_slope"],
            "preference.options.slope",
            "is not set, and",
        ),
        (
            "dpo",
            [f"preference.loss={OWN}:of_single"],
            "preference.loss",
            "reads weather; it is given: log_probs",
        ),
        (
            "reward",
            [f"reward_model.loss={OWN}:of_ranks"],
            "preference.margin_key",
            "reads margins. Name the column",
        ),
        (
            "reward",
            [f"reward_model.loss={OWN}:of_weather"],
            "reward_model.loss",
            "reads chosen_log_probs, weather",
        ),
        (
            "reward",
            [
                f"reward_model.loss={OWN}:without_margins",
                "preference.margin_key=margin",
            ],
            "preference.margin_key",
            "reads no margins",
        ),
        (
            "train",
            [
                "algorithm.group_size=2",
                "mix=[{update: preference}]",
                f"preference.loss={OWN}:of_some",
            ],
            "preference.loss",
            "which is not of pairs",
        ),
        (
            "train",
            [
                "algorithm.group_size=2",
                "mix=[{update: reward_model, judge: exact_match}]",
                "reward=[{name: exact_match}, {name: learned, path: org/judge}]",
                "reward_model.loss=bradley",
            ],
            "reward_model.loss",
            "Did you mean `bradley_terry`?",
        ),
    ],
)
def test_what_is_refused(mistakes, pairs, own_losses, command, overrides, key, said):
    found = mistakes(*pairs, *overrides, command=command)
    assert said in found[key]
    assert set(found) == {key}
