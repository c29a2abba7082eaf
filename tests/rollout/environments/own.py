"""Environments as a user writes them, named module:object in a configuration."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from megaverl.rollout.environments import Codec, Environment, Outcome, Start

SENT_AGAIN = {"x-stainless-retry-count": "1"}  # as OpenAI's clients say


class Countdown(Environment):
    """Pays for every token, three turns long; the answer to a turn is a digit."""

    def reset(self, start: Start) -> Sequence[int]:
        self.left = 3
        return start.token_ids

    def step(self, token_ids: Sequence[int]) -> Outcome:
        self.left -= 1
        return Outcome(
            self.codec.answer(str(self.left), token_ids),
            reward=len(token_ids) / 10,
            done=not self.left,
        )


class Failing(Countdown):
    """Goes wrong after some second turns, on whichever rank holds the episode.

    Args:
        attempts: how often it goes wrong after the same turns.
    """

    failed: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, codec: Codec, *, attempts: int) -> None:
        super().__init__(codec)
        self.attempts = attempts

    def reset(self, start: Start) -> Sequence[int]:
        self.read = [start.seed, *start.token_ids]
        return super().reset(start)

    def step(self, token_ids: Sequence[int]) -> Outcome:
        self.read += token_ids
        key = tuple(self.read)
        if self.left == 2 and sum(key) % 3 == 0 and self.failed[key] < self.attempts:
            self.failed[key] += 1
            # Neither is an Exception, and an exit has a code of success.
            raise SystemExit(0) if sum(key) % 2 else KeyboardInterrupt
        return super().step(token_ids)


class NeverThere(Countdown):
    """Has no server."""

    def reset(self, start: Start) -> Sequence[int]:
        raise ConnectionRefusedError("port 7")


def client(base_url: str, api_key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def talk(base_url: str, api_key: str, prompt: str, reference: Any, extra: Any) -> float:
    """An agent of three calls, that sends everything each time, one of them twice, and hears the last as a stream."""
    calls = client(base_url, api_key).chat.completions
    messages: list[Any] = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": prompt},
    ]
    first = calls.create(model="any", messages=messages, temperature=0.0, max_tokens=99)
    messages += [
        first.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    second = calls.create(model="any", messages=messages)
    again = calls.create(model="any", messages=messages, extra_headers=SENT_AGAIN)
    assert (
        second.choices[0] == again.choices[0]
        and second.usage.prompt_tokens > first.usage.total_tokens
    )
    messages += [second.choices[0].message, {"role": "user", "content": "end"}]
    pieces = list(calls.create(model="any", messages=messages, stream=True))
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    extra["heard"] += [
        first.choices[0].message.content,
        second.choices[0].message.content,
        said,
    ]
    extra["reasons"] += [
        first.choices[0].finish_reason,
        pieces[-1].choices[0].finish_reason,
    ]
    return 0.5


def complete(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """The same of plain text, in two calls."""
    calls = client(base_url, api_key).completions
    text = prompt
    for more in (" so ", ""):
        text += calls.create(model="any", prompt=text).choices[0].text + more
    return len(text) / 20


def twice(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """The same question, to hear two answers."""
    calls = client(base_url, api_key).completions
    extra["heard"] += [
        calls.create(model="any", prompt=prompt).choices[0].text for _ in range(2)
    ]
    return 0.5


def aside(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """`complete`, and in between, in some episodes, a text that has nothing to do with it."""
    calls = client(base_url, api_key).completions
    text = prompt + calls.create(model="any", prompt=prompt).choices[0].text + " so "
    if len(text) % 2:
        calls.create(model="any", prompt=prompt[1:])
    return len(text + calls.create(model="any", prompt=text).choices[0].text) / 20


def delegate(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float | None:
    """Asks a helper in between, goes back to its first answer and on from there, and cuts its history to a summary."""
    import openai

    heard = extra["heard"]

    def say(*messages: Any, **options: Any) -> Any:
        calls = client(base_url, api_key).chat.completions
        answer = (
            calls.create(model="any", messages=messages, **options).choices[0].message
        )
        heard.append(answer.content)
        return answer

    def user(text: str) -> Any:
        return {"role": "user", "content": text}

    system = {"role": "system", "content": "brief"}
    try:
        first = say(system, user(prompt))
        say(user("help"))
        say(system, user(prompt), first, user("go on"))
        extra["again"].append(
            say(user("help"), extra_headers=SENT_AGAIN).content == heard.pop()
        )
        branch = [system, user(prompt), first, user("or so")]
        last = say(*branch, say(*branch), user("and"))
        say(system, user(f"so far: {last.content}"))
    except openai.BadRequestError:  # no room
        return None
    return 0.5


def parallel(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """Helpers beside the main agent, which goes on in two ways from its first answer; each call when it may."""

    def say(name: str, *messages: Any) -> list[Any]:
        extra["may"][name].wait()
        answer = (
            client(base_url, api_key)
            .chat.completions.create(model="any", messages=messages)
            .choices[0]
            .message
        )
        return [*messages, answer]

    def user(text: str) -> Any:
        return {"role": "user", "content": text}

    with ThreadPoolExecutor() as pool:
        helpers = [pool.submit(say, name, user(name[0])) for name in ("a1", "b1")]
        main = say("main", {"role": "system", "content": "brief"}, user(prompt))
        ways = [pool.submit(say, name, *main, user(name)) for name in ("left", "right")]
        ways.append(pool.submit(say, "a2", *helpers[0].result(), user("and")))
        left, *_ = [each.result() for each in (*ways, *helpers)]
    say("main", *left, user("end"))
    return 0.5


def judged(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """Asks under the names of two models, one after the other."""
    calls = client(base_url, api_key).completions
    text = prompt + calls.create(model="writer", prompt=prompt).choices[0].text
    calls.create(model="judge", prompt=f"good? {text}")
    calls.create(model=extra.get("last", "judge"), prompt=f"{text} so")
    return 0.5


def fans_out(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> None:
    """Three calls at once after the first."""
    from openai import AsyncOpenAI

    async def all_of_it() -> None:
        async with AsyncOpenAI(
            base_url=base_url, api_key=api_key, max_retries=0
        ) as agent:
            calls = agent.completions
            first = (await calls.create(model="any", prompt=prompt)).choices[0].text
            await asyncio.gather(
                *(calls.create(model="any", prompt=f"{way}{first}") for way in "abc")
            )

    asyncio.run(all_of_it())


def wrong(base_url: str, api_key: str, prompt: str, reference: Any, extra: Any) -> None:
    """What is refused, and goes well after all; then a failure."""
    import openai

    messages: list[Any] = [{"role": "user", "content": prompt}]
    calls = client(base_url, api_key).chat.completions
    for change in ({"n": 2}, {"stop": ["x"]}, {"logprobs": True}, {"messages": []}):
        try:
            calls.create(**{"model": "any", "messages": messages, **change})
        except openai.BadRequestError as error:
            extra["refused"].append(error.body["message"])
    for url, key in ((base_url.replace("/v1", "x/v1"), api_key), (base_url, "another")):
        try:
            client(url, key).chat.completions.create(model="any", messages=messages)
        except (openai.NotFoundError, openai.AuthenticationError) as error:
            extra["refused"].append(error.body["message"])
    calls.create(model="any", messages=messages)
    raise KeyError("the program's own")


def endless(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> None:
    import openai

    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        try:
            answer = client(base_url, api_key).chat.completions.create(
                model="any", messages=messages
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        except openai.BadRequestError as error:
            extra["refused"].append(error.code)
            if "insists" not in extra:
                return


def compacts(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """`endless`, and from where there is no room on a short summary."""
    endless(base_url, api_key, prompt, reference, extra)
    messages = [{"role": "user", "content": "so far"}]
    client(base_url, api_key).chat.completions.create(model="any", messages=messages)
    return 0.5


def harness(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """An agent of pydantic-ai, which knows an address and no more: a tool that it calls by itself, and two runs."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(
        OpenAIChatModel("any", provider=OpenAIProvider(base_url, api_key)),
        system_prompt="brief",
    )

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        extra["heard"].append(f"{a} + {b}")
        return a + b

    first = agent.run_sync(prompt)
    second = agent.run_sync("go on", message_history=first.all_messages())
    extra["heard"] += [first.output, second.output]
    return 0.25


