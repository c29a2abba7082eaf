"""Peak memory of log-probs and entropy, with their backward pass, against the size of the logits.

    python tools/bench_logprobs.py --vocab 131072 --tp 2 --tokens 2048

Starts one process per tensor-parallel rank (gloo; on a GPU all share cuda:0), each with its columns of bfloat16 logits.
Counts the memory that is alive beside the logits at the peak, which includes their gradient. On a CPU that is the
process's resident memory (VmHWM, reset before each side), on a GPU torch's own count. The other side computes the same
in plain PyTorch: a float32 log-softmax of the whole vocabulary on one rank.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megaverl.models.vocab_parallel import vocab_parallel_log_probs
from megaverl.processes import end_with_parent

LIMIT = 1.2
M_MMAP_THRESHOLD = -3  # malloc.h


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if torch.cuda.is_available() else "cpu",
    )
    options = parser.parse_args(arguments)
    if options.vocab % options.tp:
        parser.error(f"--vocab {options.vocab} is not a multiple of --tp {options.tp}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(options, folder, os.getpid()), nprocs=options.tp)
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(options.tp)
        ]
    size = options.tokens * options.vocab // options.tp * 2
    print(
        f"{options.tokens} tokens x {options.vocab} / tp{options.tp}, bfloat16, {options.device}: logits of a rank "
        f"{size / 2**20:.0f} MiB"
    )
    worst = max(rank_peaks["vocab_parallel"]["bytes"] for rank_peaks in ranks) / size
    for side in ("vocab_parallel", "plain"):
        peak = max(rank_peaks[side]["bytes"] for rank_peaks in ranks)
        seconds = max(rank_peaks[side]["seconds"] for rank_peaks in ranks)
        print(
            f"  {side:15} peak {peak / 2**20:7.0f} MiB = {peak / size:5.2f} x logits, {seconds * 1e3:7.0f} ms"
        )
    print(f"  limit {LIMIT} x logits: {'kept' if worst <= LIMIT else 'MISSED'}")
    return 0 if worst <= LIMIT else 1


def measure(rank: int, options: argparse.Namespace, folder: str, parent: int) -> None:
    """Measure both sides on one rank, after a small pass of each, so that one-time allocations are not counted."""
    end_with_parent(parent)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    # glibc: every large block is mapped by itself and returned when freed, so that what
    # is resident is what is alive.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.tp
    )
    width = options.vocab // options.tp
    generator = torch.Generator().manual_seed(rank)

    def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.empty(tokens, width, dtype=torch.bfloat16, device=options.device)
        # A whole float32 draw would be the peak itself.
        for start in range(0, tokens, 64):
            part = logits[start : start + 64]
            part.copy_(torch.randn(part.shape, generator=generator))
        return logits.requires_grad_(), torch.arange(
            tokens, device=options.device
        ) * 7 % options.vocab

    def sharded(logits: torch.Tensor, targets: torch.Tensor) -> None:
        log_probs, entropy = vocab_parallel_log_probs(
            logits,
            targets,
            vocab_size=options.vocab,
            with_entropy=True,
            group=dist.group.WORLD,
        )
        (log_probs.mean() - 0.01 * entropy.mean()).backward()

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> None:
        distribution = torch.log_softmax(logits.float(), dim=-1)
        log_probs = distribution.gather(1, targets[:, None] % width)
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
        (log_probs.mean() - 0.01 * entropy.mean()).backward()

    peaks: dict[str, Any] = {}
    for name, function in (("vocab_parallel", sharded), ("plain", plain)):
        function(*inputs(8))
        peaks[name] = peak(function, *inputs(options.tokens))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def peak(
    function: Callable[..., None], logits: torch.Tensor, targets: torch.Tensor
) -> dict[str, float]:
    """Return the bytes beside the inputs at the peak of `function`, and its seconds."""
    on_gpu = logits.is_cuda
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        # Freed memory that is kept would hide what is asked for next.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = resident("VmRSS")
    start = time.perf_counter()
    function(logits, targets)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    return {"bytes": float(after - before), "seconds": seconds}


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this needs Linux")


if __name__ == "__main__":
    sys.exit(main())
