"""Small files with the columns of published evaluation data sets. The rows are the project's own."""

from __future__ import annotations

import base64
import csv
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AIME = [
    {"ID": "2024-I-1", "Problem": "What is 20 + 13?", "Answer": "033"},
    {"ID": "2024-I-2", "Problem": "What is 2 * 102?", "Answer": 204},
]
GPQA = [
    {
        "Record ID": "rec1",
        "Question": "Which particle has no charge?\n",
        "Correct Answer": "the neutron",
        "Incorrect Answer 1": "the proton",
        "Incorrect Answer 2": "the electron",
        "Incorrect Answer 3": "the positron, or none",
        "Explanation": 'It says "neutral",\nin its name.',
    },
    {
        "Record ID": "rec2",
        "Question": "What is the unit of force?",
        "Correct Answer": "N",
        "Incorrect Answer 1": "J",
        "Incorrect Answer 2": "W",
        "Incorrect Answer 3": "Pa",
        "Explanation": "",
    },
]
MMLU = [
    {
        "question": "What is 2 + 2?",
        "subject": "arithmetic",
        "choices": ["3", "4", "5", "6"],
        "answer": 1,
    }
]
GSM8K = [
    {
        "question": "What are 6 boxes of 12 pens?",
        "answer": "6 * 12 = <<6*12=72>>72\n#### 72",
    }
]
MATH = [
    {
        "problem": "What is $1/2$ as a decimal?",
        "answer": "0.5",
        "solution": "It is $\\boxed{0.5}$.",
        "level": 1,
    },
    {
        "problem": "Halve 1.",
        "solution": "Not $\\boxed{2}$ but $\\boxed{\\frac{1}{2}}$.",
        "level": "Level 1",
    },
]
SUM_TESTS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
HIDDEN_TESTS = [{"input": "10 -4\n", "output": "6\n", "testtype": "stdin"}]
CALL_TESTS = [{"input": '[1, 2, 3]\n"max"', "output": "3", "testtype": "functional"}]


def packed(tests: Sequence[Mapping[str, Any]]) -> str:
    """Return tests in the form of LiveCodeBench's private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVECODEBENCH = [
    {
        "question_title": "Sum",
        "question_content": "Add the two numbers.",
        "platform": "atcoder",
        "question_id": "abc1",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(SUM_TESTS),
        "private_test_cases": packed(HIDDEN_TESTS),
        "metadata": "{}",
    },
    {
        "question_title": "Pick",
        "question_content": "Return the largest or the smallest number.",
        "platform": "leetcode",
        "question_id": "1",
        "starter_code": "class Solution:\n    def pick(self, numbers: List[int], which: str) -> int:\n        ",
        "difficulty": "easy",
        "public_test_cases": json.dumps(CALL_TESTS),
        "private_test_cases": json.dumps([]),
        "metadata": json.dumps({"func_name": "pick"}),
    },
]
# Any two numbers with the wanted sum are right, so that only a checker can decide.
PAIR_CHECKER = """
import sys

def main():
    wanted = int(open(sys.argv[1]).read())
    with open(sys.argv[3]) as file:
        numbers = [int(word) for word in file.read().split()]
    print(1 if len(numbers) == 2 and sum(numbers) == wanted else 0)

if __name__ == "__main__":
    main()
"""
CODEFORCES = [
    {
        "id": "1/A",
        "title": "Pair",
        "time_limit": 1.0,
        "memory_limit": 256.0,
        "description": "Print two numbers whose sum is n.",
        "input_format": "One number n.",
        "output_format": "Two numbers.",
        "note": None,
        "interaction_format": None,
        "examples": [{"input": "5", "output": "2 3"}],
        "official_tests": [
            {"input": "5", "output": "2 3"},
            {"input": "9", "output": "4 5"},
        ],
        "generated_checker": PAIR_CHECKER,
    }
]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as CSV with a byte order mark, as spreadsheets do."""
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
