"""What the ranks of a test world do with whole commands."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megaverl.checkpoint.store import CheckpointStore
from megaverl.config import Config, load_config
from megaverl.data.batch import RolloutBatch
from megaverl.data.distributed_batch import RowSelection, whole_on
from megaverl.distributed import collectives
from megaverl.distributed.collectives import on_first_rank
from megaverl.distributed.job_context import default_group_context
from megaverl.errors import MegaverlError
from megaverl.models.packing import MicroBatch
from megaverl.monitoring.console import Console
from megaverl.monitoring.timeline import total_received
from megaverl.trainer.build import Builder
from megaverl.trainer.job import alone
from megaverl.trainer.loop import Trainer
from megaverl.trainer.run import COMMANDS, prepare_folder
from megaverl.weights import reshard
from megaverl.weights.reshard import in_background
from tests.models.ranks import whole_rows

Heard = dict[str, str]


def configuration(arguments: list[str], command: Any = "train") -> Config:
    """As the command makes it of `--config=FILE` and overrides."""
    return load_config(
        arguments[0].removeprefix("--config="), arguments[1:], command=command
    )


def attempt(
    command: str,
    arguments: list[str],
    on_rank: dict[str, list[str]] | None = None,
    options: dict[str, Any] | None = None,
) -> Heard:
    """Do a command on this world; the error that this rank hears.

    Args:
        on_rank: further overrides on some ranks, as if their machines had other files.
    """
    config = configuration(
        arguments + (on_rank or {}).get(str(dist.get_rank()), []), command
    )
    try:
        on_first_rank(lambda: prepare_folder(config.run_dir, config, command))
        console = Console(rank=dist.get_rank())
        COMMANDS[command](config, console, alone(config), **(options or {}))
    except MegaverlError as error:
        return {"class": type(error).__name__, "text": str(error)}
    return {}


def train_with_a_wrong_engine(
    arguments: list[str],
    wrong_rank: int,
    by: float = 0.5,
    layer: str = "layers.1.mlp.down_proj",
) -> Heard:
    """Train; after every reshard one rank's engine has other weights than the actor. -1: no rank's.

    Returns: the error that this rank hears, or what it has said.
    """
    said = io.StringIO()
    config, console = configuration(arguments), Console(rank=dist.get_rank(), out=said)
    trainer = Trainer(config, console, alone(config))
    rollout, sync = trainer.roles.rollout, trainer.roles.sync
    reshard = sync.reshard

    def reshard_wrongly() -> Any:
        stats = reshard()
        if dist.get_rank() == wrong_rank:
            weight = rollout.engine.named_parameters()[f"model.{layer}.weight"]
            weight.data[0] += by
        return stats

    sync.reshard = reshard_wrongly  # type: ignore[method-assign]
    try:
        trainer.train()
    except MegaverlError as error:
        return {"class": type(error).__name__, "text": str(error)}
    return {"said": said.getvalue()}


def checkpoint_logits(
    arguments: list[str], checkpoint: str, tokens: list[list[int]]
) -> list[Any]:
    """[b, s, vocab] logits of a checkpoint's actor; [] off the last stage."""
    builder = Builder(configuration(arguments))
    actor, critic = builder.actor(), builder.critic()
    CheckpointStore(checkpoint).load(
        checkpoint, {"actor": actor.trainable, "critic": critic.trainable}
    )
    model, found = actor.model, []

    def score(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(model.grid.shape.tp)]
        dist.all_gather(parts, output.contiguous(), group=model.grid.tp_group)
        found.append(torch.cat(parts, dim=-1)[..., : model.spec.vocab_size])
        return output.new_zeros(micro.response_mask.shape)

    batch: RolloutBatch = whole_rows(tokens)
    micro = MicroBatch(
        torch.arange(len(batch)),
        batch.joined(),
        batch.prompt_lengths,
        batch.response_lengths,
    )
    model.score([micro], score, tuple(batch.generated_ids.shape))
    return found[0].tolist() if found else []


