"""GPU memory of every rank: bytes of its roles and its engine, and the peak of each phase of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from megaverl.planner.buffers import (
    ITEMSIZE,
    BufferOptions,
    Parameter,
    TrainedBytes,
    adapters_of,
    eight_bit_copies,
    linear_elements,
    parameters_of,
    router_bias_bytes,
    trained_bytes,
)
from megaverl.planner.fsdp import gathered_bytes, shard_bytes, tensor_rank_weights
from megaverl.planner.job import PlannedJob, Role
from megaverl.planner.reserve import engine_workspace, graph_bytes, reserve_parts
from megaverl.planner.stages import (
    LayerShape,
    Recompute,
    StageLoad,
    chunked_head_bytes,
    head_bytes,
    in_flight,
    keys_per_token,
    padded_vocab_size,
    stage_bytes,
)
from megaverl.planner.traffic import (
    aliased_elements,
    compared_share,
    reshard_plans,
    update_plans,
)
from megaverl.sharding.layout import Layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import held_bytes, matrices

MB = 2**20  # unit of `reshard.bucket_mb`
REST = "between"  # phase in which no model runs on the rank


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parts: role -> component -> bytes. "samples", "reshard" and "reserve" stand beside the roles.
        moments: phase of a step -> component in use at its peak -> bytes, the reserve included.
        engine: how the rollout engine divides its share of the memory.
        saved: bytes that the rank writes to a checkpoint. With `checkpoint.async_save`, host memory may hold as much
            again if an update begins before it is written.
        loaded: bytes that the rank reads from a checkpoint when a run resumes.
        host: component -> bytes of host memory: offloaded state, and a checkpoint's copy.
    """

    rank: int
    parts: dict[str, dict[str, float]]
    moments: dict[str, dict[str, float]]
    engine: EngineBytes = field(repr=False)
    saved: float = 0.0
    host: dict[str, float] = field(default_factory=dict)
    loaded: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Phase of a step -> bytes in use at its peak."""
        return {phase: sum(used.values()) for phase, used in self.moments.items()}

    @property
    def peak(self) -> float:
        """Bytes in use at the peak of the step."""
        return max(self.phases.values(), default=0.0)


class MemoryModel:
    """Computes `RankMemory`. Ranks with equal shares of a role share one cached computation."""

    def __init__(self, job: PlannedJob) -> None:
        self.job = job
        self._stage_parameters = cache(self._make_stage_parameters)
        self._trained = cache(self._make_trained)
        self.activations = cache(self._make_activations)
        self._plans = cache(lambda: reshard_plans(job))
        self._update_plans = cache(
            lambda: [
                plans for name in job.global_models for plans in update_plans(job, name)
            ]
        )

    @cached_property
    def _engine(self) -> EngineBytes:
        job, config, rollout = self.job, self.job.config, self.job.rollout
        gpu = EngineGpu(
            memory=job.machine.memory,
            aliased=min(
                self._aliased_on(rank)
                for rank in job.stage_ranks()
                if rank in job.rollout.ranks
            ),
            # A reserve that the user gives contains the graphs already.
            graphs=graph_bytes(config.rollout.vllm)
            if job.machine.reserve is None
            else 0.0,
        )
        return engine_bytes(
            job.spec,
            rollout.layout_of(0),
            rollout.tp,
            config.rollout.vllm,
            gpu,
            itemsize=job.itemsize,
            sequences=-(-config.samples_at_once // job.rollout.num_engines),
            longest=config.max_tokens,
        )

    def ranks(self, ranks: Iterable[int] | None = None) -> list[RankMemory]:
        """Return the memory of these ranks, or of all."""
        return [
            self.rank(rank)
            for rank in (range(self.job.world) if ranks is None else ranks)
        ]

    def rank(self, rank: int) -> RankMemory:
        """Return the memory of one rank."""
        job = self.job
        parts: dict[str, dict[str, float]] = {}
        reserve = self._reserve(rank)
        opponents = job.opponent_bytes if rank in job.rollout.ranks else 0
        # `held` is in use in every phase of a step, `loads` in one phase each; `parts`
        # lists everything by role for the report.
        held = {
            "reserve": sum(reserve.values()),
            "training": 0.0,
            "frozen": float(opponents),
        }
        loads: dict[str, dict[str, float]] = {}
        for role in job.roles:
            place = role.place(rank)
            if place is None:
                continue
            train, score = self.activations(role.name, role.grid.coords(place).pp)
            copies = self._copies(role, place)
            held["frozen" if role.trained is None else "training"] += sum(
                copies.values()
            )
            if role.trained is not None:
                parts[role.name] = (
                    self._train(role, rank, (train, score), held, loads) | copies
                )
                continue
            weights = 0 if role.config.fsdp.cpu_offload else self.weights(role, rank)
            parts[role.name] = {"weights": weights, "activations": score} | copies
            loads[f"{role.name} forward"] = {"activations": score}
            if role.name == "reference" and job.config.reference.offload:
                loads[f"{role.name} forward"]["frozen"] = weights
            else:
                held["frozen"] += weights
        if fields := job.field_bytes(rank):
            parts["samples"] = {"fields": fields}
            loads = {phase: load | {"fields": fields} for phase, load in loads.items()}
        aliased, engine, generates = (
            self._aliased_on(rank),
            self._engine,
            rank in job.rollout.ranks,
        )
        if generates:
            parts["rollout"] = {
                "weights": engine.weights - aliased,
                "aliased": aliased,
                "KV cache": max(0.0, engine.cache),
                "workspace": engine.workspace,
            } | ({"reference": opponents} if opponents else {})
        sends = rank in job.placement.islands[0]
        if job.global_models:
            sends = any(
                role.part != "whole" and role.place(rank) is not None
                for role in job.roles
            )
        moves = job.world > 1 and (generates or sends)
        buckets = float(2 * job.config.reshard.bucket_mb * MB) if moves else 0.0
        if generates:
            buckets += self._landing_bytes()
        sent_copies = self._delta_copies(rank) if moves else 0.0
        if sent_copies:
            # Encoded messages that wait take up to one more bucket.
            buckets += float(job.config.reshard.bucket_mb * MB)
        if moves or job.world == 1:
            parts["reshard"] = {"buckets": buckets}
        if sent_copies:
            parts["reshard"]["copies of sent weights"] = sent_copies
            held["frozen"] += sent_copies
        if job.config.actor.offload.parameters and rank in job.actor.ranks:
            loads["reshard"] = {"training": parts["actor"]["weights"]}
        if parts and reserve:
            parts["reserve"] = reserve
        moments = (
            self._moments(held, loads, aliased, buckets)
            if generates
            else _training(held, loads, buckets)
        )
        written = [
            self.trained(role, rank)
            for role in job.roles
            if role.trained and role.place(rank) is not None
        ]
        saved = float(
            sum(
                role_bytes.saved_weights + role_bytes.saved_optimizer
                for role_bytes in written
            )
        )
        loaded = float(sum(role_bytes.loaded for role_bytes in written))
        return RankMemory(
            rank, parts, moments, engine, saved, self._host(rank, parts, saved), loaded
        )

    def _host(
        self, rank: int, parts: dict[str, dict[str, float]], saved: float
    ) -> dict[str, float]:
        """Return component -> bytes of host memory. Offloaded gradients are discarded, so they take none.

        Args:
            parts: parts of the rank's device memory.
            saved: bytes that the rank writes to a checkpoint.
        """
        host_bytes: dict[str, float] = {}
        for role in self.job.roles:
            if role.place(rank) is None:
                continue
            if role.trained is None:
                is_away = role.name == "reference" and self.job.config.reference.offload
                host_bytes[role.name] = parts[role.name]["weights"] if is_away else 0.0
            elif (offload := role.trained.offload).folder is None:
                names = [
                    name
                    for name in ("optimizer", "parameters")
                    if getattr(offload, name)
                ]
                of_names = {"optimizer": "optimizer", "parameters": "weights"}
                host_bytes[role.name] = sum(
                    parts[role.name][of_names[name]] for name in names
                )
        if self.job.config.checkpoint.async_save:
            host_bytes["checkpoint"] = saved
        return {part: nbytes for part, nbytes in host_bytes.items() if nbytes}

    def _reserve(self, rank: int) -> dict[str, float]:
        """Return part -> bytes of reserve: the user's figure if there is one, else the sum that this rank needs."""
        job = self.job
        if job.machine.reserve is not None:
            return {"as given": job.machine.reserve}
        plans, node_of = self._plans(), job.machine.node_of
        peers: set[int] = set()
        for transfer in (plans, *self._update_plans()):
            volume = transfer.volume(rank)
            peers |= {*volume.sent, *volume.received}
        # Within a node, weights are read in place over CUDA IPC
        # (`weights.transports.ipc`), without NCCL buffers.
        if job.config.reshard.ipc == "auto":
            peers = {peer for peer in peers if node_of(peer) != node_of(rank)}
            # Ranks forward weights over NCCL, within nodes too.
            for transfer in (plans, *self._update_plans()):
                if transfer.fan_out is not None:
                    peers |= transfer.fan_out.peers(rank)
        return reserve_parts(job, rank, peers)

    def _train(
        self,
        role: Role,
        rank: int,
        activations: tuple[float, float],
        held: dict[str, float],
        loads: dict[str, dict[str, float]],
    ) -> dict[str, float]:
        """Return the parts of a role with an optimizer, and add to `held` and `loads`.

        Args:
            activations: bytes (while training, while scoring).
            held: component -> bytes in use in every phase; updated in place.
            loads: phase -> component -> bytes in use in this phase only; updated in place.
        """
        assert role.trained is not None
        (train, score), trained, offload = (
            activations,
            self.trained(role, rank),
            role.trained.offload,
        )
        weights = float(trained.weights)
        if role.trained.lora is not None:
            weights += self.weights(
                role, rank, without="output_layer.weight" if role.value_head else ""
            )
        away = {
            "parameters": weights if offload.parameters else 0.0,
            # FSDP frees gradients after each optimizer step.
            "gradients": float(trained.gradients)
            if offload.gradients or role.shards is not None
            else 0.0,
            "optimizer": float(trained.optimizer) if offload.optimizer else 0.0,
        }
        held["training"] += (
            weights + trained.gradients + trained.optimizer - sum(away.values())
        )
        if role.part != "global":
            loads[f"{role.name} forward"] = {
                "activations": score,
                "training": away["parameters"],
            }
        # Offloaded optimizer state is loaded for the first optimizer step of an update
        # and stays until the last one.
        algorithm = self.job.config.algorithm
        stays = (
            away["optimizer"]
            if algorithm.num_epochs * algorithm.num_mini_batches > 1
            else 0.0
        )
        loads[f"{role.name} update"] = {
            "activations": max(train, trained.step + away["optimizer"] - stays),
            "training": away["parameters"] + away["gradients"] + stays,
        }
        return {
            "weights": weights,
            "gradients": trained.gradients,
            "optimizer": trained.optimizer,
            "activations": train,
        }

    def _moments(
        self,
        held: dict[str, float],
        loads: dict[str, dict[str, float]],
        aliased: float,
        buckets: float,
    ) -> dict[str, dict[str, float]]:
        """Return the bytes in use in each phase on a rank with an engine, by component.

        Args:
            held: component -> bytes in use in every phase.
            loads: phase -> component -> bytes in use in this phase only.
        """
        engine, config = self._engine, self.job.config
        engine_parts = {
            "engine weights": engine.weights - aliased,
            "KV cache": max(0.0, engine.cache),
        }
        resting = {} if config.rollout.sleep else engine_parts
        generate = held | engine_parts | {"activations": engine.workspace}
        # At start, vLLM allocates all its weights. Only then are some replaced by the
        # actor's, and the cache allocated.
        loading = held | {"engine weights": engine.weights}
        # During a reshard a sleeping engine has its weights mapped but no cache
        # (`workers.weight_sync`).
        written = engine_parts
        if config.rollout.sleep and self.job.placement.is_colocated:
            written = {"engine weights": engine_parts["engine weights"]}
        return {
            "engine start": max(loading, generate, key=lambda used: sum(used.values())),
            "generate": generate,
            REST: held | resting,
            "reshard": _sum(
                held | written | {"buckets": buckets}, loads.get("reshard", {})
            ),
        } | {
            phase: _sum(held | resting, load)
            for phase, load in loads.items()
            if phase != "reshard"
        }

    def weights(self, role: Role, rank: int, without: str = "") -> int:
        """Return the bytes of the role's parameters on a rank, without buffer padding.

        Args:
            without: name of a parameter to leave out: a critic's head, which is counted as trained beside adapters.
        """
        chunks = self._stage_parameters(
            role.name, role.grid.coords(role.place(rank) or 0).pp
        )
        return (
            sum(p.numel for chunk in chunks for p in chunk if p.name != without)
            * self.job.itemsize
        )

    def _copies(self, role: Role, place: int) -> dict[str, int]:
        """Return the bytes of 8-bit or rounded weight copies, which are on the device under every kind of offload."""
        stage, grid = role.grid.coords(place).pp, role.grid
        ends = {"first": stage == 0, "last": stage == grid.pp - 1}
        chunks, backward = (
            self._stage_parameters(role.name, stage),
            role.trained is not None,
        )
        nbytes = eight_bit_copies(
            chunks, role.config.megatron, backward=backward, **ends
        )
        copies = {"8-bit copies": nbytes} if nbytes else {}
        if getattr(role.config, "fake_quantization", None) is not None:
            # The backward pass reads the rounded weight of every linear layer.
            numel = linear_elements(chunks)
            copies["rounded weights"] = numel * self.job.itemsize
        return copies

    def trained(self, role: Role, rank: int) -> TrainedBytes:
        """Return the bytes that training adds to a role on this rank."""
        coords = role.grid.coords(role.place(rank) or 0)
        return self._trained(
            role.name, coords.pp, coords.cp + role.grid.cp * coords.dp, coords.edp
        )

    def _delta_copies(self, rank: int) -> float:
        """Return the bytes of the copies that `reshard.delta` keeps on a rank: what it sends, each element once."""
        job = self.job
        place, compared = job.actor.place(rank), compared_share(job)
        if place is None or not compared:
            return 0.0
        volume = self._plans().volume(rank)
        node = job.machine.node_of(rank)
        numel = sum(
            count
            for peer, count in volume.sent.items()
            if job.config.reshard.delta == "on" or job.machine.node_of(peer) != node
        )
        numel = min(numel, job.actor.layout_of(place).numel)
        return job.itemsize * numel * compared

    def _landing_bytes(self) -> float:
        """Return the bytes of the buffer that receives matrices before they are quantised.

        It holds a bucket, or the largest matrix if that is larger.
        """
        job = self.job
        sizes = [
            numel * job.itemsize
            for numel in matrices(job.rollout.layout_of(0)).values()
        ]
        return (
            max(min(job.config.reshard.bucket_mb * MB, sum(sizes)), *sizes)
            if sizes
            else 0.0
        )

    def _aliased_on(self, rank: int) -> int:
        job = self.job
        if not job.aliases or rank not in job.actor.ranks:
            return 0
        place = job.actor.place(rank) or 0
        source, adapted = job.actor.layout_of(place), frozenset(job.actor.adapters)
        dest = job.rollout.layout_of(job.rollout.ranks.index(rank))
        return aliased_elements(source, dest, adapted) * job.itemsize

    def _role(self, name: str) -> Role:
        return next(role for role in self.job.roles if role.name == name)

    def _make_stage_parameters(
        self, name: str, stage: int
    ) -> tuple[tuple[Parameter, ...], ...]:
        role = self._role(name)
        # Every rank of a stage has tensors of the same sizes.
        layout = role.layout_of(role.grid.rank(pp=stage))
        tied = role.spec.tie_embeddings and not role.value_head and role.grid.pp > 1
        return parameters_of(layout, expert_parallel=role.grid.ep > 1, tied=tied)

    def _make_trained(
        self, name: str, stage: int, dense: int, expert: int
    ) -> TrainedBytes:
        role = self._role(name)
        assert role.trained is not None
        if role.shards is not None:
            return shard_bytes(
                role.layout_of(dense),
                role.config.fsdp,
                role.shards.replicas,
                getattr(role.config, "optimizer", {}),
            )
        replicas = role.grid.dp * role.grid.cp
        parameters = self._stage_parameters(name, stage)
        layout = role.layout_of(role.grid.rank(pp=stage))
        frozen = router_bias_bytes(layout)
        if adapters := role.adapters:
            head = ("score.weight",) if role.value_head else ()
            parameters = adapters_of(layout, adapters, head)
            # Base weights, biases among them, are counted as a whole.
            frozen = 0
        nbytes = trained_bytes(
            parameters,
            BufferOptions.read(
                role.ddp,
                getattr(role.config, "optimizer", {}),
                replicas,
                on_gpus=self.job.machine.on_gpus,
            ),
            itemsize=self.job.itemsize,
            dense=(dense, replicas),
            expert=(expert, role.grid.expert_dp),
            first_stage=stage == 0,
            tensor_parallel=role.grid.tp,
        )
        nbytes = replace(nbytes, weights=nbytes.weights + frozen)
        if role.part == "replica":
            # The optimizer and the checkpoint are the global model's.
            return replace(
                nbytes,
                optimizer=0,
                step=0,
                saved_weights=0,
                saved_optimizer=0,
                loaded=0,
            )
        if role.part == "global":
            # Gradients of all but the first island are staged before they are added.
            return replace(nbytes, gradients=2 * nbytes.gradients)
        return nbytes

    def _make_activations(self, name: str, stage: int) -> tuple[float, float]:
        """Return the peak bytes of activations (while training, while scoring)."""
        role, config = self._role(name), self.job.config
        if role.part == "global":
            return 0.0, 0.0
        grid, fields = role.grid, role.recompute
        tokens = -(-self._tokens(role) // grid.cp)
        shape = LayerShape.read(
            role.spec,
            grid,
            fields,
            self.job.itemsize,
            repeats=self._repeats(role, tokens),
        )
        dense, moe = role.layers(stage)
        flying = in_flight(stage, grid.pp, grid.vpp, self._micro_batches(role))
        load = StageLoad(dense, moe, tokens, config.max_tokens, flying)
        train = stage_bytes(shape, load, Recompute.read(fields))
        score = stage_bytes(
            shape,
            StageLoad(min(dense, 1), min(moe, 1), tokens, config.max_tokens, 1.0),
            Recompute(),
        )
        if stage == grid.pp - 1:
            if role.value_head:
                # float32 hidden states and gradient.
                head_train = head_score = 8.0 * tokens * role.spec.hidden_size
            else:
                vocab = padded_vocab_size(role.spec.vocab_size, grid.tp)
                head_train, head_score = (
                    self._head_bytes(role, shape, vocab, tokens, train)
                    for train in (True, False)
                )
            train, score = train + head_train, score + head_score
        if role.shards is not None:
            gathered_sizes = (self._gathered(role, train) for train in (True, False))
            train, score = (
                kept + gathered
                for kept, gathered in zip((train, score), gathered_sizes, strict=True)
            )
        return train, score

    def _gathered(self, role: Role, train: bool) -> float:
        fsdp = role.config.fsdp
        itemsize = ITEMSIZE[fsdp.param_dtype] if fsdp.param_dtype else self.job.itemsize
        weights = tensor_rank_weights(role.spec, role.value_head, role.grid.tp)
        return gathered_bytes(
            weights,
            fsdp,
            itemsize,
            train=train,
            micro_batches=self._micro_batches(role),
        )

    def _head_bytes(
        self, role: Role, shape: LayerShape, vocab: int, tokens: int, train: bool
    ) -> float:
        # Under FSDP the output layer is replicated, so every tensor-parallel rank
        # computes all logits.
        if role.shards is not None:
            shape = replace(shape, tp=1)
        converts = self.job.config.model.fp32_lm_head and shape.itemsize < 4
        if converts:
            shape = replace(shape, itemsize=4)
        if not role.config.chunked_logits:
            return head_bytes(shape, vocab, tokens, train=train)
        trains_weight = role.trained is not None and role.trained.lora is None
        return chunked_head_bytes(
            *(shape, vocab, tokens),
            train=train,
            trains_weight=trains_weight,
            converts_weight=converts,
        )

    def _repeats(self, role: Role, tokens: int) -> float:
        config = self.job.config
        # Transformer Engine's context parallelism shares no tokens between packed
        # samples, nor do models with states.
        shares_tokens = role.grid.cp == 1 and not role.spec.is_recurrent
        if not role.config.pack_samples or not shares_tokens:
            return 1.0
        shared = config.data.max_prompt_tokens - 1
        return keys_per_token(
            tokens,
            shared,
            config.max_tokens - shared,
            config.algorithm.group_size,
            config.environment.conversations,
        )

    def _samples(self, role: Role) -> int:
        """Return the number of samples in one update on a data-parallel rank."""
        config = self.job.config
        return -(
            -config.rows_per_step // (config.algorithm.num_mini_batches * role.grid.dp)
        )

    def _tokens(self, role: Role) -> int:
        """Return the tokens of the largest micro-batch if every sample has its full length."""
        most = role.config.micro_batch_tokens
        if role.trained is None or role.trained.gradient_accumulation == 1:
            return most
        samples = -(-self._samples(role) // role.trained.gradient_accumulation)
        return min(most, samples * self.job.config.max_tokens)

    def _micro_batches(self, role: Role) -> int:
        """Return the number of micro-batches of one update on a data-parallel rank if every sample has full length."""
        samples = self._samples(role)
        least = (
            min(samples, role.trained.gradient_accumulation)
            if role.trained is not None
            else 1
        )
        return max(
            least,
            -(
                -samples
                // max(1, role.config.micro_batch_tokens // self.job.config.max_tokens)
            ),
        )


def phases_of(memory: Iterable[RankMemory]) -> list[str]:
    """List the phases of all ranks, each once."""
    return list(dict.fromkeys(phase for rank in memory for phase in rank.moments))


def _training(
    held: dict[str, float], loads: dict[str, dict[str, float]], buckets: float
) -> dict[str, dict[str, float]]:
    """Return the bytes in use in each phase on a rank without an engine, by component."""
    moves = (
        {"reshard": _sum(held | {"buckets": buckets}, loads.get("reshard", {}))}
        if buckets
        else {}
    )
    return (
        moves
        | {REST: held}
        | {
            phase: _sum(held, load)
            for phase, load in loads.items()
            if phase != "reshard"
        }
    )


def _sum(used: dict[str, float], load: dict[str, float]) -> dict[str, float]:
    return {name: used.get(name, 0.0) + load.get(name, 0.0) for name in used | load}


UTILIZATION = 0.92  # vLLM's default of gpu_memory_utilization


@dataclass(frozen=True)
class EngineBytes:
    """Memory of one rank of an engine.

    Attributes:
        budget: bytes of everything that the engine takes.
        weights: bytes of its weights, before any is aliased.
        workspace: bytes of activations of the largest batch; an estimate of vLLM's profiling.
        cache: bytes of the KV cache; negative if weights and workspace alone exceed the budget.
        bytes_per_token: bytes of a token in the cache.
        sequences: responses that a step asks of the engine.
        longest: tokens of the longest sequence.
    """

    budget: float
    weights: int
    workspace: float
    cache: float
    bytes_per_token: int
    sequences: int
    longest: int

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(0, int(self.cache // self.bytes_per_token))

    @property
    def concurrency(self) -> float:
        """Sequences of full length that the cache holds at once."""
        return self.tokens / self.longest


def kv_bytes_per_token(spec: ModelSpec, tp: int, itemsize: int) -> int:
    """Return the cache bytes of one token on one rank, over all layers.

    With tensor parallelism a rank holds keys and values of its heads; under MLA, every
    rank holds the whole latent.
    """
    if spec.mla is not None:
        return (
            spec.num_layers
            * (spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
            * itemsize
        )
    heads = max(1, spec.num_kv_heads // tp)
    num_attention = spec.count_layers("attention")
    return num_attention * 2 * heads * spec.head_dim * itemsize


def state_bytes(spec: ModelSpec, tp: int, itemsize: int) -> int:
    """Return the bytes of one sequence's states on one rank: of gated delta nets in float32, and of convolutions.

    States of Mamba-2 layers have the model's dtype.
    """
    if (mamba := spec.mamba) is not None:
        of_layer = mamba.inner_size * mamba.state_size
        of_layer += mamba.conv_rows * (mamba.conv_size - 1)
        return spec.count_layers("mamba") * itemsize * of_layer // tp
    net = spec.delta_net
    if net is None:
        return 0
    of_heads = 4 * net.num_value_heads * net.key_head_dim * net.value_head_dim
    convolved = 2 * net.key_width + net.value_width
    of_taps = itemsize * convolved * (net.conv_width - 1)
    return sum(net.layers) * (of_heads + of_taps) // tp


@dataclass(frozen=True)
class EngineGpu:
    """GPU of an engine's rank, as far as it decides the size of the KV cache.

    Attributes:
        memory: bytes of the GPU.
        aliased: bytes of weights that share an actor's storage, on the rank with the fewest. vLLM measures what it
            holds itself and gives its cache the rest of its share; all ranks take the smallest cache (0.32 and later:
            utils/mem_utils.py, v1/executor/uniproc_executor.py).
        graphs: bytes of CUDA graphs, which vLLM takes off its share before the cache (0.32: v1/worker/gpu_worker.py,
            `determine_available_memory`). Its communicators are created before it measures, and lie outside.
    """

    memory: float
    aliased: int
    graphs: float = 0.0


def engine_bytes(
    spec: ModelSpec,
    layout: Layout,
    tp: int,
    fields: Mapping[str, Any],
    gpu: EngineGpu,
    *,
    itemsize: int,
    sequences: int,
    longest: int,
) -> EngineBytes:
    """Return the bytes that each rank of an engine with `tp` ranks holds.

    Args:
        layout: layout of one of its ranks.
        fields: `rollout.vllm`.
        itemsize: bytes of a weight.
        sequences, longest: responses per engine and step, and the context they may need.
    """
    weights = held_bytes(layout, itemsize)
    own_weights = weights - gpu.aliased
    budget = gpu.memory * float(fields.get("gpu_memory_utilization", UTILIZATION))
    cache_itemsize = (
        1 if str(fields.get("kv_cache_dtype", "auto")).startswith("fp8") else itemsize
    )
    workspace = engine_workspace(spec, tp, fields, itemsize)
    cache = budget - own_weights - workspace - gpu.graphs
    # An explicit cache size overrides gpu_memory_utilization.
    if fields.get("kv_cache_memory_bytes"):
        cache = float(fields["kv_cache_memory_bytes"])
        budget = cache + own_weights + workspace + gpu.graphs
    per_token = kv_bytes_per_token(spec, tp, cache_itemsize)
    # A sequence has one state, however long it is.
    per_token += -(-state_bytes(spec, tp, itemsize) // longest)
    return EngineBytes(budget, weights, workspace, cache, per_token, sequences, longest)
