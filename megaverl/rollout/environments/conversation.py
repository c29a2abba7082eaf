"""Conversations between a program and the policy: OpenAI API calls to token ids, and token ids to answers.

Tokens that were drawn are kept. When a program sends earlier answers back, they are
compared as text with the stored ones and never tokenised again; only new text is. A
call that does not continue any answer begins a new conversation.
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
MODEL = "policy"  # the model's name in answers; calls may use any name
# Syntax of Qwen and Hermes models.
TOOL_CALL = r"<tool_call>\s*(\{.*?\})\s*</tool_call>"
# Fields of a call that could change what is drawn, with the values that are allowed
# because they do not.
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
# Sampling fields of a call, which the run's own settings override.
OVERRULED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "seed",
)


class CallRefused(Exception):
    """Raised for a call that cannot be answered; the message is sent to the program."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Call:
    """One request of a program.

    Attributes:
        kind: CHAT or COMPLETIONS.
        seen: number of answers that its program had received before it.
        repeats: whether its client says that it has sent the call before.
        answer: resolves to the JSON answer, or raises CallRefused.
    """

    kind: str
    body: Mapping[str, Any]
    seen: int = 0
    repeats: bool = False
    answer: Future[dict[str, Any]] = field(default_factory=Future)


def as_stream(answer: Mapping[str, Any]) -> str:
    """Format an answer as server-sent events. The answer is already complete, so it is sent in one piece."""
    [choice] = answer["choices"]
    piece = {name: value for name, value in choice.items() if name != "message"} | {
        "finish_reason": None
    }
    if "message" in choice:
        calls = [
            {"index": place, **call}
            for place, call in enumerate(choice["message"].get("tool_calls") or ())
        ]
        piece["delta"] = {
            **choice["message"],
            **({"tool_calls": calls} if calls else {}),
        }
    rest: dict[str, Any] = {"delta": {}} if "message" in choice else {"text": ""}
    last = {"index": 0, "finish_reason": choice["finish_reason"], **rest}
    kind = "chat.completion.chunk" if "message" in choice else "text_completion"
    parts = [
        {**answer, "object": kind, "choices": [streamed]} for streamed in (piece, last)
    ]
    return (
        "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    )


_warned: set[str] = set()


def checked(body: Any) -> Mapping[str, Any]:
    """Return the fields of a call.

    Raises:
        CallRefused: the fields ask for something else than the policy's own draws.
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
    """One conversation of a program with the policy: the messages of a chat, or one text.

    Attributes:
        said: messages or text so far, as the program sends them.
        token_ids: tokens of all of it, as the policy reads them.
        turns: for each turn of the policy: number of messages (or characters) up to its end, its first token, and the
            token after it.
        prompt_size: tokens that the conversation began with.
        calls: number of messages (or characters) at each call, and the call.
        waits: whether the last call has no answer yet.
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
        """Start with the program's first call.

        Raises:
            CallRefused: the policy cannot answer such a conversation.
        """
        if call.kind == CHAT and not self.codec.chat:
            raise CallRefused(
                "the policy's tokenizer has no chat template (or data.chat_template=none): use completions."
            )
        self.said = _said(call)
        if isinstance(self.said, str):
            rendered = self.said
        elif self.said[-1]["role"] == "assistant":
            raise CallRefused(
                "the last message is the assistant's: there is nothing to answer."
            )
        else:
            rendered = self._rendered(self.said, call)
        self.token_ids = self.codec.tokenizer.encode(rendered)
        if not self.token_ids:
            raise CallRefused("the prompt is empty.")

    def _rendered(self, messages: Sequence[dict[str, Any]], call: Call) -> str:
        try:
            return self.codec.tokenizer.render_chat(
                messages, where="a program's call", tools=call.body.get("tools")
            )
        except DataError as error:
            raise CallRefused(str(error)) from error

    @property
    def turn(self) -> list[int]:
        """Tokens of the policy's last turn."""
        return (
            self.token_ids[self.turns[-1][1] : self.turns[-1][2]] if self.turns else []
        )

    def first(self, call: Call) -> Call | None:
        """Return the earlier call that this one repeats, answered or not."""
        said_so_far = _said(call)
        same = (
            conversation
            for size, conversation in self.calls
            if call.kind == self.kind and said_so_far == self.said[:size]
        )
        return next(same, None)

    def go_on(self, call: Call) -> list[int] | None:
        """Continue with a call and return the new tokens after the policy's turn.

        Returns:
            None if the call does not continue what was said, or if another call already does.

        Raises:
            CallRefused: the chat template refuses the new messages.
        """
        said_so_far, known = _said(call), len(self.said)
        new = said_so_far[known:]
        if (
            self.waits
            or call.kind != self.kind
            or said_so_far[:known] != self.said
            or not (new and self.turns)
        ):
            return None
        if isinstance(new, str):
            tokens = self.codec.encode(new)
        elif any(message["role"] == "assistant" for message in new):
            return None
        else:
            try:
                tokens = self.codec.answers(new, self.turn)
            except DataError as error:
                raise CallRefused(str(error)) from error
        self.said = said_so_far
        self.token_ids += tokens
        return tokens

    def branch(self, call: Call) -> Conversation | None:
        """Return a new conversation that continues an earlier turn of this one, with the same tokens up to there."""
        for count in range(len(self.turns), 0, -1):
            branch = Conversation(self.codec, self.kind)
            branch.turns = self.turns[:count]
            num_messages, _, end = branch.turns[-1]
            branch.said, branch.token_ids = (
                self.said[:num_messages],
                self.token_ids[:end],
            )
            if branch.go_on(call) is not None:
                return branch
        return None

    def take(self, call: Call) -> None:
        """Record a call that continues the conversation and waits for its answer."""
        self.calls.append((len(self.said), call))
        self.waits = True

    def answer(self, turn: Sequence[int], call: Call) -> dict[str, Any]:
        """Append the policy's turn and return the answer for the program."""
        text, ended = (
            self.codec.decode(turn),
            bool(turn) and turn[-1] in self.codec.tokenizer.stop_token_ids,
        )
        reason = "stop" if ended else "length"
        used = {"prompt_tokens": len(self.token_ids), "completion_tokens": len(turn)}
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if isinstance(self.said, list):
            # A chat template may show the ids of tool calls to the policy, so they must
            # not be random.
            name = digest(self.token_ids)
            message = assistant_message(text, call.body, name)
            if "tool_calls" in message:
                reason = "tool_calls"
            self.said = [*self.said, _plain(message)]
            choice["message"] = message
        else:
            self.said += text
            choice["text"] = text
        begin = len(self.token_ids)
        self.turns.append((len(self.said), begin, begin + len(turn)))
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
    """All conversations of one program in an episode. A program may drop earlier
    messages, or ask something else in between.

    Attributes:
        limits: limits of the run. A call beyond them is refused, so that its program may continue with less.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.limits: Limits | None = None
        self.held: list[Conversation] = []

    def take(self, call: Call) -> tuple[int, list[int]] | None:
        """Assign a call to a conversation: the longest one that it continues, or a new one.

        Returns:
            (index of the conversation, new tokens in it), with all tokens if the conversation is new. None if the call
            was sent again after a lost connection; it then gets the same answer.

        Raises:
            CallRefused: the call cannot be answered.
        """
        if call.repeats:
            for conversation in self.held:
                first = conversation.first(call)
                if first:
                    # The first call may still be waiting for its turn, so its answer is
                    # passed on once it is there.
                    first.answer.add_done_callback(
                        lambda done: _pass_on(done, call.answer)
                    )
                    return None
        longest = sorted(
            range(len(self.held)), key=lambda number: -len(self.held[number].said)
        )
        for number in longest:
            candidate = self.held[number]
            num_messages, size = candidate.said, len(candidate.token_ids)
            if (tokens := candidate.go_on(call)) is not None:
                if problem := self._without_room(candidate):
                    candidate.said, candidate.token_ids = (
                        num_messages,
                        candidate.token_ids[:size],
                    )
                    raise CallRefused(problem, 413)
                candidate.take(call)
                return number, tokens
        # No conversation ends where the call goes on, so it may continue an earlier
        # turn of one, or begin a new one.
        branches = (self.held[number].branch(call) for number in longest)
        chosen = max(
            (branch for branch in branches if branch is not None),
            key=lambda branch: branch.turns[-1],
            default=None,
        )
        if chosen is None:
            chosen = Conversation(self.codec, call.kind)
            chosen.begin(call)
        chosen.prompt_size = len(chosen.token_ids)
        if problem := self._without_room(chosen):
            raise CallRefused(problem, 413)
        chosen.take(call)
        self.held.append(chosen)
        return len(self.held) - 1, chosen.token_ids

    def _without_room(self, conversation: Conversation) -> str:
        """Return why the policy has no room to write in a conversation; "" if it has."""
        if (limits := self.limits) is None:
            return ""
        if (
            limits.prompt_tokens is not None
            and conversation.prompt_size > limits.prompt_tokens
        ):
            return (
                f"this prompt has {conversation.prompt_size} tokens, more than "
                f"data.max_prompt_tokens={limits.prompt_tokens}."
            )
        read = len(conversation.token_ids) - conversation.prompt_size
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


def assistant_message(text: str, body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the policy's answer as a message, with the tool calls that are written in it.

    Args:
        body: the call that is answered, which offers tools or not.
        name: makes the ids of tool calls unique.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    offers_tools = body.get("tools") and body.get("tool_choice") != "none"
    if offers_tools and (calls := _tool_calls(text, name)):
        content = re.sub(TOOL_CALL, "", text, flags=re.DOTALL).strip()
        message |= {"content": content or None, "tool_calls": calls}
    return message


def _tool_calls(text: str, name: str) -> list[dict[str, Any]]:
    """Parse the tool calls in a text, with ids derived from `name`; empty if one of them cannot be parsed."""
    calls = []
    for place, written in enumerate(re.findall(TOOL_CALL, text, re.DOTALL)):
        try:
            call = read_json(written)
            function = {
                "name": str(call["name"]),
                "arguments": json.dumps(call.get("arguments", {})),
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        calls.append(
            {"id": f"call_{place}_{name}", "type": "function", "function": function}
        )
    return calls


def _said(call: Call) -> list[dict[str, Any]] | str:
    return plain_messages(call.body) if call.kind == CHAT else _text(call)


def plain_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat call in a normal form.

    Raises:
        CallRefused: they are not messages of text.
    """
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise CallRefused("messages is not a list of messages.")
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty fields of a message, so that a message that is sent back compares equal."""
    content = message.get("content")
    if isinstance(content, list):
        if any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            raise CallRefused("messages are of text here, and one has another part.")
        if any(not isinstance(part.get("text"), str) for part in content):
            raise CallRefused(
                'a part of a message has no text: write it as {"type": "text", "text": "..."}.'
            )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise CallRefused(
            f"the content of a message is {type(content).__name__}; write a text, or a list of parts."
        )
    role = "system" if message.get("role") == "developer" else str(message.get("role"))
    kept = {
        name: message[name]
        for name in ("tool_calls", "tool_call_id", "name")
        if message.get(name)
    }
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_plain_call(call) for call in kept["tool_calls"]]
    return {"role": role, "content": content or "", **kept}


def _plain_call(call: Any) -> Any:
    """Normalise a tool call's JSON arguments, since programs parse and rewrite them."""
    try:
        function = {
            **call["function"],
            "arguments": json.dumps(read_json(call["function"]["arguments"])),
        }
    except (ValueError, KeyError, TypeError):
        return call
    return {**call, "function": function}


def _text(call: Call) -> str:
    prompt = call.body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        [prompt] = prompt
    if not isinstance(prompt, str):
        raise CallRefused(
            "prompt is not one text: a text is a completion, and its answer is one sample."
        )
    return prompt
