"""What follows from what all ranks say of themselves."""

from __future__ import annotations

import json
import linecache
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed import heartbeat
from megaverl.distributed.heartbeat import (
    Heartbeat,
    blame,
    is_behind,
    who_is_silent,
    who_stalls,
)

STAGES = ("rollout", "reward", "values", "actor_update", "reshard")
LIMIT = 4.0  # seconds that a rank may wait


def beat(**changes: object) -> Heartbeat:
    values = {
        "doing": "x",
        "seconds": 3.0,
        "waits_for": "ranks" if changes.get("waited") else "",
        "waited": 0.0,
        "where": "a.py:1 (f)",
        "host": "h/1",
        "pid": 7,
    }
    return Heartbeat(**{**values, **changes})  # type: ignore[arg-type]


def test_whom_the_others_wait_for() -> None:
    name = "rank {}".format
    beats = {
        0: beat(waited=5.0, doing="w"),
        1: beat(seconds=5.0),
        2: beat(waited=2.0),
        3: beat(left=True),
    }
    assert who_stalls(beats, 4.0, name)[1] == (
        "rank 1 stalls: it was in x for 5 s (process 7 on h), at a.py:1 (f). rank 0 has waited for 5 s in w "
        "(run.timeout_minutes)"
    )
    assert who_stalls(beats, 6.0, name)[1] == ""
    assert who_stalls(beats | {1: beat(seconds=3.0)}, 4.0, name)[1] == "", (
        "it has begun something new since"
    )
    assert (
        "all ranks wait for each other; rank 0: it was in w"
        in who_stalls({0: beats[0]}, 4.0, name)[1]
    )
    waits = beat(waited=5.0, doing="w", collective="all_reduce 7 of the group tp")
    assert (
        "has waited for 5 s in w, in all_reduce 7 of the group tp (run"
        in who_stalls(beats | {0: waits}, 4.0, name)[1]
    )
    told = who_stalls({0: waits}, 4.0, name)[1]
    assert (
        told.count(
            "(process 7 on h), waiting in all_reduce 7 of the group tp, at a.py:1"
        )
        == 1
        == told.count("tp")
    )


def test_who_is_silent() -> None:
    beats = {0: beat(), 1: beat(left=True), 2: beat(doing="values")}
    ranks, told = who_is_silent(beats, {0: 4.0, 1: 9.0, 2: 9.0}, 5.0, "rank {}".format)
    assert ranks == [2]
    assert told.startswith(
        "rank 2 has not been heard of for 9 s: it was in values for 3 s"
    )
    written = json.dumps(asdict(beats[2]))
    assert Heartbeat.from_json(written) == beats[2]


def at(
    stage: str,
    waits: str = "",
    since: float = 9.0,
    *,
    step: int = 2,
    world: str = "",
    waited: float = 9.0,
) -> Heartbeat:
    """A rank that went through `STAGES` up to one of them, in which it is for `since`
    seconds; "d" waits for its device, "r" for other ranks.
    """
    begun = STAGES[: STAGES.index(stage) + 1] if stage in STAGES else (*STAGES, stage)
    kind = {"": "", "d": "device", "r": "ranks"}[waits]
    return beat(
        seconds=since,
        waits_for=kind,
        waited=waited if waits else 0.0,
        step=step,
        begun=begun,
        world=world,
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # waits that frames show
        ([at("values", "r"), at("values")], ([1], 0)),
        # It has begun something new.
        ([at("values", "r"), at("values", since=3.0)], None),
        # Nobody has waited for too long.
        ([at("values", "r", waited=3.0), at("values")], None),
        ([at("values"), at("values")], None),  # a long stage that nobody waits in
        ([at("values", "r"), at("values", "r", waited=1.0)], ([], 0)),
        # NCCL: the wait is in a read from the device, or shows nowhere
        ([at("values"), at("values", "d")], ([0], 1)),  # in one stage
        ([at("values"), at("actor_update", "d")], ([0], 1)),  # further
        ([at("values"), at("actor_update")], ([0], 1)),
        ([at("values", "d"), at("actor_update", "d")], ([0], 1)),
        ([at("values", "d"), at("values", "d")], ([], 0)),
        ([at("values", "d"), at("values", "d", waited=3.0)], None),
        ([at("values", "d"), at("values", "d", since=3.0, waited=3.0)], None),
        ([at("reshard"), at("rollout", step=3)], ([0], 1)),  # a step further
        # It is behind, but on its way.
        ([at("values", since=3.0), at("actor_update", "d")], None),
        ([at("values", "d"), at("values", "r")], ([0], 1)),  # its own device hangs
        ([at("values", "d", since=3.0, waited=3.0), at("values", "r")], None),
        (
            [
                at("values"),
                at("actor_update", "d"),
                at("actor_update", "r"),
                at("actor_update"),
            ],
            ([0], 1),
        ),
        # It waits for a disk, say: all others have passed.
        ([at("values", "r"), at("actor_update", "d")], ([0], 1)),
        ([at("values", "r"), at("actor_update", "r")], ([0], 1)),
        ([at("values", "r"), at("actor_update", "d", since=3.0, waited=3.0)], None),
        ([at("values", "d")], None),  # alone: nobody waits for it
        # stages that one rank has alone put nobody behind
        ([at("log"), at("checkpoint", "d")], ([0], 1)),
        ([at("log", "d"), at("checkpoint", "d", waited=8.0)], ([], 0)),
        # other worlds go through other stages, and may be steps ahead
        (
            [at("values", world="actor"), at("rollout", "d", step=4, world="engines")],
            ([0], 1),
        ),
        (
            [at("values", "d", world="actor"), at("rollout", step=4, world="engines")],
            ([1], 0),
        ),
        (
            [
                at("values", world="actor", since=3.0),
                at("rollout", "d", step=4, world="engines"),
            ],
            None,
        ),
        (
            [
                at("values", "d", world="a"),
                at("values", world="a"),
                at("rollout", "r", world="b"),
            ],
            ([1], 0),
        ),
        (
            [
                at("values", "r", world="a"),
                at("reshard", "d", world="a"),
                at("rollout", world="b"),
            ],
            ([2], 0),
        ),
    ],
)
def test_who_is_to_blame(
    ranks: list[Heartbeat], expected: tuple[list[int], int] | None
) -> None:
    assert blame(dict(enumerate(ranks)), LIMIT) == expected
    gone = beat(seconds=9.0, left=True)
    assert blame({**dict(enumerate(ranks)), 9: gone}, LIMIT) == expected, (
        "who has left holds nobody up"
    )


