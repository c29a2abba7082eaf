"""The kernels of `megaverl/kernels` beside PyTorch's operators, in turn, on one thread: milliseconds and the ratio.

python tools/bench_kernels.py
python tools/bench_kernels.py --heads 14 --kv-heads 2 --head-dim 64 --own 1024
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation of megaverl

import torch  # noqa: E402

from megaverl.kernels import gated_silu as gates  # noqa: E402
from megaverl.kernels import linear, rms_norm, rotary  # noqa: E402
from megaverl.kernels.causal_attention import packed_causal_attention  # noqa: E402
from megaverl.kernels.extension import why_not  # noqa: E402
from megaverl.models.attention import CausalAttention  # noqa: E402
from megaverl.models.packing import pack  # noqa: E402

Function = Callable[..., torch.Tensor]


def compare(what: str, ours: Function, theirs: Function, inputs: list[torch.Tensor], repeats: int) -> None:
    """Print the medians of forward and backward passes, taken in turn."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats + 1):  # the first warms up
        for side, function in (("ours", ours), ("PyTorch", theirs)):
            start = time.perf_counter()
            output = function(*leaves)
            middle = time.perf_counter()
            torch.autograd.grad(output, leaves, torch.ones_like(output))
            seconds.setdefault(("forward", side), []).append(middle - start)
            seconds.setdefault(("backward", side), []).append(time.perf_counter() - middle)
    for way in ("forward", "backward"):
        mine, other = (1e3 * statistics.median(seconds[way, side][1:]) for side in ("ours", "PyTorch"))
        print(line(what, way, mine, other))


def compare_norms(tokens: int, width: int, dtype: torch.dtype, repeats: int) -> None:
    inputs = [torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype)]
    kernel, operators = rms_norm._RMSNorm, rms_norm._RMSNormOfOperators
    name = f"norms, {width} wide, {str(dtype).removeprefix('torch.')}"
    compare(name, lambda x, w: kernel.apply(x, w, 1e-5), lambda x, w: operators.apply(x, w, 1e-5), inputs, repeats)


def compare_rotations(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, repeats: int) -> None:
    from megaverl.platform import platform

    platform.adapt_megatron()
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as adapted

    queries = torch.randn(tokens, 1, heads, head_dim).to(dtype)
    angles = torch.rand(tokens, 1, 1, head_dim)
    theirs = getattr(adapted, "__wrapped__", adapted)
    name = f"rotary embeddings, {str(dtype).removeprefix('torch.')}"
    compare(name, lambda q: rotary.rotate(q, angles), lambda q: theirs(q, angles), [queries], repeats)


def compare_products(rows: int, inner: int, outputs: int, repeats: int) -> None:
    """As in decoding: forward alone, and as many weights by turns as no cache holds."""
    weights = [torch.randn(outputs, inner).bfloat16() for _ in range(8)]
    if not linear.fits(weights[0]):
        return
    x = torch.randn(rows, inner).bfloat16()
    seconds: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for side, function in (("ours", linear.linear), ("PyTorch", torch.nn.functional.linear)):
            start = time.perf_counter()
            for weight in weights:
                function(x, weight)
            seconds.setdefault(side, []).append((time.perf_counter() - start) / len(weights))
    mine, other = (1e3 * statistics.median(seconds[side][1:]) for side in ("ours", "PyTorch"))
    print(line(f"{rows} rows times {inner} x {outputs}", "forward", mine, other))


def line(what: str, way: str, mine: float, other: float) -> str:
    return f"{what:40} {way:9} ours {mine:7.2f} ms   PyTorch {other:7.2f} ms   {other / mine:5.2f} x"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=2, help="prompts")
    parser.add_argument("--group", type=int, default=8, help="sequences that share a prompt")
    parser.add_argument("--common", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--own", type=int, default=256, help="tokens of a response")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    if why_not():
        raise SystemExit(f"the kernels cannot be used here: {why_not()}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count, length = args.groups * args.group, args.common + args.own
    numbers = [number for number in range(args.groups) for _ in range(args.group)]
    packing = pack([length] * count, [args.common] * count, numbers, width=length)
    tokens = len(packing.source)
    layer = CausalAttention(argparse.Namespace(window_size=None), 1, None, "self")
    joined = torch.randn(tokens, args.heads + 2 * args.kv_heads, args.head_dim).bfloat16()
    inputs = list(joined.split([args.heads, args.kv_heads, args.kv_heads], dim=1))
    print(f"{count} sequences of {length} tokens, {tokens} packed; {args.heads} heads of {args.head_dim} over "
          f"{args.kv_heads}; medians of {args.repeats}, one thread")  # fmt: skip
    compare(
        "attention, bfloat16",
        lambda q, k, v: packed_causal_attention(q, k, v, packing.segments).flatten(1),
        lambda q, k, v: packing.attend(layer._attend, q, k, v, None),
        inputs,
        args.repeats,
    )
    for dtype in (torch.bfloat16, torch.float32):
        both = torch.randn(tokens, 2 * args.ffn).to(dtype)
        name = f"silu(gate) * up, {args.ffn} wide, {str(dtype).removeprefix('torch.')}"
        compare(name, gates.gated_silu, gates._GatedSiluOfOperators.apply, [both], args.repeats)
        compare_norms(tokens, args.heads * args.head_dim, dtype, args.repeats)
        compare_rotations(tokens, args.heads, args.head_dim, dtype, args.repeats)
    compare_products(count, args.heads * args.head_dim, 2 * args.ffn, args.repeats)


if __name__ == "__main__":
    main()
