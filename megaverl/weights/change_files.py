"""Files with the weights that changed since the last version, for servers that read a shared folder.

Each of the actor's ranks compares its share of the weights with a copy of the last
version, and writes one file. Nothing is gathered on one rank:

    VERSION/changes.json             number of files, dtype, and the shapes of all weights
    VERSION/changes-0.safetensors    rank 0's share, a tensor for each box of a weight
    VERSION/changes-1.safetensors    rank 1's share

The tensors are encoded as in messages between ranks (`transports/changes.py`).
A worker of a server reads the boxes that it holds a part of, and writes the new values
into place. Changes are absolute values, so applying a version twice does no harm.
Versions must be applied in order, onto the version that the first one builds on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megaverl.errors import ReshardError
from megaverl.outside import read_json_file
from megaverl.sharding.box_fingerprints import UINT64, BoxFingerprints
from megaverl.sharding.boxes import Box, carry, intersect, split
from megaverl.sharding.layout import Layout
from megaverl.weights.fingerprint import box_fingerprint
from megaverl.weights.server_link import dealt
from megaverl.weights.transports import BUCKET_BYTES, Tensors, view, viewed
from megaverl.weights.transports.changes import (
    Encoding,
    decode,
    differ,
    encode,
    indices_at,
)
from megaverl.weights.transports.deltas import write_elements
from megaverl.weights.transports.sent_weights import within

DESCRIPTION = "changes.json"
ENTRIES = "entries"  # key of a file's metadata

Shapes = Mapping[str, tuple[int, ...]]


def file_name(rank: int) -> str:
    """Return the name of the file of one of the actor's ranks."""
    return f"changes-{rank}.safetensors"


class ShareEntry(NamedTuple):
    """Box of a weight in this rank's share, and where it lies in the rank's tensors."""

    tensor: str
    box: Box
    local: str
    local_box: Box


class Written(NamedTuple):
    """Result of writing one version's changes on one rank, or on all.

    Attributes:
        nbytes: bytes of the changes, without headers.
        whole: bytes of the same weights if they were written whole.
        compared, changed: elements.
    """

    nbytes: int = 0
    whole: int = 0
    compared: int = 0
    changed: int = 0

    def plus(self, other: Sequence[int]) -> Written:
        """Return the sum of two results."""
        return Written(*(a + b for a, b in zip(self, other, strict=True)))


