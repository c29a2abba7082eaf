"""Contracts of each kind of plug-in.

They cover rewards, environments, generating functions, data sources, trackers, losses,
advantage estimators and rollout filters.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaverl.algorithms import advantage_estimators, preference_losses
from megaverl.algorithms.advantages import Advantages
from megaverl.algorithms.loss import LossOutput
from megaverl.algorithms.policy_losses import policy_losses
from megaverl.data.batch import RolloutBatch
from megaverl.data.examine import examine
from megaverl.data.prompts import Columns
from megaverl.data.sources import open_source
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.errors import RewardError
from megaverl.monitoring.backends import Backend, RunInfo, make_backend
from megaverl.plugins import load_function
from megaverl.rewards import RewardFunction, RewardSample, RowNames, build_reward
from megaverl.rewards.binding import missing_columns
from megaverl.rewards.registry import FIRST
from megaverl.rollout.engine import Generation, SamplingOptions
from megaverl.rollout.environments import Outcome, Start, find_environment
from megaverl.rollout.environments.environment import Codec, make_game
from megaverl.trainer.contracts.contract import Broken, Promise
from megaverl.workers.advantage_computer import kept_by
from megaverl.workers.reward import Scores
from megaverl.workers.rollout import generate_by

# Episodes of random turns may never end, so they are cut off after this many turns.
MOST_TURNS = 64
ROW_KEYS = ("prompt_key", "answer_key")
# Include empty, long, non-Latin and unparsable responses, on which reward functions
# fail most often.
RESPONSES = (
    "42",
    "",
    "The answer is 42.",
    "\u4f60\u597d \U0001f600",
    "x" * 5000,
    "no idea",
    "\\boxed{42}",
    "42\n\n42",
)


def reward_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a reward (`reward: [{function: ...}]`).

    Args:
        options: `batched`, `row` (columns of a row other than prompt and answer), `prompt_key` and `answer_key` (names
            of these two columns), and the function's own options.
    """
    function_options = {
        key: value
        for key, value in options.items()
        if key not in ("batched", "row", *ROW_KEYS)
    }
    batched = bool(options.get("batched", False))
    example = options.get("row")
    names = RowNames(
        prompt=str(options.get("prompt_key", "prompt")),
        answer=str(options.get("answer_key", "answer")),
    )
    samples = [
        RewardSample(
            f"Question {i}?",
            response,
            "42",
            {"level": i} if example is None else dict(example),
            num_tokens=len(response),
            finish_reason="stop",
            token_ids=list(range(len(response))),
        )
        for i, response in enumerate(RESPONSES)
    ]

    def score(chosen: Sequence[RewardSample] = samples) -> list[float]:
        reward = build_reward(
            [{"function": name, "options": function_options, "batched": batched}],
            row=names,
        )
        return [float(value) for value in reward.score(list(chosen)).total]

    def bound() -> dict[str, str]:
        """Return a description of the value that each parameter receives."""
        function = RewardFunction(name, load_function(name, "reward.function"), batched)
        if function.takes_samples:
            return {FIRST[batched]: "whole samples (RewardSample)"}
        columns = None if example is None else frozenset(example)
        try:
            binding = function.binding(function_options, replace(names, extra=columns))
        except ValueError as error:
            raise function.unbound(function_options, error) from error
        if example is None and (missing := missing_columns(binding, ["level"])):
            row = ", ".join(f"{column}: ..." for column in missing)
            raise Broken(
                f"it takes the columns {', '.join(missing)}, and their values are not known: give a row of the data, "
                f"row='{{{row}}}'."
            )
        return binding.described(function.function, function_options)

    def finite() -> None:
        wrong = [
            RESPONSES[i][:20]
            for i, value in enumerate(score())
            if not math.isfinite(value)
        ]
        if wrong:
            raise Broken(
                f"not a finite number for the response {wrong[0]!r}: give every response one."
            )

    def independent() -> None:
        # A reward that depends on the rest of the batch would change with the batch
        # size and the number of ranks.
        batched_scores, single_scores = (
            score(),
            [score([sample])[0] for sample in samples],
        )
        if batched_scores != single_scores:
            first = next(
                i
                for i, (a, b) in enumerate(
                    zip(batched_scores, single_scores, strict=True)
                )
                if a != b
            )
            raise Broken(
                f"response {RESPONSES[first][:20]!r} scores {batched_scores[first]} among others and "
                f"{single_scores[first]} alone."
            )

    def same() -> None:
        if score() != score():
            raise Broken(
                "two calls gave different scores: a run could not be repeated. Draw nothing at random."
            )

    try:
        parameters = bound()
    except (Broken, RewardError) as problem:
        # A function with missing parameters cannot be called, so no further promise is
        # tested.
        yield "every parameter has a value", partial(_fail, str(problem))
        return
    for parameter, source in parameters.items():
        yield f"{parameter} gets {source}", lambda: None
    yield "a finite number for every response: empty, long, of any letters", finite
    yield "a response scores alike alone and among others", independent
    yield "the same twice", same


