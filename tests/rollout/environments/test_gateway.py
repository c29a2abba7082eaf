"""Programs that know an OpenAI-compatible address: openai's own client, answered by a real model, to the token."""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.data.datasets import PromptRecord
from megaverl.errors import ConfigError, EnvironmentFault, EpisodeError
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.environments import (
    ALONE,
    Codec,
    Limits,
    Request,
    Start,
    Turns,
    View,
    check_options,
)
from megaverl.rollout.environments.conversation import (
    CHAT,
    COMPLETIONS,
    Call,
    CallRefused,
    Conversations,
)
from megaverl.rollout.environments.dialects import DIALECTS
from megaverl.rollout.environments.environment import Alone, make_game
from megaverl.rollout.environments.gateway import GatewayServer, ProgramEpisode
from megaverl.rollout.hf_engine import HFEngine
from megaverl.workers.player import outcome_of, outcome_row
from megaverl.workers.responses import episode_batch
from tests.rollout.environments.begun import play_begun
from tests.rollout.environments.test_episodes import Letters

OWN = "tests.rollout.environments.own"
LIMITS = Limits(max_turns=4, turn_tokens=6, total_tokens=90)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFEngine:
    folder = make_tiny_folder(tmp_path_factory.mktemp("model"), vocab_size=128)
    return HFEngine(
        folder,
        dtype=torch.float32,
        max_model_len=200,
        stop_token_ids=Letters.stop_token_ids,
    )


