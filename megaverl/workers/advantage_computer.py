"""From rewards to advantages: what `algorithm` says, applied to the batch of one step."""

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
from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import FIELDS, answer_rows
from megaverl.data.held_rows import HeldRows
from megaverl.distributed.ragged import beside, on_one_device
from megaverl.errors import DataError
from megaverl.plugins import call_object
from megaverl.workers.reward import Scores

OF_REWARDS = ("component_weights",)  # what `extra` holds for each reward, and not for each sample
OF_TOKENS = ("score_norms", "implicit_rewards")  # and for each token


class AdvantageComputer:
    """The advantage estimator of a run, with its options.

    Raises:
        ConfigError: the configuration names no function, or options that it does not have.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.algorithm = algorithm
        self.estimator = advantage_estimators.get(algorithm.advantage_name)
        given = {"gamma": algorithm.gamma, "lam": algorithm.lam}
        options = {name: value for name, value in given.items() if name in self.estimator.options}
        if not algorithm.normalize_by_std and "normalize_std" in self.estimator.options:
            options["normalize_std"] = False
        self.options = {**options, **algorithm.advantage_options}
        self.estimator.check_options(self.options)

    def assign_each(
        self, batch: RolloutBatch, *, kl_coef: float, extra: Mapping[str, torch.Tensor | None]
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Run `assign` for every agent by itself where there are several; metrics are means over the agents.

        Of a batch that ranks have parts of, each rank computes the groups that it speaks for. A sample whose reward is
        NaN could not be scored: it is in no group, no mean and no deviation, and loses its `response_mask`. Under
        `distillation` so does a token whose `ref_log_probs` are NaN: a teacher of other tokens could not read it.

        Raises:
            DataError: a `ref_log_probs` on the host that is NaN, of any other estimator: the reference model failed.
        """
        ref_on_host = "ref_log_probs" in batch and batch.ref_log_probs.device.type == "cpu"
        if ref_on_host and bool((unread := batch.ref_log_probs.isnan()).any()):
            if self.estimator.name != "distillation":
                check_finite_tokens(batch.response_mask & unread, ref_log_probs=batch.ref_log_probs)
            filled = batch.ref_log_probs.masked_fill(unread, 0.0)
            batch = batch.with_(response_mask=batch.response_mask & ~unread, ref_log_probs=filled)
        scored = ~batch.rewards.isnan()
        if not bool(scored.all()):
            batch = batch.with_(response_mask=batch.response_mask & scored.unsqueeze(1))
        if batch.held is not None:
            return self._assign_held(batch, batch.held, kl_coef=kl_coef, extra=extra)
        if "agent_ids" not in batch:
            return self.assign(batch, kl_coef=kl_coef, extra=extra)
        parts, found = [], []
        rows = [(batch.agent_ids == agent).nonzero()[:, 0] for agent in batch.agent_ids.unique()]
        for mine in rows:
            own = {k: v[beside(v, mine)] if v is not None and k not in OF_REWARDS else v for k, v in extra.items()}
            part, metrics = self.assign(batch.select(mine), kl_coef=kl_coef, extra=own)
            parts.append(part)
            found.append(metrics)
        order = torch.cat(rows).argsort()
        means = {name: sum(metrics[name] for metrics in found) / len(found) for name in found[0]}
        return RolloutBatch.concat(parts).select(order), means

    def _assign_held(
        self, batch: RolloutBatch, held: HeldRows, *, kl_coef: float, extra: Mapping[str, torch.Tensor | None]
    ) -> tuple[RolloutBatch, dict[str, float]]:
        own = {k: v[beside(v, held.own)] if v is not None and k not in OF_REWARDS else v for k, v in extra.items()}
        part, metrics = self.assign(batch.select(held.own), kl_coef=kl_coef, extra=own, all_reduce=held.all_reduce)
        found: dict[str, torch.Tensor] = {}
        for name in [name for name in ("advantages", "returns") if name in part]:
            found[name] = part[name].new_zeros(batch.response_shape)
            found[name][beside(part[name], held.own)] = part[name]
        return batch.with_(**held.spread("advantages", found, held.groups_by_rank)), metrics

    def assign(
        self,
        batch: RolloutBatch,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None] | None = None,
        all_reduce: AllReduce = on_one_rank,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """The batch with `advantages`, and `returns` and `token_rewards` where the estimator has them.

        Args:
            batch: holds `rewards`, and whatever else the estimator reads.
            kl_coef: of the KL penalty in the reward.
            extra: inputs that are no field of a batch, such as `greedy_rewards` `[batch]` or `component_rewards`.
            all_reduce: where other ranks have the rest of the batch, its sums over all of them.

        An estimator that reads what a model has computed finds all that it reads on that model's device; its advantages
        stay there. One that reads rewards alone is on the host, as they are.

        An episode of several conversations is one sample: what was written in all of them, turn by turn.

        Returns: the batch, and the metrics `kl` (with a reference) and `advantage_mean`.
        """
        if len(ends := answer_rows(batch).unique()) < len(batch):
            return self._assign_episodes(batch, ends, kl_coef=kl_coef, extra=extra or {}, all_reduce=all_reduce)
        if bool((unscored := batch.rewards.isnan()).any()):
            return self._assign_scored(batch, ~unscored, kl_coef=kl_coef, extra=extra or {}, all_reduce=all_reduce)
        mask, metrics = batch.response_mask, {}
        penalty = None
        if "ref_log_probs" in batch:
            policy = batch.tensors.get("old_log_probs", batch.rollout_log_probs)
            both = on_one_device({"log_probs": policy, "ref_log_probs": batch.ref_log_probs})
            kl = kl_estimators.get(self.algorithm.kl.kind_name)(both)
            metrics["kl"] = mean(all_reduce(moments(kl, beside(kl, mask))))
            penalty = kl if self.algorithm.kl.place == "reward" else None
        if "token_rewards" in self.estimator.inputs:
            # What an environment gave for a turn stands where the turn ended, the rest at the end of the response.
            given = batch.tensors.get("turn_rewards", torch.zeros_like(mask, dtype=torch.float32))
            last = token_rewards(batch.rewards - given.sum(dim=1), mask, penalty, kl_coef=kl_coef)
            batch = batch.with_(token_rewards=last + beside(last, given))
        if penalty is not None and "rewards" in self.estimator.inputs:
            # It scores whole responses: the penalty is summed over the tokens before groups are compared.
            # one number a response, and rewards are on the host
            of_responses = (penalty * beside(penalty, mask)).sum(dim=1).to(batch.rewards.device)
            batch = batch.with_(rewards=batch.rewards - kl_coef * of_responses)
        inputs = {**batch.tensors, **(extra or {})}
        names = (*self.estimator.inputs, *self.estimator.optional_inputs)
        read = on_one_device({name: tensor for name in names if (tensor := inputs.get(name)) is not None})
        result = self.estimator({**inputs, **read, "all_reduce": all_reduce}, **self.options)
        mask = beside(result.advantages, mask)
        metrics["advantage_mean"] = mean(all_reduce(moments(result.advantages, mask)))
        has_critic = "values" in self.estimator.inputs
        whitened = has_critic and self.algorithm.normalize_advantages
        found = whiten(result.advantages, mask, all_reduce=all_reduce) if whitened else result.advantages
        batch = batch.with_(advantages=found)
        return (batch if result.returns is None else batch.with_(returns=result.returns)), metrics

    def _assign_episodes(
        self,
        batch: RolloutBatch,
        ends: torch.Tensor,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
        all_reduce: AllReduce,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`assign` of the rows `ends` of episodes, with the tokens of all their conversations in the order of turns."""
        answers = answer_rows(batch)
        number = torch.searchsorted(ends, answers)  # of the episode, by row
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        turns = number[rows] * (1 + int(batch.turn_ids.max())) + batch.turn_ids[rows, columns]
        order = turns.argsort(stable=True)
        rows, columns = rows[order], columns[order]
        counts = torch.bincount(number[rows], minlength=len(ends))
        places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[number[rows]]
        shape = (len(ends), int(counts.max()))

        def joined(name: str, values: torch.Tensor) -> torch.Tensor:
            if name not in OF_TOKENS and (name not in FIELDS or FIELDS[name].axes != "R"):
                return values[beside(values, ends)]
            whole = values.new_zeros(shape)
            whole[beside(values, number[rows]), beside(values, places)] = values[
                beside(values, rows), beside(values, columns)
            ]
            return whole

        tensors = {name: joined(name, values) for name, values in batch.tensors.items() if name != "episode_ids"}
        own = {k: joined(k, v) if v is not None and k not in OF_REWARDS else v for k, v in extra.items()}
        whole = RolloutBatch(tensors | {"response_lengths": counts})
        part, metrics = self.assign(whole, kl_coef=kl_coef, extra=own, all_reduce=all_reduce)
        found = {"rewards": part.rewards[number]}
        for name in ("advantages", "returns", "token_rewards"):
            if name in part:
                values = part.tensors[name]
                found[name] = values.new_zeros(batch.response_shape)
                found[name][beside(values, rows), beside(values, columns)] = values[
                    beside(values, number[rows]), beside(values, places)
                ]
        return batch.with_(**found), metrics

    def _assign_scored(
        self,
        batch: RolloutBatch,
        scored: torch.Tensor,
        *,
        kl_coef: float,
        extra: Mapping[str, torch.Tensor | None],
        all_reduce: AllReduce,
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """`assign` as if the batch had only the samples that are scored; the others get zeros."""
        rows = scored.nonzero()[:, 0]
        own = {k: v[beside(v, rows)] if v is not None and k not in OF_REWARDS else v for k, v in extra.items()}
        part, metrics = self.assign(batch.select(rows), kl_coef=kl_coef, extra=own, all_reduce=all_reduce)
        found = {}
        for name in ("rewards", "advantages", "returns", "token_rewards"):
            if name in part:
                values = part.tensors[name]
                found[name] = values.new_zeros((len(batch), *values.shape[1:]))
                found[name][beside(values, rows)] = values
        return batch.with_(**found), metrics


def kept_by(name: str, batch: RolloutBatch, scores: Scores) -> torch.Tensor:
    """[B] bool: the samples that `algorithm.rollout_filter` keeps.

    best_and_worst and best_and_random are `policy_filtration`, by the weighted sum of the rewards. A function is called
    as function(batch, scores), and returns true for what is to train. A sample that is dropped still counts in the
    rewards of its group.

    Raises:
        ConfigError: there is no such function. DataError: it returned something else, or dropped everything.
    """
    if name in FILTERS:
        ends, number = answer_rows(batch).unique(return_inverse=True)  # all conversations of an episode, or none
        generator = torch.Generator().manual_seed(int(batch.generated_ids.sum()) % 2**63)
        draws = torch.rand(len(ends), generator=generator) if name == "best_and_random" else None
        return policy_filtration(scores.total[ends], batch.group_ids[ends], draws)[number]
    found = call_object(name, "algorithm.rollout_filter", batch, scores)
    try:
        keep = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"algorithm.rollout_filter: {name} returned {type(found).__name__}: {error}") from error
    if keep.shape != (len(batch),) or keep.dtype != torch.bool:
        raise DataError(
            f"algorithm.rollout_filter: {name} returned {keep.dtype} of shape {list(keep.shape)}; expected bool of "
            f"shape [{len(batch)}], true for each sample that is to train."
        )
    if not bool(keep.any()):
        raise DataError(
            f"algorithm.rollout_filter: {name} dropped all {len(batch)} samples: nothing is left to train on."
        )
    return keep
