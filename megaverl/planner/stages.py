"""Pipeline stages of megatron-core: their layers, schedule and activations, counted without importing megatron-core.

Activations are counted as in Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models" (arXiv 2205.05198), sections 4 and 5. There,
a GPT layer with dropout, ungated MLP of 4h and unfused attention keeps sbh(34 + 5as/h)
bytes, divided by t under tensor and sequence parallelism (table 2). The same count is
made here for current models: grouped queries, gated MLPs, RMSNorm, no dropout,
attention without an [s, s] matrix, experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaverl.distributed.grid import GridShape
from megaverl.errors import GridError
from megaverl.planner.layer_parts import LayerParts, layers_by_parts, mean_parts
from megaverl.sharding.model_spec import DeltaNetSpec, MambaSpec, ModelSpec

MORE = "more micro-batches"


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Return the rows of the padded embedding, as `megaverl.models.options.padded_vocab_size`, which needs torch."""
    multiple = math.lcm(64, tp)
    return -(-vocab_size // multiple) * multiple


def layer_split(
    num_layers: int, pp: int, vpp: int | None, fields: Mapping[str, Any], role: str
) -> list[int]:
    """List the decoder layers of every stage in model order; with virtual stages, chunk by chunk and stage by stage.

    Source: megatron-core 0.16, `transformer_block.get_num_layers_to_build`.

    Args:
        fields: the role's `megatron` section, which may ask for an uneven split.

    Raises:
        GridError: layers do not divide, or the split is given as a layout string.
    """
    if fields.get("pipeline_model_parallel_layout") is not None:
        raise GridError(
            f"{role}.megatron.pipeline_model_parallel_layout is not read by `megaverl plan`. Use "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage."
        )
    first = fields.get("num_layers_in_first_pipeline_stage")
    last = fields.get("num_layers_in_last_pipeline_stage")
    with_embedding = bool(fields.get("account_for_embedding_in_pipeline_split"))
    with_loss = bool(fields.get("account_for_loss_in_pipeline_split"))
    chunks = vpp if vpp is not None and pp > 1 else 1
    if first is not None or last is not None:
        rest, stages = (
            num_layers - (first or 0) - (last or 0),
            pp - (first is not None) - (last is not None),
        )
        _divide(rest, stages, role, "layers of the stages between")
        per_rank = [rest // stages if stages else 0] * pp
        per_rank = [per_rank[0] if first is None else first, *per_rank[1:]]
        per_rank = [*per_rank[:-1], per_rank[-1] if last is None else last]
        for count in per_rank:
            _divide(count, chunks, role, "layers of a stage")
        return [count // chunks for _ in range(chunks) for count in per_rank]
    total = num_layers + with_embedding + with_loss
    _divide(total, pp * chunks, role, "layers")
    split = [total // (pp * chunks)] * (pp * chunks)
    # The embedding and the loss count as a layer of the first and of the last stage.
    split[0] -= with_embedding
    split[-1] -= with_loss
    return split


def _divide(number: int, parts: int, role: str, plural: str) -> None:
    if (number % parts if parts else number) or number < 0:
        fits = ", ".join(
            str(size) for size in range(1, max(number, 0) + 1) if number % size == 0
        )
        raise GridError(
            f"{role}.pp: {number} {plural} cannot be divided over {parts}. Sizes that fit: {fits or 'none'}."
        )


def pipeline(
    stages: Sequence[tuple[float, float]],
    number: int,
    hop: float,
    *,
    forward_only: bool = False,
    chunks: int = 1,
) -> tuple[float, list[tuple[str, int, float, float]]]:
    """Play the one-forward-one-backward schedule (Narayanan et al. 2021, arXiv 2104.04473).

    After enough micro-batches the schedule repeats. The rest is then added in
    proportion, as one lane (`MORE`) for each stage. Virtual stages divide the
    pipeline's idle time by their number.

    Args:
        stages: (forward, backward) seconds of each stage over one micro-batch.
        number: number of micro-batches.
        hop: seconds of sending a micro-batch to the next stage.
        chunks: virtual stages per stage.

    Returns:
        (seconds, list of (pass, stage, begin, end)).
    """
    size = len(stages)
    played = min(number, 3 * size)
    span, lanes = _one_forward_one_backward(stages, played, hop, forward_only)
    if number > played:
        before, _ = _one_forward_one_backward(stages, 2 * size, hop, forward_only)
        busiest = max(
            forward + (0.0 if forward_only else backward)
            for forward, backward in stages
        )
        # The period of the played part may be shorter than the busiest stage, which
        # bounds the steady state.
        span += (number - played) * max(busiest, (span - before) / (played - 2 * size))
        ends = {
            stage: end for _, stage, _, end in sorted(lanes, key=lambda lane: lane[3])
        }
        lanes += [(MORE, stage, end, span) for stage, end in ends.items()]
    if chunks > 1 and size > 1:
        least = max(
            number * (forward + (0.0 if forward_only else backward))
            for forward, backward in stages
        )
        shorter = (
            least
            + max(0.0, span - least) / chunks
            + 2 * hop * number * (chunks - 1) / chunks
        )
        lanes = [
            (label, stage, begin * shorter / span, end * shorter / span)
            for label, stage, begin, end in lanes
        ]
        span = shorter
    return span, lanes


def _one_forward_one_backward(
    stages: Sequence[tuple[float, float]], number: int, hop: float, forward_only: bool
) -> tuple[float, list[tuple[str, int, float, float]]]:
    size = len(stages)
    orders: list[list[tuple[bool, int]]] = []
    for stage in range(size):
        # Warm-up: stage i runs size - i - 1 forward passes before its first backward
        # pass, then alternates.
        warm = number if forward_only else min(number, size - stage - 1)
        order = [(True, n) for n in range(warm)]
        for n in range(number - warm):
            order += [(True, warm + n), (False, n)]
        order += (
            [] if forward_only else [(False, n) for n in range(number - warm, number)]
        )
        orders.append(order)
    done: dict[tuple[bool, int, int], float] = {}
    free, place = [0.0] * size, [0] * size
    lanes, moved = [], True
    while moved:
        moved = False
        for stage in range(size):
            while place[stage] < len(orders[stage]):
                forward, n = orders[stage][place[stage]]
                neighbour = stage - 1 if forward else stage + 1
                ready = 0.0
                if 0 <= neighbour < size:
                    if (forward, n, neighbour) not in done:
                        break
                    ready = done[forward, n, neighbour] + hop
                begin = max(free[stage], ready)
                free[stage] = done[forward, n, stage] = (
                    begin + stages[stage][0 if forward else 1]
                )
                lanes.append(
                    ("forward" if forward else "backward", stage, begin, free[stage])
                )
                place[stage] += 1
                moved = True
    return max(free), lanes


# Size of a chunk of logits (`megaverl.models.vocab_parallel`, which needs torch).
CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation in the backward pass: megatron-core's `recompute_*` fields."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Recompute:
        """Read the fields of a role; see `Role.recompute`."""
        granularity = fields.get("recompute_granularity")
        modules = fields.get("recompute_modules") or ["core_attn"]
        return cls(
            granularity,
            fields.get("recompute_method"),
            int(fields.get("recompute_num_layers") or 1),
            tuple(modules) if granularity == "selective" else (),
        )


@dataclass(frozen=True)
class LayerShape:
    """Properties that decide a layer's activations.

    Attributes:
        gated: the MLP has a gate, whose activation multiplies the other half.
        dropout: dropout keeps masks of one byte an element, as in the paper's models.
        unfused: attention keeps its [s, s] scores; False: a fused kernel (FlashAttention, SDPA).
        sequence_parallel: regions that are not tensor-parallel are split along the sequence.
        itemsize: bytes of an activation.
        repeats: keys and values that attention reads and keeps, per token (`keys_per_token`).
    """

    spec: ModelSpec
    tp: int = 1
    ep: int = 1
    etp: int = 1
    gated: bool = True
    dropout: bool = False
    unfused: bool = False
    sequence_parallel: bool = False
    itemsize: int = 2
    repeats: float = 1.0

    @classmethod
    def read(
        cls,
        spec: ModelSpec,
        shape: GridShape,
        fields: Mapping[str, Any],
        itemsize: int,
        *,
        repeats: float = 1.0,
    ) -> LayerShape:
        """Read the properties of a role's layers from its grid and its megatron-core fields."""
        return cls(
            spec,
            tp=shape.tp,
            ep=shape.ep,
            etp=shape.expert_tp,
            dropout=bool(
                fields.get("hidden_dropout") or fields.get("attention_dropout")
            ),
            unfused=str(fields.get("attention_backend", "auto"))
            in ("unfused", "local"),
            # Experts need sequence parallelism under tp, so megaverl turns it on for
            # them.
            sequence_parallel=bool(
                fields.get("sequence_parallel", spec.moe is not None)
            )
            and shape.tp > 1,
            itemsize=itemsize,
            repeats=repeats,
        )

    @property
    def replicated(self) -> int:
        """Number of ranks that split the regions outside attention and MLP."""
        return self.tp if self.sequence_parallel else 1


def layer_bytes(
    shape: LayerShape,
    sequence: int,
    parts: LayerParts,
    *,
    modules: tuple[str, ...] = (),
) -> float:
    """Return the bytes that one layer keeps per token on each rank.

    Args:
        sequence: length of a sequence, for attention that keeps its scores.
        parts: parts of the layer, or their mean over several.
        modules: modules that selective recomputation does not keep (`recompute_modules`).
    """
    spec, size = shape.spec, shape.itemsize
    # Inputs of the norms, and their outputs.
    of_norm = size * spec.hidden_size / shape.replicated
    total = parts.num_norms * of_norm * (1 if "layernorm" in modules else 2)
    total += parts.attention * attention_bytes(
        shape,
        sequence,
        keep_core="core_attn" not in modules,
        keep_up="mla_up_proj" not in modules,
    )
    if spec.delta_net is not None:
        total += parts.delta_net * delta_net_bytes(shape, spec.delta_net)
    if spec.mamba is not None:
        total += parts.mamba * mamba_bytes(shape, spec.mamba)
    if shape.dropout:
        total += parts.num_norms * spec.hidden_size / shape.replicated
    if spec.moe is not None and "moe" not in modules:
        keeps_act = "moe_act" not in modules
        total += parts.experts * moe_bytes(shape, keep_act=keeps_act)
    if "mlp" not in modules:
        total += parts.mlp * mlp_bytes(shape, spec.ffn_hidden_size, shape.tp)
    return total


def delta_net_bytes(shape: LayerShape, net: DeltaNetSpec) -> float:
    """Return the bytes per token that a gated delta net keeps. Estimated from its operators, not measured."""
    size = shape.itemsize
    convolved = 2 * net.key_width + net.value_width
    # Inputs of the projections' outputs; one float32 copy for each tap, and SiLU's
    # input.
    held = size * (convolved + net.value_width) + 4 * convolved * (net.conv_width + 1)
    # Inputs and outputs of the rule, with keys and queries for each value head, and its
    # float32 matrices [chunk, chunk] of each chunk of 64 tokens.
    per_head = size * (2 * net.key_head_dim + 2 * net.value_head_dim) + 2 * 4 * 64
    held += net.num_value_heads * per_head
    # The norm's and the output projection's inputs.
    return (held + (4 + size) * net.value_width) / shape.tp


def mamba_bytes(shape: LayerShape, mamba: MambaSpec) -> float:
    """Return the bytes per token that a Mamba-2 layer keeps of a packed row, counted from PyTorch's operators."""
    size, inner, channels = shape.itemsize, mamba.inner_size, mamba.conv_rows
    # The convolution: a float32 copy for each tap, SiLU's input, and its output, from
    # which the scan is computed again.
    held = 4 * channels * (mamba.conv_size + 1) + size * channels
    # Float32 copies of x, the scan's output and the gate for their products, and the
    # time steps.
    held += 4 * (4 * inner + 2 * mamba.num_heads)
    if mamba.has_norm:
        held += 2 * 4 * inner
    # The output projection's input.
    return (held + size * inner) / shape.tp


def attention_bytes(
    shape: LayerShape, sequence: int, *, keep_core: bool = True, keep_up: bool = True
) -> float:
    """Return the bytes per token of queries, keys, values and of attention's output, the input of the projection."""
    spec, size = shape.spec, shape.itemsize
    if spec.mla is not None:
        mla = spec.mla
        latents = size * (
            (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        )
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        head = query + shape.repeats * (query + mla.v_head_dim)
        heads = size * spec.num_heads * (head if keep_up else 0) / shape.tp
        return 2 * latents + heads + size * spec.num_heads * mla.v_head_dim / shape.tp
    # With fewer KV heads than ranks, ranks hold copies, so every rank has at least one
    # head.
    q, kv = (
        spec.num_heads * spec.head_dim,
        max(spec.num_kv_heads, shape.tp) * spec.head_dim,
    )
    held = size * (2 * q + 2 * kv * shape.repeats) / shape.tp
    # The gate, the gated output, and the gate's sigmoid in float32.
    held += spec.output_gate * (2 * size + 4) * q / shape.tp
    # The norms keep their inputs, and the rotation after them keeps another copy
    # (megatron-core 0.16, transformer/attention.py).
    if spec.qk_norm:
        held += size * (q + kv) / shape.tp
    # Unfused attention keeps softmax's output; with dropout, its output and mask too.
    if keep_core and shape.unfused:
        held += (
            spec.num_heads
            * sequence
            * (2 * size + 1 if shape.dropout else size)
            / shape.tp
        )
    elif keep_core:
        held += 4 * spec.num_heads / shape.tp  # log-sum-exp of every row, float32
    return held


def keys_per_token(
    tokens: int,
    shared: int,
    own_tokens: int,
    group_size: int,
    conversations: float = 1.0,
) -> float:
    """Return the keys that attention reads per token of a packed row that holds shared tokens once.

    Variable-length kernels need the keys of a prompt again before those of each sample
    but the first (`megaverl.models.packing.VarlenPacking`). If the conversations of an
    episode continue each other, they need those of all earlier turns again. What such
    conversations share is not known before a run, so this assumes that each adds as much
    as the others.

    Args:
        tokens: tokens of the row, which holds as many of a group's samples as fit.
        shared: tokens that all samples of a group have in common.
        own_tokens: further tokens of each sample.
        conversations: conversations of an episode.
    """
    # Conversation i of c has i/c of the longest one's keys, and adds 1/c of its tokens.
    of_turns = (conversations + 1) / 2
    samples = min(group_size, (tokens - shared) // own_tokens)
    if samples < 2:
        return of_turns
    of_prompt = samples * (shared + own_tokens) / (shared + samples * own_tokens)
    return max(of_prompt, of_turns)


def mlp_bytes(shape: LayerShape, width: int, cut: int) -> float:
    """Return the bytes per token of the first matrix's output (gate and up) and of the activation before the second."""
    num_parts = 3 if shape.gated and shape.spec.is_gated else 2
    return shape.itemsize * num_parts * width / cut


def moe_bytes(shape: LayerShape, *, keep_act: bool = True) -> float:
    """Return the bytes per token that experts keep under perfectly even routing.

    An expert's output is not kept: probabilities are applied inside the expert, to the
    input of its second matrix (megatron-core 0.16, transformer/moe: experts.py, and
    `unpermute` without `probs`).
    """
    spec, moe, size = shape.spec, shape.spec.moe, shape.itemsize
    assert moe is not None
    # A rank of the attention grid owns 1/tp of the tokens; an expert's ranks all hold
    # each of its tokens.
    arriving = moe.experts_per_token * shape.etp / shape.tp
    num_parts = spec.mlp_matrices - (not keep_act)
    inner = size * num_parts * moe.ffn_hidden_size / shape.etp
    routed = arriving * (size * spec.hidden_size + inner)
    router = 2 * 4 * moe.num_experts / shape.replicated
    shared = (
        mlp_bytes(shape, moe.shared_ffn_hidden_size, shape.tp)
        if moe.shared_ffn_hidden_size
        else 0.0
    )
    return routed + router + shared


def in_flight(stage: int, pp: int, vpp: int | None, num_micro_batches: int) -> float:
    """Return the number of micro-batches whose activations a stage keeps at once (1F1B; section 4.2.3).

    With virtual stages the schedule keeps pieces of micro-batches: the first stage
    keeps 1 + (p - 1) / (p m) times as many as without.
    """
    if vpp is None or vpp == 1 or pp == 1:
        return float(min(pp - stage, num_micro_batches))
    warm_up = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return min(warm_up, num_micro_batches * vpp) / vpp


@dataclass(frozen=True)
class StageLoad:
    """One pipeline stage at its peak, for `stage_bytes`."""

    num_dense: int
    num_moe: int
    tokens: int
    sequence: int
    micro_batches: float


def stage_bytes(shape: LayerShape, load: StageLoad, recompute: Recompute) -> float:
    """Return the bytes that a stage's layers keep, with the layers that are recomputed one group at a time."""
    spec, size = shape.spec, shape.itemsize
    num_layers = load.num_dense + load.num_moe
    backward = load.tokens * gradient_bytes(shape)
    present = [
        parts
        for parts in layers_by_parts(spec)
        if (load.num_moe if parts.experts else load.num_dense)
    ]

    def kept(parts: LayerParts, modules: tuple[str, ...] = ()) -> float:
        return layer_bytes(shape, load.sequence, parts, modules=modules)

    dense, routed = (mean_parts(spec, is_moe=is_moe) for is_moe in (False, True))
    if recompute.granularity != "full":
        per_token = load.num_dense * kept(dense, recompute.modules)
        per_token += load.num_moe * kept(routed, recompute.modules)
        # The backward pass recomputes one layer at a time, so the largest one counts.
        recomputed = max(
            (kept(parts) - kept(parts, recompute.modules) for parts in present),
            default=0.0,
        )
        return load.tokens * (load.micro_batches * per_token + recomputed) + backward
    inputs = size * spec.hidden_size / shape.replicated
    largest = max(map(kept, present), default=0.0)
    if recompute.method == "block":
        again_layers = min(recompute.num_layers, num_layers)
        moe_again = max(0, again_layers - load.num_dense)
        dense_kept = max(0, load.num_dense - again_layers)
        per_token = (
            again_layers * inputs
            + dense_kept * kept(dense)
            + (load.num_moe - moe_again) * kept(routed)
        )
        return load.tokens * (load.micro_batches * per_token + largest) + backward
    group = max(1, min(recompute.num_layers, num_layers))
    per_token = -(-num_layers // group) * inputs
    return load.tokens * (load.micro_batches * per_token + group * largest) + backward


def gradient_bytes(shape: LayerShape) -> float:
    """Return the bytes per token of gradients in one layer's backward pass: of its widest tensor and of its output."""
    spec = shape.spec
    widest = 2 * spec.ffn_hidden_size / shape.tp
    if spec.moe is not None:
        arriving = spec.moe.experts_per_token * shape.etp / shape.tp
        widest = max(
            widest,
            arriving * max(2 * spec.moe.ffn_hidden_size / shape.etp, spec.hidden_size),
        )
    return shape.itemsize * (widest + spec.hidden_size)


def head_bytes(
    shape: LayerShape, padded_vocab: int, tokens: int, *, train: bool
) -> float:
    """Return the peak bytes of the last stage's logits and log-probs (`megaverl.models.vocab_parallel`).

    The logits of all tokens are kept and, in the backward pass, their gradient. A few
    rows at a time are also held in float32 (`tools/bench_logprobs.py`: a twentieth).
    """
    logits = shape.itemsize * tokens * padded_vocab / shape.tp
    return logits * ((2 if train else 1) + 1 / 20)


def chunked_head_bytes(
    shape: LayerShape,
    padded_vocab: int,
    tokens: int,
    *,
    train: bool,
    trains_weight: bool,
    converts_weight: bool = False,
) -> float:
    """Return the peak bytes of log-probs if logits are computed in chunks (`megaverl.models.vocab_parallel`).

    These are the hidden states, in training also their gradient and a float32 gradient
    of the output layer's weight; one chunk with its gradient, each in the dtype of the
    products and in float32; and with `converts_weight` a float32 copy of the weight
    (`model.fp32_lm_head`).
    """
    hidden = shape.itemsize * tokens * shape.spec.hidden_size * (2 if train else 1)
    copies = (train and trains_weight) + converts_weight
    weight = 4.0 * padded_vocab * shape.spec.hidden_size / shape.tp * copies
    chunk = min(CHUNK_BYTES, shape.itemsize * tokens * padded_vocab / shape.tp)
    return hidden + weight + chunk * (2 + 2 * 4 / shape.itemsize)
