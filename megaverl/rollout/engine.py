"""What every generation engine is: the request, the answer, and how many sequences are in flight at once."""

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

    from megaverl.config.roles import RolloutConfig
    from megaverl.distributed.shared_item import SharedItem
    from megaverl.sharding.layout import Layout
    from megaverl.sharding.vllm import QuantisedWeight


@dataclass(frozen=True)
class Generation:
    """One response.

    Attributes:
        token_ids: the generated tokens; a stop token that ended them is the last one, as it is trained on too.
        log_probs: natural log of the probability with which each token was drawn, after temperature, top-k
            and top-p.
        finish_reason: "stop" (a stop token was drawn) or "length" (max_tokens were).
        routed_experts: [prompt + response - 1, layers, k] uint8 or int16: the experts of each token that was read,
            where `actor.router_replay` asks for them; anything in layers that have none.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routed_experts: Tensor | None = None


class SamplingOptions:
    """How tokens are drawn. The names are those of vLLM's SamplingParams; so are those in `extra`.

    Attributes:
        max_tokens: most tokens of a response, the stop token among them.
        temperature: logits are divided by it; 0 is greedy.
        top_p, top_k: draw from the smallest set of tokens that holds this probability, from the k likeliest
            (0: from all).
        stop_token_ids: end a response, besides those that the engine was made with.
        ignore_eos: only `stop_token_ids` given here end a response.
        reference_share: beta, where tokens are drawn from policy^(1 - beta) reference^beta; of HFEngine alone.
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
        return f"SamplingOptions({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"

    def with_max_tokens(self, max_tokens: int) -> SamplingOptions:
        """The same with another length."""
        changed = copy.copy(self)
        changed.max_tokens = max_tokens
        return changed

    def mixed(self, reference_share: float) -> SamplingOptions:
        """The same from a mixture with the reference."""
        changed = copy.copy(self)
        changed.reference_share = reference_share
        return changed

    def stop_tokens(self, of_engine: Sequence[int]) -> list[int]:
        """Every token that ends a response of an engine made with `of_engine`."""
        return sorted({*self.stop_token_ids, *(() if self.ignore_eos else of_engine)})


# Token ids of each prompt of a request.
Prompts = Sequence[Sequence[int]]

# Of each prompt of a request, those that its tokens have places for, in that order.
Images = Sequence[Sequence["SharedItem"]]

# One way to draw for all prompts, or each prompt's own (`rollout.adaptive_sampling`).
Sampling = SamplingOptions | Sequence[SamplingOptions]


def of_each(sampling: Sampling, count: int) -> Sequence[SamplingOptions]:
    """How the responses to each of `count` prompts are drawn."""
    return [sampling] * count if isinstance(sampling, SamplingOptions) else sampling


def of_some(sampling: Sampling, rows: Sequence[int]) -> Sampling:
    """The same for some of the prompts."""
    return sampling if isinstance(sampling, SamplingOptions) else [sampling[row] for row in rows]


Shapes = Mapping[str, tuple[int, ...]]  # by name

# Called with the number of a prompt in the request, and its response, as soon as that is finished.
OnFinished = Callable[[int, Generation], None]

# Called with an engine's parameters once they are there, before anything has captured their addresses; and with
# what `Engine.layouts` is.
OnLoad = Callable[[Mapping[str, "Tensor"], Callable[[Shapes], Callable[[int], "Layout"]]], None]


