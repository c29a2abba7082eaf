"""Fields of megatron-core that no table names, tried on a GPU before ranks start: what fails there is a warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.config import load_config
from megaverl.trainer.trial_build import TrialResult, has_table_fields, try_roles
from tests.softcuda.install import Options, environment
from tests.trainer.conftest import make_inputs


def test_a_small_model_is_built_on_the_gpu(
    libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    for variable, value in environment(libraries, Options(devices=1)).items():
        monkeypatch.setenv(variable, value)

    def tried(*fields: str) -> TrialResult:
        given = [
            f"model.path={inputs / 'model'}",
            f"data.train={inputs / 'train.jsonl'}",
            "reward=exact_match",
        ]
        given += [
            "data.max_prompt_tokens=16",
            "rollout.sampling.max_tokens=6",
            f"run.dir={tmp_path}",
        ]
        return try_roles(
            load_config(None, [*given, *fields], check_paths=False), "train"
        )

    failed = tried(
        "actor.megatron.fp32_residual_connection=true", "model.dtype=bfloat16"
    )
    assert failed.issues == []
    [doubt] = failed.not_tried
    assert doubt.startswith(
        "fields of actor (on this GPU a small model with them fails with "
    )
    # One rank, which takes a step.
    assert tried(
        "actor.megatron.disable_bf16_reduced_precision_matmul=true"
    ) == TrialResult([], [])


@pytest.mark.parametrize(
    ("fields", "is_named"),
    [
        ({"megatron": {"recompute_modules": ["layernorm"]}}, True),
        ({"megatron": {"recompute_modules": ["core_attn"]}}, False),
        ({"megatron": {"fp8": "hybrid"}}, True),
        ({"ddp": {"nccl_ub": True}}, True),
        ({"ddp": {"nccl_ub": False}, "megatron": {"sequence_parallel": True}}, False),
    ],
)
def test_a_tiny_model_does_not_judge_kernels_that_a_table_names(
    fields: dict[str, Any], is_named: bool
) -> None:
    assert has_table_fields(SimpleNamespace(**fields)) == is_named
