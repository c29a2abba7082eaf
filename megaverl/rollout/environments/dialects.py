"""APIs that a program may speak with the gateway, and their translation to chat completions.

    path of a call            API                       client
    chat/completions          OpenAI, chat              openai: client.chat.completions
    completions               OpenAI, text              openai: client.completions
    responses                 OpenAI, responses         openai: client.responses
    messages                  Anthropic, messages       anthropic: client.messages

A conversation is kept as the messages of a chat, whatever API its program speaks, so
that a program which sends earlier answers back continues the tokens that were drawn.
Parts of a call that cannot change what the policy reads or draws, such as cache marks
and budgets of thinking, are ignored. Parts that would are refused.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.outside import read_json
from megaverl.rollout.environments.conversation import (
    CHAT,
    COMPLETIONS,
    CallRefused,
    as_stream,
)

RESPONSES, MESSAGES = "responses", "messages"
COUNT_TOKENS = "messages/count_tokens"
Json = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """Translation between one API and the calls and answers of chat completions.

    Attributes:
        kind: what a call becomes, CHAT or COMPLETIONS.
        read: body of a call -> body of the completion. Raises CallRefused.
        write: (answer of the completion, body of the call) -> answer.
        stream: answer -> the same as server-sent events.
        error: (message, whether the conversation is too long) -> body of a refusal.
    """

    kind: str
    read: Callable[[Json], Json]
    write: Callable[[Json, Json], Json]
    stream: Callable[[Json], str]
    error: Callable[[str, bool], Json]


def _openai_error(message: str, is_too_long: bool) -> Json:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "code": "context_length_exceeded" if is_too_long else None,
            "param": None,
        }
    }


def _anthropic_error(message: str, is_too_long: bool) -> Json:
    # Clients look for this text to tell a full conversation from another mistake.
    text = f"prompt is too long: {message}" if is_too_long else message
    return {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": text},
    }


def _unchanged(answer: Json, body: Json) -> Json:
    return answer


def text_of(content: Any, kinds: Sequence[str], where: str) -> str:
    """Return the text of a content that is a text or a list of parts of these kinds.

    Raises:
        CallRefused: a part is of another kind, or has no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallRefused(f"{where}: write a text, or a list of parts.")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            type_name = part.get("type") if isinstance(part, dict) else part
            raise CallRefused(
                f"{where} has a part of the type {type_name!r:.60}; the policy reads {', '.join(kinds)}."
            )
        if not isinstance(part.get("text"), str):
            raise CallRefused(
                f'{where} has a part without text: write it as {{"type": "text", "text": "..."}}.'
            )
    return "".join(part["text"] for part in content)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _function(name: Any, description: Any, parameters: Any) -> Json:
    """Return a tool as chat completions describe it."""
    function: Json = {"name": name, "parameters": parameters or {}}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def _call(call_id: Any, name: Any, arguments: str) -> Json:
    """Return a call of a tool as chat completions describe it."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


# Anthropic: messages.


def read_messages(body: Json) -> Json:
    """Return the chat completion that a call of Anthropic's messages API asks for.

    Raises:
        CallRefused: the call has content that the policy cannot read, or asks for other draws than the policy's own.
    """
    if not _is_list_of_objects(body.get("messages")) or not body["messages"]:
        raise CallRefused("messages is not a list of messages.")
    messages: list[Json] = []
    if body.get("system"):
        system = text_of(body["system"], ("text",), "system")
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _chat_messages_of(message)
    chat: Json = {
        name: body[name]
        for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
        if name in body
    }
    chat["messages"] = messages
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("output_config") or body.get("output_format"):
        chat["response_format"] = body.get("output_config") or body["output_format"]
    choice = body.get("tool_choice")
    if choice is not None:
        kind = choice.get("type") if isinstance(choice, dict) else choice
        chat["tool_choice"] = kind if kind in ("auto", "none") else choice
    if body.get("tools"):
        if not _is_list_of_objects(body["tools"]):
            raise CallRefused("tools is not a list of tools.")
        for tool in body["tools"]:
            if not isinstance(tool.get("input_schema"), dict):
                raise CallRefused(
                    f"the tool {tool.get('name')!r:.60} has no input_schema; the policy knows tools by it."
                )
        chat["tools"] = [
            _function(tool.get("name"), tool.get("description"), tool["input_schema"])
            for tool in body["tools"]
        ]
    return chat


def _chat_messages_of(message: Json) -> Iterator[Json]:
    """Yield the messages of a chat that one message of Anthropic's API stands for."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise CallRefused(f"a message has the role {role!r:.60}.")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not _is_list_of_objects(content):
        raise CallRefused("the content of a message is a text, or a list of blocks.")
    texts: list[Json] = []
    calls: list[Json] = []
    blocks: list[Json] = content or []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input", {}))
            calls.append(_call(block.get("id"), block.get("name"), arguments))
        elif kind == "tool_result":
            result = text_of(block.get("content"), ("text",), "a tool_result")
            call_id = block.get("tool_use_id")
            yield {"role": "tool", "content": result, "tool_call_id": call_id}
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    text = text_of(texts, ("text",), "a message")
    if role == "assistant":
        yield {
            "role": role,
            "content": text,
            **({"tool_calls": calls} if calls else {}),
        }
    elif texts:
        yield {"role": role, "content": text}


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def write_message(answer: Json, body: Json) -> Json:
    """Return the answer of Anthropic's messages API."""
    [choice] = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    content: list[Json] = []
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        content.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": read_json(call["function"]["arguments"]),
            }
        )
    return {
        "id": f"msg_{secrets.token_hex(8)}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": content,
        "stop_reason": STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def stream_message(answer: Json) -> str:
    """Format an answer of the messages API as its events. Each block comes in one piece."""
    start = {**answer, "content": [], "stop_reason": None}
    events: list[Json] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty: Json = {"type": "text", "text": ""}
            delta: Json = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            text = json.dumps(block["input"])
            delta = {"type": "input_json_delta", "partial_json": text}
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events += [
        {"type": "message_delta", "delta": ended, "usage": answer["usage"]},
        {"type": "message_stop"},
    ]
    return _events(events)


# OpenAI: responses.


def read_response(body: Json) -> Json:
    """Return the chat completion that a call of OpenAI's responses API asks for.

    `earlier` in the body are the messages of the response that `previous_response_id`
    names.

    Raises:
        CallRefused: the call has content that the policy cannot read, or asks for other draws than the policy's own.
    """
    if body.get("background"):
        raise CallRefused("background=true is not possible here: wait for the answer.")
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages += body.get("earlier", ())
    request_input = body.get("input")
    if isinstance(request_input, str):
        messages.append({"role": "user", "content": request_input})
    elif _is_list_of_objects(request_input):
        items: list[Json] = request_input or []
        for item in items:
            _add_item(messages, item)
    else:
        raise CallRefused("input is a text, or a list of items.")
    chat: Json = {
        name: body[name]
        for name in ("model", "temperature", "top_p", "stream", "tool_choice")
        if name in body
    }
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    text_format = (body.get("text") or {}).get("format")
    if text_format:
        chat["response_format"] = text_format
    if body.get("tools"):
        if not _is_list_of_objects(body["tools"]):
            raise CallRefused("tools is not a list of tools.")
        for tool in body["tools"]:
            if tool.get("type") != "function":
                raise CallRefused(
                    f"a tool has the type {tool.get('type')!r:.60}; the policy knows functions."
                )
        chat["tools"] = [
            _function(tool.get("name"), tool.get("description"), tool.get("parameters"))
            for tool in body["tools"]
        ]
    return chat


def _add_item(messages: list[Json], item: Json) -> None:
    """Append one item of a call to the messages, or add it to the assistant's last one."""
    kind = item.get("type", "message")
    if kind == "message":
        parts = ("input_text", "output_text", "text")
        content = text_of(item.get("content"), parts, "a message")
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        # A turn of the policy is one message; its text and its calls are several items.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments", ""))
        calls = [*messages[-1].get("tool_calls", ()), call]
        messages[-1] = {**messages[-1], "tool_calls": calls}
    elif kind == "function_call_output":
        output = text_of(item.get("output"), ("input_text", "text"), "an output")
        call_id = item.get("call_id")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind != "reasoning":
        raise CallRefused(f"input has an item of the type {kind!r:.60}.")


def write_response(answer: Json, body: Json) -> Json:
    """Return the answer of OpenAI's responses API."""
    [choice] = answer["choices"]
    message, usage = choice["message"], answer["usage"]
    is_cut = choice["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[Json] = []
    if message["content"] or not message.get("tool_calls"):
        text: Json = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
        }
        output.append(
            {
                "type": "message",
                "id": f"msg_{secrets.token_hex(8)}",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    for call in message.get("tool_calls", ()):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{secrets.token_hex(8)}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return {
        "id": f"resp_{secrets.token_hex(8)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": answer["model"],
        "output": output,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def stream_response(answer: Json) -> str:
    """Format an answer of the responses API as its events. Each item comes in one piece."""
    begun = {**answer, "status": "in_progress", "output": []}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        events.append({**_item_event("added", index), "item": _empty(item)})
        if item["type"] == "message":
            [part] = item["content"]
            inside = {**at, "content_index": 0}
            empty = {**part, "text": ""}
            text = part["text"]
            events += [
                {"type": "response.content_part.added", **inside, "part": empty},
                {"type": "response.output_text.delta", **inside, "delta": text, "logprobs": []},
                {"type": "response.output_text.done", **inside, "text": text, "logprobs": []},
                {"type": "response.content_part.done", **inside, "part": part},
            ]  # fmt: skip
        else:
            prefix, arguments = "response.function_call_arguments", item["arguments"]
            done = {"arguments": arguments, "name": item["name"]}
            events += [
                {"type": f"{prefix}.delta", **at, "delta": arguments},
                {"type": f"{prefix}.done", **at, **done},
            ]
        events.append({**_item_event("done", index), "item": item})
    events.append({"type": f"response.{answer['status']}", "response": answer})
    numbered = [{**event, "sequence_number": n} for n, event in enumerate(events)]
    return _events(numbered)


def _item_event(event: str, index: int) -> Json:
    return {"type": f"response.output_item.{event}", "output_index": index}


def _empty(item: Json) -> Json:
    """Return an item of a response as it begins."""
    empty_body: Json = (
        {"content": []} if item["type"] == "message" else {"arguments": ""}
    )
    return {**item, **empty_body, "status": "in_progress"}


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events
    )


def _read_unchanged(body: Json) -> Json:
    return body


DIALECTS = {
    CHAT: Dialect(CHAT, _read_unchanged, _unchanged, as_stream, _openai_error),
    COMPLETIONS: Dialect(
        COMPLETIONS, _read_unchanged, _unchanged, as_stream, _openai_error
    ),
    RESPONSES: Dialect(
        CHAT, read_response, write_response, stream_response, _openai_error
    ),
    MESSAGES: Dialect(
        CHAT, read_messages, write_message, stream_message, _anthropic_error
    ),
}
