"""What CUDA, NCCL, matrix products and graphs hold: against what others measured, and shown part by part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.cli.main import main
from megaverl.distributed.grid import DIMS, EXPERT_DIMS
from megaverl.planner.job import GB, Machine
from megaverl.planner.memory import MemoryModel
from megaverl.planner.picture import draw
from megaverl.planner.report import as_text, survey
from megaverl.planner.reserve import (
    LINK,
    MIB,
    P2P_CHANNELS,
    captured_sizes,
    collective_bytes,
    graph_bytes,
    group_of,
    nccl_bytes,
    p2p_bytes,
    reserve_parts,
)
from tests.planner.jobs import CONFIGS, make, recipe
from tests.sharding.specs import make_spec

RECIPE = [
    "plan",
    "--config",
    str(CONFIGS / "llama3_70b" / "grpo_8_nodes.yaml"),
    "--nodes",
    "8",
    "--json",
]


def test_a_link_is_what_nccl_allocates() -> None:
    """NVIDIA/nccl issue 1685 counts allocations of 10,485,760 and of 2,097,152 bytes;
    and 3.28 GB for an all-to-all of 8 GPUs in a node.
    """
    assert LINK == 10_485_760 + 2_097_152
    found = p2p_bytes(range(8), range(1, 8), 0, make(make_spec(), 8))
    assert found == pytest.approx(3.28 * GB, rel=0.2)


def test_a_group_across_nodes_takes_less_for_each_peer() -> None:
    job = make(make_spec(), 16)
    inside, across = (p2p_bytes(range(size), range(1, 8), 0, job) for size in (8, 16))
    assert 0 < across < inside
    assert p2p_bytes(range(16), range(1, 16), 0, job) - across == 2 * 16 * 2 * MIB, (
        "buffers for all peers together"
    )
    assert (
        collective_bytes((0,), 0, job)
        == 0
        < collective_bytes((0, 8), 0, job)
        < collective_bytes((0, 1), 0, job)
    )


@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]), rank=st.integers(0, 15)
)
def test_groups_of_one_rank_cost_nothing(tp: int, pp: int, rank: int) -> None:
    """And a group that two roles share is there once: a reference on the actor's grid adds nothing."""
    grid = [
        f"{role}.{key}={size}"
        for role in ("actor", "reference")
        for key, size in (("tp", tp), ("pp", pp))
    ]
    engine = f"rollout.tp={tp}"
    alone, beside = (
        nccl_bytes(
            make(make_spec(num_heads=4, num_kv_heads=4), 16, *grid, engine, *more),
            rank,
            (),
        )
        for more in (
            (),
            ("algorithm={name: grpo, group_size: 8, kl: {in: loss, coef: 0.1}}",),
        )
    )
    assert alone == beside > 0
    assert nccl_bytes(make(make_spec(), 1), 0, ()) == 0


@pytest.mark.parametrize(
    ("dims", "spanned"),
    [
        (DIMS, ("tp",)),
        (DIMS, ("cp", "dp")),
        (DIMS, ("pp",)),
        (EXPERT_DIMS, ("etp", "ep")),
    ],
)
def test_a_group_is_whoever_differs_along_its_dimensions(
    dims: tuple[str, ...], spanned: tuple[str, ...]
) -> None:
    spec = recipe("qwen3_235b_a22b/grpo_64_nodes", 512).spec
    role = make(spec, 16, "actor={tp: 2, pp: 2, ep: 2, etp: 1}", "rollout.tp=4").actor
    coords = [role.grid.coords(rank) for rank in range(16)]
    fixed = [dim for dim in dims if dim not in spanned]
    for rank in range(16):
        alike = (
            other
            for other in range(16)
            if all(getattr(coords[other], d) == getattr(coords[rank], d) for d in fixed)
        )
        assert group_of(role, rank, dims, spanned) == tuple(alike)


def test_context_parallelism_adds_a_ring() -> None:
    whole, cut = (
        nccl_bytes(make(make_spec(), 8, f"actor.cp={cp}"), 0, ()) for cp in (1, 4)
    )
    assert cut - whole > 2 * P2P_CHANNELS * LINK


