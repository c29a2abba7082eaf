"""Models from a hub, loaded while they arrive: against a server on this machine that speaks the hub's endpoints."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaverl.checkpoint.convert.run import process_group
from megaverl.config.run import is_hub_name
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError, ModelError
from megaverl.models.hub import ModelFiles, find_model
from megaverl.processes import ending_with_parent
from tests.checkpoint.convert.folders import (
    assert_same_files,
    make_model,
    make_tokenizer,
)
from tests.checkpoint.convert.hub_server import FakeHub, serving
from tests.launcher import ROOT, Launcher

NAME = "org/model"
NOWHERE = "http://127.0.0.1:9"  # nobody listens there
GATED, PRIVATE = "GatedRepo", "RepoNotFound"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with a tokenizer, code and pickles."""
    folder = make_model(tmp_path_factory.mktemp("models") / "hf", shard_bytes=60_000)
    make_tokenizer(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit('this code ran')\n")
    return folder


@pytest.fixture
def hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeHub]:
    """The hub that the library asks, and an empty cache."""
    from huggingface_hub import constants

    with serving(FakeHub({NAME: folder})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        # The tests' own is on this machine.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with process_group():
        yield


def shards_of(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.safetensors"))


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B") and is_hub_name("org/a_b.c")
    assert not any(
        map(
            is_hub_name,
            ["model", "../model", "/a/b", "a/b/c", "./b", "~/b", "a/", "a/.."],
        )
    )
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B")  # what is here comes first


def test_each_file_is_given_while_the_next_one_is_still_coming(
    hub: FakeHub, folder: Path
) -> None:
    shards = shards_of(folder)
    hub.held = {name: threading.Event() for name in shards}
    files = find_model(NAME)
    assert {file.name for file in files.folder.iterdir()}.isdisjoint(shards)
    assert (files.folder / "config.json").is_file() and (
        files.folder / "tokenizer.json"
    ).is_file()
    arriving = files.arriving()
    assert arriving is not None
    for number, name in enumerate(shards):
        hub.held[name].set()
        assert next(arriving).read_bytes() == (folder / name).read_bytes()
        if number + 1 < len(shards):
            assert hub.asked[shards[number + 1]].wait(30)
            assert not (files.folder / shards[number + 1]).exists()
    assert next(arriving, None) is None
    assert files.arriving() is None  # a second model has all of them at once
    assert not (files.folder / "modeling_mine.py").exists()
    assert not (files.folder / "pytorch_model.bin").exists()


@pytest.mark.parametrize("grid", [{"tp": 2, "pp": 2}, {"tp": 1}], ids=str)
def test_ranks_load_while_it_comes(
    launch: Launcher, grid: dict[str, int], hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    results = launch.world(
        4,
        "tests.checkpoint.convert.ranks:load_from_hub",
        name=NAME,
        folder=folder,
        grid=grid,
        endpoint=hub.url,
        offload_folder=kept,
    )
    expected = {"differing": [], "folder": str(kept / "org--model"), "streamed": True}
    assert results == [expected] * 4
    assert len([line for line in hub.log if line.startswith("GET model-")]) == len(
        shards_of(folder)
    )


def test_a_run_starts_from_a_hub(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """What every role of a run is built with: tokenizer, model, reference."""
    from megaverl.config import load_config
    from megaverl.trainer.build import Builder

    prompts = tmp_path / "train.jsonl"
    prompts.write_text('{"prompt": "w2 w3", "answer": "w4"}\n')
    config = load_config(
        None,
        [
            f"model.path={NAME}",
            "model.dtype=float32",
            f"model.offload_folder={tmp_path / 'kept'}",
            f"data.train=[{prompts}]",
            "data.max_prompt_tokens=8",
            "rollout.sampling.max_tokens=8",
            "reward=exact_match",
            f"run.dir={tmp_path}",
        ],
        command="train",
    )
    builder = Builder(config)
    assert builder.folder == tmp_path / "kept" / "org--model"
    assert builder.tokenizer.encode("w2 w3") == [2, 3]
    first = builder.model(config.actor, "actor")
    asked = len(hub.log)
    second = builder.reference().model
    assert len(hub.log) == asked  # nothing comes twice
    assert all(
        (tensor == second.parameters[name]).all()
        for name, tensor in first.parameters.items()
    )
    assert builder.files().wait() == builder.folder


def test_the_command_takes_a_name(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    """In a process of its own, which finds the hub by HF_ENDPOINT."""
    command = [
        sys.executable,
        "-m",
        "megaverl.cli.main",
        "convert",
        NAME,
        str(tmp_path / "out"),
        "--to",
        "hf",
        "--verify",
    ]
    ended = subprocess.run(
        ending_with_parent(command),
        cwd=ROOT,
        env=os.environ
        | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert_same_files(
        folder,
        tmp_path / "out",
        but=("README.md", "pytorch_model.bin", "modeling_mine.py", "LICENSE"),
    )


def test_code_is_fetched_only_when_asked_for_and_the_risk_is_said_once(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megaverl"):
        for _ in range(2):
            assert (
                find_model(NAME, trust_remote_code=True).wait() / "modeling_mine.py"
            ).is_file()
    said = [
        record.getMessage()
        for record in caplog.records
        if "trust_remote_code" in record.getMessage()
    ]
    assert len(said) == 1
    assert (
        "will run in every rank, with your rights" in said[0]
        and "pin them with model.revision" in said[0]
    )


def test_without_weights_none_is_fetched(hub: FakeHub) -> None:
    files = find_model(NAME, with_weights=False)
    assert files.arriving() is None and (files.folder / "config.json").is_file()
    assert not [
        line for line in hub.log if "safetensors" in line and "index" not in line
    ]


def test_what_is_in_the_cache_serves_without_a_connection(
    folder: Path,
    hub: FakeHub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    found = find_model(NAME).wait()
    asked = len(hub.log)
    assert find_model(NAME).wait() == found
    # Only asked whether it is the same.
    assert not [line for line in hub.log[asked:] if line.startswith("GET model-")]
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with caplog.at_level(logging.WARNING, "megaverl"):
        assert find_model(NAME).wait() == found
    assert (
        "the hub cannot be reached" in caplog.text
        and "taken from the cache" in caplog.text
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(NAME).wait() == found
    assert shards_of(found) == shards_of(folder)
    (found / shards_of(folder)[1]).unlink()
    with pytest.raises(
        ModelError,
        match=rf"the cache does not have {shards_of(folder)[1]}, and HF_HUB_OFFLINE is set",
    ):
        find_model(NAME)


def test_a_download_that_breaks_off_goes_on(hub: FakeHub, folder: Path) -> None:
    first = shards_of(folder)[0]
    hub.broken[first] = (folder / first).stat().st_size * 2 // 3
    assert (find_model(NAME).wait() / first).read_bytes() == (
        folder / first
    ).read_bytes()
    assert hub.log.count(f"GET {first}") == 2


def changed(
    folder: Path, output: Path, change: Callable[[Path], object]
) -> dict[str, Path]:
    """The model of a hub with other files."""
    output.mkdir()
    for file in folder.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    change(output)
    return {NAME: output}


def drop(pattern: str) -> Callable[[Path], object]:
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def load(name: str = NAME, **options: Any) -> ModelFiles:
    files = find_model(name, **options)
    files.wait()
    return files


def test_errors_say_what_to_do(
    hub: FakeHub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    shard = shards_of(folder)[1]
    size = (folder / shard).stat().st_size
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {},
            {"name": "org/other"},
            r"org/other: no such model on the hub, or a private one \(401\).*HF_TOKEN",
        ),
        ({}, {"name": "nowhere"}, r"nowhere: no such folder \(looked in .*as org/name"),
        (
            {},
            {"name": str(folder / "config.json")},
            r"config.json: a file, not a folder",
        ),
        ({}, {"revision": "v9"}, r"no revision 'v9'. Fix model.revision"),
        (
            {},
            {"hub": "modelscope"},
            r"needs the package modelscope. Run: pip install modelscope",
        ),
        ({"refused": {NAME: (403, GATED)}}, {}, r"terms to be accepted.*hf auth login"),
        ({"refused": {NAME: (401, PRIVATE)}}, {}, r"or a private one \(401\)"),
        ({"refused": {NAME: (403, "")}}, {}, r"the hub answered 403. Log in"),
        ({"refused": {NAME: (501, "")}}, {}, r"the hub answered 501. Try again later"),
        ({"hidden": {shard}}, {}, rf"{shard}: not found"),
        (
            {"short": {shard: size - 9}},
            {},
            rf"{shard}: the download was interrupted .*size {size} but has size {size - 9}",
        ),
        (
            {"models": changed(folder, tmp_path / "a", drop("model*"))},
            {},
            r"no safetensors weights, only pytorch_model",
        ),
        (
            {"models": changed(folder, tmp_path / "b", drop("config.json"))},
            {},
            r"has no config.json on the hub",
        ),
        (
            {"models": changed(folder, tmp_path / "c", drop(shard))},
            {},
            rf"index.json names {shard}, which the hub does",
        ),
    ]
    for number, (state, asked, expected) in enumerate(cases):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"cache{number}"))
        with serving(FakeHub(**({"models": {NAME: folder}} | state))) as this:
            monkeypatch.setenv("HF_ENDPOINT", this.url)
            with pytest.raises(ModelError, match=expected):
                load(**asked)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(
        ModelError,
        match=r"no such folder in .*, not in the hub's cache, and the hub cannot be reached",
    ):
        load()


def test_an_error_reaches_every_rank(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    """A file that is shorter than it says, found when it is read; and one that never comes whole."""
    shard = shards_of(folder)[1]
    os_error = {"short": {shard: 999}}
    cut = {
        "models": changed(
            folder, tmp_path / "cut", lambda each: os.truncate(each / shard, 999)
        )
    }
    for state, expected in (
        (os_error, "the download was interrupted"),
        (cut, "truncated: 999 bytes found"),
    ):
        with serving(FakeHub(**({"models": {NAME: folder}} | state))) as hub:
            results = launch.world(
                4,
                "tests.checkpoint.convert.ranks:load_from_hub",
                name=NAME,
                folder=folder,
                grid={"tp": 2},
                endpoint=hub.url,
                offload_folder=tmp_path / expected,
            )
        assert all(
            shard in result["error"] and expected in result["error"]
            for result in results
        )


def test_a_tokenizer_on_a_hub_is_that_of_its_folder(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are fetched, code only where it is allowed; then they are in the cache, and the hub may be gone."""
    named = load_tokenizer(NAME)
    local = load_tokenizer(folder)
    assert named.encode("What is 12?") == local.encode("What is 12?")
    assert named.stop_token_ids == local.stop_token_ids
    fetched = {line.split()[1] for line in hub.log if line.startswith("GET")}
    assert "tokenizer.json" in fetched
    assert not any(name.endswith((".py", ".safetensors")) for name in fetched)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert load_tokenizer(NAME).encode("What is 12?") == local.encode("What is 12?")


def test_a_tokenizer_in_a_hubs_cache_that_is_too_large_is_not_read(
    hub: FakeHub, tmp_path: Path
) -> None:
    load_tokenizer(NAME)
    [cached] = (tmp_path / "cache").rglob("snapshots/*/tokenizer.json")
    # A hole, which takes no room on the disk.
    os.truncate(cached.resolve(), 300 * 2**20)
    with pytest.raises(
        DataError,
        match=r"tokenizer.json has 314,572,800 bytes; at most 268,435,456 are read",
    ):
        load_tokenizer(NAME)


def test_a_tokenizer_that_no_hub_has_is_named(hub: FakeHub) -> None:
    hub.refused["org/none"] = (404, PRIVATE)
    with pytest.raises(
        DataError, match="org/none: no tokenizer could be loaded from it"
    ):
        load_tokenizer("org/none")
