"""The reward `code`: which program is taken, the forms of tests, and what they are worth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megaverl.errors import RewardError
from megaverl.rewards import RewardSample, build_reward
from megaverl.rewards.rules import extract_code, row_tests, same_output


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\ndone", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        (
            "```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```\nrun it:\n```bash\npython x.py\n```",
            "x = 2\n",
        ),
        ("```python\nx = 1\nwhile", "x = 1\nwhile"),
        ("```bash\nls\n```", ""),
        ("```python title='a'\nx = '```'\n```", "x = '```'\n"),
    ],
)
def test_the_last_block_of_python(response: str, code: str) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("reference", "tests"),
    [
        ("assert f(1) == 2", [{"code": "assert f(1) == 2"}]),
        (
            ["assert a", {"code": "assert b"}],
            [{"code": "assert a"}, {"code": "assert b"}],
        ),
        ({"input": "1", "output": "2"}, [{"input": "1", "output": "2"}]),
        (
            {"call": "f", "args": [1], "expected": 2},
            [{"call": "f", "args": [1], "expected": 2}],
        ),
        (
            {"inputs": ["1\n", ["1", "2"]], "outputs": ["2", "3"]},
            [("1\n", "2"), ("1\n2", "3")],
        ),
        (
            {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"},
            [{"call": "f", "args": [1, 2], "expected": 3}],
        ),
        (
            {"test": "def check(c): pass", "entry_point": "f"},
            [{"code": "def check(c): pass\ncheck(f)"}],
        ),
        (
            {"test_list": ["assert a"], "test_setup_code": "import b"},
            [{"code": "import b\nassert a"}],
        ),
    ],
)
def test_the_forms_of_tests(reference: Any, tests: list[Any]) -> None:
    wanted = [
        dict(zip(("input", "output"), each, strict=True))
        if isinstance(each, tuple)
        else each
        for each in tests
    ]
    assert row_tests(reference) == wanted
    if not isinstance(reference, str):
        assert row_tests(json.dumps(reference)) == wanted


FIELDS = (
    "input",
    "output",
    "call",
    "args",
    "kwargs",
    "expected",
    "code",
    "inputs",
    "outputs",
    "fn_name",
    "test",
)
ALL_FIELDS = dict.fromkeys((*FIELDS, "entry_point", "test_list", "test_setup_code"))


@pytest.mark.parametrize(
    ("test", "read"),
    [
        (
            {"call": "f", "args": [1, None], "expected": 3},
            {"call": "f", "args": [1, None], "expected": 3},
        ),
        ({"call": "f", "expected": None}, {"call": "f", "expected": None}),
        (
            {"call": "f", "kwargs": {"a": 1, "b": None}, "expected": 3},
            {"call": "f", "kwargs": {"a": 1}, "expected": 3},
        ),
        ({"input": "7", "output": "7"}, {"input": "7", "output": "7"}),
        ({"output": "7"}, {"output": "7"}),
        ({"code": "assert a"}, {"code": "assert a"}),
        ({"test_list": ["assert a", None]}, {"code": "\nassert a"}),
        (
            {"test": "def check(f): pass", "entry_point": "f"},
            {"code": "def check(f): pass\ncheck(f)"},
        ),
        (
            {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"},
            {"call": "f", "args": [1, 2], "expected": 3},
        ),
        ({"inputs": [None], "outputs": ["7"]}, {"input": "", "output": "7"}),
        (
            {"inputs": [None], "outputs": [None], "fn_name": "f"},
            {"call": "f", "args": [], "expected": None},
        ),
    ],
)
def test_null_fields_are_absent(test: dict[str, Any], read: dict[str, Any]) -> None:
    """As Parquet fills them in, as the data reader leaves them out, and in a list with nulls."""
    left_out = {key: value for key, value in test.items() if value is not None}
    for reference in (ALL_FIELDS | test, left_out, [None, ALL_FIELDS | test]):
        assert row_tests(reference) == [read]


def test_programs_are_judged_the_same_with_null_fields() -> None:
    add, echo, nothing = (
        "def f(a, b): return a + b",
        "print(input())",
        "def f(): return {'a': 1, 'b': None}",
    )
    read_all = "import sys\nprint(len(sys.stdin.read()))"
    samples = [
        RewardSample(
            "", add, [ALL_FIELDS | {"call": "f", "args": [1, 2], "expected": 3}]
        ),
        RewardSample(
            "",
            add,
            [
                ALL_FIELDS
                | {
                    "call": "f",
                    "args": [1],
                    "kwargs": {"b": 2, "c": None},
                    "expected": 3,
                }
            ],
        ),
        RewardSample(
            "",
            "print(None)",
            [ALL_FIELDS | {"call": "f", "args": [1, 2], "expected": 3}],
        ),
        RewardSample("", echo, [ALL_FIELDS | {"input": "7\n", "output": "7\n"}]),
        RewardSample("", read_all, [ALL_FIELDS | {"output": "0"}]),
        RewardSample("", nothing, [{"call": "f", "expected": {"a": 1}}]),
        RewardSample(
            "",
            "def f(): return {'a': 1}",
            [{"call": "f", "expected": {"a": 1, "b": None}}],
        ),
        RewardSample("", "def f(): pass", [ALL_FIELDS | {"call": "f"}]),
        RewardSample("", "def f(): return 0", [ALL_FIELDS | {"call": "f"}]),
    ]
    assert build_reward("code").score(samples).total == [
        1.0,
        1.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
    ]


NO_TESTS = [
    3,
    None,
    {"input": "1"},
    [{"a": 1}],
    {"inputs": ["1"], "outputs": []},
    {"call": "f", "expect": 3},
    {"in": "7", "output": "7"},
    "[" * 100_000 + "3",
]


@pytest.mark.parametrize("reference", NO_TESTS[:-1])
def test_what_is_no_test_is_refused(reference: Any) -> None:
    with pytest.raises(ValueError):
        row_tests(reference)


def test_brackets_without_end_are_text() -> None:
    assert row_tests(NO_TESTS[-1]) == [{"code": NO_TESTS[-1]}]


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "same"),
    [
        ("1 2\n", "1 2", 0.0, True),
        ("1 2 \n\n", "1 2", 0.0, True),
        ("1  2", "1 2", 0.0, False),
        ("1\n2", "1 2", 0.0, False),
        ("1\n2", "1 2", 1e-6, False),
        ("0.30000000004", "0.3", 1e-6, True),
        ("0.30000000004", "0.3", 0.0, False),
        ("0.31 a", "0.3 a", 1e-6, False),
        ("nan", "1", 1e-6, False),
    ],
)
def test_outputs_are_compared(
    found: str, expected: str, tolerance: float, same: bool
) -> None:
    assert same_output(found, expected, tolerance) is same


DOUBLE = "Sure:\n```python\nn = int(input())\nprint(n * 2 if n < 3 else 0)\n```"
CASES = [{"input": str(n), "output": str(2 * n)} for n in (1, 2, 3, 4)]


def test_all_tests_or_a_part_of_them() -> None:
    samples = [
        RewardSample("", DOUBLE, CASES),
        RewardSample("", "print(int(input()) * 2)", CASES),
        RewardSample("", "I do not know.", CASES),
        RewardSample(
            "", "def f(x): return 2 * x", ["assert f(1) == 2", "assert f(2) == 5"]
        ),
    ]
    assert build_reward("code").score(samples).total == [0.0, 1.0, 0.0, 0.0]
    partial = build_reward({"name": "code", "partial_credit": True}).score(samples)
    assert partial.total == [0.5, 1.0, 0.0, 0.5]
    assert partial.correct == [False, True, False, False]
    assert build_reward({"name": "code", "max_tests": 2}).score(samples[:1]).total == [
        1.0
    ]


def test_options_reach_the_program() -> None:
    row = {"checks": "assert f(16.0) == 4.0"}
    sample = RewardSample("", "def f(x): return sqrt(x)", None, row)
    assert build_reward({"name": "code", "tests_key": "checks"}).score(
        [sample]
    ).total == [0.0]
    own = {"name": "code", "tests_key": "checks", "setup": "from math import sqrt"}
    assert build_reward(own).score([sample]).total == [1.0]
    slow = RewardSample("", "while True: pass", CASES)
    assert build_reward({"name": "code", "seconds": 0.2}).score([slow]).total == [0.0]


@pytest.mark.parametrize(
    ("sample", "options", "said"),
    [
        (RewardSample("", "", None), {}, "tests are text, mappings or lists"),
        (RewardSample("", "", []), {}, "the row has no tests"),
        (
            RewardSample("", "", None, {"a": 1}),
            {"tests_key": "checks"},
            "no column 'checks'; it has a",
        ),
    ],
)
def test_a_row_without_tests_is_said(
    sample: RewardSample, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        build_reward({"name": "code", **options}).score([sample])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0}, "seconds is 0; it must be a number above 0"),
        ({"memory_mb": "1"}, "memory_mb is '1'"),
        ({"workers": True}, "workers is True"),
        ({"threads": -1}, "threads is -1"),
        ({"tolerance": -1}, "tolerance is -1"),
        ({"language": "go"}, "language"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        build_reward({"name": "code", **options})


def code_scores(
    response: str, reference: Any, extra: dict[str, Any] | None = None, **options: Any
) -> float:
    reward = build_reward({"name": "code", **options})
    return reward.score([RewardSample("?", response, reference, extra or {})]).total[0]


ANY_ORDER = "def check(input, output, expected):\n    return sorted(output.split()) == sorted(expected.split())\n"


@pytest.mark.parametrize(
    ("checker", "program", "expected"),
    [
        (ANY_ORDER, "print(2, 1)", 1.0),
        (ANY_ORDER, "print(2, 2)", 0.0),
        # A program that fails is not checked, whatever it printed before.
        (ANY_ORDER, "print(2, 1); raise SystemExit(1)", 0.0),
        (None, "print(2, 1)", 0.0),
        (None, "print(1, 2)", 1.0),
        # A response's output is never run, and a checker that raises has not accepted.
        (
            "def check(input, output, expected):\n    return int(output) > 0\n",
            "print('1; print(1)')",
            0.0,
        ),
        (
            "import sys\nprint(float(open(sys.argv[3]).read() == '2 1\\n'))",
            "print(2, 1)",
            1.0,
        ),
        ("print('accepted')", "print(1, 2)", 0.0),
        ("print(1)\nraise ValueError('after the verdict')", "print(1, 2)", 0.0),
        ("open('/etc/hostname').read()\nprint(1)", "print(1, 2)", 0.0),
    ],
)
def test_checkers_decide_over_outputs(
    checker: str | None, program: str, expected: float
) -> None:
    row = {"checker": checker}
    assert (
        code_scores(program, {"input": "", "output": "1 2"}, row, checker_key="checker")
        == expected
    )


def test_limits_of_a_row() -> None:
    slow = "import time\ntime.sleep(1.5)\nprint(1)"
    large = "x = bytearray(200 * 2**20)\nprint(1)"
    tests = {"input": "", "output": "1"}
    keys = {"seconds_key": "time_limit", "memory_key": "memory_limit"}
    assert code_scores(slow, tests, {"time_limit": 0.5}, **keys) == 0.0
    assert code_scores(slow, tests, {"time_limit": 0.5}, **keys, time_factor=20) == 1.0
    assert code_scores(slow, tests, {"time_limit": None}, **keys) == 1.0
    assert code_scores(large, tests, {"memory_limit": 128}, **keys) == 0.0
    assert code_scores(large, tests, {"memory_limit": 1024}, **keys) == 1.0
    with pytest.raises(
        RewardError, match="the row's 'time_limit' is '2 s'; expected a number above 0"
    ):
        code_scores(slow, tests, {"time_limit": "2 s"}, **keys)
