"""What a vision-language model of transformers reads besides tokens: images, and positions in three dimensions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import ModelError
from megaverl.platform import to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from megaverl.models.packing import Packing

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
NO_IMAGE = 0  # a token of every vocabulary that is no image's, where a response has drawn one


@dataclass
class VisionInputs:
    """Of one micro-batch.

    Attributes:
        places: [b, s] int64: the tokens, of which those of an image are at an image's places and nowhere else.
        positions: [3, b, s] int64: in time, height and width.
        pixel_values: [patches, values] float32 of all images, in the order of their places; None: there are none.
        image_grid_thw: [images, 3] int64: patches in time, height and width.
    """

    places: torch.Tensor
    positions: torch.Tensor
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None

    def to(self, device: torch.device) -> VisionInputs:
        """The same on another device."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: to_device(x, device) for name, x in held.items() if x is not None})

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """As transformers' forward pass takes images."""
        if self.pixel_values is None or self.image_grid_thw is None:
            return {}
        return {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}


@dataclass(frozen=True)
class VisionReader:
    """Makes a model's inputs from tokens and images.

    Attributes:
        token: stands for a part of an image.
        merge: so many patches in height, and as many in width, are one token.
    """

    token: int
    merge: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> VisionReader | None:
        """Of a model that takes images; None of one of text.

        Raises:
            ModelError: a model whose images are not known here.
        """
        vision: Any = getattr(config, "vision_config", None)
        if vision is None:
            return None
        if config.model_type not in FAMILIES:
            raise ModelError(
                f"{config.model_type}: it takes images, and how its tokens' positions follow from them is known for "
                f"{', '.join(FAMILIES)} alone. Use one of these, or a model of text."
            )
        return cls(int(config.image_token_id), int(vision.spatial_merge_size))

    def read(
        self,
        tokens: torch.Tensor,
        prompt_lengths: torch.Tensor,
        response_lengths: torch.Tensor,
        packing: Packing | None,
        images: Sequence[SharedItem],
    ) -> VisionInputs:
        """Of rows on the host.

        Args:
            tokens: [b, s], packed or padded.
            images: in the order of their places.

        Raises:
            ModelError: places for images that are not those of `images`.
        """
        if packing is None:
            columns = torch.arange(tokens.shape[1]).expand_as(tokens)
            drawn, positions = columns >= prompt_lengths.unsqueeze(1), columns
        else:
            drawn, positions = torch.zeros_like(tokens, dtype=torch.bool), packing.positions.unsqueeze(0)
            for first, count in zip(packing.starts.tolist(), response_lengths.tolist(), strict=True):
                drawn[0, first + 1 : first + 1 + count] = True
        is_image = (tokens == self.token) & ~drawn
        sizes = [image.size for image in images]
        if int(is_image.sum()) != sum(sizes):
            raise ModelError(f"{int(is_image.sum())} tokens stand for parts of images, and images have {sum(sizes)}")
        grids = [[int(n) for n in image.tensors["image_grid_thw"]] for image in images]
        made = VisionInputs(
            torch.where((tokens == self.token) & drawn, NO_IMAGE, tokens),
            rope_positions(is_image, positions, grids, self.merge),
        )
        if images:
            made.pixel_values = torch.cat([image.tensors["pixel_values"] for image in images])
            made.image_grid_thw = torch.tensor(grids, dtype=torch.int64)
        return made


def rope_positions(
    is_image: torch.Tensor, positions: torch.Tensor, grids: Sequence[Sequence[int]], merge: int
) -> torch.Tensor:
    """[3, b, s]: where tokens are in time, height and width, for rotary embeddings (arXiv 2409.12191, section 2.1).

    A text token is one further than what is before it, in all three. An image begins so too; its parts are counted
    along each axis, and what follows it goes on after the longer of height and width.

    Args:
        is_image: [b, s] bool: the places of images, in the order of `grids`.
        positions: [b, s]: each token's place in its sequence. Rows may be packed: a token at 0 begins another prompt,
            and what follows a prompt in its row belongs to it.
        grids: patches of each image in time, height and width.
    """
    flat = positions.flatten()
    beginnings = (flat == 0).nonzero()[:, 0].tolist()
    shift = torch.zeros_like(flat)
    found = flat.repeat(3, 1)
    places = iter(is_image.flatten().nonzero()[:, 0].tolist())
    inside: list[tuple[slice, torch.Tensor]] = []
    for time, height, width in grids:
        rows, columns = height // merge, width // merge
        count = time * rows * columns
        first = next(places)
        for _ in range(count - 1):
            next(places)
        after = bisect_right(beginnings, first)
        end = beginnings[after] if after < len(beginnings) else len(flat)
        counted = torch.stack(torch.meshgrid(*map(torch.arange, (time, rows, columns)), indexing="ij")).flatten(1)
        inside.append((slice(first, first + count), flat[first] + shift[first] + counted))
        shift[first + count : end] += max(rows, columns) - count
    found += shift
    for span, values in inside:
        found[:, span] = values
    return found.view(3, *positions.shape)


def auto_class_of(config: PretrainedConfig) -> Any:
    """transformers' class that builds the policy of a config.json: one of images and text, or of text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of a model that reads images."""
    found = getattr(model.base_model, "visual", None)
    return found if isinstance(found, nn.Module) else None


def without_image(model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """Zero, from a forward pass of the tower over one black image of one token: where no image is, other ranks that
    share the tower's weights have some, and all take part in gathering them, and in adding up their gradients."""
    tower: Any = tower_of(model)
    config = model.config.vision_config
    merge, time = int(config.spatial_merge_size), int(config.temporal_patch_size)
    values = int(getattr(config, "in_channels", 3)) * time * int(config.patch_size) ** 2
    grid = torch.tensor([[1, merge, merge]], device=device)
    made = tower(torch.zeros(merge * merge, values, device=device), grid_thw=grid)
    sums = [made.pooler_output.sum(), *(each.sum() for each in getattr(made, "deepstack_features", None) or ())]
    return 0.0 * torch.stack(sums).sum()
