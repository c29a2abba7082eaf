"""When a version in a shared folder is written whole, and when as changes."""

from __future__ import annotations

from pathlib import Path

from megaverl.rollout.server_pool import ChangesFolder, PublishedWeights
from megaverl.weights.change_files import Written
from megaverl.weights.transports.sent_weights import VERSIONS_WITHOUT
from megaverl.workers.server_sync import VersionChain


def write(chain: VersionChain, sizes: list[int]) -> str:
    """Write versions whose changes take so many of 100 bytes: "w" whole, "c" changes, "r" whole after a comparison."""
    kinds = ""
    for number, nbytes in enumerate(sizes):
        folder = Path(str(number))
        if not chain.is_due():
            kinds += "w"
        elif chain.add(folder, Written(nbytes, 100, 50, nbytes // 2)):
            kinds += "c"
            continue
        else:
            kinds += "r"
        chain.begin(folder, 100)
    return kinds


def test_a_late_server_never_reads_half_of_the_weights_again() -> None:
    chain = VersionChain()
    assert write(chain, [0] + [20] * 7) == "wccrccrc"
    assert chain.whole == Path("6") and chain.changes == [Path("7")]
    assert chain.whole_bytes == 100
    # Exactly half is no more than half.
    assert write(VersionChain(), [0, 25, 25, 1]) == "wccr"


def test_versions_are_whole_for_a_while_after_most_weights_changed() -> None:
    sizes = [0, 10, 80] + [10] * (VERSIONS_WITHOUT + 2)
    assert write(VersionChain(), sizes) == "wcr" + "w" * VERSIONS_WITHOUT + "cc"


def test_copies_are_kept_for_a_version_that_will_be_compared() -> None:
    chain = VersionChain()
    assert chain.is_due(after_whole=True)
    write(chain, [0, 80])
    for left in range(VERSIONS_WITHOUT, 0, -1):
        assert chain.is_due(after_whole=True) == (left == 1)
        assert not chain.is_due()
        chain.begin(Path("later"), 100)
    assert chain.is_due()


def test_a_server_reads_what_it_lacks() -> None:
    changes = tuple(ChangesFolder(f"run-{n}", f"/f/run-{n}") for n in (2, 3, 4))
    weights = PublishedWeights("/f/run-1", "run-4", whole_name="run-1", changes=changes)
    assert weights.changes_since("run-1") == changes
    assert weights.changes_since("run-3") == changes[2:]
    assert weights.changes_since("run-4") == ()
    assert weights.changes_since("other-3") is None
    assert weights.folders == ("/f/run-1", "/f/run-2", "/f/run-3", "/f/run-4")
    assert PublishedWeights("/f/run-1", "run-1").changes_since("run-1") is None
