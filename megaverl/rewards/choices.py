"""Multiple-choice answers: find the chosen letter in a response, and the reward that compares it.

Models write a choice in many ways: `Answer: C`, `(C)`, `C.`, `\\boxed{C}`, or the text
of the option itself.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from megaverl.rewards.registry import RewardSample, register_reward

# One letter with the marks that models put around it: **C**, (C), [C], $C$, \boxed{C}, \text{(C)}.
# Repetitions are bounded, so that no response makes the search slow.
_OPEN = r"(?:\\(?:boxed|text|textbf|mathrm)\{|[*_`$(\[{\s\"']){0,12}"
_LETTER = rf"{_OPEN}(?P<letter>[A-Z])(?![A-Za-z0-9'])"
# An announcement may be in any case, but its letter must be a capital: "the answer is a
# prime" chooses nothing.
_MARKS = r"[*_`\s\"']{0,6}"
_VERB = rf"(?i:(?:is|would be|must be)\b)?{_MARKS}"
ANNOUNCED = re.compile(
    rf"(?i:\b(?:answer|option|choice)\b){_MARKS}{_VERB}:?{_MARKS}(?i:option\s{{1,3}})?{_LETTER}"
)
# After a colon and alone on its line, a small letter is a choice too.
ANNOUNCED_SMALL = re.compile(
    r"^[*_ ]{0,6}(?i:(?:final )?answer)[*_]{0,3} ?:[*_ (]{0,6}(?P<letter>[a-z])[).*_ ]{0,6}$",
    re.MULTILINE,
)
BOXED = re.compile(rf"\\boxed\{{{_LETTER}")
IN_BRACKETS = re.compile(r"[(\[]([A-Z])[)\]]")
# A line that is, or starts with, a letter as a list writes it: "C", "C.", "C)", "**C:**
# the third".
LINE_START = re.compile(r"^[\s*_`(\[]*([A-Z])(?:[\s*_`]*$|[*_`]*[.):\]])")
ANNOUNCED_TEXT = re.compile(
    rf"(?i:\banswer\b){_MARKS}(?i:is\b)?{_MARKS}:?{_MARKS}(?P<text>[^\n]+)"
)
# A reference that is a letter, perhaps in brackets.
LETTER_ALONE = re.compile(r"\s*[(\[]?([A-Z])[)\].:]?\s*")


def extract_choice(
    response: str, num_choices: int, options: Sequence[str] = ()
) -> str | None:
    """Return the letter that a response chooses, or None.

    The last announcement decides: `Answer: C`, `the answer is (C)`, `\\boxed{C}`.
    Without one, the last line decides if it names exactly one letter, as `(C)` or `C.`,
    or is the text of one option.

    Args:
        num_choices: number of options; letters beyond them are not choices.
        options: texts of the options, in the order of their letters. Empty: unknown.
    """
    letters = string.ascii_uppercase[:num_choices]
    patterns = (ANNOUNCED, ANNOUNCED_SMALL, BOXED)
    announced = [match for pattern in patterns for match in pattern.finditer(response)]
    announced = [match for match in announced if match["letter"].upper() in letters]
    by_text = _announced_text(response, options)
    last_letter = max(announced, key=lambda match: match.start("letter"), default=None)
    if last_letter is not None and (
        by_text is None or by_text[0] < last_letter.start("letter")
    ):
        return str(last_letter["letter"]).upper()
    if by_text is not None:
        return by_text[1]
    lines = [line for line in response.splitlines() if line.strip()]
    return _choice_of_line(lines[-1], letters, options) if lines else None


def _announced_text(response: str, options: Sequence[str]) -> tuple[int, str] | None:
    """Return the place and the letter of the last announcement that is followed by the text of one option."""
    announcement = None
    for match in ANNOUNCED_TEXT.finditer(response):
        letter = _option_with_text(match["text"], options)
        if letter is not None:
            announcement = (match.start("text"), letter)
    return announcement


def _choice_of_line(line: str, letters: str, options: Sequence[str]) -> str | None:
    """Return the choice of a line without an announcement, if it is unambiguous."""
    named: set[str] = {
        letter for letter in IN_BRACKETS.findall(line) if letter in letters
    }
    start = LINE_START.match(line)
    if start is not None and start[1] in letters:
        named.add(start[1])
    if len(named) == 1:
        return named.pop()
    return _option_with_text(line, options) if not named else None


def _option_with_text(text: str, options: Sequence[str]) -> str | None:
    """Return the letter of the only option whose text is `text`, ignoring case, marks and white space."""
    plain = _plain(text)
    same = [
        number
        for number, option in enumerate(options)
        if plain and _plain(option) == plain
    ]
    return string.ascii_uppercase[same[0]] if len(same) == 1 else None


def _plain(text: str) -> str:
    without_marks = re.sub(r"[*_`$]|\\(?:boxed|text|textbf|mathrm)\{|\}", "", text)
    return " ".join(without_marks.split()).strip(" .:\"'()[]").casefold()


def reference_letter(reference: str, options: Sequence[str] = ()) -> str | None:
    """Return the letter of a reference such as `C` or `(C)`, or of the option whose text it is; None for neither."""
    match = LETTER_ALONE.fullmatch(reference)
    if match is not None and (not options or ord(match[1]) - ord("A") < len(options)):
        return match[1]
    return _option_with_text(reference, options)


def _check_multiple_choice(choices_key: str = "choices", num_choices: int = 4) -> None:
    if not 2 <= num_choices <= 26:
        raise ValueError(f"num_choices is {num_choices}; it must be 2 to 26")


@register_reward("multiple_choice", check=_check_multiple_choice)
def multiple_choice(
    sample: RewardSample, *, choices_key: str = "choices", num_choices: int = 4
) -> float:
    """Return 1 if the response chooses the reference's option, else 0.

    The reference is a letter (`C`, `(C)`) or the text of an option. A response may
    announce the letter or the text; see `extract_choice`.

    Args:
        choices_key: column with the texts of the options. Rows may lack it.
        num_choices: number of options of rows without that column.

    Raises:
        ValueError: the reference is neither a letter nor the text of an option.
    """
    options = [str(option) for option in sample.extra.get(choices_key) or ()]
    expected = reference_letter(str(sample.reference), options)
    if expected is None:
        raise ValueError(
            f"the reference {str(sample.reference)[:60]!r} is neither a letter nor the text of an option"
        )
    count = len(options) or max(num_choices, ord(expected) - ord("A") + 1)
    return float(extract_choice(sample.response, count, options) == expected)
