"""Scores of responses that no step's flow carries (a validation's), where reward models have ranks of their own."""

from __future__ import annotations

from megaverl.config import Config
from megaverl.data.batch import RolloutBatch
from megaverl.dataflow.tensor_channel import TensorChannel
from megaverl.distributed.worlds import Fabric
from megaverl.workers.reward import RewardRole, Scores

_ASKED, _ANSWERED = "responses to score", "their scores"


def models_are_remote(config: Config, fabric: Fabric) -> bool:
    """Whether there are reward models, on other ranks than the engines."""
    return any(entry.path is not None for entry in config.reward) and not fabric.placement.colocated(
        "reward", "rollout"
    )


def score_remotely(fabric: Fabric, batch: RolloutBatch) -> Scores:
    """On the engines' ranks: what the reward's ranks, in `serve_scores`, score a batch with."""
    engines, models = fabric.placement.ranks["rollout"], fabric.placement.ranks["reward"]
    channel = TensorChannel(fabric, (Scores,))
    channel.send(_ASKED, batch, engines, models)
    scores: Scores = channel.receive(_ANSWERED, models, engines)
    channel.settle()
    return scores


def serve_scores(role: RewardRole, fabric: Fabric) -> None:
    """On the reward's ranks: score what the engines' ranks ask for, once."""
    engines, models = fabric.placement.ranks["rollout"], fabric.placement.ranks["reward"]
    channel = TensorChannel(fabric, (Scores,))
    scores = role.score(channel.receive(_ASKED, engines, models))
    channel.send(_ANSWERED, scores, models, engines)
    channel.settle()
