"""Every shipped recipe through `megaverl plan` and `plan --auto`; those of large models with fewer of their layers."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from megaverl.cli.main import main
from megaverl.config import Config, load_config
from megaverl.config.yaml_source import all_recipes
from tests.config.test_recipes import SMOLLM2, command_of, made_on_the_spot, name_of
from tests.launcher import Launcher

# `plan` knows runs of `megaverl train`, and no supervised stages.
RECIPES = [
    path for path in all_recipes() if command_of(path) in ("train", "quickstart")
]
# What `plan --auto` decides on; the search is the same for recipes that have these in
# common.
DECIDED = ("actor", "critic", "reference", "reward_model", "rollout", "placement")
ENDS_OF_PIPELINE = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def small_config(path: Path, config: Config) -> dict[str, Any]:
    """Return a config.json for the recipe: its own with few layers and experts, or SmolLM2's, or a quickstart's."""
    own = path.parent / "config.json"
    if not own.exists():
        heads = (
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
            if made_on_the_spot(path)
            else {}
        )
        return {**SMOLLM2, "model_type": "llama", **heads}
    model: dict[str, Any] = json.loads(own.read_text())
    actor = config.actor
    ends = sum(actor.megatron.get(name, 1) - 1 for name in ENDS_OF_PIPELINE)
    model["num_hidden_layers"] = max(4, actor.pp * (actor.vpp or 1)) + ends
    if "layer_types" in model:
        model["layer_types"] = model["layer_types"][: model["num_hidden_layers"]]
    if "num_experts" in model:
        model["num_experts"] = max(8, actor.ep)
    if "vision_config" in model:
        model["vision_config"] |= {"depth": 2, "fullatt_block_indexes": [1]}
    return model


def test_every_recipe_is_planned(launch: Launcher, tmp_path: Path) -> None:
    [found] = launch.ranks(
        1, "tests.planner.test_recipes:plan_all", folder=tmp_path
    ).check()
    assert {name for name, *_ in found} == {name_of(path) for path in RECIPES}
    assert [each for each in found if each[2:] != [0, ""]] == []
    assert sum(options == "--auto" for _, options, *_ in found) > 10


def plan_all(folder: str) -> list[tuple[str, str, int, str]]:
    """Return (recipe, options, exit code, what was written as an error) of every plan."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # a plan is for the ranks that it is asked about
    found: list[tuple[str, str, int, str]] = []
    searched: set[str] = set()
    for path in RECIPES:
        config = load_config(path, [], check_paths=False)
        # A file of its own: modules that were built of a config.json are kept by its
        # path.
        described = Path(folder) / name_of(path) / "config.json"
        described.parent.mkdir(parents=True)
        model = small_config(path, config)
        described.write_text(json.dumps(model), encoding="utf-8")
        values = config.to_dict()
        decided = json.dumps(
            [model, *(values[name] for name in DECIDED)], sort_keys=True
        )
        every = [[]] if decided in searched else [[], ["--auto"]]
        if name_of(path) == "qwen2_5_7b/grpo_fsdp_1_node":
            every.append(["--nodes", "1", "actor.tp=2"])
        for options in every:
            err = io.StringIO()
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(err),
            ):
                code = main(
                    [
                        "plan",
                        "--config",
                        str(path),
                        "--model-config",
                        str(described),
                        *options,
                    ]
                )
            found.append((name_of(path), " ".join(options), code, err.getvalue()))
        searched.add(decided)
    return found
