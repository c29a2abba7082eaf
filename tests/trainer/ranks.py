"""What the ranks of a test world do with whole commands."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.store import CheckpointStore
from megaverl.config import Config, load_config
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import on_first_rank
from megaverl.errors import MegaverlError
from megaverl.models.packing import MicroBatch
from megaverl.monitoring.console import Console
from megaverl.trainer.build import Builder
from megaverl.trainer.loop import Trainer
from megaverl.trainer.run import COMMANDS, prepare_folder
from tests.models.ranks import whole_rows

Heard = dict[str, str]


def configuration(arguments: list[str], command: Any = "train") -> Config:
    """As the command makes it of `--config=FILE` and overrides."""
    return load_config(arguments[0].removeprefix("--config="), arguments[1:], command=command)


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
    config = configuration(arguments + (on_rank or {}).get(str(dist.get_rank()), []), command)
    try:
        on_first_rank(lambda: prepare_folder(config.run_dir, config, command))
        COMMANDS[command](config, Console(rank=dist.get_rank()), None, options or {})
    except MegaverlError as error:
        return {"class": type(error).__name__, "text": str(error)}
    return {}


def train_with_a_wrong_engine(
    arguments: list[str], wrong_rank: int, by: float = 0.5, layer: str = "layers.1.mlp.down_proj"
) -> Heard:
    """Train; after every reshard one rank's engine has other weights than the actor. -1: no rank's.

    Returns: the error that this rank hears, or what it has said.
    """
    said = io.StringIO()
    trainer = Trainer(configuration(arguments), Console(rank=dist.get_rank(), out=said))
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


def checkpoint_logits(arguments: list[str], checkpoint: str, tokens: list[list[int]]) -> list[Any]:
    """[b, s, vocab] logits of a checkpoint's actor; [] off the last stage."""
    builder = Builder(configuration(arguments))
    actor, critic = builder.actor(), builder.critic()
    CheckpointStore(checkpoint).load(checkpoint, {"actor": actor.trainable, "critic": critic.trainable})
    model, found = actor.model, []

    def score(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(model.grid.shape.tp)]
        dist.all_gather(parts, output.contiguous(), group=model.grid.tp_group)
        found.append(torch.cat(parts, dim=-1)[..., : model.spec.vocab_size])
        return output.new_zeros(micro.response_mask.shape)

    batch: RolloutBatch = whole_rows(tokens)
    micro = MicroBatch(torch.arange(len(batch)), batch.joined().token_ids, batch.prompt_lengths, batch.response_lengths)
    model.score([micro], score, tuple(batch.generated_ids.shape))
    return found[0].tolist() if found else []
