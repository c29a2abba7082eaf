"""Everything that is adapted in megatron-core, rule by rule, and that torch itself is left alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaverl.platform import cuda_on_cpu, platform
from megaverl.platform.megatron_cpu import (
    ADAPTATIONS,
    REWRITES,
    _install_import_hook,
    rewrite,
)

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")


def test_the_list_is_whole_and_says_why() -> None:
    assert [adaptation.name for adaptation in ADAPTATIONS] == [
        "import hook",
        "quiet fallback warnings",
        "moe te_general_gemm",
        "moe split sizes",
        "uneven rows over gloo",
        "latent attention without Transformer Engine",
        "buffers exchanged directly",
        "gates in place",
        "products invariant to the batch",
        "Adam in one kernel",
    ]
    assert all(len(adaptation.reason) > 20 for adaptation in ADAPTATIONS)
    assert list(REWRITES) == [
        "the string 'cuda'",
        "the string 'torch.cuda.<T>Tensor'",
        "torch.cuda and from torch.cuda import ...",
        "torch.compile",
        ".cuda(...)",
        ".record_stream(stream)",
        "pin_memory=...",
    ]


def rewritten(source: str) -> tuple[str, int]:
    """What a line becomes, without the import of the shim, and how many places changed."""
    tree, count = rewrite(source)
    lines = ast.unparse(tree).splitlines()
    shim = "from megaverl.platform import cuda_on_cpu as _cuda_on_cpu"
    assert (shim in lines) == (count > 0)
    return "\n".join(line for line in lines if line != shim), count


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.zeros(3, device='cuda')", "torch.zeros(3, device='cpu')"),
        ("torch.device('cuda')", "torch.device('cpu')"),
        ("x.type() == 'torch.cuda.HalfTensor'", "x.type() == 'torch.HalfTensor'"),
        ("jit_fuser = torch.compile", "jit_fuser = _cuda_on_cpu.uncompiled"),
        ("torch.cuda.current_device()", "_cuda_on_cpu.current_device()"),
        ("isinstance(s, torch.cuda.Stream)", "isinstance(s, _cuda_on_cpu.Stream)"),
        (
            "from torch.cuda import Event",
            "from megaverl.platform.cuda_on_cpu import Event",
        ),
        ("x.cuda()", "x.cpu()"),
        ("x.y[0].cuda(device, non_blocking=True)", "x.y[0].cpu()"),
        (
            "x.record_stream(torch.cuda.current_stream())",
            "_cuda_on_cpu.record_stream(x, _cuda_on_cpu.current_stream())",
        ),
        ("torch.empty(n, pin_memory=True)", "torch.empty(n, pin_memory=False)"),
        (
            "torch.empty(n, pin_memory=self.pin, device='cuda')",
            "torch.empty(n, pin_memory=False, device='cpu')",
        ),
    ],
)
def test_each_rule(source: str, expected: str) -> None:
    found, count = rewritten(source)
    assert found == expected
    assert count > 0


@pytest.mark.parametrize(
    "source",
    [
        "print('cuda graphs are off')",
        "name = 'torch.cuda'",
        "config.cuda_graph_impl",
        "other.cuda.Stream",
        "from .cuda import Event",
        "from torch import nn",
        "def cuda(self):\n    return self",
    ],
)
def test_what_stays(source: str) -> None:
    assert rewritten(source) == (source, 0)


def test_docstring_and_future_imports_stay_first() -> None:
    tree, count = rewrite(
        '"""Words."""\nfrom __future__ import annotations\nimport torch\nd = "cuda"\n'
    )
    assert count == 1
    assert ast.get_docstring(tree) == "Words."
    kinds = [
        getattr(statement, "module", type(statement).__name__)
        for statement in tree.body
    ]
    assert kinds == ["Expr", "__future__", "megaverl.platform", "Import", "Assign"]
    compile(tree, "here", "exec")


def test_lines_keep_their_numbers() -> None:
    """A traceback through megatron-core must point at its own source."""
    source = "import torch\n\n\ndef f(x):\n    return x.cuda()\n"
    tree, _ = rewrite(source)
    function = next(
        statement for statement in tree.body if isinstance(statement, ast.FunctionDef)
    )
    assert (function.lineno, function.body[0].lineno) == (4, 5)


_LEFT_ALONE = """
import json, sys, torch
import torch._dynamo  # which itself replaces torch.manual_seed
before = dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch))
from megaverl.platform import platform
for _ in range(2): platform.adapt_megatron()
import megatron.core.optimizer, megatron.core.models.gpt, megatron.core.tensor_parallel.random
import megatron.core.transformer.moe.moe_utils as moe
import megatron.core.transformer.moe.token_dispatcher as dispatcher
import megatron.core.transformer.multi_latent_attention as latent
import megatron.core.distributed.param_and_grad_buffer as buffer
after = dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(vars(torch))
def changed(old, new):
    return sorted(name for name in old if new.get(name, None) is not old[name] and not name.startswith("_"))
