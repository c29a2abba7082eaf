"""What a rank waits in: from a trace in the form of torch's source, and from processes of which one stalls."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from torch._C import _distributed_c10d

from megaverl.distributed import flight_record
from tests.launcher import Launcher

NOW = 1_795_430_300_000_000_000  # nanoseconds


def entry(number: int, state: str, age: float, **changes: Any) -> dict[str, Any]:
    """One of NCCL's, as `FlightRecorder::dump_json` of torch 2.13 writes it."""
    return {
        "record_id": number,
        "pg_id": 2,
        "process_group": ["2", "megaverl(0, 1)"],
        "thread_name": "python",
        "thread_id": "140276920219328",
        "collective_seq_id": number,
        "p2p_seq_id": 4,
        "op_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": NOW - int(age * 1e9),
        "input_sizes": [[4096, 1024]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1024]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": False,
        **changes,
    }


GROUPS = {"2": {"name": "2", "desc": "megaverl(0, 1)", "ranks": "[0, 1]"}}


def trace(*entries: dict[str, Any]) -> bytes:
    status = {
        "2": {
            "last_enqueued_collective": "9",
            "last_started_collective": "8",
            "last_completed_collective": "7",
        }
    }
    head = {
        "version": "2.10",
        "comm_lib_version": "2.28.9",
        "pg_config": GROUPS,
        "pg_status": status,
    }
    return json.dumps(
        head | ({"entries": list(entries)} if entries else {}) | {"nccl_comm_state": {}}
    ).encode()


def test_the_first_that_is_not_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = trace(
        entry(7, "completed", 400.0),
        entry(8, "started", 312.0),
        entry(9, "scheduled", 311.0),
    )
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda: nccl, raising=False
    )
    monkeypatch.setattr(
        _distributed_c10d,
        "_dump_fr_trace_json",
        lambda: trace(entry(1, "scheduled", 9.0)),
    )
    monkeypatch.setattr(flight_record.time, "time_ns", lambda: NOW)
    expected = "all_reduce 8 of the group megaverl(0, 1) (ranks [0, 1]), BFloat16 [4096, 1024], begun 312 s ago"
    assert flight_record.waits_in() == expected
    # Before the watchdog has looked at it.
    nccl = trace(entry(7, "completed", 400.0, retired=False))
    assert flight_record.waits_in().startswith("all_reduce 1 ")  # gloo's


def test_nothing_is_named_where_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", trace)
    assert flight_record.waits_in() == ""
    monkeypatch.delattr(_distributed_c10d, "_dump_fr_trace_json")
    assert flight_record.waits_in() == ""


def test_messages_and_several_tensors_are_told_too() -> None:
    message = entry(
        8,
        "started",
        2.0,
        profiling_name="nccl:send 0->1",
        is_p2p=True,
        process_group=["5", "undefined"],
    )
    assert flight_record.describe_collective(message, GROUPS, NOW).startswith(
        "send 0->1 4 of the group 5, BFloat16 [4096, "
    )
    many = entry(
        8, "scheduled", 2.0, input_sizes=[[3], [4]], input_dtypes=["Float", "Float"]
    )
    assert flight_record.describe_collective(many, {}, NOW).endswith(
        "(0, 1), Float [3] and 1 more, queued 2 s ago"
    )


def test_a_stall_names_the_collective(launch: Launcher) -> None:
    reasons = launch.world(2, "tests.distributed.flight_ranks:stall_in_a_collective")
    assert reasons[0] == reasons[1]
    assert re.match(
        "rank 1 stalls: it was in step 3: actor_update for 1 s ", reasons[0]
    ), reasons[0]
    waits = r"rank 0 has waited for 1 s in step 3: actor_update, in all_reduce 2 of the group tensor-parallel"
    assert re.search(
        waits + r", BFloat16 \[3, 4\], queued [01] s ago \(run\.timeout_minutes\)",
        reasons[0],
    ), reasons[0]


def test_torch_writes_into_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    flight_record.write_flight_record(tmp_path, "rollout on ranks 0-1")
    assert (
        os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
        == f"{tmp_path}/nccl_trace_rollout_on_ranks_0_1_rank_"
    )
    flight_record.write_flight_record(tmp_path / "other")
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(
        f"{tmp_path}/nccl_trace"
    )


def test_what_went_into_collectives_is_added_up_by_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a step: its beginning on, in bytes of each dtype; and it is said where the recorder has lost some."""
    entries = (
        entry(0, "completed", 9.0),  # before the step
        entry(1, "completed", 4.0),
        entry(
            2,
            "completed",
            3.0,
            input_sizes=[[8], [2, 2]],
            input_dtypes=["Float", "Bool"],
        ),
        entry(
            3,
            "started",
            2.0,
            profiling_name="nccl:all_gather",
            process_group=["0", "default_pg"],
        ),
    )
    monkeypatch.setattr(
        _distributed_c10d,
        "_dump_nccl_trace_json",
        lambda: trace(*entries),
        raising=False,
    )
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", trace)
    begin = NOW - 5_000_000_000
    size = 4096 * 1024 * 2
    expected = [
        ((), "all_gather", 1, size),
        ((0, 1), "all_reduce", 2, size + 8 * 4 + 4),
    ]
    assert flight_record.recorded_collectives(begin) == (expected, True)
    monkeypatch.setattr(
        _distributed_c10d,
        "_dump_nccl_trace_json",
        lambda: trace(*entries[1:]),
        raising=False,
    )
    assert flight_record.recorded_collectives(begin) == (expected, False)
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", trace, raising=False
    )
    assert flight_record.recorded_collectives(begin) == ([], True)
