"""What the ranks of a test world do to a Megatron-core model."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape
from megaverl.parallel.groups import Grid, ProcessGroupManager
from megaverl.roles.megatron_model import MegatronModel, MicroBatch
from megaverl.roles.micro_batches import micro_batches_for


@functools.cache
def manager() -> ProcessGroupManager:
    """One per world, as in a run."""
    return ProcessGroupManager()


def grid(tp: int, pp: int, vpp: int | None = None) -> Grid:
    return manager().grid(GridShape.fit(dist.get_world_size(), tp=tp, pp=pp, vpp=vpp))


def load(folder: str, tp: int, pp: int, *, value_head: bool = False, **options: Any) -> MegatronModel:
    """The model of `folder` on a grid that fills the world."""
    vpp = options.pop("vpp", None)
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        grid(tp, pp, vpp),
        dtype=torch.float32,
        seed=0,
        value_head=value_head,
        overrides=options,
    )
    model.load(folder)
    return model


def whole_rows(tokens: list[list[int]]) -> RolloutBatch:
    """[b][s] tokens as a batch whose responses are everything after the first token."""
    ids = torch.tensor(tokens)
    return RolloutBatch(
        {
            "input_ids": ids[:, :1],
            "prompt_lengths": torch.ones(len(ids), dtype=torch.int64),
            "generated_ids": ids[:, 1:],
            "response_mask": torch.ones_like(ids[:, 1:], dtype=torch.bool),
        }
    )


def logits(folder: str, tp: int, pp: int, tokens: list[list[int]], **options: Any) -> list[list[list[float]]]:
    """[b, s, vocab] logits of every position, gathered over the tensor-parallel ranks; [] off the last stage."""
    model = load(folder, tp, pp, **options)
    found: list[torch.Tensor] = []

    def score(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(tp)]
        dist.all_gather(parts, output.contiguous(), group=model.grid.tp_group)
        found.append(torch.cat(parts, dim=-1)[..., : model.spec.vocab_size])
        return output.new_zeros(micro.response_mask.shape)

    batch = whole_rows(tokens)
    micro = MicroBatch(torch.arange(len(batch)), batch.joined().token_ids, batch.prompt_lengths, batch.response_lengths)
    model.score([micro] * pp, score, tuple(batch.generated_ids.shape))  # the same on every data-parallel rank
    return found[0].tolist() if found else []


def values(folder: str, tp: int, pp: int, tokens: list[list[int]]) -> list[list[float]]:
    """[b, s - 1] values of a critic."""
    model = load(folder, tp, pp, value_head=True)
    batch = whole_rows(tokens)
    return model.score(micro_batches_for(model, batch, 64), model.values, tuple(batch.generated_ids.shape)).tolist()
