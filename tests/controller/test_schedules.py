"""Programs on simulated clusters under random delays and faults at every event: what must hold on every schedule."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import pytest

from megaverl.controller.failures import CallFailed
from tests.controller.simulation import Deadlock, Fault, FaultKind
from tests.controller.stub_run import (
    LONGEST,
    PROGRAMS,
    Disk,
    Layout,
    Simulated,
    simulate,
)

STEPS = 2
NUM_RANKS = {"shared": 3, "split": 4}
LAYOUTS = {
    "shared": Layout.shared(NUM_RANKS["shared"]),
    "split": Layout.split(NUM_RANKS["split"]),
}
CASES = [(program, layout) for program in PROGRAMS for layout in LAYOUTS]
RANK_FAULTS: tuple[FaultKind, ...] = ("kill", "freeze", "disconnect")
# Schedules of one case; four cases make 10,000.
NUM_DELAYS, NUM_SINGLE_FAULTS, NUM_DOUBLE_FAULTS = 400, 1900, 200


@functools.cache
def clean_run(program: str, layout: str) -> Simulated:
    """Return a run without faults, which all others are held against."""
    run = simulate(program, LAYOUTS[layout], NUM_RANKS[layout], seed=0, steps=STEPS)
    assert run.outcome.error is None
    return run


def check_run(case: tuple[str, str], run: Simulated, faults: list[Fault]) -> None:
    """Assert what holds on every schedule: how the run ended, and that what it committed is whole and can go on."""
    expected = clean_run(*case)
    check_end(run, expected.outcome.result, faults)
    committed = run.disk.committed
    for rank in LAYOUTS[case[1]].actor:
        if committed:
            assert (
                run.disk.parts[committed, rank] == expected.disk.parts[committed, rank]
            )
    assert resume(case, committed) == expected.outcome.result, (
        "the resumed run ends with other weights"
    )


@functools.cache
def resume(case: tuple[str, str], committed: int) -> object:
    """Resume from a committed step; return the result. Runs that committed the same step have the same disk."""
    program, layout = case
    parts = dict(clean_run(*case).disk.parts) if committed else {}
    disk = Disk(parts, committed, list(range(1, committed + 1)))
    run = simulate(
        program, LAYOUTS[layout], NUM_RANKS[layout], seed=1, steps=STEPS, disk=disk
    )
    if committed == STEPS:
        return clean_run(*case).outcome.result
    assert run.outcome.error is None
    assert disk.commits == list(range(1, STEPS + 1)), (
        "a step was committed twice or never"
    )
    for rank in range(NUM_RANKS[layout]):
        whole = [line for line in clean_run(*case).trace if line.startswith(f"{rank} ")]
        tail = [line for line in run.trace if line.startswith(f"{rank} ")]
        tail = (
            tail[tail.index(f"{rank} save {committed + 1}") :]
            if rank in LAYOUTS[layout].actor
            else tail[-2:]
        )
        assert whole[-len(tail) :] == tail, "the resumed run makes other calls"
    return run.outcome.result


def check_end(run: Simulated, expected: object, faults: list[Fault]) -> None:
    """Assert that a run has ended with the right result, or with one error that names a rank at fault."""
    outcome = run.outcome
    assert outcome.seconds < LONGEST, "the run outlives its deadlines"
    assert run.disk.commits == list(range(1, run.disk.committed + 1))
    if outcome.error is not None:
        assert isinstance(outcome.error, CallFailed), outcome.error
        faulty = {fault.rank for fault in faults if fault.kind != "kill_controller"}
        assert set(outcome.error.ranks) <= faulty, (
            f"{outcome.error} names another rank than {faulty}"
        )
        assert outcome.error.ranks, outcome.error
    elif outcome.result is not None:
        assert outcome.result == expected
    else:
        assert any(fault.kind == "kill_controller" for fault in faults), (
            "no result and no error"
        )
    for rank, end in enumerate(outcome.rank_ends):
        is_told = outcome.error is not None and end == str(outcome.error)
        assert is_told or end in ("", "killed", "frozen", "ControllerLost"), (
            f"rank {rank}: {end}"
        )


def make_faults(case: tuple[str, str], seed: int) -> Iterator[list[Fault]]:
    """Yield single faults over all events of a run, then pairs of faults."""
    rng, num_ranks = random.Random(seed), NUM_RANKS[case[1]]
    num_events = clean_run(*case).outcome.num_events
    kinds: itertools.cycle[FaultKind] = itertools.cycle(
        (*RANK_FAULTS, "kill_controller")
    )
    for number in range(NUM_SINGLE_FAULTS):
        yield [Fault(next(kinds), rng.randrange(num_ranks), number * 7 % num_events)]
    for _ in range(NUM_DOUBLE_FAULTS):
        yield [
            Fault(
                rng.choice(RANK_FAULTS),
                rng.randrange(num_ranks),
                rng.randrange(num_events),
            )
            for _ in range(2)
        ]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_delays_change_nothing(case: tuple[str, str]) -> None:
    program, layout = case
    expected = clean_run(program, layout)
    for seed in range(NUM_DELAYS):
        run = simulate(
            program, LAYOUTS[layout], NUM_RANKS[layout], seed=seed, steps=STEPS
        )
        check_run(case, run, [])
        assert run.outcome.result == expected.outcome.result
        for rank in range(NUM_RANKS[layout]):
            own = [line for line in run.trace if line.startswith(f"{rank} ")]
            assert own == [
                line for line in expected.trace if line.startswith(f"{rank} ")
            ], "calls in another order"


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_fault_ends_the_run_and_it_resumes(case: tuple[str, str]) -> None:
    program, layout = case
    ended = {kind: 0 for kind in (*RANK_FAULTS, "kill_controller")}
    for seed, faults in enumerate(make_faults(case, seed=5)):
        try:
            run = simulate(
                program,
                LAYOUTS[layout],
                NUM_RANKS[layout],
                seed=seed,
                steps=STEPS,
                faults=faults,
            )
            check_run(case, run, faults)
        except (AssertionError, Deadlock) as error:
            raise AssertionError(f"seed={seed} {faults}: {error}") from error
        if len(faults) == 1 and run.outcome.result is None:
            ended[faults[0].kind] += 1
    assert min(ended.values()) > NUM_SINGLE_FAULTS // 8, (
        f"faults hardly ever end a run: {ended}"
    )


def test_a_job_of_several_programs() -> None:
    """Faults at every event, also between the programs. The weights are those of one long program."""
    layout, num_ranks = LAYOUTS["split"], NUM_RANKS["split"]
    run_both = functools.partial(
        simulate, "on_policy", layout, num_ranks, steps=STEPS // 2, num_programs=2
    )
    clean = run_both(seed=0)
    assert (
        clean.outcome.result == clean_run("on_policy", "split").outcome.result
        and clean.outcome.rank_ends == ("",) * num_ranks
    )
    between = 0
    for event in range(0, clean.outcome.num_events, 2):
        for kind in (*RANK_FAULTS, "kill_controller"):
            faults = [Fault(kind, rank=event % num_ranks, event=event)]
            run = run_both(seed=event, faults=faults)
            check_end(run, clean.outcome.result, faults)
            between += run.outcome.error is not None and "is gone" in str(
                run.outcome.error
            )
    assert between > 10, "faults hardly ever come between two programs"


def test_many_ranks() -> None:
    """1,024 ranks: without a fault, with a lost rank, and with a frozen one."""
    layout = Layout.split(1024)
    clean = simulate("on_policy", layout, 1024, seed=3, steps=1)
    assert clean.outcome.error is None
    for kind in ("kill", "freeze"):
        fault = Fault(kind, rank=700, event=clean.outcome.num_events // 2)
        run = simulate("on_policy", layout, 1024, seed=4, steps=1, faults=[fault])
        check_end(run, clean.outcome.result, [fault])
        assert run.outcome.error is not None
