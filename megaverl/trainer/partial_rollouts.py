"""Responses that continue over a weight update: partial rollouts and in-flight updates.

With partial rollouts, a step takes the groups that finish first, and the others
continue after the update. With in-flight updates, engines that run ahead of training
receive new weights in the middle of their responses.

Source: Kimi k1.5, arXiv 2501.12599, section 2.6.2. As in PipelineRL, arXiv 2509.19128,
one response may contain tokens of several weight versions, and each token is weighted
by the log-prob that it was drawn with.

More groups are in progress than a step takes. In each round, every unfinished response
grows by `chunk_tokens`. The step has its samples after the first round in which enough
groups are finished. The order in which groups finish depends only on their numbers of
tokens, not on timing, on the number of engines or on cache sizes. Within a step, an
engine finds earlier tokens in its prefix cache. After a weight update, it recomputes
their keys and values.

Every rank holds all groups in progress, which are the same on all ranks: tokens and
log-probs, no device tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megaverl.config import Config
from megaverl.data import batch_io
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.errors import DataError, RolloutError
from megaverl.rollout.engine import (
    Generation,
    Sampling,
    SamplingOptions,
    drawing,
    options_by_prompt,
)
from megaverl.workers.responses import Draws, Metrics, rollout_batch, rollout_metrics
from megaverl.workers.rollout import AgentRollouts, Rollout

PARTIAL_FILE = "partial.safetensors"  # in a checkpoint
_FACTS = "partial"  # column of the saved batch


@dataclass
class PartialResponse:
    """Response that may be unfinished.

    Attributes:
        log_probs, versions: for each token, the log-prob that it was drawn with and the weight version.
        rounds: number of engine requests so far. Each request draws with another seed.
        finish_reason: "stop" or "length", or empty while the response is unfinished.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rounds: int = 0
    finish_reason: str = ""

    def append(self, part: Generation, version: int, max_tokens: int) -> None:
        """Append the tokens that an engine generated.

        Args:
            version: version of the weights that generated them.
            max_tokens: limit of the whole response. At the limit the response is finished.
        """
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.versions += [version] * len(part.token_ids)
        self.rounds += 1
        if part.finish_reason == "stop" or len(self.token_ids) >= max_tokens:
            self.finish_reason = part.finish_reason

    def restart(self) -> None:
        """Drop all tokens. The next draws use other seeds, because `rounds` is kept."""
        self.token_ids, self.log_probs, self.versions, self.finish_reason = (
            [],
            [],
            [],
            "",
        )


@dataclass
class PartialGroup:
    """Responses to one prompt.

    Attributes:
        step, number: step in which the group began, and the prompt's position among the prompts of that step.
        sampling: options of each response.
    """

    prompt: PromptRecord
    step: int
    number: int
    sampling: Sequence[SamplingOptions]
    responses: list[PartialResponse]

    @property
    def is_finished(self) -> bool:
        """Return whether all responses are finished."""
        return all(response.finish_reason for response in self.responses)

    def oldest(self, version: int) -> int:
        """Return the version of the oldest token, or `version` if there is no token yet."""
        return min(
            (min(response.versions, default=version) for response in self.responses),
            default=version,
        )


# Maps prompts and their draws to the sampling options of the responses.
Sampled = Callable[[Sequence[PromptRecord], Draws], Sampling]


