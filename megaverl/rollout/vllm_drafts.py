"""Draft model or head of a vLLM engine, as the destination of a weight transfer.

vLLM reads a draft model from its folder when the engine starts. A run with `draft.train` then
writes new weights into it after every update, like those of the main model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import torch

from megaverl.rollout.engine import Shapes
from megaverl.rollout.vllm_layouts import LoaderLayouts
from megaverl.rollout.vllm_weights import loaded_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from megaverl.sharding.layout import Layout
    from megaverl.sharding.vllm import QuantisedWeight


def without_shared(draft: torch.nn.Module, target: torch.nn.Module) -> None:
    """Unregister modules of a head that are the target's, such as its embeddings, which the head goes on using.

    The target's reshard writes them.
    """
    of_target = {id(module) for module in target.modules()}
    for module in list(draft.modules()):
        for name, child in list(module.named_children()):
            if id(child) in of_target:
                delattr(module, name)
                # An attribute beside the registered modules, which a forward pass reads
                # like one of them.
                vars(module)[name] = child


class EngineDraft:
    """Draft model or head on this rank of an engine. Implements `megaverl.rollout.engine.ReceivesWeights`.

    It shares the engine's memory: it is mapped whenever the main model is, and keeps its
    contents while the engine sleeps.

    Args:
        model: vLLM's draft model on this rank, without modules of the main model.
        config: vLLM's configuration of the engine.
        dtype: dtype of the incoming weights.
        changed: called after new weights have arrived. Drops what was computed from the old ones.

    Example:
        draft = engine.draft
        layout_of = draft.layouts(shapes)
        ...  # a reshard writes draft.named_parameters() in place
        draft.reset_prefix_cache()
    """

    # Captured graphs hold the addresses of its parameters.
    may_rebind = False

    def __init__(
        self,
        model: torch.nn.Module,
        config: VllmConfig,
        dtype: torch.dtype,
        changed: Callable[[], None],
    ) -> None:
        self.model = model
        # The values from the folder are overwritten by the first reshard, so layouts may
        # be tried on these parameters.
        self._layouts = LoaderLayouts(model, config, dtype, empty=True)
        self._changed = changed

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        """Return a function from a rank to the places of the draft model's weights there. See `Engine.layouts`.

        Raises:
            RolloutError: vLLM's draft model does not load weights of these names and shapes.
        """
        return self._layouts(shapes)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the draft model's tensors on this rank that a reshard writes, by vLLM's names."""
        held = loaded_tensors(self.model)
        return {
            name: held[name] for name in self._layouts.local_names()
        } | self._layouts.beside

    def quantised_weights(self) -> Mapping[str, QuantisedWeight]:
        """Return nothing: vLLM does not quantise a trained draft model."""
        return {}

    def load_computed(self) -> None:
        """Compute the parameters that vLLM derives from weights which have arrived."""
        self._layouts.load_computed()

    def reset_prefix_cache(self) -> None:
        """Drop keys and values that were computed with the old weights. Call it after every change of weights."""
        self._changed()

    def wake_weights(self) -> None:
        """Do nothing: the main model's reshard has mapped the engine's weights."""

    def wake_up(self) -> None:
        """Do nothing: the engine wakes with its main model."""

    def sleep(self) -> None:
        """Do nothing: the engine sleeps with its main model."""

    def sleep_without(self, names: Collection[str]) -> bool:
        """Return False: the draft model's weights are kept while the engine sleeps."""
        return False
