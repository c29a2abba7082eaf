"""Files, overrides, interpolation, and every mistake of a configuration in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.config import Config, InvalidConfig, load_config
from megaverl.errors import ConfigError


def test_defaults_with_overrides_and_no_file(load):
    config = load(
        "actor.tp=2",
        "actor.optimizer.lr=1e-4",
        "run.log_with=[jsonl]",
        "model.tokenizer=null",
    )
    assert config.actor.tp == 2
    assert config.actor.optimizer == {
        "optimizer": "adam",
        "lr": 1e-4,
        "weight_decay": 0.0,
        "clip_grad": 1.0,
    }
    assert config.run.log_with == ["jsonl"]
    assert config.model.tokenizer is None
    assert config.warnings == ()


def test_a_file_is_laid_under_overrides(files, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "actor: {tp: 3, optimizer: {lr: 1e-6, adam_beta2: 0.95}}\ntrainer: {steps: 7}\n"
    )
    config = load_config(
        path, [*files, "trainer.steps=8", "actor.optimizer={lr: 2e-6}"]
    )
    assert (config.actor.tp, config.trainer.steps) == (3, 8)
    assert config.actor.optimizer["lr"] == 2e-6
    assert config.actor.optimizer["adam_beta2"] == 0.95, (
        "a mapping on the command line merges"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5e1", 5.0),
        ("3", 3),
        ("0.1", 0.1),
        ("1_000.0", 1000.0),
    ],
)
def test_numbers_are_numbers(load, text, value):
    assert (
        load(f"rollout.sampling.extra_args={{x: {text}}}").rollout.sampling[
            "extra_args"
        ]["x"]
        == value
    )


def test_text_that_looks_like_a_number_or_a_date_stays_text(load):
    config = load(
        "data.prompt_key=1e-6", "run.name=2026-01-01", "data.system_prompt=e5"
    )
    assert (config.data.prompt_key, config.run.name, config.data.system_prompt) == (
        "1e-6",
        "2026-01-01",
        "e5",
    )


def test_interpolation(load, monkeypatch):
    monkeypatch.setenv("MEGAVERL_TEST_NAME", "from-env")
    config = load(
        "actor.tp=3",
        "rollout.tp=${actor.tp}",
        "run.name=${oc.env:MEGAVERL_TEST_NAME}",
        "data.system_prompt=into ${run.dir}",  # a default that nothing sets
    )
    assert config.rollout.tp == 3
    assert config.run.name == "from-env"
    assert config.data.system_prompt == "into runs"


def test_a_text_as_model_is_its_path(files, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: some/where\n")
    rest = [override for override in files if not override.startswith("model")]
    assert (
        load_config(path, [*rest, "model.dtype=bfloat16"], check_paths=False).model.path
        == "some/where"
    )
    config = load_config(
        path, [*rest, "model.dtype=bfloat16", "model=else/where"], check_paths=False
    )
    assert (config.model.path, config.model.dtype) == ("else/where", "bfloat16")


def test_a_list_entry_can_be_overridden(load):
    config = load("reward=[{name: exact_match}, {name: gsm8k}]", "reward.1.weight=0.5")
    assert [entry.weight for entry in config.reward] == [1.0, 0.5]


def test_a_reward_as_text_is_built_in_or_a_function(load):
    config = load("reward=[exact_match, 'my_rewards.py:score']")
    assert [(entry.name, entry.function) for entry in config.reward] == [
        ("exact_match", None),
        (None, "my_rewards.py:score"),
    ]


def test_the_resolved_configuration_loads_again(load, tmp_path):
    config = load(
        "actor.tp=2",
        "critic.tp=1",
        "algorithm.kl={in: reward, coef: 0.1}",
        "actor.optimizer.lr=1e-6",
    )
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config


def test_the_critic_and_the_reference_take_the_actors_grid(load):
    config = load(
        "actor={tp: 3, pp: 2, micro_batch_tokens: 900, megatron: {hidden_dropout: 0.1}}",
        "critic.tp=1",
    )
    assert (config.critic.tp, config.critic.pp, config.critic.micro_batch_tokens) == (
        1,
        2,
        900,
    )
    assert (config.reference.tp, config.reference.pp, config.reference.megatron) == (
        3,
        2,
        {"hidden_dropout": 0.1},
    )
    assert config.critic.optimizer["lr"] == 1e-5, "an optimizer is a role's own"


def test_validation_is_off_by_default_without_held_out_prompts(load):
    assert load().trainer.validate_every == 10
    assert load("data.validation=[]").trainer.validate_every == 0


def test_a_config_cannot_be_changed(load):
    with pytest.raises(ValueError, match="frozen"):
        load().actor.tp = 3


def test_all_mistakes_at_once_each_with_its_place(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        """\
modl: {}
actor:
  tp: two
  lr: 1e-6
  optimizer: {weight_dekay: 0.1}
algorithm: {name: gppo, group_size: 3, num_mini_batches: 5}
rollout:
  sampling: {temperature: "${nowhere.to.find}", n: 2}
