"""Availability of FlashAttention's package in this process, and its use by our attention and transformers' models."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from megaverl.platform import platform

LOWEST_VERSION = (2, 5)
# From this version on it has soft caps on scores.
LOWEST_WITH_SOFTCAP = (2, 6)
LOWEST_CAPABILITY = (8, 0)  # Ampere
# Dimensions, in multiples of 8: all that its kernels are built for (2.5 to 2.8).
LARGEST_HEAD = 256

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def is_flash_attn_available(softcap: float | None = None) -> bool:
    """Return whether FlashAttention can compute here, with this soft cap on scores.

    It can if `flash_attn` 2.5 or later imports, with a cap 2.6, and this process's
    device is a CUDA GPU of compute capability 8.0 or more.
    """
    return not (why_not() or (softcap is not None and _why_no_softcap()))


@functools.cache
def why_not() -> str:
    """Return why `is_flash_attn_available` is False; empty if it is True."""
    return reason(
        torch.cuda.get_device_capability(platform.device) if platform.is_cuda else None
    )


def reason(capability: tuple[int, int] | None) -> str:
    """Return `why_not` for a device of this compute capability; None: no CUDA device."""
    if capability is None:
        return "there is no CUDA device"
    if capability < LOWEST_CAPABILITY:
        return f"it needs a GPU of compute capability 8.0 or more, and this one has {capability[0]}.{capability[1]}"
    try:
        version = str(
            getattr(importlib.import_module("flash_attn"), "__version__", "unknown")
        )
    except Exception as error:
        # Missing, or built for another torch, CUDA or C library, for which the loader
        # may raise anything.
        return f"flash_attn cannot be imported: {type(error).__name__}: {error}"
    if not _is_at_least(version, LOWEST_VERSION):
        return f"flash_attn 2.5 or later is needed, and {version} is installed"
    return ""


def _is_at_least(version: str, lowest: tuple[int, int]) -> bool:
    """Return whether a version, such as "2.8.3", is `lowest` or later. False if it is no version."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return len(numbers) == 2 and numbers >= lowest


def why_not_for(dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> str:
    """Return why FlashAttention cannot compute attention of this dtype, head size and soft cap; empty if it can."""
    if dtype.itemsize != 2:
        return f"FlashAttention computes in 16 bits, and the model is in {dtype}"
    if head_dim > LARGEST_HEAD or head_dim % 8:
        return (
            f"FlashAttention takes heads of up to {LARGEST_HEAD} dimensions, a "
            f"multiple of 8; the model has {head_dim}"
        )
    if softcap is None or why_not():
        return why_not()
    return _why_no_softcap()


def _why_no_softcap() -> str:
    """Return why the installed FlashAttention has no soft caps on scores; empty if it has."""
    version = str(importlib.import_module("flash_attn").__version__)
    if _is_at_least(version, LOWEST_WITH_SOFTCAP):
        return ""
    return (
        f"flash_attn 2.6 or later has soft caps on scores, and {version} is installed"
    )


class Segments(NamedTuple):
    """Sequences that lie end to end in one tensor.

    Attributes:
        offsets: [sequences + 1] int32: where each sequence begins, and the end of the last one.
        longest: length of the longest sequence, a plain number: reading it from the device would synchronize.
    """

    offsets: torch.Tensor
    longest: int


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Segments,
    keys: Segments,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within sequences that are concatenated; the last query of each sees its last key.

    Since 2.1 the package aligns the causal mask and the window at that end
    (`flash_attn_varlen_func` in flash_attn/flash_attn_interface.py, 2.8.3, and its
    README, "Change behavior of causal flag").

    Args:
        query: [queries, heads, d].
        key, value: [keys, kv_heads, d].
        queries, keys: the sequences' queries and keys, equally many.
        scale: scale of the scores; None: 1 / sqrt(d).
        window: number of keys that a query sees, its own included; None: all before it.
        softcap: cap of the scores; None: no cap.

    Returns:
        [queries, heads, d].
    """
    # (keys before a query, keys after it); -1 is unlimited. The package does not count
    # the query's own key.
    window_size = (-1, -1) if window is None else (window - 1, 0)
    attended: torch.Tensor = importlib.import_module(
        "flash_attn"
    ).flash_attn_varlen_func(
        query,
        key,
        value,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        softmax_scale=scale,
        causal=True,
        window_size=window_size,
        # Versions before 2.6 have no such argument.
        **({} if softcap is None else {"softcap": softcap}),
    )
    return attended


def use_in(model: PreTrainedModel) -> None:
    """Let a transformers model use FlashAttention if it is available and the model supports it.

    A model with a soft cap on scores computes them with plain products otherwise:
    transformers' default, `sdpa`, leaves the cap out (5.19,
    integrations/sdpa_attention.py).
    """
    softcap = score_softcap(model.config)
    if model.dtype.itemsize == 2 and is_flash_attn_available(softcap):
        try:
            model.set_attn_implementation("flash_attention_2")
            return
        except (ImportError, ValueError) as error:
            logger.info(
                "%s attends without FlashAttention: %s", type(model).__name__, error
            )
    if softcap is not None:
        model.set_attn_implementation("eager")


def score_softcap(config: PretrainedConfig) -> float | None:
    """Return the soft cap on attention's scores that transformers reads from a model's configuration, or None."""
    softcap: float | None = getattr(
        config.get_text_config(), "attn_logit_softcapping", None
    )
    return softcap
