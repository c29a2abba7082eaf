"""Layouts chosen: every one passes validation and fits, the order of candidates does not matter, `auto` in a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaverl.cli.main import main
from megaverl.config import Config, InvalidConfig, load_config
from megaverl.config.checks import cross_mistakes
from megaverl.config.loader import AUTO_KEYS, layered
from megaverl.planner.advice import shortages
from megaverl.planner.candidates import Candidates, SearchSpace, uneven_split
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import Machine, find_spec, make_job
from megaverl.planner.memory import MemoryModel
from megaverl.planner.search import (
    Found,
    LayoutSearch,
    choose,
    hardware_of,
    least_bytes,
)
from megaverl.planner.simulator import simulate
from megaverl.sharding.model_spec import ModelSpec
from tests.planner.jobs import CONFIGS, NEEDED

RECIPE = CONFIGS / "llama3_70b" / "ppo_16_nodes.yaml"
H100 = Hardware.read("h100")
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}


def of_70b(nodes: int, **options: Any) -> LayoutSearch:
    """A search over a few keys, which is soon done."""
    make, keys = layered(RECIPE), ("actor.pp", "actor.activation_checkpointing")
    return LayoutSearch(
        make,
        find_spec(make({}), fallback=str(RECIPE)),
        8 * nodes,
        H100,
        keys=keys,
        **options,
    )


@pytest.fixture(scope="module")
def found() -> Found:
    return of_70b(16).best(3)


def test_what_is_proposed_can_run_and_fits(found: Found) -> None:
    """With every rank counted, where the search looks at one of each stage."""
    assert len(found.choices) == 3
    make = layered(RECIPE)
    for choice in found.choices:
        config = make(choice.settings)
        assert cross_mistakes(config, "train", False, 128) == []
        assert not shortages(
            choice.job, MemoryModel(choice.job).ranks(range(0, 128, 25))
        )
        assert (
            choice.peak is not None and least_bytes(choice.job) <= choice.peak <= 85e9
        )
    seconds = [choice.prediction.step_seconds for choice in found.choices]
    assert seconds == sorted(seconds)
    assert "+" in found.choices[-1].worse_than(found.choices[0])


def test_the_order_of_candidates_does_not_matter(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_grids", "_row_tokens", "_engines", "_placements"):
        given = getattr(Candidates, name)

        def shuffled(
            self: Candidates, *arguments: Any, given: Any = given
        ) -> list[Any]:
            every = list(given(self, *arguments))
            random.Random(3).shuffle(every)
            return every

        if name != "_engines":  # the first one is what others are compared with
            monkeypatch.setattr(Candidates, name, shuffled)
    again = of_70b(16).best(3)
    assert [choice.settings for choice in again.choices] == [
        choice.settings for choice in found.choices
    ]


# Production recipes, their nodes, and the keys that the search varies: all, or few where
# it takes long.
PRODUCTION: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt_oss_20b/grpo_1_node": (1, ()),
    "llama3_70b/grpo_128_nodes": (128, ()),
    "llama3_70b/grpo_8_nodes": (8, ()),
    "llama3_70b/grpo_8_nodes_fp8_rollout": (8, ()),
    "llama3_70b/ppo_16_nodes": (16, ()),
    "qwen2_5_7b/grpo_fsdp_1_node": (1, ()),
    "qwen2_5_vl/grpo_geometry": (1, ("actor.micro_batch_tokens", "rollout.tp")),
    "qwen3_235b_a22b/grpo_64_nodes": (64, ("actor.ep", "rollout.tp")),
    "qwen3_235b_a22b/grpo_64_nodes_32k": (64, ("actor.ep", "rollout.tp")),
}


def test_every_production_recipe_is_held_to_the_search() -> None:
    described = {path.parent for path in CONFIGS.glob("*/config.json")}
    recipes = {
        str(path.relative_to(CONFIGS).with_suffix(""))
        for folder in described
        for path in folder.glob("*.yaml")
        if path.stem != "base"
    }
    assert recipes == PRODUCTION.keys()


@pytest.mark.parametrize("name", PRODUCTION)
def test_recipes_follow_the_search(name: str) -> None:
    """A recipe fits, and takes at most an eighth longer than the fastest layout found."""
    nodes, keys = PRODUCTION[name]
    path = CONFIGS / f"{name}.yaml"
    make = layered(path)
    spec = find_spec(make({}), fallback=str(path))
    search = LayoutSearch(make, spec, 8 * nodes, H100, keys=keys or AUTO_KEYS)
    best = search.best(1).choices[0].prediction.step_seconds
    planned = make_job(make({}), spec, 8 * nodes, H100.machine())
    own = simulate(planned, H100, lengths=search.lengths).step_seconds
    assert own < 1.125 * best
    memory = MemoryModel(planned).ranks(planned.stage_ranks())
    assert shortages(planned, memory) == []


def test_nothing_is_proposed_where_nothing_fits() -> None:
    with pytest.raises(Exception, match="no layout of 8 ranks holds this run"):
        of_70b(1).best()


def test_engines_apart_only_where_staleness_is_allowed(found: Found) -> None:
    assert all(choice.job.placement.is_colocated for choice in found.choices)
    placed = {
        str(rungs[0].get("placement.rollout"))
        for rungs, _ in groups(of_70b(16, staleness=1))
    }
    assert placed == {
        "None",
        "{'num_ranks': 32}",
        "{'num_ranks': 64}",
        "{'num_ranks': 96}",
    }


def test_engines_two_steps_ahead_are_predicted_with_rewards_beside_them() -> None:
    """The search did not end where rewards share the engines' ranks and `max_staleness` is 2 or more."""
    placed = {
        "placement.rollout": {"num_ranks": 64},
        "placement.reward": "rollout",
        "placement.actor": "rest",
    }
    ahead = {"rollout.async_rollout": True, "rollout.max_staleness": 2}
    make = layered(RECIPE)
    spec = find_spec(make({}), fallback=str(RECIPE))
    search = LayoutSearch(
        lambda settings: make(placed | ahead | settings),
        spec,
        128,
        H100,
        keys=("actor.pp",),
    )
    choices = search.best(3).choices
    assert choices
    for choice in choices:
        assert choice.job.placement.colocated("reward", "rollout")
        assert choice.prediction.seconds_of("rollout") > 0


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100_40gb"),
    ],
)
def test_a_gpu_is_known_by_its_name(
    gpu: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaverl.planner.search.gpu_name", lambda: gpu)
    assert hardware_of(layered(RECIPE)({}), 8).name == name


def test_a_gpu_counts_what_cuda_shows_of_it() -> None:
    """More than the name says, and less than nvidia-smi: it is what PyTorch and vLLM take shares of."""
    shown = {  # GiB
        "a100": 79.15,
        "a100_40gb": 39.4,
        "h100": 79.18,
        "h200": 139.72,
        "h20": 95.0,
        "b200": 178.35,
    }
    for name, gib in shown.items():
        assert Hardware.read(name).memory_gb == pytest.approx(
            gib * 2**30 / 1e9, rel=1e-3
        ), name
    assert Machine().memory == Hardware.read("h100").machine().memory


def groups(search: LayoutSearch) -> list[Any]:
    space = SearchSpace(
        search.world,
        8,
        search.keys,
        staleness=search.staleness,
        counts_memory=search.counts_memory,
        further=search.further,
    )
    return Candidates(search.config, search.spec, space).groups()


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "ends"),
    [
        (94, 8, None, 11),
        (94, 4, None, 23),
        (94, 16, None, 5),
        (80, 4, 4, 0),
        (94, 4, 2, None),
        (61, 2, None, None),
    ],
)
def test_layers_that_do_not_divide(
    layers: int, pp: int, vpp: int | None, ends: int | None
) -> None:
    split = uneven_split(layers, pp, vpp)
    assert (
        split is None
        if ends is None
        else set((split or {}).values()) == ({ends} if ends else set())
    )
    if split:
        assert (layers - 2 * (ends or 0)) % (pp - 2) == 0


