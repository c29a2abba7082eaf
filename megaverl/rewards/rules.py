"""Built-in rules: length, exact match, format, numbers, formulas, and `code`, which
runs a program against the row's tests.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from megaverl.outside import read_json
from megaverl.rewards.checkers import checking_program, is_accepted
from megaverl.rewards.choices import LETTER_ALONE, extract_choice
from megaverl.rewards.math_worker import MathWorker
from megaverl.rewards.registry import RewardSample, register_reward
from megaverl.rewards.sandbox import (
    ConfinedProgram,
    ProgramOutcome,
    Sandbox,
    SandboxLimits,
    why_not_here,
)


def _num_tokens(sample: RewardSample) -> int:
    if sample.num_tokens is None:
        raise ValueError(
            "the number of tokens of the response is not known here (RewardSample.num_tokens is None)"
        )
    return sample.num_tokens


def _check_overlong(max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> None:
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens}; it must be at least 1 and at most max_tokens ({max_tokens})"
        )
    if penalty < 0:
        raise ValueError(f"penalty is {penalty}; give its size, at least 0")


@register_reward("soft_overlong", check=_check_overlong, highest=0.0)
def soft_overlong(
    sample: RewardSample, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> float:
    """Return 0 up to `max_tokens - buffer_tokens` tokens, falling linearly to `-penalty` at `max_tokens`.

    DAPO (Yu et al. 2025, arXiv:2503.14476), equation 13: soft overlong punishment.
    """
    over = _num_tokens(sample) - (max_tokens - buffer_tokens)
    return -penalty * min(max(over / buffer_tokens, 0.0), 1.0)


def _check_linear(max_tokens: int, free_tokens: int = 0) -> None:
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(
            f"free_tokens is {free_tokens}; it must be at least 0 and less than max_tokens ({max_tokens})"
        )


@register_reward("length_linear", check=_check_linear, highest=0.0)
def length_linear(
    sample: RewardSample, *, max_tokens: int, free_tokens: int = 0
) -> float:
    """Return 0 up to `free_tokens`, falling linearly to -1 at `max_tokens` and beyond."""
    return -max(_num_tokens(sample) - free_tokens, 0) / (max_tokens - free_tokens)


@register_reward("finished")
def finished(sample: RewardSample) -> float:
    """Return 1 if the model ended its response itself, 0 if it was cut off."""
    if sample.finish_reason is None:
        raise ValueError(
            "why the response ended is not known here (RewardSample.finish_reason is None)"
        )
    return float(sample.finish_reason == "stop")


FORMAT_MODES = ("search", "fullmatch")


def references(sample: RewardSample) -> list[str]:
    """List the reference answers as texts: one, or those of a list. Nulls in the list are skipped.

    Raises:
        ValueError: the sample has none.
    """
    listed = (
        sample.reference if isinstance(sample.reference, list) else [sample.reference]
    )
    known = [reference for reference in listed if reference is not None]
    if not known:
        raise ValueError(
            "the row has no reference answer; name its column with data.answer_key"
        )
    return [str(reference) for reference in known]


@register_reward("exact_match")
def exact_match(
    sample: RewardSample, *, strip: bool = True, ignore_case: bool = False
) -> float:
    """Return 1 if the response equals the reference (or one of a list of them), else 0."""
    return float(
        any(
            _plain(sample.response, strip, ignore_case)
            == _plain(text, strip, ignore_case)
            for text in references(sample)
        )
    )


def _plain(text: str, strip: bool, ignore_case: bool) -> str:
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


@register_reward("positions")
def positions(sample: RewardSample, *, strip: bool = True) -> float:
    """Return the fraction of characters that are right at their position, 0 to 1: credit for a nearly right answer.

    It is relative to the longer of response and reference, so that a response of the
    wrong length loses.
    """

    def matching(reference: str) -> float:
        response = _plain(sample.response, strip, ignore_case=False)
        longest = max(len(response), len(reference))
        # `zip` stops at the shorter text; the rest of the longer one is wrong.
        same = sum(a == b for a, b in zip(response, reference, strict=False))
        # Two empty texts are equal.
        return same / longest if longest else 1.0

    return max(
        matching(_plain(text, strip, ignore_case=False)) for text in references(sample)
    )


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def _check_format(pattern: Any, mode: str = "search") -> None:
    if mode not in FORMAT_MODES:
        raise ValueError(f"mode is {mode!r}; it must be {' or '.join(FORMAT_MODES)}")
    try:
        _compiled(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"pattern {pattern!r} is not a regular expression ({error})"
        ) from error


@register_reward("format", check=_check_format)
def response_format(
    sample: RewardSample, *, pattern: str, mode: str = "search"
) -> float:
    r"""Return 1 if the regular expression `pattern` is found in the response (`fullmatch`: covers all of it), else 0.

    `.` matches line ends too. Example: `<think>.*</think>\\s*<answer>.*</answer>` with
    `mode: fullmatch`.
    """
    # `mode` was checked to be one of `FORMAT_MODES`, which are names of methods.
    return float(getattr(_compiled(pattern), mode)(sample.response) is not None)


NUMBER = r"[-+]?\$?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\$?\.\d+"
AFTER_HASHES = re.compile(rf"####\s*\$?\s*({NUMBER})")
ANY_NUMBER = re.compile(NUMBER)
METHODS = ("strict", "flexible")


def final_number(text: str, method: str = "strict") -> Decimal | None:
    """Return the number after the last `####`; with `flexible`, or else the last number
    of the text; None if there is none.

    Dollar signs and commas between thousands are allowed: `#### $1,234.50`.
    """
    numbers = AFTER_HASHES.findall(text)
    if not numbers and method == "flexible":
        numbers = ANY_NUMBER.findall(text)
    return _number(numbers[-1]) if numbers else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(re.sub(r"[$,\s]", "", text))
    except InvalidOperation:
        return None
    # `Decimal` accepts NaN and Infinity.
    return number if number.is_finite() else None


def _check_gsm8k(method: str = "strict", format_score: float = 0.0) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be {' or '.join(METHODS)}")


@register_reward("gsm8k", check=_check_gsm8k)
def gsm8k(
    sample: RewardSample, *, method: str = "strict", format_score: float = 0.0
) -> float:
    """Return 1 for the reference's final number, `format_score` for another one, 0 for none.

    GSM8K (Cobbe et al. 2021, arXiv:2110.14168) ends every answer with `#### N`. The
    reference may be such an answer, the number alone, or a text without `####`, whose
    last number counts: "The answer is 42." Numbers are compared by value: 72 is 72.0.
    """
    [reference, *_] = references(sample)
    expected = final_number(reference)
    # A broken `####` line is an error, and never replaced by some other number.
    if expected is None and "####" not in reference:
        whole = _number(reference)
        expected = final_number(reference, "flexible") if whole is None else whole
    if expected is None:
        raise ValueError(
            f"the reference {reference[-60:]!r} has no number after '####', or none at all"
        )
    answer = final_number(sample.response, method)
    if answer is None:
        return 0.0
    return 1.0 if answer == expected else format_score


# Letters A to J are read as choices where a reference is one of them.
MOST_CHOICES = 10


def _check_math_verify(timeout_seconds: float = 5.0) -> None:
    if timeout_seconds <= 0:
        raise ValueError(
            f"timeout_seconds is {timeout_seconds}; it must be more than 0"
        )
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            "the library is missing. Run: pip install math-verify[antlr4-13-2]"
        )


@register_reward("math_verify", batched=True, check=_check_math_verify)
def math_verify(
    samples: list[RewardSample], *, timeout_seconds: float = 5.0
) -> list[float]:
    """Return 1 if the response's last formula or number equals the reference mathematically (1/2 is 0.5), else 0.

    The library math-verify decides in a separate process, since model output can make
    sympy compute forever. A comparison that takes longer than `timeout_seconds` scores
    0. A reference that is one capital letter, such as `C` or `(C)`, is a choice instead
    of a formula; see `extract_choice`.
    """
    worker = MathWorker.shared()

    def is_right(reference: str, response: str) -> bool:
        choice = LETTER_ALONE.fullmatch(reference)
        # A letter may also be a variable, so math-verify decides where the response
        # chooses nothing.
        if (
            choice is not None
            and (chosen := extract_choice(response, MOST_CHOICES)) is not None
        ):
            return chosen == choice[1]
        return worker.equal(reference, response, timeout_seconds)

    return [
        float(any(is_right(text, sample.response) for text in references(sample)))
        for sample in samples
    ]


BLOCK = re.compile(
    r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)",
    re.DOTALL | re.MULTILINE,
)
LANGUAGES = ("", "python", "python3", "py")


def extract_code(response: str) -> str:
    """Return the last fenced block of Python or without a language; the whole response if it has no blocks."""
    blocks: list[str] = [
        text
        for language, text in BLOCK.findall(response)
        if language.lower() in LANGUAGES
    ]
    if blocks:
        return blocks[-1]
    # A response with blocks of other languages alone has no program; one without any
    # block is a program as a whole.
    return "" if BLOCK.search(response) else response


def row_tests(reference: Any) -> list[dict[str, Any]]:
    """Return a row's tests: each has `input` and `output`, or `call` and `expected`, or `code`.

    A null field is one that the test does not have, since Parquet gives every test the
    fields of all others. `expected: null` means that the function returns None, and so
    does a `call` without it.

    Args:
        reference: one test or a list: mappings as above, or Python text (`assert f(1) == 2`). Also the forms of APPS,
            TACO and LiveCodeBench (`inputs`, `outputs`, `fn_name`), of HumanEval (`test`, `entry_point`) and of MBPP
            (`test_list`, `test_setup_code`); also as JSON text.

    Raises:
        ValueError: it has none of these forms.
    """
    parsed = _parsed(reference)
    if isinstance(parsed, str):
        return [{"code": parsed}]
    if isinstance(parsed, list):
        return [
            test for entry in parsed if entry is not None for test in row_tests(entry)
        ]
    if not isinstance(parsed, Mapping):
        raise ValueError(
            f"tests are text, mappings or lists of them; found {type(reference).__name__}"
        )
    test = {key: value for key, value in parsed.items() if value is not None}
    if "inputs" in test and "outputs" in test:
        return _pairs(test)
    if "test_list" in test:
        setup = str(test.get("test_setup_code", ""))
        return [
            {"code": f"{setup}\n{line}"}
            for line in test["test_list"]
            if line is not None
        ]
    if "test" in test and "entry_point" in test:
        return [{"code": f"{test['test']}\ncheck({test['entry_point']})"}]
    if _is_script_test(test, parsed):
        return [test]
    if "call" in test and ("expected" in parsed or test.keys() <= FIELDS_OF_CALL):
        if "kwargs" in test:
            test["kwargs"] = {
                key: value for key, value in test["kwargs"].items() if value is not None
            }
        return [{"expected": None, **test}]
    if isinstance(test.get("code"), str):
        return [{"code": test["code"]}]
    raise ValueError(
        f"a test has input and output, call and expected, or code; found one with {', '.join(map(str, test))}"
    )


# If `expected` or `input` is missing, an unknown field may be a misspelling of it, so
# only these are allowed.
FIELDS_OF_CALL = {"call", "args", "kwargs", "tolerance"}
FIELDS_OF_SCRIPT = {"output", "testtype", "type", "name", "id"}


def _is_script_test(test: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Return whether a test runs the program as a script. A test that reads nothing may have no input, or null.

    Args:
        written: the test with its null fields.
    """
    if "output" not in test:
        return False
    if "input" in test:
        return True
    return "call" not in test and (
        "input" in written or test.keys() <= FIELDS_OF_SCRIPT
    )


