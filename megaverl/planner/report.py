"""Report of `megaverl plan`: a dictionary for programs, and the same content as text for a terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from megaverl.config.megatron_defaults import ddp_defaults
from megaverl.distributed.placement import ranks_text
from megaverl.planner.advice import Advice, Shortage, advise, shortages
from megaverl.planner.buffers import ITEMSIZE
from megaverl.planner.collectives import received_in_collectives
from megaverl.planner.fsdp import Passes, described, passes_of, tensor_rank_weights
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import GB, PlannedJob
from megaverl.planner.memory import REST, MemoryModel, RankMemory, phases_of
from megaverl.planner.operators import StepLoad
from megaverl.planner.placed_run import derive_share, explain, with_share
from megaverl.planner.simulator import (
    PredictedPhase,
    Prediction,
    default_lengths,
    simulate,
)
from megaverl.planner.traffic import (
    KINDS,
    ReshardTraffic,
    make_traffic,
    make_update_traffic,
)

LINKS = ("nvlink", "network")
WIDTH = 110  # columns of the text
INSTANT = 1e-9  # seconds
INDENTED: dict[str, Any] = {"initial_indent": "  ", "subsequent_indent": "    "}
BASIS = {
    "weights": "weights, gradients and optimizer: megatron-core's buffers and distributed optimizer, to the byte; "
    "under megatron.fp8 with the copies that Transformer Engine keeps",
    "shards": "under FSDP: float32 shards, gradients and moments; weights that are gathered count among activations",
    "activations": "activations: counted as in Korthikanti et al. 2022 (arXiv 2205.05198) for this model's layers, "
    "with fused attention, every sample at full length, even routing of experts; logits by megaverl's own heads",
    "fields": "fields: log-probs, values, advantages and returns of a rank's samples: 4 bytes for each token of the "
    "longest response, until the updates are over",
    "checkpoint": "checkpoint: weights and optimizer; no rank gathers, and each may hold what it writes in host memory"
    "; every node writes and reads at the rate of --disk",
    "cache": "KV cache: gpu_memory_utilization of the GPU less weights and an estimate of vLLM's workspace",
    "reserve": "reserve: CUDA's context, NCCL's buffers by groups and channels, workspaces and CUDA graphs of Hopper; "
    "every source is in megaverl/planner/reserve.py; fragments between blocks are not known beforehand",
    "bytes": "bytes: the plans that every rank itself will make; aliased weights are one storage on both sides",
    "step": "step: products, memory and messages at the rates of the hardware's description, a pipeline played "
    "micro-batch by micro-batch; docs/simulator.md has its errors; pass your own --prompt-tokens, --response-tokens "
    "and --share-at-limit",
    "time": "time: the slowest rank, all its links at work at once; pass your own --nvlink, --network, --hbm",
}


@dataclass(frozen=True)
class Capacity:
    """Everything that a plan has found about a job.

    Attributes:
        derived: values that a run will choose because the configuration leaves them open, one line each.
        prediction: predicted step; None if the hardware is not described.
        lengths: sample lengths of the prediction.
        collectives: role -> dimension -> bytes that the role's first rank receives in a step's collectives.
    """

    job: PlannedJob
    memory: list[RankMemory]
    traffic: ReshardTraffic
    shortages: list[Shortage]
    advice: Advice | None
    derived: tuple[str, ...] = ()
    prediction: Prediction | None = None
    lengths: LengthDistribution | None = None
    collectives: dict[str, dict[str, float]] = field(default_factory=dict)


def survey(
    job: PlannedJob,
    hardware: Hardware | None = None,
    lengths: LengthDistribution | None = None,
) -> Capacity:
    """Count memory and traffic of every rank, look for settings that fit if these do not, and predict a step.

    Args:
        hardware: hardware of the prediction; None: no prediction.
        lengths: lengths of the samples; None: `default_lengths`.
    """
    share = derive_share(job)
    if share is not None:
        job = with_share(job, share)
    derived = tuple(_derived(job, share))
    memory, traffic = MemoryModel(job).ranks(), make_traffic(job)
    missing = shortages(job, memory)
    advice = advise(job) if missing else None
    if hardware is None:
        return Capacity(job, memory, traffic, missing, advice, derived)
    lengths = lengths or default_lengths(job)
    prediction = simulate(job, hardware, lengths=lengths, traffic=traffic)
    collectives = received_in_collectives(StepLoad(job, hardware, lengths, traffic))
    return Capacity(
        job, memory, traffic, missing, advice, derived, prediction, lengths, collectives
    )


def _derived(job: PlannedJob, share: float | None) -> Iterator[str]:
    """Yield the values that a run will choose because the configuration leaves them open.

    Args:
        share: vLLM's share of a GPU, if it is derived.
    """
    if share is not None:
        yield explain(share)
    if not job.machine.on_gpus:
        return
    for role in job.roles:
        # A global model takes its ddp section from the role on the islands.
        if role.trained is None or role.shards is not None or role.part == "global":
            continue
        configured = role.ddp
        fields = ddp_defaults(
            configured, replicas=role.grid.dp * role.grid.cp, on_gpus=True
        )
        chosen = [
            f"{name}={str(value).lower()}"
            for name, value in fields.items()
            if name not in configured
        ]
        if chosen:
            yield f"{role.name}.ddp: {', '.join(chosen)}"
    if {role.config.engine for role in job.roles} == {"megatron"}:
        yield "CUDA_DEVICE_MAX_CONNECTIONS: 1 up to Hopper"


def as_dict(capacity: Capacity) -> dict[str, Any]:
    """Return the plan in bytes and seconds under plain names, with `[least, median, most]` over the ranks."""
    job, traffic, machine = capacity.job, capacity.traffic, capacity.job.machine
    slowest, mean = traffic.seconds(machine)
    memory, engine, rollout = capacity.memory, capacity.memory[0].engine, job.rollout
    return {
        "model": {
            "architecture": job.spec.architecture,
            "layers": job.spec.num_layers,
            "parameters": parameters(job),
        },
        "world": {
            "ranks": job.world,
            "nodes": num_nodes(job),
            "gpus_per_node": machine.gpus_per_node,
        },
        "machine": {
            n: getattr(machine, n)
            for n in ("memory", "reserve", "nvlink", "network", "hbm", "disk")
        },
        "roles": {
            role.name: {
                "ranks": ranks_text(role.ranks),
                "grid": str(role.grid),
                "islands": role.islands,
            }
            for role in job.roles
        }
        | {
            "rollout": {
                "ranks": ranks_text(rollout.ranks),
                "tp": rollout.tp,
                "engines": rollout.num_engines,
            }
        }
        | {
            name: {"ranks": ranks_text(job.placement.ranks[name])}
            for name in ("reward", "coordinator")
        },
        "derived": list(capacity.derived),
        "memory": {
            role: {part: spread(part_bytes(memory, role, part)) for part in parts}
            for role, parts in parts_of(memory).items()
        },
        "phases": {
            phase: spread([m.phases[phase] for m in memory if phase in m.phases])
            for phase in phases_of(memory)
        },
        "host_memory": host_memory(capacity),
        "kv_cache": {
            "bytes_per_token": engine.bytes_per_token,
            "tokens": engine.tokens,
            "full_sequences_at_once": engine.concurrency,
            "sequences_per_step": engine.sequences,
        },
        "updates": _update_figures(capacity),
        "reshard": {
            "received": {
                kind: list(traffic.spread("received", kind)) for kind in KINDS
            },
            "sent": {kind: list(traffic.spread("sent", kind)) for kind in LINKS},
            "seconds": slowest,
            "seconds_mean": mean,
            "fan_out": _fan_out_as_dict(capacity),
            "delta": _delta_as_dict(capacity),
            "share_of_wire_limit": mean / slowest if slowest else 1.0,
            "busiest_over_mean": {
                f"{direction}_{kind}": traffic.busiest(kind, direction)
                for kind in LINKS
                for direction in ("sent", "received")
            },
        },
        "fsdp_micro_batch": {
            name: passes._asdict() for name, passes in fsdp_passes(job).items()
        },
        "checkpoint": {
            "bytes": sum(m.saved for m in memory),
            "written": spread([m.saved for m in memory]),
            "read": spread([m.loaded for m in memory]),
            "save_seconds": save_seconds(capacity),
            "resume_seconds": resume_seconds(capacity),
        },
        "step": _step_as_dict(capacity),
        "fits": not capacity.shortages,
        "does_not_fit": [str(shortage) for shortage in capacity.shortages],
        "nearest_settings_that_fit": [
            list(setting) for setting in capacity.advice.settings
        ]
        if capacity.advice
        else [],
        "basis": list(BASIS.values()),
    }


def _delta_as_dict(capacity: Capacity) -> dict[str, Any] | None:
    delta, network = capacity.traffic.delta, capacity.job.machine.network
    if delta is None:
        return None
    return asdict(delta) | {"seconds": delta.busiest / network}


def _fan_out_as_dict(capacity: Capacity) -> dict[str, Any] | None:
    fan_out, network = capacity.traffic.fan_out, capacity.job.machine.network
    if fan_out is None:
        return None
    seconds = {
        "seconds": fan_out.busiest / network,
        "seconds_without": fan_out.busiest_without / network,
    }
    return asdict(fan_out) | seconds


def as_text(capacity: Capacity) -> str:
    """Format the plan for a terminal, at most 110 columns wide."""
    parts = (_head, _memory, _traffic, _step, _verdict)
    return "\n\n".join(
        "\n".join(lines)
        for lines in [*(list(part(capacity)) for part in parts), list(_basis())]
        if lines
    )


def parts_of(memory: Sequence[RankMemory]) -> dict[str, list[str]]:
    """Return role -> its memory components on any rank."""
    by_role: dict[str, dict[str, None]] = {}
    for rank in memory:
        for role, parts in rank.parts.items():
            by_role.setdefault(role, {}).update(dict.fromkeys(parts))
    return {role: list(parts) for role, parts in by_role.items()}


def part_bytes(memory: Sequence[RankMemory], role: str, part: str) -> list[float]:
    """List the bytes of a component on each rank that has it."""
    return [
        rank.parts[role][part] for rank in memory if part in rank.parts.get(role, {})
    ]


def parameters(job: PlannedJob) -> int:
    """Return the number of the actor's parameters."""
    return sum(prod(weight.shape) for weight in described(job.spec))


