"""Images in vLLM's CPU build without torchvision, whose CPU wheel is not on PyPI. Not imported where CUDA is.

vLLM takes two things from transformers' processors that need it: a function beside an image processor that has a PIL
variant with the same function, and a processor of videos, which are never given to it here.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import Any

from megaverl.errors import RolloutError

FROM_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
# vLLM's CPU attention is causal over the tokens of an image, where these models see all of it at once
NOT_CAUSAL = ("Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration")


def adapt(architecture: str) -> None:
    """Before an engine of a model that takes images.

    Raises:
        RolloutError: a model whose images vLLM's CPU build computes otherwise.
    """
    if architecture in NOT_CAUSAL:
        raise RolloutError(
            f"{architecture}: vLLM's CPU build attends causally over the tokens of an image, and the model does not: "
            "its answers would be those of another model. Generate on a GPU, or use a Qwen-VL model here."
        )
    if importlib.util.find_spec("torchvision") is None:
        _without_torchvision()


@functools.cache
def _without_torchvision() -> None:
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
    from vllm.transformers_utils import processor as processors

    sys.modules[FROM_TORCHVISION] = image_processing_pil_qwen2_vl

    def get_processor(name: str, *args: Any, processor_cls: Any, tokenizer: Any = None, **options: Any) -> Any:
        class WithoutVideos(processor_cls):  # type: ignore[misc]
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
                """The processor of videos is that of images: only its sizes are read."""

        own = {key: value for key, value in options.items() if key in ("size", "min_pixels", "max_pixels")}
        images = AutoImageProcessor.from_pretrained(name, backend="pil", **own)
        return WithoutVideos(images, tokenizer or AutoTokenizer.from_pretrained(name), images)

    processors.cached_get_processor = functools.lru_cache(get_processor)
