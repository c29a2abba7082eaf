"""The reward `code`: a response's program, run against the row's tests where it can do no harm."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megaverl.rewards.registry import register_reward
from megaverl.rewards.sample import RewardSample
from megaverl.rewards.sandbox.pool import ConfinedProgram, ProgramOutcome, Sandbox, SandboxLimits, why_not_here

BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
LANGUAGES = ("", "python", "python3", "py")


def extract_code(response: str) -> str:
    """The last fenced block of Python, or that names no language; all of it where there is no block at all."""
    blocks = [text for language, text in BLOCK.findall(response) if language.lower() in LANGUAGES]
    return blocks[-1] if blocks else "" if BLOCK.search(response) else response


def row_tests(reference: Any) -> list[dict[str, Any]]:
    """A row's tests: each has `input` and `output`, or `call` and `expected`, or `code`.

    Args:
        reference: tests, one or a list: mappings as above, or Python's text (`assert f(1) == 2`). Also the forms of
            APPS, TACO and LiveCodeBench (`inputs`, `outputs`, `fn_name`), of HumanEval (`test`, `entry_point`) and of
            MBPP (`test_list`, `test_setup_code`); also as JSON text.

    Raises:
        ValueError: it is none of them.
    """
    found = _parsed(reference)
    if isinstance(found, str):
        return [{"code": found}]
    if isinstance(found, list):
        return [test for entry in found for test in row_tests(entry)]
    if not isinstance(found, Mapping):
        raise ValueError(f"tests are text, mappings or lists of them; found {type(reference).__name__}")
    if "inputs" in found and "outputs" in found:
        return _pairs(found)
    if "test_list" in found:
        setup = str(found.get("test_setup_code") or "")
        return [{"code": f"{setup}\n{test}"} for test in found["test_list"]]
    if "test" in found and "entry_point" in found:
        return [{"code": f"{found['test']}\ncheck({found['entry_point']})"}]
    for first, second in (("input", "output"), ("call", "expected")):
        if first in found and second in found:
            return [dict(found)]
    if isinstance(found.get("code"), str):
        return [{"code": found["code"]}]
    raise ValueError(
        f"a test has input and output, call and expected, or code; found one with {', '.join(map(str, found))}"
    )


def _parsed(reference: Any) -> Any:
    """JSON text of a list or a mapping as what it says; numbers and other text stay."""
    if isinstance(reference, str) and reference.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(reference)
        except ValueError:
            return reference
    return reference


def _pairs(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = list(zip(found["inputs"], found["outputs"], strict=True))
    if name := found.get("fn_name"):
        # APPS puts the value of a function into a list of one
        return [{"call": name, "args": i, "expected": o[0] if _is_single(o) else o} for i, o in pairs]
    texts = [["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in pair] for pair in pairs]
    return [{"input": given, "output": wanted} for given, wanted in texts]


def _is_single(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def same_output(found: str, expected: str, tolerance: float = 0.0) -> bool:
    """Whether two outputs are the same, apart from space at the ends of lines and of the whole.

    Args:
        tolerance: by how much numbers may differ, relative or absolute, where the text is otherwise the same.
    """
    lines = [[line.rstrip() for line in text.strip().split("\n")] for text in (found, expected)]
    if lines[0] == lines[1] or not tolerance:
        return lines[0] == lines[1]
    words = [[word for line in each for word in (*line.split(), "\n")] for each in lines]
    return len(words[0]) == len(words[1]) and all(_close(a, b, tolerance) for a, b in zip(*words, strict=True))


def _close(found: str, expected: str, tolerance: float) -> bool:
    try:
        return found == expected or math.isclose(float(found), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _check_code(
    tests_key: str | None = None,
    partial_credit: bool = False,
    setup: str = "",
    tolerance: float = 0.0,
    max_tests: int | None = None,
    workers: int = 2,
    preload: Sequence[str] = (),
    **limits: Any,
) -> None:
    for name, value in {"workers": workers, "max_tests": max_tests or 1, **limits}.items():
        least = 0 if name == "threads" else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a number above 0")
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; it must be at least 0")
    if reason := why_not_here():
        raise ValueError(reason)


@register_reward("code", batched=True, check=_check_code)
def code(
    samples: list[RewardSample],
    *,
    tests_key: str | None = None,
    partial_credit: bool = False,
    setup: str = "",
    tolerance: float = 0.0,
    max_tests: int | None = None,
    workers: int = 2,
    seconds: float = 5.0,
    memory_mb: int = 512,
    output_kb: int = 256,
    threads: int = 16,
    preload: Sequence[str] = (),
) -> list[float]:
    """1 if the response's Python program passes all tests of the row, else 0.

    The program is the last fenced block of the response. It runs confined, anew for every test (see `Sandbox`); what
    takes too long, needs too much memory or writes too much fails the test.

    Args:
        tests_key: the row's column that has the tests; None: the reference answer. partial_credit: the fraction of
            tests that pass instead. setup: code that goes before every program, such as imports. tolerance: of numbers
            in outputs and values. max_tests: only a row's first ones. workers: programs at once, on each rank.
        seconds, memory_mb, output_kb, threads, preload: see `SandboxLimits`.
    """
    box = Sandbox.shared(SandboxLimits(seconds, memory_mb, output_kb, threads, tuple(preload)), workers)
    plan = [_tests(sample, tests_key)[:max_tests] for sample in samples]
    tasks = []
    for sample, tests in zip(samples, plan, strict=True):
        program = f"{setup}\n{extract_code(sample.response)}"
        for test in tests:
            given = str(test.get("input", ""))
            own = None if "output" in test else {"tolerance": tolerance, **test}
            tasks.append(ConfinedProgram(program, given, own))
    outcomes = iter(box.run_all(tasks))
    scores = []
    for tests in plan:
        passed = [_passes(next(outcomes), test, tolerance) for test in tests]
        scores.append(sum(passed) / len(passed) if partial_credit else float(all(passed)))
    return scores


def _passes(outcome: ProgramOutcome, test: Mapping[str, Any], tolerance: float) -> bool:
    if "output" in test:
        return outcome.code == 0 and same_output(outcome.output, str(test["output"]), tolerance)
    return outcome.passed


def _tests(sample: RewardSample, key: str | None) -> list[dict[str, Any]]:
    if key is not None and key not in sample.extra:
        raise ValueError(f"the row has no column {key!r}; it has {', '.join(sample.extra) or 'no others'}")
    found = row_tests(sample.reference if key is None else sample.extra[key])
    if not found:
        raise ValueError("the row has no tests")
    return found