def _fail(problem: str) -> None:
    raise Broken(problem)


def tiny_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer that is trained on generated text in `folder`."""
    from megaverl.data.tasks import make_task

    return load_tokenizer(
        make_task(
            "reverse", num_digits=3, num_train=64, num_held_out=8
        ).train_tokenizer(folder / "tokenizer.model")
    )


def environment_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of an environment or a game (`environment.name`)."""
    scratch = tempfile.TemporaryDirectory()
    tokenizer = tiny_tokenizer(Path(scratch.name))

    def play(seed: int = 0) -> tuple[list[tuple[str, Outcome]], bool]:
        """Play an episode with random turns. Return agents and outcomes, and whether the episode ended."""
        game = make_game(name, Codec(tokenizer, chat=False), options)
        draw = random.Random(seed)
        prompt = tokenizer.encode("reverse 123 =")
        views = game.reset(Start(prompt, "reverse 123 =", "321", {}, seed))
        if set(views) != set(game.agents):
            raise Broken(
                f"reset gives prompts for {sorted(views)}; its agents are {sorted(game.agents)}."
            )
        for agent, tokens in views.items():
            _check_tokens(tokens, tokenizer, f"the prompt of {agent}")
        seen: list[tuple[str, Outcome]] = []
        for _ in range(MOST_TURNS):
            acting = list(game.acting())
            if not acting or set(acting) - set(game.agents):
                raise Broken(
                    f"acting() gave {acting}; expected one or more of {sorted(game.agents)}."
                )
            turns = {
                agent: [draw.randrange(tokenizer.vocab_size) for _ in range(3)]
                + [tokenizer.eos_token_id]
                for agent in acting
            }
            outcomes = game.step(turns)
            for agent, outcome in outcomes.items():
                if not isinstance(outcome, Outcome):
                    raise Broken(
                        f"step gave {type(outcome).__name__} for {agent}; return megaverl.rollout.environments.Outcome."
                    )
                if not math.isfinite(outcome.reward):
                    raise Broken(
                        f"the reward of {agent} is {outcome.reward}; it must be finite."
                    )
                _check_tokens(outcome.token_ids, tokenizer, f"what {agent} reads next")
            seen += outcomes.items()
            if any(outcome.done for outcome in outcomes.values()):
                return seen, True
        return seen, False

    def same() -> None:
        if play(1) != play(1):
            raise Broken(
                "two episodes of one seed and the same turns differ: draw from Start.seed only."
            )

    def kept_open() -> None:
        # This is the last promise, so it removes the temporary folder.
        with scratch:
            play(2)

    # Promises return None. The tuple discards the value of the call.
    yield (
        "a class derived from Environment or Game",
        lambda: (find_environment(name), None)[1],
    )
    yield (
        "prompts, acting agents and outcomes are what they must be",
        lambda: (play(), None)[1],
    )
    yield "the same seed and turns, the same episode", same
    yield "an episode of other turns too", kept_open


def _check_tokens(tokens: Sequence[int], tokenizer: Tokenizer, name: str) -> None:
    wrong = [
        token
        for token in tokens
        if not isinstance(token, int) or not 0 <= token < tokenizer.vocab_size
    ]
    if wrong:
        raise Broken(
            f"{name} holds {wrong[0]!r}, which is no token id: encode text with self.codec."
        )


