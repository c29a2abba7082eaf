"""The public API for Python programs: what its names are, what they cost, and where they lead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megaverl
from megaverl import DataParallelConfig, RolloutBatch, TrainerConfig
from megaverl.config import load_config
from megaverl.errors import ConfigError, TrainingStopped
from megaverl.trainer import RLTrainer, RoleBasedDistributedStrategy
from megaverl.trainer.api import device_map, parse_devices, trainers
from megaverl.trainer.api import trainers as trainers_module
from megaverl.trainer.api.settings import JOB_OF_ONE, importable_name, resolve
from megaverl.utils import set_device_map
from megaverl.utils.config import get_ppo_config

ROOT = Path(megaverl.__file__).parents[1]
MODEL: dict[str, Any] = {
    "actor_model": "org/small",
    "train_data": "train.jsonl",
    "reward_function": "exact_match",
}
NATIVE: dict[str, Any] = {
    "model": {"path": "org/small"},
    "data": {"train": ["train.jsonl"]},
    "reward": "exact_match",
}
IMPORTS = """
from megaverl import DataFlow, Operator, RolloutBatch, TrainerConfig, DataParallelConfig
from megaverl.trainer import RLTrainer, PPOTrainer, RoleBasedDistributedStrategy, init_distributed
from megaverl.utils import is_flash_attn_available, set_device_map
from megaverl.utils.config import get_ppo_config
from megaverl.monitoring import MetricsTracker
"""


@pytest.fixture(autouse=True)
def _no_device_map() -> Iterator[None]:
    yield
    set_device_map(None)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations are checked without the model's and the data's files."""
    real = trainers_module.resolve
    monkeypatch.setattr(
        trainers_module,
        "resolve",
        lambda *given, **asked: real(*given, **asked | {"check_paths": False}),
    )
    monkeypatch.setattr(
        trainers_module, "check_code_and_data", lambda config, command: None
    )
    monkeypatch.setattr(
        "megaverl.trainer.preflight.missing_models", lambda config, **asked: []
    )


def test_every_promised_import() -> None:
    """All of them, one by one in an interpreter of its own; those without tensors load no torch."""
    checks = "import sys, megaverl.trainer, megaverl.utils, megaverl.utils.config, megaverl.monitoring\n"
    checks += "from megaverl import TrainerConfig, DataParallelConfig\n"
    checks += "from megaverl.trainer import RLTrainer, PPOTrainer, RoleBasedDistributedStrategy, init_distributed\n"
    checks += (
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n" + IMPORTS
    )
    checks += "assert is_flash_attn_available() in (True, False)\n"
    done = subprocess.run(
        [sys.executable, "-c", checks],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_names_are_listed() -> None:
    """What completion and help() show: everything that can be imported, before anything is."""
    checks = "import sys, megaverl, megaverl.trainer\n"
    checks += "for module in (megaverl, megaverl.trainer):\n    print(*dir(module))\n"
    checks += "assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", checks],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    listed = [set(line.split()) for line in done.stdout.splitlines()]
    assert {
        "RolloutBatch",
        "TrainerConfig",
        "DataFlow",
        "__version__",
        "__name__",
    } <= listed[0]
    assert {
        "PPOTrainer",
        "RLTrainer",
        "RoleBasedDistributedStrategy",
        "init_distributed",
    } <= listed[1]
    assert listed[0] >= set(megaverl.__all__) and listed[1] >= set(
        megaverl.trainer.__all__
    )


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="it has DataFlow"):
        megaverl.Dataflow  # noqa: B018
    with pytest.raises(AttributeError, match="it has PPOTrainer"):
        megaverl.trainer.GRPOTrainer  # type: ignore[attr-defined]  # noqa: B018


def test_settings_are_the_configuration() -> None:
    config = TrainerConfig(
        **MODEL,
        algorithm="grpo",
        group_size=4,
        prompts_per_step=8,
        learning_rate=1e-5,
        tensor_parallel_size=2,
        use_vllm=False,
        checkpoint_config={"save_interval": 5, "keep_last_k": 2, "async_save": False},
        log_with="tensorboard",
        actor_device_mapping={"model": "cuda:0-3"},
        options={
            "actor.optimizer.clip_grad": 0.5,
            "rollout": {"sampling": {"top_p": 0.9}},
        },
    ).to_config(check_paths=False)
    native = {
        **NATIVE,
        "algorithm": {"name": "grpo", "group_size": 4},
        "data": {"train": ["train.jsonl"], "prompts_per_step": 8},
        "actor": {"tp": 2, "optimizer": {"lr": 1e-5, "clip_grad": 0.5}},
        "rollout": {"engine": "hf", "sampling": {"top_p": 0.9}},
        "checkpoint": {"save_interval": 5, "keep_last_k": 2, "async_save": False},
        "run": {"log_with": ["tensorboard"]},
        "placement": {"actor_devices": [0, 1, 2, 3]},
    }
    assert config.to_dict() == load_config(native, check_paths=False).to_dict()


