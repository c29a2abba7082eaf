"""The layout of vLLM's parameters for any architecture: its own `load_weights`, run on a model without data.

For any rank of any tensor-parallel size in one process, without weights and without other ranks: vLLM's groups are
stood in for by objects that have a size and a rank. Layers that are alike are traced once, and repeated by name.

vLLM, traced or as an engine, is a guest in the training process: what it changes there for itself is put back.
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
    """Keep random states, `torch.set_num_threads`, environment and frozen objects from what a start does to them."""
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
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
    """Keep vLLM from freezing all objects of the process when an engine is made, and unfreezing them when it ends.

    Unfrozen, some 400,000 objects of imported modules are walked by each of seven collections, a second and more.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


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


Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_GROUPS = ("_WORLD", "_TP", "_EP", "_PP", "_DP", "_DCP", "_PCP", "_ETP", "_EPLB")


class _Size(NamedTuple):
    """What is asked of a process group."""

    members: int
    place: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.place


@contextmanager
def placed(tp: int, rank: int) -> Iterator[None]:
    """vLLM builds and loads what `rank` of `tp` holds; nothing can be sent."""
    from vllm.distributed import parallel_state

    def group(name: str, size: int, place: int) -> Any:
        made = object.__new__(parallel_state.GroupCoordinator)
        members = _Size(size, place)
        made.__dict__.update(
            {"world_size": size, "rank_in_group": place, "rank": place, "local_rank": place, "ranks": [*range(size)]}
            | {"unique_name": name, "device": torch.device("cpu"), "cpu_group": members, "device_group": members}
            | {"device_communicator": None, "mq_broadcaster": None, "use_custom_op_call": False}
        )
        return made

    held = {name: getattr(parallel_state, name) for name in _GROUPS if hasattr(parallel_state, name)}
    try:
        for name in held:
            wide = name in ("_WORLD", "_TP", "_EP")
            setattr(parallel_state, name, group(name, tp if wide else 1, rank if wide else 0))
        yield
    finally:
        for name, value in held.items():
            setattr(parallel_state, name, value)


def inspect_here(architecture: str) -> None:
    """Let vLLM look at the model's class in this process.

    To keep CUDA out of its own, it would start another that imports vLLM anew: on a new machine ten seconds on every
    rank, for a class that is imported here a moment later.
    """
    from vllm import ModelRegistry

    keep_transformers_classes()
    if known := ModelRegistry.models.get(architecture):
        ModelRegistry.register_model(architecture, known.load_model_cls())


def pixels_are_normalised() -> dict[str, Any]:
    """EngineArgs for images whose pixels come as the model takes them: newer versions would normalise them on the
    device, with numbers that they read from the model's folder."""
    from vllm.engine.arg_utils import EngineArgs

    return {"mm_device_do_normalize": False} if hasattr(EngineArgs, "mm_device_do_normalize") else {}


def engine_config(folder: str | Path, tp: int, **arguments: Any) -> VllmConfig:
    """What vLLM makes of a model folder's config.json and of its EngineArgs, for so many tensor-parallel ranks."""
    platform.adapt_vllm()
    from vllm.engine.arg_utils import EngineArgs

    for architecture in read_json_file(Path(folder) / "config.json").get("architectures", ()):
        inspect_here(architecture)
    given: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True}
    config = EngineArgs(str(folder), **given | pixels_are_normalised() | arguments).create_engine_config()
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = tp  # which need not be here
    return config


def build(config: VllmConfig, rank: int, *, data: bool = False) -> Any:
    """vLLM's model as this tensor-parallel rank builds it, on the host, in floating point; its parameters without
    `data` if not asked."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.deepcopy(config)
    config.compilation_config.static_forward_context.clear()  # a layer's name may be given once
    config.quant_config = config.model_config.quantization = None
    known = dict(rotary_embedding._ROPE_DICT)  # an engine's, which may lie on another device
    rotary_embedding._ROPE_DICT.clear()
    with as_rank(config, rank), set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        try:
            with nullcontext() if data else _parameters_without_data():
                model = initialize_model(config)
        finally:
            rotary_embedding._ROPE_DICT.clear()
            rotary_embedding._ROPE_DICT.update(known)
    return model


@contextmanager
def _parameters_without_data() -> Iterator[None]:
    """Each lets its numbers go when a module registers it; buffers keep theirs, which loaders look things up in."""
    register = torch.nn.Module.register_parameter

    def without_data(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            made = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            made.__class__, made.__dict__ = parameter.__class__, parameter.__dict__
            module._parameters[name] = made

    torch.nn.Module.register_parameter = without_data  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def as_rank(config: VllmConfig, rank: int) -> Iterator[None]:
    """`placed`, and what vLLM's layers look up is this configuration."""
    from vllm.config import set_current_vllm_config

    with placed(config.parallel_config.tensor_parallel_size, rank), set_current_vllm_config(config), torch.no_grad():
        yield


