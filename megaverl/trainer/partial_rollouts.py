"""Responses that go on over an update. Partial rollouts: a step takes the groups that are finished first, and the
others go on after the update. Updates in flight: engines that are ahead of training take new weights while they write.

Source: Kimi k1.5, arXiv 2501.12599, section 2.6.2; with tokens of several versions in one response, and each weighed by
the log-prob that it was drawn with, as in PipelineRL, arXiv 2509.19128.

More groups are in progress than a step takes. In rounds every unfinished response goes on by `chunk_tokens`; after the
first round in which enough groups are finished the step has its samples. So who is first depends on the numbers of
tokens alone: not on the clock, on how many engines there are, or on what fits into their caches. Inside a step an
engine finds what it has computed in its prefix cache; after new weights keys and values of kept tokens are computed
anew.

Every rank holds all that is in progress, as it is the same on all: tokens and log-probs, no tensors of a device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megaverl.config import Config
from megaverl.data import batch_io
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.errors import DataError, RolloutError
from megaverl.rollout.engine import Generation, Sampling, SamplingOptions, drawing, of_each
from megaverl.workers.responses import Draws, Metrics, rollout_batch, rollout_metrics
from megaverl.workers.rollout import AgentRollouts, Rollout

PARTIAL_FILE = "partial.safetensors"  # in a checkpoint
_FACTS = "partial"  # its column


@dataclass
class PartialResponse:
    """What there is of a response.

    Attributes:
        log_probs, versions: of each token: the log-prob that it was drawn with, and the version of the weights.
        rounds: requests that it took part in, whose draws have seeds of their own.
        finish_reason: "stop" or "length"; empty: it goes on.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rounds: int = 0
    finish_reason: str = ""

    def append(self, part: Generation, version: int, max_tokens: int) -> None:
        """What an engine has written next."""
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.versions += [version] * len(part.token_ids)
        self.rounds += 1
        if part.finish_reason == "stop" or len(self.token_ids) >= max_tokens:
            self.finish_reason = part.finish_reason

    def restart(self) -> None:
        """Back to the prompt; the next draws are others."""
        self.token_ids, self.log_probs, self.versions, self.finish_reason = [], [], [], ""


@dataclass
class PartialGroup:
    """The responses to one prompt.

    Attributes:
        step, number: the step that it began in, and its place among the prompts that this one took.
        sampling: of each response.
    """

    prompt: PromptRecord
    step: int
    number: int
    sampling: Sequence[SamplingOptions]
    responses: list[PartialResponse]

    @property
    def is_finished(self) -> bool:
        return all(response.finish_reason for response in self.responses)

    def oldest(self, version: int) -> int:
        """Version of the oldest token; of a group without any, the one that is about to generate."""
        return min((min(one.versions, default=version) for one in self.responses), default=version)


# Prompts, and their draws -> how their responses are drawn.
Sampled = Callable[[Sequence[PromptRecord], Draws], Sampling]


