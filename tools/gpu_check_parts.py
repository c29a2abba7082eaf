"""Checks of tools/gpu_check.py, and the program of their ranks: `python -m tools.gpu_check_parts NAME FOLDER DEVICE`.

A check is a function that every one of its ranks calls in a process group of their own; what rank 0 returns is the
finding. All go the way that a run goes: the same models, engines, transports and commands. A rank whose device is not
DEVICE checks nothing and fails, and so does a check in which a rank has used no memory of its GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from tools.gpu_check_models import (
    Outcome,
    actor_and_engine,
    captured_graphs,
    device,
    disagreement,
    forward,
    free_memory,
    generate,
    is_rehearsal,
    load_model,
    logit_errors,
    median_seconds,
    on_cuda,
    outside,
    responses_batch,
    resumed,
    train,
)

ROOT = Path(__file__).resolve().parents[1]
# Reported means of the difference between vLLM and Megatron in bfloat16 are 0.01 to
# 0.06, and this is the largest; in float32 only the order of sums differs.
CLOSE = {torch.bfloat16: 0.1, torch.float32: 1e-3}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        function: called by every rank with a folder that all share.
        world: number of ranks: one, two, or all GPUs of this machine (on a CPU: two).
        cuda_only: whether the check makes no sense on a CPU.
        needs: modules without which the check cannot run.
        captures: whether it checks CUDA graphs alone.
    """

    function: Callable[[Path], Outcome]
    world: Literal["one", "two", "all"]
    cuda_only: bool
    needs: tuple[str, ...]
    captures: bool = False

    @property
    def section(self) -> str:
        return "one GPU" if self.world == "one" else "two GPUs or more"

    def ranks(self, device: str, gpus: int) -> int:
        return {"one": 1, "two": 2, "all": gpus if device == "cuda" else 2}[self.world]

    def why_not(self, device: str, gpus: int) -> str:
        """Return the reason for which the check cannot run here; empty if it can."""
        if self.cuda_only and device != "cuda":
            return "it needs a GPU"
        if self.captures and is_rehearsal():
            return "a rehearsal captures no graphs"
        if device == "cuda" and self.world != "one" and gpus < 2:
            return "it needs two GPUs"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


CHECKS: dict[str, Check] = {}