def loaded_here(config: VllmConfig, rank: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """The model of a rank with these tensors in it; what nothing is loaded into is zero."""
    model = build(config, rank, data=True)
    for parameter in model.parameters():
        parameter.data.zero_()
    with as_rank(config, rank):
        model.load_weights(iter(tensors))
    return model


class Trace(NamedTuple):
    """What was seen of a model's `load_weights`.

    Attributes:
        found: where the tensors that were traced go; parameters that none of them goes to are in it too.
        of_each_kind: one layer of each kind was traced, and stands for the others.
    """

    found: TracedLayout
    of_each_kind: bool

    def whole(self, sources: Shapes) -> TracedLayout:
        """Of all these tensors."""
        return _Kinds.of(sources).repeat(self.found) if self.of_each_kind else self.found

    def traced(self, sources: Shapes) -> Shapes:
        """Of all these tensors, those that were traced."""
        return {name: sources[name] for name in _Kinds.of(sources).first} if self.of_each_kind else sources

    def to_json(self) -> dict[str, Any]:
        return {"found": self.found.to_json(), "of_each_kind": self.of_each_kind}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Trace:
        return cls(TracedLayout.from_json(told["found"]), told["of_each_kind"])


def trace(config: VllmConfig, rank: int, sources: Shapes, dtype: torch.dtype | None = None) -> Trace:
    """Where vLLM's model puts tensors of these names and shapes on a tensor-parallel rank, in floating point.

    Args:
        config: vLLM's; its `parallel_config.tensor_parallel_size` is the size.
        sources: of a checkpoint, by the names in its files.
        dtype: of the checkpoint; None: the model's own.
    """
    model = build(config, rank)
    with as_rank(config, rank):
        return trace_into(model, loaded_tensors(model), sources, dtype or config.model_config.dtype)


def trace_into(model: Any, held: Mapping[str, torch.Tensor], sources: Shapes, dtype: torch.dtype) -> Trace:
    """The same of a model that vLLM has built, without a change to it; `held` are those of its tensors that count."""

    def traced(names: Iterable[str]) -> TracedLayout:
        tracer = Tracer()
        tensors = [(name, tracer.source(name, sources[name], dtype)) for name in names]
        with torch.no_grad(), tracer:
            model.load_weights(iter(tensors))
        return traced_layout(tracer, held)

    kinds = _Kinds.of(sources)
    found = traced(kinds.first)
    try:
        whole = kinds.repeat(found)
    except LookupError:
        return Trace(traced(sources), False)
    shapes = whole.layout.local_shapes
    known = whole.parameters <= held.keys()
    alike = known and all(shapes[name] == tuple(held[name].shape) for name in shapes)
    return Trace(found, True) if alike else Trace(traced(sources), False)


def current_config() -> VllmConfig:
    """vLLM's, while it makes an engine."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def layer_kind(name: str) -> str:
    """A name without the number of its layer."""
    return _NUMBER.sub("N", name, count=1)


@dataclass(frozen=True)
class _Kinds:
    """Layers that are alike, by the names and shapes of their tensors.

    Attributes:
        first: the names that are traced: those of no layer, and of the first layer of each kind.
        alike: ("model.layers.", number of the first layer of a kind) -> the numbers of the others.
    """

    first: list[str]
    alike: dict[tuple[str, str], list[str]]

    @classmethod
    def of(cls, sources: Shapes) -> _Kinds:
        layers: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        for name, shape in sources.items():
            if number := _NUMBER.search(name):
                layers.setdefault((name[: number.start()], number.group()), {})[name[number.end() :]] = shape
        firsts: dict[tuple[str, frozenset[Any]], str] = {}
        alike: dict[tuple[str, str], list[str]] = {}
        skipped = set()
        for (stack, number_), tensors in layers.items():
            first = firsts.setdefault((stack, frozenset(tensors.items())), number_)
            if first != number_:
                alike.setdefault((stack, first), []).append(number_)
                skipped |= {f"{stack}{number_}{tail}" for tail in tensors}
        return cls([name for name in sources if name not in skipped], alike)

    def repeat(self, found: TracedLayout) -> TracedLayout:
        """With what was traced of the first of a kind said of the others."""
        parts = [found]
        for (stack, first), others in self.alike.items():
            layer = found.from_sources(f"{stack}{first}.")
            parts += [layer.renamed(partial(_renumbered, first, number)) for number in others]
        return joined(parts)


def _renumbered(first: str, number: str, name: str) -> str:
    """The name in another layer."""
    found = _NUMBER.search(name)
    if found is None or found.group() != first:
        raise LookupError(f"{name} is of no layer {first}")
    return name[: found.start()] + number + name[found.end() :]
