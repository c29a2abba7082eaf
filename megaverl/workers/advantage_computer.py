"""Compute advantages from rewards, as the `algorithm` section configures, for the batch of one step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megaverl.algorithms import (
    AllReduce,
    advantage_estimators,
    check_finite_tokens,
    kl_estimators,
    mean,
    moments,
    on_one_rank,
    policy_filtration,
    token_rewards,
    whiten,
)
from megaverl.config.algorithm import FILTERS, AlgorithmConfig
from megaverl.data.batch import RolloutBatch, answer_rows
from megaverl.data.batch_fields import FIELDS
from megaverl.data.held_rows import HeldRows
from megaverl.distributed.ragged import beside, on_one_device
from megaverl.errors import DataError
from megaverl.plugins import call_object
from megaverl.workers.reward import Scores

# Entries of `extra` with one value per reward function.
OF_REWARDS = ("component_weights",)
# Entries of `extra` with one value per token.
OF_TOKENS = ("score_norms", "implicit_rewards")


class AdvantageComputer:
    """Advantage estimator of a run, with its options.

    Raises:
        ConfigError: the configuration names an unknown estimator, or options that the estimator does not have.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self.estimator = advantage_estimators.get(algorithm.advantage_name)
        # Estimators take only the options that they declare, so general settings are
        # passed to those that know them.
        settings = {"gamma": algorithm.gamma, "lam": algorithm.lam}
        options = {
            name: value
            for name, value in settings.items()
            if name in self.estimator.options
        }
        if not algorithm.normalize_by_std and "normalize_std" in self.estimator.options:
            options["normalize_std"] = False
        self.options = {**options, **algorithm.advantage_options}
        self.estimator.check_options(self.options)

    def assign_each(
        self,
        batch: RolloutBatch,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Run `assign` once per agent; with several agents, metrics are means over the agents.

        If the ranks hold parts of the batch, each rank computes the groups that it
        owns. A sample with a NaN reward could not be scored: its `response_mask` is
        cleared, and it counts in no group, mean or deviation. The `distillation`
        estimator also masks tokens with NaN `ref_log_probs`, which a teacher with
        another tokenizer could not read.

        Raises:
            DataError: another estimator got NaN `ref_log_probs` in host memory, so the reference model failed.
        """
        # NaN marks tokens that a teacher with another tokenizer could not read. On a
        # device the test would block the host.
        ref_on_host = (
            "ref_log_probs" in batch and batch.ref_log_probs.device.type == "cpu"
        )
        if ref_on_host and bool((unread := batch.ref_log_probs.isnan()).any()):
            if self.estimator.name != "distillation":
                check_finite_tokens(
                    batch.response_mask & unread, ref_log_probs=batch.ref_log_probs
                )
            filled = batch.ref_log_probs.masked_fill(unread, 0.0)
            batch = batch.with_(
                response_mask=batch.response_mask & ~unread, ref_log_probs=filled
            )
        # A NaN reward marks a sample that could not be scored.
        scored = ~batch.rewards.isnan()
        if not bool(scored.all()):
            batch = batch.with_(response_mask=batch.response_mask & scored.unsqueeze(1))
        # The ranks hold parts of the batch, and each computes the groups that it owns.
        if batch.held is not None:
            return self._assign_held(batch, batch.held, kl_coef=kl_coef, extra=extra)
        if "agent_ids" not in batch:
            return self.assign(batch, kl_coef=kl_coef, extra=extra)
        # Agents are compared among themselves: each agent's samples are a batch of
        # their own.
        parts, agent_metrics = [], []
        rows = [
            (batch.agent_ids == agent).nonzero()[:, 0]
            for agent in batch.agent_ids.unique()
        ]
        for agent_rows in rows:
            agent_extra = {
                k: v[beside(v, agent_rows)]
                if v is not None and k not in OF_REWARDS
                else v
                for k, v in extra.items()
            }
            part, metrics = self.assign(
                batch.select(agent_rows), kl_coef=kl_coef, extra=agent_extra
            )
            parts.append(part)
            agent_metrics.append(metrics)
        # `concat` orders the samples by agent; undo that.
        order = torch.cat(rows).argsort()
        means = {
            name: sum(metrics[name] for metrics in agent_metrics) / len(agent_metrics)
            for name in agent_metrics[0]
        }
        return RolloutBatch.concat(parts).select(order), means

    def _assign_held(
        self,
        batch: RolloutBatch,
        held: HeldRows,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
    ) -> tuple[RolloutBatch, dict[str, float]]:
        own_extra = {
            k: v[beside(v, held.own)] if v is not None and k not in OF_REWARDS else v
            for k, v in extra.items()
        }
        # Only own rows are computed, and sums are completed over the ranks. Collective
        # over the ranks that hold the batch.
        part, metrics = self.assign(
            batch.select(held.own),
            kl_coef=kl_coef,
            extra=own_extra,
            all_reduce=held.all_reduce,
        )
        # [local rows, response], zero where another rank computes.
        fields: dict[str, torch.Tensor] = {}
        for name in [name for name in ("advantages", "returns") if name in part]:
            fields[name] = part[name].new_zeros(batch.response_shape)
            fields[name][beside(part[name], held.own)] = part[name]
        # Each rank then receives the advantages of all rows that it holds.
        return batch.with_(
            **held.spread("advantages", fields, held.groups_by_rank)
        ), metrics

    def assign(
        self,
        batch: RolloutBatch,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None] | None = None,
        all_reduce: AllReduce = on_one_rank,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Return the batch with `advantages`, plus `returns` and `token_rewards` if the estimator uses them.

        An estimator that reads model outputs gets all its inputs on that model's
        device, and its advantages stay there. An estimator that reads only rewards runs
        on the host. An episode of several conversations is one sample: its tokens are
        joined turn by turn.

        Args:
            batch: holds `rewards` and the other inputs of the estimator.
            kl_coef: coefficient of the KL penalty in the reward.
            extra: inputs that are not batch fields, such as `greedy_rewards` `[batch]` or `component_rewards`.
            all_reduce: adds up sums over the ranks that hold the rest of the batch.

        Returns:
            The batch, and the metrics `kl` (with a reference) and `advantage_mean`.
        """
        # Several rows may belong to one episode, whose last conversation has the
        # reward.
        if len(ends := answer_rows(batch).unique()) < len(batch):
            return self._assign_episodes(
                batch, ends, kl_coef=kl_coef, extra=extra or {}, all_reduce=all_reduce
            )
        if bool((unscored := batch.rewards.isnan()).any()):
            return self._assign_scored(
                batch,
                ~unscored,
                kl_coef=kl_coef,
                extra=extra or {},
                all_reduce=all_reduce,
            )
        mask, metrics = batch.response_mask, {}
        penalty = None
        if "ref_log_probs" in batch:
            policy = batch.tensors.get("old_log_probs", batch.rollout_log_probs)
            both = on_one_device(
                # The policy's log-probs come from a device and the reference's perhaps
                # from the host.
                {"log_probs": policy, "ref_log_probs": batch.ref_log_probs}
            )
            kl = kl_estimators.get(self.algorithm.kl.kind_name)(both)
            metrics["kl"] = mean(all_reduce(moments(kl, beside(kl, mask))))
            # In the loss, the penalty is computed with gradients later. Here it only
            # becomes a metric.
            penalty = kl if self.algorithm.kl.place == "reward" else None
        if "token_rewards" in self.estimator.inputs:
            # A turn's reward is placed at the end of the turn, the remaining reward at
            # the end of the response.
            turn_rewards = batch.tensors.get(
                "turn_rewards", torch.zeros_like(mask, dtype=torch.float32)
            )
            last = token_rewards(
                batch.rewards - turn_rewards.sum(dim=1), mask, penalty, kl_coef=kl_coef
            )
            batch = batch.with_(token_rewards=last + beside(last, turn_rewards))
        if penalty is not None and "rewards" in self.estimator.inputs:
            # This estimator scores whole responses, so the penalty is summed over
            # tokens before groups are compared. The sum is one number per response, so
            # copying it to the rewards on the host is cheap.
            of_responses = (
                (penalty * beside(penalty, mask)).sum(dim=1).to(batch.rewards.device)
            )
            batch = batch.with_(rewards=batch.rewards - kl_coef * of_responses)
        inputs = {**batch.tensors, **(extra or {})}
        names = (*self.estimator.inputs, *self.estimator.optional_inputs)
        read = on_one_device(
            {name: tensor for name in names if (tensor := inputs.get(name)) is not None}
        )
        result = self.estimator(
            {**inputs, **read, "all_reduce": all_reduce}, **self.options
        )
        mask = beside(result.advantages, mask)
        metrics["advantage_mean"] = mean(all_reduce(moments(result.advantages, mask)))
        # Only advantages from a critic are whitened here. Other estimators normalize by
        # themselves, if at all.
        has_critic = "values" in self.estimator.inputs
        whitened = has_critic and self.algorithm.normalize_advantages
        advantages = (
            whiten(result.advantages, mask, all_reduce=all_reduce)
            if whitened
            else result.advantages
        )
        batch = batch.with_(advantages=advantages)
        return (
            batch if result.returns is None else batch.with_(returns=result.returns)
        ), metrics

    def _assign_episodes(
        self,
        batch: RolloutBatch,
        ends: torch.Tensor,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
        all_reduce: AllReduce,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Run `assign` on one row per episode, with the tokens of all its conversations in turn order.

        Args:
            ends: rows that hold the last conversation of each episode.
        """
        answers = answer_rows(batch)
        # [rows], index of each row's episode among `ends`.
        number = torch.searchsorted(ends, answers)  # episode index of each row
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        # Turns are numbered over all conversations of an episode. The factor keeps
        # episodes apart.
        turns = (
            number[rows] * (1 + int(batch.turn_ids.max()))
            + batch.turn_ids[rows, columns]
        )
        # Stable, so that the tokens of one turn keep their order.
        order = turns.argsort(stable=True)
        rows, columns = rows[order], columns[order]
        counts = torch.bincount(number[rows], minlength=len(ends))
        # Position of each token in its episode: its index minus the start of the
        # episode.
        places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[number[rows]]
        shape = (len(ends), int(counts.max()))

        def joined(name: str, values: torch.Tensor) -> torch.Tensor:
            # Fields with one value per row are taken from the episode's last row, which
            # carries the reward.
            if name not in OF_TOKENS and (
                name not in FIELDS or FIELDS[name].axes != "R"
            ):
                return values[beside(values, ends)]
            whole = values.new_zeros(shape)
            whole[beside(values, number[rows]), beside(values, places)] = values[
                beside(values, rows), beside(values, columns)
            ]
            return whole

        tensors = {
            name: joined(name, values)
            for name, values in batch.tensors.items()
            if name != "episode_ids"
        }
        episode_extra = {
            k: joined(k, v) if v is not None and k not in OF_REWARDS else v
            for k, v in extra.items()
        }
        whole = RolloutBatch(tensors | {"response_lengths": counts})
        part, metrics = self.assign(
            whole, kl_coef=kl_coef, extra=episode_extra, all_reduce=all_reduce
        )
        # Every row of an episode gets the episode's reward, and its own tokens'
        # advantages.
        fields = {"rewards": part.rewards[number]}
        for name in ("advantages", "returns", "token_rewards"):
            if name in part:
                values = part.tensors[name]
                fields[name] = values.new_zeros(batch.response_shape)
                fields[name][beside(values, rows), beside(values, columns)] = values[
                    beside(values, number[rows]), beside(values, places)
                ]
        return batch.with_(**fields), metrics

    def _assign_scored(
        self,
        batch: RolloutBatch,
        scored: torch.Tensor,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
        all_reduce: AllReduce,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Run `assign` on the scored samples alone, and give the other samples zeros."""
        rows = scored.nonzero()[:, 0]
        scored_extra = {
            k: v[beside(v, rows)] if v is not None and k not in OF_REWARDS else v
            for k, v in extra.items()
        }
        part, metrics = self.assign(
            batch.select(rows),
            kl_coef=kl_coef,
            extra=scored_extra,
            all_reduce=all_reduce,
        )
        # Samples that could not be scored get zeros, and their tokens are masked
        # already.
        fields = {}
        for name in ("rewards", "advantages", "returns", "token_rewards"):
            if name in part:
                values = part.tensors[name]
                fields[name] = values.new_zeros((len(batch), *values.shape[1:]))
                fields[name][beside(values, rows)] = values
        return batch.with_(**fields), metrics


def kept_by(name: str, batch: RolloutBatch, scores: Scores) -> torch.Tensor:
    """Return a [B] bool mask of the samples that `algorithm.rollout_filter` keeps.

    The filters best_and_worst and best_and_random are `policy_filtration` on the
    weighted sum of the rewards. A user function is called as function(batch, scores)
    and returns true for every sample to train on. A dropped sample still counts in the
    rewards of its group.

    Raises:
        ConfigError: the function does not exist.
        DataError: the function returned something else than [B] bool, or dropped every sample.
    """
    if name in FILTERS:
        # Keep or drop whole episodes.
        ends, number = answer_rows(batch).unique(return_inverse=True)
        # The seed depends only on the batch, so that all ranks and a resumed run make
        # the same choice.
        generator = torch.Generator().manual_seed(
            int(batch.generated_ids.sum()) % 2**63
        )
        draws = (
            torch.rand(len(ends), generator=generator)
            if name == "best_and_random"
            else None
        )
        # [episodes] -> [rows]: all rows of an episode share its fate.
        return policy_filtration(scores.total[ends], batch.group_ids[ends], draws)[
            number
        ]
    returned = call_object(name, "algorithm.rollout_filter", batch, scores)
    try:
        keep = torch.as_tensor(returned)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"algorithm.rollout_filter: {name} returned {type(returned).__name__}: {error}"
        ) from error
    if keep.shape != (len(batch),) or keep.dtype != torch.bool:
        raise DataError(
            f"algorithm.rollout_filter: {name} returned {keep.dtype} of shape {list(keep.shape)}; expected bool of "
            f"shape [{len(batch)}], true for each sample that is to train."
        )
    if not bool(keep.any()):
        raise DataError(
            f"algorithm.rollout_filter: {name} dropped all {len(batch)} samples: no sample is left to train on."
        )
    return keep
