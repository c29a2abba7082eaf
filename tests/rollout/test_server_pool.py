"""Servers of a pool, over real HTTP, each with a model: who is refused, who is asked next, who comes and goes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.config import RolloutConfig
from megaverl.errors import RolloutError
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.engine import SamplingOptions, SavedWork
from megaverl.rollout.hf_engine import HFEngine
from megaverl.rollout.server_engine import ServerEngine
from megaverl.rollout.server_pool import (
    POOL_FILE,
    PublishedWeights,
    addresses_of,
    change,
)
from tests.rollout.sglang_server import SGLangLike

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [5, 6, 7]] * 3
SEEDS = list(range(12))
WAY = SamplingOptions(max_tokens=5)
TOKENS = (3, 17, 42, 99, 0, 55)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("model"), tie_embeddings=True)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_tiny_folder(
        tmp_path_factory.mktemp("newer"), tie_embeddings=True, seed=1
    )


@pytest.fixture
def made() -> Iterator[list[ServerEngine]]:
    engines: list[ServerEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def engine(
    made: list[ServerEngine],
    model: Path,
    run: Path,
    *servers: SGLangLike,
    **options: Any,
) -> ServerEngine:
    given = {
        "kind": "sglang",
        "urls": [server.url for server in servers],
        "poll_seconds": 0.02,
        "wait_seconds": 0.3,
    }
    config = RolloutConfig.model_validate(
        {"engine": "server", "servers": {**given, **options}}
    )
    made.append(ServerEngine(model, config, run_dir=run, max_model_len=24))
    return made[-1]


def version(folder: Path, name: str, *, of: Path | None = None) -> PublishedWeights:
    """The weights of a folder; their log-probs are those of another one, if that is given."""
    plain = HFEngine(of or folder, dtype=torch.float32, max_model_len=24)
    rows = plain.model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    known = tuple(
        float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)
    )
    return PublishedWeights(str(folder), name, TOKENS, known, 1e-3)


def plainly(folder: Path) -> list[list[int]]:
    found = HFEngine(folder, dtype=torch.float32, max_model_len=24).generate(
        PROMPTS, WAY, SEEDS
    )
    return [each.token_ids for each in found]


def test_what_is_drawn_is_what_one_engine_draws(
    made: list[ServerEngine], model: Path, newer: Path, tmp_path: Path
) -> None:
    """By two servers with a new version's weights: neither server nor company decides, and each has its part."""
    with SGLangLike(model) as one, SGLangLike(model) as two:
        asked = engine(made, model, tmp_path, one, two, max_requests=2)
        with pytest.raises(RolloutError, match="no weights yet"):
            asked.generate(PROMPTS, WAY, SEEDS)
        asked.use(version(newer, "run-1"))
        heard: dict[int, Any] = {}
        asked.on_finished = heard.__setitem__
        found = asked.generate(PROMPTS, WAY, SEEDS)
        assert [each.token_ids for each in found] == plainly(newer) != plainly(model)
        assert heard == dict(enumerate(found))
        local = HFEngine(newer, dtype=torch.float32, max_model_len=24)
        for served, own in zip(
            asked.score_prompts(PROMPTS), local.score_prompts(PROMPTS), strict=True
        ):
            assert served.top_tokens == own.top_tokens
            assert served.log_probs == pytest.approx(own.log_probs, abs=1e-5)
            assert served.top_log_probs == pytest.approx(own.top_log_probs, abs=1e-5)
        plain = local.generate(PROMPTS, WAY, SEEDS)
        for mine, its in zip(found, plain, strict=True):
            torch.testing.assert_close(
                torch.tensor(mine.log_probs),
                torch.tensor(its.log_probs),
                atol=1e-5,
                rtol=0,
            )
        assert {one.version, two.version} == {"run-1"}
        # One was the fingerprint.
        assert min(one.calls["/generate"], two.calls["/generate"]) > 1
        assert all("text" not in body for body in (*one.bodies, *two.bodies))


def test_a_server_that_dies_costs_no_sample(
    made: list[ServerEngine], model: Path, tmp_path: Path
) -> None:
    """... nor does one that was started again with other weights: it is given the current ones before it is used."""

    def forget(server: SGLangLike) -> None:
        server.version = "default"

    with (
        SGLangLike(model, happenings={("/generate", 4): SGLangLike.die}) as dies,
        SGLangLike(model, happenings={("/generate", 5): forget}) as stays,
    ):
        asked = engine(
            made, model, tmp_path, dies, stays, max_requests=2, wait_seconds=20.0
        )
        asked.use(version(model, "run-1"))
        assert [
            each.token_ids for each in asked.generate(PROMPTS, WAY, SEEDS)
        ] == plainly(model)
        assert (
            stays.calls["/update_weights_from_disk"] == 2 and stays.version == "run-1"
        )
        assert asked.pool.members[dies.url].state == "lost"


