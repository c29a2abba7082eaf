"""Teacher that compares whole distributions with the policy's, over the same vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megaverl.algorithms import divergences
from megaverl.errors import ConfigError
from megaverl.models.packing import MicroBatch
from megaverl.models.vocab_divergence import vocab_parallel_divergence
from megaverl.models.vocab_parallel import Distributions
from megaverl.workers.model import TrainingModel


class Teacher:
    """Measures the divergence between a student and this model, which has the same vocabulary.

    The hidden states of the response tokens are kept for the micro-batches of one
    mini-batch. Logits are computed from them in chunks during the comparison, to save
    memory.

    Args:
        model: a model with `chunked_logits` on the student's grid.
        name: name of the divergence.
        options: options of the divergence.
        temperature: of both distributions.
        top_k: see `vocab_parallel_divergence`.

    Raises:
        ConfigError: no divergence has this name, or the divergence does not have these options.
    """

    def __init__(
        self,
        model: TrainingModel,
        name: str,
        options: Mapping[str, Any],
        *,
        temperature: float,
        top_k: int | None = None,
    ) -> None:
        entry = divergences.get(name)
        entry.check_options(options)
        self.model, self.temperature, self.top_k = model, temperature, top_k

        def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            return entry(
                {"student_log_probs": student, "teacher_log_probs": teacher}, **options
            )

        self._divergence = divergence

    def check_student(self, student: TrainingModel) -> None:
        """Check that student and teacher have the same vocabulary size.

        The student's micro-batches are then packed only if both models can read packed
        rows.

        Raises:
            ConfigError: the vocabulary sizes differ.
        """
        teacher_size, student_size = self.model.spec.vocab_size, student.spec.vocab_size
        if teacher_size != student_size:
            raise ConfigError(
                f"reference.path: the teacher has a vocabulary of {teacher_size} tokens, and model.path one of "
                f"{student_size}. Distributions can be compared only over the same vocabulary: use a teacher of the "
                "same family, or algorithm.name: distillation, which compares texts."
            )
        # Both models read the same micro-batches, so both must accept their packing and
        # padding.
        student.pack = student.pack if student.pack is self.model.pack else None
        student.token_multiple = math.lcm(
            student.token_multiple, self.model.token_multiple
        )

    def attend(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with this model's hidden states of each response token. Collective over the grid."""

        def take(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            _, row, position = batch.predicting
            # [local response tokens, hidden]
            return hidden[row, position]

        taught = self.model.outputs(micro_batches, take)
        if not taught:  # not the last stage
            return micro_batches
        return [
            replace(batch, taught=states)
            for batch, states in zip(micro_batches, taught, strict=True)
        ]

    def divergence(
        self, student: TrainingModel, output: torch.Tensor, micro: MicroBatch
    ) -> torch.Tensor:
        """Return the divergence at each response token, [b, r] float32, zero in the padding.

        Gradients flow to the student's output.
        """
        assert micro.taught is not None, (
            "the teacher attends to micro-batches before they are trained on"
        )
        # The states of the response tokens are already selected, in order.
        index = torch.arange(len(micro.taught), device=micro.taught.device)
        teacher = Distributions(
            micro.taught, index, self.model.head_weight, self.model.logit_softcap
        )
        values = vocab_parallel_divergence(
            student.distributions(output, micro),
            teacher,
            self._divergence,
            vocab_size=student.spec.vocab_size,
            temperature=self.temperature,
            top_k=self.top_k,
            group=student.vocab_group,
        )
        return student.joined(values, micro)
