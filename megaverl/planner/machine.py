"""The machine that is planned for: numbers that a person states, with those of an H100 node as defaults."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Bytes and bytes per second are decimal, one direction, per GPU.

    Attributes:
        gpus_per_node: neighbouring ranks share a node and its NVLink.
        memory: of a GPU. An "80 GB" H100 shows 85.5e9 bytes; the defaults count 80e9.
        reserve: of it, what neither role nor engine may count on: CUDA's context, NCCL's buffers, fragments.
        nvlink, network, hbm: bandwidths; NVLink 4 gives 450 GB/s each way, a 400 Gbit/s adapter 50 GB/s.
    """

    gpus_per_node: int = 8
    memory: float = 80 * GB
    reserve: float = 3 * GB
    nvlink: float = 450 * GB
    network: float = 50 * GB
    hbm: float = 3350 * GB

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node
