"""Dtypes of Adam's moments: what has no effect, what an engine lacks, what would lose updates."""

from __future__ import annotations

import pytest

from megaverl.config.moment_dtypes import moment_bytes, moment_dtypes

ON = "use_precision_aware_optimizer: true"


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("fields", "key", "said"),
    [
        ("exp_avg_dtype: bf16", "exp_avg_dtype", "Set actor.optimizer.use_precision"),
        (
            f"{ON}, exp_avg_sq_dtype: bf16",
            "exp_avg_sq_dtype",
            "would never decay. Set actor.optimizer.adam_beta2 to 0.99 or less",
        ),
    ],
)
def test_a_dtype_that_would_do_harm_or_nothing(mistakes, engine, fields, key, said):
    found = mistakes(f"actor.optimizer={{{fields}}}", f"actor.engine={engine}")
    assert set(found) == {f"actor.optimizer.{key}"}
    assert said in found[f"actor.optimizer.{key}"]


def test_fsdp_has_no_float16_moments(mistakes):
    found = mistakes(
        f"actor.optimizer={{{ON}, exp_avg_dtype: fp16}}", "actor.engine=fsdp"
    )
    assert "has moments in bfloat16, float32, uint8" in str(found)


def test_right_dtypes_reach_both_engines(load):
    fields = f"{ON}, exp_avg_dtype: bf16, exp_avg_sq_dtype: bf16, adam_beta2: 0.95"
    for engine in ("megatron", "fsdp"):
        config = load(f"actor.optimizer={{{fields}}}", f"actor.engine={engine}")
        assert moment_dtypes(config.actor.optimizer) == {
            "exp_avg": "bfloat16",
            "exp_avg_sq": "bfloat16",
        }
    assert moment_dtypes({"exp_avg_dtype": "bf16"})["exp_avg"] == "float32"


def test_bytes_of_a_moment():
    assert moment_bytes("float32", 10_000) == 40_000
    assert moment_bytes("bfloat16", 10_000) == 20_000
    assert moment_bytes("uint8", 10_000) == 10_000 + 4 * 40
    assert moment_bytes("uint8", 1_000) == 4_000
