"""Operators of a job's step with their seconds on each rank. `simulator` plays them as events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, log2, prod

from megaverl.config.megatron_defaults import ddp_defaults
from megaverl.planner.costs import (
    OPTIMIZER_BYTES,
    Duration,
    LayerPasses,
    MicroBatchLoad,
    ModelCosts,
    attention_parameters,
    layers_of,
)
from megaverl.planner.fsdp import described
from megaverl.planner.generation import (
    LengthDistribution,
    engine_costs,
    rollout_duration,
)
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import PlannedJob, Role
from megaverl.planner.memory import UTILIZATION
from megaverl.planner.stages import Recompute, padded_vocab_size, pipeline
from megaverl.planner.traffic import ReshardTraffic, make_update_traffic
from megaverl.sharding.fan_out import MOST_SENT
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.quantization import bytes_per_weight

Lane = tuple[str, int, float, float]
# Messages of one exchange of samples between two ranks: sizes, header, rows
# (`data.row_transfer.move_ragged`).
EXCHANGED = 3


@dataclass(frozen=True)
class Operation:
    """An operator of a step.

    Attributes:
        needs: operators of the same step whose results it reads.
        role_groups: names of the role groups that it runs on.
        seconds: duration if every rank has a processor of its own.
        work: seconds of processor time, over all ranks.
        lanes: (part, rank, begin, end) for drawing its parts.
        ahead: number of steps that it may be ahead of training.
    """

    name: str
    role: str
    ranks: tuple[int, ...] = field(repr=False)
    role_groups: frozenset[str]
    needs: tuple[str, ...]
    seconds: float
    work: float = 0.0
    lanes: tuple[Lane, ...] = field(default=(), repr=False)
    ahead: int = 0

    @property
    def cores(self) -> float:
        """Mean number of processors that it keeps busy."""
        return self.work / self.seconds if self.seconds else 0.0

    def times(self, factor: float) -> Operation:
        """Return the operator with all its times multiplied by `factor`."""
        if factor == 1.0:
            return self
        lanes = tuple(
            (label, rank, begin * factor, end * factor)
            for label, rank, begin, end in self.lanes
        )
        return replace(
            self, seconds=self.seconds * factor, work=self.work * factor, lanes=lanes
        )


class StepLoad:
    """The work of one step of a job: its samples and the costs of its models.

    Attributes:
        samples: samples of a step, over all ranks.
        moving_seconds: of sending weights to the engines, if another way than megaverl's is simulated.
    """

    def __init__(
        self,
        job: PlannedJob,
        hardware: Hardware,
        lengths: LengthDistribution,
        traffic: ReshardTraffic | None,
        moving_seconds: float | None = None,
    ) -> None:
        self.job, self.hardware, self.lengths, self.traffic = (
            job,
            hardware,
            lengths,
            traffic,
        )
        self.moving_seconds = moving_seconds
        self.samples = job.config.rows_per_step
        dtype = job.config.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if hardware.on_gpus else "float32"
        self.dtype = dtype
        self._update_seconds: dict[str, float] = {}

    @property
    def peak(self) -> float:
        """Peak floating-point operations a second of a rank."""
        return self.hardware.peak(self.dtype)

    @cached_property
    def actor(self) -> ModelCosts:
        """Costs of the actor's model."""
        return self.model(self.job.spec)

    def model(self, spec: ModelSpec, *, fp8: bool = False) -> ModelCosts:
        """Return the costs of a model.

        Args:
            fp8: its linear layers multiply in 8 bits, if the hardware does.
        """
        fp8 = fp8 and "float8" in self.hardware.tflops
        return ModelCosts(spec, self.hardware, self.dtype, fp8=fp8)

    def update_seconds(self, name: str) -> float:
        """Return the seconds in which an update exchanges gradients and weights with a role's global model."""
        if name not in self._update_seconds:
            traffic = make_update_traffic(self.job, name)
            self._update_seconds[name] = traffic.seconds(self.job.machine)
        return self._update_seconds[name]

    def passes_over(self) -> int:
        """Return how often an update visits each sample."""
        return self.job.config.algorithm.num_epochs

    def model_flops(self) -> dict[str, float]:
        """Return operator -> operations that the model needs for it, over all ranks."""
        by_operator = {}
        tokens, pairs = (
            self.samples * self.lengths.tokens,
            self.samples * self.lengths.pairs,
        )
        for name, role, kind in scored(self.job):
            # A backward pass has twice the operations of a forward pass.
            times = 3 * self.passes_over() if kind == "update" else 1
            by_operator[name] = times * self.model(role.spec).flops(tokens, pairs)
        return by_operator | {"rollout": self.actor.flops(tokens, pairs)}


