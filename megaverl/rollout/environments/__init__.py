"""Environments: episodes of several turns, tools, and games of several agents. Episodes go turn by turn: all that are
still running write their next turns in one request to the engine. An agent may hold several conversations in one, and
write in several of them at the same time."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
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
        turn: of this conversation; where its name follows from `token_ids`, how many have asked the same before.
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
            first. writing: those whose turns come next.
        rounds: of each turn, when it was asked for; the same for those that overlapped. untrained: turns that do not
            train.
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
    writing: list[int] = field(default_factory=lambda: [0])
    rounds: list[int] = field(default_factory=list)
    untrained: set[int] = field(default_factory=set)
    asked: dict[int, int] = field(default_factory=lambda: {0: 0})  # the round of the turns that come next
    same: Counter[str] = field(default_factory=Counter)  # by content, how many have asked for a turn after it

    def write(self, generation: Generation, conversation: int = 0) -> None:
        """The model's next turn in a conversation."""
        self._add(conversation, generation.token_ids, True, generation.log_probs, len(self.rewards))
        self.rewards.append(0.0)
        self.rounds.append(self.asked[conversation])

    def read(self, outcome: Outcome) -> None:
        """What the environment put in: of a conversation that begins, its prompt.

        Raises:
            EpisodeError: a conversation that there is not, or one that begins with nothing.
        """
        self.writing = []
        for each in (outcome, *outcome.also):
            number, count = each.conversation, len(each.token_ids)
            begins = number == len(self.others) + 1
            if not 0 <= number <= len(self.others) + 1 or (begins and not count) or number in self.writing:
                raise EpisodeError(
                    f"an outcome of {count} tokens for conversation {number}; there are {len(self.others) + 1}, "
                    "counted from 0, the next begins with a prompt, and each is written in once at a time."
                )
            self.writing.append(number)
            self.asked[number] = max(self.asked.values()) + (not each.overlaps)
            if begins:
                self.others.append(list(each.token_ids))
            else:
                self._add(number, each.token_ids, False, [0.0] * count, max(len(self.rewards) - 1, 0))

    def _add(
        self, conversation: int, token_ids: Sequence[int], own: bool, log_probs: Sequence[float], turn: int
    ) -> None:
        count = len(token_ids)
        self.tokens += token_ids
        self.own += [own] * count
        self.log_probs += log_probs
        self.turns += [turn] * count
        self.places += [conversation] * count

    def settle(self) -> None:
        """Make it what it would be had turns that overlapped come in another order: among them one that goes on from
        fewer turns is first, then follows what they read; and the first to go on from a turn stays in its conversation.
        """
        if len({*self.rounds}) == len(self.rounds):
            return
        found: dict[int, DrawnTurn] = {}
        for number, prompt in enumerate(self.prompts):
            part, size = self.conversation(number), len(prompt)
            for begin, end in part.spans:
                ids = [*prompt, *part.tokens[:end]]
                found[part.turns[begin]] = DrawnTurn(ids, size + begin, part.log_probs[begin:end])
        longest = sorted(found.values(), key=lambda turn: -len(turn.ids))
        for turn in sorted(found.values(), key=lambda turn: turn.start):
            turn.after = next((one for one in longest if one.is_before(turn)), None)
            turn.depth = 0 if turn.after is None else turn.after.depth + 1
        order = sorted(found, key=lambda old: (self.rounds[old], found[old].depth, digest(found[old].read)))
        new, ends, prompts = View([]), dict[int, int](), list[list[int]]()
        for number, turn in enumerate(found[old] for old in order):
            place = ends.pop(id(turn.after), len(prompts))
            if turn.after is None or place == len(prompts):
                prompts.append(turn.read)
            else:
                between = turn.read[len(turn.after.ids) :]
                new._add(place, between, False, [0.0] * len(between), number - 1)
            new._add(place, turn.ids[turn.start :], True, turn.log_probs, number)
            ends[id(turn)] = place
        self.prompt, *self.others = prompts
        self.rewards = [self.rewards[old] for old in order]
        self.untrained = {number for number, old in enumerate(order) if old in self.untrained}
        self.tokens, self.own, self.log_probs = new.tokens, new.own, new.log_probs
        self.turns, self.places = new.turns, new.places

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
            untrained=self.untrained,
        )
        part.rewards = [self.rewards[part.turns[begin]] for begin, _ in part.spans]
        return part

    def conversations(self) -> list[View]:
        """Each that has a turn which trains or is paid, by itself: the one with the last turn at the end, whatever that
        is, and before it the others in the order of their names, whichever began first."""
        wrote = {each: turn for each, turn, own in zip(self.places, self.turns, self.own, strict=True) if own}
        last = max(wrote, key=lambda number: wrote[number], default=0)
        columns = zip(self.places, self.turns, self.trained, strict=True)
        kept = {each for each, turn, trains in columns if trains or (self.rewards and self.rewards[turn])}
        return [self.conversation(number) for number in (*sorted(kept & wrote.keys() - {last}, key=self.name), last)]

    @property
    def trained(self) -> list[bool]:
        """Which of `tokens` the model wrote in turns that train."""
        return [own and turn not in self.untrained for own, turn in zip(self.own, self.turns, strict=True)]

    def name(self, number: int) -> str:
        """What a conversation is called, whichever began before it: by its prompt; the first has none."""
        if not number:
            return ""
        same = [place for place, prompt in enumerate(self.prompts) if prompt == self.prompts[number] and place]
        return f"{digest(self.prompts[number])}/{same.index(number)}"


