"""Jobs for the tests: small ones from keys, large ones from the recipes."""

from __future__ import annotations

import json
from pathlib import Path

from megaverl.config import load_config
from megaverl.planner.job import Machine, PlannedJob, make_job
from megaverl.sharding.model_spec import ModelSpec

CONFIGS = Path(__file__).parents[2] / "configs"
NEEDED = ["model.path=absent", "data.train=absent.jsonl", "reward=exact_match"]


def make(
    spec: ModelSpec, world: int, *overrides: str, machine: Machine | None = None
) -> PlannedJob:
    config = load_config(
        None, [*NEEDED, *overrides], check_paths=False, world_size=world
    )
    return make_job(config, spec, world, machine)


def recipe(
    name: str, world: int, *overrides: str, machine: Machine | None = None
) -> PlannedJob:
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path, list(overrides), check_paths=False, world_size=world)
    assert config.model.config is not None
    described = json.loads((path.parent / config.model.config).read_text())
    return make_job(config, ModelSpec.from_config(described), world, machine)
