"""Doors under the names that users of such systems look for here; nothing is implemented in this folder."""

from megaverl.utils.devices import set_device_map
from megaverl.utils.kernels import is_flash_attn_available

__all__ = ["is_flash_attn_available", "set_device_map"]
