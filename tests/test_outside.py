"""Text, JSON and numbers that models, tools and services write."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import megaverl
from megaverl.errors import ConfigError, DataError, ModelError
from megaverl.outside import (
    check_sizes,
    clean,
    read_file,
    read_json,
    read_json_file,
    read_number,
)

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # surrogates too


@given(ANY_TEXT)
def test_clean_text_can_be_encoded_and_clean_text_stays(text: str) -> None:
    cleaned = clean(text)
    assert "\0" not in cleaned and cleaned.encode().decode() == cleaned
    if "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert cleaned == text


def test_halves_of_a_pair_that_stand_together_are_joined() -> None:
    assert clean("\ud83d\ude00, \ud83d, \ude00") == "\U0001f600, \ufffd, \ufffd"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | ANY_TEXT, st.lists
    )
)
def test_json_is_read_as_it_is_but_for_its_texts(value: Any) -> None:
    def cleaned(item: Any) -> Any:
        return (
            [cleaned(each) for each in item]
            if isinstance(item, list)
            else clean(item)
            if isinstance(item, str)
            else item
        )

    assert (
        read_json(json.dumps(value))
        == read_json(json.dumps(value).encode())
        == cleaned(value)
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000 + "]" * 3000,
        '{"a":' * 100_000,
        "[" * 101 + "]" * 101,
        "NaN",
        "[Infinity]",
        "1e999",
        "1" * 400,
        "1" * 10_000,
        "",
        "{",
        b"\xff\xfe",
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        read_json(text)


@pytest.mark.parametrize(
    "value", [None, True, "1", [1], 10**400, float("nan"), float("-inf")]
)
def test_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a"):
        read_number(value)


def test_numbers() -> None:
    assert read_number(3) == 3.0 and read_number(-0.5) == -0.5


def test_numbers_that_are_not_finite_are_read_where_they_are_accepted() -> None:
    assert read_json("[1, -Infinity]", not_finite=True) == [1, float("-inf")]
    with pytest.raises(ValueError):
        read_json("[1e999]", not_finite=True)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    plain.write_text('{"a": 1}')
    packed.write_bytes(gzip.compress(b'{"a": 1}'))
    assert read_json_file(plain) == read_json_file(packed) == {"a": 1}
    assert read_file(packed, limit=8) == b'{"a": 1}'
    for file in (plain, packed):
        with pytest.raises(ValueError, match="larger than 7 bytes"):
            read_file(file, limit=7)
    packed.write_bytes(gzip.compress(bytes(10**7)))
    assert packed.stat().st_size < 10**5
    with pytest.raises(ValueError, match="larger than 1,000,000 bytes"):
        read_json_file(packed, 10**6)
    for damaged in (
        gzip.compress(b"[]")[:-3],
        b"no gzip",
        gzip.compress(bytes(100))[:12] + b"xxxxxxxxxx",
    ):
        packed.write_bytes(damaged)
        with pytest.raises((OSError, ValueError)):
            read_json_file(packed)
    check_sizes([plain], limit=8)
    with pytest.raises(ValueError, match="a.json has 8 bytes; at most 7 are read"):
        check_sizes([plain], limit=7)


def test_files_are_parsed_by_the_bounded_reader_alone() -> None:
    """Whoever reads a JSON file goes through `outside`: files of models, runs and checkpoints come from elsewhere."""
    folder = Path(megaverl.__file__).parent
    plain = re.compile(r"json\.loads?\([^\n]*(read_text|read_bytes|open\()")
    found = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if plain.search(line)
    ]
    assert found == []


def _tokenizer(folder: Path) -> None:
    from megaverl.data.tokenizers import load_tokenizer

    load_tokenizer(folder)


def _images(folder: Path) -> None:
    from megaverl.config.run import ImagesConfig
    from megaverl.data.images import Images

    Images.of(ImagesConfig(), folder, None)  # type: ignore[arg-type]


def _adapter(folder: Path) -> None:
    from megaverl.models.lora.adapter_set import read_config

    read_config(folder)


def _plan(folder: Path) -> None:
    from megaverl.planner.job import _read_spec

    _read_spec("--model-config", folder / "config.json", "megatron")


def _report(folder: Path) -> None:
    from megaverl.monitoring.report.run_folder import read_run

    read_run(folder)


def _trace(folder: Path) -> None:
    from megaverl.monitoring.profiler import _events

    _events(folder / "trace.json")


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("read", "file", "error"),
    [
        (_tokenizer, "tokenizer_config.json", DataError),
        (_images, "config.json", DataError),
        (_adapter, "adapter_config.json", ModelError),
        (_plan, "config.json", ConfigError),
        (_report, "metrics.jsonl", DataError),
        (_trace, "trace.json", DataError),
    ],
)
def test_nested_files_are_an_error_of_their_own(
    tmp_path: Path, read: Callable[[Path], None], file: str, error: type[Exception]
) -> None:
    (tmp_path / file).write_text(DEEP + "\n")
    with pytest.raises(error, match=file.partition(".")[0]):
        read(tmp_path)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "vocab.txt", "chat_template.jinja", "own.model"]
)
def test_a_tokenizer_of_gigabytes_is_refused_before_a_library_reads_it(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with (tmp_path / file).open("wb") as large:
        large.truncate(2**30)  # a hole: it takes no room
    path = tmp_path / file if file.endswith(".model") else tmp_path
    with pytest.raises(
        DataError,
        match=rf"{re.escape(file)} has 1,073,741,824 bytes; at most 268,435,456 are read",
    ):
        from megaverl.data.tokenizers import load_tokenizer

        load_tokenizer(path)
