"""What a sharded checkpoint holds, from its index alone: no tensor is read, nothing in it is run, no torch.

The index (`.metadata`, torch's distributed checkpointing) is a pickle. Here every class that it may name is a plain
stand-in that keeps what it is given; any other name is refused.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.checkpoint.manifest import USE_ANOTHER
from megaverl.errors import CheckpointError

INDEX_FILE = ".metadata"
# Bytes of an element; what is not here (a quantised type) counts as one.
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",  # megatron-core leaves its plans in the index
    "pathlib",
    "pathlib._local",
)


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: of the whole; layers are often stacked along the first axis.
        dtype: without "torch.".
        num_shards: in so many pieces it lies in the files.
    """

    shape: tuple[int, ...]
    dtype: str
    num_shards: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Contents:
    """An index.

    Attributes:
        tensors: by name, in the index's order.
        objects: names of what is no tensor.
        ends: file -> the size in bytes that it must have at least.
    """

    tensors: dict[str, CheckpointTensor]
    objects: list[str]
    ends: dict[str, int]

    def wrong_sizes(self, folder: Path) -> list[str]:
        """Every file that is missing or too short for what the index says is in it, in words."""
        wrong = []
        for name, end in sorted(self.ends.items()):
            path = folder / name
            if not path.is_file():
                wrong.append(f"{name} is missing")
            elif path.stat().st_size < end:
                wrong.append(f"{name} has {path.stat().st_size} bytes, and the index names some up to {end}")
        return wrong


def read_contents(folder: Path) -> Contents:
    """Read the index of `folder`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
        tensors, objects = {}, []
        for name, entry in index.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                shape = tuple(int(size) for size in entry.size)
                tensors[str(name)] = CheckpointTensor(shape, entry.properties.dtype, len(entry.chunks))
            else:
                objects.append(str(name))
        ends: dict[str, int] = {}
        for place in index.storage_data.values():
            name = str(place.relative_path)
            ends[name] = max(ends.get(name, 0), int(place.offset) + int(place.length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). {USE_ANOTHER}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: refused ({type(error).__name__}: {error}). {USE_ANOTHER}") from error
    return Contents(tensors, objects, ends)


class _StandIn:
    """Any class of the index: keeps arguments and state."""

    def __init__(self, *args: Any, **state: Any) -> None:
        self.args = args
        self.__dict__.update(state)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 2:  # TensorProperties gives a tuple, its dtype first
            state = {"dtype": state[0]}
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __hash__(self) -> int:  # they are keys of dictionaries before they have their state
        return id(self)


def _layout(name: str) -> str:
    return name


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and name.isidentifier() and not name.startswith("_"):
            return name  # a dtype
        if module in _MODULES:
            return _StandIn
        raise pickle.UnpicklingError(f"it names {module}.{name}")
