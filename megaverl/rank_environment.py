"""Environment variables and CPU binding of a job's processes, in one place.

A node's agent (`megaverl.trainer.elastic_agent`) calls `prepare_agent`, and every rank
calls `prepare_rank` before it imports torch, because CUDA, NCCL, OpenMP and the name
service read these variables only once. Variables that are set already are kept, so the
user's values win. So launch scripts, SLURM, Kubernetes and the user's own torchrun give
equal environments.

These variables are left alone on purpose:

- NCCL_CUMEM_ENABLE (-2, chosen by driver: NCCL's src/misc/cudawrap.cc). vLLM 0.32 needs no value. Set it on all ranks
  or on none.
- NCCL_NVLS_ENABLE (2, on if there is NVSwitch: src/transport/nvls.cc). It sums in the switch, in another order than
  rings do. torch's deterministic mode and vLLM's batch invariance turn it off themselves.
- NCCL_ALGO, NCCL_PROTO, NCCL_NTHREADS and buffer sizes. NCCL chooses by message and topology.
- PYTORCH_CUDA_ALLOC_CONF. See docs/tuning.md.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megaverl.gpus import GPU, count_gpus, visible_gpus

INTERFACE = "MEGAVERL_INTERFACE"
NUMA = "MEGAVERL_NUMA_BINDING"
# Set by an agent that chose OMP_NUM_THREADS itself, so that a rank which knows more may
# choose again.
CHOSEN_THREADS = "MEGAVERL_CHOSE_THREADS"
CACHES = "MEGAVERL_CACHE"
PCI_DEVICES = Path("/sys/bus/pci/devices")
NUMA_NODES = Path("/sys/devices/system/node")
BLACKWELL = 10  # major compute capability
# Threads of a rank with a GPU; packing and checkpoints gain nothing from more.
MOST_THREADS = 8


class Variable(NamedTuple):
    """A variable that a process gets unless it is set.

    Attributes:
        reason: the reason, with its source if there is one.
    """

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Work:
    """The work of a rank, as far as its environment depends on it.

    Attributes:
        engines: training engines on its node: "megatron", "fsdp".
        generates: whether a vLLM engine runs in the ranks' processes.
        steps_on_cpu: whether an optimizer steps on the CPU (`optimizer_cpu_offload`).
    """

    engines: frozenset[str] = frozenset()
    generates: bool = False
    steps_on_cpu: bool = False


def prepare_agent(environment: MutableMapping[str, str], nproc: int) -> None:
    """Set the variables of a node's agent, which its ranks inherit.

    Args:
        environment: changed in place; `os.environ`.
        nproc: ranks of this node.
    """
    if "OMP_NUM_THREADS" not in environment:
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(
            threads_per_rank(nproc, cores, count_gpus())
        )
        environment[CHOSEN_THREADS] = "1"
    _set_missing(environment, job_variables(environment, on_gpus=count_gpus() > 0))


def prepare_rank(environment: MutableMapping[str, str], work: Work) -> None:
    """Set the variables of a rank, and bind it to the CPU cores near its GPU. To be called before torch is imported.

    Args:
        environment: changed in place; `os.environ`.
    """
    gpus = visible_gpus()
    _set_missing(environment, job_variables(environment, on_gpus=bool(gpus)))
    if not gpus:
        return
    _set_missing(environment, gpu_variables(environment, work, gpus))
    if work.generates and not work.steps_on_cpu and environment.pop(CHOSEN_THREADS, ""):
        # Further OpenMP threads would spin beside vLLM's thread, which launches a few
        # thousand kernels a second.
        environment["OMP_NUM_THREADS"] = "1"
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    if local_rank < len(gpus) and environment.get(NUMA, "on") != "off":
        bind_to_node_of(gpus[local_rank])


def _set_missing(
    environment: MutableMapping[str, str], variables: Iterator[Variable]
) -> None:
    for variable in variables:
        environment.setdefault(variable.name, variable.value)


def job_variables(
    environment: Mapping[str, str], *, on_gpus: bool
) -> Iterator[Variable]:
    """Yield the variables of every process of a job."""
    if interface := environment.get(INTERFACE):
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            yield Variable(
                name,
                interface,
                "else NCCL and gloo take the first interface, which may be the slow one",
            )
    yield Variable(
        "RES_OPTIONS",
        "timeout:1 attempts:5",
        "torch asks the name service for every connection to the job's store (2.13, c10d/socket.cpp); a lost answer is "
        "asked for again after 1 s, not after 5",
    )
    if not on_gpus:
        return
    yield Variable(
        "NCCL_GRAPH_REGISTER",
        "0",
        "registered buffers of collectives in CUDA graphs (NCCL's default, src/enqueue.cc) are pinned: an engine that "
        "sleeps could not give its graphs' memory back. vLLM sets it too late for a process that trains as well",
    )
    yield Variable(
        "NCCL_DEBUG",
        "WARN",
        "NCCL says what is wrong; INFO also shows rings and adapters",
    )
    yield Variable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "2000",
        "torch's flight recorder (FlightRecorder.hpp): megaverl reads from it in which collective a rank waits",
    )
    yield Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "the same as files in the run's folder, if torch's own deadline passes first",
    )


def gpu_variables(
    environment: Mapping[str, str], work: Work, gpus: Collection[GPU]
) -> Iterator[Variable]:
    """Yield the variables of a rank with a GPU that depend on what it does and on the GPUs."""
    if (
        work.engines == {"megatron"}
        and min(gpu.capability[0] for gpu in gpus) < BLACKWELL
    ):
        # FSDP wants several queues, CUDA's default.
        yield Variable(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "up to Hopper tensor, context and sequence parallelism overlap their collectives only if kernels start in "
            "the order in which they were queued (megatron-core 0.19.2, training/arguments.py)",
        )
    if int(environment.get("WORLD_SIZE", "1")) > int(
        environment.get("LOCAL_WORLD_SIZE", "1")
    ):
        yield from cache_variables(environment)


def cache_variables(environment: Mapping[str, str]) -> Iterator[Variable]:
    """Yield cache folders on this node for code that vLLM, Triton and FlashInfer compile, for a job on several nodes.

    Their defaults are under $HOME, which the nodes of a cluster share: a thousand ranks
    would write there at once.
    """
    folder = Path(environment.get(CACHES) or f"/tmp/megaverl_cache_{os.getuid()}")
    if not _is_own_folder(folder):
        return
    reason = "compiled code lies on the node's own disk, not in a home folder that all ranks of a cluster share"
    yield Variable("VLLM_CACHE_ROOT", str(folder / "vllm"), reason)
    yield Variable("TRITON_CACHE_DIR", str(folder / "triton"), reason)
    yield Variable("FLASHINFER_WORKSPACE_BASE", str(folder), reason)


def _is_own_folder(folder: Path) -> bool:
    """Return whether a folder belongs to this user alone, creating it if needed.

    Other users could put code into any other folder.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode)
        and facts.st_uid == os.getuid()
        and not facts.st_mode & 0o022
    )


