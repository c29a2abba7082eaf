"""Peak memory and time of an update, with and without each measure that saves memory, beside the planner's prediction.

    python tools/bench_memory.py                    # about 42 M parameters, float32, one process
    python tools/bench_memory.py --hidden 1024 --layers 16 --tokens 8192 --dtype bfloat16      # on a GPU

Every line is a process of its own, in which an actor takes three updates (and, if the line says so, a reference
scores). `between` is the memory that stays allocated between stages, `update` the peak of the last update, `in update`
the difference of the two (activations and gradients), `score` the peak of scoring. On a GPU it is torch's count, on a
CPU the resident memory above that of the process before it built the model (VmHWM, reset before each). A line of
context parallelism has two processes, which need two GPUs, and shows the larger figure. Percentages are of the first
line in the same run. `planned` is the planner's update peak.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megaverl.gpus import count_gpus
from megaverl.processes import end_with_parent

ALL_AWAY = "actor.offload={parameters: true, optimizer: true, gradients: true}"
CUT, MOST_OF_CUT = "cp: 2, each of two processes", 0.6
LINES: dict[str, list[str]] = {
    "everything kept": [],
    "activation_checkpointing: selective": ["actor.activation_checkpointing=selective"],
    "activation_checkpointing: full": ["actor.activation_checkpointing=full"],
    "chunked_logits: true": ["actor.chunked_logits=true"],
    CUT: ["actor.cp=2"],
    "gradient_accumulation: 8": ["actor.gradient_accumulation=8"],
    "offload: {gradients: true}": ["actor.offload={gradients: true}"],
    "offload: {optimizer: true}": ["actor.offload={optimizer: true}"],
    "offload: all three": [ALL_AWAY],
    "lora: {rank: 16}": ["actor.lora={rank: 16}"],
    "a reference": ["algorithm.kl={in: loss, coef: 0.1}"],
    "a reference, lora: {rank: 16}": [
        "algorithm.kl={in: loss, coef: 0.1}",
        "actor.lora={rank: 16}",
    ],
    "all of these": [
        "actor.chunked_logits=true",
        "actor.lora={rank: 16}",
        "actor.activation_checkpointing=full",
        "actor.gradient_accumulation=8",
        ALL_AWAY,
    ],
}
PROMPT = 64  # tokens of a sample
M_MMAP_THRESHOLD = -3  # malloc.h


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    first: dict[str, float] = {}
    print(f"{describe(options)}; MiB, percent of the first line\n")
    heads = f"{'between':>14} {'update':>14} {'in update':>14} {'planned':>8} {'score':>14} {'seconds':>8}"
    print(f"{'':37} {heads}")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), options)
        for line, settings in LINES.items():
            if 0 < count_gpus() < world_of(settings):
                continue
            if (
                options.only
                and not any(part in line for part in options.only)
                and first
            ):
                continue
            figures = in_a_process(options, str(model), settings)
            first = first or figures

            def share(
                name: str,
                figures: dict[str, float] = figures,
                first: dict[str, float] = first,
            ) -> str:
                return (
                    f"{figures[name] / 2**20:7.0f} ({figures[name] / first[name]:4.0%})"
                )

            print(
                f"{line:37} {share('between'):>14} {share('update'):>14} {share('in update'):>14} "
                f"{figures['planned'] / 2**20:8.0f} {share('score'):>14} {figures['seconds']:8.2f}",
                flush=True,
            )
            if line == CUT:
                ratio = figures["in update"] / first["in update"]
                print(
                    f"{'':37} activations and gradients on their way: {ratio:.2f} of cp: 1's (aim {MOST_OF_CUT})"
                )
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        help="of an update; half of them in one micro-batch",
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=256,
        help="tokens of a sample, of which the prompt has 64",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="WORD",
        help="the first line, and those with one of these in them",
    )
    return parser.parse_args(arguments)


def describe(options: argparse.Namespace) -> str:
    size = f"{options.layers} layers of {options.hidden}, vocabulary {options.vocab}, {options.dtype}"
    return f"{size}, {options.tokens} tokens an update, {options.tokens // 2} in a micro-batch"


def make_model(folder: Path, options: argparse.Namespace) -> Path:
    from megaverl.models.tiny import make_tiny_folder

    heads = max(1, options.hidden // 64)
    return make_tiny_folder(
        folder / "model",
        "Qwen2ForCausalLM",
        tie_embeddings=True,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4 // 64 * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=options.vocab,
        max_position_embeddings=2 * options.sample,
    )


def in_a_process(
    options: argparse.Namespace, model: str, settings: list[str]
) -> dict[str, float]:
    """Run `measure` in fresh processes, one a rank, and return the largest value of each figure."""
    context, world = multiprocessing.get_context("spawn"), world_of(settings)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, model, settings, folder, os.getpid())
        processes = [
            context.Process(target=measure, args=(rank, world, *arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(
                    f"a process of {settings} ended with exit code {process.exitcode}"
                )
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(world)
        ]
        return {
            name: max(rank_figures[name] for rank_figures in ranks) for name in ranks[0]
        }


def world_of(settings: list[str]) -> int:
    """Return the number of processes that a line needs."""
    return 2 if "actor.cp=2" in settings else 1


def measure(
    rank: int,
    world: int,
    options: argparse.Namespace,
    model: str,
    settings: list[str],
    folder: str,
    parent: int,
) -> None:
    """Measure one line: build the roles, update, score, and write this rank's file for
    the process `parent`, which waits.
    """
    end_with_parent(parent)
    # glibc: every large block is mapped by itself and returned when freed, so that what
    # is resident is what is alive
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": str(rank),
    }
    import torch
    import torch.distributed as dist

    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.platform import platform

    platform.start()
    torch.set_num_threads(options.threads)
    dist.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
    )
    if not platform.is_cuda and any("offload" in setting for setting in settings):
        # Host memory is where things are: they go to files.
        settings = [*settings, f"actor.offload.folder={folder}"]
    config, spec = configure(options, model, settings, world)
    planned, manager = planned_bytes(config, spec, world), ProcessGroupManager()
    warm_up(manager.grid(GridShape(dp=world)), options, Path(folder))
    grid = manager.grid(GridShape(cp=world))
    meter = Meter()
    actor, reference = make_roles(config, spec, model, grid)
    batch = make_batch(options, spec.vocab_size)
    figures: dict[str, float] = {"planned": planned}
    for step in range(3):  # the first allocates the optimizer's state
        start = time.perf_counter()
        figures["update"] = meter.peak_of(
            partial(actor.update, batch, step=step, kl_coef=0.1)
        )
        figures["seconds"] = time.perf_counter() - start
    figures["between"] = meter.held()
    figures["in update"] = figures["update"] - figures["between"]
    figures["score"] = meter.peak_of(lambda: (reference or actor).log_probs(batch))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def configure(
    options: argparse.Namespace, model: str, settings: list[str], world: int
) -> tuple[Any, Any]:
    """Return the configuration of a line and its model's ModelSpec."""
    from megaverl.config import load_config
    from megaverl.sharding.model_spec import ModelSpec

    keys = [
        f"model.path={model}",
        f"model.dtype={options.dtype}",
        "data.train=none.jsonl",
        "reward=exact_match",
        "algorithm={name: grpo, group_size: 2}",
        f"data.prompts_per_step={options.tokens // options.sample // 2}",
        f"data.max_prompt_tokens={PROMPT}",
        f"rollout.sampling.max_tokens={options.sample - PROMPT}",
        f"actor.micro_batch_tokens={options.tokens // 2}",
        "reshard.alias=never",
    ]
    config = load_config(None, [*keys, *settings], check_paths=False, world_size=world)
    return config, ModelSpec.from_folder(model)


