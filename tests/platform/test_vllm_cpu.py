"""Everything that is adapted in vLLM, and that it is so on a CPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaverl.errors import RolloutError
from megaverl.platform.vllm_cpu import (
    ADAPTATIONS,
    BLOCK_TOKENS,
    MAX_CACHE_BYTES,
    engine_defaults,
)
from megaverl.rollout.cpu_limits import check_runs_here
from tests.launcher import Launcher

RANKS = "tests.platform.vllm_ranks"
# Bytes: keys and values, layers, heads, dimensions, float32.
ONE_TOKEN = 2 * 4 * 2 * 32 * 4


def test_the_list_is_whole_and_says_why() -> None:
    assert [adaptation.name for adaptation in ADAPTATIONS] == [
        "kernels in vLLM's modules alone",
        "weights beside packed copies",
        "convolutions without packed weights",
        "experts beside packed copies",
        "sigmoid or biased scores in one group of experts",
        "quantised products by definition",
        "products with groups by definition",
        "no sgl kernels",
        "logits in float32 without a copy of the weight",
        "norms in one kernel",
        "rotary embeddings of all heads",
        "attention without a wrapper",
        "images without torchvision",
        "no ranks of drawn tokens",
        "sampling of drafts by definition",
        "memory bound without a warning",
        "shared memory by job",
    ]
    assert all(len(adaptation.reason) > 20 for adaptation in ADAPTATIONS)


@pytest.fixture(scope="module")
def adapted(launch: Launcher) -> list[Any]:
    """What `adapt_cuda_then_cpu` found in an interpreter of its own."""
    [found] = launch.world(1, f"{RANKS}:adapt_cuda_then_cpu", bare=True)
    return list(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_each_changes_what_it_says_and_twice_is_once(adapted: list[Any]) -> None:
    before, once, twice = adapted[1]
    assert before == {
        "weight_kept": False,
        "wrapped": [0, 0],
        "own_norm": False,
        "opaque": True,
        "ranks": [2],
    }
    assert (
        once
        == twice
        == {
            **{
                "weight_kept": True,
                "wrapped": [1, 1],
                "own_norm": True,
                "opaque": False,
                "ranks": [0],
            },
            "sgl": False,
            "kernels": [],
        }
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_products_are_those_of_written_weights(launch: Launcher) -> None:
    """Weights are packed again after a write, and oneDNN compiles products of few numbers of rows for small ones."""
    found = launch.world(1, f"{RANKS}:products_after_a_write")[0]
    assert {case: rows for case, (_, rows) in found.items()} == {
        "64 torch.float32": 4,
        "64 torch.bfloat16": 4,
        "512 torch.float32": 3,
        "512 torch.bfloat16": 3,
    }
    for case, (error, _) in found.items():
        assert error < (1e-5 if "float32" in case else 1e-2), case


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_norms_in_one_kernel_are_those_of_pytorch(launch: Launcher) -> None:
    errors = launch.world(1, f"{RANKS}:norm_errors")[0]
    assert len(errors) == 16
    assert all(error < 2.0 for error in errors.values()), errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_rotary_embeddings_turn_every_head(launch: Launcher) -> None:
    """Heads in one row, apart, one alone, cut out of wider rows, and without keys; all of a head, and half of it."""
    errors = launch.world(1, f"{RANKS}:rotary_errors")[0]
    assert len(errors) == 10
    assert all(error < 1e-5 for error in errors.values()), errors


def test_nothing_happens_on_cuda(adapted: list[Any]) -> None:
    assert adapted[0] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="adapts a CPU")
def test_shared_memory_has_one_name_in_an_engine_and_another_in_the_next(
    launch: Launcher,
) -> None:
    first, second = launch.world(2, f"{RANKS}:shared_memory_names")
    assert first == second
    assert len(set(first)) == 2


def sizes(**changes: Any) -> dict[str, Any]:
    model = {
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "dtype": torch.float32,
        "latent_attention": False,
    }
    return engine_defaults(
        **(model | {"max_model_len": 100, "num_sequences": 16} | changes)
    )


def test_cache_holds_what_is_asked_for_within_limits() -> None:
    blocks = 16 * 4 + 2  # 100 tokens are 4 blocks of 32
    assert sizes()["kv_cache_memory_bytes"] == blocks * BLOCK_TOKENS * ONE_TOKEN
    assert (
        sizes(dtype=torch.bfloat16)["kv_cache_memory_bytes"]
        == blocks * BLOCK_TOKENS * ONE_TOKEN // 2
    )
    assert (
        sizes(num_sequences=10**6)["kv_cache_memory_bytes"]
        == MAX_CACHE_BYTES + 2 * BLOCK_TOKENS * ONE_TOKEN
    )
    one_long = sizes(max_model_len=10**6, num_sequences=None)
    assert one_long["kv_cache_memory_bytes"] > 10**6 * ONE_TOKEN > MAX_CACHE_BYTES


def test_latent_attention_keeps_the_weights_that_updates_are_written_to() -> None:
    """Where there is AMX vLLM would take a backend without them."""
    assert sizes(latent_attention="CPU_MLA")["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in sizes()
    with pytest.raises(
        RolloutError,
        match="rollout.vllm.attention_backend=AMX_MLA: .* Remove the key, to use CPU_MLA",
    ):
        check_runs_here(
            {"enforce_eager": True, "attention_backend": "AMX_MLA"}, experts=False
        )


def test_experts_without_gates_are_not_computed() -> None:
    check_runs_here({"enforce_eager": True}, experts=False, has_gates=False)
    with pytest.raises(RolloutError, match="rollout.engine=hf on a CPU"):
        check_runs_here({"enforce_eager": True}, experts=True, has_gates=False)


def test_prefixes_of_recurrent_layers_are_not_cached() -> None:
    arguments = {"enforce_eager": True, "enable_prefix_caching": True}
    check_runs_here(arguments, experts=False)
    with pytest.raises(RolloutError, match="a state in the middle"):
        check_runs_here(arguments, experts=False, is_recurrent=True)
