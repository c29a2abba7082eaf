"""Export the sharded weights of all ranks as a Hugging Face folder, streamed through one bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import on_first_rank, raise_together, together
from megaverl.distributed.failures import Failures
from megaverl.errors import CheckpointError, ModelError
from megaverl.outside import read_json_file
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece
from megaverl.sharding.plan import Plan, Transfer, make_plan
from megaverl.sharding.proof import check_plan
from megaverl.sharding.weight import Weight
from megaverl.weights.safetensors_writer import (
    FolderWriter,
    cannot_write,
    replace_folder,
)
from megaverl.weights.transports import (
    BUCKET_BYTES,
    TransferJob,
    TransportOptions,
    agree_on_dtypes,
    check_tensors,
    viewed,
)
from megaverl.weights.transports.local import copy_local
from megaverl.weights.transports.point_to_point import PointToPoint

SHARD_BYTES = 5 * 10**9
# Suffixes of a model's small files: configuration, tokenizer, chat template, remote
# code.
COPIED_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


class Factors(Protocol):
    """An adapter's factors: names and shapes of A [rank, columns] and B [rows, rank],
    whose product is added to a weight.
    """

    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


# (rows of a weight, A, rows of B), in place.
AddFactors = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class ShardedModel:
    """A model whose weights lie in shards on the ranks of a group.

    Attributes:
        weights: the model's global arrays.
        layouts: rank -> layout of `tensors` on that rank.
        tensors: this rank's parameters by local name.
        adapters: adapters by the weight that `add` merges each into; `layouts` and `tensors` include their factors.
        add: adds an adapter's product to a weight; None: without adapters.
    """

    weights: Sequence[Weight]
    layouts: Callable[[int], Layout]
    tensors: Mapping[str, torch.Tensor]
    adapters: Mapping[str, Factors] = field(default_factory=dict)
    add: AddFactors | None = None


class _Chunk(NamedTuple):
    """A range of a global tensor's elements that is contiguous in its file, or an adapter's factor."""

    name: str
    tensor: str
    box: Box


@dataclass(frozen=True)
class _Window:
    """The data that is gathered at one time: at most a bucket of weights, and the adapter factors that they need."""

    weights: list[_Chunk]
    factors: list[_Chunk]

    @property
    def chunks(self) -> list[_Chunk]:
        return [*self.weights, *self.factors]


def save_folder(
    model: ShardedModel,
    folder: str | Path,
    *,
    sources: Sequence[str | Path],
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    overwrite: bool = False,
) -> None:
    """Write the model in Hugging Face format: safetensors (with an index if several), config.json, tokenizer.

    Collective over `group`, whose first rank writes. That rank holds at most one bucket
    of other ranks' weights at a time. Files are written to `folder.tmp`, which is
    renamed to `folder` at the very end.

    Args:
        model: all of its weights are written, without padding, tied ones once. Adapters are merged in their bucket.
        sources: folders of the small files. The first one, from which the model came, provides config.json; a file that
            several have is taken from the last one.
        dtype: dtype of the files; None: that of the parameters.
        shard_bytes: size of the largest file, unless one tensor is larger.
        overwrite: replace an existing folder; otherwise one is an error.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
        ModelError: the first of `sources` has no config.json.
        ReshardError: parameters do not fit their layout, or no rank holds some weight.
    """
    folder, rank = Path(folder), dist.get_rank(group)
    # Until it is complete, the folder has another name, so that an interrupted export
    # is never taken for a model.
    temporary, layout = folder.with_name(folder.name + ".tmp"), model.layouts(rank)
    with together(group):
        check_tensors(layout, model.tensors, "the model", CheckpointError)
    held = viewed(layout, {name: model.tensors[name] for name in layout.local_shapes})
    # Ranks without a tensor do not know its dtype, so all ranks agree on it. Collective
    # over the group.
    of_model = agree_on_dtypes({"model": (layout, held)}, group)["model"]
    of_files = dtype or of_model.common
    windows = _windows(model, max(1, bucket_bytes // of_files.itemsize))
    with together(group):
        plans = _plans(windows, model, dist.get_world_size(group), rank)
    folders = [Path(source) for source in sources]
    on_first_rank(
        lambda: _prepare(folder, temporary, folders, of_files, overwrite), group
    )

    # The narrower of both dtypes travels. Conversion happens on the side that has the
    # wider one.
    def wire(tensor: str) -> torch.dtype:
        return min(
            of_files,
            of_model.dtype_of(tensor) or of_files,
            key=lambda candidate: candidate.itemsize,
        )

    def converts(tensor: str) -> bool:
        return of_model.dtype_of(tensor) != of_files

    failures, options = (
        Failures(group, rank, None),
        TransportOptions(bucket_bytes=bucket_bytes),
    )
    with (
        torch.no_grad(),
        FolderWriter(
            temporary, model.weights, of_files, shard_bytes, writes=rank == 0
        ) as writer,
    ):
        # One window at a time, on all ranks in the same order. The first rank holds
        # `landed` of one window only.
        for window, plan in zip(windows, plans, strict=True):
            # Every rank sends its parts of this window to the first rank, the only one
            # that has chunks to fill.
            landed = {
                chunk.name: torch.empty(
                    chunk.box.shape, dtype=of_files, device=platform.device
                )
                for chunk in (window.chunks if rank == 0 else ())
            }
            copy_local(plan.copies, held, landed)
            transport = PointToPoint.take(
                TransferJob(
                    plan, held, landed, wire, converts, group, options, failures
                )
            )
            # None: this rank neither sends nor receives anything of the window.
            if transport is not None:
                transport.start(0)
                transport.finish()
            if rank == 0:
                if model.add is not None:
                    _merge(landed, window, model.adapters, model.add)
                writer.write(landed[chunk.name] for chunk in window.weights)
        error = writer.finish()
    # A full disk is noticed by the first rank alone. All ranks raise here, and none
    # waits for the next collective.
    raise_together(error, group)
    on_first_rank(lambda: replace_folder(temporary, folder), group)


def _windows(model: ShardedModel, max_numel: int) -> list[_Window]:
    """Divide the model's elements, in file order, into windows of at most `max_numel` elements."""
    windows: list[list[_Chunk]] = [[]]
    filled = 0
    # Files store the elements in this order, so the first rank can write each window as
    # it arrives.
    for weight in model.weights:
        for i, box in enumerate(split(whole(weight.shape), max_numel)):
            if windows[-1] and filled + box.numel > max_numel:
                windows.append([])
                filled = 0
            windows[-1].append(_Chunk(f"{weight.name}#{i}", weight.name, box))
            filled += box.numel
    made = []
    for number, window in enumerate(windows):
        merged = [
            # A weight may be cut over two windows. Its factors are then gathered in
            # both.
            model.adapters[tensor]
            for tensor in dict.fromkeys(chunk.tensor for chunk in window)
            if tensor in model.adapters
        ]
        factors = [
            (name, shape)
            for adapter in merged
            for name, shape in adapter.shapes.items()
        ]
        # Local names of factors contain the window's number, because several windows
        # may gather the same factor.
        made.append(
            _Window(
                window,
                [
                    _Chunk(f"{name}#{number}", name, whole(shape))
                    for name, shape in factors
                ],
            )
        )
    return made


