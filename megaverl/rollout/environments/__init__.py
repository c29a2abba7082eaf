"""Environments: episodes of several turns, tools, and games of several agents. Episodes go turn by turn: all that are
still running write their next turns in one request to the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megaverl.errors import EpisodeError
from megaverl.rollout.environments.environment import (
    ALONE,
    Codec,
    Environment,
    Game,
    Outcome,
    Start,
    agents_of,
    check_options,
    environment_names,
    find_environment,
    make_game,
    register_environment,
)

if TYPE_CHECKING:
    from megaverl.rollout.engine import Generation

__all__ = [
    "ALONE",
    "Codec",
    "Environment",
    "Game",
    "Limits",
    "Outcome",
    "Request",
    "Start",
    "Turns",
    "View",
    "Views",
    "agents_of",
    "check_options",
    "environment_names",
    "find_environment",
    "make_game",
    "play",
    "register_environment",
]


@dataclass(frozen=True)
class Request:
    """An agent's next turn in an episode: `token_ids` is all that it has seen and written so far."""

    episode: int
    agent: str
    turn: int
    token_ids: list[int]


@dataclass
class View:
    """One agent's side of an episode: its prompt, and what followed it.

    Attributes:
        tokens: the model's turns and the environment's answers, as they came. own: which of them the model wrote.
        log_probs: the engine's, 0 for what it did not write. turns: number of the turn, of own tokens.
        rewards: by turn.
        finish_reason: `stop` (the episode came to its end), `length` (no room for another turn) or `turns`
            (`max_turns` were taken).
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: str = ""

    def write(self, generation: Generation) -> None:
        """The model's next turn."""
        count = len(generation.token_ids)
        self.tokens += generation.token_ids
        self.own += [True] * count
        self.log_probs += generation.log_probs
        self.turns += [len(self.rewards)] * count
        self.rewards.append(0.0)

    def read(self, token_ids: Sequence[int]) -> None:
        """What the environment put in."""
        self.tokens += token_ids
        self.own += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.turns += [max(len(self.rewards) - 1, 0)] * len(token_ids)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of every turn of the model's, among `tokens`."""
        found: dict[int, tuple[int, int]] = {}
        for place, (turn, own) in enumerate(zip(self.turns, self.own, strict=True)):
            if own:
                found[turn] = (found.get(turn, (place, 0))[0], place + 1)
        return list(found.values())


Views = dict[str, View]


@dataclass(frozen=True)
class Turns:
    """What a step of an episode led to: its outcomes, and who writes next."""

    outcomes: Mapping[str, Outcome]
    acting: Sequence[str]


@dataclass(frozen=True)
class Limits:
    """max_turns: of an agent. turn_tokens: most tokens of a turn. total_tokens: of everything after the prompt."""

    max_turns: int
    turn_tokens: int
    total_tokens: int


# turns by agent, by episode -> what they led to, by episode
Step = Callable[[Mapping[int, Mapping[str, list[int]]]], Mapping[int, Turns]]
Generate = Callable[[Sequence[Request]], "Sequence[Generation]"]


def play(
    prompts: Sequence[Mapping[str, Sequence[int]]],
    acting: Sequence[Sequence[str]],
    *,
    generate: Generate,
    step: Step,
    limits: Limits,
) -> list[Views]:
    """Play all episodes to their ends; returns the views of each.

    Args:
        prompts: of every agent, by episode. acting: who writes first.

    Raises:
        EpisodeError: an outcome for an agent that there is not; an episode in which nobody acts and that is not over.
    """
    episodes: list[Views] = [{agent: View(list(ids)) for agent, ids in each.items()} for each in prompts]
    waiting = {number: list(agents) for number, agents in enumerate(acting)}
    while waiting:
        _end_those_without_room(episodes, waiting, limits)
        requests = [
            Request(number, agent, len(view.rewards), [*view.prompt, *view.tokens])
            for number, agents in waiting.items()
            for agent, view in ((agent, episodes[number][agent]) for agent in agents)
        ]
        if not requests:
            break
        written: dict[int, dict[str, list[int]]] = {}
        for request, generation in zip(requests, generate(requests), strict=True):
            episodes[request.episode][request.agent].write(generation)
            written.setdefault(request.episode, {})[request.agent] = list(generation.token_ids)
        waiting = {}
        for number, led_to in step(written).items():
            if _take_in(episodes[number], led_to, number):
                waiting[number] = list(led_to.acting)
    return episodes


def _end_those_without_room(episodes: Sequence[Views], waiting: dict[int, list[str]], limits: Limits) -> None:
    """An episode ends for all as soon as one of its agents may not write any more."""
    for number, agents in list(waiting.items()):
        views = [episodes[number][agent] for agent in agents]
        if any(len(view.rewards) >= limits.max_turns for view in views):
            reason = "turns"
        elif any(len(view.tokens) + limits.turn_tokens > limits.total_tokens for view in views):
            reason = "length"
        else:
            continue
        for view in episodes[number].values():
            view.finish_reason = reason
            _drop_unanswered(view)
        del waiting[number]


def _drop_unanswered(view: View) -> None:
    """What the environment said last leads nowhere: nothing is predicted from it."""
    end = max((place + 1 for place, own in enumerate(view.own) if own), default=0)
    for column in (view.tokens, view.own, view.log_probs, view.turns):
        del column[end:]


def _take_in(views: Views, led_to: Turns, number: int) -> bool:
    """The outcomes of one episode; returns whether it goes on."""
    done = any(outcome.done for outcome in led_to.outcomes.values())
    for agent, outcome in led_to.outcomes.items():
        if agent not in views:
            raise EpisodeError(f"episode {number}: an outcome for '{agent}'; its agents are {', '.join(views)}.")
        view = views[agent]
        if view.rewards:
            view.rewards[-1] += outcome.reward
        elif outcome.reward:
            raise EpisodeError(f"episode {number}: a reward for '{agent}', who has not written a turn yet.")
        if not done:
            view.read(outcome.token_ids)
    if done:
        for view in views.values():
            view.finish_reason = "stop"
            _drop_unanswered(view)
    elif not led_to.acting:
        raise EpisodeError(f"episode {number}: it is not over, and nobody writes the next turn.")
    return not done
