"""Adapters for environments with text observations and actions: Gymnasium, TextArena, OpenEnv.

Each turn of the model is decoded for the environment, and training uses the original
tokens, never the decoded text. An episode begins with one message: `instruction` and
the first observation. The rows of the data set only count episodes. Random draws of an
episode come from `run.seed` and its row, so all episodes of a group draw the same.
"""

from __future__ import annotations

import importlib
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from megaverl.errors import ConfigError, EnvironmentFault, EpisodeError
from megaverl.outside import read_json, read_number
from megaverl.plugins import load_module
from megaverl.rollout.environments.environment import (
    Codec,
    Environment,
    Outcome,
    Start,
    register_environment,
)
from megaverl.user_code import describe


class Observed(NamedTuple):
    """Observation of an environment after a turn."""

    text: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(Environment):
    """Base class of the adapters.

    Options:
        instruction: text before the first observation.
        action: a regular expression with one group, the action in a turn (the last match counts); None: the whole turn,
            stripped of white space.
        no_action: message to the model after a turn without an action.
        no_action_reward: reward of such a turn.
    """

    waits: ClassVar[bool] = True

    def __init__(
        self,
        codec: Codec,
        *,
        instruction: str = "",
        action: str | None = None,
        no_action: str = "There was no action in this.",
        no_action_reward: float = 0.0,
    ) -> None:
        super().__init__(codec)
        self.instruction, self.no_action, self.no_action_reward = (
            instruction,
            no_action,
            no_action_reward,
        )
        self.action = re.compile(action, re.DOTALL) if action is not None else None

    @staticmethod
    def check(**options: Any) -> None:
        """Raise a ConfigError for options that cannot be used."""
        try:
            pattern = re.compile(options.get("action") or "(x)")
        except re.error as error:
            raise ConfigError(
                f"environment: action is no regular expression ({error})"
            ) from error
        if pattern.groups != 1:
            raise ConfigError(
                f"environment: action needs one group, the action itself; it has {pattern.groups}"
            )

    def reset(self, start: Start) -> Sequence[int]:
        return self.codec.prompt(
            f"{self.instruction}\n{self._begin(start.seed)}".strip()
        )

    def step(self, token_ids: Sequence[int]) -> Outcome:
        text = self.codec.decode(token_ids).strip()
        if self.action is not None:
            actions = self.action.findall(text)
            if not actions:
                return Outcome(
                    self.codec.answer(self.no_action, token_ids), self.no_action_reward
                )
            text = actions[-1].strip()
        observed = self._act(text)
        return Outcome(
            () if observed.done else self.codec.answer(observed.text, token_ids),
            observed.reward,
            observed.done,
        )

    @abstractmethod
    def _begin(self, seed: int) -> str:
        """Start an episode and return its first observation."""

    @abstractmethod
    def _act(self, action: str) -> Observed:
        """Run the action that the model chose."""


@register_environment("gymnasium")
class GymnasiumText(TextEnvironment):
    """A Gymnasium environment whose observations are text, or that can render itself as text (`ansi`).

    Options:
        id: the environment's id for `gymnasium.make`.
        modules: modules to import first, which register the environment.
        make: further keyword arguments of `gymnasium.make`.
        actions: word -> the action that it stands for (an integer in a discrete space); None: actions are text.
        unknown: message to the model after an unknown word; {actions} is replaced by the known words.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        id: str,
        modules: Sequence[str] = (),
        make: Mapping[str, Any] | None = None,
        actions: Mapping[str, Any] | None = None,
        unknown: str = "There is no such action; there are: {actions}.",
        **options: Any,
    ) -> None:
        super().__init__(codec, **options)
        gymnasium = _module("gymnasium", "text-games")
        for name in modules:
            load_module(name, "environment.options.modules")
        self.actions = (
            {str(word).lower(): value for word, value in actions.items()}
            if actions is not None
            else None
        )
        self.unknown = unknown
        arguments = dict(make or {})
        spec = gymnasium.spec(id)
        modes = getattr(_entry(spec), "metadata", {}).get("render_modes", ())
        self.renders = "ansi" in modes
        self.inner = gymnasium.make(
            id, **({"render_mode": "ansi"} if self.renders else {}), **arguments
        )

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self.renders:
            return str(self.inner.render()).strip()
        raise EpisodeError(
            f"environment 'gymnasium': {self.inner.spec.id} observes {type(observation).__name__}, and does not render "
            "itself as text (ansi). Wrap it in one that gives text."
        )

    def _begin(self, seed: int) -> str:
        observation, _ = self.inner.reset(seed=seed % 2**31)
        return self._text(observation)

    def _act(self, action: str) -> Observed:
        chosen: Any = action
        if self.actions is not None:
            if action.lower() not in self.actions:
                return Observed(
                    self.unknown.replace("{actions}", ", ".join(self.actions)),
                    self.no_action_reward,
                )
            chosen = self.actions[action.lower()]
        observation, reward, terminated, truncated, _ = self.inner.step(chosen)
        done = bool(terminated or truncated)
        return Observed("" if done else self._text(observation), float(reward), done)

    def close(self) -> None:
        self.inner.close()


@register_environment("textarena")
class TextArenaGame(TextEnvironment):
    """A TextArena game for one player, with a reward at its end.

    Options:
        id: the game's id for `textarena.make`.
        make: further keyword arguments of `textarena.make`.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(codec, **options)
        self.inner = _module("textarena", "textarena").make(id, **(make or {}))

    def _begin(self, seed: int) -> str:
        self.inner.reset(num_players=1, seed=seed % 2**31)
        return str(self.inner.get_observation()[1]).strip()

    def _act(self, action: str) -> Observed:
        done, _ = self.inner.step(action)
        if not done:
            return Observed(str(self.inner.get_observation()[1]).strip())
        rewards, _ = self.inner.close()
        return Observed("", float(rewards[0]), True)


