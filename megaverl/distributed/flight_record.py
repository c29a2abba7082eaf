"""torch's flight recorder: the last collectives of this process, and the one that it blocks in.

torch has one recorder for NCCL and one for gloo, and returns their records as JSON
(torch 2.13: `torch/csrc/distributed/c10d/FlightRecorder.hpp` and
`FlightRecorderDetail.hpp`). NCCL's point-to-point messages are recorded too, gloo's are
not. `TORCH_NCCL_TRACE_BUFFER_SIZE` sets the number of entries; 0 disables it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

# Recorder of NCCL, if torch is built with it, and of the other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_WRITES_TO = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_flight_record(folder: Path, world: str = "") -> None:
    """Make torch write its flight record into an existing folder when one of its own timeouts expires.

    It writes one file per rank for torch's `torchfrtrace`. Paths that the environment
    already sets are kept.

    Args:
        world: name of this rank's world, if there are several with ranks from 0.
    """
    if not any(name in os.environ for name in _WRITES_TO):
        words = ["nccl_trace", *re.findall(r"\w+", world), "rank_"]
        os.environ[_WRITES_TO[-1]] = str(folder.absolute() / "_".join(words))


def waits_in() -> str:
    """Return a description of the oldest unfinished collective of this process.

    It is "" if there is none, or if the recorder is off. The call does not block: it
    only queries the device's progress.
    """
    entries = [
        (entry, groups)
        for recorded, groups in _traces()
        for entry in unfinished(recorded)
    ]
    if not entries:
        return ""
    entry, groups = min(entries, key=lambda item: item[0]["time_created_ns"])
    return describe_collective(entry, groups, time.time_ns())


def _traces() -> Iterator[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]]:
    """Yield the entries of each recorder, and its groups by name (`pg_config`)."""
    for name in _DUMPS:
        if dump := getattr(_distributed_c10d, name, None):
            trace = json.loads(dump())
            yield trace.get("entries", ()), trace.get("pg_config", {})


def _operation(entry: Mapping[str, Any]) -> str:
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def unfinished(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the unfinished entries. NCCL's finished ones are "completed", gloo's are only "retired"."""
    return [
        entry
        for entry in entries
        if entry["state"] != "completed" and not entry["retired"]
    ]


def describe_collective(
    entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]], now: int
) -> str:
    """Describe an entry as "all_reduce 17 of the group tp (ranks [0, 1]), BFloat16 [4096, 1024], begun 312 s ago".

    Args:
        groups: the recorder's `pg_config`: name of a group -> its description and ranks.
        now: nanoseconds since 1970.
    """
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, description = entry["process_group"]
    ranks = groups.get(name, {}).get("ranks", "[]")
    text = f"{_operation(entry)} {number} of the group {description if description not in ('', 'undefined') else name}"
    text += f" (ranks {ranks})" if ranks != "[]" else ""
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    if dtypes:
        more = f" and {len(dtypes) - 1} more" if len(dtypes) > 1 else ""
        text += f", {dtypes[0]} {sizes[0]}{more}"
    return f"{text}, {_STATES[entry['state']]} {(now - entry['time_created_ns']) / 1e9:.0f} s ago"


# "started": the device has begun it. "scheduled": it is queued on the device.
_STATES = {"scheduled": "queued", "started": "begun"}


class Collectives(NamedTuple):
    """Collectives of one kind that a process has called in one group.

    Attributes:
        ranks: ranks of the group; empty if torch does not report them.
        operation: name of the collective.
        calls: number of calls.
        nbytes: bytes of all inputs.
    """

    ranks: tuple[int, ...]
    operation: str
    calls: int
    nbytes: int


def recorded_collectives(since: int) -> tuple[list[Collectives], bool]:
    """Return the collectives that this process began after `since`, and whether the list is complete.

    The recorder keeps only the last ones. Point-to-point messages are recorded only
    under NCCL.

    Args:
        since: nanoseconds since 1970.
    """
    sums_by_kind: dict[tuple[tuple[int, ...], str], list[int]] = {}
    is_whole = True
    for entries, groups in _traces():
        if (
            entries
            and entries[0]["record_id"] > 0
            and entries[0]["time_created_ns"] >= since
        ):
            is_whole = False
        for entry in entries:
            if entry["time_created_ns"] < since:
                continue
            number, description = entry["process_group"]
            ranks = re.findall(
                r"\d+",
                groups.get(number, {}).get("ranks", "")
                or description.partition("(")[2],
            )
            kind = (tuple(map(int, ranks)), _operation(entry))
            sums = sums_by_kind.setdefault(kind, [0, 0])
            sums[0] += 1
            sums[1] += sum(
                _BYTES_OF.get(t, 1) * prod(n)
                for t, n in zip(
                    entry["input_dtypes"], entry["input_sizes"], strict=False
                )
            )
    return [
        Collectives(*key, *sums) for key, sums in sorted(sums_by_kind.items())
    ], is_whole


# torch's names of dtypes in records. Others (8-bit floats and integers, booleans) count
# as one byte.
_BYTES_OF = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Long": 8,
    "Int": 4,
    "Short": 2,
}
