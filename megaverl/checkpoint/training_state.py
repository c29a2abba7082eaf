"""State of a run: each role's weights, optimizer and scheduler as its engine shards them, and random generators.

Every tensor is stored under a global name with its place in the whole, so a checkpoint
can be read on another grid. Every rank stores what it holds (`rank_shards.py`).

This module also loads a checkpoint of one training engine into the other. Both engines'
checkpoints are layouts of the same Hugging Face arrays, so weights and Adam's moments
go directly from the files into their places. If the other engine trains in 16 bits, its
float32 copies are read instead of its weights. Schedule and step are taken over.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megaverl.checkpoint.engine_state import (
    MOMENT_PREFIX,
    apply_fsdp_state,
    apply_megatron_state,
    fsdp_state,
    megatron_state,
    state_layout,
    state_tensors,
)
from megaverl.config.moment_dtypes import MOMENTS
from megaverl.errors import CheckpointError
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, carry, intersect
from megaverl.sharding.layout import Layout, Piece, whole_layout
from megaverl.sharding.megatron import checkpoint_layout
from megaverl.sharding.weight import Weight
from megaverl.weights.load import EMBEDDING_KEY, OpenedCheckpoint, clear_padding, fill
from megaverl.weights.torch_dist import COMMON_FILE, locate
from megaverl.weights.torch_dist_index import IndexedArray, read_arrays
from megaverl.workers.optimizers import FSDPTrainable, MegatronTrainable
from megaverl.workers.trainable import TrainableModel

platform.adapt_megatron()

from megatron.core.dist_checkpointing.dict_utils import (  # noqa: E402
    dict_list_map_inplace,
    nested_values,
)  # noqa: E402
from megatron.core.dist_checkpointing.mapping import (  # noqa: E402
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402


def sharded_state(
    roles: Mapping[str, TrainableModel], *, loading: bool = False
) -> dict[str, Any]:
    """Return the state of all roles, each tensor wrapped with its global name and place. Names begin with the role.

    Tensors belong to the roles or are views of theirs: nothing is sent or copied.

    Args:
        loading: describe everything that this rank must load; otherwise what it must write.

    Raises:
        CheckpointError: megatron-core cannot store the state of an optimizer.
    """
    state = {}
    for role, trainable in roles.items():
        if isinstance(trainable, FSDPTrainable):
            state[role] = fsdp_state(role, trainable, loading)
        else:
            state[role] = megatron_state(role, _megatron(trainable), loading)
    return state


def apply_state(roles: Mapping[str, TrainableModel], loaded: Mapping[str, Any]) -> None:
    """Load a `sharded_state` into models, optimizers and schedulers, in place."""
    for role, trainable in roles.items():
        if isinstance(trainable, FSDPTrainable):
            apply_fsdp_state(trainable, loaded[role])
        else:
            apply_megatron_state(_megatron(trainable), loaded[role])


def engine_of(trainable: TrainableModel) -> str:
    """Return the engine's name in a configuration."""
    return "fsdp" if isinstance(trainable, FSDPTrainable) else "megatron"


def _megatron(trainable: TrainableModel) -> MegatronTrainable:
    assert isinstance(trainable, MegatronTrainable), (
        "no other engine's state is described here"
    )
    return trainable


