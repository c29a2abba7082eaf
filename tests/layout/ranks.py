"""What the ranks do in the tests of layouts against real models."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from megaverl.layout.megatron import megatron_layout
from megaverl.layout.vllm import vllm_layout
from megaverl.models.architectures import weights_of
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape
from megaverl.platform import platform
from tests.layout.specs import element_ids, fill, make_spec


def compare_with_gpt_model(grid: dict[str, int], variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each variant the parameters on which the real GPTModel and the layout differ."""
    from megaverl.models.build import build_model, named_parameters
    from megaverl.models.options import padded_vocab_size, transformer_config
    from megaverl.parallel.groups import ProcessGroupManager

    shape = GridShape(**grid)
    placed = ProcessGroupManager().grid(shape)
    found = []
    for variant in variants:
        head = variant["value_head"]
        spec = make_spec(variant["architecture"], tie_embeddings=variant["tie_embeddings"])
        config = transformer_config(spec, shape, torch.float32)
        chunks = build_model(spec, config, placed, value_head=head, seed=0)
        real = {name: tuple(p.shape) for name, p in named_parameters(chunks).items()}
        layout = megatron_layout(
            weights_of(spec, value_head=head),
            spec,
            shape,
            dist.get_rank(),
            padded_vocab_size=padded_vocab_size(spec.vocab_size, shape.tp),
        )
        found.append(differences(real, layout.local_shapes))
    return found


def differences(real: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"real": real.get(name), "layout": layout.get(name)}
        for name in real.keys() | layout.keys()
        if real.get(name) != layout.get(name)
    }


def compare_with_vllm(folders: list[str], tp_sizes: list[int]) -> dict[str, list[str]]:
    """Build vLLM's own model of each folder at each TP, let its own `load_weights` place element ids, and
    compare with what the layout places. Returns the parameters that differ, by folder and TP."""
    platform.adapt_vllm()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    wrong: dict[str, list[str]] = {}
    for tp in tp_sizes:
        # what vLLM's CPU worker would set: the name of the ranks' shared memory
        os.environ["VLLM_DIST_IDENT"] = f"layout-{os.environ['MASTER_PORT']}-{tp}"
        for folder in folders:
            config = EngineArgs(
                folder,
                tensor_parallel_size=tp,
                skip_tokenizer_init=True,
                dtype="float32",
                distributed_executor_backend="external_launcher",
            ).create_engine_config()
            with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
                if not parallel_state.model_parallel_is_initialized():
                    parallel_state.init_distributed_environment(backend="gloo")
                    parallel_state.initialize_model_parallel(tp)
                model = initialize_model(config)
            spec = ModelSpec.from_folder(folder)
            wrong[f"{folder} tp{tp}"] = place_ids(model, spec, tp, dist.get_rank() % tp)
        parallel_state.destroy_model_parallel()
    return wrong


def place_ids(model: torch.nn.Module, spec: ModelSpec, tp: int, tp_rank: int) -> list[str]:
    weights = weights_of(spec)
    ids = element_ids(weights)
    assert sum(array.size for array in ids.values()) < 2**24, "float32 must hold every id"
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.zero_()
    model.load_weights((name, torch.from_numpy(array).float()) for name, array in ids.items())
    expected = fill(vllm_layout(weights, spec, tp, tp_rank), ids)
    wrong = [f"{name}: only in one" for name in parameters.keys() ^ expected.keys()]
    for name in parameters.keys() & expected.keys():
        if tuple(parameters[name].shape) != expected[name].shape:
            wrong.append(f"{name}: {tuple(parameters[name].shape)} in vLLM, {expected[name].shape} in the layout")
        elif not torch.equal(parameters[name].data, torch.from_numpy(expected[name]).float()):
            wrong.append(f"{name}: other elements")
    return wrong