def _parsed(reference: Any) -> Any:
    """Parse JSON text of a list or mapping; return numbers and other text unchanged."""
    if isinstance(reference, str) and reference.lstrip()[:1] in ("[", "{"):
        try:
            return read_json(reference, not_finite=True)
        except ValueError:
            return reference
    return reference


def _pairs(cases: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))
    if name := cases.get("fn_name"):
        # APPS wraps the value of a function in a list.
        values = [o[0] if isinstance(o, list) and len(o) == 1 else o for _, o in pairs]
        return [
            {"call": name, "args": [] if i is None else i, "expected": value}
            for (i, _), value in zip(pairs, values, strict=True)
        ]
    return [
        {"input": _script_text(inputs), "output": _script_text(wanted)}
        for inputs, wanted in pairs
    ]


def _script_text(value: Any) -> str:
    """Return the input or output of a script as text; a list holds its lines, and null is empty."""
    if isinstance(value, list):
        return "\n".join("" if line is None else str(line) for line in value)
    return "" if value is None else str(value)


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Return whether two outputs are equal, apart from white space at the ends of lines and of the whole.

    Args:
        tolerance: permitted difference of numbers, relative or absolute, if the text is otherwise equal.
    """
    output_lines = [line.rstrip() for line in output.strip().split("\n")]
    expected_lines = [line.rstrip() for line in expected.strip().split("\n")]
    if output_lines == expected_lines or not tolerance:
        return output_lines == expected_lines
    output_words = _words(output_lines)
    expected_words = _words(expected_lines)
    if len(output_words) != len(expected_words):
        return False
    pairs = zip(output_words, expected_words, strict=True)
    return all(_close(word, expected_word, tolerance) for word, expected_word in pairs)


def _words(lines: Sequence[str]) -> list[str]:
    """Return the words of all lines. An end of line is a word, so that text cannot move to another line."""
    words = []
    for line in lines:
        words += [*line.split(), "\n"]
    return words


def _close(output: str, expected: str, tolerance: float) -> bool:
    try:
        return output == expected or math.isclose(
            float(output), float(expected), rel_tol=tolerance, abs_tol=tolerance
        )
    except ValueError:
        return False


def _check_code(
    tests_key: str | None = None,
    partial_credit: bool = False,
    setup: str = "",
    tolerance: float = 0.0,
    max_tests: int | None = None,
    checker_key: str | None = None,
    seconds_key: str | None = None,
    memory_key: str | None = None,
    workers: int = 2,
    preload: Sequence[str] = (),
    **limits: Any,
) -> None:
    for name, value in {
        "workers": workers,
        "max_tests": max_tests or 1,
        **limits,
    }.items():
        least = 0 if name == "threads" else 1e-9
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < least
        ):
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
    checker_key: str | None = None,
    seconds_key: str | None = None,
    memory_key: str | None = None,
    time_factor: float = 1.0,
    workers: int = 2,
    seconds: float = 5.0,
    memory_mb: int = 512,
    output_kb: int = 256,
    threads: int = 16,
    preload: Sequence[str] = (),
) -> list[float]:
    """Return 1 if the response's Python program passes all tests of the row, else 0.

    The program is the last fenced block of the response. It runs confined, anew for
    every test (see `Sandbox`). A program that takes too long, needs too much memory or
    writes too much fails the test.

    Args:
        tests_key: column of the row with the tests; None: the reference answer.
        partial_credit: return the fraction of passed tests instead.
        setup: code before every program, such as imports.
        tolerance: tolerance of numbers in outputs and values.
        max_tests: use only a row's first tests.
        checker_key: column with a checker of the outputs (see `checkers`). Rows without one compare outputs.
        seconds_key: column with the time limit of the row's programs in seconds. Rows without one have `seconds`.
        memory_key: column with the memory limit of the row's programs in MB. Rows without one have `memory_mb`.
        time_factor: factor on the limits of `seconds_key`, which are often meant for compiled languages.
        workers: parallel programs on each rank.
        seconds, memory_mb, output_kb, threads, preload: see `SandboxLimits`.
    """
    box = Sandbox.shared(
        SandboxLimits(seconds, memory_mb, output_kb, threads, tuple(preload)), workers
    )
    plan = [_tests(sample, tests_key)[:max_tests] for sample in samples]
    programs = []
    for sample, tests in zip(samples, plan, strict=True):
        source = f"{setup}\n{extract_code(sample.response)}"
        row_seconds = _limit(sample, seconds_key)
        row_memory = _limit(sample, memory_key)
        for test in tests:
            programs.append(
                ConfinedProgram(
                    source,
                    str(test.get("input", "")),
                    None if "output" in test else {"tolerance": tolerance, **test},
                    None if row_seconds is None else row_seconds * time_factor,
                    None if row_memory is None else math.ceil(row_memory),
                )
            )
    all_tests = [test for tests in plan for test in tests]
    checkers = [
        _checker(sample, checker_key)
        for sample, tests in zip(samples, plan, strict=True)
        for _ in tests
    ]
    passed = iter(_passed(box, all_tests, box.run_all(programs), checkers, tolerance))
    scores = []
    for tests in plan:
        results = [next(passed) for _ in tests]
        scores.append(
            sum(results) / len(results) if partial_credit else float(all(results))
        )
    return scores


def _passed(
    box: Sandbox,
    tests: Sequence[Mapping[str, Any]],
    outcomes: Sequence[ProgramOutcome],
    checkers: Sequence[str | None],
    tolerance: float,
) -> list[bool]:
    """Return whether each test is passed. Outputs of rows with a checker are decided by it."""
    passed = [
        _passes(outcome, test, tolerance)
        for outcome, test in zip(outcomes, tests, strict=True)
    ]
    checked: list[int] = []
    # All checkers run in one call, which runs them in parallel.
    programs: list[ConfinedProgram] = []
    for place, (test, outcome, checker) in enumerate(
        zip(tests, outcomes, checkers, strict=True)
    ):
        if checker is None or "output" not in test or outcome.code != 0:
            continue
        checked.append(place)
        programs.append(
            checking_program(
                checker, str(test.get("input", "")), outcome.output, str(test["output"])
            )
        )
    for place, outcome in zip(checked, box.run_all(programs), strict=True):
        passed[place] = is_accepted(outcome)
    return passed


def _checker(sample: RewardSample, key: str | None) -> str | None:
    """Return the text of the row's checker, or None if it has none."""
    text = None if key is None else sample.extra.get(key)
    return str(text) if text else None


def _limit(sample: RewardSample, key: str | None) -> float | None:
    """Return the row's own limit, or None if it has none.

    Raises:
        ValueError: it is no number above 0.
    """
    value = None if key is None else sample.extra.get(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
    ):
        raise ValueError(f"the row's {key!r} is {value!r}; expected a number above 0")
    return float(value)


def _passes(outcome: ProgramOutcome, test: Mapping[str, Any], tolerance: float) -> bool:
    if "output" in test:
        return outcome.code == 0 and same_output(
            outcome.output, str(test["output"]), tolerance
        )
    return outcome.passed


def _tests(sample: RewardSample, key: str | None) -> list[dict[str, Any]]:
    if key is not None and key not in sample.extra:
        raise ValueError(
            f"the row has no column {key!r}; it has {', '.join(sample.extra) or 'no others'}"
        )
    tests = row_tests(sample.reference if key is None else sample.extra[key])
    if not tests:
        raise ValueError("the row has no tests")
    return tests
