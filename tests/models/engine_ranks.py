"""What a rank builds, computes and would save where Transformer Engine is installed; `engine_stub` stands for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.models import engine_stub


class Engine:
    """Transformer Engine in this process: its stand-in, and whether models are built of its layers."""

    def __init__(self) -> None:
        engine_stub.install()
        from megaverl.models import build, options

        self.is_used = True
        for module in (build, options):
            module.uses_transformer_engine = lambda: self.is_used  # type: ignore[attr-defined]
        # This machine has no GPU, which fields of Transformer Engine's kernels need.
        options._check_needs = lambda overrides: None  # type: ignore[assignment]


def found(
    latent: dict[str, str], packed: dict[str, Any], output: str
) -> dict[str, Any]:
    """`latent_attention` of those folders and `updates` of those cases; one world serves both."""
    engine = Engine()
    return {
        "latent": latent_attention(latent),
        "packed": {
            name: updates(engine, Path(output) / name, **case)
            for name, case in packed.items()
        },
        "adapters": adapters(engine, Path(output), packed["sinks"]["folder"]),
        "refused": why_padded(
            next(iter(packed.values()))["folder"], next(iter(latent.values()))
        ),
    }


def latent_attention(folders: dict[str, str]) -> dict[str, Any]:
    """Of each folder's model on tp 2: its layers, and what layout, checkpoint and gradient norm make of it."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.tensor_parallel.layers import (
        param_is_not_tensor_parallel_duplicate,
    )

    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers import megatron_model
    from megaverl.workers.model_options import ModelOptions
    from tests.models.ranks import grid

    tp_grid = grid(tp=2)
    results = {}
    for name, folder in folders.items():
        model = megatron_model.MegatronModel(
            ModelSpec.from_folder(folder),
            tp_grid,
            ModelOptions(dtype=torch.float32, seed=0),
        )
        held, wanted = model.parameters, model.layout_of(tp_grid.rank).local_shapes
        shapes = {key: tuple(value.shape) for key, value in held.items()}
        whole = [key for key in held if key.endswith("down_proj.weight")]
        refused = ""
        try:
            save_preprocess(
                model.chunks[0].sharded_state_dict(
                    metadata={"dp_cp_group": tp_grid.pg_collection.dp_cp}
                )
            )
        except CheckpointingException as error:
            refused = str(error)
        attention = model.chunks[0].decoder.layers[0].self_attention
        group = tp_grid.tp_group
        results[name] = {
            "linear": sorted(
                {
                    type(each).__name__
                    for each in attention.children()
                    if "Linear" in type(each).__name__
                }
            ),
            "differs": sorted(
                key
                for key in shapes | wanted
                if shapes.get(key) != tuple(wanted.get(key, ()))
            ),
            "refused": refused,
            "counted": sorted(
                key
                for key in whole
                if param_is_not_tensor_parallel_duplicate(held[key], group)
            ),
            "packs": model.pack is not None,
        }
    return results


