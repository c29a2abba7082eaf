"""One of as many ranks as there are GPUs: how fast they add up together, and how fast each pair talks, against NVLink.

The bus bandwidth of an all-reduce is 2 (n - 1) / n of the bytes a second, as nccl-tests count it (its PERFORMANCE.md):
what a link carries, whatever n is.
"""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megaverl.monitoring.doctor.hardware import ask, link_rate, pair_rate, read_links, read_topology
from megaverl.monitoring.doctor.trials import answer, join

ROUNDS = 5
# Of what the links carry. H100s with NVSwitch were reported at 87 % from one GPU to another (NVIDIA/nccl, issue 1264);
# rings and protocol take some more in an all-reduce. Below 60 % something is wrong, not only noisy.
ENOUGH = 0.6
FIX = (
    "NCCL_DEBUG=INFO shows the way taken (P2P/CUMEM or NVLS, not SHM or NET); unset NCCL_P2P_DISABLE and "
    "NCCL_P2P_LEVEL; the lines above about NVLink and the fabric; nothing else may run meanwhile"
)


def main() -> None:
    rank, size, device = join(torch.cuda.device_count())
    on_gpus = device.type == "cuda"
    whole = torch.ones((64 if on_gpus else 1) * 2**20, device=device)  # float32: 256 MiB, or 4
    part = whole[: whole.numel() // 4]
    all_reduce = 2 * (size - 1) / size * whole.nbytes / seconds(lambda: dist.all_reduce(whole))
    rates = torch.zeros(size, size, dtype=torch.float64, device=device)
    for sender in range(size):
        for receiver in range(size):
            dist.barrier()  # one pair at a time
            if sender != receiver and rank in (sender, receiver):
                taken = seconds(functools.partial(_pass, part, sender, receiver))
                if rank == receiver:
                    rates[sender, receiver] = part.nbytes / taken
    dist.all_reduce(rates)
    if rank == 0:
        answer(**judge(all_reduce / 1e9, (rates / 1e9).tolist(), *(expected() if on_gpus else (0.0, 0.0))))
    dist.destroy_process_group()


def _pass(tensor: torch.Tensor, sender: int, receiver: int) -> None:
    sends = dist.get_rank() == sender
    operation = dist.P2POp(dist.isend if sends else dist.irecv, tensor, receiver if sends else sender)
    for work in dist.batch_isend_irecv([operation]):  # on the group's own communicator: no other for each pair
        work.wait()


def seconds(work: Callable[[], object]) -> float:
    """Mean of some rounds, after one that opens connections."""
    begin = 0.0
    for turn in range(ROUNDS + 1):
        if turn == 1:
            _wait()
            begin = time.perf_counter()
        work()
    _wait()
    return (time.perf_counter() - begin) / ROUNDS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def expected() -> tuple[float, float]:
    """GB/s that NVLink has in one direction: of a GPU in all, and between the two GPUs with the fewest links."""
    try:
        links, topology = read_links(ask("nvlink", "-s")), read_topology(ask("topo", "-m"))
    except (OSError, subprocess.SubprocessError):
        return 0.0, 0.0
    return link_rate(links), pair_rate(topology, links)


def judge(all_reduce: float, pairs: list[list[float]], of_a_gpu: float, of_a_pair: float) -> dict[str, str]:
    """What is said of the rates.

    Args:
        all_reduce: bus bandwidth in GB/s.
        pairs: GB/s from a rank (row) to another.
        of_a_gpu, of_a_pair: what NVLink has, 0 where there is none.
    """
    each = {(a, b): rate for a, row in enumerate(pairs) for b, rate in enumerate(row) if a != b}
    (a, b), slowest = min(each.items(), key=lambda item: item[1])
    fastest = max(each.values())
    found = (
        f"all-reduce of {len(pairs)} ranks: {all_reduce:.1f} GB/s bus bandwidth{_share(all_reduce, of_a_gpu)}\n"
        f"pairs: {slowest:.1f} ({a} to {b}) to {fastest:.1f} GB/s{_share(slowest, of_a_pair)}"
    )
    if all_reduce < ENOUGH * of_a_gpu or slowest < ENOUGH * of_a_pair:
        return {"found": found, "status": "warn", "fix": FIX}
    if slowest < fastest / 2:
        return {"found": f"{found}: one pair has half of another's", "status": "warn", "fix": FIX}
    return {"found": found}


def _share(rate: float, link: float) -> str:
    return f", {100 * rate / link:.0f} % of NVLink's {link:.0f} GB/s" if link else ""


if __name__ == "__main__":
    main()
