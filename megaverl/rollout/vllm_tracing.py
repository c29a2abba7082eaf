"""Trace vLLM's weight loader: run `load_weights` of a model without data, and record where every element goes.

The trace works in one process for any rank of any tensor-parallel size. It needs no
weights and no other ranks, since stand-in objects with a size and a rank replace vLLM's
groups. Only the first of several equal layers is traced.

vLLM is a guest in the training process, whether traced or used as an engine. This
module also restores what vLLM changes in the process for itself.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megaverl.outside import read_json_file
from megaverl.platform import platform
from megaverl.rollout.vllm_weights import loaded_tensors
from megaverl.sharding.tracing import TracedLayout, Tracer, joined, traced_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# vLLM sets these variables for the workers that it normally starts. Here the worker is
# this process.
_ENVIRONMENT = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random generators of Python, NumPy and torch as they were before the body."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    # CUDA's generator exists only if CUDA is in use.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore random states, `torch.set_num_threads`, environment and frozen objects after an engine's start."""
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    # Functions and variables are put back even if the engine does not start.
    set_num_threads = torch.set_num_threads  # the CPU worker replaces it by a warning
    with random_state_kept(), frozen_objects_kept():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            for name, value in environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextmanager
def frozen_objects_kept() -> Iterator[None]:
    """Keep vLLM from freezing all objects of the process when an engine is made, and from unfreezing them when it ends.

    If unfrozen, some 400,000 objects of imported modules are visited by each of seven
    collections, which takes over a second.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    # Functions without effect while vLLM calls them.
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


def keep_default_group() -> None:
    """Stop vLLM from destroying the run's default process group when an engine is closed, collected or at exit."""
    import vllm.v1.engine.core as core

    core.cleanup_dist_env_and_memory = release_groups


def release_groups(shutdown_ray: bool = False) -> None:
    """Free the process groups that vLLM made, so that an engine with another shape can be made. Safe to repeat.

    Replaces vLLM's `cleanup_dist_env_and_memory`, whose argument it therefore has.
    """
    from vllm.distributed import parallel_state

    # At exit, all groups have already been destroyed with the default one.
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    # vLLM's own world group, of the same ranks as the default group.
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    parallel_state._NODE_COUNT = None


def unlink_queue_buffers() -> None:
    """Remove the names of the shared memory through which vLLM's groups broadcast objects. Safe to repeat.

    Every rank has mapped it when its group exists. Without a name in /dev/shm it ends
    with the last of these processes, however they end.
    """
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        group = reference()
        queue = None if group is None else group.mq_broadcaster
        buffer = None if queue is None else queue.buffer
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # its destructor would unlink it again


def keep_transformers_classes() -> None:
    """Keep vLLM's Transformers backend from changing classes of transformers. Safe to repeat.

    For an architecture without a vLLM model (GPT-NeoX, OLMo-2, Starcoder2), vLLM makes
    transformers' class compile: it replaces the class's `__init__`, `__call__` and
    bases (0.32: compilation/decorators.py). The trainer's model has the same class, and
    could neither be called nor created after an engine. This patch restores the class,
    and moves the engine's module to a subclass with vLLM's changes.
    """
    from vllm.model_executor.models.transformers import base

    compiled, build = getattr(base, "support_torch_compile", None), base.Base.__init__
    if compiled is None or getattr(base.Base, "keeps_transformers_classes", False):
        return
    # class -> what was its own, and its bases.
    changed: dict[type, tuple[dict[str, Any], tuple[type, ...]]] = {}

    def support_torch_compile(*args: Any, **options: Any) -> Any:
        decorate = compiled(*args, **options)

        def noted(cls: type) -> type:
            # The state before vLLM's decorator changes the class.
            changed.setdefault(cls, (dict(vars(cls)), cls.__bases__))
            return decorate(cls)  # type: ignore[no-any-return]

        return noted

    def build_apart(self: nn.Module, *args: Any, **options: Any) -> None:
        restored = {}
        try:
            build(self, *args, **options)
        finally:
            for cls, (before, bases) in changed.items():
                restored[cls] = _taken_back(cls, before, bases)
            changed.clear()
        # The engine's module gets a subclass with vLLM's changes, and the class itself
        # is as before.
        for module in self.modules():
            if type(module) in restored:
                module.__class__ = restored[type(module)]

    base.support_torch_compile = support_torch_compile
    base.Base.__init__ = build_apart
    base.Base.keeps_transformers_classes = True


