"""Layouts of an engine's ranks, observed from vLLM's own weight loader instead of rules for each architecture.

Every rank runs its model's `load_weights` on tensors without data (`vllm_tracing`) and
sends the result to the other ranks of its replica. Some parameters are computed from
weights instead of copied (Mamba's A is -exp of `A_log`). Their source weights are
received whole into extra tensors, and passed through `load_weights` from there.

If weights will come from an actor, `load_weights` first runs once on numbers, with one layer of each kind. Every
element
must be where the layout says, and every element of a parameter must come from some weight.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaverl.distributed.collectives import gather_json, together
from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.rollout.engine import Shapes
from megaverl.rollout.vllm_tracing import Trace, layer_kind, trace, trace_into
from megaverl.rollout.vllm_weights import (
    loaded_parameters,
    loaded_tensors,
    quantised_weights,
)
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout, Piece, join_layouts, padded_tensors
from megaverl.sharding.tracing import TracedLayout
from megaverl.sharding.weight import as_block, listed
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Prefix of the local name of a weight that goes through vLLM's loader.
BESIDE = "load_weights: "
MOST_NAMED = 5
# Characters that are quoted of an error of vLLM or transformers, which may list every
# known model.
MOST_SAID = 300
# Copies of a tensor that a trial holds at most, including those of the comparison.
COPIES = 3


class LoaderLayouts:
    """Layouts of one engine. Every rank of the replica makes one and calls it alike.

    Args:
        model, config: vLLM's, as soon as they exist, while each parameter has storage of its own.
        dtype: dtype of the incoming weights.
        empty: whether the parameters hold nothing yet, so that layouts can be tried on them.

    Attributes:
        mine: this rank's layout, after the first call.
        beside: local name -> tensor for a weight from which vLLM computes parameters.

    Raises:
        RolloutError: vLLM would compute another model at this tensor-parallel size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        dtype: torch.dtype,
        *,
        empty: bool,
    ) -> None:
        _check_heads(model, config)
        self._model: Any = model
        self._config, self._dtype, self._empty = config, dtype, empty
        self._found: tuple[Shapes, Callable[[int], Layout]] | None = None
        self.mine: Layout | None = None
        self.beside: dict[str, torch.Tensor] = {}

    def __call__(self, shapes: Shapes) -> Callable[[int], Layout]:
        """Return a function from a rank to its layout of weights with these shapes.

        Ranks with the same place in their replicas share one layout object.

        Raises:
            RolloutError: vLLM cannot load such weights, or puts them elsewhere; raised on every rank of the replica.
        """
        # Traced again only for other weights.
        if self._found is None or self._found[0] != shapes:
            self._found = dict(shapes), self._find(dict(shapes))
        return self._found[1]

    def local_names(self) -> list[str]:
        """List the model's tensors that a reshard writes; all parameters if there is no layout yet."""
        if self.mine is None:
            return [name for name, _ in loaded_parameters(self._model)]
        return [name for name in self.mine.local_shapes if name not in self.beside]

    def load_computed(self) -> None:
        """Let vLLM compute its derived parameters from the weights that have arrived for them."""
        if self.beside:
            with _loading(self._config):
                self._model.load_weights(
                    (name.removeprefix(BESIDE), held)
                    for name, held in self.beside.items()
                )

    def _find(self, shapes: Shapes) -> Callable[[int], Layout]:
        from vllm.distributed import get_tp_group

        tp = get_tp_group()
        is_single = tp.world_size == 1
        # All ranks of the replica raise if one of them cannot trace.
        with nullcontext() if is_single else together(tp.cpu_group):
            own_trace = self.take(shapes, tp.rank_in_group)
        # Collective over the replica's ranks.
        traces = (
            [own_trace.to_json()]
            if is_single
            else gather_json(own_trace.to_json(), tp.cpu_group)
        )
        layouts = [
            laid_out(Trace.from_json(trace).whole(shapes), shapes, self._quantised)
            for trace in traces
        ]
        # Weights that no rank uses need not be sent at all.
        held = {name for layout in layouts for name in layout.global_shapes}
        if not tp.rank_in_group and (unused := sorted(shapes.keys() - held)):
            logger.warning(
                "vLLM has no use for %s: they are not sent", ", ".join(listed(unused))
            )
        return lambda rank: layouts[rank % len(layouts)]

    def take(self, shapes: Shapes, place: int) -> Trace:
        """Trace this rank's loader, and prepare the parameters for incoming weights.

        Args:
            place: this rank's index in its replica.
        """
        self._quantised = {
            name: weight.format
            for name, weight in quantised_weights(self._model).items()
        }
        trace = self._trace(shapes, place)
        traced_layout = trace.whole(shapes)
        held, self.mine = (
            loaded_tensors(self._model),
            laid_out(traced_layout, shapes, self._quantised),
        )
        # Sources of computed parameters keep the dtype of the parameter that they end
        # up in.
        dtypes = {
            source: held[name].dtype
            for name, sources in traced_layout.computed.items()
            for source in sources
        }
        device = next(iter(held.values())).device
        self.beside = {
            piece.local: torch.zeros(
                piece.box.shape, dtype=dtypes[piece.tensor], device=device
            )
            for piece in self.mine.pieces
            if piece.local.startswith(BESIDE)
        }
        if traced_layout.computed:
            names = ", ".join(listed(traced_layout.computed))
            logger.info(
                "vLLM computes %s from weights, which go through its loader", names
            )
        if self._empty and self._quantised:
            for name in held.keys() & {*padded_tensors(self.mine)}:
                held[name].zero_()
        # Parameters with values must not be overwritten by a trial.
        if self._empty and not self._quantised:
            self._empty = False
            self._try(trace, trace.traced(shapes), traced_layout, held)
        return trace

    def _trace(self, shapes: Shapes, place: int) -> Trace:
        from vllm import __version__

        try:
            # A quantised model's tensors differ from those that load_weights saw, so
            # trace one in floating point.
            if self._quantised:
                return trace(self._config, place, shapes, self._dtype)
            with _loading(self._config):
                return trace_into(
                    self._model, loaded_tensors(self._model), shapes, self._dtype
                )
        except (
            KeyError,
            ValueError,
            AttributeError,
            RuntimeError,
            AssertionError,
            TypeError,
        ) as error:
            raise RolloutError(
                f"vLLM {__version__} does not load these weights into {type(self._model).__name__}: "
                f"{type(error).__name__}: {error}. Check that model.path is the folder of the model that is trained, "
                "or use rollout.engine=hf."
            ) from error

    def _try(
        self,
        trace: Trace,
        shapes: Shapes,
        traced_layout: TracedLayout,
        held: Mapping[str, torch.Tensor],
    ) -> None:
        assert self.mine is not None
        with _loading(self._config):
            wrong = [
                *_tried(
                    self._model,
                    held,
                    trace.found.layout,
                    shapes,
                    self.mine,
                    {*traced_layout.computed},
                    self._dtype,
                )
            ]
            # NaN marked what nothing was loaded into. Padding must be zero.
            for name in held.keys() & {*padded_tensors(self.mine)}:
                held[name].zero_()
        if wrong:
            from vllm import __version__

            raise RolloutError(
                f"vLLM {__version__} loads {type(self._model).__name__} differently with data than without data:"
                f"{as_block(sorted(wrong), MOST_NAMED)}\nUse the vLLM of requirements/, or rollout.engine=hf."
            )


