"""What the ranks do in the tests of layouts against real models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.platform import platform
from megaverl.platform.vllm_cpu import unique_shared_memory
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import Split, Weight
from tests.sharding.specs import element_ids, fill, make_spec


def compare_with_gpt_model(
    grid: dict[str, int], variants: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each variant the parameters on which the real GPTModel and the layout differ."""
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.build import build_model, named_parameters
    from megaverl.models.options import padded_vocab_size, transformer_config

    shape = GridShape(**grid)
    placed = ProcessGroupManager().grid(shape)
    found = []
    for variant in variants:
        head = variant["value_head"]
        spec = make_spec(
            variant["architecture"], tie_embeddings=variant["tie_embeddings"]
        )
        config = transformer_config(spec, shape, torch.float32)
        chunks = build_model(spec, config, placed, value_head=head, seed=0)
        real = {name: tuple(p.shape) for name, p in named_parameters(chunks).items()}
        layout = megatron_layouts(
            weights_of(spec, value_head=head),
            spec,
            shape,
            padded_vocab_size=padded_vocab_size(spec.vocab_size, shape.tp),
        )(dist.get_rank())
        found.append(differences(real, layout.local_shapes))
    return found


def differences(real: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"real": real.get(name), "layout": layout.get(name)}
        for name in real.keys() | layout.keys()
        if real.get(name) != layout.get(name)
    }


def compare_with_vllm(cases: list[dict[str, Any]]) -> list[list[str]]:
    """For each case (folder, tp, expert_parallel, placement) build vLLM's own model,
    let its own `load_weights` place element ids, and compare with what the layout
    places. Returns the parameters that differ.

    Cases of one TP must follow each other.
    """
    platform.adapt_vllm()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from megaverl.rollout.vllm_tracing import inspect_here

    wrong = []
    tp = 0
    for case in cases:
        if tp != case["tp"] and tp:
            parallel_state.destroy_model_parallel()
        tp = case["tp"]
        inspect_here(ModelSpec.from_folder(case["folder"]).architecture)
        config = EngineArgs(
            case["folder"],
            tensor_parallel_size=tp,
            enable_expert_parallel=case["expert_parallel"],
            expert_placement_strategy=case["placement"],
            skip_tokenizer_init=True,
            dtype="float32",
            distributed_executor_backend="external_launcher",
        ).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            if not parallel_state.model_parallel_is_initialized():
                with unique_shared_memory():
                    parallel_state.init_distributed_environment(backend="gloo")
                    parallel_state.initialize_model_parallel(tp)
            with experts_without_gates():
                model = initialize_model(config)
        wrong.append(place_ids(model, case))
    parallel_state.destroy_model_parallel()
    return wrong


@contextmanager
def experts_without_gates() -> Iterator[None]:
    """Let vLLM's CPU build make experts without gates, which it loads and cannot compute (0.32)."""
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    a_gpu = mock.MagicMock(wraps=config.current_platform)
    a_gpu.is_cuda_alike = lambda: True
    yes = staticmethod(lambda *_: True)
    with (
        mock.patch.object(config, "current_platform", a_gpu),
        mock.patch.multiple(
            CPUUnquantizedExperts,
            _supports_no_act_and_mul=yes,
            _supports_activation=yes,
        ),
    ):
        yield


def place_ids(model: torch.nn.Module, case: dict[str, Any]) -> list[str]:
    spec = ModelSpec.from_folder(case["folder"])
    weights = weights_of(spec)
    ids = element_ids(weights)
    assert sum(array.size for array in ids.values()) < 2**24, (
        "float32 must hold every id"
    )
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.zero_()
    # vLLM computes Mamba's A as -exp of `A_log`.
    model.load_weights(
        (
            name,
            numbers.log() if name.endswith(("mixer.A_log", "mamba.A_log")) else numbers,
        )
        for name, array in ids.items()
        for numbers in [torch.from_numpy(array).float()]
    )
    for name, parameter in parameters.items():
        if name.endswith(("mixer.A", "mamba.A")):
            parameter.data = (-parameter.data).round()
    layouts = vllm_layouts(
        weights,
        spec,
        case["tp"],
        expert_parallel=case["expert_parallel"],
        expert_placement=case["placement"],
    )
    layout = layouts(dist.get_rank() % case["tp"])
    expected = fill(layout, ids)
    wrong = [f"{name}: only in one" for name in parameters.keys() ^ expected.keys()]
    for name in parameters.keys() & expected.keys():
        if tuple(parameters[name].shape) != expected[name].shape:
            wrong.append(
                f"{name}: {tuple(parameters[name].shape)} in vLLM, {expected[name].shape} in the layout"
            )
        elif not torch.equal(
            parameters[name].data, torch.from_numpy(expected[name]).float()
        ):
            wrong.append(f"{name}: other elements")
    return wrong


def compare_with_fsdp2(shapes: dict[str, list[int]]) -> list[str]:
    """Shard parameters that hold element ids with FSDP2; the names on which its shards and the layout differ."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from megaverl.sharding.layout import even_layout

    weights = [
        Weight(name, tuple(shape), Split.REPLICATED, 0, name, name)
        for name, shape in shapes.items()
    ]
    ids = element_ids(weights)
    model = torch.nn.Module()
    for name, array in ids.items():
        module, parameter = name.split(".")
        model.add_module(module, torch.nn.Module())
        getattr(model, module).register_parameter(
            parameter, torch.nn.Parameter(torch.from_numpy(array).float())
        )
    world = dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    expected = fill(even_layout(weights, world, dist.get_rank()), ids)
    wrong = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        shard = parameter.to_local()
        if not shard.numel():  # layouts leave out empty shards
            continue
        if name not in expected or not torch.equal(
            shard, torch.from_numpy(expected.pop(name)).float()
        ):
            wrong.append(name)
    return wrong + list(expected)