class ChangeWriter:
    """Writes the changes of one actor rank's share of the weights.

    Ranks that hold the same weights share them out (`dealt`). The copies of the last
    version lie in host memory: the model's bytes divided by the actor's ranks, a little
    more for small tensors.

    Args:
        layout_of: rank of the actor -> layout of its tensors.
        tensors: this rank's tensors, which are read in every version.
        rank, num_ranks: of the actor.
        dtype: of the files, to which values are converted before they are compared.

    Example:
        writer = ChangeWriter(model.layout_of, model.parameters, rank, num_ranks, dtype)
        writer.keep()                           # after a whole version
        written = writer.write(folder)          # the next version's changes
    """

    def __init__(
        self,
        layout_of: Callable[[int], Layout],
        tensors: Tensors,
        rank: int,
        num_ranks: int,
        dtype: torch.dtype,
    ) -> None:
        layout = dealt(layout_of, num_ranks)(rank)
        self._layout, self._rank, self._dtype = layout, rank, dtype
        self._num_ranks = num_ranks
        self._tensors = viewed(
            layout, {name: tensors[name] for name in layout.local_shapes}
        )
        # Large weights are compared in parts, so that the extra memory is a bucket.
        self._entries = [
            ShareEntry(
                piece.tensor, box, piece.local, carry(box, piece.box, piece.local_box)
            )
            for piece in layout.pieces
            for box in split(piece.box, max(1, BUCKET_BYTES // dtype.itemsize))
        ]
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        """Copy this rank's share of the weights: the next version's changes build on it."""
        with torch.no_grad():
            if not self._copies:
                self._copies = [
                    torch.empty(entry.box.numel, dtype=self._dtype)
                    for entry in self._entries
                ]
            for entry, copy in zip(self._entries, self._copies, strict=True):
                copy.copy_(self._values(entry))

    def write(self, folder: Path, shapes: Shapes) -> Written:
        """Write this rank's changes since the last `keep` or `write`; the first rank also describes the version.

        If this raises, the copies are of no version: call `keep` after a whole version.

        Args:
            shapes: of all weights, by the names of a Hugging Face folder.

        Raises:
            ReshardError: the folder cannot be written.
        """
        assert self._copies, "changes build on a version that was kept"
        payloads: dict[str, torch.Tensor] = {}
        entries: list[tuple[Any, ...]] = []
        total = Written()
        with torch.no_grad():
            for entry, copy in zip(self._entries, self._copies, strict=True):
                values = self._values(entry)
                changes = encode(values, differ(values, copy))
                nbytes = changes.nbytes if changes.num_changed else 0
                total = total.plus(
                    (nbytes, copy.nbytes, copy.numel(), changes.num_changed)
                )
                if not changes.num_changed:
                    continue
                payload = changes.payload
                if payload is None:
                    # `values` may share the storage of a weight, which changes later.
                    payload = values.clone().view(torch.uint8)
                payloads[str(len(entries))] = payload
                entries.append(
                    (
                        entry.tensor,
                        *entry.box,
                        int(changes.encoding),
                        changes.num_changed,
                    )
                )
                copy.copy_(values)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(
                payloads,
                folder / file_name(self._rank),
                metadata={ENTRIES: json.dumps(entries)},
            )
            if self._rank == 0:
                described = {
                    "files": self._num_ranks,
                    "dtype": str(self._dtype).removeprefix("torch."),
                    "shapes": shapes,
                }
                text = json.dumps(described)
                (folder / DESCRIPTION).write_text(text, encoding="utf-8")
        except (SafetensorError, OSError) as error:
            raise ReshardError(
                f"{folder}: cannot be written ({error}). Make room, or name another rollout.servers.folder."
            ) from error
        return total

    def fingerprints(self) -> BoxFingerprints:
        """Return the fingerprints of this rank's share of the weights, in the dtype of the files."""
        return box_fingerprints(self._layout, self._tensors, self._dtype)

    def _values(self, entry: ShareEntry) -> torch.Tensor:
        """Return a box's values in the dtype of the files, in host memory, as one row."""
        box = view(self._tensors[entry.local], entry.local_box)
        return box.to("cpu", self._dtype).flatten()


@dataclass(frozen=True)
class ChangesDescription:
    """Contents of a version's `changes.json`."""

    num_files: int
    dtype: torch.dtype
    shapes: dict[str, tuple[int, ...]]

    @staticmethod
    def read(folder: Path) -> ChangesDescription:
        """Read the description of a version's changes.

        Raises:
            ReshardError: it is missing or damaged.
        """
        try:
            described = read_json_file(folder / DESCRIPTION)
            shapes = {
                name: tuple(map(int, shape))
                for name, shape in described["shapes"].items()
            }
            dtype = getattr(torch, described["dtype"])
            return ChangesDescription(int(described["files"]), dtype, shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReshardError(
                f"{folder / DESCRIPTION}: cannot be read ({error!r}). Servers must see the actor's folder "
                "(rollout.servers.folder)."
            ) from error


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a Hugging Face folder's safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def apply_changes(folder: Path, layout: Layout, tensors: Tensors) -> int:
    """Write a version's changes into the tensors of a layout; return the bytes that were read.

    Every changed element is written wherever the layout holds it, converted to the
    tensor's dtype.

    Args:
        folder: the version's.
        layout: where this process holds boxes of the weights.
        tensors: its tensors, by the names of the layout.

    Raises:
        ReshardError: a file is missing or damaged. Applying the version again mends the tensors.
    """
    description = ChangesDescription.read(folder)
    held = viewed(layout, tensors)
    nbytes = 0
    with torch.no_grad():
        for rank in range(description.num_files):
            path = folder / file_name(rank)
            try:
                with safe_open(path, framework="pt") as file:
                    entries = json.loads((file.metadata() or {})[ENTRIES])
                    for place, entry in enumerate(entries):
                        nbytes += _apply_entry(
                            entry,
                            partial(file.get_tensor, str(place)),
                            description.dtype,
                            layout,
                            held,
                        )
            except (SafetensorError, OSError, ValueError, KeyError) as error:
                raise ReshardError(
                    f"{path}: cannot be read as rank {rank} of the actor wrote it ({error!r})."
                ) from error
    return nbytes


def _apply_entry(
    entry: Sequence[Any],
    read: Callable[[], torch.Tensor],
    dtype: torch.dtype,
    layout: Layout,
    held: Tensors,
) -> int:
    """Write the changes of one box; return the bytes that were read, 0 if the layout holds no part of it."""
    tensor, start, stop, encoding, count = entry
    box = Box(tuple(start), tuple(stop))
    parts = [
        (piece, common)
        for piece in layout.by_tensor.get(tensor, ())
        if (common := intersect(piece.box, box)) is not None
    ]
    if not parts:
        return 0
    payload = read()
    nbytes = payload.nbytes
    device = held[parts[0][0].local].device
    payload = payload.to(device)
    if encoding == Encoding.WHOLE:
        positions, values = None, payload.view(dtype)
    else:
        positions, values = decode(payload, Encoding(encoding), count, box.numel, dtype)
    for piece, common in parts:
        target = view(held[piece.local], carry(common, piece.box, piece.local_box))
        if positions is None:
            part = values.view(box.shape)[within(common, box).slices]
            target.copy_(part.reshape(target.shape))
            continue
        places, inside = _places_in(positions, box, common)
        write_elements(target, places, values if inside is None else values[inside])
    return nbytes


def _places_in(
    positions: torch.Tensor, box: Box, common: Box
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the positions in a part of a box, and which of the positions lie there (bool; None: all)."""
    if common == box:
        return positions, None
    coordinates = indices_at(positions, box.shape)
    part = within(common, box)
    inside = torch.ones_like(positions, dtype=torch.bool)
    for at, low, high in zip(coordinates, *part, strict=True):
        inside &= (at >= low) & (at < high)
    places = torch.zeros_like(positions[inside])
    for at, low, size in zip(coordinates, part.start, common.shape, strict=True):
        places = places * size + at[inside] - low
    return places, inside


def box_fingerprints(
    layout: Layout, tensors: Tensors, dtype: torch.dtype
) -> BoxFingerprints:
    """Return the fingerprint of every box of a layout, with elements rounded to `dtype`.

    Weights that a tensor holds in fewer bits than `dtype` are left out: their bits are
    others.
    """
    held = viewed(layout, tensors)
    pieces = [
        piece
        for piece in layout.pieces
        if held[piece.local].element_size() >= dtype.itemsize
    ]
    if not pieces:
        return {}
    # Read back together, because every read blocks the host.
    values = torch.stack(
        [
            box_fingerprint(view(held[piece.local], piece.local_box), piece.box, dtype)
            for piece in pieces
        ]
    ).tolist()
    fingerprints: BoxFingerprints = {}
    for piece, value in zip(pieces, values, strict=True):
        of_weight = fingerprints.setdefault(piece.tensor, [])
        of_weight.append((*piece.box, value % UINT64))
    return fingerprints
