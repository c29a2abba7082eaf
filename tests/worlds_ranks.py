"""What the ranks do in tests/test_worlds.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

_calls = 0


def count_calls(scale: int, path: str = "") -> dict[str, object]:
    global _calls
    _calls += 1
    total = torch.tensor(dist.get_rank() * scale)
    dist.all_reduce(total)
    print("a rank prints; the pipes must not mind")
    return {
        "total": int(total),
        "calls": _calls,
        "pid": os.getpid(),
        "rank": int(os.environ["RANK"]),
        "path": path,
    }


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose on rank {rank}")
    dist.barrier()  # never completed: the rank that raised does not come


def hang_on(rank: int) -> str:
    if dist.get_rank() == rank:
        wait_forever()
    return "fine"


def wait_forever() -> None:
    import threading

    threading.Event().wait()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def return_a_tensor() -> torch.Tensor:
    return torch.zeros(1)
