"""Published evaluation data sets as rows of prompt and answer: AIME, GPQA, GSM8K, MATH, and programming contests.

Each suite reads the columns under which its data set is published, and writes the
prompt that papers quote results with. `suite:NAME?path=FILE` is a source of prompts
like any other (see `data/sources.py`).
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import json
import pickletools
import random
import string
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config.evaluation import SUITE_NAMES
from megaverl.data.row_source import RowSource
from megaverl.errors import DataError
from megaverl.outside import read_json
from megaverl.rewards.choices import extract_choice
from megaverl.rewards.rules import final_number

Row = dict[str, Any]
# Row, place of the row for messages, and seed -> row of prompt, answer and further
# columns.
Convert = Callable[[Mapping[str, Any], str, int], Row]

# Columns of a converted row that rewards read.
CHOICES, CHECKER, SECONDS, MEMORY = "choices", "checker", "time_limit", "memory_limit"
# Column with a digest of the row, by which two evaluations of the same data are paired.
IDENTITY = "prompt_id"

# LiveCodeBench's private tests are pickled texts. Operations of a pickle that make a
# text, and those around it.
TEXT_OPERATIONS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
FRAME_OPERATIONS = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
LONGEST_TESTS = 1 << 30  # bytes of one problem's unpacked test cases

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
AFTER_HASHES = 'Think step by step, and write the final answer alone on the last line, after "####".'
LETTERED = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering."
)
FENCED = "Write a Python program. Enclose it in one block that starts with ```python and ends with ```."


@dataclass(frozen=True)
class Suite:
    """One evaluation data set.

    Attributes:
        convert: converts a published row.
        reward: name of the reward that decides whether a response is right.
        options: options of that reward.
        answer: returns a response's answer in a normal form, for maj@k, or None. It gets the response and the row's
            further columns. None: the answers of this suite cannot be counted.
    """

    name: str
    convert: Convert
    reward: str
    options: Mapping[str, Any]
    answer: Callable[[str, Mapping[str, Any]], str | None] | None


def _column(row: Mapping[str, Any], where: str, *names: str) -> Any:
    """Return the first of the columns `names` that the row has, ignoring case.

    Raises:
        DataError: the row has none of them, or null there.
    """
    by_name = {name.casefold(): value for name, value in row.items()}
    for name in names:
        if by_name.get(name.casefold()) is not None:
            return by_name[name.casefold()]
    raise DataError(
        f"{where}: expected a column {' or '.join(map(repr, names))}; found {', '.join(row) or 'none'}."
    )


def _optional(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first of the columns `names` that has a value, ignoring case, or None."""
    by_name = {name.casefold(): value for name, value in row.items()}
    return next(
        (
            by_name[name.casefold()]
            for name in names
            if by_name.get(name.casefold()) is not None
        ),
        None,
    )


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` of a text, with nested braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len("\\boxed{")
    # From the opening brace: the depth is 0 again at the matching one.
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def convert_aime(row: Mapping[str, Any], where: str, seed: int) -> Row:
    """Convert a row of AIME: a problem, and an answer from 0 to 999, perhaps with leading zeros."""
    answer = str(_column(row, where, "answer")).strip()
    if not answer.isdecimal():
        raise DataError(
            f"{where}: the answer is {answer!r}; an answer of AIME is a whole number from 0 to 999."
        )
    problem = str(_column(row, where, "problem", "question"))
    return {"prompt": f"{problem}\n\n{BOXED}", "answer": str(int(answer))}


def convert_math(row: Mapping[str, Any], where: str, seed: int) -> Row:
    r"""Convert a row of MATH: a problem, and an answer or a solution that ends in `\boxed{...}`."""
    answer = _optional(row, "answer")
    if answer is None:
        answer = last_boxed(str(_column(row, where, "answer", "solution")))
    if answer is None:
        raise DataError(
            f"{where}: the solution has no \\boxed{{...}}, and there is no column 'answer'."
        )
    problem = str(_column(row, where, "problem", "question"))
    return {"prompt": f"{problem}\n\n{BOXED}", "answer": str(answer)}


def convert_gsm8k(row: Mapping[str, Any], where: str, seed: int) -> Row:
    """Convert a row of GSM8K: a question, and a solution that ends in `#### N`."""
    question = str(_column(row, where, "question"))
    return {
        "prompt": f"{question}\n\n{AFTER_HASHES}",
        "answer": str(_column(row, where, "answer")),
    }