class Arrivals(queue.SimpleQueue[Any]):
    """Calls, and a word of each that has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came: queue.SimpleQueue[None] = queue.SimpleQueue()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self.came.put(None)


class Scheduled:
    """An engine whose turns follow from what it reads, and which lets further calls come while it writes."""

    def __init__(self, schedule: Sequence[Sequence[str]]) -> None:
        self._schedule, self.calls, self.sizes = list(schedule), Arrivals(), list[int]()
        self.may = {
            name: threading.Event()
            for name in ("main", "a1", "b1", "left", "right", "a2")
        }
        self.may["main"].set()
        # Which came before anything is written.
        self._schedule[0] = ["main", *self._schedule[0]]

    def generate(self, prompts: Sequence[Sequence[int]], *_: Any) -> list[Generation]:
        self.sizes.append(len(prompts))
        for name in self._schedule.pop(0) if self._schedule else ():
            self.may[name].set()
            self.calls.came.get(timeout=60)
        turns = [zlib.crc32(bytes(ids)) for ids in prompts]
        return [
            Generation(
                written(f"{turn % 1000}$"),
                [-turn / 2**33] * len(f"{turn % 1000}$"),
                "stop",
            )
            for turn in turns
        ]


class Says:
    """An engine that draws these texts, one after the other."""

    def __init__(self, *texts: str) -> None:
        self._turns = [[ord(letter) for letter in text] for text in texts]

    def generate(self, prompts: Sequence[Sequence[int]], *_: Any) -> list[Generation]:
        turns = (self._turns.pop(0) for _ in prompts)
        return [
            Generation(turn, [-token / 100 for token in turn], "stop") for turn in turns
        ]


def played(
    engine: HFEngine | Says | Scheduled,
    options: Mapping[str, Any],
    extra: Any = None,
    *,
    chat: bool = True,
    limits: Limits = LIMITS,
    name: str = "gateway",
    asked: list[Request] | None = None,
    calls: queue.SimpleQueue[Any] | None = None,
) -> tuple[View, list[Generation]]:
    """The view of one episode, and what the engine drew for it; `asked` gets what it was asked."""
    check_options(name, options)
    game, drawn = make_game(name, Codec(Letters(), chat=chat), options), []
    assert isinstance(game, Alone) and isinstance(game.environment, ProgramEpisode)
    game.environment.session.calls = calls or game.environment.session.calls

    def generate(requests: Sequence[Request]) -> list[Generation]:
        way = SamplingOptions(max_tokens=limits.turn_tokens)
        if asked is not None:
            asked.extend(requests)
        drawn.extend(
            engine.generate(
                [r.token_ids for r in requests], way, [7 + r.turn for r in requests]
            )
        )
        return drawn[-len(requests) :]

    def step(turns: Mapping[int, Mapping[str, list[list[int]]]]) -> dict[int, Turns]:
        rows = json.dumps(
            {
                agent: outcome_row(outcome)
                for agent, outcome in game.step_each(turns[0]).items()
            }
        )
        return {
            0: Turns(
                {agent: outcome_of(row) for agent, row in json.loads(rows).items()},
                [ALONE],
            )
        }

    try:
        prompts = game.reset(Start([1], "say", extra=extra or {}, limits=limits))
        [views] = play_begun(
            [prompts],
            [[ALONE]],
            generate=generate,
            step=step,
            limits=limits,
            by_content=game.environment.by_content,
        )
    finally:
        game.close()
    return views[ALONE], drawn


def written(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_that_were_drawn_are_kept_and_only_what_is_new_is_tokenised(
    engine: HFEngine,
) -> None:
    heard: dict[str, list[str]] = {"heard": [], "reasons": []}
    view, drawn = played(engine, {"function": f"{OWN}:talk"}, heard)
    assert (
        len(drawn) == 3
        and view.finish_reason == "stop"
        and view.rewards == [0.0, 0.0, 0.5]
    )
    assert view.prompt == written("<system>brief$\n<user>say$\n<assistant>")
    own = [token for token, is_own in zip(view.tokens, view.own, strict=True) if is_own]
    assert own == [token for each in drawn for token in each.token_ids]
    log_probs = [
        each for each, is_own in zip(view.log_probs, view.own, strict=True) if is_own
    ]
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


def test_each_conversation_of_an_episode_is_a_sample_of_exactly_what_was_read_and_drawn() -> (
    None
):
    """openai's client with a sub-agent, a way back to an earlier answer, and a history that is cut to a summary."""
    asked: list[Request] = []
    extra: dict[str, Any] = {"heard": [], "again": []}
    limits = Limits(max_turns=6, turn_tokens=6, total_tokens=90)
    texts = ["one", "two", "three", "four", "five", "six"]
    says = Says(
        "one$$", *(f"{text}$" for text in texts[1:])
    )  # text that would be tokenised otherwise than it was drawn
    view, drawn = played(
        says, {"function": f"{OWN}:delegate"}, extra, limits=limits, asked=asked
    )
    assert view.finish_reason == "stop" and len(drawn) == len(asked) == 6
    assert len({request.conversation for request in asked}) == 6 and {
        request.turn for request in asked
    } == {0}
    rows = view.conversations()
    assert [len(row.rewards) for row in rows].count(2) == 2 and len(rows) == 4
    assert rows[-1].rewards == [0.5] and sum(sum(row.rewards) for row in rows) == 0.5, (
        "the last turn is in the last row"
    )
    for number, (request, generation) in enumerate(zip(asked, drawn, strict=True)):
        whole = [*request.token_ids, *generation.token_ids]
        [row] = [
            row
            for row in rows
            if number in row.turns and [*row.prompt, *row.tokens][: len(whole)] == whole
        ]
        places = [
            at
            for at, (turn, own) in enumerate(zip(row.turns, row.own, strict=True))
            if own and turn == number
        ]
        assert [row.tokens[at] for at in places] == generation.token_ids
        assert [row.log_probs[at] for at in places] == generation.log_probs
    first, helper, branch, short = (view.conversation(number) for number in range(4))
    assert helper.prompt == written("<user>help$\n<assistant>")
    assert short.prompt == written(
        f"<system>brief$\n<user>so far: {texts[4]}$\n<assistant>"
    )
    assert branch.prompt == [
        *first.prompt,
        *written("one$$\n<user>or so$\n<assistant>"),
    ]
    assert extra["heard"] == texts and extra["again"] == [True]


def test_a_question_that_is_asked_twice_has_two_answers(engine: HFEngine) -> None:
    asked: list[Request] = []
    extra: dict[str, Any] = {"heard": []}
    limits = Limits(max_turns=4, turn_tokens=6, total_tokens=90)
    view, drawn = played(
        engine, {"function": f"{OWN}:twice"}, extra, limits=limits, asked=asked
    )
    assert asked[0].conversation == asked[1].conversation and [
        request.turn for request in asked
    ] == [0, 1]
    assert extra["heard"] == [Letters().decode(each.token_ids) for each in drawn]
    assert [row.tokens for row in view.conversations()] == [
        each.token_ids for each in drawn
    ]
    assert drawn[0].token_ids != drawn[1].token_ids and len(view.conversations()) == 2


