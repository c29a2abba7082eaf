"""Programs that know an OpenAI-compatible address: openai's own client, answered by a real model, to the token."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.errors import ConfigError, EpisodeError
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.environments import ALONE, Codec, Limits, Request, Start, Turns, View, check_options, play
from megaverl.rollout.environments.environment import Alone
from megaverl.rollout.environments.gateway import ProgramEpisode
from megaverl.rollout.hf_engine import HFEngine
from tests.rollout.environments.test_episodes import Letters

OWN = "tests.rollout.environments.own"
LIMITS = Limits(max_turns=4, turn_tokens=6, total_tokens=90)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    folder = make_tiny_folder(tmp_path_factory.mktemp("model"), vocab_size=128)
    return HFEngine(folder, dtype=torch.float32, max_model_len=200, stop_token_ids=Letters.stop_token_ids)


def played(
    engine: HFEngine, options: Mapping[str, Any], extra: Any = None, *, chat: bool = True, limits: Limits = LIMITS
) -> tuple[View, list[Generation]]:
    """The view of one episode, and what the engine drew for it."""
    check_options("gateway", options)
    codec = Codec(Letters(), chat=chat)
    game, drawn = Alone(ProgramEpisode(codec, **options)), []

    def generate(requests: Sequence[Request]) -> list[Generation]:
        way = SamplingOptions(max_tokens=limits.turn_tokens)
        drawn.extend(engine.generate([r.token_ids for r in requests], way, [7 + r.turn for r in requests]))
        return drawn[-len(requests) :]

    try:
        prompts = game.reset(Start([1], "say", extra=extra or {}))
        [views] = play(
            [prompts],
            [[ALONE]],
            generate=generate,
            step=lambda turns: {0: Turns(game.step(turns[0]), [ALONE])},
            limits=limits,
        )
    finally:
        game.close()
    return views[ALONE], drawn


def written(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_that_were_drawn_are_kept_and_only_what_is_new_is_tokenised(engine: HFEngine) -> None:
    heard: dict[str, list[str]] = {"heard": [], "reasons": []}
    view, drawn = played(engine, {"function": f"{OWN}:talk"}, heard)
    assert len(drawn) == 3 and view.finish_reason == "stop" and view.rewards == [0.0, 0.0, 0.5]
    assert view.prompt == written("<system>brief$\n<user>say$\n<assistant>")
    own = [token for token, is_own in zip(view.tokens, view.own, strict=True) if is_own]
    assert own == [token for each in drawn for token in each.token_ids]
    log_probs = [each for each, is_own in zip(view.log_probs, view.own, strict=True) if is_own]
    assert log_probs == [each for part in drawn for each in part.log_probs]
    expected: list[int] = []
    for generation, answer in zip(drawn, ("go on", "end", ""), strict=True):
        expected += generation.token_ids
        if answer:
            ended = generation.finish_reason == "stop"
            expected += written(f"{'' if ended else '$'}\n<user>{answer}$\n<assistant>")
    assert view.tokens == expected
    assert heard["heard"] == [Letters().decode(each.token_ids) for each in drawn]
    assert heard["reasons"] == [drawn[0].finish_reason, drawn[2].finish_reason]


def test_plain_text(engine: HFEngine) -> None:
    view, drawn = played(engine, {"function": f"{OWN}:complete"}, chat=False)
    assert view.prompt == written("say")
    assert view.tokens == [*drawn[0].token_ids, *written(" so "), *drawn[1].token_ids]


def test_what_is_refused_is_told_and_a_program_that_fails_ends_its_episode(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", "secret")
    extra: dict[str, list[str]] = {"refused": []}
    options = {"function": f"{OWN}:wrong", "token_env": "GATEWAY_TOKEN", "error_reward": -1.0}
    view, _ = played(engine, options, extra)
    found = (
        "n=2",
        'stop=["x"]',
        "logprobs=true",
        "messages is not",
        "no such episode",
        "another token",
        "does not go on",
    )
    assert len(extra["refused"]) == len(found)
    for message, part in zip(extra["refused"], found, strict=True):
        assert part in message
    assert view.rewards == [-1.0] and 'KeyError: "the program\'s own"' in caplog.text


def test_an_episode_without_room_ends_and_its_program_hears_of_it(engine: HFEngine) -> None:
    extra: dict[str, list[str]] = {"refused": []}
    view, drawn = played(engine, {"function": f"{OWN}:endless"}, extra)
    assert view.finish_reason in ("turns", "length") and len(drawn) >= 2


def test_a_command_finds_address_and_row(engine: HFEngine, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, sys\nfrom openai import OpenAI\nrow = json.load(sys.stdin)\n"
        "answer = OpenAI().completions.create(model='any', prompt=sys.argv[1] + row['extra']['more'])\n"
        "print('done')\nprint(json.dumps({'reward': len(answer.choices)}))\n"
    )
    command = [sys.executable, str(program), "{prompt}:"]
    view, _ = played(engine, {"command": command}, {"more": " now"}, chat=False)
    assert view.prompt == written("say: now") and view.rewards == [1.0]
    with pytest.raises(EpisodeError, match=r"without a call.* it ended with 3: no reason"):
        played(
            engine, {"command": [sys.executable, "-c", "import sys; print('no reason', file=sys.stderr); sys.exit(3)"]}
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "name a program"),
        ({"command": "agent"}, "command is a list"),
        ({"function": "agent"}, "write it as module:function"),
        ({"command": ["agent"], "host": "0.0.0.0"}, "is not the loopback"),
        ({"command": ["agent"], "host": "everywhere"}, "no address of an interface"),
        ({"command": ["agent"], "token_env": "NO_SUCH_TOKEN"}, "no variable NO_SUCH_TOKEN"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options("gateway", options)