def _merge(
    landed: Mapping[str, torch.Tensor],
    window: _Window,
    adapters: Mapping[str, Factors],
    add: AddFactors,
) -> None:
    factors = {chunk.tensor: landed[chunk.name] for chunk in window.factors}
    for chunk in window.weights:
        if (adapter := adapters.get(chunk.tensor)) is not None:
            # A chunk of a weight is rows x columns of it: B's rows and A's columns give
            # the matching part of the product.
            rows, columns = chunk.box.slices
            add(
                landed[chunk.name],
                factors[adapter.a][:, columns],
                factors[adapter.b][rows],
            )


def _plans(
    windows: Sequence[_Window], model: ShardedModel, world: int, rank: int
) -> list[Plan]:
    """Plan to gather everything on rank 0, and split the plan into one plan per window."""
    shapes: dict[str, tuple[int, ...]] = {
        weight.name: weight.shape for weight in model.weights
    }
    for adapter in model.adapters.values():
        shapes |= adapter.shapes
    chunks = [chunk for window in windows for chunk in window.chunks]
    everything = Layout(
        tuple(
            Piece(chunk.tensor, chunk.box, chunk.name, whole(chunk.box.shape))
            for chunk in chunks
        ),
        {chunk.name: chunk.box.shape for chunk in chunks},
        shapes,
    )
    # Computed alike on every rank, without communication. Only the first rank needs
    # anything.
    plan = make_plan(
        model.layouts, lambda dest: everything if dest == 0 else EMPTY, world, rank
    )
    check_plan(plan)
    window_of = {
        chunk.name: i for i, window in enumerate(windows) for chunk in window.chunks
    }

    def cut(transfers: Sequence[Transfer]) -> list[tuple[Transfer, ...]]:
        parts: list[list[Transfer]] = [[] for _ in windows]
        for transfer in transfers:
            parts[window_of[transfer.dest_local]].append(transfer)
        return [tuple(part) for part in parts]

    copies = cut(plan.copies)
    sends = {peer: cut(transfers) for peer, transfers in plan.sends.items()}
    receives = {peer: cut(transfers) for peer, transfers in plan.receives.items()}
    return [
        replace(
            plan,
            copies=copies[i],
            sends={peer: parts[i] for peer, parts in sends.items()},
            receives={peer: parts[i] for peer, parts in receives.items()},
        )
        for i in range(len(windows))
    ]


def model_files(folder: Path) -> Iterator[Path]:
    """Yield a model folder's files beside the weights: the small files, and the licence."""
    # The index names the shards of the source, which may be others than those written
    # here.
    for file in sorted(folder.iterdir()):
        is_small = file.suffix in COPIED_SUFFIXES and not file.name.endswith(
            ".index.json"
        )
        if file.is_file() and (is_small or file.name.startswith(("LICENSE", "NOTICE"))):
            yield file


def _prepare(
    folder: Path,
    temporary: Path,
    sources: Sequence[Path],
    dtype: torch.dtype,
    overwrite: bool,
) -> None:
    """Create an empty `folder.tmp` with all files except weights. If several sources have a file, the last one wins."""
    if (
        not overwrite
        and folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise CheckpointError(
            f"{folder}: exists already. Name another folder, or remove this one first."
        )
    config_file = sources[0] / "config.json"
    if not config_file.is_file():
        raise ModelError(
            f"{config_file}: not found, so the exported folder would have no configuration."
        )
    try:
        config = read_json_file(config_file)
        # Configurations have the key under its old or its new name. The old one stays
        # where it is.
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(
            dtype
        ).removeprefix("torch.")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for file in (file for source in sources for file in model_files(source)):
            shutil.copyfile(file, temporary / file.name)
        (temporary / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
    except ValueError as error:
        raise ModelError(
            f"{config_file}: cannot be read ({error}), so the export would have no configuration."
        ) from error
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(temporary, error) from error
