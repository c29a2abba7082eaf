"""Every recipe of `configs/` passes all checks that need no files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaverl.config import load_config, smallest_world
from megaverl.config.loader import Command
from megaverl.config.presets import PRESETS
from megaverl.config.registered import registered

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))

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
# Their model and data are made by the run, and their numbers of heads are not SmolLM2's.
MADE_ON_THE_SPOT = ("quickstart", "guessing_game", "turn_grpo_guessing_game", "calculator_tool", "signalling_game")


def command_of(path: Path) -> Command:
    stages: dict[str, Command] = {"dpo": "dpo", "kto": "dpo", "reward_model": "reward", "sft_gsm8k": "sft"}
    return stages.get(path.stem, "quickstart" if path.stem in MADE_ON_THE_SPOT else "train")


def test_there_are_recipes():
    assert {"quickstart", "ppo_gsm8k_smollm2", "grpo_gsm8k_smollm2_tp3", "grpo_gsm8k_smollm2_pp2"} <= {
        path.stem for path in RECIPES
    }


def test_every_algorithm_and_each_of_its_parts_is_in_a_recipe():
    """Used by it, or named in a remark beside the key that would set it."""
    loaded = {path: load_config(path, command=command_of(path), check_paths=False) for path in RECIPES}
    trained = [c.algorithm for path, c in loaded.items() if command_of(path) in ("train", "quickstart")]
    remarks = " ".join(re.findall(r"^ *\w.*? #(.*)", "".join(path.read_text() for path in RECIPES), re.MULTILINE))
    named = set(re.findall(r"\w+", remarks))
    assert {algorithm.name for algorithm in trained} == set(PRESETS)
    parts = {
        "advantage_estimators": {each.advantage_name for each in trained},
        "policy_losses": {each.policy_loss_name for each in trained},
        "token_selectors": {each.token_selector_name for each in trained},
        "aggregations": {each.aggregation_name for each in trained},
        "corrections": {each.correction.kind for each in trained},
        "kl_estimators": {each.kl.kind_name for each in trained if each.kl.place != "none"},
        "value_losses": {each.value_loss for each in trained},
        "divergences": {each.divergence_name for each in trained},
        "preference_losses": {config.preference.loss for config in loaded.values()},
        "reward_model_losses": {config.reward_model.loss for config in loaded.values()},
    }
    for registry, used in parts.items():
        assert set(registered(registry)) - used - named == set(), registry
    steered = {each.kl.target is not None for each in trained if each.kl.place != "none"}
    assert steered == {True, False}, "a fixed and an adaptive coefficient"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_right(path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = load_config(path, command=command_of(path), check_paths=False)
    assert config.warnings == ()
    assert config.run.name != "run", "two recipes must not share a run folder"


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem not in MADE_ON_THE_SPOT], ids=lambda path: path.stem)
def test_a_recipe_fits_its_model_and_its_world(path, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    described = load_config(path, command=command_of(path), check_paths=False).model.config
    (tmp_path / "config.json").write_text((CONFIGS / described).read_text() if described else json.dumps(SMOLLM2))
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    overrides = [f"model.path={tmp_path}", f"data.train={data}", f"data.validation={data}"]
    overrides += [f"preference.train={data}", f"preference.validation={data}"]
    if path.stem.startswith("mixed"):
        overrides.append(f"reward=[{{name: gsm8k, accuracy: true}}, {{name: learned, path: {tmp_path}}}]")
    config = load_config(path, overrides, command=command_of(path), world_size=512 if described else None)
    if not described:
        assert config.run.nproc == smallest_world(config, command_of(path))
