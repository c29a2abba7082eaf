"""Start torch.distributed for a benchmark whose only rank is its own process."""

from __future__ import annotations

import os


def start_one_rank() -> None:
    """Initialize the default process group with this process alone, on the loopback interface."""
    import torch.distributed as dist

    from megaverl.platform import platform

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    platform.start()
    dist.init_process_group(
        platform.backend, store=dist.HashStore(), rank=0, world_size=1
    )
