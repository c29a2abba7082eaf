"""Convert a row's columns and its prompt to token ids, once. Responses are never tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megaverl.data.images import Images, text_of_parts
from megaverl.data.messages import Message, Tools
from megaverl.data.row_values import parse_text, plain_columns, plain_value
from megaverl.data.tool_calls import without_nulls
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.config.run import DataConfig
    from megaverl.data.tokenizers import Tokenizer


TooLong = Literal["error", "drop", "truncate_left"]
# Upper bound of the tokens that a tokenizer adds around a text.
NUM_ADDED_TOKENS = 4
# Further fields that a message may have.
OF_TOOLS = ("tool_calls", "tool_call_id", "name")
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class EncodedPrompt:
    """Prompt as the model sees it: text, token ids, and the number of first tokens that were cut off."""

    text: str
    token_ids: list[int]
    num_truncated: int = 0


@dataclass(frozen=True)
class PromptFormat:
    """Format in which prompts are written.

    Attributes:
        chat_template: `auto`: the tokenizer's chat template if it has one (plain text becomes a user's message).
            `none`: the text as it is.
        system_prompt: precedes every prompt, as the system message with a chat template, else as a separate paragraph.
            A conversation with its own system message keeps that.
        prefix, suffix: text around a text prompt, such as worked examples or an instruction.
        min_tokens: shorter prompts are dropped.
        max_tokens: longest prompt, in tokens. None: no limit.
        too_long: treatment of longer prompts: `error`; `drop` the row; `truncate_left`: keep the last tokens.
    """

    chat_template: Literal["auto", "none"] = "auto"
    system_prompt: str | None = None
    prefix: str = ""
    suffix: str = ""
    min_tokens: int = 0
    max_tokens: int | None = None
    too_long: TooLong = "error"

    @classmethod
    def of(cls, data: DataConfig) -> PromptFormat:
        """Return the format that the section `data` asks for."""
        return cls(
            chat_template=data.chat_template,
            system_prompt=data.system_prompt,
            min_tokens=data.min_prompt_tokens,
            max_tokens=data.max_prompt_tokens,
            too_long=data.too_long,
        )


def check_prompt(
    prompt: Any, where: str, key: str, parts: list[Any]
) -> str | list[Message]:
    """Return the prompt of one row, after checking that it is text or a list of chat messages.

    Args:
        where: the row, for messages.
        key: the column, for messages.
        parts: receives the images in messages' contents. Their text gets a mark for each (`images.text_of_parts`).

    Raises:
        DataError: names the place, the key and what is wrong with it.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(
                f"{where}: {key!r} is empty. Write a prompt, or remove the row."
            )
        return prompt
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: {key!r} is {type(prompt).__name__}; it must be text, or a list of chat messages like "
            '[{"role": "user", "content": "..."}].'
        )
    if not prompt:
        raise DataError(
            f"{where}: {key!r} is an empty list of messages. Write a message, or remove the row."
        )
    messages = [
        _check_message(message, f"{where}: message {n} of {key!r}", parts)
        for n, message in enumerate(prompt, 1)
    ]
    # A conversation that ends with the assistant has its answer in the prompt: the
    # model would continue it.
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message of {key!r} is the assistant's, so there is nothing to answer. "
            "End with a user's message, and put the answer into its own column."
        )
    return messages


