"""The public name of `megaverl.trainer.api.devices`."""

from megaverl.trainer.api.devices import set_device_map

__all__ = ["set_device_map"]