def laid_out(
    traced_layout: TracedLayout,
    shapes: Shapes,
    quantised: Mapping[str, str] | None = None,
) -> Layout:
    """Return the layout of a trace, with whole weights added for parameters that are computed from them.

    Raises:
        RolloutError: a quantised parameter is a view of a loaded tensor.
    """
    # Each source once, however many parameters are computed from it.
    sources = dict.fromkeys(
        name for names in traced_layout.computed.values() for name in sorted(names)
    )
    layout = replace(
        traced_layout.layout,
        quantised={
            name: form
            for name, form in (quantised or {}).items()
            if name in traced_layout.parameters
        },
    )
    if beyond := [
        name for name, _ in layout.views.values() if name in layout.quantised
    ]:
        raise RolloutError(
            f"vLLM transposes {', '.join(listed(beyond))} as it loads: such weights cannot be quantised. Leave "
            "rollout.vllm.quantization out."
        )
    if not sources:
        return layout
    # Such a weight arrives whole on every rank.
    boxes = {name: whole(shapes[name]) for name in sources}
    pieces = tuple(
        Piece(name, box, f"{BESIDE}{name}", box) for name, box in boxes.items()
    )
    scale_shapes = {
        piece.local: box.shape
        for piece, box in zip(pieces, boxes.values(), strict=True)
    }
    return join_layouts(
        layout,
        Layout(pieces, scale_shapes, {name: box.shape for name, box in boxes.items()}),
    )


