"""Tensors under the names that other trainers give them, turned into those of a RolloutBatch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megaverl.errors import DataError

# what it is called elsewhere -> its name here
NAMES = {"logprobs": "rollout_log_probs", "generated_mask": "response_mask"}


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the schema's names.

    `attention_mask` [B, S] becomes `prompt_lengths`, and prompts that are padded on the left are moved to the right's
    padding. Without a mask, prompts have no padding; without one of the response, every generated token trains.

    Raises:
        DataError: a mask of another shape, or one with a hole in it; a tensor under both names.
    """
    found = dict(tensors)
    for theirs, ours in NAMES.items():
        if theirs in found:
            if ours in found:
                raise DataError(f"'{theirs}' and '{ours}' are the same, and both are given. Leave one out.")
            found[ours] = found.pop(theirs)
    if "input_ids" not in found or "generated_ids" not in found:
        return found  # what is missing is said by the batch itself
    if "response_mask" in found:
        found["response_mask"] = found["response_mask"].bool()
    else:
        found["response_mask"] = torch.ones_like(found["generated_ids"], dtype=torch.bool)
    prompts = found["input_ids"]
    mask = found.pop("attention_mask", None)
    if mask is not None:
        found["input_ids"], found["prompt_lengths"] = _right_padded(prompts, mask.bool())
    elif "prompt_lengths" not in found:
        found["prompt_lengths"] = torch.full((len(prompts),), prompts.shape[1], device=prompts.device)
    return found


def _right_padded(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts [B, S] with all padding at their ends, zeroed, and their lengths [B]."""
    if mask.shape != prompts.shape:
        raise DataError(f"'attention_mask' has shape {list(mask.shape)}; 'input_ids' has {list(prompts.shape)}")
    lengths = mask.sum(dim=1)
    edges = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    padded_twice = (edges > 1).nonzero()
    if len(padded_twice):
        raise DataError(f"'attention_mask' of sample {int(padded_twice[0, 0])} has holes; prompts are one piece")
    first = torch.where(lengths > 0, mask.int().argmax(dim=1), 0)
    places = (torch.arange(prompts.shape[1], device=prompts.device) + first.unsqueeze(1)) % max(1, prompts.shape[1])
    inside = torch.arange(prompts.shape[1], device=prompts.device) < lengths.unsqueeze(1)
    return torch.where(inside, prompts.gather(1, places), 0), lengths
