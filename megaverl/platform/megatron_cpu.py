"""Changes that megatron-core needs to run on a CPU, and those that a GPU without Transformer Engine needs too.

megatron-core names the GPU in its source: `device='cuda'`,
`torch.cuda.current_device()`, `'torch.cuda.FloatTensor'`, `.cuda()`. An import hook
rewrites these few expressions, only in `megatron.core`, when a module is loaded;
`torch` itself is never patched. `REWRITES` lists the rules.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import marshal
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megaverl.platform.batch_invariant import (
    InvariantProducts,
    is_batch_invariant,
    silu,
)
from megaverl.platform.cuda_on_cpu import Adaptation, adaptation, replaces

PACKAGE = "megatron.core"
SHIM = "megaverl.platform.cuda_on_cpu"

REWRITES = {
    "the string 'cuda'": "becomes 'cpu': devices named in calls to torch.tensor, zeros, empty, device",
    "the string 'torch.cuda.<T>Tensor'": "becomes 'torch.<T>Tensor': optimizers match parameter types by name",
    "torch.cuda and from torch.cuda import ...": f"become {SHIM}: streams, events, random state, current device",
    "torch.compile": f"becomes {SHIM}.uncompiled: a C++ compiler may be missing, and torch's own is slow to import",
    ".cuda(...)": "becomes .cpu(): tensors are already where they are computed on",
    ".record_stream(stream)": f"becomes {SHIM}.record_stream: only the CUDA allocator reuses memory early",
    "pin_memory=...": "becomes False: page-locked memory serves transfers to a GPU",
}


class CudaToCpu(ast.NodeTransformer):
    """Applies `REWRITES` to one module's syntax tree. `count` is the number of changes."""

    def __init__(self) -> None:
        self.count = 0

    def _shim(self, node: ast.AST) -> ast.Name:
        self.count += 1
        return ast.copy_location(ast.Name("_cuda_on_cpu", ast.Load()), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            replacement = "cpu"
        elif (
            isinstance(node.value, str)
            and node.value.startswith("torch.cuda.")
            and node.value.endswith("Tensor")
        ):
            replacement = node.value.replace("torch.cuda.", "torch.")
        else:
            return node
        self.count += 1
        return ast.copy_location(ast.Constant(replacement), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr == "cuda":
                return self._shim(node)
            if node.attr == "compile":
                return ast.copy_location(
                    ast.Attribute(self._shim(node), "uncompiled", ast.Load()), node
                )
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda" and node.level == 0:
            self.count += 1
            node.module = SHIM
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if node.arg == "pin_memory":
            self.count += 1
            node.value = ast.copy_location(ast.Constant(False), node.value)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        if node.func.attr == "cuda":
            self.count += 1
            function = ast.copy_location(
                ast.Attribute(node.func.value, "cpu", ast.Load()), node.func
            )
            return ast.copy_location(ast.Call(function, [], []), node)
        if node.func.attr == "record_stream":
            function = ast.copy_location(
                ast.Attribute(self._shim(node), "record_stream", ast.Load()), node.func
            )
            return ast.copy_location(
                ast.Call(function, [node.func.value, *node.args], node.keywords), node
            )
        return node


def rewrite(source: str, filename: str = "<string>") -> tuple[ast.Module, int]:
    """Parse a megatron-core module and apply `REWRITES`; return the tree and the number of changes."""
    transformer = CudaToCpu()
    tree = transformer.visit(ast.parse(source, filename))
    if transformer.count:
        shim = ast.ImportFrom(
            "megaverl.platform", [ast.alias("cuda_on_cpu", "_cuda_on_cpu")], 0
        )
        # Insert the import after the docstring and any `from __future__`, which must
        # come first.
        place = 0
        for index, statement in enumerate(tree.body):
            is_docstring = (
                index == 0
                and isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
            )
            if is_docstring or (
                isinstance(statement, ast.ImportFrom)
                and statement.module == "__future__"
            ):
                place = index + 1
        tree.body.insert(place, ast.copy_location(shim, tree.body[0]))
    return ast.fix_missing_locations(tree), transformer.count


@functools.cache
def _cache_tag() -> str:
    """Return a name of the bytecode cache that depends on the rules, so that changed rules never use old bytecode."""
    return (
        "megaverl"
        + hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[
            :12
        ]
    )


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module through `rewrite`, and keeps its bytecode beside Python's own under another name."""

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        stamp = path.stat().st_mtime_ns.to_bytes(8, "little")
        cached = Path(
            importlib.util.cache_from_source(str(path), optimization=_cache_tag())
        )
        try:
            data = cached.read_bytes()
            if data[:8] == stamp:
                cached_code: CodeType = marshal.loads(data[8:])
                return cached_code
        except (OSError, EOFError, ValueError, TypeError):
            pass  # no cache yet, or a damaged one: compile
        tree, _ = rewrite(path.read_text(encoding="utf-8"), str(path))
        code: CodeType = compile(tree, str(path), "exec", dont_inherit=True)
        temporary = cached.with_suffix(f".{os.getpid()}.tmp")
        try:
            cached.parent.mkdir(exist_ok=True)
            temporary.write_bytes(stamp + marshal.dumps(code))
            temporary.replace(cached)
        except OSError as error:
            # A read-only installation only costs the compilation, a second or two per
            # start.
            warnings.warn(
                f"bytecode of {fullname} is not cached: {error}", stacklevel=2
            )
        return code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `megatron.core` modules as Python does, and gives them to `_Loader`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(
            spec.loader, importlib.machinery.SourceFileLoader
        ):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


ADAPTATIONS: list[Adaptation] = []
# Adaptations that megatron-core 0.16 also needs on a GPU without Transformer Engine.
WITHOUT_TRANSFORMER_ENGINE = (
    "moe te_general_gemm",
    "latent attention without Transformer Engine",
)
_adapts = functools.partial(adaptation, ADAPTATIONS)


@_adapts("import hook")
def _install_import_hook() -> None:
    """megatron-core's source names the GPU as its only device."""
    if PACKAGE in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before megaverl.platform could adapt it to this CPU. "
            "Import megaverl first, or call megaverl.platform.platform.adapt_megatron() before importing it."
        )
    sys.meta_path.insert(0, _Finder())


@_adapts("quiet fallback warnings")
def _quiet_fallback_warnings() -> None:
    """Every module warns that Transformer Engine and Apex are missing, which is expected on a CPU."""
    warnings.filterwarnings("ignore", message=".*Apex (are|is) not installed.*")


@_adapts("moe te_general_gemm")
def _define_te_general_gemm() -> None:
    """megatron-core 0.16 reads this name, but does not define it without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@_adapts("moe split sizes")
def _give_splits_as_numbers() -> None:
    """The alltoall dispatcher converts its split sizes to numbers only when it copies
    them from a GPU. Otherwise they stay tensors, which torch.distributed refuses.
    """
    from megatron.core.transformer.moe import token_dispatcher

    @replaces(token_dispatcher, "maybe_move_tensor_to_cpu")
    def move_and_convert(
        move: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


@_adapts("uneven rows over gloo")
def _gather_uneven_rows() -> None:
    """Experts split by tensor parallelism exchange as many rows as they have tokens,
    but gloo supports only equal parts.
    """
    from megatron.core.tensor_parallel import mappings

    @replaces(mappings, "_gather_along_first_dim")
    def gather_any(
        gather: Any,
        rows: torch.Tensor,
        group: Any,
        sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if sizes is None or group.size() == 1:
            return gather(rows, group, None, use_global_buffer)
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        whole = rows.new_empty(group.size(), *padded.shape)
        dist.all_gather(list(whole), padded, group=group)
        return torch.cat([part[:size] for part, size in zip(whole, sizes, strict=True)])

    @replaces(mappings, "_reduce_scatter_along_first_dim")
    def scatter_any(
        scatter: Any,
        rows: torch.Tensor,
        group: Any,
        sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(rows, group, None, use_global_buffer)
        total = rows.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].clone()


@_adapts("latent attention without Transformer Engine")
def _without_transformer_engine() -> None:
    """megatron-core 0.16 mistakes the placeholders for Transformer Engine's layers for the layers themselves."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False


@_adapts("buffers exchanged directly")
def _exchange_buffers_directly() -> None:
    """gloo copies all gradients and parameters, which takes twice as long as sending them, even on a single rank."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    def directly(name: str, exchange: Callable[..., None]) -> None:
        @replaces(buffers, name)
        def call(
            collective: Any,
            output: torch.Tensor,
            inputs: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
            **options: Any,
        ) -> Any:
            if (
                dist.get_world_size(group) == 1
                and output.data_ptr() == inputs.data_ptr()
            ):
                return None
            if async_op or options or op != dist.ReduceOp.SUM:
                reduces = {"op": op} if exchange is reduce_scatter else {}
                return collective(
                    output, inputs, group=group, async_op=async_op, **reduces, **options
                )
            return exchange(output, inputs, group or dist.group.WORLD)

    directly("dist_reduce_scatter_func", reduce_scatter)
    directly("dist_all_gather_func", all_gather)


@_adapts("gates in place")
def _gate_in_place() -> None:
    """Without a compiler, gated MLPs read and write their widest tensors four times
    more than necessary: they add an offset of 0 to one half, and copy the gradients of
    both halves to join them.
    """
    from megatron.core.transformer.mlp import MLP

    @replaces(MLP, "forward")
    def gate_in_place(
        forward: Any,
        self: Any,
        hidden_states: torch.Tensor,
        per_token_scale: Any = None,
        **options: Any,
    ) -> Any:
        if per_token_scale is not None or not _gates_plainly(self.config):
            return forward(self, hidden_states, per_token_scale, **options)
        joined, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            joined = joined + bias
        activate: Any = GatedSilu.apply
        return self.linear_fc2(activate(joined))


@_adapts("products invariant to the batch")
def _multiply_by_tiles() -> None:
    """Matrix libraries choose kernels by the number of tokens. With `rollout.batch_invariant` products are tiled."""
    from megatron.core.tensor_parallel import layers

    def in_tiles(name: str) -> None:
        @replaces(layers, name)
        def multiply(original: Any, *args: Any, **options: Any) -> Any:
            if not is_batch_invariant():
                return original(*args, **options)
            with InvariantProducts():
                return original(*args, **options)

    in_tiles("linear_with_grad_accumulation_and_async_allreduce")
    in_tiles("linear_with_frozen_weight")


def _gates_plainly(config: Any) -> bool:
    return (
        config.gated_linear_unit
        and config.activation_func is F.silu
        and config.activation_func_clamp_value is None
        and config.glu_linear_offset == 0.0
        and not config.use_te_activation_func
        and not config.bias_activation_fusion
    )


class GatedSilu(torch.autograd.Function):
    """SwiGLU (arXiv 2002.05202, eq. 6): [..., 2 * ffn], gate before up -> [..., ffn]."""

    @staticmethod
    def forward(ctx: Any, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, dim=-1)
        active = silu(gate) if is_batch_invariant() else F.silu(gate)
        if not ctx.needs_input_grad[0]:
            return active.mul_(up)
        ctx.save_for_backward(joined, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Write both halves of the gradient in place."""
        joined, active = ctx.saved_tensors
        gate, up = joined.chunk(2, dim=-1)
        result = torch.empty_like(joined, memory_format=torch.contiguous_format)
        by_gate, by_up = result.chunk(2, dim=-1)
        torch.mul(grad, active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=by_gate)
        return result


@_adapts("Adam in one kernel")
def _adam_in_one_kernel() -> None:
    """PyTorch's Adam runs eight operators per tensor, unless its single kernel for CPUs is requested."""
    from megatron.core import optimizer as optimizers

    @replaces(optimizers, "_get_megatron_optimizer_based_on_param_groups")
    def make_fused(make: Any, *args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        inner = getattr(made, "optimizer", None)
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            inner.register_step_pre_hook(_fuse)
        return made


def _fuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Request the fused kernel before every step, since groups from a checkpoint may say otherwise."""
    for group in optimizer.param_groups:
        group["fused"] = True


# The functions below gather and scatter buffers by sends between pairs of ranks. gloo's
# own collectives copy the whole buffer, some of them twice.
TAG = 1 << 20  # separates these messages from others in the group


def all_gather(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Fill `whole` with the tensors of all ranks.

    They are as long as `mine`, which may be this rank's part of `whole`.
    """
    rank, size = group.rank(), group.size()
    parts = whole.view(size, -1)
    if part.data_ptr() != parts[rank].data_ptr():
        parts[rank].copy_(part.flatten())
    for distance in range(1, size):
        source = (rank - distance) % size
        _exchange(parts[rank], (rank + distance) % size, parts[source], source, group)


def reduce_scatter(
    part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """Sum this rank's part of `whole` over the ranks into `mine`, which may be that part.

    Parts are added in the order in which ranks precede this one, so the same number of
    ranks gives the same bits each time.
    """
    rank, size = group.rank(), group.size()
    parts = whole.view(size, -1)
    flat = part.view(-1)
    if flat.data_ptr() != parts[rank].data_ptr():
        flat.copy_(parts[rank])
    received = torch.empty_like(flat)
    for distance in range(1, size):
        target, source = (rank + distance) % size, (rank - distance) % size
        _exchange(parts[target], target, received, source, group)
        flat.add_(received)


def _exchange(
    sent: torch.Tensor,
    target: int,
    received: torch.Tensor,
    source: int,
    group: dist.ProcessGroup,
) -> None:
    works = [group.send([sent], target, TAG), group.recv([received], source, TAG)]
    for work in works:
        work.wait()