print(json.dumps({
    "changed": [changed(old, new) for old, new in zip(before, after)],
    "hooks": sum(type(f).__module__ == "megaverl.platform.megatron_cpu" for f in sys.meta_path),
    "te_general_gemm": moe.te_general_gemm is None,
    "latent_attention_has_te": latent.HAVE_TE,
    "split_sizes": type(dispatcher.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True)).__name__,
    "sees_the_shim": buffer._cuda_on_cpu.__name__,
}))
"""


@on_cpu
def test_torch_is_left_alone_while_megatron_core_sees_the_shim() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_ALONE], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "changed": [[], [], []],
        "hooks": 1,
        "te_general_gemm": True,
        "latent_attention_has_te": False,
        "split_sizes": "ndarray",
        "sees_the_shim": "megaverl.platform.cuda_on_cpu",
    }
    assert "not installed" not in done.stderr


def test_coming_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    finders = list(sys.meta_path)
    with pytest.raises(
        RuntimeError,
        match=r"megatron\.core was imported before megaverl\.platform could adapt it",
    ):
        _install_import_hook.__wrapped__()
    assert sys.meta_path == finders


class TestTheShim:
    """What megatron-core sees as torch.cuda."""

    def test_the_device_and_its_memory(self) -> None:
        assert cuda_on_cpu.current_device() == torch.device("cpu")
        assert cuda_on_cpu.device_count() == 1
        assert cuda_on_cpu.memory_allocated() == cuda_on_cpu.max_memory_reserved() == 0

    def test_random_state_is_the_cpus(self) -> None:
        with torch.random.fork_rng(devices=[]):
            cuda_on_cpu.manual_seed(7)
            state = cuda_on_cpu.get_rng_state()
            first = torch.rand(3)
            cuda_on_cpu.set_rng_state(state)
            assert torch.equal(torch.rand(3), first)
            assert cuda_on_cpu.default_generators[0] is torch.default_generator

    def test_streams_and_events_follow_the_program(self) -> None:
        stream = cuda_on_cpu.current_stream()
        start, end = stream.record_event(), stream.record_event()
        assert start.query() and start.elapsed_time(end) >= 0
        with cuda_on_cpu.stream(cuda_on_cpu.Stream()), cuda_on_cpu.device(0):
            assert cuda_on_cpu.default_stream() is stream
        assert isinstance(stream, cuda_on_cpu.Stream), (
            "isinstance and annotations need a class"
        )

    def test_everything_else_is_torch_cudas_own(self) -> None:
        assert cuda_on_cpu.is_available is torch.cuda.is_available
        with pytest.raises(AttributeError):
            _: Any = cuda_on_cpu.no_such_thing


@on_cpu
def test_one_rank_keeps_its_buffers_and_several_places_are_still_filled() -> None:
    platform.adapt_megatron()
    from megatron.core.distributed import param_and_grad_buffer as buffers

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        values, elsewhere = torch.arange(4.0), torch.zeros(4)
        version = values._version
        buffers.dist_reduce_scatter_func(values, values, group=dist.group.WORLD)
        buffers.dist_all_gather_func(values, values, group=dist.group.WORLD)
        assert values._version == version and values.tolist() == [0, 1, 2, 3], (
            "nothing is written"
        )
        buffers.dist_all_gather_func(elsewhere, values, group=dist.group.WORLD)
        assert torch.equal(elsewhere, values)
    finally:
        dist.destroy_process_group()


@on_cpu
def test_adam_takes_its_kernel_whatever_a_checkpoint_says() -> None:
    platform.adapt_megatron()
    from megatron.core import optimizer as optimizers

    weight = torch.nn.Parameter(torch.ones(5))
    config = optimizers.OptimizerConfig(
        optimizer="adam", lr=0.1, weight_decay=0.0, clip_grad=0.0
    )
    groups = [
        {
            "params": [weight],
            "wd_mult": 1.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
        }
    ]
    made = optimizers._get_megatron_optimizer_based_on_param_groups(
        config=config,
        model_chunks=[],
        param_groups=groups,
        pg_collection=SimpleNamespace(tp=None),
    )
    seen = []
    made.optimizer.register_step_post_hook(
        lambda adam, *_: seen.append([g["fused"] for g in adam.param_groups])
    )
    for told in (None, False):
        for group in made.optimizer.param_groups:
            group["fused"] = told
        weight.grad = torch.ones(5)
        made.optimizer.step()
    assert seen == [[True], [True]]
    assert torch.allclose(weight, torch.full((5,), 0.8)), (
        "a gradient that stays the same moves a weight by lr each time"
    )