def generation_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a generating function (`rollout.function`)."""
    prompts = [[1, 2, 3], [4, 5], [1, 2, 3], [6]]
    seeds = [11, 12, 13, 14]

    def engine(
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        seeds: Sequence[int],
    ) -> list[Generation]:
        """Generate random responses that depend only on prompt and seed."""
        if len(prompts) != len(seeds):
            raise Broken(
                f"it asked the engine for {len(prompts)} responses with {len(seeds)} seeds; give one each."
            )
        generations = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            draw = random.Random(f"{list(prompt)} {seed}")
            count = draw.randint(1, sampling.max_tokens)
            tokens = [draw.randrange(50) for _ in range(count)]
            generations.append(
                Generation(tokens, [-draw.random() for _ in tokens], "stop")
            )
        return generations

    def call(chosen: slice = slice(None)) -> list[Generation]:
        return generate_by(
            name, engine, prompts[chosen], SamplingOptions(8), seeds[chosen]
        )

    def bounded() -> None:
        long = [
            len(generation.token_ids)
            for generation in call()
            if len(generation.token_ids) > 8
        ]
        if long:
            raise Broken(f"a response has {long[0]} tokens; sampling.max_tokens is 8.")
        if positive := [
            value
            for generation in call()
            for value in generation.log_probs
            if value > 1e-6
        ]:
            raise Broken(f"a log-probability is {positive[0]}; they are at most 0.")

    def same() -> None:
        if call() != call():
            raise Broken(
                "two calls gave different responses: draw from the seeds only."
            )

    yield (
        "one response for each prompt, a log-probability for each token",
        lambda: (call(), None)[1],
    )
    yield "no longer than asked for, log-probabilities of at most 0", bounded
    yield "the same seeds, the same responses", same


LOOKED_AT = 1000


def data_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a data source (`data.train`).

    Args:
        options: `prompt_key` and `answer_key`, the names of the columns.
    """
    columns = Columns(
        str(options.get("prompt_key", "prompt")),
        str(options.get("answer_key", "answer")) or None,
    )

    def readable() -> None:
        problems = examine(open_source(name), None, columns).errors
        if problems:
            raise Broken(f"{problems[0]} ({len(problems)} rows in all)")

    def same() -> None:
        first, second = open_source(name), open_source(name)
        if first.fingerprint != second.fingerprint or len(first) != len(second):
            raise Broken(
                "opened twice, it is not the same (fingerprint, length): a run could not be resumed."
            )
        for number in range(min(len(first), LOOKED_AT)):
            if first[number] != second[number]:
                raise Broken(f"row {number + 1} differs between two readings.")

    def by_number() -> None:
        rows = open_source(name)
        last = len(rows) - 1
        before = rows[last]
        rows[0]
        if rows[last] != before:
            raise Broken(
                "a row depends on which one was read before: rows are asked for in any order."
            )

    def plain() -> None:
        rows = open_source(name)
        for number in range(min(len(rows), LOOKED_AT)):
            try:
                json.dumps(rows[number])
            except (TypeError, ValueError) as error:
                raise Broken(
                    f"{rows.where(number)}: {error}. Columns are text, numbers, lists and mappings."
                ) from error

    yield "every row has a prompt and an answer", readable
    yield "the same rows each time it is opened", same
    yield "rows by number, in any order", by_number
    yield "plain values", plain


def tracker_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a tracker (`run.log_with`)."""

    def make(folder: str, resume_step: int | None = None) -> Backend:
        return make_backend(
            name, RunInfo(Path(folder), "a-run", "megaverl", {"seed": 1}, resume_step)
        )

    def used(resume: bool = False) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for start in (None, 2) if resume else (None,):
                tracker = make(folder, start)
                for step in (1, 2) if start is None else (3,):
                    tracker.write(
                        step,
                        1.8e9 + step,
                        {"reward/mean": 0.5, "validation/pass@1": 1.0},
                    )
                tracker.close()

    def odd() -> None:
        with tempfile.TemporaryDirectory() as folder:
            tracker = make(folder)
            tracker.write(1, 1.8e9, {"a": math.nan, "b": math.inf})
            tracker.write(2, 1.8e9, {"c": 1.0})
            tracker.write(2, 1.8e9, {"validation/accuracy": 1.0})
            tracker.close()

    yield "it is made, written to and closed", used
    yield "a resumed run", lambda: used(resume=True)
    yield (
        "numbers that are not finite, other metrics later, two records of one step",
        odd,
    )


GROUPS, PER_GROUP, LENGTH = 3, 4, 7
SAMPLES = GROUPS * PER_GROUP


def make_batch(seed: int = 0) -> RolloutBatch:
    """Return 12 responses to 3 prompts, of different lengths, with all fields that a batch may have."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=draw)
    # One response fills the whole width, so that the batch has no unused columns.
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)

    def floats() -> Tensor:
        return torch.randn(SAMPLES, LENGTH, generator=draw)

    log_probs = -floats().abs()
    return RolloutBatch(
        {
            "input_ids": torch.randint(1, 50, (SAMPLES, 3), generator=draw),
            "prompt_lengths": torch.full((SAMPLES,), 3),
            "generated_ids": torch.randint(1, 50, (SAMPLES, LENGTH), generator=draw),
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs + 0.1 * floats(),
            "ref_log_probs": log_probs + 0.3 * floats(),
            "values": floats(),
            "token_rewards": floats() * mask,
            "rewards": torch.randn(SAMPLES, generator=draw),
            "group_ids": torch.arange(GROUPS).repeat_interleave(PER_GROUP),
        },
        {"finish_reason": ["stop"] * SAMPLES},
    )


