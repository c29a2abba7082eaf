"""What a program and the policy say to each other: calls of OpenAI's API to token ids, and token ids to answers.

Tokens that were drawn are kept: what a program sends back of earlier answers is compared with them, never tokenised;
only what comes new between two answers is. A call that goes on from no answer begins a conversation of its own.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megaverl.errors import DataError
from megaverl.outside import read_json
from megaverl.rollout.environments import digest
from megaverl.rollout.environments.environment import Codec, Limits

logger = logging.getLogger(__name__)

CHAT, COMPLETIONS = "chat/completions", "completions"
MODEL = "policy"  # whatever a program calls it
TOOL_CALL = r"<tool_call>\s*(\{.*?\})\s*</tool_call>"  # as Qwen and Hermes models write it
# Fields of a call that would change what is drawn, with the values that do not.
KEPT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stop": (None, [], ""),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
# Fields that say how to draw: the run's own go before them.
OVERRULED = ("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed")


class CallRefused(Exception):
    """A call that cannot be answered; says why, to its program."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Call:
    """One request of a program.

    Attributes:
        kind: CHAT or COMPLETIONS.
        seen: how many calls its program had had an answer to.
        repeats: its client says that it has sent it before.
        answer: the JSON that it is answered with; a CallRefused.
    """

    kind: str
    body: Mapping[str, Any]
    seen: int = 0
    repeats: bool = False
    answer: Future[dict[str, Any]] = field(default_factory=Future)


def as_stream(answer: Mapping[str, Any]) -> str:
    """An answer as server-sent events: it is whole before it is sent, so there is one piece."""
    [choice] = answer["choices"]
    piece = {name: value for name, value in choice.items() if name != "message"} | {"finish_reason": None}
    if "message" in choice:
        calls = [{"index": place, **call} for place, call in enumerate(choice["message"].get("tool_calls") or ())]
        piece["delta"] = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    rest: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    last = {"index": 0, "finish_reason": choice["finish_reason"], **rest}
    kind = "chat.completion.chunk" if "message" in choice else "text_completion"
    parts = [{**answer, "object": kind, "choices": [each]} for each in (piece, last)]
    return "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"


_warned: set[str] = set()


def checked(body: Any) -> Mapping[str, Any]:
    """A call's fields.

    Raises:
        CallRefused: one that would be answered with other tokens than the policy draws.
    """
    if not isinstance(body, dict):
        raise CallRefused("a call is a JSON object.")
    for name, allowed in KEPT.items():
        if body.get(name) not in allowed:
            raise CallRefused(
                f"{name}={json.dumps(body[name])[:80]} is not possible here: the policy's own draws are trained on, "
                "whole and as they come (rollout.sampling of the run says how they are drawn)."
            )
    for name in OVERRULED:
        if body.get(name) is not None and name not in _warned:
            _warned.add(name)
            logger.warning(
                "environment 'gateway': a program asks for %s=%s; the run draws as rollout.sampling and "
                "environment.max_turn_tokens say.", name, body[name],
            )  # fmt: skip
    return body


