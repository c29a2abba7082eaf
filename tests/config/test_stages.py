"""`megaverl dpo` and `megaverl reward`: what their configuration must hold, and what is refused with its reason."""

from __future__ import annotations

import pytest

from megaverl.config import Config, smallest_world


@pytest.fixture
def pairs(tmp_path) -> list[str]:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    return [f"preference.train={tmp_path / 'pairs.jsonl'}"]


def test_which_roles_a_loss_needs(load, pairs):
    for name, reference in (("dpo", True), ("ipo", True), ("kto", True), ("simpo", False), ("orpo", False)):
        config: Config = load(*pairs, f"preference.loss={name}", command="dpo")
        assert config.preference_needs_reference == reference
    config = load(*pairs, "actor={tp: 2, pp: 2}", "reward_model.pp=1", command="reward")
    assert (config.reward_model.tp, config.reward_model.pp) == (2, 1), "the rest is the actor's"
    assert smallest_world(config, "reward") == 2


@pytest.mark.parametrize(
    ("command", "overrides", "key", "said"),
    [
        ("dpo", ["preference.train=[]"], "preference.train", "is empty"),
        ("dpo", ["preference.train=nowhere.jsonl"], "preference.train.0", "does not exist"),
        ("dpo", ["preference.loss=dop"], "preference.loss", "Did you mean `dpo`?"),
        ("dpo", ["preference.options.bta=0.1"], "preference.options.bta", "Did you mean `beta`?"),
        ("dpo", ["preference.options.beta=0"], "preference.options.beta", "found 0; expected above 0"),
        ("dpo", ["preference.loss=kto", "preference.batch_size=1"], "preference.batch_size", "at least 2 rows"),
        (
            "dpo",
            ["preference.options.label_smoothing=0.5"],
            "preference.options.label_smoothing",
            "at least 0 and below 0.5",
        ),
        ("dpo", ["preference.options.beta=high"], "preference.options.beta", "found 'high'; expected float"),
        ("dpo", ["preference.margin_key=margin"], "preference.margin_key", "no preference loss reads a margin"),
        ("dpo", ["preference.lr_warmup_steps=100"], "preference.lr_warmup_steps", "below preference.steps=100"),
        ("reward", ["preference.validate_every=5"], "preference.validate_every", "preference.validation is empty"),
        ("reward", ["reward_model.loss=bradley"], "reward_model.loss", "Did you mean `bradley_terry`?"),
        ("reward", ["reward_model.options.centre=1"], "reward_model.options.centre", "Did you mean `center_coef`?"),
        ("reward", ["reward_model.lr=1"], "reward_model.lr", "reward_model.optimizer.lr"),
    ],
)
def test_what_is_refused(mistakes, pairs, command, overrides, key, said):
    found = mistakes(*pairs, *overrides, command=command)
    assert said in found[key]
    assert set(found) == {key}
