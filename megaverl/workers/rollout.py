"""Rollout role: distributes prompts over the engines and collects responses, for one actor or for several in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from megaverl.data.held_rows import HeldRows
from megaverl.data.routed_experts import EXPERTS_COLUMN as EXPERTS
from megaverl.data.routed_experts import experts_column, experts_of
from megaverl.data.row_transfer import Moving, move_ragged
from megaverl.distributed.collectives import (
    gather_host_rows,
    gather_json,
    reduce_json,
    together,
)
from megaverl.distributed.job_context import JobContext
from megaverl.distributed.ragged import RaggedBatch
from megaverl.errors import RolloutError
from megaverl.platform import platform
from megaverl.plugins import call_object
from megaverl.rollout import split_prompts
from megaverl.rollout.engine import (
    Engine,
    Generation,
    Images,
    PromptScore,
    Sampling,
    SamplingOptions,
    SavedWork,
    check_generations,
    select_options,
)
from megaverl.user_code import describe, user_code, where_raised
from megaverl.weights.reshard import ReshardStats
from megaverl.workers.server_sync import ServerSync
from megaverl.workers.weight_sync import WeightSync

# Called with a prompt's number and its response.
Finished = Callable[[int, Generation], None]


class Rollout:
    """Engine on every rank. Its replicas share the prompts, and every rank receives all responses.

    Args:
        engine: this rank's part of an engine.
        world: the ranks that the engines live on.
        sync: copies weights from the actor. None: the engine keeps the weights that it loaded.

    Example:
        with rollout.awake():  # keeps the prefix cache between turns
            first = rollout.generate(prompts, sampling, seeds)
            second = rollout.generate(next_prompts, sampling, next_seeds)
    """

    def __init__(
        self,
        engine: Engine,
        world: dist.ProcessGroup,
        sync: WeightSync | ServerSync | None = None,
    ) -> None:
        self.engine, self.world, self.sync = engine, world, sync
        self._stays_awake = False

    @property
    def weight_version(self) -> int:
        """Number of times that the weights were copied from the actor."""
        return self.sync.weight_version if self.sync is not None else 0

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Return a context in which the engine does not sleep between requests, so that its prefix cache survives."""
        # A flag and no nested sleep: every `write` inside asks for it.
        self._stays_awake = True
        try:
            yield
        finally:
            self._stays_awake = False
            self._sleep()

    def engine_metrics(self) -> dict[str, float]:
        """Return metrics of the engines since `saved_work` was reset. Collective over the role's ranks."""
        engine, metrics = self.engine, {}
        if engine.in_flight is not None:
            metrics["rollout/sequences_in_flight"] = float(engine.in_flight.number)
        # All ranks of a replica have the same counters, so only its first rank reports
        # them.
        counted = vars(engine.saved_work if engine.tp_rank == 0 else SavedWork())
        return metrics | dict(reduce_json(counted, SavedWork.shares, self.world))

    def _wake(self) -> None:
        if self.sync is not None:
            self.sync.wake()
        else:
            self.engine.wake_up()

    def _sleep(self) -> None:
        if self.sync is not None:
            self.sync.sleep()
        else:
            self.engine.sleep()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
        conversations: Sequence[int] | None = None,
        finished: Finished | None = None,
        images: Images | None = None,
    ) -> list[Generation]:
        """Generate one response per prompt, in order, and return the same list on every rank. Collective.

        For arguments and errors, see `write`.
        """
        numbers, generations = self.write(
            prompts,
            sampling,
            seeds,
            group_size=group_size,
            conversations=conversations,
            finished=finished,
            images=images,
        )
        # All ranks receive all responses. Collective over the role's ranks, of rows
        # from the first rank of each engine.
        everything = _as_rows(numbers, generations).gather(self.world)
        responses = dict(
            zip(everything.columns["number"], _from_rows(everything), strict=True)
        )
        return [responses[number] for number in range(len(prompts))]

    def generate_held(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        group_size: int,
        context: JobContext,
        hold: Callable[[Sequence[int]], HeldRows],
        finished: Finished | None = None,
        images: Images | None = None,
    ) -> tuple[HeldRows, list[Generation]]:
        """Generate responses, and send each rank only the responses that it works on. Collective.

        Args:
            hold: number of tokens of each response -> the samples that each rank holds.

        For the other arguments and the errors, see `write`.

        Returns:
            The result of `hold`, and this rank's responses in the order of its samples.
        """
        numbers, generations = self.write(
            prompts,
            sampling,
            seeds,
            group_size=group_size,
            finished=finished,
            images=images,
        )
        sizes = [
            [number, len(generation.token_ids), context.rank]
            for number, generation in zip(numbers, generations, strict=True)
        ]
        # [local responses, 3] of number, length and rank.
        own_sizes = torch.tensor(sizes, dtype=torch.int32).reshape(-1, 3)
        # Only the lengths go to every rank. Each rank computes the same assignment, and
        # tokens go point to point.
        table = sorted(gather_host_rows(own_sizes, self.world).tolist())
        source: dict[int, list[int]] = {rank: [] for rank in context.role_group.ranks}
        for number, _, rank in table:
            source[rank].append(number)
        held = hold([length for _, length, _ in table])
        # Collective over the job's ranks that take part: rows go point to point.
        moved = move_ragged(
            context,
            Moving.plan(context, "responses", source, held.by_rank),
            _as_rows(numbers, generations),
        )
        assert moved is not None
        return held, _from_rows(moved)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
        conversations: Sequence[int] | None = None,
        finished: Finished | None = None,
        images: Images | None = None,
    ) -> tuple[list[int], list[Generation]]:
        """Generate responses to this rank's share of the prompts with its engine. Collective over the role's ranks.

        Args:
            prompts: token ids. A prompt with several responses is repeated.
            sampling: options for all prompts, or one for each.
            seeds: one per prompt. The response depends on the prompt and its seed, not on its position.
            group_size: number of consecutive repetitions of a prompt. They are generated where the prefix is cached.
            conversations: see `split_prompts`.
            finished: called on the first rank of each engine with the prompt's number and the response as soon as it is
                complete, once for each response of that engine.
            images: images of each prompt; None if no prompt has any.

        Returns:
            Numbers of the prompts, ascending, and their responses on the first rank of each engine; empty elsewhere.

        Raises:
            ReshardError: the engine holds parts of two weight versions.
            RolloutError: the engine raised an error.
        """
        engine = self.engine
        # The engine's cache exists only while something is generated, unless it is kept
        # awake.
        self._wake()
        if engine.in_flight is not None and engine.in_flight.measures:
            # The rank with the least free memory sets the budget of all, because the
            # number of concurrent sequences affects an engine's rounding.
            engine.in_flight.fit(
                int(reduce_json(platform.free_memory(), min, self.world))
            )
        numbers = self.numbers(
            [len(prompt) for prompt in prompts], group_size, conversations
        )
        # All ranks of a replica hold the same responses, so only its first rank returns
        # them.
        speaks = engine.tp_rank == 0
        generations: list[Generation] = []
        # An engine that fails on one rank fails on all: the others would wait for its
        # responses.
        with (
            together(self.world),
            _reporting(engine, numbers, finished if speaks else None) as rest,
        ):
            if self.sync is not None:
                self.sync.check_whole()
            own_prompts = [list(prompts[i]) for i in numbers]
            # Pass `images` only if there are any, because an engine may not accept the
            # argument.
            more = {} if images is None else {"images": [images[i] for i in numbers]}
            with user_code(_engine_ended, keep=Exception):  # engines can be user code
                generations = engine.generate(
                    own_prompts,
                    select_options(sampling, numbers),
                    [seeds[i] for i in numbers],
                    **more,
                )
            rest(generations)
        # Sleeping frees the device memory that the update needs.
        if not self._stays_awake:
            self._sleep()
        return (numbers, generations) if speaks else ([], [])

    def score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[PromptScore]:
        """Compute the log-probs of the prompts' tokens, and return the same list on every rank. Collective.

        Raises:
            ReshardError: the engine holds parts of two weight versions.
            RolloutError: the engine cannot score prompts, or raised an error.
        """
        self._wake()
        engine = self.engine
        numbers = self.numbers([len(prompt) for prompt in prompts])
        scores: list[PromptScore] = []
        # An engine that fails on one rank fails on all: the others would wait for its
        # scores.
        with together(self.world):
            if self.sync is not None:
                self.sync.check_whole()
            with user_code(_engine_ended, keep=Exception):  # engines can be user code
                scores = engine.score_prompts([list(prompts[i]) for i in numbers])
            if len(scores) != len(numbers):
                raise RolloutError(
                    f"the engine returned {len(scores)} scores for {len(numbers)} prompts."
                )
        if not self._stays_awake:
            self._sleep()
        # All ranks of a replica have the same scores, so only its first rank sends them.
        rows = [
            [number, score.log_probs, score.top_tokens, score.top_log_probs]
            for number, score in zip(numbers, scores, strict=True)
            if engine.tp_rank == 0
        ]
        # Collective over the role's ranks.
        every_row = chain.from_iterable(gather_json(rows, self.world))
        by_number = {number: PromptScore(*values) for number, *values in every_row}
        return [by_number[number] for number in range(len(prompts))]

    def numbers(
        self,
        lengths: Sequence[int],
        group_size: int = 1,
        conversations: Sequence[int] | None = None,
    ) -> list[int]:
        """Return the numbers of the prompts that this rank's engine answers, ascending.

        Args:
            lengths: number of tokens of each prompt.
        """
        return split_prompts(
            lengths, self.engine.num_replicas, group_size, conversations
        )[self.engine.replica]


