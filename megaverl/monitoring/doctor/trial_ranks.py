"""Processes of the trials, by name: `python -m megaverl.monitoring.doctor.trial_ranks NAME`.

- add_up: one of two ranks that run an all-reduce.
- draw_token: make a tiny model and an engine, and generate one token.
- measure_links: one rank per GPU; measures an all-reduce and every pair, and compares them with NVLink.

The bus bandwidth of an all-reduce is 2 (n - 1) / n of its bytes per second, as
nccl-tests define it (its PERFORMANCE.md): the rate of a link, whatever n is.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.roles import RolloutConfig
from megaverl.monitoring.doctor.hardware import (
    ask,
    link_rate,
    pair_rate,
    read_links,
    read_topology,
)
from megaverl.monitoring.doctor.trials import RANKS, answer, join
from megaverl.platform import platform

NUMEL = 4 * 2**20
ROUNDS = 5


def add_up() -> None:
    """Run an all-reduce with the other rank, check the sum, and answer with its time."""
    rank, _, device = join(RANKS)
    with_gpus = device.type == "cuda"
    tensor = torch.full((NUMEL,), float(rank + 1), device=device)
    # The first all-reduce opens the connections, so it is not timed.
    dist.all_reduce(tensor)
    expected = sum(range(1, RANKS + 1))
    if not bool((tensor == expected).all()):
        raise SystemExit(
            f"the sum is wrong: found {float(tensor[0])}, expected {expected}"
        )
    dist.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(tensor)
    if with_gpus:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / ROUNDS
    if rank != 0:
        answer()
    else:
        nbytes = tensor.numel() * tensor.element_size()
        where = "over NCCL on two GPUs" if with_gpus else "over gloo"
        if not with_gpus and torch.cuda.is_available():
            where += " (one GPU is too few to try NCCL)"
        answer(f"right, {where}: {nbytes / 2**20:.0f} MiB in {seconds * 1e3:.1f} ms")
    dist.destroy_process_group()


# Heads have 64 dimensions, which every attention kernel supports.
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def draw_token() -> None:
    """Generate one token and answer with its times."""
    platform.start()
    dist.init_process_group(
        platform.backend, store=dist.HashStore(), rank=0, world_size=1
    )
    answer(
        generate_one("vllm" if importlib.util.find_spec("vllm") is not None else "hf")
    )
    dist.destroy_process_group()


def generate_one(engine_name: str) -> str:
    """Make a model and an engine, generate a token, and return a sentence with the times. Needs a process group."""
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.rollout import EngineOptions, make_engine
    from megaverl.rollout.engine import SamplingOptions

    begin = time.perf_counter()
    limits = {"gpu_memory_utilization": 0.2} if platform.is_cuda else {}
    options = {"engine": engine_name, "vllm": {"enforce_eager": True, **limits}}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_folder(Path(folder), "Qwen2ForCausalLM", **MODEL)
        engine = make_engine(
            RolloutConfig.model_validate(options),
            folder,
            EngineOptions(seed=0, dtype=platform.default_dtype, max_model_len=16),
        )
        ready = time.perf_counter()
        generation = engine.generate(
            [[1, 2, 3]], SamplingOptions(1, temperature=0.0), [0]
        )[0]
    done = time.perf_counter()
    engine.close()
    return (
        f"token {generation.token_ids[0]} from {engine_name} on {platform.device.type}: "
        f"engine ready after {ready - begin:.1f} s, token after {done - ready:.1f} s more"
    )


# Least acceptable fraction of the links' rate. H100s with NVSwitch reach 87 % from one
# GPU to another (NVIDIA/nccl, issue 1264), and an all-reduce somewhat less. Below 60 %
# something is wrong, not only noisy.
ENOUGH = 0.6
FIX = (
    "NCCL_DEBUG=INFO shows the way taken (P2P/CUMEM or NVLS, not SHM or NET); unset NCCL_P2P_DISABLE and "
    "NCCL_P2P_LEVEL; the lines above about NVLink and the fabric; nothing else may run meanwhile"
)


def measure_links() -> None:
    """Measure an all-reduce of all GPUs and the rate of every pair, and answer with a judgement."""
    rank, size, device = join(torch.cuda.device_count())
    on_gpus = device.type == "cuda"
    # float32: 256 MiB, or 4.
    whole = torch.ones((64 if on_gpus else 1) * 2**20, device=device)
    part = whole[: whole.numel() // 4]
    all_reduce = (
        2 * (size - 1) / size * whole.nbytes / seconds(lambda: dist.all_reduce(whole))
    )
    rates = torch.zeros(size, size, dtype=torch.float64, device=device)
    for sender in range(size):
        for receiver in range(size):
            dist.barrier()  # one pair at a time
            if sender != receiver and rank in (sender, receiver):
                taken = seconds(functools.partial(_pass, part, sender, receiver))
                if rank == receiver:
                    rates[sender, receiver] = part.nbytes / taken
    dist.all_reduce(rates)
    if rank == 0:
        # Nothing is expected of a CPU's loopback.
        expected_rates = expected() if on_gpus else (0.0, 0.0)
        answer(**judge(all_reduce / 1e9, (rates / 1e9).tolist(), *expected_rates))
    else:
        answer()
    dist.destroy_process_group()


def _pass(tensor: torch.Tensor, sender: int, receiver: int) -> None:
    sends = dist.get_rank() == sender
    operation = dist.P2POp(
        dist.isend if sends else dist.irecv, tensor, receiver if sends else sender
    )
    # A batch uses the group's communicator. Single sends would create a communicator
    # for each pair.
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def seconds(work: Callable[[], object]) -> float:
    """Return the mean seconds of some rounds, after one that opens connections."""
    begin = 0.0
    for turn in range(ROUNDS + 1):
        if turn == 1:
            _wait()
            begin = time.perf_counter()
        work()
    _wait()
    return (time.perf_counter() - begin) / ROUNDS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def expected() -> tuple[float, float]:
    """Return NVLink's GB/s in one direction: of a whole GPU, and between the two GPUs with the fewest links."""
    try:
        links, topology = (
            read_links(ask("nvlink", "-s")),
            read_topology(ask("topo", "-m")),
        )
    except (OSError, subprocess.SubprocessError):
        return 0.0, 0.0
    return link_rate(links), pair_rate(topology, links)


