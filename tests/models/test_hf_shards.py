"""FSDP2 on more ranks than a parameter has rows: layouts against what the ranks hold, and against what they move."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig
from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.hf_model import PolicyModule, local_tensors
from megaverl.models.hf_shards import (
    cut_over_tensor_ranks,
    module_without_data,
    sharded_weights,
    tensor_cuts,
)
from megaverl.models.lora.adapters import HFAdapters
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import shapes_of
from megaverl.weights.fingerprint import ReshardCheck, model_identity
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import check_tensors
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.weight_sync import ActorWeights
from tests.launcher import Launcher
from tests.models.ranks import manager

HERE = "tests.models.test_hf_shards:"
# Of one layer, with the real numbers of rows.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
LLAMA3_8B = {
    **QWEN3_8B,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
# (config, tensor-parallel ranks, all ranks, what the model has besides)
CASES: list[tuple[dict[str, Any], int, int, dict[str, int]]] = [
    *((QWEN3_8B, 1, world, {}) for world in (24, 40, 48, 56, 96, 256)),
    *((LLAMA3_8B, 1, world, {}) for world in (48, 56, 96)),
    *((QWEN3_8B, 2, world, {}) for world in (96, 400)),
    (QWEN3_8B, 1, 24, {"value_head": 1}),
    (LLAMA3_8B, 1, 48, {"value_head": 2, "beside_logits": 1}),
    (QWEN3_8B, 1, 96, {"lora": 8}),
]


def test_layouts_are_what_fsdp2_holds_on_many_ranks(
    launch: Launcher, tmp_path: Path
) -> None:
    """On ranks that a fake process group stands for, without data."""
    [found] = launch.ranks(1, f"{HERE}compare_on_many_ranks", folder=tmp_path).check()
    assert found["wrong"] == []
    assert found["empty"] >= len(CASES), (
        "each case has empty shards on some of the ranks that were looked at"
    )


def compare_on_many_ranks(folder: str) -> dict[str, Any]:
    """What is wrong, and how many shards were empty, on a few ranks of every case."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    wrong, empty = [], 0
    for number, (config, tp, world, options) in enumerate(CASES):
        place = Path(folder) / str(number)
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for rank in (world // 2, world - tp - 1, world - 1):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=world
            )
            try:
                empty += compare_on_rank(place, tp, world, rank, **options)
            except ReshardError as error:
                wrong.append(
                    f"{config['architectures']} on rank {rank} of {world}: {error}"
                )
            finally:
                dist.destroy_process_group()
    return {"wrong": wrong, "empty": empty}