def test_calls_of_the_same_time_are_written_at_once_and_their_order_changes_nothing() -> (
    None
):
    """Helpers and two ways on from one answer; each list comes while the calls of the one before are written."""
    schedules = {
        (1, 2, 2, 1, 1): [["a1", "b1"], ["left", "right"], ["a2"]],
        (1, 1, 2, 1, 1, 1): [["b1"], ["right", "a1"], ["left"], ["a2"]],
        (1, 1, 1, 1, 1, 1, 1): [["a1"], ["right"], ["b1"], ["left"], ["a2"]],
    }
    found = []
    for sizes, schedule in schedules.items():
        engine, asked, limits = Scheduled(schedule), list[Request](), Limits(7, 6, 90)
        extra, options = {"may": engine.may}, {"function": f"{OWN}:parallel"}
        view, _ = played(
            engine, options, extra, limits=limits, asked=asked, calls=engine.calls
        )
        assert (
            tuple(engine.sizes) == sizes
            and view.finish_reason == "stop"
            and view.rewards == [*[0.0] * 6, 0.5]
        )
        found.append(
            (view.conversations(), {(each.turn, each.conversation) for each in asked})
        )
    assert found[0] == found[1] == found[2] and len(found[0][1]) == 7
    rows = found[0][0]
    assert (
        sorted(len(row.spans) for row in rows) in ([1, 1, 2, 3], [1, 2, 2, 2])
        and rows[-1].rewards[-1] == 0.5
    )
    assert [turn for row in rows for turn in row.turns if turn == 6], (
        "the last call is the last turn"
    )
    for row in rows:
        for begin, end in row.spans:
            assert row.tokens[begin:end] == written(
                f"{zlib.crc32(bytes([*row.prompt, *row.tokens[:begin]])) % 1000}$"
            )


def test_a_call_waits_for_others_that_its_program_makes_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megaverl.rollout.environments.gateway.TOGETHER_SECONDS", 60.0)
    engine, options = Scheduled([[]]), {"function": f"{OWN}:fans_out"}
    view, _ = played(engine, options, chat=False, calls=engine.calls)
    assert (
        engine.sizes == [1, 3]
        and view.finish_reason == "stop"
        and len(view.conversations()) == LIMITS.max_turns
    )