def loss_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a policy loss (`algorithm.policy_loss`)."""
    batch, draw = make_batch(), torch.Generator().manual_seed(1)
    start = batch.old_log_probs + 0.2 * torch.randn(SAMPLES, LENGTH, generator=draw)
    fields = {
        "old_log_probs": batch.old_log_probs,
        "advantages": torch.randn(SAMPLES, LENGTH, generator=draw),
    }
    fields["weights"] = batch.response_mask / batch.response_mask.sum()

    def inputs_of(log_probs: Tensor) -> dict[str, Tensor]:
        return fields | {"log_probs": log_probs}

    yield from _promises_of_a_loss(
        partial(policy_losses.get(name), **options), inputs_of, start, "tokens"
    )


def preference_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a preference loss (`preference.loss`) of pairs or of single responses."""
    entry, draw = preference_losses.get(name), torch.Generator().manual_seed(1)
    frozen, policy = (
        -4.0 - 5.0 * torch.rand(SAMPLES, 2, generator=draw) for _ in range(2)
    )
    lengths, desirable = (
        torch.randint(1, LENGTH, (SAMPLES, 2), generator=draw),
        torch.arange(SAMPLES) % 3 == 0,
    )
    # One response in each group has weight 0, to test that it has no effect.
    weights = (torch.arange(SAMPLES) % PER_GROUP != 1) / (SAMPLES - GROUPS)

    def inputs_of(log_probs: Tensor) -> dict[str, Tensor]:
        ratios, zeros = log_probs - frozen, torch.zeros(SAMPLES)
        fields = {
            "weights": weights,
            "desirable": desirable,
            "log_probs": log_probs[:, 0],
        }
        fields |= {
            "ref_log_probs": frozen[:, 0],
            "reference_kl": torch.tensor(0.1),
            "reward_shift": torch.tensor(0.1),
            "margin_shifts": zeros,
        }
        for number, side in enumerate(("chosen", "rejected")):
            fields |= {
                f"{side}_log_probs": log_probs[:, number],
                f"ref_{side}_log_probs": frozen[:, number],
            }
            fields |= {
                f"{side}_lengths": lengths[:, number],
                f"{side}_log_ratios": ratios[:, number],
            }
            fields |= {
                f"{side}_matched": -ratios[:, number].detach(),
                f"{side}_alignment": zeros,
            }
        return fields

    def prefers() -> None:
        # Move log-probs toward better responses, and then away from them.
        step = (
            torch.tensor([3.0, -3.0])
            if "desirable" not in entry.inputs
            else 6.0 * desirable.unsqueeze(1) - 3.0
        )
        farther, nearer = (
            float(entry(inputs_of(frozen + sign * step), **options).loss)
            for sign in (1, -1)
        )
        if not farther < nearer:
            raise Broken(
                f"{farther:.6g} where better responses are likelier, {nearer:.6g} where worse ones are: its sign."
            )

    yield from _promises_of_a_loss(
        partial(entry, **options), inputs_of, policy, "responses"
    )
    yield "less where better responses are likelier", prefers


def _promises_of_a_loss(
    loss: Callable[[dict[str, Tensor]], LossOutput],
    inputs_of: Callable[[Tensor], dict[str, Tensor]],
    start: Tensor,
    subject: str,
) -> Iterator[Promise]:
    weights = inputs_of(start)["weights"]

    def call(rows: slice = slice(None), poison: bool = False) -> tuple[Tensor, Tensor]:
        log_probs = start.clone().requires_grad_()
        inputs = {k: v[rows] if v.dim() else v for k, v in inputs_of(log_probs).items()}
        if poison:
            # NaN at weight 0 reveals arithmetic before masking, because 0 * NaN is NaN.
            floats = [
                k
                for k, v in inputs.items()
                if v.is_floating_point() and v.dim() and k != "weights"
            ]
            inputs |= {
                k: inputs[k].masked_fill(weights == 0, torch.nan) for k in floats
            }
        value = loss(inputs).loss
        return value.detach(), torch.autograd.grad(value, log_probs)[0]

    def finite() -> None:
        value, gradient = call()
        if not torch.isfinite(value) or not torch.isfinite(gradient).all():
            raise Broken(
                f"loss {float(value)}, gradient finite: {bool(torch.isfinite(gradient).all())}."
            )
        if not gradient[weights != 0].any():
            raise Broken(f"the gradient is 0 for all {subject}.")

    def masked() -> None:
        if call()[1][weights == 0].any():
            raise Broken(
                f"{subject} of weight 0 have a gradient: multiply by `weights`."
            )

    def unpoisoned() -> None:
        clean, poisoned = call()[0], call(poison=True)[0]
        if not torch.allclose(clean, poisoned):
            raise Broken(
                f"NaN where the weight is 0 changes the loss from {float(clean):.6g} to {float(poisoned):.6g}: select "
                "with torch.where(weights != 0, ..., 0.0) before any arithmetic (policy_losses.tokens_of does)."
            )

    def additive() -> None:
        whole = call()[0]
        # Each group serves as a micro-batch.
        parts = sum(
            call(slice(i, i + PER_GROUP))[0] for i in range(0, SAMPLES, PER_GROUP)
        )
        if not torch.allclose(whole, torch.as_tensor(parts), rtol=1e-4, atol=1e-6):
            raise Broken(
                f"the parts of a batch sum to {float(parts):.6g}, the whole is {float(whole):.6g}: sum weight x loss, "
                "and divide by nothing; the weights hold the global denominator."
            )

    yield "a finite loss with a gradient", finite
    yield f"no gradient for {subject} of weight 0", masked
    yield "NaN where the weight is 0 changes nothing", unpoisoned
    yield "the losses of micro-batches add up to that of the whole batch", additive
    yield "the same twice", lambda: _same(call()[0], call()[0])


