"""A plan of roles on nodes of their own: who holds what, who sends to whom, and a picture of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megaverl.config import InvalidConfig, load_config
from megaverl.distributed.placement import Node
from megaverl.errors import ConfigError
from megaverl.planner import advice
from megaverl.planner.job import Machine
from megaverl.planner.picture import draw
from megaverl.planner.placed_run import check_memory
from megaverl.planner.report import as_dict, as_text, survey
from megaverl.trainer.job import place
from tests.config.conftest import LLAMA
from tests.planner.jobs import CONFIGS, make
from tests.sharding.specs import make_spec

PLACED = "placement={rollout: {nodes: 0}, critic: 4-5, coordinator: 7, actor: rest}"
MACHINE = Machine(gpus_per_node=4)


def test_what_each_rank_holds_and_sends(tmp_path: Path) -> None:
    found = make(make_spec(), 8, PLACED, machine=MACHINE)
    capacity = survey(found)
    assert [role.ranks for role in found.roles] == [(6,), (4, 5)]
    assert found.rollout.ranks == (0, 1, 2, 3) and not found.aliases
    parts = [set(rank.parts) for rank in capacity.memory]
    shared, trains = {"reshard", "reserve"}, {"samples", "reserve"}
    assert parts == [{"rollout", *shared}] * 4 + [{"critic", *trains}] * 2 + [
        {"actor", "samples", *shared},
        set(),
    ]
    for rank in capacity.traffic.ranks:
        assert (
            set(rank.from_rank) <= {0, 1, 2, 3, 6}
            and rank.received["local"] == rank.received["alias"] == 0
        )
        assert bool(rank.from_rank) == (rank.rank < 4)
    told = as_dict(capacity)["roles"]
    assert {name: role["ranks"] for name, role in told.items()} == {
        "actor": "6",
        "critic": "4-5",
        "rollout": "0-3",
        "reward": "0-3",
        "coordinator": "7",
    }
    assert "ranks 0-3, 4 engines" in as_text(capacity)
    assert draw(capacity, tmp_path / "plan.svg").stat().st_size > 10_000


def test_nodes_by_their_names() -> None:
    said = "placement={rollout: {nodes: [gen-1, 0]}, critic: {nodes: c}, actor: rest}"
    found = make(make_spec(), 16, said, machine=MACHINE)
    assert [node.name for node in found.placement.nodes] == [
        "node 0",
        "c",
        "gen-1",
        "node 3",
    ]
    assert found.rollout.ranks == (0, 1, 2, 3, 8, 9, 10, 11)
    assert [role.ranks for role in found.roles] == [(12, 13, 14, 15), (4, 5, 6, 7)]


def test_what_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(InvalidConfig) as caught:
        make(make_spec(), 8, "placement={rollout: 0-3, critic: 4-9}", machine=MACHINE)
    text = str(caught.value)
    assert "placement.critic" in text and "ranks 8-9 are not there" in text


def test_memory_that_will_not_do_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what would; a person who knows better starts it all the same."""
    monkeypatch.setattr(advice, "MOST_TRIED", 3)
    (tmp_path / "config.json").write_text(
        (CONFIGS / "llama3_70b" / "config.json").read_text()
    )

    def start(*more: str, placed: str = PLACED, nodes: tuple[Node, ...] = ()) -> None:
        given = [
            f"model.path={tmp_path}",
            "data.train=absent.jsonl",
            "reward=exact_match",
            placed,
            *more,
        ]
        config = load_config(
            None, given, check_paths=False, world_size=None if nodes else 8
        )
        check_memory(
            config,
            place(
                config,
                "train",
                8,
                nodes or tuple(Node(f"n{n}", 4, memory=8e9) for n in (0, 1)),
            ),
        )

    with pytest.raises(
        ConfigError,
        match=r"(?s)8 GPUs with 8.0 GB each do not hold .*rank \d needs .*\nNearest that would: ",
    ):
        start("actor.micro_batch_tokens=1500000", "reference.micro_batch_tokens=4096")
    start("actor.micro_batch_tokens=1500000", "placement.check_memory=false")
    start("actor.micro_batch_tokens=1500000", "rollout.engine=hf")
    named = "placement={rollout: {nodes: gen}, critic: {nodes: c}, coordinator: {nodes: k}, actor: rest}"
    sizes = {"gen": 4, "c": 2, "t": 1, "k": 1}
    with pytest.raises(
        ConfigError,
        match=r"(?s)7 GPUs with 8.0 GB each do not hold .*rank \d needs .*Nearest that",
    ):
        start(
            placed=named,
            nodes=tuple(
                Node(name, n, memory=8e9 * (name != "k")) for name, n in sizes.items()
            ),
        )
    roles = {
        "gen": ("rollout",),
        "c": ("critic",),
        "t": ("actor",),
        "k": ("coordinator",),
    }
    with pytest.raises(ConfigError, match="8 GPUs with 8.0 GB each do not hold"):
        claimed = tuple(Node(name, n, roles[name], 8e9) for name, n in sizes.items())
        start(placed="placement={}", nodes=claimed)
    start(nodes=(Node("a", 4), Node("b", 4)))  # no GPU: nothing is known of the memory


