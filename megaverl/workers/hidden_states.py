"""Hidden states of a model, for another model that reads them: the actor's, for a draft head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from megaverl.models.packing import MicroBatch
from megaverl.sharding.draft_head import AFTER_LAST_NORM
from megaverl.workers.model import TrainingModel


def observe(
    model: TrainingModel, micro_batches: Sequence[MicroBatch], layers: Sequence[int]
) -> list[MicroBatch]:
    """Return the micro-batches with the model's embeddings and hidden states as `observed`. Collective over the grid.

    The model runs without gradients and with dropout off.

    Args:
        model: has one pipeline stage and whole rows.
        micro_batches: of padded rows.
        layers: numbers of hidden states, as in `megaverl.sharding.draft_head`.
    """

    def take(output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        rows = [model.token_rows(seen[number]) for number in (0, *layers)]
        seen.clear()
        # Megatron's rows may be padded to a multiple of the tensor-parallel size.
        return torch.cat(rows, dim=-1)[:, : batch.tokens.shape[1]]

    with _kept_states(model, {0, *layers}) as seen:
        observed = model.outputs(micro_batches, take)
    return [
        replace(batch, observed=states)
        for batch, states in zip(micro_batches, observed, strict=True)
    ]


@contextmanager
def _kept_states(
    model: TrainingModel, numbers: set[int]
) -> Iterator[dict[int, torch.Tensor]]:
    """Keep hidden states of the last forward pass by their number, in the layout of the model's layers."""
    seen: dict[int, torch.Tensor] = {}
    layers = model.decoder_layers

    def keep_input(number: int) -> Any:
        def hook(layer: Any, args: Any, options: Any) -> None:
            seen[number] = args[0] if args else options["hidden_states"]

        return hook

    def keep_output(number: int) -> Any:
        def hook(layer: Any, args: Any, output: Any) -> None:
            seen[number] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [
        layers[number].register_forward_pre_hook(keep_input(number), with_kwargs=True)
        for number in sorted(numbers)
        if 0 <= number < len(layers)
    ]
    # The states after the last layer are no layer's input.
    if len(layers) in numbers:
        hooks.append(layers[-1].register_forward_hook(keep_output(len(layers))))
    if AFTER_LAST_NORM in numbers:
        norm = model.last_norm
        hooks.append(norm.register_forward_hook(keep_output(AFTER_LAST_NORM)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
