"""What a plan says of roles under FSDP2: bytes against a count by hand, and the recipe that uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.config.fsdp import FsdpConfig
from megaverl.errors import ModelError, RolloutError
from megaverl.models.architectures import weights_of
from megaverl.planner.fsdp import described, gathered_bytes, passes_of, shards_of
from megaverl.planner.job import PlannedJob, find_spec, make_job
from megaverl.planner.memory import MemoryModel
from megaverl.planner.report import as_dict, as_text, parameters, survey
from megaverl.planner.traffic import make_traffic
from megaverl.rollout.vllm_layouts import planned_layouts
from megaverl.sharding.model_spec import ModelSpec
from tests.planner.jobs import CONFIGS, make, recipe

SPEC = ModelSpec.from_config(
    json.loads((CONFIGS / "qwen2_5_7b" / "config.json").read_text())
)
H, FFN, VOCAB, KV = 3584, 18944, 152064, 4 * 128
BLOCK = 2 * H * H + 2 * H * KV + (H + 2 * KV) + 3 * H * FFN + 2 * H
TOTAL = 28 * BLOCK + 2 * VOCAB * H + H
FSDP = "actor.engine=fsdp"
CODE = """
from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo2Model

class MineConfig(Olmo2Config):
    model_type = "mine"

class MineModel(Olmo2Model):
    config_class = MineConfig

class MineForCausalLM(Olmo2ForCausalLM):
    config_class = MineConfig
"""


def job(*overrides: str, world: int = 8) -> PlannedJob:
    return make(
        SPEC,
        world,
        "algorithm={name: grpo, group_size: 4}",
        "model.dtype=bfloat16",
        FSDP,
        *overrides,
    )


def test_weights_are_sharded_over_the_ranks_of_a_row_too() -> None:
    [whole, *_] = MemoryModel(job("actor.fsdp.sharding_strategy=full_shard")).ranks()
    [cut, *_] = MemoryModel(job("actor.cp=2")).ranks()
    assert cut.parts["actor"]["weights"] == whole.parts["actor"]["weights"]
    assert job("actor.cp=2").roles[0].shards == (8, 1)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 4), ("uint8", 2 + 8 / 256)])
def test_small_moments_take_their_bytes(dtype: str, size: float) -> None:
    fields = ", ".join(
        f"{name}: {dtype}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    )
    on = "use_precision_aware_optimizer: true, adam_beta2: 0.95"
    [rank, *_] = MemoryModel(job(f"actor.optimizer={{{on}, {fields}}}")).ranks()
    assert rank.parts["actor"]["optimizer"] == pytest.approx(size * TOTAL / 8, rel=1e-3)
    # Checkpoints contain float32.
    assert rank.saved == pytest.approx(12 * TOTAL / 8, rel=1e-4)


def test_shards_are_float32_and_gradients_go_with_the_step() -> None:
    assert TOTAL == 7_615_616_512, "as Qwen2.5-7B's files have it"
    planned = job()
    [rank, *_] = MemoryModel(planned).ranks()
    assert (
        rank.parts["actor"]["weights"]
        == rank.parts["actor"]["gradients"]
        == pytest.approx(4 * TOTAL / 8, rel=1e-4)
    )
    assert rank.parts["actor"]["optimizer"] == pytest.approx(8 * TOTAL / 8, rel=1e-4)
    assert rank.moments["generate"]["training"] == pytest.approx(
        12 * TOTAL / 8, rel=1e-4
    )
    assert rank.moments["actor update"]["training"] == pytest.approx(
        16 * TOTAL / 8, rel=1e-4
    )
    assert rank.saved == pytest.approx(12 * TOTAL / 8, rel=1e-4)
    assert not planned.aliases and rank.parts["rollout"]["aliased"] == 0, (
        "an engine in 16 bits is no float32 shard"
    )


@pytest.mark.parametrize(
    ("fsdp", "shards", "train", "score"),
    [
        (
            {},
            (8, 1),
            2 * (VOCAB * H + H + 2 * VOCAB * H) + 6 * VOCAB * H,
            2 * (VOCAB * H + H + 2 * VOCAB * H),
        ),
        (
            {"sharding_strategy": "shard_grad_op"},
            (8, 1),
            (2 + 4) * TOTAL + 6 * VOCAB * H,
            2 * (VOCAB * H + H + 2 * VOCAB * H),
        ),
        (
            {
                "sharding_strategy": "hybrid_shard",
                "shard_size": 4,
                "reduce_dtype": "bfloat16",
            },
            (4, 2),
            2 * (VOCAB * H + H + 2 * VOCAB * H) + 4 * VOCAB * H,
            2 * (VOCAB * H + H + 2 * VOCAB * H),
        ),
    ],
)
def test_what_is_gathered(
    fsdp: dict[str, object], shards: tuple[int, int], train: int, score: int
) -> None:
    section = FsdpConfig.model_validate(fsdp)
    weights = weights_of(SPEC)
    assert shards_of(section, 8, 8) == shards
    assert gathered_bytes(
        weights, section, 2, train=True, micro_batches=2
    ) == pytest.approx(train, rel=1e-4)
    assert gathered_bytes(
        weights, section, 2, train=False, micro_batches=1
    ) == pytest.approx(score, rel=1e-4)
    passes = passes_of(weights, section, 2, shards_of(section, 8, 8))
    times = 1 if section.sharding_strategy == "shard_grad_op" else 2
    share = (shards[0] - 1) / shards[0]
    assert passes.gathered == pytest.approx(
        share * 2 * (times * (TOTAL - VOCAB * H) + VOCAB * H), rel=1e-4
    )
    assert passes.reduced == pytest.approx(
        share * TOTAL * (2 if section.reduce_dtype else 4), rel=1e-4
    )


def test_host_memory_and_replicas() -> None:
    [rank, *_] = MemoryModel(job("actor.fsdp.cpu_offload=true")).ranks()
    assert {
        rank.parts["actor"][name] for name in ("weights", "gradients", "optimizer")
    } == {0}
    whole = job("actor.fsdp.sharding_strategy=no_shard", world=2)
    [rank, *_] = MemoryModel(whole).ranks()
    assert rank.parts["actor"]["weights"] == 4 * TOTAL and rank.saved == pytest.approx(
        12 * TOTAL / 2, rel=1e-4
    )
    assert make_traffic(whole).ranks[0].received["nvlink"] == 0, (
        "each rank has all that its engine needs"
    )


def test_a_reshard_takes_each_element_once() -> None:
    """Of the engine's whole model a rank has an eighth, and the others send the rest."""
    for rank in make_traffic(job()).ranks:
        assert rank.received["local"] == pytest.approx(2 * TOTAL / 8, rel=1e-3)
        assert sum(rank.received.values()) == 2 * TOTAL


