"""Evaluation suites: published rows become prompts and answers, and scores equal those of inspect-ai."""

from __future__ import annotations

import base64
import json
import os
import pickle
import string
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.config.evaluation import SUITE_NAMES, EvaluationConfig, parse_suite_source
from megaverl.config.files_and_packages import source_problem
from megaverl.config.run import SourceConfig
from megaverl.data.sources import kind_of, open_source
from megaverl.data.suites import IDENTITY, SUITES, convert_gpqa, last_boxed
from megaverl.errors import DataError
from megaverl.monitoring.evaluations import PromptResult, SuiteResult
from megaverl.rewards import RewardSample, build_reward
from tests.data import published

HERE = Path(__file__).parent


def rows_of(suite: str, path: Path, **options: Any) -> list[dict[str, Any]]:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    source = open_source(f"suite:{suite}?path={path}{more}")
    return [source[index] for index in range(len(source))]


def score(suite: str, row: dict[str, Any], response: str) -> float:
    entry = SUITES[suite]
    reward = build_reward([{"name": entry.reward, "options": dict(entry.options)}])
    extra = {
        name: value for name, value in row.items() if name not in ("prompt", "answer")
    }
    return reward.score(
        [RewardSample(row["prompt"], response, row["answer"], extra)]
    ).total[0]


def test_aime_reads_answers_with_leading_zeros(tmp_path: Path) -> None:
    first, second = rows_of(
        "aime", published.write_jsonl(tmp_path / "aime.jsonl", published.AIME)
    )
    assert (first["answer"], second["answer"]) == ("33", "204")
    assert (
        first["prompt"].startswith("What is 20 + 13?\n")
        and "\\boxed{}" in first["prompt"]
    )
    assert (
        score("aime", first, "So it is $\\boxed{033}$.")
        == score("aime", first, "It is $\\boxed{33}$")
        == 1.0
    )
    assert score("aime", first, "It is $\\boxed{204}$") == 0.0
    published.write_jsonl(
        tmp_path / "wrong.jsonl", [{"problem": "p", "answer": "x + 1"}]
    )
    with pytest.raises(DataError, match="wrong.jsonl, line 1: the answer is 'x \\+ 1'"):
        rows_of("aime", tmp_path / "wrong.jsonl")


def test_gpqa_permutes_the_options_by_seed_and_question(tmp_path: Path) -> None:
    path = published.write_csv(tmp_path / "gpqa_diamond.csv", published.GPQA)
    orders = set()
    for seed in range(20):
        for row, source in zip(
            rows_of("gpqa", path, seed=seed), published.GPQA, strict=True
        ):
            right = row["choices"][string.ascii_uppercase.index(row["answer"])]
            assert right == source["Correct Answer"]
            assert sorted(row["choices"]) == sorted(
                v for k, v in source.items() if "Answer" in k
            )
            assert f"{row['answer']}) {right}" in row["prompt"]
            orders.add((source["Record ID"], tuple(row["choices"])))
        assert rows_of("gpqa", path, seed=seed) == rows_of("gpqa", path, seed=seed)
    assert len(orders) > 20, "two questions with 24 orders each"
    row = rows_of("gpqa", path)[0]
    assert (
        score("gpqa", row, f"ANSWER: {row['answer']}")
        == score("gpqa", row, "The answer is the neutron.")
        == 1.0
    )


@pytest.mark.parametrize("answer", [1, "B", "(B)", "4"])
def test_choices_with_an_index_a_letter_or_a_text(answer: Any) -> None:
    row = convert_gpqa({**published.MMLU[0], "answer": answer}, "row 1", 0)
    assert row["choices"][string.ascii_uppercase.index(row["answer"])] == "4"


def test_gsm8k_and_math(tmp_path: Path) -> None:
    [row] = rows_of(
        "gsm8k", published.write_jsonl(tmp_path / "gsm8k.jsonl", published.GSM8K)
    )
    assert (
        score("gsm8k", row, "#### 72"),
        score("gsm8k", row, "It is 72."),
        score("gsm8k", row, "27"),
    ) == (1, 1, 0)
    first, second = rows_of(
        "math", published.write_jsonl(tmp_path / "math.jsonl", published.MATH)
    )
    assert (first["answer"], second["answer"]) == ("0.5", "\\frac{1}{2}")
    assert score("math", second, "$\\boxed{0.5}$") == 1.0


@given(
    st.recursive(
        st.text("ab\\x", max_size=3),
        lambda inner: st.builds(lambda a, b: f"{a}{{{b}}}", inner, inner),
    )
)
def test_the_last_box_with_nested_braces(content: str) -> None:
    assert (
        last_boxed(f"first \\boxed{{1}} then \\boxed{{{content}}} end")
        == content.strip()
    )
    assert last_boxed("\\boxed{never ended") is last_boxed("no box") is None


def test_livecodebench_reads_private_tests_and_functions(tmp_path: Path) -> None:
    first, second = rows_of(
        "code", published.write_jsonl(tmp_path / "test5.jsonl", published.LIVECODEBENCH)
    )
    assert first["answer"] == [
        {"input": "1 2\n", "output": "3\n"},
        {"input": "10 -4\n", "output": "6\n"},
    ]
    assert second["answer"] == [
        {"call": "pick", "args": [[1, 2, 3], "max"], "expected": 3}
    ]
    assert "class Solution" in second["prompt"]
    right = "```python\nprint(sum(map(int, input().split())))\n```"
    # Right for the public test alone.
    wrong = "```python\nprint(sum(map(abs, map(int, input().split()))))\n```"
    assert (score("code", first, right), score("code", first, wrong)) == (1.0, 0.0)
    method = "class Solution:\n    def pick(self, numbers, which):\n        return {}(numbers)\n"
    assert score("code", second, method.format("max")) == 1.0
    assert score("code", second, method.format("min")) == 0.0


