"""Splits a batch into this data-parallel rank's micro-batches, and runs the optimizer steps on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

import torch

from megaverl.algorithms import (
    Denominators,
    Entry,
    MetricSums,
    add_metrics,
    aggregations,
    episode_shares,
    finalize,
    make_denominators,
    non_finite_token,
)
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import MicroBatchRule, mini_batches, plan_micro_batches
from megaverl.data.distributed_batch import gather_samples, select_samples
from megaverl.data.images import COLUMN, images_of_rows
from megaverl.data.prefix_packing import (
    plan_packed_micro_batches,
    sequence_lengths,
)
from megaverl.data.prefix_tree import PrefixTree
from megaverl.data.routed_experts import EXPERTS_COLUMN as EXPERTS
from megaverl.data.routed_experts import padded_experts
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.distributed.grid import GridShape
from megaverl.distributed.ragged import beside
from megaverl.errors import TrainingStopped
from megaverl.models.packing import MicroBatch
from megaverl.workers.model import Loss, Score, TrainingModel
from megaverl.workers.trainable import TrainableModel, UpdateReport

READ = (
    "input_ids",
    "prompt_lengths",
    "generated_ids",
    "response_lengths",
    "response_mask",
)
DRAWING = ("temperatures", "top_ks")


# data-parallel rank -> micro-batch -> numbers of its samples
MicroBatchPlan = list[list[list[int]]]


def micro_batches_for(
    model: TrainingModel,
    batch: RolloutBatch,
    max_tokens: int,
    fields: Mapping[str, torch.Tensor] | None = None,
    *,
    unit: int = 1,
) -> list[MicroBatch]:
    """Split this rank's share of `batch` into micro-batches; every data-parallel rank gets as many.

    Args:
        batch: holds the tokens of this rank's samples and the lengths of all samples.
        fields: [B, R] tensors that the loss needs.
        max_tokens: see `plan_for`.
        unit: see `plan_for`.

    Raises:
        DataError: a single sample exceeds the budget.
    """
    lengths = sequence_lengths(batch)
    return micro_batches_of(
        model,
        batch,
        lengths,
        plan_for(model, lengths, max_tokens, unit=unit),
        fields,
        unit=unit,
    )


def plan_for(
    model: TrainingModel,
    lengths: SequenceLengths,
    max_tokens: int,
    samples: Sequence[int] | None = None,
    *,
    least: int = 1,
    unit: int = 1,
    parts: int = 1,
) -> MicroBatchPlan:
    """Plan the micro-batches of all data-parallel ranks.

    The plan depends only on lengths, so every rank computes the same one. Plans are
    cached in `lengths.plans`.

    Args:
        max_tokens: upper bound of rows x longest row of a micro-batch, or of the row's tokens if the model packs.
        samples: the samples of this mini-batch; None: all.
        least: minimum number of micro-batches, if there are as many samples.
        parts: number of models that share the work, each with its own data-parallel ranks.
        unit: number of neighbouring samples that are never split, such as 2 for pairs. `samples` then counts units.

    Returns:
        One list of micro-batches for each data-parallel rank: first all ranks of the first part, then of the second.

    Raises:
        DataError: a single sample exceeds the budget.
    """
    shape = model.grid.shape
    part = None if samples is None else tuple(samples)
    # The key holds everything that the plan depends on, because several models share
    # one `lengths`.
    same = (
        model.pack is None,
        shape.dp,
        shape.pp,
        shape.vpp,
        model.token_multiple,
        model.sequence_multiple,
        model.shares_tokens,
        max_tokens,
        part,
        least,
        unit,
        parts,
    )
    if same not in lengths.plans:
        lengths.plans[same] = _planned(
            model, lengths, max_tokens, samples, least=least, unit=unit, parts=parts
        )
    return lengths.plans[same]


def _planned(
    model: TrainingModel,
    sample_lengths: SequenceLengths,
    max_tokens: int,
    samples: Sequence[int] | None,
    *,
    least: int,
    unit: int,
    parts: int,
) -> MicroBatchPlan:
    """Compute the plan that `plan_for` caches."""
    shape = model.grid.shape
    rule = MicroBatchRule(
        multiple_of=model.token_multiple,
        # An interleaved pipeline needs a multiple of its number of stages.
        count_multiple_of=shape.pp if shape.vpp else 1,
        least=least,
        key=f"{model.role}.micro_batch_tokens",
    )
    # A unit is a sample, or the neighbouring samples that must stay in one micro-batch.
    units = range(len(sample_lengths) // unit) if samples is None else samples
    whole = [range(number * unit, (number + 1) * unit) for number in units]
    lengths, num_ranks = sample_lengths.lengths, shape.dp * parts
    if model.pack:
        prompts = sample_lengths.prompts
        multiple = model.sequence_multiple
        # Every sample is cut by itself, so that none shares tokens with another.
        if multiple > 1:
            lengths = [-(-length // multiple) * multiple for length in lengths]
        if not _shares_tokens(model):
            prompts = list(range(len(sample_lengths)))
        return plan_packed_micro_batches(
            whole,
            lengths,
            prompts,
            _tree_for(model, sample_lengths),
            num_ranks,
            max_tokens,
            rule,
        )
    # All rows of a unit are padded to the longest one.
    costs = [
        unit * max(lengths[first : first + unit])
        for first in range(0, len(sample_lengths) - unit + 1, unit)
    ]
    # The plan counts rows of the longest sample, and a unit has several rows.
    rule = replace(rule, multiple_of=rule.multiple_of * unit)
    return [
        [
            [number * unit + i for number in micro for i in range(unit)]
            for micro in rank_batches
        ]
        for rank_batches in plan_micro_batches(
            costs, num_ranks, max_tokens, rule, indices=units
        )
    ]


def _tree_for(model: TrainingModel, lengths: SequenceLengths) -> PrefixTree:
    """Return the tree of the tokens that samples share in a packed row of this model."""
    return lengths.tree if _shares_tokens(model) else PrefixTree.apart(len(lengths))


def _shares_tokens(model: TrainingModel) -> bool:
    """Return whether samples of a packed row share the tokens of a common beginning."""
    # Context-parallel ranks of Transformer Engine cut every sample by itself.
    return model.shares_tokens and model.sequence_multiple == 1


def samples_by_rank(
    model: TrainingModel, plan: MicroBatchPlan, part: int = 0
) -> list[Sequence[int]]:
    """Return the samples that each rank of the model's grid works on, which are those of its data-parallel rank."""
    shape = model.grid.shape
    parts = [
        [row for micro in rank_batches for row in micro]
        for rank_batches in plan[part * shape.dp : (part + 1) * shape.dp]
    ]
    # Ranks that differ only in tensor, pipeline or context coordinates work on the same
    # samples.
    return [parts[place] for place in _data_parallel_ranks(shape)]


