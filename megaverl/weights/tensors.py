"""The tensors of a side: boxes of them, whether they are those of the layout, and the dtype in which each travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json, together
from megaverl.errors import MegaverlError, ReshardError
from megaverl.sharding.boxes import Box
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import listed

Tensors = Mapping[str, torch.Tensor]  # local name -> tensor
MOVABLE = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box of a tensor or parameter, sharing its storage, outside autograd."""
    return tensor.detach()[box.slices]


def check_tensors(
    layout: Layout,
    tensors: Tensors,
    holder: str,
    error: type[MegaverlError],
    *,
    exact: bool = False,
) -> None:
    """Every local tensor of the layout is in `tensors`, with the layout's shape.

    Args:
        exact: `tensors` must hold nothing else either.

    Raises:
        error: names every tensor that is missing, of another shape or, if `exact`, that no weight belongs to.
    """
    missing = [name for name in layout.local_shapes if name not in tensors]
    problems = [f"{holder} has no such parameter: {', '.join(listed(missing))}"] if missing else []
    shapes: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, shape in layout.local_shapes.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            shapes.setdefault((tuple(tensors[name].shape), tuple(shape)), []).append(name)
    for (found, wanted), names in shapes.items():
        problems.append(f"shape {list(found)}, the layout says {list(wanted)}: {', '.join(listed(names))}")
    extra = [name for name in tensors if name not in layout.local_shapes] if exact else []
    if extra:
        problems.append(
            f"no weight of the model belongs to {', '.join(listed(extra))} (quantised or adapted models have such)"
        )
    if problems:
        raise error(f"{holder} does not fit its layout: " + "; ".join(problems) + ".")


class SideDtypes:
    """The dtypes of one side's tensors over all ranks: one for almost all, and the others by name.

    Args:
        name: of the side, for messages.
        reports: each rank's, in rank order.
    """

    def __init__(self, name: str, reports: list[Any]) -> None:
        self._name = name
        common = Counter(report["common"] for report in reports if report["common"])
        self._common: str = common.most_common(1)[0][0] if common else ""
        self._others: dict[str, tuple[str, int]] = {}
        for rank, report in enumerate(reports):
            for dtype, tensors in report["others"].items():
                for tensor in tensors:
                    self._others.setdefault(tensor, (dtype, rank))
        self._odd = {rank: r["common"] for rank, r in enumerate(reports) if r["common"] not in ("", self._common)}

    @property
    def common(self) -> torch.dtype:
        """Of most tensors."""
        return MOVABLE[self._common]

    def of(self, tensor: str) -> torch.dtype | None:
        """Of a global tensor, whichever rank holds it; None where the side holds nothing that could be moved."""
        return MOVABLE.get(self._name_of(tensor))

    def _name_of(self, tensor: str) -> str:
        return self._others[tensor][0] if tensor in self._others else self._common

    def problems(self, layout: Layout, tensors: Tensors) -> Iterator[tuple[str, str]]:
        """(what is wrong, tensor) for each tensor of this rank."""
        for tensor, dtypes in _dtypes(layout, tensors).items():
            wanted, rank = self._others.get(tensor, (self._common, None))
            for dtype in dtypes:
                if dtype != wanted:
                    there = f"on rank {rank}" if rank is not None else "on most ranks"
                    yield f"{dtype} at the {self._name} here, {wanted} {there}", tensor
                elif self._odd and rank is None:
                    odd = ", ".join(f"{dtype} on rank {rank}" for rank, dtype in sorted(self._odd.items()))
                    yield f"{wanted} at the {self._name}, yet {odd}", tensor
                if dtype not in MOVABLE:
                    yield f"{dtype} at the {self._name}", tensor


def agree_on_dtypes(
    sides: Mapping[str, tuple[Layout, Tensors]], group: dist.ProcessGroup | None
) -> dict[str, SideDtypes]:
    """The dtypes of each side, on all ranks; all of them take part.

    This is also the collective that NCCL wants before the first point-to-point batch.

    Args:
        sides: name -> this rank's layout and tensors; the source first.

    Raises:
        ReshardError: on every rank, naming every tensor whose dtype differs between ranks of one side, is no
            floating-point one of at least 16 bits (a quantised engine), or cannot be converted without loss of
            range (float16 and bfloat16).
    """
    mine = {name: _report(layout, tensors) for name, (layout, tensors) in sides.items()}
    gathered = gather_json(mine, group) if dist.is_initialized() else [mine]
    merged = {name: SideDtypes(name, [found[name] for found in gathered]) for name in sides}
    with together(group) if dist.is_initialized() else nullcontext():
        problems: dict[str, list[str]] = {}
        for name, (layout, tensors) in sides.items():
            for problem, tensor in merged[name].problems(layout, tensors):
                problems.setdefault(problem, []).append(tensor)
        for tensor in sorted({tensor for layout, _ in sides.values() for tensor in layout.global_shapes}):
            found = {name: side.of(tensor) for name, side in merged.items()}
            if {torch.float16, torch.bfloat16} <= set(found.values()):
                what = ", ".join(f"{dtype} at the {name}" for name, dtype in found.items())
                problems.setdefault(what, []).append(tensor)
        if problems:
            lines = "; ".join(f"{problem}: {', '.join(listed(names))}" for problem, names in problems.items())
            raise ReshardError(
                f"nothing was moved, as dtypes do not fit: {lines}. Use one floating-point dtype per side "
                "(model.dtype), and no quantisation in rollout.vllm."
            )
    return merged


def wire_dtypes(sides: Mapping[str, SideDtypes]) -> Callable[[str], torch.dtype]:
    """Global tensor -> the dtype in which it travels: the smallest of the sides' (the last side's when they are
    as large), so that float32 masters reach a bfloat16 engine at half the bytes."""

    def wire(tensor: str) -> torch.dtype:
        dtypes = [dtype for side in reversed(list(sides.values())) if (dtype := side.of(tensor)) is not None]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    return wire


def converting(sides: Mapping[str, SideDtypes]) -> Callable[[str], bool]:
    """Global tensor -> whether the sides hold it in different dtypes."""
    return lambda tensor: len({side.of(tensor) for side in sides.values()}) > 1


def _dtypes(layout: Layout, tensors: Tensors) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for piece in layout.pieces:
        found.setdefault(piece.tensor, set()).add(str(tensors[piece.local].dtype))
    return {tensor: sorted(dtypes) for tensor, dtypes in found.items()}


def _report(layout: Layout, tensors: Tensors) -> dict[str, Any]:
    """This rank's dtypes, short for almost all models: the commonest, and the names of what has another."""
    by_dtype: dict[str, list[str]] = {}
    for tensor, dtypes in _dtypes(layout, tensors).items():
        for dtype in dtypes:
            by_dtype.setdefault(dtype, []).append(tensor)
    common = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]), default="")
    return {"common": common, "others": {dtype: names for dtype, names in by_dtype.items() if dtype != common}}
