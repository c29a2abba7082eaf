"""Tokenizers: one small class for Hugging Face folders and sentencepiece `.model` files, and training of small models.

A sentencepiece model is converted to a Hugging Face tokenizer. The conversion is
verified: on texts made of the model's own pieces, both must give the same ids and
texts. So training, the exported folder and AutoTokenizer tokenize alike.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.data.time_limit import time_limit
from megaverl.data.tool_calls import tool_arguments, with_arguments
from megaverl.errors import DataError
from megaverl.outside import check_sizes, read_json_file
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


# Character that sentencepiece uses for a space.
SPACE = "\u2581"
# Values of `SentencePiece.Type`.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
NOT_MERGED = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
# Values of `TrainerSpec.ModelType`.
UNIGRAM = 1
BPE = 2

# Suffixes of files that tokenizer classes read.
TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
# A chat template is a third-party program and may loop forever.
MAX_TEMPLATE_SECONDS = 20.0


def train_sentencepiece(
    texts: Iterable[str],
    path: str | Path,
    *,
    vocab_size: int = 64,
    model_type: str = "bpe",
    byte_fallback: bool = False,
    symbols: Iterable[str] = (),
) -> Path:
    """Train a sentencepiece model on `texts`, write it to `path` (`.model`), and return the path.

    Ids: 0 padding, 1 unknown, 2 begin, 3 end of sequence, then `symbols` (never split),
    bytes if `byte_fallback`, and pieces. Digits are single tokens. Spaces and line ends
    are kept and nothing is normalized, so decoding restores the text. Equal texts give
    equal models.

    Args:
        vocab_size: total number of ids. Fewer are created if the texts do not yield as many.

    Raises:
        DataError: there is no text, or the vocabulary is too small for the characters of the texts.
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
        "user_defined_symbols": [symbol.replace(" ", SPACE) for symbol in symbols],
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
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=size,
            **options,
        )

    try:
        train(vocab_size)
    except (RuntimeError, OSError) as error:
        # A small text has fewer pieces than were asked for, and sentencepiece names the
        # largest number that is possible.
        most = re.search(r"set it to a value <= (\d+)", str(error))
        if most is None:
            raise DataError(
                f"cannot train a tokenizer of {vocab_size} ids: {error}"
            ) from error
        train(int(most.group(1)))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written.getvalue())
    return path


def load_sentencepiece(path: str | Path) -> PreTrainedTokenizerFast:
    """Load a sentencepiece model as a Hugging Face tokenizer with the same ids.

    Raises:
        DataError: the file is no sentencepiece model, or one that a Hugging Face tokenizer cannot reproduce.
    """
    import sentencepiece
    from transformers import PreTrainedTokenizerFast

    path = Path(path)
    try:
        from sentencepiece import sentencepiece_model_pb2
    # protobuf's VersionError derives from Exception directly.
    except Exception as error:
        raise DataError(
            f"{path}: sentencepiece {sentencepiece.__version__} is not compatible with the installed protobuf "
            f"({error}). Run: pip install --upgrade protobuf, and upgrade the package that required the old version, "
            "such as mlflow before 3.11."
        ) from error
    if not path.is_file():
        raise DataError(f"{path}: not found. Name a sentencepiece .model file.")
    _check_sizes([path])
    data = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        if processor.vocab_size() == 0:
            raise ValueError("it has no pieces")
        proto = sentencepiece_model_pb2.ModelProto.FromString(data)  # type: ignore[attr-defined]
    # protobuf and the C++ library raise several unrelated types.
    except Exception as error:
        raise DataError(
            f"{path}: not a sentencepiece model ({error}). Copy the file again from its source."
        ) from error
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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )


def _special_ids(processor: Any) -> dict[str, int]:
    """Return the ids of special tokens by role; negative if the model has none."""
    return {
        "pad": processor.pad_id(),
        "unk": processor.unk_id(),
        "bos": processor.bos_id(),
        "eos": processor.eos_id(),
    }