def test_servers_join_and_leave(
    made: list[ServerEngine],
    model: Path,
    newer: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through the watched file: the one that joins gets the weights first, the one that left is asked no more."""
    caplog.set_level(logging.INFO, "megaverl.announcements")
    with SGLangLike(model) as first, SGLangLike(model) as second:
        asked = engine(made, model, tmp_path, first, wait_seconds=20.0)
        asked.use(version(newer, "run-1"))
        change(tmp_path / POOL_FILE, [second.url], adds=True)
        change(tmp_path / POOL_FILE, [first.url + "/"], adds=False)
        with (tmp_path / POOL_FILE).open("a") as file:
            file.write("no server # a remark\nhttp://10.0.0.5:8000\n")
        before = first.calls["/generate"]
        assert [
            each.token_ids for each in asked.generate(PROMPTS, WAY, SEEDS)
        ] == plainly(newer)
        # Strangers, and those without a token, are nobody.
        assert list(asked.pool.members) == [second.url]
        assert (
            first.calls["/generate"] == before
            and second.calls["/update_weights_from_disk"] == 1
        )
        # A server that waits for new weights has not left.
        asked.use(version(newer, "run-2"))
        told = [
            text
            for name, _, text in caplog.record_tuples
            if name == "megaverl.announcements"
        ]
        assert told == [
            f"rollout server {first.url} joined (1 in the pool)",
            f"rollout server {first.url} left (0 in the pool): it was removed from the pool.",
            f"rollout server {second.url} joined (1 in the pool)",
        ]
        names = {
            f"rollout/server_samples/{second.url.removeprefix('http://')}": float(
                len(PROMPTS)
            )
        }
        assert SavedWork.shares([vars(asked.saved_work)]) == names
        change(tmp_path / POOL_FILE, [first.url], adds=True)
        assert addresses_of(
            RolloutConfig.model_validate({"servers": {"urls": [first.url]}}).servers,
            tmp_path / POOL_FILE,
        ) == [first.url, second.url, "no server", "http://10.0.0.5:8000"]


def test_who_does_not_take_the_weights_is_not_used(
    made: list[ServerEngine], model: Path, newer: Path, tmp_path: Path
) -> None:
    """A server that says that it has read them and has not is found out by its
    log-probs: they are not the trainer's, or where that much is allowed, they are its
    old ones.
    """
    with SGLangLike(model) as server:
        asked = engine(made, model, tmp_path, server)
        with pytest.raises(
            RolloutError,
            match=f"{server.url}: has other weights than .* after reading it",
        ):
            asked.use(version(model, "run-1", of=newer))
        assert server.version == "default"
    with SGLangLike(model) as server:
        asked = engine(made, model, tmp_path, server)
        asked.use(replace(version(model, "run-1"), tolerance=0.2))
        with pytest.raises(
            RolloutError, match="no rollout server .* what they were before, to the bit"
        ):
            asked.use(replace(version(model, "run-2", of=newer), tolerance=0.2))


def test_nobody_is_left(made: list[ServerEngine], model: Path, tmp_path: Path) -> None:
    with SGLangLike(model, happenings={("/generate", 3): SGLangLike.die}) as only:
        asked = engine(made, model, tmp_path, only)
        asked.use(version(model, "run-1"))
        with pytest.raises(
            RolloutError,
            match=rf"no rollout server .* {only.url}: {only.url}: no answer",
        ):
            asked.generate(PROMPTS, WAY, SEEDS)


def test_who_is_refused_before_anything_is_done(
    made: list[ServerEngine],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them at once, each by its name and what to do."""
    other = make_tiny_folder(tmp_path / "other", tie_embeddings=True, hidden_size=64)
    vocabulary = make_tiny_folder(
        tmp_path / "vocabulary", tie_embeddings=True, vocab_size=120
    )
    servers = {
        "it serves another model, .*hidden_size 64 and not 32": SGLangLike(other),
        "vocab_size 120 and not 100": SGLangLike(vocabulary),
        r"has no GET /get_model_info \(it answers 404 .*\). Start it with: python -m sglang": SGLangLike(
            model, without=("/get_model_info",)
        ),
        "answers 401 to GET /get_model_info: it wants a token": SGLangLike(
            model, token="secret"
        ),
        "it takes 16 tokens, and a prompt with its response may have 24": SGLangLike(
            model, context_length=16
        ),
        "without the seeds .*--enable-deterministic-inference": SGLangLike(
            model, enable_deterministic_inference=False
        ),
    }
    with pytest.raises(RolloutError) as raised:
        engine(made, model, tmp_path, *servers.values())
    told = str(raised.value).splitlines()
    for (text, server), line in zip(servers.items(), told, strict=True):
        assert server.url in line
        assert re.search(text, line), line
        assert not server.calls["/update_weights_from_disk"]
        server.die()
    with pytest.raises(
        RolloutError, match="token_env=NOWHERE: the environment has no such variable"
    ):
        engine(made, model, tmp_path, token_env="NOWHERE")
    with SGLangLike(model, token="secret") as guarded:
        monkeypatch.setenv("POOL_TOKEN", "secret")
        asked = engine(made, model, tmp_path, guarded, token_env="POOL_TOKEN")
        asked.use(version(model, "run-1"))
        assert [
            each.token_ids for each in asked.generate(PROMPTS, WAY, SEEDS)
        ] == plainly(model)
