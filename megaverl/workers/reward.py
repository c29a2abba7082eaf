"""The reward role: every rank scores its share of the responses; all get all scores. Reward models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.data.batch_fields import answer_rows
from megaverl.data.batching import blocks_of, rows_of_rank
from megaverl.data.held_rows import of_all
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.data.prompts import Message
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.distributed.collectives import gather_host_rows, reduce_json, together
from megaverl.errors import ModelError, RewardError
from megaverl.platform import flash_attention, platform
from megaverl.rewards import Reward, RewardSample
from megaverl.rewards.binding import LOG_EXTRA, LOG_METRIC
from megaverl.rewards.service import Service
from megaverl.rewards.trl import TrainerState
from megaverl.user_code import describe, user_code
from megaverl.workers import RemoteWorker


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch.

    Attributes:
        total: [B] float32, the weighted sum; NaN: the sample could not be scored, and is left out of what is learned
            and measured.
        components: each reward's own [B], by name.
        correct: [B] bool.
        logged: sample -> column -> value that a function gave to `log_extra`, of the samples that the run may show.
    """

    total: torch.Tensor
    components: dict[str, torch.Tensor]
    correct: torch.Tensor
    logged: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def scored(self) -> torch.Tensor:
        """[B] bool: which could be."""
        return ~self.total.isnan()

    @property
    def known(self) -> Scores:
        """Of those samples alone."""
        return self if bool(self.scored.all()) else self.select(self.scored.nonzero()[:, 0])

    def metric(self, name: str) -> torch.Tensor:
        """[B]: `accuracy`, `reward` (the total), or a reward by its name; NaN where that is not known."""
        own = {"accuracy": self.correct.float().where(self.scored, torch.nan), "reward": self.total}
        return own[name] if name in own else self.components[name]

    def select(self, rows: Sequence[int] | torch.Tensor) -> Scores:
        """Of these samples, in this order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        components = {name: values[index] for name, values in self.components.items()}
        logged = {new: self.logged[old] for new, old in enumerate(index.tolist()) if old in self.logged}
        return Scores(self.total[index], components, self.correct[index], logged)

    @staticmethod
    def concat(parts: Sequence[Scores]) -> Scores:
        """Of several batches, one after the other."""
        names = list(parts[0].components)
        logged: dict[int, Mapping[str, Any]] = {}
        first_row = 0
        for part in parts:
            logged |= {first_row + row: columns for row, columns in part.logged.items()}
            first_row += len(part.total)
        return Scores(
            torch.cat([part.total for part in parts]),
            {name: torch.cat([part.components[name] for part in parts]) for name in names},
            torch.cat([part.correct for part in parts]),
            logged,
        )


ENVIRONMENT = "environment"  # the component that an environment's own rewards are, with weight 1


class ScoringModel(Protocol):
    """A reward model, on Megatron or on transformers."""

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """[B] float32, the same on every rank; all ranks take part."""

    def rows(self, outline: SequenceLengths) -> list[Sequence[int]]:
        """The samples that each rank of the role reads."""


@dataclass(frozen=True)
class LearnedReward:
    """A reward model as a term of the sum."""

    name: str
    weight: float
    model: ScoringModel | RemoteWorker


SIDE_BY_SIDE = 16  # parts of a batch of which services are asked at once
T = TypeVar("T")


class RewardRole:
    """Scores responses by rules and functions, spread over the ranks of `world`, and by models on all of them.

    Args:
        num_shown: number of first samples that the run writes down with what functions gave to `log_extra`; None: any
            sample may become one of them.
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
        self.reward, self.tokenizer, self.world, self.learned = reward, tokenizer, world, list(learned)
        self._scored: dict[int, list[float]] = {}  # samples that came early: total, correct, components
        self._logged: dict[int, dict[str, Any]] = {}  # what functions gave to `log_extra`, by number of the sample
        self._failed: RewardError | None = None
        self._asked: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="reward") if self._waits else None

    @property
    def _waits(self) -> bool:
        """Whether services are asked, and none is another's function, which may know one thread alone."""
        functions = [component.function for component in self.reward.components]
        ours = (str(each.function.__module__).partition(".")[0] == "megaverl" for each in functions)
        return any(each.may_fail for each in functions) and all(ours)

    def score_some(self, part: RolloutBatch, rows: Sequence[int], num_samples: int) -> None:
        """Score samples of a batch that is not whole yet, those of them that are this rank's, ahead of `score`.

        An error is kept until all ranks hear of it there. What waits for a service is asked beside what comes next.

        Args:
            rows: their numbers among the `num_samples` of the batch.
        """
        mine = rows_of_rank(num_samples, dist.get_rank(self.world), dist.get_world_size(self.world))
        places = [place for place, row in enumerate(rows) if row in mine]
        if not places or self._failed is not None:
            return
        if self._threads is not None:
            self._asked.append(self._threads.submit(self._score_places, part, rows, places))
        else:
            self._score_places(part, rows, places)
        for each in self.learned:
            if isinstance(each.model, TransformersRewardModel):
                self._kept(partial(each.model.score_some, part, {rows[place]: place for place in places}, mine))

    def _score_places(self, part: RolloutBatch, rows: Sequence[int], places: Sequence[int]) -> None:
        numbers = [rows[place] for place in places]
        if (scored := self._kept(partial(self._columns, part, places, numbers))) is not None:
            self._scored.update({rows[place]: row for place, row in zip(places, scored, strict=True)})

    def _kept(self, score: Callable[[], T]) -> T | None:
        try:
            return score()
        except RewardError as error:
            self._failed = error
            return None

    def _columns(self, batch: RolloutBatch, rows: Sequence[int], numbers: Sequence[int]) -> list[list[float]]:
        """Of each of these samples: total, correct, components.

        Args:
            rows: where the samples stand in `batch`. numbers: those that they have in the whole batch.
        """
        output = self.reward.score(self.samples(batch, rows))
        if self._logs_extra:
            logged = zip(numbers, self.reward.take_columns(len(rows)), strict=True)
            self._logged.update({number: columns for number, columns in logged if columns})
        found: list[Sequence[float]] = [output.total, output.correct, *output.components.values()]
        return [[float(column[number]) for column in found] for number in range(len(rows))]

    def _of_answers(self, batch: RolloutBatch, rows: Sequence[int], answers: torch.Tensor | None) -> list[list[float]]:
        """The same; NaN of conversations that no episode ends with."""
        if answers is None:
            return self._columns(batch, places_in(batch, rows), rows)
        kept = [row for row in rows if int(answers[row]) == row]
        scored = dict(zip(kept, self._columns(batch, kept, kept), strict=True))
        return [scored.get(row, [torch.nan] * (2 + len(self.reward.components))) for row in rows]

    def _take_scored(self, rows: Sequence[int]) -> list[list[float]] | None:
        """What was scored early, if it was all of these."""
        for asked in self._asked:
            asked.result()
        self._asked.clear()
        scored, failed, self._scored, self._failed = self._scored, self._failed, {}, None
        if failed is not None:
            raise failed
        return [scored[row] for row in rows] if scored and scored.keys() >= set(rows) else None

    def score(self, batch: RolloutBatch) -> Scores:
        """Scores of all samples, on every rank. The batch has the columns `prompt`, `reference` and `extra`.

        Raises:
            RewardError: on every rank, when a reward raises or returns the wrong thing on any.
        """
        rows = own_rows(batch, self.world)
        scored = torch.empty(0)
        answers = answer_rows(batch) if "episode_ids" in batch else None
        with together(self.world):
            columns = self._take_scored(rows) or self._of_answers(batch, rows, answers)
            scored = torch.tensor(columns, dtype=torch.float32).reshape(len(rows), 2 + len(self.reward.components))
        table = gather_host_rows(scored, self.world)
        components = {each.name: table[:, 2 + i] for i, each in enumerate(self.reward.components)}
        total, correct = table[:, 0], table[:, 1].bool()
        for each in self.learned:
            components[each.name] = each.model.scores(batch)  # of all samples
            total = total + each.weight * components[each.name]
        if self.learned and self.reward.accuracy_component is None:
            correct = components[self.learned[0].name] > 0
        if "turn_rewards" in batch:
            earned = of_all(batch, batch.turn_rewards.sum(dim=1))
            earned = earned if answers is None else torch.zeros_like(earned).index_add(0, answers, earned)
            components[ENVIRONMENT], total = earned, total + earned
            if self.reward.accuracy_component is None and not self.learned:
                correct = earned > 0
        if len(total) and bool(total.isnan().all()):
            lost = [name for name, values in components.items() if bool(values.isnan().all())]
            raise RewardError(
                f"none of {len(total)} responses could be scored: {', '.join(lost) or 'all rewards'} gave nothing. "
                f"{self._why()}See that the service is there, and start the run again."
            )
        # An episode of several conversations shows what was logged of its answer.
        shown = range(len(total)) if answers is None else answers.tolist()
        scores = Scores(total, components, correct, self._gather_logged(set(shown[: self.num_shown])))
        return scores.select(shown)

    def logged_metrics(self) -> dict[str, float]:
        """Return the means of what functions logged on all ranks since the last call. Collective over the role."""
        if not any(component.function.may_take(LOG_METRIC) for component in self.reward.components):
            return {}
        return dict(reduce_json(self.reward.take_logged(), _means, self.world))

    def forget_logged(self) -> None:
        """Forget what functions gave to `log_metric` in a validation, which is no part of a step's metrics."""
        self.reward.take_logged()

    @property
    def _logs_extra(self) -> bool:
        return any(component.function.may_take(LOG_EXTRA) for component in self.reward.components)

    def _gather_logged(self, shown: set[int]) -> dict[int, dict[str, Any]]:
        """Return what functions gave to `log_extra` of the samples that are shown. Collective over the role."""
        mine = {str(row): columns for row, columns in self._logged.items() if row in shown}
        self._logged.clear()
        if not self._logs_extra:
            return {}
        merged = reduce_json(mine, lambda every: {row: each[row] for each in every for row in each}, self.world)
        return {int(row): columns for row, columns in merged.items()}

    def begin(self, state: TrainerState) -> None:
        """Tell reward functions how far training is."""
        self.reward.begin(state)

    def service_costs(self) -> dict[str, float]:
        """What services were asked by all ranks since the last call; every rank takes part. Empty: nobody asks any."""
        if not any(component.function.may_fail for component in self.reward.components):
            return {}
        added = reduce_json(Service.spent(), lambda each: {k: sum(r[k] for r in each) for k in each[0]}, self.world)
        return {name: float(count) for name, count in added.items()}

    @staticmethod
    def _why() -> str:
        """What services said last, to this rank."""
        said = [service.last_failure for service in Service.known() if service.last_failure]
        return f"The last failure: {said[-1]}. " if said else ""

    def rows(self, outline: SequenceLengths) -> list[Sequence[int]]:
        """Return the samples that each rank of the role reads, those of its models among them."""
        size = dist.get_world_size(self.world)
        found = [set(rows_of_rank(len(outline), rank, size)) for rank in range(size)]
        for each in self.learned:
            for mine, rows in zip(found, each.model.rows(outline), strict=True):
                mine.update(rows)
        return [sorted(mine) for mine in found]

    def weights(self, scores: Scores) -> dict[str, float]:
        """The weight of every component in the total."""
        own = {rule.name: rule.weight for rule in self.reward.components}
        own |= {model.name: model.weight for model in self.learned}
        return {name: own.get(name, 1.0) for name in scores.components}

    def samples(self, batch: RolloutBatch, rows: Sequence[int]) -> list[RewardSample]:
        """What a reward function sees of the samples `rows`."""
        own = batch.response_mask.sum(dim=1)
        num_tokens = own.where(own > 0, batch.response_lengths).tolist()  # an opponent's tokens are not in the mask
        return [self._sample(batch, row, num_tokens[row]) for row in rows]

    def _sample(self, batch: RolloutBatch, row: int, num_tokens: int) -> RewardSample:
        transcript = self.transcript(batch, row)
        begin, end = (batch.columns["turns"][row] or [(0, 0)])[-1] if "turns" in batch.columns else (0, None)
        length = int(batch.response_lengths[row])
        return RewardSample(
            prompt=batch.columns["prompt"][row],
            response=self.response(batch, row) if "turns" in batch.columns else transcript,
            transcript=transcript,
            reference=batch.columns["reference"][row],
            extra=batch.columns["extra"][row],
            num_tokens=num_tokens,
            finish_reason=batch.columns["finish_reason"][row],
            messages=batch.columns["messages"][row] if "messages" in batch.columns else None,
            is_conversation="is_conversation" in batch.columns and bool(batch.columns["is_conversation"][row]),
            token_ids=batch.generated_ids[row, begin : length if end is None else end].tolist(),
        )

    def response(self, batch: RolloutBatch, row: int) -> str:
        """A response as text, without special tokens; of an episode its last turn."""
        if "turns" not in batch.columns:
            return self.transcript(batch, row)
        begin, end = (batch.columns["turns"][row] or [(0, 0)])[-1]
        return self.tokenizer.decode(batch.generated_ids[row, begin:end].tolist())

    def transcript(self, batch: RolloutBatch, row: int) -> str:
        """Everything after the prompt as text, without special tokens."""
        return self.tokenizer.decode(batch.generated_ids[row, : int(batch.response_lengths[row])].tolist())


