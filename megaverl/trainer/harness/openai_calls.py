"""Calls of OpenAI's API as prompts for an engine, and an engine's results as answers to the calls.

Unlike the gateway (`rollout/environments/gateway.py`), which trains on what it
generates, these calls choose how responses are drawn, and may ask for the log-probs of
their prompts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError
from megaverl.outside import clean, read_number
from megaverl.rollout.engine import PromptScore, SamplingOptions
from megaverl.rollout.environments.conversation import (
    CHAT,
    COMPLETIONS,
    CallRefused,
    assistant_message,
    plain_messages,
)
from megaverl.rollout.sample_seeds import turn_seed
from megaverl.trainer.validation import VALIDATION_STEP

# Fields that do not change what is drawn.
IGNORED = {
    "model",
    "user",
    "metadata",
    "store",
    "parallel_tool_calls",
    "stream_options",
    "reasoning_effort",
}
# Fields that an engine does not implement, with the values that ask for nothing.
UNUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "stream": (None, False),
}
READ = {
    "messages",
    "tools",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "seed",
    "echo",
    "logprobs",
    "top_logprobs",
}
MOST_CHOICES = 128
MOST_STOPS = 64
# Tokens of the first piece of a response with stop strings. Each further piece is twice
# as long as the last.
FIRST_PIECE = 32


@dataclass
class CallChoice:
    """One response of a call: generated, scored, or both.

    Attributes:
        prompt: token ids.
        stops: strings that end the response. They are not part of its text.
        digest: identifies the prompt and the sampling options; seeds depend on it.
        occurrence: number of earlier choices with the same digest.
        is_scored: the log-probs of the prompt are wanted.
        tokens, log_probs: generated so far.
        pieces: number of requests to the engine so far.
        score: log-probs of the prompt, once computed.
        text: text of the response, without stop strings.
        finish_reason: "stop" or "length" once the response is complete; before, "".
    """

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[str, ...] = ()
    digest: str = ""
    occurrence: int = 0
    is_scored: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    pieces: int = 0
    score: PromptScore | None = None
    text: str = ""
    finish_reason: str = ""

    @property
    def needs_tokens(self) -> bool:
        """Return whether the engine is to generate. The score contains the next token of a greedy response."""
        if self.finish_reason:
            return False
        in_score = self.max_tokens == 1 and self.temperature == 0.0
        return self.max_tokens > 0 and not (self.is_scored and in_score)

    @property
    def piece_tokens(self) -> int:
        """Number of tokens to generate next.

        Engines stop at tokens only. A response with stop strings is therefore generated
        in pieces, and its text is searched after each of them.
        """
        left = self.max_tokens - len(self.tokens)
        return min(left, FIRST_PIECE << self.pieces) if self.stops else left

    def seed(self, run_seed: int) -> int:
        """Return the seed of the next piece. It does not depend on the order in which calls arrive."""
        return turn_seed(
            run_seed,
            VALIDATION_STEP,
            self.occurrence,
            self.pieces,
            self.digest,
            "evaluation",
        )

    def add_piece(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        stopped: bool,
        tokenizer: Tokenizer,
    ) -> None:
        """Append generated tokens, and end the response at a stop token, a stop string or `max_tokens`."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.pieces += 1
        self.text = tokenizer.decode(self.tokens)
        ends = [place for stop in self.stops if (place := self.text.find(stop)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
        if ends or stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def add_score(self, score: PromptScore, tokenizer: Tokenizer) -> None:
        """Set the prompt's log-probs, and take the next token from them if that completes the response."""
        self.score = score
        if self.needs_tokens:
            return
        if self.max_tokens:
            token, log_prob = score.top_tokens[-1], score.top_log_probs[-1]
            self.add_piece([token], [log_prob], False, tokenizer)
        self.finish_reason = self.finish_reason or "length"


@dataclass
class OpenCall:
    """A call that waits for its answer.

    Attributes:
        kind: CHAT or COMPLETIONS.
        answer: resolves to the JSON answer, or raises CallRefused.
    """

    kind: str
    body: Mapping[str, Any]
    choices: list[CallChoice]
    answer: Future[dict[str, Any]] = field(default_factory=Future)

    @property
    def is_complete(self) -> bool:
        """Return whether all choices are complete."""
        return all(choice.finish_reason for choice in self.choices)


class CallReader:
    """Reader of calls, and writer of their answers. Any thread may use it.

    Args:
        chat: whether the tokenizer's chat template is to be used (`data.chat_template`).
        sampling: options of the run, used for what a call leaves out.
        most_tokens: most tokens of a prompt and its response together.
        model: name of the model in answers.

    Attributes:
        lock: held while the tokenizer is used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        sampling: SamplingOptions,
        most_tokens: int,
        model: str,
    ) -> None:
        self.tokenizer, self.model, self.most_tokens = tokenizer, model, most_tokens
        self._chat = chat
        self._sampling = sampling
        self._occurrences: Counter[str] = Counter()
        self._token_texts: dict[int, str] = {}
        # Tokenizers in Rust refuse to be used by two threads at once.
        self.lock = threading.Lock()

    def read(self, kind: str, body: Any) -> OpenCall:
        """Return the prompts of a call.

        Raises:
            CallRefused: the call is not of the API, or asks for something that the engine cannot do.
        """
        if not isinstance(body, dict):
            raise CallRefused("a call is a JSON object.")
        for name, value in body.items():
            if value not in UNUSED.get(name, (value,)):
                raise CallRefused(
                    f"{name}={json.dumps(value)[:80]} is not possible here. Leave it out."
                )
            if name not in (*IGNORED, *UNUSED, *READ) and value is not None:
                raise CallRefused(
                    f"there is no {name!r} here. Leave it out, or set it in rollout.sampling."
                )
        with self.lock:
            prompts = (
                [self._chat_prompt(body)]
                if kind == CHAT
                else self._text_prompts(body.get("prompt"))
            )
            return OpenCall(kind, body, self._choices(kind, body, prompts))

    def _chat_prompt(self, body: Mapping[str, Any]) -> list[int]:
        messages = plain_messages(body)
        if not self._chat:
            raise CallRefused(
                "the model's tokenizer has no chat template, or data.chat_template is none. Use a model with one, or "
                "a task of completions."
            )
        try:
            text = self.tokenizer.render_chat(
                messages, where="a call", tools=body.get("tools")
            )
        except DataError as error:
            raise CallRefused(str(error)) from error
        return self.tokenizer.encode(clean(text))

    def _text_prompts(self, prompt: Any) -> list[list[int]]:
        """Return the tokens of a completion's prompt: one or several texts, or one or several lists of tokens."""
        if isinstance(prompt, str) or (prompt and _is_tokens(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise CallRefused(
                "prompt is neither a text, nor a list of tokens, nor a list of these."
            )
        return [self._prompt_tokens(part) for part in prompt]

    def _prompt_tokens(self, part: Any) -> list[int]:
        if isinstance(part, str):
            return self.tokenizer.encode(clean(part), add_special_tokens=True)
        if not _is_tokens(part):
            raise CallRefused("a prompt is neither a text nor a list of tokens.")
        if any(not 0 <= token < self.tokenizer.vocab_size for token in part):
            raise CallRefused(
                f"a token of the prompt is not of the vocabulary, 0 to {self.tokenizer.vocab_size - 1}."
            )
        return list(part)

    def _choices(
        self, kind: str, body: Mapping[str, Any], prompts: Sequence[list[int]]
    ) -> list[CallChoice]:
        fields = _sampling_fields(body)
        wants_log_probs = body.get("logprobs") not in (None, False)
        is_scored = kind == COMPLETIONS and bool(body.get("echo")) and wants_log_probs
        top = body.get("top_logprobs") if kind == CHAT else body.get("logprobs")
        if kind == CHAT and top:
            raise CallRefused("top_logprobs: only the drawn token's log-prob is known.")
        if not isinstance(top, bool) and top is not None and top > 1:
            raise CallRefused(
                "logprobs: only the most likely token and the own one are known; ask for 1."
            )
        stops = body.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
            raise CallRefused(
                f"stop is not a text or a list of at most {MOST_STOPS} texts."
            )
        num_choices = _whole_number(body, "n", 1)
        if not 1 <= num_choices * len(prompts) <= MOST_CHOICES:
            raise CallRefused(f"a call has 1 to {MOST_CHOICES} choices.")
        choices = []
        for prompt in prompts:
            settings = {
                "max_tokens": self._max_tokens(body, prompt),
                "temperature": fields.get("temperature", self._sampling.temperature),
                "top_p": fields.get("top_p", self._sampling.top_p),
                "top_k": fields.get("top_k", self._sampling.top_k),
                "stops": tuple(stop for stop in stops if stop),
            }
            digest = _digest(prompt, settings, body.get("seed"))
            for _ in range(num_choices):
                choices.append(
                    CallChoice(
                        prompt,
                        **settings,
                        digest=digest,
                        occurrence=self._occurrences[digest],
                        is_scored=is_scored,
                        # A call may ask for its own prompt alone.
                        finish_reason=""
                        if settings["max_tokens"] or is_scored
                        else "length",
                    )
                )
                # A task that asks the same several times wants different samples.
                self._occurrences[digest] += 1
        return choices

    def _max_tokens(self, body: Mapping[str, Any], prompt: Sequence[int]) -> int:
        """Return the most tokens of a response.

        Raises:
            CallRefused: the prompt is empty, or prompt and response are too long.
        """
        if not prompt:
            raise CallRefused("the prompt is empty.")
        room = self.most_tokens - len(prompt)
        limits = (
            f"data.max_prompt_tokens + rollout.sampling.max_tokens={self.most_tokens}"
        )
        if room < 1:
            raise CallRefused(
                f"a prompt has {len(prompt)} tokens, and with its response at most {limits} are possible. Raise them."
            )
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        if asked is None:
            return min(room, self._sampling.max_tokens)
        number = _whole_number({"max_tokens": asked}, "max_tokens", 0)
        if number == 0 and not body.get("echo"):
            raise CallRefused("max_tokens=0 needs echo.")
        if number > room:
            raise CallRefused(
                f"a prompt has {len(prompt)} tokens, and its response may have {number}, which is more than {limits}. "
                "Raise them, or let the task ask for fewer tokens."
            )
        return number

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text."""
        with self.lock:
            return self.tokenizer.encode(
                clean(text), add_special_tokens=add_special_tokens
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        with self.lock:
            return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def write(self, call: OpenCall) -> dict[str, Any]:
        """Return the answer to a call whose choices are complete."""
        with self.lock:
            choices = [
                self._chat_choice(call, index, choice)
                if call.kind == CHAT
                else self._text_choice(call, index, choice)
                for index, choice in enumerate(call.choices)
            ]
        num_written = sum(len(choice.tokens) for choice in call.choices)
        num_read = sum(len(choice.prompt) for choice in call.choices)
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": "chat.completion" if call.kind == CHAT else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": num_read,
                "completion_tokens": num_written,
                "total_tokens": num_read + num_written,
            },
        }

    def _chat_choice(
        self, call: OpenCall, index: int, choice: CallChoice
    ) -> dict[str, Any]:
        name = f"{choice.digest[:16]}_{choice.occurrence}"
        message = assistant_message(choice.text, call.body, name)
        reason = "tool_calls" if "tool_calls" in message else choice.finish_reason
        log_probs = None
        if call.body.get("logprobs"):
            content: list[dict[str, Any]] = [
                {
                    "token": self._token_text(token),
                    "logprob": log_prob,
                    "bytes": None,
                    "top_logprobs": [],
                }
                for token, log_prob in self._shown_tokens(choice)
            ]
            log_probs = {"content": content}
        return {
            "index": index,
            "message": message,
            "logprobs": log_probs,
            "finish_reason": reason,
        }

    def _text_choice(
        self, call: OpenCall, index: int, choice: CallChoice
    ) -> dict[str, Any]:
        text = choice.text
        if call.body.get("echo"):
            text = self.tokenizer.decode(choice.prompt) + text
        log_probs = None
        if call.body.get("logprobs") not in (None, False):
            log_probs = self._legacy_log_probs(choice)
        return {
            "index": index,
            "text": text,
            "logprobs": log_probs,
            "finish_reason": choice.finish_reason,
        }

    def _legacy_log_probs(self, choice: CallChoice) -> dict[str, Any]:
        """Return log-probs as the completions API has them: parallel lists over the tokens of the text."""
        tokens: list[str] = []
        log_probs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if (score := choice.score) is not None:
            tokens = [self._token_text(token) for token in choice.prompt]
            # The first token has no predecessor, and so no log-prob.
            log_probs = [None, *score.log_probs]
            tops = [None]
            pairs = zip(score.top_tokens, score.top_log_probs, strict=True)
            for (token, log_prob), (top, top_log_prob) in zip(
                zip(choice.prompt[1:], score.log_probs, strict=True),
                list(pairs)[:-1],
                strict=True,
            ):
                shown = {self._token_text(top): top_log_prob}
                name = self._token_text(token)
                # Different tokens can have the same text, such as parts of a character.
                if token != top and name in shown:
                    name = f"token_id:{token}"
                tops.append({**shown, name: log_prob})
        for token, log_prob in self._shown_tokens(choice):
            tokens.append(self._token_text(token))
            log_probs.append(log_prob)
            tops.append({tokens[-1]: log_prob})
        offsets: list[int] = []
        offset = 0
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": log_probs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _shown_tokens(self, choice: CallChoice) -> list[tuple[int, float]]:
        """Return the generated tokens that the response's text consists of, with their log-probs."""
        count = len(choice.tokens)
        # A stop string has cut the text.
        while count and choice.stops:
            if len(self.tokenizer.decode(choice.tokens[: count - 1])) < len(
                choice.text
            ):
                break
            count -= 1
        return list(zip(choice.tokens[:count], choice.log_probs[:count], strict=True))

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.tokenizer.decode(
                [token], skip_special_tokens=False
            )
        return self._token_texts[token]


def _is_tokens(value: Any) -> bool:
    """Return whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in value
    )


def _sampling_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options that a call sets, in their ranges.

    Raises:
        CallRefused: an option is out of its range.
    """
    fields: dict[str, Any] = {}
    for name, least, most in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("top_k", -1, 2**31),
    ):
        if body.get(name) is None:
            continue
        try:
            number = read_number(body[name])
        except ValueError as error:
            raise CallRefused(f"{name}: {error}.") from error
        if not least <= number <= most or (name == "top_p" and number == 0):
            raise CallRefused(f"{name}={number:g} is not from {least:g} to {most:g}.")
        fields[name] = max(0, int(number)) if name == "top_k" else number
    return fields


def _whole_number(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CallRefused(f"{name}={json.dumps(value)[:80]} is not a whole number.")
    return value


def _digest(prompt: Sequence[int], settings: Mapping[str, Any], seed: Any) -> str:
    text = json.dumps([prompt, settings, seed], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
