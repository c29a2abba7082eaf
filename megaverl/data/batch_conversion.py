"""Conversion of tensors under other trainers' names, paddings and layouts to the fields of a RolloutBatch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megaverl.data.batch_fields import FIELDS
from megaverl.errors import DataError

# Name in other trainers -> name here.
NAMES = {"logprobs": "rollout_log_probs", "generated_mask": "response_mask"}


def own_names(
    tensors: Mapping[str, Tensor], includes_prompt: bool | None = None
) -> dict[str, Tensor]:
    """Return tensors under the schema's names.

    `attention_mask` [B, S] becomes `prompt_lengths`, and left-padded prompts are moved
    to right padding. Without that mask, prompts have no padding. Without a mask of the
    response, every generated token is trained.

    Args:
        includes_prompt: `generated_includes_prompt` of `RolloutBatch`.

    Raises:
        DataError: a mask has another shape or holes, a tensor is given under both names, or `includes_prompt`
            contradicts the tensors.
    """
    renamed = dict(tensors)
    for foreign_name, name in NAMES.items():
        if foreign_name in renamed:
            if name in renamed:
                raise DataError(
                    f"'{foreign_name}' and '{name}' are the same, and both are given. Leave one out."
                )
            renamed[name] = renamed.pop(foreign_name)
    if "input_ids" not in renamed or "generated_ids" not in renamed:
        # The constructor of the batch reports missing fields.
        return renamed
    renamed["response_mask"] = renamed.get(
        "response_mask", torch.ones_like(renamed["generated_ids"])
    ).bool()
    prompts = renamed["input_ids"]
    mask = renamed.pop("attention_mask", None)
    if mask is not None:
        renamed["input_ids"], renamed["prompt_lengths"] = _right_padded(
            prompts, mask.bool()
        )
    elif "prompt_lengths" not in renamed:
        renamed["prompt_lengths"] = torch.full(
            (len(prompts),), prompts.shape[1], device=prompts.device
        )
    generated = renamed["generated_ids"]
    is_same_batch = prompts.dim() == generated.dim() == 2 and len(prompts) == len(
        generated
    )
    # Tensors of different sizes are reported by the constructor of the batch.
    if includes_prompt is not False and is_same_batch:
        begins = _begins(prompts, renamed)
        if includes_prompt:
            _cut_prompts(renamed, begins)
        elif bool((begins > 0).all()) and len(begins):
            raise DataError(
                f"'generated_ids': all {len(begins)} rows begin with their own prompt, whose tokens would be trained "
                "on. Give responses alone, or generated_includes_prompt=True to have the prompts cut off (False: the "
                "responses do repeat their prompts)."
            )
    return renamed


def _begins(prompts: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return where the response begins in each row of `generated_ids` [B, W], or -1 without a prompt before it.

    The part before the response is either `prompts` [B, S] as given, padding included, in
    every row, or each prompt without padding.
    """
    generated = tensors["generated_ids"]
    lengths = tensors["prompt_lengths"].long()
    width = prompts.shape[1]
    # The prompts stand before the responses as given, padding included.
    if generated.shape[1] >= width and torch.equal(generated[:, :width], prompts):
        return torch.full_like(lengths, width)
    shared = min(width, generated.shape[1])
    beyond = torch.arange(width, device=prompts.device) >= lengths.unsqueeze(1)
    same = torch.zeros_like(beyond)
    same[:, :shared] = generated[:, :shared] == tensors["input_ids"][:, :shared]
    # All tokens of the prompt are equal, and padding does not count.
    return torch.where((same | beyond).all(dim=1), lengths, -1)


def _cut_prompts(tensors: dict[str, Tensor], begins: Tensor) -> None:
    """Remove the prompts from `generated_ids` and from all tensors of the same width. The result is right-padded."""
    without = (begins < 0).nonzero()
    if len(without):
        raise DataError(
            f"generated_includes_prompt=True, but 'generated_ids' of sample {int(without[0, 0])} does not begin with "
            "its prompt. Leave it out where they are responses alone."
        )
    width = tensors["generated_ids"].shape[1]
    # [B, r] places of the response's tokens in each row.
    places = torch.arange(
        width - int(begins.min()), device=begins.device
    ) + begins.unsqueeze(1)
    inside = places < width
    for name, tensor in tensors.items():
        if name in FIELDS and FIELDS[name].axes == "R" and tensor.shape[1:] == (width,):
            kept = tensor.gather(1, places.clamp(max=width - 1))
            tensors[name] = torch.where(
                inside, kept, torch.full_like(kept, FIELDS[name].fill)
            )


def _right_padded(prompts: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompts [B, S] with all padding at their ends, zeroed, and their lengths [B]."""
    if mask.shape != prompts.shape:
        raise DataError(
            f"'attention_mask' has shape {list(mask.shape)}; 'input_ids' has {list(prompts.shape)}"
        )
    lengths = mask.sum(dim=1)
    # A mask with more than one edge on either side has a hole.
    edges = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    padded_twice = (edges > 1).nonzero()
    if len(padded_twice):
        raise DataError(
            f"'attention_mask' of sample {int(padded_twice[0, 0])} has holes; prompts are one piece"
        )
    first = torch.where(lengths > 0, mask.int().argmax(dim=1), 0)
    columns = torch.arange(prompts.shape[1], device=prompts.device)
    # A rotation moves the padding from the front to the end.
    places = (columns + first.unsqueeze(1)) % max(1, prompts.shape[1])
    inside = columns < lengths.unsqueeze(1)
    return torch.where(inside, prompts.gather(1, places), 0), lengths
