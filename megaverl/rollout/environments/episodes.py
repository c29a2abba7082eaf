"""Episodes that advance turn by turn: all running episodes generate their next turns in one request to the engine.

An agent may hold several conversations in one episode, and write in several of them at
the same time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megaverl.errors import EpisodeError
from megaverl.rollout.environments.environment import (
    Limits,
    Outcome,
)
from megaverl.rollout.environments.faults import FAILED, Attempt, FailedCall, Faults

if TYPE_CHECKING:
    from megaverl.rollout.engine import Generation


@dataclass(frozen=True)
class Request:
    """Request for an agent's next turn in an episode.

    Attributes:
        conversation: name that tells the conversation from the agent's others; empty: the first.
        turn: index of the turn in this conversation. If the name is derived from `token_ids`, the number of earlier
            requests with the same tokens.
        token_ids: everything that was read and written in the conversation so far.
        replacement: number of draws of this episode that were given up (`Attempt`).
    """

    episode: int
    agent: str
    turn: int
    token_ids: list[int]
    conversation: str = ""
    replacement: int = 0


@dataclass
class View:
    """One agent's side of an episode: its prompt and everything after it.

    Lists with one entry per token: `tokens`, `own`, `log_probs`, `turns`, `places`.
    Lists with one entry per turn: `rewards`, `rounds`.

    Attributes:
        tokens: the model's turns and the environment's answers, in order of arrival.
        own: whether the model wrote the token.
        log_probs: the engine's log-probs; 0 for tokens that the model did not write.
        turns: turn that the token belongs to.
        rewards: reward of each turn.
        finish_reason: `stop` (the episode ended by itself), `length` (no room for another turn), `turns` (`max_turns`
            reached) or `failed` (its environment failed at every attempt; it has no turns).
        others: prompts of the conversations that began after the first.
        places: conversation that the token belongs to; 0 is the first.
        writing: conversations in which the model writes next.
        rounds: round in which each turn was requested; overlapping turns have the same.
        untrained: turns that do not train.
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
    # conversation -> round of its next turn.
    asked: dict[int, int] = field(default_factory=lambda: {0: 0})
    # Digest of the tokens so far -> requests for a turn after them.
    same: Counter[str] = field(default_factory=Counter)

    def write(self, generation: Generation, conversation: int = 0) -> None:
        """Append the model's next turn in a conversation."""
        self._add(
            conversation,
            generation.token_ids,
            True,
            generation.log_probs,
            len(self.rewards),
        )
        self.rewards.append(0.0)
        self.rounds.append(self.asked[conversation])

    def read(self, outcome: Outcome) -> None:
        """Append the environment's answer, or the prompt of a conversation that begins.

        Raises:
            EpisodeError: the conversation does not exist, or begins without a prompt.
        """
        self.writing = []
        for part in (outcome, *outcome.also):
            number, count = part.conversation, len(part.token_ids)
            begins = number == len(self.others) + 1
            if (
                not 0 <= number <= len(self.others) + 1
                or (begins and not count)
                or number in self.writing
            ):
                raise EpisodeError(
                    f"an outcome of {count} tokens for conversation {number}; there are {len(self.others) + 1}, "
                    "counted from 0, the next begins with a prompt, and each is written in once at a time."
                )
            self.writing.append(number)
            self.asked[number] = max(self.asked.values()) + (not part.overlaps)
            if begins:
                self.others.append(list(part.token_ids))
            else:
                self._add(
                    number,
                    part.token_ids,
                    False,
                    [0.0] * count,
                    max(len(self.rewards) - 1, 0),
                )

    def _add(
        self,
        conversation: int,
        token_ids: Sequence[int],
        own: bool,
        log_probs: Sequence[float],
        turn: int,
    ) -> None:
        count = len(token_ids)
        self.tokens += token_ids
        self.own += [own] * count
        self.log_probs += log_probs
        self.turns += [turn] * count
        self.places += [conversation] * count

    def settle(self) -> None:
        """Bring overlapping turns into an order that does not depend on timing.

        Turns that were requested in the same round may have arrived in any order. They
        are sorted by depth (the number of turns that they continue), then by a digest
        of what they read. The first turn that continues another one stays in its
        conversation; the others begin new ones.
        """
        if len({*self.rounds}) == len(self.rounds):
            return
        drawn_turns: dict[int, DrawnTurn] = {}
        for number, prompt in enumerate(self.prompts):
            part, size = self.conversation(number), len(prompt)
            for begin, end in part.spans:
                ids = [*prompt, *part.tokens[:end]]
                drawn_turns[part.turns[begin]] = DrawnTurn(
                    ids, size + begin, part.log_probs[begin:end]
                )
        # A turn continues the longest earlier turn whose tokens are a prefix of what it
        # reads.
        longest = sorted(drawn_turns.values(), key=lambda turn: -len(turn.ids))
        for turn in sorted(drawn_turns.values(), key=lambda turn: turn.start):
            turn.after = next(
                (earlier for earlier in longest if earlier.is_before(turn)), None
            )
            turn.depth = 0 if turn.after is None else turn.after.depth + 1
        order = sorted(
            drawn_turns,
            key=lambda old: (
                self.rounds[old],
                drawn_turns[old].depth,
                digest(drawn_turns[old].read),
            ),
        )
        new, ends, prompts = View([]), dict[int, int](), list[list[int]]()
        for number, turn in enumerate(drawn_turns[old] for old in order):
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
        self.untrained = {
            number for number, old in enumerate(order) if old in self.untrained
        }
        self.tokens, self.own, self.log_probs = new.tokens, new.own, new.log_probs
        self.turns, self.places = new.turns, new.places

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each of the model's turns, as indices into `tokens`."""
        by_turn: dict[int, tuple[int, int]] = {}
        for place, (turn, is_own) in enumerate(zip(self.turns, self.own, strict=True)):
            if is_own:
                by_turn[turn] = (by_turn.get(turn, (place, 0))[0], place + 1)
        return list(by_turn.values())

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each conversation."""
        return [self.prompt, *self.others]

    def conversation(self, number: int) -> View:
        """Return one conversation as a view of its own. Turns keep their numbers in the episode."""
        if not self.others:
            return self
        at = [
            place
            for place, place_number in enumerate(self.places)
            if place_number == number
        ]
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
        """List every conversation with a turn that trains or has a reward, as views of their own.

        The conversation with the last turn always comes, at the end. The others are
        ordered by name, so that the order does not depend on which began first.
        """
        # conversation -> its last turn that the model wrote
        last_turn: dict[int, int] = {}
        # Conversations with something to learn from: a token that trains, or a reward.
        kept: set[int] = set()
        tokens = zip(self.places, self.turns, self.own, self.trained, strict=True)
        for conversation, turn, is_own, trains in tokens:
            if is_own:
                last_turn[conversation] = turn
            if trains or (self.rewards and self.rewards[turn]):
                kept.add(conversation)
        last = max(last_turn, key=lambda number: last_turn[number], default=0)
        others = sorted(kept & last_turn.keys() - {last}, key=self.name)
        return [self.conversation(number) for number in (*others, last)]

    @property
    def trained(self) -> list[bool]:
        """True for tokens that the model wrote in turns that train."""
        return [
            is_own and turn not in self.untrained
            for is_own, turn in zip(self.own, self.turns, strict=True)
        ]

    def name(self, number: int) -> str:
        """Return a conversation's name, which follows from its prompt, not from the
        order of conversations; the first has none.
        """
        if not number:
            return ""
        same = [
            place
            for place, prompt in enumerate(self.prompts)
            if prompt == self.prompts[number] and place
        ]
        return f"{digest(self.prompts[number])}/{same.index(number)}"


@dataclass
class DrawnTurn:
    """A turn in its context, for `View.settle`.

    Attributes:
        ids: all tokens that were read before the turn, and the turn.
        start: index of the turn's first token in `ids`.
        after: the turn that this one continues.
        depth: number of turns that it continues.
    """

    ids: list[int]
    start: int
    log_probs: list[float]
    after: DrawnTurn | None = None
    depth: int = 0

    @property
    def read(self) -> list[int]:
        """Tokens before the turn."""
        return self.ids[: self.start]

    def is_before(self, other: DrawnTurn) -> bool:
        """Return whether `other` continues this turn."""
        size = len(self.ids)
        # Comparing one token first avoids most comparisons of whole lists.
        return (
            size < other.start
            and other.ids[size - 1] == self.ids[-1]
            and other.ids[:size] == self.ids
        )


def digest(token_ids: Sequence[int]) -> str:
    """Return a hash of the tokens, 16 characters long."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).hexdigest()