def test_the_recipe_that_is_written_is_laid_over_the_one_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, path = tmp_path / "recipe.yaml", tmp_path / "chosen.yaml"
    recipe.write_text(
        yaml.safe_dump({"data": {"train": ["absent.jsonl"]}, "trainer": {"steps": 7}})
    )
    given = [*tiny(tmp_path), "actor.tp=2", "run.seed=3"]
    asked = [
        "plan",
        "--auto",
        "--config",
        str(recipe),
        "--hardware",
        "cpu",
        "--gpus-per-node",
        "4",
    ]
    assert main([*asked, "--write", str(path), *given]) == 0
    assert "% slower: " in capsys.readouterr().out
    written = yaml.safe_load(path.read_text())
    assert (path.parent / written["base"]).samefile(recipe) and written["run"][
        "seed"
    ] == 3
    before = load_config(recipe, given, check_paths=False).to_dict()
    after = load_config(path, [], check_paths=False).to_dict()
    assert (
        after["actor"]["tp"] == written["actor"]["tp"]
        and after["trainer"]["steps"] == 7
    )
    roles = ("actor", "critic", "draft", "reference", "reward_model", "rollout")
    assert [
        name for name in before if before[name] != after[name] and name not in roles
    ] == []


def tiny(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    own = [
        f"model.path={tmp_path / 'model'}",
        f"run.dir={tmp_path}",
        "run.hardware=cpu",
        "rollout.engine=hf",
    ]
    return [
        *NEEDED[1:],
        *own,
        "data.prompts_per_step=4",
        "rollout.sampling.max_tokens=16",
    ]


def test_auto_is_the_same_everywhere_and_after_a_resume(tmp_path: Path) -> None:
    autos = [f"{key}=auto" for key in AUTO_KEYS]
    first, second = (load(tmp_path, autos) for _ in range(2))
    assert first.to_dict() == second.to_dict() and set(first.chosen) == set(
        AUTO_KEYS
    ) | set(first.chosen)
    assert first.choices[-1].startswith("auto: ")
    again = load_config(
        yaml.safe_load(first.to_yaml()), [], check_paths=False, world_size=4
    )
    assert again.to_dict() == first.to_dict()  # what a run writes holds no auto
    other = {key: value for key, value in first.chosen.items()} | {
        "actor.tp": 2,
        "actor.pp": 2,
        "actor.ep": 1,
    }
    first.chosen_file.parent.mkdir()
    first.chosen_file.write_text(json.dumps({"ranks": 4, "settings": other}))
    assert (load(tmp_path, autos).actor.tp, load(tmp_path, autos).actor.pp) == (2, 2)
    # Another world: chosen anew.
    first.chosen_file.write_text(json.dumps({"ranks": 2, "settings": other}))
    assert load(tmp_path, autos).chosen == first.chosen
    one = load(tmp_path, ["actor.tp=auto", "actor.pp=3", "--world=3"][:2], world=3)
    assert one.actor.pp == 3 and set(one.chosen) == {"actor.tp"}


def load(tmp_path: Path, more: list[str], world: int | None = 4) -> Config:
    return load_config(
        None,
        [*tiny(tmp_path), *more],
        check_paths=False,
        world_size=world,
        choose=choose,
    )


def test_auto_where_it_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfig,
        match=r"data.prompts_per_step .*: found 'auto'.*auto is for actor.tp",
    ):
        load(tmp_path, ["data.prompts_per_step=auto"])
    with pytest.raises(
        InvalidConfig,
        match=r"actor.tp.*: is auto, and the number of ranks is not known",
    ):
        load(tmp_path, ["actor.tp=auto"], world=None)
    with pytest.raises(
        InvalidConfig, match=r"actor.tp.*: is auto, which `megaverl train`"
    ):
        load_config(
            None, [*tiny(tmp_path), "actor.tp=auto"], check_paths=False, world_size=4
        )


def test_every_layout_of_a_tiny_model_is_valid(tmp_path: Path) -> None:
    """All that are looked at, not the best alone."""
    spec = ModelSpec.from_config(TINY)
    (tmp_path / "recipe.yaml").write_text("{}")
    make = layered(tmp_path / "recipe.yaml", tiny(tmp_path))
    search = LayoutSearch(make, spec, 4, Hardware.read("cpu"), further=False)
    settings = [
        rungs[0] | engine for rungs, engines in groups(search) for engine in engines
    ]
    valid = [cross_mistakes(make(each), "train", False, 4) for each in settings]
    assert len(valid) > 10 and not any(valid)