def trained_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Return the addresses of memory that only optimizer steps change: parameters, and the optimizers' state.

    State of a role that lies neither here nor in `buffer_storages` was made for a save.
    """
    return {
        tensor.untyped_storage().data_ptr()
        for trainable in roles
        for tensor in trainable.trained
    }


def buffer_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Return the addresses of the models' buffers. Forward and backward passes may
    change them too, such as a router's bias.
    """
    return {
        buffer.untyped_storage().data_ptr()
        for trainable in roles
        for buffer in trainable.model.buffers
    }


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators. Two runs are equal only if all of them are."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators (CPU and device) and of megatron-core's tracker."""
    # JSON holds neither numpy arrays nor tuples, so store plain values.
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [
            name,
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if platform.is_cuda else None,
        "megatron": {name: _encode(state) for name, state in _tracked().items()},
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states of `capture_random_state`. Tracker states that this run does not have are left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state(
        (name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(_decode(state["torch"]))
    if platform.is_cuda and state["cuda"] is not None:
        torch.cuda.set_rng_state(_decode(state["cuda"]))
    current = _tracked()
    saved = {
        name: _decode(data)
        for name, data in state["megatron"].items()
        if name in current
    }
    # Trackers of this run that the checkpoint does not have keep their states.
    get_cuda_rng_tracker().set_states(get_cuda_rng_tracker().get_states() | saved)


def _tracked() -> dict[str, torch.Tensor]:
    """Return the tracker's states. With CUDA graphs they are generators, which have no state tensor to save."""
    states = get_cuda_rng_tracker().get_states()
    return {
        name: state for name, state in states.items() if isinstance(state, torch.Tensor)
    }


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(data: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)


MASTERS = f"{MOMENT_PREFIX}param."  # prefix of Megatron's float32 copies of its weights


def load_from_other_engine(role: str, trainable: TrainableModel, folder: Path) -> None:
    """Fill a role's weights, optimizer and scheduler from a checkpoint of the other engine.

    Raises:
        CheckpointError: arrays are missing or do not fit, the optimizer has no Adam moments, or the role trains
            adapters.
    """
    if trainable.model.adapters is not None:
        raise CheckpointError(
            f"{folder}: {role} trains adapters, and another engine wrote it. Resume with that engine, or start from "
            "the adapter that the run exported: lora.path."
        )
    if not trainable.model.spec.is_tabled:
        raise CheckpointError(
            f"{folder}: {role}'s architecture has no table for Megatron. Resume with engine: fsdp."
        )
    # Both engines' arrays are found by their names in the index.
    index = read_arrays(folder)
    common = torch.load(folder / COMMON_FILE, weights_only=True)[role]
    if isinstance(trainable, FSDPTrainable):
        _megatron_to_fsdp(role, trainable, folder, index, common)
    else:
        assert isinstance(trainable, MegatronTrainable)
        _fsdp_to_megatron(role, trainable, folder, index, common)


def _megatron_to_fsdp(
    role: str,
    trainable: FSDPTrainable,
    folder: Path,
    index: Mapping[str, IndexedArray],
    common: dict[str, Any],
) -> None:
    tensors = state_tensors(trainable, loading=True)
    layout = state_layout(trainable.model)
    # Names of the tensors that the optimizer updates.
    stepped_on = tensors[f"{MOMENT_PREFIX}{MOMENTS[0]}."]
    kept = {
        piece.tensor
        for piece in layout.pieces
        if layout.stored_in(piece.local) not in stepped_on
    }
    weights = trainable.model.held_weights
    for prefix, held in tensors.items():
        of_optimizer = bool(prefix)
        # First tensors without optimizer state, such as a router's bias; then those
        # that the optimizer updates.
        if not of_optimizer:
            _fill(
                OpenedCheckpoint(folder, index, f"{role}."),
                weights,
                layout,
                held,
                trainable,
            )
            prefix = MASTERS
            if f"{role}.{prefix}{EMBEDDING_KEY}" not in index:
                continue
        opened = OpenedCheckpoint(folder, index, f"{role}.{prefix}")
        if opened.prefix + EMBEDDING_KEY not in index:
            raise CheckpointError(
                f"{folder}: {role} has no {prefix}*: another optimizer than Adam has written it."
            )
        named = [weight for weight in weights if weight.name not in kept]
        _fill(opened, named, layout.without(kept), held, trainable)
    step = int(
        max((float(group.get("step", 0)) for group in _groups(common)), default=0)
    )
    apply_fsdp_state(
        trainable,
        # Nothing is left behind: state of the other engine has no counterpart for it.
        {"optimizer": {"step": step, "behind": {}}, "scheduler": common["scheduler"]},
    )


def _fill(
    opened: OpenedCheckpoint,
    weights: Sequence[Weight],
    wanted: Layout,
    tensors: Mapping[str, torch.Tensor],
    trainable: FSDPTrainable,
) -> None:
    source = opened.layout(weights, trainable.model.spec)
    fill(source, opened.arrays(source), wanted, tensors)


def _groups(common: dict[str, Any]) -> list[dict[str, Any]]:
    """List all parameter groups in the state that the ranks of a Megatron role have in common."""
    groups: list[dict[str, Any]] = []
    pending: list[Any] = [common["optimizer"]]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict):
            groups += entry.get("param_groups", [])
            pending += [value for key, value in entry.items() if key != "param_groups"]
    return groups


def _fsdp_to_megatron(
    role: str,
    trainable: MegatronTrainable,
    folder: Path,
    index: Mapping[str, IndexedArray],
    common: dict[str, Any],
) -> None:
    model = trainable.model
    arrays = {
        name.removeprefix(f"{role}."): array
        for name, array in index.items()
        if name.startswith(f"{role}.")
    }
    state = megatron_state(role, trainable, loading=True)
    parts = [part for tensor in nested_values(state) for part in _boxes(tensor)]
    # Names without the prefix of the kind of array: weights, masters, moments.
    described = {_split(role, part.key)[1] for part in parts}
    # The padding of the vocabulary depends on the grid, so it is read from this role's
    # own embedding.
    rows = max(
        (part.global_shape[0] for part in parts if part.key.endswith(EMBEDDING_KEY)),
        default=0,
    )
    layout = checkpoint_layout(
        model.held_weights,
        model.spec,
        padded_vocab_size=max(rows, model.spec.vocab_size),
        present=described,
    )
    pieces: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.local, []).append(piece)
    stored = locate(arrays)
    # One kind of array after the other: each has the same boxes under another prefix.
    for prefix in dict.fromkeys(_split(role, part.key)[0] for part in parts):
        # FSDP stores no master weights: its parameters are float32, and so are the
        # masters themselves.
        source = "" if prefix == MASTERS else prefix
        of_prefix = [part for part in parts if _split(role, part.key)[0] == prefix]
        wanted, tensors = _wanted(role, of_prefix, pieces, layout)
        missing = [name for name in wanted.global_shapes if source + name not in arrays]
        if missing:
            raise CheckpointError(
                f"{folder}: {role} lacks {', '.join(source + name for name in missing[:8])}."
            )
        # Padding has no source.
        clear_padding(wanted, tensors)
        source_arrays = {name: stored[source + name] for name in wanted.global_shapes}
        fill(
            whole_layout((name, array.shape) for name, array in source_arrays.items()),
            source_arrays,
            wanted,
            tensors,
        )
    dict_list_map_inplace(_as_it_is, state)
    step = float(common["optimizer"]["step"])
    for group in _groups(state):
        group["step"] = step
    apply_megatron_state(trainable, state | {"scheduler": common["scheduler"]})


def _boxes(value: Any) -> list[ShardedTensor]:
    """List the boxes of global arrays that a described tensor consists of, with their data in place."""
    if isinstance(value, ShardedTensor):
        return [value]
    if isinstance(value, ShardedTensorFactory):
        return list(nested_values(value.build()))
    return []


def _split(role: str, key: str) -> tuple[str, str]:
    """Split a key into the prefix that names the kind of array, and the parameter's name."""
    name = key.removeprefix(f"{role}.")
    if not name.startswith(MOMENT_PREFIX):
        return "", name
    kind, _, rest = name.removeprefix(MOMENT_PREFIX).partition(".")
    return f"{MOMENT_PREFIX}{kind}.", rest


def _wanted(
    role: str,
    parts: list[ShardedTensor],
    pieces: Mapping[str, list[Piece]],
    layout: Layout,
) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Convert boxes of Megatron's arrays to boxes of Hugging Face's."""
    wanted_pieces: list[Piece] = []
    tensors: dict[str, torch.Tensor] = {}
    for number, part in enumerate(parts):
        assert part.data is not None
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        start = tuple(part.global_offset)
        box = Box(
            start, tuple(low + size for low, size in zip(start, shape, strict=True))
        )
        local, tensors[str(number)] = str(number), part.data.detach().view(shape)
        # The box of a rank may contain parts of several weights (a fused projection).
        for piece in pieces.get(_split(role, part.key)[1], ()):
            if common := intersect(piece.local_box, box):
                moved = (
                    tuple(a - b for a, b in zip(corner, start, strict=True))
                    for corner in common
                )
                wanted_pieces.append(
                    Piece(
                        piece.tensor,
                        carry(common, piece.local_box, piece.box),
                        local,
                        Box(*moved),
                    )
                )
    names = {piece.tensor for piece in wanted_pieces}
    shapes = {
        name: shape for name, shape in layout.global_shapes.items() if name in names
    }
    return Layout(
        tuple(wanted_pieces),
        {name: tuple(t.shape) for name, t in tensors.items()},
        shapes,
    ), tensors


def _as_it_is(value: Any) -> Any:
    """Return the value for the place of a description after loading: the filled tensor, or this rank's own value."""
    if isinstance(value, ShardedTensor | ShardedTensorFactory | ShardedObject):
        return value.data
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value
