"""Transports: what carries a plan's boxes, one file each. A new transport is a new file here that registers itself."""

from importlib import import_module
from pkgutil import iter_modules

from megaverl.weights.transports.local import copy_local
from megaverl.weights.transports.registry import (
    BUCKET_BYTES,
    Moved,
    TransferJob,
    Transport,
    TransportOptions,
    assign,
    register,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "BUCKET_BYTES",
    "Moved",
    "TransferJob",
    "Transport",
    "TransportOptions",
    "assign",
    "copy_local",
    "register",
]
