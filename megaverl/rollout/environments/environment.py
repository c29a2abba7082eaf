"""Interface of environments: token ids of a turn in, token ids of the answer out.
Generated tokens are never re-tokenised.

An `Environment` answers one model, turn by turn. A `Game` has several agents, and each
has its own view, turns and rewards. One object is one episode. Configurations name both
kinds by registered name, or as `module:object` of the user.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from megaverl.errors import ConfigError
from megaverl.outside import clean
from megaverl.plugins import load_object
from megaverl.user_code import describe, user_code

ALONE = "policy"  # name of the single agent of an Environment


@dataclass(frozen=True)
class Limits:
    """Limits of an episode.

    Attributes:
        max_turns: turns of an agent.
        turn_tokens: most tokens of a turn.
        total_tokens: most tokens after the prompt of a conversation.
        prompt_tokens: most tokens in the prompt of a later conversation; None: no limit.
    """

    max_turns: int
    turn_tokens: int
    total_tokens: int
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Start:
    """Input of an episode.

    Attributes:
        token_ids: the row's prompt, as the model sees it.
        text: the row's prompt as text.
        reference, extra: the row's answer and its other columns.
        seed: seed of the environment's random draws; equal for all episodes of a group.
        limits: limits of the run; an agent that reaches one ends the episode. None: unknown.
    """

    token_ids: list[int]
    text: str = ""
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    limits: Limits | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a turn.

    Attributes:
        token_ids: tokens that the model reads before its next turn; unused after the last turn.
        reward: reward of this turn.
        done: the episode is over.
        conversation: index of the conversation for the next turn. 0 is the one that the episode began with. One more
            than there are begins another, with `token_ids` as its prompt. Each conversation is a sample of its own.
        also: further conversations whose next turns are written at the same time; `step_each` gets the turns of all.
        overlaps: the turn was requested before an earlier turn was answered, so their order has no meaning.
        untrained: indices of the turns in this step that do not train; [0] if the step has one turn.
    """

    token_ids: Sequence[int] = ()
    reward: float = 0.0
    done: bool = False
    conversation: int = 0
    also: Sequence[Outcome] = ()
    overlaps: bool = False
    untrained: Sequence[int] = ()


class Environment(ABC):
    """One episode with one model.

    Args:
        codec: converts between text and token ids. Options of a subclass follow as keyword arguments; their values come
            from `environment.options`.

    Example:
        class Echo(Environment):
            def step(self, token_ids):
                text = self.codec.decode(token_ids)
                return Outcome(self.codec.answer(text, token_ids), reward=float("yes" in text))
    """

    # True if steps wait for something outside this process. Episodes then step in
    # parallel threads.
    waits: ClassVar[bool] = False
    # True if turns of several conversations may arrive in any order. A turn's seed then
    # follows from what it reads, instead of from its number.
    by_content: ClassVar[bool] = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def reset(self, start: Start) -> Sequence[int]:
        """Begin the episode and return its prompt, by default the row's."""
        return start.token_ids

    @abstractmethod
    def step(self, token_ids: Sequence[int]) -> Outcome:
        """Answer a turn of the model.

        Args:
            token_ids: tokens of the turn, with the stop token if the model wrote one.
        """

    def step_each(self, turns: Sequence[Sequence[int]]) -> Outcome:
        """Answer one turn for each conversation of the last outcome: one, unless the outcome had others in `also`."""
        [token_ids] = turns
        return self.step(token_ids)

    def close(self) -> None:  # noqa: B027
        """Free resources when the episode is over, whether it came to its end or not."""


class Game(ABC):
    """One episode of several agents. Every agent sees only what its own outcomes contain.

    Attributes:
        agents: their names, the same in all episodes.
    """

    waits: ClassVar[bool] = False
    agents: ClassVar[tuple[str, ...]]

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abstractmethod
    def reset(self, start: Start) -> Mapping[str, Sequence[int]]:
        """Begin the episode and return the prompt of every agent."""

    @abstractmethod
    def acting(self) -> Sequence[str]:
        """Return the agents that write the next turn, at the same time and without seeing each other's turns."""

    @abstractmethod
    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        """Answer the turns of the acting agents.

        Returns:
            An outcome for each agent that is affected, whether it wrote or not: its tokens are appended to that agent's
                view,
            and its reward counts for that agent's last turn. One `done` ends the episode for all.
        """

    def step_each(
        self, turns: Mapping[str, Sequence[Sequence[int]]]
    ) -> Mapping[str, Outcome]:
        """Answer several turns of each agent, one for each of its conversations."""
        return self.step({agent: turn for agent, [turn] in turns.items()})

    def close(self) -> None:  # noqa: B027
        """Free resources when the episode is over, whether it came to its end or not."""


class Alone(Game):
    """Adapter of an Environment to a game with one agent."""

    agents = (ALONE,)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment.codec)
        self.environment = environment

    def reset(self, start: Start) -> Mapping[str, Sequence[int]]:
        return {ALONE: self.environment.reset(start)}

    def acting(self) -> Sequence[str]:
        return self.agents

    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        return {ALONE: self.environment.step(turns[ALONE])}

    def step_each(
        self, turns: Mapping[str, Sequence[Sequence[int]]]
    ) -> Mapping[str, Outcome]:
        return {ALONE: self.environment.step_each(turns[ALONE])}

    def close(self) -> None:
        self.environment.close()


TURN = "MEGAVERL-TURN-OF-THE-MODEL"


