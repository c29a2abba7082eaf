"""Export: the sharded weights of all ranks into a Hugging Face folder, streamed through one bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import on_first_rank, raise_together, together
from megaverl.distributed.failures import Failures
from megaverl.errors import CheckpointError, ModelError
from megaverl.platform import platform
from megaverl.sharding.boxes import Box, split, whole
from megaverl.sharding.layout import EMPTY, Layout, Piece
from megaverl.sharding.plan import Plan, Transfer, make_plan
from megaverl.sharding.proof import check_plan
from megaverl.sharding.weight import Weight
from megaverl.weights.safetensors_writer import FolderWriter, cannot_write
from megaverl.weights.tensors import agree_on_dtypes, check_tensors
from megaverl.weights.transports import BUCKET_BYTES, TransferJob, TransportOptions, copy_local
from megaverl.weights.transports.point_to_point import PointToPoint

SHARD_BYTES = 5 * 10**9
# What belongs to a model besides its weights: configuration, tokenizer, chat template, remote code.
COPIED_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")


class Factors(Protocol):
    """An adapter's: names and shapes of A [rank, columns] and B [rows, rank], whose product is added to a weight."""

    @property
    def a(self) -> str: ...
    @property
    def b(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


AddFactors = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]  # (rows of a weight, A, rows of B), in place


@dataclass(frozen=True)
class _Chunk:
    """A run of a global tensor's elements, contiguous in its file."""

    name: str
    tensor: str
    box: Box


