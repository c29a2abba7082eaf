"""`sentencepiece` models: training a small one, and turning any into a Hugging Face tokenizer.

The conversion is not trusted but checked: on texts made of the model's own pieces, the Hugging Face tokenizer
must give the ids and the text that sentencepiece gives. So there is one way to tokenise, in training, in the
exported folder and for whoever loads that folder with AutoTokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # how sentencepiece writes a space
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # SentencePiece.Type
NOT_MERGED = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    *,
    vocab_size: int = 64,
    model_type: str = "bpe",
    byte_fallback: bool = False,
    symbols: Iterable[str] = (),
) -> Path:
    """Train a sentencepiece model on `texts` and write it to `path` (`.model`); returns the path.

    Ids: 0 padding, 1 unknown, 2 begin, 3 end of sequence, then `symbols` (kept whole wherever they stand),
    bytes if `byte_fallback`, pieces. Digits stay single. Spaces and line ends are kept as they are, nothing
    is normalised, so that decoding gives the text back. The same texts give the same model.

    Args:
        vocab_size: all ids together; fewer are made where the texts do not yield as many.

    Raises:
        DataError: no text, or a vocabulary too small for the characters of the texts.
    """
    import io

    import sentencepiece

    lines = [text for text in texts if text]
    if not lines:
        raise DataError("cannot train a tokenizer: there is no text.")
    written = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": model_type,
        "byte_fallback": byte_fallback,
        "user_defined_symbols": list(symbols),
        "character_coverage": 1.0,
        "split_digits": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "normalization_rule_name": "identity",
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": 2,
        "eos_id": 3,
        "num_threads": 1,
        "minloglevel": 2,
    }

    def train(size: int) -> None:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=written, vocab_size=size, **options
        )

    try:
        train(vocab_size)
    except (RuntimeError, OSError) as error:
        most = re.search(r"set it to a value <= (\d+)", str(error))
        if most is None:
            raise DataError(f"cannot train a tokenizer of {vocab_size} ids: {error}") from error
        train(int(most.group(1)))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written.getvalue())
    return path


def load_sentencepiece(path: str | Path) -> PreTrainedTokenizerFast:
    """The sentencepiece model `path` as a Hugging Face tokenizer with the same ids.

    Raises:
        DataError: no sentencepiece model, or one that a Hugging Face tokenizer cannot reproduce.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from transformers import PreTrainedTokenizerFast

    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: not found. Name a sentencepiece .model file.")
    data = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        if processor.vocab_size() == 0:
            raise ValueError("it has no pieces")
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]
    except Exception as error:  # protobuf and the C++ side raise several unrelated types
        raise DataError(f"{path}: not a sentencepiece model ({error}). Copy the file again from its source.") from error
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise DataError(
            f"{path}: only sentencepiece models of the type unigram or bpe can be used; this one is of type "
            f"{proto.trainer_spec.model_type} (char and word cannot be exported)."
        )
    tokenizer = _to_tokenizers(proto)
    _check_same(tokenizer, processor, proto, path)
    names = {
        f"{role}_token": processor.id_to_piece(number)
        for role, number in _special_ids(processor).items()
        if number >= 0
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def _special_ids(processor: Any) -> dict[str, int]:
    return {
        "pad": processor.pad_id(),
        "unk": processor.unk_id(),
        "bos": processor.bos_id(),
        "eos": processor.eos_id(),
    }


def _to_tokenizers(proto: Any) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    rules, trained = proto.normalizer_spec, proto.trainer_spec
    if trained.model_type == UNIGRAM:
        model: Any = models.Unigram(pieces, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback)
    else:
        vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocab,
            _merges(proto),
            unk_token=pieces[trained.unk_id][0],
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    tokenizer = Tokenizer(model)
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    # The space in front: sentencepiece adds one to the whole text, a normalizer one after every added token,
    # Metaspace one only where the text does not begin with a space.
    scheme = "never"
    if rules.add_dummy_prefix and any(piece.type == USER_DEFINED for piece in proto.pieces):
        scheme = "first"
    elif rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    tail = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece.piece.replace(SPACE, " "), normalized=False, special=False)
            for piece in proto.pieces
            if piece.type == USER_DEFINED
        ]
    )
    special = [AddedToken(piece.piece, normalized=False) for piece in proto.pieces if piece.type == CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a third, best first: BPE joins whichever pair makes the best piece."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type not in NOT_MERGED}
    found = [
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


def _check_same(tokenizer: Tokenizer, processor: Any, proto: Any, path: Path) -> None:
    for text in _sample_texts(proto):
        expected, found = processor.encode(text), tokenizer.encode(text, add_special_tokens=False).ids
        if expected != found:
            raise DataError(
                f"{path}: this sentencepiece model cannot be turned into a Hugging Face tokenizer: "
                f"{text!r:.60} gives {found[:20]} instead of {expected[:20]}. Use the Hugging Face "
                "tokenizer folder of the model instead."
            )
        # sentencepiece writes an unknown piece as a question mark, Hugging Face by its name
        known = processor.unk_id() not in expected
        if known and processor.decode(expected) != tokenizer.decode(found, skip_special_tokens=False):
            raise DataError(
                f"{path}: this sentencepiece model cannot be turned into a Hugging Face tokenizer: "
                f"{text!r:.60} decodes differently. Use the Hugging Face tokenizer folder of the model "
                "instead."
            )


def _sample_texts(proto: Any) -> Iterator[str]:
    """Texts of up to 1,000 of the model's own pieces, in fixed random order, and some it may not know."""
    draw = random.Random(0)
    pieces = [piece.piece.replace(SPACE, " ") for piece in proto.pieces if piece.type not in (UNKNOWN, CONTROL, BYTE)]
    pieces = draw.sample(pieces, min(len(pieces), 1000))
    for start in range(0, len(pieces), 5):
        yield "".join(pieces[start : start + 5])
        yield "a " + " ".join(pieces[start : start + 5])
    yield from (
        "2 + 3 = 5",
        "12345  67",
        "line\nline\n",
        " The quick brown fox",
        "caf\u00e9 \u65e5\u672c \U0001f600",
        "x",
    )
