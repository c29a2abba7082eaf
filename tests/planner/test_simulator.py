"""The predicted step: laws that hold whatever the rates are, and closed forms of parts that have one."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.cli.main import main
from megaverl.distributed.grid import GridShape
from megaverl.distributed.placement import parse_ranks
from megaverl.errors import ConfigError
from megaverl.planner.calibrate import PROBE_KEYS, PROMPT, RESPONSE, Probe, fit
from megaverl.planner.costs import LayerPasses, Links, MicroBatchLoad, ModelCosts
from megaverl.planner.generation import LengthDistribution, engine_costs
from megaverl.planner.hardware import RANGES, Hardware, known
from megaverl.planner.job import PlannedJob, find_spec, make_job
from megaverl.planner.memory import UTILIZATION, kv_bytes_per_token, state_bytes
from megaverl.planner.operators import (
    Operation,
    StepLoad,
    micro_batches,
    operations,
    parameters_of_stage,
)
from megaverl.planner.picture import draw
from megaverl.planner.report import (
    as_dict,
    as_text,
    memory_over_time,
    sleep_and_wake,
    survey,
)
from megaverl.planner.simulator import (
    MeasuredRate,
    Prediction,
    _play,
    default_lengths,
    simulate,
)
from megaverl.planner.stages import pipeline
from megaverl.planner.trial_steps import (
    WARM_UP,
    MeasuredOperator,
    Watch,
    steps_of_trace,
)
from megaverl.sharding.model_spec import ModelSpec
from tests.planner.jobs import CONFIGS, make, recipe

H100 = Hardware.read("h100")
CPU = replace(
    H100,
    name="cores",
    cores=2,
    tflops={"float32": 0.1, "bfloat16": 0.1},
    sources=("a test",),
)
RATES = (
    "memory_gb_s",
    "node_gb_s",
    "network_gb_s",
    "host_gb_s",
    "attention_efficiency",
)
COSTS = (
    "kernel_us",
    "launch_us",
    "node_latency_us",
    "network_latency_us",
    "decode_step_ms",
    "sample_ms",
    "step_ms",
    "operator_ms",
)
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
SPEC = ModelSpec.from_config(SMALL)
GRIDS = (
    "",
    "actor.tp=2",
    "actor.pp=2",
    "actor.cp=2",
    "actor={tp: 2, pp: 4}",
    "actor={pp: 2, vpp: 2}",
)
SPLIT = ("placement={rollout: 8-15, actor: rest}",)
ASYNC = (*SPLIT, "rollout.async_rollout=true")
# Who is beside the engines, and who else has ranks of its own, where engines run ahead.
BESIDE_ENGINES = {
    "rewards": "placement={rollout: 8-15, reward: 8-15, actor: rest}",
    "rewards beside the actor": "placement={rollout: 8-15, reward: actor, actor: rest}",
    "rewards apart": "placement={rollout: 8-11, reward: 12-15, actor: rest}",
    "reference": "placement={rollout: 8-15, reference: 8-15, actor: rest}",
    "reference and rewards": "placement={rollout: 8-15, reference: 8-15, reward: 8-15, actor: rest}",
    "critic": "placement={rollout: 8-15, critic: 8-15, actor: rest}",
    "critic and rewards": "placement={rollout: 8-15, critic: 8-15, reward: 8-15, actor: rest}",
    "critic apart, with rewards": "placement={rollout: 8-11, critic: 12-15, reward: 12-15, actor: rest}",
    "the actor": "placement={rollout: 0-15, actor: 0-15}",
}


def job(*more: str, world: int = 16) -> PlannedJob:
    return make(
        SPEC,
        world,
        "algorithm={name: grpo, group_size: 8, num_mini_batches: 2}",
        "data={train: absent.jsonl, prompts_per_step: 64, max_prompt_tokens: 256}",
        *[each for each in more if each],
    )


@pytest.mark.parametrize("more", [*((grid,) for grid in GRIDS), SPLIT, ASYNC])
def test_a_faster_machine_is_never_slower(more: tuple[str, ...]) -> None:
    planned = job(*more)
    before = simulate(planned, H100).step_seconds
    for name in RATES:
        faster = min(1.5 * getattr(H100, name), RANGES[name][1])
        assert simulate(
            planned, replace(H100, **{name: faster})
        ).step_seconds <= before * (1 + 1e-9), name
    for name in COSTS:
        assert simulate(
            planned, replace(H100, **{name: getattr(H100, name) / 2})
        ).step_seconds <= before * (1 + 1e-12), name
    twice = replace(
        H100, tflops={dtype: 2 * rate for dtype, rate in H100.tflops.items()}
    )
    assert simulate(planned, twice).step_seconds < before


@given(
    stages=st.integers(1, 8),
    number=st.integers(1, 40),
    forward=st.floats(0.1, 3),
    backward=st.floats(0.1, 6),
)
@settings(deadline=None)
def test_equal_stages_wait_as_long_as_the_paper_says(
    stages: int, number: int, forward: float, backward: float
) -> None:
    """(p - 1) / (m + p - 1) of the time, Narayanan et al. 2021, section 2.2."""
    seconds, _ = pipeline([(forward, backward)] * stages, number, 0.0)
    assert 1 - number * (forward + backward) / seconds == pytest.approx(
        (stages - 1) / (number + stages - 1), abs=1e-9
    )
    scored, _ = pipeline([(forward, backward)] * stages, number, 0.0, forward_only=True)
    assert scored == pytest.approx((number + stages - 1) * forward)


@given(
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=1, max_size=5),
    st.integers(1, 30),
    st.floats(0, 0.5),
)
@settings(deadline=None)
def test_a_pipeline_lies_between_its_busiest_stage_and_all_in_a_row(
    stages: list[tuple[float, float]], number: int, hop: float
) -> None:
    seconds, lanes = pipeline(stages, number, hop)
    assert (
        seconds
        >= number * max(forward + backward for forward, backward in stages) - 1e-9
    )
    assert (
        seconds <= number * (sum(map(sum, stages)) + 2 * hop * (len(stages) - 1)) + 1e-9
    )
    by_stage = defaultdict(list)
    for _, stage, begin, end in lanes:
        by_stage[stage].append((begin, end))
    for spans in by_stage.values():
        assert all(
            end <= begin + 1e-12
            for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)
        )


def test_decoding_equal_lengths_is_so_many_equal_steps() -> None:
    planned, lengths = job(), LengthDistribution.fixed(100, 64)
    engine = engine_costs(planned, ModelCosts(SPEC, H100, "bfloat16"), lengths)
    assert engine.decode(32, lengths).seconds == pytest.approx(
        64 * engine.step(32, 132).seconds
    )
    # two full batches, one after the other, as all end at once: what is predicted
    # counts the places as they fall free
    engine.most = 32
    assert (
        engine.decode(64, lengths).seconds >= 1.5 * engine.decode(32, lengths).seconds
    )
    # by hand: weights once and the cache of 32 sequences, at the memory's bandwidth,
    # and what a step costs besides
    parameters = 16 * (2048 * 64 * (2 * 32 + 2 * 8) + 3 * 2048 * 8192) + 128256 * 2048
    read = 2 * parameters + 32 * 132 * 16 * 2 * 8 * 64 * 2
    # Norms, residuals, rotations, activations.
    moved = 16 * 2 * 32 * (10 * 2048 + 4 * 32 * 64 + 5 * 8192)
    beside = 2e-3 + 32 * 4e-6 + 16 * 12 * 3e-6 + moved / (3350e9 * 0.8)
    assert engine.step(32, 132).seconds == pytest.approx(read / (3350e9 * 0.8) + beside)


def test_longer_responses_take_longer_and_a_long_tail_more_than_equal_ones() -> None:
    planned = job()
    took = [
        simulate(planned, H100, lengths=LengthDistribution.fixed(100, n)).step_seconds
        for n in (50, 100, 200)
    ]
    assert took == sorted(took) and took[2] > 1.5 * took[0]
    spread = LengthDistribution.lognormal(100, 100, 256)
    assert spread.response == pytest.approx(100) and spread.responses[-1] <= 256
    assert simulate(planned, H100, lengths=spread).seconds_of("rollout") > simulate(
        planned, H100, lengths=LengthDistribution.fixed(100, 100)
    ).seconds_of("rollout")


@given(
    mean=st.floats(20, 4000),
    # A mean within 8 % of the limit needs a median beyond the range that is searched.
    limit=st.floats(4500, 40_000),
    share=st.sampled_from([None, 0.0, 1 / 256, 1 / 64, 0.1, 0.3]),
)
@settings(deadline=None)
def test_lengths_have_the_mean_and_the_share_at_the_limit_that_they_are_made_for(
    mean: float, limit: float, share: float | None
) -> None:
    if share is not None and share * limit > mean:
        with pytest.raises(ConfigError, match=f"cannot have {limit:g} tokens"):
            LengthDistribution.lognormal(100, mean, limit, at_limit=share)
        return
    found = LengthDistribution.lognormal(100, mean, limit, at_limit=share)
    assert found.response == pytest.approx(mean, rel=1e-6)
    every = (*found.responses, *found.tail)
    assert list(every) == sorted(every) and every[-1] <= limit
    if share is not None and share * limit < 0.9 * mean:
        reached = sum(length == limit for length in found.responses) / 64
        assert abs(reached - share) <= 1 / 64
        # One of a million responses reaches the limit if any share of them does.
        assert (found.longest_of(2**20) == limit) == (share > 0)
    assert found.longest_of(10) <= found.longest_of(1000) <= found.longest_of(1e6)


def test_a_run_measures_its_own_tail() -> None:
    """Of 1,000 responses one has 5,000 tokens: fewer than 64 buckets tell, and a step with all of them has it."""
    responses = [*range(1, 1000), 5000]
    found = LengthDistribution.measured([10] * 1000, responses)
    assert found.responses[-1] < 1000
    assert found.longest_of(1023) == 5000 and found.longest_of(100) <= 1000


def test_the_last_response_decodes_alone() -> None:
    """One response of 1,000 runs on for 4,000 tokens, each at the time of a step with one sequence."""
    planned = job()
    engine = engine_costs(planned, ModelCosts(SPEC, H100, "bfloat16"), SHORT)
    short = engine.decode(100, SHORT, 1023)
    long = engine.decode(100, replace(SHORT, tail=(1000.0,) * 3 + (5000.0,) * 11), 1023)
    alone = engine.step(1, 100 + 3000) * 4000
    assert long.seconds - short.seconds == pytest.approx(alone.seconds, rel=0.05)
    assert alone.seconds < 4000 * engine.step(100, 3100).seconds


SHORT = LengthDistribution(100, (1000.0,) * 64, (1000.0,) * 14)


def test_small_all_reduces_between_nodes_cross_the_network_twice() -> None:
    links = Links(H100)
    within, between = links.all_reduce(0, 8), links.all_reduce(0, 16)
    assert between - within == pytest.approx(2 * H100.network_latency_us * 1e-6)
    assert links.gather(0, 16) - links.gather(0, 8) == pytest.approx(
        H100.network_latency_us * 1e-6
    )


def test_an_eager_engine_waits_for_its_host() -> None:
    """16 layers of 12 kernels, each of which the host launches, take longer than a small batch's weights."""
    lengths = LengthDistribution.fixed(100, 64)
    graphs, eager = (
        engine_costs(planned, ModelCosts(SPEC, H100, "bfloat16"), lengths)
        for planned in (job(), job("rollout.vllm={enforce_eager: true}"))
    )
    slower = eager.step(1, 100).seconds - graphs.step(1, 100).seconds
    bare = graphs.step(1, 100).seconds - H100.decode_step_ms * 1e-3 - 4e-6
    assert slower == pytest.approx(16 * 12 * 22e-6 - bare)


