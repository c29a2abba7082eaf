"""CUDA or CPU: what follows from each, and that a machine with CUDA is left as it is."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megaverl.platform import Platform, platform
from megaverl.processes import MOST_FILES

ROOT = Path(__file__).parents[2]


def test_this_machine() -> None:
    assert platform.is_cuda == torch.cuda.is_available()
    assert platform.device.type == ("cuda" if platform.is_cuda else "cpu")


def test_what_follows_from_a_cpu() -> None:
    cpu = Platform(is_cuda=False)
    assert (cpu.backend, cpu.device, cpu.default_dtype) == (
        "gloo",
        torch.device("cpu"),
        torch.float32,
    )
    cpu.start()
    cpu.synchronize()


def test_what_follows_from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    cuda = Platform(is_cuda=True)
    assert (cuda.backend, cuda.device) == ("nccl", torch.device("cuda", 3))


def test_a_rank_may_open_as_many_files_as_the_machine_lets_it() -> None:
    """However it was started: the launcher raises the limit of its own ranks, torchrun and srun do not."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, most), hard))
    try:
        platform.start()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def in_a_new_process(code: str) -> dict[str, object]:
    """The JSON that `code` prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_on_cuda_nothing_is_adapted() -> None:
    found = in_a_new_process(
        "import importlib.machinery, json, sys, types, warnings\n"
        "finders, filters = list(sys.meta_path), list(warnings.filters)\n"
        # Without it some are.
        "engine = sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
        "engine.__spec__ = importlib.machinery.ModuleSpec('transformer_engine', None)\n"
        "from megaverl.platform import Platform\n"
        "cuda = Platform(is_cuda=True); cuda.adapt_megatron(); cuda.adapt_vllm()\n"
        "loaded = [m for m in sys.modules if m.startswith(('megaverl.platform.', 'megatron', 'vllm'))]\n"
        "new = [type(f).__module__ for f in sys.meta_path if f not in finders]\n"
        "print(json.dumps({'loaded': sorted(loaded), 'finders': [m for m in new if 'megaverl' in m]}))"
    )
    # It hides optional packages of megatron-core, and adapts nothing.
    assert found == {
        "loaded": ["megaverl.platform.device", "megaverl.platform.quiet"],
        "finders": ["megaverl.platform.quiet"],
    }
