"""Find out where a program copies tensors, by running it on tensors without data.

The program is a model's own `load_weights`, or code that converts a model's tensors to
those of a file. Its inputs are meta tensors. A dispatch mode sees every copy below
torch's views, which are offsets and strides at that point. Copies of copies are traced
back to the inputs (`sharding.strided`). Tensors that are computed instead of copied are
reported.

`weights_of_module` uses this for a Hugging Face module, which transformers may save
under other names and in other pieces: experts of one tensor become one entry each, and
some are transposed. transformers' own conversion runs on tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaverl.errors import ModelError
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.strided import Copy, Loop, NotStrided, Strides, boxes, compose

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Limit of the copies of one element of a source.
MOST_REPEATS = 64
# Limit of the copies between a source and a destination.
MOST_STEPS = 8
# Operators that copy their input.
_COPIES = ("aten::clone", "aten::_to_copy", "aten::contiguous")
# Operators that act as views but are not marked as such.
_VIEWS = (
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::lift_fresh",
    "aten::split_with_sizes",
    "aten::split",
    "aten::unbind",
    "aten::chunk",
)
# Operators that only read shapes, or create tensors without copying.
_NEW = (
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::zeros_like",
    "aten::new_zeros",
    "aten::ones_like",
    "aten::is_same_size",
    "aten::set_",
    "aten::resize_",
)


class _Write(NamedTuple):
    """Copy into a storage. `source` None: constants, which come from no source."""

    source: int | None
    copy: Copy


class Tracer(TorchDispatchMode):
    """Dispatch mode that records copies of its sources instead of executing them.

    Example:
            tracer = Tracer()
            source = tracer.source("weight", (4, 8), torch.float32)
            with tracer:
                parameter.copy_(source.t())
            list(tracer.copied(parameter))
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages are identified by address, which stays unique only while they exist.
        self._kept: list[torch.Tensor] = []
        self._names: dict[int, str] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._writes: dict[int, list[_Write]] = {}
        self._computed: dict[int, frozenset[str]] = {}

    def source(
        self, name: str, shape: Iterable[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor without data that stands for the source `name`."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._kept.append(tensor)
        self._names[_storage(tensor)] = name
        self._shapes[_storage(tensor)] = tuple(shape)
        return tensor

    def copied(
        self, tensor: torch.Tensor
    ) -> Iterator[tuple[str | None, tuple[int, ...], Copy]]:
        """Yield what was copied into a tensor's storage: name and shape of the source, and the copy, in order of time.

        Raises:
            NotStrided: the tensor holds something that is not a copy.
        """
        for write in self._writes.get(_storage(tensor), ()):
            for source, copy in self._followed(write, MOST_STEPS):
                name = self._names.get(source) if source is not None else None
                yield (
                    name,
                    self._shapes.get(source, ()) if source is not None else (),
                    copy,
                )

    def computed(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the sources of a tensor that holds something other than copies, else nothing."""
        key = _storage(tensor)
        if key not in self._computed:
            return frozenset()
        return self._computed[key] | self._sources_of(key)

    def sources_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return all sources whose elements affect a tensor."""
        return self._sources_of(_storage(tensor))

    def _followed(self, write: _Write, steps: int) -> Iterator[tuple[int | None, Copy]]:
        """Yield the copies from sources that a write amounts to, following at most `steps` intermediate copies."""
        # Sources and constants are the ends of the chain.
        if write.source is None or write.source in self._names:
            yield write.source, write.copy
            return
        if write.source in self._computed:
            raise NotStrided(
                f"computed from {', '.join(sorted(self._computed[write.source])[:3])}"
            )
        if not steps:
            raise NotStrided(f"it was copied more than {MOST_STEPS} times")
        # The source was itself written by copies. Composing each of them with this copy
        # gives a copy from an earlier tensor, and finally from a source.
        for earlier in self._writes.get(write.source, ()):
            for copy in compose(write.copy, earlier.copy):
                yield from self._followed(_Write(earlier.source, copy), steps - 1)

    def _sources_of(self, key: int) -> frozenset[str]:
        """Return all sources whose elements affect a storage."""
        if key in self._names:
            return frozenset((self._names[key],))
        sources = self._computed.get(key, frozenset())
        for write in self._writes.get(key, ()):
            # A tensor that was copied into itself would be followed without end.
            if write.source is not None and write.source != key:
                sources |= self._sources_of(write.source)
        return sources

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's storage depends on a source."""
        key = _storage(tensor)
        return key in self._names or key in self._writes or key in self._computed

    def _write(self, dest: torch.Tensor, source: torch.Tensor) -> None:
        """Record a copy from `source` to `dest`."""
        key = _storage(dest)
        self._kept += [dest, source]
        # `copy_` broadcasts its source. Axes that are broadcast have a stride of zero.
        source = source.expand(dest.shape)
        if not dest.numel():
            # An empty tensor is known to be loaded, though nothing is copied.
            self._writes.setdefault(key, [])
        # A copy of something computed is computed, too.
        elif _storage(source) in self._computed:
            self._computed[key] = (
                self._computed.get(key, frozenset()) | self._computed[_storage(source)]
            )
        else:
            loops = zip(source.shape, source.stride(), dest.stride(), strict=True)
            copy = Copy(
                _offset(source),
                _offset(dest),
                tuple(Loop(*map(int, loop)) for loop in loops),
            )
            if self._is_known(source):
                self._writes.setdefault(key, []).extend(
                    _Write(_storage(source), part) for part in _once(copy)
                )
            else:
                self._writes.setdefault(key, []).append(_Write(None, copy))

    def _compute(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        """Record that a tensor is computed from sources."""
        self._kept.append(tensor)
        key = _storage(tensor)
        self._computed[key] = self._computed.get(key, frozenset()) | sources

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operator that involves a source, and execute it on meta tensors only."""
        kwargs = kwargs or {}
        name = func._schema.name
        known = [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if _is_tensor(leaf) and self._is_known(leaf)
        ]
        if not known and name == "aten::_to_copy" and _is_index(args[0]):
            # Indices keep their values, wherever a program wants to use them.
            return func(args[0], **(kwargs | {"device": args[0].device}))
        if not known or name in _NEW:
            return func(*args, **kwargs)
        if name == "aten::copy_":
            self._write(args[0], args[1])
            return args[0]
        if name in _COPIES:
            # The device is left out: a source without data must stay on the meta
            # device.
            copied = func(
                args[0].to("meta"),
                **{key: value for key, value in kwargs.items() if key != "device"},
            )
            return self._made(copied, [(copied, args[0])])
        if name == "aten::index" and (picked := _picked(*args)) is not None:
            return self._joined(True, torch.stack, *picked)
        if name in ("aten::cat", "aten::stack"):
            return self._joined(name == "aten::stack", func, *args, **kwargs)
        # Views share the storage, by which sources are known, so there is nothing to
        # record.
        if func.is_view or name in _VIEWS:
            return func(*args, **kwargs)
        if name in ("aten::zero_", "aten::fill_"):
            # A tensor without a source stands for constants.
            self._write(args[0], torch.empty((), device="meta"))
            # The program overwrites a source with a constant.
            if (key := _storage(args[0])) in self._names:
                del self._names[key]
            return args[0]
        # Every other operator computes its result from all its inputs.
        sources = frozenset[str]().union(
            *(self._sources_of(_storage(leaf)) for leaf in known)
        )
        if func._schema.is_mutable:
            self._compute(args[0], sources)
            return args[0]
        result = func(
            *(leaf.to("meta") if _is_tensor(leaf) else leaf for leaf in args), **kwargs
        )
        for leaf in tree_leaves(result):
            if _is_tensor(leaf):
                self._compute(leaf, sources)
        return result

    def _joined(
        self, stacks: bool, func: Any, tensors: list[torch.Tensor], dim: int = 0
    ) -> torch.Tensor:
        """Record `cat` or `stack` as copies of its inputs."""
        joined: torch.Tensor = func([tensor.to("meta") for tensor in tensors], dim)
        parts = (
            joined.unbind(dim)
            if stacks
            else joined.split([tensor.shape[dim] for tensor in tensors], dim)
        )
        return self._made(joined, zip(parts, tensors, strict=True))

    def _made(
        self, new: torch.Tensor, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Record the copies into a new tensor, and return it."""
        self._shapes[_storage(new)] = tuple(new.shape)
        for part, source in parts:
            if self._is_known(source):
                self._write(part, source)
        return new


def _is_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor."""
    return isinstance(value, torch.Tensor)


def _is_index(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has whole numbers or masks as data."""
    return tensor.device.type != "meta" and not tensor.is_floating_point()


def _picked(
    source: torch.Tensor, indices: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor], int] | None:
    """Return the parts of `source[..., index]`, and their axis. None: it is no selection along one axis."""
    used = [axis for axis, index in enumerate(indices) if index is not None]
    if len(used) != 1:
        return None
    index = indices[used[0]]
    assert index is not None
    if not _is_index(index) or index.dim() != 1 or index.dtype == torch.bool:
        return None
    return [source.select(used[0], place) for place in index.tolist()], used[0]


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage."""
    # Unlike `data_ptr`, this differs between storages without data.
    address: int = tensor.untyped_storage()._cdata
    return address


def _offset(tensor: torch.Tensor) -> int:
    """Return a tensor's offset in its storage."""
    return int(tensor.storage_offset())


def _once(copy: Copy) -> Iterator[Copy]:
    """Yield the copy without loops that repeat one element of the source, unrolled."""
    repeating = next(
        (loop for loop in copy.loops if loop.turns > 1 and not loop.source), None
    )
    if repeating is None:
        yield copy
        return
    if repeating.turns > MOST_REPEATS:
        raise NotStrided(f"{repeating.turns} copies of each element")
    rest = copy._replace(
        loops=tuple(loop for loop in copy.loops if loop is not repeating)
    )
    # Each repetition writes to another place, from the same element.
    for turn in range(repeating.turns):
        yield from _once(rest.shifted(repeating, turn))


@dataclass(frozen=True)
class TracedLayout:
    """Destinations of all sources.

    Attributes:
        layout: everything that is a copy. Local tensors are destinations.
        computed: destination -> sources from which it is computed, or copied in a way that no boxes describe.
    """

    layout: Layout
    computed: dict[str, frozenset[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values, to send it to another rank."""
        return {
            "layout": self.layout.to_json(),
            "computed": {name: sorted(of) for name, of in self.computed.items()},
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> TracedLayout:
        """Return the layout that `to_json` converted."""
        computed = {
            name: frozenset(sources) for name, sources in stored["computed"].items()
        }
        return cls(Layout.from_json(stored["layout"]), computed)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of all destinations."""
        return frozenset(self.layout.local_shapes) | self.computed.keys()

    def from_sources(self, prefix: str) -> TracedLayout:
        """Return the part that comes from sources whose names start with `prefix`."""
        pieces = tuple(
            piece for piece in self.layout.pieces if piece.tensor.startswith(prefix)
        )
        views = {
            piece.local: self.layout.views[piece.local]
            for piece in pieces
            if piece.local in self.layout.views
        }
        layout = Layout(
            pieces,
            {
                name: self.layout.local_shapes[name]
                for name in {self.layout.stored_in(p.local) for p in pieces}
            },
            {piece.tensor: self.layout.global_shapes[piece.tensor] for piece in pieces},
            views=views,
        )
        computed = {
            name: sources
            for name, sources in self.computed.items()
            if any(source.startswith(prefix) for source in sources)
        }
        return TracedLayout(layout, computed)

    def renamed(self, rename: Callable[[str], str]) -> TracedLayout:
        """Return the layout with renamed sources and destinations."""
        layout = Layout(
            tuple(
                p._replace(tensor=rename(p.tensor), local=rename(p.local))
                for p in self.layout.pieces
            ),
            {rename(name): shape for name, shape in self.layout.local_shapes.items()},
            {rename(name): shape for name, shape in self.layout.global_shapes.items()},
            views={
                rename(local): (rename(name), view)
                for local, (name, view) in self.layout.views.items()
            },
        )
        computed = {
            rename(name): frozenset(map(rename, sources))
            for name, sources in self.computed.items()
        }
        return TracedLayout(layout, computed)


def joined(parts: Sequence[TracedLayout]) -> TracedLayout:
    """Return the union of layouts of different sources. A destination that is computed in one of them is computed."""
    computed = {
        name: sources for part in parts for name, sources in part.computed.items()
    }
    shapes = {
        name: shape
        for part in parts
        for name, shape in part.layout.local_shapes.items()
    }
    layout = Layout(
        tuple(piece for part in parts for piece in part.layout.pieces),
        {name: shape for name, shape in shapes.items() if name not in computed},
        {
            name: shape
            for part in parts
            for name, shape in part.layout.global_shapes.items()
        },
        views={
            local: view for part in parts for local, view in part.layout.views.items()
        },
    )
    return TracedLayout(layout, computed)


def traced_layout(
    tracer: Tracer, destinations: Mapping[str, torch.Tensor]
) -> TracedLayout:
    """Return the layout of dense destination tensors, as the tracer saw them."""
    pieces: list[Piece] = []
    local_shapes: dict[str, tuple[int, ...]] = {}
    global_shapes: dict[str, tuple[int, ...]] = {}
    views: dict[str, tuple[str, Strides]] = {}
    computed: dict[str, frozenset[str]] = {}
    for name, tensor in destinations.items():
        if sources := tracer.computed(tensor):
            computed[name] = sources
            continue
        try:
            tensor_pieces = _pieces(name, tensor, tracer, views, global_shapes)
        except NotStrided:
            computed[name] = tracer.sources_of(tensor)
            continue
        if not tensor_pieces and not isinstance(tensor, torch.nn.Parameter):
            # Buffers that no source reaches are not loaded.
            continue
        pieces += tensor_pieces
        local_shapes[name] = tuple(tensor.shape)
    return TracedLayout(
        Layout(tuple(pieces), local_shapes, global_shapes, views=views), computed
    )


def layout_of_sources(tracer: Tracer, created: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of a program's outputs in its sources: global tensors are the outputs, local ones the sources.

    Args:
        created: created tensors, by their global names.

    Raises:
        NotStrided: a tensor, which is named, is not a copy of sources, or only partly.
    """
    pieces: list[Piece] = []
    local_shapes: dict[str, tuple[int, ...]] = {}
    views: dict[str, tuple[str, Strides]] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in created.items()}
    for name, tensor in created.items():
        # A copy into a dense tensor resolves views and transposes of the sources.
        dense = torch.empty(shapes[name], dtype=tensor.dtype, device="meta")
        with tracer:
            dense.copy_(tensor)
        if sources := tracer.computed(dense):
            raise NotStrided(f"{name} is computed from {', '.join(sorted(sources))}")
        num_copied = 0
        for source, source_shape, copy in tracer.copied(dense):
            if source is None:
                continue
            local_shapes[source] = source_shape
            # Source and destination change roles: the layout describes the created
            # tensor's elements by their place in the source.
            turned = Copy(
                copy.dest_start,
                copy.source_start,
                tuple(Loop(n, to, at) for n, at, to in copy.loops),
            )
            for box, view, local_box in boxes(turned, shapes[name], source_shape):
                local = source if view.are_plain else f"{source}.{view}"
                if not view.are_plain:
                    views[local] = (source, view)
                pieces.append(Piece(name, box, local, local_box))
                num_copied += box.numel
        # A folder written from this layout would otherwise have holes.
        if num_copied != math.prod(shapes[name]):
            raise NotStrided(
                f"{name}: {num_copied} of {math.prod(shapes[name])} elements are copies of known sources"
            )
    return Layout(tuple(pieces), local_shapes, shapes, views=views)


def _pieces(
    name: str,
    tensor: torch.Tensor,
    tracer: Tracer,
    views: dict[str, tuple[str, Strides]],
    global_shapes: dict[str, tuple[int, ...]],
) -> list[Piece]:
    """Return the pieces of one destination, recording views and shapes of sources."""
    pieces: list[Piece] = []
    shape = tuple(tensor.shape)
    for source, source_shape, copy in tracer.copied(tensor):
        if source is None:
            # Constants, such as padding, have no source.
            continue
        global_shapes[source] = source_shape
        # The destination may be a view of a larger storage. Boxes count from its own
        # first element.
        moved = copy._replace(dest_start=copy.dest_start - _offset(tensor))
        for box, view, local_box in boxes(moved, source_shape, shape):
            local = name
            if not view.are_plain:
                local = f"{name}.{view}"
                views[local] = (name, view)
            pieces.append(Piece(source, box, local, local_box))
    return _last_ones(pieces)


def _last_ones(pieces: list[Piece]) -> list[Piece]:
    """Remove pieces that a later one overwrites, such as tied weights that a file stores twice."""
    if sum(piece.local_box.numel for piece in pieces) <= 1:
        return pieces
    kept: list[Piece] = []
    seen: dict[tuple[str, Box], int] = {}
    for piece in pieces:
        key = (piece.local, piece.local_box)
        if key in seen:
            kept[seen[key]] = piece
        else:
            seen[key] = len(kept)
            kept.append(piece)
    return kept


@dataclass(frozen=True)
class ModuleWeights:
    """Tensors that a model's folder stores for a module.

    Attributes:
        layout: layout of the whole module. Global tensors have the names of the files, and `global_shapes` their order.
            Local tensors are parameters and saved buffers under the names of `state_dict()`. `layout.shard` gives the
            layout of a rank that holds a box of each.
        tied: further name of a tensor in the module -> its name in `layout`.
    """

    layout: Layout
    tied: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the names in a folder's files."""
        return self.layout.global_shapes

    @property
    def renamed(self) -> dict[str, str]:
        """Name in the module -> name in the files, for tensors that are otherwise equal."""
        pieces = self.layout.by_tensor
        num_pieces = dict.fromkeys(self.layout.local_shapes, 0)
        for piece in self.layout.pieces:
            num_pieces[self.layout.stored_in(piece.local)] += 1
        return {
            piece.local: name
            for name, (piece, *more) in pieces.items()
            if not more
            and num_pieces.get(piece.local) == 1
            and self.layout.local_shapes[piece.local] == self.shapes[name]
        }


def weights_of_module(model: PreTrainedModel) -> ModuleWeights:
    """Return the weights of a module on any device and of any dtype. The module is not changed.

    Raises:
        ModelError: transformers computes what it saves, or saves other tensors than the module has.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict(keep_vars=True)
    # In reverse, so that the first name of a tied tensor overwrites the later ones.
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    tied = {
        name: first[id(tensor)]
        for name, tensor in state.items()
        if first[id(tensor)] != name
    }
    tracer = Tracer()
    sources = {
        name: tracer.source(name, t.shape, t.dtype)
        for name, t in state.items()
        if name not in tied
    }
    try:
        with torch.no_grad(), tracer:
            saved = revert_weight_conversion(model, dict(sources))
        return ModuleWeights(layout_of_sources(tracer, saved), tied)
    except NotStrided as error:
        raise ModelError(
            f"{type(model).__name__}: transformers does not copy what it saves: {error}. Its weights cannot be moved "
            "to an engine tensor by tensor."
        ) from error
