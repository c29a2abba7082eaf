"""Worker of one rank: trains and saves adapters, and samples with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch
import torch.distributed as dist

from megaverl.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss
from megaverl.checkpoint.store import CheckpointStore
from megaverl.data.batch import RolloutBatch
from megaverl.data.prefix_packing import sequence_lengths
from megaverl.errors import CheckpointError, MegaverlError
from megaverl.models.lora.adapter_set import reset_factors
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform
from megaverl.rollout.engine import SamplingOptions
from megaverl.trainer.job import Stages
from megaverl.trainer.tinker.messages import (
    CallOutcome,
    LossRequest,
    PromptRows,
    SavedWeights,
    TokenRows,
)
from megaverl.workers.adapter_slots import AdamStep, AdapterSlots
from megaverl.workers.micro_batches import micro_batches_of, plan_for
from megaverl.workers.optimizers import MegatronTrainable
from megaverl.workers.rollout import Rollout
from megaverl.workers.weight_sync import WeightSync

# Folder with the adapters in peft's format, inside the folder of a saved state.
ADAPTER_FOLDER = "adapter"
ROLE = "actor"
# Name of a set of adapters while it is being loaded.
LOADING = "(loading)"

P = ParamSpec("P")


def reports_refusals(
    method: Callable[Concatenate[AdapterWorker, P], CallOutcome],
) -> Callable[Concatenate[AdapterWorker, P], CallOutcome]:
    """Let a method return errors that a request causes, since an exception would end the server.

    Such errors are raised on every rank alike.
    """

    @functools.wraps(method)
    def wrapped(
        self: AdapterWorker, /, *args: P.args, **kwargs: P.kwargs
    ) -> CallOutcome:
        try:
            return method(self, *args, **kwargs)
        except MegaverlError as error:
            return CallOutcome(error=str(error))

    return wrapped


class AdapterWorker:
    """Worker of one rank (`program.AdapterGroup`). Every rank of the job runs every method.

    Args:
        trainable: model with adapters, and its optimizer.
        rollout: engine on the same ranks, which gets the adapters merged into its weights.
        micro_batch_tokens: as `actor.micro_batch_tokens`.
        base: name of the base model, for peft folders.
    """

    def __init__(
        self,
        trainable: MegatronTrainable,
        rollout: Rollout,
        stages: Stages,
        *,
        micro_batch_tokens: int,
        base: str,
    ) -> None:
        assert isinstance(rollout.sync, WeightSync), "the engine is on these ranks"
        self._model = trainable.model
        self._trainable = trainable
        self._rollout = rollout
        self._sync = rollout.sync
        self._stages = stages
        self._micro_batch_tokens = micro_batch_tokens
        self._base = base
        self._slots = AdapterSlots(trainable)
        # Adapters that the model holds while no slot is live, and those that the engine
        # holds. None: undefined.
        self._read: SavedWeights | None = None
        self._sampled: SavedWeights | None = None

    @reports_refusals
    def create(self, model: str, seed: int) -> CallOutcome:
        """Create new adapters with the initial values of a seed."""
        self._slots.create(model, seed)
        return CallOutcome()

    def drop(self, model: str) -> None:
        """Free the adapters of a model."""
        self._slots.drop(model)

    @reports_refusals
    def forward_backward(
        self, model: str, rows: TokenRows, loss: LossRequest, trains: bool
    ) -> CallOutcome:
        """Compute log-probs and loss of rows of tokens, and add the loss's gradient to the model's.

        Args:
            trains: whether to compute the gradient.
        """
        self._slots.activate(model)
        compute = SUMMED_LOSSES[loss.name]
        fields = _fields(rows)
        inputs = {name: fields[name] for name in compute.inputs}
        with self._stages("forward_backward" if trains else "forward"):
            if not trains:
                log_probs = self._log_probs(rows, fields)
            else:
                log_probs = self._gradients(rows, fields, compute, loss.options)
        token_losses = compute(log_probs, inputs, loss.options)
        total = float(token_losses.double().sum())
        # Every rank has the same log-probs, and so decides alike.
        if not math.isfinite(total):
            return CallOutcome(
                error=f"the loss is {total}, so its gradient was dropped. Check the log-probs, advantages and weights "
                "of the request."
            )
        if trains:
            self._slots.add_gradients()
        lengths = [len(row) for row in rows.targets]
        return CallOutcome(
            log_probs=[
                row[:length]
                for row, length in zip(log_probs.tolist(), lengths, strict=True)
            ],
            numbers={"loss:sum": total},
        )

    @reports_refusals
    def step(self, model: str, settings: AdamStep) -> CallOutcome:
        """Take one optimizer step on the model's gradients."""
        self._slots.activate(model)
        with self._stages("optim_step"):
            norm = self._slots.step(settings)
        if math.isnan(norm):
            return CallOutcome(
                error="the gradient is not finite, so no step was taken and the gradient was dropped. Lower the "
                "learning rate, or check the data."
            )
        return CallOutcome(
            numbers={
                "grad_norm": norm,
                "lr": settings.learning_rate,
                "step": float(self._slots[model].num_steps),
            }
        )

    @reports_refusals
    def save_state(self, model: str, folder: str) -> CallOutcome:
        """Save adapters and optimizer state as a checkpoint, and the adapters in peft's format beside it."""
        self._slots.activate(model)
        num_steps = self._slots[model].num_steps
        with self._stages("save_state"):
            store = CheckpointStore(folder)
            roles = {ROLE: self._trainable}
            store.save(num_steps, roles, {"num_steps": num_steps})
            self._model.save_adapters(Path(folder, ADAPTER_FOLDER), base=self._base)
        return CallOutcome()

    @reports_refusals
    def load_state(self, model: str, folder: str, with_optimizer: bool) -> CallOutcome:
        """Load a checkpoint of `save_state`. If that fails, the model keeps what it had.

        Args:
            with_optimizer: False: load the adapters alone, and begin with a new optimizer.
        """
        with self._stages("load_state"):
            self._slots.create(LOADING, seed=0)
            try:
                store = CheckpointStore(folder)
                newest = store.latest()
                if newest is None:
                    raise CheckpointError(f"{folder}: there is no checkpoint.")
                state = store.load(newest, {ROLE: self._trainable})
            except MegaverlError:
                self._slots.drop(LOADING)
                raise
            self._slots[LOADING].num_steps = int(state["num_steps"])
            if not with_optimizer:
                self._slots.forget_moments()
            self._slots.rename(LOADING, model)
        return CallOutcome()

    @reports_refusals
    def save_adapter(self, model: str, folder: str) -> CallOutcome:
        """Save the adapters in peft's format."""
        self._slots.activate(model)
        with self._stages("save_weights_for_sampler"):
            self._model.save_adapters(folder, base=self._base)
        return CallOutcome()

    @reports_refusals
    def sample(self, weights: SavedWeights, rows: PromptRows) -> CallOutcome:
        """Sample one response for each prompt."""
        with self._stages("sample"):
            if self._sampled != weights:
                self._read_adapter(weights)
                self._sync.source_changes()
                self._sampled = None
                self._sync.reshard()
                self._sampled = weights
            options = [
                SamplingOptions(
                    max_tokens=rows.max_tokens[i],
                    temperature=rows.temperatures[i],
                    top_p=rows.top_ps[i],
                    top_k=rows.top_ks[i],
                    stop_token_ids=rows.stop_tokens[i],
                    ignore_eos=rows.ignores_eos[i],
                )
                for i in range(len(rows.prompts))
            ]
            generations = self._rollout.generate(rows.prompts, options, rows.seeds)
        return CallOutcome(
            tokens=[list(generation.token_ids) for generation in generations],
            log_probs=[list(generation.log_probs) for generation in generations],
            stopped=[generation.finish_reason == "stop" for generation in generations],
        )

    @reports_refusals
    def score(self, weights: SavedWeights, rows: TokenRows) -> CallOutcome:
        """Compute the log-probs of given tokens with saved adapters, or with the base model."""
        with self._stages("log_probs"):
            self._read_adapter(weights)
            log_probs = self._log_probs(rows, _fields(rows))
        return CallOutcome(
            log_probs=[
                row[: len(targets)]
                for row, targets in zip(log_probs.tolist(), rows.targets, strict=True)
            ]
        )

    def _read_adapter(self, weights: SavedWeights) -> None:
        """Fill the model's adapters with saved ones, or set them to no change."""
        if self._slots.live is None and self._read == weights:
            return
        self._slots.leave()
        self._read = None
        if weights.folder:
            self._model.load_adapters(weights.folder)
        else:
            assert self._model.adapters is not None
            # B is zero in new adapters, so they change nothing.
            reset_factors(self._model.adapters, seed=0)
        self._read = weights

    def _micro_batches(
        self, rows: TokenRows, fields: Mapping[str, torch.Tensor]
    ) -> list[MicroBatch]:
        batch = _batch(rows)
        lengths = sequence_lengths(batch)
        plan = plan_for(self._model, lengths, self._micro_batch_tokens)
        return micro_batches_of(self._model, batch, lengths, plan, fields)

    def _log_probs(
        self, rows: TokenRows, fields: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the targets' log-probs on every rank, [B, R] float32 on the host, without gradients."""
        scores = self._model.score(
            self._micro_batches(rows, fields),
            lambda logits, micro: self._model.log_probs(logits, _with_targets(micro))[
                0
            ],
            tuple(fields["targets"].shape),
        )
        return scores.cpu()

    def _gradients(
        self,
        rows: TokenRows,
        fields: Mapping[str, torch.Tensor],
        compute: SummedLoss,
        options: Mapping[str, float],
    ) -> torch.Tensor:
        """Compute the loss's gradient, and return the targets' log-probs as `_log_probs` does."""
        micro_batches = self._micro_batches(rows, fields)
        scored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def loss(
            logits: torch.Tensor, micro: MicroBatch
        ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            log_probs, _ = self._model.log_probs(logits, _with_targets(micro))
            scored.append((micro.samples, log_probs.detach()))
            return compute(log_probs, micro.fields, options).sum(), {}

        with self._trainable.updating():
            self._trainable.compute_gradients(micro_batches, loss)
        result = torch.zeros(fields["targets"].shape, device=platform.device)
        if self._model.reports:
            for samples, values in scored:
                result[samples, : values.shape[1]] += values
        # A row is non-zero only on the rank that reports it, so the sum copies it to
        # all ranks.
        dist.all_reduce(result, group=self._model.grid.world)
        return result.cpu()


def _with_targets(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch that predicts the field `targets` instead of the following tokens."""
    return replace(micro, targets=micro.fields["targets"][micro.predicted])


def _batch(rows: TokenRows) -> RolloutBatch:
    """Return rows as a batch in which every token after the first is a response token.

    The last target follows the last input token, so that the model has an output at
    every input token.
    """
    first = torch.tensor([[tokens[0]] for tokens in rows.tokens])
    following = [
        [*tokens[1:], targets[-1]]
        for tokens, targets in zip(rows.tokens, rows.targets, strict=True)
    ]
    lengths = torch.tensor([len(tokens) for tokens in following])
    generated = _padded(following, torch.int64)
    return RolloutBatch(
        {
            "input_ids": first,
            "prompt_lengths": torch.ones(len(first), dtype=torch.int64),
            "generated_ids": generated,
            "response_lengths": lengths,
            "response_mask": torch.arange(generated.shape[1]) < lengths[:, None],
        }
    )


def _fields(rows: TokenRows) -> dict[str, torch.Tensor]:
    """Return targets and inputs of the loss, each [B, R] and zero in the padding."""
    inputs = {
        name: _padded(values, torch.float32) for name, values in rows.inputs.items()
    }
    return {"targets": _padded(rows.targets, torch.int64), **inputs}


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different lengths as one tensor, padded with zeros on the right."""
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded
