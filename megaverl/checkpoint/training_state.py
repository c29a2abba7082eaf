"""What a run's state is: each role's weights, optimizer, scheduler as megatron-core shards them; random generators.

Every tensor is stored under a global name with its place in the whole, so a checkpoint can be read on another
TP, PP, VPP or DP. The optimizer is stored parameter by parameter ("fully reshardable"), not in its buckets; every rank
stores what it holds (`shares.py`).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megaverl.checkpoint.shares import optimizer_shards, share_replicas
from megaverl.errors import CheckpointError
from megaverl.platform import platform
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.trainable import TrainableModel, optimizer_tensors

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402

SHARDING_TYPE = "fully_reshardable"


def sharded_state(roles: Mapping[str, TrainableModel], *, loading: bool = False) -> dict[str, Any]:
    """The state of all roles, each tensor wrapped with its global name and place; names begin with the role.

    Tensors are the roles' own, or views of them: nothing is sent, and nothing copied.

    Args:
        loading: describe where to load to, all that this rank needs; else what it is to write.

    Raises:
        CheckpointError: an optimizer whose state megatron-core cannot store.
    """
    return {role: _role_state(role, trainable, loading) for role, trainable in roles.items()}


def apply_state(roles: Mapping[str, TrainableModel], loaded: Mapping[str, Any]) -> None:
    """Put a loaded `sharded_state` into models, optimizers and schedulers, in place."""
    for role, trainable in roles.items():
        state = loaded[role]
        whole = trainable.model.adapters is None
        for name, chunk in _named_chunks(trainable).items():
            chunk.load_state_dict(state["model"][name], strict=whole)
        _load_optimizer(trainable.optimizer, state["optimizer"])
        # the scheduler adds the loaded number of steps to its own
        trainable.scheduler.num_steps = 0
        trainable.scheduler.load_state_dict(state["scheduler"])


def _role_state(role: str, trainable: TrainableModel, loading: bool) -> dict[str, Any]:
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


def trained_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Addresses of the memory that only optimizer steps change: parameters, and the optimizers' state.

    What of a role's state lies neither there nor in `buffer_storages` was made for a save.
    """
    tensors: list[torch.Tensor] = []
    for trainable in roles:
        tensors += [parameter for chunk in trainable.model.chunks for parameter in chunk.parameters()]
        tensors += optimizer_tensors(trainable.optimizer)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def buffer_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Addresses of the models' buffers, which a forward or a backward pass may change too, as a router's bias."""
    buffers = [buffer for trainable in roles for chunk in trainable.model.chunks for buffer in chunk.buffers()]
    return {buffer.untyped_storage().data_ptr() for buffer in buffers}


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


def _named_chunks(trainable: TrainableModel) -> dict[str, Any]:
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
        if isinstance(single, DistributedOptimizer):
            _load_distributed(single, its_state)
        elif single.optimizer is not None:
            if isinstance(single.optimizer, torch.optim.Adam):
                # megatron-core leaves out a step count of zero, and torch cannot do without
                its_state.get("optimizer", its_state)["state"].setdefault("common_step", torch.tensor(0.0))
            single.load_state_dict(its_state)


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


def seed_generators(seed: int) -> None:
    """Start Python's, numpy's and torch's generators from a seed, which they must have for two runs to be the same."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators (CPU and device) and of megatron-core's tracker."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if platform.is_cuda else None,
        "megatron": {name: _encode(state) for name, state in _tracked().items()},
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set what `capture_random_state` took; tracker states under names that this run lacks are left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if platform.is_cuda and state["cuda"] is not None:
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    current = _tracked()
    saved = {name: _decode(data) for name, data in state["megatron"].items() if name in current}
    get_cuda_rng_tracker().set_states(get_cuda_rng_tracker().get_states() | saved)


def _tracked() -> dict[str, torch.Tensor]:
    """The tracker's states; with CUDA graphs they are generators, which hold no state of their own to save."""
    states = get_cuda_rng_tracker().get_states()
    return {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(data: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
