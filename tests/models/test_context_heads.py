"""Layers with a state over rows that are cut between ranks, as if one rank computed each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher
from tests.models.state_ranks import LENGTHS

# As kernels with a mask, FlashAttention and Transformer Engine read rows, and without packing.
LAID = ("pack_part", "pack_part_varlen", "pack_for_engine", "padded")


@pytest.mark.parametrize(
    ("architecture", "size", "changes"),
    [
        ("Qwen3NextForCausalLM", 2, {}),
        ("Qwen3NextForCausalLM", 4, {"num_value_heads": 4}),
        ("NemotronHForCausalLM", 2, {}),
        # Ranks that compute heads of one group have a copy of its rows each.
        ("NemotronHForCausalLM", 4, {"num_groups": 2, "conv_bias": False}),
        ("NemotronHForCausalLM", 4, {"num_groups": 1, "has_norm": False}),
    ],
)
def test_a_cut_row_is_computed_as_its_sequences_alone(
    launch: Launcher, architecture: str, size: int, changes: dict[str, Any]
) -> None:
    """Outputs and gradients, in float64."""
    for laid in LAID:
        found = launch.world(
            size,
            "tests.models.state_ranks:cut_row",
            architecture=architecture,
            laid=laid,
            **changes,
        )
        assert sum(each["tokens"] for each in found) == sum(LENGTHS), laid
        for each in found:
            assert each["outputs"] < 1e-5, (laid, each)
            assert each["gradients"] < 1e-4, (laid, each)