@cache
def _data_parallel_ranks(shape: GridShape) -> tuple[int, ...]:
    """Return the data-parallel rank of every rank of a grid."""
    return tuple(shape.coords(rank).dp for rank in range(shape.world_size))


def micro_batches_of(
    model: TrainingModel,
    batch: RolloutBatch,
    lengths: SequenceLengths,
    plan: MicroBatchPlan,
    fields: Mapping[str, torch.Tensor] | None = None,
    *,
    unit: int = 1,
    part: int = 0,
    replays: bool = False,
) -> list[MicroBatch]:
    """Build the micro-batches of a plan that belong to this rank. Their `samples` are row indices of this rank's batch.

    Args:
        replays: route tokens to the experts that the engine chose.
    """
    wanted = (COLUMN, EXPERTS) if replays else (COLUMN,)
    shown = {name: batch.columns[name] for name in wanted if name in batch.columns}
    # Only what the model reads is copied to the device with a micro-batch.
    bare = RolloutBatch({name: batch[name] for name in READ}, shown)
    # Log-probs refer to the distribution that each sample was drawn from.
    fields = {
        **(fields or {}),
        **{name: batch[name].unsqueeze(1) for name in DRAWING if name in batch},
    }
    rank_batches = plan[part * model.grid.shape.dp + model.grid.coords.dp]
    tree = _tree_for(model, lengths)
    micro_batches = []
    for rows in rank_batches:
        # The plan numbers all rows of the step, of which this rank may hold some.
        own_rows = (
            rows if batch.held is None else [batch.held.place[row] for row in rows]
        )
        micro_batches.append(
            _micro_batch(model, bare, own_rows, fields, tree.subset(rows), unit)
        )
    return micro_batches


