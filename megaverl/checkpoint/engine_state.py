"""State of a role as its engine holds it: sharded by megatron-core, or by FSDP2.

megatron-core's optimizer state is stored parameter by parameter ("fully reshardable")
instead of in buckets, so that a checkpoint can be read with another TP, PP, VPP or DP.

Under FSDP2 each rank stores its part of weights and moments as boxes of arrays with
Hugging Face names: `ROLE.NAME` is a weight in float32, as the optimizer updates it, and
`ROLE.optimizer.state.exp_avg.NAME` is one of its moments. Shards may differ between
ranks. Ranks with the same shard each write a share of it (`rank_shards.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.rank_shards import (
    boxed,
    optimizer_shards,
    share_replicas,
    shares_of,
    whole_parameter_shards,
)
from megaverl.config.moment_dtypes import MOMENTS
from megaverl.errors import CheckpointError
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.weights.transports import view, viewed
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.muon import WholeParameterOptimizer
from megaverl.workers.optimizers import (
    FSDPTrainable,
    MegatronTrainable,
    create_adam_state,
    create_state,
    local,
    single_optimizers,
)
from megaverl.workers.small_moments import SmallMomentAdamW

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402

SHARDING_TYPE = "fully_reshardable"


def megatron_state(
    role: str, trainable: MegatronTrainable, loading: bool
) -> dict[str, Any]:
    """Return the `sharded_state` of one role on Megatron."""
    groups = trainable.model.grid.pg_collection
    metadata = {
        "distrib_optim_sharding_type": SHARDING_TYPE,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": groups.dp_cp,
    }
    if trainable.model.adapters is None:
        chunks = {
            name: _chunk_state(chunk, metadata)
            for name, chunk in _named_chunks(trainable).items()
        }
    else:
        chunks = dict(
            zip(_named_chunks(trainable), _adapter_states(trainable.model), strict=True)
        )
    for optimizer in single_optimizers(trainable.optimizer):
        _allocate(role, optimizer)
    described = chunks if len(chunks) > 1 else next(iter(chunks.values()))
    with _own_shards(trainable.optimizer):
        optimizer = trainable.optimizer.sharded_state_dict(
            described, is_loading=loading, metadata=metadata
        )
    state = {
        "model": chunks,
        "optimizer": optimizer,
        "scheduler": trainable.scheduler.state_dict(),
    }
    add_prefix_for_sharding(state, f"{role}.")
    if loading:
        _join_in_place(state)
    else:
        share_replicas(state, groups.dp_cp, groups.expt_dp)
    return state


def _join_in_place(state: dict[str, Any]) -> None:
    """Keep parts of a tensor that were read in place (gate and up of a gated MLP) where they are.

    megatron-core would concatenate copies of them, for every weight and both its
    moments.
    """
    for factory in nested_values(state):
        if isinstance(factory, ShardedTensorFactory):
            factory.merge_fn = functools.partial(
                _joined, factory.data, factory.merge_fn
            )


def _joined(
    whole: torch.Tensor,
    join: Callable[[Any], torch.Tensor],
    parts: Sequence[torch.Tensor],
) -> torch.Tensor:
    place = whole.data_ptr()
    for part in parts:
        if (
            part.data_ptr() != place
            or part.dtype != whole.dtype
            or not part.is_contiguous()
        ):
            return join(parts)
        place += part.nbytes
    return whole if place == whole.data_ptr() + whole.nbytes else join(parts)


def apply_megatron_state(trainable: MegatronTrainable, state: Any) -> None:
    """Load the state of one role into its model and optimizer, and move its schedule to the saved step."""
    whole = trainable.model.adapters is None
    for name, chunk in _named_chunks(trainable).items():
        chunk.load_state_dict(state["model"][name], strict=whole)
    # megatron-core restores betas, eps and the like from the checkpoint, but the run's
    # configuration takes precedence.
    settings = [_settings_of(group) for group in trainable.optimizer.param_groups]
    _load_optimizer(trainable.optimizer, state["optimizer"])
    for group, saved_settings in zip(
        trainable.optimizer.param_groups, settings, strict=True
    ):
        group.update(saved_settings)
    take_up_schedule(trainable.scheduler, state["scheduler"])


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, without its parameters and its step."""
    return {
        name: value for name, value in group.items() if name not in ("params", "step")
    }


