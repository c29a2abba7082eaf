"""What a program and the policy say to each other: calls of OpenAI's API to token ids, and token ids to answers.

Tokens that were drawn are kept: what a program sends back of earlier answers is compared with them, never tokenised;
only what comes new between two answers is.
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
from megaverl.rollout.environments.environment import Codec

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
        answer: the JSON that it is answered with; a CallRefused.
    """

    kind: str
    body: Mapping[str, Any]
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
    """What one program and the policy have said, as a program sends it: the messages of a chat, or one text."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.kind = ""
        self.messages: list[dict[str, Any]] = []
        self.text = ""
        self.num_tokens = 0

    def begin(self, call: Call) -> list[int]:
        """The prompt's tokens.

        Raises:
            CallRefused: no conversation that the policy could answer.
        """
        self.kind = call.kind
        if call.kind == CHAT:
            if not self.codec.chat:
                raise CallRefused(
                    "the policy's tokenizer has no chat template (or data.chat_template=none): use completions."
                )
            self.messages = _messages(call)
            if self.messages[-1]["role"] == "assistant":
                raise CallRefused("the last message is the assistant's: there is nothing to answer.")
            rendered = self._rendered(self.messages, call)
            tokens = self.codec.tokenizer.encode(rendered)
        else:
            self.text = _text(call)
            tokens = self.codec.tokenizer.encode(self.text)
        self.num_tokens = len(tokens)
        if not tokens:
            raise CallRefused("the prompt is empty.")
        return tokens

    def _rendered(self, messages: Sequence[dict[str, Any]], call: Call) -> str:
        try:
            return self.codec.tokenizer.render_chat(messages, where="a program's call", tools=call.body.get("tools"))
        except DataError as error:
            raise CallRefused(str(error)) from error

    def go_on(self, call: Call, turn: Sequence[int]) -> list[int] | None:
        """The tokens that come new after the policy's `turn`; None: the same call as before, sent again.

        Raises:
            CallRefused: it does not go on from what was said.
        """
        if call.kind != self.kind:
            raise CallRefused(f"this episode's calls are {self.kind}.")
        if call.kind == CHAT:
            given, known = _messages(call), len(self.messages)
            if given == self.messages[:-1]:
                return None
            new = given[known:]
            if given[:known] != self.messages or not new or any(each["role"] == "assistant" for each in new):
                raise CallRefused(
                    "this call does not go on from the episode's conversation, which is one sample: send all messages "
                    "so far as they were, and new ones after them. Another conversation needs an episode of its own."
                )
            try:
                tokens = self.codec.answers(new, turn)
            except DataError as error:
                raise CallRefused(str(error)) from error
            self.messages += new
        else:
            given_text = _text(call)
            before = self.text[: len(self.text) - len(self.codec.decode(turn))]
            if given_text == before:
                return None
            if not given_text.startswith(self.text) or given_text == self.text:
                raise CallRefused(
                    "this call's prompt does not go on from the episode's text, which is one sample: send the last "
                    "prompt with its answer as they were, and new text after them."
                )
            tokens = self.codec.encode(given_text[len(self.text) :])
            self.text = given_text
        self.num_tokens += len(tokens)
        return tokens

    def answer(self, turn: Sequence[int], call: Call) -> dict[str, Any]:
        """What the program gets for the policy's turn."""
        text, ended = self.codec.decode(turn), bool(turn) and turn[-1] in self.codec.tokenizer.stop_token_ids
        reason = "stop" if ended else "length"
        used = {"prompt_tokens": self.num_tokens, "completion_tokens": len(turn)}
        self.num_tokens += len(turn)
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        if self.kind == CHAT:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if call.body.get("tools") and call.body.get("tool_choice") != "none" and (calls := _tool_calls(text)):
                content = re.sub(TOOL_CALL, "", text, flags=re.DOTALL).strip()
                message |= {"content": content or None, "tool_calls": calls}
                reason = "tool_calls"
            self.messages.append(_plain(message))
            choice["message"] = message
        else:
            self.text += text
            choice["text"] = text
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "chat.completion" if self.kind == CHAT else "text_completion",
            "created": int(time.time()),
            "model": str(call.body.get("model") or MODEL),
            "choices": [{**choice, "finish_reason": reason}],
            "usage": {**used, "total_tokens": sum(used.values())},
        }


def _tool_calls(text: str) -> list[dict[str, Any]]:
    """Those that a text is; what cannot be read stays text."""
    found = []
    for place, written in enumerate(re.findall(TOOL_CALL, text, re.DOTALL)):
        try:
            call = json.loads(written)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            return []
        found.append({"id": f"call_{place}_{secrets.token_hex(4)}", "type": "function", "function": function})
    return found


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
        content = "".join(part["text"] for part in content)
    role = "system" if message.get("role") == "developer" else str(message.get("role"))
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id", "name") if message.get(name)}
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_plain_call(each) for each in kept["tool_calls"]]
    return {"role": role, "content": content or "", **kept}


def _plain_call(call: Any) -> Any:
    """A tool call whose arguments are written in one way: programs read them and write them anew."""
    try:
        function = {**call["function"], "arguments": json.dumps(json.loads(call["function"]["arguments"]))}
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
