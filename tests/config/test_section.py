"""What all sections share."""

from __future__ import annotations

from megaverl.config import Config
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.config.section import described_keys, field_meanings


def test_every_key_says_what_it_means():
    assert [entry.key for entry in described_keys(Config) if not entry.meaning] == []
    assert all(field_meanings(Config)[name] for name in Config.model_fields)


def test_a_meaning_over_several_lines_is_one_line():
    meanings = {entry.key: entry.meaning for entry in described_keys(Config)}
    assert not any("\n" in meaning or "  " in meaning for meaning in meanings.values())
    inherited = (
        "Tensor-parallel size: the matrices of every layer are split over this many ranks. These ranks communicate in "
        "every layer, so keep tp within a node."
    )
    assert meanings["actor.tp"] == meanings["critic.tp"] == inherited


def test_what_is_not_at_its_default():
    algorithm = AlgorithmConfig(gamma=0.5, policy_loss_options={"beta": 1})
    assert algorithm.changed() == {"gamma": 0.5, "policy_loss_options": {"beta": 1}}
    assert algorithm.changed("gamma", "lam") == {"gamma": 0.5}
    assert AlgorithmConfig(gamma=1.0, kl={"in": "none"}).changed() == {}


def test_defaults_are_not_shared():
    first, second = AlgorithmConfig(), AlgorithmConfig()
    first.advantage_options["k"] = 1
    assert second.advantage_options == AlgorithmConfig().advantage_options == {}
