"""One role's Hugging Face model under PyTorch's FSDP2: score tokens, take an update."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig
from megaverl.distributed.collectives import broadcast_json, reduce_json, together
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.errors import ConfigError
from megaverl.models.hf_attention import packed
from megaverl.models.hf_model import (
    PolicyModule,
    blocks_of,
    build_module,
    checkpoint_block,
    freeze_weights,
    local_tensors,
    logits_are_plain,
    router_loss_coef,
    shard_module,
    sharded,
    vision_blocks_of,
)
from megaverl.models.hf_shards import VALUE_WEIGHT, ShardedWeights, sharded_weights
from megaverl.models.lora.hf_adapters import HFAdapters
from megaverl.models.lora.low_rank import ADAPTER, follow
from megaverl.models.packing import MicroBatch
from megaverl.models.vision import VisionReader
from megaverl.platform import platform
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.model import Loss, Taken, TrainingModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class FSDPModel(TrainingModel):
    """A causal language model of transformers, each parameter cut by rows over the ranks.

    What is trained lies in float32, and is computed in `dtype`; a model that only scores lies in `dtype`.

    Args:
        folder: a Hugging Face folder; of its files config.json and code are read here.
        groups: makes the groups of the ranks that share a model.
        trained: it will take updates.
        lora: train adapters, and a critic's head, and nothing else; the model's own weights then lie in `dtype` too.
        value_head: a critic: one value per position instead of logits, or one for each of several agents.
        beside_logits: an actor that is its own critic: logits, and beside them such values.
        activation_checkpointing: none, selective or full.
        chunked_logits: the model's output is its hidden states, and log-probs are made of them a chunk at a time.
        pack_samples: lay a micro-batch's samples end to end, a prompt that they share once, where the model reads such
            rows.
        freeze: patterns of the names of weights that are not trained.
        initialize: draw random weights; False: they will all be read, and what is in their memory may be anything.
    """

    def __init__(
        self,
        folder: str | Path,
        grid: Grid,
        groups: ProcessGroupManager,
        *,
        fsdp: FsdpConfig,
        dtype: torch.dtype,
        seed: int,
        trained: bool,
        value_head: int = 0,
        beside_logits: bool = False,
        role: str = "actor",
        lora: LoraConfig | None = None,
        activation_checkpointing: str = "none",
        chunked_logits: bool = False,
        initialize: bool = True,
        pack_samples: bool = True,
        trust_remote_code: bool = False,
        freeze: Sequence[str] = (),
    ) -> None:
        if grid.shape.world_size != grid.shape.dp:
            raise ConfigError(f"{role}: engine: fsdp has data-parallel ranks alone. Leave out tp, pp, cp and ep.")
        with together(grid.world):
            self.spec = spec = ModelSpec.outline(folder)
        self.grid, self.role, self.value_head = grid, role, int(value_head)
        self.vocab_size, self.token_multiple, self.beside_logits = spec.vocab_size, 1, beside_logits
        self.dtype = dtype if fsdp.param_dtype is None else getattr(torch, fsdp.param_dtype)
        self.trained = trained
        # nodes may have different numbers of ranks, and all must cut alike
        per_node = broadcast_json(int(os.environ.get("LOCAL_WORLD_SIZE", grid.shape.world_size)), 0, grid.world)
        self.num_shards = num_shards = count_shards(fsdp, grid.shape.world_size, per_node, role)
        kept = torch.float32 if trained and lora is None else self.dtype
        with together(grid.world):
            model, reading = build_module(
                folder,
                dtype=kept,
                seed=seed if initialize else None,
                attention=fsdp.attention,
                liger=fsdp.liger,
                trust_remote_code=trust_remote_code,
            )
            freeze_weights(model, freeze, role)
            everything = sharded_weights(
                model, spec, num_shards, value_head=self.value_head, beside_logits=beside_logits
            )
        if pack_samples and reading.padded_because and not grid.rank:
            logger.warning("%s.pack_samples: rows are padded: %s", role, reading.padded_because)
        self.pack = reading.pack if pack_samples else None
        has_logits = beside_logits or not value_head
        gives_hidden = not has_logits or (chunked_logits and self._logits_are_plain(model))
        if not has_logits:
            _take_head_away(model)
        if lora is not None:
            more = (VALUE_WEIGHT,) if value_head else ()
            self.adapters = HFAdapters(model, everything, lora, grid, num_shards, trained=more, role=role, seed=seed)
        self._router_loss = router_loss_coef(model, fsdp.router_aux_loss_coef, role) if trained else 0.0
        of_head, balances = torch.float32 if trained else kept, bool(self._router_loss)
        self.module = PolicyModule(model, self.value_head, gives_hidden, of_head, balances)
        self.vision = VisionReader.of(model.config)
        _prepare_blocks(model, activation_checkpointing if trained else "none", fsdp.compile)
        self._root = shard_module(
            self.module,
            shard_mesh(groups, grid, num_shards),
            param_dtype=self.dtype if trained and self.dtype != torch.float32 else None,
            reduce_dtype=getattr(torch, fsdp.reduce_dtype or "float32"),
            reshard_after_forward=fsdp.sharding_strategy in ("full_shard", "hybrid_shard"),
            cpu_offload=fsdp.cpu_offload,
        )
        if gives_hidden and has_logits:
            self._head = model.get_output_embeddings()
        self._beside = _Beside() if beside_logits else None
        self._values_beside = self._beside
        self.files_dtype = self.dtype
        self._syncs_once = fsdp.sharding_strategy in ("shard_grad_op", "no_shard")
        self._describe(everything)

    def _logits_are_plain(self, model: PreTrainedModel) -> bool:
        """Whether they can be made of hidden states, a chunk at a time."""
        if not (plain := logits_are_plain(model)) and not self.grid.rank:
            logger.warning(
                "%s.chunked_logits: logits are made whole: %s makes more of them than its output layer gives.",
                self.role,
                type(model).__name__,
            )
        return plain

    def _describe(self, everything: ShardedWeights) -> None:
        """Names, shapes and places of all weights; an engine has those without a value head beside logits."""
        found = local_tensors(self.module)
        self.held_parameters = {name: held for name, held in found.items() if f".{ADAPTER}." not in name}
        if isinstance(self.adapters, HFAdapters):
            self.adapters.attach(found)
        self.held_weights, self.held_layout_of = everything.weights, everything.layout_of
        self.weights, self.layout_of, self.parameters = self.held_weights, self.held_layout_of, self.held_parameters
        if self.beside_logits:
            self.weights = [weight for weight in self.held_weights if weight.name != VALUE_WEIGHT]
            self.layout_of = follow(self.held_layout_of, lambda layout: layout.without([VALUE_WEIGHT]))
            self.parameters = {name: held for name, held in self.held_parameters.items() if name != VALUE_WEIGHT}

    @property
    def holds_own_shards(self) -> bool:
        """Whether this rank speaks for its shards, which replicas hold too."""
        return self.grid.rank < self.num_shards

    @property
    def held(self) -> list[torch.Tensor]:
        return list(local_tensors(self.module).values())

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self.module.buffers())

    def outputs(
        self, micro_batches: Sequence[MicroBatch], take: Callable[[torch.Tensor, MicroBatch], Taken]
    ) -> list[Taken]:
        taken = []
        self.module.eval()
        with torch.no_grad(), self.on_device:
            for each in micro_batches:
                batch = each.to(platform.device)
                with packed(batch.packing):
                    taken.append(take(self._forward(batch)[0], batch))
            for part in sharded(self.module):  # what was gathered would be used after the next update
                part.reshard()
        self.module.train()
        return taken

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> list[Mapping[str, torch.Tensor]]:
        """Accumulate gradients over `micro_batches`, summed over the ranks; returns each one's sums.

        Where gradients are cut over the ranks, they are after every micro-batch, so that they are never whole for
        longer; replicas join theirs after the last one. The loss of experts' routers is, as under Megatron, the mean
        of the micro-batches' by their tokens, padding counted.
        """
        reports, tokens = [], sum(batch.tokens.numel() for batch in micro_batches)
        of_token = self._router_loss / reduce_json(tokens, sum, self.grid.world) if self._router_loss else 0.0
        for number, each in enumerate(micro_batches):
            batch, last = each.to(platform.device), number == len(micro_batches) - 1
            self._root.set_is_last_backward(last)
            self._root.set_requires_gradient_sync(last or not self._syncs_once)
            self._root.set_requires_all_reduce(last)
            with packed(batch.packing):
                output, of_routers = self._forward(batch, router_loss=bool(of_token))
                value, sums = loss(output, batch)
                if of_routers is not None:
                    value = value + of_token * batch.tokens.numel() * of_routers
                if self._beside is not None and self._beside.waits:
                    value = value + 0.0 * self._beside.take().sum()  # every parameter gets a gradient
                value.backward()
            reports.append(sums)
        return reports

    def _forward(self, batch: MicroBatch, *, router_loss: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The model's output, and the routers' loss, if it is asked for."""
        if batch.packing is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
        else:
            positions = batch.packing.positions.unsqueeze(0)
        output, values, of_routers = self.module(batch.tokens, positions, batch.vision, router_loss=router_loss)
        if self._beside is not None:
            self._beside.seen = values
            return output, of_routers
        return output if values is None else values, of_routers


