"""Tokenizers of both kinds, what is exported, and those that cannot be used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers

from megaverl.data.tokenizers import (
    Tokenizer,
    check_fits,
    load_tokenizer,
    train_sentencepiece,
)
from megaverl.errors import DataError
from megaverl.models.tiny import make_tiny_folder
from tests.data.conftest import CHATML, TEXTS


@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0\u2581"),
        max_size=30,
    )
)
@settings(max_examples=100, deadline=None)
def test_a_sentencepiece_model_gives_its_own_ids_and_text(
    sentencepiece_path: Path, text: str
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path))
    tokenizer = load_tokenizer(sentencepiece_path)
    assert tokenizer.encode(text) == processor.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_model_of_the_usual_kind_is_reproduced(
    tmp_path: Path, model_type: str
) -> None:
    """With sentencepiece's own defaults: NFKC, a space in front, several spaces become one."""
    prefix = str(tmp_path / "usual")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=prefix,
        model_type=model_type,
        vocab_size=340 if model_type == "bpe" else 290,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokenizer = load_tokenizer(f"{prefix}.model")
    for text in (
        "What is 3 plus 4?",
        "  two  spaces ",
        "The sum\u2026 \uff11\uff12 caf\u00e9",
        "is",
    ):
        assert tokenizer.encode(text) == processor.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == processor.decode(
            processor.encode(text)
        )


def test_the_ids_of_a_trained_model(
    sentencepiece_path: Path, tokenizer: Tokenizer
) -> None:
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        0,
        2,
        3,
    )
    assert tokenizer.stop_token_ids == [3] and tokenizer.chat_template is None
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path))
    assert tokenizer.vocab_size == processor.vocab_size() == 300
    assert tokenizer.decode([*tokenizer.encode("The sum"), 3, 0, 0]) == "The sum"
    pieces = tokenizer.backend.convert_ids_to_tokens(tokenizer.encode("12345"))
    assert [piece for piece in pieces if piece != "\u2581"] == list("12345")


def test_the_same_texts_train_the_same_model(tmp_path: Path) -> None:
    first = train_sentencepiece(TEXTS, tmp_path / "a.model", vocab_size=60)
    second = train_sentencepiece(TEXTS, tmp_path / "b.model", vocab_size=60)
    assert first.read_bytes() == second.read_bytes()


def test_a_vocabulary_larger_than_the_texts_yield_becomes_smaller(
    tmp_path: Path,
) -> None:
    path = train_sentencepiece(
        ["sort 12 =21", "sort 21 =12"], tmp_path / "a.model", vocab_size=1000
    )
    assert load_tokenizer(path).vocab_size < 30
    with pytest.raises(DataError, match="tokenizer of 5 ids"):
        train_sentencepiece(["sort 12 =21"], tmp_path / "b.model", vocab_size=5)
    with pytest.raises(DataError, match="no text"):
        train_sentencepiece([], tmp_path / "c.model")
    assert not (tmp_path / "b.model").exists()


def test_a_symbol_may_have_spaces(tmp_path: Path) -> None:
    path = train_sentencepiece(
        ["ab", "ba"], tmp_path / "a.model", vocab_size=7, symbols=["write it: "]
    )
    tokenizer = load_tokenizer(path)
    assert (
        tokenizer.encode("write it: abba")[0] == 4
        and len(tokenizer.encode("write it: abba")) == 5
    )
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.decode(saved.encode("write it: abba")) == "write it: abba"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", None])
def test_a_saved_tokenizer_loads_with_auto_tokenizer(
    tmp_path: Path, chat_tokenizer: Tokenizer, model_type: str | None
) -> None:
    from transformers import AutoTokenizer

    chat_tokenizer.save(tmp_path)
    if model_type is not None:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": 400})
        )
    auto = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "<|im_start|>user\nWhat is 12 plus  3? \u65e5<|im_end|>\n"
    assert auto.encode(text, add_special_tokens=False) == chat_tokenizer.encode(text)
    assert (auto.eos_token_id, auto.pad_token_id, auto.chat_template) == (3, 0, CHATML)
    assert load_tokenizer(tmp_path).encode(text) == chat_tokenizer.encode(text)


def test_a_qwen2_folder_keeps_a_tokenizer_of_another_kind(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 400})
    )
    assert load_tokenizer(tmp_path).encode("What is 12?") == tokenizer.encode(
        "What is 12?"
    )


def test_a_chat_template_beside_a_sentencepiece_model_is_used(
    tmp_path: Path, sentencepiece_path: Path
) -> None:
    path = tmp_path / "a.model"
    path.write_bytes(sentencepiece_path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    rendered = load_tokenizer(path).render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_generation_config_adds_ends_of_a_response(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 3]})
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded.stop_token_ids == [3, 7]
    with pytest.raises(DataError, match="does not fit"):
        check_fits(loaded, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 900}))
    with pytest.raises(DataError, match=r"ids \[900\].* is 300"):
        check_fits(load_tokenizer(tmp_path), 300)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused_with_both_numbers(
    tokenizer: Tokenizer,
) -> None:
    check_fits(tokenizer, 300)
    with pytest.raises(
        DataError, match=r"does not fit models/small.* reach 299, .* is 290"
    ):
        check_fits(tokenizer, 290, model="models/small")


def test_a_tokenizer_without_an_end_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="no end-of-sequence token.*eos_token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing/folder", None, "not a folder"),
        ("missing.model", None, "not found"),
        ("torn.model", b"\x0a\x0bnonsense", "not a sentencepiece model"),
        ("empty.model", b"", "not a sentencepiece model"),
    ],
)
def test_a_path_that_holds_no_tokenizer_is_named(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        load_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_protobuf_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentencepiece's file of the format looks at it when it is imported, and says nothing in its metadata."""
    from google.protobuf import runtime_version

    (tmp_path / "any.model").write_bytes(b"")
    monkeypatch.delitem(
        sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False
    )
    monkeypatch.delattr(sentencepiece, "sentencepiece_model_pb2", raising=False)
    monkeypatch.setattr(runtime_version, "MAJOR", 6)
    with pytest.raises(
        DataError,
        match=r"sentencepiece .* runtime 6.*pip install --upgrade protobuf.*mlflow",
    ):
        load_tokenizer(tmp_path / "any.model")


def test_a_tokenizer_that_is_code_is_not_run(tmp_path: Path) -> None:
    """As InternLM 3 comes."""
    code = {"AutoTokenizer": ["absent.InternLM3Tokenizer", None]}
    config = {"tokenizer_class": "InternLM3Tokenizer", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="is Python code .* model.trust_remote_code"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_beside_code_of_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As MiMo comes: transformers has a class of the tokenizer, and none of the model."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(special_tokens=["<|im_end|>"], show_progress=False)
    trained.train_from_iterator(["a word and another word"], trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    code = {"AutoConfig": "absent.MiMoConfig"}
    model = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (tmp_path / "config.json").write_text(json.dumps(model | {"auto_map": code}))
    found = load_tokenizer(tmp_path).encode("a word<|im_end|>")
    assert found == trained.encode("a word<|im_end|>").ids
    assert "model of type" not in capfd.readouterr().err


def test_a_folder_with_a_torn_tokenizer_is_named(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="tokenizer_config.json: not valid JSON"):
        load_tokenizer(tmp_path)


def test_a_word_model_is_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "w"),
        model_type="word",
        vocab_size=30,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="unigram or bpe"):
        load_tokenizer(tmp_path / "w.model")


def test_a_folder_without_tokenizer_files(tmp_path):
    make_tiny_folder(tmp_path, "Qwen3ForCausalLM")
    with pytest.raises(DataError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
