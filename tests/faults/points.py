"""Where a run is hit: kill points over all stages of a step and of a save, and what one such try is.

`tools/fault_campaign.py` tries every point by itself; the suite tries some of them, one
after the other in one run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaverl.errors import SAVED_AND_LEFT
from tests.faults.injector import Fault, Kind
from tests.faults.runs import (
    Remains,
    arguments,
    differences,
    remains,
    without_bytes,
)
from tests.launcher import JOB_DEADLINE, Ended, Launcher

ALL_END_WITHIN = 60.0  # seconds after one rank is lost
SHORT_WAIT = "run.timeout_minutes=0.1"  # a wait that lasts longer is a stall


def _kill(
    rank: int,
    stage: str,
    step: int | None,
    *,
    byte: int | None = None,
    delay: float = 0.0,
    message: int | None = None,
    file: str = "",
) -> Fault:
    return Fault("kill", rank, stage, step, byte, delay, message=message, file=file)


POINTS: dict[str, Fault] = {
    "first update": _kill(1, "actor_update", 1),  # there is no checkpoint yet
    "rollout begins": _kill(0, "rollout", 2),
    "inside the rollout": _kill(1, "rollout", 3, delay=0.01),
    "reward": _kill(0, "reward", 2),
    "reward of the last step": _kill(1, "reward", 4),
    "old log-probs": _kill(1, "old_log_probs", 2),
    "reference log-probs": _kill(0, "ref_log_probs", 3),
    "values": _kill(1, "values", 3),
    "advantages": _kill(0, "advantages", 2),
    "critic update": _kill(0, "critic_update", 3),
    "inside the critic update": _kill(1, "critic_update", 2, delay=0.03),
    "actor update": _kill(1, "actor_update", 2),
    "inside the actor update": _kill(0, "actor_update", 3, delay=0.04),
    "reshard, rank 0": _kill(0, "reshard", 2),
    "reshard, rank 1": _kill(1, "reshard", 3),
    "metrics": _kill(0, "log", 3),
    "validation": _kill(1, "validation", 2),
    "copy of a checkpoint": _kill(1, "checkpoint_copy", 2),
    "first byte of a file": _kill(0, "checkpoint_write", 2, byte=0),
    "byte 5,000": _kill(1, "checkpoint_write", 3, byte=5_000),
    "byte 400,000": _kill(0, "checkpoint_write", 3, byte=400_000),
    "after the last byte": _kill(1, "checkpoint_commit", 2),
    "inside the index": _kill(0, "checkpoint_commit", 3, byte=1_000),
    "manifest": _kill(0, "checkpoint_manifest", 3),
    "before the rename": _kill(0, "checkpoint_rename", 2),
    "after the rename": _kill(0, "checkpoint_marked", 3),
    "prune": _kill(0, "checkpoint_prune", 4),
    "export": _kill(1, "export", None),
}

# A run that keeps unfinished responses, between steps and in its checkpoints; and where
# it is hit besides.
PARTIAL = [
    "rollout={partial: {chunk_tokens: 2}, max_staleness: 2}",
    "rollout.sampling={max_tokens: 16, stop_token_ids: [5, 6, 7, 8]}",
]
PARTIAL_POINTS: dict[str, Fault] = {
    "an unfinished response kept": _kill(0, "rollout", 3, delay=0.05)
}
# A run whose engine takes new weights in the middle of a step, inside the second and
# the fourth.
IN_FLIGHT = [
    "placement={rollout: 0, actor: 1}",
    "actor.tp=1",
    "critic.pp=1",
    "rollout={async_rollout: true, in_flight_updates: true, use_dynamic_batching: false}",
    "checkpoint.save_interval=2",
]
IN_FLIGHT_POINTS: dict[str, Fault] = {
    "a weight switch in flight, engine": _kill(0, "reshard", None),
    "a weight switch in flight, actor": _kill(1, "reshard", None),
    "half a step waits for weights": _kill(1, "actor_update", 3),
    "the other half": _kill(0, "rollout", 4, delay=0.1),
}
# A run whose weights go to the engines while the critic updates, and where they are on
# their way or about to leave.
OVERLAP = [
    "reshard={overlap: true, alias: never, check_every: 1}",
    "actor.ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 20000}",
]
OVERLAP_POINTS: dict[str, Fault] = {
    "weights on their way": _kill(0, "critic_update", 3),
    "weights on their way, rank 1": _kill(1, "critic_update", 2, delay=0.02),
    "weights about to leave": _kill(1, "actor_update", 3, delay=0.05),
    "weights arrive": _kill(0, "reshard", 2),
}
# A run on four nodes, three of which have engines and pass changed weights on to each
# other; and where it is hit meanwhile.
RELAYED = [
    "placement={actor: 0, rollout: 1-3}",
    # In 16 bits, steps of this size change a part of the weights.
    "actor={tp: 1, optimizer: {lr: 1.0e-5}}",
    "model.dtype=bfloat16",
    "critic.pp=1",
    "rollout.use_dynamic_batching=false",
    "reshard={bucket_mb: 1, check_every: 1, delta: on}",
]
RELAYED_RANKS = 4
RELAYED_POINTS: dict[str, Fault] = {
    "inside a relayed reshard, actor": _kill(0, "reshard", 2, message=2),
    "inside a relayed reshard, engine": _kill(2, "reshard", 3, message=1),
}
# A run whose actor, on two ranks, writes changed weights to a folder for a vLLM server
# (`with_server`); and where it is hit meanwhile. The server answers one request at a
# time: its last bits depend on the batch.
CHANGES = [
    "placement={rollout: 0, actor: 1-2}",
    # In 16 bits, steps of this size change a part of the weights.
    "model.dtype=bfloat16",
    "actor.optimizer.lr=3e-6",
    "rollout.use_dynamic_batching=false",
    "reshard={delta: on, check_every: 1}",
]
CHANGES_RANKS = 3
CHANGES_POINTS: dict[str, Fault] = {
    "inside a file of changes": _kill(
        2, "reshard", 2, byte=1_000, file="changes-1.safetensors"
    ),
    "between files of changes": _kill(1, "reshard", 3, file="changes.json"),
    "before changes are published": _kill(1, "reshard", 3, file="fingerprint.json"),
}


def with_server(url: str, token_env: str) -> list[str]:
    """Settings of `CHANGES` with a vLLM server, whose token is in a variable."""
    servers = {
        "urls": [url],
        "token_env": token_env,
        "max_requests": 1,
        "poll_seconds": 0.05,
    }
    return ["rollout.engine=server", f"rollout.servers={json.dumps(servers)}", *CHANGES]


@dataclass(frozen=True)
class Hit:
    """A run that something happened to.

    Attributes:
        happened: the fault struck; a signal that comes too late to matter has struck as well.
        wrong: what is not as it should be, in words.
        resumed_from: the checkpoint that it had started from; empty: from nothing.
    """

    ended: Ended
    happened: bool
    wrong: list[str]
    resumed_from: str


def hit(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    fault: Fault,
    *more: str,
    mark: Path | None = None,
    nodes: int | None = None,
) -> Hit:
    """Start (or go on with) the run in `runs`, and let the fault happen to it.

    Args:
        nodes: as many ranks, each on a node of its own; None: two ranks on one node.
    """
    mark = mark or runs / "struck"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    environment = replace(fault, mark=str(mark)).environment()
    started = arguments(inputs, runs, *more)
    ended = launch.command(
        started, logs=runs / "output", environment=environment, **_on_nodes(nodes)
    )
    happened = mark.exists()
    wrong = _wrong_end(fault, ended) if happened else ["it did not happen"]
    return Hit(ended, happened, wrong, resumed_from(ended))


def resumed_from(ended: Ended) -> str:
    """The name of the checkpoint that a run went on from, as it said."""
    found = re.search(r"resumed from (\S+):", ended.text)
    return Path(found[1]).name if found else ""


def run_on(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    *more: str,
    nodes: int | None = None,
    deadline: float = JOB_DEADLINE,
) -> Ended:
    """Start the run, or go on with it, without a fault.

    Args:
        deadline: seconds until it counts as hung.
    """
    started = arguments(inputs, runs, *more)
    return launch.command(
        started, logs=runs / "output", deadline=deadline, **_on_nodes(nodes)
    )


def _on_nodes(nodes: int | None) -> dict[str, Any]:
    if nodes is None:
        return {}
    return {
        "ranks": nodes,
        "on_rank": {rank: {"GROUP_RANK": str(rank)} for rank in range(nodes)},
    }


def finish(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    expected: Remains,
    *more: str,
    nodes: int | None = None,
) -> tuple[Ended, list[str]]:
    """Start the run again, without a fault; what differs at its end from what is expected."""
    ended = run_on(launch, inputs, runs, *more, nodes=nodes)
    if any(ended.codes):
        return ended, [f"exit codes {ended.codes}: {ended.text[-500:]}"]
    found = without_bytes(remains(runs / "run"))
    return ended, differences(found, without_bytes(expected))


def of_kind(fault: Fault, kind: Kind) -> Fault:
    """The same point, hit in another way."""
    can_wait = kind in ("kill", "stop", "term", "usr1")
    return replace(fault, kind=kind, delay=fault.delay if can_wait else 0.0)


def _wrong_end(fault: Fault, ended: Ended) -> list[str]:
    own, others = (
        ended.codes[fault.rank],
        [code for rank, code in enumerate(ended.codes) if rank != fault.rank],
    )
    if fault.kind in ("term", "usr1"):
        # 0: it came when there was nothing left to save
        well = ended.codes in (
            [SAVED_AND_LEFT] * len(ended.codes),
            [0] * len(ended.codes),
        )
        return [] if well else [f"exit codes {ended.codes}"]
    wrong = []
    if own != (-9 if fault.kind in ("kill", "stop") else 1) or any(
        code != 1 for code in others
    ):
        wrong.append(f"exit codes {ended.codes}")
    if ended.spread > ALL_END_WITHIN:
        wrong.append(f"the others ended {ended.spread:.0f} s later")
    named = re.compile(rf"rank {fault.rank}\b.*(?:was in|failed in|stalls|: )")
    if not named.search(ended.text):
        wrong.append(f"nobody names rank {fault.rank} and what it was doing")
    return wrong