def hostile(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """Sends what no conversation can be, hears why each time, and then plays on."""
    import httpx

    def post(content: str) -> Any:
        sent = {"content-type": "application/json"}
        return httpx.post(
            f"{base_url}/chat/completions",
            content=content,
            headers=sent,
            trust_env=False,
        )

    def said(content: str) -> str:
        return f'{{"messages": [{{"role": "user", "content": {content}}}]}}'

    deep = '{"a":' * 3000 + "1" + "}" * 3000
    for content in (
        said('[{"type": "text"}]'),
        said('[{"type": "text", "text": null}]'),
        said("7"),
        said(deep),
        said("NaN"),
        said("1" * 5000),
    ):
        answer = post(content)
        assert answer.status_code == 400, answer.text
        extra["refused"].append(answer.json()["error"]["message"])
    heard = post(said('"half \\ud800 and \\u0000"')).json()["choices"][0]["message"][
        "content"
    ]
    extra["refused"].append(heard)
    return 0.5


def not_a_reward(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> Any:
    """Plays on, and then gives a reward that is no number, or leaves."""
    client(base_url, api_key).completions.create(model="any", prompt=prompt)
    if extra["reward"] == "exit":
        raise SystemExit(0)
    return extra["reward"]


def breaks(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> None:
    """Fails before its first call, after it, or when a second one is refused."""
    if extra["after"] != "nothing":
        calls = client(base_url, api_key).completions
        first = calls.create(model="any", prompt=prompt)
        if extra["after"] == "a call without room":
            said = prompt + first.choices[0].text
            calls.create(model="any", prompt=said + "x" * 40)
    raise KeyError("the program's own")


ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}


def speak_messages(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """An agent on Anthropic's client: a tool call, its result, and an answer that it hears as a stream."""
    from anthropic import Anthropic, BadRequestError

    address = base_url.removesuffix("/v1")
    messages = Anthropic(base_url=address, api_key=api_key, max_retries=0).messages
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": ADD}
    call: Any = {"model": "any", "max_tokens": 99, "system": "brief", "tools": [tool]}
    said: list[Any] = [{"role": "user", "content": prompt}]
    first = messages.create(**call, messages=said)
    text, use = first.content
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
    go_on = {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}
    said += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, go_on]},
    ]
    count = {name: call[name] for name in ("model", "system", "tools")}
    extra["heard"] += [text.text, use.input, first.stop_reason]
    extra["counted"] = messages.count_tokens(**count, messages=said).input_tokens
    with messages.stream(**call, messages=said) as stream:
        second = stream.get_final_message()
    extra["read"] = second.usage.input_tokens
    extra["heard"] += [second.content[0].text, second.stop_reason]
    refused: list[Any] = [
        {"stop_sequences": ["x"]},
        {"tool_choice": {"type": "any"}},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ]
    for wrong in refused:
        try:
            messages.create(**{**call, "messages": said, **wrong})
        except BadRequestError as error:
            body: Any = error.body
            extra["refused"].append(body["error"]["message"])
    return 0.5


