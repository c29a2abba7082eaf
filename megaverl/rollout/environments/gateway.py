"""Environment `gateway`: external programs play the episodes through an address that OpenAI's and Anthropic's clients
can call.

Each episode gives its program an address of its own. The run's engines answer the
calls: one request to the engines answers all programs that are waiting.

    program                      handler thread                  episode (rank's thread)
    POST .../chat/completions -> Session.calls.put(call)      -> step_each: take the call's tokens
                                 call.answer.result() waits      engines generate the turn
    response                  <- answer is set                <- step_each: answer the call, wait for the next
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from typing import Any, ClassVar

from megaverl.errors import ConfigError, EnvironmentFault, EpisodeError
from megaverl.http_server import EmbeddedHandler, EmbeddedServer
from megaverl.outside import clean, read_json, read_number
from megaverl.plugins import load_function
from megaverl.processes import ending_with_parent
from megaverl.rollout.environments.conversation import (
    CHAT,
    MODEL,
    Call,
    CallRefused,
    Conversation,
    Conversations,
    checked,
)
from megaverl.rollout.environments.dialects import (
    COUNT_TOKENS,
    DIALECTS,
    MESSAGES,
    RESPONSES,
    Dialect,
)
from megaverl.rollout.environments.environment import (
    Codec,
    Environment,
    Outcome,
    Start,
    register_environment,
)
from megaverl.user_code import describe, user_code

logger = logging.getLogger(__name__)

MAX_BYTES = 128 * 2**20  # of the body of a call
NO_TOKEN = "none"  # OpenAI's clients insist on a token even if the server wants none
SHOWN = 400  # characters that are quoted of a failed program's last output
# Paths at which an agent from outside requests an episode, and ends it.
NEXT, END = "next", "end"
VERSION = "v1"
NO_EPISODE = "there is no such episode, or it is over."
# Key in the metadata of a call to the server's own address, /v1: the name of its
# episode, as `GatewayServer.label` writes it.
EPISODE = "megaverl_episode"
# Header in which OpenAI's clients count how often they have sent a call before.
RETRIES = "x-stainless-retry-count"
# Time to wait for further calls that a program makes in parallel.
TOGETHER_SECONDS = 0.05
OFFER_SECONDS = 20.0  # longest time that an agent's request for an episode stays open


@dataclass
class Session:
    """Calls of one episode in order of arrival; None in the queue means that the program has ended.

    Attributes:
        answered: number of answered calls.
        reward: reward that the program reported for the episode.
        failure: reason why the program did not finish the episode.
        is_fault: whether that is a fault of the environment, and not of the policy.
        mistake: what is wrong with the configuration, if that is why.
        responses: id of each answer of the responses API -> messages of the chat up to it.
        codec: counts the tokens of a call that is not to be answered.
    """

    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    calls: queue.SimpleQueue[Call | None] = field(default_factory=queue.SimpleQueue)
    answered: int = 0
    reward: float = 0.0
    failure: str = ""
    is_fault: bool = False
    mistake: ConfigError | None = None
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    codec: Codec | None = None

    def read(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the completion that a call asks for.

        Raises:
            CallRefused: the call cannot be read, or continues a response that is not of this episode.
        """
        previous = body.get("previous_response_id") if path == RESPONSES else None
        if previous is not None:
            if previous not in self.responses:
                raise CallRefused(
                    f"there is no response {previous!r:.60} in this episode.", 404
                )
            body = {**body, "earlier": self.responses[previous]}
        return DIALECTS[path].read(body)

    def write(
        self,
        path: str,
        answer: dict[str, Any],
        chat: dict[str, Any],
        body: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the answer to a call in the words of its API."""
        written = DIALECTS[path].write(answer, body)
        if path == RESPONSES:
            instructions = int(bool(body.get("instructions")))
            message = answer["choices"][0]["message"]
            # Instructions are of one call alone.
            messages = [*chat["messages"][instructions:], message]
            self.responses[written["id"]] = messages
        return written

    def count_tokens(self, body: dict[str, Any]) -> int:
        """Return the number of tokens that a call of the messages API would read.

        Raises:
            CallRefused: the policy cannot answer such a conversation.
        """
        assert self.codec is not None
        conversation = Conversation(self.codec, CHAT)
        conversation.begin(Call(CHAT, DIALECTS[MESSAGES].read(body)))
        return len(conversation.token_ids)

    def end(self, body: Any) -> None:
        """End the episode at the request of its agent.

        Raises:
            CallRefused: the reward is not a number.
        """
        try:
            self.reward = read_number(
                body.get("reward", 0.0) if isinstance(body, dict) else None
            )
        except ValueError as error:
            raise CallRefused(
                f'an episode ends with {{"reward": number}}: {error}.'
            ) from error
        self.calls.put(None)


class GatewayServer(EmbeddedServer):
    """HTTP server for the calls of all episodes of a rank: /SESSION/v1/ and a path of `dialects`.

    A program that plays several episodes at one address calls /v1/, and names the
    episode in the metadata of each call. A call for an episode of another rank of this
    node is passed on to it.

    An agent that the run does not start requests an episode at /next, and ends it with
    a reward at /SESSION/v1/end.

    Args:
        host, port: interface and port to listen at; port 0: any free port.
        token: bearer token that every call must have; None: no token, on the loopback only, where the session's random
            name is a secret too.
    """

    _shared: ClassVar[dict[tuple[str, int, str | None], GatewayServer]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, host: str, port: int, token: str | None) -> None:
        # Calls may arrive as soon as the server listens, though not for an episode.
        self.host = host
        self.offers: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self.sessions: dict[str, Session] = {}
        super().__init__(host, port, GatewayHandler, "gateway", token)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first_port = self.server_address[1] - rank
        self.ports_of_node = range(first_port, first_port + ranks_of_node)

    @classmethod
    def shared(cls, host: str, port: int, token: str | None) -> GatewayServer:
        """Return this process's server for the address, starting it at the first call.

        Raises:
            ConfigError: another program uses the port.
        """
        with cls._lock:
            if (host, port, token) not in cls._shared:
                try:
                    cls._shared[host, port, token] = cls(host, port, token)
                except OSError as error:
                    raise ConfigError(
                        f"environment 'gateway': {host}:{port} cannot be listened at: {error}"
                    ) from error
            return cls._shared[host, port, token]

    def offered(self) -> dict[str, Any]:
        """Return the next episode that no agent plays yet, as JSON; None if none opens within OFFER_SECONDS."""
        end = time.monotonic() + OFFER_SECONDS
        while (left := end - time.monotonic()) > 0:
            try:
                key, offer = self.offers.get(timeout=left)
            except queue.Empty:
                break
            # The episode may have ended while its offer was waiting.
            if key in self.sessions:
                return {"episode": offer}
        return {"episode": None}

    def open(self, session: Session) -> str:
        """Register a session and return its address, the base URL for an OpenAI client."""
        self.sessions[session.key] = session
        return f"{self.url}/{session.key}/v1"

    def label(self, session: Session) -> str:
        """Return the name by which a call to /v1/ names an episode: the port of its rank, and its key."""
        return f"{self.server_address[1]}.{session.key}"


class GatewayHandler(EmbeddedHandler):
    """Handler of one connection to the gateway."""

    server: GatewayServer
    # API of the call, and whether its answer is sent as events.
    dialect: Dialect = DIALECTS[CHAT]
    streams: bool = False

    def do_GET(self) -> None:
        self.dialect, self.streams = DIALECTS[CHAT], False
        models = {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "megaverl"}],
        }

        def ask() -> dict[str, Any]:
            if self.path.strip("/") == NEXT:
                self._check_token()
                return self.server.offered()
            first, path = self._parts()
            if first != VERSION:
                self._session(first)
            return models if path == "models" else self._unknown()

        self._reply(ask)

    def do_POST(self) -> None:
        self.dialect, self.streams = DIALECTS[CHAT], False

        def ask() -> dict[str, Any]:
            text = self._body()
            first, path = self._parts()
            if first != VERSION:
                self._session(first)
            if path not in (*DIALECTS, COUNT_TOKENS, END):
                self._unknown()
            self.dialect = DIALECTS.get(path, DIALECTS[MESSAGES])
            try:
                body = read_json(text or b"{}")
            except ValueError as error:
                raise CallRefused(
                    f"the call cannot be read as JSON: {error}"
                ) from error
            if first == VERSION:
                port, first = self._named(body)
                if port != self.server.server_address[1]:
                    if body.get("stream"):
                        raise CallRefused(
                            f"a call to /{VERSION} that is passed on cannot be streamed."
                        )
                    return self._pass_on(port, text)
            session = self._session(first)
            if path == END:
                session.end(body)
                return {}
            if not isinstance(body, dict):
                raise CallRefused("a call is a JSON object.")
            try:
                if path == COUNT_TOKENS:
                    return {"input_tokens": session.count_tokens(body)}
                chat = session.read(path, body)
            except (TypeError, AttributeError, KeyError, ValueError) as problem:
                raise CallRefused(f"unreadable: {describe(problem)}") from problem
            repeats = self.headers.get(RETRIES, "0") != "0"
            call = Call(self.dialect.kind, checked(chat), session.answered, repeats)
            self.streams = bool(body.get("stream"))
            session.calls.put(call)
            return session.write(path, call.answer.result(), chat, body)

        self._reply(ask)

    def _body(self) -> bytes:
        """Return the body of a call. One of a stranger, or one that is too long, is not read."""
        self._check_token()
        if self.body_bytes > MAX_BYTES:
            raise self.unread(CallRefused(f"a call has at most {MAX_BYTES} bytes."))
        return self.rfile.read(self.body_bytes)

    def _unknown(self) -> Any:
        raise CallRefused(
            f"there is no {self.path}: a gateway has models, {', '.join(DIALECTS)} and {COUNT_TOKENS}.",
            404,
        )

    def _check_token(self) -> None:
        # OpenAI's clients send the token in one way, and Anthropic's in the other.
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        sent = bearer or self.headers.get("x-api-key", "")
        if not self.has_token(sent):
            raise self.unread(
                CallRefused("the call has another token than the run.", 401)
            )

    def _parts(self) -> tuple[str, str]:
        """Return the first part of the path, an episode's key or v1, and the API's path below v1."""
        self._check_token()
        _, first, *rest = self.path.split("?")[0].split("/", 2)
        path = rest[0] if rest else ""
        if first == VERSION:
            return first, path.strip("/")
        version, _, path = path.partition("/")
        if version != VERSION:
            raise CallRefused(NO_EPISODE, 404)
        return first, path.strip("/")

    def _session(self, key: str) -> Session:
        if (session := self.server.sessions.get(key)) is None:
            raise CallRefused(NO_EPISODE, 404)
        return session

    def _named(self, body: Any) -> tuple[int, str]:
        """Return the port and the key of the episode that the metadata of a call name."""
        metadata = body.get("metadata") if isinstance(body, dict) else None
        label = metadata.get(EPISODE) if isinstance(metadata, dict) else None
        port, _, key = str(label).partition(".")
        if not port.isdecimal() or int(port) not in self.server.ports_of_node:
            raise CallRefused(
                f"a call to /{VERSION} names its episode in metadata.{EPISODE}, and this one has {label!r:.60} there.",
                404,
            )
        return int(port), key

    def _pass_on(self, port: int, text: bytes) -> dict[str, Any]:
        """Return the answer of the rank at another port of this node.

        Raises:
            CallRefused: that rank refuses the call, or has gone.
        """
        headers = {
            name: value
            for name in ("authorization", "x-api-key", RETRIES)
            if (value := self.headers.get(name)) is not None
        }
        connection = HTTPConnection(self.server.host, port)
        try:
            connection.request("POST", self.path, text, headers)
            response = connection.getresponse()
            answer = read_json(response.read())
        except (OSError, HTTPException, ValueError) as problem:
            raise CallRefused(
                f"the rank at port {port} does not answer: {describe(problem)}", 404
            ) from problem
        finally:
            connection.close()
        if response.status != 200:
            error = answer["error"]
            is_too_long = error.get("code") == "context_length_exceeded"
            status = 413 if is_too_long else response.status
            raise CallRefused(error["message"], status)
        assert isinstance(answer, dict)
        return answer

    def _reply(self, make: Callable[[], dict[str, Any]]) -> None:
        try:
            status, answer = 200, make()
        except CallRefused as error:
            is_too_long = error.status == 413
            # No API has a status of its own for a conversation that is too long.
            status = 400 if is_too_long else error.status
            answer = self.dialect.error(str(error), is_too_long)
        streams = status == 200 and self.streams
        body = self.dialect.stream(answer) if streams else json.dumps(answer)
        self.send_answer(
            status,
            body.encode(),
            "text/event-stream" if streams else "application/json",
        )


@register_environment("gateway")
class ProgramEpisode(Environment):
    """One episode that an external program plays. The run's rewards score its last answer.

    Each conversation of the program is a sample, and all of them get the episode's
    reward.

    Options:
        command: the program, with {prompt} and {base_url} filled in. Its environment has OPENAI_BASE_URL and
            OPENAI_API_KEY, and the same of ANTHROPIC. Its standard input is the row as JSON: prompt, reference, extra.
            The last line that it prints may be {"reward": number}.
        function: instead of a command, `module:function`, called in a thread as function(base_url, api_key, prompt,
            reference, extra). It may return a reward.
        outside: True instead of either: agents that run elsewhere request episodes at `port`.
        seconds: longest time of a program from one call to the next; for an agent from outside, also to its first call.
        error_reward: reward of an episode whose program fails or takes longer, if that is the policy's doing. None: it
            is a fault of the program: the episode is tried again, or left out of training (`environment.faults`).
        train_models: values of the field `model` whose calls train; the policy answers other calls too. None: all
            train.
        host: interface that calls come to.
        port: port there; each rank of a node uses one more than the last. 0: any free port; programs that the run
            starts are told.
        token_env: variable with the token that calls must have, required beyond the loopback.
    """

    waits: ClassVar[bool] = True
    by_content: ClassVar[bool] = True
    kind: ClassVar[str] = "gateway"  # the environment's name, for messages

    def __init__(
        self,
        codec: Codec,
        *,
        command: Sequence[str] | None = None,
        function: str | None = None,
        outside: bool = False,
        seconds: float = 600.0,
        error_reward: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token_env: str | None = None,
        train_models: Sequence[str] | None = None,
    ) -> None:
        super().__init__(codec)
        self.train_models = train_models
        self.command, self.function, self.outside = command, function, outside
        self.seconds, self.error_reward = seconds, error_reward
        self.token = os.environ.get(token_env) if token_env else None
        own_port = port + int(os.environ.get("LOCAL_RANK", "0")) if port else 0
        self.server = GatewayServer.shared(host, own_port, self.token)
        self.session, self.conversations = Session(codec=codec), Conversations(codec)
        self._waiting: list[tuple[Conversation, Call]] = []
        self._models: set[str] = set()  # model names in the calls so far
        self._taken = 0  # calls that the policy answers
        # Calls that were refused because a conversation was full.
        self._without_room = 0
        self._process: subprocess.Popen[str] | None = None

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        command, function, outside = (
            options.get("command"),
            options.get("function"),
            options.get("outside", False),
        )
        if (command is not None) + (function is not None) + bool(outside) != 1:
            raise ConfigError(
                "environment 'gateway': name a program, command: [...] or function: module:function, or set "
                "outside: true, for agents that the run does not start"
            )
        port = options.get("port", 0)
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 2**16:
            raise ConfigError(f"environment 'gateway': port={port!r} is no port")
        if outside and not port:
            raise ConfigError(
                "environment 'gateway': outside: true needs a port, where agents ask for episodes"
            )
        if command is not None and not (
            isinstance(command, list) and {*map(type, command)} == {str}
        ):
            raise ConfigError(
                "environment 'gateway': command is a list: the program and its arguments"
            )
        if function is not None and ":" not in str(function):
            raise ConfigError(
                f"environment 'gateway': function={function!r}; write it as module:function"
            )
        models = options.get("train_models")
        if models is not None and not (
            isinstance(models, list) and {*map(type, models)} == {str}
        ):
            raise ConfigError(
                f"environment 'gateway': train_models={models!r}; list the values of `model` whose calls train, "
                "or remove it to train all calls"
            )
        host, token_env = options.get("host", "127.0.0.1"), options.get("token_env")
        if token_env is not None and not os.environ.get(token_env):
            raise ConfigError(
                f"environment 'gateway': token_env: no variable {token_env} is set"
            )
        try:
            beyond = not ip_address(host).is_loopback
        except ValueError as error:
            raise ConfigError(
                f"environment 'gateway': host={host!r} is no address of an interface"
            ) from error
        if beyond and token_env is None:
            raise ConfigError(
                f"environment 'gateway': host={host} is not the loopback, so anybody in its network could call: name a "
                "variable with a token in token_env"
            )

    def reset(self, start: Start) -> Sequence[int]:
        """Start the program and wait for its first call."""
        url = self.server.open(self.session)
        self.conversations.limits = start.limits
        row = {
            "prompt": start.text,
            "reference": start.reference,
            "extra": dict(start.extra),
        }
        if self.outside:
            self.server.offers.put((self.session.key, {"base_url": url, **row}))
        else:
            play = self._run_command if self.command is not None else self._run_function
            threading.Thread(
                target=self._played, args=(play, url, row), name="program", daemon=True
            ).start()
        if first := self._take_calls(most=1):
            return first[0].token_ids
        self._raise_mistake()
        problem = EnvironmentFault if self.session.failure else EpisodeError
        raise problem(
            f"environment '{self.kind}': {self._name} has ended, or was silent for {self.seconds:g} s, without a call "
            "that could be answered. It gets the address as OPENAI_BASE_URL (a function as base_url). "
            f"{self.session.failure}"
        )

    def step(self, token_ids: Sequence[int]) -> Outcome:
        return self.step_each([token_ids])

    def step_each(self, turns: Sequence[Sequence[int]]) -> Outcome:
        """Answer the program's calls and wait for its next ones.

        Raises:
            EnvironmentFault: the program fails, and `error_reward` does not say that this is the policy's doing.
        """
        answered, self._waiting = self._waiting, []
        untrained = [
            place for place, (_, call) in enumerate(answered) if not self._trains(call)
        ]
        for (conversation, call), turn in zip(answered, turns, strict=True):
            answer = conversation.answer(turn, call)
            self.session.answered += 1
            call.answer.set_result(answer)
        if outcomes := self._take_calls([conversation for conversation, _ in answered]):
            return replace(outcomes[0], also=outcomes[1:], untrained=untrained)
        self._raise_mistake()
        if self.session.is_fault:
            raise EnvironmentFault(
                f"environment '{self.kind}': {self._name}. {self.session.failure}"
            )
        if self.train_models is not None and not self._models & {*self.train_models}:
            logger.warning(
                "environment '%s': nothing of %s trains: its calls name the models %s, and train_models %s.",
                self.kind, self._name, sorted(self._models), self.train_models,
            )  # fmt: skip
        return Outcome(reward=self.session.reward, done=True, untrained=untrained)

    def _raise_mistake(self) -> None:
        if self.session.mistake is not None:
            raise self.session.mistake

    def _trains(self, call: Call) -> bool:
        name = str(call.body.get("model") or MODEL)
        self._models.add(name)
        return self.train_models is None or name in self.train_models

    def _take_calls(
        self, answered: Sequence[Conversation] = (), most: int = sys.maxsize
    ) -> list[Outcome]:
        """Wait for the next calls that can be answered, and return an outcome for each; empty if there is none.

        Calls that a program makes in parallel are taken in one step.

        Args:
            answered: conversations that were just answered. The program may continue all of them at once.
            most: limit of calls.
        """
        outcomes: list[Outcome] = []
        if (limits := self.conversations.limits) is not None:
            most = min(most, max(1, limits.max_turns - self._taken))
        while len(outcomes) < most:
            goes_on = len(outcomes) >= len(answered) and all(
                number in answered for number, _ in self._waiting
            )
            if not outcomes:
                seconds = self.seconds
            elif goes_on:
                seconds = 0.0
            else:
                seconds = TOGETHER_SECONDS
            if (call := self._next(seconds, fails=not outcomes)) is None:
                break
            try:
                taken = self.conversations.take(call)
            except Exception as problem:
                # A program may send anything. Its mistakes are reported to it, and must
                # not stop the run.
                error = (
                    problem
                    if isinstance(problem, CallRefused)
                    else CallRefused(f"unreadable: {describe(problem)}")
                )
                call.answer.set_exception(error)
                self._without_room += error.status == 413
                if limits is not None and self._without_room > limits.max_turns:
                    # The program repeats a call that is too long, so stop waiting for
                    # it.
                    break
                continue
            if taken is not None:
                number, tokens = taken
                outcomes.append(
                    Outcome(
                        tokens, conversation=number, overlaps=call.seen < self._taken
                    )
                )
                self._waiting.append((self.conversations.held[number], call))
                self._taken += 1
        return outcomes

    def close(self) -> None:
        """End the episode, even if the program has not finished."""
        over = CallRefused(
            "the episode is over: no tokens or turns are left (rollout.sampling.max_tokens, environment).",
            413,
        )
        # Without a session, further calls are refused at once, so the queue below
        # cannot fill again.
        self.server.sessions.pop(self.session.key, None)
        for _, waiting in self._waiting:
            waiting.answer.set_exception(over)
        while not self.session.calls.empty():
            if (call := self.session.calls.get()) is not None:
                call.answer.set_exception(over)
        if self._process is not None and self._process.poll() is None:
            # The program leads a process group of its own (start_new_session), so its
            # children end with it.
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def _name(self) -> str:
        if self.outside:
            return (
                f"an agent at {self.server.host}:{self.server.server_address[1]}/{NEXT}"
            )
        return self.command[0] if self.command is not None else str(self.function)

    def _next(self, seconds: float, *, fails: bool) -> Call | None:
        """Return the next call; None if there is none in time, or if the program has ended."""
        try:
            call = self.session.calls.get(timeout=seconds)
        except queue.Empty:
            if fails:
                self._failed(f"it was silent for {seconds:g} s")
            return None
        if call is None and not fails:
            # Calls that are already taken must be answered first, so leave the end
            # marker for the next step.
            self.session.calls.put(None)
        return call

    def _failed(self, reason: str) -> None:
        self.session.failure = f"The last failure: {reason}"
        reward = self.error_reward
        if reward is None and self._without_room:
            # The program was refused a call because the policy's conversation is full,
            # and did not bear it. Another attempt would come to the same place.
            reward = 0.0
        if reward is None:
            self.session.is_fault = True
            return
        self.session.reward = reward
        logger.warning(
            "environment '%s': %s: %s. Its episode ends with reward %g.",
            self.kind,
            self._name,
            reason,
            reward,
        )

    def _played(
        self,
        play: Callable[[str, Mapping[str, Any]], Any],
        url: str,
        row: Mapping[str, Any],
    ) -> None:
        try:
            with user_code(
                lambda error: EpisodeError(describe(error)),
                keep=(EpisodeError, ConfigError),
            ):
                reward = play(url, row)
                self.session.reward = (
                    0.0 if reward is None else read_number(float(reward))
                )
        except EpisodeError as error:
            # After `close` the program was killed, so its error says nothing.
            if self.session.key in self.server.sessions:
                self._failed(str(error))
        except ConfigError as error:
            self.session.mistake = error
        self.session.calls.put(None)

    def _run_function(self, url: str, row: Mapping[str, Any]) -> Any:
        function = load_function(str(self.function), "environment.options.function")
        return function(
            url, self.token or NO_TOKEN, row["prompt"], row["reference"], row["extra"]
        )

    def _run_command(self, url: str, row: Mapping[str, Any]) -> float | None:
        assert self.command is not None
        places = {"{prompt}": clean(str(row["prompt"])), "{base_url}": url}
        command = [
            re.sub(r"\{(prompt|base_url)\}", lambda match: places[match[0]], part)
            for part in self.command
        ]
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": self.token or NO_TOKEN,
            # Anthropic's clients append /v1 themselves.
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.token or NO_TOKEN,
        }
        pipe = subprocess.PIPE
        with subprocess.Popen(
            ending_with_parent(command), stdin=pipe, stdout=pipe, stderr=pipe, env=environment, text=True,
            start_new_session=True, encoding="utf-8", errors="replace",
        ) as process:  # fmt: skip
            self._process = process
            output, errors = process.communicate(json.dumps(row))
        output, errors = clean(output), clean(errors)
        if process.returncode:
            raise EpisodeError(
                f"it ended with {process.returncode}: {errors.strip()[-SHOWN:]}"
            )
        try:
            last = read_json(output.strip().rpartition("\n")[2])
        except ValueError:
            return None
        if not isinstance(last, dict) or "reward" not in last:
            return None
        try:
            return read_number(last["reward"])
        except ValueError as error:
            raise EpisodeError(f"its last line is no reward: {error}") from error
