"""Values of rows: what JSON cannot hold is converted or refused by row and column, and null means absent."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaverl.cli.main import main
from megaverl.data.prompts import Columns, PromptEncoder, PromptFormat
from megaverl.data.row_values import parse_row, plain_value
from megaverl.data.sources import open_source
from megaverl.data.streaming import StreamedPrompts
from megaverl.data.tokenizers import Tokenizer, load_tokenizer
from megaverl.errors import DataError
from megaverl.outside import MAX_DEPTH

SURROGATE = '"\\ud83d"'
COLUMNS = Columns()


def write_parquet(path: Path, **columns: Any) -> Path:
    count = len(next(iter(columns.values())))
    plain = {"prompt": ["a"] * count, "answer": ["b"] * count}
    pyarrow.parquet.write_table(pyarrow.table(plain | columns), path)
    return path


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


CONVERTED = [
    (datetime.datetime(2024, 1, 2, 3, 4, 5, 6), "2024-01-02T03:04:05.000006"),
    (datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), "2024-01-02T00:00:00+00:00"),
    (datetime.date(2024, 1, 2), "2024-01-02"),
    (datetime.time(3, 4), "03:04:00"),
    (datetime.timedelta(minutes=1, milliseconds=500), 60.5),
    (Decimal("12.50"), "12.50"),
    (Decimal("1E+3"), "1000"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ((1, 2), [1, 2]),
    ({1: "a"}, {"1": "a"}),
    (numpy.float32(0.5), 0.5),
    (numpy.arange(2), [0, 1]),
    (numpy.datetime64("2024-01-02"), "2024-01-02"),
    (
        {"a": [{"b": datetime.date(2024, 1, 2), "c": None}]},
        {"a": [{"b": "2024-01-02", "c": None}]},
    ),
    (2**64 - 1, 2**64 - 1),
    (nested(MAX_DEPTH), nested(MAX_DEPTH)),
]


@pytest.mark.parametrize(("value", "plain"), CONVERTED, ids=range(len(CONVERTED)))
def test_values_become_what_json_holds(value: Any, plain: Any) -> None:
    found = plain_value(value, "row 1", "column")
    assert found == plain and json.loads(json.dumps(found)) == found


REFUSED = [
    (b"abc", "'column' is bytes"),
    ({"a": [1, b"abc"]}, r"'column\.a\[1\]' is bytes"),
    (float("nan"), "'column' is NaN"),
    ([-float("inf")], r"'column\[0\]' is infinite"),
    (Decimal("NaN"), "'column' is NaN"),
    (numpy.float32("nan"), "'column' is NaN"),
    ([10**5000], "more than 4300 digits"),
    ([-(10**5000)], "more than 4300 digits"),
    ("ab\ud83d", "half of a surrogate pair .*character 3"),
    ({"\udc97": 1}, "half of a surrogate pair"),
    ({None: 1}, "keys of mappings are text"),
    ({1.5: 1}, "keys of mappings are text"),
    ({"a"}, r"builtins\.set, which JSON cannot hold"),
    (object(), r"builtins\.object, which JSON cannot hold"),
    (nested(MAX_DEPTH + 1), "more than 100 levels"),
    (nested(5000), "more than 100 levels"),
]


@pytest.mark.parametrize(("value", "said"), REFUSED, ids=range(len(REFUSED)))
def test_values_that_json_cannot_hold_are_refused(value: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"^row 1: .*{said}"):
        plain_value(value, "row 1", "column")


LINES = {
    "a surrogate in a prompt": '{"prompt": ' + SURROGATE + ', "answer": "b"}',
    "a surrogate in a message": '{"prompt": [{"role": "user", "content": '
    + SURROGATE
    + '}], "answer": "b"}',
    "a surrogate in an answer": '{"prompt": "a", "answer": [' + SURROGATE + "]}",
    "a surrogate in a column": '{"prompt": "a", "answer": "b", "more": {"x": '
    + SURROGATE
    + "}}",
    "a surrogate in a name": '{"prompt": "a", "answer": "b", ' + SURROGATE + ": 1}",
    "a surrogate in tools": json.dumps(
        {"prompt": "a", "answer": "b", "tools": '[{"name": ' + SURROGATE + "}]"}
    ),
    "digits": '{"prompt": "a", "answer": ' + "1" * 5000 + "}",
    "brackets": '{"prompt": "a", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "open brackets": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "some brackets": '{"prompt": "a", "answer": ' + "[" * 500 + "]" * 500 + "}",
    "brackets in tools": json.dumps(
        {"prompt": "a", "answer": "b", "tools": "[" * 100_000}
    ),
    "an infinite number": '{"prompt": "a", "answer": "b", "more": 1e999}',
    "NaN": '{"prompt": "a", "answer": "b", "more": NaN}',
    "a huge margin": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c\ud83d"}),
}


@pytest.mark.parametrize("name", LINES)
def test_every_reader_names_the_line(
    name: str, tmp_path: Path, tokenizer: Tokenizer, capsys: Any
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + LINES[name] + "\n")
    encoder = PromptEncoder(tokenizer, PromptFormat(chat_template="none"))
    stream = StreamedPrompts([path], encoder, COLUMNS, seed=0)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: "):
        stream.take(2)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: "):
        COLUMNS.read(open_source(path)[1], open_source(path).where(1))
    assert main(["data", "check", str(path)]) == 1
    shown = capsys.readouterr()
    assert "line 2: " in shown.out and "Traceback" not in shown.out + shown.err
    shown.out.encode()


def test_numbers_beyond_every_float(tmp_path: Path, capsys: Any) -> None:
    from megaverl.data.preferences import PreferenceColumns
    from megaverl.errors import RewardError
    from megaverl.rewards import RewardSample, build_reward

    with pytest.raises(DataError, match=r"row 1: 'margin' is 1000.* at most 1e\+30"):
        PreferenceColumns(margin="margin").read_margin({"margin": 10**400}, "row 1")
    (tmp_path / "reward.py").write_text("def large(response):\n    return -10**400\n")
    with pytest.raises(RewardError, match="for sample 0 of 1 .*; it must "):
        build_reward({"function": f"{tmp_path / 'reward.py'}:large"}).score(
            [RewardSample("a", "b", "c")]
        )


IN_PARQUET = [
    (
        pyarrow.array([1], pyarrow.timestamp("us", "Europe/Rome")),
        "1970-01-01T01:00:00.000001+01:00",
    ),
    (pyarrow.array([0], pyarrow.timestamp("s")), "1970-01-01T00:00:00"),
    (pyarrow.array([1], pyarrow.date32()), "1970-01-02"),
    (pyarrow.array([Decimal("1.50")]), "1.50"),
    (
        pyarrow.array(
            [[("a", 1), ("b", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())
        ),
        {"a": 1, "b": None},
    ),
    (
        pyarrow.array(
            [[(7, datetime.date(2024, 1, 2))]],
            pyarrow.map_(pyarrow.int64(), pyarrow.date32()),
        ),
        {"7": "2024-01-02"},
    ),
    (pyarrow.array(["x"]).dictionary_encode(), "x"),
    (pyarrow.array([[{"a": 1, "b": None}, None]]), [{"a": 1}, None]),
    (pyarrow.array([{"a": {"b": None, "c": [None]}}]), {"a": {"c": [None]}}),
]


@pytest.mark.parametrize(("array", "plain"), IN_PARQUET)
def test_columns_of_parquet(array: Any, plain: Any, tmp_path: Path) -> None:
    rows = open_source(write_parquet(tmp_path / "rows.parquet", when=array))
    extra = COLUMNS.read(rows[0], rows.where(0)).extra
    assert extra == {"when": plain} and json.loads(json.dumps(extra)) == extra


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pyarrow.array([b"a"]), "'when' is bytes"),
        (
            pyarrow.array([[{"bytes": b"a", "path": "b"}]]),
            r"'when\[0\]\.bytes' is bytes",
        ),
        (pyarrow.array([float("nan")]), "'when' is NaN"),
        (
            pyarrow.array([10**7], pyarrow.date32()),
            "it holds a value that cannot be read",
        ),
        (
            pyarrow.array([b"\xed\xa0\xbd"]).view(pyarrow.string()),
            "it holds a value that cannot be read",
        ),
    ],
)
def test_columns_of_parquet_that_are_refused_at_the_start(
    array: Any, said: str, tmp_path: Path, tokenizer: Tokenizer, capsys: Any
) -> None:
    path = write_parquet(tmp_path / "rows.parquet", when=array)
    with pytest.raises(DataError, match=f"row 1: {said}"):
        StreamedPrompts([path], PromptEncoder(tokenizer), COLUMNS, seed=0)
    assert main(["data", "check", str(path)]) == 1
    assert "rows.parquet, row 1: " in capsys.readouterr().out


def test_the_check_without_a_model_leaves_images_out(
    tmp_path: Path, capsys: Any
) -> None:
    path = write_parquet(
        tmp_path / "rows.parquet", images=[[{"bytes": b"a", "path": None}]]
    )
    assert main(["data", "check", str(path)]) == 0
    assert "1 can be used" in capsys.readouterr().out


def test_the_check_says_which_columns_it_converts(tmp_path: Path, capsys: Any) -> None:
    path = write_parquet(
        tmp_path / "rows.parquet",
        when=[datetime.date(2024, 1, 2)],
        score=[Decimal("1.5")],
    )
    assert main(["data", "check", str(path)]) == 0
    assert (
        "as JSON has no such values: when (date), score (Decimal)"
        in capsys.readouterr().out
    )


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)
TESTS = st.fixed_dictionaries(
    {},
    optional={
        "call": TEXTS,
        "args": st.lists(st.none() | st.integers(0, 9), max_size=3),
        "expected": st.integers(0, 9),
        "kwargs": st.fixed_dictionaries(
            {}, optional={"x": st.integers(0, 9), "y": TEXTS}
        ),
    },
)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.just("a"),
            "answer": st.lists(TESTS.filter(bool), min_size=1, max_size=3),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(rows=ROWS)
def test_rows_read_the_same_from_parquet_and_jsonl(
    rows: list[dict[str, Any]], tmp_path_factory: Any
) -> None:
    def has_content(value: Any) -> Any:
        """Arrow has no struct without fields, so an empty mapping comes back as an absent one."""
        if isinstance(value, dict):
            return {key: has_content(item) for key, item in value.items() if item != {}}
        return (
            [has_content(item) for item in value] if isinstance(value, list) else value
        )

    rows = has_content(rows)
    schema = pyarrow.schema(
        [
            ("prompt", pyarrow.string()),
            (
                "answer",
                pyarrow.list_(
                    pyarrow.struct(
                        [
                            ("call", pyarrow.string()),
                            ("args", pyarrow.list_(pyarrow.int64())),
                            ("expected", pyarrow.int64()),
                            (
                                "kwargs",
                                pyarrow.struct(
                                    [("x", pyarrow.int64()), ("y", pyarrow.string())]
                                ),
                            ),
                        ]
                    )
                ),
            ),
        ]
    )
    path = tmp_path_factory.getbasetemp() / "same.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    found = open_source(path)
    assert [COLUMNS.read(found[n], "row").reference for n in range(len(rows))] == [
        row["answer"] for row in rows
    ]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"})
PRICE = tool("price", ticker={"type": "string", "enum": ["A", "B"]})
WITH_CALLS = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ message.content }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} ARGUMENTS]{% endfor %}<|im_end|>{% endfor %}"""
TAKES = {
    "mappings": "{{ call.function.arguments | tojson }}",
    "text": "{{ '' + call.function.arguments }}",
    "both": "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}",
    "items": '{% for key, value in call.function.arguments.items() %}"{{ key }}": "{{ value }}"{% endfor %}',
}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("template", TAKES)
@pytest.mark.parametrize(
    "arguments",
    [{"city": "Rome"}, '{"city": "Rome"}', {"city": "\N{SNOWMAN}"}, "{}", {}],
)
def test_arguments_of_calls_are_encoded_once(
    template: str, arguments: Any, sentencepiece_path: Path
) -> None:
    tokenizer = load_tokenizer(
        sentencepiece_path,
        chat_template=WITH_CALLS.replace("ARGUMENTS", TAKES[template]),
    )
    prompt = COLUMNS.read(
        {"prompt": conversation(arguments), "answer": ""}, "row"
    ).prompt
    text = PromptEncoder(tokenizer).render(prompt)
    written = (
        arguments
        if isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False)
    )
    assert f"[weather {written if template != 'items' else written[1:-1]}]" in text


