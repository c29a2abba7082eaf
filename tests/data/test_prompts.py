"""Prompts as text and as chat messages, as the tokenizer's own template writes them."""

from __future__ import annotations

import pytest

from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError

MESSAGES = [
    {"role": "user", "content": "What is 1 plus 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "plus 1?"},
]


def test_text_stays_as_it_is_without_a_chat_template(tokenizer: Tokenizer) -> None:
    encoded = PromptEncoder(tokenizer).encode("What is 1 plus 1?")
    assert encoded is not None and encoded.text == "What is 1 plus 1?"
    assert tokenizer.decode(encoded.token_ids) == encoded.text


def test_text_becomes_a_users_message_where_there_is_a_template(
    chat_tokenizer: Tokenizer,
) -> None:
    encoded = PromptEncoder(chat_tokenizer).encode("What is 1 plus 1?")
    expected = "<|im_start|>user\nWhat is 1 plus 1?<|im_end|>\n<|im_start|>assistant\n"
    assert encoded is not None and encoded.text == expected
    backend = chat_tokenizer.backend
    own = backend.apply_chat_template(
        [{"role": "user", "content": "What is 1 plus 1?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert encoded.token_ids == own
    assert own.count(backend.convert_tokens_to_ids("<|im_start|>")) == 2


def test_a_conversation_keeps_its_messages_and_its_own_system_prompt(
    chat_tokenizer: Tokenizer,
) -> None:
    encoder = PromptEncoder(chat_tokenizer, PromptFormat(system_prompt="Be brief."))
    text = encoder.render(MESSAGES)
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1"
    )
    assert text.count("<|im_start|>") == 5 and text.endswith("<|im_start|>assistant\n")
    own = [{"role": "system", "content": "Be long."}, *MESSAGES]
    assert "Be brief." not in encoder.render(own)


def test_none_writes_no_template(chat_tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(
        chat_tokenizer, PromptFormat(chat_template="none", system_prompt="Be brief.")
    )
    assert encoder.render("What?") == "Be brief.\n\nWhat?"
    assert encoder.render(MESSAGES) == "Be brief.\n\nWhat is 1 plus 1?\n\n2\n\nplus 1?"


def test_prefix_and_suffix_stand_around_the_text(
    tokenizer: Tokenizer, chat_tokenizer: Tokenizer
) -> None:
    style = PromptFormat(prefix="Q: 1 A: 1\nQ: ", suffix=" A:")
    assert PromptEncoder(tokenizer, style).render("2") == "Q: 1 A: 1\nQ: 2 A:"
    assert "<|im_start|>user\nQ: 1 A: 1\nQ: 2 A:<|im_end|>" in PromptEncoder(
        chat_tokenizer, style
    ).render("2")


def test_a_plain_prompt_begins_and_ends_as_generation_needs(
    tokenizer: Tokenizer,
) -> None:
    """A tokenizer that puts begin and end around a text: the begin stays, the end would stop the answer."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[
            ("<s>", tokenizer.bos_token_id),
            ("</s>", tokenizer.eos_token_id),
        ],
    )
    encoded = PromptEncoder(tokenizer).encode("What?")
    assert encoded is not None
    assert encoded.token_ids == [tokenizer.bos_token_id, *tokenizer.encode("What?")]


def test_an_answer_ends_with_the_end_of_sequence(tokenizer: Tokenizer) -> None:
    assert PromptEncoder(tokenizer).encode_answer("12") == [
        *tokenizer.encode("12"),
        tokenizer.eos_token_id,
    ]


def test_messages_without_a_template_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        DataError, match="row 3: .*no chat template.*chat_template=none"
    ):
        PromptEncoder(tokenizer).encode(MESSAGES, "file, row 3")


def test_a_template_that_refuses_names_the_row(chat_tokenizer: Tokenizer) -> None:
    chat_tokenizer.backend.chat_template = (
        "{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(
        DataError, match="row 3: the chat template .* refuses .*roles must alternate"
    ):
        PromptEncoder(chat_tokenizer).encode(MESSAGES, "file, row 3")
