"""`base: FILE`: files laid over one another, with every mistake at the file and line in which it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.config import Config, InvalidConfig, load_config
from megaverl.config.yaml_source import read_source

WHOLE = """\
model: models/small
data: {train: [a.jsonl, b.jsonl], prompts_per_step: 8}
reward: [{name: gsm8k, weight: 0.5}, {name: finished}]
actor: {tp: 2, optimizer: {lr: 1e-5, weight_decay: 0.1}}
rollout: {sampling: {max_tokens: 128}}
"""


@pytest.fixture
def write(tmp_path):
    """`write(name, text)`: a file in `tmp_path`; its path."""

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def load(path: Path, *overrides: str) -> Config:
    return load_config(path, list(overrides), check_paths=False)


def mistakes(path: Path, *overrides: str) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        load(path, *overrides)
    return {mistake.key: str(mistake) for mistake in caught.value.mistakes}


def test_mappings_merge_and_the_rest_is_replaced(write):
    write("family/base.yaml", WHOLE)
    write(
        "family/one.yaml",
        "base: base.yaml\nactor: {optimizer: {lr: 2e-5}}\nreward: exact_match\n",
    )
    top = write(
        "mine/top.yaml",
        "base: ../family/one.yaml\nactor: {pp: 3}\nalgorithm: {loss_length: '${data.prompts_per_step}'}\n",
    )
    config = load(
        top, "data.prompts_per_step=16", "algorithm={name: dr_grpo, group_size: 2}"
    )
    assert (config.actor.tp, config.actor.pp) == (2, 3)
    assert {
        **config.actor.optimizer,
        "lr": 2e-5,
        "weight_decay": 0.1,
    } == config.actor.optimizer
    assert [entry.name for entry in config.reward] == ["exact_match"], (
        "a list is replaced"
    )
    assert config.algorithm.loss_length == 16, "`${...}` finds what stands at last"
    assert "base" not in config.to_dict()


def test_a_mistake_is_at_the_file_and_line_that_hold_it(write):
    base = write(
        "base.yaml",
        f"{WHOLE}trainer:\n  stps: 3\n  validate_every: -1\ncritic: {{tp: 0, pp: 0}}\n",
    )
    child = write(
        "child.yaml", "base: base.yaml\ncritic:\n  pp: -1\nreward:\n  - {nam: gsm8k}\n"
    )
    found = mistakes(child, "trainer.pass_at=x")
    assert (
        f"({base}, line 7): unknown key. Did you mean `steps`?" in found["trainer.stps"]
    )
    assert f"({base}, line 8): found -1" in found["trainer.validate_every"]
    assert f"({base}, line 9): found 0" in found["critic.tp"]
    assert f"({child}, line 3): found -1" in found["critic.pp"]
    assert f"({child}, line 5): unknown key" in found["reward.0.nam"]
    assert "(command line)" in found["trainer.pass_at"]


def test_a_place_in_a_list_of_the_base_is_not_that_of_the_childs(write):
    write("base.yaml", WHOLE)
    child = write(
        "child.yaml", "base: base.yaml\n\nreward: [3, {name: gsm8k, weight: x}]\n"
    )
    assert f"({child}, line 3)" in mistakes(child)["reward.1.weight"]


def test_a_key_twice_in_a_base_is_told(write):
    base = write("base.yaml", f"{WHOLE}actor: {{tp: 4}}\n")
    found = mistakes(write("child.yaml", "base: base.yaml\nactor: {pp: 2}\n"))
    assert f"stands twice in {base}, in lines 4 and 6" in found["actor"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "base: nowhere.yaml",
            "line 1): found 'nowhere.yaml', but {folder}/nowhere.yaml is not a file",
        ),
        ("base: .", "is not a file. It is named from this file's folder"),
        ("base:", "line 1): found null; expected the path of a YAML file"),
        (
            "actor: {tp: 2}\nbase: [a.yaml]",
            "line 2): found ['a.yaml']; expected the path",
        ),
        ("base: bad.yaml", "bad.yaml, line 2 is not valid YAML"),
        ("base: list.yaml", "list.yaml holds a list; expected sections"),
        ("bse: base.yaml", "unknown key. Did you mean `base`?"),
    ],
)
def test_a_base_that_is_none(write, tmp_path, text, words):
    write("bad.yaml", "actor:\n\ttp: 2\n")
    write("list.yaml", "- a\n")
    found = mistakes(write("child.yaml", text))
    assert any(
        words.format(folder=tmp_path) in message for message in found.values()
    ), found
    assert "data.train" not in found or text.startswith("bse"), (
        "what a base would have held is not missed"
    )


def test_files_that_are_each_others_base(write, tmp_path):
    first = write("a.yaml", "base: sub/b.yaml\n")
    second = write("sub/b.yaml", "run: {name: b}\nbase: ../c.yaml\n")
    third = write("c.yaml", "base: a.yaml\n")
    message = mistakes(first)["base"]
    assert (
        f"{first} -> {second} -> {third} -> {first}. Leave one of these out." in message
    )
    assert f"({third}, line 1)" in message
    own = write("own.yaml", "base: own.yaml\n")
    assert f"{own} -> {own}" in mistakes(own)["base"]


def test_a_base_is_for_files(write):
    base = write("base.yaml", WHOLE)
    assert "Here --config names a file" in mistakes(base, f"base={base}")["base"]
    with pytest.raises(InvalidConfig, match="base: stands in a file"):
        load_config({"base": str(base)}, check_paths=False)


def test_the_flat_form_over_a_base_and_under_a_child(write):
    write("base.yaml", f"{WHOLE}checkpoint: {{save_interval: 9, keep_last_k: 2}}\n")
    flat = write(
        "flat.yaml",
        "base: base.yaml\nmodel: {pretrain_model_path: org/other, reward_function: finished}\n"
        "checkpoint_config: {save_interval: 5}\nengine: {num_gpus: 2}\n",
    )
    config = load(flat)
    assert (config.model.path, [entry.name for entry in config.reward]) == (
        "org/other",
        ["finished"],
    )
    assert (
        config.checkpoint.save_interval,
        config.checkpoint.keep_last_k,
        config.run.nproc,
    ) == (5, 2, 2)
    over = write(
        "over.yaml",
        "base: flat.yaml\nmodel: org/third\nrun: {nproc: 4}\ncheckpoint: {save_interval: x}\n",
    )
    assert f"({over}, line 4)" in mistakes(over)["checkpoint.save_interval"]
    config = load(over, "checkpoint.save_interval=1")
    assert (config.model.path, config.run.nproc) == ("org/third", 4)
    assert (config.checkpoint.save_interval, config.checkpoint.keep_last_k) == (1, 2)


def test_a_models_description_is_named_from_the_file_that_names_it(write):
    write("family/base.yaml", "model: {path: m, config: model.json}\n")
    write("family/one.yaml", "base: base.yaml\n")
    path = write("mine/top.yaml", "base: ../family/one.yaml\n")
    assert read_source(path, []).values["model"]["config"] == "../family/model.json"


KEYS = st.sampled_from(["a", "b", "c"])
TREES = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(KEYS, TREES, max_size=3), min_size=1, max_size=4))
def test_a_chain_is_its_files_laid_over_one_another(tmp_path_factory, layers):
    """Each key has the value of the last file that sets it, and that file's name as its place."""
    import yaml

    folder = tmp_path_factory.mktemp("chain")
    for number, layer in enumerate(layers):
        text = {**({"base": f"{number - 1}.yaml"} if number else {}), **layer}
        (folder / f"{number}.yaml").write_text(yaml.safe_dump(text))

    expected: dict = {}
    holder: dict = {}

    def lay(over, under, at, number):
        for key, value in over.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(under.get(key), dict):
                lay(value, under[key], path, number)
            else:
                for old in [old for old in holder if old[: len(path)] == path]:
                    del holder[old]
                under[key] = {} if isinstance(value, dict) else value
                if isinstance(value, dict):
                    lay(value, under[key], path, number)
            if not isinstance(value, dict):
                holder[path] = number

    for number, layer in enumerate(layers):
        lay(layer, expected, (), number)
    source = read_source(folder / f"{len(layers) - 1}.yaml", [])
    assert (source.values, source.mistakes) == (expected, [])
    for path, number in holder.items():
        assert source.place(path).startswith(f"{folder / str(number)}.yaml, line ")