def _engine_ended(error: BaseException) -> RolloutError:
    return RolloutError(
        f"rollout.engine: generate() raised {describe(error)}{where_raised(error)}."
    )


@contextmanager
def _reporting(
    engine: Engine, numbers: Sequence[int], finished: Finished | None
) -> Iterator[Callable[[Sequence[Generation]], None]]:
    """Return a context that calls `finished` with the engine's responses as they complete.

    The context yields a function that calls `finished` with the remaining responses.

    Args:
        numbers: numbers of the engine's prompts.
    """
    reported: set[int] = set()

    def report(place: int, generation: Generation) -> None:
        reported.add(place)
        if finished is not None:
            finished(numbers[place], generation)

    def rest(generations: Sequence[Generation]) -> None:
        for place, generation in enumerate(generations):
            if place not in reported:
                report(place, generation)

    # The callback is the engine's attribute, so it is reset even if generating fails.
    engine.on_finished = report if finished is not None else None
    try:
        yield rest
    finally:
        engine.on_finished = None


def _as_rows(numbers: Sequence[int], generations: Sequence[Generation]) -> RaggedBatch:
    """Pack responses as rows, each with the number of its prompt."""
    tokens = [
        torch.tensor(generation.token_ids, dtype=torch.int32)
        for generation in generations
    ]
    log_probs = [
        torch.tensor(generation.log_probs, dtype=torch.float32)
        for generation in generations
    ]
    # [responses, longest] of token ids (int32) and log-probs (float32).
    tensors = {
        name: pad_sequence(rows, batch_first=True)
        if rows
        else torch.empty(0, 0, dtype=dtype)
        for name, rows, dtype in (
            ("tokens", tokens, torch.int32),
            ("log_probs", log_probs, torch.float32),
        )
    }
    lengths = torch.tensor(
        [len(generation.token_ids) for generation in generations], dtype=torch.int64
    )
    reasons = [generation.finish_reason for generation in generations]
    columns: dict[str, Sequence[object]] = {"number": numbers, "finish_reason": reasons}
    # Ranks without rows or experts send the column too, because all ranks must send the
    # same columns.
    columns[EXPERTS] = experts_column(generations).get(
        EXPERTS, [None] * len(generations)
    )
    return RaggedBatch(
        tensors, dict.fromkeys(tensors, "R"), {"R": lengths}, columns=columns
    )


