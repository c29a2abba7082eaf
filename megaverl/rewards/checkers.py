"""Custom checkers: programs that decide whether an output is right, for problems with several right outputs.

A checker is Python text of one of two forms:

- a function `check(input, output, expected)` that returns true or false, or a number of at least 1 for a right output;
- a script that is called like `checker.py input.txt correct_output.txt solution_output.txt`, reads these files and
  prints a number, as in open-r1/codeforces.

It runs confined, like the responses that it checks, and in another process than they
do. Files are not readable there, so the script gets the three texts through its own
`open`.
"""

from __future__ import annotations

import json

from megaverl.rewards.sandbox import ConfinedProgram, ProgramOutcome

# The texts arrive on standard input, so that no text of a response is ever part of a
# program.
_RUNNER = """
import builtins, io, json, sys

texts = json.load(sys.stdin)
names = ["input.txt", "correct_output.txt", "solution_output.txt"]
files = dict(zip(names, [texts["input"], texts["expected"], texts["output"]]))
open_before = builtins.open

def open_text(name, *arguments, **keywords):
    return io.StringIO(files[name]) if name in files else open_before(name, *arguments, **keywords)

builtins.open = open_text
sys.argv = ["checker.py", *names]
checker = {"__name__": "__main__"}
exec(compile(texts["checker"], "checker.py", "exec"), checker)
if callable(checker.get("check")):
    print(float(checker["check"](texts["input"], texts["output"], texts["expected"])))
"""


def checking_program(
    checker: str, test_input: str, output: str, expected: str
) -> ConfinedProgram:
    """Return the program that runs a checker on the output of a response."""
    texts = {
        "checker": checker,
        "input": test_input,
        "output": output,
        "expected": expected,
    }
    return ConfinedProgram(_RUNNER, json.dumps(texts))


def is_accepted(outcome: ProgramOutcome) -> bool:
    """Return whether a checker has accepted the output: the last word that it printed is a number of at least 1.

    A checker that raises has not accepted it. Many checkers raise for malformed output,
    such as a word instead of a number.
    """
    words = outcome.output.split()
    if outcome.code != 0 or not words:
        return False
    try:
        return float(words[-1]) >= 1.0
    except ValueError:
        return False
