from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from megaverl.algorithms import (
    Registry,
    advantage_estimators,
    aggregations,
    corrections,
    divergences,
    kl_estimators,
    policy_losses,
    preference_losses,
    reward_model_losses,
    token_selectors,
    value_losses,
)
from megaverl.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry() -> Registry[float]:
    registry: Registry[float] = Registry("policy loss")

    @registry.register("double_clip")
    def double_clip(
        log_probs, advantages, weights=None, *, clip: float = 0.2, scale: float
    ) -> float:
        return (
            float(log_probs.sum()) * scale + clip + (0.0 if weights is None else 100.0)
        )

    return registry


def test_an_entry_knows_its_inputs_and_options(registry):
    entry = registry.get("double_clip")
    assert entry.inputs == ("log_probs", "advantages") and entry.optional_inputs == (
        "weights",
    )
    assert list(entry.options) == ["clip", "scale"]
    batch = {
        "log_probs": torch.ones(2),
        "advantages": torch.ones(2),
        "other": torch.ones(2),
    }
    assert entry(batch, scale=3.0) == pytest.approx(6.2)
    assert entry({**batch, "weights": torch.ones(2)}, scale=3.0, clip=0.0) == 106.0


def test_missing_input_is_named(registry):
    with pytest.raises(
        DataError,
        match="policy loss 'double_clip' needs 'advantages'.*only 'log_probs'",
    ):
        registry.get("double_clip")(
            {"log_probs": torch.ones(1), "values": None}, scale=1.0
        )


def test_all_wrong_options_are_named_at_once(registry):
    with pytest.raises(ConfigError) as caught:
        registry.get("double_clip").check_options({"clop": 1, "gamma": 1})
    message = str(caught.value)
    assert "has no option 'clop' (did you mean 'clip'?)" in message
    assert "has no option 'gamma'" in message and "needs the option 'scale'" in message


def test_unknown_name_lists_the_nearest(registry):
    with pytest.raises(
        ConfigError,
        match=r"unknown policy loss 'duble_clip' \(did you mean 'double_clip'\?\)",
    ):
        registry.get("duble_clip")


def test_names_are_taken_once(registry):
    with pytest.raises(ConfigError, match="registered twice"):
        registry.register("double_clip")(lambda x: 0.0)


def test_every_parameter_must_have_a_name(registry):
    with pytest.raises(ConfigError, match=r"must name every parameter.*'\*\*options'"):
        registry.register("loose")(lambda log_probs, **options: 0.0)


def test_a_function_of_the_users_own(registry, tmp_path, monkeypatch):
    text = "def mine(log_probs, *, power=2):\n    return power\ndef zero(log_probs):\n    return 1 / 0\n"
    (tmp_path / "my_losses_for_test.py").write_text(text)
    (tmp_path / "my_broken_for_test.py").write_text(
        "raise RuntimeError('no licence')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert (
            registry.get("my_losses_for_test:mine")(
                {"log_probs": torch.ones(1)}, power=3
            )
            == 3
        )
        with pytest.raises(
            ConfigError,
            match=r"test:zero' raised ZeroDivisionError: division.*test\.py, line 4\)",
        ):
            registry.get("my_losses_for_test:zero")({"log_probs": torch.ones(1)})
        with pytest.raises(ConfigError, match=r"no 'mien' \(did you mean 'mine'"):
            registry.get("my_losses_for_test:mien")
        with pytest.raises(
            ConfigError, match="cannot be imported: RuntimeError: no licence"
        ):
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
PLACE = r"eq\. \d|section \d|algorithm \d|appendix|theorem|listing|number not checked|unnumbered|from memory|Source: "
OUR_OWN = {"none", "token_sum"}  # what needs no paper


@pytest.mark.parametrize(
    ("kind", "name"),
    [(each.kind, name) for each in SOURCED for name in each if name not in OUR_OWN],
)
def test_every_function_names_its_paper_and_the_place_in_it(kind: str, name: str):
    [registry] = [each for each in SOURCED if each.kind == kind]
    text = " ".join((registry.get(name).function.__doc__ or "").split())
    assert re.search(r"arXiv \d{4}\.\d{4,5}|Source: |[Aa]s `\w+`", text), "no source"
    assert re.search(PLACE, text) or re.search(r"[Aa]s `\w+`", text), "where in it?"


def test_the_table_of_algorithms_has_every_function():
    rows = [
        row.split("|")
        for row in (ROOT / "docs" / "algorithms.md").read_text().splitlines()
        if row.startswith("| ")
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])} | {
        "bradley_terry"
    }
    assert {
        name for each in (*SOURCED, kl_estimators) for name in each
    } - named == set()


RETURNED = """
import torch
from megaverl.algorithms import Advantages, Correction, LossOutput

def plain(response_mask): return response_mask * 1.0
def flat(response_mask): return Advantages(response_mask[:, 0] * 1.0, None)
def flat_returns(response_mask): return Advantages(response_mask * 1.0, response_mask[0])
def no_number(log_probs): return LossOutput(log_probs, {})
def no_gradient(log_probs): return LossOutput(log_probs.detach().sum(), {})
def one_number(log_probs): return log_probs.sum()
def row_sums(response_mask): return response_mask.sum(1)
def flat_factors(response_mask): return Correction(response_mask.sum(1), {})
def every_entry(student_log_probs): return student_log_probs
def nothing(student_log_probs): return None
"""


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        (advantage_estimators, "plain", r"returned Tensor; expected Advantages"),
        (
            advantage_estimators,
            "flat",
            r"returned as advantages shape \[2\]; expected \[2, 3\]",
        ),
        (
            advantage_estimators,
            "flat_returns",
            r"returned as returns shape \[3\]; expected \[2, 3\]",
        ),
        (policy_losses, "plain", r"returned Tensor; expected LossOutput"),
        (policy_losses, "no_number", r"returned as loss shape \[2, 3\]; expected \[\]"),
        (
            policy_losses,
            "no_gradient",
            r"returned a loss that has no gradient; compute it from log_probs",
        ),
        (preference_losses, "plain", r"returned Tensor; expected LossOutput"),
        (reward_model_losses, "plain", r"returned Tensor; expected LossOutput"),
        (kl_estimators, "one_number", r"returned shape \[\]; expected \[2, 3\]"),
        (aggregations, "row_sums", r"returned shape \[2\]; expected \[2, 3\]"),
        (corrections, "plain", r"returned Tensor; expected Correction"),
        (
            corrections,
            "flat_factors",
            r"returned as factors shape \[2\]; expected \[2, 3\]",
        ),
        (divergences, "every_entry", r"returned shape \[2, 5\]; expected \[2\]"),
        (token_selectors, "row_sums", r"returned shape \[2\]; expected \[2, 3\]"),
        (token_selectors, "plain", r"returned torch.float32; expected torch.bool"),
        (value_losses, "plain", r"returned Tensor; expected LossOutput"),
        (
            divergences,
            "nothing",
            r"returned NoneType; expected a tensor of shape \[2\]",
        ),
    ],
)
def test_what_a_function_of_the_users_own_may_not_return(kind, name, said, tmp_path):
    file = tmp_path / "returned.py"
    file.write_text(RETURNED)
    inputs = {
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
        "log_probs": torch.zeros(2, 3, requires_grad=True),
        "student_log_probs": torch.zeros(2, 5),
    }
    with pytest.raises(ConfigError, match=said):
        kind.get(f"{file}:{name}")(inputs)