def _means(logged: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the mean of every metric over all values of all ranks."""
    found: dict[str, list[float]] = {}
    for each in logged:
        for name, values in each.items():
            found.setdefault(f"reward/{name}", []).extend(values)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


BLOCK = 8  # samples that it reads together, whenever they come: they round alike
NO_TOKEN = -1  # as padding: rows of one length have none, and transformers scores the last token that is not padding


class TransformersRewardModel:
    """A sequence classifier with one label, whole on every rank; the ranks share the responses.

    With the run's own vocabulary and chat template it reads the token ids of prompt and response. Else it reads the
    conversation as its own tokenizer writes it: by its own chat template or, if it has none, the texts as they stand.

    Args:
        folder: a Hugging Face folder with its weights, which keep their dtype.
        tokenizer: the run's.
        world: the ranks of the role.
        micro_batch_tokens: most tokens in a forward pass, unless one response has more.

    Raises:
        ModelError: no such classifier, or one with several labels.
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

        self.folder, self.world, self.micro_batch_tokens = folder, world, micro_batch_tokens
        own = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        alike = own.backend.get_vocab() == tokenizer.backend.get_vocab()
        alike = alike and own.chat_template in (None, tokenizer.chat_template)
        self._tokenizer = None if alike else own
        self._run_tokenizer = tokenizer

        def not_read(error: BaseException) -> ModelError:
            return ModelError(f"{folder}: transformers cannot read it as a sequence classifier: {describe(error)}")

        with user_code(not_read, keep=ModelError):  # a model's own code may raise anything
            labels = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code).num_labels
            if labels != 1:
                raise ModelError(f"{folder}: it has {labels} labels; a reward model has one.")
            model = AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype="auto", trust_remote_code=trust_remote_code
            )
        model.config.get_text_config().pad_token_id = NO_TOKEN
        model.config.pad_token_id = NO_TOKEN
        self._waiting: dict[int, list[int]] = {}  # tokens of samples that came early, and their scores
        self._early: dict[int, float] = {}
        self.model: Any = model.to(platform.device).eval().requires_grad_(False)
        flash_attention.use_in(self.model)

    @property
    def reads_text(self) -> bool:
        """Whether it writes conversations itself, and so does without the run's token ids."""
        return self._tokenizer is not None

    def scores(self, batch: RolloutBatch) -> torch.Tensor:
        """[B] float32, the same on every rank.

        Raises:
            RewardError: on every rank: a response too long for it, or a score that is no number.
        """
        rows, early = own_rows(batch, self.world), self._early
        self._waiting, self._early = {}, {}
        with together(self.world):
            if not early.keys() >= set(rows):
                early = {}
                for block in blocks_of(rows, BLOCK):
                    tokens = [self._tokens(batch, place) for place in places_in(batch, block)]
                    early |= self._scored(dict(zip(block, tokens, strict=True)))
        return gather_host_rows(torch.tensor([early[row] for row in rows], dtype=torch.float32), self.world)

    def score_some(self, part: RolloutBatch, places: Mapping[int, int], mine: range) -> None:
        """Ahead of `scores`, samples of a batch that is not whole yet, in the same blocks, as soon as one is.

        Args:
            places: in `part`, by the samples' numbers. mine: all that are this rank's.
        """
        self._waiting |= {row: self._tokens(part, place) for row, place in places.items()}
        for block in blocks_of(mine, BLOCK):
            if self._waiting.keys() >= set(block):
                self._early |= self._scored({row: self._waiting.pop(row) for row in block})

    @torch.no_grad()
    def _scored(self, tokens_of: Mapping[int, list[int]]) -> dict[int, float]:
        """The scores of samples, by their numbers."""
        rows, tokens, found = list(tokens_of), list(tokens_of.values()), torch.zeros(len(tokens_of))
        self._check_lengths(tokens, rows)
        for places in self._micro_batches(tokens):
            ids = torch.tensor([tokens[place] for place in places], device=platform.device)
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            found[places] = logits[:, 0].float().cpu()
        if not found.isfinite().all():
            place = int((~found.isfinite()).nonzero()[0, 0])
            raise RewardError(f"{self.folder}: the score of response {rows[place]} is {found[place]}.")
        return dict(zip(rows, found.tolist(), strict=True))

    def rows(self, outline: SequenceLengths) -> list[Sequence[int]]:
        """The samples that each rank of the role reads."""
        size = dist.get_world_size(self.world)
        return [rows_of_rank(len(outline), rank, size) for rank in range(size)]

    def _tokens(self, batch: RolloutBatch, row: int) -> list[int]:
        prompt = batch.input_ids[row, : int(batch.prompt_lengths[row])].tolist()
        response = batch.generated_ids[row, : int(batch.response_lengths[row])].tolist()
        if self._tokenizer is None:
            return [*prompt, *response]
        messages, answer = self._messages(batch, row, prompt), self._run_tokenizer.decode(response)
        if self._tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages) + answer
            return self._tokenizer.encode(text, add_special_tokens=True)
        conversation = [*messages, {"role": "assistant", "content": answer}]
        return self._tokenizer.encode(self._tokenizer.render_chat(conversation, where=f"response {row}"))

    def _messages(self, batch: RolloutBatch, row: int, prompt: list[int]) -> list[Message]:
        """The conversation before a response."""
        if "turns" in batch.columns:  # plain text, see `reads_text`; the environment may have changed the row's prompt
            return [{"role": "user", "content": self._run_tokenizer.decode(prompt)}]
        if "messages" not in batch.columns:
            raise RewardError(
                f"{self.folder}: it has a tokenizer or chat template of its own, and the batch does not have the "
                "conversations that its prompts were made of. Give them as the column `messages`, a list of chat "
                "messages for each sample, or generate stored rollouts again."
            )
        return list(batch.columns["messages"][row])

    def _check_lengths(self, tokens: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        for row, ids in zip(rows, tokens, strict=True):
            if limit is not None and len(ids) > limit:
                raise RewardError(
                    f"{self.folder}: prompt and response {row} have {len(ids)} tokens, and it reads {limit}. Lower "
                    "data.max_prompt_tokens or rollout.sampling.max_tokens."
                )

    def _micro_batches(self, tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Places of rows of the same length."""
        of_length: dict[int, list[int]] = {}
        for place, ids in enumerate(tokens):
            of_length.setdefault(len(ids), []).append(place)
        for length, places in of_length.items():
            most = max(1, self.micro_batch_tokens // length)
            for start in range(0, len(places), most):
                yield places[start : start + most]


def own_rows(batch: RolloutBatch, world: dist.ProcessGroup) -> range:
    """The numbers of the samples that this rank scores: which it is follows from how many there are."""
    count = len(batch) if batch.held is None else len(batch.held.lengths)
    return rows_of_rank(count, dist.get_rank(world), dist.get_world_size(world))


def places_in(batch: RolloutBatch, rows: Sequence[int]) -> Sequence[int]:
    """Where in this rank's batch samples are."""
    return rows if batch.held is None else [batch.held.place[row] for row in rows]
