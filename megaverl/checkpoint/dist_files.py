"""Reading the files of a sharded state, megatron-core's `torch_dist` format; and what may stand in its pickles.

A rank that fails makes all ranks fail: torch's checkpointing gathers the outcome of every rank at each stage.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megaverl.checkpoint.shards import COMMON_FILE, METADATA_FILE
from megaverl.errors import CheckpointError
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingException  # noqa: E402

# All that the pickled index of a torch_dist checkpoint may name.
_INDEX_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


def read_shards(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a `sharded_state(loading=True)` from a folder; every rank takes part and reads what it needs.

    Raises:
        CheckpointError: on every rank, if one could not read; names the ranks, and the tensor that does not fit.
    """
    with own_errors(
        f"{folder}: the checkpoint cannot be loaded",
        "It must be of the same model and the same kind of optimizer; the grid may differ.",
    ):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def check_pickles(folder: Path) -> None:
    """Refuse a folder whose pickled parts name anything but tensors, their layout and plain values.

    torch reads the index and stored objects with an unrestricted unpickler, so they are vetted first; what is
    common to the ranks is tried as well, for one message instead of one from each rank.

    Raises:
        CheckpointError: the index or an object is damaged, or names something that loading must not run.
    """
    mend = "Load only checkpoints that megaverl wrote; take another one if this one was damaged."
    index = folder / METADATA_FILE
    try:
        with index.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        torch.load(folder / COMMON_FILE, weights_only=True)
        objects = {
            name
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, torch_checkpoint.metadata.BytesStorageMetadata)
        }
        for key, place in metadata.storage_data.items():
            if key.fqn in objects:
                with (folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}. {mend}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{folder}: refused: {_reason(error)}. {mend}") from error


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def own_errors(what: str, mend: str) -> Iterator[None]:
    """One CheckpointError, short, instead of the libraries' exceptions with a traceback for every rank."""
    try:
        yield
    except CheckpointException as error:  # torch's, a BaseException: the same on every rank
        failures = "; ".join(f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
        raise CheckpointError(f"{what}: {failures}. {mend}") from error
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{what}: {_reason(error)}. {mend}") from error


def _reason(error: BaseException) -> str:
    """The first line, for some of them list every tensor of the model."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:500]}"
