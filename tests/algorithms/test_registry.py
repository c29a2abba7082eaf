from __future__ import annotations

import re
import sys

import pytest
import torch

from megaverl.algorithms import (
    Registry,
    advantage_estimators,
    aggregations,
    corrections,
    divergences,
    policy_losses,
    preference_losses,
    reward_model_losses,
    token_selectors,
    value_losses,
)
from megaverl.errors import ConfigError, DataError


@pytest.fixture
def registry() -> Registry[float]:
    registry: Registry[float] = Registry("policy loss")

    @registry.register("double_clip")
    def double_clip(log_probs, advantages, weights=None, *, clip: float = 0.2, scale: float) -> float:
        return float(log_probs.sum()) * scale + clip + (0.0 if weights is None else 100.0)

    return registry


def test_an_entry_knows_its_inputs_and_options(registry):
    entry = registry.get("double_clip")
    assert entry.inputs == ("log_probs", "advantages") and entry.optional_inputs == ("weights",)
    assert list(entry.options) == ["clip", "scale"]
    batch = {"log_probs": torch.ones(2), "advantages": torch.ones(2), "other": torch.ones(2)}
    assert entry(batch, scale=3.0) == pytest.approx(6.2)
    assert entry({**batch, "weights": torch.ones(2)}, scale=3.0, clip=0.0) == 106.0


def test_missing_input_is_named(registry):
    with pytest.raises(DataError, match="policy loss 'double_clip' needs 'advantages'.*only 'log_probs'"):
        registry.get("double_clip")({"log_probs": torch.ones(1)}, scale=1.0)


def test_all_wrong_options_are_named_at_once(registry):
    with pytest.raises(ConfigError) as caught:
        registry.get("double_clip").check_options({"clop": 1, "gamma": 1})
    message = str(caught.value)
    assert "has no option 'clop' (did you mean 'clip'?)" in message
    assert "has no option 'gamma'" in message and "needs the option 'scale'" in message


def test_unknown_name_lists_the_nearest(registry):
    with pytest.raises(ConfigError, match=r"unknown policy loss 'duble_clip' \(did you mean 'double_clip'\?\)"):
        registry.get("duble_clip")


def test_names_are_taken_once(registry):
    with pytest.raises(ConfigError, match="registered twice"):
        registry.register("double_clip")(lambda x: 0.0)


def test_every_parameter_must_have_a_name(registry):
    with pytest.raises(ConfigError, match=r"must name every parameter.*'\*\*options'"):
        registry.register("loose")(lambda log_probs, **options: 0.0)


def test_a_function_of_the_users_own(registry, tmp_path, monkeypatch):
    (tmp_path / "my_losses_for_test.py").write_text("def mine(log_probs, *, power=2):\n    return power\n")
    (tmp_path / "my_broken_for_test.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert registry.get("my_losses_for_test:mine")({"log_probs": torch.ones(1)}, power=3) == 3
        with pytest.raises(ConfigError, match=r"no 'mien' \(did you mean 'mine'"):
            registry.get("my_losses_for_test:mien")
        with pytest.raises(ConfigError, match="cannot be imported: RuntimeError: no licence"):
            registry.get("my_broken_for_test:mine")
        with pytest.raises(ConfigError, match="ModuleNotFoundError"):
            registry.get("no_such_module_for_test:mine")
    finally:
        sys.modules.pop("my_losses_for_test", None)


SOURCED = (
    advantage_estimators,
    policy_losses,
    preference_losses,
    reward_model_losses,
    value_losses,
    divergences,
    aggregations,
    corrections,
    token_selectors,
)
PLACE = r"eq\. \d|section \d|algorithm \d|appendix|theorem|listing|number not checked|unnumbered|Source: "
OUR_OWN = {"none", "token_sum"}  # what needs no paper


@pytest.mark.parametrize(
    ("kind", "name"), [(each.kind, name) for each in SOURCED for name in each if name not in OUR_OWN]
)
def test_every_function_names_its_paper_and_the_place_in_it(kind: str, name: str):
    [registry] = [each for each in SOURCED if each.kind == kind]
    text = " ".join((registry.get(name).function.__doc__ or "").split())
    assert re.search(r"arXiv \d{4}\.\d{4,5}|Source: |[Aa]s `\w+`", text), "no source"
    assert re.search(PLACE, text) or re.search(r"[Aa]s `\w+`", text), "where in it?"
