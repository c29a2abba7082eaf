"""Host memory of a node: what is offloaded there, and a checkpoint's copy."""

from __future__ import annotations

import pytest

from megaverl.planner.job import GB
from megaverl.planner.report import as_dict, as_text, host_memory, survey
from tests.planner.jobs import recipe

GRPO_8 = "llama3_70b/grpo_8_nodes"
ALL = "actor.offload={optimizer: true, gradients: true, parameters: true}"


def test_what_is_offloaded_is_counted_once_a_node() -> None:
    capacity = survey(recipe(GRPO_8, 64, ALL, "checkpoint.async_save=true"))
    first = [rank for rank in capacity.memory if rank.rank < 8]
    expected = sum(
        rank.parts["actor"]["weights"] + rank.parts["actor"]["optimizer"]
        for rank in first
    )
    host = host_memory(capacity)
    assert host["actor"] == pytest.approx(expected, rel=0.05), "gradients are not kept"
    assert host["reference"] > 1 * GB and host["checkpoint"] > 1 * GB
    assert as_dict(capacity)["host_memory"] == host
    assert (
        f"host memory of the fullest node: {sum(host.values()) / GB:,.0f} GB ("
        in as_text(capacity)
    )


def test_what_goes_to_files_takes_none() -> None:
    to_files = "actor.offload={optimizer: true, folder: /scratch}"
    keys = [to_files, "reference.offload=false", "checkpoint.async_save=false"]
    capacity = survey(recipe(GRPO_8, 64, *keys))
    assert (
        host_memory(capacity) == {}
        and "host memory" not in as_text(capacity).split("how this was")[0]
    )