def speak_responses(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """An agent on OpenAI's responses: a tool call, then its result, by id or with everything sent again."""
    from openai import BadRequestError, NotFoundError

    responses = client(base_url, api_key).responses
    tool: Any = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
    call: Any = {"model": "any", "instructions": "brief", "tools": [tool]}
    first = responses.create(**call, input=prompt)
    message, use = first.output
    result: Any = {
        "type": "function_call_output",
        "call_id": use.call_id,
        "output": "5",
    }
    extra["heard"] += [first.output_text, use.arguments, first.status]
    if extra["by_id"]:
        second = responses.create(**call, input=[result], previous_response_id=first.id)
    else:
        said: Any = [{"role": "user", "content": prompt}, *first.output, result]
        with responses.stream(**call, input=said) as stream:
            second = stream.get_final_response()
    extra["heard"] += [second.output_text, second.status]
    for wrong, kind in (
        ({"input": "x", "background": True}, BadRequestError),
        ({"input": "x", "tools": [{"type": "web_search"}]}, BadRequestError),
        ({"input": "x", "previous_response_id": "resp_0"}, NotFoundError),
    ):
        try:
            responses.create(**{**call, **wrong})
        except kind as error:
            extra["refused"].append(error.message)
    return 0.5


def by_name(
    base_url: str, api_key: str, prompt: str, reference: Any, extra: Any
) -> float:
    """Calls the addresses of gateways, and names its episode in each call; extra["heard"] gets what it hears."""
    import openai

    _, _, host, key, _ = base_url.split("/")
    port = host.rpartition(":")[2]

    def say(door: int, label: str) -> Any:
        calls = client(f"http://127.0.0.1:{door}/v1", api_key).responses
        return calls.create(
            model="any", input=prompt, metadata={"megaverl_episode": label}
        ).output_text

    for door in [int(port), *extra["doors"]]:
        extra["heard"].append(say(door, f"{port}.{key}"))
    for label in ("", key, f"9.{key}", f"{port}.{key}0"):
        try:
            say(int(port), label)
        except openai.NotFoundError as error:
            extra["heard"].append(error.status_code)
    return 0.5