def take_up_schedule(
    scheduler: OptimizerParamScheduler, state: Mapping[str, Any]
) -> None:
    """Move a scheduler to the saved number of updates. Peak, shape and length of the schedule stay its own.

    `OptimizerParamScheduler.load_state_dict` would restore the shape of the schedule
    too. A run resumed with more steps would then train at the end of the old schedule,
    at a learning rate of 0.
    """
    scheduler.num_steps = 0
    scheduler.step(increment=int(state["num_steps"]))


@contextlib.contextmanager
def _own_shards(optimizer: Any) -> Iterator[None]:
    """Let distributed optimizers describe their own shards inside, where megatron-core
    would gather: elements (`optimizer_shards`) or, with Muon, whole parameters.

    Names and shapes are those of its "fully_reshardable", in which earlier checkpoints
    were written.
    """
    replaced: list[tuple[Any, str]] = []
    for single in single_optimizers(optimizer):
        if isinstance(single, DistributedOptimizer):
            name = "sharded_param_state_fully_reshardable"
            setattr(single, name, functools.partial(_shards_of, single))
            replaced.append((single, name))
    for link in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        if isinstance(link, WholeParameterOptimizer):
            name = "sharded_state_dict"
            setattr(link, name, functools.partial(_whole_parameter_state, link))
            replaced.append((link, name))
    try:
        yield
    finally:
        for owner, name in replaced:
            delattr(owner, name)


def _whole_parameter_state(
    optimizer: Any, described: dict[str, Any], *_: Any, **__: Any
) -> dict[str, Any]:
    """Return the state of Muon's parameters on this rank.

    There are no step counts, and hyperparameters are taken from the run's configuration.
    """
    return {
        "param_state": {
            number: whole_parameter_shards(single, described)
            for number, single in enumerate(single_optimizers(optimizer))
        }
    }


def _shards_of(
    optimizer: Any, described: dict[str, Any], is_loading: bool, *_: Any
) -> dict[int, dict[str, Any]]:
    return optimizer_shards(optimizer, described, loading=is_loading)


def _named_chunks(trainable: MegatronTrainable) -> dict[str, Any]:
    """Return virtual pipeline stages under the names that megatron-core's optimizers expect."""
    chunks = trainable.model.chunks
    return (
        {f"model{index}": chunk for index, chunk in enumerate(chunks)}
        if len(chunks) > 1
        else {"model": chunks[0]}
    )


