"""Reward role: every rank scores its share of the responses and receives all scores.

The module also contains reward models that run on transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch, answer_rows
from megaverl.data.batching import blocks_of, rows_of_rank
from megaverl.data.distributed_batch import gather_samples
from megaverl.data.messages import Message
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.distributed.collectives import gather_host_rows, reduce_json, together
from megaverl.errors import ModelError, RewardError
from megaverl.platform import flash_attention, platform
from megaverl.rewards import Reward, RewardSample
from megaverl.rewards.binding import LOG_EXTRA, LOG_METRIC
from megaverl.rewards.service import Service
from megaverl.rewards.trl import TrainerState
from megaverl.rollout.environments import FAILED
from megaverl.user_code import describe, user_code
from megaverl.workers import RemoteWorker


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch.

    Attributes:
        total: [B] float32, the weighted sum. NaN: the sample could not be scored, and is excluded from training and
            metrics.
        components: [B] values of each reward by its name.
        correct: [B] bool.
        logged: sample -> column -> value that a function passed to `log_extra`, for samples that the run may show.
    """

    total: torch.Tensor
    components: dict[str, torch.Tensor]
    correct: torch.Tensor
    logged: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def scored(self) -> torch.Tensor:
        """[B] bool: whether each sample could be scored."""
        return ~self.total.isnan()

    @property
    def known(self) -> Scores:
        """Scores of only the samples that could be scored."""
        return (
            self
            if bool(self.scored.all())
            else self.select(self.scored.nonzero()[:, 0])
        )

    def metric(self, name: str) -> torch.Tensor:
        """Return `accuracy`, `reward` (the total) or a reward by its name, [B]; NaN where it is unknown."""
        total_metrics = {
            "accuracy": self.correct.float().where(self.scored, torch.nan),
            "reward": self.total,
        }
        return total_metrics[name] if name in total_metrics else self.components[name]

    def select(self, rows: Sequence[int] | torch.Tensor) -> Scores:
        """Return the scores of these samples, in this order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        components = {name: values[index] for name, values in self.components.items()}
        logged = {
            new: self.logged[old]
            for new, old in enumerate(index.tolist())
            if old in self.logged
        }
        return Scores(self.total[index], components, self.correct[index], logged)

    @staticmethod
    def concat(parts: Sequence[Scores]) -> Scores:
        """Concatenate the scores of several batches."""
        names = list(parts[0].components)
        logged: dict[int, Mapping[str, Any]] = {}
        first_row = 0
        for part in parts:
            logged |= {first_row + row: columns for row, columns in part.logged.items()}
            first_row += len(part.total)
        return Scores(
            torch.cat([part.total for part in parts]),
            {
                name: torch.cat([part.components[name] for part in parts])
                for name in names
            },
            torch.cat([part.correct for part in parts]),
            logged,
        )


# Component name of the environment's rewards, with weight 1.
ENVIRONMENT = "environment"


class ScoringModel(Protocol):
    """Reward model on Megatron or transformers."""

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """Return [B] float32 scores, identical on every rank. Collective over the role's ranks."""

    def rows(self, lengths: SequenceLengths) -> list[Sequence[int]]:
        """Return the samples that each rank of the role reads."""


@dataclass(frozen=True)
class LearnedReward:
    """Reward model as a term of the weighted sum."""

    name: str
    weight: float
    model: ScoringModel | RemoteWorker


SIDE_BY_SIDE = 16  # concurrent parts of a batch whose services are called
T = TypeVar("T")


