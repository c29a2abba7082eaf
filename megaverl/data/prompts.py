"""From a row's columns and its prompt to token ids, once; responses are never tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megaverl.data.images import Images, text_of_parts
from megaverl.data.row_values import parse_text, plain_columns, plain_value
from megaverl.data.tool_calls import without_nulls
from megaverl.distributed.shared_item import SharedItem
from megaverl.errors import DataError

if TYPE_CHECKING:
    from megaverl.config.run import DataConfig
    from megaverl.data.tokenizers import Tokenizer


Message = dict[str, Any]
Tools = list[dict[str, Any]]  # JSON schemas of functions, as chat templates take them
TooLong = Literal["error", "drop", "truncate_left"]
NUM_ADDED_TOKENS = 4  # at most, that a tokenizer itself puts around a text
OF_TOOLS = ("tool_calls", "tool_call_id", "name")  # what a message may have besides
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it: text, token ids, and how many of its first tokens were cut off."""

    text: str
    token_ids: list[int]
    num_truncated: int = 0


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are written.

    Attributes:
        chat_template: `auto`: the tokenizer's chat template where it has one (text becomes a user's message);
            `none`: the text as it stands.
        system_prompt: goes before every prompt, as the system message where there is a chat template, else as
            a paragraph of its own. A conversation that has a system message of its own keeps that.
        prefix, suffix: text around a text prompt, such as worked examples before it or an instruction after
            it.
        min_tokens: a shorter prompt is dropped.
        max_tokens: the longest prompt, in tokens; None: no limit.
        too_long: what is done with a longer one. `error`; `drop` the row; `truncate_left`: keep its last
            tokens.
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
        """As the section `data` wants it."""
        return cls(
            chat_template=data.chat_template,
            system_prompt=data.system_prompt,
            min_tokens=data.min_prompt_tokens,
            max_tokens=data.max_prompt_tokens,
            too_long=data.too_long,
        )