Views = dict[str, View]


@dataclass(frozen=True)
class Turns:
    """Result of one step of an episode: an outcome for each agent, and the agents that write next."""

    outcomes: Mapping[str, Outcome]
    acting: Sequence[str]


@dataclass(frozen=True)
class Begun:
    """Result of an episode's beginning: the prompt of every agent, and the agents that write first."""

    prompts: Mapping[str, Sequence[int]]
    acting: Sequence[str]


Begin = Callable[[Mapping[int, Attempt]], Mapping[int, Begun | FailedCall]]
# From episode -> agent -> its turns, one per conversation it wrote in, to episode ->
# results.
Step = Callable[
    [Mapping[int, Mapping[str, list[list[int]]]]], Mapping[int, Turns | FailedCall]
]
Generate = Callable[[Sequence[Request]], "Sequence[Generation]"]


def play(
    prompts: Sequence[Sequence[int]],
    agents: Sequence[str],
    *,
    begin: Begin,
    generate: Generate,
    step: Step,
    limits: Limits,
    faults: Faults,
    group_size: int = 1,
    by_content: bool = False,
) -> list[Views]:
    """Play all episodes to their ends and return each agent's view of each episode.

        loop until every episode is over:
            begin episodes, at first all, later those whose environment has failed
            end episodes without room for another turn
            generate the next turn of every writing agent, in one request
            step all environments, and append their answers to the views

    An attempt that follows a fault begins the episode anew. It has the same seeds, so
    the policy writes the same turns, and an environment without randomness of its own
    comes to where it failed.

    Args:
        prompts: the prompt of each row, which a lost episode shows.
        agents: names of the agents of every episode.
        begin: begins attempts at episodes.
        faults: decides what follows a fault of `begin` or `step`.
        group_size: number of consecutive episodes that are compared with each other.
        by_content: see `Environment`.

    Raises:
        EpisodeError: an outcome names an unknown agent, an episode goes on although no agent writes, or the environment
            does not work (`Faults.after`).
    """
    episodes: list[Views] = [{} for _ in prompts]
    waiting: dict[int, list[str]] = {}
    to_begin = faults.begin(len(prompts), group_size)
    replacements = dict.fromkeys(to_begin, 0)

    def give_up(
        failed: Mapping[int, FailedCall], retried: Mapping[int, Attempt]
    ) -> None:
        for number in failed.keys() - retried.keys():
            episodes[number] = {
                agent: View(list(prompts[number]), finish_reason=FAILED)
                for agent in agents
            }

    while waiting or to_begin:
        if to_begin:
            replacements |= {
                number: attempt.replacement for number, attempt in to_begin.items()
            }
            failed: dict[int, FailedCall] = {}
            begun = begin(to_begin)
            for number, result in sorted(begun.items()):
                if isinstance(result, FailedCall):
                    failed[number] = result
                    continue
                episodes[number] = {
                    agent: View(list(ids)) for agent, ids in result.prompts.items()
                }
                waiting[number] = list(result.acting)
            to_begin = faults.after("reset", begun.keys(), failed)
            give_up(failed, to_begin)
        running = len(waiting)
        _end_those_without_room(episodes, waiting, limits)
        faults.finished(running - len(waiting))
        places = [
            (number, agent, conversation)
            for number, acting in sorted(waiting.items())
            for agent in acting
            for conversation in episodes[number][agent].writing
        ]
        if not places:
            waiting = {}
            continue
        requests = [
            _request(
                *place, episodes[place[0]][place[1]], by_content, replacements[place[0]]
            )
            for place in places
        ]
        written: dict[int, dict[str, list[list[int]]]] = {}
        for (number, agent, conversation), generation in zip(
            places, generate(requests), strict=True
        ):
            episodes[number][agent].write(generation, conversation)
            written.setdefault(number, {}).setdefault(agent, []).append(
                list(generation.token_ids)
            )
        waiting, failed = {}, {}
        results = step(written)
        for number, led_to in results.items():
            if isinstance(led_to, FailedCall):
                failed[number] = led_to
            elif _take_in(episodes[number], led_to, number):
                waiting[number] = list(led_to.acting)
        faults.finished(len(results) - len(failed) - len(waiting))
        stepped_again = faults.after("step", results.keys(), failed)
        give_up(failed, stepped_again)
        to_begin = {**to_begin, **stepped_again}
    return episodes


