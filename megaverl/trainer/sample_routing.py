"""Routing of a step's samples: which rows each rank reads, from the operators of its roles.

A rank receives only its own rows unless an operator reads all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megaverl.algorithms import advantage_estimators, policy_losses
from megaverl.data.distributed_batch import RowSelection
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.dataflow import DataFlow
from megaverl.distributed.job_context import JobContext
from megaverl.sharding.rows import Rows, join_rows
from megaverl.trainer.step import RLStep
from megaverl.workers import local
from megaverl.workers.micro_batches import Updated, rows_of_updates

TOKENS = frozenset({"input_ids", "generated_ids"})
# Operators that read no rows of their own, or that follow the rows of others.
WITHOUT_ROWS = {"rollout", "critic_update", "actor_update", "reshard"}


# Maps the lengths of a step's samples to the rows that each rank reads.
RowsRead = Callable[[SequenceLengths], Rows]


class SampleRouting:
    """Assignment of a step's samples to ranks, derived from the operators of each rank's roles.

    Args:
        reporting_rank: rank that keeps the run's records.

    Attributes:
        step: running step, counted from 0.
        first_step: first step of this start of the run.
    """

    def __init__(self, steps: RLStep, context: JobContext, reporting_rank: int) -> None:
        self._steps, self.context, self._reporter = steps, context, reporting_rank
        self.config, self.roles = steps.config, steps.roles
        self.step = self.first_step = 0

    def rows_read(self) -> dict[str, RowsRead]:
        """Return, by operator name, the function that computes the rows which the operator reads.

        The functions ask the roles, so they are called only when the sample lengths are
        known.
        """
        return {
            "reward": self._reward,
            "ref_log_probs": self._reference,
            "old_log_probs": self._old_log_probs,
            "score_norms": self._scored,
            "implicit_rewards": self._implicit,
            "values": self._critic,
            "advantages": self._trained,
            "draft_update": self._draft,
        }

    def readers(self, flow: DataFlow) -> RowSelection | None:
        """Return the row selection for a step on the ranks of this role group.

        Returns:
            None if an operator, the environment or the algorithm reads all samples on every rank.
        """
        config, operators = (
            self.config,
            [operator.name for operator in flow.plan.operators],
        )
        here = [
            operator.name
            for operator in flow.plan.operators
            if not {*operator.roles}.isdisjoint(self.context.role_group.roles)
        ]
        algorithm, selectors = config.algorithm, self.rows_read()
        # Episodes and responses of a rollout function are produced as one batch, which
        # every rank gets whole.
        made_together = (
            config.environment.name is not None or config.rollout.function is not None
        )
        looks_at_all = made_together or config.samples_in_rounds or self._reads_all
        # These losses depend on tokens or samples of the whole batch.
        selects = "selected" in policy_losses.get(algorithm.policy_loss_name).inputs
        selects = (
            selects or algorithm.top_entropy is not None or algorithm.positive_coef > 0
        )
        estimator = advantage_estimators.get(algorithm.advantage_name)
        # Operators that work with a rank's local rows. Any other (`mix`, a user's
        # operator) needs all samples on every rank.
        of_held = {*selectors, *WITHOUT_ROWS} - {"implicit_rewards"}
        if (
            looks_at_all
            or selects
            or not estimator.of_groups
            or not of_held.issuperset(operators)
        ):
            return None
        selectors_here = [selectors[name] for name in here if name in selectors]
        return RowSelection(
            self.context,
            lambda lengths: join_rows(rows(lengths) for rows in selectors_here),
        )

    def readers_of_validation(self) -> RowSelection:
        """Return the row selection for a validation: rows to score, and the first rows,
        which are written to the records.
        """

        def rows(lengths: SequenceLengths) -> Rows:
            return join_rows(
                [
                    self._reward(lengths),
                    self._written(lengths, self.config.trainer.save_samples),
                ]
            )

        return RowSelection(self.context, rows)

    def _written(self, lengths: SequenceLengths, count: int) -> Rows:
        return {self._reporter: range(min(count, len(lengths)))}

    def _reward(self, lengths: SequenceLengths) -> Rows:
        return self._on("reward", self.roles.reward.rows(lengths))

    def _reference(self, lengths: SequenceLengths) -> Rows:
        assert self.roles.reference is not None
        return self._on("reference", self.roles.reference.rows(lengths))

    def _old_log_probs(self, lengths: SequenceLengths) -> Rows:
        # The first step after a start always computes log-probs, to compare them with
        # the engine's.
        wanted = (
            self.config.shares_backbone
            or self._steps.needs_log_probs(self.step)
            or self.step == self.first_step
        )
        return self._scored(lengths) if wanted else {}

    def _scored(self, lengths: SequenceLengths) -> Rows:
        """Return the rows that each actor rank scores. Every island scores all samples."""
        return self._on("actor", self.roles.actor.rows(lengths))

    def _implicit(self, lengths: SequenceLengths) -> Rows:
        assert self.roles.implicit is not None
        return self._on("actor", self.roles.implicit.rows(lengths))

    def _critic(self, lengths: SequenceLengths) -> Rows:
        critic = self.roles.critic
        assert critic is not None
        return join_rows(
            [
                self._on("critic", critic.rows(lengths)),
                self._updates("critic", local(critic), lengths),
            ]
        )

    def _trained(self, lengths: SequenceLengths) -> Rows:
        """Return the rows that each actor rank trains on, and the rows that the reporter writes to the records."""
        # A filter or an estimator that reads tokens needs all samples on every rank of
        # the actor.
        if self._reads_all:
            return dict.fromkeys(
                self.context.placement.ranks["actor"], range(len(lengths))
            )
        count = (
            len(lengths)
            if self.config.trainer.store_rollouts
            else self.config.trainer.save_samples
        )
        return join_rows(
            [
                self._written(lengths, count),
                self._updates("actor", local(self.roles.actor), lengths),
            ]
        )

    def _draft(self, lengths: SequenceLengths) -> Rows:
        """Return the rows that each actor rank trains the draft model on."""
        assert self.roles.draft is not None
        return self._updates("actor", self.roles.draft, lengths)

    @property
    def _reads_all(self) -> bool:
        """Return whether the advantage computation reads tokens of all samples."""
        return (
            self.config.algorithm.rollout_filter is not None
            or not TOKENS.isdisjoint(self._estimator_reads)
        )

    @property
    def _estimator_reads(self) -> frozenset[str]:
        estimator = advantage_estimators.get(self.config.algorithm.advantage_name)
        return frozenset(estimator.inputs) | frozenset(estimator.optional_inputs)

    def _updates(self, role: str, trained: Updated, lengths: SequenceLengths) -> Rows:
        # Every island plans the same updates and trains on its own part of each
        # mini-batch.
        return join_rows(
            dict(
                zip(
                    ranks,
                    rows_of_updates(trained, lengths, self.step, part),
                    strict=True,
                )
            )
            for part, ranks in enumerate(self._groups_of(role))
        )

    def _on(self, role: str, rows: Sequence[Sequence[int]]) -> Rows:
        """Assign rows to the ranks of a role. If islands have their own copy of the role, each works on all samples."""
        return join_rows(
            dict(zip(ranks, rows, strict=True)) for ranks in self._groups_of(role)
        )

    def _groups_of(self, role: str) -> Sequence[Sequence[int]]:
        """Return the ranks of a role, as one group per island if the role shares the actor's ranks."""
        placement = self.context.placement
        return (
            placement.islands
            if placement.colocated(role, "actor")
            else (placement.ranks[role],)
        )
