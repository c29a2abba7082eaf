"""Time and size of reshard plans at scale: 70B dense and 235B MoE models on 1,024 ranks, Megatron to vLLM.

    python tools/bench_plan.py                    # both shapes, all 1,024 plans of each
    python tools/bench_plan.py --shape llama3_70b --json plan.json
    python tools/bench_plan.py --ranks 0 700      # one rank's plan for these ranks only, no others
    python tools/bench_plan.py --fan-out          # 64 trainers and 128 replicas on other nodes, with fan-out
    python tools/bench_plan.py --traffic          # the bytes of all ranks' plans, as `megaverl plan` counts them

No weights are loaded. One rank's plan is timed in a fresh process, including the layouts of all ranks, as in a run. All
plans are also made one after another in this process and proven by `check_plans`. The bytes that a rank must receive
are computed from the layouts alone, so that they can judge the plans.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, overload

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from megaverl.config import load_config
from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.planner.job import PlannedJob, make_job
from megaverl.planner.traffic import make_traffic
from megaverl.processes import ending_with_parent
from megaverl.sharding.boxes import Box, intersect
from megaverl.sharding.layout import EMPTY, Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.plan import Plan, Plans, make_plans
from megaverl.sharding.proof import check_plans
from megaverl.sharding.vllm import vllm_layouts

RANKS_PER_NODE = 8
ITEMSIZE = 2  # bfloat16 on the wire
Layouts = Callable[[int], Layout]


@dataclass(frozen=True)
class Shape:
    """A model and the two parallelisms between which its weights move.

    Attributes:
        replicas: engines on ranks after the trainers', whose plans may fan out. None: engines on the trainers' ranks.
    """

    title: str
    model: str
    grid: GridShape
    vllm_tp: int
    layer_split: tuple[int, ...] | None = None
    expert_parallel: bool = False
    replicas: int | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.grid.world_size + (self.replicas or 0) * self.vllm_tp

    def layouts(self) -> tuple[Layouts, Layouts]:
        spec = spec_of(self.model)
        weights = weights_of(spec)
        padded = -(-spec.vocab_size // self.grid.tp) * self.grid.tp
        source = megatron_layouts(
            weights,
            spec,
            self.grid,
            padded_vocab_size=padded,
            layer_split=self.layer_split,
        )
        dest = vllm_layouts(
            weights, spec, self.vllm_tp, expert_parallel=self.expert_parallel
        )
        if self.replicas is None:
            return source, dest
        trainers = self.grid.world_size
        return (
            lambda rank: source(rank) if rank < trainers else EMPTY,
            lambda rank: dest(rank - trainers) if rank >= trainers else EMPTY,
        )

    def plans(self) -> Plans:
        """Return the plans of all ranks, each made on access."""
        return make_plans(
            *self.layouts(), self.world, node_of, fan_out=self.replicas is not None
        )


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def planned_job(model: dict[str, Any], world: int, *settings: str) -> PlannedJob:
    """Return a job of the planner that reads no files but the model's configuration."""
    absent = ["model.path=absent", "data.train=absent.jsonl", "reward=exact_match"]
    config = load_config(
        None, [*absent, *settings], check_paths=False, world_size=world
    )
    return make_job(config, ModelSpec.from_config(model), world)


@cache
def spec_of(model: str) -> ModelSpec:
    """Return the spec of a model, by the name of its folder in configs/."""
    return ModelSpec.from_config(model_config(model))


def model_config(name: str) -> dict[str, Any]:
    return json.loads(
        (ROOT / "configs" / name / "config.json").read_text(encoding="utf-8")
    )


TRAFFIC_JOBS: dict[str, Callable[[], PlannedJob]] = {
    "Qwen3-235B, 256 ranks": lambda: planned_job(
        model_config("qwen3_235b_a22b"),
        256,
        "actor={tp: 4, pp: 8, ep: 16, etp: 1}",
        "actor.megatron={num_layers_in_first_pipeline_stage: 11, num_layers_in_last_pipeline_stage: 11}",
        "rollout.tp=16",
    ),
    "DeepSeek-V3, 512 ranks": lambda: planned_job(
        DEEPSEEK_V3,
        512,
        "actor={tp: 8, pp: 8, ep: 32, etp: 1}",
        "actor.megatron={num_layers_in_first_pipeline_stage: 7, num_layers_in_last_pipeline_stage: 6}",
        "rollout={tp: 16, vllm: {enable_expert_parallel: true}}",
    ),
}


def seconds_of_traffic(job: PlannedJob) -> tuple[float, float]:
    """Return the seconds and processor seconds of `make_traffic`, with the layouts made before."""
    job.actor.layout_of(0)
    job.rollout.layout_of(0)
    start, cpu = time.perf_counter(), time.process_time()
    make_traffic(job)
    return time.perf_counter() - start, time.process_time() - cpu