def test_settings_of_several_sections(no_files: None) -> None:
    config = RLTrainer(
        **MODEL,
        use_dynamic_batching=True,
        async_rollout=True,
        trust_remote_code=True,
        offload_folder=Path("downloads"),
        rollout_device_mapping=[1],
    ).config
    assert config.rollout.use_dynamic_batching and config.rollout.async_rollout
    assert (config.model.trust_remote_code, config.model.offload_folder) == (
        True,
        "downloads",
    )


def test_paths_are_text_and_objects_are_refused(no_files: None) -> None:
    paths = {
        "actor_model": Path("org/small"),
        "train_data": Path("train.jsonl"),
        "output_dir": Path("runs"),
    }
    assert RLTrainer(**{**MODEL, **paths}).config == RLTrainer(**MODEL).config
    assert TrainerConfig(**{**MODEL, "train_data": [Path("train.jsonl")]}).values()[
        "data"
    ]["train"] == ["train.jsonl"]
    with pytest.raises(
        ConfigError,
        match=r"actor_model: found a Linear; expected text \(a folder, org/name\)",
    ):
        RLTrainer(**{**MODEL, "actor_model": torch.nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_vllm": "maybe"}, "use_vllm: found 'maybe'; expected True"),
        ({"checkpoint_config": 3}, "checkpoint_config: found 3; expected a mapping"),
        ({"log_with": 3}, "log_with: found 3; expected text"),
        (
            {"log_with": "wandbb"},
            r"run.log_with.0 \(`log_with` in Python\): .*Did you mean `wandb`",
        ),
        ({"actor_model": "nowhere"}, r"model.path \(`actor_model` in Python\)"),
        (
            {"reward_model": "/no/such/model", "reward_function": None},
            r"reward.0.path \(`reward_function` in Python\)",
        ),
        ({"config": 7}, "config: found a int; expected a YAML file"),
        (
            {"fsdp_config": {"sharding_strategy": "FULL"}},
            r"fsdp_config \(.* in Python\): .*Did you mean `FULL_SHARD`",
        ),
        (
            {"config": TrainerConfig(fsdp_config={"zero": 3})},
            "fsdp_config .*Known here: mixed_precision",
        ),
    ],
)
def test_a_wrong_setting_is_named_as_the_program_has_it(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        RLTrainer(**{**MODEL, **settings})


def test_a_setting_is_laid_over_a_flat_file(no_files: None) -> None:
    model = {"pretrain_model_path": "org/other", "reward_function": "gsm8k"}
    config = RLTrainer(
        {"model": model, "data": {"train_path": "a.jsonl"}}, **MODEL
    ).config
    assert (config.model.path, config.reward[0].name) == ("org/small", "exact_match")
    assert [source.path for source in config.data.train] == ["train.jsonl"]


def test_the_same_run_in_every_form(tmp_path: Path, no_files: None) -> None:
    config = TrainerConfig(**MODEL).to_config(check_paths=False)
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    forms: list[Any] = [
        config,
        TrainerConfig(**MODEL),
        TrainerConfig(**MODEL).values(),
        file,
        str(file),
        NATIVE,
    ]
    assert [RLTrainer(form).config.to_dict() for form in forms] == [
        config.to_dict()
    ] * len(forms)
    assert RLTrainer(**MODEL).config == config
    changed = RLTrainer(file, use_vllm=False, overrides=["actor.tp=2"]).config
    assert (changed.rollout.engine, changed.actor.tp, changed.algorithm.name) == (
        "hf",
        2,
        "ppo",
    )
    grpo = {**NATIVE, "algorithm": {"name": "grpo", "group_size": 4}}
    assert RLTrainer(grpo, seed=3).config.algorithm.name == "grpo", (
        "a setting that was not given changes nothing"
    )


def test_ppo_config_can_be_changed() -> None:
    config = get_ppo_config(**MODEL)
    config.total_steps = 7
    assert config.to_config(check_paths=False).trainer.steps == 7
    with pytest.raises(
        ConfigError, match=r"no setting total_step\. Did you mean `total_steps`"
    ):
        get_ppo_config(total_step=3)


def test_steps_have_two_words(no_files: None) -> None:
    assert (
        get_ppo_config(total_steps=3).max_steps
        == 3
        == TrainerConfig(max_steps=3).total_steps
    )
    config = get_ppo_config(**MODEL, max_steps=3)
    config.total_steps = 4
    assert (config.max_steps, config.values()["trainer"]) == (4, {"steps": 4})
    with pytest.raises(
        ConfigError, match="max_steps=3 and total_steps=4 are the same setting"
    ):
        TrainerConfig(max_steps=3, total_steps=4)
    assert RLTrainer(config, total_steps=5).config.trainer.steps == 5
    assert get_ppo_config(**MODEL).max_steps == 100, "the key's own default"
    assert get_ppo_config(options={"trainer.steps": 7}).max_steps == 7


def test_a_ppo_config_without_a_model_is_a_small_run(no_files: None) -> None:
    """Settings go over it; with a model or data of one's own nothing of it is left."""
    config = get_ppo_config(use_vllm=True, learning_rate=3e-4)
    config.output_dir = "elsewhere"
    small = resolve(config, check_paths=False)
    assert small.model.path == "elsewhere/quickstart_ppo/inputs/model"
    assert (small.trainer.steps, small.actor.tp, small.run.nproc) == (
        config.max_steps,
        1,
        None,
    )
    assert (
        small.rollout.engine,
        small.actor.optimizer["lr"],
        small.algorithm.group_size,
    ) == ("vllm", 3e-4, 8)
    assert RLTrainer(config, prompts_per_step=4).config.data.prompts_per_step == 4
    config = get_ppo_config(use_vllm=True)
    config.actor_model, config.train_data, config.reward_function = MODEL.values()
    own = RLTrainer(**MODEL, use_vllm=True, max_steps=config.max_steps).config
    assert resolve(config, check_paths=False) == own
    with pytest.raises(ConfigError, match="model.path"):
        RLTrainer(TrainerConfig())


def score(prompt: str, response: str, reference: str, extra: dict[str, Any]) -> float:
    return float(len(response))


def test_a_function_is_found_by_its_name(no_files: None) -> None:
    assert importable_name(score, "x") == "tests.trainer.api.test_public_api:score"
    trainer = RLTrainer(
        actor_model="org/small", train_data="train.jsonl", reward_model=score
    )
    assert (
        trainer.config.reward[0].function == "tests.trainer.api.test_public_api:score"
    )
    with pytest.raises(
        ConfigError, match="reward_function: .*lambda.* top level of a file"
    ):
        TrainerConfig(reward_function=lambda prompt: 1.0).values()


def test_a_reward_may_be_a_model(tmp_path: Path, no_files: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    trainer = RLTrainer(**{**MODEL, "reward_function": None}, reward_model=tmp_path)
    assert trainer.config.reward[0].path == str(tmp_path)


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("cuda:0-3", [0, 1, 2, 3]),
        ({"model": "cuda:0,2"}, [0, 2]),
        ("1-2", [1, 2]),
        ([0, 1], [0, 1]),
        (2, [2]),
        ("auto", None),
        (None, None),
    ],
)
def test_devices(value: Any, ranks: list[int] | None) -> None:
    assert parse_devices(value, "actor_devices") == ranks


