"""The files of a sharded state on their way to the disk: first planned by all ranks, then written by each alone.

megatron-core's `torch_dist` format, in two halves: `Stager.stage` is the collective one; `StagedShards.write` touches
nothing but its own files, so a thread may run it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.held import HeldTensors, copy_to_host
from megaverl.checkpoint.manifest import crc32_of
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.dist_checkpointing.core import CheckpointingConfig  # noqa: E402
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
CONFIG_FILE = "metadata.json"

Files = dict[str, list[Any]]  # name -> [bytes, CRC-32]


class ChecksummedFile(io.FileIO):
    """A new file that counts and sums up what is written to it, front to back."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self.num_bytes, self.crc32 = 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):  # the system may take less than it is given
            done += super().write(view[done:]) or 0
        self.num_bytes += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        return len(view)

    @property
    def record(self) -> list[Any]:
        """[bytes, CRC-32] of what was written."""
        return [self.num_bytes, f"{self.crc32:08x}"]


def write_bytes(path: Path, data: bytes) -> list[Any]:
    """Write a file that is on the disk when this returns; its [bytes, CRC-32]."""
    with ChecksummedFile(path) as file:
        file.write(data)
        os.fsync(file.fileno())
    return file.record


def synced_record(path: Path) -> list[Any]:
    """Put a file that something else wrote on the disk; its [bytes, CRC-32]."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return [path.stat().st_size, crc32_of(path)]


class _RecordingFiles(FileSystem):
    """torch's way to the disk, which here notes what became of every file."""

    def __init__(self) -> None:
        self.files: Files = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with ChecksummedFile(path) as stream:
            yield stream
        self.files[Path(path).name] = stream.record


@dataclass
class StagedShards:
    """This rank's part of a sharded state, and how it is to be written.

    Attributes:
        plan: of torch's checkpointing: which items go into this rank's file.
        data: the items' tensors and objects; those of `held` are not among them.
        held: tensors that training will change again, but not yet.
        num_bytes: about how much this rank will write.
        metadata: on the first rank, torch's description of the whole; its storage is filled in by `index`.
        common: on the first rank, what is the same on all.
    """

    plan: SavePlan
    data: Mapping[MetadataIndex, Any]
    held: HeldTensors[MetadataIndex]
    num_bytes: int
    metadata: Metadata | None = None
    common: bytes | None = None

    def resolve_data(self, item: WriteItem) -> Any:
        """The part of torch's SavePlanner that a writer calls."""
        return self.data[item.index] if item.index in self.data else self.held.take(item.index)

    def write(self, folder: Path) -> tuple[Files, list[Any]]:
        """Write this rank's files; returns their records, and where each item lies, as JSON.

        Raises:
            OSError: a full disk, a folder that is gone or cannot be written.
        """
        # one item at a time: `held` takes an item for written when the next one is asked for
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True, per_thread_copy_ahead=0)
        writer.fs = disk = _RecordingFiles()
        try:
            results = writer.write_data(self.plan, cast(Any, self)).value()
        finally:
            self.held.close()
        if self.common is not None:
            disk.files[COMMON_FILE] = write_bytes(folder / COMMON_FILE, self.common)
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
            disk.files[CONFIG_FILE] = write_bytes(folder / CONFIG_FILE, config.encode())
        return disk.files, [_result_to_json(result) for result in results]

    def index(self, folder: Path, items: list[list[Any]]) -> Files:
        """On the first rank, when all have written: the index of where everything lies."""
        assert self.metadata is not None, "only the rank that planned for all can write the index"
        writer = FileSystemWriter(folder)
        storage = {result.index: result.storage_data for rank in items for result in map(_result_from_json, rank)}
        whole = replace(self.metadata, storage_data=storage, storage_meta=writer.storage_meta())
        return {METADATA_FILE: write_bytes(folder / METADATA_FILE, pickle.dumps(whole))}


@dataclass
class Stager:
    """Plans a save with all ranks. The memory of its copies is kept for the next save."""

    _buffers: dict[MetadataIndex, torch.Tensor] = field(default_factory=dict)
    _validated: bool = False

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
        # What is held by whom does not change between the saves of a run: checked at the first one only.
        sharded, common = save_preprocess(state, not self._validated)
        self._validated = True
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
            return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_")) for rank, plan in enumerate(plans)]

        plan = planner.finish_plan(ranks.reduce_scatter("plan", for_me, for_all))
        items = {item.index: planner.resolve_data(item) for item in plan.items}
        num_bytes = sum(v.nbytes if isinstance(v, torch.Tensor) else len(v.getbuffer()) for v in items.values())
        platform.synchronize()  # another thread will read them
        data, lasting = {}, {}
        for index, value in items.items():
            place = _place(value)
            if place in held:
                lasting[index] = value
            else:
                data[index] = copy_to_host(value, self._buffers, index) if place in copied else value
        return StagedShards(
            plan,
            data,
            HeldTensors(lasting, self._buffers),
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


def _result_to_json(result: WriteResult) -> list[Any]:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, place.relative_path, place.offset, place.length]


def _result_from_json(found: list[Any]) -> WriteResult:
    name, offset, number, path, start, length = found
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return WriteResult(index, length, _StorageInfo(path, start, length))