def _chunk_state(chunk: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    tied_copy = (
        chunk.share_embeddings_and_output_weights
        and chunk.post_process
        and not chunk.pre_process
    )
    state: dict[str, Any]
    if not tied_copy:
        state = chunk.sharded_state_dict(metadata=metadata)
        return state
    # For the last stage's copy of tied embeddings, megatron-core (0.16 to 0.19) asks
    # its global process groups, which do not exist here. So it describes an untied
    # output layer, which then takes the embedding's name.
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
    """Return, for each chunk, the adapters that `lora` trains.

    The base model stays in its own files, and the manifest identifies it.
    """
    adapters, coords = model.adapters, model.grid.coords
    assert adapters is not None
    layout, replica = (
        adapters.layout_of(model.grid.rank),
        dist.get_rank(model.grid.pg_collection.dp_cp),
    )
    states: list[dict[str, ShardedTensor]] = [{} for _ in model.chunks]
    for piece in layout.pieces:
        shape = layout.global_shapes[piece.tensor]
        offsets = [
            (axis, low // (high - low), size // (high - low))
            for axis, (low, high, size) in enumerate(
                zip(*piece.box, shape, strict=True)
            )
            if high - low != size
        ]
        chunk, _, name = (
            piece.local.partition(".")
            if len(states) > 1
            else ("chunk0", "", piece.local)
        )
        states[int(chunk.removeprefix("chunk"))][name] = (
            ShardedTensor.from_rank_offsets(
                piece.tensor,
                adapters.parameters[piece.local],
                *offsets,
                replica_id=(0, 0 if offsets else coords.tp, replica),
            )
        )
    return states


def _allocate(role: str, optimizer: Any) -> None:
    """Give an optimizer that has not stepped yet its initial state. Others are left alone."""
    inner = optimizer.optimizer
    # This rank has no trainable parameter.
    if inner is None:
        return
    if optimizer.init_state_fn is None:
        if isinstance(optimizer, DistributedOptimizer):
            raise CheckpointError(
                f"{role}.optimizer.optimizer={optimizer.config.optimizer}: megatron-core cannot save its state under "
                f"the distributed optimizer. Use adam, or set {role}.ddp.use_distributed_optimizer=false."
            )
        return
    create_state(optimizer)


def _load_optimizer(optimizer: Any, state: Any) -> None:
    optimizers = single_optimizers(optimizer)
    states = (
        [state] if len(optimizers) == 1 else [state[index] for index in sorted(state)]
    )
    for single, its_state in zip(optimizers, states, strict=True):
        if set(its_state) == {"param_state"}:
            # Muon's tensors on this rank have been read in place, and that is all.
            continue
        if single.optimizer is not None:
            _set_settings(its_state.get("optimizer", its_state), single.param_groups)
        if isinstance(single, DistributedOptimizer):
            _load_distributed(single, its_state)
        elif single.optimizer is not None:
            if isinstance(single.optimizer, torch.optim.Adam):
                # megatron-core omits a step count of zero, but torch requires it.
                its_state.get("optimizer", its_state)["state"].setdefault(
                    "common_step", torch.tensor(0.0)
                )
            single.load_state_dict(its_state)


# Keys that identify a parameter group. The other keys are hyperparameters.
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


def _set_settings(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Overwrite the hyperparameters of saved parameter groups with the run's own.

    megatron-core 0.19 identifies a saved group by its maximum learning rate, among
    others, and fails if that has changed.
    """
    by_key = {tuple(group.get(key) for key in _GROUP_KEYS): group for group in groups}
    for saved in state.get("param_groups", ()):
        group = by_key.get(tuple(saved.get(key) for key in _GROUP_KEYS))
        if group is not None:
            saved.update(_settings_of(group))


def _load_distributed(optimizer: Any, state: dict[str, Any]) -> None:
    """Load a distributed optimizer in two halves, because torch's Adam keeps its step beside the moments.

    megatron-core's load in one piece fails on that step (0.16 to 0.19). It also gives
    all parameters one shared step tensor, which an update would then increment once for
    each parameter.
    """
    parameters = state.pop("param_state", {})
    optimizer.load_state_dict(state)
    moments = optimizer.optimizer.state
    steps = {
        parameter: entry.pop("step")
        for parameter, entry in moments.items()
        if "step" in entry
    }
    held = {
        number: {name: entry_state["held"] for name, entry_state in entry.items()}
        for number, entry in parameters.items()
    }
    # Most tensors were read in place, so this copies little.
    optimizer.load_parameter_state_from_fs_model_space(held)
    for parameter, step in steps.items():
        moments[parameter]["step"] = step.clone()


MOMENT_PREFIX = "optimizer.state."


def fsdp_state(role: str, trainable: FSDPTrainable, loading: bool) -> dict[str, Any]:
    """Return the `sharded_state` of one role under FSDP2."""
    steps = {name: int(state["step"]) for name, state in _states(trainable).items()}
    last = max(steps.values(), default=0)
    return {
        "tensors": {
            f"{role}.{prefix}": _shards(
                trainable.model, f"{role}.{prefix}", tensors, loading
            )
            for prefix, tensors in state_tensors(trainable, loading=loading).items()
        },
        # Experts that no token has reached have no gradient and skip the step, so their
        # step counts lag behind.
        "optimizer": {
            "step": last,
            "behind": {name: step for name, step in steps.items() if step != last},
        },
        "scheduler": trainable.scheduler.state_dict(),
    }


def apply_fsdp_state(trainable: FSDPTrainable, state: Mapping[str, Any]) -> None:
    """Load the state of one role into its optimizer. Its tensors have been read in place."""
    if isinstance(trainable.optimizer, SmallMomentAdamW):
        trainable.optimizer.store_loaded()
    saved = state["optimizer"]
    for name, parameter_state in _states(trainable).items():
        parameter_state["step"].fill_(saved["behind"].get(name, saved["step"]))
    take_up_schedule(trainable.scheduler, state["scheduler"])


def state_tensors(
    trainable: FSDPTrainable, *, loading: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """Return name prefix -> this rank's tensors by local name: weights (no prefix), and each of their moments.

    Moments that are stored in fewer bits are copied to float32.

    Args:
        loading: the tensors will be filled: `apply_fsdp_state` stores such copies afterwards.
    """
    optimizer = trainable.optimizer
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for moment in MOMENTS:
        tensors = moments[f"{MOMENT_PREFIX}{moment}."] = {}
        for name, (parameter, state) in _stepped_on(trainable).items():
            if not isinstance(optimizer, SmallMomentAdamW):
                tensors[name] = local(state[moment])
            elif loading:
                tensors[name] = optimizer.to_load(parameter, moment)
            else:
                tensors[name] = optimizer.moment(parameter, moment)
    return {"": dict(_trained(trainable.model)), **moments}


def state_layout(model: FSDPModel) -> Layout:
    """Return the layout of these tensors, equal for weights and moments."""
    adapters = model.adapters
    return (model.held_layout_of if adapters is None else adapters.layout_of)(
        model.grid.rank
    )


def _trained(model: FSDPModel) -> Mapping[str, torch.Tensor]:
    """Return the model's tensors that a checkpoint holds: all of them, or those that `lora` trains."""
    return (
        model.held_parameters if model.adapters is None else model.adapters.parameters
    )


def _states(trainable: FSDPTrainable) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer state of each parameter of which this rank has a part, by local name."""
    return {name: state for name, (_, state) in _stepped_on(trainable).items()}


def _stepped_on(
    trainable: FSDPTrainable,
) -> dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return each parameter of which this rank has a part, with its optimizer state, by local name.

    State that does not exist yet is created.
    """
    optimizer = trainable.optimizer
    parameters = {
        local(parameter).data_ptr(): parameter for parameter in trainable.parameters
    }
    by_name: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    for name, tensor in _trained(trainable.model).items():
        parameter = parameters.get(tensor.data_ptr()) if tensor.numel() else None
        # The tensor is a buffer, or this rank has no row of the parameter.
        if parameter is None:
            continue
        create_adam_state(optimizer, [parameter])
        state = optimizer.state[parameter]
        by_name[name] = (parameter, state)
    return by_name


def _shards(
    model: FSDPModel, prefix: str, tensors: Mapping[str, torch.Tensor], loading: bool
) -> list[list[ShardedTensor]]:
    """Return the boxes of each shard: all of them if loading, else this rank's share of what several ranks hold."""
    shards = list(_whole_shards(model, prefix, tensors))
    if loading:
        return [
            list(
                boxed(
                    shard,
                    (0,) * shard.data.ndim,
                    shard.data,
                    shard.key,
                    shard.replica_id,
                )
            )
            for shard, _ in shards
        ]
    shards_by_count: dict[int, list[ShardedTensor]] = {}
    for shard, num_holders in shards:
        shards_by_count.setdefault(num_holders, []).append(shard)
    shares: list[list[ShardedTensor]] = []
    # Every rank that holds the same shards must divide them in the same order.
    for num_holders in sorted(shards_by_count):
        shares += shares_of(shards_by_count[num_holders], num_holders)
    return shares


def _whole_shards(
    model: FSDPModel, prefix: str, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield every shard of this rank with the number of ranks that hold the same."""
    layout = state_layout(model)
    rank = model.grid.rank
    world = model.grid.shape.world_size
    tp = model.grid.shape.tp
    buffers = {name for name, _ in model.module.model.named_buffers()}
    seen = viewed(layout, tensors)
    for piece in layout.pieces:
        stored = layout.stored_in(piece.local)
        if stored not in tensors:
            continue
        data = view(seen[piece.local], piece.local_box).view(piece.box.shape)
        # Number of neighbouring ranks that together hold the whole tensor, and how many
        # of them hold each part.
        parts = model.num_shards * tp
        same = 1 if model.is_cut_over_tp(stored) else tp
        # Buffers are not sharded.
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
