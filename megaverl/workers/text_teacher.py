"""Teacher with another tokenizer than the policy's, which scores the text of the policy's responses.

Two tokenizers split a text at different positions. A chunk lies between two
neighbouring positions where both split it; the end of sequence of both is a chunk too.
The log-prob of a chunk is the sum over its tokens. The student's tokens are those that
were sampled, the teacher's are those of its tokenizer for the same text.

    text       Hello world!
    student    Hel | lo | _world!
    teacher    Hello    | _world | !
    chunks     0        | 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megaverl.algorithms.model_rewards import LOWEST
from megaverl.config import Config
from megaverl.config.actor_and_teacher import other_tokenizer_issues
from megaverl.data.batch import RolloutBatch
from megaverl.data.images import COLUMN
from megaverl.data.sequence_lengths import SequenceLengths
from megaverl.data.tokenizers import Tokenizer, check_fits, load_tokenizer
from megaverl.errors import ConfigError, DataError
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.model import TrainingModel
from megaverl.workers.policy import Policy

INSIDE = -1  # end of a token that stops within a character
# Maximum run of tokens that end within characters; after a longer run the search stops.
MOST_INSIDE = 32
# Maximum number of tokens of a character whose last token is missing.
MOST_UNFINISHED = 3
BROKEN = "\N{REPLACEMENT CHARACTER}"  # replaces invalid bytes in decoded text


class TokenTexts:
    """Maps the tokens of a tokenizer to positions in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.added_tokens_decoder
        self.tokenizer = tokenizer
        self.special = {
            *tokenizer.backend.all_special_ids,
            *(number for number in added if added[number].special),
        }
        # Any token before a text makes the tokenizer treat the text as a continuation.
        self._before = tokenizer.encode("a")[-1:]
        self._text_before = self._decode(self._before)
        self._pieces: dict[int, str] = {}

    def text(self, token_ids: Sequence[int], *, follows: bool) -> str:
        """Return the text of tokens.

        Args:
            follows: the tokens follow other text. False: they start the text, where some tokenizers drop a leading
                space.
        """
        if not follows:
            return self._decode(token_ids)
        return self._decode([*self._before, *token_ids]).removeprefix(self._text_before)

    def ends(self, token_ids: Sequence[int], text: str, *, follows: bool) -> list[int]:
        """Return the end of each token in characters of `text`, or `INSIDE` if it ends within a character.

        The list stops early if the ends of the last tokens cannot be determined. Its
        last entry is never `INSIDE`.

        Args:
            text: text of the tokens.
        """
        ends: list[int] = []
        # `start` is the first token of the piece that is not placed yet, `reached` the
        # end of the text before it.
        start = reached = 0
        for number in range(len(token_ids)):
            piece = self._piece(token_ids[start : number + 1], follows or start > 0)
            if text.startswith(piece, reached):
                start, reached = number + 1, reached + len(piece)
                ends.append(reached)
            # The piece ends inside a character. More tokens may complete it.
            elif number - start < MOST_INSIDE:
                ends.append(INSIDE)
            else:
                break
        # Tokens behind the last complete piece have no end.
        return ends[:start]

    def read(self, token_ids: Sequence[int], *, follows: bool) -> tuple[str, list[int]]:
        """Return the text of tokens and their ends.

        It stops at the first special token and at the first bytes that are not valid
        text. Later tokens have no entry.
        """
        first = next(
            (number for number, token in enumerate(token_ids) if token in self.special),
            len(token_ids),
        )
        text = self.text(token_ids[:first], follows=follows)
        ends = self.ends(token_ids[:first], text, follows=follows)
        # Text before the first invalid byte.
        whole = len(text.partition(BROKEN)[0])
        while ends and not 0 <= ends[-1] <= whole:
            ends.pop()
        return text[: ends[-1]] if ends else "", ends

    def write(self, text: str) -> tuple[list[int], list[int]] | None:
        """Return the tokens of a text that follows other text, and their ends.

        Returns:
            None if no tokens reproduce the text exactly, as with a tokenizer that lower-cases it, or if some are
            special.
        """
        encode = self.tokenizer.encode
        line = encode(
            "\n"
            # A newline merges with no letters, and it absorbs the space that some
            # tokenizers put before a text.
        )
        after_line = encode(f"\n{text}")
        candidates = [(encode(text), True), (encode(text.removeprefix(" ")), True)]
        candidates += (
            [(after_line[len(line) :], True)] if after_line[: len(line)] == line else []
        )
        for token_ids, follows in [*candidates, (encode(text), False)]:
            if self.text(
                token_ids, follows=follows
            ) == text and not self.special.intersection(token_ids):
                ends = self.ends(token_ids, text, follows=follows)
                return (token_ids, ends) if len(ends) == len(token_ids) else None
        return None

    def _piece(self, token_ids: Sequence[int], follows: bool) -> str:
        if len(token_ids) > 1 or not follows:
            return self.text(token_ids, follows=follows)
        if (token := token_ids[0]) not in self._pieces:
            self._pieces[token] = self.text(token_ids, follows=True)
        return self._pieces[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        backend = self.tokenizer.backend
        text: str = backend.decode(
            list(token_ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return text


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)


def other_tokenizer(
    config: Config, folder: Path, student: Tokenizer, spec: ModelSpec
) -> Tokenizer | None:
    """Return the tokenizer of the reference, whose files are in `folder`, or None if it shares the model's tokens.

    Tokens are shared if every id in both vocabularies stands for the same token. One
    vocabulary may have additional tokens, such as those of a chat template.

    Raises:
        ConfigError: the tokens differ and the run uses a feature that needs equal tokens.
        DataError: the tokenizer does not fit `spec`.
    """
    path = config.reference.path or config.model.path
    named = config.reference.tokenizer
    if named is None and (
        path == config.model.path
        or not any((folder / name).is_file() for name in TOKENIZER_FILES)
    ):
        return None
    tokenizer = load_tokenizer(
        named or folder, trust_remote_code=config.model.trust_remote_code
    )
    teacher_tokens = {
        number: token for token, number in tokenizer.backend.get_vocab().items()
    }
    if all(
        teacher_tokens.get(number, token) == token
        for token, number in student.backend.get_vocab().items()
    ):
        return None
    if mistakes := list(other_tokenizer_issues(config)):
        lines = [f"  - {mistake}" for mistake in mistakes]
        raise ConfigError(
            "\n".join(
                [
                    f"reference.path: {path} has other tokens than {student.source}:",
                    *lines,
                ]
            )
        )
    check_fits(tokenizer, spec.vocab_size, model=path)
    return tokenizer


def chunks_of(
    ends: Sequence[int], other_ends: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the chunk index of each token, for two tokenizations of one text given by their tokens' ends."""
    # A chunk ends where both tokenizations have an end.
    cuts = sorted({*ends} & {*other_ends} - {INSIDE})

    def numbers(of: Sequence[int]) -> list[int]:
        # From the back, so that tokens inside a character take the end of the next one.
        chunk_numbers: list[int] = []
        reached = cuts[-1] if cuts else 0
        for end in reversed(of):
            reached = reached if end == INSIDE else end
            chunk_numbers.append(bisect_left(cuts, reached))
        return chunk_numbers[::-1]

    return numbers(ends), numbers(other_ends)


def compared(
    log_probs: torch.Tensor,
    teacher: torch.Tensor,
    chunks: Sequence[int],
    teacher_chunks: Sequence[int],
) -> torch.Tensor:
    """Return each token's log-prob plus the log-ratio of teacher to student on its whole chunk, [n] float64.

    The advantage (`algorithms.distillation`) is then log teacher(chunk) - log student(chunk) for every token of the
    chunk, because log student(chunk) is the sum of its tokens' log-probs. That is the score-function gradient of
    KL(student || teacher) over chunks. For a token that is a chunk in both tokenizations, the result is the teacher's
    log-prob.

    Args:
        log_probs: [n], the student's.
        teacher: [m], the teacher's.
        chunks: chunk index of each student token.
        teacher_chunks: chunk index of each teacher token. Every chunk has tokens of both.
    """
    index, teacher_index = (
        torch.tensor(list(numbers), dtype=torch.int64)
        for numbers in (chunks, teacher_chunks)
    )
    # [2, chunks] float64 sums of log-probs: the student's, then the teacher's.
    sums = torch.zeros(
        2, int(index.max()) + 1 if len(index) else 0, dtype=torch.float64
    )
    sums[0].index_add_(0, index, log_probs.double())
    sums[1].index_add_(0, teacher_index, teacher.double())
    return log_probs.double() + (sums[1] - sums[0])[index]


class ReadText(NamedTuple):
    """A sample as the teacher reads it.

    Attributes:
        prompt: the teacher's tokens of the prompt.
        response: the teacher's tokens of the response.
        chunks: chunk index of the student's first tokens. The teacher does not score later ones.
        own_chunks: chunk index of the teacher's tokens.
        then_impossible: the first student token after `chunks` belongs to no text, and is scored as impossible.
    """

    prompt: list[int]
    response: list[int]
    chunks: list[int]
    own_chunks: list[int]
    then_impossible: bool = False


class TextTeacher(Policy):
    """Reference model with its own tokenizer.

    It reads the conversation in its own chat template, or the text of the prompt,
    followed by the text of the response.

    Args:
        student: the run's tokenizer.
        tokenizer: this model's tokenizer.
        chat: render conversations with chat templates, if the tokenizers have them.
    """

    def __init__(
        self,
        model: TrainingModel,
        student: Tokenizer,
        tokenizer: Tokenizer,
        *,
        temperature: float,
        micro_batch_tokens: int,
        chat: bool,
    ) -> None:
        super().__init__(
            model, temperature=temperature, micro_batch_tokens=micro_batch_tokens
        )
        self._student, self._own = TokenTexts(student), TokenTexts(tokenizer)
        self._student_chats = chat and student.chat_template is not None
        self._chats = chat and tokenizer.chat_template is not None
        self._counts: dict[str, float] = {}

    def rows(self, lengths: SequenceLengths) -> list[Sequence[int]]:
        """Return all samples for every rank.

        The micro-batches depend on the teacher's token counts, which are known only
        from the texts.
        """
        return [range(len(lengths))] * self.model.grid.shape.world_size

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """Return the log-probs of `compared`, [B, R] float32 in host memory, identical on every rank.

        Tokens without a counterpart get NaN. A token that belongs to no text, because
        it is special or has invalid bytes, gets `LOWEST`, and the tokens after it NaN.
        Without this penalty the student would learn to produce such tokens to avoid
        being scored.

        Args:
            batch: has the columns `messages` and `prompt`.

        Raises:
            DataError: a column is missing, or prompts have images.
        """
        if any(batch.columns.get(COLUMN) or ()):
            raise DataError(
                "reference.tokenizer: the teacher reads only text, and the prompts have images."
            )
        if missing := {"messages", "prompt"} - batch.columns.keys():
            raise DataError(
                "reference.tokenizer: the teacher formats the conversations with its own chat template, and the "
                "batch has "
                f"no column {' and no '.join(sorted(missing))}. Add them, or generate stored rollouts again."
            )
        # The texts decide lengths and micro-batches, so all of them are read before the
        # forward pass.
        read = [self._read(batch, row) for row in range(len(batch))]
        teacher_log_probs = super().log_probs(self._batch(batch, read)).cpu()
        # NaN: tokens without a counterpart.
        result = torch.full_like(batch.rollout_log_probs, torch.nan)
        for row, text in enumerate(read):
            student_log_probs = batch.rollout_log_probs[row, : len(text.chunks)]
            estimates = compared(
                student_log_probs,
                teacher_log_probs[row, : len(text.response)],
                text.chunks,
                text.own_chunks,
            )
            result[row, : len(text.chunks)] = estimates.to(result.dtype)
            result[row, len(text.chunks) : len(text.chunks) + text.then_impossible] = (
                LOWEST
            )
            self._count(
                student_log_probs,
                teacher_log_probs[row, : len(text.response)],
                text,
                int(batch.response_lengths[row]),
            )
        # Padding must be finite, because NaN marks tokens that the teacher could not
        # read.
        beyond = torch.arange(result.shape[1]) >= batch.response_lengths.unsqueeze(1)
        return result.masked_fill(beyond, 0.0)

    def report(self) -> dict[str, float]:
        """Return metrics of the comparisons since the last call.

        `kl_per_token` is log student - log teacher per student token (nats),
        `tokens_per_chunk` the student tokens per chunk, and `compared_fraction` the
        compared share of all tokens. `impossible_samples` counts samples with a token
        that belongs to no text, `unread_samples` those without any scored token.

        Raises:
            DataError: no sample could be scored.
        """
        counts, self._counts = self._counts, {}
        if not counts:
            return {}
        if counts["unread"] == counts["samples"]:
            raise DataError(
                f"reference.tokenizer: the teacher can read none of the {counts['samples']:.0f} responses: its "
                f"tokenizer ({self._own.tokenizer.source}) cannot encode the text of the model's tokenizer "
                f"({self._student.tokenizer.source}), or its context of {self.model.spec.max_positions} tokens is too "
                "short. Use another teacher."
            )
        return {
            "kl_per_token": counts["gap"] / max(1, counts["compared"]),
            "tokens_per_chunk": counts["compared"] / max(1, counts["chunks"]),
            "compared_fraction": counts["compared"] / counts["tokens"],
            "impossible_samples": counts["impossible"],
            "unread_samples": counts["unread"],
        }

    def _count(
        self,
        student_log_probs: torch.Tensor,
        teacher_log_probs: torch.Tensor,
        text: ReadText,
        length: int,
    ) -> None:
        gap = float(student_log_probs.double().sum() - teacher_log_probs.double().sum())
        counts = {
            "gap": gap,
            "compared": len(text.chunks),
            "chunks": len({*text.chunks}),
            "tokens": length,
        }
        judged = bool(text.chunks) or text.then_impossible
        counts |= {
            "samples": 1,
            "impossible": text.then_impossible,
            "unread": not judged,
        }
        for name, value in counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + value

    def _read(self, batch: RolloutBatch, row: int) -> ReadText:
        tokenizer = self._own.tokenizer
        prompt, empty_text = (
            self._prompt(batch, row),
            ReadText([tokenizer.eos_token_id], [], [], []),
        )
        response = batch.generated_ids[row, : int(batch.response_lengths[row])].tolist()
        # A stop token is compared with the teacher's own end of sequence.
        ended = (
            bool(response) and response[-1] in self._student.tokenizer.stop_token_ids
        )
        spoken = response[:-1] if ended else response
        # After a chat template, an answer starts without the leading space that some
        # tokenizers add to a text.
        text, ends = self._student.read(spoken, follows=not self._student_chats)
        written = self._own.write(text) if text else ([], [])
        if written is None or not prompt:
            return empty_text
        token_ids, own_ends = written
        chunks, own_chunks = chunks_of(ends if token_ids else [], own_ends)
        # Both sequences end: their ends form a last chunk.
        if ended and len(chunks) == len(spoken):
            token_ids, last = (
                [*token_ids, tokenizer.eos_token_id],
                max(chunks, default=-1) + 1,
            )
            chunks, own_chunks = [*chunks, last], [*own_chunks, last]
        rest = spoken[len(chunks) :]
        # A character that the length limit cut off is not impossible.
        impossible = bool(rest) and (
            rest[0] in self._student.special or ended or len(rest) > MOST_UNFINISHED
        )
        # A longer context than the teacher's is not read at all.
        fits = len(prompt) + len(token_ids) <= self.model.spec.max_positions
        return (
            ReadText(prompt, token_ids, chunks, own_chunks, impossible)
            if fits
            else empty_text
        )

    def _prompt(self, batch: RolloutBatch, row: int) -> list[int]:
        """Return the teacher's tokens of everything before a response."""
        messages, tokenizer = batch.columns["messages"][row], self._own.tokenizer
        if self._chats:
            return tokenizer.encode(
                tokenizer.render_chat(
                    messages, where=f"reference.tokenizer: sample {row}"
                )
            )
        texts = (
            [message["content"] for message in messages]
            if self._student_chats
            else [batch.columns["prompt"][row]]
        )
        token_ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=True)
        # Some tokenizers append an end-of-sequence token, which must not end the
        # prompt.
        return (
            token_ids[:-1] if token_ids[-1:] == [tokenizer.eos_token_id] else token_ids
        )

    def _batch(self, batch: RolloutBatch, read: Sequence[ReadText]) -> RolloutBatch:
        """Return the batch in the teacher's tokens."""

        def rows(of: Sequence[Sequence[int]]) -> torch.Tensor:
            # At least one column, because a model cannot read rows without tokens.
            width = max([1, *map(len, of)])
            return torch.tensor(
                [[*tokens, *[0] * (width - len(tokens))] for tokens in of],
                dtype=torch.int64,
            )

        lengths = torch.tensor([len(text.response) for text in read])
        generated = rows([text.response for text in read])
        tensors = {
            "input_ids": rows([text.prompt for text in read]),
            "prompt_lengths": torch.tensor([len(text.prompt) for text in read]),
            "generated_ids": generated,
            "response_lengths": lengths,
            "response_mask": torch.arange(generated.shape[1]) < lengths.unsqueeze(1),
        }
        # Temperatures apply to the teacher's tokens. A cut to the most likely tokens of
        # another vocabulary does not.
        if "temperatures" in batch:
            tensors |= {
                "temperatures": batch["temperatures"],
                "top_ks": torch.zeros_like(batch["top_ks"]),
            }
        return RolloutBatch(tensors)


def reference_policy(
    config: Config, model: TrainingModel, folder: Path, student: Tokenizer
) -> Policy:
    """Build the reference of a run from its model, whose files are in `folder`. See `other_tokenizer`.

    Raises:
        ConfigError: see `other_tokenizer`.
        DataError: see `other_tokenizer`.
    """
    own_tokenizer = other_tokenizer(config, folder, student, model.spec)
    cap, temperature = (
        config.reference.micro_batch_tokens,
        float(config.rollout.sampling.get("temperature", 1.0)),
    )
    if own_tokenizer is None:
        return Policy(model, temperature=temperature, micro_batch_tokens=cap)
    chat = config.data.chat_template == "auto"
    return TextTeacher(
        model,
        student,
        own_tokenizer,
        temperature=temperature,
        micro_batch_tokens=cap,
        chat=chat,
    )