@pytest.mark.parametrize(
    "value", ["tpu:0", "cuda:3-1", [0, 0], [-1], {"head": 1}, [], True, ["0"]]
)
def test_devices_that_cannot_be_read(value: Any) -> None:
    with pytest.raises(ConfigError, match="actor_devices"):
        parse_devices(value, "actor_devices")


def test_set_device_map_counts_for_what_comes_after(no_files: None) -> None:
    devices = DataParallelConfig(
        actor_devices=[0, 1], critic_devices=[2], reward_model_devices=[3]
    )
    expected = {"actor_devices": [0, 1], "critic_devices": [2], "reward_devices": [3]}
    assert devices.set_device_map() == expected == device_map()
    assert RLTrainer(**MODEL).config.placement.critic_devices == [2]
    own = RLTrainer(**MODEL, critic_device_mapping="4-5").config.placement
    assert own.critic_devices == [4, 5]
    assert set_device_map({"actor": "cuda:0", "reward_model": 1}) == {
        "actor_devices": [0],
        "reward_devices": [1],
    }
    with pytest.raises(ConfigError, match="no role 'critics'"):
        set_device_map({"critics": [0]})
    with pytest.raises(
        ConfigError, match=r"found \[0, 1\]; expected a DataParallelConfig"
    ):
        set_device_map([0, 1])  # type: ignore[arg-type]
    set_device_map(None)
    assert resolve(NATIVE, check_paths=False).placement.actor_devices is None


