"""Gain of `torch.compile` on a CPU for norm, rotary embedding and gate, forward and backward, in one thread.

    python tools/bench_compile.py [--tokens 2048] [--hidden 256] [--repeats 40]

Each row compares today's implementation with the compiled textbook formula; both take turns in one run, and medians are
printed. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.models.layers import rms_norm

HEAD_DIM = 32


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
        x.dtype
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def gate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return functional.silu(first) * second


def median_microseconds(
    function: Callable[..., Tensor], inputs: list[Tensor], repeats: int
) -> float:
    seconds = []
    for _ in range(repeats):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:1]] + inputs[1:]
        gradient = torch.ones_like(function(*leaves))
        begin = time.perf_counter()
        function(*leaves).backward(gradient)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens, hidden = options.tokens, options.hidden
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; microseconds"
    )
    for dtype in (torch.float32, torch.bfloat16):
        angles = [torch.rand(tokens, 1, HEAD_DIM, dtype=dtype) for _ in range(2)]
        weight = torch.rand(hidden, dtype=dtype, requires_grad=True)
        cases: list[
            tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
        ] = [
            (
                norm,
                lambda x, weight: rms_norm(x, weight, 1e-6),
                [torch.rand(tokens, hidden, dtype=dtype), weight],
            ),
            (
                rotary,
                rotary,
                [
                    torch.rand(tokens, hidden // HEAD_DIM, HEAD_DIM, dtype=dtype),
                    *angles,
                ],
            ),
            (gate, gate, [torch.rand(tokens, 8 * hidden, dtype=dtype)]),
        ]
        for textbook, today, inputs in cases:
            compiled = torch.compile(textbook)
            begin = time.perf_counter()
            median_microseconds(compiled, inputs, 1)
            first = time.perf_counter() - begin
            now, then = (
                median_microseconds(function, inputs, options.repeats)
                for function in (today, compiled)
            )
            name = f"{textbook.__name__} {str(dtype).removeprefix('torch.')}"
            print(
                f"{name:17} today {now:7.0f}  compiled {then:7.0f}  ratio {now / then:.2f}  first call {first:.1f} s"
            )


if __name__ == "__main__":
    main()
