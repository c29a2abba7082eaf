"""An engine is a guest in the training process: what it changes there for itself is put back."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

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


def keep_transformers_classes() -> None:
    """Let vLLM's Transformers backend compile classes of its own; safe to repeat.

    For an architecture that vLLM has no model of (GPT-NeoX, OLMo-2, Starcoder2) it makes transformers' class compile:
    it replaces that class's `__init__`, `__call__` and bases (0.32: compilation/decorators.py). The trainer's model is
    of the same class, and could neither be called nor made after an engine. So the class gets back what was its own,
    and the engine's module goes to a subclass that has what vLLM wrote.
    """
    from vllm.model_executor.models.transformers import base

    compiled, build = getattr(base, "support_torch_compile", None), base.Base.__init__
    if compiled is None or getattr(base.Base, "keeps_transformers_classes", False):
        return
    changed: dict[type, tuple[dict[str, Any], tuple[type, ...]]] = {}  # class -> what was its own, and its bases

    def support_torch_compile(*args: Any, **options: Any) -> Any:
        decorate = compiled(*args, **options)

        def noted(cls: type) -> type:
            changed.setdefault(cls, (dict(vars(cls)), cls.__bases__))
            return decorate(cls)  # type: ignore[no-any-return]

        return noted

    def build_apart(self: nn.Module, *args: Any, **options: Any) -> None:
        own = {}
        try:
            build(self, *args, **options)
        finally:
            for cls, (before, bases) in changed.items():
                own[cls] = _taken_back(cls, before, bases)
            changed.clear()
        for module in self.modules():
            if type(module) in own:
                module.__class__ = own[type(module)]

    base.support_torch_compile = support_torch_compile
    base.Base.__init__ = build_apart
    base.Base.keeps_transformers_classes = True


def _taken_back(cls: Any, before: dict[str, Any], bases: tuple[type, ...]) -> type:
    """Make a class what it was, and give a subclass what it had become."""
    written = {name: value for name, value in vars(cls).items() if name not in before or before[name] is not value}
    added = tuple(each for each in cls.__bases__ if each not in bases)
    for name in written:
        if name in before:
            setattr(cls, name, before[name])
        else:
            delattr(cls, name)
    cls.__bases__ = bases
    return type(cls)(cls.__name__, (cls, *added), {"__module__": cls.__module__, **written})