def planned_layouts(
    described: str | Path, tp: int, shapes: Shapes, **options: Any
) -> Callable[[int], Layout]:
    """Return the layouts of an engine for the model of a config.json, without an engine
    or weights. vLLM must be installed.

    Args:
        options: EngineArgs that affect where weights go, such as `enable_expert_parallel`; with `trust_remote_code`,
            Python files beside the config.json may be run.

    Raises:
        RolloutError: vLLM is not installed, or cannot build the model.
    """
    # A run sets the same level. vLLM reads it when it is imported.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from megaverl.rollout.vllm_tracing import engine_config

        # The folder lives as long as the layouts, since a model's own code is imported
        # from it when it is built.
        folder = tempfile.TemporaryDirectory()
        shutil.copyfile(described, Path(folder.name) / "config.json")
        for code in (
            Path(described).parent.glob("*.py")
            if options.get("trust_remote_code")
            else ()
        ):
            shutil.copy(code, folder.name)
        config = engine_config(folder.name, tp, **options)
    except ImportError as error:
        raise RolloutError(
            f"{described}: where vLLM keeps such a model's weights is read from its own loader, and vLLM cannot be "
            f"imported here ({error}). Plan where it is installed."
        ) from error

    # Only the place in the replica decides, so equal places share a layout.
    @cache
    def layout_of(place: int) -> Layout:
        assert Path(folder.name).is_dir()
        try:
            # A model's own code may raise SystemExit, which would end the command as if
            # all were well.
            with user_code(lambda error: RuntimeError(describe(error)), keep=Exception):
                return laid_out(trace(config, place, shapes).whole(shapes), shapes)
        except (
            KeyError,
            ValueError,
            AttributeError,
            RuntimeError,
            TypeError,
            AssertionError,
        ) as error:
            text = " ".join(str(error).split())[:MOST_SAID]
            architectures = ", ".join(config.model_config.architectures)
            # vLLM's layers assert that their sizes divide over the ranks.
            if isinstance(error, AssertionError):
                raise RolloutError(
                    f"{described}: vLLM does not build {architectures} at rollout.tp={tp}: one of its layers does not "
                    f"divide over {tp} ranks{': ' + text if text else ''}. Use a smaller rollout.tp."
                ) from error
            raise RolloutError(
                f"{described}: vLLM does not build {architectures} as its own class or through its Transformers "
                f"backend, or does not load its weights: {type(error).__name__}: {text}. A model's own code must name "
                "AutoModel in auto_map. Else use rollout.engine=hf."
            ) from error

    return lambda rank: layout_of(rank % tp)