def test_experts_add_their_exchange() -> None:
    spec = recipe("qwen3_235b_a22b/grpo_64_nodes", 512).spec
    few, many = (
        nccl_bytes(
            make(spec, 16, f"actor.ep={ep}", "actor.etp=1", "rollout.tp=4"), 0, ()
        )
        for ep in (2, 8)
    )
    assert many - few > 5 * 32 * LINK


def test_sizes_that_vllm_captures() -> None:
    """vLLM 0.32 logs 51 sizes by default ("PIECEWISE=51 (largest=512)", vllm-project/vllm pull request 48214)."""
    assert len(captured_sizes({})) == 51 and captured_sizes({})[-1] == 512
    assert captured_sizes({"max_num_seqs": 8}) == [1, 2, 4, 8, 16]
    assert captured_sizes(
        {"compilation_config": {"cudagraph_capture_sizes": [4, 1, 4]}}
    ) == [1, 4]
    assert (
        captured_sizes({"enforce_eager": True})
        == captured_sizes({"compilation_config": {"cudagraph_mode": 0}})
        == []
    )
    assert (
        graph_bytes({"enforce_eager": True})
        == 0
        < graph_bytes({"max_num_seqs": 8})
        < graph_bytes({})
        < GB
    )


@pytest.mark.parametrize("num_seqs", [1, 5, 100, 256, 300, 1024])
@pytest.mark.parametrize("tokens", [64, 16384])
@pytest.mark.parametrize("largest", [None, 40])
def test_the_sizes_are_vllms_own(
    num_seqs: int, tokens: int, largest: int | None
) -> None:
    """On a CPU vLLM captures nothing, so its rule is asked with the settings of a GPU."""
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation = CompilationConfig(
        cudagraph_mode=mode, max_cudagraph_capture_size=largest
    )
    settings = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(
            max_num_seqs=num_seqs, max_num_batched_tokens=tokens
        ),
        uniform_decode_query_len=1,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(settings)  # type: ignore[arg-type]
    fields = {"max_num_seqs": num_seqs, "max_num_batched_tokens": tokens}
    found = captured_sizes(
        fields | ({} if largest is None else {"max_cudagraph_capture_size": largest})
    )
    assert found == compilation.cudagraph_capture_sizes


def test_graphs_come_off_the_engines_share() -> None:
    """vLLM takes them off before the cache, so that beside the rest of a rank its share is not exceeded."""
    job = recipe("llama3_70b/grpo_8_nodes", 64)
    eager = recipe("llama3_70b/grpo_8_nodes", 64, "rollout.vllm.enforce_eager=true")
    graphs, none = (MemoryModel(each).rank(0) for each in (job, eager))
    taken = graph_bytes(job.config.rollout.vllm)
    assert (
        graphs.parts["reserve"]["CUDA graphs"]
        == taken
        > 0
        == none.parts["reserve"]["CUDA graphs"]
    )
    assert none.engine.cache - graphs.engine.cache == pytest.approx(taken)
    assert graphs.phases["generate"] == pytest.approx(none.phases["generate"])
    assert graphs.phases["actor update"] - none.phases["actor update"] == pytest.approx(
        taken
    )


def test_a_person_may_know_better() -> None:
    known = recipe("llama3_70b/grpo_8_nodes", 64, machine=Machine(reserve=5 * GB))
    rank = MemoryModel(known).rank(0)
    assert rank.parts["reserve"] == {"as given": 5 * GB}
    assert {used["reserve"] for used in rank.moments.values()} == {5 * GB}


def test_every_part_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = recipe("llama3_70b/grpo_8_nodes", 64)
    capacity = survey(job)
    parts = reserve_parts(job, 0, ())
    text, picture = as_text(capacity), draw(capacity, tmp_path / "plan.svg").read_text()
    assert all(f"  reserve    {part}" in text and part in picture for part in parts)
    assert main(RECIPE) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["memory"]["reserve"].keys() == parts.keys()
        and found["machine"]["reserve"] is None
    )
    assert main([*RECIPE, "--reserve", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["memory"]["reserve"] == {"as given": [3 * GB] * 3}
        and found["machine"]["reserve"] == 3 * GB
    )
