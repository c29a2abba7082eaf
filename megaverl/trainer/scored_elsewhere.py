"""Scores of responses that no step's flow carries (a validation's), where reward models have ranks of their own."""

from __future__ import annotations

from typing import Any, cast

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.tensor_channel import TensorChannel
from megaverl.distributed.worlds import Fabric
from megaverl.trainer.build import Builder
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.trainable import TrainableModel

_ASKED, _ANSWERED = "responses to score", "their scores"


def reward_of(builder: Builder, fabric: Fabric, learned: TrainableModel | None = None) -> RewardRole:
    """This rank's part of the rewards: models where they are placed, and on the engines' ranks a way to them.

    Args:
        learned: the one of them that the run trains.
    """
    role = builder.reward(learned, models_are_here=fabric.has("reward"))
    asks = models_are_apart(builder.config, fabric) and fabric.has("rollout")
    return cast(RewardRole, ScoredElsewhere(role, fabric)) if asks else role


def models_are_apart(config: Config, fabric: Fabric) -> bool:
    """Whether there are reward models, on other ranks than the engines."""
    return any(entry.path is not None for entry in config.reward) and not fabric.placement.colocated(
        "reward", "rollout"
    )


class ScoredElsewhere:
    """In a RewardRole's place on the engines' ranks; all of these, and of the reward's, take part in `score`."""

    def __init__(self, role: RewardRole, fabric: Fabric) -> None:
        self._role, self._fabric = role, fabric
        self._courier = TensorChannel(fabric, (Scores,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._role, name)

    def score(self, batch: RolloutBatch) -> Scores:
        """Scores of all samples, when they are here."""
        engines, models = self._fabric.placement.ranks["rollout"], self._fabric.placement.ranks["reward"]
        self._courier.send(_ASKED, batch, engines, models)
        scores: Scores = self._courier.receive(_ANSWERED, models, engines)
        self._courier.settle()
        return scores


def serve_scores(role: RewardRole, fabric: Fabric) -> None:
    """On the reward's ranks: score what the engines' ranks ask for, once."""
    engines, models = fabric.placement.ranks["rollout"], fabric.placement.ranks["reward"]
    courier = TensorChannel(fabric, (Scores,))
    scores = role.score(courier.receive(_ASKED, engines, models))
    courier.send(_ANSWERED, scores, models, engines)
    courier.settle()