def test_private_tests_that_hold_an_object_are_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode()
    row = {**published.LIVECODEBENCH[0], "private_test_cases": packed}
    with pytest.raises(
        DataError,
        match="line 1: its test cases cannot be read .*STACK_GLOBAL; expected one text",
    ):
        rows_of("code", published.write_jsonl(tmp_path / "bad.jsonl", [row]))
    assert not (tmp_path / "made").exists()


def test_codeforces_has_limits_and_a_checker(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "codeforces.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(published.CODEFORCES), path)
    [row] = rows_of("code", path)
    assert (row["time_limit"], row["memory_limit"]) == (1.0, 256.0)
    assert "Example input\n5" in row["prompt"]
    # Another pair than the published one, then a wrong sum, output that no number is
    # in, and one that takes too long.
    assert score("code", row, "```python\nprint(0, int(input()))\n```") == 1.0
    assert score("code", row, "```python\nprint(1, int(input()))\n```") == 0.0
    assert score("code", row, "```python\nprint('a', 'b')\n```") == 0.0
    assert (
        score(
            "code",
            row,
            "```python\nimport time\ntime.sleep(2)\nprint(0, int(input()))\n```",
        )
        == 0.0
    )
    assert (
        score(
            "code",
            row,
            "```python\nx = bytearray(300 * 2**20)\nprint(0, int(input()))\n```",
        )
        == 0.0
    )
    with pytest.raises(DataError, match="it is interactive"):
        interactive = [{**published.CODEFORCES[0], "interaction_format": "Ask."}]
        rows_of(
            "code", published.write_jsonl(tmp_path / "interactive.jsonl", interactive)
        )


@pytest.mark.parametrize("suite", SUITE_NAMES)
def test_a_row_with_other_columns_names_the_expected_ones(
    suite: str, tmp_path: Path
) -> None:
    path = published.write_jsonl(tmp_path / "other.jsonl", [{"text": "a"}])
    with pytest.raises(
        DataError, match="other.jsonl, line 1: expected a column '.*; found text"
    ):
        rows_of(suite, path)


def test_sources_are_checked_before_a_run(tmp_path: Path) -> None:
    path = published.write_csv(tmp_path / "a&b.csv", published.GPQA)
    config = EvaluationConfig(suites=["gpqa"], data={"gpqa": str(path)}, limit=1)
    source = config.source("gpqa", 3)
    assert kind_of(source) == "suite" and source_problem(source) == ""
    assert len(open_source(SourceConfig(path=source))) == 1
    assert parse_suite_source(source) == ("gpqa", str(path), {"limit": 1}, 3)
    assert parse_suite_source("suite:aime").path == "HuggingFaceH4/aime_2024"
    assert "there is no suite 'gsm'" in source_problem("suite:gsm")
    assert "there is no option 'sed'" in source_problem("suite:gpqa?path=a.csv&sed=1")
    assert "does not exist" in source_problem("suite:gpqa?path=absent.csv")


def test_settings_that_contradict_each_other() -> None:
    config = EvaluationConfig(
        suites=["gsm8k", "aime"], pass_at=[8], data={"aime": "a/b?part=1"}
    )
    issues = {issue.key: str(issue) for issue in config.issues("evaluation")}
    assert "gsm8k draws 1" in issues["evaluation.pass_at"]
    assert "found the option 'part'" in issues["evaluation.data.aime"]


@pytest.fixture(scope="module")
def by_inspect() -> dict[str, Any]:
    """Scores of inspect-ai, which `score_by_inspect.py` has written."""
    content: dict[str, Any] = json.loads((HERE / "inspect_scores.json").read_text())
    return content


@pytest.mark.parametrize("suite", ["gsm8k", "gpqa", "math"])
def test_the_scores_of_inspect_ai(suite: str, by_inspect: dict[str, Any]) -> None:
    """... of each response, their means over prompts, pass@k, and standard errors."""
    prompts = []
    for row in json.loads((HERE / "suite_responses.json").read_text())[suite]:
        entry, extra = SUITES[suite], {"choices": row.get("choices")}
        reward = build_reward([{"name": entry.reward, "options": dict(entry.options)}])
        samples = [
            RewardSample(row["question"], text, row["answer"], extra)
            for text in row["responses"]
        ]
        assert entry.answer is not None
        answers = [entry.answer(text, extra) for text in row["responses"]]
        correct: list[bool | None] = list(reward.score(samples).correct)
        prompts.append(
            PromptResult(
                row["question"],
                "",
                None,
                correct,
                answers,
                row["responses"],
                [1] * 4,
                ["stop"],
            )
        )
    assert [prompt.correct for prompt in prompts] == by_inspect[suite]["correct"]
    result = SuiteResult(suite, prompts, [2])
    names = {"avg@4": "mean", "pass@2": "pass_at_2", "pass@4": "pass_at_4"}
    for metric, reducer in names.items():
        estimate, metrics = result.estimate(metric), by_inspect[suite]["metrics"]
        assert estimate.value == pytest.approx(
            metrics[f"{reducer}/accuracy"], abs=1e-12
        )
        assert estimate.error == pytest.approx(metrics[f"{reducer}/stderr"], abs=1e-12)


def test_rows_of_the_same_data_have_the_same_identity(tmp_path: Path) -> None:
    path = published.write_jsonl(tmp_path / "math.jsonl", published.MATH)
    first, again = rows_of("math", path), rows_of("math", path)
    assert [row[IDENTITY] for row in first] == [row[IDENTITY] for row in again]
    assert len({row[IDENTITY] for row in first}) == 2
