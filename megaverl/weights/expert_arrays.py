"""Arrays in files that hold the routed experts of a layer one after the other, read as one matrix of each expert.

Published folders of Qwen3.5 with experts have `gate_up_proj` [experts, gate rows then
up rows, hidden] and `down_proj` [experts, hidden, expert ffn]. transformers reads these
arrays, and writes matrices of single experts, which are the model's weights here too. A
matrix is a run of bytes of its array, so it is read in place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megaverl.errors import ModelError
from megaverl.sharding.weight import Weight
from megaverl.weights.stored import DTYPES, StoredTensor

MATRIX = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
# Array -> the matrices of each expert in it, in this order.
PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


class ExpertArray(NamedTuple):
    """An array that files may have in place of matrices of single experts.

    Attributes:
        shape: [experts, rows of an expert, columns].
        weights: the matrices that lie in it one after the other.
    """

    shape: tuple[int, ...]
    weights: tuple[Weight, ...]

    def is_beside(self, stored: Collection[str]) -> bool:
        """Return whether matrices of single experts are stored as well. The array is then one too many."""
        return any(weight.name in stored for weight in self.weights)


def expert_arrays(weights: Iterable[Weight]) -> dict[str, ExpertArray]:
    """Return the arrays that files may have in place of these weights, by name."""
    by_block: dict[str, dict[tuple[int, str], Weight]] = {}
    for weight in weights:
        if matrix := MATRIX.fullmatch(weight.name):
            block, number, part = matrix.groups()
            by_block.setdefault(block, {})[int(number), part] = weight
    arrays = {}
    for block, matrices in by_block.items():
        num_experts = 1 + max(number for number, _ in matrices)
        for name, parts in PARTS.items():
            wanted = [(n, part) for n in range(num_experts) for part in parts]
            # Experts without gates are stored in another form.
            if not matrices.keys() >= set(wanted):
                continue
            members = tuple(matrices[key] for key in wanted)
            rows = sum(weight.shape[0] for weight in members[: len(parts)])
            shape = (num_experts, rows, members[0].shape[1])
            arrays[block + name] = ExpertArray(shape, members)
    return arrays


def separate_experts(
    stored: Mapping[str, StoredTensor], weights: Sequence[Weight]
) -> dict[str, StoredTensor]:
    """Return stored tensors with the matrices of single experts in place of arrays that hold all of a layer.

    Raises:
        ModelError: such an array has another shape than the model's experts.
    """
    separate: dict[str, StoredTensor] = {}
    arrays = expert_arrays(weights)
    for name, tensor in stored.items():
        array = arrays.get(name)
        if array is None or array.is_beside(stored) or tensor.dtype not in DTYPES:
            separate[name] = tensor
            continue
        if tensor.shape != array.shape:
            raise ModelError(
                f"{tensor.file}: {name} has the shape {list(tensor.shape)}, expected {list(array.shape)}: all experts "
                "of a layer. Copy config.json and weights from the same source."
            )
        offset = tensor.offset
        for weight in array.weights:
            separate[weight.name] = StoredTensor(
                tensor.file, weight.shape, tensor.dtype, offset
            )
            offset += prod(weight.shape) * DTYPES[tensor.dtype].itemsize
    return separate


def separate_names(
    files: Mapping[str, str], weights: Sequence[Weight]
) -> dict[str, str]:
    """Return the file of each stored tensor with names of single experts' matrices in place of such arrays' names."""
    separate: dict[str, str] = {}
    arrays = expert_arrays(weights)
    for name, file in files.items():
        array = arrays.get(name)
        if array is None or array.is_beside(files):
            separate[name] = file
        else:
            separate |= dict.fromkeys((weight.name for weight in array.weights), file)
    return separate
