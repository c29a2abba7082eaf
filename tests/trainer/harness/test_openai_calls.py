"""Calls of OpenAI's API: what an engine is asked for, and what a harness is answered."""

from __future__ import annotations

from typing import Any

import pytest

from megaverl.rollout.engine import PromptScore, SamplingOptions
from megaverl.rollout.environments.conversation import CHAT, COMPLETIONS, CallRefused
from megaverl.trainer.harness.openai_calls import FIRST_PIECE, CallReader
from tests.workers.tokenizers_made import of_bytes

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
TOKENIZER = of_bytes(chat_template=TEMPLATE)


def reader(**changes: Any) -> CallReader:
    settings: dict[str, Any] = {
        "chat": True,
        "sampling": SamplingOptions(16, temperature=0.5, top_p=0.9),
        "most_tokens": 200,
        "model": "policy",
    }
    return CallReader(TOKENIZER, **{**settings, **changes})


def test_a_call_overrides_the_sampling_of_the_run() -> None:
    body = {"prompt": ["What is", [40, 41]], "n": 2, "temperature": 0, "max_tokens": 3}
    call = reader().read(COMPLETIONS, body)
    assert [choice.prompt for choice in call.choices] == [
        *[TOKENIZER.encode("What is")] * 2,
        *[[40, 41]] * 2,
    ]
    first, second = call.choices[:2]
    assert (first.max_tokens, first.temperature, first.top_p) == (3, 0.0, 0.9)
    assert first.seed(0) != second.seed(0), "samples of one prompt differ"
    again = reader().read(COMPLETIONS, body)
    assert [choice.seed(0) for choice in again.choices] == [
        choice.seed(0) for choice in call.choices
    ]


def test_a_stop_string_ends_a_response_between_pieces() -> None:
    call = reader().read(
        COMPLETIONS, {"prompt": "What", "stop": ["sum is", "?"], "max_tokens": 150}
    )
    [choice] = call.choices
    assert choice.needs_tokens and choice.piece_tokens == FIRST_PIECE
    choice.add_piece(TOKENIZER.encode("The "), [-1.0], False, TOKENIZER)
    assert not choice.finish_reason and choice.piece_tokens == 2 * FIRST_PIECE
    tokens = TOKENIZER.encode("sum is 4")
    choice.add_piece(tokens, [-2.0] * len(tokens), False, TOKENIZER)
    assert (choice.text, choice.finish_reason) == ("The ", "stop")
    [answered] = reader().write(call)["choices"]
    assert (answered["text"], answered["finish_reason"]) == ("The ", "stop")


def test_log_probs_of_a_prompt_as_lm_eval_reads_them() -> None:
    """It reads the tokens after the context, without the last one, which is generated."""
    prompt = [40, 41, 42]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    calls = reader()
    call = calls.read(COMPLETIONS, {**body, "echo": True})
    [choice] = call.choices
    assert choice.is_scored and not choice.needs_tokens, "the score has the next token"
    score = PromptScore([-0.25, -4.0], [41, 50, 51], [-0.25, -0.5, -0.75])
    choice.add_score(score, TOKENIZER)
    [answered] = calls.write(call)["choices"]
    log_probs = answered["logprobs"]
    assert log_probs["token_logprobs"] == [None, -0.25, -4.0, -0.75]
    greedy = [
        own == max(top.values())
        for own, top in zip(
            log_probs["token_logprobs"][1:-1],
            log_probs["top_logprobs"][1:-1],
            strict=True,
        )
    ]
    assert greedy == [True, False]
    assert "".join(log_probs["tokens"]) == answered["text"]


def test_a_call_for_its_own_prompt_alone_needs_no_engine() -> None:
    call = reader().read(COMPLETIONS, {"prompt": "What", "echo": True, "max_tokens": 0})
    assert call.is_complete
    assert reader().write(call)["choices"][0]["text"] == "What"


def test_a_tool_call_in_an_answer() -> None:
    calls = reader()
    body = {
        "messages": [{"role": "user", "content": "2+2"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    call = calls.read(CHAT, body)
    text = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
    call.choices[0].add_piece(tokens, [-1.0] * len(tokens), True, TOKENIZER)
    [answered] = calls.write(call)["choices"]
    assert answered["finish_reason"] == "tool_calls"
    [made] = answered["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 2}'}


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (COMPLETIONS, {}, "neither a text"),
        (COMPLETIONS, {"prompt": ["a", 3]}, "neither a text nor"),
        (COMPLETIONS, {"prompt": [[10**6]]}, "not of the vocabulary"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": [[5] * 200]}, "at most data.max_prompt_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 200}, "may have 200, which is"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "not a whole number"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5}, "ask for 1"),
        (COMPLETIONS, {"prompt": "a", "n": 1000}, "1 to 128 choices"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p=0 is not from"),
        (COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature: expected"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias="),
        (COMPLETIONS, {"prompt": "a", "min_p": 0.1}, "there is no 'min_p'"),
        (CHAT, {"messages": []}, "not a list of messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            "only the drawn token",
        ),
    ],
)
def test_calls_that_are_refused(kind: str, body: Any, reason: str) -> None:
    with pytest.raises(CallRefused, match=reason):
        reader().read(kind, body)


def test_a_chat_needs_a_template() -> None:
    with pytest.raises(CallRefused, match="no chat template"):
        reader(chat=False).read(CHAT, {"messages": [{"role": "user", "content": "a"}]})
