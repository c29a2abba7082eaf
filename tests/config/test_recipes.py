"""Every recipe of `configs/` passes all checks that need no files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl.config import InvalidConfig, load_config, smallest_world
from megaverl.config.algorithm import FILTERS, PRESETS, AlgorithmConfig
from megaverl.config.loader import Command
from megaverl.config.signatures import registered
from megaverl.config.yaml_source import all_recipes, read_source, recipe, recipes_folder
from megaverl.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
RECIPES = all_recipes()

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def name_of(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def made_on_the_spot(path: Path) -> bool:
    """Model and data; the numbers of heads are not SmolLM2's."""
    return path.parent.name == "games" or path.stem == "quickstart"


def command_of(path: Path) -> Command:
    stages: dict[str, Command] = {
        "dpo": "dpo",
        "kto": "dpo",
        "reward_model": "reward",
        "sft": "sft",
    }
    return stages.get(path.stem, "quickstart" if made_on_the_spot(path) else "train")


def test_there_are_recipes():
    assert {
        "quickstart",
        "gsm8k_smollm2/ppo",
        "gsm8k_smollm2/grpo_tp3",
        "games/guessing_game",
    } <= {*map(name_of, RECIPES)}
    assert recipes_folder() == CONFIGS and recipe("gsm8k_smollm2/ppo") in RECIPES
    with pytest.raises(ConfigError, match="there is no recipe nothing.yaml"):
        recipe("nothing")


def leaves(
    values: dict[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        yield from (
            leaves(value, (*at, key))
            if isinstance(value, dict)
            else [((*at, key), value)]
        )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_states_only_what_its_base_does_not(path):
    own = yaml.safe_load(path.read_text())
    if "base" not in own:
        return
    below = dict(leaves(read_source(path.parent / own.pop("base"), []).values))
    above = dict(leaves(read_source(path, []).values))
    stated = [at for at, _ in leaves(own)]
    assert [
        ".".join(at) for at in stated if at in below and below[at] == above[at]
    ] == []


def test_every_file_is_a_recipe_or_under_one():
    named = {
        (path.parent / base).resolve()
        for path in FILES
        if (base := yaml.safe_load(path.read_text()).get("base"))
    }
    assert set(FILES) == {*RECIPES, *named}
    names = [
        load_config(path, command=command_of(path), check_paths=False).run.name
        for path in RECIPES
    ]
    assert len(set(names)) == len(names), "two recipes must not share a run folder"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("grpo_gsm8k_smollm2_pp2.yaml", ["gsm8k_smollm2/grpo_pp2"]),
        (
            "reinforce_plus_plus_gsm8k_smollm2.yaml",
            ["gsm8k_smollm2/reinforce_plus_plus"],
        ),
        ("sft_gsm8k.yaml", ["gsm8k_smollm2/sft"]),
        ("guessing_game.yaml", ["games/guessing_game"]),
        ("reward_model.yaml", ["preferences_smollm2/reward_model"]),
        (
            "grpo_llama3_70b.yaml",
            ["llama3_70b/grpo_128_nodes", "llama3_70b/grpo_8_nodes"],
        ),
        ("llama3_70b_ppo.yaml", ["llama3_70b/ppo_16_nodes"]),
        ("qwen3_235b_a22b_grpo.yaml", ["qwen3_235b_a22b/grpo_64_nodes"]),
        ("gsm8k_smollm2/ppo", ["gsm8k_smollm2/ppo"]),
        ("mine.yaml", []),
    ],
)
def test_a_recipe_that_is_elsewhere_is_named(typed, found, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    hint = (
        f"Did you mean {' or '.join(f'configs/{name}.yaml' for name in found)}?"
        if found
        else "Give the path of a"
    )
    with pytest.raises(
        InvalidConfig, match=re.escape(f"configs/{typed} does not exist. {hint}")
    ):
        load_config(f"configs/{typed}")


# What makes an algorithm of its own, or changes one.
OPTIONS = (
    *(
        "top_entropy",
        "entropy_target",
        "positive_coef",
        "rollout_filter",
        "opponent_beta",
        "dynamic_sampling",
    ),
    *(
        "kl.importance_weighted",
        "kl.score_function",
        "correction.also",
        "correction.low",
        "distillation.top_k",
    ),
)


def test_every_algorithm_and_each_of_its_parts_is_in_a_recipe():
    """Used by it, or named in a remark beside the key that would set it."""
    loaded = {
        path: load_config(path, command=command_of(path), check_paths=False)
        for path in RECIPES
    }
    trained = [
        c.algorithm
        for path, c in loaded.items()
        if command_of(path) in ("train", "quickstart")
    ]
    remarks = " ".join(
        re.findall(
            r"^ *\w.*? #(.*)", "".join(path.read_text() for path in FILES), re.MULTILINE
        )
    )
    named = set(re.findall(r"\w+", remarks))
    assert {algorithm.name for algorithm in trained} == set(PRESETS)
    parts = {
        "advantage_estimators": {each.advantage_name for each in trained},
        "policy_losses": {each.policy_loss_name for each in trained},
        "token_selectors": {each.token_selector_name for each in trained},
        "aggregations": {each.aggregation_name for each in trained},
        "corrections": {
            part.kind
            for each in trained
            for part in (each.correction, *each.correction.also)
        },
        "kl_estimators": {
            each.kl.kind_name for each in trained if each.kl.place != "none"
        },
        "value_losses": {each.value_loss for each in trained},
        "divergences": {each.divergence_name for each in trained},
        "preference_losses": {config.preference.loss for config in loaded.values()},
        "reward_model_losses": {config.reward_model.loss for config in loaded.values()},
    }
    for registry, used in parts.items():
        assert set(registered(registry)) - used - named == set(), registry
    assert set(FILTERS) - {each.rollout_filter for each in trained} - named == set()
    for key in OPTIONS:
        default, *used = (
            attrgetter(key)(each) for each in (AlgorithmConfig(), *trained)
        )
        assert key.split(".")[-1] in named or any(value != default for value in used), (
            key
        )
    steered = {
        each.kl.target is not None for each in trained if each.kl.place != "none"
    }
    assert steered == {True, False}, "a fixed and an adaptive coefficient"


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_is_right(path, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = load_config(path, command=command_of(path), check_paths=False)
    assert config.warnings == ()
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert (
        load_config(
            tmp_path / "resolved.yaml", command=command_of(path), check_paths=False
        )
        == config
    )


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if not made_on_the_spot(path)], ids=name_of
)
def test_a_recipe_fits_its_model_and_its_world(path, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    described = load_config(
        path, command=command_of(path), check_paths=False
    ).model.config
    (tmp_path / "config.json").write_text(
        (path.parent / described).read_text() if described else json.dumps(SMOLLM2)
    )
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    overrides = [
        f"model.path={tmp_path}",
        f"data.train={data}",
        f"data.validation={data}",
    ]
    overrides += [f"preference.train={data}", f"preference.validation={data}"]
    if path.stem == "mixed":
        overrides.append(
            f"reward=[{{name: gsm8k, accuracy: true}}, {{name: learned, path: {tmp_path}}}]"
        )
    config = load_config(
        path, overrides, command=command_of(path), world_size=512 if described else None
    )
    if not described:
        assert config.run.nproc == smallest_world(config, command_of(path))
