"""A reward model as transformers runs it, for classifiers that Megatron-core has no layers for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.data.batch import RolloutBatch
from megaverl.data.batching import rows_of_rank
from megaverl.data.prefix_packing import SequenceLengths
from megaverl.data.prompts import Message
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.distributed.collectives import gather_rows, together
from megaverl.errors import ModelError, RewardError
from megaverl.platform import flash_attention, platform

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
        try:
            labels = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code).num_labels
            if labels != 1:
                raise ModelError(f"{folder}: it has {labels} labels; a reward model has one.")
            model = AutoModelForSequenceClassification.from_pretrained(
                str(folder), dtype="auto", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{folder}: transformers cannot read it as a sequence classifier: {error}") from error
        model.config.get_text_config().pad_token_id = NO_TOKEN
        model.config.pad_token_id = NO_TOKEN
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
        size, rank = dist.get_world_size(self.world), dist.get_rank(self.world)
        rows = rows_of_rank(len(batch), rank, size)
        found = torch.zeros(len(rows))
        with together(self.world), torch.no_grad():
            tokens = [self._tokens(batch, row) for row in rows]
            self._check_lengths(tokens, rows)
            for places in self._micro_batches(tokens):
                ids = torch.tensor([tokens[place] for place in places], device=platform.device)
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
                found[places] = logits[:, 0].float().cpu()
            if not found.isfinite().all():
                row = rows[int((~found.isfinite()).nonzero()[0, 0])]
                raise RewardError(f"{self.folder}: the score of response {row} is {found[row - rows[0]]}.")
        return gather_rows(found.to(platform.device), self.world).cpu()

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

    def _check_lengths(self, tokens: Sequence[Sequence[int]], rows: range) -> None:
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
