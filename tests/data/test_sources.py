"""Sources of rows: files, folders, data sets of the hub's library, own code; with weights, in a stream, with tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megaverl.config.run import SourceConfig
from megaverl.data.datasets import BLOCK, MixedSampler, Mixture, PromptDataset
from megaverl.data.prompts import (
    Columns,
    PromptEncoder,
    PromptFormat,
    check_tools,
    load_tools,
)
from megaverl.data.sources import kind_of, load_hub, open_source
from megaverl.data.streaming import PromptStream, StreamedPrompts
from megaverl.data.tokenizers import Tokenizer
from megaverl.errors import DataError
from tests.checkpoint.convert.hub_server import FakeHub, serving

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def rows(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{name} {number}", "answer": str(number)} for number in range(count)
    ]


def jsonl(path: Path, some: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


@pytest.fixture
def encoder(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, PromptFormat(chat_template="none"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "b").mkdir(parents=True)
    jsonl(tmp_path / "data" / "a.jsonl", rows("a", 5))
    table = pyarrow.Table.from_pylist(rows("b", 7))
    pyarrow.parquet.write_table(
        table, tmp_path / "data" / "b" / "b.parquet", row_group_size=3
    )
    (tmp_path / "data" / "README.md").write_text("no data")
    return tmp_path


def texts(found: Any) -> list[str]:
    return [record.prompt for record in found]


def test_a_folder_is_all_its_data_files(folder: Path) -> None:
    found = open_source(folder / "data")
    assert [found[i]["prompt"] for i in range(len(found))] == [
        f"a {i}" for i in range(5)
    ] + [f"b {i}" for i in range(7)]
    assert "a.jsonl, line 1" in found.where(0) and "b.parquet, row 7" in found.where(11)
    (folder / "none").mkdir()
    with pytest.raises(
        DataError, match=r"no file in this folder ends in \.jsonl or \.parquet"
    ):
        open_source(folder / "none")


def test_only_the_first_rows(folder: Path) -> None:
    found = open_source(SourceConfig(path=str(folder / "data"), limit=3))
    assert (
        len(found) == 3
        and found.fingerprint != open_source(folder / "data").fingerprint
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("org/name", "hub"),
        ("data/train.jsonl", "files"),
        ("data/*.jsonl", "files"),
        ("rows.py:load", "own"),
        ("pack.module:load", "own"),
        ("nothing_there", "files"),
    ],
)
def test_kinds(path: str, kind: str) -> None:
    assert kind_of(path) == kind


def test_data_sets_of_the_hubs_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="pip install 'megaverl[datasets]'"
    )
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows("t", 4)),
        test=datasets.Dataset.from_list(rows("v", 2)),
    )
    both.save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    assert kind_of(path) == "saved"
    found = open_source(SourceConfig(path=path, split="test"))
    assert (len(found), found[1]) == (2, rows("v", 2)[1])
    with pytest.raises(DataError, match="it has train, test"):
        open_source(SourceConfig(path=path, split="validation"))


ON_THE_HUB = """
import json, sys
from megaverl.cli.main import main
from megaverl.config.run import SourceConfig
from megaverl.data.prompts import Columns
from megaverl.data.prompts import PromptEncoder, PromptFormat
from megaverl.data.sources import open_source
from megaverl.data.streaming import StreamedPrompts
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError

encoder = PromptEncoder(load_tokenizer(sys.argv[1]), PromptFormat(chat_template="none"))
def stream():
    return StreamedPrompts([SourceConfig(path="org/sums")], encoder, Columns(), seed=0, shuffle_buffer=7)
test = open_source(SourceConfig(path="org/sums", split="test"))
whole, first, second = stream(), stream(), stream()
first.take(4)
second.load_state_dict(json.loads(json.dumps(first.state_dict())), 0)
said = []
for source in (SourceConfig(path="org/none"), SourceConfig(path="org/sums", split="validation")):
    try:
        open_source(source)
    except DataError as error:
        said.append(str(error))
code = main(["data", "check", "org/sums", "--split", "test"])
print(json.dumps({
    "test": [test[i] for i in range(len(test))], "said": said, "code": code,
    "whole": [record.prompt for record in whole.take(14)], "rest": [record.prompt for record in second.take(10)],
}))
"""


def test_names_on_the_hub(tmp_path: Path, sentencepiece_path: Path) -> None:
    """The library itself, asking a server that speaks the hub's endpoints: loaded whole, and streamed."""
    pytest.importorskip("datasets", reason="pip install 'megaverl[datasets]'")
    folder = tmp_path / "sums"
    folder.mkdir()
    jsonl(folder / "train.jsonl", rows("t", 7))
    jsonl(folder / "test.jsonl", rows("v", 3))
    with serving(FakeHub({"datasets/org/sums": folder})) as hub:
        done = subprocess.run(
            [sys.executable, "-c", ON_THE_HUB, str(sentencepiece_path)],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_OFFLINE": "0",
            },
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["test"] == rows("v", 3) and found["code"] == 0
    assert "org/sums: 3 rows, 3 can be used" in done.stdout
    assert (
        sorted(found["whole"][:7]) == [f"t {i}" for i in range(7)]
        and found["rest"] == found["whole"][4:]
    )
    assert (
        found["said"][0].startswith("org/none: datasets cannot load it")
        and "validation" in found["said"][1]
    )


