"""Seconds of generation: prompts first, then one token at a time for a batch that shrinks as responses end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from megaverl.distributed.grid import GridShape
from megaverl.errors import ConfigError
from megaverl.planner.costs import (
    FORWARD_KERNELS,
    Duration,
    MicroBatchLoad,
    ModelCosts,
    attention_parameters,
    layers_of,
)
from megaverl.planner.job import PlannedJob
from megaverl.planner.layer_parts import LayerParts, layers_by_parts
from megaverl.planner.memory import UTILIZATION, kv_bytes_per_token
from megaverl.sharding.quantization import bytes_per_weight

BUCKETS = 64  # lengths of equal probability that stand for a distribution
# Shares of the longest responses whose lengths are kept beyond the buckets: 1 / 128 and
# halves of it, down to one response in a million.
TAIL = tuple(2.0**-power for power in range(7, 21))
# Share of responses that run to max_tokens if a run has not measured it. A policy that
# is trained by RL repeats itself in some responses until the limit; 1.6 % do in a public
# log whose mean response is a quarter of the limit (verl-project/verl, issue 4303).
SHARE_AT_LIMIT = 1 / 64
# Largest part of all tokens that responses at the limit have by assumption, for limits
# that are far above the mean.
MOST_TOKENS_AT_LIMIT = 0.25
NUM_SEQS = 256  # vLLM's default of max_num_seqs
PREFILL_TOKENS = 8192.0  # tokens of one engine pass over prompts
# Transformers copies its whole cache to append a token: one read, one write, and
# attention's read.
CACHE_PASSES = 3
# Kernels of a decoding layer of vLLM's models: norm, qkv, rotation, cache write,
# attention in two parts, output, all-reduce, norm, gate and up, activation, down.
# docs/simulator.md compares the steps that follow with published ones.
DECODE_KERNELS = 12
# Further kernels of a layer with experts, whose two products of all experts take the
# place of an MLP's: norms of queries and keys, router, top-k, sorting of tokens in three
# parts, sum.
DECODE_EXPERT_KERNELS_ON_GPU = 8
# Further launches of such a layer without CUDA graphs: renormalisation of the router's
# probabilities, a buffer that is filled, and two Triton kernels, whose launches take
# twice as long as those of compiled ones.
DECODE_EXPERT_LAUNCHES = 4
# Further kernels of latent attention: compressed queries with their norm, the latent's
# norm, and the products with both halves of the up-projection.
DECODE_LATENT_KERNELS = 8
# Further kernels for routing and sorting tokens, as transformers decodes on a CPU.
DECODE_EXPERT_KERNELS = 6


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of the lengths of prompts and responses, in tokens.

    Attributes:
        prompt: mean tokens of a prompt.
        responses: lengths of equal probability, ascending.
        tail: lengths that the shares in `TAIL` of all responses exceed, ascending; empty: none exceeds the last of
            `responses`.
    """

    prompt: float
    responses: tuple[float, ...]
    tail: tuple[float, ...] = ()

    @classmethod
    def fixed(cls, prompt: float, response: float) -> LengthDistribution:
        """Return a distribution in which all samples have the same lengths."""
        return cls(prompt, (float(response),))

    @classmethod
    def lognormal(
        cls,
        prompt: float,
        mean: float,
        longest: float,
        *,
        spread: float = 0.6,
        at_limit: float | None = None,
    ) -> LengthDistribution:
        """Return lengths of which a share runs to the limit, and the others are log-normal below it.

        Args:
            mean: mean length of all responses.
            longest: the limit, `rollout.sampling.max_tokens`.
            spread: standard deviation of the logarithm of the others.
            at_limit: share of the responses that run to the limit: 1 - `rollout/finished_fraction` of a run. None:
                the part of a log-normal distribution of this mean above the limit, and at least `SHARE_AT_LIMIT`.

        Raises:
            ConfigError: responses at the limit alone would have a larger mean.
        """
        mean = min(mean, longest)
        if at_limit is None:
            median = _median_of_cut(mean, longest, spread)
            above = 1 - NormalDist().cdf(math.log(longest / median) / spread)
            likely = min(SHARE_AT_LIMIT, MOST_TOKENS_AT_LIMIT * mean / longest)
            at_limit = max(above, likely)
        elif not 0 <= at_limit <= mean / longest:
            raise ConfigError(
                f"share at the limit: {at_limit:g} of the responses cannot have {longest:g} tokens if the mean is "
                f"{mean:g}. Use at most {mean / longest:.3g}, or another mean."
            )
        # The others need a token each, too, and buckets are at the limit as a whole.
        most = int(max(0.0, mean - 1) * BUCKETS / longest)
        reaching = min(at_limit, (most + 0.49) / BUCKETS)
        shares_below = [(number + 0.5) / BUCKETS for number in range(BUCKETS)]
        shares_below += [1 - share for share in TAIL]

        def lengths(median: float) -> list[float]:
            return [
                _quantile(share, median, longest, spread, reaching)
                for share in shares_below
            ]

        low, high = 1e-9, longest * math.exp(8 * spread)
        for _ in range(60):
            # The median may lie anywhere between a token and far above the limit.
            middle = math.sqrt(low * high)
            if sum(lengths(middle)[:BUCKETS]) / BUCKETS < mean:
                low = middle
            else:
                high = middle
        bucket_lengths = [max(1.0, length) for length in lengths(high)]
        return cls(
            prompt, tuple(bucket_lengths[:BUCKETS]), tuple(bucket_lengths[BUCKETS:])
        )

    @classmethod
    def measured(
        cls, prompts: Sequence[float], responses: Sequence[float]
    ) -> LengthDistribution:
        """Return the distribution of a run's own samples."""
        ordered = sorted(responses)
        count = min(BUCKETS, len(ordered))
        places = [int((number + 0.5) * len(ordered) / count) for number in range(count)]
        exceeded = [int((1 - share) * len(ordered)) for share in TAIL]
        return cls(
            sum(prompts) / len(prompts),
            tuple(float(ordered[place]) for place in places),
            tuple(float(ordered[place]) for place in exceeded),
        )

    def longest_of(self, number: float) -> float:
        """Return the expected longest response of `number` samples: the length that one in number + 1 exceeds."""
        share = 1 / (number + 1)
        if not self.tail or share > TAIL[0]:
            place = int((1 - share) * len(self.responses))
            return self.responses[min(place, len(self.responses) - 1)]
        # Between two shares of the tail, the length is interpolated.
        position = min(math.log2(TAIL[0] / share), len(self.tail) - 1.0)
        before = int(position)
        after = min(before + 1, len(self.tail) - 1)
        step = self.tail[after] - self.tail[before]
        return self.tail[before] + (position - before) * step

    @cached_property
    def response(self) -> float:
        """Mean tokens of a response."""
        return sum(self.responses) / len(self.responses)

    @cached_property
    def age(self) -> float:
        """Mean number of tokens that a running response has, if responses of all ages run."""
        squares = sum(length**2 for length in self.responses) / len(self.responses)
        return squares / self.response / 2

    @cached_property
    def tokens(self) -> float:
        """Mean tokens of a sample."""
        return self.prompt + self.response

    @cached_property
    def pairs(self) -> float:
        """Mean number of token pairs that causal attention visits in a sample: half its squared length."""
        return (
            sum((self.prompt + response) ** 2 for response in self.responses)
            / len(self.responses)
            / 2
        )


