"""Evaluation of a model (`megaverl eval`): on held-out prompts, suites of published data sets, or other harnesses.

    evaluate_sets             the program, on the coordinator's rank
      begin                   the prompts and the reward of a set
      generate, score         responses and their rewards, which stay on the ranks
      report                  what is printed and written of the set
    evaluate_tasks            the same for tasks of other harnesses
      answer_rows             responses and log-probs for the harness's process
      report_task             what is printed and written of the task
    finish                    the table of all suites and tasks

There is one engine for all sets. Every suite has its own prompts, reward and samples.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megaverl.config import Config
from megaverl.config.run import RewardConfig, SourceConfig
from megaverl.controller.core import Controller
from megaverl.controller.groups import WorkerGroup, remote
from megaverl.controller.references import Ref
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.data.suites import IDENTITY, SUITES, Suite
from megaverl.data.tokenizers import Tokenizer
from megaverl.distributed.collectives import on_first_rank
from megaverl.errors import ConfigError
from megaverl.monitoring.console import Console
from megaverl.monitoring.evaluations import (
    HarnessResult,
    PromptResult,
    SuiteResult,
    TableResult,
    read_suites,
    table_rows,
    table_text,
    write_suite,
)
from megaverl.monitoring.timeline import Timeline
from megaverl.trainer.build import Builder
from megaverl.trainer.harness.engine_door import EngineDoor, evaluate_task
from megaverl.trainer.harness.engine_rows import (
    EngineAnswers,
    EngineRows,
    answer_rows,
)
from megaverl.trainer.job import Job, Stages
from megaverl.trainer.serving import serve_program
from megaverl.trainer.validation import (
    held_out_prompts,
    held_out_responses,
    measure_held_out,
)
from megaverl.workers.player import Player
from megaverl.workers.reward import RewardRole, Scores

HELD_OUT = "held_out"  # name of the set of held-out prompts


async def evaluate_sets(evaluators: EvaluatorGroup, sets: Sequence[str]) -> None:
    """Generate and score the responses to each set of prompts, and report on it."""
    for name in sets:
        await evaluators.begin(name)
        responses = await evaluators.generate()
        scores = await evaluators.score(responses)
        await evaluators.report_set(responses, scores)


async def evaluate_tasks(
    evaluators: EvaluatorGroup, config: Config, tokenizer: Tokenizer, *, chat: bool
) -> None:
    """Evaluate the tasks of other harnesses, and report on each.

    Args:
        chat: whether calls of the chat API can be answered.

    Raises:
        HarnessError: a harness is missing, failed, or did not end in time.
    """
    with EngineDoor(config, tokenizer, chat=chat) as door:
        for task in config.evaluation.harness_tasks:
            results = await evaluate_task(door, evaluators, task, config)
            for result in results or ():
                write_suite(config.run_dir, result)
                await evaluators.report_task(result.suite)


class EvaluatorGroup(WorkerGroup):
    """All ranks of a job that evaluates a model."""

    @remote
    def begin(self, name: str) -> None:
        """Prepare the prompts and the reward of a set."""

    @remote
    def generate(self) -> Ref[RolloutBatch]:
        """Generate `trainer.validation_samples` responses to each prompt of the set.

        The responses of every call have the same seeds, so that two evaluations differ
        only by the model.
        """

    @remote
    def score(self, responses: Ref[RolloutBatch]) -> Ref[Scores]:
        """Compute the rewards of the responses."""

    @remote
    def report_set(self, responses: Ref[RolloutBatch], scores: Ref[Scores]) -> None:
        """Print and write the results of the set."""

    @remote
    def answer_rows(self, rows: EngineRows) -> EngineAnswers:
        """Generate and score for the process of a harness."""

    @remote
    def report_task(self, name: str) -> None:
        """Print the results of a harness's task, which are in the run's folder."""

    @remote
    def finish(self) -> None:
        """Print and write what all sets have in common."""


def evaluate(
    builder: Builder, console: Console, job: Job, *, against: str | None
) -> None:
    """Evaluate a model on `evaluation.suites` and `evaluation.tasks`, or else on `data.validation`.

    Collective over all ranks.

    Args:
        against: folder of an earlier evaluation on suites or tasks, which the table compares with.

    Raises:
        ConfigError: there are no held-out prompts, or `against` has no results.
        HarnessError: a task of another harness failed.
    """
    config = builder.config
    stages = Stages(Timeline(), job)
    sets: Sequence[str] = config.evaluation.suites
    worker: Evaluator
    if config.evaluation.has_sets:
        worker = SuiteEvaluator(builder, console, stages, against)
    else:
        sets = [HELD_OUT]
        worker = HeldOutEvaluator(builder, console, stages)

    async def program(controller: Controller) -> None:
        everyone = range(controller.num_ranks)
        evaluators = EvaluatorGroup("evaluator", everyone, controller)
        await evaluate_sets(evaluators, sets)
        if config.evaluation.tasks:
            await evaluate_tasks(
                evaluators,
                config,
                builder.tokenizer,
                chat=builder.encoder().uses_chat_template,
            )
        await evaluators.finish()

    serve_program(
        program,
        {"evaluator": worker},
        config=config,
        stages=stages,
        console=console,
    )


class Evaluator(ABC):
    """Worker of one rank, with the methods that `EvaluatorGroup` calls. It creates the engine of the job.

    Attributes:
        config: configuration of the current set.
    """

    def __init__(self, builder: Builder, console: Console, stages: Stages) -> None:
        self._builder, self._console, self._stages = builder, console, stages
        self.config = builder.config
        self._rollout = builder.rollout(None)
        self._player: Player | None = None
        self._prompts: Sequence[PromptRecord] = ()
        self._reward: RewardRole

    @abstractmethod
    def begin(self, name: str) -> None:
        """Prepare the prompts and the reward of a set."""

    def generate(self) -> RolloutBatch:
        """Generate responses to each prompt of the set."""
        with self._stages("rollout"):
            return held_out_responses(
                self.config, self._rollout, self._prompts, self._player
            )

    def score(self, responses: RolloutBatch) -> Scores:
        """Compute the rewards of the responses."""
        with self._stages("reward"):
            return self._reward.score(responses)

    def answer_rows(self, rows: EngineRows) -> EngineAnswers:
        """Generate and score for the process of a harness."""
        with self._stages("rollout"):
            return answer_rows(self.config, self._rollout, rows)

    @abstractmethod
    def report_set(self, responses: RolloutBatch, scores: Scores) -> None:
        """Print and write the results of the set."""

    def finish(self) -> None:
        """Print and write what all sets have in common, if there is anything."""
        return

    def _write(self, metrics: Mapping[str, float]) -> None:
        (self.config.run_dir / "eval.json").write_text(
            json.dumps(metrics, indent=2) + "\n", encoding="utf-8"
        )


class HeldOutEvaluator(Evaluator):
    """Evaluator on the held-out prompts of the run."""

    def __init__(self, builder: Builder, console: Console, stages: Stages) -> None:
        validation = builder.config.data.validation
        if not validation:
            raise ConfigError(
                "data.validation: empty. Name the files of held-out prompts to evaluate on."
            )
        data = builder.dataset(validation)
        super().__init__(builder, console, stages)
        self._prompts = held_out_prompts(self.config, data)
        self._reward = builder.reward()
        if note := self._reward.reward.accuracy_note:
            console.print(note)
        self._player = builder.player()

    def begin(self, name: str) -> None:
        return

    def report_set(self, responses: RolloutBatch, scores: Scores) -> None:
        metrics = measure_held_out(self.config, self._reward, responses, scores).metrics
        if dist.get_rank() == 0:
            self._write(metrics)
        for name, value in metrics.items():
            self._console.print(f"{name.removeprefix('validation/'):20} {value:.4f}")


class SuiteEvaluator(Evaluator):
    """Evaluator on suites of published data sets, and on tasks of other harnesses."""

    def __init__(
        self, builder: Builder, console: Console, stages: Stages, against: str | None
    ) -> None:
        # Read first: a missing folder must not show only after hours of generation.
        if against and not on_first_rank(lambda: len(read_suites(Path(against)))):
            raise ConfigError(
                f"--against: {against} has no results of suites. Evaluate that model first."
            )
        super().__init__(builder, console, stages)
        self._against = against
        self._suite = ""
        self._results: list[TableResult] = []

    def begin(self, name: str) -> None:
        self._suite = name
        builder = copy.copy(self._builder)
        self.config = builder.config = suite_config(self._builder.config, SUITES[name])
        dataset = builder.dataset(self.config.data.validation)
        self._reward = builder.reward()
        self._prompts = [dataset[index] for index in range(len(dataset))]

    def report_set(self, responses: RolloutBatch, scores: Scores) -> None:
        name, pass_at = self._suite, list(self.config.evaluation.pass_at)
        results = prompt_results(
            SUITES[name], self._prompts, responses, scores, self._reward
        )
        result = SuiteResult(name, results, pass_at)
        on_first_rank(partial(write_suite, self.config.run_dir, result))
        self._results.append(result)
        if result.num_unscored:
            self._console.warn(
                f"{name}: {result.num_unscored} prompts are left out, as a response could not be scored."
            )
        self._console.print(
            f"{name}: {len(result.prompts)} prompts, {result.num_samples} responses each, mean length "
            f"{result.length:.0f} tokens, {result.finished:.0%} finished"
        )

    def report_task(self, name: str) -> None:
        """Print the results of a harness's task."""
        # The program has written them, on the coordinator's rank.
        if dist.get_rank() == 0:
            result = read_suites(self.config.run_dir)[name]
            self._results.append(result)
            self._console.print(task_summary(result))

    def finish(self) -> None:
        self._console.print(on_first_rank(self._write_table))

    def _write_table(self) -> str:
        """Write the metrics of all suites, and return their table."""
        confidence = self.config.evaluation.confidence
        earlier = read_suites(Path(self._against)) if self._against else {}
        rows = list(table_rows(self._results, earlier, confidence))
        metrics = {f"{row.suite}/{row.metric}": row.estimate.value for row in rows}
        self._write(metrics)
        return table_text(rows, confidence)


def task_summary(result: TableResult) -> str:
    """Return one line about the results of a harness's task."""
    if not isinstance(result, HarnessResult):
        return result.suite
    version = f", version {result.version}" if result.version else ""
    return f"{result.suite}: {result.num_samples} samples by {result.harness}{version}"


def suite_config(config: Config, suite: Suite) -> Config:
    """Return the run's configuration with the prompts, the reward and the samples of one suite."""
    evaluation = config.evaluation
    source = SourceConfig(path=evaluation.source(suite.name, config.run.seed))
    data = config.data.model_copy(
        update={"validation": [source], "prompt_key": "prompt", "answer_key": "answer"}
    )
    options_by_suite = {
        str(name): options for name, options in evaluation.options.items()
    }
    options = {**suite.options, **options_by_suite.get(suite.name, {})}
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