class TokenizerLike(Protocol):
    """The part of `megaverl.data.tokenizers.Tokenizer` that environments use."""

    stop_token_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str: ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        where: str = "prompt",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str: ...


class Codec:
    """Encodes the environment's text to tokens, and decodes the model's tokens to text.

    Args:
        chat: whether answers are messages of the tokenizer's chat template; otherwise they are plain text.
    """

    def __init__(self, tokenizer: TokenizerLike, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens. The text is cleaned first (`outside.clean`)."""
        return self.tokenizer.encode(clean(text))

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a first message; under a chat template, a user's message and the answer's beginning."""
        if not self.chat:
            return self.tokenizer.encode(clean(text), add_special_tokens=True)
        return self.encode(
            self.tokenizer.render_chat([{"role": "user", "content": clean(text)}])
        )

    def answer(
        self, text: str, turn: Sequence[int], *, role: str = "user"
    ) -> list[int]:
        """Return the tokens after the model's `turn` that answer it with `text`, up to where its next turn begins.

        Under a chat template these are all tokens that the template writes between two
        turns of the assistant, including the end of the first turn if the model did not
        write it.

        Raises:
            DataError: the chat template refuses a message of this role.
        """
        return (
            self.answers([{"role": role, "content": clean(text)}], turn)
            if self.chat
            else self.encode(text)
        )

    def answers(
        self, messages: Sequence[dict[str, Any]], turn: Sequence[int]
    ) -> list[int]:
        """Return the tokens of several messages after the model's `turn`, under a chat template."""
        before = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": TURN},
        ]
        role = messages[0]["role"]
        # The template renders a whole conversation with a marker as the model's turn.
        # The text after the marker is the answer.
        rendered = self.tokenizer.render_chat(
            [*before, *messages], where=f"an environment's answer in the role '{role}'"
        )
        tokens = self.encode(rendered.rpartition(TURN)[2])
        ended = bool(turn) and turn[-1] in self.tokenizer.stop_token_ids
        return (
            tokens[1:]
            if ended and tokens[:1] and tokens[0] in self.tokenizer.stop_token_ids
            else tokens
        )


Kind = type[Environment] | type[Game]
T = TypeVar("T", bound=Kind)

# name -> the module that registers it
BUILT_IN = {
    "tools": "megaverl.rollout.environments.tools",
    "guess": "megaverl.rollout.environments.games",
    "signals": "megaverl.rollout.environments.games",
    "gymnasium": "megaverl.rollout.environments.adapters",
    "textarena": "megaverl.rollout.environments.adapters",
    "openenv": "megaverl.rollout.environments.adapters",
    "gateway": "megaverl.rollout.environments.gateway",
    "verifiers": "megaverl.rollout.environments.verifiers",
    "harbor": "megaverl.rollout.environments.harbor",
    "nemo_gym": "megaverl.rollout.environments.nemo_gym",
}
_REGISTERED: dict[str, Kind] = {}


def register_environment(name: str) -> Callable[[T], T]:
    """Return a decorator that registers a class under `name` for configurations.

    Raises:
        ConfigError: another class has this name.
    """

    def register(kind: T) -> T:
        if name in _REGISTERED:
            raise ConfigError(
                f"an environment named '{name}' is registered already; choose another name"
            )
        _REGISTERED[name] = kind
        return kind

    return register


def environment_names() -> list[str]:
    """List the names of all environments that are registered or come with the package."""
    return sorted({*BUILT_IN, *_REGISTERED})


def find_environment(name: str) -> Kind:
    """Return the class that a configuration names.

    Raises:
        ConfigError: the name is unknown (the message lists similar ones), cannot be imported, or is not an environment.
    """
    if name in BUILT_IN:
        importlib.import_module(BUILT_IN[name])
    if name in _REGISTERED:
        return _REGISTERED[name]
    known = environment_names()
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(
            f"no environment '{name}'.{hint} There are: {', '.join(known)}; or a class of your own as module:object."
        )
    kind = load_object(name, "environment.name")
    if not (inspect.isclass(kind) and issubclass(kind, Environment | Game)):
        raise ConfigError(
            f"environment '{name}' is not a class derived from Environment or Game: found {kind!r:.80}"
        )
    return kind


def make_game(name: str, codec: Codec, options: Mapping[str, Any]) -> Game:
    """Return a new episode of the environment or game `name`.

    Raises:
        ConfigError: the name is unknown.
    """
    kind = find_environment(name)
    made = kind(codec, **options)
    return made if isinstance(made, Game) else Alone(made)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that the environment's class accepts these options.

    Raises:
        ConfigError: it does not; lists the options that it takes.
    """
    kind = find_environment(name)
    signature = inspect.signature(kind)
    try:
        signature.bind("codec", **options)
    except TypeError as error:
        taken = [key for key in signature.parameters if key != "codec"]
        raise ConfigError(
            f"environment '{name}' takes {', '.join(taken) or 'no options'}: {error}"
        ) from error
    check = getattr(kind, "check", None)
    if check is not None:
        with user_code(
            lambda error: ConfigError(
                f"environment '{name}': check() raised {describe(error)}"
            ),
            keep=ConfigError,
        ):
            check(**options)


def agents_of(name: str) -> tuple[str, ...]:
    """Return the names of the agents that play in an environment."""
    kind = find_environment(name)
    return kind.agents if issubclass(kind, Game) else Alone.agents