def scored(job: PlannedJob) -> Iterator[tuple[str, Role, str]]:
    """Yield (operator, its role, "score" or "update") for operators that run a model over a step's samples."""
    config, roles = job.config, {role.name: role for role in job.roles}
    algorithm = config.algorithm
    # A single update per step starts from the weights that scored, so it needs no
    # separate pass for old_log_probs.
    if (
        algorithm.num_epochs * algorithm.num_mini_batches > 1
        or algorithm.kl.place == "reward"
    ):
        yield "old_log_probs", job.actor, "score"
    if config.uses_ref_log_probs:
        yield "ref_log_probs", roles.get("reference", job.actor), "score"
    if "critic" in roles:
        yield "values", roles["critic"], "score"
        yield "critic_update", roles["critic"], "update"
    yield "actor_update", job.actor, "update"
    if "draft" in roles:
        yield "draft_update", roles["draft"], "update"


def operations(load: StepLoad) -> list[Operation]:
    """List the operators of a step, in the order in which a rank with several of them runs them."""
    job, hardware = load.job, load.hardware
    models = {name: over_samples(load, role, kind) for name, role, kind in scored(job)}
    generated = rollout_duration(job, load.actor, load.lengths)
    ranks, copied = job.rollout.ranks, slept_seconds(load)
    weights_mapped, cache_mapped = mapped_seconds(load)
    per_sample = load.samples / len(ranks) * hardware.sample_ms * 1e-3
    work = (generated.work(hardware) + per_sample) * len(ranks)
    seconds = generated.seconds + per_sample
    lanes = _around(
        job,
        [("wake", cache_mapped), ("rollout", seconds), ("sleep", copied or 0.0)],
        sleeps=copied is not None,
    )
    planned = [
        _operation(
            load,
            "rollout",
            "rollout",
            ranks,
            (),
            cache_mapped + seconds + (copied or 0.0),
            work,
            lanes,
        )
    ]
    reward_ranks = job.placement.ranks["reward"]
    per_sample = ceil(load.samples / len(reward_ranks)) * hardware.sample_ms * 1e-3
    planned.append(
        _operation(
            load,
            "reward",
            "reward",
            reward_ranks,
            ("rollout",),
            per_sample,
            per_sample * len(reward_ranks),
        )
    )
    needs = ["reward"]
    for name, role, kind in scored(job):
        if kind == "score":
            seconds, work, lanes = models[name]
            exchange = _exchanged(load, role)
            seconds, work = (
                seconds + exchange.seconds,
                work + exchange.work(hardware) * len(role.ranks),
            )
            planned.append(
                _operation(
                    load,
                    name,
                    role.name,
                    role.ranks,
                    ("rollout",),
                    seconds,
                    work,
                    lanes,
                )
            )
            needs.append(name)
    own_time = Duration(hardware.step_ms * 1e-3) + _exchanged(load, job.actor)
    ranks, work = job.actor.ranks, own_time.work(hardware) * len(job.actor.ranks)
    planned.append(
        _operation(
            load, "advantages", "actor", ranks, tuple(needs), own_time.seconds, work
        )
    )
    for name, role, kind in scored(job):
        if kind == "update":
            planned.append(
                _operation(
                    load, name, role.name, role.ranks, ("advantages",), *models[name]
                )
            )
    ranks = tuple(sorted({*job.actor.ranks, *job.rollout.ranks}))
    moving = Duration(wait=reshard_seconds(load))
    waking = weights_mapped + (copied or 0.0)
    work, seconds = moving.work(hardware) * len(ranks), moving.seconds + waking
    lanes = _around(
        job,
        [("wake", waking), ("reshard", moving.seconds)],
        sleeps=copied is not None,
    )
    planned.append(
        _operation(
            load, "reshard", "rollout", ranks, ("actor_update",), seconds, work, lanes
        )
    )
    return _running_ahead(job, planned)


