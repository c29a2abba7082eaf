"""The environment of a job's processes: what is set for whom, and on which cores they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaverl import rank_environment
from megaverl.config import load_config
from megaverl.gpus import GPU, visible_gpus
from megaverl.rank_environment import (
    Work,
    bind_to_node_of,
    cores_of,
    prepare_agent,
    prepare_rank,
)
from megaverl.trainer.preflight import prepare_environment

MEGATRON = Work(frozenset({"megatron"}), generates=True)
GIVEN = (
    "model.path=m",
    "data.train=t.jsonl",
    "reward=exact_match",
    "data.validation=t.jsonl",
)
LISTING = """\
0, 9.0, 00000000:1B:00.0
1, 9.0, 00000000:43:00.0
2, 9.0, 00000001:9D:00.0
"""


def write_smi(folder: Path, listing: str = LISTING) -> None:
    """A program that lists GPUs as nvidia-smi does."""
    names = "".join(
        f"GPU {number}: H100 (UUID: GPU-{number})\n"
        for number in range(len(listing.splitlines()))
    )
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -L ]; then printf '{names}'; else printf '{listing}'; fi\n"
    )
    program.chmod(0o755)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three GPUs: two of one NUMA node, with the even cores of this process, and one of another."""
    write_smi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(rank_environment, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(rank_environment, "NUMA_NODES", tmp_path / "numa")
    for bus, node in (("0000:1b:00.0", 0), ("0000:43:00.0", 0), ("0001:9d:00.0", 1)):
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "numa_node").write_text(f"{node}\n")
    for node, cores in ((0, "0-3,8\n"), (1, "4-7,9-11\n")):
        (tmp_path / "numa" / f"node{node}").mkdir(parents=True)
        (tmp_path / "numa" / f"node{node}" / "cpulist").write_text(cores)
    return tmp_path


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The cores that this process may use: twelve, then what it is bound to."""
    held = [set(range(12))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: held[-1])
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda process, wanted: held.append(set(wanted))
    )
    return held


def test_gpus_are_listed_as_cuda_shows_them(
    gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [gpu.bus for gpu in visible_gpus()] == [
        "0000:1b:00.0",
        "0000:43:00.0",
        "0001:9d:00.0",
    ]
    assert visible_gpus()[0] == GPU(0, (9, 0), "0000:1b:00.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [gpu.number for gpu in visible_gpus()] == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("engines", "capability", "value"),
    [
        ({"megatron"}, "9.0", "1"),
        ({"megatron"}, "8.0", "1"),
        ({"megatron"}, "10.0", None),
        ({"fsdp"}, "9.0", None),
        ({"megatron", "fsdp"}, "9.0", None),
        (set(), "9.0", None),
    ],
)
def test_one_queue_for_megatron_up_to_hopper(
    engines: set[str],
    capability: str,
    value: str | None,
    gpus: Path,
    cores: list[set[int]],
) -> None:
    write_smi(gpus / "bin", f"0, {capability}, 00000000:1B:00.0\n")
    environment: dict[str, str] = {}
    prepare_rank(environment, Work(frozenset(engines)))
    assert environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == value
    prepare_rank(
        given := {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, Work(frozenset(engines))
    )
    assert given["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "what is set stays"


def test_a_rank_of_any_launcher_gets_nccl_settings(
    gpus: Path, cores: list[set[int]]
) -> None:
    environment = {"MEGAVERL_INTERFACE": "eth1", "NCCL_DEBUG": "INFO"}
    prepare_rank(environment, MEGATRON)
    assert (
        environment["NCCL_GRAPH_REGISTER"] == "0"
        and environment["NCCL_DEBUG"] == "INFO"
    )
    assert (
        environment["NCCL_SOCKET_IFNAME"] == environment["GLOO_SOCKET_IFNAME"] == "eth1"
    )
    assert environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"


def test_a_processor_gets_nothing_that_is_for_gpus(
    monkeypatch: pytest.MonkeyPatch, cores: list[set[int]]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    prepare_rank(environment, MEGATRON)
    assert (
        set(environment) == {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "RES_OPTIONS"}
        and len(cores) == 1
    )


@pytest.mark.parametrize(
    ("given", "work", "threads"),
    [
        ({}, MEGATRON, "1"),  # vLLM's loop launches kernels beside them
        ({}, Work(frozenset({"megatron"})), "4"),  # packing, checkpoints
        ({}, Work(frozenset({"megatron"}), generates=True, steps_on_cpu=True), "4"),
        ({"OMP_NUM_THREADS": "3"}, MEGATRON, "3"),
    ],
)
def test_threads_beside_an_engine(
    given: dict[str, str], work: Work, threads: str, gpus: Path, cores: list[set[int]]
) -> None:
    environment = dict(given)
    prepare_agent(environment, nproc=3)
    prepare_rank(environment, work)
    assert environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, {0, 1, 2, 3, 8}), (1, {0, 1, 2, 3, 8}), (2, {4, 5, 6, 7, 9, 10, 11})],
)
def test_a_rank_runs_on_the_cores_of_its_gpus_node(
    rank: int, expected: set[int], gpus: Path, cores: list[set[int]]
) -> None:
    prepare_rank({"LOCAL_RANK": str(rank)}, MEGATRON)
    assert cores[-1] == expected


def test_where_cores_stay_as_they_are(gpus: Path, cores: list[set[int]]) -> None:
    """Someone has bound the process; the kernel does not know the node; the user says no."""
    first = visible_gpus()[0]
    cores.append({1, 2})
    assert bind_to_node_of(first) is None, "one node alone already"
    cores.append({4, 5})
    assert bind_to_node_of(first) is None, "no core of that node is this process's"
    cores.append(set(range(12)))
    (gpus / "pci" / first.bus / "numa_node").write_text("-1\n")
    assert cores_of(first) == set() and bind_to_node_of(first) is None
    prepare_rank({"LOCAL_RANK": "2", "MEGAVERL_NUMA_BINDING": "off"}, MEGATRON)
    assert cores[-1] == set(range(12))


def test_caches_of_a_job_on_several_nodes_are_the_nodes_own(
    gpus: Path, cores: list[set[int]]
) -> None:
    folder = gpus / "cache"
    several = {
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "MEGAVERL_CACHE": str(folder),
    }
    prepare_rank(environment := several | {"TRITON_CACHE_DIR": "/mine"}, MEGATRON)
    assert (
        environment["VLLM_CACHE_ROOT"] == str(folder / "vllm")
        and environment["TRITON_CACHE_DIR"] == "/mine"
    )
    assert (
        environment["FLASHINFER_WORKSPACE_BASE"] == str(folder)
        and folder.stat().st_mode & 0o777 == 0o700
    )
    prepare_rank(one := several | {"WORLD_SIZE": "3"}, MEGATRON)
    assert "VLLM_CACHE_ROOT" not in one, (
        "of one node they stay in the home folder, and outlive a container"
    )
    folder.chmod(0o777)
    prepare_rank(shared := dict(several), MEGATRON)
    assert "VLLM_CACHE_ROOT" not in shared, "others could put code into it"


@pytest.mark.parametrize(
    ("command", "keys", "expected"),
    [
        (
            "train",
            ["algorithm.name=grpo", "algorithm.group_size=4"],
            Work(frozenset({"megatron"}), generates=True),
        ),
        (
            "train",
            ["actor.engine=fsdp", "algorithm.name=grpo", "algorithm.group_size=4"],
            Work(frozenset({"fsdp"}), generates=True),
        ),
        (
            "train",
            ["critic.engine=fsdp", "algorithm.name=ppo"],
            Work(frozenset({"fsdp", "megatron"}), generates=True),
        ),
        (
            "train",
            [
                "actor.optimizer.optimizer_cpu_offload=true",
                "algorithm.name=grpo",
                "algorithm.group_size=4",
            ],
            Work(frozenset({"megatron"}), generates=True, steps_on_cpu=True),
        ),
        ("sft", [], Work(frozenset({"megatron"}))),
        ("eval", [], Work(generates=True)),
    ],
)
def test_work_follows_the_configuration(
    command: str, keys: list[str], expected: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Work] = []
    monkeypatch.setattr(
        "megaverl.trainer.preflight.prepare_rank",
        lambda environment, work: found.append(work),
    )
    prepare_environment(load_config(None, [*GIVEN, *keys], check_paths=False), command)
    assert found == [expected]


def test_a_command_sets_them_before_torch_is_imported(gpus: Path) -> None:
    """CUDA, NCCL and OpenMP read theirs once."""
    program = f"""
import os, sys
from megaverl.cli import main, train

def stop(config, command):
    assert "torch" not in sys.modules
    prepare(config, command)
    print(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], os.environ["NCCL_GRAPH_REGISTER"])
    sys.exit(0)

prepare, train.prepare_environment = train.prepare_environment, stop
read = train.read_config
train.read_config = lambda given, name, **_: read(given, name, check_paths=False)
main.main(["train", *{list(GIVEN)!r}])
"""
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1", "0"]), done.stderr
