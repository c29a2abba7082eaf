"""Changes that vLLM needs for training on a CPU. Not imported on CUDA.

vLLM's CPU build is made for serving fixed weights in processes that it starts itself.
Here it runs in a training process whose weights are updated in place.

Images work without torchvision, whose CPU wheel is not on PyPI. vLLM uses two parts of
transformers' processors that need it: a function beside an image processor, which also
has a PIL variant with the same function, and a processor of videos, which is never used
here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megaverl.platform.cuda_on_cpu import Adaptation, adaptation, replaces
from megaverl.platform.float32_linear import float32_linear
from megaverl.platform.quiet import native_stderr_without
from megaverl.temporary import (
    MARK,
    SHARED_MEMORY,
    claim_shared_memory,
    release_shared_memory,
)

FROM_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
WITH_PIL = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


class _WithPil(MetaPathFinder, Loader):
    """Import hook that returns the PIL variant's module in place of torchvision's."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> ModuleSpec | None:
        return (
            importlib.util.spec_from_loader(fullname, self)
            if fullname == FROM_TORCHVISION
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(WITH_PIL)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


def adapt_images() -> None:
    """Let vLLM work without torchvision, if it is missing."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from vllm.transformers_utils import processor as processors

    sys.meta_path.insert(0, _WithPil())

    def get_processor(
        name: str, *args: Any, processor_cls: Any, tokenizer: Any = None, **options: Any
    ) -> Any:
        from transformers import AutoImageProcessor, AutoTokenizer

        class WithoutVideos(processor_cls):  # type: ignore[misc]
            def check_argument_for_proper_class(
                self, argument_name: str, argument: Any
            ) -> None:
                """Accept the image processor as the processor of videos: only its sizes are read."""

        image_options = {
            key: value
            for key, value in options.items()
            if key in ("size", "min_pixels", "max_pixels")
        }
        images = AutoImageProcessor.from_pretrained(
            name, backend="pil", **image_options
        )
        return WithoutVideos(
            images, tokenizer or AutoTokenizer.from_pretrained(name), images
        )

    processors.cached_get_processor = functools.lru_cache(get_processor)


# Default size of the key-value cache: this many full-length responses, up to a limit.
DEFAULT_NUM_SEQUENCES = 128
MAX_CACHE_BYTES = 1 << 30
BLOCK_TOKENS = 32  # the CPU attention kernel works on multiples of this
STATE_BLOCK = 128  # vLLM rounds blocks up to this beside layers with a state
NORM_LANES = 16  # the CPU norm kernels work on multiples of this
MAX_PADDED = 2**17  # elements of a weight up to which its products have padded rows
EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
REPACK = "megaverl_repack_experts"


ADAPTATIONS: list[Adaptation] = []
_adapts = functools.partial(adaptation, ADAPTATIONS)


@_adapts("kernels in vLLM's modules alone")
def _look_for_kernels_in_vllm() -> None:
    """To replace its Triton kernels, vLLM reads every attribute of every module.
    Deprecated ones of torch then warn, and llvmlite's (numba) raise an error. It does so again for every engine of a
    process, and each time it wraps the replacements once more.
    """
    from vllm.triton_utils import dispatcher

    @replaces(dispatcher, "register_kernels")
    def register_new(register: Any, overrides: Mapping[str, Any]) -> None:
        known = dispatcher._registry
        if new := {name: overrides[name] for name in overrides if name not in known}:
            register(new)

    @replaces(dispatcher, "_rebind_kernels")
    def rebind(everywhere: Any, overrides: Any) -> None:
        vllm_modules = {
            name: module
            for name, module in sys.modules.items()
            if name.partition(".")[0] == "vllm"
        }
        dispatcher.sys = SimpleNamespace(modules=vllm_modules)
        try:
            everywhere(overrides)
        finally:
            dispatcher.sys = sys


@_adapts("weights beside packed copies")
def _keep_weights_beside_packed() -> None:
    """Packing linear weights for oneDNN replaces them by empty tensors, to which nothing can be written. Packing the
    taps of short convolutions changes their order.

    oneDNN also compiles a product for each shape and number of rows, in 0.5 to 1 ms, and
    keeps up to 1,024 of them. For small weights, whose products take less time than
    that, rows are therefore padded to powers of two.
    """
    from vllm.model_executor.layers import utils

    @replaces(utils, "dispatch_cpu_unquantized_gemm")
    def pack_and_keep(pack: Any, layer: torch.nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        is_matrix = weight.ndim == 2
        if not weight.is_meta and not is_matrix:
            return
        pack(layer, remove_weight=False)
        if is_matrix and weight.numel() <= MAX_PADDED:
            layer.cpu_linear = functools.partial(  # type: ignore[assignment]
                _multiply_padded, layer.cpu_linear
            )


def _multiply_padded(
    multiply: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return multiply(x, weight, bias) for x [..., k] with zeros added to its rows, up to a power of two."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    missing = (1 << max(0, num_rows - 1).bit_length()) - num_rows
    if missing:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    product: torch.Tensor = multiply(rows, weight, bias)
    return product[:num_rows].view(*x.shape[:-1], -1)


@_adapts("convolutions without packed weights")
def _convolve_unpacked() -> None:
    """The convolutions of gated delta nets expect packed taps on CPUs with products in
    bfloat16, and taps are not packed here.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):

        @replaces(gdn_attention, name)
        def convolve(run: Any, **arguments: Any) -> Any:
            # [channels, 1, taps] -> [channels, taps]
            weight = arguments["weight"].flatten(1)
            return run(**{**arguments, "weight": weight, "is_weight_packed": False})


