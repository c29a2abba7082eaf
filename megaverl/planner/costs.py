"""Seconds of each piece of a step: matrix products, attention, memory traffic and messages. Pure arithmetic.

A piece takes the longer of two times: its operations at the rate that products of its
size reach, and its bytes at the memory's bandwidth (Williams et al. 2009, "Roofline").
A collective of n ranks moves (n - 1) / n of its bytes over the slowest link on its
path, as rings do (Thakur et al. 2005), after the latency of its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaverl.distributed.grid import GridShape
from megaverl.planner.buffers import ITEMSIZE
from megaverl.planner.hardware import Hardware
from megaverl.planner.layer_parts import LayerParts, mean_parts
from megaverl.planner.stages import Recompute, padded_vocab_size
from megaverl.sharding.model_spec import DeltaNetSpec, MambaSpec, ModelSpec

# Kernel launches of a layer's forward pass: norms, products, rotation, attention,
# activation, residuals.
FORWARD_KERNELS = 14
# Operations of a forward pass through experts that the GPU waits for, and further ones
# for each expert of the rank. Megatron-core's dispatcher copies the number of tokens of
# each expert to the host and waits for it (0.16, moe/token_dispatcher.py,
# `cuda_sync_point`). The GPU's queue is then empty while the host launches permutation,
# exchange, each expert's two products with their splits and events, activation and the
# way back. Fitted on one published figure: Qwen3-30B-A3B takes 152 s a step on 16 + 16
# H100s, which training bounds (NeMo-RL 0.6, docs/about/performance-summary.md).
EXPOSED_LAUNCHES = 72
EXPOSED_LAUNCHES_PER_EXPERT = 3
# Further launches on a CPU for the router, and for sorting tokens by expert and back.
EXPERT_KERNELS = 20
# Further launches on a CPU for attention's second part, and for putting keys and values
# in order.
CONTEXT_KERNELS = 14
# Operations of attention's backward pass divided by those of its forward pass (arXiv
# 2307.08691, section 3.1).
FLASH_BACKWARD = 2.5
# Bytes per parameter and step: float32 weight and both moments read and written,
# gradient read, 16-bit weight written.
OPTIMIZER_BYTES = 34


@dataclass(frozen=True)
class Duration:
    """Time that a rank spends in some part of a step.

    Attributes:
        compute: seconds that its processor works.
        wait: seconds in messages beyond that.
    """

    compute: float = 0.0
    wait: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.compute + self.wait

    def work(self, hardware: Hardware) -> float:
        """Return the seconds of processor time. Where ranks share cores, messages cost processor time too."""
        if hardware.cores is None:
            return self.compute
        return self.compute + hardware.message_work * self.wait

    def __add__(self, other: Duration) -> Duration:
        return Duration(self.compute + other.compute, self.wait + other.wait)

    def __mul__(self, factor: float) -> Duration:
        return Duration(self.compute * factor, self.wait * factor)


@dataclass(frozen=True)
class LayerPasses:
    """Forward and backward passes of a layer, a head or a stage over one micro-batch on one rank."""

    forward: Duration = Duration()
    backward: Duration = Duration()

    def __add__(self, other: LayerPasses) -> LayerPasses:
        return LayerPasses(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> LayerPasses:
        return LayerPasses(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class MicroBatchLoad:
    """Size of a micro-batch over all ranks of tp and cp: its tokens, and the token pairs that attention visits."""

    tokens: float
    pairs: float


class Links:
    """Times of messages between ranks of a grid. `stride` is the distance between neighbouring ranks of the group."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def _link(self, size: int, stride: int) -> tuple[float, float]:
        """Return (bytes per second of each rank, seconds of latency) for `size` ranks that are `stride` apart."""
        hardware = self.hardware
        node = hardware.node_gb_s * 1e9 * hardware.link_efficiency
        here = max(1, min(size, hardware.ranks_per_node // stride))
        latency = hardware.node_latency_us * 1e-6 * math.ceil(math.log2(here))
        if (size - 1) * stride < hardware.ranks_per_node:
            return node, latency
        latency += self._network_latency(size, stride)
        # Every GPU has a network adapter, so as many rings cross the network as the
        # group has ranks on a node.
        network = here * hardware.network_gb_s * 1e9 * hardware.link_efficiency
        return min(node, network), latency

    def _network_latency(self, size: int, stride: int) -> float:
        """Return the seconds of latency of the rounds between nodes; 0 within a node."""
        hardware = self.hardware
        if (size - 1) * stride < hardware.ranks_per_node:
            return 0.0
        here = max(1, min(size, hardware.ranks_per_node // stride))
        rounds = math.ceil(math.log2(-(-size // here)))
        return hardware.network_latency_us * 1e-6 * rounds

    def gather(self, nbytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter with `nbytes` bytes in total."""
        if size == 1:
            return 0.0
        rate, latency = self._link(size, stride)
        return latency + nbytes * (size - 1) / size / rate

    def all_reduce(self, nbytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-reduce of `nbytes` bytes on each rank.

        Between nodes a small one goes up a tree and down again (NCCL 2.29, graph/tuning.cc), so its latency counts
        twice. In a node every rank reads from all others at once.
        """
        if size == 1:
            return 0.0
        rate, latency = self._link(size, stride)
        latency += self._network_latency(size, stride)
        return latency + 2 * nbytes * (size - 1) / size / rate

    def all_to_all(self, nbytes: float, size: int, stride: int = 1) -> float:
        """Return the seconds of an all-to-all in which each rank sends an equal part of
        its `nbytes` bytes to every rank.
        """
        if size == 1:
            return 0.0
        hardware = self.hardware
        ranks_here = max(1, min(size, hardware.ranks_per_node // stride))
        node_rate = hardware.node_gb_s * 1e9 * hardware.link_efficiency
        network_rate = hardware.network_gb_s * 1e9 * hardware.link_efficiency
        within_node = nbytes * (ranks_here - 1) / size / node_rate
        between_nodes = nbytes * (size - ranks_here) / size / network_rate
        latency = (
            hardware.node_latency_us
            if ranks_here == size
            else hardware.network_latency_us
        )
        # Messages to both run at the same time.
        return latency * 1e-6 + max(within_node, between_nodes)

    def send(self, nbytes: float, stride: int) -> float:
        """Return the seconds of a message from one rank to the rank `stride` further on."""
        rate, latency = self._link(2, stride)
        if self.hardware.send_latency_us is not None:
            latency = self.hardware.send_latency_us * 1e-6
        return latency + nbytes / rate


class ModelCosts:
    """Seconds of a model's layers and heads on given hardware.

    Args:
        dtype: dtype of weights and activations, such as bfloat16.
        fp8: linear layers multiply in 8 bits (`megatron.fp8`), but not attention and the output layer.
    """

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, dtype: str, *, fp8: bool = False
    ) -> None:
        self.spec, self.hardware, self.links = spec, hardware, Links(hardware)
        self.itemsize = ITEMSIZE[dtype]
        self.peak = hardware.peak(dtype)
        self.linear_peak = hardware.peak("float8") if fp8 else self.peak
        self.memory = hardware.memory_gb_s * 1e9 * hardware.memory_efficiency
        self.slower = hardware.memory_efficiency / (
            hardware.elementwise_efficiency or hardware.memory_efficiency
        )
        self.kernel = hardware.kernel_us * 1e-6
        # By whether layers have routed experts.
        self.parts = {
            is_moe: mean_parts(spec, is_moe=is_moe) for is_moe in (False, True)
        }

    def product(
        self,
        rows: float,
        inner: float,
        columns: float,
        count: float = 1.0,
        *,
        peak: float | None = None,
    ) -> float:
        """Return the seconds of `count` products of [rows, inner] with [inner, columns].

        Args:
            peak: peak rate; None: that of linear layers.
        """
        if rows <= 0 or count <= 0:
            return 0.0
        flops = 2 * rows * inner * columns
        peak = self.linear_peak if peak is None else peak
        computed = flops / (peak * self.hardware.matmul_share(flops))
        # A CPU packs weights into blocks before it multiplies, so reading them adds to
        # the time instead of overlapping it.
        if self.hardware.weights_gb_s is not None:
            return count * (computed + self.read(self.itemsize * inner * columns))
        moved = self.itemsize * (rows * inner + inner * columns + rows * columns)
        return count * max(computed, moved / self.memory)

    def read(self, weights: float) -> float:
        """Return the seconds of reading `weights` bytes of weights for products."""
        rate = self.hardware.weights_gb_s
        return weights / (self.memory if rate is None else rate * 1e9)

    def moved(self, nbytes: float) -> float:
        """Return the seconds of elementwise work that moves `nbytes` bytes."""
        return nbytes / self.memory * self.slower

    def elementwise(
        self,
        tokens: float,
        tp: int,
        parts: LayerParts,
        *,
        sequence_parallel: bool = False,
    ) -> float:
        """Return the seconds of a layer's norms, residuals and rotations. The MLP's activation is separate."""
        spec = self.spec
        # Norms and residuals are split over ranks only under sequence parallelism,
        # rotations always are.
        split = tp if sequence_parallel else 1
        hidden_width = 5 * parts.num_norms * spec.hidden_size / split
        # Convolutions of layers with a state count as rotations.
        mixers = min(1.0, parts.attention + parts.num_states)
        head_width = 4 * mixers * spec.num_heads * spec.head_dim / tp
        return self.moved(self.itemsize * tokens * (hidden_width + head_width))

    def layer(
        self,
        batch: MicroBatchLoad,
        grid: GridShape,
        *,
        is_moe: bool,
        sequence_parallel: bool,
    ) -> LayerPasses:
        """Return a decoder layer's passes over a micro-batch on a rank, without recomputation.

        It is the mean over layers with routed experts, or over those without.
        """
        spec, tp, size = self.spec, grid.tp, self.itemsize
        parts = self.parts[is_moe]
        tokens = batch.tokens / grid.cp
        products = self._mixer_products(tokens, tp, parts)
        attention = parts.attention * self._attention(batch.pairs / (grid.cp * tp))
        elementwise = self.elementwise(
            tokens, tp, parts, sequence_parallel=sequence_parallel
        )
        hidden = size * tokens * spec.hidden_size
        # For each output an all-gather and a reduce-scatter, or an all-reduce, which
        # moves as many bytes.
        if sequence_parallel:
            wait = 2 * parts.num_outputs * self.links.gather(hidden, tp)
        else:
            wait = parts.num_outputs * self.links.all_reduce(hidden, tp)
        # Launches were counted in layers with attention and an MLP.
        kernels = FORWARD_KERNELS * parts.num_norms / 2
        if is_moe and spec.moe is not None:
            expert, moved, away = self._experts(tokens, grid)
            products += expert
            elementwise += moved
            wait += away
            # A GPU computes all experts in one grouped product.
            kernels += EXPERT_KERNELS if self.hardware.cores else 8
        else:
            products += parts.mlp * self._mlp(tokens, spec.ffn_hidden_size / tp)
            activation = self.moved(size * tokens * 5 * spec.ffn_hidden_size / tp)
            elementwise += parts.mlp * activation
        launches = kernels * self.kernel
        backward_factor = self.hardware.backward_factor
        forward = products + attention + elementwise + launches
        # The backward pass has two products for each of the forward pass: for the
        # inputs and for the weights.
        backward = (
            2 * products
            + FLASH_BACKWARD * attention
            + backward_factor * (elementwise + launches)
        )
        wait += parts.num_states * self._exchange(tokens, grid)
        nbytes = parts.attention * self._context_bytes(tokens, grid)
        ring = self.links.gather(nbytes, grid.cp, tp)
        # On a CPU, keys and values are gathered first, and attention then runs in two
        # parts.
        if self.hardware.cores is not None and grid.cp > 1:
            recomputed = CONTEXT_KERNELS * self.kernel + self.moved(4 * nbytes)
            return LayerPasses(
                Duration(forward + recomputed, wait + ring),
                Duration(backward + backward_factor * recomputed, wait + ring),
            )
        # On a GPU the ring runs beside attention. The backward pass sends keys, values
        # and their gradients.
        return LayerPasses(
            Duration(forward, wait + max(0.0, ring - attention)),
            Duration(backward, wait + max(0.0, 2 * ring - FLASH_BACKWARD * attention)),
        )

    def exposed_launches(self, grid: GridShape, *, is_moe: bool) -> LayerPasses:
        """Return the time in which a GPU waits for its host in a trained layer, without CUDA graphs."""
        moe = self.spec.moe
        if not is_moe or moe is None or self.hardware.cores is not None:
            return LayerPasses()
        launches = EXPOSED_LAUNCHES + EXPOSED_LAUNCHES_PER_EXPERT * (
            moe.num_experts / grid.ep
        )
        forward = Duration(launches * self.hardware.launch_us * 1e-6)
        return LayerPasses(forward, forward * self.hardware.backward_factor)

    def head(
        self, batch: MicroBatchLoad, grid: GridShape, *, value_head: bool = False
    ) -> LayerPasses:
        """Return the passes of the output layer with its log-probs, or of a critic's value head."""
        spec = self.spec
        tokens = batch.tokens / grid.cp
        if value_head:
            forward = Duration(self.moved(8 * tokens * spec.hidden_size))
            backward = Duration(self.moved(16 * tokens))
            return LayerPasses(forward, backward)
        columns = padded_vocab_size(spec.vocab_size, grid.tp) / grid.tp
        product = self.product(tokens, spec.hidden_size, columns, peak=self.peak)
        logits = self.moved(3 * 4 * tokens * columns)
        # A vocabulary-parallel softmax reduces the largest logit, the sum, and the
        # chosen token's logit.
        reduced = 3 * self.links.all_reduce(4 * tokens, grid.tp)
        launches = 8 * self.kernel
        # The backward pass has the probabilities already, so it sends nothing.
        return LayerPasses(
            Duration(product + logits + launches, reduced),
            Duration(2 * product + logits + launches),
        )

    def recomputed(
        self,
        passes: LayerPasses,
        batch: MicroBatchLoad,
        grid: GridShape,
        recompute: Recompute,
    ) -> LayerPasses:
        """Return the passes with the part of the forward pass that the backward pass repeats under recomputation."""
        recomputed = Duration()
        if recompute.granularity == "full":
            recomputed = passes.forward
        elif "core_attn" in recompute.modules:
            share = mean_parts(self.spec).attention
            pairs = batch.pairs / (grid.cp * grid.tp)
            recomputed = Duration(share * self._attention(pairs))
        if {"mlp", "moe"} & set(recompute.modules):
            # An MLP, or its experts, is about 60 % of a layer's forward pass.
            recomputed = recomputed + passes.forward * 0.6
        return LayerPasses(passes.forward, passes.backward + recomputed)

    def flops(self, tokens: float, pairs: float) -> float:
        """Return the operations of a forward pass over all ranks as MFU counts them, without recomputation."""
        spec = self.spec
        num_dense, num_moe = spec.count_layers("mlp"), spec.count_layers("moe")
        moe_layer = 0
        if spec.moe is not None:
            # Only the experts that a token is routed to count.
            width = (
                spec.moe.experts_per_token * spec.moe.ffn_hidden_size
                + spec.moe.shared_ffn_hidden_size
            )
            moe_layer = 2 * spec.mlp_matrices * spec.hidden_size * width
        # One product for each matrix, with two operations for each weight.
        dense_layer = 2 * spec.mlp_matrices * spec.hidden_size * spec.ffn_hidden_size
        layers = self._mixer_flops() + num_dense * dense_layer + num_moe * moe_layer
        head = 2 * spec.hidden_size * spec.vocab_size
        num_attention = spec.count_layers("attention")
        attention = pairs * num_attention * 4 * spec.num_heads * spec.head_dim
        return tokens * (layers + head) + attention

    def _attention_shapes(self, tp: int) -> list[tuple[float, float]]:
        """List (inner, columns) of attention's products on one rank."""
        spec = self.spec
        if spec.mla is not None:
            mla = spec.mla
            heads = spec.num_heads / tp
            query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
            # Down to the latent, up to keys and values, and the output. Latents are not
            # split over ranks.
            shapes = [
                (
                    float(spec.hidden_size),
                    float(mla.kv_lora_rank + mla.qk_rope_head_dim),
                ),
                (mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
                (heads * mla.v_head_dim, float(spec.hidden_size)),
            ]
            if mla.q_lora_rank:
                return [
                    *shapes,
                    (spec.hidden_size, float(mla.q_lora_rank)),
                    (mla.q_lora_rank, heads * query),
                ]
            return [*shapes, (spec.hidden_size, heads * query)]
        query_width = spec.num_heads * spec.head_dim / tp
        # With more ranks than KV heads, ranks hold copies of a head.
        kv_width = max(spec.num_kv_heads / tp, 1) * spec.head_dim
        return [
            (spec.hidden_size, (1 + spec.output_gate) * query_width + 2 * kv_width),
            (query_width, spec.hidden_size),
        ]

    def _mixer_products(self, tokens: float, tp: int, parts: LayerParts) -> float:
        """Return the seconds of the products of attention, gated delta nets and Mamba-2 layers in a layer."""
        spec = self.spec
        seconds = parts.attention * self._products(tokens, self._attention_shapes(tp))
        if (net := spec.delta_net) is not None:
            shapes = delta_net_shapes(net, spec.hidden_size, tp)
            rule = self._in_heads(tokens * rule_flops(net) / tp)
            seconds += parts.delta_net * (self._products(tokens, shapes) + rule)
        if (mamba := spec.mamba) is not None:
            shapes = [
                (spec.hidden_size, mamba.in_rows / tp),
                (mamba.inner_size / tp, spec.hidden_size),
            ]
            scanned = self._in_heads(tokens * scan_flops(mamba) / tp)
            seconds += parts.mamba * (self._products(tokens, shapes) + scanned)
        return seconds

    def _products(self, tokens: float, shapes: Sequence[tuple[float, float]]) -> float:
        """Return the seconds of products of [tokens, inner] with [inner, columns]."""
        return sum(self.product(tokens, inner, columns) for inner, columns in shapes)

    def _in_heads(self, flops: float) -> float:
        """Return the seconds of operations within heads, at the rate of attention."""
        return flops / (self.peak * self.hardware.attention_efficiency)

    def _mixer_flops(self) -> float:
        """Return the operations per token of all layers' attention, gated delta nets and Mamba-2 layers.

        Those of attention's pairs of tokens are not among them.
        """
        spec = self.spec
        flops = sum(2 * inner * columns for inner, columns in self._attention_shapes(1))
        total = spec.count_layers("attention") * flops
        if (net := spec.delta_net) is not None:
            of_net = rule_flops(net) + sum(
                2 * inner * columns
                for inner, columns in delta_net_shapes(net, spec.hidden_size, 1)
            )
            total += sum(net.layers) * of_net
        return total + spec.count_layers("mamba") * mamba_flops(spec)

    def _attention(self, pairs: float) -> float:
        return self._in_heads(4 * pairs * self.spec.num_heads * self.spec.head_dim)

    def _mlp(self, tokens: float, width: float) -> float:
        hidden = self.spec.hidden_size
        first_width = (self.spec.mlp_matrices - 1) * width
        return self.product(tokens, hidden, first_width) + self.product(
            tokens, width, hidden
        )

    def _experts(self, tokens: float, grid: GridShape) -> tuple[float, float, float]:
        """Return the seconds of (products, elementwise work, messages) of a layer's experts under even routing."""
        spec, moe, size = self.spec, self.spec.moe, self.itemsize
        assert moe is not None
        etp = grid.expert_tp
        # Tensor-parallel ranks hold the same tokens, and each routes an equal part of
        # them.
        local_tokens = tokens / grid.tp
        arriving = local_tokens * moe.experts_per_token * etp
        local = moe.num_experts / grid.ep
        busy = min(local, arriving)
        rows, width = arriving / busy if busy else 0.0, moe.ffn_hidden_size / etp
        first_width = (spec.mlp_matrices - 1) * width
        products = self.product(
            rows, spec.hidden_size, first_width, busy
        ) + self.product(rows, width, spec.hidden_size, busy)
        products += self.product(local_tokens, spec.hidden_size, moe.num_experts)
        if moe.shared_ffn_hidden_size:
            products += self._mlp(tokens, moe.shared_ffn_hidden_size / grid.tp)
        moved = self.moved(size * arriving * (4 * spec.hidden_size + 5 * width))
        sent = size * local_tokens * moe.experts_per_token * spec.hidden_size
        wait = 2 * self.links.all_to_all(sent, grid.ep, etp)
        wait += 2 * self.links.gather(size * arriving * spec.hidden_size, etp)
        return products, moved, wait

    def _exchange(self, tokens: float, grid: GridShape) -> float:
        """Return the seconds in which a layer with a state exchanges tokens for heads, and back."""
        if grid.cp == 1 or not self.spec.is_recurrent:
            return 0.0
        return sum(
            self.links.all_to_all(self.itemsize * tokens * numbers, grid.cp, grid.tp)
            for numbers in exchanged_numbers(self.spec, grid)
        )

    def _context_bytes(self, tokens: float, grid: GridShape) -> float:
        """Return the bytes of keys and values of all context-parallel ranks."""
        width = 2 * max(self.spec.num_kv_heads / grid.tp, 1) * self.spec.head_dim
        return self.itemsize * tokens * grid.cp * width


def layers_of(spec: ModelSpec) -> dict[bool, int]:
    """Return the number of dense (False) and of mixture-of-experts (True) layers."""
    num_routed = spec.count_layers("moe")
    return {False: spec.num_layers - num_routed, True: num_routed}


def exchanged_numbers(spec: ModelSpec, grid: GridShape) -> tuple[float, float]:
    """Return how many numbers per token a layer with a state sends in exchange for heads, and how many back.

    Counted are those of one tensor-parallel rank (`models/context_heads.py`).
    """
    if (net := spec.delta_net) is not None:
        inputs = 2 * net.key_width + net.value_width + 2 * net.num_value_heads
        return inputs / grid.tp, net.value_width / grid.tp
    mamba = spec.mamba
    assert mamba is not None
    groups = max(1, mamba.num_groups // grid.tp)
    # B and C of a group go to every rank that computes some of its heads.
    of_groups = 2 * mamba.group_rows * max(1, grid.cp // groups)
    inputs = mamba.inner_size + of_groups + mamba.num_heads
    return inputs / grid.tp, mamba.inner_size / grid.tp


def delta_net_shapes(
    net: DeltaNetSpec, hidden_size: int, tp: int
) -> list[tuple[float, float]]:
    """List (inner, columns) of a gated delta net's products on one rank."""
    values = net.value_width / tp
    return [
        (hidden_size, 2 * net.key_width / tp + 2 * values),
        (hidden_size, 2 * net.num_value_heads / tp),
        (values, hidden_size),
    ]


def rule_flops(net: DeltaNetSpec) -> float:
    """Return the operations of the delta rule per token: a read, a write and a read of each head's state."""
    return 6.0 * net.num_value_heads * net.key_head_dim * net.value_head_dim


def mamba_flops(spec: ModelSpec) -> float:
    """Return the operations per token of a Mamba-2 layer's forward pass (arXiv 2405.21060, section 6.3)."""
    if (mamba := spec.mamba) is None:
        return 0.0
    projections = 2 * spec.hidden_size * (mamba.in_rows + mamba.inner_size)
    return projections + scan_flops(mamba)


def scan_flops(mamba: MambaSpec) -> float:
    """Return the operations per token of a Mamba-2 layer's convolution and scan."""
    # Half of a chunk's pairs of tokens, then the states of chunks.
    pairs = mamba.chunk_size * (mamba.group_rows + mamba.inner_size)
    states = 4 * mamba.inner_size * mamba.state_size
    return 2 * mamba.conv_size * mamba.conv_rows + pairs + states


def attention_parameters(spec: ModelSpec) -> float:
    """Return the number of parameters in one layer's attention, over all ranks.

    If only some layers have attention, it is the mean over all layers, with gated delta
    nets and Mamba-2 layers.
    """
    if (mamba := spec.mamba) is not None:
        projections = spec.hidden_size * (mamba.in_rows + mamba.inner_size)
        plain = replace(spec, mamba=None, layer_kinds=())
        total = spec.count_layers("attention") * attention_parameters(plain)
        return (total + spec.count_layers("mamba") * projections) / spec.num_layers
    hidden = spec.hidden_size
    if spec.mla is None:
        num_heads = (2 + spec.output_gate) * spec.num_heads + 2 * spec.num_kv_heads
        parameters = float(hidden * spec.head_dim * num_heads)
        if (net := spec.delta_net) is None:
            return parameters
        share = mean_parts(spec).attention
        taps = (2 * net.key_width + net.value_width) * net.conv_width
        of_net = taps + sum(
            inner * columns for inner, columns in delta_net_shapes(net, hidden, 1)
        )
        return share * parameters + (1 - share) * of_net
    mla, heads = spec.mla, spec.num_heads
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    queries = (
        hidden * mla.q_lora_rank + mla.q_lora_rank * query
        if mla.q_lora_rank
        else hidden * query
    )
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    return (
        queries
        + latent
        + heads
        * (
            mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
            + mla.v_head_dim * hidden
        )
    )