class Conversation:
    """What one program and the policy have said, as a program sends it: the messages of a chat, or one text.

    Attributes:
        token_ids: of all of it, as the policy reads it.
        turns: of each turn of the policy: messages (or characters) with it; its first token, and the one after it.
        prompt_size: tokens that it began with.
        calls: those that went on with it, and how many messages (or characters) there were with each.
        waits: the last of them has no answer yet.
    """

    def __init__(self, codec: Codec, kind: str) -> None:
        self.codec, self.kind = codec, kind
        self.said: list[dict[str, Any]] | str = [] if kind == CHAT else ""
        self.token_ids: list[int] = []
        self.turns: list[tuple[int, int, int]] = []
        self.calls: list[tuple[int, Call]] = []
        self.waits = False
        self.prompt_size = 0

    def begin(self, call: Call) -> None:
        """The program's first call.

        Raises:
            CallRefused: no conversation that the policy could answer.
        """
        if call.kind == CHAT and not self.codec.chat:
            raise CallRefused(
                "the policy's tokenizer has no chat template (or data.chat_template=none): use completions."
            )
        self.said = _said(call)
        if isinstance(self.said, str):
            rendered = self.said
        elif self.said[-1]["role"] == "assistant":
            raise CallRefused("the last message is the assistant's: there is nothing to answer.")
        else:
            rendered = self._rendered(self.said, call)
        self.token_ids = self.codec.tokenizer.encode(rendered)
        if not self.token_ids:
            raise CallRefused("the prompt is empty.")

    def _rendered(self, messages: Sequence[dict[str, Any]], call: Call) -> str:
        try:
            return self.codec.tokenizer.render_chat(messages, where="a program's call", tools=call.body.get("tools"))
        except DataError as error:
            raise CallRefused(str(error)) from error

    @property
    def turn(self) -> list[int]:
        """The policy's last one."""
        return self.token_ids[self.turns[-1][1] : self.turns[-1][2]] if self.turns else []

    def first(self, call: Call) -> Call | None:
        """The call that this one repeats, answered or not."""
        given = _said(call)
        same = (one for size, one in self.calls if call.kind == self.kind and given == self.said[:size])
        return next(same, None)

    def go_on(self, call: Call) -> list[int] | None:
        """The tokens that come new after the policy's turn; None: the call does not go on from what was said, or
        another does already.

        Raises:
            CallRefused: it does, with messages that the chat template refuses.
        """
        given, known = _said(call), len(self.said)
        new = given[known:]
        if self.waits or call.kind != self.kind or given[:known] != self.said or not (new and self.turns):
            return None
        if isinstance(new, str):
            tokens = self.codec.encode(new)
        elif any(each["role"] == "assistant" for each in new):
            return None
        else:
            try:
                tokens = self.codec.answers(new, self.turn)
            except DataError as error:
                raise CallRefused(str(error)) from error
        self.said = given
        self.token_ids += tokens
        return tokens

    def branch(self, call: Call) -> Conversation | None:
        """Another conversation that goes on after an earlier turn of this one, with the same tokens up to there."""
        for count in range(len(self.turns), 0, -1):
            other = Conversation(self.codec, self.kind)
            other.turns = self.turns[:count]
            said, _, end = other.turns[-1]
            other.said, other.token_ids = self.said[:said], self.token_ids[:end]
            if other.go_on(call) is not None:
                return other
        return None

    def take(self, call: Call) -> None:
        """It goes on with it, and waits for its answer."""
        self.calls.append((len(self.said), call))
        self.waits = True

    def answer(self, turn: Sequence[int], call: Call) -> dict[str, Any]:
        """What the program gets for the policy's turn."""
        text, ended = self.codec.decode(turn), bool(turn) and turn[-1] in self.codec.tokenizer.stop_token_ids
        reason = "stop" if ended else "length"
        used = {"prompt_tokens": len(self.token_ids), "completion_tokens": len(turn)}
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if isinstance(self.said, list):
            name = digest(self.token_ids)  # a chat template may show it to the policy, so it is no random one
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if call.body.get("tools") and call.body.get("tool_choice") != "none" and (calls := _tool_calls(text, name)):
                content = re.sub(TOOL_CALL, "", text, flags=re.DOTALL).strip()
                message |= {"content": content or None, "tool_calls": calls}
                reason = "tool_calls"
            self.said = [*self.said, _plain(message)]
            choice["message"] = message
        else:
            self.said += text
            choice["text"] = text
        self.turns.append((len(self.said), len(self.token_ids), len(self.token_ids) + len(turn)))
        self.token_ids += turn
        self.waits = False
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "chat.completion" if self.kind == CHAT else "text_completion",
            "created": int(time.time()),
            "model": str(call.body.get("model") or MODEL),
            "choices": [{**choice, "finish_reason": reason}],
            "usage": {**used, "total_tokens": sum(used.values())},
        }


