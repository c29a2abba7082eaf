"""Whether FlashAttention's package can be used in this process, and its use by transformers' models."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING

import torch

from megaverl.platform.device import platform

LOWEST_VERSION = (2, 5)
LOWEST_CAPABILITY = (8, 0)  # Ampere

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def is_flash_attn_available() -> bool:
    """Whether FlashAttention can compute here.

    `flash_attn` imports and is of version 2.5 or later, and this process's device is a CUDA GPU of compute capability
    8.0 or more.
    """
    return not why_not()


@functools.cache
def why_not() -> str:
    """Why `is_flash_attn_available` is False; empty: it is not."""
    return reason(torch.cuda.get_device_capability(platform.device) if platform.is_cuda else None)


def reason(capability: tuple[int, int] | None) -> str:
    """`why_not` on a device of this compute capability; None: no CUDA device."""
    if capability is None:
        return "there is no CUDA device"
    if capability < LOWEST_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or more, and this one has {capability[0]}.{capability[1]}"
    try:
        found = str(getattr(importlib.import_module("flash_attn"), "__version__", "unknown"))
    except Exception as error:  # absent, or built for another torch, CUDA or C library: its loader raises as it likes
        return f"flash_attn cannot be imported: {type(error).__name__}: {error}"
    numbers = [int(part) for part in found.split(".")[:2] if part.isdigit()]
    if len(numbers) < 2 or tuple(numbers) < LOWEST_VERSION:
        return f"flash_attn 2.5 or later is needed, and {found} is installed"
    return ""


def use_in(model: PreTrainedModel) -> None:
    """Let a transformers model, on its device, attend by FlashAttention where that is available and the model can."""
    if model.dtype.itemsize == 2 and is_flash_attn_available():
        try:
            model.set_attn_implementation("flash_attention_2")
        except (ImportError, ValueError) as error:
            logger.info("%s attends without FlashAttention: %s", type(model).__name__, error)