class _Beside:
    """The values beside the logits of the last forward pass, to be taken once."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    @property
    def waits(self) -> bool:
        return self.seen is not None

    def take(self) -> torch.Tensor:
        """[b, s, num_values] float32."""
        assert self.seen is not None, "there was no forward pass, or its values were taken"
        values, self.seen = self.seen, None
        return values


def count_shards(fsdp: FsdpConfig, num_ranks: int, per_node: int, role: str) -> int:
    """Over how many neighbouring ranks a role's parameters are cut; others hold replicas.

    Args:
        per_node: how many of its `num_ranks` ranks the role has on its first rank's node.

    Raises:
        ConfigError: `shard_size` does not divide the ranks.
    """
    if fsdp.sharding_strategy == "no_shard":
        return 1
    if fsdp.sharding_strategy != "hybrid_shard":
        return num_ranks
    size = fsdp.shard_size or min(per_node, num_ranks)
    if num_ranks % size:
        raise ConfigError(
            f"{role}.fsdp.shard_size={size} does not divide the {num_ranks} ranks of the role. Give one that does."
        )
    return size


def shard_mesh(groups: ProcessGroupManager, grid: Grid, num_shards: int) -> DeviceMesh:
    """Replicas and shards; every rank of the world takes part."""
    kind, world = platform.device.type, grid.shape.world_size
    if num_shards == world:
        return DeviceMesh.from_group(grid.world, kind, mesh_dim_names=("shard",))
    ranks = torch.arange(world).view(-1, num_shards)
    replicas, shards = (groups.group(rows.tolist() for rows in each) for each in (ranks.T, ranks))
    assert replicas is not None and shards is not None
    return DeviceMesh.from_group([replicas, shards], kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _prepare_blocks(model: Any, checkpointing: str, compiles: bool) -> None:
    """What is done to each block before it is cut."""
    for block in [*vision_blocks_of(model), *blocks_of(model)]:
        if checkpointing != "none":
            checkpoint_block(block, checkpointing)
        if compiles:
            block.compile()


def _take_head_away(model: Any) -> None:
    """Of a critic: its output layer, with the parameters that are its own."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
