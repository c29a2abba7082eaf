"""Seconds of generation: prompts at once, then token by token of a batch that thins out as responses end."""

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

BUCKETS = 64  # of equal probability, of a distribution of lengths
NUM_SEQS = 256  # vLLM's default of max_num_seqs
PREFILL_TOKENS = 8192.0  # of a pass of the engine over prompts
CACHE_PASSES = 3  # of transformers' cache, which a token is appended to by copying it whole
DECODE_KERNELS = 6  # of a decoding layer, after fusion; a captured graph launches them all at once
DECODE_EXPERT_KERNELS = 6  # of a router and of tokens sorted by expert, as transformers decodes on a CPU


@dataclass(frozen=True)
class LengthDistribution:
    """Tokens of prompts and responses.

    Attributes:
        prompt: mean tokens of a prompt.
        responses: lengths of equal probability, ascending.
    """

    prompt: float
    responses: tuple[float, ...]

    @classmethod
    def fixed(cls, prompt: float, response: float) -> LengthDistribution:
        """All alike."""
        return cls(prompt, (float(response),))

    @classmethod
    def lognormal(cls, prompt: float, mean: float, longest: float, *, spread: float = 0.6) -> LengthDistribution:
        """Responses of a mean length, cut off at the longest: what samples of reasoning models look like.

        Args:
            mean: of the lengths after they are cut off; above 0.95 of the longest nearly all are cut off.
            spread: standard deviation of the logarithm.
        """
        mean = min(mean, longest)
        normal = NormalDist()
        steps = [math.exp(spread * normal.inv_cdf((number + 0.5) / BUCKETS)) for number in range(BUCKETS)]
        low, high = 0.0, max(longest / steps[0], mean)
        for _ in range(50):
            middle = (low + high) / 2
            if sum(min(longest, middle * step) for step in steps) / BUCKETS < mean:
                low = middle
            else:
                high = middle
        return cls(prompt, tuple(max(1.0, min(longest, high * step)) for step in steps))

    @classmethod
    def measured(cls, prompts: Sequence[float], responses: Sequence[float]) -> LengthDistribution:
        """Of a run's own samples."""
        ordered = sorted(responses)
        count = min(BUCKETS, len(ordered))
        places = [int((number + 0.5) * len(ordered) / count) for number in range(count)]
        return cls(sum(prompts) / len(prompts), tuple(float(ordered[place]) for place in places))

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
        """Mean of half the square of a sample's length: pairs of tokens that causal attention looks at."""
        return sum((self.prompt + response) ** 2 for response in self.responses) / len(self.responses) / 2


class EngineCosts:
    """Seconds of an engine of `tp` ranks that generates.

    Args:
        weights: bytes of a rank's weights, of which experts are `expert_weights`.
        most: sequences that it works on at once: `max_num_seqs`, and what its cache holds.
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
        self.weights, self.expert_weights, self.expert_parallel = weights, expert_weights, expert_parallel
        self.cache_bytes = kv_bytes_per_token(model.spec, tp, cache_itemsize or model.itemsize)

    def prefill(self, tokens: float, pairs: float) -> Duration:
        """Of so many tokens of prompts."""
        if tokens <= 0:
            return Duration()
        spec, chunk = self.model.spec, min(tokens, PREFILL_TOKENS)
        batch = MicroBatchLoad(chunk, pairs * chunk / tokens)
        ep = self.tp if self.expert_parallel else 1
        grid = GridShape(tp=self.tp, ep=ep, etp=1 if self.expert_parallel else None)
        total = Duration()
        for is_moe, count in layers_of(spec).items():
            if count:
                layer = self.model.layer(batch, grid, is_moe=is_moe, sequence_parallel=False).forward
                total = total + layer * count
        return total * (tokens / chunk)

    def step(self, batch: float, context: float) -> Duration:
        """One token of each of `batch` sequences with `context` tokens so far."""
        model, spec, hardware = self.model, self.model.spec, self.model.hardware
        read = self.weights - self.expert_weights
        if spec.moe is not None and self.expert_weights:
            missed = (1 - spec.moe.experts_per_token / spec.moe.num_experts) ** batch
            read += self.expert_weights * (1 - missed)
        cache = batch * context * self.cache_bytes
        # layers one after the other: each is bound by memory or by its products
        flops = self._token_flops * max(batch, 1.0) / self.tp
        share = hardware.matmul_share(flops / (4 * spec.num_layers)) if hardware.cores else hardware.matmul_share(1e15)
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
        if (
            hardware.cores is not None
        ):  # a token's activations stay in the processor's cache: its kernels' times are all
            moved /= model.slower
        compute += spec.num_layers * moved
        compute += hardware.decode_step_ms * 1e-3 + batch * hardware.decode_sequence_us * 1e-6
        message = model.itemsize * batch * spec.hidden_size
        return Duration(compute, 2 * spec.num_layers * model.links.all_reduce(message, self.tp))

    def _activation(self, batch: float) -> float:
        """Of a layer's MLP, elementwise."""
        spec, width = self.model.spec, self.model.spec.ffn_hidden_size
        if spec.moe is not None:
            width = spec.moe.experts_per_token * spec.moe.ffn_hidden_size
        return self.model.moved(self.model.itemsize * batch * 5 * width / self.tp)

    @cached_property
    def _token_flops(self) -> float:
        return self.model.flops(1.0, 0.0)

    def decode(self, sequences: float, lengths: LengthDistribution) -> Duration:
        """Until the last of so many sequences has ended, each waiting for a place among those worked on.

        While some wait, as many as can be are worked on, of any age; then none follows, and the batch thins out.
        """
        steps = _thinning(lengths.responses)
        if sequences <= self.most:
            return self._thin(sequences, steps, lengths.prompt, 0.0)
        mean = lengths.response
        age = sum(length**2 for length in lengths.responses) / len(lengths.responses) / mean / 2
        full = (sequences - self.most) * mean / self.most  # steps until the last begins
        # of those under way then, how many are left after u steps: the mean over their ages (renewal theory)
        left = _residual(lengths.responses)
        return self.step(self.most, lengths.prompt + age) * full + self._thin(self.most, left, lengths.prompt, age)

    def _thin(
        self, sequences: float, steps: Sequence[tuple[float, float, float]], prompt: float, age: float
    ) -> Duration:
        total = Duration()
        for number, middle, share in steps:
            batch = max(1.0, sequences * share)
            total = total + self.step(batch, prompt + age + middle) * number
        return total