def _micro_batch(
    model: TrainingModel,
    batch: RolloutBatch,
    rows: list[int],
    fields: Mapping[str, torch.Tensor],
    tree: PrefixTree,
    unit: int,
) -> MicroBatch:
    """Build a micro-batch of rows of a batch, whose shared tokens are those of `tree`."""
    if rows:
        batch, index = batch.select(rows), torch.tensor(rows, dtype=torch.int64)
    # A rank without samples takes part in collectives with a padding row (or unit): no
    # response, no weight.
    else:
        batch, index = (
            batch.select([]).pad_to(samples=unit),
            torch.zeros(unit, dtype=torch.int64),
        )
        tree = PrefixTree.apart(unit)
    packing = None
    # Padded: one row per sample, [samples, longest].
    if model.pack is None:
        tokens = batch.joined(multiple_of=model.token_multiple)
        experts = padded_experts(
            batch.columns.get(EXPERTS), batch.sequence_lengths, tokens.shape[1]
        )
    else:
        # Packed: all samples in one row, [1, tokens]. `packing.source` picks them from
        # the padded rows.
        padded = batch.joined()
        packing = model.pack(
            batch.sequence_lengths.tolist(),
            tree,
            width=padded.shape[1],
            multiple_of=model.token_multiple,
        )
        tokens = padded.flatten()[packing.source].unsqueeze(0)
        experts = padded_experts(
            batch.columns.get(EXPERTS), batch.sequence_lengths, padded.shape[1]
        )
        experts = (
            None
            if experts is None
            else experts.flatten(0, 1)[packing.source].unsqueeze(0)
        )
    # Response fields are cut to the longest response of this micro-batch.
    width = int(batch.response_lengths.max())
    vision = None
    if model.vision is not None:
        images = images_of_rows(
            batch.columns.get(COLUMN), tree if packing is not None else None
        )
        vision = model.vision.read(
            tokens, batch.prompt_lengths, batch.response_lengths, packing, images
        )
    micro = MicroBatch(
        samples=index,
        tokens=tokens,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
        fields={
            name: tensor[beside(tensor, index), :width]
            for name, tensor in fields.items()
        },
        packing=packing,
        vision=vision,
        routed_experts=experts,
    )
    return model.own_part(micro)


