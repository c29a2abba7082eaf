"""Turns of many episodes at once: what each agent sees, writes and is paid for, to the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megaverl.errors import EpisodeError
from megaverl.rollout.engine import Generation
from megaverl.rollout.environments import (
    Codec,
    Limits,
    Outcome,
    Request,
    Turns,
    View,
)
from tests.rollout.environments.begun import play_begun

STOP = 3


class Script:
    """Writes `agent letter, turn, STOP`, and answers `8, turn` to whoever wrote, for so many turns an episode."""

    def __init__(self, lengths: Sequence[int], agents: Sequence[str] = ("a",)) -> None:
        self.lengths, self.agents = lengths, agents
        self.asked: list[list[Request]] = []
        self.taken = [0] * len(lengths)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        self.asked.append(list(requests))
        return [
            Generation([ord(r.agent), 10 + r.turn, STOP], [-0.5, -1.0, -2.0], "stop")
            for r in requests
        ]

    def step(self, turns: Mapping[int, Mapping[str, list[int]]]) -> dict[int, Turns]:
        found = {}
        for number, written in turns.items():
            self.taken[number] += 1
            done = self.taken[number] == self.lengths[number]
            outcomes = {
                agent: Outcome(
                    [8, self.taken[number]], reward=self.taken[number], done=done
                )
                for agent in written
            }
            found[number] = Turns(outcomes, self.agents)
        return found

    def play(self, **limits: int) -> list[dict[str, View]]:
        return play_begun(
            [
                {agent: [5, number] for agent in self.agents}
                for number in range(len(self.lengths))
            ],
            [self.agents] * len(self.lengths),
            generate=self.generate,
            step=self.step,
            limits=Limits(
                **{"max_turns": 9, "turn_tokens": 3, "total_tokens": 99} | limits
            ),
        )


def test_a_view_to_the_token() -> None:
    script = Script([2, 1])
    first, second = (episode["a"] for episode in script.play())
    assert first.prompt == [5, 0]
    assert first.tokens == [97, 10, STOP, 8, 1, 97, 11, STOP], (
        "nothing after the last turn"
    )
    assert first.own == [True] * 3 + [False] * 2 + [True] * 3
    assert first.log_probs == [-0.5, -1.0, -2.0, 0.0, 0.0, -0.5, -1.0, -2.0]
    assert [turn for turn, own in zip(first.turns, first.own, strict=True) if own] == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
    assert first.rewards == [1.0, 2.0] and first.spans == [(0, 3), (5, 8)]
    assert first.finish_reason == second.finish_reason == "stop"
    assert second.tokens == [97, 10, STOP]


def test_all_that_are_running_are_asked_at_once_and_with_what_they_have_seen() -> None:
    script = Script([2, 1, 3])
    script.play()
    assert [[r.episode for r in asked] for asked in script.asked] == [
        [0, 1, 2],
        [0, 2],
        [2],
    ]
    assert script.asked[1][0].token_ids == [5, 0, 97, 10, STOP, 8, 1]
    assert [asked[-1].turn for asked in script.asked] == [0, 1, 2]


def test_an_episode_ends_where_there_is_no_room_for_another_turn() -> None:
    [episode] = Script([9]).play(total_tokens=10)
    assert episode["a"].finish_reason == "length" and episode["a"].tokens[-1] == STOP
    assert len(episode["a"].tokens) == 8 and episode["a"].rewards == [1.0, 2.0]
    [episode] = Script([9]).play(max_turns=3)
    assert episode["a"].finish_reason == "turns" and len(episode["a"].rewards) == 3


def test_a_conversation_that_begins_with_too_much_ends_its_episode() -> None:
    [episode] = play_begun(
        [{"a": [5]}],
        [["a"]],
        generate=lambda requests: [
            Generation([9, STOP], [-1.0, -1.0], "stop") for _ in requests
        ],
        step=lambda turns: dict.fromkeys(
            turns, Turns({"a": Outcome([7] * 9, conversation=1)}, ["a"])
        ),
        limits=Limits(max_turns=9, turn_tokens=3, total_tokens=99, prompt_tokens=8),
    )
    [row] = episode["a"].conversations()
    assert row.finish_reason == "length" and row.tokens == [9, STOP]


def test_agents_that_write_at_the_same_time_see_only_their_own() -> None:
    script = Script([2], agents=("a", "b"))
    [episode] = script.play()
    assert episode["a"].tokens == [97, 10, STOP, 8, 1, 97, 11, STOP]
    assert episode["b"].tokens == [98, 10, STOP, 8, 1, 98, 11, STOP]
    assert [r.agent for r in script.asked[0]] == ["a", "b"]


@pytest.mark.parametrize(
    ("led_to", "said"),
    [
        (Turns({"c": Outcome()}, ["a"]), "an outcome for 'c'; its agents are a, b"),
        (Turns({"a": Outcome()}, []), "not over, and nobody writes"),
        (
            Turns({"b": Outcome(reward=1.0)}, ["b"]),
            "a reward for 'b', which has not taken",
        ),
        (
            Turns({"a": Outcome([1], conversation=2)}, ["a"]),
            "for conversation 2; there are 1, counted from 0",
        ),
    ],
)
def test_what_an_environment_may_not_answer(led_to: Turns, said: str) -> None:
    with pytest.raises(EpisodeError, match=said):
        play_begun(
            [{"a": [1], "b": [1]}],
            [["a"]],
            generate=lambda requests: [
                Generation([1], [0.0], "stop") for _ in requests
            ],
            step=lambda turns: dict.fromkeys(turns, led_to),
            limits=Limits(5, 3, 20),
        )


class Letters:
    """A tokenizer of single letters, with a chat template."""

    stop_token_ids = [ord("$")]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        return "".join(
            chr(token) for token in token_ids if token not in self.stop_token_ids
        )

    def render_chat(
        self, messages: Sequence[dict[str, Any]], *, where: str = "", tools: Any = None
    ) -> str:
        return (
            "".join(f"<{m['role']}>{m['content']}$\n" for m in messages) + "<assistant>"
        )


def test_an_answer_under_a_chat_template_is_all_that_stands_between_two_turns() -> None:
    codec = Codec(Letters(), chat=True)

    def text(turn: str, **options: Any) -> str:
        return "".join(map(chr, codec.answer("4", codec.encode(turn), **options)))

    assert text("2+2$", role="tool") == "\n<tool>4$\n<assistant>"
    assert text("2+2") == "$\n<user>4$\n<assistant>", (
        "a turn that was cut off is ended here"
    )
    assert Codec(Letters(), chat=False).answer("4", []) == [ord("4")]
