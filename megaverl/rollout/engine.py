"""Protocol of generation engines: requests, responses, checks of both, and the number of sequences in flight."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megaverl.errors import RolloutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megaverl.distributed.shared_item import SharedItem
    from megaverl.sharding.layout import Layout
    from megaverl.sharding.vllm import EngineWeight


@dataclass(frozen=True)
class Generation:
    """A response.

    Attributes:
        token_ids: the generated tokens, including the stop token that ended them, which is trained on too.
        log_probs: natural log of the probability with which each token was drawn, after temperature, top-k and top-p.
        finish_reason: "stop" (a stop token was drawn) or "length" (max_tokens were).
        routed_experts: [prompt + response - 1, layers, k] uint8 or int16: the experts of each token that was read, if
            `actor.router_replay` is on; values of dense layers are arbitrary.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class PromptScore:
    """Log-probs of a prompt's tokens, at temperature 1.

    Attributes:
        log_probs: [n - 1] natural log of the probability of each token after the first, given the tokens before it.
        top_tokens: [n] for each prefix of the prompt, the most likely next token; the last one would follow the prompt.
        top_log_probs: [n] log-probs of `top_tokens`.
    """

    log_probs: list[float]
    top_tokens: list[int]
    top_log_probs: list[float]


class SamplingOptions:
    """Sampling parameters of a request. They have the names of vLLM's SamplingParams, including those in `extra`.

    Attributes:
        max_tokens: most tokens of a response, including the stop token.
        temperature: divides the logits; 0 is greedy.
        top_p: draw from the smallest set of tokens with this probability.
        top_k: draw from the k most likely tokens; 0: from all.
        stop_token_ids: tokens that end a response, in addition to the engine's own.
        ignore_eos: only this object's `stop_token_ids` end a response.
        reference_share: beta of policy^(1 - beta) reference^beta, the distribution to draw from; HFEngine only.
        extra: further fields of vLLM's SamplingParams.
    """

    def __init__(
        self,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        **extra: Any,
    ) -> None:
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = max(0, top_k)  # vLLM also takes -1 for "all"
        self.stop_token_ids = tuple(stop_token_ids or ())
        self.ignore_eos = ignore_eos
        self.reference_share = 0.0
        self.extra: Mapping[str, Any] = extra

    def __repr__(self) -> str:
        return (
            f"SamplingOptions({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"
        )

    def with_max_tokens(self, max_tokens: int) -> SamplingOptions:
        """Return a copy with another `max_tokens`."""
        changed = copy.copy(self)
        changed.max_tokens = max_tokens
        return changed

    def mixed(self, reference_share: float) -> SamplingOptions:
        """Return a copy that draws from a mixture with the reference."""
        changed = copy.copy(self)
        changed.reference_share = reference_share
        return changed

    def stop_tokens(self, of_engine: Sequence[int]) -> list[int]:
        """Return all tokens that end a response.

        Args:
            of_engine: stop tokens that the engine was made with.
        """
        # Without duplicates and in a fixed order, because engines compare requests of
        # ranks.
        return sorted({*self.stop_token_ids, *(() if self.ignore_eos else of_engine)})


# Token ids of each prompt of a request.
Prompts = Sequence[Sequence[int]]

# Images of each prompt of a request, in the order of their placeholder tokens.
Images = Sequence[Sequence["SharedItem"]]

# Options for all prompts, or a list with the options of each prompt
# (`rollout.adaptive_sampling`).
Sampling = SamplingOptions | Sequence[SamplingOptions]


def options_by_prompt(sampling: Sampling, count: int) -> Sequence[SamplingOptions]:
    """Return the sampling options of each of `count` prompts."""
    return [sampling] * count if isinstance(sampling, SamplingOptions) else sampling


def select_options(sampling: Sampling, rows: Sequence[int]) -> Sampling:
    """Return the sampling options of the prompts in `rows`."""
    return (
        sampling
        if isinstance(sampling, SamplingOptions)
        else [sampling[row] for row in rows]
    )