def threads_per_rank(nproc: int, cores: int, gpus: int) -> int:
    """Return the default of OMP_NUM_THREADS: a rank's share of the cores, with an upper bound if GPUs do the work.

    torchrun would give each of several ranks one thread.
    """
    share = max(1, cores // nproc)
    return min(share, MOST_THREADS) if gpus else share


def bind_to_node_of(gpu: GPU) -> set[int] | None:
    """Bind this process to the cores of a GPU's NUMA node; return them, or None if nothing was done.

    Memory then comes from that node too, since Linux allocates a page where it is first
    touched. Nothing is done if the kernel does not know the node, or if the process may
    only use cores of one node already.
    """
    cores = cores_of(gpu)
    allowed = os.sched_getaffinity(0)
    wanted = cores & allowed
    if not wanted or wanted == allowed:
        return None
    os.sched_setaffinity(0, wanted)
    return wanted


def cores_of(gpu: GPU) -> set[int]:
    """Return the cores of a GPU's NUMA node as the kernel lists them; empty if it does not know the node."""
    try:
        node = int((PCI_DEVICES / gpu.bus / "numa_node").read_text(encoding="utf-8"))
        listed = (
            (NUMA_NODES / f"node{node}" / "cpulist").read_text(encoding="utf-8")
            if node >= 0
            else ""
        )
    except (OSError, ValueError):
        return set()
    ranges = re.findall(r"(\d+)(?:-(\d+))?", listed)
    return {
        core
        for first, last in ranges
        for core in range(int(first), int(last or first) + 1)
    }
