"""The arithmetic against real Megatron models, optimizers, reshards and vLLM's own cache specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.models.tiny import make_tiny_folder, make_tiny_vision_folder
from megaverl.planner.job import Machine
from megaverl.planner.memory import MemoryModel, kv_bytes_per_token
from megaverl.planner.stages import layer_split, padded_vocab_size
from megaverl.planner.traffic import make_traffic
from megaverl.sharding.model_config import IMAGE_MODEL_TYPES
from megaverl.sharding.model_spec import MLASpec, ModelSpec
from tests.launcher import Launcher
from tests.planner.jobs import make
from tests.sharding.specs import NEMOTRON_EXPERTS, make_spec

# architecture, tied embeddings, grid, dtype, critic, DDP's fields. Sizes of 32 and 100
# leave padding in the buffers.
CASES = [
    (
        "Qwen2ForCausalLM",
        True,
        {"tp": 1, "pp": 2, "dp": 2},
        "bfloat16",
        False,
        {"grad_reduce_in_fp32": False},
    ),
    (
        "Qwen3ForCausalLM",
        False,
        {"tp": 2, "pp": 1, "dp": 2},
        "float32",
        False,
        {"overlap_grad_reduce": True},
    ),
    (
        "LlamaForCausalLM",
        False,
        {"tp": 1, "pp": 1, "dp": 4},
        "bfloat16",
        True,
        {"pad_buckets_for_high_nccl_busbw": True},
    ),
    (
        "Qwen2ForCausalLM",
        False,
        {"tp": 1, "pp": 2, "dp": 2, "vpp": 2},
        "bfloat16",
        False,
        {"overlap_grad_reduce": True, "bucket_size": 5000},
    ),
    (
        "Qwen3MoeForCausalLM",
        False,
        {"tp": 1, "pp": 2, "dp": 2, "ep": 2},
        "bfloat16",
        False,
        {},
    ),
    (
        "Qwen3NextForCausalLM",
        False,
        {"tp": 2, "pp": 1, "dp": 2, "ep": 2},
        "bfloat16",
        False,
        {},
    ),
    # A tower on the first stage.
    (
        "Qwen3_5MoeForConditionalGeneration",
        False,
        {"tp": 1, "pp": 2, "dp": 2, "ep": 2},
        "bfloat16",
        False,
        {},
    ),
    # Ranks that share a group.
    (
        "FalconH1ForCausalLM",
        False,
        {"tp": 4, "pp": 1, "dp": 1},
        "bfloat16",
        False,
        {},
    ),
    # Stages with unequal layers.
    (
        "NemotronHForCausalLM",
        False,
        {"tp": 2, "pp": 2, "dp": 1},
        "bfloat16",
        False,
        {},
    ),
    # Some of which are experts alone.
    (
        "NemotronHForCausalLM",
        False,
        {"tp": 2, "pp": 1, "dp": 2, "ep": 2},
        "bfloat16",
        False,
        {},
    ),
]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: f"{case[0][:6]}-{'-'.join(f'{k}{v}' for k, v in case[2].items())}",
)
def test_trained_bytes_are_exact(case: tuple, launch: Launcher, tmp_path: Path) -> None:
    architecture, tied, shape, dtype, critic, ddp = case
    if family := IMAGE_MODEL_TYPES.get(architecture):
        # As many tokens as the samples of the update have.
        words = [f"word{number}" for number in range(90)]
        folder = make_tiny_vision_folder(
            tmp_path, family, words=words, tie_embeddings=tied
        )
    else:
        with_experts = architecture == "NemotronHForCausalLM" and "ep" in shape
        more = NEMOTRON_EXPERTS if with_experts else {}
        folder = make_tiny_folder(tmp_path, architecture, tie_embeddings=tied, **more)
    measured = launch.world(
        4,
        "tests.planner.ranks:trained",
        folder=folder,
        shape=shape,
        dtype=dtype,
        critic=critic,
        ddp=ddp,
    )
    grid = [f"actor.{name}={size}" for name, size in shape.items() if name != "dp"]
    fields = ", ".join(f"{name}: {value}".lower() for name, value in ddp.items())
    spec = ModelSpec.from_folder(folder)
    job = make(
        spec,
        4,
        *grid,
        f"actor.ddp={{{fields}}}",
        f"model.dtype={dtype}",
        "actor.micro_batch_tokens=4096",
    )
    model = MemoryModel(job)
    role = job.roles[1] if critic else job.actor
    for rank, found in enumerate(measured):
        predicted = model.trained(role, rank)
        # Which are cut between rows, and norms are one rank's.
        for name in ("saved_weights", "saved_optimizer"):
            assert found.pop(name, getattr(predicted, name)) == pytest.approx(
                getattr(predicted, name), rel=0.15
            )
        assert {name: getattr(predicted, name) for name in found} == found, (
            f"rank {rank}"
        )


@pytest.mark.parametrize("has_norm", [False, True])
def test_what_a_mamba_layer_keeps(has_norm: bool, launch: Launcher) -> None:
    for num_groups in (1, 4):
        [(kept, counted)] = launch.world(
            1,
            "tests.planner.ranks:kept_by_mamba",
            has_norm=has_norm,
            num_groups=num_groups,
        )
        assert counted == pytest.approx(kept, rel=0.05)


def test_what_layers_of_one_part_keep(launch: Launcher) -> None:
    [found] = launch.world(1, "tests.planner.ranks:kept_by_layers_of_one_part")
    assert [kind for kind, *_ in found] == ["mamba", "mlp", "mamba"]
    for kind, kept, counted in found:
        assert counted == pytest.approx(kept, rel=0.02), kind


@pytest.mark.parametrize("critic", [False, True], ids=["actor", "critic"])
def test_bytes_with_adapters_are_exact(
    critic: bool, launch: Launcher, tmp_path: Path
) -> None:
    """Frozen weights have no buffers, gradients or moments; a critic's head is trained whole."""
    folder = make_tiny_folder(tmp_path, "Qwen2ForCausalLM", tie_embeddings=True)
    shape, lora = {"tp": 2, "pp": 2}, {"rank": 3, "alpha": 6.0}
    measured = launch.world(
        4,
        "tests.planner.ranks:trained",
        folder=folder,
        shape=shape,
        dtype="bfloat16",
        critic=critic,
        lora=lora,
    )
    role = "critic" if critic else "actor"
    settings = (
        "actor.tp=2",
        "actor.pp=2",
        "model.dtype=bfloat16",
        f"{role}.lora.rank=3",
        f"{role}.lora.alpha=6.0",
    )
    model = MemoryModel(
        make(ModelSpec.from_folder(folder), 4, *settings, "algorithm.name=ppo")
    )
    for rank, found in enumerate(measured):
        predicted = model.rank(rank).parts[role]
        assert {name: predicted[name] for name in found} == found, f"rank {rank}"


