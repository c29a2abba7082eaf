"""What the tool prints of what ranks have counted (the counting itself takes hundreds of processes)."""

from __future__ import annotations

import math

from tools.bench_control import (
    COLUMNS,
    KINDS,
    agreement_table,
    placement_of,
    socket_table,
)


def test_sockets_of_many_ranks_follow_from_those_of_few() -> None:
    """What grows with N, with log2 N, and with both."""
    laws = [
        lambda n: n,
        lambda n: 7 * n // 2,
        lambda n: 2 + int(math.log2(n)),
        lambda n: n + 2 * int(math.log2(n)) + 1,
    ]
    found = {
        size: [
            {
                kind: {"sockets": law(size) - rank}
                for kind, law in zip(KINDS, laws, strict=True)
            }
            for rank in range(size)
        ]
        for size in (4, 8, 16)
    }
    table = socket_table(found)
    assert (
        table[0]
        == "| sockets of a rank | 4 ranks | 8 ranks | 16 ranks | 1,024, by these |"
    )
    ends = [line.partition("|")[2].split("|", 1)[1].strip(" |") for line in table[2:]]
    assert ends == [
        "4 | 8 | 16 | 1,024",
        "14 | 28 | 56 | 3,584",
        "4 | 5 | 6 | 12",
        "9 | 15 | 25 | 1,045",
    ]


def test_beyond_some_ranks_there_is_no_mesh() -> None:
    def rank(number: int, *sides: str) -> dict[str, dict[str, float]]:
        return {
            side: {column: 10.0 * number + 2.5 for column in COLUMNS} for side in sides
        }

    found = {
        2: [rank(n, "mesh", "tree") for n in range(2)],
        1024: [rank(n, "tree") for n in range(1024)],
    }
    lines = agreement_table(found)[2:]
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 2", "mesh"],
        ["| 2", "tree"],
        ["| 1,024", "tree"],
    ]
    assert lines[0].endswith("| 7.5, 2.5 | 15 |") and lines[2].endswith(
        "| 5,118, 2.5 | 5,240,320 |"
    )


def test_roles_that_are_apart_have_half_of_the_ranks_each() -> None:
    apart, together = (placement_of(8, apart=each) for each in (True, False))
    assert [world.ranks for world in apart.role_groups] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ] and not apart.is_colocated
    assert (
        together.is_colocated
        and together.ranks["rollout"]
        == tuple(range(8))
        == together.role_groups[0].ranks
    )