def _thinning(responses: Sequence[float]) -> list[tuple[float, float, float]]:
    """(steps, the step in their middle, share of sequences that still run)."""
    found, before, count = [], 0.0, len(responses)
    for number, length in enumerate(responses):
        if length > before:
            found.append((length - before, (before + length) / 2, (count - number) / count))
            before = length
    return found


def _residual(responses: Sequence[float]) -> list[tuple[float, float, float]]:
    """The same of sequences of any age: P(left > u) is the integral of P(length > x) from u on, over the mean."""
    mean, longest = sum(responses) / len(responses), responses[-1]
    found, number = [], 16
    for part in range(number):
        middle = (part + 0.5) * longest / number
        left = sum(max(0.0, length - middle) for length in responses) / len(responses) / mean
        found.append((longest / number, middle, left))
    return found


def engine_costs(job: PlannedJob, model: ModelCosts, lengths: LengthDistribution) -> EngineCosts:
    """Of one of the job's engines."""
    spec, tp, hardware = job.spec, job.rollout.tp, model.hardware
    fields = job.config.rollout.vllm
    itemsize = 1 if fields.get("quantization") else model.itemsize
    layers, experts = layers_of(spec), 0.0
    plain = spec.num_layers * attention_parameters(spec) + spec.vocab_size * spec.hidden_size
    plain += layers[False] * 3 * spec.hidden_size * spec.ffn_hidden_size
    if spec.moe is not None:
        plain += layers[True] * 3 * spec.hidden_size * spec.moe.shared_ffn_hidden_size
        experts = layers[True] * spec.moe.num_experts * 3.0 * spec.hidden_size * spec.moe.ffn_hidden_size
    eight = str(fields.get("kv_cache_dtype", "auto")).startswith("fp8")
    engine = EngineCosts(
        model,
        tp,
        weights=itemsize * (plain + experts) / tp,  # without the embedding, of which a token reads one row
        expert_weights=itemsize * experts / tp,
        cache_itemsize=1 if eight else None,
        expert_parallel=job.rollout.expert_parallel,
    )
    most = math.inf if job.config.rollout.engine == "hf" else float(fields.get("max_num_seqs") or NUM_SEQS)
    if hardware.cores is None:
        share = float(fields.get("gpu_memory_utilization", UTILIZATION))
        lookup = itemsize * spec.vocab_size * spec.hidden_size / tp
        left = hardware.memory_gb * 1e9 * share - engine.weights - lookup
        most = min(most, left / (engine.cache_bytes * lengths.tokens))
    engine.most = max(1.0, most)
    if job.config.rollout.engine == "hf":
        engine.cache_bytes *= CACHE_PASSES
    return engine


def rollout_duration(job: PlannedJob, model: ModelCosts, lengths: LengthDistribution) -> Duration:
    """Of generating an engine's equal share of a step's samples."""
    engine, config = engine_costs(job, model, lengths), job.config
    sequences, episodes = (each / job.rollout.num_engines for each in (config.rows_per_step, config.samples_per_step))
    shared = config.rollout.engine != "hf" and config.rollout.vllm.get("enable_prefix_caching", True)
    begun_alike = episodes / (min(config.algorithm.group_size, episodes) if shared else 1)
    prompts = begun_alike + sequences - episodes
    prefill = engine.prefill(prompts * lengths.prompt, prompts * lengths.prompt**2 / 2)
    return prefill + engine.decode(sequences, lengths)
