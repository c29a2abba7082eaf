"""Which collective a rank waits in: torch's flight recorder, read as JSON.

torch keeps the last collectives of a process, of NCCL and of gloo in a recorder each (torch 2.13:
`torch/csrc/distributed/c10d/FlightRecorder.hpp` and `FlightRecorderDetail.hpp`; NCCL's messages between two ranks are
in it as well, gloo's are not). `TORCH_NCCL_TRACE_BUFFER_SIZE` is how many, 0: none.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

# Of NCCL, where torch is built with it, and of the other backends.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_WRITES_TO = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_into(folder: Path, world: str = "") -> None:
    """Let torch, where its own deadline passes first, write its recorder into a folder that is there, as one file a
    rank for its `torchfrtrace`. What the environment names already stays.

    Args:
        world: of this rank, where there are several, each with ranks from 0.
    """
    if not any(name in os.environ for name in _WRITES_TO):
        words = ["nccl_trace", *re.findall(r"\w+", world), "rank_"]
        os.environ[_WRITES_TO[-1]] = str(folder.absolute() / "_".join(words))


def waits_in() -> str:
    """The collective that this process began first of those that are not over; '' where it is in none, or the
    recorder is off. Nobody is waited for: a device is asked how far it is."""
    entries: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    for name in _DUMPS:
        if dump := getattr(_distributed_c10d, name, None):
            trace = json.loads(dump())
            entries += [(entry, trace.get("pg_config", {})) for entry in unfinished(trace.get("entries", ()))]
    if not entries:
        return ""
    entry, groups = min(entries, key=lambda found: found[0]["time_created_ns"])
    return describe(entry, groups, time.time_ns())


def unfinished(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What is not over: NCCL's are found to be complete, gloo's are only retired."""
    return [entry for entry in entries if entry["state"] != "completed" and not entry["retired"]]


def describe(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]], now: int) -> str:
    """As "all_reduce 17 of the group tp (ranks [0, 1]), BFloat16 [4096, 1024], begun 312 s ago".

    Args:
        groups: the recorder's `pg_config`: by name, what each is and which ranks it has.
        now: in nanoseconds since 1970.
    """
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name, what = entry["process_group"]
    ranks = groups.get(name, {}).get("ranks", "[]")
    text = f"{operation} {number} of the group {what if what not in ('', 'undefined') else name}"
    text += f" (ranks {ranks})" if ranks != "[]" else ""
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    if dtypes:
        more = f" and {len(dtypes) - 1} more" if len(dtypes) > 1 else ""
        text += f", {dtypes[0]} {sizes[0]}{more}"
    return f"{text}, {_STATES[entry['state']]} {(now - entry['time_created_ns']) / 1e9:.0f} s ago"


# A device has come to it, or it waits there behind another.
_STATES = {"scheduled": "queued", "started": "begun"}


class Collectives(NamedTuple):
    """What a process sent into collectives of one kind, in one group.

    Attributes:
        ranks: of the group; empty: torch does not say. calls: how many. nbytes: of all inputs.
    """

    ranks: tuple[int, ...]
    operation: str
    calls: int
    nbytes: int


def collectives(since: int) -> tuple[list[Collectives], bool]:
    """Those that this process began after a moment (nanoseconds since 1970), and whether that is all of them: the
    recorder keeps the last ones only. Messages between two ranks are in it under NCCL alone."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = {}
    is_whole = True
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is None:
            continue
        trace = json.loads(dump())
        entries, groups = trace.get("entries", ()), trace.get("pg_config", {})
        if entries and entries[0]["record_id"] > 0 and entries[0]["time_created_ns"] >= since:
            is_whole = False
        for entry in entries:
            if entry["time_created_ns"] < since:
                continue
            number, what = entry["process_group"]
            ranks = re.findall(r"\d+", groups.get(number, {}).get("ranks", "") or what.partition("(")[2])
            operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
            sums = found.setdefault((tuple(map(int, ranks)), operation), [0, 0])
            sums[0] += 1
            sums[1] += sum(
                _BYTES_OF.get(t, 1) * prod(n) for t, n in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            )
    return [Collectives(*key, *sums) for key, sums in sorted(found.items())], is_whole


# torch's names of dtypes there; of others (8-bit floats, integers, booleans) it is one byte.
_BYTES_OF = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2}
