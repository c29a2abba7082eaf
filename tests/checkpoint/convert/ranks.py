"""What the ranks of a test world do with conversions and with models that come from a hub."""

from __future__ import annotations

import multiprocessing
import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import constants

from megaverl.checkpoint.convert.run import ConversionRequest, convert
from megaverl.distributed.grid import GridShape
from megaverl.errors import MegaverlError
from megaverl.models.hub import find_model
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.model_options import ModelOptions
from tests.models.ranks import manager


def convert_there_and_back(
    source: str, middle: str, output: str, grid: dict[str, int]
) -> None:
    """Every rank writes its share."""
    convert(
        ConversionRequest(
            Path(source),
            Path(middle),
            "megatron",
            GridShape(**grid),
            verify=True,
            quiet=True,
        )
    )
    convert(
        ConversionRequest(
            Path(middle), Path(output), "hugging_face", verify=True, quiet=True
        )
    )


def build(
    folder: str | Path, grid: dict[str, int], *, seed: int = 0, value_head: bool = False
) -> MegatronModel:
    shape = GridShape.fit(dist.get_world_size(), **grid)  # type: ignore[arg-type]
    spec = ModelSpec.from_folder(folder)
    return MegatronModel(
        spec,
        manager().grid(shape),
        ModelOptions(
            dtype=torch.float32, seed=seed, value_head=value_head, role="critic"
        ),
    )


def differing(model: MegatronModel, other: MegatronModel) -> list[str]:
    return [
        name
        for name, tensor in model.parameters.items()
        if not torch.equal(tensor, other.parameters[name])
    ]


def start_from_checkpoint(
    folder: str, checkpoint: str, grid: dict[str, int], value_head: bool = False
) -> list[str]:
    """The parameters that a model has otherwise when it starts from a converted checkpoint."""
    expected, started = (
        build(folder, grid, seed=seed, value_head=value_head) for seed in (0, 1)
    )
    expected.load(folder)
    started.load(checkpoint)
    return differing(expected, started)


def mcore_loads(
    folder: str, checkpoint: str, grid: dict[str, int], value_head: bool = False
) -> list[str]:
    """The same, loaded by megatron-core itself, strictly."""
    from megatron.core import dist_checkpointing

    expected, started = (
        build(folder, grid, seed=seed, value_head=value_head) for seed in (0, 1)
    )
    expected.load(folder)
    state = started.chunks[0].sharded_state_dict(
        metadata={"dp_cp_group": started.grid.pg_collection.dp_cp}
    )
    started.chunks[0].load_state_dict(dist_checkpointing.load(state, checkpoint))
    return differing(expected, started)


def mcore_saves(
    folder: str, checkpoint: str, grid: dict[str, int], value_head: bool = False
) -> list[str]:
    """A checkpoint that megatron-core itself wrote, as Megatron-LM does; the processes that it has left running."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # megatron-core's own queue is a server process (`multiprocessing.Manager`) that
    # outlives a rank that is killed; a save that nobody else does needs none.
    filesystem_async._results_queue = queue.Queue()
    model = build(folder, grid, value_head=value_head)
    model.load(folder)
    state = model.chunks[0].sharded_state_dict(
        metadata={"dp_cp_group": model.grid.pg_collection.dp_cp}
    )
    if dist.get_rank() == 0:
        Path(checkpoint).mkdir()
    dist.barrier()
    dist_checkpointing.save({**state, "iteration": 7}, checkpoint)
    return [process.name for process in multiprocessing.active_children()]


def save_run(
    folder: str, root: str, grid: dict[str, int], roles: list[str]
) -> dict[str, Any]:
    """A run's checkpoint of an actor and a critic, with optimizer; the weights are the folder's."""
    from megaverl.checkpoint.store import CheckpointStore
    from megaverl.workers.optimizers import MegatronTrainable

    trainables = {}
    for role in roles:
        model = build(folder, grid, value_head=role == "critic")
        model.load(folder)
        if role == "critic" and "output_layer.weight" in model.parameters:
            with torch.no_grad():
                model.parameters["output_layer.weight"].copy_(
                    torch.arange(32.0)[None] / 7
                )
        trainables[role] = MegatronTrainable(
            model, optimizer={"lr": 1e-3}, scheduler={}, ddp={}, total_updates=4
        )
    return {"path": str(CheckpointStore(root).save(1, trainables, {}))}


def load_from_hub(
    name: str, folder: str, grid: dict[str, int], **options: Any
) -> dict[str, Any]:
    """Load a model while it comes; what differs from the folder, or the error's message."""
    constants.HF_HUB_OFFLINE = False  # the tests' own hub is on this machine
    try:
        files = find_model(name, **options)
        arriving = files.arriving()
        model = build(files.folder, grid, seed=1)
        model.load(files.folder, arriving)
    except MegaverlError as error:
        return {"error": str(error)}
    expected = build(folder, grid)
    expected.load(folder)
    return {
        "differing": differing(expected, model),
        "folder": str(files.folder),
        "streamed": arriving is not None,
    }