def test_memory_of_a_model_without_a_table_is_counted_too(tmp_path: Path) -> None:
    """By the module that transformers builds; of the engine with equal parts, as vLLM is not built before a start."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    kind = {
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        "vocab_size": 50304,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**kind, **sizes, "num_hidden_layers": 32})
    )
    given = [
        f"model.path={tmp_path}",
        "data.train=absent.jsonl",
        "reward=exact_match",
        "actor={engine: fsdp}",
    ]
    given += [
        "algorithm={name: grpo, group_size: 2}",
        "rollout.vllm.gpu_memory_utilization=0.5",
    ]
    config = load_config(None, given, check_paths=False)

    def start(memory: float) -> None:
        check_memory(config, place(config, "train", 2, (Node("n", 2, memory=memory),)))

    with pytest.raises(
        ConfigError,
        match=r"(?s)2 GPUs with 40.0 GB each do not hold this run.*`megaverl plan` shows",
    ):
        start(40e9)
    start(400e9)


def test_a_trained_draft_model_takes_memory_on_the_actors_ranks(tmp_path: Path) -> None:
    """If its folder is here: the actor's model does not stand for one on a hub."""
    given = ["placement={rollout: 0-3, actor: 4-7}", "actor.tp=2"]
    given.append("draft={train: true, tp: 1}")

    def drafts(model: str) -> str:
        return f"rollout.vllm.speculative_config={{model: {model}, num_speculative_tokens: 3}}"

    sizes = {**LLAMA, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = make(make_spec(), 8, *given, drafts(str(tmp_path)), machine=MACHINE)
    draft = found.roles[-1]
    assert (draft.name, draft.ranks, draft.grid.tp) == ("draft", (4, 5, 6, 7), 1)
    assert draft.trained is not None and not draft.value_head
    assert draft.spec.num_layers == 1
    distant = make(make_spec(), 8, *given, drafts("org/draft"), machine=MACHINE)
    assert "draft" not in [role.name for role in distant.roles]


def test_reward_models_take_memory_where_they_are(tmp_path: Path) -> None:
    models = [
        "placement={rollout: 0-3, reward: 4-5, actor: 6-7, critic: actor}",
        "reward=[{name: exact_match}, {name: liked, path: org/liked}, {path: org/b, engine: transformers}]",
        "reward_model.tp=2",
    ]
    found = make(make_spec(), 8, *models, machine=MACHINE)
    assert [(role.name, role.ranks) for role in found.roles] == [
        ("actor", (6, 7)),
        ("critic", (6, 7)),
        ("liked", (4, 5)),
    ]
    liked = found.roles[2]
    assert liked.trained is None and liked.grid.tp == 2 and liked.value_head
    capacity = survey(found)
    memory = capacity.memory
    assert (
        "liked" in as_text(capacity)
        and "liked" in draw(capacity, tmp_path / "plan.svg").read_text()
    )
    assert [
        set(rank.parts) - {"reshard", "reserve", "samples"} for rank in memory[4:]
    ] == [{"liked"}] * 2 + [{"actor", "critic"}] * 2
    held = memory[4].parts["liked"]["weights"]
    assert set(memory[4].parts["liked"]) == {"weights", "activations"}
    assert (
        held
        == sum(math.prod(shape) for shape in liked.layout_of(0).local_shapes.values())
        * found.itemsize
        > 0
    )
    assert liked.layout_of(0).local_shapes["output_layer.weight"] == (
        1,
        found.spec.hidden_size,
    )
    assert memory[4].phases["liked forward"] >= held
