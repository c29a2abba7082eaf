"""Files of a sharded state in megatron-core's `torch_dist` format: planned collectively, written and read by each rank.

`Stager.stage` is the collective half of a save. `StagedShards.write` touches only its
own files, so it can run in a thread. If one rank fails to read, all fail: torch's
checkpointing gathers every rank's outcome at each stage.
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

from megaverl.checkpoint import (
    OBJECTS_SUFFIX,
    TENSORS_SUFFIX,
    USE_ANOTHER,
    ChecksummedFile,
    write_bytes,
)
from megaverl.checkpoint.background import HostBuffers, PendingTensors
from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.tensor_records import (
    frame_of,
    read_object,
    read_tensor,
    write_tensor,
)
from megaverl.errors import CheckpointError, DamagedCheckpoint
from megaverl.platform import platform
from megaverl.weights.torch_dist import COMMON_FILE
from megaverl.weights.torch_dist_index import FORMAT_FILE, INDEX_FILE, read_index

platform.adapt_megatron()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import (  # noqa: E402
    CheckpointingConfig,
    CheckpointingException,
)  # noqa: E402
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
    """This rank's part of a sharded state, ready to be written.

    Attributes:
        rank: index among all ranks that write; part of the file names.
        plan: torch's save plan: the items of this rank's files.
        data: the items' tensors and objects, without those in `held`.
        held: tensors that training will change again.
        num_bytes: approximate number of bytes that this rank writes.
        metadata: on the first rank, torch's description of the whole; `index` fills in its storage.
        common: on the first rank, the state that is equal on all ranks.
    """

    rank: int
    plan: SavePlan
    data: Mapping[MetadataIndex, Any]
    held: PendingTensors[MetadataIndex]
    num_bytes: int
    metadata: Metadata | None = None
    common: bytes | None = None

    def write(self, folder: Path) -> tuple[Files, list[Any]]:
        """Write this rank's files; return their records, and the place of each item as JSON.

        Raises:
            OSError: the disk is full, or the folder is gone or not writable.
        """
        # Tensors and objects go to separate files: tensors are read in place.
        tensors = [
            item for item in self.plan.items if item.type != WriteItemType.BYTE_IO
        ]
        objects = [
            item for item in self.plan.items if item.type == WriteItemType.BYTE_IO
        ]
        files: Files = {}
        places: list[list[Any]] = []
        try:
            for suffix, items in ((TENSORS_SUFFIX, tensors), (OBJECTS_SUFFIX, objects)):
                if items:
                    name = f"__{self.rank}{suffix}"
                    files[name] = self._write_items(folder / name, items, places)
        finally:
            # Even after an error: training must not wait for tensors that nobody writes
            # any more.
            self.held.close()
        if self.common is not None:
            files[COMMON_FILE] = write_bytes(folder / COMMON_FILE, self.common)
            config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1)))
            files[FORMAT_FILE] = write_bytes(folder / FORMAT_FILE, config.encode())
        return files, places

    def _write_items(
        self, path: Path, items: Sequence[WriteItem], places: list[list[Any]]
    ) -> list[Any]:
        """Write items one by one: `held` regards an item as written when the next one is taken."""
        with ChecksummedFile(path) as file:
            for item in items:
                start, value = file.num_bytes, self._value(item.index)
                if isinstance(value, torch.Tensor):
                    write_tensor(file, value)
                else:
                    file.write(value.getbuffer())
                places.append(
                    _item_to_json(item.index, path.name, start, file.num_bytes - start)
                )
            # The contents must be on the disk before anything refers to them.
            os.fsync(file.fileno())
        return file.record

    def _value(self, index: MetadataIndex) -> Any:
        return self.data[index] if index in self.data else self.held.take(index)

    def index(self, folder: Path, items: list[list[Any]]) -> Files:
        """Write the index of all items. Called on the first rank, when all ranks have written."""
        assert self.metadata is not None, (
            "only the rank that planned for all can write the index"
        )
        # Places of all items, as the ranks have reported them after writing.
        storage = dict(_item_from_json(entry) for rank in items for entry in rank)
        whole = replace(self.metadata, storage_data=storage, storage_meta=StorageMeta())
        return {INDEX_FILE: write_bytes(folder / INDEX_FILE, pickle.dumps(whole))}


@dataclass
class Stager:
    """Plans a save with all ranks. Keeps the memory of its copies for the next save."""

    _buffers: HostBuffers = field(default_factory=HostBuffers)

    def stage(
        self,
        state: dict[str, Any],
        *,
        held: Collection[int] = (),
        copied: Collection[int] = (),
        committer: Committer,
    ) -> StagedShards:
        """Plan a save and copy the tensors that may change. Collective over the committer's ranks.

        Args:
            state: a `sharded_state`.
            held: storage addresses of tensors that may change after `StagedShards.held.settle`.
            copied: storage addresses of tensors that may change at once. All others must not change until they are
                written.
            committer: its rank plans for all. Ranks outside its role group have other roles.
        """
        # megatron-core's own check would send all ranks' descriptions to every rank.
        # Instead, one rank checks the global plan below: torch refuses a plan that
        # omits an element of a tensor, or writes one twice.
        sharded, common = save_preprocess(state, False)
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        group = committer.group
        ranks = _DistWrapper(group, True, committer.planner)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        )
        planner.set_up_planner(
            mcore_to_pyt_state_dict(flat, is_loading=False),
            is_coordinator=ranks.is_coordinator,
        )
        metadata: list[Metadata] = []
        # The first rank of each role group reports its common state, and one rank
        # merges them.
        commons: dict[str, Any] = {} if group is not None else common

        # Called on every rank, before the plans are merged.
        def for_me() -> tuple[SavePlan, dict[str, Any]]:
            return (
                planner.create_local_plan(),
                common if group is not None and dist.get_rank() == 0 else {},
            )

        # Called on the planning rank alone.
        def for_all(
            plans_and_dtypes: list[tuple[SavePlan, dict[str, Any]]],
        ) -> list[SavePlan]:
            plans: list[SavePlan]
            plans, whole = planner.create_global_plan(
                [plan for plan, _ in plans_and_dtypes]
            )
            metadata.append(whole)
            for _, of_world in plans_and_dtypes:
                commons.update(of_world)
            return plans

        # Collective over the committer's ranks: local plans go up, and each rank's part
        # comes back.
        plan = planner.finish_plan(ranks.reduce_scatter("plan", for_me, for_all))
        items = {item.index: planner.resolve_data(item) for item in plan.items}
        num_bytes = 0
        for item_data in items.values():
            num_bytes += (
                item_data.nbytes
                if isinstance(item_data, torch.Tensor)
                else len(item_data.getbuffer())
            )
        # Another thread will read the tensors, so pending device work must be complete.
        platform.synchronize()
        # Three kinds: tensors that change at the next update, those that may change at
        # once, and the rest.
        data: dict[MetadataIndex, Any] = {}
        lasting: dict[MetadataIndex, torch.Tensor] = {}
        changing: dict[MetadataIndex, torch.Tensor] = {}
        for index, value in items.items():
            place = _place(value)
            if place in held:
                lasting[index] = value
            elif place in copied:
                changing[index] = value
            else:
                data[index] = value
        return StagedShards(
            committer.rank,
            plan,
            data,
            PendingTensors(lasting, changing, self._buffers),
            num_bytes,
            metadata[0] if metadata else None,
            _saved(commons) if metadata else None,
        )


def _place(value: Any) -> int | None:
    """Return the storage address of a tensor; None for an object that was serialised for this save."""
    return (
        value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None
    )


def _saved(common: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(common, stream)
    return stream.getvalue()


def _item_to_json(
    index: MetadataIndex, file: str, start: int, length: int
) -> list[Any]:
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, file, start, length]


def _item_from_json(entry: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, number, path, start, length = entry
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return index, _StorageInfo(path, start, length)


class CheckedReader(FileSystemReader):
    """torch's checkpoint reader, which reads every byte once, in place if possible, and verifies checksums.

    Args:
        folder: the checkpoint.
        is_alone: no other rank reads the same tensors, so the kernel need not keep them in memory.
    """

    def __init__(self, folder: Path, *, is_alone: bool) -> None:
        super().__init__(folder)
        self._keep_cached = not is_alone
        self._described: Mapping[str, Any] = {}

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        """Keep the descriptions of all tensors, which torch's reader does not use."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **options)
        self._described = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items, front to back through each file.

        Raises:
            DamagedCheckpoint: names the file and the tensor whose bytes have changed.
        """
        # Disks and network file systems read ahead, which only helps where reads go
        # forward.
        items = sorted(
            plan.items,
            key=lambda item: (
                self._place(item).relative_path,
                self._place(item).offset,
            ),
        )
        for name, in_file in groupby(
            items, lambda item: self._place(item).relative_path
        ):
            with open(Path(self.path) / name, "rb", buffering=0) as file:
                # Several parts of one stored item are read together.
                for _, of_item in groupby(
                    in_file, lambda item: self._place(item).offset
                ):
                    wanted = list(of_item)
                    try:
                        self._read(file, wanted, planner)
                    except DamagedCheckpoint as error:
                        raise DamagedCheckpoint(
                            f"{name}: {wanted[0].storage_index.fqn}: {error}"
                        ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> _StorageInfo:
        place: _StorageInfo = self.storage_data[item.storage_index]
        return place

    def _read(
        self, file: io.FileIO, wanted: list[ReadItem], planner: LoadPlanner
    ) -> None:
        """Read one stored item, of which the run may want several parts."""
        first, place = wanted[0], self._place(wanted[0])
        if first.type == LoadItemType.BYTE_IO:
            data = read_object(file, place.offset, place.length)
            for item in wanted:
                planner.load_bytes(item, io.BytesIO(data))
            return
        shape, dtype = self._shape_and_dtype(first.storage_index)
        frame = frame_of(shape, dtype)
        # torch.save wrote this tensor, not `write_tensor`.
        if frame is None or frame.length != place.length:
            data = read_object(file, place.offset, place.length)
            stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # The usual case on an unchanged grid: the bytes go directly into the parameter,
        # without a copy of the tensor.
        elif len(wanted) == 1 and _takes_all(
            target := planner.resolve_tensor(first).detach(), first, shape, dtype
        ):
            read_tensor(
                file, place.offset, frame, target, keep_cached=self._keep_cached
            )
            planner.commit_tensor(first, target)
            return
        else:
            stored = torch.empty(shape, dtype=dtype)
            read_tensor(
                file, place.offset, frame, stored, keep_cached=self._keep_cached
            )
        for item in wanted:
            target = planner.resolve_tensor(item).detach()
            target.copy_(
                narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            )
            planner.commit_tensor(item, target)

    def _shape_and_dtype(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
        entry = self._described[index.fqn]
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
        return chunk.sizes, entry.properties.dtype


def _takes_all(
    target: torch.Tensor, item: ReadItem, shape: torch.Size, dtype: torch.dtype
) -> bool:
    """Return whether the stored tensor can be read directly into `target`."""
    return (
        type(target) is torch.Tensor
        # A parameter of its own, not a subclass whose elements are elsewhere.
        and target.device.type == "cpu"
        and (target.shape, target.dtype) == (shape, dtype)
        and target.is_contiguous()
        and not any(item.storage_offsets)
    )


class _CheckedLoading(TorchDistLoadShardedStrategy):  # type: ignore[misc]  # megatron-core has no complete types
    """megatron-core's load strategy with a `CheckedReader` (0.16, `TorchDistLoadShardedStrategy.load`)."""

    def __init__(self, *, is_alone: bool) -> None:
        super().__init__()
        self._is_alone = is_alone

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *_: Any
    ) -> dict[str, Any]:
        """Load a sharded state.

        Version 0.19 passes a further argument about background writes, which loading
        ignores.
        """
        tensors = [
            value
            for value in nested_values(sharded_state_dict)
            if isinstance(value, ShardedTensor)
        ]
        flat, places, names = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        wanted = mcore_to_pyt_state_dict(flat, True)
        # Collective over the role's ranks. Each reads what it needs.
        torch_checkpoint.load(
            wanted,
            storage_reader=CheckedReader(Path(checkpoint_dir), is_alone=self._is_alone),
            planner=MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[
                    tensor for tensor in tensors if not tensor.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors={
                    tensor.key: tensor
                    for tensor in tensors
                    if tensor.allow_shape_mismatch
                },
            ),
        )
        values = {
            name: _unwrap_pyt_sharded_tensor(value) for name, value in wanted.items()
        }
        loaded: dict[str, Any] = _replace_sharded_keys_with_state_dict_keys(
            values, places, names
        )
        _restore_dict_types(loaded, sharded_state_dict)
        return loaded


