"""Seconds of generation: prompts first, then one token at a time for a batch that shrinks as responses end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from megaverl.distributed.grid import GridShape
from megaverl.planner.costs import (
    FORWARD_KERNELS,
    Duration,
    MicroBatchLoad,
    ModelCosts,
    attention_parameters,
    layers_of,
)
from megaverl.planner.job import PlannedJob
from megaverl.planner.memory import UTILIZATION, kv_bytes_per_token

BUCKETS = 64  # lengths of equal probability that stand for a distribution
NUM_SEQS = 256  # vLLM's default of max_num_seqs
PREFILL_TOKENS = 8192.0  # tokens of one engine pass over prompts
# Transformers copies its whole cache to append a token: one read, one write, and
# attention's read.
CACHE_PASSES = 3
# Kernels of a decoding layer after fusion, launched together by a captured CUDA graph.
DECODE_KERNELS = 6
# Further kernels for routing and sorting tokens, as transformers decodes on a CPU.
DECODE_EXPERT_KERNELS = 6


@dataclass(frozen=True)
class LengthDistribution:
    """Distribution of the lengths of prompts and responses, in tokens.

    Attributes:
        prompt: mean tokens of a prompt.
        responses: lengths of equal probability, ascending.
    """

    prompt: float
    responses: tuple[float, ...]

    @classmethod
    def fixed(cls, prompt: float, response: float) -> LengthDistribution:
        """Return a distribution in which all samples have the same lengths."""
        return cls(prompt, (float(response),))

    @classmethod
    def lognormal(
        cls, prompt: float, mean: float, longest: float, *, spread: float = 0.6
    ) -> LengthDistribution:
        """Return log-normal response lengths, cut off at `longest`, as samples of reasoning models are distributed.

        Args:
            mean: mean length after the cut; above 0.95 of `longest`, nearly all responses are cut.
            spread: standard deviation of the logarithm.
        """
        mean = min(mean, longest)
        normal = NormalDist()
        steps = [
            math.exp(spread * normal.inv_cdf((number + 0.5) / BUCKETS))
            for number in range(BUCKETS)
        ]
        # The cut lowers the mean, so find the median of the uncut distribution that
        # gives the wanted mean by bisection.
        low, high = 0.0, max(longest / steps[0], mean)
        for _ in range(50):
            middle = (low + high) / 2
            if sum(min(longest, middle * step) for step in steps) / BUCKETS < mean:
                low = middle
            else:
                high = middle
        return cls(prompt, tuple(max(1.0, min(longest, high * step)) for step in steps))

    @classmethod
    def measured(
        cls, prompts: Sequence[float], responses: Sequence[float]
    ) -> LengthDistribution:
        """Return the distribution of a run's own samples."""
        ordered = sorted(responses)
        count = min(BUCKETS, len(ordered))
        places = [int((number + 0.5) * len(ordered) / count) for number in range(count)]
        return cls(
            sum(prompts) / len(prompts),
            tuple(float(ordered[place]) for place in places),
        )

    @cached_property
    def response(self) -> float:
        """Mean tokens of a response."""
        return sum(self.responses) / len(self.responses)

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