def test_calls_that_name_other_models_are_answered_and_do_not_train(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their conversations are no rows, but the one with the last answer; whose reward is paid to what trains."""
    options = {"function": f"{OWN}:judged", "train_models": ["writer"]}
    view, _ = played(Says("one", "no", "two"), options, chat=False)
    [row] = view.conversations()
    assert row.prompt == written("say") and row.tokens == written("one sotwo")
    record = PromptRecord(0, "say", "say", row.prompt, None, {}, "", [])
    batch = episode_batch([record], [view], [0])
    assert batch.response_mask.tolist() == [[True] * 3 + [False] * 6]
    assert (
        batch.turn_rewards.tolist() == [[0.0, 0.0, 0.5, *[0.0] * 6]] and not caplog.text
    )
    view, _ = played(
        Says("one", "no", "two"), {**options, "train_models": ["author"]}, chat=False
    )
    assert not any(view.trained) and len(view.conversations()) == 1
    assert (
        "its calls name the models ['judge', 'writer'], and train_models ['author']"
        in caplog.text
    )


def test_a_program_that_is_told_of_no_room_goes_on_with_less(engine: HFEngine) -> None:
    extra: dict[str, Any] = {"refused": []}
    limits = Limits(max_turns=6, turn_tokens=6, total_tokens=60, prompt_tokens=30)
    view, drawn = played(engine, {"function": f"{OWN}:compacts"}, extra, limits=limits)
    assert extra["refused"] == ["context_length_exceeded"]
    assert view.finish_reason == "stop" and view.rewards == [
        *[0.0] * (len(drawn) - 1),
        0.5,
    ]
    first, second = view.conversations()
    assert len(first.rewards) == 2 and first.own[-1] and len(first.tokens) <= 60
    assert (
        second.prompt == written("<user>so far$\n<assistant>")
        and len(second.rewards) == 1
    )
    extra = {"refused": [], "insists": True}
    view, drawn = played(engine, {"function": f"{OWN}:endless"}, extra, limits=limits)
    assert (
        len(drawn) == 2
        and len(extra["refused"]) >= limits.max_turns
        and view.finish_reason == "stop"
    )
    with pytest.raises(
        EpisodeError, match=r"without a call.* more than data.max_prompt_tokens=5"
    ):
        played(
            engine,
            {"function": f"{OWN}:talk"},
            limits=Limits(4, 6, 90, prompt_tokens=5),
        )


@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
def test_a_refused_call_leaves_no_token_behind(kind: str) -> None:
    """The next call goes on as if the refused one had never come: the policy reads exactly what it was asked."""

    def call(*texts: str) -> Call:
        if kind == COMPLETIONS:
            return Call(kind, {"prompt": "".join(texts)})
        roles = ["user", "assistant", "user", "assistant", "user"]
        said = [
            {"role": role, "content": text}
            for role, text in zip(roles, texts, strict=False)
        ]
        return Call(kind, {"messages": said})

    found = []
    for refused in (True, False):
        held = Conversations(Codec(Letters(), chat=kind == CHAT))
        held.limits = Limits(
            max_turns=4, turn_tokens=6, total_tokens=60, prompt_tokens=40
        )
        begun = held.take(call("hi"))
        assert begun is not None
        one = held.held[begun[0]]
        one.answer(written("ok$"), call("hi"))
        if refused:
            with pytest.raises(CallRefused, match="no room for another turn"):
                held.take(call("hi", "ok", "x" * 80))
        before = one.said, list(one.token_ids)
        found.append((*before, held.take(call("hi", "ok", "go")), one.token_ids))
    assert found[0] == found[1]


def test_a_published_harness_is_trained_as_it_is() -> None:
    """pydantic-ai's own loop: the model's tool call, its answer, and a second run on the messages of the first."""
    pytest.importorskip(
        "pydantic_ai", reason="pip install 'megaverl[agents]' (pydantic-ai)"
    )
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>$'
    extra: dict[str, list[str]] = {"heard": []}
    limits = Limits(max_turns=4, turn_tokens=90, total_tokens=300)
    view, _ = played(
        Says(call, "It is 5.$", "No more.$"),
        {"function": f"{OWN}:harness"},
        extra,
        limits=limits,
    )
    assert extra["heard"] == ["2 + 3", "It is 5.", "No more."] and view.rewards == [
        0.0,
        0.0,
        0.25,
    ]
    assert view.prompt == written("<system>brief$\n<user>say$\n<assistant>")
    own = [token for token, is_own in zip(view.tokens, view.own, strict=True) if is_own]
    assert own == written(f"{call}It is 5.$No more.$")
    between = "\n<tool>5$\n<assistant>", "\n<user>go on$\n<assistant>"
    assert view.tokens == written(f"{call}{between[0]}It is 5.${between[1]}No more.$")


def test_an_agent_that_nobody_here_starts_takes_an_episode_and_ends_it(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "outside": True,
        "port": port,
        "token_env": "GATEWAY_TOKEN",
        "seconds": 60.0,
    }
    with ThreadPoolExecutor() as pool:
        agent = pool.submit(agent_from_outside, f"http://127.0.0.1:{port}")
        view, drawn = played(engine, options, {"more": 1})
        refused, episode, said = agent.result()
    assert refused == [401, 400] and (episode["prompt"], episode["extra"]) == (
        "say",
        {"more": 1},
    )
    assert said == Letters().decode(drawn[0].token_ids) and view.rewards == [0.75]
    with (
        pytest.raises(ConfigError, match="cannot be listened at"),
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ProgramEpisode(
            Codec(Letters(), chat=True), outside=True, port=other.getsockname()[1]
        )


def agent_from_outside(url: str) -> tuple[list[int], Any, str]:
    """What it was refused with, the episode that it got, and the policy's answer."""
    refused, found = [], None

    def ask(where: str, token: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(where, data, {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(call) as answer:
            return json.load(answer)

    while found is None:
        try:
            found = ask(f"{url}/next", "secret" if refused else "another")["episode"]
        except urllib.error.HTTPError as error:
            refused.append(error.code)
        except urllib.error.URLError:  # the run has not come to its first episode
            continue
    message = {"role": "user", "content": found["prompt"]}
    answer = ask(
        f"{found['base_url']}/chat/completions", "secret", {"messages": [message]}
    )
    try:
        ask(f"{found['base_url']}/end", "secret", {"reward": "much"})
    except urllib.error.HTTPError as error:
        refused.append(error.code)
    ask(f"{found['base_url']}/end", "secret", {"reward": 0.75})
    return refused, found, answer["choices"][0]["message"]["content"]


TOOL_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
# What the policy reads after its call, through Anthropic's API and through OpenAI's.
READ_AFTER = {
    "speak_messages": "\n<tool>5$\n<user>go on$\n<assistant>",
    "speak_responses": "\n<tool>5$\n<assistant>",
}


@pytest.mark.parametrize(
    ("function", "by_id", "reasons", "refused"),
    [
        (
            "speak_messages",
            None,
            ("tool_use", "end_turn"),
            ('stop=["x"]', "tool_choice", "a part of the type 'image'"),
        ),
        (
            "speak_responses",
            True,
            ("completed", "completed"),
            ("background=true", "'web_search'", "no response 'resp_0'"),
        ),
        (
            "speak_responses",
            False,
            ("completed", "completed"),
            ("background=true", "'web_search'", "no response 'resp_0'"),
        ),
    ],
)
def test_a_program_may_speak_another_api(
    function: str,
    by_id: bool | None,
    reasons: tuple[str, str],
    refused: tuple[str, ...],
) -> None:
    """Its client's own types make the calls. The turns that were drawn are one conversation, token by token."""
    engine = Says(f"so {TOOL_CALL}$", "done$")
    extra: dict[str, Any] = {"heard": [], "refused": [], "by_id": by_id}
    limits = Limits(4, 90, 900)
    view, drawn = played(
        engine, {"function": f"{OWN}:{function}"}, extra, limits=limits
    )
    text, arguments, reason, said, last = extra["heard"]
    assert (text, said) == ("so", "done") and (reason, last) == reasons
    assert (arguments if isinstance(arguments, dict) else json.loads(arguments)) == {
        "a": 2,
        "b": 3,
    }
    assert len(drawn) == 2 and view.others == [] and view.rewards == [0.0, 0.5]
    assert view.prompt == written("<system>brief$\n<user>say$\n<assistant>")
    assert view.tokens == [
        *drawn[0].token_ids,
        *written(READ_AFTER[function]),
        *drawn[1].token_ids,
    ]
    assert extra.get("counted") == extra.get("read")
    assert len(extra["refused"]) == len(refused)
    for message, part in zip(extra["refused"], refused, strict=True):
        assert part in message


def test_a_conversation_without_room_is_refused_in_the_words_of_its_api() -> None:
    """Anthropic's agents shorten their history if the message says that the prompt is too long."""
    error = DIALECTS["messages"].error("no room.", True)
    assert error["error"]["message"] == "prompt is too long: no room."
    error = DIALECTS["responses"].error("no room.", True)
    assert error["error"]["code"] == "context_length_exceeded"


def test_plain_text(engine: HFEngine) -> None:
    view, drawn = played(engine, {"function": f"{OWN}:complete"}, chat=False)
    assert view.prompt == written("say")
    assert view.tokens == [*drawn[0].token_ids, *written(" so "), *drawn[1].token_ids]


def test_what_is_refused_is_told_and_a_program_that_fails_ends_its_episode(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GATEWAY_TOKEN", "secret")
    extra: dict[str, list[str]] = {"refused": []}
    options = {
        "function": f"{OWN}:wrong",
        "token_env": "GATEWAY_TOKEN",
        "error_reward": -1.0,
    }
    view, _ = played(engine, options, extra)
    found = (
        "n=2",
        'stop=["x"]',
        "logprobs=true",
        "messages is not",
        "no such episode",
        "another token",
    )
    assert len(extra["refused"]) == len(found)
    for message, part in zip(extra["refused"], found, strict=True):
        assert part in message
    assert view.rewards == [-1.0] and 'KeyError: "the program\'s own"' in caplog.text


@pytest.mark.parametrize(
    ("token", "expected"),
    [("wrong", b"401"), ("secret", b"400")],
)
def test_a_body_that_is_not_wanted_is_not_waited_for(
    token: str, expected: bytes
) -> None:
    """A stranger's, and one that is too long: answered from the headers alone, and the connection is closed."""
    server = GatewayServer("127.0.0.1", 0, "secret")
    try:
        with socket.create_connection(server.server_address[:2], timeout=20) as link:
            link.sendall(
                b"POST /key/v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
                b"Authorization: Bearer " + token.encode() + b"\r\n"
                b"Content-Length: 1000000000\r\n\r\n"
            )
            answer = b""
            while received := link.recv(4096):
                answer += received
    finally:
        server.shutdown()
        server.server_close()
    assert answer.split()[1] == expected


def test_a_program_that_fails_is_no_fault_of_the_policy(engine: HFEngine) -> None:
    """Its episode is tried again, unless its policy had no room left for what it wrote."""
    with pytest.raises(EnvironmentFault, match='KeyError: "the program\'s own"'):
        played(engine, {"function": f"{OWN}:breaks"}, {"after": "a call"})
    with pytest.raises(EnvironmentFault, match="without a call.*the program's own"):
        played(engine, {"function": f"{OWN}:breaks"}, {"after": "nothing"})
    view, _ = played(
        engine,
        {"function": f"{OWN}:breaks"},
        {"after": "a call without room"},
        limits=Limits(3, 6, 11),
    )
    assert view.rewards == [0.0] and view.finish_reason == "stop"


def test_whatever_a_program_sends_is_refused_or_cleaned_and_its_episode_goes_on() -> (
    None
):
    extra: dict[str, list[str]] = {"refused": []}
    view, drawn = played(Says("yes$"), {"function": f"{OWN}:hostile"}, extra)
    *refused, heard = extra["refused"]
    parts = (
        "a part of a message has no text",
        "has no text",
        "is int",
        "nested more than 100 deep",
        "NaN",
        "cannot be read",
    )
    assert len(refused) == len(parts)
    assert [
        message
        for message, part in zip(refused, parts, strict=True)
        if part not in message
    ] == []
    assert view.rewards == [0.5] and len(drawn) == 1 and heard
    assert "half \ufffd and \ufffd" in Letters().decode(view.prompt)


@pytest.mark.parametrize("reward", [float("nan"), 10**400, "much", "exit"])
def test_a_reward_that_is_no_number_is_a_failure_of_its_episode(
    engine: HFEngine, reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"function": f"{OWN}:not_a_reward", "error_reward": -1.0}
    view, _ = played(engine, options, {"reward": reward}, chat=False)
    assert view.rewards == [-1.0] and "Its episode ends with reward -1" in caplog.text


def test_an_episode_without_turns_left_ends_and_its_program_hears_of_it(
    engine: HFEngine,
) -> None:
    extra: dict[str, list[str]] = {"refused": []}
    view, drawn = played(
        engine, {"function": f"{OWN}:endless"}, extra, limits=Limits(2, 6, 90)
    )
    assert view.finish_reason == "turns" and len(drawn) == 2


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
    with pytest.raises(
        EpisodeError, match=r"without a call.* it ended with 3: no reason"
    ):
        played(
            engine,
            {
                "command": [
                    sys.executable,
                    "-c",
                    "import sys; print('no reason', file=sys.stderr); sys.exit(3)",
                ]
            },
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "name a program"),
        ({"command": "agent"}, "command is a list"),
        ({"outside": True}, "needs a port"),
        ({"outside": True, "function": "a:b", "port": 1}, "name a program"),
        ({"outside": True, "port": 70000}, "is no port"),
        ({"function": "agent"}, "write it as module:function"),
        (
            {"command": ["agent"], "train_models": "writer"},
            "list the values of `model`",
        ),
        ({"command": ["agent"], "host": "0.0.0.0"}, "is not the loopback"),
        ({"command": ["agent"], "host": "everywhere"}, "no address of an interface"),
        (
            {"command": ["agent"], "token_env": "NO_SUCH_TOKEN"},
            "no variable NO_SUCH_TOKEN",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_options("gateway", options)


def test_calls_that_name_their_episode_come_to_it_at_any_gateway_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (GatewayServer("127.0.0.1", 0, None) for _ in range(2))
    ports = {first.server_address[1], second.server_address[1]}
    for server in (first, second):
        monkeypatch.setattr(server, "ports_of_node", ports)
    monkeypatch.setattr(GatewayServer, "shared", lambda *_: first)
    extra: dict[str, Any] = {"heard": [], "doors": [second.server_address[1]]}
    view, drawn = played(
        Says("one$", "two$"), {"function": f"{OWN}:by_name"}, extra, chat=True
    )
    assert extra["heard"] == ["one", "two", 404, 404, 404, 404]
    assert len(drawn) == 2 and sum(view.rewards) == 0.5
    for server in (first, second):
        server.shutdown()
        server.server_close()
