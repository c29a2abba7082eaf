"""Bytes that a role's first rank receives in the collectives of one step, by dimension of its grid.

The counts are those of `megaverl.distributed.traffic` in a run: a bandwidth-optimal
algorithm, for Megatron-core's layers and distributed optimizer. One all-reduce of B
bytes over n ranks receives 2 (n - 1) / n B.

    tp   two all-reduces of the hidden states in each layer and direction; under sequence parallelism as many bytes in
         all-gathers and reduce-scatters, and in the backward pass the inputs of column-parallel layers once more
    cp   keys and values of the other ranks, and in the backward pass their gradients; layers with a state exchange
         tokens for heads and back, in both directions
    ep   tokens to their experts and back, in both directions
    pp   the hidden states of a micro-batch from the stage before, or their gradients from the stage after; gradients
         of tied embeddings
    dp   gradients (reduce-scatter) and weights (all-gather) of each update, over dp and cp together
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from megaverl.config.megatron_defaults import ddp_defaults
from megaverl.planner.costs import exchanged_numbers
from megaverl.planner.job import Role
from megaverl.planner.layer_parts import mean_parts
from megaverl.planner.operators import (
    StepLoad,
    micro_batches,
    parameters_of_stage,
    scored,
)
from megaverl.planner.stages import Recompute, padded_vocab_size

# Numbers that a vocabulary-parallel log-prob sums for each response token, in float32:
# the largest logit, the normaliser, two weighted sums, and the chosen token's logit
# (`models.vocab_parallel`).
VOCABULARY_SUMS = 5


def received_in_collectives(
    load: StepLoad, operators: Iterable[tuple[str, Role, str]] | None = None
) -> dict[str, dict[str, float]]:
    """Return role -> dimension -> bytes that the role's first rank receives in a step. Dimensions of size 1 are absent.

    Roles under FSDP are left out: `Passes` counts their gathers for each micro-batch.

    Args:
        operators: as of `scored`; None: those of a step of `megaverl train`.
    """
    total: defaultdict[str, defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for _, role, kind in scored(load.job) if operators is None else operators:
        if role.shards is not None:
            continue
        for dimension, count in _bytes_of_operator(
            load, role, updates=kind == "update"
        ).items():
            if count:
                total[role.name][dimension] += count
    return {role: dict(counts) for role, counts in total.items()}


def _bytes_of_operator(
    load: StepLoad, role: Role, *, updates: bool
) -> dict[str, float]:
    """Return the bytes of scoring a step's samples, or of all updates on them."""
    grid, spec, itemsize = role.grid, role.spec, load.actor.itemsize
    parts = load.job.config.algorithm.num_mini_batches if updates else 1
    times = parts * load.passes_over() if updates else 1
    batch, number = micro_batches(load, role, parts)
    tokens = batch.tokens * number * times / grid.cp
    responses = load.samples / (grid.dp * role.islands) * load.lengths.response
    responses *= load.passes_over() if updates else 1
    hidden = itemsize * tokens * spec.hidden_size
    counts = {
        "tp": _tensor(load, role, responses, hidden, updates=updates),
        "cp": _context(load, role, tokens, updates=updates),
        "ep": _expert(load, role, hidden, updates=updates),
        # The first stage receives gradients alone.
        "pp": hidden / _sequence_shards(role) if grid.pp > 1 and updates else 0.0,
        "dp": 0.0,
    }
    if updates:
        # Gradients are reduced over dp and cp together, a group that is counted as cp if
        # there is one replica.
        counts["dp" if grid.dp > 1 else "cp"] += times * _data(load, role)
        counts["pp"] += times * _tied(load, role)
    return counts


def _sequence_shards(role: Role) -> int:
    """Return the number of ranks over which hidden states are split between layers: tp under sequence parallelism."""
    is_split = bool(role.recompute.get("sequence_parallel", role.spec.moe is not None))
    return role.grid.tp if is_split else 1


