"""GPU memory that is neither weights, activations nor cache: CUDA's context, NCCL,
workspaces of matrix products, graphs.

Sizes are those of Hopper GPUs with NVSwitch, and of the versions of
`requirements/cuda-py312.lock`: NCCL 2.29.7, Transformer Engine 2.20 (read at 2.18),
torch 2.13, vLLM 0.32. Each constant names its source. Sizes marked "measured" are
published measurements; the others follow from source code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from megaverl.distributed.grid import DIMS, EXPERT_DIMS, GridShape
from megaverl.planner.job import GB, Machine, PlannedJob, Role
from megaverl.sharding.model_spec import ModelSpec

KIB, MIB = 2**10, 2**20

# Measured: memory of a process on an H100 outside torch's allocator, with NCCL
# initialised and nothing connected yet (NVIDIA/nccl issue 1685). CUDA loads kernels
# lazily, so this hardly depends on the installed libraries.
CONTEXT = 1.06 * GB

# NCCL 2.29.7, src/init.cc: buffers of a connection for the protocols Simple
# (NCCL_BUFFSIZE), LL and LL128.
SIMPLE, LL, LL128 = 4 * MIB, 512 * KIB, 120 * 640 * 8 * 8
PAGE = 2 * MIB  # granularity of cuMem allocations
# src/transport/p2p.cc: inside a node the receiver has the three buffers and the sender
# a page of counters; issue 1685 counts allocations of 10,485,760 and 2,097,152 bytes.
LINK = -(-(SIMPLE + LL + LL128) // PAGE) * PAGE + PAGE
# src/transport/net.cc: between nodes both sides have Simple and LL128 on the GPU, LL on
# the host.
NETWORK_LINK = 2 * -(-(SIMPLE + LL128) // PAGE) * PAGE
# Rings and trees inside a node: "24 coll channels, 16 nvls channels, 32 p2p channels"
# on 8 H100.
CHANNELS = 24
# Between nodes, src/graph/connect.cc: two channels per search channel, or four if two
# make fewer than 16.
MOST_CHANNELS = 16
P2P_CHANNELS = 32  # for each peer inside a node: src/graph/paths.cc, seen in issue 1685
CHANNEL_BANDWIDTH = 14 * GB  # src/graph/paths.cc: NCCL_P2P_PER_CHANNEL_NET_BW
PEERS_AT_ONCE = 8  # src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH
# Buffer of a p2p channel between nodes, shared by all peers: src/transport/net.cc,
# NCCL_P2P_NET_CHUNKSIZE.
SHARED = 16 * 128 * KIB
# src/transport/nvls.cc: 16 channels, two directions, 8 steps of 128 KiB, for each rank
# of the node
NVLS = 16 * 2 * 8 * 128 * KIB

# torch, ATen/cuda/CublasHandlePool.cpp: 32 MiB per stream on Hopper
# (CUBLAS_WORKSPACE_CONFIG), for the main stream and for the stream on which the engine
# captures graphs.
CUBLAS = 32 * MIB
# Transformer Engine 2.18, pytorch/cpp_extensions/gemm.py:
# get_cublas_workspace_size_bytes() on Hopper. The grouped products of experts have one
# more workspace on each of 4 streams.
TE_GEMM, TE_STREAMS = 32 * MIB + 1024, 4  # the second: common/util/multi_stream.cpp

# Measured, on an engine of vLLM: 0.44 GiB for 51 sizes (vllm-project/vllm pull request
# 48214)
GRAPH = 0.44 * 2**30 / 51
MOST_CAPTURED = 512  # vLLM 0.32, config/vllm.py: _set_cudagraph_sizes
NUM_SEQS = 1024  # its default of max_num_seqs, offline, on GPUs of 70 GiB and more
# Its default of max_num_batched_tokens, offline, on GPUs of 70 GiB and more.
BATCHED_TOKENS = 16384
# vLLM 0.32, distributed/device_communicators: all_reduce_utils.py, tables for "9.0"
# (Hopper), bytes by tp. The custom all-reduce has two buffers and a table of 8 MiB; a
# further buffer lies in symmetric memory.
CUSTOM = {2: 8 * MIB, 4: 8 * MIB, 6: MIB // 2, 8: MIB // 4}
SYMMETRIC = {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB}

# torch 2.13, c10/core/AllocatorConfig.h: large blocks are cut from segments of 20 MiB
# (kLargeBuffer), and the last segment of each stream is partly empty. Streams: compute,
# offload, graphs, exchanges. Fragments are not counted.
SEGMENT, STREAMS = 20 * MIB, 4

Members = tuple[int, ...] | range  # ranks of a group


def reserve_parts(
    job: PlannedJob, rank: int, peers: Collection[int]
) -> dict[str, float]:
    """Return part -> bytes that a rank holds throughout a run; empty for a rank without a role.

    Args:
        peers: ranks with which this rank exchanges weights over NCCL in a reshard.
    """
    roles = [role for role in job.roles if role.place(rank) is not None]
    generates = rank in job.rollout.ranks
    if not roles and not generates:
        return {}
    parts = {
        "CUDA context": CONTEXT,
        "NCCL": float(nccl_bytes(job, rank, peers)),
        "GEMM workspaces": float(_gemm_bytes(roles, generates)),
        "allocator": float(STREAMS * SEGMENT),
    }
    if generates:
        parts["all-reduce buffers"] = float(_all_reduce_bytes(job.rollout.tp))
        parts["CUDA graphs"] = graph_bytes(job.config.rollout.vllm)
    return parts


def graph_bytes(fields: Mapping[str, Any]) -> float:
    """Return the bytes of an engine's CUDA graphs: one per captured size for any batch,
    and one for pure decoding batches.

    Args:
        fields: `rollout.vllm`.
    """
    sizes = captured_sizes(fields)
    return GRAPH * (
        len(sizes)
        + sum(size <= int(fields.get("max_num_seqs") or NUM_SEQS) for size in sizes)
    )


def captured_sizes(fields: Mapping[str, Any]) -> list[int]:
    """List the batch sizes that vLLM 0.32 captures without speculative decoding (`VllmConfig._set_cudagraph_sizes`).

    These are 1, 2 and 4, every 8 up to 256, every 16 up to twice `max_num_seqs` but at
    most 512, and `max_num_seqs`.
    """
    compilation = fields.get("compilation_config")
    compilation = {
        **(compilation if isinstance(compilation, Mapping) else {}),
        **fields,
    }
    if fields.get("enforce_eager") or compilation.get("cudagraph_mode") in ("NONE", 0):
        return []
    if chosen := compilation.get("cudagraph_capture_sizes"):
        return sorted({int(size) for size in chosen})
    num_seqs = int(fields.get("max_num_seqs") or NUM_SEQS)
    largest = compilation.get("max_cudagraph_capture_size")
    tokens = int(fields.get("max_num_batched_tokens") or MOST_CAPTURED)
    most = min(tokens, int(largest or min(MOST_CAPTURED, 2 * num_seqs)))
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)}
    # vLLM adds the largest batch itself, unless the user has named a limit.
    if largest is None:
        sizes.add(num_seqs)
    return sorted(size for size in sizes if size <= most)


def nccl_bytes(job: PlannedJob, rank: int, peers: Collection[int]) -> int:
    """Return the bytes of the communicators that a rank uses.

    These are each group of its roles once, the engine's groups, and the peers of a
    reshard.
    """
    total = sum(
        collective_bytes(members, rank, job)
        for members in _collective_groups(job, rank)
    )
    total += sum(
        p2p_bytes(members, others, rank, job)
        for members, others in _exchanges(job, rank).items()
    )
    if rank in job.rollout.ranks:
        first = job.rollout.ranks.index(rank) // job.rollout.tp * job.rollout.tp
        engine = job.rollout.ranks[first : first + job.rollout.tp]
        # vLLM has groups of its own: one for tensor parallelism and one for experts.
        groups = 2 if job.spec.moe is not None else 1
        total += groups * collective_bytes(engine, rank, job)
    if peers:
        total += p2p_bytes(range(job.world), peers, rank, job)
    return total


def collective_bytes(members: Members, rank: int, job: PlannedJob) -> int:
    """Return the bytes of a group's rings, trees and NVLink SHARP buffers on a rank.

    A rank has two neighbours in a ring; in a group of two, both are the same rank.
    """
    if len(members) < 2:
        return 0
    here, nodes = _here(members, rank, job)
    # A ring uses one direction of a link, a tree both.
    directions = 1 if len(members) == 2 else 2
    nvls = NVLS * here if here > 1 else 0
    if nodes == 1:
        return directions * CHANNELS * LINK + nvls
    # In each channel, one rank of a node sends to the next node and one receives from
    # the node before.
    return (
        directions * _channels(here) * ((here - 1) * LINK + NETWORK_LINK) // here + nvls
    )


def p2p_bytes(
    members: Members, peers: Collection[int], rank: int, job: PlannedJob
) -> int:
    """Return the bytes of point-to-point connections of a rank with its peers, over the communicator of `members`."""
    here, nodes = _here(members, rank, job)
    near = sum(job.machine.node_of(peer) == job.machine.node_of(rank) for peer in peers)
    if nodes == 1:
        return near * P2P_CHANNELS * LINK
    channels = _power_of_two(_channels(here))
    channels_per_peer = _power_of_two(
        -(-int(job.machine.network) // int(CHANNEL_BANDWIDTH))
    )
    # NCCL halves the channels per peer until all peers that are served at once fit into
    # the communicator's channels.
    while (
        channels_per_peer > 1
        and channels_per_peer * -(-len(members) // PEERS_AT_ONCE) > channels
    ):
        channels_per_peer //= 2
    far = any(job.machine.node_of(peer) != job.machine.node_of(rank) for peer in peers)
    return near * min(channels_per_peer, channels) * LINK + (
        2 * channels * SHARED if far else 0
    )


def _collective_groups(job: PlannedJob, rank: int) -> set[tuple[int, ...]]:
    """Return the groups of this rank's roles that run collectives. Roles with equal ranks share one communicator."""
    collective: set[tuple[int, ...]] = set()
    for role in job.roles:
        place = role.place(rank)
        if place is None:
            continue
        groups = [group_of(role, rank, DIMS, (dim,)) for dim in ("tp", "cp")]
        if role.spec.moe is not None:
            groups.append(group_of(role, rank, EXPERT_DIMS, ("etp", "ep")))
            # A router's load-balancing loss is reduced over tp and cp.
            groups.append(group_of(role, rank, DIMS, ("tp", "cp")))
        # Gradients are reduced over cp and dp, and their norm over all ranks of the
        # replica group.
        if role.trained is not None:
            groups.append(group_of(role, rank, DIMS, ("cp", "dp")))
            groups.append(role.ranks[_island(role, rank) :][: role.grid.world_size])
            if role.spec.moe is not None:
                groups.append(group_of(role, rank, EXPERT_DIMS, ("edp",)))
            stages = group_of(role, rank, DIMS, ("pp",))
            if (
                role.spec.tie_embeddings
                and not role.value_head
                and rank in (stages[0], stages[-1])
            ):
                groups.append(tuple(dict.fromkeys((stages[0], stages[-1]))))
        collective.update(group for group in groups if len(group) > 1)
    return collective