@contextmanager
def _loading(config: VllmConfig) -> Iterator[None]:
    """Set vLLM's current configuration, which its layers look up, as while an engine is made."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), torch.no_grad():
        yield


def _tried(
    model: Any,
    held: Mapping[str, torch.Tensor],
    traced: Layout,
    shapes: Shapes,
    layout: Layout,
    computed: set[str],
    dtype: torch.dtype,
) -> Iterator[str]:
    """Load numbers into the traced tensors, and yield a message for every deviation from the layout.

    Args:
        traced: the traced part of the layout.
        shapes: shapes of the weights that were traced.
        layout: the whole layout of the rank.
        computed: names of parameters that vLLM computes.
    """
    device = next(iter(held.values())).device
    # The trial holds a weight several times, so large ones are left out.
    num_elements = platform.free_memory() // (2 * COPIES * dtype.itemsize)
    numbers = {
        name: number
        for number, (name, shape) in enumerate(shapes.items())
        if math.prod(shape) <= num_elements
    }
    if left_out := shapes.keys() - numbers.keys():
        logger.info(
            "not tested, too large for the free memory: %s", ", ".join(listed(left_out))
        )

    def source(name: str) -> torch.Tensor:
        """Return pseudo-random numbers for a weight that every floating-point type can hold, none of them zero."""
        # The seed is the weight's number, so that a number found in a wrong place is
        # noticed.
        generator = torch.Generator(device).manual_seed(numbers[name])
        made = torch.empty(shapes[name], dtype=dtype, device=device)
        # Multiples of 1/128 below 2 are exact in every 16-bit and 32-bit type.
        return made.random_(1, 256, generator=generator).div_(128)

    filled: dict[str, int] = {}
    for piece in traced.pieces:
        name = traced.stored_in(piece.local)
        filled[name] = filled.get(name, 0) + piece.box.numel
    skipped = {
        traced.stored_in(piece.local)
        for piece in traced.pieces
        if piece.tensor in left_out
    } | computed
    with_pieces = {layout.stored_in(piece.local) for piece in layout.pieces}
    bare = [
        name for name in layout.local_shapes if name in held and name not in with_pieces
    ]
    tried = [
        name
        for name in (*filled, *bare)
        if held[name].is_floating_point() and name not in skipped
    ]
    for name in tried:
        # NaN shows what `load_weights` leaves untouched.
        held[name].fill_(math.nan)
    model.load_weights((name, source(name)) for name in numbers)
    pieces = [piece for piece in traced.pieces if piece.tensor in numbers]
    for tensor, of_tensor in groupby(pieces, key=lambda piece: piece.tensor):
        numbered = source(tensor)
        for piece in of_tensor:
            name, view = traced.views.get(piece.local, (piece.local, None))
            target = (held[name] if view is None else view.apply(held[name]))[
                piece.local_box.slices
            ]
            # Bits are compared, not values within a tolerance.
            if not torch.equal(
                target,
                numbered[piece.box.slices].reshape(target.shape).to(target.dtype),
            ):
                yield f"{piece.tensor} {piece.box} is not in {piece.local} {piece.local_box}"
    # Only one layer of each kind was loaded. A parameter without pieces therefore counts
    # as loaded if the same parameter of any layer was.
    alike: dict[str, bool] = {}
    for name in tried:
        unset = int(held[name].isnan().sum())
        alike[layer_kind(name)] = alike.get(layer_kind(name), False) or not unset
        if name in filled and unset:
            yield f"nothing is loaded into {unset} elements of {name}"
        if (
            # Zeros are padding, so a wrong number of them means that something else was
            # written.
            name in filled
            and not unset
            and int(held[name].count_nonzero()) != filled[name]
        ):
            yield f"{name} has elements that are neither weights nor zero"
    yield from (
        f"nothing is loaded into {name}"
        for name in bare
        if not alike.get(layer_kind(name), True)
    )


def _check_heads(model: Any, config: VllmConfig) -> None:
    """Refuse a model whose attention heads vLLM splits although it does not split their projections.

    vLLM's Transformers backend gives each rank its share of the heads even where it
    knows no way to split the projections before them, and continues (0.32: Persimmon).
    """
    from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear

    size = config.parallel_config.tensor_parallel_size
    # On a single rank nothing is split.
    for path, _ in getattr(model, "attention_fusers", {}).values() if size > 1 else ():
        linears = [
            module
            for module in model.get_submodule(path).modules()
            if isinstance(module, LinearBase)
        ]
        if linears and all(isinstance(linear, ReplicatedLinear) for linear in linears):
            raise RolloutError(
                f"vLLM does not know how to cut {path} over {size} ranks, and would compute another model. "
                "Set rollout.tp=1, or rollout.engine=hf."
            )
