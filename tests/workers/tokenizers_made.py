"""Tokenizers of several kinds, trained on the spot: bytes, sentencepiece with and without its usual habits, words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megaverl.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece

TEXTS = [
    f"What is {a} plus {b}? The sum is {a + b}.\n" for a in range(20) for b in range(20)
]


def of_bytes(
    texts: Sequence[str] = TEXTS,
    size: int = 320,
    *,
    all_bytes: bool = True,
    chat_template: str | None = None,
) -> Tokenizer:
    """Byte-level BPE: a token may end within a character. Of all bytes, or of those of the texts alone."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Fast(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    options = {
        "vocab_size": size,
        "special_tokens": ["<pad>", "<end>"],
        "show_progress": False,
    }
    made.train_from_iterator(
        texts, trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    )
    backend = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>"
    )
    backend.chat_template = chat_template
    return Tokenizer(backend, "bytes")


def of_pieces(folder: Path, texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Sentencepiece, with bytes for characters that it does not know, and all spaces as they are."""
    return load_tokenizer(
        train_sentencepiece(
            texts, folder / "pieces.model", vocab_size=320, byte_fallback=True
        )
    )


def of_usual_pieces(folder: Path, texts: Sequence[str] = TEXTS) -> Tokenizer:
    """Sentencepiece with its own defaults, as Llama 2 has it: a space in front of everything."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "usual"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return load_tokenizer(folder / "usual.model")


def of_words(
    words: Sequence[str] = ("What", "is", "The", "sum", "plus", "7", "11", "a"),
) -> Tokenizer:
    """Whole words between spaces; it knows no others."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(("<unk>", "<end>", *words))}
    made = Fast(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=made, unk_token="<unk>", eos_token="<end>"
        ),
        "words",
    )