def check(
    world: Literal["one", "two", "all"] = "one",
    *,
    cuda_only: bool = False,
    needs: tuple[str, ...] = (),
    captures: bool = False,
) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """Return a decorator that registers a check under its function's name."""

    def add(function: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        CHECKS[function.__name__] = Check(function, world, cuda_only, needs, captures)
        return function

    return add


@check(needs=("vllm",))
def engine(folder: Path) -> Outcome:
    """Check vLLM beside the actor, in one engine.

    It adopts the actor's storage before graphs are captured, answers as the actor
    would, gives memory back asleep, answers the same awake, and follows an update.
    """
    model, sync, made = actor_and_engine(folder, sleep=True)
    limit = CLOSE[model.config.params_dtype]
    ours = {
        parameter.untyped_storage().data_ptr()
        for parameter in model.parameters.values()
    }
    theirs = made.named_parameters().values()
    shared = sum(
        tensor.nbytes
        for tensor in theirs
        if tensor.untyped_storage().data_ptr() in ours
    )
    whole = sum(tensor.nbytes for tensor in theirs)
    graphs = captured_graphs(made)

    sync.reshard()
    before = generate(made, sync)
    differences = [disagreement(model, before)]

    awake = free_memory()
    sync.sleep()
    given_back = free_memory() - awake
    after_sleep = generate(made, sync)
    same = [generation.token_ids for generation in before] == [
        generation.token_ids for generation in after_sleep
    ]

    sync.sleep()
    sync.source_changes()
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.data.mul_(1.05)
    sync.reshard()
    after_update = generate(made, sync)
    changed = any(
        a.log_probs != b.log_probs for a, b in zip(before, after_update, strict=True)
    )
    differences.append(disagreement(model, after_update))

    failed = {
        "shares no storage": shared == 0,
        "has captured no graphs": on_cuda() and not is_rehearsal() and not graphs,
        "is apart from the actor": max(differences) >= limit,
        "gives no memory back asleep": on_cuda() and given_back <= 0,
        "answers otherwise after sleep": not same,
        "ignores an update": not changed,
    }
    measured = f"{shared / 2**20:.1f} of {whole / 2**20:.1f} MiB shared; graphs {graphs or 'none'}; log-probs "
    measured += f"{differences[0]:.1e} apart, after an update {differences[1]:.1e}; "
    measured += f"asleep {given_back / 2**30:.2f} GiB given back"
    if wrong := [text for text, holds in failed.items() if holds]:
        measured += f". The engine {', '.join(wrong)}"
    return Outcome(not wrong, measured, f"log-probs under {limit} apart, nothing wrong")


@check()
def logits(folder: Path) -> Outcome:
    """Compare logits in 16 bits with Hugging Face's in float32: no further off than Hugging Face's own in 16 bits."""
    model, path = load_model(folder)
    ours, theirs = logit_errors(model, path)
    return Outcome(
        ours < 2 * theirs, f"mean error {ours:.2e}", f"under twice {theirs:.2e}"
    )


@check(cuda_only=True, needs=("transformer_engine",))
def transformer_engine(folder: Path) -> Outcome:
    """Compare Transformer Engine's layers with megatron-core's local ones in bfloat16: errors and speed."""
    from megaverl.models import build, options

    with_engine, path = load_model(folder)
    ours, theirs = logit_errors(with_engine, path)
    with (
        mock.patch.object(build, "uses_transformer_engine", lambda: False),
        mock.patch.object(options, "uses_transformer_engine", lambda: False),
    ):
        local, _ = load_model(folder)
        plain, _ = logit_errors(local, path)
    times = [
        median_seconds(functools.partial(forward, model))
        for model in (with_engine, local)
    ]
    measured = f"mean error {ours:.2e}, local {plain:.2e}; {times[0] * 1e3:.2f} ms, local {times[1] * 1e3:.2f} ms"
    return Outcome(
        max(ours, plain) < 2 * theirs, measured, f"both under twice {theirs:.2e}"
    )


@check()
def packing(folder: Path) -> Outcome:
    """Compare log-probs of samples laid end to end (on a GPU: THD) with those of padded rows."""
    from megaverl.workers.policy import Policy

    packed, _ = load_model(folder)
    if packed.pack is None:
        return Outcome(
            True,
            "not checked: this build of the model does not pack (padded rows are used)",
            "equal",
        )
    padded, _ = load_model(folder, pack_samples=False)
    batch = responses_batch(
        [[int(i) % 900 for i in range(10 * n, 10 * n + 3 * n + 2)] for n in range(8)]
    )
    log_probs = [
        Policy(model, temperature=1.0, micro_batch_tokens=256).log_probs(batch)
        for model in (packed, padded)
    ]
    difference = float((log_probs[0] - log_probs[1]).abs().max())
    limit = CLOSE[packed.config.params_dtype]
    return Outcome(
        difference < limit, f"largest difference {difference:.1e}", f"under {limit}"
    )


@check()
def training(folder: Path) -> Outcome:
    """Take ten updates with float32 master weights: the loss falls as a language model's should."""
    losses, _ = train(folder)
    return Outcome(
        losses[-1] < 0.8 * losses[0],
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}",
        "falls by a fifth",
    )


@check(cuda_only=True)
def saving_memory(folder: Path) -> Outcome:
    """Offload to pinned memory and checkpoint activations: the losses are the same, and memory between updates is less.

    Adapters alone must learn as well.
    """
    from megaverl.config.roles import LoraConfig, OffloadConfig

    offload = OffloadConfig(parameters=True, optimizer=True, gradients=True)
    kept, held = train(folder)
    away, left = train(folder, offload=offload, activation_checkpointing="full")
    adapted, small = train(folder, lora=LoraConfig(rank=8, alpha=16.0))
    passed = (
        kept == away and left < held / 4 and adapted[-1] < adapted[0] and small < held
    )
    measured = f"losses {'equal' if kept == away else 'different'}, {held / 2**20:.1f} -> {left / 2**20:.1f} MiB; "
    measured += (
        f"adapters {adapted[0]:.3f} -> {adapted[-1]:.3f} with {small / 2**20:.1f} MiB"
    )
    return Outcome(
        passed, measured, "equal losses, a quarter of the memory; adapters learn"
    )


