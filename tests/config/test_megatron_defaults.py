"""Defaults of gradients where megatron-core's own would lose precision or time."""

from __future__ import annotations

from typing import Any

import pytest

from megaverl.config.megatron_defaults import ddp_defaults


@pytest.mark.parametrize(
    ("given", "replicas", "on_gpus", "expected"),
    [
        ({}, 8, True, (True, True)),
        ({}, 1, True, (True, False)),  # nothing is reduced
        # gloo's threads would compete with the backward pass.
        ({}, 8, False, (True, False)),
        ({"grad_reduce_in_fp32": False}, 8, True, (False, True)),
        ({"overlap_grad_reduce": False}, 8, True, (True, False)),
        ({"overlap_grad_reduce": True}, 1, False, (True, True)),
    ],
)
def test_gradients_are_float32_and_reduced_beside_the_backward_pass(
    given: dict[str, Any], replicas: int, on_gpus: bool, expected: tuple[bool, bool]
) -> None:
    found = ddp_defaults(given, replicas=replicas, on_gpus=on_gpus)
    assert (found["grad_reduce_in_fp32"], found["overlap_grad_reduce"]) == expected
    assert found["use_distributed_optimizer"] is True


def test_what_is_given_stays() -> None:
    given = {"bucket_size": 5, "use_distributed_optimizer": False}
    assert given.items() <= ddp_defaults(given, replicas=2, on_gpus=True).items()