def read_shards(
    state: dict[str, Any], folder: Path, *, is_alone: bool = False
) -> dict[str, Any]:
    """Fill a `sharded_state(loading=True)` from a folder. Collective; every rank reads the parts that it needs.

    Args:
        is_alone: no two ranks want the same tensors.

    Raises:
        DamagedCheckpoint: on every rank, if one read bytes that have changed; names file and tensor.
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
    """Refuse a folder whose pickles name anything but tensors, their layout and plain values.

    torch reads the index and stored objects with an unrestricted unpickler, so they are
    checked first. The ranks' common state is checked too, for one message instead of
    one from each rank.

    Raises:
        CheckpointError: the index or an object is damaged, or names something that loading must not run.
    """
    fix = "Load only checkpoints that megaverl wrote; take another one if this one was damaged."
    index = read_index(folder, fix)
    # The index is checked by a reader that runs nothing.
    try:
        torch.load(folder / COMMON_FILE, weights_only=True)
        for place in index.objects.values():
            with place.file.open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}. {fix}") from error
    except Exception as error:
        # A damaged pickle can raise anything.
        raise CheckpointError(f"{folder}: refused: {_reason(error)}. {fix}") from error


@contextmanager
def own_errors(doing: str, fix: str) -> Iterator[None]:
    """Replace the libraries' exceptions, with a traceback for every rank, by one short CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        # torch raises this BaseException with the same contents on every rank.
        wrong = {
            # Only damage is reported here, because an older checkpoint may then be
            # tried.
            str(cause)
            for cause, _ in error.failures.values()
            if isinstance(cause, DamagedCheckpoint)
        }
        if wrong:
            raise DamagedCheckpoint(
                f"{doing}: {'; '.join(sorted(wrong))}. {USE_ANOTHER}"
            ) from error
        failures = "; ".join(
            f"rank {rank}: {_reason(cause)}"
            for rank, (cause, _) in sorted(error.failures.items())
        )
        raise CheckpointError(f"{doing}: {failures}. {fix}") from error
    except (
        CheckpointingException,
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{doing}: {_reason(error)}. {fix}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of an error. Some errors list every tensor of the model in the others."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:500]}"
