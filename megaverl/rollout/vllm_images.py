"""Images in requests to vLLM: an engine in this process, and a server.

Images arrive already processed, so engine and trainer see the same numbers, and each
image is processed once. A server receives the same tensors in the request, as vLLM's
own disaggregated processing sends them (0.32, `entrypoints/scale_out`). It would
process a picture with another library than the trainer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.rollout.cpu_limits import check_images_run_here
from megaverl.rollout.vllm_tracing import pixels_are_normalised

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItems

    from megaverl.config.run import ImagesConfig
    from megaverl.distributed.shared_item import SharedItem

MODALITY = "image"


def prepare_images(architecture: str) -> dict[str, Any]:
    """Return further EngineArgs of a model that takes images in this vLLM version. To
    be called before its engine is made.

    Raises:
        RolloutError: vLLM's CPU build would compute the images differently.
    """
    arguments = pixels_are_normalised()
    if not platform.is_cuda:
        check_images_run_here(architecture)
        # vLLM does not measure memory on a CPU.
        arguments["skip_mm_profiling"] = True
    return arguments


def image_arguments(config: ImagesConfig, tokenizer: str) -> dict[str, Any]:
    """Return the EngineArgs of a model that takes images.

    Args:
        tokenizer: the run's tokenizer; vLLM refuses such models without one.
    """
    return {
        "skip_tokenizer_init": False,
        "tokenizer": tokenizer,
        "limit_mm_per_prompt": {"image": config.max_per_prompt, "video": 0},
        # The engine processes no images itself, but derives the most tokens of an image
        # from these options.
        "mm_processor_kwargs": dict(config.processor),
        "mm_processor_cache_gb": 0,
    }


def image_input(
    token: int, prompt: Sequence[int], images: Sequence[SharedItem], number: int
) -> Any:
    """Return vLLM's input of a prompt with images that this run's processor has already processed.

    Args:
        token: placeholder token of a part of an image.
        number: the prompt's number in messages.

    Raises:
        RolloutError: the prompt's placeholder tokens do not match its images.
    """
    from vllm.inputs.engine import mm_input, tokens_input
    from vllm.multimodal.inputs import PlaceholderRange

    if not images:
        return tokens_input(list(prompt))
    ranges = [
        PlaceholderRange(offset=offset, length=length)
        for offset, length in places_of_images(token, prompt, images, number)
    ]
    return mm_input(
        list(prompt),
        _items(images),
        {MODALITY: [image.key for image in images]},
        {MODALITY: ranges},
    )


def image_features(
    token: int, prompt: Sequence[int], images: Sequence[SharedItem], number: int
) -> dict[str, Any]:
    """Return the field `features` of a server's request for a prompt with images.

    For arguments and errors, see `image_input`.
    """
    platform.adapt_vllm()
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (
        encode_mm_kwargs_item,
    )

    ranges = [
        {"offset": offset, "length": length}
        for offset, length in places_of_images(token, prompt, images, number)
    ]
    tensors = [encode_mm_kwargs_item(item) for item in _items(images)[MODALITY]]
    return {
        "mm_hashes": {MODALITY: [image.key for image in images]},
        "mm_placeholders": {MODALITY: ranges},
        "kwargs_data": {MODALITY: tensors},
    }


def _items(images: Sequence[SharedItem]) -> MultiModalKwargsItems:
    """Return the tensors of images as vLLM's models of the Qwen-VL families take them."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grids = torch.stack([image.tensors["image_grid_thw"] for image in images])
    pixels = torch.cat([image.tensors["pixel_values"] for image in images])
    # An image has as many rows of pixels as its grid has patches.
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(MODALITY, grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),
    }
    processed = BatchFeature({"pixel_values": pixels, "image_grid_thw": grids})
    return MultiModalKwargsItems.from_hf_inputs(processed, fields)


def places_of_images(
    token: int, prompt: Sequence[int], images: Sequence[SharedItem], number: int
) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of each image in the prompt.

    Raises:
        RolloutError: the placeholder tokens do not match the images.
    """
    places = list(image_places(prompt, token, [image.size for image in images]))
    num_placed = sum(length for _, length in places)
    if len(places) != len(images) or prompt.count(token) != num_placed:
        raise RolloutError(
            f"prompt {number}: its tokens have {len(places)} places for its {len(images)} images."
        )
    return places


def image_places(
    prompt: Sequence[int], token: int, sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (first token, number of tokens) of each image in the prompt.

    Stops at a run of image tokens whose length does not match the images.
    """
    waiting, place = list(sizes), 0
    for is_image, run in groupby(prompt, lambda token_id: token_id == token):
        length = len(list(run))
        # Adjacent images have no token between them, so one run may hold several.
        while is_image and waiting and waiting[0] <= length:
            yield place, waiting[0]
            place, length = place + waiting[0], length - waiting.pop(0)
        if is_image and length:
            return
        place += length
