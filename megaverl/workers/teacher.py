"""The frozen model whose distributions a policy learns, token by token (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megaverl.algorithms import divergences
from megaverl.errors import ConfigError
from megaverl.models.vocab_divergence import Distributions, vocab_parallel_divergence
from megaverl.workers.megatron_model import MegatronModel, MicroBatch, spread


class Teacher:
    """Says how far a student is from it.

    Of its forward pass the hidden states of the response tokens are kept, for the micro-batches of one mini-batch;
    logits are made of them where they are compared, some tokens at a time.

    Args:
        model: with `chunked_logits`, on the student's grid.
        name, options: of the divergence.
        temperature: of both distributions.
    """

    def __init__(self, model: MegatronModel, name: str, options: Mapping[str, Any], *, temperature: float) -> None:
        entry = divergences.get(name)
        entry.check_options(options)
        self.model, self.temperature = model, temperature

        def apart(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            return entry({"student_log_probs": student, "teacher_log_probs": teacher}, **options)

        self._divergence = apart

    def check_student(self, student: MegatronModel) -> None:
        """That their vocabularies are the same. From now on micro-batches are packed if both can read such rows.

        Raises:
            ConfigError: they are not.
        """
        mine, theirs = self.model.spec.vocab_size, student.spec.vocab_size
        if mine != theirs:
            raise ConfigError(
                f"reference.path: the teacher has a vocabulary of {mine} tokens, and model.path one of {theirs}. "
                "Distributions can be compared only over the same vocabulary: use a teacher of the same family, or "
                "algorithm.name: distillation, which needs log-probs alone."
            )
        student.packs = student.packs and self.model.packs

    def attend(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The same micro-batches, with what this model thinks at each response token; every rank takes part."""

        def take(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            _, row, position = batch.predicting()
            return hidden[row, position]

        taught = self.model.outputs(micro_batches, take)
        if not taught:  # not the last stage
            return micro_batches
        return [replace(batch, taught=states) for batch, states in zip(micro_batches, taught, strict=True)]

    def divergence(self, student: MegatronModel, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """[b, r] float32, zero in the padding; the gradient flows to the student's output."""
        assert micro.taught is not None, "the teacher attends to micro-batches before they are trained on"
        index = torch.arange(len(micro.taught), device=micro.taught.device)
        mine = Distributions(micro.taught, index, self.model.head_weight)
        found = vocab_parallel_divergence(
            student.distributions(output, micro),
            mine,
            self._divergence,
            vocab_size=student.spec.vocab_size,
            temperature=self.temperature,
            group=student.grid.tp_group,
        )
        return spread(found, micro)
