"""The files of a sharded state, megatron-core's `torch_dist` format: planned by all ranks, written and read by each.

`Stager.stage` is the collective half of a save; `StagedShards.write` touches nothing but its own files, so a thread may
run it. A rank that fails to read makes all fail: torch's checkpointing gathers every rank's outcome at each stage.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from megaverl.checkpoint import OBJECTS_SUFFIX, TENSORS_SUFFIX, USE_ANOTHER, ChecksummedFile, write_bytes
from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.parts import HeldTensors, HostBuffers, frame_of, read_object, read_tensor, write_tensor
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.platform import platform
from megaverl.weights.torch_dist import COMMON_FILE
from megaverl.weights.torch_dist_index import FORMAT_FILE, INDEX_FILE, read_index

platform.adapt_megatron()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)

Files = dict[str, list[Any]]  # name -> [bytes, CRC-32]


@dataclass
class StagedShards:
    """This rank's part of a sharded state, and how it is to be written.

    Attributes:
        rank: of all that write; it names this rank's files.
        plan: of torch's checkpointing: which items go into them.
        data: the items' tensors and objects; those of `held` are not among them.
        held: tensors that training will change again.
        num_bytes: about how much this rank will write.
        metadata: on the first rank, torch's description of the whole; its storage is filled in by `index`.
        common: on the first rank, what is the same on all.
    """

    rank: int
    plan: SavePlan
    data: Mapping[MetadataIndex, Any]
    held: HeldTensors[MetadataIndex]
    num_bytes: int
    metadata: Metadata | None = None
    common: bytes | None = None

    def write(self, folder: Path) -> tuple[Files, list[Any]]:
        """Write this rank's files; returns their records, and where each item lies, as JSON.

        Raises:
            OSError: a full disk, a folder that is gone or cannot be written.
        """
        tensors = [item for item in self.plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in self.plan.items if item.type == WriteItemType.BYTE_IO]
        files: Files = {}
        places: list[list[Any]] = []
        try:
            for suffix, items in ((TENSORS_SUFFIX, tensors), (OBJECTS_SUFFIX, objects)):
                if items:
                    name = f"__{self.rank}{suffix}"
                    files[name] = self._write_items(folder / name, items, places)
        finally:
            self.held.close()
        if self.common is not None:
            files[COMMON_FILE] = write_bytes(folder / COMMON_FILE, self.common)
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
            files[FORMAT_FILE] = write_bytes(folder / FORMAT_FILE, config.encode())
        return files, places

    def _write_items(self, path: Path, items: Sequence[WriteItem], places: list[list[Any]]) -> list[Any]:
        """One item at a time: `held` takes an item for written when the next one is asked for."""
        with ChecksummedFile(path) as file:
            for item in items:
                start, value = file.num_bytes, self._value(item.index)
                if isinstance(value, torch.Tensor):
                    write_tensor(file, value)
                else:
                    file.write(value.getbuffer())
                places.append(_item_to_json(item.index, path.name, start, file.num_bytes - start))
            os.fsync(file.fileno())
        return file.record

    def _value(self, index: MetadataIndex) -> Any:
        return self.data[index] if index in self.data else self.held.take(index)

    def index(self, folder: Path, items: list[list[Any]]) -> Files:
        """On the first rank, when all have written: the index of where everything lies."""
        assert self.metadata is not None, "only the rank that planned for all can write the index"
        storage = dict(_item_from_json(found) for rank in items for found in rank)
        whole = replace(self.metadata, storage_data=storage, storage_meta=StorageMeta())
        return {INDEX_FILE: write_bytes(folder / INDEX_FILE, pickle.dumps(whole))}


@dataclass
class Stager:
    """Plans a save with all ranks. The memory of its copies is kept for the next save."""

    _buffers: HostBuffers = field(default_factory=HostBuffers)

    def stage(
        self,
        state: dict[str, Any],
        *,
        held: Collection[int] = (),
        copied: Collection[int] = (),
        committer: Committer,
    ) -> StagedShards:
        """Every rank takes part.

        Args:
            state: a `sharded_state`.
            held: what lies in the memory at these addresses may change again after `StagedShards.held.settle`.
            copied: what lies at these may change at once. All else must stay as it is until it is written.
            committer: whose rank plans for all. Ranks of another world than its have other roles.
        """
        # megatron-core's own check would send every rank what all hold. The plan for all is checked below, on one rank:
        # torch refuses one that leaves out an element of a tensor, or writes one twice.
        sharded, common = save_preprocess(state, False)
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        group = committer.group
        ranks = _DistWrapper(group, True, committer.planner)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(flat, is_loading=False), is_coordinator=ranks.is_coordinator)
        metadata: list[Metadata] = []
        commons: dict[str, Any] = {} if group is not None else common

        def for_me() -> tuple[SavePlan, dict[str, Any]]:
            return planner.create_local_plan(), common if group is not None and dist.get_rank() == 0 else {}

        def for_all(found: list[tuple[SavePlan, dict[str, Any]]]) -> list[SavePlan]:
            plans, whole = planner.create_global_plan([plan for plan, _ in found])
            metadata.append(whole)
            for _, of_world in found:
                commons.update(of_world)
            return plans

        plan = planner.finish_plan(ranks.reduce_scatter("plan", for_me, for_all))
        items = {item.index: planner.resolve_data(item) for item in plan.items}
        num_bytes = sum(v.nbytes if isinstance(v, torch.Tensor) else len(v.getbuffer()) for v in items.values())
        platform.synchronize()  # another thread will read them
        data: dict[MetadataIndex, Any] = {}
        lasting: dict[MetadataIndex, torch.Tensor] = {}
        changing: dict[MetadataIndex, torch.Tensor] = {}
        for index, value in items.items():
            place = _place(value)
            (lasting if place in held else changing if place in copied else data)[index] = value
        return StagedShards(
            committer.rank,
            plan,
            data,
            HeldTensors(lasting, changing, self._buffers),
            num_bytes,
            metadata[0] if metadata else None,
            _saved(commons) if metadata else None,
        )


def _place(value: Any) -> int | None:
    """Where a tensor's memory begins; None for an object that was serialised for this save."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _saved(common: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(common, stream)
    return stream.getvalue()