def planned_bytes(config: Any, spec: Any, world: int) -> float:
    """Return the planner's update peak without the engine's share."""
    from megaverl.planner.job import make_job
    from megaverl.planner.memory import MemoryModel

    planned = MemoryModel(make_job(config, spec, world)).rank(0).moments["actor update"]
    return float(sum(planned[name] for name in ("training", "frozen", "activations")))


def make_roles(config: Any, spec: Any, folder: str, grid: Any) -> tuple[Any, Any]:
    """Build actor and reference (or None) as a run builds them."""
    import torch

    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.optimizers import MegatronTrainable
    from megaverl.workers.policy import Actor, Policy

    dtype, section = getattr(torch, config.model.dtype), config.actor
    model = MegatronModel(
        spec,
        grid,
        ModelOptions(
            dtype=dtype,
            seed=0,
            lora=section.lora,
            activation_checkpointing=section.activation_checkpointing,
            chunked_logits=section.chunked_logits,
        ),
        overrides=section.megatron,
    )
    model.load(folder)
    trainable = MegatronTrainable(
        model,
        optimizer=section.optimizer,
        scheduler={},
        ddp=section.ddp,
        total_updates=10,
        gradient_accumulation=section.gradient_accumulation,
        offload=section.offload,
    )
    tokens = section.micro_batch_tokens
    actor = Actor(
        trainable, config.algorithm, temperature=1.0, micro_batch_tokens=tokens, seed=0
    )
    if not config.uses_reference:
        return actor, None
    if config.reference_is_actor:
        return actor, Policy(
            model, temperature=1.0, micro_batch_tokens=tokens, with_adapters=False
        )
    frozen = MegatronModel(
        spec, grid, ModelOptions(dtype=dtype, seed=0, role="reference")
    )
    frozen.load(folder)
    return actor, Policy(frozen, temperature=1.0, micro_batch_tokens=tokens)


