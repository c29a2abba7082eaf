"""Tools in processes of their own: what they may do, how long they may take, and what the model is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megaverl.errors import ConfigError, EnvironmentFault, EpisodeError
from megaverl.rollout.environments import Codec
from megaverl.rollout.environments.environment import Start
from megaverl.rollout.environments.games import GuessingGame
from megaverl.rollout.environments.tools import (
    Answer,
    ToolBox,
    ToolLimits,
    ToolUse,
    calculate,
)
from tests.rollout.environments.test_episodes import Letters

TOOLS = {
    "calculator": "megaverl.rollout.environments.tools:calculate",
    "shell": "os:system",
    "opened": "builtins:open",
    "connect": "socket:create_connection",
    "fill": "builtins:bytearray",
    "leave": "os:_exit",
    "environment": "os:getenv",
    "said": "builtins:repr",
}


@pytest.fixture(scope="module")
def box() -> Iterator[ToolBox]:
    made = ToolBox(
        TOOLS, ToolLimits(seconds=1.0, memory_mb=256, max_characters=20), size=1
    )
    yield made
    made.close()


def test_a_call_and_its_result(box: ToolBox) -> None:
    assert box.call("calculator", {"expression": "2*(3+4)^2 - min(5, 6)"}) == Answer(
        "93", True
    )


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("calculator", {"expression": "1/0"}, "ZeroDivisionError"),
        ("calculator", {"expressoin": "1"}, "TypeError"),
        ("calculator", {"expression": "9**9**9**9"}, "took longer than 1 s"),
        ("calculator", {"expression": "__import__('os')"}, "ValueError"),
        ("calculator", {"expression": 3}, "ValueError: expre"),
        ("shell", {"command": "true"}, "PermissionError"),
        ("opened", {"file": "/tmp/megaverl_tool", "mode": "w"}, "PermissionError"),
        ("connect", {"address": ["127.0.0.1", 9]}, "PermissionError"),
        ("leave", {"status": 3}, "ended its process (code 3)"),
    ],
)
def test_whatever_goes_wrong_is_an_answer_and_the_next_call_goes_well(
    box: ToolBox, name: str, arguments: dict[str, object], said: str
) -> None:
    answer = box.call(name, arguments)
    assert not answer.ok and said in answer.text
    assert box.call("calculator", {"expression": "1+1"}) == Answer("2", True)


def test_limits_of_memory_and_of_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "greedy_tools.py").write_text(
        "def fill(mb):\n    return len(bytearray(mb * 2**20))\ndef talk(n):\n    print('x' * n)\n    return 'y' * n\n"
    )
    import sys

    sys.path.insert(0, str(tmp_path))
    box = ToolBox(
        {"fill": "greedy_tools:fill", "talk": "greedy_tools:talk"},
        ToolLimits(memory_mb=256, max_characters=9),
    )
    try:
        assert box.call("fill", {"mb": 8}).ok
        assert box.call("fill", {"mb": 1024}) == Answer(
            "more than 256 MiB of memory", False
        )
        assert box.call("talk", {"n": 100}) == Answer("y" * 9, True), (
            "what it prints goes nowhere"
        )
    finally:
        box.close()
        sys.path.remove(str(tmp_path))


def test_nothing_of_this_process_reaches_a_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hush")
    box = ToolBox({"environment": "os:getenv"})
    try:
        assert box.call("environment", {"key": "SECRET_KEY"}) == Answer("None", True)
    finally:
        box.close()


def test_a_tool_that_cannot_be_imported_ends_the_run() -> None:
    with pytest.raises(EpisodeError, match="no_such_module_for_test.*module:function"):
        ToolBox({"gone": "no_such_module_for_test:f"}).call("gone", {})


@pytest.mark.parametrize(
    "text", ["", "2 +", "a", "[1]", "abs", "'a' * 9", "x.y", "1 if 1 else 2"]
)
def test_what_is_no_arithmetic(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        calculate(text)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


CODEC = Codec(Letters(), chat=False)


def test_a_json_call_is_answered_and_a_turn_without_one_ends_the_episode() -> None:
    environment = ToolUse(
        CODEC,
        result="got {text}",
        error="bad: {text}",
        call_reward=0.5,
        error_reward=-1.0,
    )
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>$'
    outcome = environment.step(letters(call))
    assert (CODEC.decode(outcome.token_ids), outcome.reward, outcome.done) == (
        "got 42",
        0.5,
        False,
    )
    for wrong, said in (
        ("{not json}", "bad: Expecting property name"),
        ('{"name": 3}', 'bad: a call is {"name"'),
        (
            '{"name": "calculator", "arguments": {"expression": "1/0"}}',
            "bad: ZeroDivisionError",
        ),
    ):
        outcome = environment.step(letters(f"<tool_call>{wrong}</tool_call>$"))
        assert (
            CODEC.decode(outcome.token_ids).startswith(said)
            and outcome.reward == -1.0
            and not outcome.done
        )
    assert environment.step(letters("The answer is 42.$")).done


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"expression": "1 + \\ud800"}', "bad: "),
        ('{"expression": "1 + \\u0000"}', "bad: "),
        (
            '{"expression": ' + "[" * 3000 + "]" * 3000 + "}",
            "bad: nested more than 100 deep",
        ),
        ('{"expression": NaN}', "bad: NaN is no JSON"),
        ('{"expression": 1e999}', "bad: "),
        ('{"expression": ' + "9" * 5000 + "}", "bad: "),
        ('{"expression": "' + "(" * 3000 + ")" * 3000 + '"}', "bad: "),
        ('{"\\ud800": 1}', "bad: "),
    ],
)
def test_whatever_a_model_writes_into_a_call_is_answered(
    arguments: str, said: str
) -> None:
    environment = ToolUse(
        CODEC, result="got {text}", error="bad: {text}", error_reward=-1.0
    )
    outcome = environment.step(
        letters(
            f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>$'
        )
    )
    text = CODEC.decode(outcome.token_ids)
    assert text.startswith(said) and outcome.reward == -1.0 and not outcome.done
    text.encode()


TELLS = """
import sys