Shapes = Mapping[str, tuple[int, ...]]  # weight name -> shape

# Called with a prompt's index in the request and its response, as soon as the response
# is finished.
OnFinished = Callable[[int, Generation], None]

# Called with an engine's parameters and its `layouts` method, before a captured graph
# holds addresses of parameters.
OnLoad = Callable[
    [Mapping[str, "Tensor"], Callable[[Shapes], Callable[[int], "Layout"]]], None
]


class ReceivesWeights(Protocol):
    """Destination of a weight transfer on this rank: an `Engine`, or the draft model of one.

    The methods are those of `Engine`.
    """

    may_rebind: bool

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that a reshard writes in place."""

    def quantised_weights(self) -> Mapping[str, EngineWeight]:
        """Return the storage of quantised parameters and their scales."""

    def reset_prefix_cache(self) -> None:
        """Discard everything that was computed with old weights."""

    def sleep(self) -> None:
        """Free device memory."""

    def sleep_without(self, names: Collection[str]) -> bool:
        """Sleep without keeping the contents of these parameters. Return False if they are kept anyway."""

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again."""

    def wake_up(self) -> None:
        """Allocate all memory again."""


class Engine(Protocol):
    """A model that generates, or this rank's part of one.

    `num_replicas` engines of `tp_size` neighbouring ranks each share the ranks; this
    rank is rank `tp_rank` of engine `replica`. Every rank of a replica makes the same
    calls in the same order. Optional features (quantised weights, a cache, sleep) have
    defaults in this class, so subclasses need not define them.

    Attributes:
        may_rebind: whether parameters may move to other storage: no captured graph holds their addresses.
        in_flight: bounds on the number of sequences; None: no bounds.
        on_finished: called with every response of `generate` that finishes before the others. An engine may skip the
            calls; its responses then count as finished at the end. None: no calls.
        saved_work: counters that an engine may add to.

    Example:
        engine.wake_weights()
        ...  # a reshard writes engine.named_parameters() in place
        engine.reset_prefix_cache()
        engine.wake_up()
        generations = engine.generate(prompts, SamplingOptions(max_tokens=64), seeds)
        engine.sleep()
    """

    tp_size: int
    tp_rank: int
    replica: int
    num_replicas: int
    may_rebind: bool
    in_flight: InFlight | None = None
    on_finished: OnFinished | None = None
    saved_work: SavedWork

    def named_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that this rank holds, under the engine's names. A reshard writes them in place.

        A quantised parameter appears with its shape and the dtype in which it is sent,
        on the meta device.
        """

    def quantised_weights(self) -> Mapping[str, EngineWeight]:
        """Return the storage of quantised parameters and their scales; called only if layouts name such parameters."""
        return {}

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        """Return a function from a rank to the places of the model's weights in that rank's `named_parameters()`.

        Args:
            shapes: shapes of the weights by their names in a Hugging Face folder. Layouts may leave out weights that
                the engine does not use.
        """

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        images: Images | None = None,
    ) -> list[Generation]:
        """Generate one response per prompt, in order.

        The response to a prompt depends on the prompt, its seed and the weights, not on
        the other prompts.

        Args:
            prompts: token ids; an image has one placeholder token for each of its patches.
            sampling: options for all prompts; with `rollout.adaptive_sampling`, one for each.
            seeds: one per prompt (see `megaverl.rollout.sample_seed`).
            images: images of each prompt, if any prompt has some.

        Raises:
            RolloutError: a prompt is empty, too long or not of this vocabulary; checked before any work.
        """

    def score_prompts(self, prompts: Prompts) -> list[PromptScore]:
        """Compute the log-probs of the prompts' tokens, in order.

        Raises:
            RolloutError: the engine cannot score prompts; or see `generate`.
        """
        raise RolloutError(
            f"rollout.engine: {type(self).__name__} has no score_prompts(), so tasks that compare the likelihoods of "
            "given answers cannot be evaluated with it. Use vllm, server or hf."
        )

    def reset_prefix_cache(self) -> None:
        """Discard everything that was computed with old weights. To be called after every change of weights."""
        return

    def sleep(self) -> None:
        """Free device memory until `wake_up`, if the engine can."""
        return

    def sleep_without(self, names: Collection[str]) -> bool:
        """Sleep without keeping the contents of the parameters in `names`, which a
        reshard will write before `generate`.

        Returns:
            False if the engine keeps them anyway.
        """
        return False

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again, so that they can be written."""
        return

    def wake_up(self) -> None:
        """Allocate all memory again. The weights are unchanged, and the cache is empty."""
        return

    def close(self) -> None:
        """Free everything that the engine holds. It cannot be used afterwards."""