class GroupsInProgress:
    """Responses that go on over an update of the weights.

    Args:
        sampled: how the responses to prompts are drawn.
    """

    def __init__(self, config: Config, sampled: Sampled) -> None:
        self.config, self._sampled = config, sampled
        self.groups: list[PartialGroup] = []
        self._ways: dict[str, SamplingOptions] = {}  # equal ones are one: an engine handles these together

    @property
    def room(self) -> int:
        """Prompts that the next step takes."""
        return self.config.data.prompts_per_step

    def _draws(self, step: int, number: int) -> Draws:
        return Draws(self.config.run.seed, step, self.config.algorithm.group_size, number)

    def _group(self, prompt: PromptRecord, step: int, number: int) -> PartialGroup:
        draws = self._draws(step, number)
        ways = of_each(self._sampled([prompt], draws), draws.group_size)
        return PartialGroup(prompt, step, number, [self._ways.setdefault(repr(way), way) for way in ways], [])

    def _begin(self, prompts: Sequence[PromptRecord], step: int) -> None:
        for number, prompt in enumerate(prompts):
            if prompt.images:
                raise RolloutError(
                    "rollout.partial and rollout.in_flight_updates go on with a response as with a longer prompt, and "
                    "the prompts have images, whose places are counted in it. Leave one of the two out."
                )
            group = self._group(prompt, step, number)
            group.responses = [PartialResponse() for _ in group.sampling]
            self.groups.append(group)

    def _round(self, rollout: Rollout, version: int, most: int) -> int:
        """Every unfinished response goes on by `most` tokens, if it does not end before; the number of new tokens."""
        going = [
            (place, number)
            for place, group in enumerate(self.groups)
            for number, response in enumerate(group.responses)
            if not response.finish_reason
        ]
        limited: dict[tuple[SamplingOptions, int], SamplingOptions] = {}
        prompts, sampling, seeds = [], [], []
        for place, number in going:
            group = self.groups[place]
            way, response = group.sampling[number], group.responses[number]
            prompts.append([*group.prompt.token_ids, *response.token_ids])
            chunk = min(most, way.max_tokens - len(response.token_ids))
            sampling.append(limited.setdefault((way, chunk), way.with_max_tokens(chunk)))
            seeds.append(self._draws(group.step, group.number).seed(number, response.rounds))
        # the same engine goes on with a group: it has its keys and values
        parts = rollout.generate(prompts, sampling, seeds, conversations=[place for place, _ in going])
        for (place, number), part in zip(going, parts, strict=True):
            group = self.groups[place]
            group.responses[number].append(part, version, group.sampling[number].max_tokens)
        return sum(len(part.token_ids) for part in parts)

    def _measured(self, rollout: Rollout, batch: RolloutBatch, seconds: float, generated: int) -> Metrics:
        found = rollout_metrics(batch, seconds, rollout.weight_version) | rollout.engine_metrics()
        return found | {"rollout/throughput_tokens_per_sec": generated / seconds}

    def _finished(self, groups: Sequence[PartialGroup]) -> RolloutBatch:
        ways = [way for group in groups for way in group.sampling]
        batch = _batch(groups)
        return batch.with_(**drawing(ways if self.config.rollout.adaptive_sampling else ways[0], len(batch)))

    def restart(self) -> None:
        """Begin every response anew from its prompt, drawn as the configuration has it now."""
        self.groups = [self._group(group.prompt, group.step, group.number) for group in self.groups]
        for group in self.groups:
            group.responses = [PartialResponse() for _ in group.sampling]

    # --- in a checkpoint ------------------------------------------------------------------------------------------

    def writer(self) -> Callable[[Path], None]:
        """Writes what is in progress now, at any later time."""
        batch = _batch(self.groups)
        facts = [
            {
                "began": [group.step, group.number],
                "rounds": response.rounds,
                "prompt": {} if number else _record(group.prompt),
            }
            for group in self.groups
            for number, response in enumerate(group.responses)
        ]
        kept = RolloutBatch(batch.tensors, {_FACTS: facts, "finish_reason": batch.columns["finish_reason"]})
        return partial(batch_io.save, kept)

    def read(self, path: Path) -> None:
        """Take up what `writer` has written.

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
                if facts["prompt"]:
                    token_ids = batch.input_ids[row, : int(batch.prompt_lengths[row])].tolist()
                    prompt, (step, number) = PromptRecord(token_ids=token_ids, **facts["prompt"]), facts["began"]
                    self.groups.append(self._group(prompt, step, number))
                self.groups[-1].responses.append(response)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{path}: these are no unfinished responses: {type(error).__name__}: {error}") from error


class PartialRollouts(GroupsInProgress):
    """`rollout.partial`: more groups than a step takes."""

    def __init__(self, config: Config, sampled: Sampled) -> None:
        super().__init__(config, sampled)
        assert config.rollout.partial is not None
        self.settings = config.rollout.partial
        self.wanted, self.limit = config.data.prompts_per_step, config.rollout.max_staleness
        self._version: int | None = None  # of the weights that the engine's cache was filled with

    @property
    def room(self) -> int:
        """So that as many groups are in progress as `over_sample` says."""
        return max(0, self.settings.num_groups(self.wanted) - len(self.groups))

    def run(
        self, rollout: Rollout | AgentRollouts, prompts: Sequence[PromptRecord], step: int
    ) -> tuple[RolloutBatch, Metrics]:
        """Go on until a step's groups are finished: they leave."""
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start, version, rounds, generated = time.perf_counter(), rollout.weight_version, 0, 0
        self._begin(prompts, step)
        if version == self._version and not self.config.rollout.sleep:
            rollout.engine.reset_prefix_cache()  # no weights came, which would have; a run that starts here has none
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
            "rollout/kept_tokens": float(sum(len(r.token_ids) for group in self.groups for r in group.responses)),
            "rollout/restarted": float(restarted),
        }

    def _taken(self, version: int) -> list[PartialGroup] | None:
        """Of the finished groups the oldest, as many as a step takes; None while there are fewer, or while others that
        `max_staleness` lets wait no longer are not finished."""
        finished = [group for group in self.groups if group.is_finished]
        finished.sort(key=lambda group: (group.oldest(version), group.step, group.number))
        if len(finished) < self.wanted:
            return None
        taken = finished[: self.wanted]
        if self.settings.when_stale == "finish" and len(finished) < len(self.groups):
            # every step takes so many: what falls due until some later step must not be more than these steps take
            ages = [version - group.oldest(version) for group in _without(self.groups, taken)]
            for later in range(self.limit + 1):
                if sum(age + later >= self.limit for age in ages) > later * self.wanted:
                    return None
        return taken

    def _restart_stale(self, version: int) -> int:
        """Responses with a token that is too old to be trained on go back to their prompts; how many.

        With `when_stale: finish` there are none, unless the limit was lowered before a resume.
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
    """`rollout.in_flight_updates`: the engines take new weights once, after so many tokens of each response.

    A run that leaves between `begin` and `finish` finds `groups` in its checkpoint, and goes on from there.

    Attributes:
        trains_from: version of the weights that the step which is generated will be trained from.
    """

    trains_from: int = 0
    _num_tokens = 0  # generated for the running step
    _seconds = 0.0  # that this took

    def begin(self, rollout: Rollout | AgentRollouts, prompts: Sequence[PromptRecord], step: int) -> None:
        """Generate the first `in_flight_tokens` of each response, unless a checkpoint has them."""
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start, settings = time.perf_counter(), self.config.rollout
        self._num_tokens = 0
        if not self.groups:
            half = -(-int(settings.sampling["max_tokens"]) // 2)
            self._begin(prompts, step)
            self._num_tokens = self._round(rollout, rollout.weight_version, settings.in_flight_tokens or half)
        self._seconds = time.perf_counter() - start

    def finish(self, rollout: Rollout | AgentRollouts) -> tuple[RolloutBatch, Metrics]:
        """Generate the rest; return the samples, with the versions of their tokens, and what was measured."""
        assert isinstance(rollout, Rollout), "agents of their own write in episodes"
        start = time.perf_counter()
        longest = int(self.config.rollout.sampling["max_tokens"])
        num_tokens = self._num_tokens + self._round(rollout, rollout.weight_version, longest)
        batch, self.groups = self._finished(self.groups), []
        seconds = self._seconds + time.perf_counter() - start
        measured = self._measured(rollout, batch, seconds, num_tokens)
        return batch, measured | age_metrics(batch, self.trains_from)


def _without(groups: Sequence[PartialGroup], others: Sequence[PartialGroup]) -> list[PartialGroup]:
    gone = set(map(id, others))
    return [group for group in groups if id(group) not in gone]


def _record(prompt: PromptRecord) -> dict[str, object]:
    """All of a prompt that the batch does not hold, as JSON."""
    names = [each.name for each in dataclasses.fields(prompt) if each.name not in ("token_ids", "images")]
    return {name: getattr(prompt, name) for name in names}


def _batch(groups: Sequence[PartialGroup]) -> RolloutBatch:
    """All responses of groups, numbered as they come."""
    rows = [(number, group, response) for number, group in enumerate(groups) for response in group.responses]
    batch = rollout_batch(
        [group.prompt for _, group, _ in rows],
        [Generation(response.token_ids, response.log_probs, response.finish_reason) for _, _, response in rows],
        [number for number, _, _ in rows],
    )
    versions = torch.full_like(batch.generated_ids, -1)
    for row, (_, _, response) in enumerate(rows):
        versions[row, : len(response.versions)] = torch.tensor(response.versions, dtype=torch.int64)
    return batch.with_(weight_versions=versions)


def age_metrics(batch: RolloutBatch, version: int) -> Metrics:
    """How many updates the tokens of a batch are behind the weights of this version."""
    ages = (version - batch.weight_versions[batch.response_mask]).double()
    return {
        "rollout/staleness": float(ages.max()),
        "rollout/token_staleness_mean": float(ages.mean()),
        "rollout/older_token_share": float((ages > 0).double().mean()),
    }