OWN = """
def good(): return [{"prompt": "x", "answer": "y"}]
def bad(): return [1]
def none(): return 3
def raises(): raise KeyError("z")
"""


def test_rows_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert open_source(f"{tmp_path / 'own.py'}:good")[0]["prompt"] == "x"
    for name, said in (
        ("bad", "row 1: found int"),
        ("none", "it gave int"),
        ("raises", "raised KeyError"),
    ):
        with pytest.raises(DataError, match=said):
            open_source(f"{tmp_path / 'own.py'}:{name}")


def test_a_mixture_has_its_shares_in_every_block() -> None:
    mixture = Mixture([3, 1, 0.0001], seed=5)
    first = [mixture.at(position) for position in range(2 * BLOCK)]
    for block in (first[:BLOCK], first[BLOCK:]):
        counts = Counter(source for source, _ in block)
        assert (
            counts[2] == 1
            and abs(counts[0] - 3 * counts[1]) <= 4
            and sum(counts.values()) == BLOCK
        )
    for source in range(3):
        turns = [turn for other, turn in first if other == source]
        assert turns == list(range(len(turns))), "every turn once, in order"
    assert first[:BLOCK] != first[BLOCK:]


def test_a_mixed_sampler_reads_every_row_of_a_source_before_any_again() -> None:
    sampler = MixedSampler([4, 100], [1.0, 1.0], 8, seed=1)
    taken = [row for step in range(100) for row in sampler.indices(step)]
    small = [row for row in taken if row < 4]
    assert 350 < len(small) < 450
    assert all(
        sorted(small[i : i + 4]) == [0, 1, 2, 3] for i in range(0, len(small) - 4, 4)
    )
    assert sampler.indices(7) == sampler.rows(56, 8), (
        "a step is the same whatever came before"
    )
    with pytest.raises(DataError, match="weights"):
        sampler.check_state({**sampler.state_dict(), "weights": [1.0, 2.0]})


def test_weighted_sources_of_a_data_set(folder: Path, encoder: PromptEncoder) -> None:
    a, b = str(folder / "data" / "a.jsonl"), str(folder / "data" / "b" / "b.parquet")
    data = PromptDataset.load(
        [SourceConfig(path=a, weight=3.0), SourceConfig(path=b, weight=1.0)], encoder
    )
    sampler = data.sampler(16, seed=0)
    counts = Counter(
        data[i].prompt[0] for step in range(20) for i in sampler.indices(step)
    )
    assert 2 < counts["a"] / counts["b"] < 4.5
    with pytest.raises(DataError, match="Give every source one, or none"):
        PromptDataset.load(
            [SourceConfig(path=a, weight=3.0), SourceConfig(path=b)], encoder
        )


def test_short_prompts_are_dropped_and_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = jsonl(
        tmp_path / "x.jsonl",
        [{"prompt": "x", "answer": ""}, *rows("a longer prompt with words", 3)],
    )
    encoder = PromptEncoder(tokenizer, PromptFormat(chat_template="none", min_tokens=4))
    data = PromptDataset.load(path, encoder)
    assert (len(data), data.report.num_short, data.report.num_dropped) == (3, 1, 0)
    assert "1 too short and dropped" in str(data.report)
    assert PromptStream(data, data.sampler(1, 0)).losses == str(data.report)
    streamed = StreamedPrompts([path], encoder, Columns(), seed=0)
    streamed.take(3)
    assert streamed.losses == "3 prompts; 1 dropped for their length"


@pytest.mark.parametrize("shuffle_buffer", [1, 4])
@pytest.mark.parametrize("weights", [(None, None), (2.0, 1.0)])
def test_a_stream_goes_on_exactly(
    folder: Path,
    encoder: PromptEncoder,
    shuffle_buffer: int,
    weights: tuple[float | None, float | None],
) -> None:
    """Wherever it is cut, what follows is the same; through the ends of files and of epochs."""

    def stream() -> StreamedPrompts:
        paths = (folder / "data" / "a.jsonl", folder / "data" / "b")
        sources = [
            SourceConfig(path=str(path), weight=weight)
            for path, weight in zip(paths, weights, strict=True)
        ]
        return StreamedPrompts(
            sources, encoder, Columns(), seed=3, shuffle_buffer=shuffle_buffer
        )

    whole = texts(stream().take(40))
    assert len(set(whole[:20])) > 8
    if weights == (None, None) and shuffle_buffer == 1:
        assert (
            whole[:12] == [f"a {i}" for i in range(5)] + [f"b {i}" for i in range(7)]
            and whole[12] == "a 0"
        )
    for cut in (0, 1, 3, 4, 11, 12, 29):
        first, second = stream(), stream()
        assert texts(first.take(cut)) == whole[:cut]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())), 0)
        assert texts(second.take(40 - cut)) == whole[cut:], cut
        assert second.position == 40
        sought = stream()
        sought.seek(cut)
        assert texts(sought.take(1)) == whole[cut : cut + 1]


