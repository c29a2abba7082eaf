"""What the ranks do in tests/test_launcher.py."""

from __future__ import annotations

import os
import signal
import sys
import tempfile

_imported = [name in sys.modules for name in ("torch", "vllm")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

_calls = 0


def count_calls(scale: int, path: str = "") -> dict[str, object]:
    global _calls
    _calls += 1
    total = torch.tensor(dist.get_rank() * scale)
    dist.all_reduce(total)
    print("a rank prints; the pipes must not mind")
    left = tempfile.mkdtemp()
    return {
        "total": int(total),
        "calls": _calls,
        "pid": os.getpid(),
        "rank": int(os.environ["RANK"]),
        "path": path,
        "left": left,
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


def imported_before() -> list[bool]:
    return _imported


def end_each_in_its_way(path: str) -> object:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
    if rank == 1:
        sys.exit(7)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        wait_forever()
    return [rank, path]


def stop_or_raise() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("no process group") if not dist.is_initialized() else SystemExit(3)