@dataclass
class SavedWork:
    """Counters of work that an engine saved.

    Attributes:
        prompt_tokens: prompt tokens of all requests.
        cached_tokens: those of them whose keys and values were in the prefix cache.
        draft_tokens: tokens that a speculator proposed.
        accepted_tokens: those of them that were accepted.
        by_server: number of responses of each inference server.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_server: Counter[str] = field(default_factory=Counter)

    def add_cached(self, prompts: Prompts, cached: Iterable[int]) -> None:
        """Count prompts whose first `cached` tokens were in the prefix cache."""
        self.prompt_tokens += sum(map(len, prompts))
        self.cached_tokens += sum(cached)

    @staticmethod
    def shares(engine_counts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics over several engines.

        Args:
            engine_counts: `vars` of each engine's counters.
        """
        by_server = Counter[str]()
        for engine in engine_counts:
            by_server.update(engine["by_server"])
        metrics = {
            f"rollout/server_samples/{server}": float(count)
            for server, count in sorted(by_server.items())
        }
        # Numbers are summed. The counter by server has been merged above.
        numbers = [
            name for name, value in vars(SavedWork()).items() if isinstance(value, int)
        ]
        total = {
            name: sum(counts[name] for counts in engine_counts) for name in numbers
        }
        if total["prompt_tokens"]:
            metrics["rollout/prefix_cache_hit_rate"] = (
                total["cached_tokens"] / total["prompt_tokens"]
            )
        if total["draft_tokens"]:
            metrics["rollout/draft_acceptance_rate"] = (
                total["accepted_tokens"] / total["draft_tokens"]
            )
        return metrics


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Refuse a request that an engine would fail on, or would silently truncate, before any work.

    Raises:
        RolloutError: names the prompt by its index.
    """
    if len(seeds) != len(prompts):
        raise RolloutError(
            f"{len(prompts)} prompts came with {len(seeds)} seeds. Give one seed per prompt."
        )
    per_prompt = options_by_prompt(sampling, len(prompts))
    if len(per_prompt) != len(prompts):
        raise RolloutError(
            f"{len(prompts)} prompts came with {len(per_prompt)} sampling options. Give one, or one each."
        )
    if isinstance(sampling, SamplingOptions):
        # Check the options even if the request has no prompt.
        per_prompt = [*per_prompt, sampling]
    # Each wrong limit is reported once, however many prompts have it.
    for max_tokens in {
        options.max_tokens for options in per_prompt if options.max_tokens < 1
    }:
        raise RolloutError(
            f"rollout.sampling.max_tokens is {max_tokens}. At least 1 is needed."
        )
    for index, (prompt, options) in enumerate(zip(prompts, per_prompt, strict=False)):
        if not prompt:
            raise RolloutError(
                f"prompt {index} is empty. A prompt needs at least one token."
            )
        if len(prompt) + options.max_tokens > max_model_len:
            raise RolloutError(
                f"prompt {index} has {len(prompt)} tokens; with rollout.sampling.max_tokens={options.max_tokens} "
                f"that is more than the engine's max_model_len of {max_model_len}. Lower max_tokens, shorten or "
                "drop the prompt (data.max_prompt_tokens), or make the engine with a larger max_model_len."
            )
        # Both bounds are tested: a negative token would index from the end of the
        # embedding.
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= vocab_size:
            raise RolloutError(
                f"prompt {index} holds token {highest if lowest >= 0 else lowest}, but the model's vocabulary is "
                f"0 to {vocab_size - 1}. The tokenizer does not fit the model (model.tokenizer, model.path)."
            )


def check_generations(generations: Sequence[Generation], num_prompts: int) -> None:
    """Refuse an answer that is not one complete response per prompt.

    Raises:
        RolloutError: names the prompt by its index.
    """
    if len(generations) != num_prompts:
        raise RolloutError(
            f"the engine returned {len(generations)} responses for {num_prompts} prompts."
        )
    for index, generation in enumerate(generations):
        # Log-probs are trained on, so a response with one too few would shift all of
        # them.
        if not generation.token_ids or len(generation.token_ids) != len(
            generation.log_probs
        ):
            raise RolloutError(
                f"prompt {index}: the engine returned {len(generation.token_ids)} tokens and "
                f"{len(generation.log_probs)} log-probs."
            )
        if generation.finish_reason not in ("stop", "length"):
            raise RolloutError(
                f"prompt {index}: generation ended with {generation.finish_reason!r} instead of at a stop token "
                "or at max_tokens."
            )


@dataclass
class InFlight:
    """Number of sequences that one engine decodes at once.

    Attributes:
        least, most: bounds. If memory holds fewer than `least`, the engine must make room (vLLM preempts).
        budget: bytes for keys and values, for an engine without a cache of its own; None: not measured yet.
        measures: whether the budget follows the device's free memory.
        number: the number that was chosen last.
    """

    least: int
    most: int
    budget: int | None = None
    measures: bool = False
    number: int = 0

    def fit(self, free: int) -> None:
        """Set the budget to half of the `free` bytes, rounded down to a power of two,
        unless the present budget still fits.

        The other half is for activations. The budget stays as long as possible and is
        saved in checkpoints, since another batch size changes an engine's rounding.
        """
        # Halved for activations. A power of two keeps the budget stable when free
        # memory varies a little.
        if self.measures and (self.budget is None or free < self.budget):
            self.budget = 1 << max(0, (free // 2).bit_length() - 1)

    def choose(self, free_tokens: int, longest: int) -> int:
        """Return the number of responses to decode at once, when prompt and response
        together take up to `longest` tokens.

        Args:
            free_tokens: tokens whose keys and values fit into memory.
        """
        # At least `least`, even if memory seems short: the engine then makes room
        # itself.
        self.number = max(self.least, min(self.most, free_tokens // max(longest, 1)))
        return self.number


def sampling_options(fields: Mapping[str, Any], **changes: Any) -> SamplingOptions:
    """Return the configuration's sampling fields, with changes, as `SamplingOptions`."""
    return SamplingOptions(**{**fields, **changes})


def drawing(sampling: Sampling, count: int) -> dict[str, torch.Tensor]:
    """Return the batch fields with which the trainer computes log-probs of the
    distributions that samples were drawn from.

    Empty if one temperature describes all samples.

    Args:
        sampling: options of all samples, or of each; with several agents, of each sample of the first agent.
        count: samples of the batch.
    """
    # Reading a configuration imports this module, but must not import torch.
    import torch

    if isinstance(sampling, SamplingOptions) and not sampling.top_k:
        return {}
    per_prompt = options_by_prompt(sampling, count)
    # Several agents' samples follow each other, and have the same options in the same
    # order.
    per_prompt = list(per_prompt) * (count // len(per_prompt))
    # Greedy samples are compared at temperature 1.
    return {
        "temperatures": torch.tensor(
            [options.temperature or 1.0 for options in per_prompt], dtype=torch.float32
        ),
        "top_ks": torch.tensor(
            [options.top_k for options in per_prompt], dtype=torch.int64
        ),
    }
