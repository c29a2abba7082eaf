"""The weights of a Hugging Face module: their names and shapes in a folder, and where they lie in the module.

transformers may save under other names than a module's, and in other pieces
(experts that a module holds in one tensor are one file entry each, some are transposed): its own conversion is run on
tensors without data, and what it copies is recorded (`sharding.tracing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megaverl.errors import ModelError
from megaverl.sharding.layout import Layout
from megaverl.sharding.strided import NotStrided
from megaverl.sharding.tracing import Tracer, layout_of_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModuleWeights:
    """What a model's folder holds of its module.

    Attributes:
        layout: the module's, whole: global tensors have the names of the files, and `global_shapes` all of them in the
            files' order; local ones are parameters and saved buffers under the names of `state_dict()`.
            `layout.shard` says what a rank holds that has a box of each.
        tied: further names of a tensor in the module -> its name in `layout`.
    """

    layout: Layout
    tied: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By the names in a folder's files."""
        return self.layout.global_shapes

    @property
    def renamed(self) -> dict[str, str]:
        """Name in the module -> in the files, of the tensors that are the same in both but for that."""
        pieces, held = self.layout.by_tensor, dict.fromkeys(self.layout.local_shapes, 0)
        for piece in self.layout.pieces:
            held[self.layout.stored_in(piece.local)] += 1
        return {
            piece.local: name
            for name, (piece, *more) in pieces.items()
            if not more and held.get(piece.local) == 1 and self.layout.local_shapes[piece.local] == self.shapes[name]
        }


def weights_of_module(model: PreTrainedModel) -> ModuleWeights:
    """Of a module, on any device and of any dtype: it is only looked at.

    Raises:
        ModelError: transformers computes what it saves, or saves other tensors than the module has.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    tied = {name: first[id(tensor)] for name, tensor in state.items() if first[id(tensor)] != name}
    tracer = Tracer()
    sources = {name: tracer.source(name, t.shape, t.dtype) for name, t in state.items() if name not in tied}
    try:
        with torch.no_grad(), tracer:
            saved = revert_weight_conversion(model, dict(sources))
        return ModuleWeights(layout_of_sources(tracer, saved), tied)
    except NotStrided as error:
        raise ModelError(
            f"{type(model).__name__}: transformers does not copy what it saves: {error}. Its weights cannot be moved "
            "to an engine tensor by tensor."
        ) from error