def train_counted(arguments: list[str], whole: bool = False) -> dict[str, Any]:
    """Train, and count what comes to this rank of samples and of what is said of them.

    Args:
        whole: every rank gets all samples, as where something reads them all.

    Returns: `metrics` by step; `weights`, a sum of each; bytes of `rows` of samples
    that came, and of `numbers` of all
        samples; `held`, the samples that this rank had in the last step; `groups`, of how many ranks each new one is;
        `parts` of a reshard in the background.
    """
    config = configuration(arguments)
    console = Console(rank=dist.get_rank(), out=io.StringIO())
    # Other tests may have made groups of these ranks.
    of_group = dist.distributed_c10d._world.pg_group_ranks
    before = set(of_group)
    trainer = Trainer(config, console, alone(config))
    state = trainer.run_state
    if whole:
        state._readers = None
    counted = CountedBytes()
    logged: list[dict[str, float]] = []
    log = trainer.records.log

    def noted(done: int, metrics: Mapping[str, float]) -> None:
        log(done, metrics)
        logged.append({**metrics, **total_received(metrics)})

    trainer.records.log = noted
    with counted.counting():
        trainer.train()
    batch, _ = state._samples
    return {
        "metrics": logged,
        "weights": [
            float(p.detach().double().sum())
            for p in trainer.roles.actor.model.parameters.values()
        ],
        "rows": state.context.traffic.received,
        "numbers": counted.numbers,
        "held": len(batch),
        "groups": [
            len(ranks) for group, ranks in of_group.items() if group not in before
        ],
        "tokens": int(batch.response_lengths.sum()),
        "parts": trainer.roles.sync._resharder.num_parts,  # type: ignore[union-attr]
    }


class CountedBytes:
    """Bytes of the numbers that this rank hears of all samples: what `gather_host_rows` brings."""

    def __init__(self) -> None:
        self.numbers = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        conclude = collectives.conclude

        def counted(*args: Any) -> bytes:
            found = conclude(*args)
            if sys._getframe(1).f_code.co_name == "gather_host_rows":
                self.numbers += len(found)
            return found

        with patch.object(collectives, "conclude", counted):
            yield


def hold_and_give_back(count: int, group_size: int) -> dict[str, Any]:
    """Take some samples of a batch that every rank has; what is made of them on one rank or on all."""
    context = default_group_context(("actor",), timedelta(minutes=1))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (count,), generator=generator)
    lengths[0] = 5
    mask = torch.arange(5) < lengths.unsqueeze(1)
    prompts, values = (
        torch.arange(1, count + 1).unsqueeze(1),
        torch.rand(count, 5, generator=generator) * mask,
    )
    batch = RolloutBatch(
        {
            "input_ids": prompts,
            "prompt_lengths": torch.ones(count, dtype=torch.int64),
            "generated_ids": (values * 100).long(),
            "response_mask": mask,
            "response_lengths": lengths,
            "rollout_log_probs": values,
            "group_ids": torch.arange(count) // group_size,
        },
        {"text": [f"sample {row}" for row in range(count)]},
    )
    size = len(context.role_group.ranks)
    wanted = {
        rank: [row for row in range(count) if (row * 7) % (size + 1) == rank]
        for rank in range(size)
    }
    mine = RowSelection(context, lambda _: wanted).select(batch)
    held = mine.held
    assert held is not None and set(wanted[context.rank]) <= set(held.rows)
    assert torch.equal(held.gather_samples(mine.response_lengths), lengths)
    assert torch.equal(held.pick(lengths), mine.response_lengths)
    assert int(held.all_reduce(mine.response_mask[held.own].sum())) == int(mask.sum())
    # each rank has made the values of its own groups, and knows nothing of the others
    known = torch.zeros_like(mine.rollout_log_probs)
    known[held.own] = mine.rollout_log_probs[held.own]
    one_more = torch.nn.functional.pad(known, (1, 0), value=0.0)
    for rows in (None, context.group):  # over the hosts, and as devices would
        there = replace(held, context=replace(context, rows=rows))
        values = {"same": known, "more": one_more, "one": known.sum(1)}
        found = there.spread("values", values, held.groups_by_rank)
        assert torch.equal(found["same"], mine.rollout_log_probs)
        assert torch.equal(found["more"][:, 1:], mine.rollout_log_probs)
        assert torch.equal(found["one"], mine.rollout_log_probs.sum(1))
    whole = whole_on(mine, 0)
    if context.rank == 0:
        assert all(torch.equal(whole[name], batch[name]) for name in batch)
        assert whole.columns == batch.columns
    return {"held": len(mine), "groups": len(held.own)}


def train_until_a_part_is_lost(arguments: list[str], stalls: bool) -> str:
    """Train while weights move in the background, where those of rank 1 raise or never come; how it ends."""
    config = configuration(arguments)
    console = Console(rank=dist.get_rank(), out=io.StringIO())
    trainer = Trainer(config, console, alone(config))
    let_go = threading.Event()

    def lost(function: Any) -> Any:
        def instead() -> Any:
            if stalls:
                let_go.wait()
            raise OSError("the device is gone")

        return in_background(instead if dist.get_rank() == 1 else function)

    try:
        with patch.object(reshard, "in_background", lost):
            trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        let_go.set()
    return "trained"