class RewardRole:
    """Scores responses by rules and functions, spread over the ranks of `world`, and by models on all of these ranks.

    Args:
        num_shown: number of leading samples that the run records with the values passed to `log_extra`. None: any
            sample may be recorded.
    """

    def __init__(
        self,
        reward: Reward,
        tokenizer: Tokenizer,
        world: dist.ProcessGroup,
        learned: Sequence[LearnedReward] = (),
        num_shown: int | None = 0,
    ) -> None:
        self.num_shown = num_shown
        self.reward, self.tokenizer, self.world, self.learned = (
            reward,
            tokenizer,
            world,
            list(learned),
        )
        # Scores of `score_some`: sample -> [total, correct, *components].
        self._scored: dict[int, list[float]] = {}
        # sample -> values passed to `log_extra`.
        self._logged: dict[int, dict[str, Any]] = {}
        self._failed: RewardError | None = None
        # Calls of services that are under way, for samples scored ahead.
        self._asked: list[Future[None]] = []
        self._threads = (
            ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="reward")
            if self._waits
            else None
        )

    @property
    def _waits(self) -> bool:
        """Return whether scoring can run in threads: it calls services, and only megaverl's own functions.

        A user's function may not be thread-safe.
        """
        functions = [component.function for component in self.reward.components]
        are_built_in = (
            str(component.function.__module__).partition(".")[0] == "megaverl"
            for component in functions
        )
        return any(component.may_fail for component in functions) and all(are_built_in)

    def score_some(
        self, part: RolloutBatch, rows: Sequence[int], num_samples: int
    ) -> None:
        """Score this rank's samples of an incomplete batch, ahead of `score`.

        Errors are kept until `score` raises them on all ranks. Calls of services run in
        background threads.

        Args:
            rows: numbers of the samples of `part` in the whole batch.
            num_samples: number of samples of the whole batch.
        """
        # Ranks divide the samples by number, as `score` does, so that what is scored
        # ahead is what this rank must score.
        rank_rows = rows_of_rank(
            num_samples, dist.get_rank(self.world), dist.get_world_size(self.world)
        )
        places = [place for place, row in enumerate(rows) if row in rank_rows]
        if not places or self._failed is not None:
            return
        if self._threads is not None:
            self._asked.append(
                self._threads.submit(self._score_places, part, rows, places)
            )
        else:
            self._score_places(part, rows, places)
        # Models on transformers score in blocks of samples, and keep incomplete blocks.
        for learned in self.learned:
            if isinstance(learned.model, TransformersRewardModel):
                self._kept(
                    partial(
                        learned.model.score_some,
                        part,
                        {rows[place]: place for place in places},
                        rank_rows,
                    )
                )

    def _score_places(
        self, part: RolloutBatch, rows: Sequence[int], places: Sequence[int]
    ) -> None:
        numbers = [rows[place] for place in places]
        if (
            scored := self._kept(partial(self._columns, part, places, numbers))
        ) is not None:
            self._scored.update(
                {rows[place]: row for place, row in zip(places, scored, strict=True)}
            )

    def _kept(self, score: Callable[[], T]) -> T | None:
        try:
            return score()
        except RewardError as error:
            self._failed = error
            return None

    # The rows may be places of a partial batch, while numbers are those of the step.
    def _columns(
        self, batch: RolloutBatch, rows: Sequence[int], numbers: Sequence[int]
    ) -> list[list[float]]:
        """Return [total, correct, *components] for each of these samples; NaN if its environment failed.

        Args:
            rows: rows of the samples in `batch`.
            numbers: their numbers in the whole batch.
        """
        reasons = batch.columns["finish_reason"]
        played = [place for place, row in enumerate(rows) if reasons[row] != FAILED]
        # It counts neither as right nor as wrong.
        unscored = [math.nan, 0.0, *[math.nan] * len(self.reward.components)]
        columns = [unscored] * len(rows)
        if not played:
            return columns
        scored = self._columns_of_played(
            batch,
            [rows[place] for place in played],
            [numbers[place] for place in played],
        )
        for place, values in zip(played, scored, strict=True):
            columns[place] = values
        return columns

    def _columns_of_played(
        self, batch: RolloutBatch, rows: Sequence[int], numbers: Sequence[int]
    ) -> list[list[float]]:
        output = self.reward.score(self.samples(batch, rows))
        if self._logs_extra:
            logged = zip(numbers, self.reward.take_columns(len(rows)), strict=True)
            self._logged.update(
                {number: columns for number, columns in logged if columns}
            )
        values: list[Sequence[float]] = [
            output.total,
            output.correct,
            *output.components.values(),
        ]
        return [
            [float(column[place]) for column in values] for place in range(len(rows))
        ]

    def _answer_columns(
        self, batch: RolloutBatch, rows: Sequence[int], answers: torch.Tensor | None
    ) -> list[list[float]]:
        """Return `_columns` of the samples, with NaN for conversations that do not end an episode."""
        if answers is None:
            return self._columns(batch, places_in(batch, rows), rows)
        # Only the conversation that ends an episode is scored.
        kept = [row for row in rows if int(answers[row]) == row]
        scored = dict(zip(kept, self._columns(batch, kept, kept), strict=True))
        return [
            scored.get(row, [torch.nan] * (2 + len(self.reward.components)))
            for row in rows
        ]

    def _take_scored(self, rows: Sequence[int]) -> list[list[float]] | None:
        """Return what `score_some` scored if it covers all of `rows`, else None. Reset the early scores.

        Raises:
            RewardError: scoring ahead failed.
        """
        # Waits for the threads and raises what they raised.
        for future in self._asked:
            future.result()
        self._asked.clear()
        # Reset before anything is raised, so that the next step begins without old
        # scores.
        scored, failed, self._scored, self._failed = (
            self._scored,
            self._failed,
            {},
            None,
        )
        if failed is not None:
            raise failed
        return (
            [scored[row] for row in rows]
            if scored and scored.keys() >= set(rows)
            else None
        )

    def score(self, batch: RolloutBatch) -> Scores:
        """Score all samples and return the scores on every rank. Collective over the role's ranks.

        The batch has the columns `prompt`, `reference` and `extra`.

        Raises:
            RewardError: a reward raised or returned a wrong value on some rank, or no sample could be scored. Raised on
                every rank.
        """
        rows = own_rows(batch, self.world)
        # Placeholder for the type checker: `together` raises on every rank if any rank
        # failed.
        scored = torch.empty(0)
        answers = answer_rows(batch) if "episode_ids" in batch else None
        with together(self.world):
            # Early scores are used only if they cover every sample; otherwise all are
            # scored again.
            columns = self._take_scored(rows) or self._answer_columns(
                batch, rows, answers
            )
            scored = torch.tensor(columns, dtype=torch.float32).reshape(
                len(rows), 2 + len(self.reward.components)
            )
        # [samples, 2 + components], completed with all ranks' rows. Collective over the
        # role's ranks.
        table = gather_host_rows(scored, self.world)
        components = {
            component.name: table[:, 2 + i]
            for i, component in enumerate(self.reward.components)
        }
        total, correct = table[:, 0], table[:, 1].bool()
        for learned in self.learned:
            # Scores of all samples.
            components[learned.name] = learned.model.scores(batch)
            total = total + learned.weight * components[learned.name]
        # Without a rule that decides correctness, a positive score of the first reward
        # model counts as correct.
        if self.learned and self.reward.accuracy_component is None:
            correct = components[self.learned[0].name] > 0
        if "turn_rewards" in batch:
            earned = gather_samples(batch, batch.turn_rewards.sum(dim=1))
            earned = (
                # Turns of several conversations belong to the episode, whose reward is
                # at its last conversation.
                earned
                if answers is None
                else torch.zeros_like(earned).index_add(0, answers, earned)
            )
            components[ENVIRONMENT], total = earned, total + earned
            if self.reward.accuracy_component is None and not self.learned:
                correct = earned > 0
        # Single failures of a service are tolerated, but a batch without any reward
        # would train on nothing.
        if len(total) and bool(total.isnan().all()):
            lost = [
                name
                for name, values in components.items()
                if bool(values.isnan().all())
            ]
            raise RewardError(
                f"none of {len(total)} responses could be scored: {', '.join(lost) or 'all rewards'} failed. "
                f"{self._why()}Check that the service or the environment is running, and start the run again."
            )
        # Every conversation of an episode shows the values that were logged for its
        # last one.
        shown = range(len(total)) if answers is None else answers.tolist()
        scores = Scores(
            total,
            components,
            correct,
            self._gather_logged(set(shown[: self.num_shown])),
        )
        return scores.select(shown)

    def logged_metrics(self) -> dict[str, float]:
        """Return means over all ranks of the values logged since the last call. Collective over the role's ranks."""
        if not any(
            component.function.may_take(LOG_METRIC)
            for component in self.reward.components
        ):
            return {}
        return dict(reduce_json(self.reward.take_logged(), _means, self.world))

    def forget_logged(self) -> None:
        """Drop the values passed to `log_metric` during a validation, which do not belong to a step's metrics."""
        self.reward.take_logged()

    @property
    def _logs_extra(self) -> bool:
        return any(
            component.function.may_take(LOG_EXTRA)
            for component in self.reward.components
        )

    def _gather_logged(self, shown: set[int]) -> dict[int, dict[str, Any]]:
        """Return the values passed to `log_extra` for the samples that are shown. Collective over the role."""
        shown_columns = {
            str(row): columns for row, columns in self._logged.items() if row in shown
        }
        # Cleared on every rank, whether or not its samples are shown.
        self._logged.clear()
        if not self._logs_extra:
            return {}
        # Collective over the role's ranks. JSON turns the numbers of samples into text.
        merged = reduce_json(
            shown_columns,
            lambda every: {row: logged[row] for logged in every for row in logged},
            self.world,
        )
        return {int(row): columns for row, columns in merged.items()}

    def begin(self, state: TrainerState) -> None:
        """Pass the training progress to the reward functions."""
        self.reward.begin(state)

    def service_costs(self) -> dict[str, float]:
        """Return the services' costs on all ranks since the last call. Collective over the role's ranks.

        The result is empty if no reward calls a service.
        """
        if not any(component.function.may_fail for component in self.reward.components):
            return {}
        # Each rank has called services for its own samples, so counts are added.
        added = reduce_json(
            Service.spent(),
            lambda reports: {k: sum(r[k] for r in reports) for k in reports[0]},
            self.world,
        )
        return {name: float(count) for name, count in added.items()}

    @staticmethod
    def _why() -> str:
        """Return a sentence with the last failure of a service on this rank, or ""."""
        failures = [
            service.last_failure for service in Service.known() if service.last_failure
        ]
        return f"The last failure: {failures[-1]}. " if failures else ""

    def rows(self, lengths: SequenceLengths) -> list[Sequence[int]]:
        """Return the samples that each rank of the role reads, including those that its models read."""
        size = dist.get_world_size(self.world)
        rank_rows = [
            set(rows_of_rank(len(lengths), rank, size)) for rank in range(size)
        ]
        for learned in self.learned:
            for needed, rows in zip(
                rank_rows, learned.model.rows(lengths), strict=True
            ):
                needed.update(rows)
        return [sorted(numbers) for numbers in rank_rows]

    def weights(self, scores: Scores) -> dict[str, float]:
        """Return the weight of every component in the total."""
        weights = {rule.name: rule.weight for rule in self.reward.components}
        weights |= {model.name: model.weight for model in self.learned}
        return {name: weights.get(name, 1.0) for name in scores.components}

    def samples(self, batch: RolloutBatch, rows: Sequence[int]) -> list[RewardSample]:
        """Return the samples `rows` as reward functions see them."""
        trained_tokens = batch.response_mask.sum(dim=1)
        # `response_mask` excludes an opponent's tokens, so count by length there.
        num_tokens = trained_tokens.where(
            trained_tokens > 0, batch.response_lengths
        ).tolist()
        return [self._sample(batch, row, num_tokens[row]) for row in rows]

    def _sample(self, batch: RolloutBatch, row: int, num_tokens: int) -> RewardSample:
        transcript = self.transcript(batch, row)
        # The last turn is the response of an episode.
        begin, end = (
            (batch.columns["turns"][row] or [(0, 0)])[-1]
            if "turns" in batch.columns
            else (0, None)
        )
        length = int(batch.response_lengths[row])
        return RewardSample(
            prompt=batch.columns["prompt"][row],
            response=self.response(batch, row)
            if "turns" in batch.columns
            else transcript,
            transcript=transcript,
            reference=batch.columns["reference"][row],
            extra=batch.columns["extra"][row],
            num_tokens=num_tokens,
            finish_reason=batch.columns["finish_reason"][row],
            messages=batch.columns["messages"][row]
            if "messages" in batch.columns
            else None,
            is_conversation="is_conversation" in batch.columns
            and bool(batch.columns["is_conversation"][row]),
            token_ids=batch.generated_ids[
                row, begin : length if end is None else end
            ].tolist(),
        )

    def response(self, batch: RolloutBatch, row: int) -> str:
        """Return a response as text without special tokens; for an episode, its last turn."""
        if "turns" not in batch.columns:
            return self.transcript(batch, row)
        begin, end = (batch.columns["turns"][row] or [(0, 0)])[-1]
        return self.tokenizer.decode(batch.generated_ids[row, begin:end].tolist())

    def transcript(self, batch: RolloutBatch, row: int) -> str:
        """Return everything after the prompt as text without special tokens."""
        return self.tokenizer.decode(
            batch.generated_ids[row, : int(batch.response_lengths[row])].tolist()
        )


