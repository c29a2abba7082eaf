"""A role's model on its grid, whoever computes it: what is made of its outputs, and where its weights lie."""

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
from megaverl.models.layers import sum_values
from megaverl.models.lora.adapter_set import AdapterSet, add_product, load_adapters, save_adapters
from megaverl.models.packing import MicroBatch, Pack, spread
from megaverl.models.vision import VisionReader
from megaverl.models.vocab_parallel import Distributions, vocab_parallel_log_probs, vocab_parallel_squared_probs
from megaverl.platform import platform
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight
from megaverl.weights.export import BUCKET_BYTES, save_folder
from megaverl.weights.load import ArrivingFolder, clear_padding, load_folder
from megaverl.workers.offload import Offload, OffloadTarget, storages_of

# (model output on the last stage, micro-batch) -> per-response-token values [b, r]
Score = Callable[[torch.Tensor, MicroBatch], torch.Tensor]
# ... -> (this micro-batch's share of the global loss, sums to be added over micro-batches and ranks)
Loss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
Taken = TypeVar("Taken")


class OutputLayer(Protocol):
    """One that logits are made with later: the model's output is its hidden states."""

    @property
    def weight(self) -> torch.Tensor: ...


class TakesValues(Protocol):
    """A value head beside the output layer."""

    def take(self) -> torch.Tensor: ...


