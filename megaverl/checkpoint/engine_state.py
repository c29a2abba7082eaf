"""A role's state as its engine holds it: as megatron-core shards it, or as FSDP2 cuts it.

megatron-core's optimizer is stored parameter by parameter ("fully reshardable"), not in its buckets, so that a
checkpoint can be read on another TP, PP, VPP or DP.

Under FSDP2 it is what each rank holds of weights and moments, as boxes of arrays with Hugging Face's names.
`ROLE.NAME` is a weight in float32, as the optimizer steps on it, `ROLE.optimizer.state.exp_avg.NAME` a moment of it.
Shards need not be alike on all ranks; ranks that hold the same one write a share of it each (`parts.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.parts import boxed, optimizer_shards, share_replicas, shares_of
from megaverl.errors import CheckpointError
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.weights.transports import view, viewed
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable, local

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

SHARDING_TYPE = "fully_reshardable"


def megatron_state(role: str, trainable: MegatronTrainable, loading: bool) -> dict[str, Any]:
    """`sharded_state` of one role."""
    groups = trainable.model.grid.pg_collection
    metadata = {
        "distrib_optim_sharding_type": SHARDING_TYPE,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.dp_cp,
    }
    if trainable.model.adapters is None:
        chunks = {name: _chunk_state(chunk, metadata) for name, chunk in _named_chunks(trainable).items()}
    else:
        chunks = dict(zip(_named_chunks(trainable), _adapter_states(trainable.model), strict=True))
    for optimizer in _single_optimizers(trainable.optimizer):
        _allocate(role, optimizer)
    described = chunks if len(chunks) > 1 else next(iter(chunks.values()))
    with _own_shards(trainable.optimizer):
        optimizer = trainable.optimizer.sharded_state_dict(described, is_loading=loading, metadata=metadata)
    state = {"model": chunks, "optimizer": optimizer, "scheduler": trainable.scheduler.state_dict()}
    add_prefix_for_sharding(state, f"{role}.")
    if loading:
        _join_in_place(state)
    else:
        share_replicas(state, groups.dp_cp, groups.expt_dp)
    return state


def _join_in_place(state: dict[str, Any]) -> None:
    """Leave the parts of a tensor that were read into their places (gate and up of a gated MLP) where they are.

    megatron-core would join copies of them, of every weight and both its moments.
    """
    for factory in nested_values(state):
        if isinstance(factory, ShardedTensorFactory):
            factory.merge_fn = functools.partial(_joined, factory.data, factory.merge_fn)


def _joined(whole: torch.Tensor, join: Callable[[Any], torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    place = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.dtype != whole.dtype or not part.is_contiguous():
            return join(parts)
        place += part.nbytes
    return whole if place == whole.data_ptr() + whole.nbytes else join(parts)


def apply_megatron_state(trainable: MegatronTrainable, state: Any) -> None:
    """Put the loaded state of one role into its model and optimizer; the schedule stands at the saved step."""
    whole = trainable.model.adapters is None
    for name, chunk in _named_chunks(trainable).items():
        chunk.load_state_dict(state["model"][name], strict=whole)
    # megatron-core restores betas, eps and the like from the checkpoint. The run's configuration counts instead.
    settings = [_settings_of(group) for group in trainable.optimizer.param_groups]
    _load_optimizer(trainable.optimizer, state["optimizer"])
    for group, own in zip(trainable.optimizer.param_groups, settings, strict=True):
        group.update(own)
    take_up_schedule(trainable.scheduler, state["scheduler"])


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, without its parameters and its count of steps."""
    return {name: value for name, value in group.items() if name not in ("params", "step")}


def take_up_schedule(scheduler: OptimizerParamScheduler, state: Mapping[str, Any]) -> None:
    """Move a scheduler to the saved number of updates; peak, shape and length of the schedule stay its own.

    `OptimizerParamScheduler.load_state_dict` would restore the shape of the schedule too. A run that is resumed with
    more steps would then train at the end of the old schedule, at a learning rate of 0.
    """
    scheduler.num_steps = 0
    scheduler.step(increment=int(state["num_steps"]))


@contextlib.contextmanager
def _own_shards(optimizer: Any) -> Iterator[None]:
    """Inside, distributed optimizers describe what they hold, where megatron-core would gather (`optimizer_shards`).

    Names and shapes are those of its "fully_reshardable", which wrote earlier checkpoints.
    """
    single_ones = [single for single in _single_optimizers(optimizer) if isinstance(single, DistributedOptimizer)]
    for single in single_ones:
        single.sharded_param_state_fully_reshardable = functools.partial(_shards_of, single)
    try:
        yield
    finally:
        for single in single_ones:
            del single.sharded_param_state_fully_reshardable


def _shards_of(optimizer: Any, described: dict[str, Any], is_loading: bool, *_: Any) -> dict[int, dict[str, Any]]:
    return optimizer_shards(optimizer, described, loading=is_loading)


def _named_chunks(trainable: MegatronTrainable) -> dict[str, Any]:
    """Virtual pipeline stages under the names that megatron-core's optimizers expect."""
    chunks = trainable.model.chunks
    return {f"model{index}": chunk for index, chunk in enumerate(chunks)} if len(chunks) > 1 else {"model": chunks[0]}


