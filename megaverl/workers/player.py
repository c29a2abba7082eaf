"""Plays a run's episodes: each rank holds some of the environments, and every rank receives all turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megaverl.config.roles import EnvironmentConfig
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.collectives import gather_json, together
from megaverl.errors import EpisodeError, MegaverlError
from megaverl.outside import read_number
from megaverl.rollout.environments import (
    Codec,
    Game,
    Generate,
    Limits,
    Outcome,
    Start,
    Turns,
    Views,
    agents_of,
    find_environment,
    make_game,
    play,
)
from megaverl.user_code import describe, show, user_code

# Maximum concurrent episodes per rank, if environments wait for something outside the
# process.
SIDE_BY_SIDE = 16


class Player:
    """Plays episodes. Every rank of `world` takes part with the same starts, and gets the same views.

    Args:
        config: the `environment` section, with a name.
        max_tokens: token limit of everything after a prompt.
        max_prompt_tokens: token limit of a prompt.
        chat: format answers as messages of the tokenizer's chat template.

    Raises:
        ConfigError: no environment has this name.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        world: dist.ProcessGroup,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        chat: bool,
    ) -> None:
        assert config.name is not None, (
            "a run without an environment has no episodes to play"
        )
        self.name, self.options, self.world = config.name, config.options, world
        self.codec = Codec(tokenizer, chat=chat)
        turn_tokens = config.max_turn_tokens or max_tokens // config.max_turns
        self.limits = Limits(
            config.max_turns, turn_tokens, max_tokens, max_prompt_tokens
        )
        self.max_prompt_tokens = max_prompt_tokens
        with together(world):
            self.agents = agents_of(self.name)

    def play(self, starts: Sequence[Start], generate: Generate) -> list[Views]:
        """Play one episode to its end from each start. Collective over `world`.

        Args:
            generate: writes one turn for each request, identically on every rank.

        Raises:
            EpisodeError: an environment failed on some rank; raised on every rank.
        """
        rank, size = dist.get_rank(self.world), dist.get_world_size(self.world)
        # Round-robin: the consecutive episodes of a group go to different ranks.
        own_numbers = range(rank, len(starts), size)
        # Games of this rank, by the number of the episode over all ranks.
        games: dict[int, Game] = {}
        begun: dict[int, Any] = {}
        try:
            # Collective over `world`: all ranks raise if an environment of one of them
            # fails.
            with together(self.world):
                for number in own_numbers:
                    with self._environment(number, "reset"):
                        games[number] = make_game(self.name, self.codec, self.options)
                begun = self._side_by_side(
                    games,
                    lambda number: self._begin(games[number], number, starts[number]),
                )
            # JSON, because episodes begin on different ranks and all ranks must know
            # all prompts.
            views = self._play(
                starts, games, _joined(gather_json(begun, self.world)), generate
            )
        except BaseException:
            for number, game in games.items():
                # Errors of close() are dropped, because the first error is more
                # informative.
                with suppress(MegaverlError), self._environment(number, "close"):
                    game.close()
            raise
        with together(self.world):
            for number, game in games.items():
                with self._environment(number, "close"):
                    game.close()
        return views

    def _play(
        self,
        starts: Sequence[Start],
        games: Mapping[int, Game],
        everyone: Mapping[int, Any],
        generate: Generate,
    ) -> list[Views]:
        def step(
            turns: Mapping[int, Mapping[str, list[list[int]]]],
        ) -> dict[int, Turns]:
            results: dict[int, Any] = {}
            with together(self.world):
                # Only the rank that holds an episode steps it. The others wait for its
                # result.
                own_games = {
                    number: games[number] for number in turns if number in games
                }
                results = self._side_by_side(
                    own_games,
                    lambda number: self._step(own_games[number], number, turns[number]),
                )
            return {
                number: Turns(
                    {agent: outcome_of(row) for agent, row in outcomes.items()}, acting
                )
                for number, (outcomes, acting) in _joined(
                    gather_json(results, self.world)
                ).items()
            }

        return play(
            [everyone[number][0] for number in range(len(starts))],
            [everyone[number][1] for number in range(len(starts))],
            generate=generate,
            step=step,
            limits=self.limits,
            by_content=getattr(find_environment(self.name), "by_content", False),
        )

    def _begin(self, game: Game, number: int, start: Start) -> list[Any]:
        """Return [prompts by agent, agents that write first] of one episode.

        Raises:
            EpisodeError: the environment's agents or the lengths of its prompts are wrong.
        """
        start = replace(start, limits=self.limits)
        with self._environment(number, "reset"):
            prompts = {
                agent: [int(token) for token in ids]
                for agent, ids in game.reset(start).items()
            }
            acting = list(game.acting())
        if (
            set(prompts) != set(self.agents)
            or not acting
            or not set(acting) <= set(self.agents)
        ):
            raise EpisodeError(
                f"environment '{self.name}', episode {number}: prompts for {', '.join(prompts) or 'nobody'}, and "
                f"{', '.join(acting) or 'nobody'} writes first; its agents are {', '.join(self.agents)}."
            )
        for agent, ids in prompts.items():
            if not 0 < len(ids) <= self.max_prompt_tokens:
                raise EpisodeError(
                    f"environment '{self.name}', episode {number}: the prompt of '{agent}' has {len(ids)} tokens; "
                    f"expected 1 to data.max_prompt_tokens={self.max_prompt_tokens}."
                )
        return [prompts, acting]

    def _side_by_side(
        self, games: Mapping[int, Game], call: Callable[[int], Any]
    ) -> dict[int, Any]:
        """Run `call` for each episode, in threads if the environment waits for something outside this process."""
        first = next(iter(games.values()), None)
        # The user's environment object.
        environment: Any = getattr(first, "environment", first)
        if games and type(environment).waits:
            # Results are in the order of the episodes, not of completion, so that
            # timing decides nothing.
            with ThreadPoolExecutor(min(len(games), SIDE_BY_SIDE)) as threads:
                return dict(zip(games, threads.map(call, games), strict=True))
        return {number: call(number) for number in games}

    def _step(
        self, game: Game, number: int, turns: Mapping[str, list[list[int]]]
    ) -> list[Any]:
        with self._environment(number, "step"):
            outcomes = {
                agent: outcome_row(outcome)
                for agent, outcome in game.step_each(turns).items()
            }
            done = any(outcome[2] for outcome in outcomes.values())
            acting = [] if done else list(game.acting())
        return [outcomes, acting]

    def _environment(self, number: int, method: str) -> AbstractContextManager[None]:
        """Return the context for calls of the user's environment, which may raise anything."""

        def failed(error: BaseException) -> EpisodeError:
            return EpisodeError(
                f"environment '{self.name}', episode {number}: {method}() raised {describe(error)}. Fix "
                "the environment or the row; what a model writes must never make it fail."
            )

        return user_code(failed, keep=MegaverlError)


def outcome_row(outcome: Outcome) -> list[Any]:
    """Return an outcome as JSON.

    Raises:
        EpisodeError: the reward is not a finite number.
    """
    try:
        reward = read_number(float(outcome.reward))
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeError(
            f"the reward of a turn is {show(outcome.reward)}; it must be a finite number."
        ) from error
    columns = [
        reward,
        bool(outcome.done),
        outcome.conversation,
        [outcome_row(other_outcome) for other_outcome in outcome.also],
    ]
    return [
        [*map(int, outcome.token_ids)],
        *columns,
        outcome.overlaps,
        [*outcome.untrained],
    ]


def outcome_of(row: Sequence[Any]) -> Outcome:
    """Return the outcome that `outcome_row` serialised."""
    token_ids, reward, done, conversation, also, *rest = row
    return Outcome(
        token_ids, reward, done, conversation, [outcome_of(row) for row in also], *rest
    )


def _joined(parts: Sequence[Mapping[Any, Any]]) -> dict[int, Any]:
    """Merge the ranks' mappings by episode. JSON has turned episode numbers into text."""
    return {int(number): value for part in parts for number, value in part.items()}
