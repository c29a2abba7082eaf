"""The door to `megaverl.api.devices`."""

from megaverl.api.devices import set_device_map

__all__ = ["set_device_map"]
