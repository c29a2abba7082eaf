"""An engine is a guest in the training process: what it changes there for itself is put back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

# vLLM sets these for the workers that it would start; ours is the process itself.
_ENVIRONMENT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random generators of Python, NumPy and torch as they were before the body."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Keep random states, `torch.set_num_threads` and the environment from what building an engine does to them."""
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    set_num_threads = torch.set_num_threads  # the CPU worker replaces it by a warning
    with random_state_kept():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            for name, value in environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def keep_default_group() -> None:
    """Stop vLLM from ending the default process group, ours, when an engine is closed or collected or at exit."""
    import vllm.v1.engine.core as core

    core.cleanup_dist_env_and_memory = release_groups


def release_groups(shutdown_ray: bool = False) -> None:
    """Free the process groups that vLLM made, so that an engine of another shape can be made; safe to repeat.

    Takes the place of vLLM's `cleanup_dist_env_and_memory`, hence the argument.
    """
    from vllm.distributed import parallel_state

    if not dist.is_initialized():  # at exit: all groups went with the default one
        return
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None
