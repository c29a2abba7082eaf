"""The door to `megaverl.config.installed`."""

from megaverl.config.installed import is_flash_attn_available

__all__ = ["is_flash_attn_available"]
