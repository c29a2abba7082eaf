"""What an environment is: token ids of a turn in, token ids of the answer out. Nothing generated is tokenised again.

Two kinds. An `Environment` answers one model, turn by turn. A `Game` has several agents, each of which sees a view of
its own, writes turns of its own and gets rewards of its own. One object is one episode. Both are known by name, or as
`module:object` of the user's own.
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

ALONE = "policy"  # the one agent of an Environment


@dataclass(frozen=True)
class Limits:
    """max_turns: of an agent. turn_tokens: most tokens of a turn. total_tokens: of everything after the prompt of a
    conversation. prompt_tokens: of the prompt of one that begins later; None: as many as there are."""

    max_turns: int
    turn_tokens: int
    total_tokens: int
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Start:
    """What an episode begins from.

    Attributes:
        token_ids: the row's prompt, as the model sees it. text: the same as text.
        reference, extra: the row's answer and other columns.
        seed: for whatever the environment draws; the same for all episodes of a group.
        limits: an agent that may not write any more ends the episode; None: not known.
    """

    token_ids: list[int]
    text: str = ""
    reference: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    limits: Limits | None = None


@dataclass(frozen=True)
class Outcome:
    """What a turn led to.

    Attributes:
        token_ids: what the model reads before its next turn; of no use in the last one.
        reward: of this turn.
        done: the episode is over.
        conversation: that the next turn is written in, by its number: 0 is the one that the episode began with, and one
            more than there are begins another, of which `token_ids` are the prompt. Each is a sample of its own.
        also: further conversations whose next turns are written at the same time; `step_each` gets the turns of all.
        overlaps: it was asked for before an earlier turn was answered: that it came later says nothing.
        untrained: which of the turns that led to it do not train, by their places; [0] where there was one.
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
        codec: between text and token ids. Options of a class of your own follow as keyword arguments; they come from
            `environment.options`.
    """

    # Steps wait for something outside this process: several episodes are taken side by side, in threads.
    waits: ClassVar[bool] = False
    # A turn's draws follow from what it reads, not from its number: turns of several conversations come in any order.
    by_content: ClassVar[bool] = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def reset(self, start: Start) -> Sequence[int]:
        """Begin; returns the prompt, by default the row's."""
        return start.token_ids

    @abstractmethod
    def step(self, token_ids: Sequence[int]) -> Outcome:
        """The model wrote `token_ids` (with the stop token, if it came to one)."""

    def step_each(self, turns: Sequence[Sequence[int]]) -> Outcome:
        """The same of as many turns as the last outcome has conversations: one, unless it has others `also`."""
        [token_ids] = turns
        return self.step(token_ids)

    def close(self) -> None:  # noqa: B027
        """The episode is over, whether it came to its end or not."""


class Game(ABC):
    """One episode of several agents. Every agent sees only what its own outcomes say.

    Attributes:
        agents: their names, the same in all episodes.
    """

    waits: ClassVar[bool] = False
    agents: ClassVar[tuple[str, ...]]

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    @abstractmethod
    def reset(self, start: Start) -> Mapping[str, Sequence[int]]:
        """Begin; returns the prompt of every agent."""

    @abstractmethod
    def acting(self) -> Sequence[str]:
        """Who writes the next turn; several write at the same time, without seeing each other's."""

    @abstractmethod
    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        """Those who were acting wrote these turns.

        Returns: an outcome for each agent whom it concerns, whether it wrote or not: its tokens come into that
            agent's view, its reward to that agent's last turn. One `done` ends the episode for all.
        """

    def step_each(self, turns: Mapping[str, Sequence[Sequence[int]]]) -> Mapping[str, Outcome]:
        """The same of several turns of an agent, of as many conversations."""
        return self.step({agent: one for agent, [one] in turns.items()})

    def close(self) -> None:  # noqa: B027
        """The episode is over, whether it came to its end or not."""


class Alone(Game):
    """An Environment as a game of one agent."""

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

    def step_each(self, turns: Mapping[str, Sequence[Sequence[int]]]) -> Mapping[str, Outcome]:
        return {ALONE: self.environment.step_each(turns[ALONE])}

    def close(self) -> None:
        self.environment.close()