class ModelWorker:
    """Base of workers that run a model over a batch, in micro-batches of at most `micro_batch_tokens`.

    Args:
        replays: route tokens to the experts that the engine chose (`actor.router_replay`).
    """

    def __init__(
        self, model: TrainingModel, *, micro_batch_tokens: int, replays: bool = False
    ) -> None:
        self.model, self.micro_batch_tokens, self.replays = (
            model,
            micro_batch_tokens,
            replays,
        )

    def rows(self, lengths: SequenceLengths) -> list[Sequence[int]]:
        """Return the samples that each rank of the model's grid reads to score a batch."""
        return samples_by_rank(
            self.model, plan_for(self.model, lengths, self.micro_batch_tokens)
        )

    def score(
        self,
        batch: RolloutBatch,
        score: Score,
        shape: tuple[int, ...],
        fields: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run `TrainingModel.score` on a batch. `score` reads `fields` [B, R].

        The result of a sample is identical on every rank that holds the sample.
        """
        # Depends on lengths only, so that all ranks compute the same plan.
        lengths = sequence_lengths(batch)
        plan = plan_for(self.model, lengths, self.micro_batch_tokens)
        micro = micro_batches_of(
            self.model, batch, lengths, plan, fields, replays=self.replays
        )
        if batch.held is None:
            return self.model.score(micro, score, shape)
        # Each sample's scores are on the one rank that reports it, and are sent from there.
        # Without the sum over all ranks of `score`: a rank receives only the samples that it holds.
        ranks, rank_rows = (
            batch.held.context.role_group.ranks,
            samples_by_rank(self.model, plan),
        )
        source = {
            rank: rows
            for n, (rank, rows) in enumerate(zip(ranks, rank_rows, strict=True))
            if self.model.reporter(n)
        }
        received = batch.held.spread(
            f"scores of {self.model.role}",
            {"scores": self.model.scored(micro, score, shape)},
            source,
        )
        return received["scores"]


class MiniBatch(NamedTuple):
    """Tokens of one optimizer step.

    Attributes:
        mask: [B, R] bool over this rank's samples: the response tokens of the mini-batch.
        denominators: sums over all samples of the mini-batch, on all ranks.
        number: (step, epoch, mini-batch).
    """

    mask: torch.Tensor
    denominators: Denominators
    number: tuple[int, int, int]


# mini-batch -> additional fields of its loss
Selection = Callable[[MiniBatch], Mapping[str, torch.Tensor]]
# Called with the micro-batches of a mini-batch before the update; returns those to
# train on.
Preparation = Callable[[list[MicroBatch]], list[MicroBatch]]


class Updated(Protocol):
    """A role that is trained: the actor or a critic."""

    trainable: TrainableModel
    algorithm: AlgorithmConfig
    micro_batch_tokens: int
    seed: int


def run_updates(
    role: Updated,
    batch: RolloutBatch,
    loss: Loss,
    *,
    weighting: Weighting,
    fields: Mapping[str, torch.Tensor],
    step: int,
    select: Selection | None = None,
    prepare: Preparation | None = None,
    replays: bool = False,
) -> dict[str, float]:
    """Update on every mini-batch of every epoch. Collective over the role's ranks.

    Args:
        loss: gets `fields` and `weights` of its micro-batch, and returns its share of the global loss. A metric named
            `loss` or `.../loss` is a share too.
        weighting: weight of every token in the loss of its mini-batch.
        select: computes fields that depend on the whole mini-batch.
        prepare: adds the outputs of another model to the micro-batches.
        replays: see `micro_batches_of`.

    Returns:
        Means over all updates of the loss's metrics, `loss` and `grad_norm`; the last update's `lr`; the counts
        `num_updates` and `skipped`.
    """
    reports: list[UpdateReport] = []
    sums, lengths, trainable = MetricSums(), sequence_lengths(batch), role.trainable
    num_tokens = gather_samples(batch, batch.response_mask.sum(dim=1))
    of_episodes = shares_of_episodes(batch, num_tokens)
    # Weights and gradients stay on the device for all updates of the step.
    with trainable.updating():
        for planned in plan_updates(role, lengths, step):
            # The plan numbers all samples of the step. The mask is over this rank's
            # rows.
            chosen = (
                batch.held.places_of(planned.samples)
                if batch.held is not None
                else planned.samples
            )
            mask = mini_batch_mask(batch.response_mask, chosen)
            # Weights are normalised over the whole mini-batch, on all ranks, so that
            # results do not depend on the grid.
            parts = None if of_episodes is None else of_episodes[planned.samples]
            mini = MiniBatch(
                mask,
                make_denominators(num_tokens[planned.samples], parts),
                planned.number,
            )
            extra = select(mini) if select else {}
            own_episodes = (
                None if of_episodes is None else select_samples(batch, of_episodes)
            )
            update_fields = {
                **fields,
                **extra,
                "weights": weighting.weights(mask, mini.denominators, own_episodes),
            }
            part = trainable.part[0]
            micro = micro_batches_of(
                trainable.model,
                batch,
                lengths,
                planned.micro_batches,
                update_fields,
                part=part,
                replays=replays,
            )
            micro = prepare(micro) if prepare else micro
            # After the last update no weight changes until the next reshard, so sending
            # can start with it.
            is_last = (
                len(reports) + 1
                == role.algorithm.num_epochs * role.algorithm.num_mini_batches
            )
            with naming_what_is_not_finite(fields, mask):
                report = trainable.update(
                    micro, loss, float(mini.denominators.num_tokens), is_last=is_last
                )
            reports.append(report)
            sums = add_metrics(sums, reports[-1].sums)
    # The loss is a sum of shares, not a mean over tokens, so it is divided by the
    # number of updates alone.
    shares = {
        name: sums.pop(name) for name in list(sums) if name.rpartition("/")[2] == "loss"
    }
    return {
        **finalize(sums),
        **{name: float(value[1]) / len(reports) for name, value in shares.items()},
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].learning_rate,
        "num_updates": float(len(reports)),
        "skipped": float(sum(report.is_skipped for report in reports)),
    }


@contextmanager
def naming_what_is_not_finite(
    fields: Mapping[str, torch.Tensor], mask: torch.Tensor
) -> Iterator[None]:
    """Add the names of non-finite loss inputs to the error of a stopped update.

    The inputs are checked only after a failure, so that a successful update copies
    nothing more from the device.

    Args:
        fields: `[B, R]` tensors, or tensors with one value per sample.
        mask: `[B, R]` bool, this rank's tokens of the mini-batch.
    """
    try:
        yield
    except TrainingStopped as error:
        tokens = {
            name: tensor
            for name, tensor in fields.items()
            if tensor.shape == mask.shape
        }
        wrong = [
            sentence
            for name, tensor in tokens.items()
            if tensor.is_floating_point()
            and (sentence := non_finite_token(name, tensor.cpu(), mask.cpu()))
        ]
        if not wrong:
            raise
        raise TrainingStopped(
            f"{error} Not finite in this mini-batch: {' '.join(wrong)}"
        ) from error


class PlannedUpdate(NamedTuple):
    """One optimizer step: its number (step, epoch, mini-batch), its samples, and the micro-batches of every rank."""

    number: tuple[int, int, int]
    samples: list[int]
    micro_batches: MicroBatchPlan


def plan_updates(
    role: Updated, lengths: SequenceLengths, step: int
) -> Iterator[PlannedUpdate]:
    """Yield all updates of a step, identical on every rank, from the lengths of all samples.

    Samples with the same prompt go to the same mini-batch as far as its size allows,
    because packed rows share the prompt's tokens.

    Raises:
        DataError: a single sample exceeds the budget, or there are fewer samples than mini-batches.
    """
    trainable, seed, count = role.trainable, role.seed, role.algorithm.num_mini_batches
    least, islands = trainable.gradient_accumulation, trainable.part[1]
    # Every epoch divides the samples anew, from a seed of step and epoch.
    for epoch in range(role.algorithm.num_epochs):
        parts = mini_batches(
            len(lengths),
            count,
            seed=seed,
            step=step,
            epoch=epoch,
            group_ids=lengths.prompts,
        )
        for number, samples in enumerate(parts):
            plan = plan_for(
                trainable.model,
                lengths,
                role.micro_batch_tokens,
                samples,
                least=least,
                parts=islands,
            )
            yield PlannedUpdate((step, epoch, number), samples, plan)


def rows_of_updates(
    role: Updated, lengths: SequenceLengths, step: int, part: int
) -> list[Sequence[int]]:
    """Return the samples that each rank of the model's grid trains on, over all updates of a step.

    Args:
        part: index of the island, each of which trains a copy of the model.
    """
    model = role.trainable.model
    shape = model.grid.shape
    # A set, because a sample appears once per epoch.
    rank_rows: list[set[int]] = [set() for _ in range(shape.dp)]
    for update in plan_updates(role, lengths, step):
        for rows, micro in zip(
            rank_rows,
            update.micro_batches[part * shape.dp : (part + 1) * shape.dp],
            strict=True,
        ):
            rows.update(*micro)
    return samples_by_rank(model, [[sorted(rows)] for rows in rank_rows])


class Weighting:
    """Loss aggregation with its options."""

    def __init__(self, name: str, **options: int | None) -> None:
        self.aggregation: Entry[torch.Tensor] = aggregations.get(name)
        self.options = {
            key: value
            for key, value in options.items()
            if key in self.aggregation.options
        }

    def weights(
        self,
        mask: torch.Tensor,
        denominators: Denominators,
        episode_shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [B, R] weights of the tokens under `mask`, normalised by the denominators of the whole mini-batch."""
        inputs = {
            "response_mask": mask,
            "denominators": denominators,
            "episode_shares": episode_shares,
        }
        return self.aggregation(inputs, **self.options)


def shares_of_episodes(
    batch: RolloutBatch, num_tokens: torch.Tensor
) -> torch.Tensor | None:
    """Return `episode_shares` per agent, [B] over all samples of a step; None without episodes."""
    if "episode_ids" not in batch:
        return None
    agents = (
        batch.agent_ids if "agent_ids" in batch else torch.zeros_like(batch.episode_ids)
    )
    # Agents of one episode count separately: the pair of numbers becomes one number.
    return episode_shares(
        num_tokens,
        gather_samples(batch, batch.episode_ids * (1 + int(agents.max())) + agents),
    )


def mini_batch_mask(response_mask: torch.Tensor, samples: list[int]) -> torch.Tensor:
    """Return a [B, R] mask of the response tokens of `samples` alone."""
    mask = torch.zeros_like(response_mask)
    mask[samples] = response_mask[samples]
    return mask


def cross_entropy(model: TrainingModel) -> Loss:
    """Return the loss -log p of every token, multiplied by the field `weights`."""

    def loss(
        logits: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_probs, _ = model.log_probs(logits, micro)
        value = -(micro.fields["weights"] * log_probs).sum()
        return value, {"loss": share(value)}

    return loss


def share(loss: torch.Tensor) -> torch.Tensor:
    """Return a share of the loss as a metric whose sum is the global loss: [1, loss, loss^2]."""
    # A count of one, so that the report's mean is the sum of the shares over one
    # update.
    value = loss.detach().double()
    return torch.stack([torch.ones_like(value), value, value.square()])
