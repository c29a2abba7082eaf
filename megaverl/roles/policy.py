"""The policy: log-probs of responses, and its update by a policy loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megaverl.algorithms import LossOutput, combine, entropy_sum, kl_loss, moments, policy_losses
from megaverl.config.algorithm import AlgorithmConfig
from megaverl.data.batch import RolloutBatch
from megaverl.platform import platform
from megaverl.roles.megatron_model import MegatronModel, MicroBatch
from megaverl.roles.micro_batches import micro_batches_for
from megaverl.roles.trainable import TrainableModel
from megaverl.roles.updates import run_updates, share


class Policy:
    """A language model that scores responses: the reference, and what the actor builds on.

    Args:
        temperature: of the rollout; log-probs are of the distribution that was sampled from.
        micro_batch_tokens: the cap of a micro-batch.
        offload: keep the weights in host memory between calls.
    """

    def __init__(
        self, model: MegatronModel, *, temperature: float, micro_batch_tokens: int, offload: bool = False
    ) -> None:
        self.model, self.temperature, self.micro_batch_tokens = model, temperature, micro_batch_tokens
        self._offload = offload and platform.is_cuda  # on a CPU the weights already are where they would go
        if self._offload:
            self.model.to(torch.device("cpu"))

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """[B, R] float32 log-probs of the response tokens, the same on every rank."""

        def score(logits: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return self.model.log_probs(logits, micro, temperature=self.temperature)[0]

        micro = micro_batches_for(self.model, batch, self.micro_batch_tokens)
        if self._offload:
            self.model.to(platform.device)
        log_probs = self.model.score(micro, score, batch.response_shape)
        if self._offload:
            self.model.to(torch.device("cpu"))
        return log_probs


class Actor(Policy):
    """The policy that is trained."""

    def __init__(
        self,
        trainable: TrainableModel,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        super().__init__(trainable.model, temperature=temperature, micro_batch_tokens=micro_batch_tokens)
        self.trainable, self.algorithm, self.seed = trainable, algorithm, seed
        self._policy_loss = policy_losses.get("ppo_clip")
        self._kl_coef = 0.0
        self._largest_difference = 0.0

    @property
    def is_on_policy(self) -> bool:
        """One optimizer step per batch: the policy being updated is the one that the old log-probs are of."""
        return self.algorithm.num_epochs == 1 and self.algorithm.num_mini_batches == 1

    def update(self, batch: RolloutBatch, *, step: int, kl_coef: float = 0.0) -> dict[str, float]:
        """Take all updates of one step; every rank takes part.

        Args:
            batch: holds `advantages` and `rollout_log_probs`, and `ref_log_probs` for a KL loss. Without
                `old_log_probs` the update must be on-policy; they are then this forward pass's own.
            kl_coef: of the KL loss, if there is one.

        Returns:
            Metrics; without old log-probs `logprob_diff_mean` and `logprob_diff_max` (rollout's against
            Megatron's) among them.
        """
        self._kl_coef, self._largest_difference = kl_coef, 0.0
        names = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
        metrics = run_updates(
            self.trainable,
            batch,
            self._loss,
            algorithm=self.algorithm,
            aggregation=self.algorithm.loss_aggregation,
            fields={name: batch[name] for name in names if name in batch},
            micro_batch_tokens=self.micro_batch_tokens,
            seed=self.seed,
            step=step,
        )
        if "old_log_probs" not in batch:
            # Only last stages have seen log-probs, each those of its samples.
            largest = torch.tensor(self._largest_difference, device=platform.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.model.grid.world)
            metrics["logprob_diff_max"] = float(largest)
        return metrics

    def _loss(self, logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        algorithm, fields = self.algorithm, micro.fields
        with_entropy = algorithm.entropy_coef > 0
        log_probs, entropies = self.model.log_probs(
            logits, micro, temperature=self.temperature, with_entropy=with_entropy
        )
        weights = fields["weights"]
        policy = self._policy_loss(
            {
                "log_probs": log_probs,
                "old_log_probs": fields.get("old_log_probs", log_probs.detach()),
                "advantages": fields["advantages"],
                "weights": weights,
            },
            clip_low=algorithm.clip_range,
            clip_high=algorithm.clip_range_high or algorithm.clip_range,
        )
        terms: list[tuple[float, LossOutput]] = [(1.0, policy)]
        if algorithm.kl.place == "loss":
            penalty = kl_loss(log_probs, fields["ref_log_probs"], weights, kind=algorithm.kl.kind)
            terms.append((self._kl_coef, penalty))
        if with_entropy:
            terms.append((-algorithm.entropy_coef, entropy_sum(entropies, weights)))
        total = combine(*terms)
        metrics = {**total.metrics, "loss": share(total.loss)}
        if "old_log_probs" not in fields:
            active = weights != 0
            difference = (log_probs.detach() - fields["rollout_log_probs"]).abs().masked_fill(~active, 0.0)
            metrics["logprob_diff_mean"] = moments(difference, active)
            if difference.numel():
                self._largest_difference = max(self._largest_difference, float(difference.max()))
        return total.loss, metrics