def fsdp_passes(job: PlannedJob) -> dict[str, Passes]:
    """Return role -> bytes that a rank receives in a micro-batch, for roles that are trained under FSDP."""
    by_role = {}
    for role in job.roles:
        if role.shards is not None and role.trained is not None:
            dtype = role.config.fsdp.param_dtype
            weights = tensor_rank_weights(role.spec, role.value_head, role.grid.tp)
            itemsize = ITEMSIZE[dtype] if dtype else job.itemsize
            by_role[role.name] = passes_of(
                weights, role.config.fsdp, itemsize, role.shards
            )
    return by_role


Span = tuple[float, float, str, float]


def memory_over_time(prediction: Prediction, memory: RankMemory) -> list[Span]:
    """List (begin, end, activity, peak bytes) of a rank through a step, without gaps.

    Between operators the rank holds what it keeps at rest, with engines asleep if they
    sleep. An operator that runs ahead of its own step appears at the time of this step
    at which it runs.
    """
    step, pieces = prediction.step_seconds, []
    for phase in prediction.phases:
        if memory.rank in phase.ranks and phase.seconds > INSTANT:
            # Steps repeat, so an operator that began before this step appears at its
            # end, split in two if it crosses the boundary.
            begin = phase.begin % step
            begin = 0.0 if step - begin < INSTANT else begin
            end = begin + phase.seconds
            pieces.append((begin, min(end, step), phase))
            if end - step > INSTANT:
                pieces.append((0.0, end - step, phase))
    spans: list[Span] = []
    at, resting = 0.0, memory.phases.get(REST, 0.0)
    for begin, end, phase in sorted(pieces, key=lambda piece: piece[0]):
        if begin - at > INSTANT:
            spans.append((at, begin, REST, resting))
            at = begin
        spans.append((at, end, phase.name, memory.phases.get(_moment(phase), resting)))
        at = end
    return spans + ([(at, step, REST, resting)] if step - at > INSTANT else [])


