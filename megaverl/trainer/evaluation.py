"""Evaluation on suites of published data sets: one engine, each suite with its own prompts, reward and samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from megaverl.config import Config
from megaverl.config.run import RewardConfig, SourceConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.suites import IDENTITY, SUITES, Suite
from megaverl.monitoring.evaluations import PromptResult, SuiteResult
from megaverl.trainer.build import Builder
from megaverl.trainer.validation import held_out_responses
from megaverl.workers.reward import RewardRole, Scores
from megaverl.workers.rollout import Rollout


def evaluate_suite(builder: Builder, rollout: Rollout, name: str) -> SuiteResult:
    """Generate and score the responses to a suite's prompts. Collective over all ranks, with the same result on each.

    The responses of every call have the same seeds, so that two evaluations differ only
    by the model.
    """
    suite = SUITES[name]
    own_builder = copy.copy(builder)
    own_builder.config = suite_config(builder.config, suite)
    dataset = own_builder.dataset(own_builder.config.data.validation)
    reward = own_builder.reward()
    prompts = [dataset[index] for index in range(len(dataset))]
    batch = held_out_responses(own_builder.config, rollout, prompts)
    scores = reward.score(batch)
    results = prompt_results(suite, prompts, batch, scores, reward)
    return SuiteResult(name, results, list(builder.config.evaluation.pass_at))


def suite_config(config: Config, suite: Suite) -> Config:
    """Return the run's configuration with the prompts, the reward and the samples of one suite."""
    evaluation = config.evaluation
    source = SourceConfig(path=evaluation.source(suite.name, config.run.seed))
    data = config.data.model_copy(
        update={"validation": [source], "prompt_key": "prompt", "answer_key": "answer"}
    )
    given = {str(name): options for name, options in evaluation.options.items()}
    options = {**suite.options, **given.get(suite.name, {})}
    reward = RewardConfig(name=suite.reward, options=options, accuracy=True)
    trainer = config.trainer.model_copy(
        update={"validation_samples": evaluation.num_samples(suite.name)}
    )
    return config.model_copy(
        update={"data": data, "reward": [reward], "trainer": trainer}
    )


def prompt_results(
    suite: Suite,
    prompts: Sequence[PromptRecord],
    batch: RolloutBatch,
    scores: Scores,
    reward: RewardRole,
) -> list[PromptResult]:
    """Group the samples of a batch by prompt. The batch has the samples of each prompt one after the other."""
    size = len(batch) // len(prompts)
    lengths = batch.response_lengths.tolist()
    responses = [reward.transcript(batch, row) for row in range(len(batch))]
    is_scored = scores.scored.tolist()
    is_correct = scores.correct.tolist()
    results = []
    for number, prompt in enumerate(prompts):
        rows = range(number * size, (number + 1) * size)
        answers = (
            []
            if suite.answer is None
            else [suite.answer(responses[row], prompt.extra) for row in rows]
        )
        result = PromptResult(
            prompt_id=str(prompt.extra[IDENTITY]),
            prompt=prompt.text,
            reference=prompt.reference,
            correct=[bool(is_correct[row]) if is_scored[row] else None for row in rows],
            answers=answers,
            responses=[responses[row] for row in rows],
            lengths=[int(lengths[row]) for row in rows],
            finish_reasons=[batch.columns["finish_reason"][row] for row in rows],
        )
        results.append(result)
    return results