def test_groups_in_progress_end_more_often_than_a_step_takes_them() -> None:
    """Equal lengths: twice as many groups in progress halve the steps of a step, at a larger batch."""
    lengths = LengthDistribution.fixed(100, 64)
    once, twice = (
        job(
            "rollout.max_staleness=8",
            f"rollout.partial={{over_sample: {more}}}",
            "algorithm.correction.kind=token_truncate",
        )
        for more in (1, 2)
    )
    seconds = []
    for planned in (once, twice):
        engine = engine_costs(planned, ModelCosts(SPEC, H100, "bfloat16"), lengths)
        seconds.append(engine.decode_continued(32, lengths, planned).seconds)
    assert seconds[0] == pytest.approx(64 * engine.step(32, 132).seconds)
    assert seconds[1] == pytest.approx(32 * engine.step(64, 132).seconds)
    long_tail = LengthDistribution.lognormal(100, 400, 8000, at_limit=0.02)
    assert (
        simulate(twice, H100, lengths=long_tail).seconds_of("rollout")
        < simulate(job(), H100, lengths=long_tail).seconds_of("rollout") / 2
    )


def test_a_gpu_waits_for_its_host_where_tokens_go_to_experts() -> None:
    """The dispatcher empties the queue: 72 launches and 3 for each of the rank's experts, on GPUs."""
    spec = recipe("qwen3_235b_a22b/grpo_64_nodes", 512).spec
    costs = ModelCosts(spec, H100, "bfloat16")
    grid = GridShape(ep=8, dp=8)
    waits = costs.exposed_launches(grid, is_moe=True)
    assert waits.forward.seconds == pytest.approx((72 + 3 * 128 / 8) * 22e-6)
    assert waits.backward.seconds == 2 * waits.forward.seconds
    assert costs.exposed_launches(grid, is_moe=False) == LayerPasses()
    on_cores = ModelCosts(spec, CPU, "bfloat16")
    assert on_cores.exposed_launches(grid, is_moe=True) == LayerPasses()


