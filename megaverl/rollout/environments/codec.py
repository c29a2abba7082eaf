"""Between text and token ids, for environments that think in text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TURN = "MEGAVERL-TURN-OF-THE-MODEL"


class TokenizerLike(Protocol):
    """`megaverl.data.tokenizers.Tokenizer`."""

    stop_token_ids: list[int]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[dict[str, str]], *, where: str = "prompt") -> str: ...


class Codec:
    """Encodes what an environment writes, and decodes what the model wrote.

    Args:
        chat: answers are messages of the tokenizer's chat template; else plain text.
    """

    def __init__(self, tokenizer: TokenizerLike, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a turn, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text by itself, with none of the special ones."""
        return self.tokenizer.encode(text)

    def answer(self, text: str, turn: Sequence[int], *, role: str = "user") -> list[int]:
        """The tokens that follow the model's `turn` when `text` answers it, up to where its next turn begins.

        Under a chat template that is all that the template writes between two turns of the assistant, the end of
        the first included if the turn did not come to one.

        Raises:
            DataError: the chat template refuses a message of this role.
        """
        if not self.chat:
            return self.encode(text)
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": TURN},
            {"role": role, "content": text},
        ]
        rendered = self.tokenizer.render_chat(messages, where=f"an environment's answer in the role '{role}'")
        tokens = self.tokenizer.encode(rendered.rpartition(TURN)[2])
        ended = bool(turn) and turn[-1] in self.tokenizer.stop_token_ids
        return tokens[1:] if ended and tokens[:1] and tokens[0] in self.tokenizer.stop_token_ids else tokens