def compare_on_rank(
    folder: Path,
    tp: int,
    world: int,
    rank: int,
    value_head: int = 0,
    beside_logits: int = 0,
    lora: int = 0,
) -> int:
    """Hold a rank's layout against its tensors, as a reshard does; the number of its empty shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = module_without_data(folder)
    cuts = tensor_cuts(model, tp, "actor")
    head = {"value_head": value_head, "beside_logits": bool(beside_logits)}
    weights = sharded_weights(
        model, ModelSpec.outline(folder), world // tp, cuts=cuts, **head
    )
    layouts = weights.layout_of
    if lora:
        grid: Any = SimpleNamespace(rank=rank)
        adapters = HFAdapters(
            model, weights, LoraConfig(rank=lora), grid, world, role="actor", seed=0
        )
        layouts = adapters.beside(layouts)
    if value_head and not beside_logits:
        cast(Any, model).lm_head = torch.nn.Identity()
    module = PolicyModule(model, value_head, bool(value_head), torch.float32)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("shard", "tp"))
    cut_over_tensor_ranks(model, cuts, mesh["tp"])
    fully_shard(module, mesh=mesh["shard"])
    check_tensors(
        layouts(rank), local_tensors(module), f"rank {rank}", ReshardError, exact=True
    )
    return len(layouts(0).local_shapes) - len(layouts(rank).local_shapes)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of one row in every layer."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes |= {"shared_expert_intermediate_size": 16, "num_hidden_layers": 2}
    return make_tiny_folder(
        tmp_path_factory.mktemp("gated"), "Qwen2MoeForCausalLM", **sizes
    )


def test_weights_arrive_from_ranks_that_hold_nothing_of_some(
    launch: Launcher, gated: Path, tmp_path: Path
) -> None:
    """Resharded, fingerprinted and exported by four ranks; with a model's numbers however it is sharded."""
    found = launch.world(4, f"{HERE}move", folder=gated, exported=tmp_path / "exported")
    assert all(each == {**found[0], "empty": each["empty"]} for each in found)
    assert [each["empty"] for each in found] == [0, 2, 2, 2]
    assert (
        found[0]["identity"] == found[0]["identity of two shards"]
        and found[0]["differing"] == []
    )
    exported, weights = (
        load_file(tmp_path / "exported" / "model.safetensors"),
        load_file(gated / "model.safetensors"),
    )
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def move(folder: str, exported: str) -> dict[str, Any]:
    """Load, reshard to every rank whole, compare, and export."""
    model = sharded_model(folder, FsdpConfig())
    source, group, rank = ActorWeights.of(model), model.grid.world, model.grid.rank
    everything = whole_layout(shapes_of(model.weights).items())
    arrived = {
        name: torch.zeros(shape) for name, shape in everything.local_shapes.items()
    }
    Resharder(
        source.plan(lambda _: everything, group, None), source.tensors, arrived, group
    ).run()
    ReshardCheck(
        source.layout_of, lambda _: everything, source.tensors, arrived, group
    ).compare()
    weights = load_file(Path(folder) / "model.safetensors")
    halves = sharded_model(
        folder, FsdpConfig(sharding_strategy="hybrid_shard", shard_size=2)
    )
    model.export(exported, source_folder=folder)
    return {
        "empty": len(model.layout_of(0).local_shapes)
        - len(model.layout_of(rank).local_shapes),
        "differing": [
            name
            for name, tensor in arrived.items()
            if not torch.equal(tensor, weights[name])
        ],
        "identity": model_identity(model.layout_of, model.parameters, group),
        "identity of two shards": model_identity(
            halves.layout_of, halves.parameters, group
        ),
    }


def sharded_model(folder: str, fsdp: FsdpConfig) -> FSDPModel:
    grid = manager().grid(GridShape(dp=dist.get_world_size()))
    options = ModelOptions(dtype=torch.float32, seed=0, initialize=False)
    model = FSDPModel(folder, grid, manager(), options, fsdp=fsdp)
    model.load(folder)
    return model


def test_parameters_in_host_memory_are_given_out_when_no_copy_of_them_is_under_way(
    launch: Launcher, gated: Path
) -> None:
    """The device copies page-locked memory by itself, and what is written there before it has would go along."""
    [found] = launch.world(1, f"{HERE}events_of_sharding", folder=gated)
    assert "unshard" in found["host"] and found["host"][-1] == "synchronize"
    assert "synchronize" not in found["device"]


def events_of_sharding(folder: str) -> dict[str, list[str]]:
    """In which order `shard_module` copies parameters and waits for the device, by where they lie."""
    from torch.distributed.fsdp import FSDPModule

    from megaverl.models import hf_model
    from megaverl.platform import Platform

    events: list[str] = []
    unshard = FSDPModule.unshard

    def copies(module: FSDPModule) -> Any:
        events.append("unshard")
        return unshard(module)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_model.FSDPModule, "unshard", copies)
        patch.setattr(Platform, "synchronize", lambda _: events.append("synchronize"))
        for place, offload in (("host", True), ("device", False)):
            events.clear()
            sharded_model(folder, FsdpConfig(cpu_offload=offload))
            found[place] = list(events)
    return found