def updates(
    engine: Engine,
    output: Path,
    *,
    folder: str,
    shape: dict[str, int],
    megatron: dict[str, Any],
) -> Any:
    """Metrics of the same update, the weights to `output`, of Transformer Engine's
    layers, packed and padded, and of ours; and the packed rows that Transformer
    Engine's attention saw.
    """
    from megaverl.models import engine_attention
    from tests.workers.ranks import update

    seen: list[tuple[int, int]] = []

    def counted(kernel: Any, *given: Any, **options: Any) -> Any:
        if options.get("qkv_format") == "thd":
            seen.append((len(given[0]), len(given[1])))
        return plain(kernel, *given, **options)

    plain = engine_stub.DotProductAttention.forward
    engine_stub.DotProductAttention.forward = counted  # type: ignore[method-assign, assignment]
    assert issubclass(engine_attention.EngineAttention, engine_stub.DotProductAttention)
    results = {}
    for name in ("engine packed", "engine padded", "local padded"):
        engine.is_used = name.startswith("engine")
        seen.clear()
        # Latent attention has a kernel in Triton. The fused kernel leaves out YaRN's
        # factor, and rotates no pairs in packed rows.
        described = Path(folder, "config.json").read_text()
        fuses = engine.is_used and not any(
            word in described
            for word in ("Deepseek", "yarn", "Glm4ForCausalLM", "Cohere2", "Llama4")
        )
        options = megatron | {"apply_rope_fusion": fuses}
        if not engine.is_used:  # how Transformer Engine sends keys and values
            options.pop("cp_comm_type", None)
        given = {
            "same_prompts": 3,
            "pack_samples": name.endswith("packed"),
            "megatron": options,
        }
        metrics = update(folder, shape, str(output / name), **given)
        results[name] = {"metrics": metrics, "rows": list(seen)}
        dist.barrier()
    engine.is_used = True
    engine_stub.DotProductAttention.forward = plain  # type: ignore[method-assign]
    return results


def adapters(engine: Engine, output: Path, folder: str) -> dict[str, Any]:
    """Metrics of the same update of adapters of gpt-oss's attention, which has biases,
    of both kinds of layers; the adapters to `output`.
    """
    from tests.workers.lora_ranks import random_adapter, update

    shape, lora = {"tp": 2, "etp": 1}, {"rank": 4, "alpha": 8.0}
    given = {"lora": lora, "megatron": {"sequence_parallel": True}}
    random_adapter(folder, lora, str(output / "adapter"), shape)
    found = {}
    for name in ("adapted engine", "adapted local"):
        engine.is_used = name.endswith("engine")
        found |= update(
            folder, {name: shape}, str(output / "adapter"), str(output), **given
        )
    engine.is_used = True
    return found


def why_padded(folder: str, latent: str) -> dict[str, Any]:
    """What is said where Transformer Engine does not take packed rows, and what it was
    asked; and where it does not take sequences that are cut over ranks.
    """
    from megaverl.distributed.grid import GridShape
    from megaverl.models import engine_attention
    from megaverl.models.options import transformer_config
    from megaverl.sharding.model_spec import ModelSpec

    def of_shape(shape: GridShape, of: str, **fields: Any) -> Any:
        return transformer_config(
            ModelSpec.from_folder(of), shape, torch.bfloat16, fields
        )

    config = partial(of_shape, GridShape(tp=2), folder)

    def cut(of: str = folder, cp: int = 2, **fields: Any) -> Any:
        return of_shape(GridShape(cp=cp), of, **fields)

    asked: list[Any] = []

    def none_takes_it(given: Any) -> tuple[Any, ...]:
        asked.append(given)
        return False, None, False, None, True, [False, False, True]

    reasons = {"nothing": engine_attention.why_padded(config())}
    utils = engine_attention.utils
    takes = utils.get_attention_backend
    utils.get_attention_backend = none_takes_it
    reasons["no kernel"] = engine_attention.why_padded(config())
    utils.get_attention_backend = takes
    lowest, engine_attention.LOWEST_ENGINE = engine_attention.LOWEST_ENGINE, "2.99.0"
    reasons["too old"] = engine_attention.why_padded(config())
    engine_attention.LOWEST_ENGINE = lowest
    refused = {
        "nothing": cut(),
        "windows": cut(window_size=[3, 0]),
        "windows sent at once": cut(window_size=[3, 0], cp_comm_type="all_gather"),
        "groups of groups": cut(cp_comm_type="a2a+p2p"),
        "heads": cut(cp=4, cp_comm_type="a2a"),
        "latent": cut(latent, cp_comm_type="a2a"),
    }
    reasons["cut padded"] = engine_attention.why_padded(cut(cp_comm_type="a2a"))
    reasons["cut"] = {
        name: engine_attention.why_not_cut(each) for name, each in refused.items()
    }
    return reasons | {"asked": str(sorted(vars(asked[0]).items()))}