@pytest.mark.parametrize("num_kv_heads", [2, 4], ids=["aliased", "copied"])
def test_bytes_of_a_reshard_are_exact(
    num_kv_heads: int, launch: Launcher, tmp_path: Path
) -> None:
    """With one key-value head a rank both sides hold queries, keys and values in one order; with two they do not."""
    folder = make_tiny_folder(
        tmp_path, "Qwen2ForCausalLM", num_key_value_heads=num_kv_heads
    )
    measured = launch.world(
        4,
        "tests.planner.ranks:resharded",
        folder=folder,
        shape={"tp": 2, "pp": 2, "dp": 1},
        tp=2,
        gpus_per_node=2,
    )
    overrides = ("actor.tp=2", "actor.pp=2", "rollout.tp=2", "model.dtype=bfloat16")
    job = make(
        ModelSpec.from_folder(folder),
        4,
        *overrides,
        machine=Machine(gpus_per_node=2, on_gpus=False),
    )
    for found, rank in zip(measured, make_traffic(job).ranks, strict=True):
        assert (found["alias"], found["local"]) == (
            rank.received["alias"],
            rank.received["local"],
        )
        assert found["sent"] == rank.sent["nvlink"] + rank.sent["network"] > 0
        assert (
            found["received"] == rank.received["nvlink"] + rank.received["network"] > 0
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cache_bytes_are_vllms_own(tp: int) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    spec = make_spec(
        "LlamaForCausalLM", num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16
    )
    heads = max(1, spec.num_kv_heads // tp)
    page = FullAttentionSpec(
        block_size=16, num_kv_heads=heads, head_size=16, dtype=torch.bfloat16
    ).page_size_bytes
    assert kv_bytes_per_token(spec, tp, 2) * 16 == 3 * page
    latent = make_spec(
        "LlamaForCausalLM", num_layers=3, mla=MLASpec(None, 48, 16, 16, 16)
    )
    page = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    ).page_size_bytes
    assert kv_bytes_per_token(latent, tp, 2) * 16 == 3 * page


@pytest.mark.parametrize(
    ("num_layers", "pp", "vpp", "fields"),
    [
        (8, 4, None, {}),
        (8, 2, 2, {}),
        (
            94,
            8,
            None,
            {
                "num_layers_in_first_pipeline_stage": 11,
                "num_layers_in_last_pipeline_stage": 11,
            },
        ),
        (10, 3, None, {"num_layers_in_first_pipeline_stage": 4}),
        (
            10,
            2,
            2,
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
    ],
)
def test_layers_are_dealt_as_megatron_deals_them(
    num_layers: int, pp: int, vpp: int | None, fields: dict
) -> None:
    import torch

    from megaverl.distributed.grid import GridShape
    from megaverl.models.build import layers_per_stage
    from megaverl.models.options import padded_vocab_size as of_models
    from megaverl.models.options import transformer_config

    shape = GridShape(pp=pp, vpp=vpp)
    config = transformer_config(
        make_spec(num_layers=num_layers), shape, torch.float32, fields
    )
    assert layer_split(num_layers, pp, vpp, fields, "actor") == layers_per_stage(
        config, shape
    )
    assert all(
        padded_vocab_size(size, tp) == of_models(size, tp)
        for size in (1, 64, 100, 128256)
        for tp in (1, 3, 8)
    )
