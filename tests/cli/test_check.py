"""`megaverl data check`: every bad row, at once, and numbers about the good ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.cli.main import main as megaverl
from tests.trainer.conftest import make_inputs


def main(arguments: list[str]) -> int:
    """`megaverl data`"""
    return megaverl(["data", *arguments])


ROWS = [
    '{"prompt": "one two three", "answer": "1"}',
    '{"prompt": "one two three", "answer": ""}',
    '{"question": "?", "answer": "1"}',
    "nonsense",
    '{"prompt": 5, "answer": "1"}',
    '{"prompt": "bad \ufffd letter", "answer": "1", "more": 2}',
    '{"prompt": [{"role": "user"}], "answer": "1"}',
    '{"prompt": "four", "answer": null}',
]


def test_every_bad_row_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(ROWS))
    assert main(["check", str(path)]) == 1
    text = capsys.readouterr().out
    assert "8 rows, 3 can be used" in text
    for line, said in (
        (3, "no 'prompt' in this row"),
        (4, "not valid JSON"),
        (5, "'prompt' is int"),
        (7, "must be like"),
        (8, "'answer' is null. Fill it in"),
    ):
        assert f"error: {path}, line {line}: " in text and said in text
    assert f"warning: {path}, line 2: the answer is empty" in text
    assert f"line 2: the same prompt as {path}, line 1" in text
    assert "line 6: the prompt holds" in text
    assert "columns that only some rows have: answer, more, prompt, question" in text


def test_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(ROWS[:1]))
    assert main(["check", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(path)]
    assert (found["rows"], found["usable"], found["problems"]) == (1, 1, [])
    assert found["answer_characters"]["most"] == 1


def test_a_runs_own_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the run would read them: its tokenizer, its lengths; and what stands in both parts."""
    inputs = make_inputs(tmp_path)
    held_out = tmp_path / "leaky.jsonl"
    held_out.write_text(
        (inputs / "held_out.jsonl").read_text()
        + (inputs / "train.jsonl").read_text().splitlines()[0]
    )
    arguments = [
        "check",
        f"--config={inputs / 'run.yaml'}",
        f"model.path={inputs / 'model'}",
    ]
    arguments += [
        f"data.train={inputs / 'train.jsonl'}",
        f"data.validation={held_out}",
        "reward=exact_match",
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (
        "data.train: 64 rows, 64 can be used" in text
        and "prompt tokens: least " in text
    )
    assert "the first prompt, as the model sees it:\n    | reverse " in text
    assert (
        f"warning: {held_out}, line 17: this held-out prompt is a training prompt too"
        in text
    )
    assert main([*arguments, "data.max_prompt_tokens=2"]) == 1
    text = capsys.readouterr().out
    assert (
        "too long: 64" in text
        and "no row can be used: 64 are longer than data.max_prompt_tokens" in text
    )


def test_mistakes_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["check"])
    assert main(["check", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl: not found" in capsys.readouterr().err


JUDGED = [
    '{"prompt": "a", "completion": "b", "label": true}',
    '{"prompt": "a", "completion": "c", "label": 0}',
    '{"prompt": "a", "chosen": "b", "rejected": "b"}',
    '{"prompt": "a", "completion": "c", "label": "no"}',
    '{"prompt": "a", "completion": "c", "chosen": "d"}',
    '{"prompt": "a", "chosen": "d"}',
]


def test_pairs_and_single_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "judged.jsonl"
    path.write_text("\n".join(JUDGED))
    assert main(["check", str(path)]) == 1
    text = capsys.readouterr().out
    assert (
        "6 rows, 3 can be used\n  pairs of responses: 1\n  single responses: 1 desirable, 1 undesirable"
        in text
    )
    for line, said in (
        (3, "the better and the worse response are the same"),
        (4, "'label' is 'no'; it says whether"),
        (5, "it has 'completion', of a single response, and a pair as well"),
        (6, "no 'rejected' in this row"),
    ):
        assert f"{path}, line {line}: {said}" in text
    assert "the same prompt" not in text, (
        "of judged responses there are several to a prompt"
    )


def test_the_preferences_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = make_inputs(tmp_path)
    (tmp_path / "judged.jsonl").write_text("\n".join(JUDGED[:1]))
    arguments = [
        "check",
        f"--config={inputs / 'run.yaml'}",
        f"model.path={inputs / 'model'}",
        "preference.loss=kto",
    ]
    assert main([*arguments, f"preference.train={tmp_path / 'judged.jsonl'}"]) == 0
    text = capsys.readouterr().out
    assert (
        "preference.train: 1 rows" in text
        and "every single response is desirable: kto and bco need both" in text
    )
