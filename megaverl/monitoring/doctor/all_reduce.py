"""One of two ranks that add a tensor up, and try whether they may read each other's memory."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megaverl.monitoring.doctor.trials import RANKS, answer, join

NUMEL = 4 * 2**20
ROUNDS = 5


def main() -> None:
    rank, _, device = join(RANKS)
    with_gpus = device.type == "cuda"
    tensor = torch.full((NUMEL,), float(rank + 1), device=device)
    dist.all_reduce(tensor)  # the first opens the connections
    expected = sum(range(1, RANKS + 1))
    if not bool((tensor == expected).all()):
        raise SystemExit(f"the sum is wrong: found {float(tensor[0])}, expected {expected}")
    dist.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
    if with_gpus:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / ROUNDS
    if rank == 0:
        nbytes = tensor.numel() * tensor.element_size()
        where = "over NCCL on two GPUs" if with_gpus else "over gloo"
        if not with_gpus and torch.cuda.is_available():
            where += " (one GPU is too few to try NCCL)"
        answer(f"right, {where}: {nbytes / 2**20:.0f} MiB in {seconds * 1e3:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