class EngineCosts:
    """Seconds of generation on an engine of `tp` ranks.

    Args:
        weights: bytes of a rank's weights, experts included.
        expert_weights: bytes of the experts among them.
        most: sequences that it decodes at once, limited by `max_num_seqs` and by its cache.
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
    ) -> None:
        self.model, self.tp, self.most = model, tp, max(1.0, most)
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
            hardware.matmul_share(flops / (4 * spec.num_layers))
            if hardware.cores
            else hardware.matmul_share(1e15)
        )
        computed = flops / (model.peak * share)
        if hardware.weights_gb_s is None:
            compute = max((read + cache) / model.memory, computed)
        else:
            compute = model.read(read) + cache / model.memory + computed
        kernels = FORWARD_KERNELS if hardware.cores else DECODE_KERNELS
        compute += spec.num_layers * kernels * model.kernel
        if hardware.cores is not None:
            compute += layers_of(spec)[True] * DECODE_EXPERT_KERNELS * model.kernel
        moved = model.elementwise(batch, self.tp) + self._activation(batch)
        if hardware.cores is not None:
            # A token's activations stay in the processor's cache, so elementwise work
            # runs at the memory's full rate.
            moved /= model.slower
        compute += spec.num_layers * moved
        compute += (
            hardware.decode_step_ms * 1e-3 + batch * hardware.decode_sequence_us * 1e-6
        )
        message = model.itemsize * batch * spec.hidden_size
        return Duration(
            compute, 2 * spec.num_layers * model.links.all_reduce(message, self.tp)
        )

    def _activation(self, batch: float) -> float:
        """Return the seconds of elementwise work in a layer's MLP."""
        spec, width = self.model.spec, self.model.spec.ffn_hidden_size
        if spec.moe is not None:
            width = spec.moe.experts_per_token * spec.moe.ffn_hidden_size
        return self.model.moved(self.model.itemsize * batch * 5 * width / self.tp)

    @cached_property
    def _token_flops(self) -> float:
        return self.model.flops(1.0, 0.0)

    def decode(self, sequences: float, lengths: LengthDistribution) -> Duration:
        """Return the time until the last of `sequences` responses has ended, when the
        engine decodes at most `most` at once.

        The engine first runs a full batch of sequences of all ages, as long as some are
        waiting. Then the batch shrinks.
        """
        steps = _thinning(lengths.responses)
        if sequences <= self.most:
            return self._thin(sequences, steps, lengths.prompt, 0.0)
        mean = lengths.response
        age = (
            sum(length**2 for length in lengths.responses)
            / len(lengths.responses)
            / mean
            / 2
        )
        full = (sequences - self.most) * mean / self.most  # steps until the last begins
        # Running sequences then have all ages. The share still running after u steps is
        # a mean over these ages.
        left = _residual(lengths.responses)
        while_waiting = self.step(self.most, lengths.prompt + age) * full
        return while_waiting + self._thin(self.most, left, lengths.prompt, age)

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


def _thinning(responses: Sequence[float]) -> list[tuple[float, float, float]]:
    """List (steps, middle step, share of sequences still running) for a batch that starts together."""
    intervals, before, count = [], 0.0, len(responses)
    for number, length in enumerate(responses):
        if length > before:
            intervals.append(
                (length - before, (before + length) / 2, (count - number) / count)
            )
            before = length
    return intervals


def _residual(responses: Sequence[float]) -> list[tuple[float, float, float]]:
    """List the same for sequences of all ages: P(left > u) is the integral of P(length
    > x) from u, over the mean length.
    """
    mean, longest = sum(responses) / len(responses), responses[-1]
    intervals, number = [], 16
    for part in range(number):
        middle = (part + 0.5) * longest / number
        left = (
            sum(max(0.0, length - middle) for length in responses)
            / len(responses)
            / mean
        )
        intervals.append((longest / number, middle, left))
    return intervals


def engine_costs(
    job: PlannedJob, model: ModelCosts, lengths: LengthDistribution
) -> EngineCosts:
    """Return the costs of one of the job's engines."""
    spec, tp, hardware = job.spec, job.rollout.tp, model.hardware
    fields = job.config.rollout.vllm
    itemsize = 1 if fields.get("quantization") else model.itemsize
    layers, experts = layers_of(spec), 0.0
    plain = (
        spec.num_layers * attention_parameters(spec)
        + spec.vocab_size * spec.hidden_size
    )
    dense_layer = spec.mlp_matrices * spec.hidden_size * spec.ffn_hidden_size
    plain += layers[False] * dense_layer
    if spec.moe is not None:
        plain += layers[True] * 3 * spec.hidden_size * spec.moe.shared_ffn_hidden_size
        experts = (
            layers[True]
            * spec.moe.num_experts
            * 3.0
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
    return prefill + engine.decode(sequences, lengths)