UNEVEN_94 = (12, 12, 12, 12, 12, 12, 11, 11)
SHAPES = {
    "llama3_70b": Shape(
        "TP8 x PP8 x DP16 -> vLLM TP8 x 128",
        "llama3_70b",
        GridShape(tp=8, pp=8, dp=16),
        8,
    ),
    "qwen3_235b": Shape(
        "TP4 x PP8 x EP16 (experts whole on a rank: ETP1) -> vLLM TP8 with EP x 128",
        "qwen3_235b_a22b",
        GridShape(tp=4, pp=8, dp=32, ep=16, etp=1),
        8,
        UNEVEN_94,
        expert_parallel=True,
    ),
    "qwen3_235b_etp4": Shape(
        "TP4 x PP8 x EP16, each expert cut over TP too (ETP4) -> vLLM TP8 with EP x 128",
        "qwen3_235b_a22b",
        GridShape(tp=4, pp=8, dp=32, ep=16),
        8,
        UNEVEN_94,
        expert_parallel=True,
    ),
}
FAN_OUT_SHAPES = {
    "llama3_70b_split": Shape(
        "TP8 x PP8 -> vLLM TP8 x 128 on other nodes",
        "llama3_70b",
        GridShape(tp=8, pp=8),
        8,
        replicas=128,
    ),
    "qwen3_235b_split": Shape(
        "TP4 x PP8 x EP8 (ETP1) -> vLLM TP8 with EP x 128 on other nodes",
        "qwen3_235b_a22b",
        GridShape(tp=4, pp=8, dp=2, ep=8, etp=1),
        8,
        UNEVEN_94,
        expert_parallel=True,
        replicas=128,
    ),
}
ALL_SHAPES = SHAPES | FAN_OUT_SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=ALL_SHAPES, help="one of the shapes instead of all"
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="only one rank's plan, for each of these"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument(
        "--fan-out", action="store_true", help="the shapes with engines on other nodes"
    )
    parser.add_argument(
        "--traffic",
        action="store_true",
        help="only what `megaverl plan` counts of large jobs",
    )
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure_one(ALL_SHAPES[options.shape], options.ranks[0])))
        return
    if options.traffic:
        for name, job in TRAFFIC_JOBS.items():
            seconds, cpu_seconds = seconds_of_traffic(job())
            print(f"{name}: {seconds:.1f} s ({cpu_seconds:.1f} s of CPU)", flush=True)
        return
    figures = {}
    chosen = FAN_OUT_SHAPES if options.fan_out else SHAPES
    for name in [options.shape] if options.shape else chosen:
        shape = ALL_SHAPES[name]
        print(
            f"\n{shape.model}: {shape.title}, {shape.world:,} ranks, {RANKS_PER_NODE} a node",
            flush=True,
        )
        figures[name] = one_rank_each(name, options.ranks or spread(shape.world, 6))
        if not options.ranks:
            figures[name] |= measure_all(shape)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def spread(world: int, count: int) -> list[int]:
    """Return `count` ranks spread from first to last, at different positions within their nodes."""
    return [round(i * (world - 1) / (count - 1)) for i in range(count)]


def node_of(rank: int) -> int:
    return rank // RANKS_PER_NODE


def one_rank_each(name: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Return measurements of one rank's layouts and plan, in a fresh process for each of `ranks`."""
    measured = []
    for rank in ranks:
        command = ending_with_parent(
            [sys.executable, __file__, "--alone", "--shape", name, "--ranks", str(rank)]
        )
        measured.append(
            json.loads(
                subprocess.run(
                    command, check=True, capture_output=True, text=True
                ).stdout
            )
        )
    worst = {key: max(figures[key] for figures in measured) for key in measured[0]}
    print(
        f"  one rank's layouts and plan (most of {len(ranks)}, each in a fresh process): {worst['seconds']:.2f} s "
        f"({worst['cpu_seconds']:.2f} s of CPU) and {worst['peak_mb']:.0f} MB; "
        f"{worst['transfers']:,} boxes with {worst['peers']} peers, {worst['messages']:,} messages",
        flush=True,
    )
    return {"one_rank": measured}


def measure_one(shape: Shape, rank: int) -> dict[str, float]:
    """Time one rank's work before its first reshard. The process must be fresh."""
    # A run has read the configuration long before, and imported transformers for it.
    spec_of(shape.model)
    before = resident_mb()
    start, cpu = time.perf_counter(), time.process_time()
    plan = shape.plans()[rank]  # asks for the layouts of all ranks
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    # in KiB on Linux: the most that the process ever held
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rank": rank,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": peak - before,
        "transfers": sum(map(len, transfers_by_peer(plan))),
        "peers": len(
            {peer for hop in plan.hops for peer in (*hop.sends, *hop.receives)}
        ),
        "messages": num_messages(plan),
    }


def transfers_by_peer(plan: Plan) -> list[Sequence[Any]]:
    """Return what a rank exchanges with each peer in each hop."""
    return [
        transfers
        for hop in plan.hops
        for lists in (hop.sends, hop.receives)
        for transfers in lists.values()
    ]


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 2**20


def num_messages(plan: Plan) -> int:
    """Return the messages that a rank sends and receives in one reshard with the default bucket size."""
    import torch  # only here: it would hide what the plan itself takes

    from megaverl.weights.transports import BUCKET_BYTES, messages
    from megaverl.weights.transports.point_to_point import SLOTS

    size = BUCKET_BYTES // SLOTS
    return sum(
        len(messages(boxes, lambda _: torch.bfloat16, size))
        for boxes in transfers_by_peer(plan)
    )


