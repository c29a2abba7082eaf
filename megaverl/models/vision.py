"""Inputs of transformers' vision-language models besides tokens: images, and positions in three dimensions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from megaverl.data.images import FAMILIES
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import ModelError
from megaverl.platform import to_device
from megaverl.sharding.draft_head import head_method

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Replaces image tokens that a response has sampled: any ordinary token of the
# vocabulary will do.
NO_IMAGE = 0


class PackedRow(Protocol):
    """Places of the samples in a packed row, of which `packing.Packing` has more."""

    positions: torch.Tensor
    places: torch.Tensor


@dataclass
class VisionInputs:
    """Inputs of one micro-batch besides its tokens.

    Attributes:
        places: [b, s] int64: tokens in which the image token occurs only where an image is.
        positions: [3, b, s] int64: positions in time, height and width.
        pixel_values: [patches, values] float32 of all images, in the order of their places. None: no images.
        image_grid_thw: [images, 3] int64: number of patches in time, height and width.
    """

    places: torch.Tensor
    positions: torch.Tensor
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None

    def to(self, device: torch.device) -> VisionInputs:
        """Return a copy on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: to_device(x, device)
                for name, x in values.items()
                if x is not None
            },
        )

    def padded(self, padding: tuple[int, int]) -> VisionInputs:
        """Return a copy with the rows padded by ordinary tokens, in front and behind."""
        places = nn.functional.pad(self.places, padding, value=NO_IMAGE)
        return replace(
            self,
            places=places,
            positions=nn.functional.pad(self.positions, padding),
        )

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """Image arguments of transformers' forward pass; empty without images."""
        if self.pixel_values is None or self.image_grid_thw is None:
            return {}
        return {
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
        }


@dataclass(frozen=True)
class VisionReader:
    """Builds a model's inputs from tokens and images.

    Attributes:
        token: id of the token that stands for a part of an image.
        merge: one token covers merge x merge patches.
        reads_pixels: False: only positions are needed, on a pipeline stage without the tower.
    """

    token: int
    merge: int
    reads_pixels: bool = True

    @classmethod
    def of(cls, config: PretrainedConfig) -> VisionReader | None:
        """Return the reader for a model that takes images, or None for a model of text.

        Raises:
            ModelError: the model takes images, but its family is not supported.
        """
        vision: Any = getattr(config, "vision_config", None)
        if vision is None:
            return None
        if config.model_type not in FAMILIES:
            raise ModelError(
                f"{config.model_type}: it takes images, and the positions of their tokens are supported only for "
                f"{', '.join(FAMILIES)}. Use one of these, or a text model."
            )
        return cls(int(config.image_token_id), int(vision.spatial_merge_size))

    def read(
        self,
        tokens: torch.Tensor,
        prompt_lengths: torch.Tensor,
        response_lengths: torch.Tensor,
        packing: PackedRow | None,
        images: Sequence[SharedItem],
    ) -> VisionInputs:
        """Build the vision inputs for rows on the host.

        Args:
            tokens: [b, s], packed or padded.
            prompt_lengths, response_lengths: [n], in tokens.
            packing: layout of a packed row. None: each row is one sample.
            images: in the order of their places.

        Raises:
            ModelError: the image tokens of prompts do not match the sizes of `images`.
        """
        if packing is None:
            columns = torch.arange(tokens.shape[1]).expand_as(tokens)
            # Everything behind the prompt was sampled.
            drawn = columns >= prompt_lengths.unsqueeze(1)
            positions = columns
        else:
            drawn = torch.zeros_like(tokens, dtype=torch.bool)
            positions = packing.positions.unsqueeze(0)
            columns = torch.arange(packing.places.shape[1])
            prompts = prompt_lengths[:, None]
            is_response = (columns >= prompts) & (
                columns < prompts + response_lengths[:, None]
            )
            drawn[0, packing.places[is_response]] = True
        # The policy may sample the image token in a response. There it is an ordinary
        # token without an image.
        is_image = (tokens == self.token) & ~drawn
        sizes = [image.size for image in images]
        if int(is_image.sum()) != sum(sizes):
            raise ModelError(
                f"{int(is_image.sum())} tokens stand for parts of images, and images have {sum(sizes)}"
            )
        grids = [[int(n) for n in image.tensors["image_grid_thw"]] for image in images]
        inputs = VisionInputs(
            torch.where((tokens == self.token) & drawn, NO_IMAGE, tokens),
            rope_positions(is_image, positions, grids, self.merge),
        )
        if images and self.reads_pixels:
            inputs.pixel_values = torch.cat(
                [image.tensors["pixel_values"] for image in images]
            )
            inputs.image_grid_thw = torch.tensor(grids, dtype=torch.int64)
        return inputs


