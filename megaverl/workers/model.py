"""Base class of a role's model on its grid, for every training backend.

It computes scores from the model's outputs, and loads, exports and offloads its
weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import together
from megaverl.distributed.groups import Grid
from megaverl.models.context_attention import Part, own_places
from megaverl.models.layers import sum_values
from megaverl.models.lora.adapter_set import (
    AdapterSet,
    add_product,
    load_adapters,
    save_adapters,
)
from megaverl.models.packing import MicroBatch, Pack, spread
from megaverl.models.vision import VisionReader
from megaverl.models.vocab_parallel import (
    Distributions,
    vocab_parallel_log_probs,
    vocab_parallel_squared_probs,
)
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight
from megaverl.weights.export import ShardedModel, save_folder
from megaverl.weights.load import ArrivingFolder, clear_padding, load_folder
from megaverl.weights.transports import BUCKET_BYTES
from megaverl.workers.offload import Offload, OffloadTarget, storages_of

# (model output on the last stage, micro-batch) -> values per response token, [b, r]
Score = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
# The same arguments -> (this micro-batch's share of the global loss, sums to add over
# micro-batches and ranks)
Loss = Callable[
    [torch.Tensor, MicroBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]
]
Taken = TypeVar("Taken")


class OutputLayer(Protocol):
    """Output layer that turns hidden states into logits outside the model (`chunked_logits`)."""

    @property
    def weight(self) -> torch.Tensor: ...


class TakesValues(Protocol):
    """Value head beside the output layer. `take` returns the values of the last forward pass, [b, s, heads]."""

    def take(self) -> torch.Tensor: ...


class TrainingModel(ABC):
    """Base of one role's model, sharded over the ranks of its grid: it scores tokens and accumulates gradients.

    Attributes:
        role: name of the role.
        grid: the ranks of the role.
        value_head: number of values per position that a critic returns; 0 without a value head.
        dtype: of the weights.
        vocab_size: without padding.
        pack: packs micro-batches into one row. None: every sample has its own row.
        vision: reads images. None: the model takes no images.
        token_multiple: rows of tokens are padded to a multiple of this.
        shares_tokens: packed samples may have the tokens of a common beginning once. Layers with a state along the
            sample cannot, since a sample would continue with the state of the sample before.
        sequence_multiple: if above 1, packed samples share no prompt, and each is padded to a multiple of this.
        parameters: the model's own parameters on this rank by local name, described by `layout_of`.
        weights: weights in a Hugging Face folder or an engine; `layout_of` gives their layouts. The `held_` variants
            include a value head beside the logits.
        files_dtype: dtype of the folders that `export` writes. None: that of the parameters.
        logit_softcap: soft cap to apply to the model's logits. None: none, or the model applies it.
        in_order: sets of `parameters` that get their new values together, in the order of an optimizer step. Empty: all
            parameters get them at its end.
        adapters: trained instead of the model's own parameters, if present.
        on_device: context in which the weights may be read or written. Outside it they may be offloaded
            (`workers/offload.py`).
    """

    role: str
    grid: Grid
    spec: ModelSpec
    value_head: int
    dtype: torch.dtype
    vocab_size: int
    pack: Pack | None
    vision: VisionReader | None = None
    token_multiple: int
    shares_tokens: bool = True
    sequence_multiple: int = 1
    parameters: Mapping[str, torch.Tensor]
    held_parameters: Mapping[str, torch.Tensor]
    weights: Sequence[Weight]
    held_weights: Sequence[Weight]
    layout_of: Callable[[int], Layout]
    held_layout_of: Callable[[int], Layout]
    files_dtype: torch.dtype | None = None
    in_order: Sequence[frozenset[str]] = ()
    logit_softcap: float | None = None
    adapters: AdapterSet | None = None
    on_device: AbstractContextManager[Any] = nullcontext()
    _head: OutputLayer | None = None
    _values_beside: TakesValues | None = None

    @property
    def reports(self) -> bool:
        """Return whether this rank reports for its model replica.

        That is the first tensor- and context-parallel rank of the last stage.
        """
        return self.reporter(self.grid.rank)

    def reporter(self, rank: int) -> bool:
        """Return whether `rank` of the grid reports for its model replica."""
        coords = self.grid.shape.coords(rank)
        # The last stage has the logits. Ranks that share them by tensor or context
        # parallelism have equal results.
        return coords.pp == self.grid.shape.pp - 1 and coords.tp == 0 and coords.cp == 0

    @property
    @abstractmethod
    def held(self) -> list[torch.Tensor]:
        """All weights on this rank, including adapters."""

    @property
    @abstractmethod
    def buffers(self) -> list[torch.Tensor]:
        """Tensors besides the weights that a forward or backward pass may change."""

    @abstractmethod
    def outputs(
        self,
        micro_batches: Sequence[MicroBatch],
        take: Callable[[torch.Tensor, MicroBatch], Taken],
    ) -> list[Taken]:
        """Run a forward pass without gradients, and return `take(output, micro_batch)` of each micro-batch.

        Returns an empty list on all but the last stage. Collective over the grid.
        """

    @property
    @abstractmethod
    def decoder_layers(self) -> Sequence[torch.nn.Module]:
        """Decoder layers on this rank, whose first input and first output are hidden states."""

    @property
    @abstractmethod
    def last_norm(self) -> torch.nn.Module:
        """Norm behind the last decoder layer. Only the last stage has it."""

    @abstractmethod
    def output_weight(self) -> torch.Tensor:
        """Return this rank's part of the output layer's weight, [padded_vocab / tp, hidden], detached.

        The parts belong to the ranks of `vocab_group`. Only the last stage has it.
        Collective over the grid.
        """

    @abstractmethod
    def token_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states of a decoder layer or the last norm as [b, s, hidden].

        Collective over the tensor-parallel group.
        """

    def own_part(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of a micro-batch whose rows are padded to `token_multiple`."""
        if self.grid.shape.cp == 1:
            return micro_batch
        packing = micro_batch.packing
        if packing is None:
            return micro_batch.cut(own_places(micro_batch.tokens.shape[1], self.part))
        assert packing.local_places is not None, "it was packed for another model"
        return micro_batch.cut(packing.local_places)

    @property
    def part(self) -> Part:
        """This rank's part of each row: its place in the context-parallel group."""
        return Part(self.grid.coords.cp, self.grid.shape.cp)

    def router_metrics(self) -> dict[str, float]:
        """Return metrics of the experts that routers chose since the last call, or {} without experts. Collective."""
        return {}

    def load(
        self, folder: str | Path, arriving: Iterable[Path] | None = None
    ) -> list[str]:
        """Fill this rank's parameters from a Hugging Face folder or a distributed checkpoint.

        A rank reads only its own slices. A critic may start from a language model: its
        value head keeps its initial values. Collective over the grid; all ranks fail if
        one does. Returns the names of weights that are missing in the folder.

        Args:
            arriving: yields the folder's weight files as each is downloaded (`ModelFiles.arriving`). None: all are
                present.

        Raises:
            ModelError: a file is missing or damaged, or tensors do not fit the model.
            CheckpointError: the same, of a distributed checkpoint.
        """
        # A critic that starts from a language model has no head in the folder.
        absent: list[str] = []
        layout, optional = (
            self.held_layout_of(self.grid.rank),
            ("score.weight",) if self.value_head else (),
        )
        if arriving is None:
            with together(self.grid.world):
                absent = load_folder(
                    folder,
                    layout,
                    self.held_parameters,
                    weights=self.held_weights,
                    optional=optional,
                )
            return absent
        with together(self.grid.world):
            reader = ArrivingFolder(
                folder,
                layout,
                self.held_parameters,
                weights=self.held_weights,
                optional=optional,
            )
        # `together` is entered once per file, so that no rank waits in a later
        # collective for one that failed.
        for file in arriving:
            with together(self.grid.world):
                reader.read(file)
        with together(self.grid.world):
            absent = reader.finish()
        return absent

    def export(
        self,
        folder: str | Path,
        *,
        source_folder: str | Path,
        tokenizer_folder: str | Path | None = None,
        overwrite: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Write all weights with `save_folder`, with adapters merged in. Collective over the grid."""
        model = ShardedModel(self.weights, self.layout_of, self.parameters)
        if (adapters := self.adapters) is not None:
            model = ShardedModel(
                self.weights,
                adapters.beside(self.layout_of),
                {**self.parameters, **adapters.parameters},
                adapters.low_ranks,
                partial(add_product, scaling=adapters.scaling),
            )
        sources = [source_folder]
        if tokenizer_folder is not None:
            sources.append(tokenizer_folder)
        # Weights that are offloaded come back for the export.
        with self.on_device:
            save_folder(
                model,
                folder,
                sources=sources,
                group=self.grid.world,
                dtype=self.files_dtype,
                bucket_bytes=bucket_bytes,
                overwrite=overwrite,
            )

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes with its own weights alone."""
        return nullcontext() if self.adapters is None else self.adapters.off()

    def load_adapters(self, folder: str | Path) -> None:
        """Fill the adapters from a peft folder; see `lora.adapter_set.load_adapters`."""
        assert self.adapters is not None, "the model was made without lora"
        load_adapters(self.adapters, folder)

    def save_adapters(self, folder: str | Path, *, base: str) -> None:
        """Write the trained adapters as a peft adapter of the model `base`. Collective over the grid."""
        assert self.adapters is not None, "the model was made without lora"
        with self.on_device:
            save_adapters(self.adapters, folder, base=base)

    def clear_padding(self) -> None:
        """Zero the vocabulary padding. Called before a checkpoint is read, which may contain less padding."""
        clear_padding(self.layout_of(self.grid.rank), self.parameters)

    def offload_to(self, place: OffloadTarget) -> None:
        """Offload the weights to `place` whenever no `on_device` context is active, starting now."""
        self.on_device = moved = Offload(lambda: storages_of(self.held), place)
        moved.offload()

    @property
    def offloads(self) -> bool:
        """Return whether the weights are offloaded at times. If so, other tensors must not share their storage."""
        return isinstance(self.on_device, Offload)

    def score(
        self, micro_batches: Sequence[MicroBatch], score: Score, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Compute per-response-token values of the whole batch, identical on every rank. Collective over the grid.

        Each data-parallel rank passes the micro-batches of its own samples.

        Returns:
            [B, R] float32 of `shape` on the model's device, zero where there is no response token; [B, R, n] if `score`
            gives n values.
        """
        result = self.scored(micro_batches, score, shape)
        # Each sample's row is non-zero only on the rank that reports it, so the sum
        # copies it to all ranks.
        dist.all_reduce(result, group=self.grid.world)
        return result

    def scored(
        self, micro_batches: Sequence[MicroBatch], score: Score, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Compute `score` for the samples that this rank reports; other rows are zero. Collective over the grid."""
        outputs = self.outputs(
            micro_batches, lambda output, batch: (batch.samples, score(output, batch))
        )
        # [B, R] on every rank, also on those without an output, because the sum needs
        # equal shapes.
        result = torch.zeros(shape, dtype=torch.float32, device=platform.device)
        if self.reports:
            # `+=`, because a sample may be in one micro-batch only, and all other rows
            # are zero.
            for samples, values in outputs:
                result[samples, : values.shape[1]] += values
        return result

    def log_probs(
        self,
        logits: torch.Tensor,
        batch: MicroBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probability and entropy of every response token.

        Args:
            logits: [b, s, padded_vocab / tp], this rank's shard; with `chunked_logits` hidden states [b, s, hidden].
            temperature: of the distribution, for samples without `temperatures` and `top_ks`.

        Returns:
            (log_probs, entropy), each [b, r] float32, zero in the padding. Entropy is zero unless `with_entropy`.
        """
        options = self._given(logits, batch, temperature)
        log_probs, entropy = vocab_parallel_log_probs(
            logits, with_entropy=with_entropy, **options
        )
        if not with_entropy:
            return self.joined(log_probs, batch), entropy.new_zeros(
                batch.predicted.shape
            )
        return self.joined(log_probs, batch), self.joined(entropy, batch)

    def squared_probs(
        self, logits: torch.Tensor, batch: MicroBatch, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probability of every response token, sum over the vocabulary of p^2), without gradient.

        Arguments and shapes as in `log_probs`.
        """
        log_probs, squares = vocab_parallel_squared_probs(
            logits, **self._given(logits, batch, temperature)
        )
        return self.joined(log_probs, batch), self.joined(squares, batch)

    def joined(self, flat: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Add up values of response tokens over context-parallel ranks: [local tokens] -> [b, r].

        The padding is zero. Each rank computes the whole loss but the gradient of its
        own tokens only, so that summed gradients count every token once. Collective
        over the context-parallel group.
        """
        return sum_values(spread(flat, batch), self.grid.cp_group)

    def _given(
        self, output: torch.Tensor, batch: MicroBatch, temperature: float
    ) -> dict[str, Any]:
        """Return targets, positions and sampling parameters of the response tokens."""
        # Places of the outputs from which response tokens are predicted: one before
        # each token.
        sample, row, position = batch.predicting
        return {
            "targets": batch.targets,
            # Rows and positions become an index into the flattened [b * s] outputs.
            "index": row * output.shape[1] + position,
            "weight": None if self._head is None else self._head.weight,
            "softcap": self.logit_softcap,
            "vocab_size": self.vocab_size,
            "group": self.vocab_group,
            **batch.drawing(sample, temperature),
        }

    @property
    def vocab_group(self) -> dist.ProcessGroup:
        """The group of ranks that logits are sharded over."""
        return self.grid.tp_group

    @property
    def head_weight(self) -> torch.Tensor:
        """Output layer's detached weight, [padded_vocab / tp, hidden], of the last forward pass.

        Needs `chunked_logits`.
        """
        assert self._head is not None, "logits are whole"
        return self._head.weight.detach()

    def distributions(self, output: torch.Tensor, batch: MicroBatch) -> Distributions:
        """Return this model's distributions of the response tokens.

        They consist of logits, or with `chunked_logits` of hidden states and the output
        layer's weight.
        """
        _, row, position = batch.predicting
        weight = None if self._head is None else self._head.weight
        index = row * output.shape[1] + position
        return Distributions(output, index, weight, self.logit_softcap)

    def values(
        self, output: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split value outputs [b, s, heads] into values before each response token and after the last one.

        With several heads the field `heads` [b, 1] selects the head of each sample. If
        values are computed beside logits, those of the forward pass that produced
        `output` are used.

        Returns:
            Values [b, r], zero in the padding, and [b].
        """
        output = output if self._values_beside is None else self._values_beside.take()
        sample, row, position = batch.predicting
        heads = batch.fields.get("heads")
        head = (
            # One head: every sample uses the first.
            torch.zeros_like(batch.samples)
            if heads is None or not heads.shape[1]
            else heads[:, 0].long()
        )
        # [b, heads] -> [b], the value after the last token.
        after = self.at_the_end(output, batch).gather(1, head.unsqueeze(1))[:, 0]
        return self.joined(output[row, position, head[sample]].float(), batch), after

    def at_the_end(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Return the output at each sequence's last token, [b, s, k] -> [b, k] float32.

        Rows without a response have arbitrary values. Collective over the
        context-parallel group.
        """
        return sum_values(batch.at_the_end(output).float(), self.grid.cp_group)
