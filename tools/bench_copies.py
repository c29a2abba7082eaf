"""Measure copies within a GPU: one kernel for many tensors beside plain copies, by size, stride and dtype.

    python tools/bench_copies.py

A reshard on ranks shared with the engine copies boxes within the GPU (megaverl/weights/transports/transport.py:
`copy_boxes`). The figures are GB/s of bytes read and written, medians of CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

SIZES_KIB = (64, 256, 1024, 4096, 8192, 16384, 32768, 131072)
TOTAL_BYTES = 2**30
ROUNDS = 30


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(
        argv
    )
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure")
        return 2
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: GB/s together / one by one"
    )
    print(
        f"{'KiB':>8} {'tensors':>8} {'contiguous':>15} {'strided target':>15} {'to float32':>15}"
    )
    for kib in SIZES_KIB:
        numel = kib * 1024 // 2
        count = max(4, min(256, TOTAL_BYTES // (kib * 1024)))
        sources = [torch.randn(numel, device="cuda").bfloat16() for _ in range(count)]
        columns = [
            _both_rates(sources, [torch.empty_like(source) for source in sources]),
            _both_rates(
                [source.view(-1, 128) for source in sources],
                [_strided(numel) for _ in sources],
            ),
            _both_rates(sources, [torch.empty(numel, device="cuda") for _ in sources]),
        ]
        print(
            f"{kib:8} {count:8} "
            + " ".join(
                f"{batched_rate:7.0f}/{single_rate:7.0f}"
                for batched_rate, single_rate in columns
            )
        )
    return 0


def _strided(numel: int) -> torch.Tensor:
    """Return a view of half of the columns of a tensor, with rows of 128 elements."""
    return torch.empty(numel // 128, 256, device="cuda", dtype=torch.bfloat16)[:, :128]


def _both_rates(
    sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> tuple[float, float]:
    """Return the rates of one call for all tensors and of a call for each, in GB/s of bytes read and written."""
    num_bytes = sum(tensor.nbytes for tensor in (*sources, *targets))

    def one_by_one() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    copy_batched = partial(torch._foreach_copy_, targets, sources)
    return num_bytes / _median_ms(copy_batched) / 1e6, num_bytes / _median_ms(
        one_by_one
    ) / 1e6


def _median_ms(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        begin, end = (
            torch.cuda.Event(enable_timing=True),
            torch.cuda.Event(enable_timing=True),
        )
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