def _median_of_cut(mean: float, longest: float, spread: float) -> float:
    """Return the median of a log-normal distribution that has this mean if longer values are cut to `longest`."""
    normal = NormalDist()

    def mean_of(median: float) -> float:
        # E[min(x, l)] = E[x; x < l] + l P(x > l), for a log-normal x.
        at = math.log(longest / median) / spread
        below = median * math.exp(spread**2 / 2) * normal.cdf(at - spread)
        return below + longest * (1 - normal.cdf(at))

    low, high = 1e-9, longest * math.exp(8 * spread)
    for _ in range(60):
        middle = math.sqrt(low * high)
        if mean_of(middle) < mean:
            low = middle
        else:
            high = middle
    return high


def _quantile(
    share: float, median: float, longest: float, spread: float, at_limit: float
) -> float:
    """Return the length that `share` of the responses do not exceed.

    Args:
        median, spread: of the log-normal distribution of responses below the limit.
    """
    if share >= 1 - at_limit:
        return longest
    normal = NormalDist()
    # The limit cuts the log-normal distribution off: only the part below it is left.
    kept = normal.cdf(math.log(longest / median) / spread)
    place = share / (1 - at_limit) * kept
    if place <= 0:
        # The median is so far above the limit that no part is below it.
        return longest
    return min(longest, median * math.exp(spread * normal.inv_cdf(place)))


