"""CUDA or CPU: the one place that knows, and the one place where libraries are adapted to a CPU."""

from megaverl.platform.device import Platform, platform

__all__ = ["Platform", "platform"]
