"""Hugging Face model of one role under PyTorch's FSDP2: it scores tokens and takes updates."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.roles import LoraConfig
from megaverl.distributed.collectives import broadcast_json, reduce_json, together
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.errors import ConfigError, ModelError
from megaverl.models.fake_quantization import round_hf_layers
from megaverl.models.hf_attention import RowReading, packed
from megaverl.models.hf_model import (
    PolicyModule,
    RootModule,
    all_shards,
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
from megaverl.models.hf_shards import (
    VALUE_WEIGHT,
    ShardedWeights,
    cut_over_tensor_ranks,
    sharded_weights,
    tensor_cuts,
)
from megaverl.models.lora import ADAPTER, follow
from megaverl.models.lora.adapters import HFAdapters
from megaverl.models.packing import MicroBatch
from megaverl.models.vision import VisionReader
from megaverl.platform import platform
from megaverl.platform.batch_invariant import batch_invariant
from megaverl.platform.float32_linear import compute_in_float32
from megaverl.sharding.model_spec import BATCH_INVARIANT, ModelSpec
from megaverl.workers.model import Loss, Taken, TrainingModel
from megaverl.workers.model_options import ModelOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class FSDPModel(TrainingModel):
    """Causal language model of transformers, with each parameter sharded by rows over the ranks.

    Trained parameters are stored in float32 and computed in `dtype`. A model that only
    scores is stored in `dtype`.

    Args:
        folder: a Hugging Face folder; only its config.json and code are read here.
        groups: creates the process groups of the ranks that share a model.
        options: with `lora`, the model's own weights are stored in `dtype` too.
        freeze: name patterns of weights that are not trained.
    """

    def __init__(
        self,
        folder: str | Path,
        grid: Grid,
        groups: ProcessGroupManager,
        options: ModelOptions,
        *,
        fsdp: FsdpConfig,
        trust_remote_code: bool = False,
        freeze: Sequence[str] = (),
    ) -> None:
        role, lora, trained = options.role, options.lora, options.trained
        value_head, beside_logits = options.value_head, options.beside_logits
        _check_ranks(grid, fsdp, lora, role)
        # All ranks read the folder. If one of them fails, all raise.
        with together(grid.world):
            self.spec = spec = ModelSpec.outline(folder)
        self.grid, self.role, self.value_head = grid, role, int(value_head)
        self.vocab_size, self.beside_logits = spec.vocab_size, beside_logits
        # Each rank of a row holds two chunks of it.
        self.token_multiple = 1 if grid.shape.cp == 1 else 2 * grid.shape.cp
        self._context_group = None if grid.shape.cp == 1 else grid.cp_group
        self.dtype = (
            options.dtype
            if fsdp.param_dtype is None
            else getattr(torch, fsdp.param_dtype)
        )
        self.trained = trained
        # Nodes may have different numbers of ranks, but all ranks must use the same
        # shard count.
        per_node = broadcast_json(
            int(os.environ.get("LOCAL_WORLD_SIZE", grid.shape.world_size)),
            0,
            grid.world,
        )
        self.num_shards = num_shards = count_shards(
            fsdp, grid.shape.dp * grid.shape.cp, per_node // grid.shape.tp, role
        )
        # Optimizer updates need float32 weights. Adapters have weights of their own,
        # and a reference takes no updates.
        kept = torch.float32 if trained and lora is None else self.dtype
        with together(grid.world):
            model, reading = build_module(
                folder,
                dtype=kept,
                seed=options.seed if options.initialize else None,
                attention=fsdp.attention,
                liger=fsdp.liger,
                trust_remote_code=trust_remote_code,
            )
            if grid.shape.cp > 1:
                _check_context(model, reading, fsdp, trained, role)
            freeze_weights(model, freeze, role)
            if options.fake_quantization is not None:
                round_hf_layers(model, options.fake_quantization)
            self._cuts = tensor_cuts(model, grid.shape.tp, role)
            # Layouts of the whole model and of the shards, before FSDP2 replaces the
            # parameters by shards.
            everything = sharded_weights(
                model,
                spec,
                num_shards,
                value_head=self.value_head,
                beside_logits=beside_logits,
                cuts=self._cuts,
            )
        if options.pack_samples and reading.padded_because and not grid.rank:
            logger.warning(
                "%s.pack_samples: rows are padded: %s", role, reading.padded_because
            )
        self.pack = reading.pack_of(self.part) if options.pack_samples else None
        has_logits = beside_logits or not value_head
        # Without an output layer, or with one that is applied in chunks, the module
        # returns hidden states.
        gives_hidden = not has_logits or (
            options.chunked_logits and self._logits_are_plain(model)
        )
        self._batch_invariant = _computes_by_row(model, options)
        # Chunks of hidden states are multiplied in the dtype that they have.
        self._widens = has_logits and self._prepare_logits(model, gives_hidden, options)
        if not has_logits:
            _take_head_away(model)
        if lora is not None:
            more = (VALUE_WEIGHT,) if value_head else ()
            self.adapters = HFAdapters(
                model,
                everything,
                lora,
                grid,
                num_shards,
                trained=more,
                role=role,
                seed=options.seed,
            )
        self._router_loss = (
            router_loss_coef(model, fsdp.router_aux_loss_coef, role) if trained else 0.0
        )
        of_head, balances = torch.float32 if trained else kept, bool(self._router_loss)
        self.module = self._root_module(model, gives_hidden, of_head, balances)
        self.vision = VisionReader.of(model.config)
        # Wrapped before sharding, because FSDP2 hooks the blocks that it finds.
        _prepare_blocks(
            model,
            options.activation_checkpointing if trained else "none",
            fsdp.compile,
        )
        self._root = self._shard(model, groups, fsdp)
        # The head is applied outside of the module, to chunks of hidden states.
        if gives_hidden and has_logits:
            self._head = model.get_output_embeddings()
            self.logit_softcap = _softcap_of(model)
        self._beside = _Beside() if beside_logits else None
        self._values_beside = self._beside
        self.files_dtype = self.dtype
        self._syncs_once = fsdp.sharding_strategy in ("shard_grad_op", "no_shard")
        self._describe(everything)

    def _root_module(
        self,
        model: PreTrainedModel,
        gives_hidden: bool,
        dtype: torch.dtype,
        balances: bool,
    ) -> RootModule:
        """Return the module that FSDP2 shards. Arguments are those of `PolicyModule`."""
        return PolicyModule(model, self.value_head, gives_hidden, dtype, balances)

    def _shard(
        self, model: PreTrainedModel, groups: ProcessGroupManager, fsdp: FsdpConfig
    ) -> FSDPModule:
        """Shard the module's parameters over the ranks, and return its root. Collective over the grid."""
        mesh, tensor_mesh = shard_meshes(groups, self.grid, self.num_shards)
        if tensor_mesh is not None:
            cut_over_tensor_ranks(model, self._cuts, tensor_mesh)
        casts = self.trained and self.dtype != torch.float32
        return shard_module(
            self.module,
            mesh,
            param_dtype=self.dtype if casts else None,
            reduce_dtype=getattr(torch, fsdp.reduce_dtype or "float32"),
            reshard_after_forward=fsdp.sharding_strategy
            in ("full_shard", "hybrid_shard"),
            cpu_offload=fsdp.cpu_offload,
        )

    def _prepare_logits(
        self, model: PreTrainedModel, gives_hidden: bool, options: ModelOptions
    ) -> bool:
        """Let the model compute logits in float32. Return whether its hidden states are to be converted instead."""
        if not options.fp32_lm_head or self.dtype == torch.float32:
            return False
        if not gives_hidden:
            compute_in_float32(model, ModelError)
        return gives_hidden

    def _logits_are_plain(self, model: PreTrainedModel) -> bool:
        """Return whether logits can be computed from hidden states in chunks; warn on rank 0 if not."""
        softcap = _softcap_of(model)
        if not (plain := logits_are_plain(model, softcap)) and not self.grid.rank:
            logger.warning(
                "%s.chunked_logits: logits are made whole: %s makes more of them than its output layer gives.",
                self.role,
                type(model).__name__,
            )
        return plain

    def _describe(self, everything: ShardedWeights) -> None:
        """Record names, shapes and layouts of all weights. Engines get them without a value head beside the logits."""
        named = dict(self.module.model.named_parameters())
        self._cut_over_tp = {id(named[name]) for name in self._cuts.axes}
        self._partial = [
            named[name]
            for name in sorted(self._cuts.partial)
            if named[name].requires_grad
        ]
        tensors = local_tensors(self.module)
        self.held_parameters = {
            name: held for name, held in tensors.items() if f".{ADAPTER}." not in name
        }
        if isinstance(self.adapters, HFAdapters):
            self.adapters.attach(tensors)
        self.held_weights, self.held_layout_of = (
            everything.weights,
            everything.layout_of,
        )
        self.weights, self.layout_of, self.parameters = (
            self.held_weights,
            self.held_layout_of,
            self.held_parameters,
        )
        # Engines have no value head, so weights and layouts exist with and without it.
        if self.beside_logits:
            self.weights = [
                weight for weight in self.held_weights if weight.name != VALUE_WEIGHT
            ]
            self.layout_of = follow(
                self.held_layout_of, lambda layout: layout.without([VALUE_WEIGHT])
            )
            self.parameters = {
                name: held
                for name, held in self.held_parameters.items()
                if name != VALUE_WEIGHT
            }

    def speaks_for(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank represents all ranks that hold the same part of `parameter`."""
        tp = self.grid.shape.tp
        is_cut = id(parameter) in self._cut_over_tp
        # Replicas beyond the first hold copies. Among tensor-parallel ranks all count
        # if the parameter is cut, else the first.
        return self.grid.rank < self.num_shards * tp and (
            is_cut or self.grid.coords.tp == 0
        )

    def is_cut_over_tp(self, local: str) -> bool:
        """Return whether tensor-parallel ranks hold different parts of the tensor with local name `local`."""
        return local in self._cuts.axes

    @property
    def vocab_group(self) -> dist.ProcessGroup:
        """The pipeline-parallel group, of size 1: every rank has the full vocabulary."""
        return self.grid.pp_group

    @property
    def held(self) -> list[torch.Tensor]:
        return list(all_shards(self.module).values())

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self.module.buffers())

    @property
    def decoder_layers(self) -> list[nn.Module]:
        return blocks_of(self.module.model)

    @property
    def last_norm(self) -> nn.Module:
        # The name in all architectures that MTP heads are trained for.
        norm: nn.Module = self.module.model.base_model.norm
        return norm

    def output_weight(self) -> torch.Tensor:
        # Between passes the weight is sharded.
        sharded_weight: Any = self.module.model.get_output_embeddings().weight.detach()
        on_device = sharded_weight.to(platform.device, self.dtype)
        weight: torch.Tensor = on_device.full_tensor()
        return weight

    def token_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def outputs(
        self,
        micro_batches: Sequence[MicroBatch],
        take: Callable[[torch.Tensor, MicroBatch], Taken],
    ) -> list[Taken]:
        taken = []
        # Dropout is off, like every layer that behaves differently in training.
        self.module.eval()
        with torch.no_grad(), self.on_device:
            for micro_batch in micro_batches:
                batch = micro_batch.to(platform.device)
                with self._reading(batch):
                    taken.append(take(self._forward(batch)[0], batch))
            # Gathered parameters would be stale after the next update.
            for part in sharded(self.module):
                part.reshard()
        self.module.train()
        return taken

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], loss: Loss
    ) -> list[Mapping[str, torch.Tensor]]:
        """Accumulate gradients over `micro_batches`, summed over the ranks, and return each micro-batch's sums.

        Sharded gradients are reduced after every micro-batch, so that full gradients
        never stay in memory. Replicas all-reduce after the last micro-batch. The router
        loss of experts is the token-weighted mean over the micro-batches, with padding
        counted, as under Megatron.
        """
        # All micro-batches are known, so that means over tokens can be taken without a
        # second pass.
        reports, tokens = [], sum(batch.tokens.numel() for batch in micro_batches)
        # Divide by the tokens of all ranks, because gradients are summed and not
        # averaged over the ranks.
        of_token = (
            self._router_loss / reduce_json(tokens, sum, self.grid.world)
            if self._router_loss
            else 0.0
        )
        for number, micro_batch in enumerate(micro_batches):
            batch, last = (
                micro_batch.to(platform.device),
                number == len(micro_batches) - 1,
            )
            # Replicas all-reduce once per update. shard_grad_op and no_shard accumulate
            # unsharded gradients, and reduce them once, too.
            self._root.set_is_last_backward(last)
            self._root.set_requires_gradient_sync(last or not self._syncs_once)
            self._root.set_requires_all_reduce(last)
            with self._reading(batch):
                output, of_routers = self._forward(batch, router_loss=bool(of_token))
                value, sums = loss(output, batch)
                if of_routers is not None:
                    value = value + of_token * batch.tokens.numel() * of_routers
                if self._beside is not None and self._beside.waits:
                    # Give every parameter a gradient, even if the loss ignores the
                    # values.
                    value = value + 0.0 * self._beside.take().sum()
                value.backward()
            reports.append(sums)
        # Each tensor-parallel rank applies these replicated parameters to its own part
        # of the activations, so their gradients must be summed.
        for parameter in self._partial:
            if parameter.grad is not None:
                local_gradient = parameter.grad.to_local()
                # The gradient may be offloaded to the host, where the group cannot
                # reduce it.
                whole = local_gradient.to(platform.device)
                dist.all_reduce(whole, group=self.grid.tp_group)
                local_gradient.copy_(whole)
        return reports

    @contextmanager
    def _reading(self, batch: MicroBatch) -> Iterator[None]:
        """Let passes inside read the rows of a micro-batch, with the numerics of the options."""
        with (
            packed(batch.packing, self._context_group),
            batch_invariant(self._batch_invariant),
        ):
            yield

    def _forward(
        self, batch: MicroBatch, *, router_loss: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the model's output, and the router loss if `router_loss` is set."""
        if batch.packing is not None:
            positions = batch.packing.positions.unsqueeze(0)
        elif batch.places is not None:
            positions = batch.places.expand_as(batch.tokens)
        else:
            positions = torch.arange(
                batch.tokens.shape[1], device=batch.tokens.device
            ).expand_as(batch.tokens)
        output, values, of_routers = self.module(
            batch.tokens, positions, batch.vision, router_loss=router_loss
        )
        if self._widens:
            output = output.float()
        if self._beside is not None:
            self._beside.seen = values
            return output, of_routers
        return output if values is None else values, of_routers


class _Beside:
    """Holder of the values computed beside the logits in the last forward pass; they can be taken once."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None

    @property
    def waits(self) -> bool:
        return self.seen is not None

    def take(self) -> torch.Tensor:
        """Return the values, [b, s, num_values] float32, and clear them."""
        assert self.seen is not None, (
            "there was no forward pass, or its values were taken"
        )
        values, self.seen = self.seen, None
        return values


def _softcap_of(model: PreTrainedModel) -> float | None:
    """Return the soft cap that a model's configuration has for logits, or None."""
    config = model.config.get_text_config()
    softcap: float | None = getattr(config, "final_logit_softcapping", None)
    return softcap


def _computes_by_row(model: PreTrainedModel, options: ModelOptions) -> bool:
    """Prepare a model for `rollout.batch_invariant` on a CPU. Return whether it is prepared.

    Other models than those in `BATCH_INVARIANT` are not compared with an engine.
    """
    prepared = (
        options.batch_invariant
        and not platform.is_cuda
        and type(model).__name__ in BATCH_INVARIANT
    )
    if prepared:
        # Not imported on CUDA.
        from megaverl.models.hf_invariant import compute_by_row

        compute_by_row(model)
    return prepared


def _check_ranks(
    grid: Grid, fsdp: FsdpConfig, lora: LoraConfig | None, role: str
) -> None:
    shape = grid.shape
    if shape.world_size != shape.tp * shape.cp * shape.dp:
        raise ConfigError(
            f"{role}: engine: fsdp has data-, context- and tensor-parallel ranks. Leave out pp and ep."
        )
    if grid.shape.tp > 1 and (lora is not None or fsdp.compile):
        unread = "fsdp.compile" if fsdp.compile else "lora"
        raise ConfigError(
            f"{role}.{unread}: engine: fsdp has it with {role}.tp=1 alone. Leave one of both out."
        )


def _check_context(
    model: PreTrainedModel,
    reading: RowReading,
    fsdp: FsdpConfig,
    trained: bool,
    role: str,
) -> None:
    """Refuse models and settings whose result would depend on how a row is cut over ranks.

    Raises:
        ConfigError: names the reason.
    """
    reason = reading.padded_because
    if not reason and VisionReader.of(model.config) is not None:
        reason = "images are not cut over ranks"
    if (
        not reason
        and trained
        and router_loss_coef(model, fsdp.router_aux_loss_coef, role)
    ):
        reason = "the routers' loss of a part of a row differs from that of the row (fsdp.router_aux_loss_coef)"
    if reason:
        raise ConfigError(
            f"{role}.cp: engine: fsdp cannot split rows over ranks: {reason}. Set {role}.cp=1."
        )


def count_shards(fsdp: FsdpConfig, num_ranks: int, per_node: int, role: str) -> int:
    """Return the number of neighbouring ranks that a role's parameters are sharded over; other ranks hold replicas.

    Args:
        num_ranks: number of data- and context-parallel ranks.
        per_node: number of these ranks on the node of the role's first rank.

    Raises:
        ConfigError: `shard_size` does not divide the number of ranks.
    """
    if fsdp.sharding_strategy == "no_shard":
        return 1
    if fsdp.sharding_strategy != "hybrid_shard":
        return num_ranks
    size = fsdp.shard_size or min(max(per_node, 1), num_ranks)
    if num_ranks % size:
        raise ConfigError(
            f"{role}.fsdp.shard_size={size} does not divide the {num_ranks} ranks of the role. Give one that does."
        )
    return size


def shard_meshes(
    groups: ProcessGroupManager, grid: Grid, num_shards: int
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the (replicate, shard) mesh, and the tensor-parallel mesh if tp > 1. Collective over the role's ranks."""
    kind, world, tp = platform.device.type, grid.shape.world_size, grid.shape.tp
    # All ranks are one shard group, and there are neither replicas nor tensor-parallel
    # ranks.
    if num_shards == world:
        return DeviceMesh.from_group(grid.world, kind, mesh_dim_names=("shard",)), None
    # [replicas, shards, tensor-parallel ranks] of rank numbers; tensor-parallel ranks
    # are neighbours.
    ranks = torch.arange(world).view(-1, num_shards, tp)
    of_replicas, of_shards = (
        ranks.permute(1, 2, 0).flatten(0, 1),
        ranks.transpose(1, 2).flatten(0, 1),
    )
    # Created on all ranks in the same order, as every process group must be.
    replicas, shards = (
        groups.group(rows.tolist() for rows in slices)
        for slices in (of_replicas, of_shards)
    )
    assert replicas is not None and shards is not None
    if tp == 1:
        both = DeviceMesh.from_group(
            [replicas, shards],
            kind,
            mesh=ranks.squeeze(2),
            mesh_dim_names=("replicate", "shard"),
        )
        return both, None
    if len(ranks) == 1:
        both = DeviceMesh.from_group(
            [shards, grid.tp_group], kind, mesh=ranks[0], mesh_dim_names=("shard", "tp")
        )
        return both["shard"], both["tp"]
    names = ("replicate", "shard", "tp")
    every = DeviceMesh.from_group(
        [replicas, shards, grid.tp_group], kind, mesh=ranks, mesh_dim_names=names
    )
    return every["replicate", "shard"], every["tp"]


def _prepare_blocks(model: Any, checkpointing: str, compiles: bool) -> None:
    """Apply activation checkpointing and torch.compile to each block, before the model is sharded."""
    for block in [*vision_blocks_of(model), *blocks_of(model)]:
        if checkpointing != "none":
            checkpoint_block(block, checkpointing)
        if compiles:
            block.compile()


def _take_head_away(model: Any) -> None:
    """Replace the output layer of a critic by an identity, which drops the parameters that only this layer uses."""
    head = model.get_output_embeddings()
    # Found by identity, because architectures give their output layer different names.
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
