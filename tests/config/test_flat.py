"""The flat form: the same run as in this project's own keys, and mistakes named as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl import TrainerConfig
from megaverl.config import Config, InvalidConfig, load_config
from megaverl.rewards import registry

FLAT: dict[str, Any] = {
    "algorithm": {"name": "ppo", "clip_range": 0.2, "value_loss_coef": 0.5},
    "model": {"pretrain_model_path": "org/small", "reward_function": "exact_match"},
    "data": {"train_path": "train.jsonl", "batch_size_per_gpu": 8},
    "engine": {"actor_type": "vllm", "critic_type": "megatron", "num_gpus": 4},
    "placement": {"actor_devices": [0, 1], "critic_devices": [2, 3]},
    "checkpoint_config": {"save_interval": 5, "keep_last_k": 2, "async_save": False},
    "log_with": "tensorboard",
}
NATIVE: dict[str, Any] = {
    "algorithm": {"name": "ppo", "clip_range": 0.2, "value_loss_coef": 0.5},
    "model": {"path": "org/small"},
    "reward": "exact_match",
    "data": {"train": ["train.jsonl"], "prompts_per_step": 32},
    "rollout": {"engine": "vllm"},
    "run": {"nproc": 4, "log_with": ["tensorboard"]},
    "placement": {"actor_devices": [0, 1], "critic_devices": [2, 3]},
    "checkpoint": {"save_interval": 5, "keep_last_k": 2, "async_save": False},
}
BFLOAT16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


def load(values: dict[str, Any], *overrides: str) -> Config:
    return load_config(values, list(overrides), check_paths=False)


def mistakes(values: dict[str, Any], *overrides: str) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        load(values, *overrides)
    return {mistake.key: str(mistake) for mistake in caught.value.mistakes}


def test_the_flat_form_is_the_same_run() -> None:
    assert load(FLAT).to_dict() == load(NATIVE).to_dict()


@pytest.mark.parametrize(
    ("flat", "actor", "critic"),
    [
        (
            {"engine": {"actor_type": "fsdp", "critic_type": "fsdp"}},
            {"engine": "fsdp"},
            {"engine": "fsdp"},
        ),
        (
            {"engine": {"actor_type": "fsdp", "critic_type": "megatron"}},
            {"engine": "fsdp"},
            {"engine": "megatron"},
        ),
        (
            {"engine": {"critic_type": "fsdp"}},
            {"engine": "megatron"},
            {"engine": "fsdp"},
        ),
        ({"fsdp_config": {}}, {"engine": "fsdp"}, {"engine": "fsdp"}),
        (
            {
                "fsdp_config": {
                    "sharding_strategy": "SHARD_GRAD_OP",
                    "cpu_offload": True,
                    "mixed_precision": True,
                }
            },
            {
                "engine": "fsdp",
                "fsdp": {
                    "sharding_strategy": "shard_grad_op",
                    "cpu_offload": True,
                    **BFLOAT16,
                },
            },
            {
                "engine": "fsdp",
                "fsdp": {
                    "sharding_strategy": "shard_grad_op",
                    "cpu_offload": True,
                    **BFLOAT16,
                },
            },
        ),
        (
            {
                "fsdp_config": {
                    "sharding_strategy": "ShardingStrategy.HYBRID_SHARD",
                    "shard_size": 2,
                    "compile": True,
                }
            },
            {
                "engine": "fsdp",
                "fsdp": {
                    "sharding_strategy": "hybrid_shard",
                    "shard_size": 2,
                    "compile": True,
                },
            },
            {
                "engine": "fsdp",
                "fsdp": {
                    "sharding_strategy": "hybrid_shard",
                    "shard_size": 2,
                    "compile": True,
                },
            },
        ),
        (
            {
                "fsdp_config": {"mixed_precision": {"param_dtype": "torch.bfloat16"}},
                "engine": {"critic_type": "megatron"},
            },
            {"engine": "fsdp", "fsdp": {"param_dtype": "bfloat16"}},
            {"engine": "megatron"},
        ),
    ],
)
def test_fsdp_is_selected_and_configured(
    flat: dict[str, Any], actor: dict[str, Any], critic: dict[str, Any]
) -> None:
    rest = {
        key: value
        for key, value in FLAT.items()
        if key not in ("engine", "data", "placement")
    }
    data = {"train_path": "train.jsonl"}
    native = load({**rest, "data": data, "actor": actor, "critic": critic})
    assert load({**rest, "data": data, **flat}).to_dict() == native.to_dict()
    assert native.critic.engine == critic["engine"]


def test_what_was_given_stays_as_it_is() -> None:
    before = yaml.safe_dump(FLAT)
    load(FLAT)
    assert yaml.safe_dump(FLAT) == before


def test_a_function_is_a_reward_too() -> None:
    config = load(
        {
            **FLAT,
            "model": {
                "pretrain_model_path": "org/small",
                "reward_function": "my_rewards.py:score",
            },
        }
    )
    assert config.reward[0].function == "my_rewards.py:score"


def test_both_forms_may_stand_in_one_file_and_overrides_win() -> None:
    config = load(
        FLAT, "actor.tp=2", "engine.num_gpus=4", "model.pretrain_model_path=org/other"
    )
    assert (config.actor.tp, config.model.path, config.data.prompts_per_step) == (
        2,
        "org/other",
        32,
    )


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (
            {"engine": {"actor_type": "vlm", "num_gpus": 4}},
            "engine.actor_type",
            "allowed: vllm, hf",
        ),
        (
            {"engine": {"critic_type": "deepspeed", "num_gpus": 4}},
            "engine.critic_type",
            "allowed: megatron, fsdp",
        ),
        ({"engine": {"num_gpu": 4}}, "engine.num_gpu", "Did you mean `num_gpus`?"),
        ({"engine": {}}, "data.batch_size_per_gpu", "engine.num_gpus does not say"),
        ({"engine": 3}, "engine", "expected a mapping"),
        (
            {"data": {"train_path": "t.jsonl", "batch_size_per_gpu": 0}},
            "data.batch_size_per_gpu",
            "at least 1",
        ),
        (
            {"run": {"nproc": 4}},
            "engine.num_gpus",
            "so is run.nproc, which is the same",
        ),
        (
            {"checkpoint_config": {"save_intervall": 5}},
            "checkpoint.save_intervall",
            "save_interval",
        ),
        (
            {"fsdp_config": {"sharding_strategy": "FULL_SHRD"}},
            "fsdp_config",
            "Did you mean `FULL_SHARD`?",
        ),
        (
            {"fsdp_config": {"mixed_precision": "fp9"}},
            "fsdp_config",
            "mixed_precision: found 'fp9'; allowed: bf16",
        ),
        (
            {"fsdp_config": {"cpu_ofload": True}},
            "fsdp_config",
            "Did you mean `cpu_offload`?",
        ),
        (
            {"fsdp_config": {"cpu_offload": 1}},
            "actor.fsdp.cpu_offload",
            "expected true or false",
        ),
        (
            {
                "fsdp_config": {},
                "actor": {"engine": "megatron", "fsdp": {"compile": True}},
            },
            "actor.fsdp.compile",
            "fsdp",
        ),
        ({"log_with": "wandbb"}, "run.log_with.0", "wandb"),
    ],
)
def test_mistakes_say_what_to_write(
    change: dict[str, Any], key: str, words: str
) -> None:
    found = mistakes({**FLAT, **change})
    assert words in found[key], found


def test_a_mistake_names_the_line_and_the_word_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    path.write_text(
        yaml.safe_dump(FLAT, sort_keys=False).replace("num_gpus: 4", "num_gpus: four")
    )
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, check_paths=False)
    text = str(caught.value)
    line = path.read_text().splitlines().index("  num_gpus: four") + 1
    assert (
        f"run.nproc ({path}, line {line}, as engine.num_gpus): found 'four'; expected an integer."
        in text
    )


def test_a_registered_reward_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is named beside `data`, or as reward.modules; in both forms, and in Python."""
    registry.reward_names()  # the built-in ones stay
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    path = tmp_path / "rewards_of_mine.py"
    path.write_text(
        "from megaverl import register_reward\n"
        "@register_reward\n"
        "def accuracy_reward(sampled_response, reference_answer):\n"
        "    return float(sampled_response == reference_answer)\n"
    )
    flat = {
        **FLAT,
        "model": {
            "pretrain_model_path": "org/small",
            "reward_function": "accuracy_reward",
        },
    }
    found = mistakes(flat)
    assert (
        "@register_reward) by a module in reward_modules" in found["reward.0.name"]
    ), found
    with pytest.raises(
        InvalidConfig, match=r"reward_modules.0: no_such.py is not there"
    ) as caught:
        load_config({**flat, "reward_modules": "no_such.py"})
    assert "reward.0.name" not in [mistake.key for mistake in caught.value.mistakes]
    assert (
        load({**flat, "reward_modules": "no_such.py"}).reward[0].name
        == "accuracy_reward"
    ), "seen elsewhere"
    for said in ({"reward": {"modules": [str(path)]}}, {"reward_modules": [str(path)]}):
        config = load({**flat, **said})
        assert (config.reward_modules, config.reward[0].name) == (
            [str(path)],
            "accuracy_reward",
        )
    own = {"name": "accuracy_reward", "modules": str(path), "weight": 2.0}
    config = load({"model": "org/small", "data": {"train": ["t.jsonl"]}, "reward": own})
    assert (config.reward_modules, config.reward[0].weight) == ([str(path)], 2.0)
    python = TrainerConfig(
        actor_model="org/small", train_data="t.jsonl", reward_function="accuracy_reward"
    )
    python.reward_modules = path
    assert python.to_config(check_paths=False).reward_modules == [str(path)]
