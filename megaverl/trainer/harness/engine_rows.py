"""Rows that the program sends to the engines' ranks on behalf of a harness, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megaverl.config import Config
from megaverl.rollout.engine import PromptScore, SamplingOptions, sampling_options
from megaverl.workers.rollout import Rollout


@dataclass(frozen=True)
class EngineRows:
    """Prompts to continue, and prompts to score. The first six lists have one entry for each prompt to continue.

    Attributes:
        scored: prompts whose tokens' log-probs are wanted.
    """

    prompts: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    top_ps: list[float] = field(default_factory=list)
    top_ks: list[int] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class EngineAnswers:
    """Results of `EngineRows`.

    Attributes:
        tokens, log_probs: generated tokens of each prompt, and their log-probs.
        stopped: whether each response ended at a stop token.
        scores: log-probs of the scored prompts.
    """

    tokens: list[list[int]] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    scores: list[PromptScore] = field(default_factory=list)


def evaluation_sampling(config: Config) -> SamplingOptions:
    """Return the sampling options of an evaluation, for what a harness leaves out."""
    return sampling_options(
        config.rollout.sampling, **config.trainer.validation_sampling
    )


def answer_rows(config: Config, rollout: Rollout, rows: EngineRows) -> EngineAnswers:
    """Generate and score with the engines. Collective over their ranks, which all get the same result.

    Raises:
        RolloutError: the engine raised an error, or cannot score prompts.
    """
    scores: Sequence[PromptScore] = ()
    if rows.scored:
        scores = rollout.score_prompts(rows.scored)
    if not rows.prompts:
        return EngineAnswers(scores=list(scores))
    options = []
    for row in range(len(rows.prompts)):
        # Options that a call cannot set, such as stop tokens, stay those of the run.
        of_row = evaluation_sampling(config).with_max_tokens(rows.max_tokens[row])
        of_row.temperature = rows.temperatures[row]
        of_row.top_p = rows.top_ps[row]
        of_row.top_k = rows.top_ks[row]
        options.append(of_row)
    generations = rollout.generate(rows.prompts, options, rows.seeds)
    return EngineAnswers(
        tokens=[list(generation.token_ids) for generation in generations],
        log_probs=[list(generation.log_probs) for generation in generations],
        stopped=[generation.finish_reason == "stop" for generation in generations],
        scores=list(scores),
    )
