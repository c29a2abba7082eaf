"""Which samples of a step each rank of a role reads, where that is known before they come: they alone go to it."""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.config import Config
from megaverl.data.batching import balance
from megaverl.fabric.courier import Readers
from megaverl.fabric.rows import rows_of_grid
from megaverl.parallel.grid import GridShape
from megaverl.placement import ResolvedPlacement
from megaverl.roles.reward import rows_of_rank
from megaverl.trainer.build import grid_sizes


def readers_of(config: Config, placement: ResolvedPlacement) -> dict[str, Readers]:
    """Operator -> who reads which rows of the rollouts. What trains weighs each sample against all, and reads all."""
    found: dict[str, Readers] = {}
    if config.environment.name is None and all(entry.path is None for entry in config.reward):  # rules alone
        found["reward"] = _of_reward(placement.ranks["reward"])
    if "reference" in placement.ranks:
        found["ref_log_probs"] = _of_reference(config, placement.ranks["reference"])
    return found


def speakers_of(config: Config, placement: ResolvedPlacement) -> tuple[int, ...]:
    """The ranks that send samples as they are finished, one for each engine; none where a step's are made together."""
    in_rounds = config.algorithm.dynamic_sampling.metric is not None or config.trainer.replay_rollouts is not None
    if config.environment.name is not None or config.rollout.function is not None or in_rounds:
        return ()
    return tuple(placement.ranks["rollout"][:: config.rollout.tp])


def _of_reward(ranks: Sequence[int]) -> Readers:
    def rows(prompts: Sequence[int], responses: Sequence[int]) -> dict[int, Sequence[int]]:
        return {rank: rows_of_rank(len(prompts), number, len(ranks)) for number, rank in enumerate(ranks)}

    return rows


def _of_reference(config: Config, ranks: Sequence[int]) -> Readers:
    def rows(prompts: Sequence[int], responses: Sequence[int]) -> dict[int, Sequence[int]]:
        grid = GridShape.fit(len(ranks), **grid_sizes(config.reference), role="reference")
        lengths = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return rows_of_grid(ranks, grid, balance(lengths, grid.dp))

    return rows
