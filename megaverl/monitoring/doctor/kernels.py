"""Which kernels will compute: the fast one where it is there, else the fallback that is taken and what it costs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from megaverl.monitoring.doctor.finding import Finding
from megaverl.platform import flash_attention, platform


@dataclass(frozen=True)
class Kernel:
    """One thing that is computed.

    Attributes:
        what: is computed.
        modules: any of these has the fast kernel.
        fast: what is used then.
        fallback: what is used otherwise.
        costs: what the fallback costs on a GPU.
        fix: how to get the fast one.
    """

    what: str
    modules: tuple[str, ...]
    fast: str
    fallback: str
    costs: str
    fix: str


TE = "pip install 'transformer-engine[pytorch]' (a CUDA toolkit must be there), or use NVIDIA's PyTorch container"
APEX = "build NVIDIA's apex from source with --cpp_ext --cuda_ext (not PyPI's package of that name)"
KERNELS = (
    Kernel(
        "layers of the actor",
        ("transformer_engine",),
        "Transformer Engine: fused norms and linear layers, FP8",
        "megatron-core's local layers with PyTorch's own norm and linear kernels",
        "norm and linear layer in kernels of their own, no FP8",
        TE,
    ),
    Kernel(
        "attention of the actor",
        ("transformer_engine",),
        "Transformer Engine's: FlashAttention or cuDNN's, whichever serves",
        "FlashAttention's for packed rows where it is there, else PyTorch's scaled_dot_product_attention",
        "without flash-attn, a group's samples look back at a long prompt under masks, in slower kernels",
        TE,
    ),
    Kernel(
        "experts",
        ("transformer_engine", "grouped_gemm"),
        "all experts of a rank in one grouped GEMM",
        "one expert after the other",
        "mixture-of-experts models launch one small GEMM per expert and layer",
        TE,
    ),
    Kernel(
        "optimizer",
        ("transformer_engine", "apex"),
        "fused Adam: one kernel for all parameters",
        "torch.optim's Adam",
        "a few launches per parameter in each update, with a temporary copy",
        f"{TE}; or {APEX}",
    ),
    Kernel(
        "gradient accumulation",
        ("fused_weight_gradient_mlp_cuda",),
        "fused into the weight gradient's GEMM (actor.megatron.gradient_accumulation_fusion)",
        "added in a kernel of its own",
        "one more pass over every gradient per micro-batch",
        APEX,
    ),
    Kernel(
        "vLLM's compiled kernels",
        ("triton",),
        "Triton",
        "plain PyTorch operators",
        "vLLM does not start on most GPUs without it",
        "pip install triton, in the version that torch names",
    ),
)


def kernels() -> Iterator[Finding]:
    """One finding for each thing that is computed."""
    if not platform.is_cuda:
        for kernel in KERNELS:
            yield Finding("kernels", kernel.what, "note", f"{kernel.fallback} (a CPU has no other)")
        yield _vllm_on_cpu()
        return
    for kernel in KERNELS:
        there = [name for name in kernel.modules if importlib.util.find_spec(name) is not None]
        if there and there[0] in (kernel.modules[0], "apex", "grouped_gemm"):
            yield Finding("kernels", kernel.what, "ok", kernel.fast)
        else:
            found = f"{kernel.modules[0]} is absent: {kernel.fallback}. Cost: {kernel.costs}"
            yield Finding("kernels", kernel.what, "warn", found, kernel.fix)
    yield _flash_attention()
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    found = "Liger's, with actor.fsdp.liger" if has_liger else "none: liger-kernel is absent, actor.fsdp.liger refused"
    yield Finding("kernels", "fused kernels under FSDP2", "ok" if has_liger else "note", found)
    yield Finding("kernels", "attention of vLLM", "note", "chosen by vLLM for the GPU and model; its log says which")


def _flash_attention() -> Finding:
    if reason := flash_attention.why_not():
        found = f"{reason}: attention is cuDNN's where Transformer Engine is, and PyTorch's elsewhere. Packed rows "
        found += "then want compute capability 9.0 or more and cuDNN 9.7"
        return Finding("kernels", "FlashAttention", "note", found)
    return Finding("kernels", "FlashAttention", "ok", "Transformer Engine's choice, and that of rollout.engine=hf")


def _vllm_on_cpu() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding("kernels", "engine", "note", "vllm is absent: rollout.engine=hf, plain transformers")
    found = "vLLM's CPU attention (heads of 32 dimensions and more); weights unpacked, so that a reshard can write them"
    return Finding("kernels", "engine", "note", found)