class EngineCosts:
    """Seconds of generation on an engine of `tp` ranks.

    Args:
        weights: bytes of a rank's weights, experts included.
        expert_weights: bytes of the experts among them.
        most: sequences that it decodes at once, limited by `max_num_seqs` and by its cache.
        eager: kernels are launched one by one (vLLM's `enforce_eager`) instead of as a CUDA graph.
    """

    def __init__(
        self,
        model: ModelCosts,
        tp: int,
        *,
        weights: float,
        expert_weights: float = 0.0,
        most: float = math.inf,
        cache_itemsize: int | None = None,
        expert_parallel: bool = False,
        eager: bool = False,
    ) -> None:
        self.model, self.tp, self.most = model, tp, max(1.0, most)
        self.eager = eager
        self.weights, self.expert_weights, self.expert_parallel = (
            weights,
            expert_weights,
            expert_parallel,
        )
        self.cache_bytes = kv_bytes_per_token(
            model.spec, tp, cache_itemsize or model.itemsize
        )

    def prefill(self, tokens: float, pairs: float) -> Duration:
        """Return the time to process `tokens` prompt tokens with `pairs` attention pairs."""
        if tokens <= 0:
            return Duration()
        spec, chunk = self.model.spec, min(tokens, PREFILL_TOKENS)
        batch = MicroBatchLoad(chunk, pairs * chunk / tokens)
        ep = self.tp if self.expert_parallel else 1
        grid = GridShape(tp=self.tp, ep=ep, etp=1 if self.expert_parallel else None)
        total = Duration()
        for is_moe, count in layers_of(spec).items():
            if count:
                layer = self.model.layer(
                    batch, grid, is_moe=is_moe, sequence_parallel=False
                ).forward
                total = total + layer * count
        return total * (tokens / chunk)

    def step(self, batch: float, context: float) -> Duration:
        """Return the time of one decoding step: one token for each of `batch` sequences with `context` tokens."""
        model, spec, hardware = self.model, self.model.spec, self.model.hardware
        read = self.weights - self.expert_weights
        if spec.moe is not None and self.expert_weights:
            # A small batch does not reach every expert, and only reached experts are
            # read.
            missed = (1 - spec.moe.experts_per_token / spec.moe.num_experts) ** batch
            read += self.expert_weights * (1 - missed)
        cache = batch * context * self.cache_bytes
        # Small products reach less of a CPU's peak. On GPUs decoding is bound by
        # memory, so the peak hardly matters.
        flops = self._token_flops * max(batch, 1.0) / self.tp
        share = (
            hardware.matmul_share(flops / (2 * self._num_blocks))
            if hardware.cores
            else hardware.matmul_share(1e15)
        )
        computed = flops / (model.peak * share)
        if hardware.weights_gb_s is None:
            compute = max((read + cache) / model.memory, computed)
        else:
            compute = model.read(read) + cache / model.memory + computed
        compute += self._kernels * model.kernel
        moved = sum(
            count * self._elementwise(batch, parts)
            for parts, count in self._layers.items()
        )
        if hardware.cores is not None:
            # A token's activations stay in the processor's cache, so elementwise work
            # runs at the memory's full rate.
            moved /= model.slower
        compute += moved
        if self.eager and hardware.cores is None:
            # The GPU computes what has been launched while the host launches more.
            with_experts = layers_of(spec)[True]
            launches = self._kernels + with_experts * DECODE_EXPERT_LAUNCHES
            compute = max(compute, launches * hardware.launch_us * 1e-6)
        compute += (
            hardware.decode_step_ms * 1e-3 + batch * hardware.decode_sequence_us * 1e-6
        )
        message = model.itemsize * batch * spec.hidden_size
        num_outputs = sum(
            count * parts.num_outputs for parts, count in self._layers.items()
        )
        return Duration(compute, num_outputs * model.links.all_reduce(message, self.tp))

    @cached_property
    def _layers(self) -> Counter[LayerParts]:
        return layers_by_parts(self.model.spec)

    @cached_property
    def _num_blocks(self) -> float:
        """Number of norms with what follows them: two in a layer with attention and an MLP."""
        return sum(count * parts.num_norms for parts, count in self._layers.items())

    def _elementwise(self, batch: float, parts: LayerParts) -> float:
        """Return the seconds of elementwise work in a layer."""
        model, spec = self.model, self.model.spec
        width = parts.mlp * spec.ffn_hidden_size
        if spec.moe is not None:
            of_experts = spec.moe.experts_per_token * spec.moe.ffn_hidden_size
            width += parts.experts * of_experts
        activation = model.moved(model.itemsize * batch * 5 * width / self.tp)
        return model.elementwise(batch, self.tp, parts) + activation

    @cached_property
    def _kernels(self) -> float:
        """Number of kernels of a decoding step."""
        spec, with_experts = self.model.spec, layers_of(self.model.spec)[True]
        num_pairs = self._num_blocks / 2
        if self.model.hardware.cores is not None:
            return num_pairs * FORWARD_KERNELS + with_experts * DECODE_EXPERT_KERNELS
        latent = DECODE_LATENT_KERNELS if spec.mla is not None else 0
        return (
            num_pairs * (DECODE_KERNELS + latent)
            + with_experts * DECODE_EXPERT_KERNELS_ON_GPU
        )

    @cached_property
    def _token_flops(self) -> float:
        return self.model.flops(1.0, 0.0)

    def decode(
        self, sequences: float, lengths: LengthDistribution, total: float | None = None
    ) -> Duration:
        """Return the time until the last of `sequences` responses has ended, when the
        engine decodes at most `most` at once.

        The engine first runs a full batch of sequences of all ages, as long as some are
        waiting. Then the batch shrinks, down to the one longest response. A step needs
        few seconds less for one sequence than for many, so a long tail is slow.

        Args:
            total: responses of all engines of the step. The slowest engine has the longest of them; None: those of
                this engine.
        """
        longest = lengths.longest_of(max(sequences, total or 0.0))
        if sequences <= self.most:
            steps = _thinning(lengths, longest)
            return self._thin(sequences, steps, lengths.prompt, 0.0)
        mean, age = lengths.response, lengths.age
        full = (sequences - self.most) * mean / self.most  # steps until the last begins
        # Running sequences then have all ages. The share still running after u steps is
        # a mean over these ages.
        left = _residual(lengths.responses, longest)
        while_waiting = self.step(self.most, lengths.prompt + age) * full
        return while_waiting + self._thin(self.most, left, lengths.prompt, age)

    def decode_continued(
        self, sequences: float, lengths: LengthDistribution, job: PlannedJob
    ) -> Duration:
        """Return the time of a step of `rollout.partial` in its steady state.

        A step ends when as many groups have ended as it takes; the others continue in
        the next step. A group is in progress until its longest response ends. By
        Little's law, `over_sample` times as many groups in progress end that much more
        often. Responses that `max_staleness` does not allow to wait hold a step up.
        """
        rollout, group = job.config.rollout, job.config.algorithm.group_size
        assert rollout.partial is not None
        more = rollout.partial.over_sample
        of_group = lengths.longest_of(group)
        running = min(self.most, more * sequences * lengths.response / of_group)
        decode_step = self.step(max(1.0, running), lengths.prompt + lengths.age)
        steps = max(of_group / more, sequences * lengths.response / max(1.0, running))
        longest = lengths.longest_of(sequences * job.rollout.num_engines)
        oldest = longest / (rollout.max_staleness + 1)
        return decode_step * max(steps, oldest)

    def _thin(
        self,
        sequences: float,
        steps: Sequence[tuple[float, float, float]],
        prompt: float,
        age: float,
    ) -> Duration:
        total = Duration()
        for number, middle, share in steps:
            batch = max(1.0, sequences * share)
            total = total + self.step(batch, prompt + age + middle) * number
        return total


