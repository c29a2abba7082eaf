"""The built-in rewards, one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.errors import RewardError
from megaverl.rewards import RewardSample, build_reward
from megaverl.rewards.math_worker import MathWorker
from megaverl.rewards.rules import final_number

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def score(
    reward: str,
    response: str,
    reference: Any = None,
    num_tokens: int | None = None,
    **options: Any,
) -> float:
    sample = RewardSample(
        "prompt", response, reference, finish_reason="stop", num_tokens=num_tokens
    )
    return build_reward({"name": reward, **options}).score([sample]).total[0]


@pytest.mark.parametrize(
    ("response", "reference", "options", "expected"),
    [
        ("12345", "12345", {}, 1.0),
        (" 12345\n", "12345", {}, 1.0),
        (" 12345", "12345", {"strip": False}, 0.0),
        ("yes", "Yes", {}, 0.0),
        ("yes", "Yes", {"ignore_case": True}, 1.0),
        ("12", 12, {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("c", ["a", "b"], {}, 0.0),
    ],
)
def test_exact_match(
    response: str, reference: Any, options: dict[str, Any], expected: float
) -> None:
    assert score("exact_match", response, reference, **options) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [("12345", 1.0), ("12354", 0.6), ("123", 0.6), ("1234567890", 0.5), ("", 0.0)],
)
def test_positions_give_partial_credit(response: str, expected: float) -> None:
    assert score("positions", response, "12345") == pytest.approx(expected)


@given(
    response=st.text("01", max_size=6), reference=st.text("01", min_size=1, max_size=6)
)
def test_positions_are_one_only_for_an_exact_match(
    response: str, reference: str
) -> None:
    value = score("positions", response, reference)
    assert 0.0 <= value <= 1.0 and (value == 1.0) == (response == reference)


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("48+24 = 72\n#### 72", 1.0, 1.0),
        ("#### 72.0", 1.0, 1.0),
        ("#### $72.", 1.0, 1.0),
        ("####72", 1.0, 1.0),
        ("#### 72 clips", 1.0, 1.0),
        ("#### 7 or rather #### 72", 1.0, 1.0),
        ("#### 72 or rather #### 7", 0.0, 0.0),
        ("#### -72", 0.0, 0.0),
        ("#### 720", 0.0, 0.0),
        ("the answer is 72", 0.0, 1.0),
        ("the answer is 72, not 71", 0.0, 0.0),
        ("####", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
@pytest.mark.parametrize(
    "reference",
    ["48+24 = 72\n#### 72", "72", 72, "48 and 24: the answer is 72.", "$72.00"],
)
def test_gsm8k(response: str, strict: float, flexible: float, reference: Any) -> None:
    assert score("gsm8k", response, reference) == strict
    assert score("gsm8k", response, reference, method="flexible") == flexible


def test_gsm8k_reads_large_numbers_and_rewards_the_form() -> None:
    assert score("gsm8k", "#### $1,234,500.50", "#### 1234500.5") == 1.0
    assert score("gsm8k", "#### 1234", "#### 1,234") == 1.0
    assert score("gsm8k", "#### -3", "#### -3") == 1.0
    assert score("gsm8k", "#### 5", "#### 72", format_score=0.1) == 0.1
    assert score("gsm8k", "5", "#### 72", format_score=0.1) == 0.0
    assert final_number("#### .5") == Decimal("0.5") and final_number("none") is None


def test_gsm8k_says_which_row_has_no_number() -> None:
    for reference in ("many", "nan", "48 and 24 #### many"):
        with pytest.raises(
            RewardError,
            match=f"raised ValueError: the reference '{reference}' .*sample 0 of 1",
        ):
            score("gsm8k", "#### 5", reference)
    with pytest.raises(RewardError, match="no reference answer; .*data.answer_key"):
        score("gsm8k", "#### 5", None)


@pytest.mark.skipif(
    not GSM8K.is_file(), reason="no copy of GSM8K beside the repository"
)
def test_gsm8k_reads_every_published_answer() -> None:
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    samples = [
        RewardSample(row["question"], row["answer"], row["answer"]) for row in rows
    ]
    assert all(build_reward("gsm8k").score(samples).correct) and len(rows) > 1000


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("So it is $\\boxed{\\frac{1}{2}}$.", "0.5", 1.0),
        ("So it is $\\boxed{\\frac{1}{3}}$.", "0.5", 0.0),
        ("The answer is 1/2", "\\frac{1}{2}", 1.0),
        ("$x^2+2x+1$", "(x+1)^2", 1.0),
        ("$x^2+2x+2$", "(x+1)^2", 0.0),
        ("$\\{2, 1\\}$", "$\\{1, 2\\}$", 1.0),
        ("I do not know.", "7", 0.0),
        ("", "7", 0.0),
        ("7", ["6", "7"], 1.0),
    ],
)
def test_math_verify(response: str, reference: Any, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math_verify", response, reference) == expected


def test_math_verify_gives_up_on_what_takes_for_ever_and_goes_on() -> None:
    pytest.importorskip("math_verify")
    before = MathWorker.shared().num_timeouts
    samples = [
        RewardSample("p", "$10^{10^{10^{10}}}$", "7"),
        RewardSample("p", "$7$", "7"),
    ]
    output = build_reward({"name": "math_verify", "timeout_seconds": 3}).score(samples)
    assert output.total == [0.0, 1.0]
    assert MathWorker.shared().num_timeouts == before + 1


def test_math_verify_says_when_its_process_died() -> None:
    pytest.importorskip("math_verify")
    worker = MathWorker()
    assert worker.equal("1", "1", 60.0)
    assert worker._process is not None
    worker._process._process.kill()
    worker._process._process.wait()
    with pytest.raises(RewardError, match="ended with code -9.*by hand"):
        worker.equal("1", "1", 60.0)
    assert worker.equal("1", "1", 60.0)
    worker.close()


@pytest.mark.parametrize(
    ("response", "mode", "expected"),
    [
        ("<think>a\nb</think><answer>1</answer>", "fullmatch", 1.0),
        ("<think>a\nb</think><answer>1</answer> more", "fullmatch", 0.0),
        ("<think>a\nb</think><answer>1</answer> more", "search", 1.0),
        ("1", "search", 0.0),
    ],
)
def test_format(response: str, mode: str, expected: float) -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert score("format", response, pattern=pattern, mode=mode) == expected


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (150, -1)]
)
def test_soft_overlong_is_daposs_equation_13(num_tokens: int, expected: float) -> None:
    value = score(
        "soft_overlong", "", num_tokens=num_tokens, max_tokens=100, buffer_tokens=20
    )
    assert value == pytest.approx(expected)
    half = score(
        "soft_overlong",
        "",
        num_tokens=num_tokens,
        max_tokens=100,
        buffer_tokens=20,
        penalty=0.5,
    )
    assert half == pytest.approx(expected / 2)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (20, 0), (60, -0.5), (100, -1), (140, -1.5)]
)
def test_length_linear(num_tokens: int, expected: float) -> None:
    value = score(
        "length_linear", "", num_tokens=num_tokens, max_tokens=100, free_tokens=20
    )
    assert value == pytest.approx(expected)


def test_finished_tells_a_cut_off_response() -> None:
    samples = [
        RewardSample("p", "r", finish_reason=reason) for reason in ("stop", "length")
    ]
    assert build_reward("finished").score(samples).total == [1.0, 0.0]
    with pytest.raises(RewardError, match="finish_reason is None"):
        build_reward("finished").score([RewardSample("p", "r")])
    with pytest.raises(RewardError, match="num_tokens is None"):
        build_reward({"name": "length_linear", "max_tokens": 5}).score(
            [RewardSample("p", "r")]
        )


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"name": "gsm8k", "method": "loose"},
            "method is 'loose'; it must be strict or flexible",
        ),
        ({"name": "format", "pattern": "("}, "not a regular expression"),
        ({"name": "format", "pattern": "a", "mode": "match"}, "mode is 'match'"),
        ({"name": "format"}, "missing a required .*argument.* 'pattern'"),
        (
            {"name": "soft_overlong", "max_tokens": 5, "buffer_tokens": 6},
            "buffer_tokens is 6",
        ),
        (
            {
                "name": "soft_overlong",
                "max_tokens": 5,
                "buffer_tokens": 2,
                "penalty": -1,
            },
            "penalty is -1",
        ),
        (
            {"name": "length_linear", "max_tokens": 5, "free_tokens": 5},
            "free_tokens is 5",
        ),
        ({"name": "math_verify", "timeout_seconds": 0}, "timeout_seconds is 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused_when_built(
    spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        build_reward(spec)


def test_rewards_need_no_heavy_library() -> None:
    code = "import sys, megaverl.rewards as r; r.reward_names(); print([m for m in sys.modules if m in BAD])"
    code = code.replace(
        "BAD", repr(("torch", "transformers", "vllm", "sympy", "math_verify"))
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
