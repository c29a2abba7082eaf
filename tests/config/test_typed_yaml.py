"""The type of a key decides how text is read: on the command line, and in files, whose expansion is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.config import InvalidConfig, load_config
from megaverl.config.typed_yaml import MAX_BYTES
from megaverl.config.yaml_source import read_source

ODD_TEXTS = [
    "####.",
    "one\ntwo\n\n three",
    "Answer: x",
    "{x}",
    "{x} and {y: 1}",
    "[INST]",
    "[INST] a [/INST]",
    "*b*",
    "&a",
    "@you",
    "`tick`",
    "123",
    "010",
    "1_000",
    "1:30",
    "8210e54",
    "1e-6",
    ".inf",
    "true",
    "no",
    "off",
    "~",
    "",
    " leading and trailing ",
    "# a comment?",
    "text # not a comment",
    "'quoted'",
    '"double',
    "- item",
    "? key",
    "!tag",
    "%directive",
    "| block",
    "> folded",
    "a: b: c",
    "\\boxed{}",
    "key=value",
    "2026-01-01",
]


@pytest.mark.parametrize("text", [*ODD_TEXTS, "null"])
def test_a_text_key_takes_the_text_as_it_is(text):
    values = read_source(None, [f"data.prompt_key={text}"]).values
    assert values == {"data": {"prompt_key": text}}


@given(
    st.text(st.characters(exclude_characters="$", exclude_categories=["Cs"])).filter(
        lambda text: text != "???"
    )
)
def test_any_text_is_taken_as_it_is(text):
    assert read_source(None, [f"data.prompt_key={text}"]).values == {
        "data": {"prompt_key": text}
    }


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_a_text_key_that_may_be_null_is_so_for_null_alone(text):
    assert read_source(None, [f"data.system_prompt={text}"]).values == {
        "data": {"system_prompt": text}
    }
    assert read_source(None, ["data.system_prompt=null"]).values == {
        "data": {"system_prompt": None}
    }


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.steps=010", 10),
        ("trainer.steps=0o10", 8),
        ("trainer.steps=1_000", 1000),
        ("trainer.steps= 7 ", 7),
        ("data.shuffle=off", False),
        ("data.shuffle=yes", True),
        ("run.timeout_minutes=1e1", 10.0),
        ("actor.router_replay=off", "off"),
        ("data.train=2024", "2024"),
        ("data.train=[2024, 8210e54]", ["2024", "8210e54"]),
        ("data.train={path: 010, limit: 010}", {"path": "010", "limit": 10}),
        ("model=010", "010"),
        ("run.log_with=jsonl", "jsonl"),
        ("trainer.pass_at=04", 4),
        ("rollout.sampling.stop=####.", "####."),
        ("rollout.sampling={stop: [010, no]}", {"stop": ["010", "no"]}),
        ("reward.0.function=a.py:f # x", "a.py:f # x"),
        ("reward.0.options.stop=####.", "####."),
        ("reward.0.options.stop=a: b", "a: b"),
        ("reward.0.options.template={x}", "{x}"),
        ("reward.0.options.template={x} and {y}", "{x} and {y}"),
        ("reward.0.options.most='010'", "010"),
        ("reward.0.options.scale=1:30", "1:30"),
        ("reward.0.options={stop: [a, b]}", {"stop": ["a", "b"]}),
        ("placement.rollout=0-3", "0-3"),
        ("placement.rollout=08", 8),
        ("actor.lora.targets=[q_proj, 010]", ["q_proj", "010"]),
        ("actor.lora.targets=[qk]_proj", "[qk]_proj"),
        ("coordinator.skip_above={actor: 010}", {"actor": 10}),
        ("engine.num_gpus=010", 10),
        ("model.tokenizer_path=010", "010"),
    ],
)
def test_the_type_of_a_key_decides(override, value):
    source = read_source(None, [override])
    assert source.mistakes == []
    here = source.values
    for part in override.partition("=")[0].split("."):
        here = here[int(part) if isinstance(here, list) else part]
    assert here == ({"path": "010"} if override == "model=010" else value)


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        (
            "model: {path: m, revision: 8210e54}",
            "model.revision",
            "8210e54, which YAML reads as a number",
        ),
        (
            "run: {name: 010}",
            "run.name",
            "found 010, which YAML reads as a number; expected text. Put it in quotes.",
        ),
        (
            "data: {prompt_key: true}",
            "data.prompt_key",
            "found true, which YAML reads as a boolean",
        ),
        (
            "run: {timeout_minutes: 1:30}",
            "run.timeout_minutes",
            "found '1:30'; expected a number",
        ),
        (
            "reward: {name: judge, options: {strict: no}}",
            "reward.options.strict",
            "YAML 1.1 reads as false",
        ),
        ("run: {name: ..}", "run.name", "names a folder that exists already"),
        ("run: {name: a/b}", "run.name", "expected letters, digits"),
        ("run: {name: ''}", "run.name", "expected some text"),
        ("run: {name: !!int 3}", "run.name", "expected text"),
        ("run: {name: !!set {a, b}}", "run.name", "has the tag"),
        ("trainer: {steps: 1e400}", "trainer.steps", "expected a finite number"),
        ("trainer: {steps: 99999999999999999999}", "trainer.steps", "at most 64 bits"),
        (
            "rollout: {sampling: {extra_args: {a: [.nan]}}}",
            "rollout.sampling.extra_args.a.0",
            "a finite number",
        ),
        ('data: {system_prompt: "a\\0b"}', "data.system_prompt", "NUL"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_with_its_line(
    files, tmp_path, text, key, said
):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    rest = [
        each for each in files if not each.startswith(("model", "reward", "data.train"))
    ]
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, rest, check_paths=False)
    found = {mistake.key: mistake for mistake in caught.value.mistakes}
    assert said in found[key].message
    assert found[key].where == f"{path}, line 1"


def test_a_file_reads_words_and_numbers_by_the_key(files, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "trainer: {steps: 010, store_rollouts: on}\ndata: {system_prompt: no, shuffle: off}\n"
        "actor: {router_replay: off, optimizer: {lr: 1e-6}}\nplacement:\ncoordinator: null\n"
        "x: &x {lr_decay_style: cosine}\ncritic: {scheduler: {<<: *x, lr_warmup_steps: 1}}\n"
    )
    text = path.read_text().replace("x: &x {lr_decay_style: cosine}\n", "")
    path.write_text(text.replace("<<: *x", "<<: {lr_decay_style: cosine}"))
    config = load_config(path, files)
    assert (config.trainer.steps, config.trainer.store_rollouts) == (10, True)
    assert (
        config.data.system_prompt,
        config.data.shuffle,
        config.actor.router_replay,
    ) == ("no", False, "off")
    assert config.critic.scheduler == {"lr_decay_style": "cosine", "lr_warmup_steps": 1}


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "holds more than 20,000 values once its aliases"),
        (
            BOMB.replace("[", "{? [").replace("]", "]}"),
            "holds more than 20,000 values once its aliases",
        ),
        ("a: &x [*x]\n", "stands inside what it names"),
        ("a: " + "[" * 100 + "]" * 100, "is nested deeper than 60 levels"),
        ("a: " + "[" * 20_000, "is nested deeper than 60 levels"),
        ("a: " + "x" * MAX_BYTES, "a configuration has at most"),
        ("a: [" + "1, " * 30_000 + "]", "holds more than 20,000 values"),
    ],
)
def test_what_a_file_expands_to_is_bounded(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path)
    assert [mistake.key for mistake in caught.value.mistakes] == ["--config"]
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_the_command_line_is_bounded_too(mistakes):
    bomb = "{" + BOMB.strip().replace("\n", ", ") + "}"
    assert (
        "holds more than 20,000 values"
        in mistakes(f"rollout.sampling={bomb}")["rollout.sampling"]
    )


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["reward=5"], "reward.0", "found 5; expected a mapping"),
        (["reward.0.weight=x"], "reward.0.weight", "found 'x'; expected a number"),
        (
            ["reward=[exact_match, {name: gsm8k, wieght: 2}, gsm8k]"],
            "reward.1.wieght",
            "Did you mean `weight`?",
        ),
        (["data.train=[{split: x}]"], "data.train.0.path", "is missing"),
        (["data.validation=[7.5]"], "data.validation.0", "whose suffix"),
        (["mix=3"], "mix", "expected a list"),
        (["alerts=[{when: 3}, {}]"], "alerts.1.when", "is missing"),
        (["run.log_with=[jsonl, tensorbord]"], "run.log_with.1", "tensorboard"),
        (
            ["rollout.sampling_rules=[{under: x}]"],
            "rollout.sampling_rules.0.under",
            "expected an integer",
        ),
        (["data.images.allow_urls=[3.5, '']"], "data.images.allow_urls", ""),
    ],
)
def test_a_mistake_in_an_entry_brings_no_other(mistakes, overrides, key, said):
    found = mistakes(*overrides)
    keys = [each for each in found if each == key or each.startswith(f"{key}.")]
    assert keys and said in found[keys[0]]
    allowed = key.split(".")[0]
    assert all(each.startswith(allowed) for each in found), found


@pytest.mark.parametrize(
    ("text", "overrides", "weights"),
    [
        ("reward: {name: exact_match}", ["reward.0.weight=0.5"], [0.5]),
        ("reward: {name: exact_match}", ["reward.weight=0.5"], [0.5]),
        ("reward: exact_match", ["reward.0.weight=0.5"], [0.5]),
        ("reward: exact_match", ["reward.weight=0.5"], [0.5]),
        ("reward: [exact_match]", ["reward[0].weight=0.5"], [0.5]),
        ("reward: [exact_match]", ["reward.1.name=gsm8k"], [1.0, 1.0]),
        ("{}", ["reward.0.name=gsm8k", "reward.0.weight=2"], [2.0]),
    ],
)
def test_an_entry_of_a_reward_in_any_form_can_be_overridden(
    files, tmp_path, text, overrides, weights
):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    rest = [each for each in files if not each.startswith("reward")]
    config = load_config(path, [*rest, *overrides])
    assert [entry.weight for entry in config.reward] == weights


def test_a_source_as_text_can_be_given_a_weight(load):
    assert load("data.train.0.limit=3").data.train[0].limit == 3


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        (
            "reward.5.weight=1",
            "reward.5.weight",
            "Name an entry by its number: 0 to 0, and 1 adds one",
        ),
        ("data.seed.x=1", "data.seed", "unknown key"),
        ("trainer.steps.x=1", "trainer.steps.x", "has no keys"),
        ("run..name=x", "run..name", "has an empty part"),
        ("run.name=${USER}", "run.name", "${oc.env:NAME} an environment variable"),
        (
            "data.system_prompt=costs ${",
            "data.system_prompt",
            "a ${ that is meant as text is written \\${",
        ),
    ],
)
def test_overrides_that_lead_nowhere(load, mistakes, override, key, said):
    before = (
        ["trainer.steps=3"] if key.startswith("trainer") else ["reward=[exact_match]"]
    )
    found = mistakes(*before, override)
    assert set(found) == {key} and said in found[key]


def test_an_escaped_reference_is_text(load):
    assert (
        load(r"data.system_prompt=costs \${USER}").data.system_prompt == "costs ${USER}"
    )


def test_a_section_that_is_null_has_its_defaults(load):
    assert load("placement=null") == load("placement={}") == load()


def test_quotes_that_stay_in_a_text_are_told(load):
    assert any(
        "the quotes" in warning
        for warning in load("data.system_prompt='Be brief.'").warnings
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.learning_rate=1", "actor.optimizer.lr"),
        ("learning_rate=1", "actor.optimizer.lr"),
        ("sft.learning_rate=1", "sft.lr"),
        ("actor.optimizer.learning_rate=1", "lr"),
        ("actor.megatron.num_layer=3", "num_layers"),
        ("rollout.max_new_tokens=3", "rollout.sampling.max_tokens"),
        ("rollout.sampling.max_new_tokens=3", "max_tokens"),
        ("rollout.tensor_parallel_size=3", "rollout.tp"),
        ("algorithm.kl_coef=1", "algorithm.kl.coef"),
        ("data.batch_size=1", "data.prompts_per_step"),
    ],
)
def test_the_names_of_other_projects_are_suggested(mistakes, override, key):
    assert f"`{key}`" in next(iter(mistakes(override).values()))
