"""Turns prompts into a batch of responses or episodes, and measures it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch, answer_rows
from megaverl.data.datasets import PromptRecord
from megaverl.data.distributed_batch import RowSelection, as_held, gather_samples
from megaverl.data.held_rows import HeldRows
from megaverl.data.images import COLUMN, image_column
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.errors import RolloutError
from megaverl.rollout import sample_seed, turn_seed
from megaverl.rollout.engine import (
    Generation,
    Images,
    Sampling,
    SamplingOptions,
    options_by_prompt,
    sampling_options,
    select_options,
)
from megaverl.rollout.environments import ALONE, FAILED, Request, Start, View, Views
from megaverl.workers.player import Player
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import AgentRollouts, Rollout, generate_by

Metrics = dict[str, float]
# Called with a sample's number in the step, and a batch that holds only this sample.
Finished = Callable[[int, RolloutBatch], None]


@dataclass(frozen=True)
class Draws:
    """Seeds of a step's samples, with `group_size` samples per prompt, and the choice of opponents among them.

    Attributes:
        run_seed: `run.seed`.
        group_size: number of samples per prompt.
        first_group: number of the first group in the step.
        opponent_beta: `algorithm.opponent_beta`. None: no opponents.
    """

    run_seed: int
    step: int
    group_size: int
    first_group: int = 0
    opponent_beta: float | None = None

    def is_opponent(self, sample: int) -> bool:
        """Return whether a sample is an opponent: if there are any, they are the second half of each group."""
        return (
            # The second half of each group: samples of a prompt are neighbours.
            self.opponent_beta is not None
            and sample % self.group_size >= self.group_size // 2
        )

    def ways(self, sampling: Sampling, count: int) -> Sampling:
        """Return the sampling options of `count` samples, with the mixture distribution for opponents."""
        if self.opponent_beta is None:
            return sampling
        sampling_of_each = options_by_prompt(sampling, count)
        # Samples share a few distinct options, and each is mixed once.
        mixed = {
            options: options.mixed(self.opponent_beta) for options in sampling_of_each
        }
        return [
            mixed[options] if self.is_opponent(sample) else options
            for sample, options in enumerate(sampling_of_each)
        ]

    def seed(self, sample: int, turn: int = 0, agent: str = "") -> int:
        """Return the seed of one turn of one sample."""
        return turn_seed(
            self.run_seed,
            self.step,
            # Numbered over the whole step, so that a prompt's seeds do not depend on
            # how the step is divided.
            self.first_group * self.group_size + sample,
            turn,
            agent,
        )

    def environment_seed(self, sample: int) -> int:
        """Return the seed of a sample's environment. It is the same for a whole group, whose episodes start alike."""
        return sample_seed(
            self.run_seed,
            self.step,
            self.first_group + sample // self.group_size,
            "environment",
        )