def advantage_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of an advantage estimator (`algorithm.advantage`)."""
    batch = make_batch()
    draw = torch.Generator().manual_seed(2)
    extra = {
        "greedy_rewards": torch.randn(SAMPLES, generator=draw),
        "score_norms": torch.rand(SAMPLES, LENGTH, generator=draw),
        "component_rewards": torch.randn(SAMPLES, 2, generator=draw),
        "component_weights": torch.ones(2),
    }

    def call(order: Tensor | None = None, poison: bool = False) -> Advantages:
        inputs = {**batch.tensors, **extra}
        if poison:
            outside = ~batch.response_mask
            inputs = {
                key: value.masked_fill(outside, torch.nan)
                if value.is_floating_point() and value.shape == outside.shape
                else value
                for key, value in inputs.items()
            }
        if order is not None:
            inputs = {
                key: value[order] if len(value) == SAMPLES else value
                for key, value in inputs.items()
            }
        return advantage_estimators.get(name)(inputs, **options)

    def finite() -> None:
        advantages = call().advantages
        if not torch.isfinite(advantages).all():
            raise Broken("some are NaN or infinite.")
        if advantages[~batch.response_mask].any():
            raise Broken(
                "tokens outside response_mask have one: multiply by response_mask."
            )

    def unpoisoned() -> None:
        if not torch.allclose(call().advantages, call(poison=True).advantages):
            raise Broken(
                "NaN outside response_mask changes them: select with torch.where(response_mask, ..., 0.0) first."
            )

    def unordered() -> None:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3))
        if not torch.allclose(
            call().advantages[order], call(order).advantages, atol=1e-5
        ):
            raise Broken(
                "they depend on the order of the samples: use group_ids to see which belong together."
            )

    yield (
        "advantages, and returns if any, of shape [batch, response]",
        lambda: (call(), None)[1],
    )
    yield "finite, and 0 outside the mask", finite
    yield "NaN outside the mask changes nothing", unpoisoned
    yield "the order of the samples changes nothing", unordered
    yield "the same twice", lambda: _same(call().advantages, call().advantages)


def filter_promises(name: str, options: Mapping[str, Any]) -> Iterator[Promise]:
    """Yield the promises of a rollout filter (`algorithm.rollout_filter`)."""
    batch = make_batch()
    scores = Scores(batch.rewards, {"reward": batch.rewards}, batch.rewards > 0)
    before = {key: value.clone() for key, value in batch.tensors.items()}

    def unchanged() -> None:
        kept_by(name, batch, scores)
        if changed := [
            key
            for key, value in before.items()
            if not torch.equal(value, batch.tensors[key])
        ]:
            raise Broken(
                f"it changed {', '.join(changed)}; return what to keep, and change nothing."
            )

    yield (
        "true or false for every sample, and not false for all",
        lambda: (kept_by(name, batch, scores), None)[1],
    )
    yield "the batch stays as it is", unchanged
    yield (
        "the same twice",
        lambda: _same(kept_by(name, batch, scores), kept_by(name, batch, scores)),
    )


def _same(first: Tensor, second: Tensor) -> None:
    if not torch.equal(first, second):
        raise Broken(
            "two calls gave different results: draw nothing at random, or from a seed of the batch."
        )
