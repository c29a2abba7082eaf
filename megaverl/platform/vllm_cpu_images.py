"""Images in vLLM's CPU build without torchvision, whose CPU wheel is not on PyPI. Not imported where CUDA is.

vLLM takes two things from transformers' processors that need it: a function beside an image processor that has a PIL
variant with the same function, and a processor of videos, which are never given to it here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megaverl.errors import RolloutError

FROM_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
WITH_PIL = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
# vLLM's CPU attention is causal over the tokens of an image, where these models see all of it at once
NOT_CAUSAL = ("Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration")


def check_runs_here(architecture: str) -> None:
    """Refuse a model whose images vLLM's CPU build computes otherwise.

    Raises:
        RolloutError: names the architecture.
    """
    if architecture in NOT_CAUSAL:
        raise RolloutError(
            f"{architecture}: vLLM's CPU build attends causally over the tokens of an image, and the model does not: "
            "its answers would be those of another model. Generate on a GPU, or use a Qwen-VL model here."
        )


class _WithPil(MetaPathFinder, Loader):
    """Gives the PIL variant's module in the place of torchvision's, when that is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == FROM_TORCHVISION else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(WITH_PIL)

    def exec_module(self, module: ModuleType) -> None:
        """It is there already."""


def adapt() -> None:
    """Where torchvision is missing, let vLLM do without."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm.transformers_utils import processor as processors

    sys.meta_path.insert(0, _WithPil())

    def get_processor(name: str, *args: Any, processor_cls: Any, tokenizer: Any = None, **options: Any) -> Any:
        from transformers import AutoImageProcessor, AutoTokenizer

        class WithoutVideos(processor_cls):  # type: ignore[misc]
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
                """The processor of videos is that of images: only its sizes are read."""

        own = {key: value for key, value in options.items() if key in ("size", "min_pixels", "max_pixels")}
        images = AutoImageProcessor.from_pretrained(name, backend="pil", **own)
        return WithoutVideos(images, tokenizer or AutoTokenizer.from_pretrained(name), images)

    processors.cached_get_processor = functools.lru_cache(get_processor)
