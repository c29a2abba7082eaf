"""The random generators of one rank, as JSON."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch

from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402


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