def test_linear_layers_in_8_bits_take_half_as_long() -> None:
    plain, eight = (
        ModelCosts(SPEC, H100, "bfloat16", fp8=fp8) for fp8 in (False, True)
    )
    ratio = H100.tflops["float8"] / H100.tflops["bfloat16"]
    large = plain.product(32_768, 8192, 8192)
    assert large == pytest.approx(ratio * eight.product(32_768, 8192, 8192))
    batch = MicroBatchLoad(8192, 8192 * 1000)
    assert eight.head(batch, GridShape()) == plain.head(batch, GridShape())
    seconds = [
        simulate(job(*keys), H100).seconds_of("actor_update")
        for keys in ((), ("actor.megatron.fp8=hybrid",))
    ]
    assert 0.5 * seconds[0] < seconds[1] < 0.95 * seconds[0]


def test_more_ranks_do_not_split_the_longest_sample() -> None:
    lengths = LengthDistribution.lognormal(100, 400, 32_768, at_limit=1 / 256)
    many, most = (
        simulate(job(world=world), H100, lengths=lengths).seconds_of("actor_update")
        for world in (64, 128)
    )
    load = StepLoad(job(world=128), H100, lengths, None)
    batch, number = micro_batches(load, load.job.actor, 2)
    assert batch.tokens * number == pytest.approx(100 + 32_768)
    assert most > 0.8 * many