@dataclass
class DrawnTurn:
    """A turn: all that was read before it and what was written from `start` on; the turn that it goes on from, and how
    many those are."""

    ids: list[int]
    start: int
    log_probs: list[float]
    after: DrawnTurn | None = None
    depth: int = 0

    @property
    def read(self) -> list[int]:
        return self.ids[: self.start]

    def is_before(self, other: DrawnTurn) -> bool:
        """The other goes on from it."""
        size = len(self.ids)
        return size < other.start and other.ids[size - 1] == self.ids[-1] and other.ids[:size] == self.ids


def digest(token_ids: Sequence[int]) -> str:
    """Of any number of tokens, 16 characters."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


Views = dict[str, View]


@dataclass(frozen=True)
class Turns:
    """What a step of an episode led to: its outcomes, and who writes next."""

    outcomes: Mapping[str, Outcome]
    acting: Sequence[str]


# turns by agent, one of each conversation that is written in, by episode -> what they led to, by episode
Step = Callable[[Mapping[int, Mapping[str, list[list[int]]]]], Mapping[int, Turns]]
Generate = Callable[[Sequence[Request]], "Sequence[Generation]"]


def play(
    prompts: Sequence[Mapping[str, Sequence[int]]],
    acting: Sequence[Sequence[str]],
    *,
    generate: Generate,
    step: Step,
    limits: Limits,
    by_content: bool = False,
) -> list[Views]:
    """Play all episodes to their ends; returns the views of each.

    Args:
        prompts: of every agent, by episode. acting: who writes first.
        by_content: see `Environment`.

    Raises:
        EpisodeError: an outcome for an agent that there is not; an episode in which nobody acts and that is not over.
    """
    episodes: list[Views] = [{agent: View(list(ids)) for agent, ids in each.items()} for each in prompts]
    waiting = {number: list(agents) for number, agents in enumerate(acting)}
    while waiting:
        _end_those_without_room(episodes, waiting, limits)
        places = [
            (number, agent, conversation)
            for number, agents in waiting.items()
            for agent in agents
            for conversation in episodes[number][agent].writing
        ]
        if not places:
            break
        requests = [_request(*place, episodes[place[0]][place[1]], by_content) for place in places]
        written: dict[int, dict[str, list[list[int]]]] = {}
        for (number, agent, conversation), generation in zip(places, generate(requests), strict=True):
            episodes[number][agent].write(generation, conversation)
            written.setdefault(number, {}).setdefault(agent, []).append(list(generation.token_ids))
        waiting = {}
        for number, led_to in step(written).items():
            if _take_in(episodes[number], led_to, number):
                waiting[number] = list(led_to.acting)
    return episodes


def _request(episode: int, agent: str, conversation: int, view: View, by_content: bool) -> Request:
    now = view.conversation(conversation)
    token_ids = [*now.prompt, *now.tokens]
    if by_content:
        name = digest(token_ids)
        view.same[name] += 1
        return Request(episode, agent, view.same[name] - 1, token_ids, name)
    return Request(episode, agent, len(now.rewards), token_ids, view.name(conversation))


def _end_those_without_room(episodes: Sequence[Views], waiting: dict[int, list[str]], limits: Limits) -> None:
    """An episode ends for all as soon as one of its agents may not write any more."""
    for number, agents in list(waiting.items()):
        views = [episodes[number][agent] for agent in agents]
        if any(len(view.rewards) + len(view.writing) > limits.max_turns for view in views):
            reason = "turns"
        elif any(_is_full(view, limits) for view in views):
            reason = "length"
        else:
            continue
        for view in episodes[number].values():
            _end(view, reason)
        del waiting[number]


def _is_full(view: View, limits: Limits) -> bool:
    return any(
        view.places.count(number) + limits.turn_tokens > limits.total_tokens
        or (number and limits.prompt_tokens is not None and len(view.prompts[number]) > limits.prompt_tokens)
        for number in view.writing
    )


def _end(view: View, reason: str) -> None:
    """What the environment said last in a conversation leads nowhere: nothing is predicted from it."""
    view.finish_reason = reason
    ends = {each: place for place, (each, own) in enumerate(zip(view.places, view.own, strict=True)) if own}
    kept = [place for place, each in enumerate(view.places) if place <= ends.get(each, -1)]
    columns: tuple[list[Any], ...] = (view.tokens, view.own, view.log_probs, view.turns, view.places)
    for column in columns:
        column[:] = [column[place] for place in kept]
    view.settle()


def _take_in(views: Views, led_to: Turns, number: int) -> bool:
    """The outcomes of one episode; returns whether it goes on."""
    done = any(outcome.done for outcome in led_to.outcomes.values())
    for agent in views.keys() & led_to.outcomes.keys():
        view = views[agent]
        wrote = len(view.rewards) - len(view.writing)
        view.untrained.update(wrote + place for place in led_to.outcomes[agent].untrained)
    for view in views.values() if done else ():
        _end(view, "stop")
    for agent, outcome in led_to.outcomes.items():
        if agent not in views:
            raise EpisodeError(f"episode {number}: an outcome for '{agent}'; its agents are {', '.join(views)}.")
        view = views[agent]
        if view.rewards:
            view.rewards[-1] += outcome.reward
        elif outcome.reward:
            raise EpisodeError(f"episode {number}: a reward for '{agent}', who has not written a turn yet.")
        if not done:
            view.read(outcome)
    if not done and not led_to.acting:
        raise EpisodeError(f"episode {number}: it is not over, and nobody writes the next turn.")
    return not done
