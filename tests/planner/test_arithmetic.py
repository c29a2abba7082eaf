"""Pure parts: activations against the paper's table, pipelines, buckets, machines, aliases, advice."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.distributed.grid import GridShape
from megaverl.errors import GridError
from megaverl.models.architectures import weights_of
from megaverl.planner.advice import advise, shortages, with_settings
from megaverl.planner.buffers import BufferOptions, Parameter, make_buffer
from megaverl.planner.costs import MicroBatchLoad, ModelCosts
from megaverl.planner.hardware import Hardware
from megaverl.planner.job import GB, Machine
from megaverl.planner.layer_parts import LayerParts, layers_by_parts, mean_parts
from megaverl.planner.memory import MemoryModel, RankMemory
from megaverl.planner.stages import (
    CHUNK_BYTES,
    LayerShape,
    Recompute,
    StageLoad,
    attention_bytes,
    gradient_bytes,
    in_flight,
    keys_per_token,
    layer_bytes,
    layer_split,
    moe_bytes,
    padded_vocab_size,
    stage_bytes,
)
from megaverl.planner.traffic import (
    aliased_elements,
    compared_share,
    make_traffic,
    reshard_plans,
)
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of
from tests.planner.jobs import make, recipe
from tests.sharding.specs import make_spec


def paper_layer_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int,
    *,
    sequence_parallel: bool,
) -> float:
    """Table 2 of the paper: a GPT layer in 16 bits, with dropout."""
    s, b, h, a = sequence, batch, hidden, heads
    attention = 5 * a * s / h
    return (
        s
        * b
        * h
        * (
            (34 + attention) / tp
            if sequence_parallel
            else 10 + 24 / tp + attention / tp
        )
    )


@given(
    heads=st.sampled_from([8, 16, 96]),
    head_dim=st.sampled_from([64, 128]),
    sequence=st.sampled_from([512, 2048]),
    tp=st.sampled_from([1, 2, 8]),
    sequence_parallel=st.booleans(),
)
def test_a_gpt_layer_keeps_what_the_paper_says(
    heads: int, head_dim: int, sequence: int, tp: int, sequence_parallel: bool
) -> None:
    """Korthikanti et al. 2022, table 2: dropout, an MLP of 4h without a gate, attention that keeps its scores."""
    hidden = heads * head_dim
    spec = make_spec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
    )
    shape = LayerShape(
        spec,
        tp=tp,
        gated=False,
        dropout=True,
        unfused=True,
        sequence_parallel=sequence_parallel,
    )
    expected = paper_layer_bytes(
        sequence, 1, hidden, heads, tp, sequence_parallel=sequence_parallel
    )
    assert sequence * layer_bytes(shape, sequence, mean_parts(spec)) == pytest.approx(
        expected
    )
    without = expected - 5 * heads * sequence**2 / tp
    assert sequence * layer_bytes(
        shape, sequence, mean_parts(spec), modules=("core_attn",)
    ) == pytest.approx(without)


@given(
    group_size=st.integers(1, 8),
    shared=st.integers(1, 50),
    own=st.integers(1, 50),
    tokens=st.integers(100, 300),
)
def test_keys_of_a_packed_row(
    group_size: int, shared: int, own: int, tokens: int
) -> None:
    """As many as the kernels are given, and kept so for the backward pass."""
    from megaverl.data.prefix_tree import PrefixTree
    from megaverl.models.packing import pack_varlen

    samples = max(1, min(group_size, (tokens - shared) // own))
    tree = PrefixTree.of_prompts([0] * samples, [shared + 1] * samples)
    packing = pack_varlen([shared + own] * samples, tree, width=100)
    keys = int(packing.cu_seqlens_kv[-1])
    assert keys_per_token(tokens, shared, own, group_size) == pytest.approx(
        keys / len(packing.source)
    )
    # Four conversations of an episode, each with ten tokens more than the one before.
    turns = [[1] * 10 * (count + 1) for count in range(4)]
    tree = PrefixTree.of_tokens(turns, [len(tokens) for tokens in turns], [0] * 4)
    packing = pack_varlen([len(tokens) for tokens in turns], tree, width=40)
    assert keys_per_token(40, 1, 40, 1, conversations=4.0) == pytest.approx(
        int(packing.cu_seqlens_kv[-1]) / len(packing.source)
    )
    spec = make_spec(num_heads=8, num_kv_heads=2, head_dim=16)
    once, again = (
        attention_bytes(LayerShape(spec, repeats=repeats), 50) for repeats in (1.0, 3.0)
    )
    assert again - once == 2 * 2 * (2 * 2 * 16), (
        "keys and values twice more, of two heads in 16 bits"
    )


def test_what_experts_and_norms_of_queries_and_keys_keep() -> None:
    """Of a routed token its hidden state, gate and up, and their product; of the norms what enters them."""
    spec = make_spec(
        "Qwen3MoeForCausalLM", hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=16
    )
    assert spec.moe is not None and (
        spec.moe.num_experts,
        spec.moe.experts_per_token,
    ) == (4, 2)
    router = 2 * 4 * 4
    assert moe_bytes(LayerShape(spec)) == router + 2 * 2 * (
        64 + 3 * spec.moe.ffn_hidden_size
    )
    plain = dataclasses.replace(spec, qk_norm=False)
    kept, without = (
        attention_bytes(LayerShape(each, tp=2), 50) for each in (spec, plain)
    )
    assert kept - without == 2 * (8 + 2) * 16 / 2


def test_the_papers_example() -> None:
    """GPT-3 175B (h 12288, 96 heads, s 2048), batch 1, tp 8: 34 + 80 units without recomputation."""
    unit = 2048 * 12288 / 8
    assert paper_layer_bytes(
        2048, 1, 12288, 96, 8, sequence_parallel=True
    ) == pytest.approx((34 + 80) * unit)


def test_micro_batches_in_flight() -> None:
    assert [in_flight(stage, 4, None, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(0, 4, None, 2) == 2, "no more than there are"
    p, m = 8, 2
    assert in_flight(0, p, m, 100) == pytest.approx(p * (1 + (p - 1) / (p * m))), (
        "section 4.2.3"
    )


def test_layers_of_one_part_are_counted_by_their_parts() -> None:
    """Of seven layers three have Mamba-2, one attention and three an MLP."""
    kinds = ("mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp")
    spec = make_spec("NemotronHForCausalLM", num_layers=7, layer_kinds=kinds)
    layers = layers_by_parts(spec)
    assert layers == {
        LayerParts(mamba=1.0): 3,
        LayerParts(attention=1.0): 1,
        LayerParts(mlp=1.0): 3,
    }
    mean = mean_parts(spec, is_moe=False)
    assert mean == mean_parts(spec)
    assert (mean.num_norms, mean.num_outputs) == (pytest.approx(1), pytest.approx(1))
    assert mean_parts(spec, is_moe=True) == LayerParts()
    shape, load = LayerShape(spec), StageLoad(7, 0, 100, 50, 1.0)
    kept = {parts: layer_bytes(shape, 50, parts) for parts in layers}
    total = sum(kept[parts] * count for parts, count in layers.items())
    assert 7 * layer_bytes(shape, 50, mean) == pytest.approx(total)
    # One layer is recomputed at a time, and the largest needs most.
    inputs, largest = 7 * 2 * spec.hidden_size, max(kept.values())
    assert stage_bytes(shape, load, Recompute("full", "uniform", 1)) == pytest.approx(
        100 * (inputs + largest + gradient_bytes(shape))
    )


def test_a_layers_time_is_that_of_its_parts() -> None:
    """Of a layer with attention, Mamba-2 and an MLP; and of a mean layer."""
    spec = make_spec("FalconH1ForCausalLM", hidden_size=512)
    costs = ModelCosts(spec, Hardware.read("h100"), "bfloat16")
    batch, grid = MicroBatchLoad(4096, 4096 * 1024), GridShape(tp=2)

    def seconds(**parts: float) -> float:
        costs.parts[False] = LayerParts(**parts)
        passes = costs.layer(batch, grid, is_moe=False, sequence_parallel=False)
        return passes.forward.compute

    mixers = [seconds(attention=1.0), seconds(mamba=1.0)]
    mlp = seconds(mlp=1.0)
    both = seconds(attention=1.0, mamba=1.0, mlp=1.0)
    # Mixers side by side have one norm, and one set of launches.
    shared = seconds(attention=1.0, mlp=1.0) - mixers[0] - mlp
    assert shared == pytest.approx(0.0, abs=1e-12)
    assert max(*mixers) + mlp < both < sum(mixers) + mlp
    mean = seconds(attention=0.25, mamba=0.25, mlp=0.5)
    assert mean == pytest.approx(sum(mixers) / 4 + mlp / 2)


def test_parts_of_layers_with_a_mixer_and_an_mlp() -> None:
    beside = layers_by_parts(make_spec("FalconH1ForCausalLM", num_layers=2))
    assert beside == {LayerParts(attention=1.0, mamba=1.0, mlp=1.0): 2}
    [parts] = beside
    assert (parts.num_norms, parts.num_outputs) == (2, 3)
    nets = layers_by_parts(make_spec("Qwen3NextForCausalLM"))
    assert set(nets) == {
        LayerParts(attention=1.0, experts=1.0),
        LayerParts(delta_net=1.0, experts=1.0),
    }


def test_full_recomputation_keeps_one_input_a_group() -> None:
    spec = make_spec(hidden_size=64, ffn_hidden_size=256, num_layers=8)
    shape, load = (
        LayerShape(spec),
        StageLoad(8, 0, tokens=100, sequence=50, micro_batches=4.0),
    )
    stored = [
        stage_bytes(shape, load, Recompute("full", "uniform", layers))
        - layers * 100 * layer_bytes(shape, 50, mean_parts(spec))
        for layers in (1, 2, 8)
    ]
    one_input = 100 * 4 * 2 * 64
    assert stored[0] - stored[1] == pytest.approx(4 * one_input)
    assert stored[1] - stored[2] == pytest.approx(3 * one_input)
    assert stage_bytes(shape, load, Recompute()) > stage_bytes(
        shape, load, Recompute("full", "uniform", 1)
    )


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    replicas=st.sampled_from([1, 2, 3, 8]),
    bucket=st.sampled_from([None, 1000, 4000]),
    shared=st.booleans(),
)
def test_replicas_own_every_element_once(
    sizes: list[int], replicas: int, bucket: int | None, shared: bool
) -> None:
    options = BufferOptions.read({}, {}, replicas)
    parameters = [
        Parameter(str(i), n, is_shared_embedding=shared and i == 0)
        for i, n in enumerate(sizes)
    ]
    buffer = make_buffer(parameters, replicas, bucket, options)
    assert sum(buffer.owned(replica, replicas) for replica in range(replicas)) == sum(
        sizes
    )
    assert all(end % replicas == 0 and end % 128 == 0 for end in buffer.bucket_ends)


def test_uneven_layers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        GridError,
        match="actor.pp: 7 layers of the stages between cannot be divided over 2",
    ):
        layer_split(10, 3, None, {"num_layers_in_first_pipeline_stage": 3}, "actor")
    with pytest.raises(GridError, match="pipeline_model_parallel_layout is not read"):
        layer_split(
            10, 2, None, {"pipeline_model_parallel_layout": "Et*5|t*5L"}, "actor"
        )


def test_what_can_be_aliased() -> None:
    spec = make_spec("LlamaForCausalLM", num_layers=2, num_heads=4, num_kv_heads=2)
    weights = weights_of(spec)

    def elements(tp: int, engine_tp: int) -> tuple[int, int]:
        source = megatron_layouts(
            weights, spec, GridShape(tp=tp), padded_vocab_size=64
        )(0)
        dest = vllm_layouts(weights, spec, engine_tp)(0)
        return aliased_elements(source, dest), dest.numel

    aliased, needed = elements(2, 2)
    assert aliased == needed, "one key-value head a rank: the same order on both sides"
    aliased, needed = elements(1, 1)
    assert aliased == needed - 2 * (4 + 2 * 2) * spec.head_dim * spec.hidden_size, (
        "qkv is interleaved by group"
    )


def test_the_70b_recipe_at_1024_ranks() -> None:
    """FACTS: 15.4 GB into each GPU, 0.31 s at 50 GB/s; the busiest sender within 1.5 times the mean."""
    job = recipe("llama3_70b/grpo_128_nodes", 1024, "actor={tp: 8, pp: 8}")
    traffic = make_traffic(job)
    assert len(traffic.ranks) == 1024
    assert sum(r.sent["network"] for r in traffic.ranks) == sum(
        r.received["network"] for r in traffic.ranks
    )
    received = traffic.spread("received", "network")
    assert 15.2 * GB < received[0] <= received[2] < 15.6 * GB
    assert traffic.busiest("network") < 1.5
    slowest, mean = traffic.seconds(job.machine)
    assert 0.30 < mean <= slowest < 0.35
    shapes = [weight.shape for weight in weights_of(job.spec)]
    # Norms on every rank.
    engine = 2 * sum(
        math.prod(shape) * (8 if len(shape) == 1 else 1) for shape in shapes
    )
    assert (
        sum(rank.received["alias"] + rank.received["network"] for rank in traffic.ranks)
        == 128 * engine
    )


def test_seconds_follow_the_bandwidths() -> None:
    job = recipe("llama3_70b/grpo_8_nodes", 64)
    slow = dataclasses.replace(job.machine, network=job.machine.network / 2)
    traffic = make_traffic(job)
    assert traffic.seconds(slow)[0] == pytest.approx(
        2 * traffic.seconds(job.machine)[0]
    )


def test_an_engine_in_4_bits_holds_half_a_byte_an_element_and_its_scales() -> None:
    name = "llama3_70b/grpo_8_nodes"
    plain, int4, nvfp4 = (
        recipe(name, 64, *([f"rollout.vllm.quantization={kind}"] if kind else []))
        for kind in ("", "int4_g128", "nvfp4")
    )
    heads = (plain.spec.num_heads + 2 * plain.spec.num_kv_heads) // 8
    shapes = [(heads * 128, 8192), (8192, 1024), (2 * 3584, 8192), (8192, 3584)]
    linear = 80 * sum(map(math.prod, shapes))
    held = [MemoryModel(job).rank(0).engine.weights for job in (plain, int4, nvfp4)]
    assert held[0] - held[1] == 2 * linear - linear // 2 - 2 * linear // 128
    globals_ = 4 * 80 * len(shapes)
    assert held[0] - held[2] == 2 * linear - linear // 2 - linear // 16 - globals_


def test_rounded_weights_of_an_actor_are_counted() -> None:
    name, method = "llama3_70b/grpo_8_nodes", "int4_g128"
    settings = [f"rollout.vllm.quantization={method}"]
    plain = recipe(name, 64, *settings)
    rounding = recipe(name, 64, *settings, f"actor.fake_quantization={method}")
    parts = [MemoryModel(job).rank(0).parts["actor"] for job in (plain, rounding)]
    assert parts[1]["rounded weights"] > 0 and "rounded weights" not in parts[0]


def test_an_engine_in_8_bits_holds_a_byte_an_element_and_its_scales() -> None:
    name = "llama3_70b/grpo_8_nodes"
    plain, block, tensor = (
        recipe(name, 64, *([f"rollout.vllm.quantization={kind}"] if kind else []))
        for kind in ("", "fp8_per_block", "fp8_per_tensor")
    )
    spec = plain.spec
    # linear layers of a rank of 8; 80 layers
    heads = (spec.num_heads + 2 * spec.num_kv_heads) // 8
    shapes = [(heads * 128, 8192), (8192, 1024), (2 * 3584, 8192), (8192, 3584)]
    linear = 80 * sum(map(math.prod, shapes))
    scales = 80 * sum(
        4 * (-(-rows // 128)) * (-(-columns // 128)) for rows, columns in shapes
    )
    held = [MemoryModel(job).rank(0) for job in (plain, block, tensor)]
    weights = [rank.engine.weights for rank in held]
    assert weights == [
        weights[0],
        weights[0] - linear + scales,
        weights[0] - linear + 80 * 4 * 4,
    ]
    assert held[1].parts["rollout"]["aliased"] < held[0].parts["rollout"]["aliased"]
    largest = 2 * math.prod(shapes[2])
    buckets = [rank.parts["reshard"]["buckets"] for rank in held]
    assert buckets == [buckets[0], buckets[0] + largest, buckets[0] + largest]
    # as many bytes come as into an engine of bfloat16, and nothing of a linear layer
    # stays where it is
    sums = [sum(make_traffic(job).ranks[0].received.values()) for job in (plain, block)]
    assert sums[0] == sums[1]


def test_an_actor_in_8_bits_keeps_copies_of_its_linear_layers() -> None:
    """2 bytes an element where gradients flow back, 1 where not; offloading weights leaves them on the device."""
    given = ["actor.megatron.fp8=hybrid", "reference.megatron.fp8=hybrid"]

    def of_rank(rank: int, *more: str) -> RankMemory:
        return MemoryModel(recipe("llama3_70b/grpo_8_nodes", 64, *given, *more)).rank(
            rank
        )

    # Of Llama-3 70B: queries to output, and the feed-forward part.
    layer = 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672)
    linear = 20 * layer // 8  # a stage of PP4, TP8
    found, without = (
        of_rank(9),
        of_rank(9, "actor.megatron.fp8=null", "reference.megatron.fp8=null"),
    )
    assert (
        found.parts["actor"]["8-bit copies"] == 2 * linear
        and found.parts["reference"]["8-bit copies"] == linear
    )
    assert "8-bit copies" not in without.parts["actor"]
    for phase, used in found.phases.items():
        assert used - without.phases[phase] == 3 * linear, phase
    ends = [
        "actor.megatron.first_last_layers_bf16=true",
        "actor.megatron.num_layers_at_end_in_bf16=3",
    ]
    copies = [
        of_rank(rank, *ends).parts["actor"]["8-bit copies"] / (2 * layer // 8)
        for rank in (0, 16, 63)
    ]
    assert copies == [19, 20, 17]
    blocks = of_rank(9, "actor.megatron.fp8_recipe=blockwise").parts["actor"][
        "8-bit copies"
    ]
    assert blocks == 2 * (linear + 4 * linear // 128**2)
    assert (
        "8-bit copies"
        not in of_rank(
            9, "actor.megatron.disable_parameter_transpose_cache=true"
        ).parts["actor"]
    )


def test_opponents_are_drawn_with_a_second_model_on_every_engine() -> None:
    """Nash-MD: plain transformers holds the reference beside the policy, in every phase."""
    spec, kl = (
        make_spec(tie_embeddings=False),
        "kl: {in: loss, kind: k1, score_function: true, coef: 0.01}",
    )
    nash = f"algorithm={{name: grpo, advantage: nash_md, opponent_beta: 0.25, group_size: 2, {kl}}}"
    plain = f"algorithm={{name: grpo, group_size: 2, {kl}}}"
    with_both, without = (
        MemoryModel(make(spec, 2, "rollout.engine=hf", each)).rank(1)
        for each in (nash, plain)
    )
    numel = sum(math.prod(shape) for shape in shapes_of(weights_of(spec)).values())
    assert with_both.parts["rollout"].pop("reference") == numel * 2
    assert with_both.parts == without.parts
    more = {
        phase: used - without.phases[phase] for phase, used in with_both.phases.items()
    }
    assert set(more.values()) == {numel * 2.0}


def test_recipes_fit_the_machines_that_they_name() -> None:
    for name, nodes in (
        ("llama3_70b/grpo_8_nodes", 8),
        ("llama3_70b/grpo_8_nodes_fp8_rollout", 8),
        ("llama3_70b/ppo_16_nodes", 16),
        ("llama3_70b/grpo_128_nodes", 128),
    ):
        job = recipe(name, 8 * nodes)
        memory = MemoryModel(job).ranks(job.stage_ranks())
        assert shortages(job, memory) == [], name
        assert all(
            rank.parts["samples"]["fields"] < 0.003 * job.machine.memory
            for rank in memory
        ), name


def test_what_models_say_of_samples_lies_on_the_device_until_the_updates_are_over() -> (
    None
):
    """GRPO at 1,024 ranks: three fields of the samples that a rank works on; PPO: five of all, as it looks at all."""
    grpo = recipe("llama3_70b/grpo_128_nodes", 1024)
    assert grpo.field_bytes(0) == 4 * 4096 * 3 * (16384 // 1024 + 2 * 16384 // 64)
    ppo = recipe("llama3_70b/ppo_16_nodes", 128)
    assert ppo.field_bytes(0) == 4 * 4096 * 5 * 1024
    moments = MemoryModel(ppo).rank(0).moments
    assert {phase for phase, used in moments.items() if "fields" in used} == {
        "actor forward", "actor update", "critic forward", "critic update", "reference forward"
    }  # fmt: skip


def test_who_is_ahead_of_the_actor_holds_what_it_has_for_it() -> None:
    places = ["placement={rollout: 0, actor: 1, critic: 2, reference: 3}"]
    places.append("algorithm={name: ppo, kl: {in: reward, coef: 0.1}}")
    ahead = "rollout={async_rollout: true, max_staleness: 3}"
    jobs = [
        make(make_spec(), 4, *places, *given, "rollout.engine=hf")
        for given in ([], [ahead])
    ]
    field = (
        4.0
        * jobs[0].config.samples_per_step
        * int(jobs[0].config.rollout.sampling["max_tokens"])
    )
    assert [[job.field_bytes(rank) / field for rank in range(4)] for job in jobs] == [
        [0, 5, 3, 1],
        [0, 5, 4, 3],
    ]


def test_advice_is_the_nearest_setting_that_fits() -> None:
    job = recipe(
        "llama3_70b/grpo_8_nodes", 64, "rollout.vllm.gpu_memory_utilization=0.9"
    )
    missing = shortages(job, MemoryModel(job).ranks(job.stage_ranks()))
    # The reshard has the cache's room.
    assert {s.phase for s in missing} == {"engine start", "generate"}
    assert "GB too much" in str(missing[0])
    advice = advise(job)
    assert advice.settings == (("rollout.vllm.gpu_memory_utilization", 0.6),)
    corrected = with_settings(job, advice.settings)
    assert (
        shortages(corrected, MemoryModel(corrected).ranks(corrected.stage_ranks()))
        == []
    )


def test_advice_cuts_a_sample_that_is_too_long() -> None:
    """It is one micro-batch already, and its activations do not fit a rank."""
    lengths = (
        "data.max_prompt_tokens=1024",
        "rollout.sampling.max_tokens=31744",
        "actor.micro_batch_tokens=32768",
        "rollout.tp=16",
        "rollout.vllm.gpu_memory_utilization=0.6",
    )
    kept = [
        f"actor.megatron.recompute_{name}=null"
        for name in ("granularity", "method", "num_layers")
    ]
    job = recipe(
        "qwen3_235b_a22b/grpo_64_nodes",
        512,
        *lengths,
        *kept,
        "actor.chunked_logits=true",
    )
    assert {
        missing.phase
        for missing in shortages(job, MemoryModel(job).ranks(job.stage_ranks()))
    } == {"actor update"}
    whole, cut = (
        MemoryModel(with_settings(job, (("actor.cp", cp),))).rank(0).parts["actor"]
        for cp in (1, 2)
    )
    assert cut["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01)
    assert advise(job).settings == (("actor.cp", 4),)


def test_logits_in_float32_take_more() -> None:
    """Whole logits have twice the bytes. Chunks need a copy of the output layer, and hidden states of 4 bytes."""
    plain, wide = (
        [
            recipe(
                "llama3_70b/grpo_8_nodes", 64, f"actor.chunked_logits={chunked}", *of
            )
            for chunked in ("false", "true")
        ]
        for of in ([], ["model.fp32_lm_head=true"])
    )
    spec, actor = plain[0].spec, plain[0].actor
    tp, tokens = actor.grid.tp, actor.config.micro_batch_tokens
    columns = padded_vocab_size(spec.vocab_size, tp) / tp
    last = actor.grid.pp - 1
    whole, chunked = (
        MemoryModel(after).activations("actor", last)[0]
        - MemoryModel(before).activations("actor", last)[0]
        for before, after in zip(plain, wide, strict=True)
    )
    assert whole == pytest.approx(2 * tokens * columns * (2 + 1 / 20))
    # A chunk and its gradient have the same bytes, of fewer tokens.
    hidden = 2 * 2 * tokens * spec.hidden_size
    chunk = 2 * CHUNK_BYTES
    assert chunked == pytest.approx(
        4 * columns * spec.hidden_size + hidden - chunk, rel=0.01
    )


def test_changes_leave_quantised_matrices_out() -> None:
    """They are sent whole, so no rank keeps a copy of them."""
    plain, int4 = (
        recipe(
            "llama3_70b/grpo_8_nodes",
            64,
            *("reshard={delta: on, alias: never}", "rollout.sleep=false"),
            *([f"rollout.vllm.quantization={kind}"] if kind else []),
        )
        for kind in ("", "int4_g128")
    )
    assert compared_share(plain) == 1.0
    layout = int4.rollout.layout_of(0)
    matrices = sum(
        piece.box.numel for piece in layout.pieces if piece.local in layout.quantised
    )
    assert compared_share(int4) == pytest.approx(1 - matrices / layout.numel)
    before, after = (make_traffic(job).delta for job in (plain, int4))
    assert before is not None and after is not None
    assert before.bytes_share < 0.02 < 0.9 < after.bytes_share


def test_advice_may_need_more_than_one_setting_or_find_none() -> None:
    spec = recipe("llama3_70b/grpo_8_nodes", 64).spec
    job = make(
        spec,
        64,
        "actor.tp=8",
        "rollout.tp=8",
        "algorithm={name: grpo, group_size: 8, kl: {in: loss, coef: 0.1}}",
    )
    advice = advise(job)
    assert len(advice.settings) > 1 and "=" in str(advice)
    corrected = with_settings(job, advice.settings)
    assert (
        shortages(corrected, MemoryModel(corrected).ranks(corrected.stage_ranks()))
        == []
    )
    hopeless = make(
        spec, 2, "actor.tp=2", "rollout.tp=2", "algorithm={name: grpo, group_size: 8}"
    )
    nothing = advise(hopeless)
    assert nothing.settings == () and "more nodes" in str(nothing)


def test_plans_of_the_same_grids_are_made_once() -> None:
    """A search for settings that fit would make them hundreds of times."""
    job, other = (
        recipe("llama3_70b/grpo_8_nodes", 64, f"rollout.sleep={sleep}")
        for sleep in ("true", "false")
    )
    assert reshard_plans(job) is reshard_plans(other)
    assert reshard_plans(with_settings(job, (("rollout.tp", 4),))) is not reshard_plans(
        job
    )


def test_a_cache_that_holds_no_sequence_is_told() -> None:
    job = recipe(
        "llama3_70b/grpo_8_nodes", 64, "rollout.vllm.gpu_memory_utilization=0.18"
    )
    [missing] = shortages(job, MemoryModel(job).ranks(job.stage_ranks()))
    assert missing.phase == "KV cache" and "less than one sequence" in str(missing)


def test_offload_and_sleep_free_what_they_say() -> None:
    job = recipe("llama3_70b/grpo_8_nodes", 64, machine=Machine(reserve=0.0))
    # Without sleep, ranks would keep copies of what they send.
    job = with_settings(job, (("reshard.delta", "off"),))
    [rank] = MemoryModel(job).ranks([0])
    awake = with_settings(job, (("rollout.sleep", False), ("reference.offload", False)))
    [other] = MemoryModel(awake).ranks([0])
    resting = rank.parts["rollout"]["weights"] + rank.parts["rollout"]["KV cache"]
    reference = rank.parts["reference"]["weights"]
    assert other.phases["actor update"] - rank.phases["actor update"] == pytest.approx(
        resting + reference
    )
    assert other.phases["generate"] - rank.phases["generate"] == pytest.approx(
        reference
    )
    cache = rank.parts["rollout"]["KV cache"]
    assert other.phases["reshard"] - rank.phases["reshard"] == pytest.approx(
        cache + reference
    )


def test_what_the_engine_shares_leaves_its_cache_more_room() -> None:
    machine = Machine(reserve=0.0)
    options = (
        "rollout.tp=8",
        "actor.tp=8",
        "algorithm={name: grpo, group_size: 8}",
        "rollout.sleep=true",
    )
    spec = recipe("llama3_70b/grpo_8_nodes", 64).spec
    little = ("reshard.alias=auto", "rollout.vllm.gpu_memory_utilization=0.1")
    shared, apart, small = (
        MemoryModel(make(spec, 64, *options, *more, machine=machine)).rank(0)
        for more in (["reshard.alias=auto"], ["reshard.alias=never"], little)
    )
    weights = apart.parts["rollout"]["weights"]
    assert (
        shared.parts["rollout"]["aliased"] == weights
        and shared.parts["rollout"]["weights"] == 0
    )
    assert (
        shared.parts["rollout"]["KV cache"] - apart.parts["rollout"]["KV cache"]
        == weights
    )
    # loaded beside the actor's; then one share for both
    for rank in (shared, apart, small):
        held = (
            rank.parts["actor"]["weights"]
            + rank.parts["actor"]["gradients"]
            + rank.parts["actor"]["optimizer"]
        )
        assert rank.phases["generate"] - held == pytest.approx(rank.engine.budget)
        assert rank.phases["engine start"] == max(
            rank.phases["generate"], held + weights
        )
    assert small.phases["engine start"] > small.phases["generate"], (
        "both are there until the actor's are adopted"
    )
