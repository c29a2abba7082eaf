"""Runs whose responses come from real `vllm serve` processes: one joins while it generates, one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import RewardError
from megaverl.models.tiny import make_tiny_folder
from megaverl.processes import ending_with_parent
from megaverl.rewards import RewardSample, build_reward
from megaverl.rollout.server_api import ExpectedModel, ServerRefused, VLLMServer
from megaverl.sharding.model_spec import ModelSpec
from tests.checkpoint.convert.folders import as_reward_model
from tests.faults.runs import arguments
from tests.launcher import Ended, Launcher, free_port
from tests.trainer.conftest import MODEL, ROOT, make_inputs

TOKEN, REWARD_TOKEN = "secret", "another"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
)
# What is told of a run besides: its rewards, in order, let things happen to the
# servers.
REWARD = """
import os, signal
from pathlib import Path

from megaverl.cli.main import main

FOLDER, RUN, FIRST, SECOND = {names!r}
calls = 0

def letters(prompt, response, reference, extra):
    global calls
    calls += 1
    if os.environ["RANK"] == "0" and calls == {joins}:
        assert main(["rollout-pool", "add", RUN, "http://127.0.0.1:" + SECOND]) == 0
    if os.environ["RANK"] == "0" and calls == {dies}:
        os.killpg(int(Path(FOLDER, FIRST + ".pid").read_text()), signal.SIGKILL)
    return sum(ord(letter) % 7 for letter in response) / 40
"""
SERVE = "--kv-cache-memory-bytes 20000000 --block-size 32 --max-model-len 64 --disable-log-stats --max-num-seqs 32"
SERVE += " --max-num-batched-tokens 2048"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def classifier(inputs: Path) -> Path:
    """A reward model with a chat template of its own."""
    tokenizer = load_tokenizer(inputs / "tokenizer.model", chat_template=TEMPLATE)
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    made = as_reward_model(
        make_tiny_folder(inputs / "base", "Qwen3ForCausalLM", **MODEL, **special),
        inputs / "classifier",
    )
    tokenizer.save(made)
    return made


@pytest.fixture(scope="module")
def reward_port(inputs: Path, ports: tuple[str, str, str]) -> str:
    return (inputs / "reward_port").read_text()


@pytest.fixture(scope="module")
def ports(inputs: Path, classifier: Path) -> Iterator[tuple[str, str, str]]:
    """Of three servers that answer; the last one has two workers."""
    first, second, third, reward = (str(free_port()) for _ in range(4))
    (inputs / "reward_port").write_text(reward)
    command = [
        sys.executable,
        "-m",
        "tests.rollout.vllm_serve",
        str(inputs),
        f"{first},{second},{third}:2",
        str(inputs / "model"),
    ]
    vllm = "--kv-cache-memory-bytes 20000000 --block-size 32 --max-model-len 64"
    told = [
        str(classifier),
        "--port",
        reward,
        "--token-env",
        "REWARD_TOKEN",
        "--per-job",
        "3",
        f"--vllm={vllm}",
    ]
    environment = {**os.environ, "TEST_REWARD_SERVER": json.dumps(told)}
    environment |= {"REWARD_TOKEN": REWARD_TOKEN, "POOL_TOKEN": TOKEN}
    with (inputs / "servers.log").open("w") as log:
        servers = subprocess.Popen(
            ending_with_parent(
                [*command, "--token-env", "POOL_TOKEN", f"--vllm={SERVE}"]
            ),
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment,
        )
    try:
        for port in (first, second, third, reward):
            while not _answers(port):
                with suppress(subprocess.TimeoutExpired):
                    servers.wait(0.2)
                assert servers.poll() is None, (inputs / "servers.log").read_text()
        yield first, second, third
    finally:
        for file in inputs.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGKILL)
        servers.kill()
        servers.wait()


def _answers(port: str) -> bool:
    connection = HTTPConnection("127.0.0.1", int(port), timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_who_is_refused(
    inputs: Path, ports: tuple[str, str, str], tmp_path: Path
) -> None:
    """Another model, another longest length, no token."""
    url, spec = f"http://127.0.0.1:{ports[0]}", ModelSpec.from_folder(inputs / "model")
    server = VLLMServer(url, TOKEN, generating=60.0, loading=60.0)
    assert server.problems(ExpectedModel(spec, 64)) == []
    assert "takes 64 tokens" in server.problems(ExpectedModel(spec, 65))[0]
    config = json.loads((inputs / "model" / "config.json").read_text())
    other = ModelSpec.from_config(
        {**config, "vocab_size": config["vocab_size"] + 8, "hidden_size": 128}
    )
    [problem] = server.problems(ExpectedModel(other, 64))
    assert (
        "serves another model" in problem
        and "vocab_size" in problem
        and "hidden_size 64 and not 128" in problem
    )
    with pytest.raises(ServerRefused, match="answers 401 .* it wants a token"):
        VLLMServer(url, None, generating=60.0, loading=60.0).log_probs([1, 2])


def test_a_served_reward_model(
    classifier: Path, reward_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are transformers' own; who has no token, or asks for too much at once, is told so."""
    monkeypatch.setenv("REWARD_TOKEN", REWARD_TOKEN)
    url = f"http://127.0.0.1:{reward_port}"
    messages = [{"role": "user", "content": "reverse 12 ="}]
    samples = [
        RewardSample("", str(number), messages=messages) for number in range(10, 20)
    ]
    options = {
        "url": url,
        "model": str(classifier),
        "token_env": "REWARD_TOKEN",
        "concurrent": 8,
        "job": "mine",
    }
    found = build_reward({"name": "served", "options": options}).score(samples).total
    model = AutoModelForSequenceClassification.from_pretrained(
        classifier, dtype=torch.float32
    )
    tokenizer = load_tokenizer(classifier)
    for sample, score in zip(samples, found, strict=True):
        text = f"user:reverse 12 =;assistant:{sample.response};"
        with torch.no_grad():
            expected = model(torch.tensor([tokenizer.encode(text)])).logits[0, 0]
        assert score == pytest.approx(float(expected), abs=1e-4)
    with pytest.raises(RewardError, match="answers 401"):
        build_reward(
            {"name": "served", "options": {**options, "token_env": None}}
        ).score(samples)


