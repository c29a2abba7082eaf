"""Device of this process: CUDA or CPU, chosen by what exists. Libraries are adapted to a CPU here and nowhere else."""

from megaverl.platform.device import Platform, page_locked, platform, to_device

__all__ = [
    "Platform",
    "page_locked",
    "platform",
    "to_device",
]