def _check_message(message: Any, where: str, parts: list[Any]) -> Message:
    """Return one message, checked."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() | (
        {"content"} if calls else set()
    ):
        raise DataError(
            f'{where} must be like {{"role": "user", "content": "..."}}; found {message!r:.80}.'
        )
    role = message["role"]
    content = message.get("content")
    # OpenAI's format has a null content in messages that only call tools.
    if calls and content is None:
        content = ""
    if role not in ROLES:
        raise DataError(
            f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}."
        )
    if isinstance(content, list):
        content, images = text_of_parts(content, where)
        parts += images
    if not isinstance(content, str):
        raise DataError(
            f"{where} has content of type {type(content).__name__}; it must be text, or a list of parts."
        )
    more = {key: message[key] for key in OF_TOOLS if message.get(key) is not None}
    if isinstance(more.get("tool_calls"), list):
        # Parquet fills every field that any row has with null, and templates write what
        # is not missing.
        more["tool_calls"] = [without_nulls(call) for call in more["tool_calls"]]
    return {"role": role, "content": content, **more}


class PromptEncoder:
    """Converts prompts to token ids in one format.

    Args:
        image_token: token that stands for an image in a prompt, and is repeated for every part of the image. None for a
            model without images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_format: PromptFormat | None = None,
        image_token: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.image_token = image_token
        self.format = prompt_format or PromptFormat()
        self.uses_chat_template = (
            self.format.chat_template == "auto" and tokenizer.chat_template is not None
        )

    def render(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
    ) -> str:
        """Return the text to tokenize.

        Args:
            tools: tools to show to the chat template.

        Raises:
            DataError: there are chat messages or tools but no chat template, or the template refuses them.
        """
        if self.uses_chat_template:
            return self.tokenizer.render_chat(
                self.messages(prompt), where=where, tools=tools
            )
        if tools:
            raise DataError(
                f"{where}: the row has tools, and no chat template writes them (tokenizer {self.tokenizer.source}, "
                f"data.chat_template={self.format.chat_template}). Leave the column out, or use a template."
            )
        if not isinstance(prompt, str):
            if self.format.chat_template == "auto":
                raise DataError(
                    f"{where}: the prompt is a list of chat messages, but the tokenizer "
                    f"{self.tokenizer.source} has no chat template. Give it one (chat_template.jinja in its "
                    "folder), write the prompt as text, or set data.chat_template=none to join the "
                    "messages' texts."
                )
            # Without a template roles cannot be written, so only the texts remain.
            prompt = "\n\n".join(message["content"] for message in prompt)
        system = f"{self.format.system_prompt}\n\n" if self.format.system_prompt else ""
        return f"{system}{self.format.prefix}{prompt}{self.format.suffix}"

    def messages(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Return the prompt as a conversation.

        Text becomes a user's message, after the system prompt if there is one.
        """
        if isinstance(prompt, str):
            messages = [
                {
                    "role": "user",
                    "content": f"{self.format.prefix}{prompt}{self.format.suffix}",
                }
            ]
        else:
            messages = list(prompt)
        # A row's own system message has priority.
        if self.format.system_prompt and messages[0]["role"] != "system":
            messages = [
                {"role": "system", "content": self.format.system_prompt},
                *messages,
            ]
        return messages

    def encode(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
        images: Sequence[SharedItem] = (),
    ) -> EncodedPrompt | None:
        """Return text and token ids of `prompt`, or None if it is too long and such rows are dropped.

        Args:
            images: images written into the prompt, in order.

        Raises:
            DataError: the prompt is too long and that is an error, has no tokens, or has another number of places for
                images; also see `render`.
        """
        text = self.render(prompt, where, tools)
        # A chat template writes the special tokens itself. On plain text the tokenizer
        # adds its own, such as a BOS.
        token_ids = self.tokenizer.encode(
            text, add_special_tokens=not self.uses_chat_template
        )
        if (
            not self.uses_chat_template
            and token_ids
            and token_ids[-1] == self.tokenizer.eos_token_id
        ):
            # Some tokenizers add an end-of-sequence token to every text. A prompt must
            # stay open for the response.
            token_ids = token_ids[:-1]
        if not token_ids:
            raise DataError(
                f"{where}: the prompt {text!r:.60} becomes no tokens at all. Remove the row."
            )
        if self.image_token is not None:
            token_ids = self._expanded(token_ids, images, where)
        limit = self.format.max_tokens
        if limit is None or len(token_ids) <= limit:
            return EncodedPrompt(text, token_ids)
        if self.format.too_long == "drop":
            return None
        if self.format.too_long == "truncate_left" and not images:
            return EncodedPrompt(
                text, token_ids[-limit:], num_truncated=len(token_ids) - limit
            )
        raise DataError(
            f"{where}: the prompt is {len(token_ids)} tokens long, and at most {limit} fit. Raise "
            "data.max_prompt_tokens (as far as the model's context and rollout.sampling.max_tokens leave "
            "room), shorten the row, or set data.too_long to drop or truncate_left."
            + (
                " (One with images is not cut; data.images.processor.max_pixels makes them smaller.)"
                if images
                else ""
            )
        )

    def _expanded(
        self, token_ids: list[int], images: Sequence[SharedItem], where: str
    ) -> list[int]:
        """Repeat the image token for every part of each image."""
        places = token_ids.count(self.image_token)  # type: ignore[arg-type]  # asked for where there is one
        if places != len(images):
            raise DataError(
                f"{where}: the prompt has {len(images)} images, and as the model reads it {places} places for them. "
                "Look at the chat template, and at text that holds the image token itself."
            )
        sizes = iter(image.size for image in images)
        return [
            token
            for token_id in token_ids
            for token in [token_id]
            * (next(sizes) if token_id == self.image_token else 1)
        ]

    def is_short(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
    ) -> bool:
        """Return whether `prompt` has fewer tokens than required. An image counts as one token."""
        if self.format.min_tokens <= 1:
            return False
        text = self.render(prompt, where, tools)
        return (
            len(
                self.tokenizer.encode(
                    text, add_special_tokens=not self.uses_chat_template
                )
            )
            < self.format.min_tokens
        )

    def num_cut(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
        images: Sequence[SharedItem] = (),
    ) -> int | None:
        """Return how many tokens `encode` would cut off, or None if it would drop the prompt. Raises the same errors.

        Only prompts that might be too long are tokenized: no token is shorter than a
        byte. That is much faster.
        """
        limit = self.format.max_tokens
        if self.image_token is None and (
            # A token covers at least one byte, so a text of few bytes fits without
            # being tokenized. Most prompts do.
            limit is None
            or len(self.render(prompt, where, tools).encode()) + NUM_ADDED_TOKENS
            <= limit
        ):
            return 0
        encoded = self.encode(prompt, where, tools, images)
        return None if encoded is None else encoded.num_truncated

    def encode_answer(self, answer: str) -> list[int]:
        """Return the token ids of an answer followed by the end of sequence, as supervised fine-tuning needs them."""
        return [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]


class RowColumns(NamedTuple):
    """Columns of a row: prompt, reference answer, tools, all others for the reward, and images."""

    prompt: str | list[Message]
    reference: Any
    tools: Tools | None
    extra: dict[str, Any]
    # None for a model that takes no images.
    images: Sequence[SharedItem] | None = None


@dataclass(frozen=True)
class Columns:
    """Names of columns. `a.b` refers to a nested field.

    Attributes:
        answer: column of the reference answer. None: there is none.
        tools: column of the tools that the chat template is shown. Rows may lack it.
        default_tools: tools of rows without their own.
        images: reader of a row's images. None for a model without images.
        ignored: columns that are not read.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    tools: str = "tools"
    default_tools: Tools | None = None
    images: Images | None = None
    ignored: tuple[str, ...] = ()

    def read(self, row: Mapping[str, Any], where: str) -> RowColumns:
        """Return the row's columns, checked.

        Raises:
            DataError: a required column is missing or has a wrong type.
        """
        parts: list[Any] = []
        prompt = check_prompt(
            _column(row, self.prompt, where, "data.prompt_key"),
            where,
            self.prompt,
            parts,
        )
        prompt = plain_value(prompt, where, self.prompt)
        reference = None
        if self.answer is not None:
            reference = plain_value(
                _column(row, self.answer, where, "data.answer_key"), where, self.answer
            )
        tools = self.default_tools
        if row.get(self.tools):
            tools = check_tools(row[self.tools], f"{where}: {self.tools!r}")
        read_keys: list[str | None] = [
            self.prompt,
            self.answer,
            self.tools,
            *self.ignored,
        ]
        rest: Mapping[str, Any] = row
        images: list[SharedItem] | None = None
        if self.images is not None:
            key = self.images.config.key
            read_keys.append(key)
            prompt, images = self.images.write_images(
                prompt, parts, value_at(row, key), where
            )
            rest = _without(row, key)
        elif parts:
            raise DataError(
                f"{where}: the prompt has images, and the model takes none (no vision_config there)."
            )
        extra = plain_columns(
            {key: rest[key] for key in rest if key not in read_keys}, where
        )
        return RowColumns(prompt, reference, tools, extra, images)


def check_tools(value: Any, where: str) -> Tools:
    """Return tools as chat templates take them, a list of JSON schemas of functions, from such a list or its JSON text.

    Null fields are removed: Parquet and `datasets` give every tool the fields of all
    the others. Only `default` and `const` of a schema may be null.

    Raises:
        DataError: the value is not a list of tools.
    """
    if isinstance(value, str):
        try:
            value = parse_text(value)
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON ({error}).") from error
    value = _schema_without_nulls(plain_value(value, where, "tools"))
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if (
            not isinstance(value, list)
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise DataError(
                f'{where}: expected a list of tools like {{"type": "function", "function": {{"name": "...", '
                f'"parameters": {{...}}}}}}; found {tool!r:.80}.'
            )
    return list(value)


NULL_IN_SCHEMA = ("default", "const")


def _schema_without_nulls(value: Any, *, of_properties: bool = False) -> Any:
    """Remove null fields of a JSON schema.

    Args:
        of_properties: the keys are names of properties, not words of JSON Schema.
    """
    if isinstance(value, list):
        return [_schema_without_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _schema_without_nulls(
            item, of_properties=key == "properties" and not of_properties
        )
        for key, item in value.items()
        if item is not None or (key in NULL_IN_SCHEMA and not of_properties)
    }


def load_tools(path: str | Path) -> Tools:
    """Read tools from a JSON file (`data.tools`).

    Raises:
        DataError: the file cannot be read, or holds no list of tools.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tools: {path} cannot be read ({error}).") from error
    return check_tools(text, f"data.tools: {path}")


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key`, or of the path `a.b`, or None."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _without(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the row without the value of `key`, or of the path `a.b`."""
    first, _, rest = key.partition(".")
    if key in row:
        return {name: row[name] for name in row if name != key}
    if rest and isinstance(row.get(first), Mapping):
        return {**row, first: _without(row[first], rest)}
    return row


def _column(row: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    """Return the value of `key`, or of the path `a.b`, which must exist and not be null."""
    value = value_at(row, key)
    if value is None and key in row:
        raise DataError(
            f"{where}: {key!r} is null. Fill it in, remove the row, or name another column with {setting}."
        )
    if value is None:
        raise DataError(
            f"{where}: no {key!r} in this row; its keys: {', '.join(map(repr, row)) or 'none'}. "
            f"Add it, or name the right column with {setting}."
        )
    return value