@check()
def local_transport(folder: Path) -> Outcome:
    """Time boxes that move within a device against plain copies of 2 GiB in bfloat16 (on a CPU 8 MiB)."""
    full_size = on_cuda() and not is_rehearsal()
    from megaverl.sharding.boxes import whole
    from megaverl.sharding.plan import Transfer
    from megaverl.weights.transports.local import copy_local

    width = 8192 if full_size else 512
    source = {
        str(i): torch.randn(width, width, device=device()).bfloat16() for i in range(16)
    }
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    box = whole((width, width))
    transfers = [Transfer(name, box, 0, name, box, 0, name, box) for name in source]
    transport = median_seconds(lambda: copy_local(transfers, source, target))
    # Before plain copies write the same.
    same = all(torch.equal(source[name], target[name]) for name in source)
    plain = median_seconds(
        lambda: [target[name].copy_(tensor) for name, tensor in source.items()]
    )
    num_bytes = 2 * sum(tensor.nbytes for tensor in source.values())  # read and written
    measured = f"{num_bytes / transport / 1e9:.0f} GB/s, plain copies {num_bytes / plain / 1e9:.0f} GB/s"
    fast = transport < 1.25 * plain or not full_size  # a CPU's clock is another matter
    return Outcome(same and fast, measured, "equal, at least 0.8 of plain copies")


@check(cuda_only=True, captures=True)
def graphs(folder: Path) -> Outcome:
    """Check that a captured forward pass sees weights copied in place after the capture, as by a reshard."""
    weight = torch.zeros(256, 256, device=device())
    inputs = torch.randn(8, 256, device=device())
    (inputs @ weight).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = inputs @ weight
    new = torch.randn_like(weight)
    weight.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    error = float((result - inputs @ new).abs().max())
    return Outcome(error < 1e-4, f"difference {error:.1e}", "0")


@check()
def saves(folder: Path) -> Outcome:
    """Run the command for four steps, resume at the save in the middle; with saves at once and in the background."""
    return resumed(folder)


@check(needs=("trl", "vllm"))
def beside_trl(folder: Path) -> Outcome:
    """Time a GRPO step with the sizes of Qwen2.5-0.5B against TRL's, in bfloat16, in turn (on a CPU: a tiny model)."""
    shape = {
        "layers": 24,
        "hidden": 896,
        "ffn": 4864,
        "heads": 14,
        "kv-heads": 2,
        "vocab": 151936,
    }
    work = {
        "response-tokens": 256,
        "prompt-tokens": 64,
        "steps": 5,
        "micro-batch-tokens": 16384,
    }
    if not on_cuda() or is_rehearsal():
        shape, work = (
            {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2, "kv-heads": 2},
            {"steps": 2, "warmup": 1},
        )
    sizes = [
        word
        for name, value in (shape | work).items()
        for word in (f"--{name}", str(value))
    ]
    command = [
        sys.executable,
        "tools/bench_step.py",
        "--nproc",
        "1",
        "--trl-nproc",
        "1",
        *sizes,
    ]
    command += [
        "--device",
        device().type,
        "--dtype",
        "bfloat16" if on_cuda() else "float32",
    ]
    command += ["--json", str(folder / "step.json")]
    subprocess.run(
        command, cwd=ROOT, env=outside(), check=True, stdout=subprocess.DEVNULL
    )
    medians = json.loads((folder / "step.json").read_text())["medians"]
    ours, theirs = medians["megaverl"], medians["trl"]
    parts = ", ".join(
        f"{part} {theirs[part] / ours[part]:.2f}"
        for part in ("rollout", "log_probs", "update")
    )
    measured = f"{ours['step']:.2f} s, TRL {theirs['step']:.2f} s: {theirs['step'] / ours['step']:.2f} x ({parts})"
    # each side refuses to run on another device than --device
    return Outcome(
        is_rehearsal() or ours["step"] <= theirs["step"],
        measured,
        "not slower",
        elsewhere=True,
    )


@check("all")
def collectives(folder: Path) -> Outcome:
    """Check sums and gathers over all ranks, through the helpers that a run uses."""
    from megaverl.distributed.collectives import gather_json, gather_rows

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((3, 2), float(rank + 1), device=device())
    total = rows.clone()
    dist.all_reduce(total)
    gathered = gather_rows(rows)
    right = bool((total == size * (size + 1) / 2).all())
    right &= gathered.shape == (3 * size, 2) and bool((gathered[-1] == size).all())
    right &= gather_json([rank]) == [[other] for other in range(size)]
    return Outcome(right, f"{size} ranks, {'right' if right else 'wrong'}", "right")


