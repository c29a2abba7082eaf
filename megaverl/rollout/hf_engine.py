"""Generation with plain transformers: slow and simple, with a whole model per rank. Meant for tests and comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaverl.errors import RolloutError
from megaverl.platform import flash_attention, platform
from megaverl.platform.float32_linear import compute_in_float32
from megaverl.platform.hf_mamba import correct_mamba
from megaverl.rollout.engine import (
    Engine,
    Generation,
    Images,
    Prompts,
    PromptScore,
    Sampling,
    SamplingOptions,
    SavedWork,
    Shapes,
    check_generations,
    check_request,
    options_by_prompt,
)
from megaverl.sharding.model_spec import ModelSpec, why_not_in_transformers
from megaverl.sharding.tracing import weights_of_module
from megaverl.sharding.weight import listed
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from megaverl.sharding.layout import Layout


class HFEngine(Engine):
    """A transformers model on every rank, each a replica; see `megaverl.rollout.engine.Engine` for the methods.

    Args:
        model_folder: a Hugging Face folder with weights.
        dtype: dtype of the weights.
        max_model_len: most tokens of prompt and response together.
        stop_token_ids: tokens that end a response.
        fp32_lm_head: compute logits in float32, also with weights of 16 bits.
        reference_folder: folder of a second, frozen model, for responses drawn from a mixture of the two.
    """

    tp_size, tp_rank = 1, 0
    may_rebind = True

    def __init__(
        self,
        model_folder: str | Path,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        stop_token_ids: Sequence[int] = (),
        trust_remote_code: bool = False,
        fp32_lm_head: bool = False,
        reference_folder: str | Path | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        started = dist.is_initialized()
        self.replica = dist.get_rank() if started else 0
        self.num_replicas = dist.get_world_size() if started else 1
        self.saved_work = SavedWork()
        self.max_model_len = max_model_len
        self._stop_token_ids = tuple(stop_token_ids)

        def load(folder: str | Path) -> Any:
            reason = why_not_in_transformers(ModelSpec.outline(folder).architecture)
            if reason and not trust_remote_code:
                raise RolloutError(f"{folder}: {reason}")
            with user_code(
                lambda error: RolloutError(
                    f"{folder}: transformers cannot load it: {describe(error)}"
                )
            ):
                model = AutoModelForCausalLM.from_pretrained(
                    str(folder), dtype=dtype, trust_remote_code=trust_remote_code
                )
            flash_attention.use_in(
                model.to(platform.device).eval().requires_grad_(False)
            )
            correct_mamba(model)
            if fp32_lm_head and dtype != torch.float32:
                compute_in_float32(model, RolloutError)
            return model

        self.model = load(model_folder)
        self.reference = None if reference_folder is None else load(reference_folder)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        parameters = dict(self.model.named_parameters())
        # By identity, because tied parameters appear once in `named_parameters`.
        known = {id(tensor) for tensor in self.model.parameters()}
        # Folders also hold persistent buffers, which named_parameters() leaves out.
        saved = self.model.state_dict(keep_vars=True)
        return parameters | {
            name: tensor for name, tensor in saved.items() if id(tensor) not in known
        }

    def layouts(self, shapes: Shapes) -> Callable[[int], Layout]:
        """Return layouts in which every rank holds every weight whole.

        Raises:
            RolloutError: transformers' module lacks some of the weights, or has them with other shapes.
        """
        layout = weights_of_module(self.model).layout
        if unknown := [
            name
            for name, shape in shapes.items()
            if layout.global_shapes.get(name) != tuple(shape)
        ]:
            raise RolloutError(
                f"transformers' {type(self.model).__name__} has no weights with these names and shapes: "
                f"{', '.join(listed(unknown))}. Use rollout.engine=vllm."
            )
        return lambda rank: layout

    @torch.no_grad()
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        images: Images | None = None,
    ) -> list[Generation]:
        """Generate one response per prompt, in batches padded on the left."""
        if images is not None:
            raise RolloutError(
                "rollout.engine=hf supports only text, and the prompts have images. Use vllm."
            )
        vocab_size = self.model.config.vocab_size
        check_request(
            prompts,
            sampling,
            seeds,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
        )
        per_prompt = options_by_prompt(sampling, len(prompts))
        if extra := {name: None for options in per_prompt for name in options.extra}:
            raise RolloutError(
                f"rollout.sampling: {', '.join(extra)} cannot be used with rollout.engine=hf. Leave them "
                "out, or use rollout.engine=vllm."
            )
        if not prompts:
            return []
        step = len(prompts)
        if self.in_flight is not None:
            longest = max(map(len, prompts)) + max(
                options.max_tokens for options in per_prompt
            )
            # Otherwise the ranks have already agreed on a budget.
            if self.in_flight.budget is None:
                self.in_flight.fit(platform.free_memory())
            step = self.in_flight.choose(
                (self.in_flight.budget or 0) // self._bytes_per_token, longest
            )
        generations: dict[int, Generation] = {}
        # Waves of as many prompts as the budget holds. Each row has its own seed, so
        # waves change nothing but rounding.
        for numbers in self._waves(prompts, step):
            made = self._wave(
                [prompts[number] for number in numbers],
                [per_prompt[number] for number in numbers],
                [seeds[number] for number in numbers],
                numbers,
            )
            generations.update(zip(numbers, made, strict=True))
        return [generations[number] for number in range(len(prompts))]

    def _waves(self, prompts: Prompts, most: int) -> Iterator[Sequence[int]]:
        """Yield numbers of prompts that are generated together, at most `most` of them."""
        groups: dict[int, list[int]] = {}
        is_by_length = self._counts_padding
        for number, prompt in enumerate(prompts):
            length = len(prompt) if is_by_length else 0
            groups.setdefault(length, []).append(number)
        for numbers in groups.values():
            for start in range(0, len(numbers), most):
                yield numbers[start : start + most]

    @property
    def _counts_padding(self) -> bool:
        """Return whether attention depends on a token's place in its row, so that rows need prompts of equal length.

        Llama 4 scales queries and cuts chunks by that place (transformers 5.19).
        """
        config = self.model.config.get_text_config()
        return bool(
            getattr(config, "attn_temperature_tuning", False)
            or getattr(config, "attention_chunk_size", None)
        )

    @torch.no_grad()
    def score_prompts(self, prompts: Prompts) -> list[PromptScore]:
        """Compute the log-probs of the prompts' tokens, one prompt after the other."""
        check_request(
            prompts,
            SamplingOptions(max_tokens=1),
            [0] * len(prompts),
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        scores = []
        for prompt in prompts:
            tokens = torch.tensor([prompt], device=platform.device)
            # [tokens, vocab].
            logits = self.model(input_ids=tokens, use_cache=False).logits[0]
            log_probs = logits.float().log_softmax(-1)
            own = log_probs[:-1].gather(1, tokens[0, 1:, None])[:, 0]
            top = log_probs.max(dim=-1)
            scores.append(
                PromptScore(own.tolist(), top.indices.tolist(), top.values.tolist())
            )
        return scores

    @property
    def _bytes_per_token(self) -> int:
        """Bytes of keys and values per token, over both models if there are two."""
        total = 0
        for config in [
            model.config for model in (self.model, self.reference) if model is not None
        ]:
            heads = (
                getattr(config, "num_key_value_heads", None)
                or config.num_attention_heads
            )
            size = (
                getattr(config, "head_dim", None)
                or config.hidden_size // config.num_attention_heads
            )
            total += (
                # Keys and values, for every layer.
                2 * config.num_hidden_layers * heads * size * self.model.dtype.itemsize
            )
        return int(total)

    def _wave(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: Sequence[SamplingOptions],
        seeds: Sequence[int],
        numbers: Sequence[int],
    ) -> list[Generation]:
        """Generate responses to one batch of prompts.

        Args:
            numbers: number of each prompt in the request.
        """
        stop_tokens = [
            set(options.stop_tokens(self._stop_token_ids)) for options in per_prompt
        ]
        # One generator a prompt, on the CPU: a response depends on its seed alone,
        # neither on its batch nor on the device.
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        longest = max(map(len, prompts))
        padded_prompts = []
        padded_masks = []
        # Padding on the left, so that all rows continue at the same column.
        for prompt in prompts:
            padding = [0] * (longest - len(prompt))
            padded_prompts.append(padding + list(prompt))
            padded_masks.append(padding + [1] * len(prompt))
        tokens = torch.tensor(padded_prompts)
        mask = torch.tensor(padded_masks)
        generations = [Generation([], [], "length") for _ in prompts]
        running = set(range(len(prompts)))
        shares = torch.tensor([[options.reference_share] for options in per_prompt])
        assert self.reference is not None or not shares.any(), (
            "the engine was made without a reference"
        )
        cache = other_cache = None
        for _ in range(max(options.max_tokens for options in per_prompt)):
            logits, cache = _next_logits(self.model, tokens, mask, cache)
            # A geometric mixture of two distributions has the weighted mean of their
            # logits: constants cancel.
            if shares.any():
                other_logits, other_cache = _next_logits(
                    self.reference, tokens, mask, other_cache
                )
                # Linear interpolation between both models' logits, by each row's share.
                logits = torch.lerp(logits, other_logits, shares)
            log_probs, tokens = _next_tokens(logits, per_prompt, draws)
            mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
            # Finished rows stay in the batch until all have ended; their further tokens
            # are ignored.
            for row in sorted(running):
                token = int(tokens[row])
                generations[row].token_ids.append(token)
                generations[row].log_probs.append(float(log_probs[row, token]))
                if token in stop_tokens[row]:
                    generations[row] = Generation(
                        generations[row].token_ids, generations[row].log_probs, "stop"
                    )
                elif len(generations[row].token_ids) < per_prompt[row].max_tokens:
                    continue
                running.remove(row)
                if self.on_finished is not None:
                    self.on_finished(numbers[row], generations[row])
            if not running:
                break
        check_generations(generations, len(prompts))
        return generations

    def close(self) -> None:
        """Free the models."""
        del self.model, self.reference


def _next_logits(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, cache: Any
) -> tuple[torch.Tensor, Any]:
    """Return logits [batch, vocab] after the given tokens, and the cache with these tokens.

    Args:
        tokens: [batch, new tokens].
        mask: [batch, all tokens so far].
    """
    # Positions count the tokens before, without the padding on the left.
    # [batch, all tokens], of which only the new ones are needed.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    new_positions = positions[:, -tokens.shape[1] :]
    output = model(
        input_ids=tokens.to(platform.device),
        attention_mask=mask.to(platform.device),
        position_ids=new_positions.to(platform.device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1].float().cpu(), output.past_key_values


def _next_tokens(
    logits: torch.Tensor,
    per_prompt: Sequence[SamplingOptions],
    draws: Sequence[torch.Generator],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [batch, vocab] and drawn tokens [batch, 1], each row drawn with its own options."""
    # One call for all rows, if they have the same options.
    if all(shared is per_prompt[0] for shared in per_prompt):
        log_probs = sampled_distribution(logits, per_prompt[0])
        return log_probs, draw(log_probs, per_prompt[0], draws)[:, None]
    log_probs, tokens = (
        torch.empty_like(logits),
        torch.empty((len(per_prompt), 1), dtype=torch.int64),
    )
    for shared in dict.fromkeys(per_prompt):
        rows = [row for row, options in enumerate(per_prompt) if options is shared]
        log_probs[rows] = sampled_distribution(logits[rows], shared)
        tokens[rows, 0] = draw(log_probs[rows], shared, [draws[row] for row in rows])
    return log_probs, tokens


def sampled_distribution(
    logits: torch.Tensor, sampling: SamplingOptions
) -> torch.Tensor:
    """Return the log-probs [batch, vocab] that tokens are drawn with: after temperature, then top-k, then top-p.

    Greedy decoding (temperature 0) reports the log-probs at temperature 1, as vLLM
    does.
    """
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        # Ascending, so that the tail of unlikely tokens comes first.
        ordered, places = logits.sort(descending=False)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1.0 - sampling.top_p
        # The likeliest token always stays.
        dropped[:, -1] = False
        logits = logits.masked_fill(dropped.scatter(1, places, dropped), -torch.inf)
    return logits.log_softmax(-1)


def draw(
    log_probs: torch.Tensor, sampling: SamplingOptions, draws: Sequence[torch.Generator]
) -> torch.Tensor:
    """Return tokens [batch]; row i is drawn with its own generator `draws[i]`."""
    if sampling.temperature == 0.0:
        return log_probs.argmax(-1)
    rows = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(log_probs.exp(), draws, strict=True)
    ]
    return torch.cat(rows)