def _running_ahead(job: PlannedJob, ops: Sequence[Operation]) -> list[Operation]:
    """Set how many steps each operator may be ahead of training.

    An operator is as far ahead as its role groups are, but no further than the
    operators that it needs and those before it in the same group. For example, a critic
    on the engines' ranks computes values ahead of training, but its update waits for
    the actor's advantages.
    """
    rollout, sampling = job.config.rollout, job.config.algorithm.dynamic_sampling
    staleness = rollout.max_staleness if rollout.async_rollout else 0
    in_rounds = (
        sampling.metric is not None and job.config.trainer.replay_rollouts is None
    )
    lags = {
        group.name: job.placement.lag(group.ranks[0], staleness, in_rounds=in_rounds)
        for group in job.placement.role_groups
    }
    ahead: dict[str, int] = {}
    for op in ops:
        ahead[op.name] = min(
            [lags[name] for name in op.role_groups] + [ahead[name] for name in op.needs]
        )
        lags |= dict.fromkeys(op.role_groups, ahead[op.name])
    return [replace(op, ahead=ahead[op.name]) for op in ops]


def _around(
    job: PlannedJob, parts: Sequence[tuple[str, float]], *, sleeps: bool
) -> tuple[Lane, ...]:
    """Return lanes on the engine's first rank for its parts, one after the other; empty if the engine never sleeps."""
    lanes, at = [], 0.0
    for label, seconds in parts if sleeps else ():
        lanes.append((label, job.rollout.ranks[0], at, at + seconds))
        at += seconds
    return tuple(lanes)


def slept_seconds(load: StepLoad) -> float | None:
    """Return the seconds of copying an engine's weights to the host when it sleeps; None if it does not sleep.

    Waking for a reshard takes as long again. Where actor and engines share ranks
    nothing is copied, as the reshard writes all weights anew (`workers.weight_sync`).
    Mapping memory again is counted by `mapped_seconds`, and unmapping takes no time.
    """
    job, config = load.job, load.job.config
    if (
        not config.rollout.sleep
        or config.rollout.engine != "vllm"
        or load.hardware.cores is not None
    ):
        return None
    if job.placement.colocated("actor", "rollout"):
        return 0.0
    return _engine_weights(load) / (load.hardware.host_gb_s * 1e9)


def _engine_weights(load: StepLoad) -> float:
    """Return the bytes of weights on a rank of an engine, with the input embedding."""
    job, spec = load.job, load.job.spec
    method = job.config.rollout.vllm.get("quantization")
    itemsize = bytes_per_weight(method, load.actor.itemsize)
    embedding = itemsize * spec.vocab_size * spec.hidden_size / job.rollout.tp
    return engine_costs(job, load.actor, load.lengths).weights + embedding


def mapped_seconds(load: StepLoad) -> tuple[float, float]:
    """Return the seconds in which an engine that sleeps gets the memory of its weights back, and that of its cache.

    Weights that are the actor's own storage stay mapped.
    """
    job, hardware = load.job, load.hardware
    if slept_seconds(load) is None or hardware.map_gb_s is None:
        return 0.0, 0.0
    rate = hardware.map_gb_s * 1e9
    weights = _engine_weights(load)
    share = float(job.config.rollout.vllm.get("gpu_memory_utilization", UTILIZATION))
    cache = max(0.0, hardware.memory_gb * 1e9 * share - weights)
    return 0.0 if job.aliases else weights / rate, cache / rate