TOKENS = [3, 11, 7, 2, 19, 5, 13, 23, 4, 17]


def run_with_changing_servers(
    launch: Launcher, inputs: Path, folder: Path, dies: str, joins: str, **options: str
) -> Ended:
    """Run the command while the server at port `joins` joins in a step, and the one at port `dies` is killed later."""
    names = (str(inputs), str(folder / "run"), dies, joins)
    (folder / "reward.py").write_text(REWARD.format(names=names, joins=10, dies=26))
    servers = {
        "urls": [f"http://127.0.0.1:{dies}"],
        "token_env": "POOL_TOKEN",
        "poll_seconds": 0.05,
        **options,
    }
    rollout = {"engine": "server", "use_dynamic_batching": False, "servers": servers}
    reward = {"function": f"{folder / 'reward.py'}:letters"}
    ended = launch.command(
        arguments(
            inputs,
            folder,
            f"rollout={json.dumps(rollout)}",
            f"reward={json.dumps(reward)}",
        ),
        logs=folder / "output",
        environment={"POOL_TOKEN": TOKEN},
        deadline=300.0,
    )
    assert ended.codes == [0, 0], ended.text
    return ended


def test_weights_go_shard_to_shard(
    launch: Launcher, inputs: Path, ports: tuple[str, str, str], tmp_path: Path
) -> None:
    """... from two tensor-parallel ranks: to a server of two workers that is killed in
    a step, and to one of one that joins in a step.
    """
    _, second, third = ports
    ended = run_with_changing_servers(
        launch, inputs, tmp_path, third, second, transfer="direct"
    )
    for news in (f"{third} joined (1 in", f"{third} left (", f"{second} joined ("):
        assert f"rollout server http://127.0.0.1:{news}" in ended.text
    assert not (tmp_path / "run" / "rollout_weights").exists()
    left = VLLMServer(
        f"http://127.0.0.1:{second}", TOKEN, generating=60.0, loading=60.0
    )
    assert left.weight_version().endswith("-5")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "hf", dtype=torch.float32
    )
    with torch.no_grad():
        rows = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)]
    assert left.log_probs(TOKENS) == pytest.approx(expected, abs=1e-5)
    records = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert any(
        each.get(f"rollout/server_samples/127.0.0.1:{second}") for each in records
    )
    differences = [
        each["rollout/logprob_diff_max"]
        for each in records
        if "rollout/logprob_diff_max" in each
    ]
    assert len(differences) == 4 and max(differences) < 1e-3
    # A delivery brings each element once to each worker that needs it, in float32:
    # norms to both workers of a server.
    files = [
        load_file(path) for path in (tmp_path / "run" / "hf").glob("*.safetensors")
    ]
    tensors = [tensor for file in files for tensor in file.values()]
    of_one = 4 * sum(tensor.numel() for tensor in tensors)
    of_two = of_one + 4 * sum(tensor.numel() for tensor in tensors if tensor.dim() == 1)
    received = [
        each["reshard/bytes_received"]
        for each in records
        if "reshard/bytes_received" in each
    ]
    possible = {
        times * of_one + killed * of_two for times in range(3) for killed in range(2)
    }
    assert len(received) == 4 and possible.issuperset(received), (
        received,
        of_one,
        of_two,
    )
    assert min(received) > 0 and max(received) >= of_two and received[-1] == of_one


def test_one_joins_and_one_is_killed(
    launch: Launcher, inputs: Path, ports: tuple[str, str, str], tmp_path: Path
) -> None:
    """... inside steps; every response's log-probs are those of the actor at that step."""
    first, second, _ = ports
    ended = run_with_changing_servers(launch, inputs, tmp_path, first, second)
    log = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*"))
    assert f"rollout server http://127.0.0.1:{first} is lost" in log, log
    for news in (f"{first} joined (1 in", f"{first} left (", f"{second} joined ("):
        assert f"rollout server http://127.0.0.1:{news}" in ended.text
    left = VLLMServer(
        f"http://127.0.0.1:{second}", TOKEN, generating=60.0, loading=60.0
    )
    [newest] = (tmp_path / "run" / "rollout_weights").iterdir()
    assert left.weight_version() == newest.name and newest.name.endswith("-5")
    records = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    name = "rollout/server_samples/127.0.0.1:"
    samples = [
        [each.get(f"{name}{port}", 0.0) for port in (first, second)]
        for each in records
        if f"{name}{first}" in each
    ]
    assert samples[0] == [8.0, 0.0]
    assert any(each.get(f"{name}{second}") for each in records)
    differences = [
        each["rollout/logprob_diff_max"]
        for each in records
        if "rollout/logprob_diff_max" in each
    ]
    assert len(differences) == 4 and max(differences) < 1e-3