def _from_rows(rows: RaggedBatch) -> list[Generation]:
    """Undo `_as_rows`, in the order of the rows."""
    tokens, log_probs, lengths = (
        rows.tensors["tokens"],
        rows.tensors["log_probs"],
        rows.lengths["R"].tolist(),
    )
    return [
        Generation(
            tokens[i, :length].tolist(),
            log_probs[i, :length].tolist(),
            reason,
            experts_of(taken),
        )
        for i, (reason, length, taken) in enumerate(
            zip(
                rows.columns["finish_reason"],
                lengths,
                rows.columns[EXPERTS],
                strict=True,
            )
        )
    ]


class AgentRollouts:
    """Rollouts of all agents over the same engine. Each agent has its own actor as the source of weights.

    The engine holds one agent's weights at a time, so its storage must not be shared
    with an actor (`reshard.alias: never`). Every change of agent costs one reshard.

    Attributes:
        weight_version: number of times that the agents' weights have changed.
        current: agent whose weights the engine holds. None: none, or outdated ones.
    """

    def __init__(self, rollouts: Mapping[str, Rollout]) -> None:
        self.rollouts = dict(rollouts)
        self.weight_version = 0
        self.current: str | None = None

    @property
    def engine(self) -> Engine:
        return next(iter(self.rollouts.values())).engine

    @property
    def world(self) -> dist.ProcessGroup:
        return next(iter(self.rollouts.values())).world

    def engine_metrics(self) -> dict[str, float]:
        """Return `Rollout.engine_metrics` of the engines, which all agents share."""
        return next(iter(self.rollouts.values())).engine_metrics()

    def source_changes(self) -> None:
        """Mark the engine's weights as outdated. Call it before the actors' weights change."""
        self.current = None
        for agent in self.rollouts:
            self._sync(agent).source_changes()

    def reshard(self) -> ReshardStats:
        """Copy the first agent's weights to the engine. The other agents' weights follow when they generate."""
        self.weight_version += 1
        first = next(iter(self.rollouts))
        self.current = first
        return self._sync(first).reshard()

    def of(self, agent: str) -> Rollout:
        """Return the rollout of `agent`, after copying its weights to the engine if needed."""
        # A reshard is needed only if another agent has generated since.
        if self.current != agent:
            self._sync(agent).reshard()
            self.current = agent
        return self.rollouts[agent]

    def _sync(self, agent: str) -> WeightSync | ServerSync:
        sync = self.rollouts[agent].sync
        assert sync is not None, "every agent's weights come from its actor"
        return sync

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Return `Rollout.awake` for every agent."""
        with ExitStack() as stack:
            for rollout in self.rollouts.values():
                stack.enter_context(rollout.awake())
            yield

    def generate_as(
        self,
        agents: Sequence[str],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        conversations: Sequence[int],
    ) -> list[Generation]:
        """Generate one response per prompt with the weights of its agent, one agent after the other."""
        generations: dict[int, Generation] = {}
        # Start with the agent whose weights are loaded, which saves a reshard.
        for agent in sorted(
            # Sorted, so that the ranks change agents in the same order: each change is
            # a collective.
            set(agents),
            key=lambda name: (name != self.current, list(self.rollouts).index(name)),
        ):
            numbers = [
                number for number, writer in enumerate(agents) if writer == agent
            ]
            prompts_of, seeds_of = (
                [prompts[n] for n in numbers],
                [seeds[n] for n in numbers],
            )
            kept_at = [conversations[n] for n in numbers]
            written = self.of(agent).generate(
                prompts_of,
                select_options(sampling, numbers),
                seeds_of,
                conversations=kept_at,
            )
            generations |= dict(zip(numbers, written, strict=True))
        return [generations[number] for number in range(len(prompts))]


# prompts (token ids), sampling, seeds -> one response each
Generate = Callable[
    [Sequence[Sequence[int]], SamplingOptions, Sequence[int]], list[Generation]
]


def generate_by(
    name: str,
    generate: Generate,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions,
    seeds: Sequence[int],
) -> list[Generation]:
    """Generate responses with the user function that `rollout.function` names.

    It is called as function(generate, prompts, sampling, seeds) on every rank alike,
    and may call `generate` any number of times. It returns one `Generation` per prompt,
    which is what the actor trains on.

    Raises:
        ConfigError: the function does not exist.
        RolloutError: the result is not one response per prompt.
    """
    generations = list(
        call_object(name, "rollout.function", generate, prompts, sampling, seeds)
    )
    check_generations(generations, len(prompts))
    return generations