@pytest.mark.parametrize("hardware", [H100, CPU], ids=["gpus", "shared cores"])
@pytest.mark.parametrize(
    "more", [*((grid,) for grid in GRIDS), SPLIT, ASYNC, ("algorithm.name=ppo",)]
)
def test_no_rank_does_two_things_at_once_and_the_path_makes_up_the_step(
    more: tuple[str, ...], hardware: Hardware
) -> None:
    found = simulate(job(*more), hardware)
    by_rank = defaultdict(list)
    for phase in found.phases:
        for rank in phase.ranks:
            by_rank[rank].append((phase.begin, phase.end))
        assert all(
            phase.begin - 1e-9 <= begin <= end <= phase.end + 1e-9
            for _, _, begin, end in phase.lanes
        )
    for spans in by_rank.values():
        ordered = sorted(spans)
        assert all(
            end <= begin + 1e-9
            for (_, end), (begin, _) in zip(ordered, ordered[1:], strict=False)
        )
    assert sum(seconds for _, seconds in found.critical_path) == pytest.approx(
        found.step_seconds
    )
    assert 0 < found.mfu < 1 and 0 < found.update_mfu < 1


def test_what_runs_ahead_hides_behind_training() -> None:
    waits, ahead = (simulate(job(*more), H100) for more in (SPLIT, ASYNC))
    generating = ahead.seconds_of("rollout")
    training = sum(
        phase.seconds
        for phase in ahead.phases
        if phase.name not in ("rollout", "reshard")
    )
    assert waits.step_seconds == pytest.approx(
        generating + training + waits.seconds_of("reshard"), rel=0.1
    )
    assert ahead.step_seconds == pytest.approx(
        max(generating, training) + ahead.seconds_of("reshard"), rel=0.1
    )


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("beside", BESIDE_ENGINES)
def test_engines_run_ahead_whoever_is_beside_them(beside: str, staleness: int) -> None:
    """Every step ends, its parts take turns on their ranks, and the critical path makes it up."""
    if beside == "the actor" and staleness > 1:
        pytest.skip("who is beside the actor is not ahead")
    settings = [
        "rollout.async_rollout=true",
        f"rollout.max_staleness={staleness}",
        BESIDE_ENGINES[beside],
    ]
    settings += (
        ["algorithm.name=ppo", "algorithm.group_size=1"]
        if "critic" in beside
        else ["algorithm.kl={in: loss, coef: 0.1}"]
    )
    found = simulate(job(*settings), H100)
    assert sum(seconds for _, seconds in found.critical_path) == pytest.approx(
        found.step_seconds
    )
    names = {phase.name for phase in found.phases}
    assert {"rollout", "reward", "actor_update", "reshard"} <= names
    assert ("critic_update" in names) == ("critic" in beside)


def test_more_staleness_is_never_slower() -> None:
    """Rewards beside the engines do not hold them: with one step ahead all of the generation is hidden already."""
    seconds = []
    for staleness in (0, 1, 2, 4):
        ahead = (
            [f"rollout={{async_rollout: true, max_staleness: {staleness}}}"]
            if staleness
            else []
        )
        seconds.append(
            simulate(job(BESIDE_ENGINES["rewards"], *ahead), H100).step_seconds
        )
    assert seconds[0] > seconds[1]
    assert seconds[1:] == pytest.approx([seconds[1]] * 3, rel=1e-6)


def test_a_circle_of_operators_is_named() -> None:
    ranks, worlds = (0,), frozenset({"world"})
    ops = [
        Operation("rollout", "rollout", ranks, worlds, ("reward",), 1.0),
        Operation("reward", "reward", ranks, worlds, (), 1.0),
    ]
    with pytest.raises(
        ConfigError,
        match=r"\(rollout of step 1 -> reward of step 1 -> rollout of step 1\)",
    ):
        _play(ops, 3, H100, job())