def _taken_back(cls: Any, before: dict[str, Any], bases: tuple[type, ...]) -> type:
    """Restore a class to its earlier state, and return a subclass with the changes that were made."""
    # Everything that vLLM has added or replaced.
    written = {
        name: value
        for name, value in vars(cls).items()
        if name not in before or before[name] is not value
    }
    added = tuple(base for base in cls.__bases__ if base not in bases)
    for name in written:
        if name in before:
            setattr(cls, name, before[name])
        else:
            delattr(cls, name)
    cls.__bases__ = bases
    changed: type = type(cls)(
        cls.__name__, (cls, *added), {"__module__": cls.__module__, **written}
    )
    return changed


Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_GROUPS = ("_WORLD", "_TP", "_EP", "_PP", "_DP", "_DCP", "_PCP", "_ETP", "_EPLB")


class _Size(NamedTuple):
    """Stand-in for a process group: it knows its size and this rank."""

    members: int
    place: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.place


@contextmanager
def placed(tp: int, rank: int) -> Iterator[None]:
    """Let vLLM build and load the part of `rank` among `tp` ranks. Nothing can be communicated inside."""
    from vllm.distributed import parallel_state

    def group(name: str, size: int, place: int) -> Any:
        # `__init__` would create process groups.
        made = object.__new__(parallel_state.GroupCoordinator)
        members = _Size(size, place)
        made.__dict__.update(
            {
                "world_size": size,
                "rank_in_group": place,
                "rank": place,
                "local_rank": place,
                "ranks": [*range(size)],
            }
            | {
                "unique_name": name,
                "device": torch.device("cpu"),
                "cpu_group": members,
                "device_group": members,
            }
            | {
                "device_communicator": None,
                "mq_broadcaster": None,
                "use_custom_op_call": False,
            }
        )
        return made

    held = {
        name: getattr(parallel_state, name)
        for name in _GROUPS
        if hasattr(parallel_state, name)
    }
    try:
        for name in held:
            # World, tensor-parallel and expert-parallel groups have `tp` members, all
            # others one.
            wide = name in ("_WORLD", "_TP", "_EP")
            setattr(
                parallel_state,
                name,
                group(name, tp if wide else 1, rank if wide else 0),
            )
        yield
    finally:
        for name, value in held.items():
            setattr(parallel_state, name, value)


def inspect_here(architecture: str) -> None:
    """Let vLLM inspect the model's class in this process.

    To keep CUDA out of its process, vLLM would start another one that imports vLLM
    again. On a new machine that takes ten seconds on every rank, for a class that is
    imported here a moment later.

    Also lets vLLM read the config.json of models that transformers has no class of.
    """
    from vllm import ModelRegistry

    from megaverl.sharding.own_configs import register_config

    register_config(architecture)
    keep_transformers_classes()
    if known := ModelRegistry.models.get(architecture):
        ModelRegistry.register_model(architecture, known.load_model_cls())


def pixels_are_normalised() -> dict[str, Any]:
    """Return EngineArgs for images whose pixels are already normalised.

    Newer versions would normalise them again on the device, with numbers from the
    model's folder.
    """
    from vllm.engine.arg_utils import EngineArgs

    return (
        {"mm_device_do_normalize": False}
        if hasattr(EngineArgs, "mm_device_do_normalize")
        else {}
    )