def _thinning(
    lengths: LengthDistribution, longest: float
) -> list[tuple[float, float, float]]:
    """List (steps, middle step, share of sequences still running) for a batch that starts together.

    Args:
        longest: length of the response that ends last.
    """
    intervals, before, count = [], 0.0, len(lengths.responses)
    ends = [
        (length, (count - number) / count)
        for number, length in enumerate(lengths.responses)
    ]
    # Until a length of the tail, about twice the share that exceeds it still runs.
    ends += [
        (length, 2 * share) for length, share in zip(lengths.tail, TAIL, strict=False)
    ]
    for length, share in ends:
        end = min(length, longest)
        if end > before:
            intervals.append((end - before, (before + end) / 2, share))
            before = end
    return intervals


RESIDUAL_PARTS = 24


def _residual(
    responses: Sequence[float], longest: float
) -> list[tuple[float, float, float]]:
    """List the same for sequences of all ages: P(left > u) is the integral of P(length
    > x) from u, over the mean length.
    """
    mean = sum(responses) / len(responses)
    intervals: list[tuple[float, float, float]] = []
    # Parts become wider towards the end, where few sequences run.
    edges = [
        longest * (part / RESIDUAL_PARTS) ** 2 for part in range(RESIDUAL_PARTS + 1)
    ]
    for begin, end in zip(edges, edges[1:], strict=False):
        middle = (begin + end) / 2
        left = (
            sum(max(0.0, length - middle) for length in responses)
            / len(responses)
            / mean
        )
        intervals.append((end - begin, middle, left))
    return intervals


