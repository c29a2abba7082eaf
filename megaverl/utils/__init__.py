"""Public names that users of such systems look for here; nothing is implemented in this folder."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaverl.platform.flash_attention import is_flash_attn_available
    from megaverl.trainer.api.devices import set_device_map

__all__ = ["is_flash_attn_available", "set_device_map"]

_PUBLIC = {
    "is_flash_attn_available": "megaverl.platform.flash_attention",  # which loads torch
    "set_device_map": "megaverl.trainer.api.devices",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megaverl.utils' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    found: object = getattr(import_module(_PUBLIC[name]), name)
    return found