def engine_config(folder: str | Path, tp: int, **arguments: Any) -> VllmConfig:
    """Return vLLM's configuration for a model folder and EngineArgs, with `tp` tensor-parallel ranks."""
    platform.adapt_vllm()
    from vllm.engine.arg_utils import EngineArgs

    for architecture in read_json_file(Path(folder) / "config.json").get(
        "architectures", ()
    ):
        inspect_here(architecture)
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
    }
    config = EngineArgs(
        str(folder), **defaults | pixels_are_normalised() | arguments
    ).create_engine_config()
    # Set afterwards, since vLLM would check that this machine has as many devices.
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tp
    return config


def build(config: VllmConfig, rank: int, *, data: bool = False) -> Any:
    """Build vLLM's model of a tensor-parallel rank, on the host and in floating point.

    Args:
        data: whether parameters have data; otherwise they are on the meta device.
    """
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # The caller's configuration must not keep the layers of this model.
    config = copy.deepcopy(config)
    # vLLM refuses to register two layers of one name in a configuration.
    config.compilation_config.static_forward_context.clear()
    config.quant_config = config.model_config.quantization = None
    # The cache of rotary embeddings may hold an engine's, which may be on another
    # device.
    known = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    with (
        as_rank(config, rank),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("cpu"),
    ):
        try:
            with nullcontext() if data else _parameters_without_data():
                model = initialize_model(config)
        finally:
            rotary_embedding._ROPE_DICT.clear()
            rotary_embedding._ROPE_DICT.update(known)
    return model


@contextmanager
def _parameters_without_data() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it. Buffers keep
    their data, which loaders look up.
    """
    register = torch.nn.Module.register_parameter

    def without_data(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            # Subclasses of Parameter carry the loaders' functions as attributes.
            made = torch.nn.Parameter(
                parameter.to("meta"), requires_grad=parameter.requires_grad
            )
            made.__class__, made.__dict__ = parameter.__class__, parameter.__dict__
            module._parameters[name] = made

    torch.nn.Module.register_parameter = without_data  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def as_rank(config: VllmConfig, rank: int) -> Iterator[None]:
    """Enter `placed`, and set the configuration that vLLM's layers look up."""
    from vllm.config import set_current_vllm_config

    with (
        placed(config.parallel_config.tensor_parallel_size, rank),
        set_current_vllm_config(config),
        torch.no_grad(),
    ):
        yield


