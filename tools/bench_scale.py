#!/usr/bin/env python3
"""Data that one rank of N receives and processes in a step, at N = 8, 128 and 1,024: the table of docs/scaling.md.

    python tools/bench_scale.py                          # about a minute and 6 GB of memory for 1,024 ranks
    python tools/bench_scale.py --ranks 8 128 --only samples

Runs the real code as one rank of N over torch's fake process group, whose collectives move nothing. Messages are packed
and unpacked and plans are made, so their bytes and the rank's processor time can be counted. Each function in `GROUPS`
yields the lines of one subject; to add lines, add a function.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from megaverl.algorithms.loss import make_denominators
from megaverl.config import load_config
from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import rows_of_rank
from megaverl.data.datasets import PromptRecord
from megaverl.data.distributed_batch import RowSelection, as_held
from megaverl.data.held_rows import HeldRows
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.data.row_transfer import Moving
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.distributed.grid import GridShape
from megaverl.distributed.job_context import default_group_context
from megaverl.distributed.ragged import RaggedBatch, merge
from megaverl.models.packing import pack
from megaverl.rollout.engine import Generation
from megaverl.sharding.rows import Rows, join_rows
from megaverl.trainer.job import kept_objects
from megaverl.trainer.sample_routing import SampleRouting
from megaverl.workers.advantage_computer import AdvantageComputer
from megaverl.workers.micro_batches import (
    ModelWorker,
    Weighting,
    micro_batches_of,
    plan_for,
    plan_updates,
)
from megaverl.workers.responses import rollout_batch
from megaverl.workers.reward import RewardRole
from megaverl.workers.rollout import _as_rows, _from_rows

TP = 8
SAMPLES_PER_RANK = 16  # of a step: 128 for each data-parallel rank
GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 16, 256, 2048
REPEATS = 3
ROLES = ("actor", "reference", "rollout", "reward", "coordinator")
MINUTE = timedelta(minutes=1)


class Line(NamedTuple):
    """One line of the table: its subject, and its number for each count of ranks, as text."""

    what: str
    cells: list[str]


class Step(NamedTuple):
    """Lengths and responses of a step at some number of ranks."""

    lengths: SequenceLengths
    group_ids: list[int]
    prompts: list[PromptRecord]

    def response(self, row: int) -> Generation:
        size = self.lengths.response_lengths[row]
        return Generation([1000 + row] * size, [-0.5] * size, "stop")


class Stopwatch:
    """Adds up processor seconds by part of a rank's step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024])
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=list(GROUPS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(
        f"| per rank and step | {' | '.join(f'{count:,} ranks' for count in options.ranks)} |"
    )
    print("| --- |" + " ---: |" * len(options.ranks))
    with kept_objects():  # as a run does
        for group in options.only:
            for line in GROUPS[group](options.ranks):
                print(f"| {line.what} | {' | '.join(line.cells)} |", flush=True)


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """Make this process one rank of `size`, in a group whose collectives move nothing, until the context ends."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def samples(ranks: Sequence[int]) -> Iterator[Line]:
    """Yield the lines on responses, log-probs and advantages: all samples on every rank, or each rank's own."""
    moved_by_rank = {
        # the quickest of some: the first one makes what a run makes once, and others
        # use these processors too
        (size, is_first): (
            min(
                (own_rows(size, rank) for _ in range(REPEATS)),
                key=lambda moved: moved.seconds,
            ),
            everything(size, rank),
        )
        for size in ranks
        for is_first, rank in ((True, 0), (False, size // 2 + 1))
    }

    def line(
        label: str,
        number: Callable[[tuple[Moved, Moved]], str],
        *,
        of_rank_0: bool = False,
    ) -> Line:
        return Line(label, [number(moved_by_rank[size, of_rank_0]) for size in ranks])

    yield Line(
        "samples of the step", [f"{size * SAMPLES_PER_RANK:,}" for size in ranks]
    )
    yield line("samples that a rank has", lambda both: f"{both[0].held:,}")
    yield line(
        "bytes received, every rank having all samples",
        lambda both: megabytes(both[1].bytes),
    )
    yield line(
        "bytes received, each its own: rows", lambda both: megabytes(both[0].bytes)
    )
    yield line(
        "bytes received, each its own: numbers of all samples",
        lambda both: megabytes(both[0].numbers),
    )
    for name, of_rank_0 in (("a rank", False), ("rank 0", True)):
        yield line(
            f"processor seconds of {name}, all samples",
            lambda b: f"{b[1].seconds:.2f}",
            of_rank_0=of_rank_0,
        )
        yield line(
            f"processor seconds of {name}, its own",
            lambda b: f"{b[0].seconds:.2f}",
            of_rank_0=of_rank_0,
        )
    for part in moved_by_rank[ranks[0], True][0].parts:
        yield line(
            f"of these {part}",
            lambda both, part=part: f"{both[0].parts[part]:.3f}",  # type: ignore[misc]
        )


GROUPS: dict[str, Callable[[Sequence[int]], Iterator[Line]]] = {"samples": samples}


class Moved(NamedTuple):
    """Data that a step brings to a rank, and the processor time that the rank spends on it.

    Attributes:
        bytes: bytes of sample rows.
        numbers: bytes of the numbers that are known of all samples.
    """

    held: int
    bytes: float
    numbers: float
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB"


def step_of(size: int) -> Step:
    """Return a step with prompts of about 200 tokens and `GROUP_SIZE` responses of about 1,300 tokens to each."""
    count, draw = size * SAMPLES_PER_RANK, random.Random(0)
    prompt = [
        draw.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS)
        for _ in range(count // GROUP_SIZE)
    ]
    records = [
        PromptRecord(n, "", "", [n] * length, "", {}, "", [])
        for n, length in enumerate(prompt)
    ]
    groups = [row // GROUP_SIZE for row in range(count)]
    response = [
        draw.randint(RESPONSE_TOKENS // 4, RESPONSE_TOKENS) for _ in range(count - 1)
    ] + [RESPONSE_TOKENS]
    lengths = SequenceLengths([prompt[group] for group in groups], response, groups)
    return Step(lengths, groups, [records[group] for group in groups])


def roles_of(size: int) -> tuple[Any, Any]:
    """Return (roles, model) for the plans of a step: actor and reference at TP8, and rewards."""
    shape = GridShape(tp=TP, dp=size // TP)
    grid = SimpleNamespace(shape=shape, coords=shape.coords(dist.get_rank()))
    # For sequence parallelism.
    filled_up = {
        "token_multiple": TP,
        "sequence_multiple": 1,
        "shares_tokens": True,
    }
    model: Any = SimpleNamespace(
        role="actor",
        grid=grid,
        pack=pack,
        vision=None,
        own_part=lambda micro_batch: micro_batch,
        **filled_up,
    )
    actor: Any = ModelWorker(model, micro_batch_tokens=16384)
    actor.trainable = SimpleNamespace(model=model, part=(0, 1), gradient_accumulation=1)
    actor.algorithm, actor.seed, actor.is_on_policy = CONFIG.algorithm, 0, False
    rules: Any = SimpleNamespace(components=[])
    reward = RewardRole(rules, None, dist.group.WORLD)  # type: ignore[arg-type]  # asked for rows alone
    return SimpleNamespace(
        actor=actor, reference=actor, reward=reward, critic=None, implicit=None
    ), model


CONFIG = load_config(
    None,
    [
        "model.path=m",
        "data.train=t",
        "reward=exact_match",
        f"algorithm={{name: grpo, group_size: {GROUP_SIZE}, num_mini_batches: 4}}",
        "algorithm.kl={in: loss, kind: k3, coef: 0.01}",
    ],
    check_paths=False,
)


def routing_of(size: int, roles: Any) -> SampleRouting:
    steps: Any = SimpleNamespace(
        config=CONFIG, roles=roles, needs_log_probs=lambda step: True
    )
    return SampleRouting(steps, default_group_context(ROLES, MINUTE), reporting_rank=0)


def written_by(size: int, count: int) -> dict[int, range]:
    """Return the samples that each engine has generated, by the engine's first rank."""
    return {
        rank: rows_of_rank(count, rank // TP, size // TP) for rank in range(0, size, TP)
    }


def own_rows(size: int, rank: int) -> Moved:
    """Simulate a step in which each rank has only its own samples."""
    watch, step = Stopwatch(), step_of(size)
    lengths = step.lengths
    with rank_of(rank, size):
        roles, model = roles_of(size)
        routing = routing_of(size, roles)
        rows_read = routing.rows_read()
        names = ("reward", "ref_log_probs", "old_log_probs", "advantages")

        def rows(lengths: SequenceLengths) -> Rows:
            return join_rows(rows_read[name](lengths) for name in names)

        with watch.part("plans: who works on what"):
            held = RowSelection(routing.context, rows).held(lengths, step.group_ids)
            moving = Moving.plan(
                routing.context,
                "responses",
                written_by(size, len(lengths)),
                held.by_rank,
            )
        messages = [
            _as_rows(move.rows, [step.response(row) for row in move.rows]).pack(
                range(len(move.rows))
            )
            for move in moving.moves
            if move.dest == rank
        ]
        wanted = [move.rows for move in moving.moves if move.dest == rank]
        own_places = [
            row
            for row in written_by(size, len(lengths)).get(rank, ())
            if row in held.place
        ]
        row_batch = _as_rows(own_places, [step.response(row) for row in own_places])
        size_of_rows: float = sum(
            payload.numel() + len(header) for header, payload, _ in messages
        )
        with watch.part("unpacking responses"):
            batch = held_batch(step, held, [(own_places, row_batch)], wanted, messages)
        micro_batches(watch, model, batch)
        size_of_rows += results(watch, roles, model, batch, held)
        advantages(watch, batch, step)
        weights(watch, roles.actor, batch, held)
        routing.context.messages.close()
    # lengths and their ranks; two scores and a component; tokens that train, asked for
    # twice, and whether they ended
    return Moved(
        len(held.rows),
        size_of_rows,
        len(lengths) * (12 + 12 + 2 * 8 + 1),
        watch.seconds,
    )


def held_batch(
    step: Step,
    held: HeldRows,
    here: list[tuple[list[int], RaggedBatch]],
    wanted: Any,
    messages: Any,
) -> RolloutBatch:
    """Build the batch from the received rows as `responses.held_responses` does."""
    parts: list[Any] = [
        ([held.place[row] for row in rows], part, range(len(rows)))
        for rows, part in here
        if rows
    ]
    for rows, (header, payload, _) in zip(wanted, messages, strict=True):
        parts.append(
            (
                [held.place[row] for row in rows],
                RaggedBatch.unpack(header, payload, {}),
                range(len(rows)),
            )
        )
    generations = _from_rows(merge(len(held.rows), parts))
    batch = rollout_batch(
        [step.prompts[row] for row in held.rows],
        generations,
        [step.group_ids[row] for row in held.rows],
    )
    return as_held(batch, held)


def everything(size: int, rank: int) -> Moved:
    """Simulate a step in which every rank has all samples."""
    watch, step = Stopwatch(), step_of(size)
    count = len(step.lengths)
    with rank_of(rank, size):
        roles, model = roles_of(size)
        speakers = written_by(size, count)
        packed = [
            (
                rows,
                _as_rows(rows, [step.response(row) for row in rows]).pack(
                    range(len(rows))
                ),
            )
            for rows in speakers.values()
        ]
        widest = max(payload.numel() for _, (_, payload, _) in packed)
        with watch.part("unpacking responses"):
            parts: list[Any] = []
            for rows, (header, payload, _) in packed:
                parts.append(
                    (
                        rows,
                        RaggedBatch.unpack(header, payload.clone(), {}),
                        range(len(rows)),
                    )
                )
            batch = rollout_batch(
                step.prompts, _from_rows(merge(count, parts)), step.group_ids
            )
        del packed, parts
        micro_batches(watch, model, batch)
        advantages(watch, batch, step)
        weights(watch, roles.actor, batch, None)
    # every rank's bytes are padded to the most of any; a sum over all ranks brings a
    # tensor twice (ring)
    gathered = widest * size
    sums = 2 * 2 * count * batch.generated_ids.shape[1] * 4
    return Moved(count, gathered + sums, count * 12, watch.seconds)


def micro_batches(watch: Stopwatch, model: Any, batch: RolloutBatch) -> None:
    """Cut the batch into the micro-batches of the actor's and the reference's log-probs."""
    for _ in range(2):
        with watch.part("plans: who works on what"):
            outline = sequence_lengths(batch)
            plan = plan_for(model, outline, 16384)
        with watch.part("micro-batches"):
            micro_batches_of(model, batch, outline, plan)


def results(
    watch: Stopwatch, roles: Any, model: Any, batch: RolloutBatch, held: HeldRows
) -> float:
    """Exchange log-probs of actor and reference, and advantages; return the bytes that this rank receives."""
    context = held.context
    rows_by_rank = roles.actor.rows(held.lengths)
    of_scores = {
        rank: rows if rank % TP == 0 else () for rank, rows in enumerate(rows_by_rank)
    }
    received = 0.0
    for name, source in (
        ("old", of_scores),
        ("reference", of_scores),
        ("advantages", held.groups_by_rank),
    ):
        with watch.part("plans: who sends what"):
            moving = Moving.plan(context, name, source, held.by_rank)
        messages = []
        for move in moving.moves:
            if move.dest == context.rank:
                sizes = torch.tensor(
                    [held.lengths.response_lengths[row] for row in move.rows]
                )
                rows = torch.zeros(len(move.rows), batch.generated_ids.shape[1])
                messages.append(
                    RaggedBatch({"x": rows}, {"x": "R"}, {"R": sizes}).pack(
                        range(len(move.rows))
                    )
                )
        received += sum(
            payload.numel() + len(header) for header, payload, _ in messages
        )
        with watch.part("unpacking results"):
            for header, payload, _ in messages:
                RaggedBatch.unpack(header, payload, {})
    return received


def advantages(watch: Stopwatch, batch: RolloutBatch, step: Step) -> None:
    """Compute GRPO advantages of all samples, or of this rank's groups alone."""
    total = torch.arange(len(step.lengths)) % 3
    rewards = (total if batch.held is None else batch.held.pick(total)).float()
    complete = batch.with_(rewards=rewards, ref_log_probs=batch.rollout_log_probs)
    with watch.part("advantages"):
        local = complete if batch.held is None else complete.select(batch.held.own)
        AdvantageComputer(CONFIG.algorithm).assign(local, kl_coef=0.01)


def weights(
    watch: Stopwatch, actor: Any, batch: RolloutBatch, held: HeldRows | None
) -> None:
    """Compute the loss weights of the tokens in each mini-batch."""
    num_tokens = torch.tensor(sequence_lengths(batch).response_lengths)
    plans = plan_updates(actor, sequence_lengths(batch), 0)
    while True:
        with watch.part("plans: who works on what"):
            planned = next(plans, None)
        if planned is None:
            return
        with watch.part("micro-batches"):
            places = (
                planned.samples if held is None else held.places_of(planned.samples)
            )
            mask = torch.zeros_like(batch.response_mask)
            mask[places] = batch.response_mask[places]
            values = Weighting("token_mean").weights(
                mask, make_denominators(num_tokens[planned.samples])
            )
            fields = {"weights": values, "advantages": batch.rollout_log_probs}
            micro_batches_of(
                actor.model,
                batch,
                sequence_lengths(batch),
                planned.micro_batches,
                fields,
            )


if __name__ == "__main__":
    main()