def _moment(phase: PredictedPhase) -> str:
    """Return the phase of `RankMemory` that an operator belongs to."""
    kinds = {
        "rollout": "generate",
        "reshard": "reshard",
        "reward": REST,
        "advantages": REST,
    }
    return kinds.get(
        phase.name,
        f"{phase.role} {'update' if phase.name.endswith('_update') else 'forward'}",
    )


def sleep_and_wake(prediction: Prediction) -> list[tuple[str, float, float]]:
    """List ("sleep" or "wake", begin, end) of the engines by begin; begin equals end if nothing is copied."""
    lanes = [
        lane
        for phase in prediction.phases
        for lane in phase.lanes
        if lane[0] in ("sleep", "wake")
    ]
    return sorted(
        ((label, begin, end) for label, _, begin, end in lanes),
        key=lambda event: event[1],
    )


def num_nodes(job: PlannedJob) -> int:
    """Return the number of nodes that the job uses."""
    return -(-job.world // job.machine.gpus_per_node)


def nodes_text(job: PlannedJob) -> str:
    """Format the number of nodes: "1 node", "128 nodes"."""
    return f"{num_nodes(job):,} node{'s' if num_nodes(job) > 1 else ''}"


def spread(values: Sequence[float]) -> list[float]:
    """Return [least, median, most]."""
    return [min(values), statistics.median(values), max(values)]


def _head(capacity: Capacity) -> Iterator[str]:
    job, machine = capacity.job, capacity.job.machine
    dtype = {2: "16-bit", 4: "32-bit"}[job.itemsize]
    yield (
        f"{job.spec.architecture}: {job.spec.num_layers} layers, "
        f"{parameters(job) / 1e9:.1f} billion parameters, {dtype}"
    )
    yield (
        f"{job.world:,} ranks: {nodes_text(job)} of {machine.gpus_per_node} GPUs, {machine.memory / GB:g} GB each "
        f"(NVLink {machine.nvlink / GB:.0f}, network {machine.network / GB:.0f}, HBM {machine.hbm / GB:.0f} GB/s)"
    )
    yield ""
    width = max(11, *(len(role.name) for role in job.roles))
    for role in job.roles:
        islands = f" x {role.islands} islands" if role.islands > 1 else ""
        yield f"  {role.name:<{width}} {str(role.grid) + islands:<28} ranks {ranks_text(role.ranks)}"
    engines = f"vLLM tp{job.rollout.tp}{' with expert parallel' if job.rollout.expert_parallel else ''}"
    where = (
        "" if job.placement.is_colocated else f"ranks {ranks_text(job.rollout.ranks)}, "
    )
    yield f"  {'rollout':<{width}} {engines:<28} {where}{job.rollout.num_engines:,} engines"
    if not job.placement.is_colocated:
        for name in ("reward", "coordinator"):
            yield f"  {name:<{width}} {'':<28} ranks {ranks_text(job.placement.ranks[name])}"
    if capacity.derived:
        yield ""
        yield "chosen, as the configuration does not say:"
        for line in capacity.derived:
            yield textwrap.fill(line, WIDTH, **INDENTED)


def _memory(capacity: Capacity) -> Iterator[str]:
    memory, machine = capacity.memory, capacity.job.machine
    yield f"{'memory per rank, GB':<36}{'least':>10}{'median':>10}{'most':>10}"
    width = max(10, *(len(role) for role in parts_of(memory)))
    for role, parts in parts_of(memory).items():
        for part in parts:
            yield _row(f"  {role:<{width}} {part}", part_bytes(memory, role, part))
    yield f"in use, of {machine.memory / GB:g} GB"
    for phase in phases_of(memory):
        values = [m.phases[phase] for m in memory if phase in m.phases]
        over = max(values) - machine.memory
        yield _row(f"  {phase}", values) + (
            f"   {over / GB:.1f} GB too much" if over > 0 else ""
        )
    engine = memory[0].engine
    yield (
        f"KV cache of an engine: {engine.tokens:,} tokens of {engine.bytes_per_token / 1e3:.0f} kB a rank; "
        f"{engine.concurrency:,.1f} sequences of {engine.longest:,} at once, {engine.sequences:,} a step"
    )
    yield _row("a checkpoint: written by each rank", [m.saved for m in memory]) + (
        f"   {sum(m.saved for m in memory) / GB:,.0f} GB together"
    )
    if any(m.saved for m in memory):
        yield _row("  read by each rank in a resume", [m.loaded for m in memory])
        place = (
            "in the background"
            if capacity.job.config.checkpoint.async_save
            else "while the run waits"
        )
        yield (
            f"  at {machine.disk / GB:g} GB/s a node: save {save_seconds(capacity):,.1f} s {place}, "
            f"resume {resume_seconds(capacity):,.1f} s with the first reshard"
        )
    if host := host_memory(capacity):
        by_part = ", ".join(
            f"{part} {nbytes / GB:,.0f} GB" for part, nbytes in host.items()
        )
        yield f"host memory of the fullest node: {sum(host.values()) / GB:,.0f} GB ({by_part})"


def save_seconds(capacity: Capacity) -> float:
    """Return the seconds in which the fullest node writes its part of a checkpoint."""
    return (
        _largest_of_nodes(capacity, [m.saved for m in capacity.memory])
        / capacity.job.machine.disk
    )


def resume_seconds(capacity: Capacity) -> float:
    """Return the seconds in which the fullest node reads a checkpoint, and the engines then get its weights.

    The starts of processes and engines come before that and are not counted.
    """
    read = _largest_of_nodes(capacity, [m.loaded for m in capacity.memory])
    slowest, _ = capacity.traffic.seconds(capacity.job.machine)
    return read / capacity.job.machine.disk + slowest


def _largest_of_nodes(capacity: Capacity, values: Sequence[float]) -> float:
    """Return the largest sum of the ranks' values on a node."""
    totals: dict[int, float] = {}
    for rank, value in zip(capacity.memory, values, strict=True):
        node = capacity.job.machine.node_of(rank.rank)
        totals[node] = totals.get(node, 0.0) + value
    return max(totals.values(), default=0.0)


def host_memory(capacity: Capacity) -> dict[str, float]:
    """Return component -> bytes of host memory on the fullest node: offloaded state, and a checkpoint's copy."""
    nodes: dict[int, dict[str, float]] = {}
    for rank in capacity.memory:
        node = nodes.setdefault(capacity.job.machine.node_of(rank.rank), {})
        for part, nbytes in rank.host.items():
            node[part] = node.get(part, 0.0) + nbytes
    return max(nodes.values(), key=lambda node: sum(node.values()), default={})


def _updates(capacity: Capacity) -> Iterator[str]:
    """Yield what one update of each role with a global model moves, if there are any."""
    for name, update in _update_figures(capacity).items():
        yield (
            f"one update of the {name}, {update['seconds']:.3f} s between islands and coordinator:"
        )
        yield (
            f"  into its busiest rank {update['gradients_received'] / GB:.2f} GB of gradients, out of it "
            f"{update['weights_sent'] / GB:.2f} GB of weights; into an island {update['weights_received'] / GB:.2f} GB"
        )


def _update_figures(capacity: Capacity) -> dict[str, dict[str, float]]:
    """Return role -> bytes and seconds of one update, for roles with a global model on the coordinator's ranks."""
    job = capacity.job
    figures = {}
    for name in job.global_models:
        traffic = make_update_traffic(job, name)
        received = [
            sum(
                sum(transfer.ranks[rank].from_rank.values())
                for transfer in traffic.gradients
            )
            for rank in range(job.world)
        ]
        weights = traffic.weights.ranks
        figures[name] = {
            "gradients_received": max(received),
            "weights_sent": max(sum(rank.to_rank.values()) for rank in weights),
            "weights_received": max(sum(rank.from_rank.values()) for rank in weights),
            "seconds": traffic.seconds(job.machine),
        }
    return figures


def _traffic(capacity: Capacity) -> Iterator[str]:
    traffic, machine = capacity.traffic, capacity.job.machine
    yield f"{'one reshard, GB per rank':<36}{'least':>10}{'median':>10}{'most':>10}{'most/mean':>11}"
    names = {
        "alias": "aliased, not moved",
        "local": "copied in place",
        "nvlink": "NVLink",
        "network": "network",
    }
    for kind in KINDS:
        directions = ("received", "sent") if kind in LINKS else ("received",)
        for direction in directions:
            label = f"  {names[kind]}{f' {direction}' if kind in LINKS else ''}"
            values = [getattr(rank, direction)[kind] for rank in traffic.ranks]
            busy = f"{traffic.busiest(kind, direction):>11.2f}" if any(values) else ""
            yield _row(label, values) + busy
    yield from _updates(capacity)
    slowest, mean = traffic.seconds(machine)
    by_link: dict[str, float] = {}
    for rank in traffic.ranks:
        for link, seconds in rank.seconds_by_link(machine).items():
            by_link[link] = max(by_link.get(link, 0.0), seconds)
    parts = ", ".join(
        f"{link} {seconds:.3f} s" for link, seconds in by_link.items() if seconds
    )
    share = mean / slowest if slowest else 1.0
    yield from _fsdp(capacity.job)
    yield f"time {slowest:.3f} s ({parts or 'nothing moves'}); {share:.0%} of the wire limit (mean rank over busiest)"
    if (fan_out := _fan_out_as_dict(capacity)) is not None:
        yield (
            f"fan-out: copies sent from the actor's ranks to other nodes: {fan_out['copies']:.1f} "
            f"({fan_out['copies_without']:.1f} without fan-out)"
        )
        yield (
            f"  busiest link between nodes: {fan_out['busiest'] / GB:.1f} GB in {fan_out['seconds']:.3f} s "
            f"({fan_out['busiest_without'] / GB:.1f} GB in {fan_out['seconds_without']:.3f} s without fan-out)"
        )
    if (delta := _delta_as_dict(capacity)) is not None:
        yield (
            f"delta: if {delta['changed']:.0%} of the weights change in a step, the busiest link between nodes carries "
            f"{delta['busiest'] / GB:.2f} GB in {delta['seconds']:.3f} s ({delta['bytes_share']:.1%} of whole weights)"
        )


def _fsdp(job: PlannedJob) -> Iterator[str]:
    for name, passes in fsdp_passes(job).items():
        yield (
            f"{name} under FSDP: of each micro-batch a rank receives {passes.gathered / GB:.2f} GB of weights "
            f"(all-gathers) and {passes.reduced / GB:.2f} GB of gradients"
        )


def _step_as_dict(capacity: Capacity) -> dict[str, Any] | None:
    prediction = capacity.prediction
    if prediction is None:
        return None
    return {
        "seconds": prediction.step_seconds,
        "phases": {phase.name: [phase.begin, phase.end] for phase in prediction.phases},
        "critical_path": [list(part) for part in prediction.critical_path],
        "sleep_and_wake": [list(event) for event in sleep_and_wake(prediction)],
        "memory_over_time": _memory_by_ranks(prediction, capacity.memory),
        "tokens": prediction.tokens,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "mfu": prediction.mfu,
        "mfu_of_updates": prediction.update_mfu,
        "collective_bytes": capacity.collectives,
    }


def _memory_by_ranks(
    prediction: Prediction, memory: Sequence[RankMemory]
) -> list[dict[str, Any]]:
    """Return memory over time, with ranks of equal memory in one entry."""
    alike: dict[tuple[Span, ...], list[int]] = {}
    for rank_memory in memory:
        alike.setdefault(tuple(memory_over_time(prediction, rank_memory)), []).append(
            rank_memory.rank
        )
    return [
        {"ranks": ranks_text(ranks), "spans": [list(span) for span in spans]}
        for spans, ranks in alike.items()
    ]


def _step(capacity: Capacity) -> Iterator[str]:
    prediction, lengths = capacity.prediction, capacity.lengths
    if prediction is None or lengths is None:
        return
    yield (
        f"a step, predicted: {prediction.step_seconds:.1f} s; {prediction.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
        f"; MFU {prediction.mfu:.1%} of the step, {prediction.update_mfu:.1%} of the update"
    )
    yield (
        f"  {prediction.samples:,} samples: prompts of {lengths.prompt:,.0f} tokens, "
        f"responses of {lengths.response:,.0f} (up to {lengths.longest_of(prediction.samples):,.0f})"
    )
    on_path = dict(prediction.critical_path)
    for phase in prediction.phases:
        share = on_path.get(phase.name, 0.0) / prediction.step_seconds
        remark = f"{share:>7.0%} of the step" if share else "   beside other operators"
        yield f"  {phase.name:<16}{phase.begin:>10.2f} to{phase.end:>9.2f} s{remark}"
    yield "  critical path: " + ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in prediction.critical_path
    )
    if capacity.collectives:
        roles = [
            f"{role} "
            + ", ".join(
                f"{dimension} {count / GB:,.2f}" for dimension, count in counts.items()
            )
            for role, counts in capacity.collectives.items()
        ]
        text = (
            f"collectives, GB that each role's first rank receives: {'; '.join(roles)}"
        )
        yield from textwrap.wrap(text, WIDTH, **INDENTED)
    if slept := sleep_and_wake(prediction):
        yield "  engines: " + ", ".join(
            f"{label} at {begin:.2f} s ({end - begin:.2f} s)"
            for label, begin, end in slept
        )
    fullest = max(capacity.memory, key=lambda rank_memory: rank_memory.peak)
    held = ", ".join(
        f"{label} {nbytes / GB:.1f}"
        for _, _, label, nbytes in memory_over_time(prediction, fullest)
    )
    yield from textwrap.wrap(
        f"memory of rank {fullest.rank} through it, GB: {held}", WIDTH, **INDENTED
    )


def _verdict(capacity: Capacity) -> Iterator[str]:
    if not capacity.shortages:
        peak = max(rank.peak for rank in capacity.memory)
        yield f"fits: {peak / GB:.1f} of {capacity.job.machine.memory / GB:.1f} GB on the fullest rank"
        return
    yield "does not fit:"
    for shortage in capacity.shortages:
        yield f"  - {shortage}"
    yield f"nearest that would: {capacity.advice}"


def _basis() -> Iterator[str]:
    yield "how this was worked out"
    for line in BASIS.values():
        yield textwrap.fill(
            line, WIDTH, initial_indent="  - ", subsequent_indent="    "
        )


def _row(label: str, values: Sequence[float]) -> str:
    return f"{label:<36}" + "".join(f"{value / GB:>10.2f}" for value in spread(values))