def test_ranks_that_share_cores_take_turns() -> None:
    """The same work on twice as many ranks of the same two cores is no faster."""
    lengths = LengthDistribution.fixed(64, 64)
    two, four = (simulate(job(world=world), CPU, lengths=lengths) for world in (2, 4))
    assert four.seconds_of("actor_update") >= 0.95 * two.seconds_of("actor_update")
    alone = replace(CPU, cores=None)
    assert (
        simulate(job(world=4), alone, lengths=lengths).step_seconds
        < 0.7 * four.step_seconds
    )


@pytest.mark.parametrize(
    "name", ["llama3_70b/grpo_8_nodes", "qwen3_235b_a22b/grpo_64_nodes"]
)
def test_operations_and_parameters_are_those_of_the_model(name: str) -> None:
    planned = recipe(name, 64 if "70b" in name else 512)
    role, grid = planned.actor, planned.actor.grid
    whole = 0.0
    for stage in range(grid.pp):
        plain, expert = parameters_of_stage(role, stage)
        whole += plain * grid.tp + expert * grid.expert_tp * grid.ep
        held = role.layout_of(grid.rank(pp=stage))
        numel = sum(piece.box.numel for piece in held.pieces)
        assert plain + expert == pytest.approx(numel, rel=0.03)
    active = {"llama3_70b/grpo_8_nodes": 70e9, "qwen3_235b_a22b/grpo_64_nodes": 22e9}[
        name
    ]
    flops = ModelCosts(planned.spec, H100, "bfloat16").flops(1.0, 0.0)
    assert flops == pytest.approx(2 * active, rel=0.05)
    load = StepLoad(planned, H100, LengthDistribution.fixed(100, 100), None)
    assert load.model_flops()["actor_update"] == pytest.approx(
        3 * load.model_flops()["old_log_probs"]
    )


def test_parameters_and_caches_of_gated_delta_nets() -> None:
    """Of a model of Qwen3-Next's proportions, whose layers differ."""
    described = {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 8,
        "vocab_size": 4096,
        "num_experts": 16,
        "max_position_embeddings": 4096,
    }
    spec = ModelSpec.from_config(described)
    planned = make(spec, 4, "actor={tp: 2, pp: 2}", "model.dtype=bfloat16")
    role, grid = planned.actor, planned.actor.grid
    for stage in range(grid.pp):
        held = role.layout_of(grid.rank(pp=stage))
        numel = sum(piece.box.numel for piece in held.pieces)
        assert sum(parameters_of_stage(role, stage)) == pytest.approx(numel, rel=0.01)
    # 2 of 8 layers have keys and values, of 2 heads of 256 dimensions in 16 bits.
    assert kv_bytes_per_token(spec, 1, 2) == 2 * 2 * 2 * 256 * 2
    # 6 have states: 32 heads of 128 x 128 in float32, and 3 inputs of 8192 channels.
    assert state_bytes(spec, 1, 2) == 6 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert state_bytes(spec, 2, 2) * 2 == state_bytes(spec, 1, 2)
    flops = ModelCosts(spec, H100, "bfloat16")
    with_pairs = flops.flops(1.0, 1.0) - flops.flops(1.0, 0.0)
    assert with_pairs == 2 * 4 * spec.num_heads * spec.head_dim


@pytest.mark.parametrize("pattern", ["MEM*EME", "M-M*-M-"])
def test_parameters_of_layers_of_one_part_each(pattern: str) -> None:
    """As nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B's, made smaller, and with MLPs in place of experts."""
    described = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "vocab_size": 4096,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 512,
        "mlp_hidden_act": "relu2",
    }
    spec = ModelSpec.from_config(described)
    planned = make(spec, 2, "actor={tp: 2}", "model.dtype=bfloat16")
    role = planned.actor
    held = role.layout_of(role.grid.rank(tp=0))
    numel = sum(piece.box.numel for piece in held.pieces)
    assert sum(parameters_of_stage(role, 0)) == pytest.approx(numel, rel=0.01)


