"""Dtypes of a reshard's two sides: all ranks agree on them, and on the dtype in which each tensor travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import reduce_json, together
from megaverl.errors import ReshardError
from megaverl.sharding.layout import Layout
from megaverl.sharding.weight import listed
from megaverl.weights.transports.tensor_views import Tensors

MOVABLE = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class SideDtypes:
    """The dtypes of one side's tensors over all ranks: one for most tensors, and exceptions by name.

    Args:
        name: name of the side, for messages.
        common: dtype of most tensors.
        others: tensor -> its dtype, and a rank that holds it in this dtype.
        odd: (rank, dtype) of ranks most of whose tensors have another dtype.
    """

    def __init__(
        self,
        name: str,
        common: str,
        others: Mapping[str, tuple[str, int]],
        odd: Sequence[tuple[int, str]],
    ) -> None:
        self._name, self._common, self._others, self._odd = name, common, others, odd

    @staticmethod
    def summary(reports: Sequence[Any]) -> list[Any]:
        """Return the constructor's arguments after the name, as JSON, from every rank's report in rank order."""
        counts = Counter(report["common"] for report in reports if report["common"])
        common = counts.most_common(1)[0][0] if counts else ""
        others: dict[str, tuple[str, int]] = {}
        for rank, report in enumerate(reports):
            for dtype, tensors in report["others"].items():
                for tensor in tensors:
                    others.setdefault(tensor, (dtype, rank))
        odd = [
            (rank, report["common"])
            for rank, report in enumerate(reports)
            if report["common"] not in ("", common)
        ]
        return [common, others, odd]

    @property
    def common(self) -> torch.dtype:
        """Dtype of most tensors."""
        return MOVABLE[self._common]

    def dtype_of(self, tensor: str) -> torch.dtype | None:
        """Return the dtype of a global tensor on any rank; None if the side holds nothing that could be moved."""
        return MOVABLE.get(
            self._others[tensor][0] if tensor in self._others else self._common
        )

    def problems(self, layout: Layout, tensors: Tensors) -> Iterator[tuple[str, str]]:
        """Yield (problem, tensor) for each tensor of this rank."""
        for tensor, dtypes in _dtypes(layout, tensors).items():
            wanted, rank = self._others.get(tensor, (self._common, None))
            for dtype in dtypes:
                if dtype != wanted:
                    place = f"on rank {rank}" if rank is not None else "on most ranks"
                    yield f"{dtype} at the {self._name} here, {wanted} {place}", tensor
                elif self._odd and rank is None:
                    odd = ", ".join(
                        f"{dtype} on rank {rank}" for rank, dtype in self._odd
                    )
                    yield f"{wanted} at the {self._name}, yet {odd}", tensor
                if dtype not in MOVABLE:
                    yield f"{dtype} at the {self._name}", tensor


def agree_on_dtypes(
    sides: Mapping[str, tuple[Layout, Tensors]], group: dist.ProcessGroup | None
) -> dict[str, SideDtypes]:
    """Return the dtypes of each side over all ranks. Collective over the group.

    Args:
        sides: name -> this rank's layout and tensors; the source first.

    Raises:
        ReshardError: on every rank; lists every tensor whose dtype differs between ranks of one side, is not a
            floating-point type of at least 16 bits, or cannot be converted without loss of range (float16 and
            bfloat16).
    """
    own_reports = {
        name: _report(layout, tensors) for name, (layout, tensors) in sides.items()
    }

    def summaries(every: list[Any]) -> dict[str, Any]:
        return {
            name: SideDtypes.summary([report[name] for report in every])
            for name in sides
        }

    found_on_all = (
        reduce_json(own_reports, summaries, group)
        if dist.is_initialized()
        else summaries([own_reports])
    )
    merged = {
        name: SideDtypes(name, *dtypes_of_sides)
        for name, dtypes_of_sides in found_on_all.items()
    }
    with together(group) if dist.is_initialized() else nullcontext():
        problems: dict[str, list[str]] = {}
        for name, (layout, tensors) in sides.items():
            for problem, tensor in merged[name].problems(layout, tensors):
                problems.setdefault(problem, []).append(tensor)
        for tensor in sorted(
            {tensor for layout, _ in sides.values() for tensor in layout.global_shapes}
        ):
            dtypes_of_sides = {
                name: side.dtype_of(tensor) for name, side in merged.items()
            }
            if {torch.float16, torch.bfloat16} <= set(dtypes_of_sides.values()):
                pair = ", ".join(
                    f"{dtype} at the {name}" for name, dtype in dtypes_of_sides.items()
                )
                problems.setdefault(pair, []).append(tensor)
        if problems:
            lines = "; ".join(
                f"{problem}: {', '.join(listed(names))}"
                for problem, names in problems.items()
            )
            raise ReshardError(
                f"nothing was moved, as dtypes do not fit: {lines}. Use one floating-point dtype per side "
                "(model.dtype), and for a quantised engine one of the rollout.vllm.quantization that are known."
            )
    return merged


def wire_dtypes(sides: Mapping[str, SideDtypes]) -> Callable[[str], torch.dtype]:
    """Return a function from a global tensor to the dtype in which it is sent.

    This is the smallest dtype of the sides (in a tie, the last side's). So float32
    masters reach a bfloat16 engine in half the bytes.
    """

    def wire(tensor: str) -> torch.dtype:
        dtypes = [
            dtype
            for side in reversed(list(sides.values()))
            if (dtype := side.dtype_of(tensor)) is not None
        ]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    return wire


def converting(sides: Mapping[str, SideDtypes]) -> Callable[[str], bool]:
    """Return a function from a global tensor to whether the sides hold it in different dtypes."""
    return lambda tensor: len({side.dtype_of(tensor) for side in sides.values()}) > 1


def _dtypes(layout: Layout, tensors: Tensors) -> dict[str, list[str]]:
    dtypes_by_tensor: dict[str, set[str]] = {}
    for piece in layout.pieces:
        dtypes_by_tensor.setdefault(piece.tensor, set()).add(
            str(tensors[layout.stored_in(piece.local)].dtype)
        )
    return {tensor: sorted(dtypes) for tensor, dtypes in dtypes_by_tensor.items()}


def _report(layout: Layout, tensors: Tensors) -> dict[str, Any]:
    """Return this rank's dtypes in compact form: the most common one, and the names of tensors with another."""
    by_dtype: dict[str, list[str]] = {}
    for tensor, dtypes in _dtypes(layout, tensors).items():
        for dtype in dtypes:
            by_dtype.setdefault(dtype, []).append(tensor)
    common = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]), default="")
    return {
        "common": common,
        "others": {
            dtype: names for dtype, names in by_dtype.items() if dtype != common
        },
    }