def rope_positions(
    is_image: torch.Tensor,
    positions: torch.Tensor,
    grids: Sequence[Sequence[int]],
    merge: int,
) -> torch.Tensor:
    """Return positions in time, height and width for rotary embeddings, [3, b, s] (arXiv 2409.12191, section 2.1).

    A text token is one position after its predecessor in all three dimensions. An image
    starts like a text token, and its parts are counted along each dimension. The token
    after an image continues from the larger of its height and width.

    Args:
        is_image: [b, s] bool: places of image tokens, in the order of `grids`.
        positions: [b, s]: position of each token in its sequence. In a packed row, a token at 0 starts another prompt,
            and everything up to the next one belongs to it.
        grids: number of patches of each image in time, height and width.
    """
    flat = positions.flatten()
    # Position 0 marks the beginning of a prompt in a packed row.
    beginnings = (flat == 0).nonzero()[:, 0].tolist()
    shift = torch.zeros_like(flat)
    rotary = flat.repeat(3, 1)
    places = iter(is_image.flatten().nonzero()[:, 0].tolist())
    inside: list[tuple[slice, torch.Tensor]] = []
    for time, height, width in grids:
        rows = height // merge
        columns = width // merge
        count = time * rows * columns
        first = next(places)
        for _ in range(count - 1):
            next(places)
        # Positions shift until the next prompt begins.
        after = bisect_right(beginnings, first)
        end = beginnings[after] if after < len(beginnings) else len(flat)
        counted = torch.stack(
            torch.meshgrid(*map(torch.arange, (time, rows, columns)), indexing="ij")
        ).flatten(1)
        inside.append(
            (slice(first, first + count), flat[first] + shift[first] + counted)
        )
        # The image takes fewer positions than tokens, and later tokens move up.
        shift[first + count : end] += max(rows, columns) - count
    rotary += shift
    # After the shift, because an image's positions are not a shift of the text's.
    for span, image_positions in inside:
        rotary[:, span] = image_positions
    return rotary.view(3, *positions.shape)


def auto_class_of(config: PretrainedConfig) -> Any:
    """Return transformers' auto class for a config.json: for images and text, or for text only.

    Of a draft head, which transformers does not know, it is the class of the head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if (method := head_method(config.to_dict())) is not None:
        from megaverl.models.draft_head import HEADS

        return HEADS[method]
    return (
        AutoModelForCausalLM
        if getattr(config, "vision_config", None) is None
        else AutoModelForImageTextToText
    )


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that encodes images, or None."""
    tower = getattr(model.base_model, "visual", None)
    return tower if isinstance(tower, nn.Module) else None


def zero_of_tower(tower: Any, device: torch.device) -> torch.Tensor:
    """Return zero, computed by running a vision tower on one black image of one token.

    All weights of the tower get a gradient of zero. FSDP2 needs it on a rank without
    images, because every rank takes part in gathering weights and in reducing
    gradients. Megatron-core needs it where a bucket is reduced once all of its
    gradients are there.
    """
    config = tower.config
    merge = int(config.spatial_merge_size)
    time = int(config.temporal_patch_size)
    values = int(getattr(config, "in_channels", 3)) * time * int(config.patch_size) ** 2
    # One token's worth of patches.
    grid = torch.tensor([[1, merge, merge]], device=device)
    features = tower(torch.zeros(merge * merge, values, device=device), grid_thw=grid)
    # Every output of the tower, so that all of its weights get a gradient, of zero.
    sums = [
        features.pooler_output.sum(),
        *(
            feature.sum()
            for feature in getattr(features, "deepstack_features", None) or ()
        ),
    ]
    # Multiplied by zero: the sum takes part in the graph and changes nothing.
    return 0.0 * torch.stack(sums).sum()
