"""Section `tinker`, and what a server of adapters cannot have elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from megaverl.config import load_config
from megaverl.errors import ConfigError

pytest.importorskip("tinker")


def mistakes(*overrides: str) -> str:
    """Return the text of all mistakes, or "" if there are none."""
    given = ["model.path=m", "actor.lora.rank=4", *overrides]
    try:
        load_config(None, given, command="tinker", check_paths=False)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_server_needs_a_model_and_adapters_and_no_data() -> None:
    assert mistakes() == ""
    assert "actor.lora" in mistakes("actor.lora=null")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("actor.lora.dropout=0.1", "actor.lora.dropout"),
        ("actor.lora.path=elsewhere", "actor.lora.path"),
        ("actor.engine=fsdp", "actor.engine"),
        ("actor.optimizer.lr=1.0e-3", "actor.optimizer.lr"),
        ("actor.optimizer.clip_grad=0.5", "actor.optimizer.clip_grad"),
        ("actor.optimizer.optimizer=muon", "actor.optimizer.optimizer"),
        ("actor.scheduler.lr_warmup_steps=3", "actor.scheduler"),
        ("actor.offload=true", "actor.offload.optimizer"),
        ("rollout.engine=server", "rollout.engine"),
        ("reshard.overlap=true", "reshard.overlap"),
        ("tinker.host=somewhere", "tinker.host"),
        ("tinker.host=0.0.0.0", "tinker.host"),
    ],
)
def test_settings_that_clients_give_or_that_do_not_fit_are_refused(
    setting: str, key: str
) -> None:
    assert key in mistakes(setting)


def test_a_key_must_be_one_that_the_client_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public = ("tinker.host=10.0.0.5", "tinker.token_env=TEST_KEY")
    for value in ("", "secret", "tml-"):
        monkeypatch.setenv("TEST_KEY", value)
        assert "tinker.token_env" in mistakes(*public)
    monkeypatch.setenv("TEST_KEY", "tml-secret")
    assert mistakes(*public) == ""


def test_the_client_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from megaverl.config import serving

    def without_tinker(name: str) -> Any:
        return None

    monkeypatch.setattr(serving, "find_spec", without_tinker)
    assert "megaverl[tinker]" in mistakes()
