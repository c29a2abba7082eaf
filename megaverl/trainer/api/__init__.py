"""Public API for Python programs. It provides the names that users of such systems expect, for one implementation.

`megaverl`, `megaverl.trainer` and `megaverl.utils` re-export these names and import
nothing until they are used.
"""

from megaverl.trainer.api.devices import (
    DataParallelConfig,
    Devices,
    device_map,
    parse_devices,
    placement_of,
    set_device_map,
)

__all__ = [
    "DataParallelConfig",
    "Devices",
    "device_map",
    "parse_devices",
    "placement_of",
    "set_device_map",
]
