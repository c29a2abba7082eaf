"""Plays a run's episodes: each rank holds some of the environments, and every rank receives all turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megaverl.config.roles import EnvironmentConfig
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.collectives import gather_json, together
from megaverl.errors import EnvironmentFault, EpisodeError, MegaverlError
from megaverl.outside import read_number
from megaverl.rollout.environments import (
    Attempt,
    Begun,
    Codec,
    FailedCall,
    FaultLimits,
    Faults,
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
from megaverl.user_code import describe, show, user_code, where_raised

logger = logging.getLogger(__name__)

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
        self.faults = Faults(self.name, FaultLimits(**config.faults.model_dump()))
        with together(world):
            self.agents = agents_of(self.name)

    def play(
        self, starts: Sequence[Start], generate: Generate, group_size: int = 1
    ) -> list[Views]:
        """Play one episode to its end from each start. Collective over `world`.

        An episode whose environment fails is tried again, or left out (`Faults`).

        Args:
            generate: writes one turn for each request, identically on every rank.
            group_size: number of consecutive episodes that are compared with each other.

        Raises:
            EpisodeError: an environment is set up wrongly, or does not work; raised on every rank.
        """
        # Games of this rank, by the number of the episode over all ranks.
        games: dict[int, Game] = {}
        try:
            views = self._play(starts, games, generate, group_size)
        except BaseException:
            for number in list(games):
                # Errors of close() are dropped, because the first error is more
                # informative.
                self._abandon(games, number)
            raise
        for number in list(games):
            # The episode is over, and its samples do not depend on how it closes.
            self._abandon(games, number, warns=True)
        return views

    def fault_metrics(self) -> dict[str, float]:
        """Return metrics of the faults in the last `play`; {} before the first."""
        return self.faults.metrics()

    def _play(
        self,
        starts: Sequence[Start],
        games: dict[int, Game],
        generate: Generate,
        group_size: int,
    ) -> list[Views]:
        rank, size = dist.get_rank(self.world), dist.get_world_size(self.world)

        def begin(attempts: Mapping[int, Attempt]) -> dict[int, Begun | FailedCall]:
            # Round-robin: the consecutive episodes of a group go to different ranks.
            own_numbers = [number for number in attempts if number % size == rank]

            def begin_one(number: int) -> Any:
                self._abandon(games, number)
                self.faults.wait_before(attempts[number])
                with self._environment(number, "reset"):
                    games[number] = make_game(self.name, self.codec, self.options)
                return self._begin(games[number], number, starts[number])

            return {
                number: row
                if isinstance(row, FailedCall)
                else Begun(prompts=row[0], acting=row[1])
                for number, row in self._call_own(own_numbers, begin_one, games).items()
            }

        def step(
            turns: Mapping[int, Mapping[str, list[list[int]]]],
        ) -> dict[int, Turns | FailedCall]:
            # Only the rank that holds an episode steps it. The others wait for its
            # result.
            own_numbers = [number for number in turns if number in games]

            def step_one(number: int) -> Any:
                return self._step(games[number], number, turns[number])

            return {
                number: row
                if isinstance(row, FailedCall)
                else Turns(
                    {agent: outcome_of(outcome) for agent, outcome in row[0].items()},
                    row[1],
                )
                for number, row in self._call_own(own_numbers, step_one, games).items()
            }

        return play(
            [start.token_ids for start in starts],
            self.agents,
            begin=begin,
            generate=generate,
            step=step,
            limits=self.limits,
            faults=self.faults,
            group_size=group_size,
            by_content=getattr(find_environment(self.name), "by_content", False),
        )

    def _call_own(
        self,
        numbers: Sequence[int],
        call: Callable[[int], Any],
        games: dict[int, Game],
    ) -> dict[int, Any]:
        """Call this rank's episodes, and return the results of all ranks. Collective over `world`.

        Returns:
            Result of each episode; a `FailedCall` where its environment failed.

        Raises:
            EpisodeError: an environment is set up wrongly; raised on every rank.
        """

        def call_one(number: int) -> Any:
            try:
                return {"result": call(number)}
            except EnvironmentFault as fault:
                # Close the failed episode: it may hold processes and connections.
                self._abandon(games, number)
                return {"fault": str(fault)}

        results: dict[int, Any] = {}
        # All ranks raise if an environment of one of them is set up wrongly.
        with together(self.world):
            results = self._side_by_side(numbers, call_one)
        return {
            number: FailedCall(answer["fault"])
            if "fault" in answer
            else answer["result"]
            for number, answer in _joined(gather_json(results, self.world)).items()
        }

    def _abandon(
        self, games: dict[int, Game], number: int, *, warns: bool = False
    ) -> None:
        """Close an episode if it is open. What its `close` raises is dropped, or logged if `warns`."""
        game = games.pop(number, None)
        if game is None:
            return
        try:
            with self._environment(number, "close"):
                game.close()
        except MegaverlError as error:
            if warns:
                logger.warning("%s", error)

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
        self, numbers: Sequence[int], call: Callable[[int], Any]
    ) -> dict[int, Any]:
        """Run `call` for each episode, in threads if the environment waits for something outside this process."""
        if numbers and find_environment(self.name).waits:
            with ThreadPoolExecutor(min(len(numbers), SIDE_BY_SIDE)) as threads:
                results = threads.map(call, numbers)
                return dict(zip(numbers, results, strict=True))
        return {number: call(number) for number in numbers}

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
            return EnvironmentFault(
                f"environment '{self.name}', episode {number}: {method}() raised {describe(error)}"
                f"{where_raised(error)}."
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
    token_ids, reward, done, conversation, further, *rest = row
    return Outcome(
        token_ids,
        reward,
        done,
        conversation,
        [outcome_of(row) for row in further],
        *rest,
    )


def _joined(parts: Sequence[Mapping[Any, Any]]) -> dict[int, Any]:
    """Merge the ranks' mappings by episode. JSON has turned episode numbers into text."""
    return {int(number): value for part in parts for number, value in part.items()}