@register_environment("openenv")
class OpenEnvClient(TextEnvironment):
    """An environment behind OpenEnv's protocol (JSON messages over a WebSocket), in any process or container.

    Options:
        url: URL of its server, http(s):// or ws(s)://.
        action_key: field of an action that holds the model's text.
        fields: other fields of every action.
        observation_key: field of an observation that the model reads; None: the whole observation, as JSON.
        seconds: time limit of one answer.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        url: str,
        action_key: str = "message",
        fields: Mapping[str, Any] | None = None,
        observation_key: str | None = None,
        seconds: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(codec, **options)
        self.url = re.sub(r"^http", "ws", url.rstrip("/")) + "/ws"
        self.action_key, self.fields, self.key, self.seconds = (
            action_key,
            dict(fields or {}),
            observation_key,
            seconds,
        )
        self._socket: Any = None

    def _begin(self, seed: int) -> str:
        connect = _module("websockets.sync.client", "openenv").connect
        try:
            self._socket = connect(
                self.url, open_timeout=self.seconds, max_size=2**26, proxy=None
            )
        except (OSError, TimeoutError) as error:
            raise EnvironmentFault(
                f"environment 'openenv': {self.url} does not answer ({error}). Start its server."
            ) from error
        return self._ask("reset", {"seed": seed % 2**31}).text

    def _act(self, action: str) -> Observed:
        return self._ask("step", {**self.fields, self.action_key: action})

    def close(self) -> None:
        if self._socket is not None:
            # The server may be gone already.
            with suppress(Exception):
                self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _ask(self, kind: str, data: dict[str, Any]) -> Observed:
        """Send a message and return the answer. The model reads an error of a step.

        Raises:
            EnvironmentFault: the server is gone, takes too long, or refuses to begin.
        """
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            received = self._socket.recv(timeout=self.seconds)
        except Exception as error:  # whatever the socket raises: closed, too late
            raise EnvironmentFault(
                f"environment 'openenv': {self.url}: {describe(error)}"
            ) from error
        try:
            return self._observed(received)
        except (ValueError, TypeError, AttributeError) as error:
            problem = str(error)
        if kind == "step":
            return Observed(f"error: {problem}", self.no_action_reward)
        raise EnvironmentFault(f"environment 'openenv': {self.url}: {problem}")

    def _observed(self, received: str | bytes) -> Observed:
        """Read the server's answer.

        Raises:
            ValueError, TypeError, AttributeError: it reports an error, or cannot be read.
        """
        answer = read_json(received)
        data = answer.get("data", {})
        if answer.get("type") == "error":
            raise ValueError(str(data.get("message", answer)))
        observation = data.get("observation", {})
        whole = self.key is None or not isinstance(observation, dict)
        text = (
            json.dumps(observation, ensure_ascii=False)
            if whole
            else str(observation.get(self.key, ""))
        )
        reward = data.get("reward")
        return Observed(
            text, 0.0 if reward is None else read_number(reward), bool(data.get("done"))
        )


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EpisodeError(
            f"this environment needs {name.partition('.')[0]}: pip install 'megaverl[{extra}]'."
        ) from error


def _entry(spec: Any) -> Any:
    """Return the class that an environment's entry point names."""
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    module, _, name = spec.entry_point.partition(":")
    return getattr(importlib.import_module(module), name)
