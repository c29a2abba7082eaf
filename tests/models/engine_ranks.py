"""What a rank builds and would save where Transformer Engine is installed; `engine_stub` stands for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.models import engine_stub


def latent_attention(folders: dict[str, str]) -> dict[str, Any]:
    """Of each folder's model on tp 2: its layers, and what layout, checkpoint and gradient norm make of it."""
    engine_stub.install()
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models import build, options
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers import megatron_model

    for module in (build, options, megatron_model):
        module.uses_transformer_engine = lambda: True  # type: ignore[attr-defined]
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    grid = ProcessGroupManager().grid(GridShape.fit(dist.get_world_size(), tp=2))
    found = {}
    for name, folder in folders.items():
        model = megatron_model.MegatronModel(ModelSpec.from_folder(folder), grid, dtype=torch.float32, seed=0)
        held, wanted = model.parameters, model.layout_of(grid.rank).local_shapes
        shapes = {key: tuple(value.shape) for key, value in held.items()}
        whole = [key for key in held if key.endswith("down_proj.weight")]
        refused = ""
        try:
            save_preprocess(model.chunks[0].sharded_state_dict(metadata={"dp_cp_group": grid.pg_collection.dp_cp}))
        except CheckpointingException as error:
            refused = str(error)
        attention = model.chunks[0].decoder.layers[0].self_attention
        found[name] = {
            "linear": sorted({type(each).__name__ for each in attention.children() if "Linear" in type(each).__name__}),
            "differs": sorted(key for key in shapes | wanted if shapes.get(key) != tuple(wanted.get(key, ()))),
            "refused": refused,
            "counted": sorted(key for key in whole if param_is_not_tensor_parallel_duplicate(held[key], grid.tp_group)),
        }
    return found