@_adapts("experts beside packed copies")
def _keep_experts_beside_packed() -> None:
    """Packing fused expert weights replaces them by tensors with another order and
    padded sizes. And with enable_expert_parallel the kernel reads beyond a rank's
    experts.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    @replaces(CPUUnquantizedExperts, "process_weights_after_loading")
    def pack_and_keep(pack: Any, self: Any, layer: torch.nn.Module) -> None:
        kept = {name: getattr(layer, name) for name in EXPERT_WEIGHTS}
        # Packing replaces the parameters, so restore them below and keep the packed
        # copies aside.
        pack(self, layer)
        self.packed = [getattr(layer, name).data for name in EXPERT_WEIGHTS]
        for name, weight in kept.items():
            layer.register_parameter(name, weight)
        # `repack_weights` finds layers, not their experts, so give it this function.
        setattr(
            layer, REPACK, functools.partial(self.process_weights_after_loading, layer)
        )

    @replaces(CPUUnquantizedExperts, "apply")
    def run_packed(run: Any, self: Any, **arguments: Any) -> None:
        arguments |= dict(zip(("w1", "w2"), self.packed, strict=True))
        if arguments["expert_map"] is not None:
            # The kernel uses expert numbers as indices into its weights. Give it this
            # rank's numbers, and weight zero to other ranks' experts.
            here = arguments["expert_map"][arguments["topk_ids"].long()]
            weights = arguments["topk_weights"]
            if arguments["apply_router_weight_on_input"]:
                # The inputs are scaled already, and the kernel would read no weights.
                weights = torch.ones_like(weights)
                arguments["apply_router_weight_on_input"] = False
            arguments["topk_weights"] = weights.masked_fill(here < 0, 0.0)
            arguments["topk_ids"] = here.clamp(min=0).to(arguments["topk_ids"].dtype)
        run(self, **arguments)


@contextmanager
def weights_to_come() -> Iterator[None]:
    """Skip noise and packing in an engine made inside, as a reshard will bring its weights.

    Weights that are quantised on loading have no storage before, so these are loaded
    with noise.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.dummy_loader import (
        DummyModelLoader,
        get_layerwise_info,
    )

    noise, pack = DummyModelLoader.load_weights, utils.dispatch_cpu_unquantized_gemm

    def pack_later(layer: torch.nn.Module, remove_weight: bool) -> None:
        # Only the weight of a matrix product is packed later.
        if layer.weight.is_meta or layer.weight.ndim != 2:
            pack(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    def load_quantised(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        for layer in model.modules():
            if (info := get_layerwise_info(layer)).can_load():
                self._process_online_quant_layer(layer, info)

    DummyModelLoader.load_weights = load_quantised
    utils.dispatch_cpu_unquantized_gemm = pack_later
    try:
        yield
    finally:
        DummyModelLoader.load_weights, utils.dispatch_cpu_unquantized_gemm = noise, pack


def repack_weights(model: torch.nn.Module) -> None:
    """Make the packed copies again, from weights that were written in place."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        if repack := getattr(layer, REPACK, None):
            repack()


@_adapts("sigmoid or biased scores in one group of experts")
def _route_all_scores() -> None:
    """Route sigmoid scores, and softmax scores with a bias, as if all experts were one group, which changes nothing.

    Without groups the CPU build (0.32) refuses sigmoid scores, and silently ignores a
    bias on softmax scores.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    @replaces(CPURouter, "__init__")
    def in_one_group(create: Any, self: Any, **options: Any) -> None:
        scores = options.get("scoring_func", "softmax")
        is_biased = options.get("e_score_correction_bias") is not None
        is_unknown = scores == "sigmoid" or (scores == "softmax" and is_biased)
        if is_unknown and not options.get("use_grouped_topk"):
            options |= {
                "use_grouped_topk": True,
                "num_expert_group": 1,
                "topk_group": 1,
            }
        create(self, **options)


@_adapts("quantised products by definition")
def _multiply_quantised_by_definition() -> None:
    """vLLM's CPU build multiplies 8-bit weights only with AMX, from packed copies that
    replace them. It also lacks the operator that quantises a matrix.
    """
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms import PlatformEnum

    class ReferenceBlockKernel(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        """Kernel that quantises both factors as a GPU does, and multiplies them in float32."""

        @classmethod
        def is_supported(
            cls, compute_capability: int | None = None
        ) -> tuple[bool, None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            down, across = self.weight_group_shape.row, self.weight_group_shape.col
            tokens = A.float() * As.repeat_interleave(across, 1)[:, : A.shape[1]]
            scales = Bs.repeat_interleave(down, 0)[: B.shape[0]].repeat_interleave(
                across, 1
            )[:, : B.shape[1]]
            return torch.nn.functional.linear(tokens, B.float() * scales)

    @replaces(_custom_ops, "scaled_fp8_quant")
    def quantise(
        original: Any, input: torch.Tensor, scale: Any = None, **options: Any
    ) -> Any:
        largest = torch.finfo(torch.float8_e4m3fn).max
        return (input.float() * (1.0 / scale)).clamp_(-largest, largest).to(
            torch.float8_e4m3fn
        ), scale

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [ReferenceBlockKernel]
    linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = [
        linear.PerTensorTorchFP8ScaledMMLinearKernel
    ]


@_adapts("products with groups by definition")
def _multiply_groups_by_definition() -> None:
    """vLLM's CPU build multiplies int4 weights with AVX-512 only, in 16 bits, and in sizes that 32 divides. It has no
    kernel for NVFP4 weights with 16-bit activations, and does not list its emulation of MXFP8.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import (
        CPUWNA16LinearKernel,
    )
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (
        MPLinearKernel,
    )
    from vllm.model_executor.kernels.linear.nvfp4.base import (
        NvFp4LinearKernel,
        NvFp4LinearLayerConfig,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as nvfp4,
    )
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )
    from vllm.platforms import PlatformEnum

    class CPUInt4Kernel(CPUWNA16LinearKernel):  # type: ignore[misc]
        """vLLM's kernel, which accepts float32 and then has no product for it."""

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            if config.act_type == torch.float32:
                return False, "the kernel has no float32"
            answer: tuple[bool, str | None] = super().can_implement(config)
            return answer

    class ReferenceInt4Kernel(MPLinearKernel):  # type: ignore[misc]
        """Kernel that dequantises a matrix for every product, from the order of a compressed-tensors folder."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            size = config.weight_type.size_bits
            return size == 4, f"{size} bits" if size != 4 else None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Keep the order."""

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            group = self.config.group_size
            numbers = unpack_int4(layer.weight_packed)[:, : x.shape[-1]]
            numbers = numbers.float().unflatten(1, (-1, group))
            zero: Any = 8.0
            if self.config.zero_points:
                rows = numbers.shape[0]
                zero = unpack_int4(layer.weight_zero_point.t()).t()[:rows, :, None]
            matrix = (numbers - zero) * layer.weight_scale.float()[:, :, None]
            return torch.nn.functional.linear(x, matrix.flatten(1).to(x.dtype), bias)

    class ReferenceNvfp4Kernel(NvFp4LinearKernel):  # type: ignore[misc]
        """Kernel that dequantises a matrix for every product with 16-bit activations."""

        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> tuple[bool, None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Keep the order."""

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            matrix = dequantize_to_dtype(
                layer.weight,
                layer.weight_scale,
                layer.weight_global_scale,
                x.dtype,
                swizzle=False,
            )
            return torch.nn.functional.linear(x, matrix, bias)

    @replaces(nvfp4, "init_nvfp4_linear_kernel")
    def choose(original: Any, use_a16: bool = False) -> Any:
        config = NvFp4LinearLayerConfig()
        return ReferenceNvfp4Kernel(config) if use_a16 else original(use_a16=use_a16)

    has_kernel = hasattr(torch.ops._C, "cpu_gemm_wna16")
    linear._POSSIBLE_KERNELS[PlatformEnum.CPU] = [
        *([CPUInt4Kernel] if has_kernel else []),
        ReferenceInt4Kernel,
    ]
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [
        linear.EmulationMxfp8LinearKernel
    ]


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return the numbers from 0 to 15 in int32 [..., n], eight in an element from the lowest bits on: [..., 8 n]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & 15).flatten(-2)


@_adapts("no sgl kernels")
def _keep_biases_as_they_are() -> None:
    """Packing small 16-bit weights for AMX replaces their biases by float32 copies, which an update cannot reach."""
    from vllm.model_executor.layers import utils

    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


@_adapts("logits in float32 without a copy of the weight")
def _multiply_logits_in_float32() -> None:
    """With `head_dtype: float32` a CPU build converts the whole output layer for every token that it decodes, and its
    product depends on the batch.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
    )

    @replaces(LogitsProcessor, "_apply_head")
    def apply(
        original: Any,
        self: Any,
        lm_head: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Any:
        method = lm_head.quant_method
        # vLLM refuses a quantised layer.
        is_plain = isinstance(
            method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
        )
        is_wide = self.head_dtype == torch.float32 and hidden.dtype != torch.float32
        if not is_plain or not is_wide:
            return original(self, lm_head, hidden, bias)
        return float32_linear(hidden, lm_head.weight, bias)


@_adapts("norms in one kernel")
def _norm_in_one_kernel() -> None:
    """vLLM's CPU build has kernels for its norms, but uses eight operators of PyTorch
    instead. That is a tenth of the time of decoding a small model.
    """
    from vllm.model_executor.layers.layernorm import RMSNorm

    native = RMSNorm.forward_native
    if "forward_cpu" in vars(RMSNorm) or not hasattr(
        torch.ops._C, "fused_add_rms_norm"
    ):
        return

    def forward_cpu(
        self: Any, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Any:
        plain = (
            self.has_weight
            and self.variance_size_override is None
            and self.weight.dtype == x.dtype
        )
        plain = plain and x.shape[-1] % NORM_LANES == 0
        if not plain or type(self).forward_native is not native:
            return self.forward_native(x, residual)
        x = x.contiguous()  # the kernels know no strides
        if residual is None:
            normed = torch.empty_like(x)
            torch.ops._C.rms_norm(normed, x, self.weight.data, self.variance_epsilon)
            return normed
        residual = residual.contiguous()
        # Writes into x and residual.
        torch.ops._C.fused_add_rms_norm(
            x, residual, self.weight.data, self.variance_epsilon
        )
        return x, residual

    RMSNorm.forward_cpu = forward_cpu


@_adapts("rotary embeddings of all heads")
def _turn_all_heads() -> None:
    """The kernel assumes that the last axis holds all heads of a token. Given [tokens,
    heads, size], as LFM2's code passes queries and keys, it rotates only as many rows
    as there are tokens, by wrong positions (vLLM 0.32).
    """
    from vllm import _custom_ops

    @replaces(_custom_ops, "rotary_embedding")
    def turn(
        kernel: Any,
        positions: torch.Tensor,
        query: Any,
        key: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        rows = [
            tensor if tensor is None else tensor.flatten(positions.dim())
            for tensor in (query, key)
        ]
        kernel(positions, *rows, *args, **options)
        for tensor, row in zip((query, key), rows, strict=True):
            # Parts of wider rows.
            if (
                tensor is not None
                and row is not None
                and tensor.data_ptr() != row.data_ptr()
            ):
                tensor.copy_(row.view_as(tensor))


@_adapts("attention without a wrapper")
def _attend_without_a_wrapper() -> None:
    """Two custom operators per layer hide attention from a compiler that is not used
    here. That is a fiftieth of the time of decoding a small model.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)


@_adapts("images without torchvision")
def _images_without_torchvision() -> None:
    """vLLM imports modules and a processor of videos that need torchvision, whose CPU build is not on PyPI."""
    adapt_images()


@_adapts("no ranks of drawn tokens")
def _leave_ranks_out() -> None:
    """vLLM compares every drawn token with the whole vocabulary for its rank among log-probs, which nobody reads."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda log_probs, drawn: torch.zeros(
        len(log_probs), dtype=torch.int64
    )


@_adapts("sampling of drafts by definition")
def _expand_to_drafts() -> None:
    """The substitute for a Triton kernel that gives each draft token its request's
    temperature, top-k and top-p casts them to integers, and writes them to a copy that
    nobody reads (0.32: `_expand_kernel_impl`).
    """
    from vllm.v1.sample import rejection_sampler

    @replaces(rejection_sampler, "expand_batch_to_tokens")
    def expand(
        kernel: Any, x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(
            counts, output_size=num_tokens
        )


@_adapts("memory bound without a warning")
def _bind_memory_quietly() -> None:
    """vLLM's worker binds memory to a NUMA node, and warns about it from C++, outside logging and Python's warnings."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    @replaces(CPUWorker, "__init__")
    def start_quietly(start: Any, *args: Any, **kwargs: Any) -> None:
        with native_stderr_without("NUMA binding"):
            start(*args, **kwargs)


@_adapts("shared memory by job")
def _own_shared_memory_by_job() -> None:
    """vLLM names shared memory after its init method, which under torchrun is equal in
    every job on a machine. Jobs would share one tensor-parallel buffer, several
    machines would seem to be one, and buffers of killed ranks would stay.
    """
    from vllm.v1.worker import cpu_worker

    @replaces(cpu_worker, "init_worker_distributed_environment")
    def start_with_unique_name(start: Any, *args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            with unique_shared_memory():
                start(*args, **kwargs)
            return
        # Workers of a server: vLLM draws their name, and never removes the files.
        start(*args, **kwargs)
        dist.barrier()
        # Every rank has mapped them.
        name = os.environ["VLLM_DIST_IDENT"]
        for buffer in SHARED_MEMORY.glob(f"{name}-*-cpushm*"):
            buffer.unlink(missing_ok=True)


@contextmanager
def unique_shared_memory() -> Iterator[None]:
    """Give vLLM groups created inside this block shared memory with a name that no other job uses.

    Collective over the default process group.
    """
    name = os.environ["VLLM_DIST_IDENT"] = shared_memory_name()
    mark = claim_shared_memory(name)
    yield
    # Every rank has mapped its buffers. Without names they end with the last rank,
    # however it ends.
    dist.barrier()
    release_shared_memory(name, mark)
    for buffer in SHARED_MEMORY.glob(f"{name}*"):
        if MARK not in buffer.name:
            buffer.unlink(missing_ok=True)


def shared_memory_name() -> str:
    """Return a name that is shared by all ranks on one machine, and by no other engine, job or machine.

    Collective over the default process group: its first rank draws the engine's part of
    the name.
    """
    drawn = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8)
    dist.broadcast(drawn, src=0)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    return f"megaverl-{bytes(drawn.tolist()).hex()}-{machine}-{SHARED_MEMORY.stat().st_dev}"


def engine_defaults(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_model_len: int,
    num_sequences: int | None,
    latent_attention: str | None,
    num_states: int = 0,
    state_bytes: int = 0,
) -> dict[str, Any]:
    """Return EngineArgs that suit a CPU, as defaults for the user's.

    These are eager mode, since compiling takes longer than it saves and needs a C++
    compiler; a cache for `num_sequences` full-length responses (vLLM's default takes 92
    % of the machine's memory); blocks small enough that short prompts can share a
    prefix; and for latent attention another backend than the one that vLLM chooses with
    AMX (see `check_runs_here`).

    Args:
        num_layers: layers with attention.
        num_kv_heads: KV heads on one rank.
        num_states: layers with a state in place of keys and values.
        state_bytes: bytes of one such state on one rank.
        latent_attention: attention backend of a model with latent attention; None for other models.
    """
    layer_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
    block_tokens = BLOCK_TOKENS
    if num_states:
        # vLLM makes blocks so long that a layer's keys and values of one take as much
        # as a state.
        block_tokens = STATE_BLOCK * -(-state_bytes // (STATE_BLOCK * layer_bytes))
    blocks_each = -(-max_model_len // block_tokens)
    block_bytes = block_tokens * layer_bytes * num_layers
    # A sequence has two blocks for each state, such as before and after a step. Layers
    # share blocks in groups of as many as have attention.
    blocks_each += 2 * -(-num_states // num_layers)
    wanted = (num_sequences or DEFAULT_NUM_SEQUENCES) * blocks_each * block_bytes
    # vLLM keeps one block for itself, and one response must fit whatever the limit.
    cache_bytes = (
        max(min(wanted, MAX_CACHE_BYTES), blocks_each * block_bytes) + 2 * block_bytes
    )
    backend = {"attention_backend": latent_attention} if latent_attention else {}
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": cache_bytes,
        "block_size": BLOCK_TOKENS,
        **backend,
    }