def _exchanges(job: PlannedJob, rank: int) -> dict[tuple[int, ...], set[int]]:
    """Return group -> peers to which this rank sends point to point within it.

    Experts' ranks send to all ranks of their group, pipeline stages to their
    neighbours, and context-parallel ranks to their neighbours in a ring.
    """
    by_group: dict[tuple[int, ...], set[int]] = {}
    for role in job.roles:
        if role.place(rank) is None:
            continue
        stages = group_of(role, rank, DIMS, ("pp",))
        stage = stages.index(rank)
        before, after = stage - 1, stage + 1
        # With virtual stages the last stage sends to the first one again. Without, the
        # ends have one neighbour.
        if not role.grid.vpp:
            before = max(before, 0)
            after = min(after, len(stages) - 1)
        by_group.setdefault(stages, set()).update(
            stages[number % len(stages)] for number in (before, after)
        )
        context = group_of(role, rank, DIMS, ("cp",))
        place = context.index(rank)
        # Layers with a state send to all ranks of the group, attention to its neighbours.
        by_group.setdefault(context, set()).update(
            context
            if role.spec.is_recurrent
            else (context[(place + step) % len(context)] for step in (-1, 1))
        )
        if role.spec.moe is not None:
            experts = group_of(role, rank, EXPERT_DIMS, ("ep",))
            by_group.setdefault(experts, set()).update(experts)
    return {
        group: others - {rank} for group, others in by_group.items() if len(group) > 1
    }