def responses(
    rollout: Rollout | AgentRollouts,
    prompts: Sequence[PromptRecord],
    sampling: Sampling,
    draws: Draws,
    player: Player | None = None,
    function: str | None = None,
    finished: Finished | None = None,
    selection: RowSelection | None = None,
) -> RolloutBatch:
    """Generate a batch of `draws.group_size` responses, or episodes, for every prompt.

    Args:
        sampling: options for all responses, or one for each.
        player: plays episodes. None: single responses.
        function: `rollout.function`, which generates in place of the engine alone.
        finished: called on the first rank of each engine with a sample's number and the sample, as soon as it is
            generated. Not called for episodes, nor if a function generates.
        selection: which samples each rank reads; a rank gets only those. None: every rank gets all.

    Raises:
        RolloutError: a function or an environment got prompts with images.
    """
    size = draws.group_size
    # [prompts x group_size], the samples of a prompt one after the other.
    repeated = [prompt for prompt in prompts for _ in range(size)]
    sampling = draws.ways(sampling, len(repeated))
    group_ids = [draws.first_group + i // size for i in range(len(repeated))]
    if player is not None:
        played = episodes(rollout, repeated, sampling, draws, player)
        return episodes_batch(
            repeated, played, player.agents, group_ids, draws.first_group * size
        )
    assert isinstance(rollout, Rollout), "agents of their own write in episodes"
    # A user's function generates on every rank alike, so that its responses are on all
    # ranks already.
    if selection is not None and function is None:
        return held_responses(rollout, repeated, sampling, draws, group_ids, selection)
    token_ids, images = [prompt.token_ids for prompt in repeated], images_of(repeated)
    seeds = [draws.seed(sample) for sample in range(len(repeated))]
    if function is not None:
        if images is not None:
            raise RolloutError(
                f"rollout.function: {function} generates from tokens, and the prompts have images."
            )
        assert isinstance(sampling, SamplingOptions), (
            "the configuration allows one of the two"
        )
        generations = generate_by(
            function, rollout.generate, token_ids, sampling, seeds
        )
    else:

        def one_finished(number: int, generation: Generation) -> None:
            assert finished is not None
            sample_batch = rollout_batch(
                [repeated[number]], [generation], [group_ids[number]]
            )
            finished(number, without_opponents(sample_batch, [number], draws))

        # Without a listener the engine does not have to report single responses.
        on_finished = one_finished if finished is not None else None
        generations = rollout.generate(
            token_ids,
            sampling,
            seeds,
            group_size=size,
            finished=on_finished,
            images=images,
        )
    return without_opponents(
        rollout_batch(repeated, generations, group_ids), range(len(repeated)), draws
    )


def without_opponents(
    batch: RolloutBatch, numbers: Sequence[int], draws: Draws
) -> RolloutBatch:
    """Remove the tokens of opponents from `response_mask`, because opponents do not train.

    Args:
        numbers: number of each sample of the batch.
    """
    if draws.opponent_beta is None:
        return batch
    is_actors = torch.tensor([not draws.is_opponent(number) for number in numbers])
    return batch.with_(response_mask=batch.response_mask & is_actors.unsqueeze(1))


def held_responses(
    rollout: Rollout,
    prompts: Sequence[PromptRecord],
    sampling: Sampling,
    draws: Draws,
    group_ids: Sequence[int],
    selection: RowSelection,
) -> RolloutBatch:
    """Generate a batch that holds the samples that this rank reads.

    The rank already has the prompts; the engines send it the responses.
    """
    token_ids, images = [prompt.token_ids for prompt in prompts], images_of(prompts)
    numbers: dict[Any, int] = {}
    # Prompts are equal if tokens and images are: rows that may share a prompt in packed
    # rows.
    same = [
        numbers.setdefault(
            (*prompt.token_ids, *(image.key for image in prompt.images or ())),
            len(numbers),
        )
        for prompt in prompts
    ]

    def hold(response_lengths: Sequence[int]) -> HeldRows:
        # Every rank computes the same assignment from the lengths alone.
        lengths = SequenceLengths(
            [len(ids) for ids in token_ids], list(response_lengths), same
        )
        return selection.held(lengths, group_ids)

    seeds = [draws.seed(sample) for sample in range(len(prompts))]
    held, generations = rollout.generate_held(
        token_ids,
        sampling,
        seeds,
        group_size=draws.group_size,
        context=selection.context,
        hold=hold,
        images=images,
    )
    held_batch = rollout_batch(
        [prompts[row] for row in held.rows],
        generations,
        [group_ids[row] for row in held.rows],
    )
    return as_held(without_opponents(held_batch, held.rows, draws), held)


def episodes(
    rollout: Rollout | AgentRollouts,
    prompts: Sequence[PromptRecord],
    sampling: Sampling,
    draws: Draws,
    player: Player,
) -> list[Views]:
    """Play one episode from each prompt. All running episodes request their next turns from the engine together.

    Raises:
        RolloutError: the prompts have images.
    """
    if images_of(prompts) is not None:
        raise RolloutError(
            "environment.name: episodes are of text, and the prompts have images. Leave one out."
        )
    starts = [
        Start(
            prompt.token_ids,
            prompt.text,
            prompt.reference,
            prompt.extra,
            draws.environment_seed(number),
        )
        for number, prompt in enumerate(prompts)
    ]
    # An episode's turns have a limit of their own, below that of a response.
    a_turn = {
        options: options.with_max_tokens(player.limits.turn_tokens)
        for options in options_by_prompt(sampling, len(prompts))
    }
    turn_sampling = (
        a_turn[sampling]
        if isinstance(sampling, SamplingOptions)
        else [a_turn[options] for options in sampling]
    )

    def write(requests: Sequence[Request]) -> Sequence[Generation]:
        # Conversations of an agent have their own seeds. A single agent has no name in
        # them, as in runs without agents.
        names = [
            ("" if r.agent == ALONE else r.agent)
            + r.conversation
            # Draws in the place of others that were given up have other seeds.
            + (f"/replacement {r.replacement}" if r.replacement else "")
            for r in requests
        ]
        seeds = [
            draws.seed(r.episode, r.turn, name)
            for r, name in zip(requests, names, strict=True)
        ]
        # The engine's prefix cache helps within a group, whose episodes start alike.
        groups = [r.episode // draws.group_size for r in requests]
        prompts = [r.token_ids for r in requests]
        turns = select_options(turn_sampling, [r.episode for r in requests])
        if isinstance(rollout, AgentRollouts):
            return rollout.generate_as(
                [r.agent for r in requests], prompts, turns, seeds, groups
            )
        return rollout.generate(prompts, turns, seeds, conversations=groups)

    # The engine stays awake between turns, so that its prefix cache has the
    # conversation so far.
    with rollout.awake():
        return player.play(starts, write, draws.group_size)


def rollout_batch(
    prompts: Sequence[PromptRecord],
    generations: Sequence[Generation],
    group_ids: Sequence[int],
) -> RolloutBatch:
    """Return a batch of prompts and their responses, with the columns that rewards and samples read."""
    return RolloutBatch.from_generations(
        [prompt.token_ids for prompt in prompts],
        generations,
        group_ids=group_ids,
        columns={
            "messages": [prompt.messages for prompt in prompts],
            "is_conversation": [isinstance(prompt.prompt, list) for prompt in prompts],
            "prompt": [prompt.text for prompt in prompts],
            "reference": [prompt.reference for prompt in prompts],
            "extra": [prompt.extra for prompt in prompts],
            **image_column(prompt.images for prompt in prompts),
        },
    )


def images_of(prompts: Sequence[PromptRecord]) -> Images | None:
    """Return the images of each prompt, or None if no prompt has any."""
    return (
        [prompt.images or () for prompt in prompts]
        if any(prompt.images for prompt in prompts)
        else None
    )


def episode_batch(
    prompts: Sequence[PromptRecord],
    views: Sequence[View],
    group_ids: Sequence[int],
    first_episode: int = 0,
) -> RolloutBatch:
    """Return one agent's views of episodes as a batch with one row per conversation.

    Only the agent's own tokens are in `response_mask`. The environment's tokens and
    turns marked as untrained are not.

    Args:
        first_episode: number of the first episode in the step.
    """
    rows = [
        (number, part)
        for number, view in enumerate(views)
        for part in view.conversations()
    ]
    numbers, parts = [number for number, _ in rows], [part for _, part in rows]
    batch = RolloutBatch.from_generations(
        [part.prompt for part in parts],
        [Generation(part.tokens, part.log_probs, part.finish_reason) for part in parts],
        group_ids=[group_ids[number] for number in numbers],
        columns={
            "prompt": [prompts[number].text for number in numbers],
            "reference": [prompts[number].reference for number in numbers],
            "extra": [prompts[number].extra for number in numbers],
            "turns": [part.spans for part in parts],
        },
    )
    written_mask, turns = (
        torch.zeros_like(batch.response_mask),
        torch.zeros_like(batch.generated_ids),
    )
    rewards = torch.zeros_like(batch.rollout_log_probs)
    for row, part in enumerate(parts):
        length = len(part.tokens)
        written_mask[row, :length] = trained = torch.tensor(
            part.trained, dtype=torch.bool
        )
        turns[row, :length] = torch.tensor(part.turns, dtype=torch.int64)
        # The reward of a turn belongs to its last token, from which returns are counted
        # back.
        for (_, end), reward in zip(part.spans, part.rewards, strict=True):
            # The reward of an untrained turn goes to the last trained token before its
            # end.
            places = trained[:end].nonzero()
            rewards[row, int(places[-1]) if len(places) else end - 1] += reward
    # Numbers continue over the parts of a step, so that episodes stay distinct when the
    # parts are joined.
    episodes = torch.tensor(numbers) + first_episode
    return batch.with_(
        response_mask=written_mask,
        turn_ids=turns,
        turn_rewards=rewards,
        episode_ids=episodes,
    )


def episodes_batch(
    prompts: Sequence[PromptRecord],
    episodes: Sequence[Views],
    agents: Sequence[str],
    group_ids: Sequence[int],
    first_episode: int = 0,
) -> RolloutBatch:
    """Return the views of all agents, concatenated by agent. Group ids differ between agents."""
    parts = [
        episode_batch(
            prompts,
            [views[agent] for views in episodes],
            # Each agent's samples form groups of their own, because agents have
            # different tasks.
            [group * len(agents) + number for group in group_ids],
            first_episode,
        )
        for number, agent in enumerate(agents)
    ]
    if len(agents) == 1:
        return parts[0]
    return RolloutBatch.concat(
        [
            part.with_(agent_ids=torch.full((len(part),), number)).with_columns(
                agent=[agent] * len(part)
            )
            for number, (agent, part) in enumerate(zip(agents, parts, strict=True))
        ]
    )


def own_rows(batch: RolloutBatch) -> list[int]:
    """Return the rows of all samples that the policy generated.

    An opponent's sample has tokens, but none in the mask (`without_opponents`).
    """
    return (
        # A sample without any token is the policy's as well: an opponent's has a
        # length.
        gather_samples(
            batch, batch.response_mask.any(dim=1) | (batch.response_lengths == 0)
        )
        .nonzero()[:, 0]
        .tolist()
    )


def rollout_metrics(
    batch: RolloutBatch, seconds: float, weight_version: int, draws: Draws | None = None
) -> Metrics:
    """Return metrics of responses that took `seconds` to generate.

    Opponents count only in the throughput, and lost episodes not at all.
    """
    if batch.held is None and FAILED in batch.columns["finish_reason"]:
        reasons = batch.columns["finish_reason"]
        played = [row for row, reason in enumerate(reasons) if reason != FAILED]
        if not played:
            return {"rollout/seconds": seconds}
        batch = batch.select(played)
    written_tokens = gather_samples(batch, batch.response_mask.sum(dim=1)).double()
    stopped = torch.tensor(
        [reason == "stop" for reason in batch.columns["finish_reason"]],
        dtype=torch.bool,
    )
    finished, num_tokens = gather_samples(batch, stopped), float(written_tokens.sum())
    # Opponents' tokens took time as well, so the throughput counts them.
    if draws is not None and draws.opponent_beta is not None:
        rows, written = own_rows(batch), gather_samples(batch, batch.response_lengths)
        written_tokens, finished, num_tokens = (
            written_tokens[rows],
            finished[rows],
            float(written.sum()),
        )
    return {
        "rollout/seconds": seconds,
        "rollout/throughput_tokens_per_sec": num_tokens / seconds,
        "rollout/response_length_mean": float(written_tokens.mean()),
        "rollout/response_length_max": float(written_tokens.max()),
        "rollout/finished_fraction": float(finished.double().mean()),
        **_turn_metrics(batch),
        "rollout/weight_version": float(weight_version),
    }


def _turn_metrics(batch: RolloutBatch) -> Metrics:
    """Return metrics of episodes; {} for single responses."""
    if "turns" not in batch.columns:
        return {}
    # [rows] -> index of each row's episode.
    _, episode = answer_rows(batch).unique(return_inverse=True)
    conversations = torch.bincount(episode).double()
    turns = torch.bincount(
        episode, torch.tensor([len(spans) for spans in batch.columns["turns"]]).double()
    )
    of_environment = torch.bincount(
        episode, (batch.response_lengths - batch.response_mask.sum(dim=1)).double()
    )
    lengths = sequence_lengths(batch)
    num_tokens = sum(lengths.lengths)
    # Tokens of a packed row with all samples of the step.
    num_packed = lengths.tree.num_tokens(range(len(batch)), lengths.lengths)
    return {
        "rollout/shared_tokens_fraction": 1.0 - num_packed / num_tokens,
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "rollout/conversations_mean": float(conversations.mean()),
        "rollout/conversations_max": float(conversations.max()),
        "rollout/environment_tokens_mean": float(of_environment.mean()),
    }


def once(batch: RolloutBatch, scores: Scores, *, has_opponents: bool = False) -> Scores:
    """Return the scores of the policy's own samples, with one score per episode however many conversations it has."""
    if has_opponents:
        return scores.select(own_rows(batch))
    return (
        scores.select(answer_rows(batch).unique()) if "episode_ids" in batch else scores
    )


def greedy_responses(
    config: Config, rollout: Rollout, rollouts: RolloutBatch, step: int
) -> RolloutBatch:
    """Generate the greedy response to the prompt of each group of `rollouts`. Collective over the role's ranks.

    Returns:
        A batch with one row per group, in order of first appearance.
    """
    of_sample, groups = places_of_groups(rollouts)
    # The first sample of each group stands for its prompt.
    firsts = rollouts.select([of_sample.index(number) for number in range(groups)])
    prompts = [
        row[:length].tolist()
        for row, length in zip(
            firsts.input_ids, firsts.prompt_lengths.tolist(), strict=True
        )
    ]
    generations = rollout.generate(
        prompts,
        sampling_options(config.rollout.sampling, temperature=0.0),
        [
            sample_seed(config.run.seed, step, number, "greedy")
            for number in range(groups)
        ],
        images=firsts.columns.get(COLUMN),
    )
    columns = {
        name: firsts.columns[name]
        for name in ("messages", "is_conversation", "prompt", "reference", "extra")
    }
    if (images := firsts.columns.get(COLUMN)) is not None:
        columns[COLUMN] = images
    return RolloutBatch.from_generations(prompts, generations, columns=columns)


def expand_to_samples(of_groups: torch.Tensor, rollouts: RolloutBatch) -> torch.Tensor:
    """Expand values per group to values per sample: [groups] -> [B]."""
    return of_groups[places_of_groups(rollouts)[0]]


def places_of_groups(rollouts: RolloutBatch) -> tuple[list[int], int]:
    """Return the index of each sample's group, in order of first appearance, and the number of groups."""
    place: dict[int, int] = {}
    of_sample = [
        place.setdefault(group, len(place)) for group in rollouts.group_ids.tolist()
    ]
    return of_sample, len(place)


def score_metrics(scores: Scores, seconds: float) -> Metrics:
    """Return metrics of rewards that took `seconds` to compute, over the samples that could be scored."""
    scored = scores.known
    return {
        "reward/latency_ms": seconds * 1e3,
        "reward/mean": float(scored.total.mean()),
        "reward/std": float(scored.total.std(unbiased=False)),
        "reward/max": float(scored.total.max()),
        "reward/min": float(scored.total.min()),
        "reward/accuracy": float(scored.correct.float().mean()),
        **{
            f"reward/{name}": float(values.nanmean())
            for name, values in scores.components.items()
        },
        **(
            {}
            if scored is scores
            else {"reward/unscored_fraction": 1.0 - float(scores.scored.float().mean())}
        ),
    }