class GroupsInProgress:
    """Responses that continue over a weight update.

    Args:
        sampled: returns the sampling options of the responses to prompts.
    """

    def __init__(self, config: Config, sampled: Sampled) -> None:
        self.config, self._sampled = config, sampled
        self.groups: list[PartialGroup] = []
        # Equal options share one object, because an engine processes requests with the
        # same options together.
        self._ways: dict[str, SamplingOptions] = {}

    @property
    def room(self) -> int:
        """Return the number of prompts that the next step takes."""
        return self.config.data.prompts_per_step

    def _draws(self, step: int, number: int) -> Draws:
        return Draws(
            self.config.run.seed, step, self.config.algorithm.group_size, number
        )

    def _group(self, prompt: PromptRecord, step: int, number: int) -> PartialGroup:
        draws = self._draws(step, number)
        options = options_by_prompt(self._sampled([prompt], draws), draws.group_size)
        return PartialGroup(
            prompt,
            step,
            number,
            [self._ways.setdefault(repr(sampling), sampling) for sampling in options],
            [],
        )

    def _begin(self, prompts: Sequence[PromptRecord], step: int) -> None:
        for number, prompt in enumerate(prompts):
            # The response so far becomes part of the prompt, in which image
            # placeholders are counted.
            if prompt.images:
                raise RolloutError(
                    "rollout.partial and rollout.in_flight_updates do not support prompts with images: they continue a "
                    "response as a longer prompt, which would shift the images. Remove the key."
                )
            group = self._group(prompt, step, number)
            group.responses = [PartialResponse() for _ in group.sampling]
            self.groups.append(group)

    def _round(self, rollout: Rollout, version: int, most: int) -> int:
        """Extend every unfinished response by at most `most` tokens. Return the number of new tokens.

        Args:
            version: version of the engine's weights.
        """
        going = [
            (place, group, number)
            for place, group in enumerate(self.groups)
            # Finished responses of unfinished groups wait for the rest of their group.
            for number, response in enumerate(group.responses)
            if not response.finish_reason
        ]
        # Share equal options among requests, so that the engine handles these together.
        limited: dict[tuple[SamplingOptions, int], SamplingOptions] = {}
        prompts, sampling, seeds = [], [], []
        for _, group, number in going:
            options, response = group.sampling[number], group.responses[number]
            prompts.append([*group.prompt.token_ids, *response.token_ids])
            chunk = min(most, options.max_tokens - len(response.token_ids))
            sampling.append(
                limited.setdefault((options, chunk), options.with_max_tokens(chunk))
            )
            # The seed depends only on the sample and its number of rounds, not on other
            # requests in progress.
            seeds.append(
                self._draws(group.step, group.number).seed(number, response.rounds)
            )
        # All responses of a group go to the same engine in every round, which has their
        # keys and values in its cache.
        parts = rollout.generate(
            prompts, sampling, seeds, conversations=[place for place, *_ in going]
        )
        for (_, group, number), part in zip(going, parts, strict=True):
            group.responses[number].append(
                part, version, group.sampling[number].max_tokens
            )
        return sum(len(part.token_ids) for part in parts)

    def _measured(
        self, rollout: Rollout, batch: RolloutBatch, seconds: float, generated: int
    ) -> Metrics:
        metrics = (
            rollout_metrics(batch, seconds, rollout.weight_version)
            | rollout.engine_metrics()
        )
        return metrics | {"rollout/throughput_tokens_per_sec": generated / seconds}

    def _finished(self, groups: Sequence[PartialGroup]) -> RolloutBatch:
        options = [sampling for group in groups for sampling in group.sampling]
        batch = _batch(groups)
        # Without adaptive sampling all responses have the same options, of which one is
        # enough.
        return batch.with_(
            **drawing(
                options if self.config.rollout.adaptive_sampling else options[0],
                len(batch),
            )
        )

    def restart(self) -> None:
        """Restart every response from its prompt, with the current sampling options."""
        self.groups = [
            self._group(group.prompt, group.step, group.number) for group in self.groups
        ]
        for group in self.groups:
            group.responses = [PartialResponse() for _ in group.sampling]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the groups as the contents of a file."""
        batch = _batch(self.groups)
        facts = [
            {
                "began": [group.step, group.number],
                "rounds": response.rounds,
                # The prompt is stored once for each group, with its first response.
                "prompt": {} if number else _record(group.prompt),
            }
            for group in self.groups
            for number, response in enumerate(group.responses)
        ]
        kept = RolloutBatch(
            batch.tensors,
            {_FACTS: facts, "finish_reason": batch.columns["finish_reason"]},
        )
        return batch_io.to_bytes(kept)

    def read(self, path: Path) -> None:
        """Restore groups from a file with the contents of `to_bytes`.

        Raises:
            DataError: the file is missing or damaged.
        """
        batch = batch_io.load(path)
        try:
            self.groups = []
            for row, facts in enumerate(batch.columns[_FACTS]):
                length = int(batch.response_lengths[row])
                response = PartialResponse(
                    batch.generated_ids[row, :length].tolist(),
                    batch.rollout_log_probs[row, :length].tolist(),
                    batch.weight_versions[row, :length].tolist(),
                    int(facts["rounds"]),
                    batch.columns["finish_reason"][row],
                )
                # A response with a prompt is the first of its group.
                if facts["prompt"]:
                    token_ids = batch.input_ids[
                        row, : int(batch.prompt_lengths[row])
                    ].tolist()
                    prompt, (step, number) = (
                        PromptRecord(token_ids=token_ids, **facts["prompt"]),
                        facts["began"],
                    )
                    self.groups.append(self._group(prompt, step, number))
                self.groups[-1].responses.append(response)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"{path}: these are no unfinished responses: {type(error).__name__}: {error}"
            ) from error


class PartialRollouts(GroupsInProgress):
    """Partial rollouts (`rollout.partial`), which keep more groups in progress than a step takes."""

    def __init__(self, config: Config, sampled: Sampled) -> None:
        super().__init__(config, sampled)
        assert config.rollout.partial is not None
        self.settings = config.rollout.partial
        self.wanted = config.data.prompts_per_step
        self.limit = config.rollout.max_staleness
        # Version of the weights that filled the engine's prefix cache.
        self._version: int | None = None

    @property
    def room(self) -> int:
        """Return the number of new prompts, so that `over_sample` times a step's groups are in progress."""
        return max(0, self.settings.num_groups(self.wanted) - len(self.groups))

    def run(
        self,
        rollout: Rollout | AgentRollouts,
        prompts: Sequence[PromptRecord],
        step: int,
    ) -> tuple[RolloutBatch, Metrics]:
        """Generate in rounds until a step's groups are finished. Remove and return them.

        Returns:
            The finished samples, and the metrics of the rollout.
        """
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start, version, rounds, generated = (
            time.perf_counter(),
            rollout.weight_version,
            0,
            0,
        )
        self._begin(prompts, step)
        if version == self._version and not self.config.rollout.sleep:
            # New weights would have reset the cache. Without them it is reset here, as
            # a run that resumes here starts with an empty one.
            rollout.engine.reset_prefix_cache()
        self._version = version
        restarted = self._restart_stale(version)
        with rollout.awake():
            while (taken := self._taken(version)) is None:
                generated += self._round(rollout, version, self.settings.chunk_tokens)
                rounds += 1
        self.groups = _without(self.groups, taken)
        batch, seconds = self._finished(taken), time.perf_counter() - start
        return batch, {
            **self._measured(rollout, batch, seconds, generated),
            **age_metrics(batch, version),
            "rollout/rounds": float(rounds),
            "rollout/generated_tokens": float(generated),
            "rollout/kept_groups": float(len(self.groups)),
            "rollout/kept_tokens": float(
                sum(len(r.token_ids) for group in self.groups for r in group.responses)
            ),
            "rollout/restarted": float(restarted),
        }

    def _taken(self, version: int) -> list[PartialGroup] | None:
        """Return the oldest finished groups, as many as a step takes.

        Returns:
            None if too few groups are finished, or if unfinished groups would exceed `max_staleness` when they wait
            longer.
        """
        finished = [group for group in self.groups if group.is_finished]
        # Oldest tokens first, so that no group waits longer than necessary. Step and
        # number make the order unique.
        finished.sort(
            key=lambda group: (group.oldest(version), group.step, group.number)
        )
        if len(finished) < self.wanted:
            return None
        taken = finished[: self.wanted]
        if self.settings.when_stale == "finish" and len(finished) < len(self.groups):
            # Every later step takes `wanted` groups, so no more groups than these may
            # become due by that step.
            ages = [
                version - group.oldest(version)
                for group in _without(self.groups, taken)
            ]
            for later in range(self.limit + 1):
                if sum(age + later >= self.limit for age in ages) > later * self.wanted:
                    return None
        return taken

    def _restart_stale(self, version: int) -> int:
        """Restart responses that have a token too old to be trained on. Return their number.

        With `when_stale: finish` there are none, unless `max_staleness` was lowered
        before a resume.
        """
        stale = [
            response
            for group in self.groups
            for response in group.responses
            if version - min(response.versions, default=version) > self.limit
        ]
        for response in stale:
            response.restart()
        return len(stale)