TURN = "MEGAVERL-TURN-OF-THE-MODEL"


class TokenizerLike(Protocol):
    """`megaverl.data.tokenizers.Tokenizer`."""

    stop_token_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        where: str = "prompt",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str: ...


class Codec:
    """Encodes what an environment writes, and decodes what the model wrote.

    Args:
        chat: answers are messages of the tokenizer's chat template; else plain text.
    """

    def __init__(self, tokenizer: TokenizerLike, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a turn, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text by itself, with none of the special ones. Text is cleaned (`outside.clean`)."""
        return self.tokenizer.encode(clean(text))

    def prompt(self, text: str) -> list[int]:
        """The tokens that an episode begins with: under a chat template a user's message, up to the model's answer."""
        if not self.chat:
            return self.tokenizer.encode(clean(text), add_special_tokens=True)
        return self.encode(self.tokenizer.render_chat([{"role": "user", "content": clean(text)}]))

    def answer(self, text: str, turn: Sequence[int], *, role: str = "user") -> list[int]:
        """The tokens that follow the model's `turn` when `text` answers it, up to where its next turn begins.

        Under a chat template that is all that the template writes between two turns of the assistant, the end of
        the first included if the turn did not come to one.

        Raises:
            DataError: the chat template refuses a message of this role.
        """
        return self.answers([{"role": role, "content": clean(text)}], turn) if self.chat else self.encode(text)

    def answers(self, messages: Sequence[dict[str, Any]], turn: Sequence[int]) -> list[int]:
        """The same of several messages, under a chat template."""
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}]
        role = messages[0]["role"]
        rendered = self.tokenizer.render_chat(
            [*before, *messages], where=f"an environment's answer in the role '{role}'"
        )
        tokens = self.encode(rendered.rpartition(TURN)[2])
        ended = bool(turn) and turn[-1] in self.tokenizer.stop_token_ids
        return tokens[1:] if ended and tokens[:1] and tokens[0] in self.tokenizer.stop_token_ids else tokens


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
}
_REGISTERED: dict[str, Kind] = {}


def register_environment(name: str) -> Callable[[T], T]:
    """Decorator: makes a class known to configurations as `name`.

    Raises:
        ConfigError: the name is taken by another.
    """

    def register(kind: T) -> T:
        if name in _REGISTERED:
            raise ConfigError(f"an environment named '{name}' is registered already; choose another name")
        _REGISTERED[name] = kind
        return kind

    return register


def environment_names() -> list[str]:
    """Of all that are registered or come with the package."""
    return sorted({*BUILT_IN, *_REGISTERED})


def find_environment(name: str) -> Kind:
    """The class that a configuration names.

    Raises:
        ConfigError: unknown (the nearest names are listed), not importable, or no environment.
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
    found = load_object(name, "environment.name")
    if not (inspect.isclass(found) and issubclass(found, Environment | Game)):
        raise ConfigError(f"environment '{name}' is not a class derived from Environment or Game: found {found!r:.80}")
    return found


def make_game(name: str, codec: Codec, options: Mapping[str, Any]) -> Game:
    """One episode of the environment or game `name`.

    Raises:
        ConfigError: unknown, or options that it does not take.
    """
    kind = find_environment(name)
    made = kind(codec, **options)
    return made if isinstance(made, Game) else Alone(made)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """See that the class can be made with these options.

    Raises:
        ConfigError: names what it takes.
    """
    kind = find_environment(name)
    signature = inspect.signature(kind)
    try:
        signature.bind("codec", **options)
    except TypeError as error:
        taken = [key for key in signature.parameters if key != "codec"]
        raise ConfigError(f"environment '{name}' takes {', '.join(taken) or 'no options'}: {error}") from error
    check = getattr(kind, "check", None)
    if check is not None:
        with user_code(
            lambda error: ConfigError(f"environment '{name}': check() raised {describe(error)}"), keep=ConfigError
        ):
            check(**options)


def agents_of(name: str) -> tuple[str, ...]:
    """Who plays in it."""
    kind = find_environment(name)
    return kind.agents if issubclass(kind, Game) else Alone.agents
