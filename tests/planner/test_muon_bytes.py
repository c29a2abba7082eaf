"""Bytes of roles that Muon trains, against real optimizers. Needs emerging-optimizers (Python 3.12)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from megaverl.models.tiny import make_tiny_folder
from megaverl.planner.memory import MemoryModel
from megaverl.sharding.model_spec import ModelSpec
from tests.launcher import Launcher
from tests.planner.jobs import make

pytestmark = pytest.mark.skipif(
    find_spec("emerging_optimizers") is None,
    reason="emerging-optimizers is not installed: it needs Python 3.12",
)
CASES = [
    ("Qwen2ForCausalLM", {"tp": 2, "dp": 2}, "bfloat16", False, {}),
    (
        "Qwen3ForCausalLM",
        {"pp": 2, "dp": 2},
        "float32",
        True,
        {"overlap_grad_reduce": True, "bucket_size": 5000},
    ),
    ("Qwen3MoeForCausalLM", {"pp": 2, "dp": 2, "ep": 2}, "bfloat16", False, {}),
    (
        "Qwen2ForCausalLM",
        {"dp": 4},
        "bfloat16",
        False,
        {"use_distributed_optimizer": False},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[1]))
def test_bytes_are_exact(case: tuple, launch: Launcher, tmp_path: Path) -> None:
    architecture, shape, dtype, critic, ddp = case
    folder = make_tiny_folder(tmp_path, architecture, tie_embeddings=True)
    measured = launch.world(
        4,
        "tests.planner.ranks:trained",
        folder=folder,
        shape={"tp": 1, "pp": 1, "dp": 1} | shape,
        dtype=dtype,
        critic=critic,
        ddp=ddp,
        optimizer={"optimizer": "muon"},
    )
    grid = [f"actor.{name}={size}" for name, size in shape.items() if name != "dp"]
    fields = ", ".join(f"{name}: {value}".lower() for name, value in ddp.items())
    job = make(
        ModelSpec.from_folder(folder),
        4,
        *grid,
        f"actor.ddp={{{fields}}}",
        f"model.dtype={dtype}",
        "actor.optimizer.optimizer=muon",
        "critic.optimizer.optimizer=muon",
        "actor.micro_batch_tokens=4096",
    )
    model = MemoryModel(job)
    role = job.roles[1] if critic else job.actor
    for rank, found in enumerate(measured):
        predicted = model.trained(role, rank)
        # Ranks share what all of them hold as one sequence of tensors, cut between rows.
        saved = [found.pop(name, 0) for name in ("saved_weights", "saved_optimizer")]
        if any(saved):
            expected = predicted.saved_weights + predicted.saved_optimizer
            assert sum(saved) == pytest.approx(expected, rel=0.15)
        assert {name: getattr(predicted, name) for name in found} == found, (
            f"rank {rank}"
        )
