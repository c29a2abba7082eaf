"""Time and bytes of a reshard that sends changes only, beside one that sends whole weights, over links of one rate.

    sudo python tools/bench_delta.py --model DIR --rows rows.jsonl                    # 1e-6, 1 replica, 1 Gbit/s
    sudo python tools/bench_delta.py --model DIR --rows rows.jsonl --lr 1e-5 --replicas 4 --mbit 200

Rank 0 trains a model of a Hugging Face folder in bfloat16, with float32 masters and AdamW or Muon (`--optimizer`), on a
policy-gradient loss: rows of text with random advantages of zero mean, gradients clipped at 1. After every step it
sends the weights to engines at TP1, twice: as changes (`reshard.delta: on`) and whole (`off`). Every rank is a node: a
network namespace of its own, whose link carries `--mbit` in each direction (`tools/bench_fanout.py`).

The table has the share of elements that changed, the bytes of the busiest sender, and the seconds of the slowest rank.
After every step the engines' bits after both ways are compared. `--compute` prints what encoding and decoding cost
without a link, and needs no network. `--changed adamw muon` prints the share of elements that change with each
optimizer, from the same rows, without sending anything. Muon is that of emerging-optimizers (Python 3.12), scaled to
AdamW's size of an update (arXiv 2502.16982). All else needs root, iproute2 and network namespaces; exits with 77 where
it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from megaverl.models.architectures import weights_of
from megaverl.processes import end_with_parent
from megaverl.sharding.layout import EMPTY, Layout, whole_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.reshard import Resharder, ReshardStats
from megaverl.weights.transports import DeltaMode, TransportOptions
from megaverl.weights.transports.changes import decode, differ, encode
from tests.faults.networks import Networks, address, enter, networks, why_not
from tools.bench_fanout import CANNOT_RUN, PATIENCE, run_on, shape, why_no_shaping

PORT = 29_461
WAYS: tuple[DeltaMode, DeltaMode] = ("on", "off")
SHARES = (0.001, 0.01, 0.05, 0.1, 0.3)
COMPUTE_NUMEL = 2**23
OPTIMIZERS = ("adamw", "muon")
# Root mean square of AdamW's updates, by which Liu et al. scale Muon's.
MUON_SCALE = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder")
    parser.add_argument(
        "--rows", type=Path, help="a JSONL file; the text of a row is all its strings"
    )
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="rows of a step")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a row")
    parser.add_argument("--replicas", type=int, default=1, help="number of engines")
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of a link")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--compute", action="store_true")
    parser.add_argument("--changed", nargs="+", choices=OPTIMIZERS)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    if options.compute:
        print(compute_table())
        return 0
    if options.model is None or options.rows is None:
        parser.error("--model and --rows are needed, or --compute")
    if options.changed:
        print(changed_table(options))
        return 0
    if reason := why_not() or why_no_shaping():
        print(f"bench_delta.py: {reason}", file=sys.stderr)
        return CANNOT_RUN
    with networks(1 + options.replicas) as nodes:
        shape(nodes, options.mbit)
        figures = run_on(nodes, run_rank, options)
    print(table(figures, options))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def run_rank(
    rank: int,
    nodes: Networks,
    options: argparse.Namespace,
    results: Connection | None,
    parent: int,
) -> None:
    """Train on rank 0, receive on the others."""
    end_with_parent(parent)
    enter(nodes.prefix, rank)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:{PORT}",
        rank=rank,
        world_size=nodes.count,
        timeout=PATIENCE,
    )
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    spec = ModelSpec.from_config(config)
    weights = weights_of(spec)
    held = whole_layout((weight.name, weight.shape) for weight in weights)
    engine = vllm_layouts(weights, spec, 1)(0)
    trainer = Trainer(options, options.optimizer) if rank == 0 else None
    source = {} if trainer is None else trainer.tensors(held)
    sides = {mode: Side(mode, rank, nodes.count, held, engine, source) for mode in WAYS}
    figures = []
    for step in range(options.steps + 1):
        if trainer is not None and step:
            trainer.step()
        figures.append({"step": step} | {mode: sides[mode].move() for mode in WAYS})
        sides["on"].compare(sides["off"])
    if results is not None:
        results.send(figures)
    dist.destroy_process_group()


class Side:
    """One way of moving the weights, with engine weights of its own."""

    def __init__(
        self,
        mode: DeltaMode,
        rank: int,
        world: int,
        held: Layout,
        engine: Layout,
        source: dict[str, torch.Tensor],
    ) -> None:
        plan = make_plan(
            lambda place: EMPTY if place else held,
            lambda place: engine if place else EMPTY,
            world,
            rank,
            lambda place: place,
            fan_out=True,
        )
        self.dest = {
            name: torch.zeros(local_shape, dtype=torch.bfloat16)
            for name, local_shape in plan.dest_layout.local_shapes.items()
        }
        options = TransportOptions(
            node_of=lambda place: place, timeout=PATIENCE, delta=mode
        )
        self._resharder = Resharder(plan, source, self.dest, None, options)

    def move(self) -> dict[str, float | None]:
        """Move one version; return the seconds of the slowest rank, the bytes of the busiest, and the changed share."""
        dist.barrier()
        start = time.perf_counter()
        stats: ReshardStats = self._resharder.run()
        seconds = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return {
            "seconds": float(seconds),
            "bytes": stats.busiest_sent,
            "changed": stats.changed_fraction,
        }

    def compare(self, other: Side) -> None:
        """Check that both ways left the same bits in this rank's engine."""
        for name, tensor in self.dest.items():
            bits, expected = (
                tensor_bits.view(torch.int16)
                for tensor_bits in (tensor, other.dest[name])
            )
            assert torch.equal(bits, expected), f"{name} differs"