def convert_gpqa(row: Mapping[str, Any], where: str, seed: int) -> Row:
    """Convert a row of GPQA, or of a data set with the columns question, choices and answer, as MMLU has.

    The options are permuted by (seed, question), since GPQA always lists the right one
    first.
    """
    question = str(_column(row, where, "question")).strip()
    listed = _optional(row, "choices", "options")
    if listed is None:
        right = str(_column(row, where, "correct answer")).strip()
        wrong = [
            str(_column(row, where, f"incorrect answer {number}")).strip()
            for number in (1, 2, 3)
        ]
        options = [right, *wrong]
        right_place = 0
    else:
        options = [str(option).strip() for option in listed]
        right_place = _place_of_answer(
            _column(row, where, "answer", "answer_index"), options, where
        )
    order = list(range(len(options)))
    # Seeded by the question, so that the order does not depend on the other rows.
    random.Random(f"choices/{seed}/{question}").shuffle(order)
    shown = [options[place] for place in order]
    letters = string.ascii_uppercase[: len(shown)]
    lines = [
        f"{letter}) {option}" for letter, option in zip(letters, shown, strict=True)
    ]
    prompt = "\n\n".join([LETTERED.format(letters=letters), question, "\n".join(lines)])
    return {
        "prompt": prompt,
        "answer": letters[order.index(right_place)],
        CHOICES: shown,
    }


def _place_of_answer(answer: Any, options: list[str], where: str) -> int:
    """Return the index of the right option, from its index, its letter or its text."""
    if isinstance(answer, int) and 0 <= answer < len(options):
        return answer
    text = str(answer).strip()
    if text in options:
        return options.index(text)
    # Such as (B), B) or B.
    letter = text.strip("()[].")
    if len(letter) == 1 and letter in string.ascii_uppercase[: len(options)]:
        return string.ascii_uppercase.index(letter)
    raise DataError(
        f"{where}: the answer {text[:60]!r} is neither an index, a letter nor the text of an option."
    )


def convert_code(row: Mapping[str, Any], where: str, seed: int) -> Row:
    """Convert a row of LiveCodeBench, of open-r1/codeforces, or one of `question` and `tests`."""
    if _optional(row, "question_content") is not None:
        return _livecodebench(row, where)
    if _optional(row, "official_tests", "examples") is not None:
        return _codeforces(row, where)
    question = str(_column(row, where, "question", "prompt", "problem", "description"))
    tests = _column(row, where, "tests", "test_cases", "answer")
    return {"prompt": f"{question}\n\n{FENCED}", "answer": tests, **_limits_of(row)}


def _limits_of(row: Mapping[str, Any]) -> Row:
    """Return the row's limits and checker, as far as it has them."""
    limits = {name: _optional(row, name) for name in (SECONDS, MEMORY)}
    checker = _optional(row, "generated_checker", "checker")
    columns = {
        name: float(value) for name, value in limits.items() if value is not None
    }
    return columns if checker is None else {**columns, CHECKER: str(checker)}


def _livecodebench(row: Mapping[str, Any], where: str) -> Row:
    """Convert a row of livecodebench/code_generation_lite."""
    starter = str(_optional(row, "starter_code") or "")
    metadata = _optional(row, "metadata") or "{}"
    function = (
        read_json(metadata) if isinstance(metadata, str) else dict(metadata)
    ).get("func_name")
    tests = []
    for column in ("public_test_cases", "private_test_cases"):
        tests += [
            _livecodebench_test(test, function, where)
            for test in _test_cases(_optional(row, column), where)
        ]
    if not tests:
        raise DataError(
            f"{where}: it has no tests in public_test_cases and private_test_cases."
        )
    question = str(_column(row, where, "question_content"))
    instruction = (
        "Read the input from standard input and write the answer to standard output."
    )
    if starter:
        instruction = f"Complete this code:\n\n```python\n{starter}\n```"
    return {"prompt": "\n\n".join([question, instruction, FENCED]), "answer": tests}


def _livecodebench_test(
    test: Mapping[str, Any], function: str | None, where: str
) -> Row:
    """Convert a test: a script's input and output, or one line of JSON for each argument of a function."""
    if test.get("testtype") != "functional":
        return {"input": str(test["input"]), "output": str(test["output"])}
    if not function:
        raise DataError(
            f"{where}: it has a functional test, and its metadata names no func_name."
        )
    arguments = [
        read_json(line) for line in str(test["input"]).splitlines() if line.strip()
    ]
    return {
        "call": function,
        "args": arguments,
        "expected": read_json(str(test["output"])),
    }


def _pickled_text(packed: str) -> str:
    """Return the text in base64 of a compressed pickle, without running the pickle's program.

    Raises:
        ValueError: the pickle holds anything but one text, or the text is longer than `LONGEST_TESTS`.
    """
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(base64.b64decode(packed.encode()), LONGEST_TESTS)
    # A compressed text may be a thousand times larger than its file.
    if unpacking.unconsumed_tail:
        raise ValueError(f"more than {LONGEST_TESTS:,} bytes")
    texts: list[str] = []
    # `pickle.loads` would run code from the file. This only lists the operations.
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in TEXT_OPERATIONS:
            texts.append(str(argument))
        elif operation.name not in FRAME_OPERATIONS:
            raise ValueError(
                f"a pickle with the operation {operation.name}; expected one text"
            )
    if len(texts) != 1:
        raise ValueError(f"a pickle of {len(texts)} texts; expected one")
    return texts[0]