def _tensor(
    load: StepLoad, role: Role, responses: float, hidden: float, *, updates: bool
) -> float:
    """Return the bytes of tensor parallelism: layers, embedding, and the head if it is on the same stage.

    Args:
        responses: response tokens of a rank.
    """
    tp = role.grid.tp
    if tp == 1:
        return 0.0
    share = (tp - 1) / tp
    # Two messages for each output, forward and backward.
    num_outputs = sum(role.layers(0)) * mean_parts(role.spec).num_outputs
    is_split = _sequence_shards(role) > 1
    forward = 2.0
    # Under sequence parallelism the backward pass gathers the inputs of column-parallel
    # layers once more.
    backward = 3.0 if is_split else 2.0
    repeats = 1.0 if Recompute.read(role.recompute).granularity == "full" else 0.0
    passes = forward + (backward + repeats * forward if updates else 0.0)
    # The embedding is summed once: an all-reduce, or a reduce-scatter and in the
    # backward pass an all-gather.
    embedding = (2.0 if updates else 1.0) if is_split else 2.0
    total = num_outputs * passes * hidden * share + embedding * hidden * share
    if role.grid.pp == 1 and not role.value_head:
        total += VOCABULARY_SUMS * 2 * 4 * responses * share
        # The gradient of the head's input is summed; under sequence parallelism its
        # input is gathered as well.
        head = (3.0 if updates else 1.0) if is_split else (2.0 if updates else 0.0)
        total += head * hidden * share
    return total


def _context(load: StepLoad, role: Role, tokens: float, *, updates: bool) -> float:
    """Return the bytes that layers receive from the other context-parallel ranks.

    Attention receives keys and values, and their gradients. Layers with a state receive
    tokens in exchange for heads, and back.

    Args:
        tokens: tokens of this rank.
    """
    spec, grid = role.spec, role.grid
    if grid.cp == 1:
        return 0.0
    num_layers, parts = sum(role.layers(0)), mean_parts(spec)
    recompute = Recompute.read(role.recompute)
    is_full = recompute.granularity == "full"
    # A pass of the update that is repeated receives once more.
    layer_passes = (2 + is_full) if updates else 1
    has_core_twice = is_full or "core_attn" in recompute.modules
    core_passes = (2 + has_core_twice) if updates else 1
    width = 2 * max(spec.num_kv_heads / grid.tp, 1) * spec.head_dim
    received = parts.attention * core_passes * (grid.cp - 1) * width
    if spec.is_recurrent:
        exchanged = sum(exchanged_numbers(spec, grid)) * (grid.cp - 1) / grid.cp
        received += parts.num_states * layer_passes * exchanged
    return load.actor.itemsize * num_layers * tokens * received


def _expert(load: StepLoad, role: Role, hidden: float, *, updates: bool) -> float:
    """Return the bytes of tokens that arrive at experts and come back, under even routing."""
    spec, grid = role.spec, role.grid
    if spec.moe is None or grid.ep == 1:
        return 0.0
    _, num_layers = role.layers(0)
    exchanged = hidden / grid.tp * spec.moe.experts_per_token * (grid.ep - 1) / grid.ep
    return 2 * num_layers * exchanged * (2 if updates else 1)


def _gradient_bytes(load: StepLoad, role: Role) -> int:
    """Return the bytes of a gradient's element while it is summed."""
    assert role.trained is not None
    ddp = ddp_defaults(
        role.trained.ddp,
        replicas=role.grid.dp * role.grid.cp,
        on_gpus=load.hardware.on_gpus,
    )
    return (
        4
        if ddp["grad_reduce_in_fp32"] or load.dtype == "float32"
        else load.actor.itemsize
    )


def _tied(load: StepLoad, role: Role) -> float:
    """Return the bytes in which the first and the last stage sum the gradients of tied embeddings, once an update."""
    grid, spec, trained = role.grid, role.spec, role.trained
    if (
        grid.pp == 1
        or not spec.tie_embeddings
        or role.value_head
        or trained is None
        or trained.lora is not None
    ):
        return 0.0
    parameters = (
        padded_vocab_size(spec.vocab_size, grid.tp) / grid.tp * spec.hidden_size
    )
    return parameters * _gradient_bytes(load, role)


def _data(load: StepLoad, role: Role) -> float:
    """Return the bytes of one update: gradients are scattered over the replicas, and weights gathered from them."""
    grid, trained = role.grid, role.trained
    if trained is None or trained.lora is not None:
        return 0.0
    gradient = _gradient_bytes(load, role)
    plain, expert = parameters_of_stage(role, 0)
    shares = ((plain, grid.dp * grid.cp), (expert, grid.expert_dp))
    # A replica without an optimizer sums its gradients by an all-reduce.
    gathered = gradient if role.part == "replica" else load.actor.itemsize
    return sum(
        (gradient + gathered) * count * (size - 1) / size for count, size in shares
    )
