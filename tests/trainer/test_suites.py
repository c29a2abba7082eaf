"""`megaverl eval --suite` on real ranks: stored responses have inspect-ai's scores, and a real engine generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaverl.monitoring.evaluations import read_suites
from tests.data import published
from tests.launcher import Launcher
from tests.rollout.sglang_server import SGLangLike

DATA = Path(__file__).parents[1] / "data"
SUITES = ("gsm8k", "math")
# An engine that answers every sample with its stored response, by the question in the
# prompt and by the seed. Each rank is a replica of its own, so that samples of one
# prompt are generated on different ranks.
ENGINE = """
import json
import os

from megaverl.data.tokenizers import load_tokenizer
from megaverl.rollout import sample_seed
from megaverl.rollout.engine import Engine, Generation
from megaverl.trainer.validation import VALIDATION_STEP


class Stored(Engine):
    tp_size, tp_rank, may_rebind = 1, 0, True

    def __init__(self, model_folder, config, **unused):
        self.replica, self.num_replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.tokenizer = load_tokenizer(model_folder)
        rows = [row for rows in json.load(open({stored!r})).values() for row in rows]
        self.responses = {{row["question"]: row["responses"] for row in rows}}
        self.sample_of = {{sample_seed(0, VALIDATION_STEP, number): number % 4 for number in range(64)}}

    def generate(self, prompts, sampling, seeds, *, images=None):
        return [self.one(self.tokenizer.decode(list(p)), seed) for p, seed in zip(prompts, seeds, strict=True)]

    def one(self, prompt, seed):
        [question] = [question for question in self.responses if question in prompt]
        tokens = self.tokenizer.encode(self.responses[question][self.sample_of[seed]])
        return Generation([*tokens, self.tokenizer.eos_token_id], [-1.0] * (len(tokens) + 1), "stop")

    def named_parameters(self):
        return {{}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer keeps any text."""
    from megaverl.data.tokenizers import load_tokenizer, train_sentencepiece
    from megaverl.models.tiny import make_tiny_folder
    from tests.trainer.conftest import MODEL

    folder = tmp_path_factory.mktemp("suites") / "model"
    path = train_sentencepiece(
        ["a b c"], folder.parent / "tokenizer.model", vocab_size=300, byte_fallback=True
    )
    tokenizer = load_tokenizer(path)
    sizes: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(
        folder,
        "Qwen3ForCausalLM",
        **{**MODEL, "max_position_embeddings": 1024},
        **sizes,
    )
    tokenizer.save(folder)
    return folder


def arguments(model: Path, runs: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"run.dir={runs}",
        "data={max_prompt_tokens: 800, chat_template: none}",
        "rollout.sampling.max_tokens=64",
        *more,
    ]


def test_stored_responses_have_the_scores_of_inspect_ai(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    """... in the table, in eval.json and per prompt; then a second evaluation is compared with the first."""
    stored = json.loads((DATA / "suite_responses.json").read_text())
    engine = tmp_path / "stored.py"
    engine.write_text(ENGINE.format(stored=str(DATA / "suite_responses.json")))
    for suite in SUITES:
        rows = [
            {key: row[key] for key in ("question", "answer")} for row in stored[suite]
        ]
        published.write_jsonl(tmp_path / f"{suite}.jsonl", rows)
    data = ", ".join(f"{suite}: {tmp_path / suite}.jsonl" for suite in SUITES)
    command = [
        "eval",
        "--suite",
        ",".join(SUITES),
        *arguments(model, tmp_path / "runs", f"evaluation.data={{{data}}}"),
    ]
    command += [
        f"rollout.engine={engine}:Stored",
        "evaluation.samples={gsm8k: 4}",
        "evaluation.pass_at=[2]",
    ]
    command += ["run.name=first"]
    ended = launch.command(command, ranks=2, logs=tmp_path / "logs")
    ended.check()
    expected = json.loads((DATA / "inspect_scores.json").read_text())
    metrics = json.loads((tmp_path / "runs" / "first" / "eval.json").read_text())
    names = {"avg@4": "mean", "pass@2": "pass_at_2", "pass@4": "pass_at_4"}
    for suite in SUITES:
        for ours, theirs in names.items():
            value = expected[suite]["metrics"][f"{theirs}/accuracy"]
            assert metrics[f"{suite}/{ours}"] == pytest.approx(value)
            assert f"{value:.4f}" in ended.text
    results = read_suites(tmp_path / "runs" / "first")
    assert [prompt.correct for prompt in results["math"].prompts] == expected["math"][
        "correct"
    ]
    assert results["gsm8k"].prompts[0].responses == stored["gsm8k"][0]["responses"]

    again = [*command, "run.name=second", "--against", str(tmp_path / "runs" / "first")]
    ended = launch.command(again, ranks=2, logs=tmp_path / "again")
    ended.check()
    line = next(
        line for line in ended.text.splitlines() if line.startswith("gsm8k  avg@4")
    )
    assert line.split()[-4:] == ["+0.0000", "[+0.0000,", "+0.0000]", "1.000"]


def test_every_suite_on_a_real_engine(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    """The tiny model's responses are noise, so that nearly all are wrong; all of them are scored."""
    published.write_jsonl(tmp_path / "aime.jsonl", published.AIME)
    published.write_csv(tmp_path / "gpqa.csv", published.GPQA)
    published.write_jsonl(tmp_path / "code.jsonl", published.LIVECODEBENCH)
    files = {"aime": "aime.jsonl", "gpqa": "gpqa.csv", "code": "code.jsonl"}
    data = ", ".join(f"{suite}: {tmp_path / file}" for suite, file in files.items())
    given = arguments(
        model, tmp_path / "runs", f"evaluation.data={{{data}}}", "evaluation.limit=2"
    )
    given += [
        "evaluation.suites=[aime, gpqa, code]",
        "evaluation.samples={aime: 3, gpqa: 2, code: 1}",
        "rollout.tp=2",
    ]
    world = launch.world(
        2,
        "tests.trainer.ranks:attempt",
        command="eval",
        arguments=["--config=", *given],
    )
    assert world == [{}, {}]
    results = read_suites(tmp_path / "runs" / "run")
    assert {
        name: (len(result.prompts), result.num_samples)
        for name, result in results.items()
    } == {
        "aime": (2, 3),
        "gpqa": (2, 2),
        "code": (2, 1),
    }
    assert results["aime"].metrics == ["avg@3", "maj@3", "pass@3"] and results[
        "code"
    ].metrics == ["avg@1"]
    assert all(result.num_unscored == 0 for result in results.values())
    assert len(set(results["aime"].prompts[0].responses)) == 3, (
        "each sample has a seed of its own"
    )


def test_a_served_model_gives_the_same_responses_as_an_engine(
    launch: Launcher, model: Path, tmp_path: Path
) -> None:
    file = published.write_jsonl(tmp_path / "aime.jsonl", published.AIME)
    common = [
        "eval",
        "--suite",
        "aime",
        f"evaluation.data.aime={file}",
        "evaluation.samples.aime=3",
    ]
    common += arguments(model, tmp_path / "runs", "model.dtype=float32")
    launch.command(
        [*common, "run.name=engine", "rollout.engine=hf"],
        ranks=2,
        logs=tmp_path / "engine",
    ).check()
    with SGLangLike(model, context_length=1024) as server:
        served = ["--url", server.url, "rollout.servers.kind=sglang", "run.name=served"]
        launch.command([*common, *served], ranks=2, logs=tmp_path / "served").check()
        assert server.calls["/generate"] >= 6
    first, second = (
        read_suites(tmp_path / "runs" / name)["aime"] for name in ("engine", "served")
    )
    assert first == second
