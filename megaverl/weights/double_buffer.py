"""A second set of the destination's tensors, where the next version gathers while the last one is in use."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.errors import ReshardError
from megaverl.platform import platform

# Left free beside the second set: allocations of the generation that goes on meanwhile.
HEADROOM = 1.05


class Staging:
    """Tensors like the destination's, padding included, and the swap at the boundary.

    Args:
        may_rebind: the destination's tensors may take other storage; else the swap is a copy on the device.

    Raises:
        ReshardError: there is no memory for a second set.
    """

    def __init__(self, dest: Mapping[str, torch.Tensor], may_rebind: bool) -> None:
        needed = sum(tensor.numel() * tensor.element_size() for tensor in dest.values())
        free = free_bytes()
        if free is not None and needed * HEADROOM > free:
            raise ReshardError(
                f"reshard.overlap needs {needed:,} bytes for a second set of the engine's weights, and {free:,} are "
                "free on this rank. Set reshard.overlap=false, or lower rollout.vllm.gpu_memory_utilization."
            )
        self._dest, self._may_rebind = dest, may_rebind
        self.tensors = {name: tensor.detach().clone() for name, tensor in dest.items()}

    def swap(self) -> None:
        """The staged version becomes the destination's."""
        for name, staged in self.tensors.items():
            target = self._dest[name]
            if self._may_rebind:
                target.data, staged.data = staged.data, target.data
            else:
                target.detach().copy_(staged)


def free_bytes() -> int | None:
    """Memory that is free where the weights are; None where that cannot be known."""
    if platform.is_cuda:
        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":", 1) for line in lines)
    except OSError:  # not Linux
        return None
    return int(found["MemAvailable"].split()[0]) * 1024
