"""Tensors under the names that other trainers give them, turned into those of a RolloutBatch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megaverl.data.batch_fields import FIELDS
from megaverl.errors import DataError

# what it is called elsewhere -> its name here
NAMES = {"logprobs": "rollout_log_probs", "generated_mask": "response_mask"}


def own_names(tensors: Mapping[str, Tensor], includes_prompt: bool | None = None) -> dict[str, Tensor]:
    """The same tensors under the schema's names.

    `attention_mask` [B, S] becomes `prompt_lengths`, and prompts that are padded on the left are moved to the right's
    padding. Without a mask, prompts have no padding; without one of the response, every generated token trains.

    Args:
        includes_prompt: `generated_includes_prompt` of `RolloutBatch`.

    Raises:
        DataError: a mask of another shape, or one with a hole in it; a tensor under both names; `includes_prompt` is
            not what the tensors show.
    """
    found = dict(tensors)
    for theirs, ours in NAMES.items():
        if theirs in found:
            if ours in found:
                raise DataError(f"'{theirs}' and '{ours}' are the same, and both are given. Leave one out.")
            found[ours] = found.pop(theirs)
    if "input_ids" not in found or "generated_ids" not in found:
        return found  # what is missing is said by the batch itself
    found["response_mask"] = found.get("response_mask", torch.ones_like(found["generated_ids"])).bool()
    prompts = found["input_ids"]
    mask = found.pop("attention_mask", None)
    if mask is not None:
        found["input_ids"], found["prompt_lengths"] = _right_padded(prompts, mask.bool())
    elif "prompt_lengths" not in found:
        found["prompt_lengths"] = torch.full((len(prompts),), prompts.shape[1], device=prompts.device)
    fit = prompts.dim() == found["generated_ids"].dim() == 2 and len(prompts) == len(found["generated_ids"])
    if includes_prompt is not False and fit:  # what does not fit is said by the batch itself
        begins = _begins(prompts, found)
        if includes_prompt:
            _cut_prompts(found, begins)
        elif bool((begins > 0).all()) and len(begins):
            raise DataError(
                f"'generated_ids': all {len(begins)} rows begin with their own prompt, whose tokens would be trained "
                "on. Give responses alone, or generated_includes_prompt=True to have the prompts cut off (False: the "
                "responses do repeat their prompts)."
            )
    return found


def _begins(prompts: Tensor, found: Mapping[str, Tensor]) -> Tensor:
    """Where the response begins in each row of `generated_ids` [B, W] that begins with its prompt [B]; -1: it does not.

    What stands before the response is `prompts` [B, S] as they were given, with their padding, if that is so in every
    row; else each prompt without any.
    """
    generated, lengths = found["generated_ids"], found["prompt_lengths"].long()
    width = prompts.shape[1]
    if generated.shape[1] >= width and torch.equal(generated[:, :width], prompts):
        return torch.full_like(lengths, width)
    shared = min(width, generated.shape[1])
    beyond = torch.arange(width, device=prompts.device) >= lengths.unsqueeze(1)
    same = torch.zeros_like(beyond)
    same[:, :shared] = generated[:, :shared] == found["input_ids"][:, :shared]
    return torch.where((same | beyond).all(dim=1), lengths, -1)


def _cut_prompts(found: dict[str, Tensor], begins: Tensor) -> None:
    """Leave of `generated_ids`, and of all that is as wide, what follows the prompts; padded on the right."""
    without = (begins < 0).nonzero()
    if len(without):
        raise DataError(
            f"generated_includes_prompt=True, but 'generated_ids' of sample {int(without[0, 0])} does not begin with "
            "its prompt. Leave it out where they are responses alone."
        )
    width = found["generated_ids"].shape[1]
    places = torch.arange(width - int(begins.min()), device=begins.device) + begins.unsqueeze(1)
    inside = places < width
    for name, tensor in found.items():
        if name in FIELDS and FIELDS[name].axes == "R" and tensor.shape[1:] == (width,):
            kept = tensor.gather(1, places.clamp(max=width - 1))
            found[name] = torch.where(inside, kept, torch.full_like(kept, FIELDS[name].fill))


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