class Trainer:
    """A bfloat16 model with float32 masters, which AdamW updates, or Muon its matrices."""

    def __init__(self, options: argparse.Namespace, optimizer: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._options = options
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        with options.rows.open(encoding="utf-8") as lines:
            texts = [
                " ".join(text for text in json.loads(line).values() if text)
                for line, _ in zip(
                    lines, range(options.steps * options.samples), strict=False
                )
            ]
        self._rows = [
            tokenizer(text, return_tensors="pt").input_ids[:, : options.tokens]
            for text in texts
        ]
        self._generator = torch.Generator().manual_seed(1)
        self._held = list(self._model.parameters())
        self._masters = [parameter.detach().float() for parameter in self._held]
        embeddings = {
            id(self._model.get_input_embeddings().weight),
            id(self._model.get_output_embeddings().weight),
        }
        matrices: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for master, parameter in zip(self._masters, self._held, strict=True):
            is_matrix = parameter.dim() == 2 and id(parameter) not in embeddings
            by_muon = optimizer == "muon" and is_matrix
            (matrices if by_muon else others).append(master)
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                others,
                lr=options.lr,
                betas=(0.9, 0.95),
                weight_decay=options.weight_decay,
            )
        ]
        if matrices:
            from emerging_optimizers.orthogonalized_optimizers import Muon

            self._optimizers.append(
                Muon(
                    matrices,
                    lr=options.lr,
                    weight_decay=options.weight_decay,
                    extra_scale_factor=MUON_SCALE,
                )
            )

    def tensors(self, held: Layout) -> dict[str, torch.Tensor]:
        """Return the model's tensors by the names of the layout."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        return {name: named[name] for name in held.local_shapes}

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the model's parameters."""
        return [parameter.detach().clone() for parameter in self._held]

    def step(self) -> None:
        """Make one update: the policy gradient of rows with random advantages."""
        samples = self._options.samples
        advantages = torch.randn(samples, generator=self._generator)
        advantages -= advantages.mean()
        for advantage in advantages:
            row = self._rows.pop(0)
            loss = self._model(input_ids=row, labels=row).loss
            (advantage * loss / samples).backward()
        torch.nn.utils.clip_grad_norm_(self._held, 1.0)
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._held, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            for optimizer in self._optimizers:
                optimizer.step()
            for master, parameter in zip(self._masters, self._held, strict=True):
                parameter.copy_(master)


def table(figures: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Format the figures as a table in Markdown."""
    lines = [
        f"{options.optimizer}, lr {options.lr:g}, {options.replicas} replicas, links of {options.mbit:g} Mbit/s",
        "",
        "| Step | Changed | Changes, MB | Whole, MB | Changes, s | Whole, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for of_step in figures:
        delta, whole = of_step["on"], of_step["off"]
        changed = "first" if delta["changed"] is None else f"{delta['changed']:.3%}"
        lines.append(
            f"| {of_step['step']} | {changed} | {delta['bytes'] / 1e6:.2f} | {whole['bytes'] / 1e6:.2f} "
            f"| {delta['seconds']:.2f} | {whole['seconds']:.2f} |"
        )
    return "\n".join(lines)


def changed_table(options: argparse.Namespace) -> str:
    """Train with each optimizer in turn, and measure the share of bfloat16 elements that each step changes."""
    torch.set_num_threads(1)
    shares: dict[str, list[float]] = {}
    for optimizer in options.changed:
        trainer = Trainer(options, optimizer)
        before = trainer.copies()
        for _ in range(options.steps):
            trainer.step()
            after = trainer.copies()
            num_changed = sum(
                int((old != new).sum()) for old, new in zip(before, after, strict=True)
            )
            numel = sum(tensor.numel() for tensor in after)
            shares.setdefault(optimizer, []).append(num_changed / numel)
            before = after
    lines = [
        f"lr {options.lr:g}, changed elements of {numel:,}",
        "",
        f"| Step | {' | '.join(shares)} |",
        f"| --- |{' --- |' * len(shares)}",
    ]
    for step, row in enumerate(zip(*shares.values(), strict=True), start=1):
        lines.append(f"| {step} | {' | '.join(f'{share:.3%}' for share in row)} |")
    return "\n".join(lines)


def compute_table() -> str:
    """Measure comparing, encoding and decoding of bfloat16 elements on one core, by the share that changed."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(COMPUTE_NUMEL, generator=generator).bfloat16()
    lines = [
        "| Changed | Encoding | Bytes | Compare and encode, GB/s | Decode and write, GB/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    whole = before.nbytes
    for share in SHARES:
        after = before.clone()
        places = torch.rand(COMPUTE_NUMEL, generator=generator) < share
        after[places] *= -1
        encoding_seconds, decoding_seconds = [], []
        for _ in range(5):
            start = time.perf_counter()
            changes = encode(after, differ(after, before))
            encoding_seconds.append(time.perf_counter() - start)
            assert changes.payload is not None
            start = time.perf_counter()
            positions, values = decode(
                changes.payload,
                changes.encoding,
                changes.num_changed,
                COMPUTE_NUMEL,
                torch.bfloat16,
            )
            before.clone().index_copy_(0, positions, values)
            decoding_seconds.append(time.perf_counter() - start)
        lines.append(
            f"| {share:.1%} | {changes.encoding.name} | {changes.nbytes / whole:.2%} "
            f"| {whole / min(encoding_seconds) / 1e9:.2f} | {whole / min(decoding_seconds) / 1e9:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