def test_a_model_without_a_table(tmp_path: Path) -> None:
    """What transformers builds is counted, and what vLLM's loader would put on a rank."""
    described = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 1000,
        "n_positions": 2048,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], **described})
    )
    settings = [
        "data.train=absent.jsonl",
        "reward=exact_match",
        FSDP,
        "model.dtype=bfloat16",
        "rollout.tp=2",
    ]
    config = load_config(
        None, [f"model.path={tmp_path}", *settings], check_paths=False, world_size=2
    )
    planned = make_job(config, find_spec(config), 2)
    # GPT-2's own count, tied embeddings.
    total = 1000 * 64 + 2048 * 64 + 3 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert parameters(planned) == total
    [rank, _] = MemoryModel(planned).ranks()
    assert rank.parts["actor"]["weights"] == pytest.approx(4 * total / 2, rel=1e-3)
    # vLLM keeps positions, norms and biases behind a sum whole on each rank, and pads
    # the vocabulary to 1,024
    both = 2048 * 64 + 3 * 6 * 64 + 2 * 64
    assert rank.parts["rollout"]["weights"] == 2 * (total + both + 24 * 64) // 2


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Two by two shards: layers are cut twice, embeddings and norms once; the engines still get each element once."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    }
    described = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    settings = [
        "data.train=absent.jsonl",
        "reward=exact_match",
        FSDP,
        "actor.tp=2",
        "model.dtype=bfloat16",
    ]
    config = load_config(
        None, [f"model.path={tmp_path}", *settings], check_paths=False, world_size=4
    )
    planned = make_job(config, find_spec(config), 4)
    cut = 2 * (2 * 64 * 64 + 64 + 2 * (32 * 64 + 32) + 3 * 64 * 128)
    whole = 1000 * 64 + (2 * 2 + 1) * 64
    assert parameters(planned) == cut + whole
    for rank in MemoryModel(planned).ranks():
        assert rank.parts["actor"]["weights"] == 4 * (whole / 2 + cut / 4)
    for moved in make_traffic(planned).ranks:
        assert sum(moved.received.values()) == 2 * (cut + whole)


def test_the_recipe_fits() -> None:
    capacity = survey(recipe("qwen2_5_7b/grpo_fsdp_1_node", 8))
    assert not capacity.shortages
    assert "actor under FSDP: of each micro-batch a rank receives" in as_text(capacity)
    assert set(as_dict(capacity)["fsdp_micro_batch"]) == {"actor"}


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    """Planned by its own code, with consent; without, the refusal says which key gives it."""
    config = {
        "architectures": ["MineForCausalLM"],
        "model_type": "mine",
        "vocab_size": 130,
        "hidden_size": 64,
    }
    config |= {
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config |= {"max_position_embeddings": 64, "pad_token_id": 0}
    config["auto_map"] = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_mine.py").write_text(CODE)
    settings = [
        f"model.path={tmp_path}",
        FSDP,
        "algorithm={name: grpo, group_size: 4}",
        "reward=exact_match",
    ]
    settings.append("data.train=[rows.jsonl]")
    spec = find_spec(load_config(None, settings, check_paths=False))
    with pytest.raises(ModelError, match=r"model\.trust_remote_code=true"):
        described(spec)
    trusted = find_spec(
        load_config(
            None, [*settings, "model.trust_remote_code=true"], check_paths=False
        )
    )
    shapes = {weight.name: weight.shape for weight in described(trusted)}
    assert {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"} <= shapes.keys()
    layouts = planned_layouts(
        tmp_path / "config.json", 2, shapes, trust_remote_code=True
    )
    with pytest.raises(
        RolloutError, match="vLLM does not build .* must name AutoModel in auto_map"
    ):
        layouts(1)
    config["auto_map"]["AutoModel"] = "modeling_mine.MineModel"
    (tmp_path / "config.json").write_text(json.dumps(config))
    layouts = planned_layouts(
        tmp_path / "config.json", 2, shapes, trust_remote_code=True
    )
    assert {piece.tensor for piece in layouts(1).pieces} == shapes.keys()