def _chunk_state(chunk: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    tied_copy = chunk.share_embeddings_and_output_weights and chunk.post_process and not chunk.pre_process
    if not tied_copy:
        return chunk.sharded_state_dict(metadata=metadata)
    # For the last stage's copy of tied embeddings, megatron-core (0.16 to 0.19) asks its global process groups,
    # which do not exist here. So it describes an untied output layer, which then takes the embedding's name.
    chunk.share_embeddings_and_output_weights = False
    try:
        state = chunk.sharded_state_dict(metadata=metadata)
    finally:
        chunk.share_embeddings_and_output_weights = True
    output = state["output_layer.weight"]
    state["output_layer.weight"] = replace(
        output,
        key="embedding.word_embeddings.weight",
        replica_id=(1, 0, dist.get_rank(metadata["dp_cp_group"])),
        allow_shape_mismatch=True,
    )
    return state


def _adapter_states(model: MegatronModel) -> list[dict[str, ShardedTensor]]:
    """Of each chunk, what `lora` trains: the base model stays in its own files, and the manifest says which it is."""
    adapters, coords = model.adapters, model.grid.coords
    assert adapters is not None
    layout, replica = adapters.layout_of(model.grid.rank), dist.get_rank(model.grid.pg_collection.dp_cp)
    states: list[dict[str, ShardedTensor]] = [{} for _ in model.chunks]
    for piece in layout.pieces:
        shape = layout.global_shapes[piece.tensor]
        offsets = [
            (axis, low // (high - low), size // (high - low))
            for axis, (low, high, size) in enumerate(zip(*piece.box, shape, strict=True))
            if high - low != size
        ]
        chunk, _, name = piece.local.partition(".") if len(states) > 1 else ("chunk0", "", piece.local)
        states[int(chunk.removeprefix("chunk"))][name] = ShardedTensor.from_rank_offsets(
            piece.tensor,
            adapters.parameters[piece.local],
            *offsets,
            replica_id=(0, 0 if offsets else coords.tp, replica),
        )
    return states


def _single_optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _allocate(role: str, optimizer: Any) -> None:
    """Give an optimizer that has not stepped yet the state it would start from; leave others alone."""
    inner = optimizer.optimizer
    if inner is None:  # no trainable parameter on this rank
        return
    if optimizer.init_state_fn is None:
        if isinstance(optimizer, DistributedOptimizer):
            raise CheckpointError(
                f"{role}.optimizer.optimizer={optimizer.config.optimizer}: megatron-core cannot save its state under "
                f"the distributed optimizer. Use adam, or set {role}.ddp.use_distributed_optimizer=false."
            )
        return
    optimizer.init_state_fn(inner, optimizer.config)
    if isinstance(inner, torch.optim.Adam):  # AdamW is one; Transformer Engine's keeps its step per group
        for state in inner.state.values():
            state.setdefault("step", torch.tensor(0.0))


def _load_optimizer(optimizer: Any, state: Any) -> None:
    optimizers = _single_optimizers(optimizer)
    states = [state] if len(optimizers) == 1 else [state[index] for index in sorted(state)]
    for single, its_state in zip(optimizers, states, strict=True):
        if single.optimizer is not None:
            _set_settings(its_state.get("optimizer", its_state), single.param_groups)
        if isinstance(single, DistributedOptimizer):
            _load_distributed(single, its_state)
        elif single.optimizer is not None:
            if isinstance(single.optimizer, torch.optim.Adam):
                # megatron-core leaves out a step count of zero, and torch cannot do without
                its_state.get("optimizer", its_state)["state"].setdefault("common_step", torch.tensor(0.0))
            single.load_state_dict(its_state)


# Keys of a parameter group that say which parameters are in it. The others are hyperparameters.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def _set_settings(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Give saved parameter groups the run's own hyperparameters.

    megatron-core 0.19 finds a saved group by its maximum learning rate, among others, and fails if that has changed.
    """
    own = {tuple(group.get(key) for key in _GROUP_KEYS): group for group in groups}
    for saved in state.get("param_groups", ()):
        group = own.get(tuple(saved.get(key) for key in _GROUP_KEYS))
        if group is not None:
            saved.update(_settings_of(group))


def _load_distributed(optimizer: Any, state: dict[str, Any]) -> None:
    """megatron-core's own load, in two halves, for torch's Adam keeps its step beside the moments.

    In one piece it fails on that step (0.16 to 0.19), and it gives all parameters one shared step tensor, which
    an update would then count up once for each parameter.
    """
    parameters = state.pop("param_state", {})
    optimizer.load_state_dict(state)
    moments = optimizer.optimizer.state
    steps = {parameter: entry.pop("step") for parameter, entry in moments.items() if "step" in entry}
    held = {number: {name: each["held"] for name, each in entry.items()} for number, entry in parameters.items()}
    optimizer.load_parameter_state_from_fs_model_space(held)  # mostly in their place already
    for parameter, step in steps.items():
        moments[parameter]["step"] = step.clone()


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
    """Put the loaded state of one role into its optimizer; its tensors were read into their places."""
    saved = state["optimizer"]
    for name, each in _states(trainable).items():
        each["step"].fill_(saved["behind"].get(name, saved["step"]))
    take_up_schedule(trainable.scheduler, state["scheduler"])


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