def _to_tokenizers(proto: Any) -> FastTokenizer:
    """Build a Hugging Face tokenizer from a sentencepiece model."""
    from tokenizers import (
        AddedToken,
        Regex,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from tokenizers import Tokenizer as FastTokenizer

    # Symbols defined by the user match in the text before spaces are replaced.
    kept = {
        piece.piece: piece.piece.replace(SPACE, " ")
        for piece in proto.pieces
        if piece.type == USER_DEFINED
    }
    pieces = [
        (kept.get(piece.piece, piece.piece), piece.score) for piece in proto.pieces
    ]
    rules = proto.normalizer_spec
    trained = proto.trainer_spec
    if trained.model_type == UNIGRAM:
        model: Any = models.Unigram(
            pieces, unk_id=trained.unk_id, byte_fallback=trained.byte_fallback
        )
    else:
        vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocab,
            _merges(proto),
            unk_token=pieces[trained.unk_id][0],
            fuse_unk=True,
            byte_fallback=trained.byte_fallback,
        )
    tokenizer = FastTokenizer(model)
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    # Three ways to add a leading space differ: sentencepiece adds one to the whole
    # text, a normalizer one after every added token, and Metaspace only if the text
    # does not begin with a space.
    scheme = "never"
    if rules.add_dummy_prefix and any(
        piece.type == USER_DEFINED for piece in proto.pieces
    ):
        scheme = "first"
    elif rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    tail = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False, special=False) for text in kept.values()]
    )
    special = [
        AddedToken(piece.piece, normalized=False)
        for piece in proto.pieces
        if piece.type == CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a third, best first: BPE merges the pair that gives the best piece."""
    scores = {
        piece.piece: piece.score
        for piece in proto.pieces
        if piece.type not in NOT_MERGED
    }
    ranked = [
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]


def _check_same(
    tokenizer: FastTokenizer, processor: Any, proto: Any, path: Path
) -> None:
    """Raise DataError if the two tokenizers differ on a sample text."""
    for text in _sample_texts(proto):
        expected = processor.encode(text)
        converted = tokenizer.encode(text, add_special_tokens=False).ids
        if expected != converted:
            raise DataError(
                f"{path}: this sentencepiece model cannot be turned into a Hugging Face tokenizer: "
                f"{text!r:.60} gives {converted[:20]} instead of {expected[:20]}. Use the Hugging Face "
                "tokenizer folder of the model instead."
            )
        # sentencepiece writes an unknown piece as a question mark, Hugging Face by its
        # name.
        known = processor.unk_id() not in expected
        if known and processor.decode(expected) != tokenizer.decode(
            converted, skip_special_tokens=False
        ):
            raise DataError(
                f"{path}: this sentencepiece model cannot be turned into a Hugging Face tokenizer: "
                f"{text!r:.60} decodes differently. Use the Hugging Face tokenizer folder of the model "
                "instead."
            )


def _sample_texts(proto: Any) -> Iterator[str]:
    """Yield texts of up to 1,000 of the model's own pieces in fixed random order, and some with unknown characters."""
    # A fixed seed, so that a model is accepted or refused the same way every time.
    draw = random.Random(0)
    pieces = [
        piece.piece.replace(SPACE, " ")
        for piece in proto.pieces
        if piece.type not in (UNKNOWN, CONTROL, BYTE)
    ]
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


# Class names of tokenizers that are defined by their tokenizer.json alone. In a Qwen2
# folder transformers 5 replaces them by Qwen2Tokenizer, which splits and normalizes
# differently, so they are loaded by class.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """Common interface of all tokenizers.

    Attributes:
        backend: the Hugging Face tokenizer.
        source: its origin, for messages.
        vocab_size: highest id + 1.
        eos_token_id: token that ends a response.
        stop_token_ids: all tokens that end a response. A model's generation_config.json may name several.
        pad_token_id: token that pads a batch. The end of sequence if the tokenizer has no padding.
        bos_token_id: token that begins a sequence, or None.
        chat_template: Jinja text, or None.
    """

    def __init__(
        self,
        backend: PreTrainedTokenizerBase,
        source: str,
        *,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if backend.eos_token_id is None:
            raise DataError(
                f"{source}: the tokenizer has no end-of-sequence token, so a response could never end. "
                "Name one as eos_token in its tokenizer_config.json."
            )
        if len(backend) <= len(backend.all_special_tokens):
            # transformers 5 makes an empty tokenizer for a folder without tokenizer
            # files
            raise DataError(
                f"{source}: the tokenizer holds no tokens but special ones. Copy tokenizer.json and "
                "tokenizer_config.json from the model's source, or name another tokenizer with model.tokenizer."
            )
        self.backend = backend
        self.source = source
        self.vocab_size: int = max(backend.get_vocab().values()) + 1
        self.eos_token_id: int = backend.eos_token_id
        self.pad_token_id: int = (
            backend.eos_token_id
            if backend.pad_token_id is None
            else backend.pad_token_id
        )
        self.bos_token_id: int | None = backend.bos_token_id
        self.stop_token_ids: list[int] = sorted({self.eos_token_id, *stop_token_ids})
        self.chat_template: str | None = backend.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special_tokens: include tokens that the tokenizer adds around a text.
        """
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of `token_ids`, by default without special tokens such as the end of sequence."""
        text: str = self.backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return text

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        where: str = "prompt",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Return a conversation as the chat template writes it.

        The text ends where the assistant's answer begins, or after the last message if
        that is an answer.

        Args:
            where: the row, for messages.
            tools: JSON schemas of functions, for templates that show them.

        Raises:
            DataError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise DataError(
                f"{where}: the tokenizer {self.source} has no chat template to write chat messages with."
            )
        try:
            with time_limit(MAX_TEMPLATE_SECONDS):
                return self._render(
                    list(messages), list(tools) if tools else None, where
                )
        # A template is a program: it may raise jinja2's errors, TypeError, KeyError and
        # others.
        except Exception as error:
            raise DataError(
                f"{where}: the chat template of {self.source} refuses these messages "
                f"({type(error).__name__}: {error}). Correct the roles or their order in the row, or the "
                "template."
            ) from error

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        where: str,
    ) -> str:
        """Render with arguments of tool calls in the form that the template expects.

        OpenAI writes arguments as JSON text, which some templates take. Others take a
        mapping and encode it themselves, so text would be encoded twice. Text that the
        template does not write verbatim is therefore parsed first. Mappings that make
        the template fail are converted to text.
        """

        def render(conversation: list[dict[str, Any]]) -> str:
            text: str = self.backend.apply_chat_template(
                conversation,
                tools=tools,
                tokenize=False,
                add_generation_prompt=conversation[-1]["role"] != "assistant",
            )
            return text

        arguments = tool_arguments(messages)
        texts = [argument for argument in arguments if isinstance(argument, str)]
        other_form = (
            with_arguments(messages, where, as_text=not texts)
            if arguments
            else messages
        )
        if other_form == messages:
            return render(messages)
        try:
            rendered = render(messages)
        # The template may raise anything if it does not know this form.
        except Exception:
            return render(other_form)
        encoded_once = all(
            text in rendered and json.dumps(text, ensure_ascii=False) not in rendered
            for text in texts
        )
        return rendered if encoded_once else render(other_form)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files into `folder`, for AutoTokenizer of transformers 4 and 5.

        One pitfall remains: for a custom tokenizer in a Qwen2 folder, AutoTokenizer of
        transformers 5 ignores how it splits text. `load_tokenizer` does not. Llama and
        Qwen3 folders are not affected.
        """
        save_backend(self.backend, folder)


def save_backend(backend: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face tokenizer into `folder`, with a class name that transformers 4 and 5 know."""
    backend.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = read_json_file(path)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # These entries tell how the tokenizer was loaded, and would be read again as
    # settings.
    for leftover in ("is_local", "local_files_only"):
        config.pop(leftover, None)
    path.write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def load_tokenizer(
    path: str | Path,
    *,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a Hugging Face folder, a sentencepiece `.model` file (a `chat_template.jinja` beside it is used), or a
            model's name on a hub.
        chat_template: Jinja text to use instead of the tokenizer's own.
        trust_remote_code: allow Python code in a Hugging Face folder or repository to run.

    Raises:
        DataError: the tokenizer is missing, unreadable, or without an end of sequence.
    """
    source = str(path)
    if source.endswith(".model"):
        backend: Any = load_sentencepiece(path)
        template_file = Path(path).with_name("chat_template.jinja")
        if chat_template is None and template_file.is_file():
            _check_sizes([template_file])
            chat_template = template_file.read_text(encoding="utf-8")
        stops: list[int] = []
    else:
        folder = _tokenizer_folder(source, trust_remote_code)
        backend = _load_hugging_face(source, folder, trust_remote_code)
        stops = _stop_tokens(folder)
    if chat_template is not None:
        backend.chat_template = chat_template
    return Tokenizer(backend, source, stop_token_ids=stops)


def _tokenizer_folder(source: str, trust_remote_code: bool) -> Path:
    """Return the folder of a tokenizer's files; those of a hub's model are in the hub's cache, or are fetched.

    Raises:
        DataError: there is no such folder or model, or a file is larger than any tokenizer.
    """
    folder = Path(source)
    if not folder.is_dir() and (
        folder.exists() or source.count("/") > 1 or source[:1] in "./~"
    ):
        raise DataError(
            f"{source}: not a folder (looked in {os.getcwd()}). model.tokenizer must name a Hugging Face "
            "folder, a sentencepiece .model file, or a model on a hub, such as Qwen/Qwen3-0.6B."
        )
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        suffixes = (
            (*TOKENIZER_SUFFIXES, ".py") if trust_remote_code else TOKENIZER_SUFFIXES
        )
        patterns = [f"*{suffix}" for suffix in suffixes]
        endpoint = os.environ.get("HF_ENDPOINT")
        # huggingface_hub passes on any error of its HTTP library and of caches.
        with user_code(partial(_not_loaded, source)):
            folder = Path(
                snapshot_download(source, allow_patterns=patterns, endpoint=endpoint)
            )
    _check_sizes(
        file
        for file in folder.iterdir()
        if file.suffix in TOKENIZER_SUFFIXES and file.is_file()
    )
    return folder


def _not_loaded(source: str, error: BaseException) -> DataError:
    reason = describe(error).strip().split("\n")[0]
    if "trust_remote_code" in describe(error):
        return DataError(
            f"{source}: the tokenizer is Python code that comes with the model. If you trust it, set "
            "model.trust_remote_code=true. Or name a folder with a tokenizer.json by model.tokenizer."
        )
    return DataError(
        f"{source}: no tokenizer could be loaded from it ({reason}). A folder needs tokenizer.json and "
        "tokenizer_config.json; copy them from the model's source, or name another tokenizer with model.tokenizer."
    )


def _load_hugging_face(
    source: str, folder: Path, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, whose files have bounds.

    Args:
        source: the name of the folder, or of the model on a hub, for messages.

    Raises:
        DataError: the folder holds no tokenizer, or a damaged one.
    """
    import transformers

    options: dict[str, Any] = {"local_files_only": True}
    named = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if (folder / "tokenizer.json").is_file() and named in GENERIC_CLASSES:
        loader: Any = transformers.PreTrainedTokenizerFast
    else:
        from megaverl.sharding.own_configs import register_config

        # Importing this class loads all that models need, which takes four seconds.
        loader = transformers.AutoTokenizer
        options["trust_remote_code"] = trust_remote_code
        # AutoTokenizer reads config.json too.
        architectures = _read_json(folder / "config.json").get("architectures")
        if isinstance(architectures, list) and architectures:
            register_config(str(architectures[0]))

    # transformers raises OSError, ValueError, KeyError or bare Exception for bad files.
    # Code in a folder may raise anything.
    with user_code(partial(_not_loaded, source)):
        return loader.from_pretrained(str(folder), **options)


def _check_sizes(files: Iterable[Path]) -> None:
    """Check that files which a tokenizer library reads whole have a plausible size.

    Raises:
        DataError: names the file and its size.
    """
    files = list(files)
    try:
        check_sizes(files)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{files[0].parent}: {error}. Copy the tokenizer's files again from their source."
        ) from error


def _stop_tokens(folder: Path) -> list[int]:
    """Return further end-of-sequence tokens from the model's generation_config.json."""
    stop_ids = _read_json(folder / "generation_config.json").get("eos_token_id")
    if stop_ids is None:
        return []
    return [stop_ids] if isinstance(stop_ids, int) else list(stop_ids)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = read_json_file(path)
        return content
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not valid JSON ({error}). Copy the file again from its source."
        ) from error


def check_fits(
    tokenizer: Tokenizer, vocab_size: int, *, model: str | Path = "the model"
) -> None:
    """Check that every id of the tokenizer has a row in the model's embedding.

    Raises:
        DataError: names both numbers.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{tokenizer.source}: this tokenizer does not fit {model}: its ids reach "
            f"{tokenizer.vocab_size - 1}, but the model's vocabulary (vocab_size in config.json) is "
            f"{vocab_size}, ids 0 to {vocab_size - 1}. Use the tokenizer that the model was "
            "trained with."
        )
    beyond = [number for number in tokenizer.stop_token_ids if number >= vocab_size]
    if beyond:
        raise DataError(
            f"{tokenizer.source}: generation_config.json names the end-of-sequence ids {beyond}, but the "
            f"vocabulary of {model} is {vocab_size}. Correct eos_token_id there."
        )