def _operation(
    load: StepLoad,
    name: str,
    role: str,
    ranks: tuple[int, ...],
    needs: tuple[str, ...],
    seconds: float,
    work: float,
    lanes: tuple[Lane, ...] = (),
) -> Operation:
    """Return an operator with the overhead that every operator has; on shared cores, with the time that they need."""
    job, hardware = load.job, load.hardware
    overhead = hardware.operator_ms * 1e-3
    seconds, work = seconds + overhead, work + overhead * len(ranks)
    if hardware.cores is not None:
        nodes = len({rank // hardware.ranks_per_node for rank in ranks})
        longer = max(seconds, work / (hardware.cores * nodes))
        lanes = tuple(
            (label, rank, a * longer / seconds, b * longer / seconds)
            for label, rank, a, b in lanes
        )
        seconds = longer
    names = [
        group.name
        for group in job.placement.role_groups
        if set(group.ranks) & set(ranks)
    ]
    return Operation(name, role, ranks, frozenset(names), needs, seconds, work, lanes)


def _exchanged(load: StepLoad, role: Role) -> Duration:
    """Return the time in which data-parallel ranks exchange their samples, by recursive doubling.

    See `data.held_rows.HeldRows.spread`.
    """
    if role.grid.dp * role.islands == 1:
        return Duration()
    number = len(role.ranks)
    return Duration(
        wait=EXCHANGED * load.actor.links.send(0.0, number // 2) * ceil(log2(number))
    )


def over_samples(
    load: StepLoad, role: Role, kind: str
) -> tuple[float, float, tuple[Lane, ...]]:
    """Return (seconds, processor seconds, lanes) of scoring a step's samples, or of updating on them."""
    update = kind == "update"
    algorithm = load.job.config.algorithm
    parts = algorithm.num_mini_batches if update else 1
    batch, number = micro_batches(load, role, parts)
    stages = stage_passes(load, role, batch)
    hop = _hop(load, role, batch)
    passes = [(stage.forward.seconds, stage.backward.seconds) for stage in stages]
    span, lanes = pipeline(
        passes, number, hop, forward_only=not update, chunks=role.grid.vpp or 1
    )
    busy = [
        number * sum(piece.work(load.hardware) for piece in _pieces(stage, update))
        for stage in stages
    ]
    per_stage = len(role.ranks) // role.grid.pp
    overhead = load.hardware.micro_batch_ms * 1e-3 * number * (2 if update else 1)
    hops = number * (role.grid.pp - 1) * (2 if update else 1)
    work = (
        sum(busy)
        + overhead * role.grid.pp
        + hops * Duration(wait=hop).work(load.hardware)
    ) * per_stage
    span += overhead
    offload = _offloaded(load, role) if update else 0.0
    if not update:
        return span + offload, work, _ranked(role, lanes)
    closing = _closing(load, role, stages)
    times = parts * load.passes_over()
    first = _ranked(role, lanes)
    for stage in range(role.grid.pp):
        first += (
            (
                "optimizer",
                role.ranks[role.grid.rank(pp=stage)],
                span,
                span + closing.seconds,
            ),
        )
    period = span + closing.seconds  # of one update
    all_lanes = tuple(
        (label, rank, begin + turn * period, stop + turn * period)
        for turn in range(times)
        for label, rank, begin, stop in first
    )
    work += closing.work(load.hardware) * len(role.ranks)
    return times * period + offload, times * work, all_lanes


def _pieces(stage: LayerPasses, update: bool) -> tuple[Duration, ...]:
    return (stage.forward, stage.backward) if update else (stage.forward,)


def micro_batches(load: StepLoad, role: Role, parts: int) -> tuple[MicroBatchLoad, int]:
    """Return (one micro-batch, their number) on the slowest data-parallel rank, for one
    of `parts` equal parts of a step's samples.

    Samples are balanced over the ranks by their lengths (`data.batching.balance`), but
    none is split: the rank with the longest sample has at least its tokens.
    """
    config, lengths = load.job.config, load.lengths
    ranks = role.grid.dp * role.islands
    samples = load.samples / (parts * ranks)
    samples_per_row = (
        min(config.algorithm.group_size, samples) if role.config.pack_samples else 1.0
    )
    shares_prompts = (
        role.config.pack_samples
        and (role.grid.cp == 1 or load.hardware.cores is not None)
        and not role.spec.is_recurrent
    )
    once = samples_per_row if shares_prompts else 1.0
    tokens = samples * (lengths.response + lengths.prompt / once)
    pairs = samples * (lengths.pairs - lengths.prompt**2 / 2 * (1 - 1 / once))
    longest = lengths.prompt + lengths.longest_of(load.samples / parts)
    if ranks > 1:
        tokens, pairs = max(tokens, longest), max(pairs, longest**2 / 2)
    # Without packing, rows are padded to the longest sample.
    if not role.config.pack_samples:
        tokens, pairs = samples * longest, samples * longest**2 / 2
    least = (
        role.trained.gradient_accumulation
        if role.trained is not None and parts > 1
        else 1
    )
    number = max(1, least, ceil(tokens / role.config.micro_batch_tokens))
    # On a CPU attention computes all pairs of a packed row and masks those between
    # samples.
    if load.hardware.cores is not None:
        pairs = number * (tokens / number) ** 2
    return MicroBatchLoad(tokens / number, pairs / number), number


def stage_passes(
    load: StepLoad, role: Role, batch: MicroBatchLoad
) -> list[LayerPasses]:
    """Return the passes of every pipeline stage over one micro-batch."""
    grid, fields = role.grid, role.recompute
    costs = load.model(role.spec, fp8=bool(fields.get("fp8")))
    parallel = (
        bool(fields.get("sequence_parallel", role.spec.moe is not None)) and grid.tp > 1
    )
    recompute = Recompute.read(fields)
    by_kind = {}
    for is_moe in layers_of(role.spec):
        passes = costs.layer(batch, grid, is_moe=is_moe, sequence_parallel=parallel)
        passes = passes + costs.exposed_launches(grid, is_moe=is_moe)
        by_kind[is_moe] = costs.recomputed(passes, batch, grid, recompute)
    head = costs.head(batch, grid, value_head=role.value_head)
    embedding = costs.moved(
        3 * costs.itemsize * batch.tokens / grid.cp * role.spec.hidden_size
    )
    stages = []
    for stage in range(grid.pp):
        dense, moe = role.layers(stage)
        total = by_kind[False] * dense + by_kind[True] * moe
        if stage == 0:
            total = total + LayerPasses(Duration(embedding), Duration(embedding))
        if stage == grid.pp - 1:
            total = total + head
        stages.append(
            _gathered(load, role, total) if role.shards is not None else total
        )
    return stages


def _gathered(load: StepLoad, role: Role, passes: LayerPasses) -> LayerPasses:
    """Add the gathers of FSDP to a stage's passes.

    Weights arrive while the layer before computes, and gradients leave during the
    backward pass, so only time beyond the computation counts.
    """
    assert role.shards is not None
    costs = load.model(role.spec)
    nbytes = costs.itemsize * sum(parameters_of_stage(role, 0))
    moved = costs.links.gather(nbytes, role.shards.size)
    forward, backward = passes.forward, passes.backward
    return LayerPasses(
        Duration(forward.compute, max(forward.wait, moved - forward.compute)),
        Duration(backward.compute, max(backward.wait, 2 * moved - backward.compute)),
    )


def _hop(load: StepLoad, role: Role, batch: MicroBatchLoad) -> float:
    """Return the seconds of sending a micro-batch from one pipeline stage to the next."""
    grid, costs = role.grid, load.actor
    if grid.pp == 1:
        return 0.0
    parallel = bool(role.recompute.get("sequence_parallel", False)) and grid.tp > 1
    nbytes = (
        costs.itemsize
        * batch.tokens
        / grid.cp
        * role.spec.hidden_size
        / (grid.tp if parallel else 1)
    )
    return costs.links.send(nbytes, grid.world_size // grid.pp)


def _ranked(
    role: Role, lanes: Sequence[tuple[str, int, float, float]]
) -> tuple[Lane, ...]:
    """Map lanes of stages to each stage's first rank, and merge passes that follow each other without a pause."""
    merged: list[Lane] = []
    open_lanes: dict[int, int] = {}
    for label, stage, begin, end in lanes:
        at = open_lanes.get(stage)
        if at is not None and merged[at][0] == label and begin - merged[at][3] < 1e-9:
            merged[at] = (label, merged[at][1], merged[at][2], end)
            continue
        open_lanes[stage] = len(merged)
        merged.append((label, role.ranks[role.grid.rank(pp=stage)], begin, end))
    return tuple(merged)


def parameters_of_stage(role: Role, stage: int) -> tuple[float, float]:
    """Return the parameters (outside experts, in experts) that a rank of a pipeline stage holds."""
    spec, grid = role.spec, role.grid
    dense, moe = role.layers(stage)
    attention = attention_parameters(spec) / grid.tp
    plain = (dense + moe) * (attention + 2 * spec.hidden_size)
    matrices = spec.mlp_matrices
    # Of layers without experts, only some have an MLP if layers have one part each.
    share = spec.count_layers("mlp") / max(1, layers_of(spec)[False])
    mlp = matrices * spec.hidden_size * spec.ffn_hidden_size / grid.tp
    plain += dense * share * mlp
    expert = 0.0
    if spec.moe is not None:
        plain += (
            moe
            * spec.hidden_size
            * (
                spec.moe.num_experts
                + matrices * spec.moe.shared_ffn_hidden_size / grid.tp
            )
        )
        held = spec.moe.num_experts / (grid.ep * grid.expert_tp)
        expert = moe * held * matrices * spec.hidden_size * spec.moe.ffn_hidden_size
    embedding = padded_vocab_size(spec.vocab_size, grid.tp) * spec.hidden_size / grid.tp
    ends = [stage == 0, stage == grid.pp - 1 and not role.value_head]
    if all(ends) and spec.tie_embeddings:
        ends[1] = False
    return plain + sum(ends) * embedding, expert


def _closing(load: StepLoad, role: Role, stages: Sequence[LayerPasses]) -> Duration:
    """Return the time of the slowest stage after its last backward pass.

    This is the gradient reduction, the optimizer's step, and the gathering of weights.
    """
    costs, grid = load.model(role.spec), role.grid
    trained, optimizer = role.trained, getattr(role.config, "optimizer", {})
    assert trained is not None
    ddp = ddp_defaults(
        role.ddp, replicas=grid.dp * grid.cp, on_gpus=load.hardware.on_gpus
    )
    gradient = (
        4 if ddp["grad_reduce_in_fp32"] or load.dtype == "float32" else costs.itemsize
    )
    overlaps = bool(ddp["overlap_grad_reduce"])
    gathers_early = bool(trained.ddp.get("overlap_param_gather"))
    distributed = bool(optimizer.get("use_distributed_optimizer", True))
    slowest = Duration()
    for stage in range(grid.pp):
        plain, expert = parameters_of_stage(role, stage)
        if trained.lora is not None:
            # Adapters have about a hundredth of the parameters.
            plain, expert = plain * 0.01, expert * 0.01
        replicas, stride = grid.dp * grid.cp, grid.tp
        groups = (
            (plain, replicas, stride),
            (expert, grid.expert_dp, grid.expert_tp * grid.ep),
        )
        if role.shards is not None:
            groups = ((0.0, 1, 1), (0.0, 1, 1))
        reduced = sum(
            costs.links.gather(gradient * n, size, step) for n, size, step in groups
        )
        gathered = sum(
            costs.links.gather(costs.itemsize * n, size, step)
            for n, size, step in groups
        )
        # The reduction overlaps with the last backward pass, but the last bucket has
        # nothing left to overlap with.
        if overlaps:
            reduced = max(reduced / 8, reduced - stages[stage].backward.seconds)
        if gathers_early:
            gathered = max(gathered / 8, gathered - stages[stage].forward.seconds)
        # A distributed optimizer updates one replica's share on each rank; under FSDP
        # each rank updates its shard.
        shards = role.shards.size if role.shards is not None else 1
        is_distributed = distributed and shards == 1
        plain_split = replicas if is_distributed else shards
        expert_split = grid.expert_dp if is_distributed else shards
        updated = plain / plain_split + expert / expert_split
        step = OPTIMIZER_BYTES * updated / costs.memory
        if optimizer.get("optimizer_cpu_offload"):
            step = OPTIMIZER_BYTES * updated / (load.hardware.host_gb_s * 1e9)
        step += load.hardware.update_ms * 1e-3
        duration = Duration(step, reduced + gathered)
        slowest = max(slowest, duration, key=lambda piece: piece.seconds)
    if role.part == "replica":
        # The optimizer's step is the global model's, between two transfers.
        model = load.job.global_models[role.name]
        # No gradient is reduced there, so the passes that could hide it do not matter.
        step_there = _closing(load, model, [stages[0]] * model.grid.pp)
        waits = slowest.wait + load.update_seconds(role.name)
        return Duration(step_there.compute, waits)
    if role.islands > 1:
        return slowest + Duration(wait=_summed_on_coordinator(load, role))
    return slowest


def _summed_on_coordinator(load: StepLoad, role: Role) -> float:
    """Return the seconds in which the coordinator's rank sums what all islands send, as a mean over the updates.

    One island's ranks together send and receive one float32 number for each trained
    parameter; without a distributed optimizer each data-parallel replica does. Each
    bucket is received from all islands before its sum is sent.
    """
    job, coordinator = load.job, load.job.config.coordinator
    numbers = sum(
        prod(weight.shape) for weight in described(role.spec, role.value_head)
    )
    if role.trained is not None and role.trained.lora is not None:
        # Adapters have about a hundredth of the parameters.
        numbers = numbers // 100
    optimizer = getattr(role.config, "optimizer", {})
    if not optimizer.get("use_distributed_optimizer", True):
        numbers *= role.grid.dp * role.grid.cp
    sent = 2 if coordinator.islands_compress == "bfloat16" else 4
    node_of = job.machine.node_of
    nodes = {node_of(rank) for rank in (*role.ranks, job.placement.coordinator)}
    bandwidth = job.machine.nvlink if len(nodes) == 1 else job.machine.network
    seconds = role.islands * numbers * (sent + 4) / bandwidth
    return seconds / coordinator.islands_every


def _offloaded(load: StepLoad, role: Role) -> float:
    """Return the seconds of copying offloaded state from host memory for an update, and back."""
    if role.trained is None:
        return 0.0
    offload, host = role.trained.offload, load.hardware.host_gb_s * 1e9
    worst = 0.0
    for stage in range(role.grid.pp):
        plain, expert = parameters_of_stage(role, stage)
        nbytes = load.actor.itemsize * (plain + expert) * 2 * offload.parameters
        shards = 12 * (
            plain / (role.grid.dp * role.grid.cp) + expert / role.grid.expert_dp
        )
        nbytes += 2 * shards * offload.optimizer
        worst = max(worst, nbytes / host)
    return worst


def reshard_seconds(load: StepLoad) -> float:
    """Return the seconds of a reshard, from the ranks' own plans if `load.traffic` has them, else from an estimate.

    The estimate counts the bytes that an engine's rank does not hold yet, from the
    nearest ranks that hold them.
    """
    if load.moving_seconds is not None:
        return load.moving_seconds
    job, hardware = load.job, load.hardware
    machine = hardware.machine()
    if load.traffic is not None:
        return load.traffic.seconds(machine)[0] / hardware.link_efficiency
    grid, tp = job.actor.grid, job.rollout.tp
    itemsize = load.actor.itemsize
    stages = [sum(parameters_of_stage(job.actor, stage)) for stage in range(grid.pp)]
    # Bytes of the whole model over a replica's ranks, of which an engine's rank needs 1
    # / tp.
    whole = sum(
        plain * grid.tp + expert * grid.expert_tp * grid.ep
        for plain, expert in (
            parameters_of_stage(job.actor, stage) for stage in range(grid.pp)
        )
    )
    needed = itemsize * whole / tp
    if not job.placement.colocated("actor", "rollout"):
        # Each actor rank sends its weights to several engine ranks if there are more of
        # these.
        copies = max(1, -(-len(job.rollout.ranks) // max(1, len(job.actor.ranks))))
        if (
            copies > 1
            and job.world > hardware.ranks_per_node
            and job.config.reshard.may_fan_out
        ):
            # The ranks of a node share what enters it, and no sender carries much more
            # than they receive.
            shared_by = max(1, hardware.ranks_per_node // tp)
            between_nodes = MOST_SENT * needed / shared_by / hardware.network_gb_s
            return (
                max(between_nodes, needed / hardware.node_gb_s)
                / 1e9
                / hardware.link_efficiency
            )
        gb_s = (
            hardware.network_gb_s
            if job.world > hardware.ranks_per_node
            else hardware.node_gb_s
        )
        return needed * copies / gb_s / 1e9 / hardware.link_efficiency
    # An engine's rank already has the weights of its own actor rank that fall into its
    # tensor-parallel part.
    if grid.ep == 1:
        held = itemsize * max(stages) * min(1.0, grid.tp / tp)
    else:
        held = itemsize * whole / tp / grid.pp / grid.ep
    missing = max(0.0, needed - held)
    # With pipeline stages, a node has a part of the model; the rest comes over the
    # network.
    here = 1.0
    if grid.pp > 1:
        here = min(
            1.0,
            hardware.ranks_per_node * itemsize * max(stages) / max(needed * tp, 1.0),
        )
    within_node = missing * here / (hardware.node_gb_s * 1e9)
    between_nodes = missing * (1 - here) / (hardware.network_gb_s * 1e9)
    links = max(within_node, between_nodes)
    copied = (
        0.0 if job.aliases else 2 * min(held, needed) / (hardware.memory_gb_s * 1e9)
    )
    return max(links / hardware.link_efficiency, copied / hardware.memory_efficiency)