beats = st.builds(
    at,
    st.sampled_from([*STAGES, "log", "checkpoint"]),
    st.sampled_from(["", "d", "r"]),
    st.sampled_from([1.0, 9.0]),
    step=st.integers(1, 2),
    world=st.sampled_from("ab"),
    waited=st.sampled_from([1.0, 9.0]),
)


@given(st.lists(beats, min_size=1, max_size=6))
def test_blame_is_never_on_one_who_waits_or_goes_on(ranks: list[Heartbeat]) -> None:
    assert not any(
        is_behind(one, other) and is_behind(other, one)
        for one in ranks
        for other in ranks
    )
    if found := blame(dict(enumerate(ranks)), LIMIT):
        to_blame, witness = found
        assert witness not in to_blame
        for rank in to_blame:
            assert ranks[rank].seconds > LIMIT and not any(
                is_behind(other, ranks[rank]) for other in ranks
            )
            assert ranks[rank].waits_for != "ranks" or any(
                is_behind(ranks[rank], other) for other in ranks
            )
        assert to_blame or all(rank.waits_for for rank in ranks)


@given(st.lists(st.sampled_from(STAGES), min_size=2, max_size=6))
def test_of_ranks_that_all_seem_to_wait_for_their_devices_the_last_are_blamed(
    stages: list[str],
) -> None:
    places = [STAGES.index(stage) for stage in stages]
    last = [rank for rank, place in enumerate(places) if place == min(places)]
    found = blame({rank: at(stage, "d") for rank, stage in enumerate(stages)}, LIMIT)
    assert found is not None and found[0] == (last if len(set(places)) > 1 else [])


def test_the_coordinators_look_at_a_thousand_ranks_compares_stages_and_not_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    monkeypatch.setattr(
        heartbeat, "is_behind", lambda *two: compared.append(two) or is_behind(*two)
    )
    beats = {rank: at(STAGES[rank % 5], "r", step=rank % 2) for rank in range(1000)} | {
        3: at("rollout", step=0)
    }
    assert blame(beats, LIMIT) == ([3], 0), (
        "it is at work in the first stage, and the others wait"
    )
    assert len(compared) < 2 * 10 * 10 + len(beats)


def test_source_files_are_not_kept(tmp_path: Path) -> None:
    """The lines at which a rank stands are read, and their files leave no lines in memory."""
    file = tmp_path / "waits.py"
    text = "import sys\n\ndef here():\n    return sys._getframe()\n\nframe = here()\n"
    file.write_text(text)
    frame = runpy.run_path(str(file))["frame"]
    assert heartbeat._line(frame) == "    return sys._getframe()\n"
    assert str(file) not in linecache.cache