trainer: {steps: "???"}
reward: exact_mach
actor: {}
"""
    )
    with pytest.raises(InvalidConfig) as caught:
        load_config(
            path, ["critic.tp=0", "actor.tp=three", "nonsense", "data.train=x.csv"]
        )
    found = {mistake.key: mistake for mistake in caught.value.mistakes}
    assert isinstance(caught.value, ConfigError)
    assert (
        "stands twice" in found["actor"].message
        and "lines 2 and 11" in found["actor"].message
    )
    assert found["modl"].message == "unknown key. Did you mean `model`?"
    assert found["modl"].where == f"{path}, line 1"
    assert found["actor.tp"].message == "found 'three'; expected an integer."
    assert found["actor.tp"].where == "command line"
    assert found["critic.tp"].message == "found 0; expected at least 1."
    assert found["algorithm.name"].message.startswith(
        "found 'gppo'; allowed: ppo, grpo, "
    )
    assert found["algorithm.name"].message.endswith(" Did you mean `ppo`?")
    assert (
        "not a divisor of the 192 samples"
        in found["algorithm.num_mini_batches"].message
    )
    assert "nowhere.to.find" in found["rollout.sampling.temperature"].message
    assert "algorithm.group_size" in found["rollout.sampling.n"].message
    assert "left open" in found["trainer.steps"].message
    assert "Did you mean `exact_match`?" in found["reward.0.name"].message
    assert "key=value" in found["nonsense"].message
    assert "suffix" in found["data.train.0"].message
    assert "model.path" in found
    assert "reference.tp" not in found, "the actor's mistake is told once"
    text = str(caught.value)
    assert text.startswith(
        f"{len(found)} mistakes in the configuration ({path} and the command line):"
    )
    assert all(str(mistake) in text for mistake in found.values())


def test_an_inherited_mistake_is_the_actors_alone(mistakes):
    others = ("critic.pp=1", "reference.offload=true", "reward_model.beta=0.1")
    assert set(mistakes("actor.tp=two", *others)) == {"actor.tp"}
    assert set(mistakes("actor.cp=0", *others, "trainer.steps=0")) == {
        "actor.cp",
        "trainer.steps",
    }


def test_the_mistakes_below_a_key_that_stands_twice(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("run:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(
        InvalidConfig,
        match=r"run\.seed: stands twice in .*twice\.yaml, in lines 2 and 3",
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("actor: [1, 2\n", r"not valid YAML"),
        ("- a\n- b\n", r"holds a list; expected sections"),
        ("actor:\n\ttp: 2\n", r"line 2 is not valid YAML"),
        ("just text\n", r"holds a str"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, said):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=said):
        load_config(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidConfig, match="missing.yaml does not exist"):
        load_config(tmp_path / "missing.yaml")


def test_an_empty_file_is_all_defaults(files, tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load_config(path, files) == load_config(None, files)


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("actor.tp=2.0", "actor.tp", "found 2.0; expected an integer"),
        ("actor.tp='2'", "actor.tp", "found '2'; expected an integer"),
        ("actor.tp=true", "actor.tp", "found true; expected an integer"),
        ("data.shuffle=1", "data.shuffle", "found 1; expected true or false"),
        ("algorithm.gamma=1.5", "algorithm.gamma", "found 1.5; expected at most 1"),
        ("algorithm.gamma=.nan", "algorithm.gamma", "expected a finite number"),
        ("run.seed=-1", "run.seed", "expected at least 0"),
        ("run.name=a b", "run.name", "expected letters, digits"),
        ("actor=3", "actor", "expected a mapping"),
        ("actor.optimizer=3", "actor.optimizer", "expected a mapping"),
        (
            "trainer.pass_at=[1, x]",
            "trainer.pass_at.1",
            "found 'x'; expected an integer",
        ),
        ("run.log_with=[tensorbord]", "run.log_with.0", "Did you mean `tensorboard`?"),
        ("run.nproc=", "run.nproc", None),
        (
            "algorithm.kl.in=",
            "algorithm.kl.in",
            "found null; allowed: none, reward, loss",
        ),
        ("actor.tpp=2", "actor.tpp", "Did you mean `tp`?"),
        ("actor.cp=0", "actor.cp", "found 0; expected at least 1"),
        ("lr=1", "lr", "Did you mean `sft.lr`?"),
        ("critic.learning_rate=1", "critic.learning_rate", "unknown key"),
        (
            "actor.lr_warmup_steps=1",
            "actor.lr_warmup_steps",
            "Did you mean `actor.scheduler.lr_warmup_steps`?",
        ),
        (
            "actor.recompute_method=full",
            "actor.recompute_method",
            "`actor.megatron.recompute_method`",
        ),
        ("rollout.top_p=1", "rollout.top_p", "`rollout.sampling.top_p`"),
        (
            "rollout.gpu_memory_utilization=1",
            "rollout.gpu_memory_utilization",
            "`rollout.vllm.gpu_memory",
        ),
        ("algorithm.lambda=1", "algorithm.lambda", "Did you mean `lam`?"),
    ],
)
def test_one_wrong_key_or_type(load, mistakes, override, key, said):
    if said is None:
        assert load(override).run.nproc is None
        return
    found = mistakes(override)
    assert set(found) == {key}
    assert said in found[key]


def test_config_can_be_made_directly():
    config = Config(actor={"tp": 2}, reward="gsm8k", data={"train": "a.jsonl"})
    assert (
        config.critic.tp,
        config.reward[0].name,
        [str(source) for source in config.data.train],
    ) == (
        2,
        "gsm8k",
        ["a.jsonl"],
    )
    assert config.uses_critic and not config.uses_reference
    assert config.samples_per_step == 64
    assert config.run_dir == Path("runs/run")
    assert config.max_tokens == 512 + 256
