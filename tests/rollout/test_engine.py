"""What every engine refuses before any work."""

from __future__ import annotations

import pytest

from megaverl.errors import RolloutError
from megaverl.rollout.engine import (
    Generation,
    SamplingOptions,
    check_generations,
    check_request,
)


def check(
    prompts: list[list[int]], seeds: list[int] | None = None, max_tokens: int = 4
) -> None:
    options = SamplingOptions(max_tokens=max_tokens)
    check_request(
        prompts, options, seeds or [0] * len(prompts), max_model_len=10, vocab_size=50
    )


def test_what_fits_passes() -> None:
    check([[1, 2, 3], [0, 49], [7] * 6])
    check([])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        (
            [[1], [7] * 7],
            "prompt 1 has 7 tokens; with rollout.sampling.max_tokens=4 .* max_model_len of 10",
        ),
        ([[1, 50]], "prompt 0 holds token 50, but the model's vocabulary is 0 to 49"),
        ([[1], [3, -1]], "prompt 1 holds token -1"),
    ],
)
def test_bad_prompts_are_named(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        check(prompts)


def test_seeds_and_max_tokens() -> None:
    with pytest.raises(RolloutError, match="2 prompts came with 3 seeds"):
        check([[1], [2]], seeds=[0, 1, 2])
    with pytest.raises(RolloutError, match="max_tokens is 0"):
        check([[1]], max_tokens=0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Generation([1], [-0.5], "stop")], "1 responses for 2 prompts"),
        (
            [Generation([1], [-0.5], "stop"), Generation([1, 2], [-0.5], "stop")],
            "prompt 1: .* 2 tokens and 1 log-probs",
        ),
        (
            [Generation([1], [-0.5], "abort"), Generation([1], [-0.5], "stop")],
            "prompt 0: generation ended with 'abort'",
        ),
    ],
)
def test_wrong_answers_are_named(answer: list[Generation], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        check_generations(answer, 2)


def test_options_take_vllms_names() -> None:
    options = SamplingOptions(
        **{
            "max_tokens": 5,
            "temperature": 0.7,
            "top_k": -1,
            "min_p": 0.1,
            "stop_token_ids": [9],
        }
    )
    assert (options.top_k, options.extra) == (0, {"min_p": 0.1})
    assert options.stop_tokens([2, 9]) == [2, 9]
    assert SamplingOptions(5, stop_token_ids=[9], ignore_eos=True).stop_tokens([2]) == [
        9
    ]
