"""Which samples of a step each rank of a role reads; they alone go to it, where nothing on it reads all."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.algorithms import advantage_estimators, policy_losses
from megaverl.config import Config
from megaverl.data.held_rows import Readers
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.dataflow import DataFlow
from megaverl.dataflow.carrier import Reads
from megaverl.distributed.placement import ResolvedPlacement
from megaverl.distributed.worlds import Fabric
from megaverl.sharding.rows import Rows, join_rows
from megaverl.trainer.step import RLStep
from megaverl.workers import local
from megaverl.workers.micro_batches import Updated, rows_of_updates

# Operators that say what they read of the rollouts; any other (`mix`, a user's own) reads all of it.
SELECTIVE = ("reward", "ref_log_probs", "old_log_probs", "score_norms", "implicit_rewards", "values", "advantages")
TOKENS = frozenset({"input_ids", "generated_ids"})
# What says which tokens train, and whose they are; and how the engine saw them.
MASKS = frozenset({"response_mask", "turn_ids", "turn_rewards", "agent_ids", "group_ids"})
OF_ENGINE = frozenset({"rollout_log_probs", "weight_versions"})


# Operators that work with a rank's own samples alone; any other wants all of them on every rank.
OF_HELD = frozenset({*SELECTIVE, "rollout", "critic_update", "actor_update", "reshard"} - {"implicit_rewards"})


def speakers_of(config: Config, placement: ResolvedPlacement) -> tuple[int, ...]:
    """The ranks that send samples as they are finished, one for each engine; none where a step's are made together."""
    in_rounds = config.algorithm.dynamic_sampling.metric is not None or config.trainer.replay_rollouts is not None
    whole = config.rollout.function is not None or config.rollout.in_flight_updates
    if config.environment.name is not None or whole or in_rounds:
        return ()
    return tuple(placement.ranks["rollout"][:: config.rollout.tp])


class SampleRouting:
    """What this rank's operators read, from what its roles will do with a step's samples.

    Args:
        reporter: the rank that keeps the run's records.

    Attributes:
        step: the running one, counted from 0.
        first_step: of this start of the run.
    """

    def __init__(self, steps: RLStep, fabric: Fabric, reporter: int) -> None:
        self._steps, self.fabric, self._reporter = steps, fabric, reporter
        self.config, self.roles = steps.config, steps.roles
        self.step = self.first_step = 0

    def of_operators(self) -> dict[str, Reads]:
        """By their names; the roles are asked when a batch is here."""
        weighed = MASKS | OF_ENGINE | self._estimator_reads
        return {
            "reward": Reads(self._reward, frozenset({"turn_rewards"})),
            "ref_log_probs": Reads(self._reference),
            "old_log_probs": Reads(self._old_log_probs, MASKS | OF_ENGINE),
            "score_norms": Reads(self._scored, MASKS),
            "implicit_rewards": Reads(self._implicit, MASKS),
            "values": Reads(self._critic, MASKS),
            "advantages": Reads(self._trained, weighed - TOKENS),
        }

    def readers(self, flow: DataFlow) -> Readers | None:
        """Who works on which samples of a step, where the roles share their ranks; None where something reads all."""
        config, operators = self.config, [each.name for each in flow.plan.operators]
        algorithm, reads = config.algorithm, self.of_operators()
        made_together = config.environment.name is not None or config.rollout.function is not None
        looks_at_all = made_together or algorithm.dynamic_sampling.metric is not None or self._reads_all
        selects = "selected" in policy_losses.get(algorithm.policy_loss_name).inputs
        selects = selects or algorithm.top_entropy is not None or algorithm.positive_coef > 0
        estimator = advantage_estimators.get(algorithm.advantage_name)
        if looks_at_all or selects or not estimator.of_groups or not OF_HELD.issuperset(operators):
            return None
        some = [reads[name] for name in operators if name in reads]
        return Readers(self.fabric, Reads.together(some).rows)

    def readers_of_validation(self) -> Readers:
        """Who scores which responses of a validation; and the first of them are written down."""

        def rows(lengths: SequenceLengths) -> Rows:
            return join_rows([self._reward(lengths), self._written(lengths, self.config.trainer.save_samples)])

        return Readers(self.fabric, rows)

    def _written(self, lengths: SequenceLengths, count: int) -> Rows:
        return {self._reporter: range(min(count, len(lengths)))}

    def _reward(self, outline: SequenceLengths) -> Rows:
        return self._on("reward", self.roles.reward.rows(outline))

    def _reference(self, outline: SequenceLengths) -> Rows:
        assert self.roles.reference is not None
        return self._on("reference", self.roles.reference.rows(outline))

    def _old_log_probs(self, outline: SequenceLengths) -> Rows:
        wanted = self.config.shares_backbone or self._steps.needs_log_probs(self.step) or self.step == self.first_step
        return self._scored(outline) if wanted else {}

    def _scored(self, outline: SequenceLengths) -> Rows:
        """Every island scores all samples."""
        return self._on("actor", self.roles.actor.rows(outline))

    def _implicit(self, outline: SequenceLengths) -> Rows:
        assert self.roles.implicit is not None
        return self._on("actor", self.roles.implicit.rows(outline))

    def _critic(self, outline: SequenceLengths) -> Rows:
        critic = self.roles.critic
        assert critic is not None
        return join_rows([self._on("critic", critic.rows(outline)), self._updates("critic", local(critic), outline)])

    def _trained(self, outline: SequenceLengths) -> Rows:
        """What the updates train on, and what is written down."""
        if self._reads_all:
            return dict.fromkeys(self.fabric.placement.ranks["actor"], range(len(outline)))
        count = len(outline) if self.config.trainer.store_rollouts else self.config.trainer.save_samples
        return join_rows([self._written(outline, count), self._updates("actor", local(self.roles.actor), outline)])

    @property
    def _reads_all(self) -> bool:
        """Whether tokens of all samples are looked at where they are weighed."""
        return self.config.algorithm.rollout_filter is not None or not TOKENS.isdisjoint(self._estimator_reads)

    @property
    def _estimator_reads(self) -> frozenset[str]:
        estimator = advantage_estimators.get(self.config.algorithm.advantage_name)
        return frozenset(estimator.inputs) | frozenset(estimator.optional_inputs)

    def _updates(self, role: str, trained: Updated, outline: SequenceLengths) -> Rows:
        return join_rows(
            dict(zip(ranks, rows_of_updates(trained, outline, self.step, part), strict=True))
            for part, ranks in enumerate(self._worlds(role))
        )

    def _on(self, role: str, rows: Sequence[Sequence[int]]) -> Rows:
        """Where each island has all of a role, each works on all samples."""
        return join_rows(dict(zip(ranks, rows, strict=True)) for ranks in self._worlds(role))

    def _worlds(self, role: str) -> Sequence[Sequence[int]]:
        """The ranks of a role; of each island where it is on those."""
        placement = self.fabric.placement
        return placement.islands if placement.colocated(role, "actor") else (placement.ranks[role],)