def _means(logged: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of every metric over all values of all ranks."""
    values_by_name: dict[str, list[float]] = {}
    for metrics in logged:
        for name, values in metrics.items():
            values_by_name.setdefault(f"reward/{name}", []).extend(values)
    return {
        name: sum(values) / len(values)
        for name, values in sorted(values_by_name.items())
    }


# Samples are scored in fixed blocks, so that rounding does not depend on whether they
# were scored ahead.
BLOCK = 8
# Id of the padding token. transformers scores the last token that is not padding, and
# no row is padded here because a forward pass holds rows of one length.
NO_TOKEN = -1


class TransformersRewardModel:
    """Sequence classifier with one label, replicated on every rank. The ranks share the responses.

    With the run's vocabulary and chat template, it reads the token ids of prompt and
    response. Otherwise it reads the conversation in its own chat template or, without
    one, as plain text.

    Args:
        folder: a Hugging Face folder with weights, which keep their dtype.
        tokenizer: the run's tokenizer.
        world: the ranks of the role.
        micro_batch_tokens: token limit of a forward pass, exceeded only by a single longer response.

    Raises:
        ModelError: transformers cannot load the classifier, or it has several labels.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        world: dist.ProcessGroup,
        *,
        micro_batch_tokens: int,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        self.folder, self.world, self.micro_batch_tokens = (
            folder,
            world,
            micro_batch_tokens,
        )
        own_tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        # Token ids can be passed on only if both vocabularies and templates are equal.
        alike = own_tokenizer.backend.get_vocab() == tokenizer.backend.get_vocab()
        alike = alike and own_tokenizer.chat_template in (None, tokenizer.chat_template)
        self._tokenizer = None if alike else own_tokenizer
        self._run_tokenizer = tokenizer

        def not_read(error: BaseException) -> ModelError:
            return ModelError(
                f"{folder}: transformers cannot read it as a sequence classifier: {describe(error)}"
            )

        # Remote model code may raise anything.
        with user_code(not_read, keep=ModelError):
            labels = AutoConfig.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code
            ).num_labels
            if labels != 1:
                raise ModelError(
                    f"{folder}: it has {labels} labels; a reward model has one."
                )
            model = AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype="auto", trust_remote_code=trust_remote_code
            )
        # Set on both configurations, since a multimodal model's text part has its own.
        model.config.get_text_config().pad_token_id = NO_TOKEN
        model.config.pad_token_id = NO_TOKEN
        # sample -> tokens, until its block is complete.
        self._waiting: dict[int, list[int]] = {}
        self._early: dict[int, float] = {}
        self.model: Any = model.to(platform.device).eval().requires_grad_(False)
        flash_attention.use_in(self.model)

    @property
    def reads_text(self) -> bool:
        """Return whether the model tokenizes conversations itself instead of reading the run's token ids."""
        return self._tokenizer is not None

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """Return [B] float32 scores, identical on every rank. Collective over the role's ranks.

        Raises:
            RewardError: a response is too long for the model, or a score is not finite. Raised on every rank.
        """
        rows, early = own_rows(batch, self.world), self._early
        # Taken away before scoring, so that an error leaves no scores of this step
        # behind.
        self._waiting, self._early = {}, {}
        with together(self.world):
            # Scores from ahead count only if they cover all samples of this rank.
            if not early.keys() >= set(rows):
                early = {}
                for block in blocks_of(rows, BLOCK):
                    tokens = [
                        self._tokens(batch, place) for place in places_in(batch, block)
                    ]
                    early |= self._scored(dict(zip(block, tokens, strict=True)))
        return gather_host_rows(
            torch.tensor([early[row] for row in rows], dtype=torch.float32), self.world
        )

    def score_some(
        self, part: RolloutBatch, places: Mapping[int, int], own_places: range
    ) -> None:
        """Score samples of an incomplete batch ahead of `scores`, in the same blocks, each as soon as it is complete.

        Args:
            places: number of a sample -> its row in `part`.
            own_places: numbers of all of this rank's samples.
        """
        self._waiting |= {
            row: self._tokens(part, place) for row, place in places.items()
        }
        # Blocks are those of `scores`, so that rounding does not depend on what was
        # scored ahead.
        for block in blocks_of(own_places, BLOCK):
            if self._waiting.keys() >= set(block):
                self._early |= self._scored(
                    {row: self._waiting.pop(row) for row in block}
                )

    @torch.no_grad()
    def _scored(self, tokens_of: Mapping[int, list[int]]) -> dict[int, float]:
        """Return the scores of samples by their numbers."""
        rows, tokens, scores = (
            list(tokens_of),
            list(tokens_of.values()),
            torch.zeros(len(tokens_of)),
        )
        self._check_lengths(tokens, rows)
        for places in self._micro_batches(tokens):
            # [samples, tokens]: rows of one length need no padding, and no attention
            # mask.
            ids = torch.tensor(
                [tokens[place] for place in places], device=platform.device
            )
            logits = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids)
            ).logits
            scores[places] = logits[:, 0].float().cpu()
        if not scores.isfinite().all():
            place = int((~scores.isfinite()).nonzero()[0, 0])
            raise RewardError(
                f"{self.folder}: the score of response {rows[place]} is {scores[place]}."
            )
        return dict(zip(rows, scores.tolist(), strict=True))

    def rows(self, lengths: SequenceLengths) -> list[Sequence[int]]:
        """Return the samples that each rank of the role reads."""
        size = dist.get_world_size(self.world)
        return [rows_of_rank(len(lengths), rank, size) for rank in range(size)]

    def _tokens(self, batch: RolloutBatch, row: int) -> list[int]:
        prompt = batch.input_ids[row, : int(batch.prompt_lengths[row])].tolist()
        response = batch.generated_ids[row, : int(batch.response_lengths[row])].tolist()
        if self._tokenizer is None:
            return [*prompt, *response]
        messages, answer = (
            self._messages(batch, row, prompt),
            self._run_tokenizer.decode(response),
        )
        if self._tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages) + answer
            return self._tokenizer.encode(text, add_special_tokens=True)
        conversation = [*messages, {"role": "assistant", "content": answer}]
        return self._tokenizer.encode(
            self._tokenizer.render_chat(conversation, where=f"response {row}")
        )

    def _messages(
        self, batch: RolloutBatch, row: int, prompt: list[int]
    ) -> list[Message]:
        """Return the conversation before a response."""
        # The environment may have changed the prompt, so decode it as plain text; see
        # `reads_text`.
        if "turns" in batch.columns:
            return [{"role": "user", "content": self._run_tokenizer.decode(prompt)}]
        if "messages" not in batch.columns:
            raise RewardError(
                f"{self.folder}: it has a tokenizer or chat template of its own, and the batch does not have the "
                "conversations that its prompts were made of. Give them as the column `messages`, a list of chat "
                "messages for each sample, or generate stored rollouts again."
            )
        return list(batch.columns["messages"][row])

    def _check_lengths(
        self, tokens: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> None:
        limit = getattr(
            self.model.config.get_text_config(), "max_position_embeddings", None
        )
        for row, ids in zip(rows, tokens, strict=True):
            if limit is not None and len(ids) > limit:
                raise RewardError(
                    f"{self.folder}: prompt and response {row} have {len(ids)} tokens, and it reads {limit}. Lower "
                    "data.max_prompt_tokens or rollout.sampling.max_tokens."
                )

    def _micro_batches(self, tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield indices of rows of equal length, within the token limit."""
        of_length: dict[int, list[int]] = {}
        for place, ids in enumerate(tokens):
            of_length.setdefault(len(ids), []).append(place)
        for length, places in of_length.items():
            most = max(1, self.micro_batch_tokens // length)
            for start in range(0, len(places), most):
                yield places[start : start + most]


def own_rows(batch: RolloutBatch, world: dist.ProcessGroup) -> range:
    """Return the numbers of the samples that this rank scores. They depend only on the number of samples."""
    count = len(batch) if batch.held is None else len(batch.held.lengths)
    return rows_of_rank(count, dist.get_rank(world), dist.get_world_size(world))


def places_in(batch: RolloutBatch, rows: Sequence[int]) -> Sequence[int]:
    """Return the rows of samples in this rank's batch."""
    return rows if batch.held is None else [batch.held.place[row] for row in rows]
