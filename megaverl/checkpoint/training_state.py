"""What a run's state is: each role's weights, optimizer, scheduler as its engine shards them; random generators.

Every tensor is stored under a global name with its place in the whole, so a checkpoint can be read on another grid;
every rank stores what it holds (`shares.py`).
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from megaverl.checkpoint.fsdp_state import apply_fsdp_state, fsdp_state
from megaverl.checkpoint.megatron_state import apply_megatron_state, megatron_state
from megaverl.platform import platform
from megaverl.workers.fsdp_trainable import FSDPTrainable
from megaverl.workers.megatron_trainable import MegatronTrainable
from megaverl.workers.trainable import TrainableModel

platform.adapt_megatron()

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402


def sharded_state(roles: Mapping[str, TrainableModel], *, loading: bool = False) -> dict[str, Any]:
    """The state of all roles, each tensor wrapped with its global name and place; names begin with the role.

    Tensors are the roles' own, or views of them: nothing is sent, and nothing copied.

    Args:
        loading: describe where to load to, all that this rank needs; else what it is to write.

    Raises:
        CheckpointError: an optimizer whose state megatron-core cannot store.
    """
    state = {}
    for role, trainable in roles.items():
        if isinstance(trainable, FSDPTrainable):
            state[role] = fsdp_state(role, trainable, loading)
        else:
            state[role] = megatron_state(role, _megatron(trainable), loading)
    return state


def apply_state(roles: Mapping[str, TrainableModel], loaded: Mapping[str, Any]) -> None:
    """Put a loaded `sharded_state` into models, optimizers and schedulers, in place."""
    for role, trainable in roles.items():
        if isinstance(trainable, FSDPTrainable):
            apply_fsdp_state(trainable, loaded[role])
        else:
            apply_megatron_state(_megatron(trainable), loaded[role])


def engine_of(trainable: TrainableModel) -> str:
    """As a configuration names it."""
    return "fsdp" if isinstance(trainable, FSDPTrainable) else "megatron"


def _megatron(trainable: TrainableModel) -> MegatronTrainable:
    assert isinstance(trainable, MegatronTrainable), "no other engine's state is described here"
    return trainable


def trained_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Addresses of the memory that only optimizer steps change: parameters, and the optimizers' state.

    What of a role's state lies neither there nor in `buffer_storages` was made for a save.
    """
    return {tensor.untyped_storage().data_ptr() for trainable in roles for tensor in trainable.trained}


def buffer_storages(roles: Iterable[TrainableModel]) -> set[int]:
    """Addresses of the models' buffers, which a forward or a backward pass may change too, as a router's bias."""
    return {buffer.untyped_storage().data_ptr() for trainable in roles for buffer in trainable.model.buffers}


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
