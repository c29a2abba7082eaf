"""The files of a sharded state on their way to the disk: first planned by all ranks, then written by each alone.

megatron-core's `torch_dist` format, in two halves: `Stager.stage` is the collective one; `StagedShards.write` touches
nothing but its own files, so a thread may run it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper

from megaverl.checkpoint.checksums import ChecksummedFile, write_bytes
from megaverl.checkpoint.commit import Committer
from megaverl.checkpoint.held import HeldTensors, copy_to_host
from megaverl.checkpoint.items import write_tensor
from megaverl.checkpoint.manifest import OBJECTS_SUFFIX, TENSORS_SUFFIX
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


@dataclass
class StagedShards:
    """This rank's part of a sharded state, and how it is to be written.

    Attributes:
        rank: of all that write; it names this rank's files.
        plan: of torch's checkpointing: which items go into them.
        data: the items' tensors and objects; those of `held` are not among them.
        held: tensors that training will change again, but not yet.
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
            files[CONFIG_FILE] = write_bytes(folder / CONFIG_FILE, config.encode())
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
            return plans

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
            committer.rank,
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


def _item_to_json(index: MetadataIndex, file: str, start: int, length: int) -> list[Any]:
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, file, start, length]


def _item_from_json(found: list[Any]) -> tuple[MetadataIndex, _StorageInfo]:
    name, offset, number, path, start, length = found
    index = MetadataIndex(name, None if offset is None else torch.Size(offset), number)
    return index, _StorageInfo(path, start, length)
