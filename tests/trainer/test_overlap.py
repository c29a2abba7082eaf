"""`reshard.overlap`: weights are on their way before the step is over, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaverl.weights.reshard import HIDDEN
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments
from tools.same_numbers import is_cost

PPO = [
    "rollout.engine=hf",
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
    "trainer={steps: 2, validate_every: 0}",
    "checkpoint.export_hf=false",
    "reshard.check_every=1",
]
PATIENCE = 3  # seconds
# Gathered in several buckets, each of which is a part of the reshard.
BUCKETS = "actor.ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 20000}"


def test_the_same_bits_as_without(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Fingerprints of both sides are compared after every reshard."""
    found = {}
    for overlap in (False, True):
        arguments = [
            *command_arguments(inputs, tmp_path / str(overlap)),
            *PPO,
            BUCKETS,
            f"reshard.overlap={overlap}",
        ]
        found[overlap] = launch.world(
            2, "tests.trainer.ranks:train_counted", arguments=arguments
        )
    for plain, overlapped in zip(found[False], found[True], strict=True):
        assert plain["weights"] == overlapped["weights"]
        assert overlapped["parts"] > 1
        for before, after in zip(plain["metrics"], overlapped["metrics"], strict=True):
            assert comparable(before) == comparable(after)
            assert HIDDEN not in before and 0 <= after[HIDDEN] <= 1
            assert after["reshard/bytes_received"] + after["reshard/bytes_local"] > 0


@pytest.mark.parametrize("stalls", [False, True])
def test_what_goes_wrong_in_the_background_ends_the_run(
    launch: Launcher, inputs: Path, tmp_path: Path, stalls: bool
) -> None:
    """On the rank itself with its own words, on the other with the rank that failed, or that it waited for."""
    arguments = [
        *command_arguments(inputs, tmp_path),
        *PPO,
        BUCKETS,
        "reshard.overlap=true",
    ]
    arguments += [f"reshard.timeout_minutes={PATIENCE / 60}"]
    target = "tests.trainer.ranks:train_until_a_part_is_lost"
    found = launch.world(2, target, fresh=True, arguments=arguments, stalls=stalls)
    if stalls:
        waited = "ReshardError: rank 1 died or stalled while the weights of version 2 moved: rank 0, "
        assert waited in found[0]
        assert f"got no answer within {PATIENCE} s" in found[0]
        assert found[1].startswith(
            "ReshardError: this rank's weights of version 2 have not moved in the background"
        )
    else:
        # Rank 0 notices a broken connection, and learns the cause.
        assert found[0].startswith("TrainingStopped: rank 1 failed in weights.sync")
        assert "OSError: the device is gone" in found[0]
        assert found[1] == "OSError: the device is gone"


def comparable(metrics: dict[str, Any]) -> str:
    return json.dumps(
        {name: value for name, value in sorted(metrics.items()) if not is_cost(name)}
    )
