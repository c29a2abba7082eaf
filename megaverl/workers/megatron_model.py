"""Megatron-core model of one role on its grid: it scores tokens and takes updates.

Every pipeline stage knows all micro-batches, so stages exchange only activations and
gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version

from megaverl.distributed.collectives import reduce_json
from megaverl.distributed.groups import Grid
from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.build import (
    attends_with_engine,
    build_model,
    layouts_of,
    named_parameters,
    packer,
    why_not_cut,
    why_padded,
)
from megaverl.models.fake_quantization import (
    quantised_locals,
    round_megatron_layers,
)
from megaverl.models.freezing import (
    frozen_names,
    frozen_parameters,
    keep_graph,
)
from megaverl.models.layers import (
    AtPositions,
    Float32Head,
    HiddenHead,
    ValuesBesideLogits,
    as_one_row,
    to_float32,
)
from megaverl.models.lora.adapters import Adapters
from megaverl.models.options import (
    check_divides,
    recompute_options,
    token_multiple,
    transformer_config,
)
from megaverl.models.packing import MicroBatch, Pack
from megaverl.models.router_replay import RouterReplay, why_not_replayed
from megaverl.models.vision import VisionInputs, VisionReader
from megaverl.platform import platform
from megaverl.platform.batch_invariant import batch_invariant
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import (
    ModelSpec,
    why_not_quantised,
    why_rows_not_cut,
)
from megaverl.sharding.vllm import quantised_tensors
from megaverl.workers.model import Loss, Taken, TrainingModel
from megaverl.workers.model_options import ModelOptions

platform.adapt_megatron()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402

Shape = tuple[int, int, int]  # (sequence, samples, hidden)


class StageCommunicator(P2PCommunicator):  # type: ignore[misc]  # megatron-core has no complete types
    """Megatron-core's P2PCommunicator without the exchange of tensor shapes.

    For micro-batches of different lengths megatron-core (0.16 to 0.19,
    `pipeline_parallel/p2p_communication.py`) sends the shape of each tensor ahead of
    it, which blocks the host on the device on both sides, in each direction of each
    micro-batch. Here the shapes follow from the micro-batches, which all stages process
    in the same order, forward and backward. Virtual stages process them in another
    order and still exchange shapes.
    """

    def __init__(self, grid: Grid, config: TransformerConfig) -> None:
        super().__init__(grid.pp_group, config)
        self._tp = grid.shape.tp if config.sequence_parallel else 1
        self._shapes: list[Shape] = []
        self._forward = self._backward = 0

    def expect(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the micro-batches that pass through the pipeline next."""
        width = self.config.hidden_size
        sizes = [batch.tokens.shape for batch in micro_batches]
        # Sequence-parallel ranks exchange their part of the sequence only. [sequence /
        # tp, samples, hidden]
        self._shapes = [
            (-(-length // self._tp), samples, width) for samples, length in sizes
        ]
        self._forward = self._backward = 0

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> Any:
        """Return the shapes of the activations from the previous stage and of the gradient from the next stage."""
        if self.virtual_pipeline_model_parallel_size is not None:
            return super()._communicate_shapes(
                tensor_send_next, tensor_send_prev, recv_prev, recv_next
            )
        # An empty shape: nothing comes from this side.
        no_shape = (0, 0, 0)
        forward = self._shapes[self._forward] if recv_prev else no_shape
        backward = self._shapes[self._backward] if recv_next else no_shape
        # Both directions count separately, since a schedule may run several
        # micro-batches forward before the first backward.
        self._forward += recv_prev
        self._backward += recv_next
        return forward, backward


logger = logging.getLogger(__name__)

# TransformerConfig fields with the coefficients of the router losses, which are added
# to the policy loss.
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
# First megatron-core release whose router losses account for ranks that hold parts of a
# sequence.
COUNTS_PARTS = Version("0.19")


class MegatronModel(TrainingModel):
    """Model chunks of a GPTModel on this rank, and their pipeline schedule.

    Args:
        options: `activation_checkpointing` sets fields of TransformerConfig, over which `overrides` take precedence.
        overrides: the user's TransformerConfig fields.
        freeze: name patterns of weights that are not trained.

    Raises:
        ModelError: the architecture does not support `lora`, or the grid's context parallelism.
        ConfigError: `freeze` fits no weight, all weights of a stage, or a part of a parameter.
    """

    def __init__(
        self,
        spec: ModelSpec,
        grid: Grid,
        options: ModelOptions,
        overrides: Mapping[str, Any] | None = None,
        *,
        freeze: Sequence[str] = (),
    ) -> None:
        role, lora, value_head = options.role, options.lora, options.value_head
        beside_logits = options.beside_logits
        # Checked before the model is built, so that a wrong grid costs no time.
        check_divides(spec, grid.shape, role)
        if options.fake_quantization and (reason := why_not_quantised(spec)):
            raise ModelError(f"{role}.fake_quantization: {reason}.")
        self.spec, self.grid, self.role, self.value_head = spec, grid, role, value_head
        self.vocab_size, self.dtype = spec.vocab_size, options.dtype
        self.logit_softcap = spec.logit_softcap
        self._batch_invariant = options.batch_invariant
        # The user's fields come last and win.
        checkpointing = recompute_options(options.activation_checkpointing, spec)
        fields = checkpointing | dict(overrides or {})
        # Random initialisation takes long for large models, and is wasted if all
        # weights are loaded.
        if not options.initialize:
            fields["perform_initialization"] = False
        self.config = transformer_config(spec, grid.shape, options.dtype, fields)
        cp, tp = grid.shape.cp, grid.shape.tp
        if reason := why_rows_not_cut(spec, cp=cp, tp=tp) or why_not_cut(self.config):
            raise ModelError(f"{role}.cp={cp}: {reason}.")
        if spec.vision is not None:
            self.vision = VisionReader(
                spec.vision.image_token, spec.vision.merge, grid.is_first_stage
            )
        self.token_multiple = token_multiple(self.config, grid.shape)
        self._router_losses = {
            name: getattr(self.config, name)
            for name in ROUTER_LOSSES
            if getattr(self.config, name)
        }
        self.beside_logits = beside_logits
        self.chunks = build_model(
            spec,
            self.config,
            grid,
            value_head=value_head,
            seed=options.seed,
            beside_logits=beside_logits,
        )
        self.held_parameters: dict[str, torch.nn.Parameter] = named_parameters(
            self.chunks
        )
        self._describe_weights()
        if freeze:
            self._freeze(freeze)
        if options.fake_quantization is not None:
            self._round_weights(options.fake_quantization)
        if lora is not None:
            self.adapters = Adapters(
                self.chunks,
                self.held_weights,
                self.held_layout_of,
                lora,
                self.config,
                grid,
                parameters=self.held_parameters,
                trained=("score.weight",) if value_head else (),
                role=role,
                seed=options.seed,
            )
        # Only the last stage has an output layer.
        if (beside_logits or not value_head) and grid.is_last_stage:
            self._prepare_head(self.chunks[-1].output_layer, options)
        self._values_beside: ValuesBesideLogits | None = None
        if beside_logits and grid.is_last_stage:
            self._values_beside = self.chunks[-1].value_head
        self.pack = self._packer() if options.pack_samples else None
        self.shares_tokens = not spec.is_recurrent
        # Transformer Engine splits each packed sequence into two chunks per
        # context-parallel rank, to balance causal attention.
        if self.pack and grid.shape.cp > 1 and attends_with_engine(self.config):
            self.sequence_multiple = 2 * grid.shape.cp
        self._replay = (
            None
            if why_not_replayed(self.config)
            else RouterReplay(self.chunks, self.config, grid)
        )
        self._positions = AtPositions(spec.rope_axes)
        self._give_positions()
        self._schedule = get_forward_backward_func(
            pp_size=grid.shape.pp, vp_size=grid.shape.vpp
        )
        self._p2p = StageCommunicator(grid, self.config) if grid.shape.pp > 1 else None

    def _prepare_head(self, layer: torch.nn.Module, options: ModelOptions) -> None:
        """Let the output layer compute in float32, or return hidden states that it is applied to in chunks."""
        is_wide = options.fp32_lm_head and self.dtype != torch.float32
        if is_wide:
            # Before the hook that scales hidden states, whose result has more digits
            # than 16 bits hold.
            layer.register_forward_pre_hook(to_float32, prepend=True)
        if options.chunked_logits:
            self._head = HiddenHead(layer, self.grid.tp_group)
        elif is_wide:
            Float32Head(layer, self.grid.tp_group)

    def _describe_weights(self) -> None:
        """Set weights, layouts and parameters: all that this model holds, and those that engines and folders get.

        These are the weights without a value head.
        """
        spec, grid = self.spec, self.grid
        self.held_weights = weights_of(
            spec, value_head=self.value_head, beside_logits=self.beside_logits
        )
        self.held_layout_of = layouts_of(
            self.held_weights, spec, self.config, grid.shape
        )
        self.weights, self.layout_of = self.held_weights, self.held_layout_of
        self.parameters = dict(self.held_parameters)
        if self.beside_logits:
            self.weights = weights_of(spec)
            self.layout_of = layouts_of(self.weights, spec, self.config, grid.shape)
            # Local names that engines may ask for.
            names = self.layout_of(grid.rank).local_shapes
            self.parameters = {name: self.held_parameters[name] for name in names}

    def _give_positions(self) -> None:
        """Let rotary embeddings read explicit positions: packed and context-parallel rows do not start at 0."""
        for chunk in self.chunks:
            # Latent attention has a rotary embedding in every layer instead of one per
            # chunk.
            if (
                (self.pack or self.grid.shape.cp > 1 or self.vision)
                and not self.config.multi_latent_attention
                and self.spec.has_rope
            ):
                self._positions.attach(chunk.rotary_pos_emb)
            if self.pack and chunk.pre_process:
                chunk.embedding.register_forward_hook(as_one_row)

    def _round_weights(self, method: str) -> None:
        """Let the layers that an engine quantises multiply with rounded weights."""
        in_engine = quantised_tensors(self.held_weights)
        names = {
            weight.name for weight in self.held_weights if weight.vllm in in_engine
        }
        held = quantised_locals(names, self.held_layout_of(self.grid.rank).by_tensor)
        round_megatron_layers(
            self.chunks,
            [self.held_parameters[local] for local in sorted(held)],
            method,
            self.grid.tp_group,
            self.role,
        )

    def _freeze(self, patterns: Sequence[str]) -> None:
        """Freeze weights before megatron-core makes gradient buffers and an optimizer of the others."""
        names = [weight.name for weight in self.held_weights]
        frozen = frozen_names(names, patterns, self.role)
        # Ranks that hold the same share one layout object.
        layouts: list[dict[int, Layout]] = [{} for _ in range(self.grid.shape.pp)]
        for rank in range(self.grid.shape.world_size):
            layout = self.held_layout_of(rank)
            layouts[self.grid.shape.coords(rank).pp][id(layout)] = layout
        # Every rank checks all stages, so that all raise.
        by_stage = [
            frozen_parameters(stage, held.values(), frozen, self.role)
            for stage, held in enumerate(layouts)
        ]
        for local in by_stage[self.grid.coords.pp]:
            self.held_parameters[local].requires_grad_(False)
        if self.config.recompute_granularity is not None:
            keep_graph(self.chunks)

    def _packer(self) -> Pack | None:
        reason = why_padded(self.config)
        if reason and not self.grid.rank:
            logger.warning("%s.pack_samples: rows are padded: %s", self.role, reason)
        if reason:
            return None
        return packer(self.config, self.part, with_states=self.spec.is_recurrent)

    @property
    def held(self) -> list[torch.Tensor]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [buffer for chunk in self.chunks for buffer in chunk.buffers()]

    @property
    def decoder_layers(self) -> list[torch.nn.Module]:
        return [layer for chunk in self.chunks for layer in chunk.decoder.layers]

    @property
    def last_norm(self) -> torch.nn.Module:
        norm: torch.nn.Module = self.chunks[-1].decoder.final_layernorm
        return norm

    def output_weight(self) -> torch.Tensor:
        model = self.chunks[-1]
        weight: torch.Tensor = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        # A copy, because the weights may be offloaded while it is used.
        return weight.detach().clone() if self.offloads else weight.detach()

    def token_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        # [s / tp, b, hidden] on sequence-parallel ranks, else [s, b, hidden].
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.grid.tp_group
            )
        return hidden.transpose(0, 1)

    def outputs(
        self,
        micro_batches: Sequence[MicroBatch],
        take: Callable[[torch.Tensor, MicroBatch], Taken],
    ) -> list[Taken]:
        def forward_step(
            batches: Iterator[MicroBatch], model: Any
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            # Copied when its turn comes, so that only micro-batches in the pipeline are
            # on the device.
            batch = next(batches).to(platform.device)
            return self._forward(
                model, batch, is_kept=False
            ), lambda output, non_loss_data=True: take(output, batch)

        # All chunks of this rank, because virtual stages have several.
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), self.on_device:
            taken: list[Taken] = self._run(
                self.chunks, micro_batches, forward_step, forward_only=True
            )
        for chunk in self.chunks:
            chunk.train()
        return taken

    def forward_backward(
        self,
        chunks: Sequence[torch.nn.Module],
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
    ) -> list[Mapping[str, torch.Tensor]]:
        """Accumulate gradients over `micro_batches`. Return each one's sums on the last stage, else an empty list."""
        self._weigh_router_losses(micro_batches)

        def forward_step(
            batches: Iterator[MicroBatch], model: Any
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            batch = next(batches).to(platform.device)

            def loss_func(
                output: torch.Tensor,
            ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
                value, sums = loss(output, batch)
                if self._values_beside is not None and self._values_beside.waits:
                    # The loss used only logits. Megatron-core waits for the gradient of every parameter, so add
                    # a zero term.
                    value = value + 0.0 * self._values_beside.take().sum()
                return (
                    value,
                    # megatron-core adds up this count and may divide by it. The loss is
                    # already normalized.
                    torch.ones((), dtype=torch.int, device=output.device),
                    sums,
                )

            return self._forward(model, batch, is_kept=True), loss_func

        sums: list[Mapping[str, torch.Tensor]] = self._run(
            chunks, micro_batches, forward_step, forward_only=False
        )
        return sums

    def _weigh_router_losses(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Scale the router losses to means over the tokens of the whole mini-batch, with padding counted.

        Megatron-core multiplies router losses by the number of tokens that a rank sees
        of a micro-batch, and since 0.19 also by the number of ranks that share a
        sequence (`attach_and_log_load_balancing_loss` and `apply_z_loss` of
        `transformer/moe/router.py`). It relies on gradients being divided by all tokens
        afterwards. Here the policy loss is already normalised and gradients are not
        divided, so the coefficients are.
        """
        if not self._router_losses:
            return
        shape = self.grid.shape
        coords = self.grid.coords
        # Collective over the grid: every rank must reach the sum, also those that add
        # zero.
        # The other ranks of a model replica have the same micro-batches and must not be
        # counted again.
        speaks = coords.tp == coords.cp == coords.pp == 0
        num_tokens = (
            shape.cp * sum(batch.tokens.numel() for batch in micro_batches)
            if speaks
            else 0
        )
        # Before 0.19 each rank that shares a sequence counts only its own part of the
        # tokens.
        parts = (
            1
            if Version(metadata.version("megatron-core")) >= COUNTS_PARTS
            else shape.tp * shape.cp
        )
        factor = parts / reduce_json(num_tokens, sum, self.grid.world)
        for name, coefficient in self._router_losses.items():
            setattr(
                self.config,
                name,
                [value * factor for value in coefficient]
                if isinstance(coefficient, list)
                else coefficient * factor,
            )

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        micro_batches: Sequence[MicroBatch],
        step: Any,
        *,
        forward_only: bool,
    ) -> Any:
        # One iterator per chunk: virtual stages read the same micro-batches at
        # different times.
        iterators = [iter(micro_batches) for _ in chunks]
        if self._p2p is not None:
            self._p2p.expect(micro_batches)
        with (
            self._replay.passing() if self._replay else nullcontext(),
            batch_invariant(self._batch_invariant),
        ):
            return self._schedule(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(micro_batches),
                # With variable_seq_lengths, megatron-core uses the shape of each
                # micro-batch instead of these two.
                seq_length=micro_batches[0].tokens.shape[1],
                micro_batch_size=micro_batches[0].tokens.shape[0],
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.grid.pg_collection,
                **({"p2p_communicator": self._p2p} if self._p2p else {}),
            )

    def router_metrics(self) -> dict[str, float]:
        return self._replay.metrics() if self._replay else {}

    def _forward(self, model: Any, batch: MicroBatch, *, is_kept: bool) -> torch.Tensor:
        tokens, positions = batch.tokens, batch.places
        if self._replay is not None:
            # Rows of a packed or divided micro-batch have their final width already.
            width = (
                tokens.shape[1]
                if batch.packing is not None or positions is not None
                else self._width(tokens)
            )
            self._replay.expect(model, batch, width, is_kept=is_kept)
        if batch.packing is not None:
            packed = batch.packing
            with self._reading(model, batch.vision, packed.positions):
                packed_output: torch.Tensor = model(
                    tokens,
                    packed.positions.unsqueeze(0),
                    None,
                    packed_seq_params=packed,
                )
            return packed_output
        if positions is not None:
            with self._positions.at(positions):
                part_output: torch.Tensor = model(
                    tokens, positions.expand_as(tokens), None
                )
            return part_output
        padding = (0, self._width(tokens) - tokens.shape[1])
        tokens = torch.nn.functional.pad(tokens, padding)
        vision = None if batch.vision is None else batch.vision.padded(padding)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(
            tokens
        )
        with self._reading(model, vision, None):
            padded_output: torch.Tensor = model(tokens, positions, None)
        return padded_output

    @contextmanager
    def _reading(
        self, model: Any, vision: VisionInputs | None, positions: torch.Tensor | None
    ) -> Iterator[None]:
        """Let a chunk use these positions inside, or those of images, and the images if it is the first stage's."""
        if vision is None:
            with self._positions.at(positions):
                yield
            return
        # Inside DistributedDataParallel during updates.
        tower = getattr(unwrap_model(model), "vision_tower", None)
        sees = nullcontext() if tower is None else tower.sees(vision)
        with self._positions.at(vision.positions), sees:
            yield

    def _width(self, tokens: torch.Tensor) -> int:
        """Return the width of the padded rows that the model reads."""
        return tokens.shape[1] + -tokens.shape[1] % self.token_multiple