class TrainingModel(ABC):
    """One role's model, cut over the ranks of its grid: it scores tokens and accumulates gradients.

    Attributes:
        role, grid, value_head: whose it is, on which ranks, and how many values a critic gives per position.
        dtype: of the weights.
        vocab_size: without padding.
        pack: how micro-batches are packed. None: every sample has a row of its own.
        vision: how it reads images; None: it takes none.
        token_multiple: what rows of tokens are filled up to a multiple of.
        sequence_multiple: where above 1, packed samples share no prompt, and each is filled up to a multiple of it.
        parameters: the model's own on this rank, by local name, that `layout_of` describes.
        weights, layout_of: what a Hugging Face folder or an engine has of it; the `held_` ones have a value head
            besides, if it is beside logits.
        files_dtype: of the folders that `export` writes; None: that of the parameters.
        in_order: sets of `parameters` that get their new values together, in the order of an optimizer step; none: all
            of them at its end.
        adapters: what is trained instead of these, if there are any.
        on_device: whoever reads or writes the weights does so inside; outside they may be away (`workers/offload.py`).
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
    sequence_multiple: int = 1
    parameters: Mapping[str, torch.Tensor]
    held_parameters: Mapping[str, torch.Tensor]
    weights: Sequence[Weight]
    held_weights: Sequence[Weight]
    layout_of: Callable[[int], Layout]
    held_layout_of: Callable[[int], Layout]
    files_dtype: torch.dtype | None = None
    in_order: Sequence[frozenset[str]] = ()
    adapters: AdapterSet | None = None
    on_device: AbstractContextManager[Any] = nullcontext()
    _head: OutputLayer | None = None
    _values_beside: TakesValues | None = None

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for its model replica: last stage, first tensor- and context-parallel rank."""
        return self.reporter(self.grid.rank)

    def reporter(self, rank: int) -> bool:
        """Whether a rank of the grid does."""
        coords = self.grid.shape.coords(rank)
        return coords.pp == self.grid.shape.pp - 1 and coords.tp == 0 and coords.cp == 0

    @property
    @abstractmethod
    def held(self) -> list[torch.Tensor]:
        """All of the weights on this rank, those of adapters among them."""

    @property
    @abstractmethod
    def buffers(self) -> list[torch.Tensor]:
        """What a forward or a backward pass may change beside them."""

    @abstractmethod
    def outputs(
        self, micro_batches: Sequence[MicroBatch], take: Callable[[torch.Tensor, MicroBatch], Taken]
    ) -> list[Taken]:
        """What `take` makes of the model's output for each micro-batch, without a gradient; nothing before the last
        stage."""

    def own_part(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this rank has of a micro-batch, whose rows are filled up to the `token_multiple`."""
        return micro_batch

    def router_metrics(self) -> dict[str, float]:
        """What routers of experts chose since the last call; nothing where there are none. Every rank takes part."""
        return {}

    def load(self, folder: str | Path, arriving: Iterable[Path] | None = None) -> list[str]:
        """Fill this rank's parameters from a Hugging Face folder or a distributed checkpoint, its own slices only.

        A critic may start from a language model: its value head stays as it was initialised. Every rank takes
        part, and all fail if one does. Returns the names that the folder lacked.

        Args:
            arriving: the folder's weight files, each given when it is there (`ModelFiles.arriving`). None: all are.

        Raises:
            ModelError, CheckpointError: a missing or damaged file, or tensors that do not fit the model.
        """
        absent: list[str] = []
        layout, optional = self.held_layout_of(self.grid.rank), ("score.weight",) if self.value_head else ()
        if arriving is None:
            with together(self.grid.world):
                absent = load_folder(folder, layout, self.held_parameters, weights=self.held_weights, optional=optional)
            return absent
        with together(self.grid.world):
            reader = ArrivingFolder(folder, layout, self.held_parameters, weights=self.held_weights, optional=optional)
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
        """`save_folder` of all weights, adapters merged into them on the way. Every rank of the grid takes part."""
        layouts, tensors, adapters, add = self.layout_of, self.parameters, None, None
        if self.adapters is not None:
            adapters, add = self.adapters.low_ranks, partial(add_product, scaling=self.adapters.scaling)
            layouts, tensors = self.adapters.beside(layouts), {**tensors, **self.adapters.parameters}
        with self.on_device:
            save_folder(
                folder,
                source_folder=source_folder,
                weights=self.weights,
                layouts=layouts,
                tensors=tensors,
                group=self.grid.world,
                tokenizer_folder=tokenizer_folder,
                dtype=self.files_dtype,
                bucket_bytes=bucket_bytes,
                overwrite=overwrite,
                adapters=adapters,
                add=add,
            )

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the model computes what its own weights alone say."""
        return nullcontext() if self.adapters is None else self.adapters.off()

    def load_adapters(self, folder: str | Path) -> None:
        """Fill the adapters from a peft folder; see there."""
        assert self.adapters is not None, "the model was made without lora"
        load_adapters(self.adapters, folder)

    def save_adapters(self, folder: str | Path, *, base: str) -> None:
        """Write what `lora` trains as a peft adapter of the model `base`. Every rank of the grid takes part."""
        assert self.adapters is not None, "the model was made without lora"
        with self.on_device:
            save_adapters(self.adapters, folder, base=base)

    def clear_padding(self) -> None:
        """Zero the vocabulary's padding, before a checkpoint of this model, which may have had less, is read."""
        clear_padding(self.layout_of(self.grid.rank), self.parameters)

    def offload_to(self, place: OffloadTarget) -> None:
        """From now on the weights are at `place` whenever nobody is inside `on_device`."""
        self.on_device = moved = Offload(lambda: storages_of(self.held), place)
        moved.offload()

    @property
    def offloads(self) -> bool:
        """Whether the weights are away at times: nothing else can live in their storage."""
        return isinstance(self.on_device, Offload)

    def score(self, micro_batches: Sequence[MicroBatch], score: Score, shape: tuple[int, ...]) -> torch.Tensor:
        """Per-response-token values of the whole batch, on every rank, where the model computes.

        Every rank of the grid takes part; each data-parallel rank holds the micro-batches of its samples.

        Returns:
            [B, R] float32 of `shape`, zero where there is no response token; [B, R, n] where `score` gives n values.
        """
        result = self.scored(micro_batches, score, shape)
        # Each sample's row is non-zero on the one rank that reports it: the sum only distributes.
        dist.all_reduce(result, group=self.grid.world)
        return result

    def scored(self, micro_batches: Sequence[MicroBatch], score: Score, shape: tuple[int, ...]) -> torch.Tensor:
        """The same, of the samples that this rank reports alone; zeros for the others."""
        outputs = self.outputs(micro_batches, lambda output, batch: (batch.samples, score(output, batch)))
        result = torch.zeros(shape, dtype=torch.float32, device=platform.device)
        if self.reports:
            for samples, values in outputs:
                result[samples, : values.shape[1]] += values
        return result

    def log_probs(
        self, logits: torch.Tensor, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of every response token.

        Args:
            logits: [b, s, padded_vocab / tp], this rank's shard; with `chunked_logits` hidden states [b, s, hidden].
            temperature: of the distribution, where a sample does not say how it was drawn (`temperatures`, `top_ks`).

        Returns:
            (log_probs, entropy), each [b, r] float32, zero in the padding; entropy is zero unless asked for.
        """
        given = self._given(logits, batch, temperature)
        log_probs, entropy = vocab_parallel_log_probs(logits, with_entropy=with_entropy, **given)
        if not with_entropy:
            return self.joined(log_probs, batch), entropy.new_zeros(batch.predicted.shape)
        return self.joined(log_probs, batch), self.joined(entropy, batch)

    def squared_probs(
        self, logits: torch.Tensor, batch: MicroBatch, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability of every response token, sum over the vocabulary of p^2), as `log_probs`; no gradient."""
        log_probs, squares = vocab_parallel_squared_probs(logits, **self._given(logits, batch, temperature))
        return self.joined(log_probs, batch), self.joined(squares, batch)

    def joined(self, flat: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """[response tokens predicted here] -> [b, r], those of all context-parallel ranks, zero in the padding.

        Each of these ranks makes the whole loss of them, and the gradient of its own tokens alone: what the ranks add
        up then counts every token once. They all take part.
        """
        return sum_values(spread(flat, batch), self.grid.cp_group)

    def _given(self, output: torch.Tensor, batch: MicroBatch, temperature: float) -> dict[str, Any]:
        """What the response tokens are, where they are predicted, and how they were drawn."""
        sample, row, position = batch.predicting
        return {
            "targets": batch.targets,
            "index": row * output.shape[1] + position,
            "weight": None if self._head is None else self._head.weight,
            "vocab_size": self.vocab_size,
            "group": self.vocab_group,
            **batch.drawing(sample, temperature),
        }

    @property
    def vocab_group(self) -> dist.ProcessGroup:
        """The ranks over which logits are cut."""
        return self.grid.tp_group

    @property
    def head_weight(self) -> torch.Tensor:
        """[padded_vocab / tp, hidden] of the output layer, as of the last forward pass; with `chunked_logits`."""
        assert self._head is not None, "logits are whole"
        return self._head.weight.detach()

    def distributions(self, output: torch.Tensor, batch: MicroBatch) -> Distributions:
        """Those that the response tokens were drawn from, as this model has them: logits, or with `chunked_logits`
        hidden states and the output layer's weight."""
        _, row, position = batch.predicting
        weight = None if self._head is None else self._head.weight
        return Distributions(output, row * output.shape[1] + position, weight)

    def values(self, output: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, s, heads] -> values [b, r] before each response token, zero in the padding, and [b] after the last one.

        With several heads the field `heads` [b, 1] says which one is a sample's. Where values are beside logits, those
        of the forward pass that gave the `output`.
        """
        output = output if self._values_beside is None else self._values_beside.take()
        sample, row, position = batch.predicting
        heads = batch.fields.get("heads")
        head = torch.zeros_like(batch.samples) if heads is None or not heads.shape[1] else heads[:, 0].long()
        after = self.at_the_end(output, batch).gather(1, head.unsqueeze(1))[:, 0]
        return self.joined(output[row, position, head[sample]].float(), batch), after

    def at_the_end(self, output: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """[b, s, k] -> [b, k] float32: the model's output at each sequence's last token; anything where there is none.
        Every context-parallel rank takes part."""
        return sum_values(batch.at_the_end(output).float(), self.grid.cp_group)
