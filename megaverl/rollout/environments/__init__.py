"""Environments: episodes of several turns, tools, and games of several agents. Episodes go turn by turn: all that are
still running write their next turns in one request to the engine. An agent may hold several conversations in one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaverl.errors import EpisodeError
from megaverl.rollout.environments.environment import (
    ALONE,
    Codec,
    Environment,
    Game,
    Limits,
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
    """An agent's next turn in an episode.

    Attributes:
        conversation: what tells it from the agent's others; empty: the first.
        turn: of this conversation.
        token_ids: all that was seen and written in it so far.
    """

    episode: int
    agent: str
    turn: int
    token_ids: list[int]
    conversation: str = ""


@dataclass
class View:
    """One agent's side of an episode: its prompt, and what followed it.

    Attributes:
        tokens: the model's turns and the environment's answers, as they came. own: which of them the model wrote.
        log_probs: the engine's, 0 for what it did not write. turns: number of the turn, of own tokens.
        rewards: by turn.
        finish_reason: `stop` (the episode came to its end), `length` (no room for another turn) or `turns`
            (`max_turns` were taken).
        others: prompts of the conversations that began after the first. places: which one each token is of, 0 the
            first. current: the one that is written in.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: str = ""
    others: list[list[int]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    current: int = 0

    def write(self, generation: Generation) -> None:
        """The model's next turn."""
        self._add(generation.token_ids, True, generation.log_probs, len(self.rewards))
        self.rewards.append(0.0)

    def read(self, token_ids: Sequence[int], conversation: int = 0) -> None:
        """What the environment put in: of a conversation that begins, its prompt.

        Raises:
            EpisodeError: a conversation that there is not, or one that begins with nothing.
        """
        begins = conversation == len(self.others) + 1
        if not 0 <= conversation <= len(self.others) + 1 or (begins and not token_ids):
            raise EpisodeError(
                f"an outcome of {len(token_ids)} tokens for conversation {conversation}; there are "
                f"{len(self.others) + 1}, counted from 0, and the next begins with a prompt."
            )
        self.current = conversation
        if begins:
            self.others.append(list(token_ids))
        else:
            self._add(token_ids, False, [0.0] * len(token_ids), max(len(self.rewards) - 1, 0))

    def _add(self, token_ids: Sequence[int], own: bool, log_probs: Sequence[float], turn: int) -> None:
        count = len(token_ids)
        self.tokens += token_ids
        self.own += [own] * count
        self.log_probs += log_probs
        self.turns += [turn] * count
        self.places += [self.current] * count

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of every turn of the model's, among `tokens`."""
        found: dict[int, tuple[int, int]] = {}
        for place, (turn, own) in enumerate(zip(self.turns, self.own, strict=True)):
            if own:
                found[turn] = (found.get(turn, (place, 0))[0], place + 1)
        return list(found.values())

    @property
    def prompts(self) -> list[list[int]]:
        """Of each conversation."""
        return [self.prompt, *self.others]

    def conversation(self, number: int) -> View:
        """One of them by itself; turns keep their numbers in the episode."""
        if not self.others:
            return self
        at = [place for place, each in enumerate(self.places) if each == number]
        part = View(
            self.prompts[number],
            [self.tokens[place] for place in at],
            [self.own[place] for place in at],
            [self.log_probs[place] for place in at],
            [self.turns[place] for place in at],
            finish_reason=self.finish_reason,
        )
        part.rewards = [self.rewards[part.turns[begin]] for begin, _ in part.spans]
        return part

    def conversations(self) -> list[View]:
        """Each that has a turn, by itself: the one with the last turn at the end, and before it the others in the order
        of their names, whichever began first."""
        wrote = {each: turn for each, turn, own in zip(self.places, self.turns, self.own, strict=True) if own}
        last = max(wrote, key=lambda number: wrote[number], default=0)
        return [self.conversation(number) for number in (*sorted(wrote.keys() - {last}, key=self.name), last)]

    def name(self, number: int) -> str:
        """What a conversation is called, whichever began before it: by its prompt; the first has none."""
        if not number:
            return ""
        same = [place for place, prompt in enumerate(self.prompts) if prompt == self.prompts[number] and place]
        return f"{hashlib.blake2b(str(self.prompts[number]).encode(), digest_size=8).hexdigest()}/{same.index(number)}"


Views = dict[str, View]


@dataclass(frozen=True)
class Turns:
    """What a step of an episode led to: its outcomes, and who writes next."""

    outcomes: Mapping[str, Outcome]
    acting: Sequence[str]


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
            _request(number, agent, episodes[number][agent]) for number, agents in waiting.items() for agent in agents
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


def _request(episode: int, agent: str, view: View) -> Request:
    now = view.conversation(view.current)
    return Request(episode, agent, len(now.rewards), [*now.prompt, *now.tokens], view.name(view.current))


def _end_those_without_room(episodes: Sequence[Views], waiting: dict[int, list[str]], limits: Limits) -> None:
    """An episode ends for all as soon as one of its agents may not write any more."""
    for number, agents in list(waiting.items()):
        views = [episodes[number][agent] for agent in agents]
        if any(len(view.rewards) >= limits.max_turns for view in views):
            reason = "turns"
        elif any(_is_full(view, limits) for view in views):
            reason = "length"
        else:
            continue
        for view in episodes[number].values():
            view.finish_reason = reason
            _drop_unanswered(view)
        del waiting[number]


def _is_full(view: View, limits: Limits) -> bool:
    if view.current and limits.prompt_tokens is not None and len(view.prompts[view.current]) > limits.prompt_tokens:
        return True
    return view.places.count(view.current) + limits.turn_tokens > limits.total_tokens


def _drop_unanswered(view: View) -> None:
    """What the environment said last in a conversation leads nowhere: nothing is predicted from it."""
    ends = {each: place for place, (each, own) in enumerate(zip(view.places, view.own, strict=True)) if own}
    kept = [place for place, each in enumerate(view.places) if place <= ends.get(each, -1)]
    columns: tuple[list[Any], ...] = (view.tokens, view.own, view.log_probs, view.turns, view.places)
    for column in columns:
        column[:] = [column[place] for place in kept]


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
            view.read(outcome.token_ids, outcome.conversation)
    if done:
        for view in views.values():
            view.finish_reason = "stop"
            _drop_unanswered(view)
    elif not led_to.acting:
        raise EpisodeError(f"episode {number}: it is not over, and nobody writes the next turn.")
    return not done