def test_the_rate_of_a_run_is_counted_as_that_of_a_plan(tmp_path: Path) -> None:
    """By hand for a dense model: 2 operations a weight and token, 4 for each pair of tokens, thrice in an update."""
    planned = job(world=2)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    config = planned.config.model_copy(
        update={
            "model": planned.config.model.model_copy(update={"path": str(tmp_path)})
        }
    )
    lengths, seconds = [10, 30, 20, 20], 2.0
    load = StepLoad(
        make_job(config, find_spec(config), 2),
        H100,
        LengthDistribution(0.0, (10, 30, 20, 20)),
        None,
    )
    passes = sum(3 if name.endswith("_update") else 1 for name in load.model_flops())
    spec = find_spec(config)
    weights = (
        spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    )
    weights += (
        spec.num_heads * spec.head_dim * spec.hidden_size
        + 3 * spec.hidden_size * spec.ffn_hidden_size
    )
    weights = weights * spec.num_layers + spec.hidden_size * spec.vocab_size
    pairs = (
        sum(length**2 / 2 for length in lengths)
        * spec.num_layers
        * 4
        * spec.num_heads
        * spec.head_dim
    )
    flops = passes * (2 * weights * sum(lengths) + pairs)
    found = MeasuredRate(config, 2, H100).metrics(lengths, seconds)
    assert found["train/tflop_per_gpu_per_sec"] == pytest.approx(
        flops / seconds / 2 / 1e12
    )
    assert found["train/mfu"] == pytest.approx(
        flops / seconds / 2 / H100.peak("bfloat16")
    )
    assert found["train/tokens_per_gpu_per_sec"] == 80 / seconds / 2
    assert "train/mfu" not in MeasuredRate(config, 2, None).metrics(lengths, seconds)
    assert MeasuredRate(config, 2, H100).metrics([], 1.0) == {}


def test_an_estimate_of_the_reshard_is_near_the_ranks_own_plans() -> None:
    from megaverl.planner.traffic import make_traffic

    for more in ((), ("actor.tp=2",), ("actor.pp=2",)):
        planned = job(*more)
        exact = simulate(planned, H100, traffic=make_traffic(planned)).seconds_of(
            "reshard"
        )
        assert simulate(planned, H100).seconds_of("reshard") == pytest.approx(
            exact, rel=0.5, abs=0.02
        ), more


@pytest.mark.parametrize("name", known())
def test_every_description_reads_and_says_where_its_numbers_are_from(
    name: str, tmp_path: Path
) -> None:
    hardware = Hardware.read(name)
    assert hardware.name == name and all(
        len(source) > 20 for source in hardware.sources
    )
    assert Hardware.read(hardware.write(tmp_path / "own.json")) == hardware
    shares = [hardware.matmul_share(10.0**power) for power in range(6, 15)]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
    assert {"h100", "h200", "b200", "a100", "a100_40gb"} <= set(known())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_gbs": 3350}, "unknown key memory_gbs"),
        ({"node_gb_s": "fast"}, "node_gb_s: expected a number, found 'fast'"),
        ({"node_gb_s": 450e9}, "node_gb_s: found 4.5e+11, expected 0.01 to 10000"),
        ({"tflops": {"bfloat16": 989e12}}, "tflops.bfloat16: found 9.89e+14"),
        ({"sources": []}, "sources: say where"),
        ({"matmul_efficiency": [[1e9, 0.5], [1e8, 0.2]]}, "ascend"),
        ({"matmul_efficiency": [[1e9, 50]]}, "shares lie between 0 and 1"),
        ({"cores": 0}, "cores: found 0"),
        ({"name": None}, "name is missing"),
    ],
)
def test_a_description_that_cannot_be_meant_is_refused_in_words(
    change: dict, said: str, tmp_path: Path
) -> None:
    fields = asdict(H100) | change
    path = tmp_path / "machine.json"
    path.write_text(
        json.dumps(
            {key: value for key, value in fields.items() if key != "name" or value}
        )
    )
    with pytest.raises(ConfigError) as error:
        Hardware.read(path)
    assert said in str(error.value)


def test_a_description_that_is_not_there_says_which_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown name h1000\. Known: a100, a100_40gb, b200, cpu, h100, h20, h200",
    ):
        Hardware.read("h1000")
    with pytest.raises(ConfigError, match=r"absent\.json does not exist"):
        Hardware.read("absent.json")
    with pytest.raises(ConfigError, match="tflops has no float32"):
        simulate(job("model.dtype=float32"), replace(H100, tflops={"bfloat16": 989}))


def test_a_fit_gives_back_what_steps_cost_beyond_the_rates() -> None:
    """Steps that are made up from known overheads: another job is then predicted as with these."""
    overheads = {"kernel_us": 40, "decode_step_ms": 1.5, "sample_ms": 0.1, "step_ms": 4}
    free = {
        "operator_ms": 0,
        "micro_batch_ms": 0,
        "update_ms": 0,
        "decode_sequence_us": 0,
        "memory_efficiency": 1.0,
    }
    true = replace(
        CPU,
        **free,
        **overheads,
        elementwise_efficiency=0.05,
        backward_factor=1.4,
        node_latency_us=200,
    )
    bare = replace(
        true,
        **dict.fromkeys(overheads, 0.0),
        elementwise_efficiency=None,
        backward_factor=2.0,
        node_latency_us=50,
    )

    def probe(layers: int, *more: str, world: int = 1) -> Probe:
        spec = replace(
            SPEC,
            num_layers=layers,
            hidden_size=192,
            ffn_hidden_size=576,
            num_heads=4,
            num_kv_heads=4,
        )
        planned = make(
            spec,
            world,
            *PROBE_KEYS,
            f"rollout={{engine: hf, sampling: {{max_tokens: {RESPONSE}}}}}",
            *more,
        )
        load = StepLoad(planned, true, LengthDistribution.fixed(PROMPT, RESPONSE), None)
        return Probe(
            planned,
            {
                op.name: MeasuredOperator(op.seconds, op.work / len(op.ranks))
                for op in operations(load)
            },
        )

    found = fit(
        bare, [probe(2), probe(6), probe(6, "actor.tp=2", "reference.tp=2", world=2)]
    )
    assert found.node_latency_us == pytest.approx(200, rel=0.05)
    for planned in (
        job("actor.tp=2", world=2),
        job(world=2),
        job("actor.pp=2", world=4),
    ):
        lengths = LengthDistribution.fixed(PROMPT, RESPONSE)
        want = simulate(planned, true, lengths=lengths).step_seconds
        assert simulate(planned, found, lengths=lengths).step_seconds == pytest.approx(
            want, rel=0.05
        )


