"""Program of an evaluation by a harness: its process runs, and its calls are answered by the run's engines.

evaluate_task        one task, from the start of its process to its results
  EngineDoor.answer  one request to the engines, for all calls that wait
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from megaverl.config import Config
from megaverl.config.evaluation import HarnessTask
from megaverl.controller.references import PendingCall
from megaverl.data.tokenizers import Tokenizer
from megaverl.monitoring.evaluations import HarnessResult
from megaverl.rollout.environments.conversation import CallRefused
from megaverl.trainer.harness.engine_rows import (
    EngineAnswers,
    EngineRows,
    evaluation_sampling,
)
from megaverl.trainer.harness.harness_process import HarnessProcess, HarnessRequest
from megaverl.trainer.harness.openai_calls import CallChoice, CallReader, OpenCall
from megaverl.trainer.harness.openai_server import OpenAIServer

# Time to wait for further calls, which a harness sends in parallel.
TOGETHER_SECONDS = 0.02
# Time between two looks at the harness's process.
IDLE_SECONDS = 0.1
# Most choices in one request to the engines, and most tokens of their prompts, which
# travel in control messages. One choice may have more.
MOST_ROWS = 256
MOST_TOKENS = 2**17
MODEL = "policy"  # the model's name for harnesses


class AnsweringGroup(Protocol):
    """Worker group whose ranks have the engines."""

    def answer_rows(self, rows: EngineRows) -> PendingCall[EngineAnswers]:
        """Generate and score (`engine_rows.answer_rows`)."""


class EngineDoor:
    """Server of OpenAI's API whose calls the program answers. Created in the program's event loop.

    Args:
        chat: whether the tokenizer has a chat template that is to be used.

    Example:
        with EngineDoor(config, tokenizer, chat=True) as door:
            while process.is_running:
                await door.answer(evaluators)
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, chat: bool) -> None:
        self._seed = config.run.seed
        self._tokenizer = tokenizer
        self._waiting: list[OpenCall] = []
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        reader = CallReader(
            tokenizer,
            chat=chat,
            sampling=evaluation_sampling(config),
            most_tokens=config.max_tokens,
            model=MODEL,
        )
        self._reader = reader
        self.server = OpenAIServer(reader, self._submit)

    def __enter__(self) -> EngineDoor:
        return self

    def __exit__(self, *error: object) -> None:
        self.refuse_waiting()
        self.server.close()

    def _submit(self, call: OpenCall) -> None:
        """Append a call. The threads of the server call it."""
        self._loop.call_soon_threadsafe(self._append, call)

    def _append(self, call: OpenCall) -> None:
        self._waiting.append(call)
        self._arrived.set()

    def refuse_waiting(self) -> None:
        """Refuse all calls that wait, because their harness has ended."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.answer.set_exception(CallRefused("the evaluation has ended.", 503))

    async def answer(self, engines: AnsweringGroup) -> None:
        """Send one request to the engines for the calls that wait, and answer those that are complete.

        Returns after `IDLE_SECONDS` if no call waits.
        """
        if not self._waiting:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), IDLE_SECONDS)
            except TimeoutError:
                return
            await asyncio.sleep(TOGETHER_SECONDS)
        choices = self._next_choices()
        scored = [
            choice for choice in choices if choice.is_scored and choice.score is None
        ]
        generated = [choice for choice in choices if choice.needs_tokens]
        answers = await engines.answer_rows(self._rows(generated, scored))
        with self._reader.lock:
            for choice, score in zip(scored, answers.scores, strict=True):
                choice.add_score(score, self._tokenizer)
            for choice, tokens, log_probs, stopped in zip(
                generated,
                answers.tokens,
                answers.log_probs,
                answers.stopped,
                strict=True,
            ):
                choice.add_piece(tokens, log_probs, stopped, self._tokenizer)
        complete = [call for call in self._waiting if call.is_complete]
        self._waiting = [call for call in self._waiting if not call.is_complete]
        for call in complete:
            call.answer.set_result(self._reader.write(call))

    def _next_choices(self) -> list[CallChoice]:
        """Return the choices of the next request, in order of arrival."""
        choices: list[CallChoice] = []
        num_tokens = 0
        for call in self._waiting:
            for choice in call.choices:
                if choice.finish_reason:
                    continue
                num_tokens += len(choice.prompt) + len(choice.tokens)
                if choices and (len(choices) == MOST_ROWS or num_tokens > MOST_TOKENS):
                    return choices
                choices.append(choice)
        return choices

    def _rows(
        self, generated: Sequence[CallChoice], scored: Sequence[CallChoice]
    ) -> EngineRows:
        return EngineRows(
            # A response that goes on is read together with its prompt.
            prompts=[[*choice.prompt, *choice.tokens] for choice in generated],
            seeds=[choice.seed(self._seed) for choice in generated],
            max_tokens=[choice.piece_tokens for choice in generated],
            temperatures=[choice.temperature for choice in generated],
            top_ps=[choice.top_p for choice in generated],
            top_ks=[choice.top_k for choice in generated],
            scored=[choice.prompt for choice in scored],
        )


async def evaluate_task(
    door: EngineDoor,
    engines: AnsweringGroup,
    task: HarnessTask,
    config: Config,
    stops: Callable[[], bool] = lambda: False,
) -> list[HarnessResult] | None:
    """Run one task of a harness on the engines.

    Args:
        stops: returns whether the run is to end. The task is then given up.

    Returns:
        The results of the task, or of each of its parts. None: the task was given up.

    Raises:
        HarnessError: the harness is missing, failed, or did not end in time.
    """
    evaluation = config.evaluation
    request = HarnessRequest(
        task=task,
        base_url=door.server.url,
        token=door.server.token,
        model=MODEL,
        most_tokens=config.max_tokens,
        limit=evaluation.limit,
        seed=config.run.seed,
        options=evaluation.options_of(task.harness),
        python=evaluation.harness_python,
        minutes=evaluation.harness_minutes,
    )
    door.server.last_refusal = ""
    try:
        with HarnessProcess(request, config.run_dir) as process:
            while process.is_running:
                if stops():
                    return None
                process.check_deadline(door.server.last_refusal)
                await door.answer(engines)
            return process.results(door.server.last_refusal)
    finally:
        # A harness may leave calls behind.
        door.refuse_waiting()


def metrics_of(results: Sequence[HarnessResult]) -> dict[str, float]:
    """Return the scores of tasks as metrics of a run: evaluation/TASK/METRIC."""
    return {
        f"evaluation/{result.suite}/{score.metric}": score.value
        for result in results
        for score in result.scores
    }