class Watched(Sequence[Plan]):
    """Sequence that makes plans on access, and notes the seconds that took and the elements that move."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = plans
        self._numel: dict[Box, int] = {}
        self.seconds = self.seconds_counting = 0.0
        self.received = [0] * len(plans)
        self.sent = [0] * len(plans)
        self.sent_far = [0] * len(plans)
        self.local = [0] * len(plans)
        self.to_own_node = 0

    def __len__(self) -> int:
        return len(self._plans)

    @overload
    def __getitem__(self, rank: int) -> Plan: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Plan]: ...
    def __getitem__(self, rank: int | slice) -> Plan | Sequence[Plan]:
        if isinstance(rank, slice):
            return self._plans[rank]
        if rank >= len(self):
            raise IndexError(rank)
        start = time.perf_counter()
        plan = self._plans[rank]
        made = time.perf_counter()
        self.local[rank] = self._count(plan.copies)
        for hop in plan.hops:
            self.received[rank] += sum(map(self._count, hop.receives.values()))
            for peer, transfers in hop.sends.items():
                count = self._count(transfers)
                self.sent[rank] += count
                if node_of(peer) == node_of(rank):
                    self.to_own_node += count
                else:
                    self.sent_far[rank] += count
        self.seconds += made - start
        self.seconds_counting += time.perf_counter() - made
        return plan

    def _count(self, transfers: Sequence[Any]) -> int:
        numel, total = self._numel, 0
        for transfer in transfers:
            box = transfer[1]
            if box not in numel:
                numel[box] = box.numel
            total += numel[box]
        return total


def measure_all(shape: Shape) -> dict[str, Any]:
    """Make and prove all ranks' plans, and return their times and bytes."""
    world = shape.world
    source, dest = shape.layouts()
    start, cpu = time.perf_counter(), time.process_time()
    plans = Watched(
        make_plans(source, dest, world, node_of, fan_out=shape.replicas is not None)
    )
    # The layouts stay: without this the collector walks through them again and again.
    gc.freeze()
    check_plans(plans)
    seconds = time.perf_counter() - start - plans.seconds_counting
    cpu_seconds = time.process_time() - cpu
    must = minima(source, dest, world)
    wrong = [rank for rank in range(world) if plans.received[rank] != must[rank]]
    busiest = max(plans.sent) / statistics.mean(plans.sent)
    nodes = [
        sum(plans.sent[rank : rank + RANKS_PER_NODE])
        for rank in range(0, world, RANKS_PER_NODE)
    ]
    gigabytes = [received * ITEMSIZE / 1e9 for received in plans.received]
    print(
        f"  all {world:,} plans: {seconds:.1f} s made and checked (made {plans.seconds:.1f} s; {cpu_seconds:.1f} s of "
        "CPU with counting their bytes), check_plans passed"
    )
    print(
        f"  received by a rank: {min(gigabytes):.3f} to {max(gigabytes):.3f} GB, median "
        f"{statistics.median(gigabytes):.3f} GB; the minimum (needed and not held) exactly on "
        f"{world - len(wrong):,} of {world:,} ranks; {plans.to_own_node / sum(plans.sent):.0%} stays within a node"
    )
    print(
        f"  busiest sender: {busiest:.3f} of the mean; busiest node: {max(nodes) / statistics.mean(nodes):.3f}"
    )
    if shape.replicas is not None:
        most = max(plans.sent_far) * ITEMSIZE / 1e9
        print(
            f"  busiest sender to other nodes: {most:.3f} GB, {most / max(gigabytes):.3f} of what a rank receives"
        )
    return {
        "seconds_all": seconds,
        "seconds_making": plans.seconds,
        "cpu_seconds": cpu_seconds,
        "gigabytes_received": [
            min(gigabytes),
            statistics.median(gigabytes),
            max(gigabytes),
        ],
        "ranks_off_the_minimum": wrong,
        "busiest_sender": busiest,
        "busiest_node": max(nodes) / statistics.mean(nodes),
        "within_nodes": plans.to_own_node / sum(plans.sent),
    }


def minima(source: Layouts, dest: Layouts, world: int) -> list[int]:
    """Return the elements that each rank needs and does not hold, from the layouts.

    Pieces of one layout are disjoint.
    """
    known: dict[tuple[int, int], int] = {}
    for rank in range(world):
        key = (id(source(rank)), id(dest(rank)))
        if key not in known:
            held: dict[str, list[Box]] = {}
            for piece in source(rank).pieces:
                held.setdefault(piece.tensor, []).append(piece.box)
            count = 0
            for piece in dest(rank).pieces:
                common_boxes = [
                    intersect(piece.box, box) for box in held.get(piece.tensor, ())
                ]
                count += piece.box.numel - sum(
                    common.numel for common in common_boxes if common is not None
                )
            known[key] = count
    return [known[id(source(rank)), id(dest(rank))] for rank in range(world)]


if __name__ == "__main__":
    main()