def test_a_strategy_shows_who_is_where(no_files: None) -> None:
    strategy = RoleBasedDistributedStrategy(
        DataParallelConfig(actor_devices=[0, 1]), critic="cuda:2-3"
    )
    # the resolution itself is the placement's; here only that it is the configuration's
    assert strategy.placement == {"actor_devices": [0, 1], "critic_devices": [2, 3]}
    assert RLTrainer(**MODEL, strategy=strategy).config.placement.critic_devices == [
        2,
        3,
    ]
    description = {**NATIVE, "rollout": {"engine": "hf"}}
    ranks = RoleBasedDistributedStrategy(actor=[0, 1], critic=[2]).resolve_for(
        description, 3
    )
    assert ranks == {"actor": (0, 1), "critic": (2,)} | {
        role: ranks[role] for role in ranks if role not in ("actor", "critic")
    }
    with pytest.raises(ConfigError):
        RoleBasedDistributedStrategy(actor=[0, 1]).resolve_for(description, 1)


def test_several_ranks_are_started_with_this_configuration(
    tmp_path: Path, no_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun: the command itself, on a file that says the same."""
    from megaverl.trainer import elastic_agent as launch

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    trainer = RLTrainer(
        **MODEL, tensor_parallel_size=2, num_gpus=2, output_dir=str(tmp_path)
    )
    seen: list[Any] = []

    def start_ranks(arguments: list[str], nproc: int, log_hint: str) -> int:
        seen.append(
            (
                arguments[:3],
                nproc,
                load_config(arguments[-1], check_paths=False).to_dict(),
            )
        )
        trainer.config.run_dir.mkdir(parents=True)
        (trainer.config.run_dir / "metrics.jsonl").write_text(
            '{"step": 1, "time": 2.0, "reward/mean": 0.5}\n'
        )
        return len(seen) - 1

    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    assert trainer.train() == {"reward/mean": 0.5}
    assert seen == [(["-m", "megaverl.cli.main", "train"], 2, trainer.config.to_dict())]
    (trainer.config.run_dir / "metrics.jsonl").unlink()
    trainer.config.run_dir.rmdir()
    with pytest.raises(TrainingStopped, match="exit code 1"):
        trainer.train()


def test_a_job_of_one_says_nothing_of_the_next_trainer(
    no_files: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has run a trainer in its own process may have one of several ranks, which it starts."""
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="does not divide the 1 ranks"):
        RLTrainer(**MODEL, tensor_parallel_size=2)
    for name, value in alone.items():
        monkeypatch.setitem(JOB_OF_ONE, name, value)
    trainer = RLTrainer(**MODEL, tensor_parallel_size=2)
    assert not trainers.under_torchrun() and os.environ["WORLD_SIZE"] == "1"
    with pytest.raises(
        ConfigError, match="needs 2 ranks, but this process is a single one"
    ):
        trainers.init_distributed(trainer.config)


def test_a_batch_as_such_systems_name_it() -> None:
    batch = RolloutBatch(
        input_ids=torch.tensor([[0, 0, 5], [6, 7, 8]]),
        attention_mask=torch.tensor([[0, 0, 1], [1, 1, 1]]),
        generated_ids=torch.tensor([[9, 1], [2, 0]]),
        generated_mask=torch.tensor([[1, 1], [1, 0]]),
        logprobs=torch.tensor([[-0.5, -1.0], [-2.0, 0.0]]),
        rewards=torch.tensor([1.0, 0.0]),
        advantages=torch.zeros(2, 2),
    )
    assert batch.input_ids.tolist() == [[5, 0, 0], [6, 7, 8]], (
        "padded on the left, it is moved to the right"
    )
    assert batch.attention_mask.tolist() == [[True, False, False], [True, True, True]]
    assert batch.response_lengths.tolist() == [2, 1]
    assert torch.equal(batch.logprobs, batch.rollout_log_probs)
    assert len(batch[1:]) == 1 and batch[-1].generated_ids.tolist() == [[2, 0]]
    assert batch[[1, 0]].rewards.tolist() == [0.0, 1.0]
    assert batch[torch.tensor([True, False])].rewards.tolist() == [1.0]
    both = RolloutBatch.concat([batch, batch.pad_to(prompt=5)])
    assert both.input_ids.shape == (4, 5) and both.to("cpu").rewards.tolist() == [
        1.0,
        0.0,
        1.0,
        0.0,
    ]
    newer = batch.with_(old_log_probs=torch.ones(2, 2))
    assert torch.equal(newer.logprobs, torch.ones(2, 2)), (
        "the actor's own, once they are known"
    )