class Engine(Protocol):
    """A model that generates, or this rank's part of one.

    `num_replicas` engines of `tp_size` neighbouring ranks each share the world; this rank is number `tp_rank`
    of engine `replica`. Every rank of a replica calls each method alike. What an engine need not have (quantised
    weights, a cache, sleep) it has from here as a subclass.

    Attributes:
        may_rebind: whether parameters may take other storage: no captured graph holds their addresses.
        in_flight: bounds on the number of sequences; None: as many as the engine likes.
        on_finished: called with every response of `generate` that is finished while others are not. An engine may leave
            the calls out: the responses then count as finished at the end. None: nobody wants to know.
        saved_work: an engine may add to it.
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
        """The parameters that this rank holds, under the engine's names; written in place by a reshard.

        A quantised one stands there by its shape and the dtype in which it travels, on the meta device.
        """

    def quantised_weights(self) -> Mapping[str, QuantisedWeight]:
        """Where the numbers and scales of the quantised ones are; asked for only where the layouts name some."""
        return {}

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        """Rank -> where the elements of the model's weights stand in that rank's `named_parameters()`.

        Args:
            shapes: of the weights, by the names that they have in a Hugging Face folder. What the engine has no use
                for may be left out of the layouts.
        """

    def generate(
        self, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], *, images: Images | None = None
    ) -> list[Generation]:
        """One response per prompt, in order.

        What is drawn for a prompt depends on the prompt, its seed and the weights, not on the other prompts.

        Args:
            prompts: token ids; of an image one for each of its parts.
            sampling: for all of them; with `rollout.adaptive_sampling` one for each.
            seeds: one per prompt (see `megaverl.rollout.sample_seed`).
            images: given where a prompt has any.

        Raises:
            RolloutError: a prompt that is empty, too long or not of this vocabulary; checked before any work.
        """

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with old weights; to be called after every change of them."""
        return

    def sleep(self) -> None:
        """Free device memory until `wake_up`, where the engine can."""
        return

    def sleep_without(self, names: Collection[str]) -> bool:
        """The same, but what these of `named_parameters()` hold need not be kept: a reshard writes them anew before
        the next `generate`. False: they are kept."""
        return False

    def wake_weights(self) -> None:
        """Take back the memory of the weights alone, to be written."""
        return

    def wake_up(self) -> None:
        """Take all of the memory back; the weights are as they were, the cache is empty."""
        return

    def close(self) -> None:
        """Free what the engine holds; it cannot be used afterwards."""


@dataclass
class SavedWork:
    """What an engine did not have to compute token by token.

    Attributes:
        prompt_tokens, cached_tokens: of requests, and of them those whose keys and values were in the prefix cache.
        draft_tokens, accepted_tokens: what a speculator proposed, and of it what was drawn.
        by_server: responses of each inference server, where servers generate.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_server: Counter[str] = field(default_factory=Counter)

    def add_cached(self, prompts: Prompts, cached: Iterable[int]) -> None:
        """Of each prompt, how many of its tokens were in the cache."""
        self.prompt_tokens += sum(map(len, prompts))
        self.cached_tokens += sum(cached)

    @staticmethod
    def shares(of_engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics of several engines together, from `vars` of each."""
        by_server = Counter[str]()
        for engine in of_engines:
            by_server.update(engine["by_server"])
        found = {f"rollout/server_samples/{server}": float(count) for server, count in sorted(by_server.items())}
        numbers = [name for name, value in vars(SavedWork()).items() if isinstance(value, int)]
        total = {name: sum(each[name] for each in of_engines) for name in numbers}
        if total["prompt_tokens"]:
            found["rollout/prefix_cache_hit_rate"] = total["cached_tokens"] / total["prompt_tokens"]
        if total["draft_tokens"]:
            found["rollout/draft_acceptance_rate"] = total["accepted_tokens"] / total["draft_tokens"]
        return found


