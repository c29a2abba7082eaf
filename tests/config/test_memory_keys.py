"""`lora`, `activation_checkpointing`, `gradient_accumulation`, `offload`: what they accept, and what follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.config import Config, InvalidConfig, load_config
from megaverl.config.passthrough import recompute_fields

NEEDED = [
    "model.path=absent",
    "data.train=absent.jsonl",
    "reward=exact_match",
    "algorithm.name=ppo",
]
KL = "algorithm.kl={in: loss, coef: 0.1}"


def load(*overrides: str) -> Config:
    return load_config(None, [*NEEDED, *overrides], check_paths=False, world_size=4)


def test_offload_of_everything_in_one_word() -> None:
    offload = load("actor.offload=true").actor.offload
    assert (
        offload.parameters
        and offload.optimizer
        and offload.gradients
        and offload.folder is None
    )
    assert not load("actor.offload=false").actor.offload.parameters
    assert load("actor.offload.optimizer=true").actor.offload.gradients is False


def test_the_critic_saves_memory_as_the_actor_does_unless_it_says_otherwise() -> None:
    config = load(
        "actor.activation_checkpointing=full",
        "actor.offload=true",
        "critic.offload={optimizer: true}",
    )
    assert config.critic.activation_checkpointing == "full"
    assert config.critic.offload.optimizer and not config.critic.offload.parameters
    assert load("actor.lora.rank=8").critic.lora is None, (
        "it needs targets and a rank of its own"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.lora.rank=0", "actor.lora.rank"),
        ("actor.lora.dropout=1.0", "actor.lora.dropout"),
        ("actor.lora.targets=[]", "actor.lora.targets"),
        ("actor.lora.target_modules=q_proj", "actor.lora.target_modules"),
        ("actor.activation_checkpointing=some", "actor.activation_checkpointing"),
        ("actor.gradient_accumulation=0", "actor.gradient_accumulation"),
        ("actor.offload=cpu", "actor.offload"),
        ("actor.offload.weights=true", "actor.offload.weights"),
    ],
)
def test_mistakes_name_the_key(override: str, key: str) -> None:
    with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
        load(override)


def test_an_adapter_folder_must_be_there(tmp_path: Path) -> None:
    given = [*NEEDED, f"actor.lora.path={tmp_path}"]
    with pytest.raises(InvalidConfig, match=r"actor\.lora\.path.*adapter_config\.json"):
        load_config(None, given, world_size=4)


def test_when_the_reference_is_the_actor_without_adapters() -> None:
    assert load("actor.lora.rank=8", KL).reference_is_actor
    assert load("actor.lora.rank=8", "actor.tp=2", KL).reference_is_actor
    assert not load(KL).reference_is_actor
    for other in (
        "reference.tp=2",
        "reference.path=elsewhere",
        "reference.megatron={sequence_parallel: true}",
    ):
        assert not load("actor.lora.rank=8", KL, other).reference_is_actor
    apart = "placement={reference: [0, 1], actor: [2, 3]}"
    assert not load("actor.lora.rank=8", KL, apart).reference_is_actor


def test_what_is_computed_again() -> None:
    assert (
        recompute_fields("none", dense=True, experts=False, fused_attention=False) == {}
    )
    full = recompute_fields("full", dense=True, experts=True, fused_attention=True)
    assert full["recompute_granularity"] == "full"
    some = recompute_fields(
        "selective", dense=True, experts=True, fused_attention=False
    )
    assert some["recompute_modules"] == ["core_attn", "mlp", "moe"]
    fused = recompute_fields(
        "selective", dense=True, experts=False, fused_attention=True
    )
    assert fused["recompute_modules"] == ["mlp"]