def loaded_here(
    config: VllmConfig, rank: int, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Any:
    """Return the model of a rank with these tensors loaded; parameters that receive nothing are zero."""
    model = build(config, rank, data=True)
    for parameter in model.parameters():
        parameter.data.zero_()
    with as_rank(config, rank):
        model.load_weights(iter(tensors))
    return model


class Trace(NamedTuple):
    """Result of tracing a model's `load_weights`.

    Attributes:
        found: places of the traced tensors, and parameters that none of them goes to.
        of_each_kind: whether only one layer of each kind was traced, and stands for the others.
    """

    found: TracedLayout
    of_each_kind: bool

    def whole(self, sources: Shapes) -> TracedLayout:
        """Return the places of all weights, with the traced layers repeated."""
        return (
            _Kinds.of(sources).repeat(self.found) if self.of_each_kind else self.found
        )

    def traced(self, sources: Shapes) -> Shapes:
        """Return the shapes of the weights that were traced."""
        return (
            {name: sources[name] for name in _Kinds.of(sources).first}
            if self.of_each_kind
            else sources
        )

    def to_json(self) -> dict[str, Any]:
        return {"found": self.found.to_json(), "of_each_kind": self.of_each_kind}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Trace:
        return cls(TracedLayout.from_json(content["found"]), content["of_each_kind"])


def trace(
    config: VllmConfig, rank: int, sources: Shapes, dtype: torch.dtype | None = None
) -> Trace:
    """Trace where vLLM's model puts weights on a tensor-parallel rank, in floating point.

    Args:
        config: vLLM's; its `parallel_config.tensor_parallel_size` is the size.
        sources: shapes of a checkpoint's weights by the names in its files.
        dtype: dtype of the checkpoint; None: the model's own.
    """
    model = build(config, rank)
    with as_rank(config, rank):
        return trace_into(
            model, loaded_tensors(model), sources, dtype or config.model_config.dtype
        )


def trace_into(
    model: Any, held: Mapping[str, torch.Tensor], sources: Shapes, dtype: torch.dtype
) -> Trace:
    """Trace a model that vLLM has built, without changing it.

    Args:
        held: the model's tensors whose contents are recorded.
    """

    # Traces the given weights, and leaves the model unchanged.
    def traced(names: Iterable[str]) -> TracedLayout:
        tracer = Tracer()
        tensors = [(name, tracer.source(name, sources[name], dtype)) for name in names]
        with torch.no_grad(), tracer:
            model.load_weights(iter(tensors))
        return traced_layout(tracer, held)

    # Trace one layer of each kind, which takes a fraction of the time. If repeating it
    # does not give every tensor of the model its right shape, trace all layers.
    kinds = _Kinds.of(sources)
    first_layout = traced(kinds.first)
    try:
        whole = kinds.repeat(first_layout)
    except LookupError:
        return Trace(traced(sources), False)
    # Tensors that the model does not have show that layers differ.
    shapes = whole.layout.local_shapes
    known = whole.parameters <= held.keys()
    alike = known and all(shapes[name] == tuple(held[name].shape) for name in shapes)
    return Trace(first_layout, True) if alike else Trace(traced(sources), False)


def current_config() -> VllmConfig:
    """Return vLLM's configuration while it makes an engine."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def layer_kind(name: str) -> str:
    """Return a name without the number of its layer."""
    return _NUMBER.sub("N", name, count=1)


@dataclass(frozen=True)
class _Kinds:
    """Groups of layers whose tensors have equal names and shapes.

    Attributes:
        first: names that are traced: those outside layers, and those of the first layer of each kind.
        alike: ("model.layers.", number of the first layer of a kind) -> numbers of the other layers.
    """

    first: list[str]
    alike: dict[tuple[str, str], list[str]]

    @classmethod
    def of(cls, sources: Shapes) -> _Kinds:
        layers: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        for name, shape in sources.items():
            if number := _NUMBER.search(name):
                layers.setdefault((name[: number.start()], number.group()), {})[
                    name[number.end() :]
                ] = shape
        firsts: dict[tuple[str, frozenset[Any]], str] = {}
        # Layers of one kind have equal names and shapes. The first one stands for all.
        alike: dict[tuple[str, str], list[str]] = {}
        skipped = set()
        for (stack, number_), tensors in layers.items():
            first = firsts.setdefault((stack, frozenset(tensors.items())), number_)
            if first != number_:
                alike.setdefault((stack, first), []).append(number_)
                skipped |= {f"{stack}{number_}{tail}" for tail in tensors}
        return cls([name for name in sources if name not in skipped], alike)

    def repeat(self, first_layout: TracedLayout) -> TracedLayout:
        """Copy the traced layout of the first layer of each kind to the other layers."""
        parts = [first_layout]
        for (stack, first), layers in self.alike.items():
            layer = first_layout.from_sources(f"{stack}{first}.")
            parts += [
                layer.renamed(partial(_renumbered, first, number)) for number in layers
            ]
        return joined(parts)


def _renumbered(first: str, number: str, name: str) -> str:
    """Return the name with another layer number."""
    match = _NUMBER.search(name)
    if match is None or match.group() != first:
        # A name without the layer's number cannot be repeated, so that all layers are
        # traced.
        raise LookupError(f"{name} is of no layer {first}")
    return name[: match.start()] + number + name[match.end() :]