def engine_costs(
    job: PlannedJob, model: ModelCosts, lengths: LengthDistribution
) -> EngineCosts:
    """Return the costs of one of the job's engines."""
    spec, tp, hardware = job.spec, job.rollout.tp, model.hardware
    fields = job.config.rollout.vllm
    itemsize = bytes_per_weight(fields.get("quantization"), model.itemsize)
    layers, experts = layers_of(spec), 0.0
    plain = (
        spec.num_layers * attention_parameters(spec)
        + spec.vocab_size * spec.hidden_size
    )
    dense_layer = spec.mlp_matrices * spec.hidden_size * spec.ffn_hidden_size
    plain += spec.count_layers("mlp") * dense_layer
    if spec.moe is not None:
        matrix = spec.hidden_size * spec.moe.shared_ffn_hidden_size
        plain += layers[True] * spec.mlp_matrices * matrix
        experts = (
            layers[True]
            * spec.moe.num_experts
            * float(spec.mlp_matrices)
            * spec.hidden_size
            * spec.moe.ffn_hidden_size
        )
    eight = str(fields.get("kv_cache_dtype", "auto")).startswith("fp8")
    engine = EngineCosts(
        model,
        tp,
        # Without the input embedding: a token reads only one row of it.
        weights=itemsize * (plain + experts) / tp,
        expert_weights=itemsize * experts / tp,
        cache_itemsize=1 if eight else None,
        expert_parallel=job.rollout.expert_parallel,
        eager=bool(fields.get("enforce_eager")),
    )
    most = (
        math.inf
        if job.config.rollout.engine == "hf"
        else float(fields.get("max_num_seqs") or NUM_SEQS)
    )
    if hardware.cores is None:
        share = float(fields.get("gpu_memory_utilization", UTILIZATION))
        lookup = itemsize * spec.vocab_size * spec.hidden_size / tp
        left = hardware.memory_gb * 1e9 * share - engine.weights - lookup
        most = min(most, left / (engine.cache_bytes * lengths.tokens))
    engine.most = max(1.0, most)
    if job.config.rollout.engine == "hf":
        engine.cache_bytes *= CACHE_PASSES
    return engine


def rollout_duration(
    job: PlannedJob, model: ModelCosts, lengths: LengthDistribution
) -> Duration:
    """Return the time to generate one engine's equal share of a step's samples."""
    engine, config = engine_costs(job, model, lengths), job.config
    sequences, episodes = (
        total / job.rollout.num_engines
        for total in (config.rows_per_step, config.samples_per_step)
    )
    shared = config.rollout.engine != "hf" and config.rollout.vllm.get(
        "enable_prefix_caching", True
    )
    # With prefix caching, samples of a group share one prefill of their prompt.
    begun_alike = episodes / (
        min(config.algorithm.group_size, episodes) if shared else 1
    )
    prompts = begun_alike + sequences - episodes
    prefill = engine.prefill(prompts * lengths.prompt, prompts * lengths.prompt**2 / 2)
    if config.rollout.partial is not None:
        return prefill + engine.decode_continued(sequences, lengths, job)
    return prefill + engine.decode(sequences, lengths, config.rows_per_step)