def group_of(
    role: Role, rank: int, dims: tuple[str, ...], spanned: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the global ranks whose grid coordinates differ from this rank's only along the dimensions `spanned`."""
    island = _island(role, rank)
    places = _along(role.grid, role.place(rank) or 0, dims, spanned)
    return tuple(role.ranks[island + place] for place in places)


def _island(role: Role, rank: int) -> int:
    """Return the index, among the role's ranks, of the first rank in this rank's island."""
    return role.ranks.index(rank) - (role.place(rank) or 0)


def _along(
    grid: GridShape, place: int, dims: tuple[str, ...], spanned: tuple[str, ...]
) -> list[int]:
    """Return the places of a grid whose coordinates differ from those of `place` only along `spanned`, ascending."""
    steps = []
    step = 1  # distance of neighbours along a dimension
    for dim, size in zip(dims, grid.sizes(dims), strict=True):
        if dim in spanned:
            # Go back to the first place along this dimension, from which all of them
            # are counted.
            coordinate = place // step % size
            place -= coordinate * step
            steps.append(range(0, size * step, step))
        step *= size
    return sorted(place + sum(offsets) for offsets in product(*steps))


def _here(members: Members, rank: int, job: PlannedJob) -> tuple[int, int]:
    """Return (number of members on this rank's node, number of nodes with members)."""
    nodes = _by_node(members, job.machine)
    return nodes[job.machine.node_of(rank)], len(nodes)


@lru_cache(maxsize=256)
def _by_node(members: Members, machine: Machine) -> Counter[int]:
    return Counter(machine.node_of(member) for member in members)


def _channels(here: int) -> int:
    """Return the channels of a communicator between nodes, each of whose GPUs has a network adapter."""
    return min(MOST_CHANNELS, 2 * here if here >= MOST_CHANNELS // 2 else 4 * here)


def _gemm_bytes(roles: list[Role], generates: bool) -> int:
    transformer_engine = 0
    if roles:
        # Grouped products of experts run on streams of their own, each with a
        # workspace.
        has_experts = any(role.spec.moe is not None for role in roles)
        transformer_engine = TE_GEMM * (1 + (TE_STREAMS if has_experts else 0))
    return CUBLAS * (1 + generates) + transformer_engine


def _all_reduce_bytes(tp: int) -> int:
    return 2 * CUSTOM[tp] + 8 * MIB + SYMMETRIC[tp] if tp in CUSTOM else 0


def _power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


def engine_workspace(
    spec: ModelSpec, tp: int, fields: Mapping[str, Any], itemsize: int
) -> float:
    """Return the bytes of an engine's activations and sampler.

    Activations are counted at a layer's widest point for a full batch. The sampler
    holds float32 logits three times.
    """
    tokens = int(fields.get("max_num_batched_tokens") or BATCHED_TOKENS)
    seqs = int(fields.get("max_num_seqs") or NUM_SEQS)
    width = 3 * spec.ffn_hidden_size / tp
    if spec.moe is not None:
        width = max(
            width,
            spec.moe.experts_per_token
            * (spec.hidden_size + 3 * spec.moe.ffn_hidden_size / tp),
        )
    return (
        tokens * itemsize * (3 * spec.hidden_size + width)
        + 3 * 4 * seqs * spec.vocab_size
    )