def test_ranks_with_samples_of_their_own_tell_each_other_of_them() -> None:
    def longer(*cut: str, world: int, name: str = "advantages") -> float:
        planned, lengths = (
            job(*cut, world=world),
            LengthDistribution.fixed(PROMPT, RESPONSE),
        )
        both = [
            simulate(
                planned, replace(CPU, cores=None, node_latency_us=us), lengths=lengths
            )
            for us in (1000, 0)
        ]
        return both[0].seconds_of(name) - both[1].seconds_of(name)

    assert longer(world=1) == longer("actor.tp=2", "reference.tp=2", world=2) == 0
    for name in ("advantages", "old_log_probs"):
        assert longer(world=2, name=name) == pytest.approx(3e-3)  # sizes, header, rows
    assert longer("actor.pp=2", "reference.pp=2", world=4) == pytest.approx(6e-3)


def test_messages_between_stages_are_work_of_processors_that_ranks_share() -> None:
    """One hop of each micro-batch that is scored, and there and back of those of both updates."""
    planned = job("actor.pp=2", "actor.micro_batch_tokens=1024", world=2)
    lengths = LengthDistribution.fixed(28, 100)

    def work(latency: float) -> float:
        return simulate(
            planned,
            replace(CPU, message_work=0.5, send_latency_us=latency),
            lengths=lengths,
        ).processor_seconds

    (role,) = (each for each in planned.roles if each.name == "actor")
    load = StepLoad(planned, CPU, lengths, None)
    hops = micro_batches(load, role, 1)[1] + 2 * 2 * micro_batches(load, role, 2)[1]
    assert work(2000) - work(1000) == pytest.approx(hops * 1e-3 * 0.5)


