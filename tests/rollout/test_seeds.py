"""Seeds of samples: fixed for ever, as resumed and repeated runs depend on them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megaverl.rollout import sample_seed, turn_seed


def test_published_values_never_change() -> None:
    assert sample_seed(0, 0, 0) == 5675604045959537625
    assert sample_seed(17, 3, 255) == 6824078900503719025
    assert sample_seed(0, 0, 0, purpose="validation") == 7320302964012079555


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**9), st.integers(0, 10**9))
def test_fits_a_signed_64_bit_integer(run_seed: int, step: int, sample: int) -> None:
    assert 0 <= sample_seed(run_seed, step, sample) < 2**63


def test_low_bits_alone_tell_samples_apart() -> None:
    seeds = {
        sample_seed(seed, step, sample) & 0xFFFFFFFF
        for seed in (0, 1)
        for step in range(30)
        for sample in range(50)
    }
    # torch's CPU generator uses 32 bits; 3,000 draws collide once in 1,000 runs.
    assert len(seeds) == 3000


def test_turns_of_an_episode_and_agents_in_it() -> None:
    assert turn_seed(17, 3, 255, 0) == sample_seed(17, 3, 255), (
        "an only agent's first turn is a response"
    )
    seeds = {
        turn_seed(0, 1, 2, turn, agent)
        for turn in range(20)
        for agent in ("", "a", "b", "a" * 90, "b" * 90)
    }
    assert len(seeds) == 100
