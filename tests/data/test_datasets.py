"""Files of prompts: what is read, in which order, and what is said about a bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaverl.data.datasets import PromptDataset, PromptSampler
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat
from megaverl.data.row_groups import RowGroupCache
from megaverl.data.sources import (
    JsonlFile,
    ParquetFile,
    RowChain,
    RowList,
    expand_paths,
    open_rows,
)
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.errors import DataError

GSM8K_ROWS = [
    {
        "question": "Natalia sold 48 clips, then half as many. How many?",
        "answer": "48/2 = 24\n48+24 = 72\n#### 72",
    },
    {
        "question": "Weng earns $12 an hour. How much for 50 minutes?",
        "answer": "12/60 = 0.2\n0.2*50 = 10\n#### 10",
    },
]
ROWS = [
    {"prompt": f"What is {n} plus 1?", "answer": str(n + 1), "level": n % 3}
    for n in range(10)
]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, PromptFormat(max_tokens=200))


def test_jsonl_rows_come_with_reference_and_extra(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    dataset = PromptDataset.load(write_jsonl(tmp_path / "a.jsonl", ROWS), encoder)
    assert len(dataset) == 10
    record = dataset[7]
    assert (record.index, record.prompt, record.reference, record.extra) == (
        7,
        "What is 7 plus 1?",
        "8",
        {"level": 1},
    )
    assert (
        record.token_ids == encoder.tokenizer.encode(record.text)
        and record.text == record.prompt
    )
    assert record.where == f"{tmp_path / 'a.jsonl'}, line 8"


def test_parquet_gives_the_same_as_jsonl_across_row_groups(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=3)
    dataset = PromptDataset.load(path, encoder)
    assert [dataset[n].prompt for n in (9, 0, 5, 2, 3)] == [
        ROWS[n]["prompt"] for n in (9, 0, 5, 2, 3)
    ]
    assert [record.extra["level"] for record in dataset] == [
        row["level"] for row in ROWS
    ]
    assert dataset[4].where.endswith("row 5")


def test_several_files_and_a_pattern_follow_one_another(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS[:2]), tmp_path / "z.parquet"
    )
    write_jsonl(tmp_path / "b.jsonl", ROWS[5:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[2:5])
    dataset = PromptDataset.load(
        [tmp_path / "z.parquet", str(tmp_path / "*.jsonl")], encoder
    )
    assert [record.prompt for record in dataset] == [row["prompt"] for row in ROWS]


def test_keys_can_be_named_and_nested(tmp_path: Path, encoder: PromptEncoder) -> None:
    path = write_jsonl(tmp_path / "gsm8k.jsonl", GSM8K_ROWS)
    dataset = PromptDataset.load(path, encoder, Columns(prompt="question"))
    assert dataset[0].reference.endswith("#### 72") and dataset[0].extra == {}
    nested = [{"prompt": "What is 1 plus 1?", "reward_model": {"ground_truth": 2}}]
    dataset = PromptDataset.load(
        write_jsonl(tmp_path / "nested.jsonl", nested),
        encoder,
        Columns(answer="reward_model.ground_truth"),
    )
    assert dataset[0].reference == 2
    assert (
        PromptDataset(RowList([{"prompt": "What?"}]), encoder, Columns(answer=None))[
            0
        ].reference
        is None
    )


def test_empty_lines_are_skipped_and_line_numbers_stay_right(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a"}\r\n\n  \n{"prompt": "\u00e9"}', encoding="utf-8")
    rows = JsonlFile(path)
    assert [rows[n]["prompt"] for n in range(len(rows))] == ["a", "\u00e9"]
    assert rows.where(1) == f"{path}, line 5"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ['{"prompt": "a", "answer": "b"}', '{"prompt": "a'],
            ["line 2", "not valid JSON", "correct or remove"],
        ),
        (
            ['{"prompt": "a", "answer": "b"}', '["a", "b"]'],
            ["line 2", "JSON object is expected", "a list"],
        ),
        (
            ['{"question": "a", "answer": "b"}'],
            ["line 1", "no 'prompt'", "'question', 'answer'", "data.prompt_key"],
        ),
        (
            ['{"prompt": null, "answer": "b"}'],
            ["line 1", "'prompt' is null", "data.prompt_key"],
        ),
        (['{"prompt": "a"}'], ["line 1", "no 'answer'", "data.answer_key"]),
        (['{"prompt": "  ", "answer": "b"}'], ["line 1", "'prompt' is empty"]),
        (
            ['{"prompt": 5, "answer": "b"}'],
            ["line 1", "'prompt' is int", "text, or a list of chat messages"],
        ),
        (['{"prompt": [], "answer": "b"}'], ["line 1", "empty list of messages"]),
        (['{"prompt": ["hi"], "answer": "b"}'], ["line 1", "message 1", "'hi'"]),
        (
            ['{"prompt": [{"role": "boss", "content": "x"}], "answer": "b"}'],
            ["line 1", "'boss'", "user"],
        ),
        (
            ['{"prompt": [{"role": "user", "content": 5}], "answer": "b"}'],
            ["line 1", "content of type int"],
        ),
        (
            ['{"prompt": [{"role": "assistant", "content": "x"}], "answer": "b"}'],
            ["line 1", "last message"],
        ),
        (
            ['{"prompt": [{"role": "user", "content": "x"}], "answer": "b"}'],
            ["line 1", "no chat template"],
        ),
        (["", " "], ["empty"]),
    ],
)
def test_a_bad_row_is_named_before_the_run(
    tmp_path: Path, encoder: PromptEncoder, lines: list[str], said: list[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        PromptDataset.load(path, encoder)
    for text in [str(path), *said]:
        assert text in str(caught.value)


def test_one_file_is_read_as_it_stands_and_several_as_a_chain(tmp_path: Path) -> None:
    first, second = (
        write_jsonl(tmp_path / name, rows)
        for name, rows in (("a.jsonl", ROWS[:4]), ("b.jsonl", ROWS[4:]))
    )
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS), tmp_path / "c.parquet", row_group_size=4
    )
    assert isinstance(open_rows(first), JsonlFile) and isinstance(
        open_rows([second]), JsonlFile
    )
    assert isinstance(open_rows(tmp_path / "c.parquet"), ParquetFile)
    both = open_rows([first, second])
    assert isinstance(both, RowChain) and len(both) == 10
    assert [both[n] for n in range(10)] == ROWS
    assert [both.where(n) for n in (0, 3, 4, 9)] == [
        f"{first}, line 1",
        f"{first}, line 4",
        f"{second}, line 1",
        f"{second}, line 6",
    ]
    prints = [
        open_rows(paths).fingerprint
        for paths in (first, second, [first, second], [second, first])
    ]
    assert len(set(prints)) == 4 and {len(found) for found in prints} == {16}
    assert open_rows([first, second]).fingerprint == prints[2]
    assert len(RowChain([])) == len(RowList([])) == 0
    three = RowChain([RowList(ROWS[:4]), RowList(ROWS[4:5]), RowList(ROWS[5:])])
    assert (
        len(three) == 10
        and [three[n] for n in range(10)] == ROWS
        and three.where(9) == "rows, row 5"
    )
    backwards = [dict(reversed(row.items())) for row in ROWS]
    assert (
        RowList(backwards).fingerprint
        == RowList(ROWS).fingerprint
        != RowList(ROWS[1:]).fingerprint
    )


def test_a_parquet_file_is_read_by_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=4)
    cache = RowGroupCache()
    rows = ParquetFile(path, cache)
    assert [rows[n] for n in (3, 4, 7, 8, 9, 0)] == [
        ROWS[n] for n in (3, 4, 7, 8, 9, 0)
    ]
    assert rows.where(0) == f"{path}, row 1" and len(rows) == 10
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a.parquet, row 2: the file is damaged"):
        ParquetFile(path)[1]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": []}), path)
    assert len(ParquetFile(path)) == 0


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("[1]", "a list"),
        ('"x"', "text"),
        ("1", "a number"),
        ("1.5", "a number"),
        ("true", "true/false"),
        ("null", "null"),
    ],
)
def test_a_line_that_is_no_object_is_said_to_be_what_it_is(
    tmp_path: Path, value: str, kind: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(value)
    with pytest.raises(
        DataError, match=f"a.jsonl, line 1: a JSON object is expected.*found {kind}[.]"
    ):
        JsonlFile(path)[0]
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="a.jsonl, line 1: not valid JSON"):
        JsonlFile(path)[0]


def test_patterns_are_sorted_and_reach_into_folders(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "in/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, ROWS[:1])
    (tmp_path / "folder.jsonl").mkdir()
    names = lambda pattern: [path.name for path in expand_paths(tmp_path / pattern)]  # noqa: E731
    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"] and names("**/*.jsonl") == [
        "a.jsonl",
        "b.jsonl",
        "c.jsonl",
    ]
    assert names("[ab].jsonl") == ["a.jsonl", "b.jsonl"] and names("?.jsonl") == [
        "a.jsonl",
        "b.jsonl",
    ]
    (tmp_path / "[1].jsonl").write_text("{}")
    assert names("[1].jsonl") == ["[1].jsonl"], "a file that is there is no pattern"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for entry, said in [
        ("none.jsonl", "not found"),
        ("*.jsonl", "no file matches"),
        (".", "is a folder"),
        ("a.csv", ".jsonl or .parquet"),
        ("a.parquet", "not a whole Parquet file"),
        ("empty.jsonl", "empty"),
    ]:
        (tmp_path / "a.csv").write_text("prompt\n")
        (tmp_path / "a.parquet").write_bytes(b"PAR1 torn")
        with pytest.raises(DataError, match=said) as caught:
            if entry == "empty.jsonl":
                (tmp_path / entry).touch()
            open_rows(tmp_path / entry)
        assert str(tmp_path / entry) in str(caught.value)
    with pytest.raises(DataError, match="no data file"):
        open_rows([])


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), path)
    with pytest.raises(DataError, match="empty"):
        open_rows(path)


def long_and_short(
    tokenizer: Tokenizer, too_long: Any, max_tokens: int = 12
) -> PromptDataset:
    rows = [dict(row) for row in ROWS[:3]]
    rows[1]["prompt"] = "What is 1 plus 1? " * 20
    encoder = PromptEncoder(
        tokenizer, PromptFormat(max_tokens=max_tokens, too_long=too_long)
    )
    return PromptDataset(RowList(rows, "some rows"), encoder)


def test_a_prompt_longer_than_the_context_is_an_error_with_both_numbers(
    tokenizer: Tokenizer,
) -> None:
    length = len(tokenizer.encode("What is 1 plus 1? " * 20))
    with pytest.raises(
        DataError,
        match=rf"some rows, row 2: .* {length} tokens .* at most 12 .*max_prompt_tokens",
    ):
        long_and_short(tokenizer, "error")


def test_a_prompt_longer_than_the_context_can_be_dropped(tokenizer: Tokenizer) -> None:
    dataset = long_and_short(tokenizer, "drop")
    assert [record.prompt for record in dataset] == [
        ROWS[0]["prompt"],
        ROWS[2]["prompt"],
    ]
    assert [record.index for record in dataset] == [0, 1]
    assert (dataset.report.num_rows, dataset.report.num_dropped) == (2, 1)
    assert "1 too long and dropped" in str(dataset.report)
    with pytest.raises(DataError, match="every prompt is longer than 1 tokens"):
        long_and_short(tokenizer, "drop", max_tokens=1)


def test_a_prompt_longer_than_the_context_can_lose_its_beginning(
    tokenizer: Tokenizer,
) -> None:
    dataset = long_and_short(tokenizer, "truncate_left")
    assert dataset[1].token_ids == tokenizer.encode("What is 1 plus 1? " * 20)[-12:]
    assert (dataset.report.num_rows, dataset.report.num_truncated) == (3, 1)


@given(
    text=st.text(min_size=1, max_size=20).filter(str.strip), limit=st.integers(1, 30)
)
@settings(max_examples=60, deadline=None)
def test_the_quick_check_of_lengths_agrees_with_the_tokens(
    sentencepiece_path: Path, text: str, limit: int
) -> None:
    tokenizer = load_tokenizer(sentencepiece_path)
    encoder = PromptEncoder(
        tokenizer, PromptFormat(max_tokens=limit, too_long="truncate_left")
    )
    assert encoder.num_cut(text) == max(0, len(tokenizer.encode(text)) - limit)


def test_the_fingerprint_follows_the_rows(
    tmp_path: Path, encoder: PromptEncoder
) -> None:
    first = PromptDataset.load(write_jsonl(tmp_path / "a.jsonl", ROWS), encoder)
    same = PromptDataset.load(write_jsonl(tmp_path / "b.jsonl", ROWS), encoder)
    other = PromptDataset.load(
        write_jsonl(tmp_path / "c.jsonl", [*ROWS[:9], ROWS[0]]), encoder
    )
    assert first.fingerprint == same.fingerprint != other.fingerprint
    state = first.sampler(4, seed=1).state_dict()
    same.sampler(4, seed=1).check_state(json.loads(json.dumps(state)))
    with pytest.raises(DataError, match="fingerprint: was .* is"):
        other.sampler(4, seed=1).check_state(state)
    with pytest.raises(DataError, match="seed: was 1, is 2"):
        first.sampler(4, seed=2).check_state(state)


SIZES = st.integers(1, 40)


@given(
    num_rows=SIZES,
    per_step=SIZES,
    seed=st.integers(0, 2**63),
    first_epoch=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_every_epoch_takes_every_row_once(
    num_rows: int, per_step: int, seed: int, first_epoch: int
) -> None:
    sampler = PromptSampler(num_rows, per_step, seed)
    steps = (first_epoch + 2) * num_rows // per_step + 1
    stream = [index for step in range(steps) for index in sampler.indices(step)]
    for epoch in range(first_epoch, first_epoch + 2):
        assert sorted(stream[epoch * num_rows : (epoch + 1) * num_rows]) == list(
            range(num_rows)
        )


@given(
    num_rows=SIZES,
    per_step=SIZES,
    seed=st.integers(0, 100),
    steps=st.permutations(range(8)),
)
@settings(max_examples=50, deadline=None)
def test_a_step_does_not_depend_on_the_steps_before(
    num_rows: int, per_step: int, seed: int, steps: list[int]
) -> None:
    in_order = {
        step: PromptSampler(num_rows, per_step, seed).indices(step) for step in range(8)
    }
    sampler = PromptSampler(num_rows, per_step, seed)
    assert {step: sampler.indices(step) for step in steps} == in_order
    assert all(len(indices) == per_step for indices in in_order.values())


def test_epochs_and_seeds_differ_and_unshuffled_keeps_the_order() -> None:
    orders = {
        tuple(PromptSampler(20, 20, seed).indices(step))
        for seed in range(3)
        for step in range(3)
    }
    assert len(orders) == 9
    plain = PromptSampler(4, 3, seed=0, shuffle=False)
    assert [plain.indices(step) for step in range(3)] == [
        [0, 1, 2],
        [3, 0, 1],
        [2, 3, 0],
    ]
    assert plain.epoch(2) == 1.5


def test_a_sampler_without_rows_or_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        PromptSampler(0, 1, 0)
    with pytest.raises(DataError, match="prompts_per_step is 0"):
        PromptSampler(1, 0, 0)
