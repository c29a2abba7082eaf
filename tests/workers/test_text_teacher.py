"""A teacher with another tokenizer: where two tokenizers cut a text, what is compared, and all of it against others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaverl.algorithms import advantage_estimators
from megaverl.algorithms.model_rewards import LOWEST
from megaverl.config import load_config
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import ConfigError
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.text_teacher import (
    BROKEN,
    INSIDE,
    TokenTexts,
    chunks_of,
    compared,
    other_tokenizer,
)
from tests.algorithms.strategies import PROPERTY
from tests.launcher import Launcher
from tests.workers.tokenizers_made import of_bytes, of_pieces, of_usual_pieces, of_words

SAID = st.text(st.sampled_from("ab 719?.\n\u00e9\u4f60\u597d\U0001f600"), max_size=12)
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[a]"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenTexts]:
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {
        "bytes": of_bytes(),
        "pieces": of_pieces(folder),
        "usual": of_usual_pieces(folder),
        "words": of_words(),
    }
    return {name: TokenTexts(tokenizer) for name, tokenizer in made.items()}


KINDS = st.sampled_from(["bytes", "pieces", "usual", "words"])


@PROPERTY
@given(
    kind=KINDS,
    numbers=st.lists(st.integers(0, 319), max_size=14),
    follows=st.booleans(),
)
def test_where_any_tokens_end_in_their_text(
    kinds: dict[str, TokenTexts], kind: str, numbers: list[int], follows: bool
) -> None:
    """Of tokens as a policy may draw them, which no tokenizer would write so: a token
    ends where all tokens up to it have decoded to, unless that is within a character.
    """
    texts = kinds[kind]
    token_ids = [number % texts.tokenizer.vocab_size for number in numbers]
    text, ends = texts.read(token_ids, follows=follows)
    plain = next(
        (i for i, token in enumerate(token_ids) if token in texts.special),
        len(token_ids),
    )
    whole = texts.text(token_ids[:plain], follows=follows)
    assert len(ends) <= plain and whole.startswith(text) and BROKEN not in text
    for count, end in enumerate(ends, 1):
        so_far = texts.text(token_ids[:count], follows=follows)
        assert BROKEN in so_far if end == INSIDE else so_far == text[:end]
    assert not ends or ends[-1] == len(text)
    # What was left out is no text any more, or ends within a character.
    if len(ends) < plain:
        assert BROKEN in whole


@PROPERTY
@given(kind=KINDS, text=SAID)
def test_a_teacher_writes_the_same_text_or_nothing(
    kinds: dict[str, TokenTexts], kind: str, text: str
) -> None:
    texts = kinds[kind]
    written = texts.write(text)
    if kind != "words":
        assert written is not None, "bytes say everything"
    if written is not None:
        token_ids, ends = written
        assert text in (
            texts.text(token_ids, follows=True),
            texts.text(token_ids, follows=False),
        )
        assert (
            len(ends) == len(token_ids)
            and (not ends or ends[-1] == len(text))
            and not texts.special & {*token_ids}
        )


def test_spaces_and_words_that_are_no_text(kinds: dict[str, TokenTexts]) -> None:
    usual, words, pieces = kinds["usual"], kinds["words"], kinds["pieces"]
    # an answer after a chat template's words, and one in the middle of a text, have the
    # space or have it not
    answer = usual.tokenizer.encode("The sum")
    assert (
        usual.read(answer, follows=False)[0] == "The sum"
        and usual.read(answer, follows=True)[0] == " The sum"
    )
    for text in ("The sum", " The sum", "  The", "7"):
        written = usual.write(text)
        assert written is not None and usual.text(written[0], follows=True) == text
    assert (
        words.write("The sum is 7") is not None
        and words.write("The cat") is None
        and words.write("The  sum") is None
    )
    assert kinds["bytes"].write("say <end>") is None, "its end of sequence, in letters"
    # the end of sequence in the middle, and bytes that are no character at the end
    the, end = pieces.tokenizer.encode("The"), pieces.tokenizer.eos_token_id
    assert pieces.read([*the, end, *the], follows=True) == (
        "The",
        pieces.ends(the, "The", follows=True),
    )
    half = kinds["bytes"].tokenizer.encode("a\U0001f600")[:-1]
    assert kinds["bytes"].read(half, follows=True) == ("a", [1])


@PROPERTY
@given(data=st.data(), length=st.integers(1, 12))
def test_chunks_begin_where_both_cut(data: st.DataObject, length: int) -> None:
    def cuts() -> list[int]:
        inner = data.draw(st.lists(st.integers(0, length), max_size=8))
        return [
            end if data.draw(st.integers(0, 3)) else INSIDE for end in sorted(inner)
        ] + [length]

    mine, theirs = cuts(), cuts()
    common = {*mine} & {*theirs} - {INSIDE}
    numbers = chunks_of(mine, theirs)
    for own, found in zip((mine, theirs), numbers, strict=True):
        for place, number in enumerate(found):
            reach = next(end for end in own[place:] if end != INSIDE)
            assert number == sum(cut < reach for cut in common)
    assert {*numbers[0]} == {*numbers[1]} == set(range(len(common))), (
        "every chunk has tokens of both"
    )
    log_probs = [
        torch.rand(len(each), dtype=torch.float64).log() for each in (mine, theirs)
    ]
    found = compared(*log_probs, *numbers) - log_probs[0]
    for number in range(len(common)):
        inside = [torch.tensor([each == number for each in part]) for part in numbers]
        ratio = log_probs[1][inside[1]].sum() - log_probs[0][inside[0]].sum()
        torch.testing.assert_close(found[inside[0]], ratio.expand(int(inside[0].sum())))


def test_one_tokenizer_gives_the_teachers_log_probs_themselves() -> None:
    mine, teacher = -torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    ends = [1, INSIDE, 4, 6, 6]
    assert chunks_of([1, 2, 4], [1, 2, 4]) == ([0, 1, 2], [0, 1, 2])
    torch.testing.assert_close(
        compared(mine[:3], teacher[:3], [0, 1, 2], [0, 1, 2]).float(), teacher[:3]
    )
    same = chunks_of(ends, ends)
    assert same[0] == same[1] == [0, 1, 1, 2, 2], (
        "tokens that end nowhere, or at one place, are one chunk"
    )


def test_the_advantage_is_the_gradient_of_the_kl_over_texts() -> None:
    """A student of tokens `a`, `b`, `ab`, and a teacher that says how likely texts are: over all that the student can
    write, in float64, advantage times score is the gradient of KL(student || teacher).
    """
    generator = torch.Generator().manual_seed(1)
    first, second = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in (3, 2)
    )
    teacher = {
        text: torch.randn((), generator=generator, dtype=torch.float64)
        for text in ("ab", "aa", "ba", "bb")
    }
    estimator = advantage_estimators.get("distillation")
    writings = [("ab", [2])] + [
        (a + b, ["ab".index(a), "ab".index(b)]) for a in "ab" for b in "ab"
    ]
    surrogate = exact = torch.zeros((), dtype=torch.float64)
    for text, tokens in writings:
        parts = torch.stack(
            [
                each.log_softmax(0)[token]
                for each, token in zip((first, second), tokens, strict=False)
            ]
        )
        probability, log_probs = parts.sum().exp(), parts.detach()
        ref = compared(log_probs, teacher[text][None], [0] * len(tokens), [0])
        inputs = {"rollout_log_probs": log_probs[None], "ref_log_probs": ref[None]}
        mask = torch.ones(1, len(tokens), dtype=torch.bool)
        advantages = estimator({**inputs, "response_mask": mask}).advantages[0]
        surrogate = surrogate - probability.detach() * (advantages * parts).sum()
        exact = exact + probability * (parts.sum() - teacher[text])
    found = torch.autograd.grad(surrogate, (first, second), retain_graph=True)
    expected = torch.autograd.grad(exact, (first, second))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def reference_chunks(
    student: Tokenizer,
    own: Tokenizer,
    answer: Sequence[int],
    teacher_ids: Sequence[int],
) -> list[tuple[int, int]]:
    """By decoding every beginning of both: how many tokens of each there are at every
    place where both have decoded to the same whole text.
    """

    def beginnings(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[str, int]:
        return {
            tokenizer.decode(ids[:count]): count for count in range(1, len(ids) + 1)
        }

    mine, theirs = beginnings(student, answer), beginnings(own, teacher_ids)
    return [
        (mine[text], theirs[text])
        for text in mine
        if text in theirs and BROKEN not in text
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_against_transformers_on_every_grid(
    launch: Launcher, tmp_path: Path, chat: bool
) -> None:
    from transformers import AutoModelForCausalLM

    student, own = of_pieces(tmp_path), of_bytes(chat_template=CHAT if chat else None)
    folder = make_tiny_folder(
        tmp_path / "teacher", "Qwen3ForCausalLM", vocab_size=own.vocab_size
    )
    student.save(tmp_path / "student")
    own.save(tmp_path / "own")
    said = ["The sum is 11.", "caf\u00e9 \u4f60\u597d", "", "What is 7?"]
    answers = [[*student.encode(text), student.eos_token_id] for text in said]
    answers[3].pop()  # it was cut off
    answers += [
        [*student.encode("The sum"), student.pad_token_id, student.eos_token_id],
        [*student.encode("x" * 80)],
    ]
    prompts = ["What is 7 plus 4?", "What is 1 plus 2?"]
    generator = torch.Generator().manual_seed(0)
    mine = [
        (-torch.rand(len(answer), generator=generator)).tolist() for answer in answers
    ]
    given: dict[str, Any] = {
        "prompts": prompts,
        "answers": answers,
        "log_probs": mine,
        "most": 60,
    }
    folders = {
        "folder": folder,
        "student": tmp_path / "student",
        "own": tmp_path / "own",
    }
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    expected, gap, num_chunks = [], 0.0, 0
    for row, answer in enumerate(answers):
        wanted = torch.full((len(answer),), torch.nan)
        text = prompts[row % 2]
        prompt = own.encode(f"[user]{text}\n[a]" if chat else text)
        body = [
            token
            for token in answer
            if token not in (student.eos_token_id, student.pad_token_id)
        ]
        said_by_teacher = own.encode(student.decode(body))
        cuts = [(0, 0), *reference_chunks(student, own, body, said_by_teacher)]
        if answer[len(body) :] == [student.eos_token_id]:
            said_by_teacher.append(own.eos_token_id)
            cuts.append((len(answer), len(said_by_teacher)))
        if len(prompt) + len(said_by_teacher) <= 60:
            with torch.no_grad():
                logits = (
                    model(torch.tensor([prompt + said_by_teacher]))
                    .logits[0]
                    .log_softmax(-1)
                )
            theirs = logits[len(prompt) - 1 : -1].gather(
                1, torch.tensor(said_by_teacher)[:, None]
            )[:, 0]
            for (a, b), (c, d) in zip(cuts, cuts[1:], strict=False):
                ratio = float(theirs[b:d].sum()) - sum(mine[row][a:c])
                wanted[a:c] = torch.tensor(mine[row][a:c]) + ratio
                gap, num_chunks = gap - ratio, num_chunks + 1
        expected.append(wanted)
    assert (
        bool(expected[5].isnan().all())
        and int(expected[4].isnan().sum()) == 2
        and len(expected[2]) == 1
    )
    expected[4][-2] = LOWEST  # padding within a response: no text has it
    read = sum(int((~each.isnan()).sum()) for each in expected) - 1
    for shape in ({}, {"tp": 2}, {"pp": 2}):
        size = 2 if shape else 1
        options = {"shape": shape, "chat": chat, **folders, **given}
        for found, report in launch.world(
            size, "tests.workers.algorithm_ranks:text_teacher", **options
        ):
            for row, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(
                    torch.tensor(row[: len(wanted)]),
                    wanted,
                    atol=2e-5,
                    rtol=1e-5,
                    equal_nan=True,
                )
                assert not any(row[len(wanted) :]), "zero in the padding"
            assert report == pytest.approx(
                {
                    "kl_per_token": gap / read,
                    "tokens_per_chunk": read / num_chunks,
                    "compared_fraction": read / sum(map(len, answers)),
                    "impossible_samples": 1.0,
                    "unread_samples": 1.0,
                },
                rel=1e-4,
            )


def test_when_a_teacher_reads_text(tmp_path: Path) -> None:
    student, own = of_pieces(tmp_path), of_bytes()
    folder = make_tiny_folder(
        tmp_path / "teacher", "Qwen3ForCausalLM", vocab_size=own.vocab_size
    )
    spec = ModelSpec.from_folder(folder)

    def found(*more: str) -> Tokenizer | None:
        base = [
            "model.path=org/model",
            f"reference.path={folder}",
            "data.train=x.jsonl",
            "reward=exact_match",
            *more,
        ]
        return other_tokenizer(
            load_config(None, base, check_paths=False), folder, student, spec
        )

    taught = "algorithm.name=distillation"
    assert found(taught) is None, "no tokenizer there: the run's"
    student.save(folder)
    assert found(taught) is None, "the same"
    student.backend.add_tokens(["<|tool|>"])
    assert found(taught) is None, "the same, and one more"
    own.save(folder)
    made = found(taught)
    assert made is not None and made.encode("The sum") == own.encode("The sum")
    with pytest.raises(
        ConfigError,
        match=r"has other tokens than .*\n.*reference.tokenizer: is of a teacher",
    ):
        found("algorithm={name: grpo, group_size: 2, kl: {in: loss, coef: 0.1}}")


def test_the_same_tokenizer_is_the_same_vocabulary(
    launch: Launcher, tmp_path: Path
) -> None:
    """Given its own tokens as text, a model says what it says of the tokens."""
    from transformers import AutoModelForCausalLM

    student = of_pieces(tmp_path)
    folder = make_tiny_folder(
        tmp_path / "teacher", "Qwen3ForCausalLM", vocab_size=student.vocab_size
    )
    student.save(tmp_path / "student")
    answers = [
        [*student.encode(text), student.eos_token_id]
        for text in ("The sum is 11.", "caf\u00e9 \u4f60")
    ]
    prompt, mine = (
        "What is 7 plus 4?",
        [[-1.0 - place for place in range(len(answer))] for answer in answers],
    )
    given: dict[str, Any] = {
        "prompts": [prompt],
        "answers": answers,
        "log_probs": mine,
        "most": 60,
        "chat": False,
    }
    folders = {
        "folder": folder,
        "student": tmp_path / "student",
        "own": tmp_path / "student",
    }
    [[found, report]] = launch.world(
        1, "tests.workers.algorithm_ranks:text_teacher", shape={}, **folders, **given
    )
    model, ids = (
        AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32),
        student.encode(prompt),
    )
    for row, answer in zip(found, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer])).logits[0].log_softmax(-1)
        expected = logits[len(ids) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[
            :, 0
        ]
        # A character's bytes are one chunk.
        inside = [token not in student.encode("\u00e9\u4f60") for token in answer]
        torch.testing.assert_close(
            torch.tensor(row[: len(answer)])[inside],
            expected[inside],
            atol=2e-5,
            rtol=1e-5,
        )
    assert report["compared_fraction"] == 1.0