class InFlightUpdates(GroupsInProgress):
    """In-flight updates (`rollout.in_flight_updates`): the engines receive new weights once within each response.

    A run that leaves between `begin` and `finish` saves `groups` in its checkpoint and
    continues from there.

    Attributes:
        trains_from: version of the weights from which the step that is being generated will be trained.
    """

    trains_from: int = 0
    _num_tokens = 0  # tokens generated for the running step
    _seconds = 0.0  # seconds that their generation took

    def begin(
        self,
        rollout: Rollout | AgentRollouts,
        prompts: Sequence[PromptRecord],
        step: int,
    ) -> None:
        """Generate the first `in_flight_tokens` of each response, unless they were restored from a checkpoint.

        The default is half of `max_tokens`.
        """
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start, settings = time.perf_counter(), self.config.rollout
        self._num_tokens = 0
        if not self.groups:
            # Half of `max_tokens`, rounded up.
            half = -(-self.config.max_response_tokens // 2)
            self._begin(prompts, step)
            self._num_tokens = self._round(
                rollout, rollout.weight_version, settings.in_flight_tokens or half
            )
        self._seconds = time.perf_counter() - start

    def finish(self, rollout: Rollout | AgentRollouts) -> tuple[RolloutBatch, Metrics]:
        """Generate the rest of each response. Return the samples, with the versions of their tokens, and metrics."""
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start = time.perf_counter()
        num_tokens = self._num_tokens + self._round(
            rollout, rollout.weight_version, self.config.max_response_tokens
        )
        batch, self.groups = self._finished(self.groups), []
        seconds = self._seconds + time.perf_counter() - start
        measured = self._measured(rollout, batch, seconds, num_tokens)
        return batch, measured | age_metrics(batch, self.trains_from)


def _without(
    groups: Sequence[PartialGroup], removed_groups: Sequence[PartialGroup]
) -> list[PartialGroup]:
    # Compare by identity, because two groups of the same prompt may be equal.
    removed = set(map(id, removed_groups))
    return [group for group in groups if id(group) not in removed]


def _record(prompt: PromptRecord) -> dict[str, object]:
    """Return the fields of a prompt that the batch does not hold, as JSON-compatible values."""
    return {
        name: value
        for name, value in vars(prompt).items()
        if name not in ("token_ids", "images")
    }


def _batch(groups: Sequence[PartialGroup]) -> RolloutBatch:
    """Return the responses of all groups as one batch. Groups are numbered in order."""
    rows = [
        (number, group, response)
        for number, group in enumerate(groups)
        for response in group.responses
    ]
    batch = rollout_batch(
        [group.prompt for _, group, _ in rows],
        [
            Generation(response.token_ids, response.log_probs, response.finish_reason)
            for _, _, response in rows
        ],
        [number for number, _, _ in rows],
    )
    versions = torch.full_like(batch.generated_ids, -1)
    for row, (_, _, response) in enumerate(rows):
        versions[row, : len(response.versions)] = torch.tensor(
            response.versions, dtype=torch.int64
        )
    return batch.with_(weight_versions=versions)


def age_metrics(batch: RolloutBatch, version: int) -> Metrics:
    """Return metrics of token ages: the number of updates between a token's weights and `version`."""
    ages = (version - batch.weight_versions[batch.response_mask]).double()
    return {
        "rollout/staleness": float(ages.max()),
        "rollout/token_staleness_mean": float(ages.mean()),
        "rollout/older_token_share": float((ages > 0).double().mean()),
    }