def save_folder(
    folder: str | Path,
    *,
    source_folder: str | Path,
    weights: Sequence[Weight],
    layouts: Callable[[int], Layout],
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer_folder: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    overwrite: bool = False,
    adapters: Mapping[str, Factors] | None = None,
    add: AddFactors | None = None,
) -> None:
    """Write the model as Hugging Face does: safetensors (with an index if several), config.json, tokenizer.

    Collective over `group`, whose first rank writes; it holds no more than one bucket of others' weights at
    a time. Everything goes to `folder.tmp`, which takes the folder's name at the very end.

    Args:
        source_folder: the folder that the model came from: gives config.json and the other small files.
        weights: the model's global arrays; all of them are written, without padding, tied ones once.
        layouts: rank -> layout of `tensors` on that rank.
        tensors: this rank's parameters by local name.
        dtype: of the files; None: that of the parameters.
        tokenizer_folder: where the tokenizer's files are, when not in `source_folder`.
        shard_bytes: the largest file, unless one tensor is larger.
        overwrite: replace a folder that exists; else that is an error.
        adapters: by the weight that `add` merges each into, in its bucket; `layouts` and `tensors` have their factors.

    Raises:
        CheckpointError: the folder exists, or cannot be written.
        ModelError: `source_folder` has no config.json.
        ReshardError: parameters that do not fit their layout, or a weight that no rank holds.
    """
    folder, rank, world = Path(folder), dist.get_rank(group), dist.get_world_size(group)
    temporary = folder.with_name(folder.name + ".tmp")
    with together(group):
        check_tensors(layouts(rank), tensors, "the model", CheckpointError)
    held = {name: tensors[name] for name in layouts(rank).local_shapes}
    of_model = agree_on_dtypes({"model": (layouts(rank), held)}, group)["model"]
    dtype = of_files = dtype or of_model.common
    windows = _windows(weights, max(1, bucket_bytes // dtype.itemsize))
    adapters = adapters or {}
    factors = [_factors(number, window, adapters) for number, window in enumerate(windows)]
    shapes: dict[str, tuple[int, ...]] = {weight.name: weight.shape for weight in weights}
    for factors_of in adapters.values():
        shapes |= factors_of.shapes
    arriving = [[*window, *more] for window, more in zip(windows, factors, strict=True)]
    with together(group):
        plans = _plans_by_window(arriving, layouts, shapes, world, rank)
    on_first_rank(
        lambda: _prepare(folder, temporary, Path(source_folder), tokenizer_folder, of_files, overwrite), group
    )

    def wire(tensor: str) -> torch.dtype:
        return min(of_files, of_model.of(tensor) or of_files, key=lambda each: each.itemsize)

    def converts(tensor: str) -> bool:
        return of_model.of(tensor) != dtype

    failures, options = Failures(group, rank, None), TransportOptions(bucket_bytes=bucket_bytes)
    with torch.no_grad(), FolderWriter(temporary, weights, dtype, shard_bytes, writes=rank == 0) as writer:
        for number, (window, plan) in enumerate(zip(windows, plans, strict=True)):
            # every rank sends its parts of this window to the first, which alone has chunks to fill
            landed = {
                chunk.name: torch.empty(chunk.box.shape, dtype=dtype, device=platform.device)
                for chunk in (arriving[number] if rank == 0 else ())
            }
            copy_local(plan.copies, held, landed)
            transport = PointToPoint.take(TransferJob(plan, held, landed, wire, converts, group, options, failures))
            if transport is not None:
                transport.start(0)
                transport.finish()
            for chunk in window if rank == 0 else ():
                if (adapter := adapters.get(chunk.tensor)) is not None and add is not None:
                    rows, columns = chunk.box.slices
                    a, b = landed[f"{adapter.a}#{number}"][:, columns], landed[f"{adapter.b}#{number}"][rows]
                    add(landed[chunk.name], a, b)
            writer.write(landed[chunk.name] for chunk in window if rank == 0)
        error = writer.finish()
    raise_together(error, group)
    on_first_rank(lambda: commit(temporary, folder), group)


def _windows(weights: Sequence[Weight], max_numel: int) -> list[list[_Chunk]]:
    """The model's elements in the order of the files, in windows of at most `max_numel`."""
    windows: list[list[_Chunk]] = [[]]
    filled = 0
    for weight in weights:
        for i, box in enumerate(split(whole(weight.shape), max_numel)):
            if windows[-1] and filled + box.numel > max_numel:
                windows.append([])
                filled = 0
            windows[-1].append(_Chunk(f"{weight.name}#{i}", weight.name, box))
            filled += box.numel
    return windows


def _factors(number: int, window: Sequence[_Chunk], adapters: Mapping[str, Factors]) -> list[_Chunk]:
    """The factors of all adapters of a window's tensors, which come with it."""
    found = [adapters[tensor] for tensor in dict.fromkeys(chunk.tensor for chunk in window) if tensor in adapters]
    return [
        _Chunk(f"{name}#{number}", name, whole(shape)) for adapter in found for name, shape in adapter.shapes.items()
    ]


def _plans_by_window(
    windows: Sequence[Sequence[_Chunk]],
    layouts: Callable[[int], Layout],
    shapes: dict[str, tuple[int, ...]],
    world: int,
    rank: int,
) -> list[Plan]:
    """One plan to gather everything on rank 0, cut into one plan a window."""
    chunks = [chunk for window in windows for chunk in window]
    everything = Layout(
        tuple(Piece(chunk.tensor, chunk.box, chunk.name, whole(chunk.box.shape)) for chunk in chunks),
        {chunk.name: chunk.box.shape for chunk in chunks},
        shapes,
    )
    plan = make_plan(layouts, lambda other: everything if other == 0 else EMPTY, world, rank)
    check_plan(plan)
    window_of = {chunk.name: i for i, window in enumerate(windows) for chunk in window}

    def cut(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
        parts: list[list[Transfer]] = [[] for _ in windows]
        for transfer in transfers:
            parts[window_of[transfer.dest_local]].append(transfer)
        return parts

    copies = cut(plan.copies)
    sends = {peer: cut(transfers) for peer, transfers in plan.sends.items()}
    receives = {peer: cut(transfers) for peer, transfers in plan.receives.items()}
    return [
        replace(
            plan,
            copies=tuple(copies[i]),
            sends={peer: tuple(parts[i]) for peer, parts in sends.items()},
            receives={peer: tuple(parts[i]) for peer, parts in receives.items()},
        )
        for i in range(len(windows))
    ]


def _prepare(
    folder: Path,
    temporary: Path,
    source_folder: Path,
    tokenizer_folder: str | Path | None,
    dtype: torch.dtype,
    overwrite: bool,
) -> None:
    """An empty `folder.tmp` with all that is not weights."""
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already. Name another folder, or remove this one first.")
    config_file = source_folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{config_file}: not found, so the exported folder would have no configuration.")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for source in (source_folder, tokenizer_folder):
            for file in sorted(Path(source).iterdir()) if source is not None else ():
                is_model_file = file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")
                if file.is_file() and (is_model_file or file.name.startswith(("LICENSE", "NOTICE"))):
                    shutil.copyfile(file, temporary / file.name)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(temporary, error) from error


def commit(temporary: Path, folder: Path) -> None:
    """Give the finished folder its name; an older one of that name goes only then."""
    old = folder.with_name(folder.name + ".old")
    try:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    except OSError as error:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise cannot_write(folder, error) from error
    shutil.rmtree(old, ignore_errors=True)