def test_a_stream_of_the_hubs_library(tmp_path: Path, encoder: PromptEncoder) -> None:
    datasets = pytest.importorskip(
        "datasets", reason="pip install 'megaverl[datasets]'"
    )
    datasets.Dataset.from_list(rows("t", 5)).save_to_disk(str(tmp_path / "saved"))

    def stream(limit: int | None = None) -> StreamedPrompts:
        source = SourceConfig(path=str(tmp_path / "saved"), limit=limit)
        return StreamedPrompts([source], encoder, Columns(), seed=0, shuffle_buffer=3)

    whole = texts(stream().take(12))
    assert Counter(whole[:9]).most_common(1)[0][1] <= 2
    for cut in (2, 5, 7):
        first, second = stream(), stream()
        first.take(cut)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())), 0)
        assert texts(second.take(12 - cut)) == whole[cut:]
    assert set(texts(stream(limit=2).take(6))) == {"t 0", "t 1"}


def test_a_stream_of_other_sources_is_refused(
    folder: Path, encoder: PromptEncoder
) -> None:
    stream = StreamedPrompts(
        [folder / "data"], encoder, Columns(), seed=3, shuffle_buffer=4
    )
    other = StreamedPrompts(
        [folder / "data"], encoder, Columns(), seed=4, shuffle_buffer=8
    )
    with pytest.raises(
        DataError, match="seed: was 3, is 4; shuffle_buffer: was 4, is 8"
    ):
        other.load_state_dict(stream.state_dict(), 0)


def test_a_bad_row_of_a_stream_is_named(tmp_path: Path, encoder: PromptEncoder) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n\n{"prompt": 3}\n')
    stream = StreamedPrompts([path], encoder, Columns(), seed=0)
    stream.take(1)
    with pytest.raises(DataError, match=r"bad\.jsonl, line 3: 'prompt' is int"):
        stream.take(1)


CHAT = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}{% endfor %}<assistant>"
)


def test_tools_reach_the_chat_template(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer.backend, "chat_template", CHAT)
    monkeypatch.setattr(tokenizer, "chat_template", CHAT, raising=False)
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    asked = [
        {"role": "user", "content": "1+1?"},
        call,
        {"role": "tool", "content": "2", "tool_call_id": "0"},
    ]
    path = jsonl(
        tmp_path / "x.jsonl",
        [
            {"prompt": asked, "answer": "2", "tools": TOOLS},
            {"prompt": "hi", "answer": "", "tools": json.dumps(TOOLS)},
        ],
    )
    data = PromptDataset.load(path, PromptEncoder(tokenizer))
    assert (
        data[0].text
        == "<tool>add</tool><user>1+1?<assistant><call>add</call><tool>2<assistant>"
    )
    assert (
        data[1].text.startswith("<tool>add</tool><user>hi")
        and "tools" not in data[1].extra
    )
    plain = PromptDataset.load(
        jsonl(tmp_path / "y.jsonl", rows("y", 1)),
        PromptEncoder(tokenizer),
        Columns(default_tools=TOOLS),
    )
    assert plain[0].text.startswith("<tool>add</tool>")
    with pytest.raises(DataError, match="has tools, and no chat template"):
        PromptDataset.load(
            path,
            PromptEncoder(tokenizer, PromptFormat(chat_template="none", max_tokens=64)),
        )


@pytest.mark.parametrize("value", ["[", "3", [3], [{"function": {}}], {"name": "x"}])
def test_tools_that_are_none(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 1"):
        check_tools(value, "row 1")
    with pytest.raises(DataError, match=r"data\.tools"):
        load_tools(tmp_path / "none.json")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_revision_is_handed_to_datasets(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    datasets = pytest.importorskip("datasets")
    given: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        given.append((arguments, options))
        rows = datasets.Dataset.from_list([{"prompt": "a", "answer": "b"}])
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    load_hub(SourceConfig(path="org/name", revision="v2"), streaming=streaming)
    load_hub(SourceConfig(path="org/name"), streaming=streaming)
    assert [options["revision"] for _, options in given] == ["v2", None]


def test_a_revision_of_what_is_not_on_the_hub_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(
        DataError,
        match=r"revision=v2 is of data sets on the hub, .* Leave revision out",
    ):
        open_source(SourceConfig(path=str(path), revision="v2"))
