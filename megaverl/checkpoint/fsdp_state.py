"""An FSDP2 role's state: what each rank holds of weights and moments, as boxes of arrays with Hugging Face's names.

`ROLE.NAME` is a weight in float32, as the optimizer steps on it, `ROLE.optimizer.state.exp_avg.NAME` a moment of it.
Shards need not be alike on all ranks; ranks that hold the same one write a share of it each (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megaverl.checkpoint.shares import boxed, shares_of
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.weights.transfer import view, viewed
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.fsdp_trainable import FSDPTrainable, local

platform.adapt_megatron()

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENT_PREFIX = "optimizer.state."


def fsdp_state(role: str, trainable: FSDPTrainable, loading: bool) -> dict[str, Any]:
    """`sharded_state` of one role."""
    steps = {name: int(state["step"]) for name, state in _states(trainable).items()}
    last = max(steps.values(), default=0)
    return {
        "tensors": {
            f"{role}.{prefix}": _shards(trainable.model, f"{role}.{prefix}", tensors, loading)
            for prefix, tensors in state_tensors(trainable).items()
        },
        # of few experts' weights: those that no token has reached have no gradient, and are not stepped on
        "optimizer": {"step": last, "behind": {name: step for name, step in steps.items() if step != last}},
        "scheduler": trainable.scheduler.state_dict(),
    }


def apply_fsdp_state(trainable: FSDPTrainable, state: Mapping[str, Any]) -> None:
    """`apply_state` of one role, whose tensors were read into their places."""
    found = state["optimizer"]
    for name, each in _states(trainable).items():
        each["step"].fill_(found["behind"].get(name, found["step"]))
    # the scheduler adds the loaded number of steps to its own
    trainable.scheduler.num_steps = 0
    trainable.scheduler.load_state_dict(state["scheduler"])


def state_tensors(trainable: FSDPTrainable) -> dict[str, dict[str, torch.Tensor]]:
    """What the prefix of a name says it is -> this rank's tensors by local name: weights, and their moments."""
    states = _states(trainable)
    moments = {
        f"{MOMENT_PREFIX}{moment}.": {n: local(each[moment]) for n, each in states.items()} for moment in MOMENTS
    }
    return {"": dict(_trained(trainable.model)), **moments}


def state_layout(model: FSDPModel) -> Layout:
    """Where in these tensors what lies: the same for weights and moments."""
    adapters = model.adapters
    return (model.held_layout_of if adapters is None else adapters.layout_of)(model.grid.rank)


def _trained(model: FSDPModel) -> Mapping[str, torch.Tensor]:
    """What a checkpoint holds of the model: all of it, or what `lora` trains."""
    return model.held_parameters if model.adapters is None else model.adapters.parameters


def _states(trainable: FSDPTrainable) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's state of each parameter of which this rank has a part, by local name; made if it is not there."""
    stepped_on = {local(parameter).data_ptr(): parameter for parameter in trainable.parameters}
    found = {}
    for name, tensor in _trained(trainable.model).items():
        parameter = stepped_on.get(tensor.data_ptr()) if tensor.numel() else None
        if parameter is None:  # a buffer, or no row of it is here
            continue
        state = trainable.optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        found[name] = state
    return found


def _shards(
    model: FSDPModel, prefix: str, tensors: Mapping[str, torch.Tensor], loading: bool
) -> list[list[ShardedTensor]]:
    shards = list(_whole_shards(model, prefix, tensors))
    if loading:
        return [list(boxed(each, (0,) * each.data.ndim, each.data, each.key, each.replica_id)) for each, _ in shards]
    counts = {count for _, count in shards}
    return [
        share for count in sorted(counts) for share in shares_of([each for each, of in shards if of == count], count)
    ]


def _whole_shards(
    model: FSDPModel, prefix: str, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[ShardedTensor, int]]:
    """All that this rank has, and how many ranks have the same."""
    layout, rank, world, tp = state_layout(model), model.grid.rank, model.grid.shape.world_size, model.grid.shape.tp
    buffers = {name for name, _ in model.module.model.named_buffers()}
    seen = viewed(layout, tensors)
    for piece in layout.pieces:
        stored = layout.stored_in(piece.local)
        if stored not in tensors:
            continue
        data = view(seen[piece.local], piece.local_box).view(piece.box.shape)
        # how many neighbours have all of it, and how many of them each part
        parts, same = model.num_shards * tp, 1 if model.is_cut_over_tp(stored) else tp
        if stored in buffers:
            parts = same = 1
        yield (
            ShardedTensor(
                key=prefix + piece.tensor,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_shape=layout.global_shapes[piece.tensor],
                global_offset=piece.box.start,
                axis_fragmentations=None,
                replica_id=(0, rank // parts * same + rank % same),
            ),
            world // parts * same,
        )