def check_request(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    max_model_len: int,
    vocab_size: int,
) -> None:
    """Refuse, before any work, what an engine would fail on or would silently cut.

    Raises:
        RolloutError: naming the prompt by its index.
    """
    if len(seeds) != len(prompts):
        raise RolloutError(f"{len(prompts)} prompts came with {len(seeds)} seeds. Give one seed per prompt.")
    ways = of_each(sampling, len(prompts))
    if len(ways) != len(prompts):
        raise RolloutError(f"{len(prompts)} prompts came with {len(ways)} sampling options. Give one, or one each.")
    if isinstance(sampling, SamplingOptions):
        ways = [*ways, sampling]  # refused though there be no prompt
    for max_tokens in {way.max_tokens for way in ways if way.max_tokens < 1}:
        raise RolloutError(f"rollout.sampling.max_tokens is {max_tokens}. At least 1 is needed.")
    for index, (prompt, way) in enumerate(zip(prompts, ways, strict=False)):
        if not prompt:
            raise RolloutError(f"prompt {index} is empty. A prompt needs at least one token.")
        if len(prompt) + way.max_tokens > max_model_len:
            raise RolloutError(
                f"prompt {index} has {len(prompt)} tokens; with rollout.sampling.max_tokens={way.max_tokens} "
                f"that is more than the engine's max_model_len of {max_model_len}. Lower max_tokens, shorten or "
                "drop the prompt (data.max_prompt_tokens), or make the engine with a larger max_model_len."
            )
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= vocab_size:
            raise RolloutError(
                f"prompt {index} holds token {highest if lowest >= 0 else lowest}, but the model's vocabulary is "
                f"0 to {vocab_size - 1}. The tokenizer does not fit the model (model.tokenizer, model.path)."
            )


def check_generations(generations: Sequence[Generation], num_prompts: int) -> None:
    """Refuse an answer that is not one whole response per prompt.

    Raises:
        RolloutError: naming the prompt by its index.
    """
    if len(generations) != num_prompts:
        raise RolloutError(f"the engine returned {len(generations)} responses for {num_prompts} prompts.")
    for index, generation in enumerate(generations):
        if not generation.token_ids or len(generation.token_ids) != len(generation.log_probs):
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
    """Of one engine.

    Attributes:
        least, most: bounds; with too little room for `least`, the engine has to make some (vLLM preempts).
        budget: bytes for keys and values, where the engine has no cache of its own to ask; None: not measured yet.
        measures: whether the budget follows the device's free memory.
        number: what was chosen last.
    """

    least: int
    most: int
    budget: int | None = None
    measures: bool = False
    number: int = 0

    def fit(self, free: int) -> None:
        """Make the budget half of the `free` bytes, a power of two, unless there is one that they still hold.

        The other half is for activations. A budget stays as long as it can, and a checkpoint keeps it: engines whose
        batches have other sizes round otherwise.
        """
        if self.measures and (self.budget is None or free < self.budget):
            self.budget = 1 << max(0, (free // 2).bit_length() - 1)

    def choose(self, free_tokens: int, longest: int) -> int:
        """The number for responses whose prompt and response together take up to `longest` tokens.

        Args:
            free_tokens: for whose keys and values there is room.
        """
        self.number = max(self.least, min(self.most, free_tokens // max(longest, 1)))
        return self.number


def sampling_options(given: Mapping[str, Any], **changes: Any) -> SamplingOptions:
    """The configuration's sampling fields, with changes, as the engine takes them."""
    return SamplingOptions(**{**given, **changes})


def sampling_of(config: RolloutConfig, lengths: Sequence[int]) -> Sampling:
    """How responses to prompts of these lengths are drawn: all alike, or, with adaptive sampling, each its own way."""
    plain = sampling_options(config.sampling)
    if not config.adaptive_sampling:
        return plain
    ways = [(rule, sampling_options(config.sampling, **rule.changes)) for rule in config.sampling_rules]
    return [next((way for rule, way in ways if rule.holds(length)), plain) for length in lengths]


def drawing(sampling: Sampling, count: int) -> dict[str, torch.Tensor]:
    """What a batch must say of how its samples were drawn, so that the trainer computes log-probs of the same
    distributions: nothing where one temperature says it all.

    Args:
        sampling: of all, or of each; where there are several agents, of each of the first one's.
        count: samples of the batch.
    """
    import torch  # not needed to read a configuration

    if isinstance(sampling, SamplingOptions) and not sampling.top_k:
        return {}
    ways = of_each(sampling, count)
    ways = list(ways) * (count // len(ways))
    return {
        "temperatures": torch.tensor([way.temperature or 1.0 for way in ways], dtype=torch.float32),
        "top_ks": torch.tensor([way.top_k for way in ways], dtype=torch.int64),
    }
