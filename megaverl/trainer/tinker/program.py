"""Program of the server: takes the clients' requests in order of arrival, and calls the workers.

serve_requests     the loop, on the coordinator's rank
  QueuedRequest              one request: makes the calls, and gives the result to the client
  QueuedSamples        one request for samples. All that wait for the same weights are generated together
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaverl.controller.groups import WorkerGroup, remote
from megaverl.trainer.tinker.messages import (
    CallOutcome,
    LossRequest,
    PromptRows,
    SavedWeights,
    TokenRows,
)
from megaverl.trainer.tinker.promises import Promise, RequestFailed
from megaverl.workers.adapter_slots import AdamStep

logger = logging.getLogger(__name__)

# Time to wait for further requests for samples, which clients send one by one.
TOGETHER_SECONDS = 0.05
# Time between two looks at whether the server is to end.
IDLE_SECONDS = 0.25


class AdapterGroup(WorkerGroup):
    """All ranks of the server. Each holds its part of the model, of all adapters, and of an engine."""

    @remote
    def create(self, model: str, seed: int) -> CallOutcome:
        """Create new adapters with the initial values of a seed."""

    @remote
    def drop(self, model: str) -> None:
        """Free the adapters of a model."""

    @remote
    def forward_backward(
        self, model: str, rows: TokenRows, loss: LossRequest, *, trains: bool
    ) -> CallOutcome:
        """Compute log-probs and loss of rows of tokens, and with `trains` add the gradient to the model's."""

    @remote
    def step(self, model: str, settings: AdamStep) -> CallOutcome:
        """Take one optimizer step on the model's gradients."""

    @remote
    def save_state(self, model: str, folder: str) -> CallOutcome:
        """Save adapters and optimizer state."""

    @remote
    def load_state(
        self, model: str, folder: str, *, with_optimizer: bool
    ) -> CallOutcome:
        """Load a saved state. If that fails, the model keeps what it had."""

    @remote
    def save_adapter(self, model: str, folder: str) -> CallOutcome:
        """Save the adapters in peft's format."""

    @remote
    def sample(self, weights: SavedWeights, rows: PromptRows) -> CallOutcome:
        """Sample one response for each prompt."""

    @remote
    def score(self, weights: SavedWeights, rows: TokenRows) -> CallOutcome:
        """Compute the log-probs of given tokens."""


@dataclass
class QueuedRequest:
    """One request in the queue.

    Attributes:
        promise: receives the result.
        run: makes the calls, and returns the result.
    """

    promise: Promise
    run: Callable[[AdapterGroup], Awaitable[Any]]


@dataclass
class QueuedSamples:
    """One request for samples in the queue.

    Attributes:
        promise: receives the result.
        weights: adapters to sample with.
        rows: prompts, one for each sample.
        scored: tokens whose log-probs are wanted besides. None: none are.
        make: makes the result from the responses, and from the log-probs of `scored`.
    """

    promise: Promise
    weights: SavedWeights
    rows: PromptRows
    scored: TokenRows | None
    make: Callable[[CallOutcome, list[float] | None], Any]


@dataclass
class RequestQueue:
    """Queue from the threads of the HTTP server to the program. Created in the program's event loop."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _jobs: list[QueuedRequest | QueuedSamples] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, job: QueuedRequest | QueuedSamples) -> None:
        """Append a request. Any thread may call it."""
        self.loop.call_soon_threadsafe(self._append, job)

    def _append(self, job: QueuedRequest | QueuedSamples) -> None:
        self._jobs.append(job)
        self._arrived.set()

    async def take(self, seconds: float) -> QueuedRequest | list[QueuedSamples] | None:
        """Return the next request, or all requests that sample with the same weights. None: none came in time.

        Saved weights do not change, so a later request for samples may be answered
        before other requests.
        """
        if not self._jobs:
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), seconds)
            except TimeoutError:
                return None
        if isinstance(self._jobs[0], QueuedSamples):
            await asyncio.sleep(TOGETHER_SECONDS)
        first = self._jobs[0]
        if isinstance(first, QueuedRequest):
            del self._jobs[0]
            return first
        together: list[QueuedSamples] = []
        others: list[QueuedRequest | QueuedSamples] = []
        for job in self._jobs:
            if isinstance(job, QueuedSamples) and job.weights == first.weights:
                together.append(job)
            else:
                others.append(job)
        self._jobs = others
        return together


async def serve_requests(
    adapters: AdapterGroup,
    queue: RequestQueue,
    tick: Callable[[], Sequence[str]],
    stops: Callable[[], bool],
) -> None:
    """Answer requests until the server is to end.

    Args:
        tick: called between requests. Returns models that have expired.
        stops: returns whether the server is to end.
    """
    while not stops():
        jobs = await queue.take(IDLE_SECONDS)
        if isinstance(jobs, QueuedRequest):
            await _run(jobs, adapters)
        elif jobs is not None:
            await _sample(
                [job for job in jobs if not job.promise.is_cancelled], adapters
            )
        for model in tick():
            await adapters.drop(model)


async def _run(job: QueuedRequest, adapters: AdapterGroup) -> None:
    try:
        job.promise.fulfil(await job.run(adapters))
    except RequestFailed as error:
        job.promise.fail(error)


async def _sample(jobs: Sequence[QueuedSamples], adapters: AdapterGroup) -> None:
    """Answer requests that sample with the same weights, by one call to the engines."""
    if not jobs:
        return
    weights = jobs[0].weights
    try:
        sampled = succeeded(
            await adapters.sample(weights, _joined([job.rows for job in jobs]))
        )
        first = 0
        for job in jobs:
            last = first + len(job.rows.prompts)
            responses = CallOutcome(
                tokens=sampled.tokens[first:last],
                log_probs=sampled.log_probs[first:last],
                stopped=sampled.stopped[first:last],
            )
            first = last
            scores = None
            if job.scored is not None:
                [scores] = succeeded(
                    await adapters.score(weights, job.scored)
                ).log_probs
            job.promise.fulfil(job.make(responses, scores))
    except RequestFailed as error:
        for job in jobs:
            job.promise.fail(error)


def _joined(parts: Sequence[PromptRows]) -> PromptRows:
    fields = {
        name: [value for part in parts for value in getattr(part, name)]
        for name in PromptRows.__dataclass_fields__
    }
    return PromptRows(**fields)


def succeeded(outcome: CallOutcome) -> CallOutcome:
    """Return an outcome that is no refusal.

    Raises:
        RequestFailed: the workers have refused the request.
    """
    if outcome.error:
        raise RequestFailed(outcome.error)
    return outcome