def judge(
    all_reduce: float,
    pairs: list[list[float]],
    gpu_link_rate: float,
    pair_link_rate: float,
) -> dict[str, str]:
    """Return the answer about the measured rates.

    Args:
        all_reduce: bus bandwidth in GB/s.
        pairs: GB/s from a rank (row) to another.
        gpu_link_rate, pair_link_rate: NVLink's rates; 0 without NVLink.
    """
    rates = {
        (a, b): rate
        for a, row in enumerate(pairs)
        for b, rate in enumerate(row)
        if a != b
    }
    (a, b), slowest = min(rates.items(), key=lambda item: item[1])
    fastest = max(rates.values())
    text = (
        f"all-reduce of {len(pairs)} ranks: {all_reduce:.1f} GB/s bus bandwidth{_share(all_reduce, gpu_link_rate)}\n"
        f"pairs: {slowest:.1f} ({a} to {b}) to {fastest:.1f} GB/s{_share(slowest, pair_link_rate)}"
    )
    if all_reduce < ENOUGH * gpu_link_rate or slowest < ENOUGH * pair_link_rate:
        return {"found": text, "status": "warn", "fix": FIX}
    if slowest < fastest / 2:
        return {
            "found": f"{text}: one pair has half of another's",
            "status": "warn",
            "fix": FIX,
        }
    return {"found": text}


def _share(rate: float, link: float) -> str:
    return f", {100 * rate / link:.0f} % of NVLink's {link:.0f} GB/s" if link else ""


if __name__ == "__main__":
    {"add_up": add_up, "draw_token": draw_token, "measure_links": measure_links}[
        sys.argv[1]
    ]()