def _item_to_json(index: MetadataIndex, file: str, start: int, length: int) -> list[Any]:
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, file, start, length]


def _item_from_json(found: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, number, path, start, length = found
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return index, _StorageInfo(path, start, length)


class CheckedReader(FileSystemReader):
    """torch's reader of checkpoints, but every byte is read once, into its place where it can be, and checked.

    Args:
        folder: the checkpoint.
        is_alone: no other rank reads the same tensors, so the system need not keep them in its memory.
    """

    def __init__(self, folder: Path, *, is_alone: bool) -> None:
        super().__init__(folder)
        self._keep_cached = not is_alone
        self._described: Mapping[str, Any] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **options)
        self._described = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Front to back through each file.

        Raises:
            DamagedCheckpoint: names the file and the tensor whose bytes are not those that were written.
        """
        items = sorted(plan.items, key=lambda item: (self._place(item).relative_path, self._place(item).offset))
        for name, in_file in groupby(items, lambda item: self._place(item).relative_path):
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                for _, of_item in groupby(in_file, lambda item: self._place(item).offset):
                    wanted = list(of_item)
                    try:
                        self._read(file, wanted, planner)
                    except DamagedCheckpoint as error:
                        raise DamagedCheckpoint(f"{name}: {wanted[0].storage_index.fqn}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> _StorageInfo:
        place: _StorageInfo = self.storage_data[item.storage_index]
        return place

    def _read(self, file: io.FileIO, wanted: list[ReadItem], planner: LoadPlanner) -> None:
        """Read one stored item, of which the run may want several parts."""
        first, place = wanted[0], self._place(wanted[0])
        if first.type == LoadItemType.BYTE_IO:
            data = read_object(file, place.offset, place.length)
            for item in wanted:
                planner.load_bytes(item, io.BytesIO(data))
            return
        shape, dtype = self._shape_and_dtype(first.storage_index)
        frame = frame_of(shape, dtype)
        if frame is None or frame.length != place.length:  # torch has written it
            data = read_object(file, place.offset, place.length)
            stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        elif len(wanted) == 1 and _takes_all(target := planner.resolve_tensor(first).detach(), first, shape, dtype):
            read_tensor(file, place.offset, frame, target, keep_cached=self._keep_cached)
            planner.commit_tensor(first, target)
            return
        else:
            stored = torch.empty(shape, dtype=dtype)
            read_tensor(file, place.offset, frame, stored, keep_cached=self._keep_cached)
        for item in wanted:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)

    def _shape_and_dtype(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
        entry = self._described[index.fqn]
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
        return chunk.sizes, entry.properties.dtype


def _takes_all(target: torch.Tensor, item: ReadItem, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether what is stored can be read straight into `target`."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and (target.shape, target.dtype) == (shape, dtype)
        and target.is_contiguous()
        and not any(item.storage_offsets)
    )


class _CheckedLoading(TorchDistLoadShardedStrategy):
    """megatron-core's way to load, with a `CheckedReader` (0.16, `TorchDistLoadShardedStrategy.load`)."""

    def __init__(self, *, is_alone: bool) -> None:
        super().__init__()
        self._is_alone = is_alone

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *_: Any) -> dict[str, Any]:
        """0.19 also says how checkpoints are written in the background, which reading them has no part in."""
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        flat, places, names = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        wanted = mcore_to_pyt_state_dict(flat, True)
        torch_checkpoint.load(
            wanted,
            storage_reader=CheckedReader(Path(checkpoint_dir), is_alone=self._is_alone),
            planner=MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
                allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
            ),
        )
        found = {name: _unwrap_pyt_sharded_tensor(value) for name, value in wanted.items()}
        loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(found, places, names)
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def read_shards(state: dict[str, Any], folder: Path, *, is_alone: bool = False) -> dict[str, Any]:
    """Fill a `sharded_state(loading=True)` from a folder; every rank takes part and reads what it needs.

    Args:
        is_alone: no two ranks want the same.

    Raises:
        DamagedCheckpoint: on every rank, if one has read other bytes than were written; names file and tensor.
        CheckpointError: on every rank, if one could not read; names the ranks, and the tensor that does not fit.
    """
    with own_errors(
        f"{folder}: the checkpoint cannot be loaded",
        "It must be of the same model and the same kind of optimizer; the grid may differ.",
    ):
        strategy = _CheckedLoading(is_alone=is_alone)
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), strategy)
    return loaded


