"""What the ranks do in tests/platform/test_vllm_cpu.py."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch

from megaverl.platform import Platform
from megaverl.platform.vllm_cpu import (
    ADAPTATIONS,
    repack_weights,
    shared_memory_name,
)


def adapt_cuda_then_cpu() -> list[Any]:
    """In one new interpreter: `adapt_cuda`, and where there is no GPU `apply_twice`."""
    return [adapt_cuda(), [] if torch.cuda.is_available() else apply_twice()]


def apply_twice() -> list[dict[str, Any]]:
    """What the adaptations change: before them, after them, and after them again."""
    import vllm.v1.worker.cpu_worker as cpu_worker
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample import sampler

    def state() -> dict[str, Any]:
        # Larger than the weights whose products have padded rows.
        layer = torch.nn.Linear(512, 512, bias=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        wrapped = (
            utils.dispatch_cpu_unquantized_gemm,
            cpu_worker.init_worker_distributed_environment,
        )
        log_probs = torch.tensor([[-1.0, -0.5, -3.0]])
        # vLLM compiles the count of ranks: a minute on a busy machine, for one row.
        with torch.compiler.set_stance("force_eager"):
            drawn = sampler.Sampler.gather_logprobs(log_probs, 0, torch.tensor([0]))
        return {
            "weight_kept": layer.weight.numel() == 512 * 512,
            "wrapped": [times_wrapped(f) for f in wrapped],
            "own_norm": "forward_cpu" in vars(RMSNorm),
            "opaque": CpuPlatform.opaque_attention_op(),
            "ranks": drawn.selected_token_ranks.tolist(),
        }

    found = [state()]
    for _ in range(2):
        for adaptation in ADAPTATIONS:
            adaptation.apply()
        found.append(
            state()
            | {
                "sgl": utils.check_cpu_sgl_kernel(8, 64, torch.bfloat16),
                "kernels": kernels_replaced_again(),
            }
        )
    return found


def kernels_replaced_again() -> list[str]:
    """Replace vLLM's Triton kernels, as the start of an engine does; the names whose replacement was replaced."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import dispatcher

    CpuPlatform.register_triton_kernel_overrides()
    assert dispatcher._registry
    return [
        name
        for name, (original, _) in dispatcher._registry.items()
        if isinstance(original, dispatcher.KernelOverride)
    ]


def products_after_a_write() -> dict[str, Any]:
    """By case: error of a product of 3 rows after its weight was written and packed again, and how many oneDNN got."""
    Platform(is_cuda=False).adapt_vllm()
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    num_rows: list[int] = []
    multiply = _custom_ops.onednn_mm

    def noted(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_rows.append(len(x))
        return multiply(handler, x, bias)

    _custom_ops.onednn_mm = noted
    found = {}
    try:
        for width, dtype in itertools.product(
            (64, 512), (torch.float32, torch.bfloat16)
        ):
            num_rows.clear()
            layer = torch.nn.Linear(width, width, bias=False).to(dtype)
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(width, width))
            repack_weights(layer)
            x = torch.randn(3, width).to(dtype)
            product = utils.cpu_unquantized_gemm(layer, x, layer.weight)
            exact = x.double() @ layer.weight.double().T
            error = float((product - exact).abs().max() / exact.abs().max())
            found[f"{width} {dtype}"] = [error, *num_rows]
    finally:
        _custom_ops.onednn_mm = multiply
    return found


def norm_errors() -> dict[str, float]:
    """By case, how far norms in one kernel are from PyTorch's in float64, relative to what their dtype can tell."""
    Platform(is_cuda=False).adapt_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        return (
            float(((found - expected).abs() / (1 + expected.abs())).max())
            / torch.finfo(found.dtype).eps
        )

    errors = {}
    # the kernels know no width of 12
    for dtype, width in itertools.product((torch.float32, torch.bfloat16), (64, 12)):
        with set_current_vllm_config(VllmConfig()):
            norm = RMSNorm(width, eps=1e-5, dtype=dtype)
        torch.nn.init.normal_(norm.weight)
        x, residual = torch.randn(2, 5, 3, width).to(dtype)
        # As of queries that were cut out of a wider tensor.
        heads = torch.randn(5, 2, 3, width).to(dtype)[:, 0]
        for name, given, before in (
            ("alone", x, None),
            ("cut out", heads, None),
            ("added", x, residual),
        ):
            exact = (
                given.double() if before is None else given.double() + before.double()
            )
            expected = torch.nn.functional.rms_norm(
                exact, (width,), norm.weight.double(), 1e-5
            )
            found = norm.forward_cpu(
                given.clone() if before is not None else given, before
            )
            normed = found if before is None else found[0]
            errors[f"{name} {width} {dtype}"] = error(normed, expected)
            if before is not None:
                errors[f"sum {width} {dtype}"] = error(found[1], exact)
    return errors


def rotary_errors() -> dict[str, float]:
    """By case, how far turned queries and keys are from the definition."""
    Platform(is_cuda=False).adapt_vllm()
    from vllm import _custom_ops

    tokens, size = 7, 32
    positions = torch.arange(tokens)
    errors = {}
    for turned in (32, 16):
        angles = positions[:, None] * 100.0 ** -(torch.arange(turned // 2) / turned * 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        wide = torch.randn(tokens, 4, 2 * size)
        apart, keys = torch.randn(tokens, 4, size), torch.randn(tokens, 2, size)
        cases = {
            "in a row": (apart.flatten(1), keys.flatten(1)),
            "apart": (apart, keys),
            "one key": (apart, torch.randn(tokens, 1, size)),
            "cut out": (wide[..., size:], keys),
            "no keys": (apart, None),
        }
        for name, given in cases.items():
            before = [
                None if x is None else x.clone().view(tokens, -1, size) for x in given
            ]
            _custom_ops.rotary_embedding(
                positions,
                *given,
                size,
                torch.cat([angles.cos(), angles.sin()], -1),
                True,
            )
            worst = 0.0
            for x, was in zip(given, before, strict=True):
                if x is not None and was is not None:
                    a, b, rest = was.split(
                        [turned // 2, turned // 2, size - turned], -1
                    )
                    wanted = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
                    worst = max(
                        worst, float((x.view(tokens, -1, size) - wanted).abs().max())
                    )
            errors[f"{name} {turned}"] = worst
    return errors


def times_wrapped(function: Any) -> int:
    return (
        1 + times_wrapped(function.__wrapped__)
        if hasattr(function, "__wrapped__")
        else 0
    )


def adapt_cuda() -> list[str]:
    """The modules of vLLM that are loaded after adapting it to a machine with CUDA."""
    Platform(is_cuda=True).adapt_vllm()
    return [name for name in sys.modules if name.split(".")[0] == "vllm"]


def shared_memory_names() -> list[str]:
    return [shared_memory_name(), shared_memory_name()]