def half():
    return "half of a pair \\ud800 and \\x00"

def leaves():
    raise SystemExit(0)

class Hostile:
    def __str__(self):
        raise SystemExit(0)

def hostile():
    return Hostile()

def huge():
    return 10 ** 10_000
"""


def test_whatever_a_tool_of_a_file_says_is_clean_text(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS.replace("\\\\", "\\"))
    names = ("half", "leaves", "hostile", "huge")
    tools = {name: f"{tmp_path / 'tells.py'}:{name}" for name in names}
    environment = ToolUse(CODEC, tools=tools, workers=1)
    answers = {name: environment.box.call(name, {}) for name in names}
    assert (
        answers["half"].text == "half of a pair \ufffd and \ufffd"
        and answers["half"].ok
    )
    assert answers["leaves"].text.startswith("SystemExit") and not answers["leaves"].ok
    assert not answers["hostile"].ok and not answers["huge"].ok
    assert CODEC.encode("\ud800") == CODEC.encode("\ufffd")


def test_a_call_written_as_the_recipe_says() -> None:
    environment = ToolUse(CODEC, call=r"\[(.*?)\]", result="is {text} =")
    assert CODEC.decode(environment.step(letters("[47+85]$")).token_ids) == "is 132 ="
    with pytest.raises(
        ConfigError, match="no built-in tool 'abacus'; there are: calculator"
    ):
        ToolUse(CODEC, tools=["abacus"])


def test_the_guessing_game() -> None:
    game = GuessingGame(CODEC)
    assert list(game.reset(Start([1, 2], reference="6"))) == [1, 2]
    told = [
        (CODEC.decode(o.token_ids), o.reward, o.done)
        for o in map(game.step, map(letters, ("3$", "8$", "x$", "6$")))
    ]
    assert told == [
        ("higher", -0.1, False),
        ("lower", -0.1, False),
        ("higher", -0.1, False),
        ("", 1.0, True),
    ]


@pytest.mark.parametrize("blame", [None, "environment"])
def test_whose_doing_a_call_that_fails_is(blame: str | None) -> None:
    """A lost connection is never the policy's; a time-out, an exit and a tool's own error as `blame` says."""
    names = ("slow", "leaves", "breaks", "refuses", "unreachable", "says_so")
    tools = {name: f"tests.rollout.environments.own_tools:{name}" for name in names}
    box = ToolBox(tools, ToolLimits(seconds=0.5, blame=blame), size=1)
    try:
        faults = {name for name in names if box.call(name, {}).is_fault}
    finally:
        box.close()
    always = {"unreachable", "says_so"}
    own = {"slow", "leaves", "breaks"} if blame == "environment" else set()
    assert faults == always | own


def test_a_call_is_tried_again_and_then_the_episode_has_failed(tmp_path: Path) -> None:
    """The second call of a file finds it; a tool that never answers is a fault."""
    options = {
        "tools": {"twice": "tests.rollout.environments.own_tools:twice"},
        "argument": "path",
        "call": "<(.*)>",
        "allow": ["files"],
    }
    call = letters(f"<{tmp_path / 'mark'}>")
    answered = ToolUse(CODEC, **options).step(call)
    assert CODEC.decode(answered.token_ids) == "there"
    (tmp_path / "mark").unlink()
    with pytest.raises(EnvironmentFault, match="ConnectionResetError: once"):
        ToolUse(CODEC, **options, retries=0).step(call)