@check("all")
def point_to_point(folder: Path) -> Outcome:
    """Send a message from every rank to every other, batched as in a reshard; all arrive unchanged."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    sent = {
        other: torch.full((1 << 20,), float(rank * size + other), device=device())
        for other in others
    }
    got = {other: torch.zeros(1 << 20, device=device()) for other in others}
    operations = [dist.P2POp(dist.isend, sent[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, got[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    wrong = [
        f"{other} to {rank}"
        for other in others
        if not bool((got[other] == other * size + rank).all())
    ]
    all_wrong: list[Any] = [None] * size
    dist.all_gather_object(all_wrong, wrong)
    bad: list[str] = sum(all_wrong, [])
    return Outcome(
        not bad,
        f"{size * (size - 1)} pairs, wrong: {', '.join(bad) or 'none'}",
        "all as they left",
    )


@check("two")
def ipc(folder: Path) -> Outcome:
    """Move weights of TP2 to a full copy on each rank, through the other process's memory and then without it."""
    from megaverl.models.architectures import weights_of
    from megaverl.sharding.plan import make_plan
    from megaverl.sharding.vllm import vllm_layouts
    from megaverl.weights.fingerprint import ReshardCheck
    from megaverl.weights.reshard import Resharder
    from megaverl.weights.transports import TransportOptions

    model, _ = load_model(folder, tp=2)
    layouts = vllm_layouts(weights_of(model.spec), model.spec, 1)
    rank, reports, wrong = dist.get_rank(), [], []
    for through_ipc in (True, False):
        shapes = layouts(rank).local_shapes
        dtype = model.config.params_dtype
        dest = {
            name: torch.zeros(shape, dtype=dtype, device=device())
            for name, shape in shapes.items()
        }
        plan = make_plan(model.layout_of, layouts, 2, rank)
        resharder = Resharder(
            plan, model.parameters, dest, options=TransportOptions(ipc=through_ipc)
        )
        stats = resharder.run()
        # Raises if wrong.
        ReshardCheck(
            model.layout_of, layouts, model.parameters, dest, dist.group.WORLD
        ).compare()
        name = "IPC" if through_ipc else "point to point"
        reports.append(
            f"{name} {stats.bytes_received / 2**20:.1f} MiB received in {stats.num_messages} messages"
        )
        # IPC falls back to messages where it cannot open the other process's memory: a
        # run goes on, this check fails
        if bool(stats.num_messages) == through_ipc or not stats.bytes_received:
            wrong.append(name)
    expected = "equal fingerprints; no messages with IPC, some without"
    return Outcome(not wrong, f"{', '.join(reports)}; fingerprints equal", expected)


def on_device(wanted: str, outcome: Outcome) -> bool:
    """Return whether this rank's work was on the device that was asked for."""
    return (
        wanted != "cuda" or outcome.elsewhere or torch.cuda.max_memory_allocated() > 0
    )


def main() -> None:
    """Run this rank of the check that the command line names."""
    from datetime import timedelta

    from megaverl.distributed.collectives import gather_json
    from megaverl.distributed.store import job_store
    from megaverl.monitoring.doctor.trials import answer
    from megaverl.platform import platform

    name, folder, wanted = sys.argv[1:]
    if platform.device.type != wanted:
        raise SystemExit(
            f"nothing was checked: this process computes on {platform.device.type}, not on {wanted}"
        )
    platform.start()
    timeout = timedelta(seconds=300)
    store, rank, size = job_store(timeout)
    dist.init_process_group(
        platform.backend, timeout=timeout, store=store, rank=rank, world_size=size
    )
    outcome = CHECKS[name].function(Path(folder))
    used = on_device(wanted, outcome)
    dist.barrier()
    idle: list[int] = [other for other, did in enumerate(gather_json(used)) if not did]
    if rank == 0:
        passed, text = (
            outcome.passed,
            f"{outcome.measured} (expected: {outcome.expected})",
        )
        if idle:
            passed, text = (
                False,
                f"nothing ran on the GPU of ranks {idle}, so this shows nothing: {text}",
            )
        more = (
            {}
            if passed
            else {"status": "fail", "fix": f"run it alone: gpu_check.py --only {name}"}
        )
        answer(text, **more)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines and their threads may not end by themselves


if __name__ == "__main__":
    main()