def test_arguments_that_are_no_json_stay_text(sentencepiece_path: Path) -> None:
    tokenizer = load_tokenizer(
        sentencepiece_path, chat_template=WITH_CALLS.replace("ARGUMENTS", TAKES["both"])
    )
    for arguments in ("Rome", "[1]", "{" * 100_000, '{"city": '):
        assert f"[weather {arguments}]" in PromptEncoder(tokenizer).render(
            conversation(arguments)
        )


def test_tools_and_calls_read_the_same_from_parquet_and_jsonl(
    tmp_path: Path, sentencepiece_path: Path
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "answer": "1",
            "tools": [WEATHER],
        },
        {
            "prompt": [{"role": "user", "content": "hi"}],
            "answer": "1",
            "tools": [PRICE],
        },
        {"prompt": conversation({"city": "Rome"}), "answer": "1", "tools": [WEATHER]},
        {
            "prompt": conversation({"ticker": "A"}),
            "answer": "1",
            "tools": [PRICE, WEATHER],
        },
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet"
    )
    filled = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    # What `datasets` writes as JSON has the nulls of Arrow.
    for name, some in (("rows", rows), ("filled", filled)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in some)
        )
    encoder = PromptEncoder(
        load_tokenizer(
            sentencepiece_path,
            chat_template=WITH_CALLS.replace("ARGUMENTS", TAKES["mappings"]),
        )
    )

    def rendered(name: str) -> list[str]:
        source = open_source(tmp_path / name)
        read = [COLUMNS.read(source[number], "row") for number in range(len(rows))]
        return [encoder.render(each.prompt, "row", each.tools) for each in read]

    assert rendered("rows.parquet") == rendered("rows.jsonl")
    assert rendered("filled.jsonl")[:2] == rendered("rows.jsonl")[:2]
    assert "null" not in "".join(rendered("rows.parquet"))


def test_nulls_that_a_schema_means_stay() -> None:
    schema = {"type": "string", "default": None, "title": None, "enum": ["A", None]}
    row = {
        "prompt": "a",
        "answer": "b",
        "tools": [tool("f", x=schema, default=None, const=schema)],
    }
    [found] = COLUMNS.read(row, "row").tools or []
    kept = {"type": "string", "default": None, "enum": ["A", None]}
    assert found["function"]["parameters"]["properties"] == {"x": kept, "const": kept}


def test_lines_that_are_no_objects() -> None:
    assert parse_row(b'\xef\xbb\xbf{"a": null}', "line 1") == {"a": None}
    for line, said in (
        (b"[1]", "found a list"),
        (b"3", "found a number"),
        (b"{", "not valid JSON"),
        (b"\xff", "JSON"),
    ):
        with pytest.raises(DataError, match=f"line 1: .*{said}"):
            parse_row(line, "line 1")
