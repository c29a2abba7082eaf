"""Public names that users of such systems look for here; nothing is implemented in this folder."""

from typing import Any

from megaverl.utils.devices import set_device_map

__all__ = ["is_flash_attn_available", "set_device_map"]


def __getattr__(name: str) -> Any:
    if name != "is_flash_attn_available":
        raise AttributeError(f"module 'megaverl.utils' has no attribute {name!r}; it has {', '.join(__all__)}")
    from megaverl.platform.flash_attention import is_flash_attn_available  # which loads torch

    return is_flash_attn_available