def check_prompt(prompt: Any, where: str, key: str, parts: list[Any]) -> str | list[Message]:
    """The prompt of one row, if it is text or a list of chat messages.

    Args:
        parts: gets the images in messages' contents; in their text is a mark for each (`images.text_of_parts`).

    Raises:
        DataError: names the place, the key and what is wrong with it.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: {key!r} is empty. Write a prompt, or remove the row.")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: {key!r} is {type(prompt).__name__}; it must be text, or a list of chat messages like "
            '[{"role": "user", "content": "..."}].'
        )
    if not prompt:
        raise DataError(f"{where}: {key!r} is an empty list of messages. Write a message, or remove the row.")
    messages = [
        _check_message(message, f"{where}: message {n} of {key!r}", parts) for n, message in enumerate(prompt, 1)
    ]
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message of {key!r} is the assistant's, so there is nothing to answer. "
            "End with a user's message, and put the answer into its own column."
        )
    return messages


def _check_message(message: Any, where: str, parts: list[Any]) -> Message:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() | (
        {"content"} if calls else set()
    ):
        raise DataError(f'{where} must be like {{"role": "user", "content": "..."}}; found {message!r:.80}.')
    role, content = message["role"], message.get("content")
    if calls and content is None:
        content = ""
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}.")
    if isinstance(content, list):
        content, images = text_of_parts(content, where)
        parts += images
    if not isinstance(content, str):
        raise DataError(f"{where} has content of type {type(content).__name__}; it must be text, or a list of parts.")
    more = {key: message[key] for key in OF_TOOLS if message.get(key) is not None}
    if isinstance(more.get("tool_calls"), list):
        more["tool_calls"] = [without_nulls(call) for call in more["tool_calls"]]
    return {"role": role, "content": content, **more}


class PromptEncoder:
    """Turns prompts into token ids, all in one format.

    Args:
        image_token: stands for an image in a prompt, and becomes as many as the image has parts. None: of a model that
            takes none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_format: PromptFormat | None = None, image_token: int | None = None
    ) -> None:
        self.tokenizer, self.image_token = tokenizer, image_token
        self.format = prompt_format or PromptFormat()
        self.uses_chat_template = self.format.chat_template == "auto" and tokenizer.chat_template is not None

    def render(self, prompt: str | Sequence[Message], where: str = "prompt", tools: Tools | None = None) -> str:
        """The text that is tokenised.

        Args:
            tools: shown to the chat template.

        Raises:
            DataError: chat messages or tools, and no chat template to write them with; or a template that refuses
                them.
        """
        if self.uses_chat_template:
            return self.tokenizer.render_chat(self.messages(prompt), where=where, tools=tools)
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
            prompt = "\n\n".join(message["content"] for message in prompt)
        system = f"{self.format.system_prompt}\n\n" if self.format.system_prompt else ""
        return f"{system}{self.format.prefix}{prompt}{self.format.suffix}"

    def messages(self, prompt: str | Sequence[Message]) -> list[Message]:
        """The conversation that `prompt` is: a text is a user's message, after the system prompt if there is one."""
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": f"{self.format.prefix}{prompt}{self.format.suffix}"}]
        else:
            messages = list(prompt)
        if self.format.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.format.system_prompt}, *messages]
        return messages

    def encode(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
        images: Sequence[SharedItem] = (),
    ) -> EncodedPrompt | None:
        """Text and token ids of `prompt`; None if it is too long and such rows are dropped.

        Args:
            images: those that are written into it, in that order.

        Raises:
            DataError: too long, and that is an error; no tokens at all; images that the chat template or the text
                has other places for; see also `render`.
        """
        text = self.render(prompt, where, tools)
        # A chat template writes the special tokens itself; on plain text the tokenizer puts its own (such as
        # a BOS).
        token_ids = self.tokenizer.encode(text, add_special_tokens=not self.uses_chat_template)
        if not self.uses_chat_template and token_ids and token_ids[-1] == self.tokenizer.eos_token_id:
            token_ids = token_ids[:-1]  # some tokenizers end every text; a prompt must stay open
        if not token_ids:
            raise DataError(f"{where}: the prompt {text!r:.60} becomes no tokens at all. Remove the row.")
        if self.image_token is not None:
            token_ids = self._expanded(token_ids, images, where)
        limit = self.format.max_tokens
        if limit is None or len(token_ids) <= limit:
            return EncodedPrompt(text, token_ids)
        if self.format.too_long == "drop":
            return None
        if self.format.too_long == "truncate_left" and not images:
            return EncodedPrompt(text, token_ids[-limit:], num_truncated=len(token_ids) - limit)
        raise DataError(
            f"{where}: the prompt is {len(token_ids)} tokens long, and at most {limit} fit. Raise "
            "data.max_prompt_tokens (as far as the model's context and rollout.sampling.max_tokens leave "
            "room), shorten the row, or set data.too_long to drop or truncate_left."
            + (" (One with images is not cut; data.images.processor.max_pixels makes them smaller.)" if images else "")
        )

    def _expanded(self, token_ids: list[int], images: Sequence[SharedItem], where: str) -> list[int]:
        """With the image token as often as each image has parts."""
        places = token_ids.count(self.image_token)  # type: ignore[arg-type]  # asked for where there is one
        if places != len(images):
            raise DataError(
                f"{where}: the prompt has {len(images)} images, and as the model reads it {places} places for them. "
                "Look at the chat template, and at text that holds the image token itself."
            )
        sizes = iter(image.size for image in images)
        return [token for one in token_ids for token in [one] * (next(sizes) if one == self.image_token else 1)]

    def is_short(self, prompt: str | Sequence[Message], where: str = "prompt", tools: Tools | None = None) -> bool:
        """Whether `prompt` has fewer tokens than a prompt must have; of an image one is counted."""
        if self.format.min_tokens <= 1:
            return False
        text = self.render(prompt, where, tools)
        return len(self.tokenizer.encode(text, add_special_tokens=not self.uses_chat_template)) < self.format.min_tokens

    def num_cut(
        self,
        prompt: str | Sequence[Message],
        where: str = "prompt",
        tools: Tools | None = None,
        images: Sequence[SharedItem] = (),
    ) -> int | None:
        """How many tokens `encode` would cut off `prompt`; None if it would drop it. Raises what it raises.

        Tokenises only what might be too long, since no token is shorter than a byte: much quicker.
        """
        limit = self.format.max_tokens
        if self.image_token is None and (
            limit is None or len(self.render(prompt, where, tools).encode()) + NUM_ADDED_TOKENS <= limit
        ):
            return 0
        encoded = self.encode(prompt, where, tools, images)
        return None if encoded is None else encoded.num_truncated

    def encode_answer(self, answer: str) -> list[int]:
        """Token ids of a written answer, with the end of sequence: the target of supervised fine-tuning."""
        return [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]


