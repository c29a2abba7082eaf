"""Results of suites in a run's folder: written, read back, and shown as one table with a comparison."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megaverl.errors import DataError
from megaverl.monitoring import report
from megaverl.monitoring.evaluations import (
    HarnessResult,
    HarnessScore,
    PromptResult,
    SuiteResult,
    read_suites,
    table_rows,
    table_text,
    write_suite,
)


def prompt(
    number: int, correct: list[bool | None], answers: list[str | None] | None = None
) -> PromptResult:
    size = len(correct)
    given = ["1"] * size if answers is None else answers
    responses = [f"line\u2028{number}\n"] * size
    return PromptResult(
        f"id{number}",
        "prompt",
        "1",
        correct,
        given,
        responses,
        [4] * size,
        ["stop"] * size,
    )


BEFORE = SuiteResult("gsm8k", [prompt(n, [n % 3 == 0, False]) for n in range(12)], [1])
AFTER = SuiteResult(
    "gsm8k", [prompt(n, [n % 2 == 0, n % 3 == 0]) for n in range(2, 14)], [1]
)


def test_results_are_read_back(tmp_path: Path) -> None:
    write_suite(tmp_path, BEFORE)
    write_suite(tmp_path, replace(AFTER, suite="math"))
    assert read_suites(tmp_path) == {
        "gsm8k": BEFORE,
        "math": replace(AFTER, suite="math"),
    }
    # An evaluation of a trained run is in its subfolder.
    write_suite(tmp_path / "trained" / "eval", AFTER)
    assert read_suites(tmp_path / "trained") == {"gsm8k": AFTER}
    assert read_suites(tmp_path / "absent") == {}
    (tmp_path / "suites" / "math.jsonl").write_text('{"suite": "math"}\n')
    with pytest.raises(DataError, match="math.jsonl: not the results of a suite"):
        read_suites(tmp_path)


def test_a_table_with_a_paired_comparison() -> None:
    rows = list(table_rows([AFTER], {"gsm8k": BEFORE}))
    assert [row.metric for row in rows] == ["avg@2", "maj@2", "pass@1", "pass@2"]
    first = rows[0]
    assert first.estimate.num_prompts == 12 and first.difference is not None
    assert first.difference.num_prompts == 10, "the prompts that both have"
    assert first.before == pytest.approx(3 / 20)
    assert first.difference.value == pytest.approx((5 + 3) / 20 - 3 / 20)
    text = table_text(rows).splitlines()
    heads = " ".join(text[0].split())
    assert (
        heads
        == "suite metric value 95% interval prompts before difference 95% interval p"
    )
    assert text[1].split()[:3] == ["gsm8k", "avg@2", f"{first.estimate.value:.4f}"]
    assert len(text) == 5 and f"{first.difference.value:+.4f}" in text[1]


def test_a_table_of_one_evaluation() -> None:
    other = SuiteResult("code", [prompt(n, [True], []) for n in range(3)])
    text = table_text(list(table_rows([BEFORE, other], confidence=0.9)), 0.9)
    assert "difference" not in text and "90% interval" in text
    assert [line.split()[:2] for line in text.splitlines()[-1:]] == [
        ["code", "avg@1"]
    ], "no answers, so no maj@k"


def test_prompts_that_could_not_be_scored_are_left_out() -> None:
    result = SuiteResult("math", [prompt(0, [True, None]), prompt(1, [True, False])])
    assert (
        result.num_unscored,
        result.estimate("avg@2").value,
        result.estimate("avg@2").num_prompts,
    ) == (1, 0.5, 1)
    nothing = SuiteResult("math", [prompt(0, [None])])
    assert nothing.estimate("avg@1").num_prompts == 0 and "nan" in table_text(
        list(table_rows([nothing]))
    )


def test_a_report_shows_and_compares_them(tmp_path: Path) -> None:
    for name, result in (("before", BEFORE), ("after", AFTER)):
        write_suite(tmp_path / name, result)
    page = report.write_report(
        [tmp_path / "before", tmp_path / "after"], tmp_path / "report.html"
    ).read_text()
    rows = [*table_rows([BEFORE]), *table_rows([AFTER], {"gsm8k": BEFORE})]
    for row in rows:
        assert f"<td>{row.metric}</td><td>{row.estimate.value:.4f}</td>" in page
    assert f"<td>{rows[-1].difference.value:+.4f}</td>" in page
    assert "paired over prompts" in page
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no run's folder"):
        report.write_report([tmp_path / "empty"], tmp_path / "report.html")


def harness_result(values: list[float], perplexity: float) -> HarnessResult:
    scores = [
        HarnessScore("acc", sum(values) / len(values), 0.1),
        HarnessScore("perplexity", perplexity, 2.0),
        HarnessScore("f1", math.nan),
    ]
    samples = [
        {"id": f"id{number}", "values": {"acc": value, "perplexity": 1.0}}
        for number, value in enumerate(values)
    ]
    return HarnessResult("lm-eval:qa", "lm-eval 0.4.13", "1.0", 8, scores, samples)


def test_results_of_another_harness(tmp_path: Path) -> None:
    """Means of samples are compared in pairs; a metric that is no mean has the harness's standard error."""
    before = harness_result([0.0, 1.0] * 4, 20.0)
    after = harness_result([0.0, 1.0, 1.0, 1.0] * 2, 16.0)
    for name, result in (("before", before), ("after", after)):
        write_suite(tmp_path / name, result)
    [read] = read_suites(tmp_path / "before").values()
    assert isinstance(read, HarnessResult) and read.scores[:2] == before.scores[:2]
    assert math.isnan(read.scores[2].value) and read.samples == before.samples
    acc, perplexity, f1 = table_rows([after], read_suites(tmp_path / "before"))
    assert acc.difference is not None and acc.difference.value == pytest.approx(0.25)
    assert perplexity.difference is None and f1.difference is None
    low, high = perplexity.estimate.low, perplexity.estimate.high
    assert (low, high) == pytest.approx((16 - 3.92, 16 + 3.92), abs=1e-2)
    text = table_text([acc, perplexity, f1])
    assert "f1          nan      unknown" in text, text
    page = report.write_report(
        [tmp_path / "before", tmp_path / "after"], tmp_path / "report.html"
    ).read_text()
    assert "<td>lm-eval:qa</td><td>perplexity</td><td>16.0000</td>" in page