def make_batch(options: argparse.Namespace, vocab_size: int) -> Any:
    """Return samples of one length, with every tensor that an update reads."""
    import torch

    from megaverl.data.batch import RolloutBatch

    count, length = options.tokens // options.sample, options.sample - PROMPT
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(count, length, generator=generator) * 0.1 - 5.0
    return RolloutBatch(
        {
            "input_ids": torch.randint(
                0, vocab_size, (count, PROMPT), generator=generator
            ),
            "prompt_lengths": torch.full((count,), PROMPT),
            "generated_ids": torch.randint(
                0, vocab_size, (count, length), generator=generator
            ),
            "response_mask": torch.ones(count, length, dtype=torch.bool),
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs,
            "ref_log_probs": log_probs,
            "advantages": torch.randn(count, length, generator=generator),
        }
    )


def warm_up(grid: Any, options: argparse.Namespace, folder: Path) -> None:
    """Update a small model, which makes one-time allocations; `folder` holds the first rank's files for all ranks."""
    import torch
    import torch.distributed as dist

    from megaverl.config.algorithm import AlgorithmConfig
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.optimizers import MegatronTrainable
    from megaverl.workers.policy import Actor

    small = argparse.Namespace(
        **{
            **vars(options),
            "hidden": 64,
            "layers": 1,
            "vocab": 128,
            "tokens": 2 * options.sample,
        }
    )
    if not dist.get_rank():
        make_model(folder, small)
    dist.barrier()
    spec = ModelSpec.from_folder(folder / "model")
    model = MegatronModel(
        spec, grid, ModelOptions(dtype=getattr(torch, options.dtype), seed=0)
    )
    trainable = MegatronTrainable(
        model, optimizer={"lr": 1e-3}, scheduler={}, ddp={}, total_updates=2
    )
    actor = Actor(
        trainable,
        AlgorithmConfig(),
        temperature=1.0,
        micro_batch_tokens=options.sample,
        seed=0,
    )
    actor.update(make_batch(small, 128), step=0)
    actor.log_probs(make_batch(small, 128))


class Meter:
    """Measures memory above the level at which the meter was made, in bytes."""

    def __init__(self) -> None:
        import torch

        from megaverl.platform import platform

        self._cuda = torch.cuda if platform.is_cuda else None
        self._before = self._now()

    def held(self) -> float:
        """Return the bytes that are allocated now."""
        return self._now() - self._before

    def peak_of(self, function: Callable[[], Any]) -> float:
        """Return the largest number of bytes that was allocated while `function` ran."""
        self._now()
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            function()
            self._cuda.synchronize()
            return float(self._cuda.max_memory_allocated() - self._before)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        function()
        return resident("VmHWM") - self._before

    def _now(self) -> float:
        import gc

        gc.collect()
        if self._cuda is not None:
            self._cuda.synchronize()
            return float(self._cuda.memory_allocated())
        ctypes.CDLL(None).malloc_trim(0)
        return resident("VmRSS")


def resident(field: str) -> float:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1]) * 1024
    raise SystemExit(
        f"/proc/self/status has no {field}: without a GPU this needs Linux"
    )


if __name__ == "__main__":
    sys.exit(main())
