"""What a machine with a GPU should show: parity in bfloat16, the local transport against the memory, graphs, NCCL.

    python tools/gpu_check.py [--output FILE.json]

Needs torch with CUDA and megatron-core; vLLM is not needed. One process, one GPU. Prints a line per check with
what was measured and what is expected; exits 1 if a check fails and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Check:
    """One result; `measured` and `expected` say what in words."""

    name: str
    passed: bool
    measured: str
    expected: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to check")
        return 2
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_RANK", "0")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for check in (check_nccl, check_local_copy, check_logits, check_training, check_saving_memory, check_graph):
            try:
                results.append(check(Path(folder)))
            except Exception as error:  # one check that breaks must not hide the others
                results.append(Check(check.__name__, False, f"{type(error).__name__}: {error}", "no error"))
            last = results[-1]
            print(f"{'ok  ' if last.passed else 'FAIL'} {last.name}: {last.measured} (expected: {last.expected})")
    if arguments.output:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.output.write_text(json.dumps([device, *map(asdict, results)], indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0 if all(result.passed for result in results) else 1


def check_nccl(folder: Path) -> Check:
    """Collectives of a group of one, through the same helpers that a run uses."""
    from megaverl.distributed.collectives import gather_json, gather_rows

    rows = torch.arange(6.0, device="cuda").reshape(3, 2)
    total = rows.clone()
    dist.all_reduce(total)
    same = torch.equal(gather_rows(rows), rows) and torch.equal(total, rows) and gather_json([1]) == [[1]]
    return Check("NCCL, one rank", same, "equal" if same else "different", "equal")


def check_local_copy(folder: Path) -> Check:
    """The local transport on 2 GiB of bfloat16, against a plain copy of as many bytes."""
    from megaverl.sharding.boxes import whole
    from megaverl.sharding.plan import Transfer
    from megaverl.weights.transports.local import copy_local

    shape = (8192, 8192)
    source = {str(i): torch.randn(shape, dtype=torch.bfloat16, device="cuda") for i in range(16)}
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    box = whole(shape)
    transfers = [Transfer(name, box, 0, name, box, 0, name, box) for name in source]
    transport = median_seconds(lambda: copy_local(transfers, source, target))
    plain = median_seconds(lambda: [target[name].copy_(tensor) for name, tensor in source.items()])
    num_bytes = 2 * sum(tensor.nbytes for tensor in source.values())  # read and written
    same = all(torch.equal(source[name], target[name]) for name in source)
    measured = f"{num_bytes / transport / 1e9:.0f} GB/s, plain copies {num_bytes / plain / 1e9:.0f} GB/s"
    return Check("local transport", same and transport < 1.25 * plain, measured, "at least 0.8 of plain copies")


def check_logits(folder: Path) -> Check:
    """bfloat16 logits against Hugging Face's in float32, as far off as Hugging Face's own bfloat16."""
    from transformers import AutoModelForCausalLM

    model, path = load_model(folder)
    tokens = torch.randint(0, 1000, (4, 128), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    positions = torch.arange(128, device="cuda").expand_as(tokens)
    with torch.no_grad():
        found = model.chunks[0](tokens, positions, None)[..., :1000].float()
        exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda()(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda()(tokens).logits.float()
    ours, theirs = float((found - exact).abs().mean()), float((plain - exact).abs().mean())
    return Check("bfloat16 logits", ours < 2 * theirs, f"mean error {ours:.2e}", f"under twice {theirs:.2e}")


def check_training(folder: Path) -> Check:
    """Ten updates in bfloat16 with float32 master weights: the loss falls as a language model's should."""
    losses, _ = train(folder)
    return Check("bfloat16 training", losses[-1] < 0.8 * losses[0], f"{losses[0]:.3f} -> {losses[-1]:.3f}", "falls")


def check_saving_memory(folder: Path) -> Check:
    """Offload to pinned memory and activation checkpointing: the same losses, and less memory between updates; and
    adapters alone, which learn as well."""
    from megaverl.config.roles import LoraConfig, OffloadConfig

    offload = OffloadConfig(parameters=True, optimizer=True, gradients=True)
    kept, held = train(folder)
    away, left = train(folder, offload=offload, activation_checkpointing="full")
    adapted, small = train(folder, lora=LoraConfig(rank=8, alpha=16.0))
    passed = kept == away and left < held / 4 and adapted[-1] < adapted[0] and small < held
    measured = f"losses {'equal' if kept == away else 'different'}, {held / 2**20:.1f} -> {left / 2**20:.1f} MiB; "
    measured += f"adapters {adapted[0]:.3f} -> {adapted[-1]:.3f} with {small / 2**20:.1f} MiB"
    return Check("offload, checkpointing, adapters", passed, measured, "equal losses, a quarter; adapters learn")


def train(folder: Path, offload: Any = None, **options: Any) -> tuple[list[float], int]:
    """The losses of ten updates of a small model, and the bytes that are allocated for it afterwards."""
    from megaverl.models.packing import MicroBatch
    from megaverl.workers.trainable import TrainableModel

    before = torch.cuda.memory_allocated()
    model, _ = load_model(folder, **options)
    trainable = TrainableModel(model, optimizer={"lr": 1e-3}, scheduler={}, ddp={}, total_updates=10, offload=offload)
    tokens = torch.randint(0, 1000, (8, 64), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(8, dtype=torch.int64)
    batch = MicroBatch(torch.arange(8), tokens, ones, ones * 63)

    def loss(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = -model.log_probs(logits, micro)[0].sum() / (8 * 63)
        return value, {"loss": torch.stack([torch.ones_like(value), value.detach(), value.detach() ** 2]).double()}

    losses = []
    for _ in range(10):
        with trainable.updating():
            losses.append(float(trainable.update([batch], loss).sums["loss"][1]))
    return losses, torch.cuda.memory_allocated() - before


def check_graph(folder: Path) -> Check:
    """A captured forward pass sees weights that are copied in place after the capture, as a reshard does."""
    weight = torch.zeros(256, 256, device="cuda")
    given = torch.randn(8, 256, device="cuda")
    (given @ weight).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = given @ weight
    new = torch.randn_like(weight)
    weight.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    error = float((result - given @ new).abs().max())
    return Check("graph sees weights copied in place", error < 1e-4, f"difference {error:.1e}", "0")


def load_model(folder: Path, **options: Any) -> tuple[Any, Path]:
    """A small Qwen3 in bfloat16 on a grid of one, and its folder."""
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel

    path = folder / "model"
    if not path.exists():
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
        make_tiny_folder(path, "Qwen3ForCausalLM", tie_embeddings=True, **sizes)
    grid = ProcessGroupManager().grid(GridShape())
    model = MegatronModel(ModelSpec.from_folder(path), grid, dtype=torch.bfloat16, seed=0, **options)
    model.load(path)
    return model, path


def median_seconds(work: Callable[[], object], runs: int = 10) -> float:
    """Median over `runs` of the device time of `work`, after a warm-up."""
    work()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