class Conversations:
    """All that one program and the policy hold in an episode: it may leave out what was said, or ask something else in
    between.

    Attributes:
        limits: a call that goes beyond is refused, so that its program may go on with less.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.limits: Limits | None = None
        self.held: list[Conversation] = []

    def take(self, call: Call) -> tuple[int, list[int]] | None:
        """The number of the conversation that a call goes on with, the longest that it can be and none that waits for
        an answer, and the tokens that come new in it; all of one that it begins. None: a call that is sent again after
        a lost connection, and gets the same answer.

        Raises:
            CallRefused: it cannot be answered.
        """
        if call.repeats and (repeated := next((first for one in self.held if (first := one.first(call))), None)):
            repeated.answer.add_done_callback(lambda done: _pass_on(done, call.answer))
            return None
        longest = sorted(range(len(self.held)), key=lambda number: -len(self.held[number].said))
        for number in longest:
            one = self.held[number]
            said, size = one.said, len(one.token_ids)
            if (tokens := one.go_on(call)) is not None:
                if problem := self._without_room(one):
                    one.said, one.token_ids = said, one.token_ids[:size]
                    raise CallRefused(problem, 413)
                one.take(call)
                return number, tokens
        branches = (self.held[number].branch(call) for number in longest)
        found = max((each for each in branches if each is not None), key=lambda each: each.turns[-1], default=None)
        if found is None:
            found = Conversation(self.codec, call.kind)
            found.begin(call)
        found.prompt_size = len(found.token_ids)
        if problem := self._without_room(found):
            raise CallRefused(problem, 413)
        found.take(call)
        self.held.append(found)
        return len(self.held) - 1, found.token_ids

    def _without_room(self, one: Conversation) -> str:
        """Why the policy cannot write in it; "" where it can."""
        if (limits := self.limits) is None:
            return ""
        if limits.prompt_tokens is not None and one.prompt_size > limits.prompt_tokens:
            return f"this prompt has {one.prompt_size} tokens, more than data.max_prompt_tokens={limits.prompt_tokens}."
        read = len(one.token_ids) - one.prompt_size
        if read + limits.turn_tokens <= limits.total_tokens:
            return ""
        return (
            f"this conversation has {read} tokens after its first prompt, and no room for another turn "
            f"(rollout.sampling.max_tokens={limits.total_tokens}). Go on with a shorter one, or end the episode."
        )


def _pass_on(done: Future[dict[str, Any]], to: Future[dict[str, Any]]) -> None:
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def _tool_calls(text: str, name: str) -> list[dict[str, Any]]:
    """Those that a text is, with ids of this name; what cannot be read stays text."""
    found = []
    for place, written in enumerate(re.findall(TOOL_CALL, text, re.DOTALL)):
        try:
            call = read_json(written)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        found.append({"id": f"call_{place}_{name}", "type": "function", "function": function})
    return found


def _said(call: Call) -> list[dict[str, Any]] | str:
    return _messages(call) if call.kind == CHAT else _text(call)


def _messages(call: Call) -> list[dict[str, Any]]:
    messages = call.body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise CallRefused("messages is not a list of messages.")
    return [_plain(each) for each in messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what says nothing, so that what comes back compares equal."""
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise CallRefused("messages are of text here, and one has another part.")
        if any(not isinstance(part.get("text"), str) for part in content):
            raise CallRefused('a part of a message has no text: write it as {"type": "text", "text": "..."}.')
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise CallRefused(f"the content of a message is {type(content).__name__}; write a text, or a list of parts.")
    role = "system" if message.get("role") == "developer" else str(message.get("role"))
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id", "name") if message.get(name)}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_plain_call(each) for each in kept["tool_calls"]]
    return {"role": role, "content": content or "", **kept}


def _plain_call(call: Any) -> Any:
    """A tool call whose arguments are written in one way: programs read them and write them anew."""
    try:
        function = {**call["function"], "arguments": json.dumps(read_json(call["function"]["arguments"]))}
    except (ValueError, KeyError, TypeError):
        return call
    return {**call, "function": function}


def _text(call: Call) -> str:
    prompt = call.body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str):
        raise CallRefused("prompt is not one text: a text is a completion, and its answer is one sample.")
    return prompt