def _request(
    episode: int,
    agent: str,
    conversation: int,
    view: View,
    by_content: bool,
    replacement: int,
) -> Request:
    now = view.conversation(conversation)
    token_ids = [*now.prompt, *now.tokens]
    if by_content:
        name = digest(token_ids)
        view.same[name] += 1
        turn = view.same[name] - 1
    else:
        name, turn = view.name(conversation), len(now.rewards)
    return Request(episode, agent, turn, token_ids, name, replacement)


def _end_those_without_room(
    episodes: Sequence[Views], waiting: dict[int, list[str]], limits: Limits
) -> None:
    """End episodes in which an agent has no room or turns left. Such an episode ends for all its agents."""
    for number, agents in list(waiting.items()):
        views = [episodes[number][agent] for agent in agents]
        if any(
            len(view.rewards) + len(view.writing) > limits.max_turns for view in views
        ):
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
        or (
            number
            and limits.prompt_tokens is not None
            and len(view.prompts[number]) > limits.prompt_tokens
        )
        for number in view.writing
    )


def _end(view: View, reason: str) -> None:
    """Set the finish reason, and cut the environment's last text in each conversation, as no turn follows it."""
    view.finish_reason = reason
    ends = {
        conversation: place
        for place, (conversation, is_own) in enumerate(
            zip(view.places, view.own, strict=True)
        )
        if is_own
    }
    kept = [
        place
        for place, conversation in enumerate(view.places)
        if place <= ends.get(conversation, -1)
    ]
    columns: tuple[list[Any], ...] = (
        view.tokens,
        view.own,
        view.log_probs,
        view.turns,
        view.places,
    )
    for column in columns:
        column[:] = [column[place] for place in kept]
    view.settle()


def _take_in(views: Views, led_to: Turns, number: int) -> bool:
    """Append the outcomes of one episode to its views; return whether it goes on."""
    done = any(outcome.done for outcome in led_to.outcomes.values())
    for agent in views.keys() & led_to.outcomes.keys():
        view = views[agent]
        wrote = len(view.rewards) - len(view.writing)
        view.untrained.update(
            wrote + place for place in led_to.outcomes[agent].untrained
        )
    for view in views.values() if done else ():
        _end(view, "stop")
    for agent, outcome in led_to.outcomes.items():
        if agent not in views:
            raise EpisodeError(
                f"episode {number}: an outcome for '{agent}'; its agents are {', '.join(views)}."
            )
        view = views[agent]
        if view.rewards:
            view.rewards[-1] += outcome.reward
        elif outcome.reward:
            raise EpisodeError(
                f"episode {number}: a reward for '{agent}', which has not taken a turn yet."
            )
        if not done:
            view.read(outcome)
    if not done and not led_to.acting:
        raise EpisodeError(
            f"episode {number}: it is not over, and nobody writes the next turn."
        )
    return not done
