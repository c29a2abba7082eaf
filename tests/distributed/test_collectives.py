"""Small agreements between four real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launcher import Launcher

RANKS = "tests.distributed.group_ranks:"


@pytest.mark.parametrize(
    "value",
    [None, "grün – 数", {"a": [1, 2.5, None]}, "long " * 5000],
    ids=lambda v: str(v)[:9],
)
def test_every_rank_gets_every_value_in_rank_order(
    launch: Launcher, value: Any
) -> None:
    assert (
        launch.world(4, RANKS + "gather", value=value)
        == [[[rank, value] for rank in range(4)]] * 4
    )


def test_a_group_talks_among_itself(launch: Launcher) -> None:
    assert launch.world(4, RANKS + "gather_in_pairs") == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
    ]


@pytest.mark.parametrize(
    "rows_of", [[1, 1, 1, 1], [0, 3, 1, 2], [0, 0, 2, 0], [0, 0, 0, 0]]
)
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_uneven_rows_are_joined_in_rank_order(
    launch: Launcher, rows_of: list[int], dtype: str
) -> None:
    expected = [[rank, number] for rank in range(4) for number in range(rows_of[rank])]
    for found in launch.world(4, RANKS + "gather_uneven", rows_of=rows_of, dtype=dtype):
        assert found == {"rows": expected, "dtype": f"torch.{dtype}"}


@pytest.mark.parametrize("rows_of", [[2, 0, 1, 3], [0, 0, 0, 0]])
def test_ragged_rows_are_joined_in_rank_order(
    launch: Launcher, rows_of: list[int]
) -> None:
    rows = [(rank, number) for rank in range(4) for number in range(rows_of[rank])]
    width = max(rank + rows_of[rank] for rank in range(4))
    for found in launch.world(4, RANKS + "gather_ragged", rows_of=rows_of):
        assert found["rows"] == [f"{rank}.{number}" for rank, number in rows]
        assert found["lengths"] == [rank + number for rank, number in rows]
        assert found["score"] == [number for _, number in rows]
        assert found["tokens"] == [
            [rank] * (rank + number) + [-1] * (width - rank - number)
            for rank, number in rows
        ]


@pytest.mark.parametrize("how", ["raise_together", "together"])
@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ({}, ("", "")),
        ({"2": ["DataError", "no row 7"]}, ("DataError", "rank 2: no row 7")),
        # two different errors: the lowest rank's is told
        (
            {"3": ["RewardError", "nan"], "1": ["ModelError", "torn"]},
            ("ModelError", "rank 1: torn"),
        ),
        # all alike: it is nobody's own
        (
            {str(r): ["ModelError", "config.json is missing"] for r in range(4)},
            ("ModelError", "config.json is missing"),
        ),
        # a foreign error keeps its name in the text
        (
            {"0": ["ValueError", "seven"]},
            ("MegaverlError", "rank 0: ValueError: seven"),
        ),
    ],
)
def test_an_error_on_any_rank_is_raised_on_all_with_the_same_text(
    launch: Launcher, on: dict[str, list[str]], expected: tuple[str, str], how: str
) -> None:
    for rank, heard in enumerate(launch.world(4, RANKS + "fail", on=on, how=how)):
        assert (heard["class"], heard["text"]) == expected
        assert heard["cause"] == (str(rank) in on), (
            "the rank's own error is chained, for its log"
        )
        assert heard["after"] == [0, 1, 2, 3]


def test_the_first_rank_speaks_for_its_group(launch: Launcher) -> None:
    found = launch.world(4, RANKS + "first_rank_only", fails=False)
    assert [each["called"] for each in found] == [[0], [], [2], []]
    assert [each["result"]["from"] for each in found] == [0, 0, 2, 2]


def test_the_first_ranks_error_is_everybodys(launch: Launcher) -> None:
    found = launch.world(4, RANKS + "first_rank_only", fails=True)
    # a rank is named by its place in the group
    assert [each["result"] for each in found] == [
        "DataError: rank 0: nothing on rank 0",
        "DataError: rank 0: nothing on rank 0",
        "DataError: rank 0: nothing on rank 2",
        "DataError: rank 0: nothing on rank 2",
    ]


def test_hosts_agree_whatever_the_groups_backend_and_open_a_few_connections(
    launch: Launcher,
) -> None:
    rows = [[float(rank)] * 2 for rank in range(4) for _ in range(rank)]
    expected = {
        "gathered": [[rank, "x" * (700 * rank)] for rank in range(4)],
        "sum": 6,
        "from the last": {"rank": 3},
        "rows": rows,
        "none": [0, 3],
    }
    found = launch.world(4, RANKS + "agree_without_a_device")
    # 0 speaks with 1 and 2, 3 with 2 alone
    assert [each.pop("opened") for each in found] == [2, 1, 2, 1]
    assert found == [expected] * 4


def test_beside_a_device_ranks_join_those_they_speak_with(launch: Launcher) -> None:
    found = launch.world(4, RANKS + "control_beside_a_device")
    assert [each["opened"] for each in found] == [2, 1, 2, 1]
    assert [each["heard"] for each in found] == [3, 0, 1, 2]
    assert all(each["agreed"] == [0, 1, 2, 3] and each["own"] for each in found)


def test_ranks_of_other_roles_join_those_they_speak_with(launch: Launcher) -> None:
    """At first along the tree: 0 with 1 and 2, 3 with 2."""
    assert launch.ranks(
        4, "tests.distributed.ranks:sockets_of_roles_apart"
    ).check() == [2, 1, 2, 1]


def test_an_error_in_what_one_rank_makes_of_all_values_is_raised_on_all(
    launch: Launcher,
) -> None:
    found = launch.world(4, RANKS + "reduce_that_fails")
    assert [each[0] for each in found] == ["IndexError: list index out of range"] * 4
    assert [each[1] for each in found] == [
        "list index out of range",
        "None",
        "None",
        "None",
    ]
    assert [each[2] for each in found] == ["[0, 1, 2, 3]"] * 4


def test_who_waits_for_a_rank_that_does_not_come_names_it(launch: Launcher) -> None:
    found = launch.world(4, RANKS + "agree_without", missing=3, seconds=1.0)
    assert "rank 3 of the group died or stalled" in found[2]
    assert "Timed out waiting 1000ms" in found[2]
    assert "rank 2 of the group" in found[0]
    assert "rank 0 of the group" in found[1]