def test_steps_in_which_others_were_at_work_do_not_count(tmp_path: Path) -> None:
    """Two worlds' first ranks; the slower one is the step's, and the first steps are left out."""
    events = []
    for step in range(WARM_UP + 6):
        disturbed = step % 2 == 0
        for rank in (0, 3):
            common = {
                "ph": "X",
                "pid": rank,
                "ts": 1e6 * (10 * step + rank),
                "dur": 1e6 * (9 if disturbed else 2 + rank),
            }
            events.append(common | {"name": "step", "args": {"step": step}})
            facts = {"step": step, "processor_us": 1e6 * (1 + rank)}
            events.append(
                common | {"name": "rollout", "dur": common["dur"] / 2, "args": facts}
            )
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = steps_of_trace(
        path, lambda begin, end: 0.75 if int(begin // 10) % 2 == 0 else 0.125
    )
    assert found.others == 0.125
    assert found.operators == {
        "rollout": MeasuredOperator(2.5, 2.5),
        "step": MeasuredOperator(5.0, 0.0),
    }

    watch = Watch(0)
    watch._looks = [(0.0, 1.0), (1.0, 1.0), (2.0, 2.0), (3.0, 2.0)]
    assert [
        watch.others(*span) for span in ((0.2, 0.9), (1.1, 1.9), (0.5, 2.5), (2.5, 9.0))
    ] == [0, 1, 1 / 3, 0]


def test_a_prediction_is_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = job("actor.pp=2", *SPLIT)
    capacity = survey(planned, H100)
    assert capacity.prediction is not None
    text, found = as_text(capacity), as_dict(capacity)["step"]
    assert (
        f"a step, predicted: {found['seconds']:.1f} s" in text
        and "critical path: rollout" in text
    )
    assert found["phases"].keys() == {
        phase.name for phase in capacity.prediction.phases
    }
    assert draw(capacity, tmp_path / "plan.svg").read_text().count("<path") > 100
    assert as_dict(survey(planned))["step"] is None
    recipe_path = CONFIGS / "llama3_70b" / "grpo_8_nodes.yaml"
    command = ["plan", "--config", str(recipe_path), "--nodes", "8"]
    assert (
        main([*command, "--hardware", "h1000"]) == 2
        and "unknown name h1000" in capsys.readouterr().err
    )
    assert main([*command, "--hardware", "h200", "--response-tokens", "900"]) == 0
    said = capsys.readouterr().out
    assert "150 GB each" in said and "responses of 900 (up to 4,096)" in said
    lengths = ["--hardware", "h200", "--response-tokens", "900", "--share-at-limit"]
    assert main([*command, *lengths, "0.5"]) == 2
    assert "0.5 of the responses cannot have 4096 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*command, *lengths, "1.5"])
    assert "expected a share, from 0 to below 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [("actor={tp: 2, pp: 2}",), SPLIT, ASYNC],
    ids=["together", "split", "ahead"],
)
def test_memory_through_a_step_is_that_of_what_each_rank_works_on(
    more: tuple[str, ...],
) -> None:
    """Engines that sleep copy their weights only where no reshard of their own ranks writes them anew."""
    planned = job(*more, "rollout.sleep=true")
    capacity, awake = (
        survey(planned, H100),
        survey(job(*more, "rollout.sleep=false"), H100).prediction,
    )
    found = capacity.prediction
    assert found is not None and awake is not None
    moments = {
        "rollout": "generate",
        "old_log_probs": "actor forward",
        "actor_update": "actor update",
    }
    for memory in capacity.memory:
        spans = memory_over_time(found, memory)
        assert all(
            end == begin
            for (_, end, *_), (begin, *_) in zip(spans, spans[1:], strict=False)
        )
        assert spans[0][0] == 0 and spans[-1][1] == pytest.approx(found.step_seconds)
        assert all(end > begin for begin, end, *_ in spans)
        held = {what: nbytes for _, _, what, nbytes in spans}
        assert ("rollout" in held) == (memory.rank in planned.rollout.ranks)
        assert ("actor_update" in held) == (memory.rank in planned.actor.ranks)
        assert all(
            held[name] == memory.phases[moment]
            for name, moment in moments.items()
            if name in held
        )
        assert min(held.values()) == memory.phases["between"]
    told = as_dict(capacity)["step"]["memory_over_time"]
    assert sum(len(parse_ranks(each["ranks"])) for each in told) == planned.world
    slept = sleep_and_wake(found)
    assert [what for what, *_ in slept] == ["wake", "sleep", "wake"]
    copied = slept[1][2] - slept[1][1]
    weights = (
        capacity.memory[planned.rollout.ranks[0]].engine.weights
        if more in (SPLIT, ASYNC)
        else 0
    )
    assert copied == pytest.approx(weights / (H100.host_gb_s * 1e9), rel=0.02)
    # The driver maps the cache again before the rollout, and weights before the reshard
    # unless they are the actor's own.
    engine = capacity.memory[planned.rollout.ranks[0]].engine
    share = capacity.job.config.rollout.vllm.get("gpu_memory_utilization", UTILIZATION)
    cache = H100.memory_gb * 1e9 * float(share) - engine.weights
    for name, nbytes in (
        ("rollout", cache),
        ("reshard", 0.0 if planned.aliases else engine.weights),
    ):
        assert found.seconds_of(name) - awake.seconds_of(name) == pytest.approx(
            copied + nbytes / 30e9, rel=0.02
        )


def test_a_step_of_70b_is_predicted_in_milliseconds_of_arithmetic() -> None:
    """And lies where such steps lie: tens of seconds to minutes, a fifth to two thirds of the peak in updates."""
    planned = recipe("llama3_70b/grpo_8_nodes", 64)
    found: Prediction = simulate(planned, H100, lengths=default_lengths(planned))
    assert 60 < found.step_seconds < 900 and 0.2 < found.update_mfu < 0.66
    assert found.tokens == pytest.approx(
        found.samples * default_lengths(planned).tokens
    )


def test_conversations_of_an_episode_are_rows_of_a_step() -> None:
    """Three of each are as many responses as three times the group, where no prompt is kept for the next."""
    given = [
        "environment.name=guess",
        "rollout.vllm={enable_prefix_caching: false}",
        "actor.pack_samples=false",
    ]
    three = job(*given, "environment.conversations=3", "algorithm.group_size=4")
    same = job(*given, "algorithm.group_size=12")
    found, expected = (simulate(each, H100) for each in (three, same))
    assert found.samples == expected.samples == 3 * three.config.samples_per_step
    assert found.step_seconds == expected.step_seconds and three.field_bytes(
        0
    ) == same.field_bytes(0)
    one = simulate(job(*given, "algorithm.group_size=4"), H100)
    assert (
        found.seconds_of("rollout") > one.seconds_of("rollout")
        and found.tokens == 3 * one.tokens
    )