class RowColumns(NamedTuple):
    """A row, taken apart: prompt, reference answer, tools, all further columns, for the reward, and its images."""

    prompt: str | list[Message]
    reference: Any
    tools: Tools | None
    extra: dict[str, Any]
    images: Sequence[SharedItem] | None = None  # of a model that takes none


@dataclass(frozen=True)
class Columns:
    """Names of columns; `a.b` reaches into a nested one.

    Attributes:
        answer: None: there is none.
        tools: what the chat template is shown; a row need not have it.
        default_tools: of rows that have none.
        images: reads those of a row. None: of a model that takes none.
        ignored: columns that are not read at all.
    """

    prompt: str = "prompt"
    answer: str | None = "answer"
    tools: str = "tools"
    default_tools: Tools | None = None
    images: Images | None = None
    ignored: tuple[str, ...] = ()

    def read(self, row: Mapping[str, Any], where: str) -> RowColumns:
        """The row's columns, checked.

        Raises:
            DataError: one that must be there is not, or is of a wrong type.
        """
        parts: list[Any] = []
        prompt = check_prompt(_column(row, self.prompt, where, "data.prompt_key"), where, self.prompt, parts)
        prompt = plain_value(prompt, where, self.prompt)
        reference = None
        if self.answer is not None:
            reference = plain_value(_column(row, self.answer, where, "data.answer_key"), where, self.answer)
        tools = self.default_tools
        if row.get(self.tools):
            tools = check_tools(row[self.tools], f"{where}: {self.tools!r}")
        own: list[str | None] = [self.prompt, self.answer, self.tools, *self.ignored]
        rest: Mapping[str, Any] = row
        images: list[SharedItem] | None = None
        if self.images is not None:
            key = self.images.config.key
            own.append(key)
            prompt, images = self.images.of_row(prompt, parts, value_at(row, key), where)
            rest = _without(row, key)
        elif parts:
            raise DataError(f"{where}: the prompt has images, and the model takes none (no vision_config there).")
        extra = plain_columns({key: rest[key] for key in rest if key not in own}, where)
        return RowColumns(prompt, reference, tools, extra, images)


def check_tools(value: Any, where: str) -> Tools:
    """Return tools as chat templates take them, a list of JSON schemas of functions, from such a list or its JSON text.

    A field that is null is left out: Parquet and what `datasets` writes give every tool the fields of all the others.
    Only `default` and `const` of a schema may be null themselves.

    Raises:
        DataError: says what was found.
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
    """Drop fields that are null. of_properties: the keys are names of properties, not words of JSON Schema."""
    if isinstance(value, list):
        return [_schema_without_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _schema_without_nulls(item, of_properties=key == "properties" and not of_properties)
        for key, item in value.items()
        if item is not None or (key in NULL_IN_SCHEMA and not of_properties)
    }


def load_tools(path: str | Path) -> Tools:
    """Read the tools in a JSON file (`data.tools`).

    Raises:
        DataError: it cannot be read, or is not such a list.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tools: {path} cannot be read ({error}).") from error
    return check_tools(text, f"data.tools: {path}")


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of `key`, or of the path `a.b`; None where there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _without(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The row without the value of `key`, or of the path `a.b`."""
    first, _, rest = key.partition(".")
    if key in row:
        return {name: row[name] for name in row if name != key}
    if rest and isinstance(row.get(first), Mapping):
        return {**row, first: _without(row[first], rest)}
    return row


def _column(row: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    """The value of `key` (or of the path `a.b`), which must be there and not null."""
    value = value_at(row, key)
    if value is None and key in row:
        raise DataError(f"{where}: {key!r} is null. Fill it in, remove the row, or name another column with {setting}.")
    if value is None:
        raise DataError(
            f"{where}: no {key!r} in this row; its keys: {', '.join(map(repr, row)) or 'none'}. "
            f"Add it, or name the right column with {setting}."
        )
    return value