def check_pickles(folder: Path) -> None:
    """Refuse a folder whose pickled parts name anything but tensors, their layout and plain values.

    torch reads the index and stored objects with an unrestricted unpickler, so they are vetted first; what is
    common to the ranks is tried as well, for one message instead of one from each rank.

    Raises:
        CheckpointError: the index or an object is damaged, or names something that loading must not run.
    """
    fix = "Load only checkpoints that megaverl wrote; take another one if this one was damaged."
    index = read_index(folder, fix)
    try:
        torch.load(folder / COMMON_FILE, weights_only=True)
        for place in index.objects.values():
            with place.file.open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}. {fix}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{folder}: refused: {_reason(error)}. {fix}") from error


@contextmanager
def own_errors(what: str, fix: str) -> Iterator[None]:
    """One CheckpointError, short, instead of the libraries' exceptions with a traceback for every rank."""
    try:
        yield
    except CheckpointException as error:  # torch's, a BaseException: the same on every rank
        wrong = {str(cause) for cause, _ in error.failures.values() if isinstance(cause, DamagedCheckpoint)}
        if wrong:
            raise DamagedCheckpoint(f"{what}: {'; '.join(sorted(wrong))}. {USE_ANOTHER}") from error
        failures = "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{what}: {failures}. {fix}") from error
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{what}: {_reason(error)}. {fix}") from error


def _reason(error: BaseException) -> str:
    """The first line, for some of them list every tensor of the model."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:500]}"