def _test_cases(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Return test cases from a list, JSON text, or LiveCodeBench's base64 of compressed, pickled JSON text."""
    if value is None or value == "":
        return []
    # Public tests are plain JSON, and private ones are packed.
    if isinstance(value, str) and value.lstrip()[:1] != "[":
        try:
            value = _pickled_text(value)
        except (binascii.Error, zlib.error, ValueError) as error:
            raise DataError(
                f"{where}: its test cases cannot be read ({error}). Copy the file again."
            ) from error
    parsed = read_json(value) if isinstance(value, str) else value
    if not isinstance(parsed, list) or not all(
        isinstance(test, Mapping) for test in parsed
    ):
        raise DataError(
            f"{where}: expected a list of test cases; found {type(parsed).__name__}."
        )
    return parsed


def _codeforces(row: Mapping[str, Any], where: str) -> Row:
    """Convert a row of open-r1/codeforces."""
    # The tests of such a problem are a program that answers, not texts.
    if _optional(row, "interaction_format"):
        raise DataError(
            f"{where}: it is interactive, which is not supported. Use the subset verifiable."
        )
    tests = _optional(row, "official_tests") or _optional(row, "examples")
    parts = [str(_column(row, where, "description"))]
    for title, name in (
        ("Input", "input_format"),
        ("Output", "output_format"),
        ("Note", "note"),
    ):
        if text := _optional(row, name):
            parts.append(f"{title}\n{text}")
    for example in _optional(row, "examples") or ():
        parts.append(
            f"Example input\n{example['input']}\nExample output\n{example['output']}"
        )
    limits = _limits_of(row)
    if SECONDS in limits:
        parts.append(f"Time limit: {limits[SECONDS]:g} s")
    answer = [
        {"input": str(test["input"]), "output": str(test["output"])} for test in tests
    ]
    return {"prompt": "\n\n".join([*parts, FENCED]), "answer": answer, **limits}


def number_answer(response: str, extra: Mapping[str, Any]) -> str | None:
    """Return the final number of a response: that in the last box, after the last `####`, or the last of the text."""
    boxed = last_boxed(response)
    number = None if boxed is None else final_number(boxed, "flexible")
    number = final_number(response, "flexible") if number is None else number
    return None if number is None else f"{number.normalize():f}"


# Spellings in formulas that change nothing.
SPELLINGS = (
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("\\!", ""),
    ("$", ""),
)


def formula_answer(response: str, extra: Mapping[str, Any]) -> str | None:
    """Return the content of the last box without white space and spellings that change nothing, or the last number."""
    boxed = last_boxed(response)
    if boxed is None:
        return number_answer(response, extra)
    # Only for counting equal answers: the suite's reward decides whether one is right.
    for spelling, plain in SPELLINGS:
        boxed = boxed.replace(spelling, plain)
    return "".join(boxed.split()).rstrip(".")


def choice_answer(response: str, extra: Mapping[str, Any]) -> str | None:
    """Return the letter that a response chooses."""
    options = [str(option) for option in extra[CHOICES]]
    return extract_choice(response, len(options), options)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("aime", convert_aime, "math_verify", {}, number_answer),
        Suite(
            "gpqa",
            convert_gpqa,
            "multiple_choice",
            {"choices_key": CHOICES},
            choice_answer,
        ),
        Suite("gsm8k", convert_gsm8k, "gsm8k", {"method": "flexible"}, number_answer),
        Suite("math", convert_math, "math_verify", {}, formula_answer),
        Suite(
            "code",
            convert_code,
            "code",
            {"checker_key": CHECKER, "seconds_key": SECONDS, "memory_key": MEMORY},
            None,
        ),
    )
}
assert SUITES.keys() == set(SUITE_NAMES)


class SuiteRows:
    """Rows of a published data set, converted when they are read.

    Args:
        rows: rows as published.
        seed: seed of the order of a question's options.
    """

    def __init__(self, rows: RowSource, suite: Suite, seed: int = 0) -> None:
        self._rows = rows
        self._suite = suite
        self._seed = seed
        self.where = rows.where
        self.fingerprint = f"{rows.fingerprint}-{suite.name}-{seed}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        where = self.where(index)
        try:
            converted = self._suite.convert(row, where, self._seed)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{where}: not a row of {self._suite.name} as published ({type(error).__name__}: {error})."
            ) from error
        return {**converted, IDENTITY: prompt_identity(converted)}


class CsvRows:
    """Rows of a CSV file with a header, in memory. GPQA is published in this form."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = path.read_bytes()
            text = content.decode("utf-8-sig")
            self._rows = list(_rows_of_csv(io.StringIO(text, newline="")))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{path}: cannot be read as CSV ({error}). Copy the file again."
            ) from error
        self.fingerprint = hashlib.blake2b(content, digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """Return the name of a row, for messages."""
        return f"{self.path}, row {index + 1}"

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def _rows_of_csv(lines: Iterable[str]) -> Iterable[Row]:
    # A cell may hold a long solution; the limit of the csv module is 128 KiB.
    csv.field_size_limit(2**27)
    for row in csv.DictReader(lines):
        yield {name: value for name, value in row.items() if name}


def prompt_identity(row: Mapping[str, Any]) -> str:
    """Return a digest of a converted row's prompt and answer."""
    text = json.dumps([row["prompt"], row["answer"]], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
