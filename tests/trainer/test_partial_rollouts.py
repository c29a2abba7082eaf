"""Partial rollouts: who is first is settled by tokens, nothing is lost or taken twice, and nothing gets too old."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.config import Config, load_config
from megaverl.data.batch import RolloutBatch
from megaverl.data.datasets import PromptRecord
from megaverl.errors import DataError
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.trainer.partial_rollouts import PartialRollouts
from megaverl.workers.responses import Draws
from megaverl.workers.rollout import Rollout
from tests.faults.injector import Fault
from tests.faults.points import PARTIAL, finish, hit
from tests.faults.runs import arguments, metrics, remains
from tests.launcher import Launcher
from tests.trainer.conftest import make_inputs

STOP, LONGEST = 1, 200


def configured(*more: str) -> Config:
    base = [
        "model.path=m",
        "data={train: t, prompts_per_step: 3}",
        "reward=exact_match",
        "algorithm.group_size=2",
    ]
    sampling = f"rollout.sampling.max_tokens={LONGEST}"
    return load_config(None, [*base, sampling, *more], check_paths=False)


class Counting(Rollout):
    """An engine in whose responses every token is one more than the last, until a prompt's own length is reached.

    Args:
        lengths: of the responses to a prompt, by its first token and their number.
    """

    def __init__(self, lengths: dict[tuple[int, int], int]) -> None:
        self.lengths, self.version, self.seeds = lengths, 1, list[int]()
        self.limits = list[int]()
        self.engine: Any = self
        self.resets, self.in_flight = 0, None

    @property
    def weight_version(self) -> int:
        return self.version

    def awake(self) -> Any:
        return nullcontext()

    def engine_metrics(self) -> dict[str, float]:
        return {}

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Any,
        seeds: Sequence[int],
        **_: Any,
    ) -> Any:
        assert len(set(seeds)) == len(seeds)
        self.seeds += seeds
        self.limits += [way.max_tokens for way in sampling]
        found = []
        seen: Counter[int] = Counter()
        for (first, *so_far), way in zip(prompts, sampling, strict=True):
            assert so_far == list(range(2, 2 + len(so_far)))
            length = self.lengths.get((first, seen[first]), 1)
            seen[first] += 1
            ends = len(so_far) + way.max_tokens >= length
            tokens = list(
                range(
                    2 + len(so_far),
                    2 + (length if ends else len(so_far) + way.max_tokens),
                )
            )
            reason = "stop" if ends else "length"
            found.append(
                Generation(tokens, [-float(self.version)] * len(tokens), reason)
            )
        return found


def sampled(prompts: Sequence[PromptRecord], draws: Draws) -> SamplingOptions:
    return SamplingOptions(LONGEST)


def prompts(first: int, count: int) -> list[PromptRecord]:
    return [
        PromptRecord(n, "p", "p", [n], "a", {}, "t:1", [])
        for n in range(first, first + count)
    ]


def one_length(lengths: Sequence[int]) -> dict[tuple[int, int], int]:
    """Of groups, both of whose responses are as long; while one goes on, it is the first of the requests."""
    return {
        (1000 + n, place): length
        for n, length in enumerate(lengths)
        for place in range(2)
    }


def taken(batch: RolloutBatch) -> list[int]:
    return [int(row[0]) - 1000 for row in batch.input_ids][::2]


def test_first_is_who_needs_the_fewest_rounds() -> None:
    config = configured("rollout.partial.chunk_tokens=4")
    state = PartialRollouts(config, sampled)
    engine = Counting(one_length([9, 4, 30, 3, 20, 8, 5, 5, 5]))
    assert state.room == 6
    batch, found = state.run(engine, prompts(1000, 6), 0)
    assert (
        taken(batch) == [1, 3, 5]
        and found["rollout/rounds"] == 2
        and found["rollout/kept_groups"] == 3
    )
    assert (
        found["rollout/generated_tokens"] == 2 * (8 + 4 + 8 + 3 + 8 + 8)
        and found["rollout/kept_tokens"] == 48
    )
    engine.version, before = 2, len(engine.seeds)
    assert state.room == 3
    # no more than one update may lie between, so the three that are left are waited
    # for, and the new ones wait
    batch, found = state.run(engine, prompts(1006, 3), 1)
    assert (
        taken(batch) == [0, 2, 4]
        and len(set(engine.seeds)) == len(engine.seeds) > before
    )
    assert batch.weight_versions[0, :9].tolist() == [1] * 8 + [2]
    assert batch.rollout_log_probs[2, :30].tolist() == [-1.0] * 8 + [-2.0] * 22
    assert batch.generated_ids[2, :30].tolist() == list(range(2, 32))
    older, all_tokens = 2 * 24, 2 * (9 + 30 + 20)
    assert found["rollout/staleness"] == 1 and found[
        "rollout/older_token_share"
    ] == pytest.approx(older / all_tokens)
    assert found["rollout/token_staleness_mean"] == pytest.approx(older / all_tokens)
    engine.version = 3
    # What was finished before is taken without a round.
    batch, found = state.run(engine, prompts(1009, 3), 2)
    assert (
        taken(batch) == [6, 7, 8]
        and found["rollout/rounds"] == 0
        and engine.resets == 0
    )
    state.run(engine, prompts(1012, 3), 3)
    assert engine.resets == 1  # no new weights came


def test_a_response_goes_on_by_no_more_than_it_may_still_have() -> None:
    """200 tokens in chunks of 64: the last one is of 8."""
    engine = Counting(one_length([LONGEST + 300] * 6))
    batch, _ = PartialRollouts(
        configured("rollout.partial.chunk_tokens=64"), sampled
    ).run(engine, prompts(1000, 6), 0)
    assert sorted(set(engine.limits)) == [8, 64]
    assert batch.response_lengths.tolist() == [LONGEST] * 6


def test_what_is_too_old_is_answered_anew() -> None:
    more = "rollout={max_staleness: 0, partial: {over_sample: 2, chunk_tokens: 10, when_stale: restart}}"
    state = PartialRollouts(configured(more), sampled)
    engine = Counting(one_length([50, 60, 10, 10, 10, 10, 10, 10, 10]))
    batch, _ = state.run(engine, prompts(1000, 6), 0)
    assert taken(batch) == [2, 3, 4] and len(state.groups) == 3
    engine.version = 2
    batch, found = state.run(engine, prompts(1006, 3), 1)
    assert taken(batch) == [5, 6, 7] and found["rollout/restarted"] == 6
    assert set(batch.weight_versions[batch.response_mask].tolist()) == {2}
    # Other draws than before.
    assert [group.responses[0].rounds for group in state.groups[:2]] == [2, 2]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=80, max_size=80),
    chunk=st.sampled_from([1, 7, 64]),
    limit=st.integers(1, 4),
    when=st.sampled_from(["finish", "restart"]),
)
def test_nothing_is_lost_taken_twice_or_too_old(
    lengths: list[int], chunk: int, limit: int, when: str
) -> None:
    partial = f"{{chunk_tokens: {chunk}, over_sample: {min(limit + 1, 3)}, when_stale: {when}}}"
    config = configured(f"rollout={{max_staleness: {limit}, partial: {partial}}}")
    state, engine = PartialRollouts(config, sampled), Counting(one_length(lengths))
    begun, done = 0, list[int]()
    for step in range(8):
        room = state.room
        batch, found = state.run(engine, prompts(1000 + begun, room), step)
        begun += room
        assert len(batch) == 6 and found["rollout/staleness"] <= limit
        assert batch.response_lengths.tolist()[::2] == [
            lengths[n] for n in taken(batch)
        ]
        done += taken(batch)
        engine.version += 1
    left = [group.prompt.token_ids[0] - 1000 for group in state.groups]
    assert sorted(done + left) == list(range(begun))


def test_what_is_in_progress_comes_back_from_a_file(tmp_path: Path) -> None:
    config = configured(
        "rollout={max_staleness: 3, partial: {over_sample: 3, chunk_tokens: 3}}"
    )
    state, engine = (
        PartialRollouts(config, sampled),
        Counting(one_length([2, 30, 7, 7, 2, 40, 90, 2, 3, 3, 3, 3])),
    )
    state.run(engine, prompts(1000, state.room), 0)
    written, path = state.to_bytes(), tmp_path / "partial.safetensors"
    expected = [
        (group.prompt, group.step, group.number, group.responses)
        for group in state.groups
    ]
    copied = repr(expected)
    again = PartialRollouts(config, sampled)
    engine.version = 2
    other = Counting(dict(engine.lengths))
    other.version = 2
    first, _ = state.run(engine, prompts(1009, 3), 1)
    path.write_bytes(
        written
    )  # as a save in the background does, when the run has gone on
    again.read(path)
    assert (
        repr(
            [
                (group.prompt, group.step, group.number, group.responses)
                for group in again.groups
            ]
        )
        == copied
    )
    second, _ = again.run(other, prompts(1009, 3), 1)
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    again.read(path)
    again.config = configured(
        "rollout={max_staleness: 3, partial: {over_sample: 3}}",
        "algorithm.group_size=4",
    )
    again.restart()  # other settings: the same prompts, and nothing of the responses
    assert [group.prompt for group in again.groups] == [
        prompt for prompt, *_ in expected
    ]
    assert {
        len(response.token_ids)
        for group in again.groups
        for response in group.responses
    } == {0}
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"partial\.safetensors"):
        again.read(path)


def test_a_run_that_is_killed_and_asked_to_leave_goes_on(
    launch: Launcher, tmp_path: Path
) -> None:
    """Two ranks with an engine each; it ends with the bits of a run that nothing happened to."""
    inputs = make_inputs(tmp_path)
    ended = launch.command(
        arguments(inputs, tmp_path / "untouched", *PARTIAL), logs=tmp_path / "output"
    )
    assert ended.codes == [0, 0], ended.output
    expected = remains(tmp_path / "untouched" / "run")
    found = [
        record
        for record in metrics(tmp_path / "untouched" / "run")
        if "rollout/kept_groups" in record
    ]
    assert all(record["rollout/kept_tokens"] > 0 for record in found)
    assert max(record["rollout/older_token_share"] for record in found) > 0
    for fault in (
        Fault("kill", 1, "rollout", 2),
        Fault("term", 0, "reward", 3),
        Fault("kill", 0, "log", 3),
    ):
        assert hit(launch, inputs, tmp_path / "hit", fault, *PARTIAL).wrong == []
    ended, wrong = finish(launch, inputs, tmp_path / "hit", expected, *PARTIAL)
    assert wrong == [], ended
    ended = launch.command(
        arguments(inputs, tmp_path / "hit", "trainer.steps=5"), logs=tmp_path / "output"
    )
    assert (
        ended.codes != [0, 0]
        and "rollout.partial" in ended.text
        and "groups of responses" in ended.text
    )
