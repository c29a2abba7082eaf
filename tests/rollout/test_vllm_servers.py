"""Runs whose responses come from real `vllm serve` processes: one joins while it generates, one is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import RewardError
from megaverl.models.tiny import make_tiny_folder
from megaverl.rewards import RewardSample, build_reward
from megaverl.rollout.server_api import ExpectedModel, ServerRefused, VLLMServer
from megaverl.rollout.server_pool import ChangesFolder, PublishedWeights, ServerPool
from megaverl.sharding.box_fingerprints import join_fingerprints
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.change_files import ChangeWriter
from tests.checkpoint.convert.folders import as_reward_model
from tests.faults.points import (
    CHANGES_POINTS,
    CHANGES_RANKS,
    finish,
    hit,
    run_on,
    with_server,
)
from tests.faults.runs import arguments, remains
from tests.launcher import Ended, Launcher, free_port
from tests.rollout.vllm_serve import vllm_servers
from tests.trainer.conftest import MODEL, make_inputs

TOKEN, REWARD_TOKEN = "secret", "another"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
)
# What is told of a run besides: its rewards, in order, let things happen to the
# servers.
REWARD = """
import os
from pathlib import Path

from megaverl.cli.main import main
from megaverl.rollout.serving import end_group

FOLDER, RUN, FIRST, SECOND = {names!r}
calls = 0

def letters(prompt, response, reference, extra):
    global calls
    calls += 1
    if os.environ["RANK"] == "0" and calls == {joins}:
        assert main(["rollout-pool", "add", RUN, "http://127.0.0.1:" + SECOND]) == 0
    if os.environ["RANK"] == "0" and calls == {dies}:
        # Kills all but multiprocessing's tracker, which removes their shared memory.
        end_group(int(Path(FOLDER, FIRST + ".pid").read_text()))
    return sum(ord(letter) % 7 for letter in response) / 40
"""


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
    environment = {
        "TEST_REWARD_SERVER": json.dumps(told),
        "REWARD_TOKEN": REWARD_TOKEN,
        "POOL_TOKEN": TOKEN,
    }
    with vllm_servers(
        inputs,
        inputs / "model",
        (first, second, f"{third}:2"),
        token_env="POOL_TOKEN",
        environment=environment,
        others=(reward,),
    ):
        yield first, second, third


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
    launch: Launcher,
    inputs: Path,
    folder: Path,
    dies: str,
    joins: str,
    *more: str,
    **options: str,
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
            *more,
        ),
        logs=folder / "output",
        environment={"POOL_TOKEN": TOKEN},
        deadline=300.0,
    )
    assert ended.codes == [0, 0], ended.text
    return ended


class FolderVersions:
    """Versions of a model: whole folders, and the changes that an actor of two ranks writes."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(model.glob("*.safetensors")):
            self.tensors |= load_file(path)
        self.shapes = {name: tuple(each.shape) for name, each in self.tensors.items()}
        layout = whole_layout(self.shapes.items())
        self.writers = [
            ChangeWriter(lambda _: layout, self.tensors, rank, 2, torch.float32)
            for rank in range(2)
        ]
        self._generator = torch.Generator().manual_seed(3)

    def change(self) -> None:
        """Change one element in twenty by a half."""
        for tensor in self.tensors.values():
            shape = tensor.shape
            tensor[torch.rand(shape, generator=self._generator) < 0.05] *= 1.5

    def whole(self, name: str) -> Path:
        """Write a whole folder."""
        folder = self._folder / name
        shutil.copytree(self._model, folder)
        for path in folder.glob("*.safetensors"):
            save_file({key: self.tensors[key] for key in load_file(path)}, path)
        return folder

    def changes(self, name: str) -> tuple[ChangesFolder, int]:
        """Write the changes; return them and their bytes."""
        folder = self._folder / name
        written = [writer.write(folder, self.shapes) for writer in self.writers]
        assert written[0].whole + written[1].whole == 4 * sum(
            tensor.numel() for tensor in self.tensors.values()
        )
        return ChangesFolder(name, str(folder)), sum(each.nbytes for each in written)

    def published(self, name: str, **more: Any) -> PublishedWeights:
        """Return the current version, with transformers' log-probs and the actor's fingerprints."""
        right = self.whole(f"{name}-right")
        known = tuple(_log_probs(right))
        whole = str(self._folder / "run-1")
        joined = join_fingerprints(writer.fingerprints() for writer in self.writers)
        return PublishedWeights(
            whole,
            name,
            tuple(TOKENS),
            known,
            1e-4,
            "run-1",
            fingerprints=joined,
            **more,
        )


def _log_probs(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, TOKENS[1:], strict=True)]


def test_servers_apply_the_changes_of_a_folder(
    inputs: Path, ports: tuple[str, str, str], tmp_path: Path
) -> None:
    """... each onto the version that it has; a late one reads the whole version and all changes since."""
    _, second, third = ports
    urls = [f"http://127.0.0.1:{third}"]
    pool = ServerPool(
        lambda: urls,
        lambda url: VLLMServer(url, TOKEN, generating=60.0, loading=60.0),
        ExpectedModel(ModelSpec.from_folder(inputs / "model"), 64),
        admits=True,
        most_running=4,
        wait_seconds=60.0,
        poll_seconds=600.0,
    )
    pool.prepares_changes = True
    versions = FolderVersions(inputs / "model", tmp_path)
    try:
        versions.change()
        versions.whole("run-1")
        for writer in versions.writers:
            writer.keep()
        pool.use(versions.published("run-1"))
        [early] = pool.members.values()
        assert early.server.applies_changes and pool.takes_changes()
        assert early.holds == "run-1" and not pool.changes_read
        versions.change()
        two, of_two = versions.changes("run-2")
        pool.use(versions.published("run-2", changes=(two,)))
        # The actor's ranks hold whole weights, of which both workers hold a part.
        assert early.holds == "run-2" and pool.changes_read[urls[0]] == 2 * of_two
        urls.append(f"http://127.0.0.1:{second}")
        versions.change()
        three, of_three = versions.changes("run-3")
        pool.use(versions.published("run-3", changes=(two, three)))
        late = pool.members[urls[1]]
        assert {early.state, late.state} == {"ready"}
        assert early.holds == late.holds == "run-3"
        assert pool.changes_read[urls[1]] == of_two + of_three
        assert pool.being_read() == set()
        for member in (early, late):
            assert member.server.weight_version() == "run-3"
            found = member.server.log_probs(TOKENS)
            right = _log_probs(tmp_path / "run-3-right")
            assert found == pytest.approx(right, abs=1e-5)
            score = member.server.score_prompt(TOKENS)
            assert score.log_probs == pytest.approx(right, abs=1e-5)
            assert len(score.top_tokens) == len(score.top_log_probs) == len(TOKENS)
            for own, top in zip(score.log_probs, score.top_log_probs, strict=False):
                assert own <= top
        # A server that was started again, or that another run gave weights, has none of
        # the versions.
        late.server.name_weights("default")
        versions.change()
        four, of_four = versions.changes("run-4")
        pool.use(versions.published("run-4", changes=(two, three, four)))
        assert pool.changes_read[urls[1]] == 2 * (of_two + of_three) + of_four
        # A server that takes whole weights only waits for them.
        late.server.applies_changes = False
        late.server.name_weights("default")
        versions.change()
        five, _ = versions.changes("run-5")
        pool.use(versions.published("run-5", changes=(two, three, four, five)))
        assert early.state == "ready" and late.state == "lost"
        assert "takes whole weights only" in late.reason and not pool.takes_changes()
        assert late.failed_loads == 0
    finally:
        pool.close()


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
    """... inside steps. They read changes from a folder, and whole weights when they join.

    Servers have the actor's bits at every step, and about its log-probs: they compute
    in float32, and the actor in bfloat16.
    """
    first, second, _ = ports
    ended = run_with_changing_servers(
        launch,
        inputs,
        tmp_path,
        first,
        second,
        "reshard={delta: on, check_every: 1}",
        "model.dtype=bfloat16",
        "actor.optimizer.lr=3e-6",
    )
    log = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*"))
    assert f"rollout server http://127.0.0.1:{first} is lost" in log, log
    for news in (f"{first} joined (1 in", f"{first} left (", f"{second} joined ("):
        assert f"rollout server http://127.0.0.1:{news}" in ended.text
    left = VLLMServer(
        f"http://127.0.0.1:{second}", TOKEN, generating=60.0, loading=60.0
    )
    versions = sorted((tmp_path / "run" / "rollout_weights").iterdir())
    assert [version.name[-2:] for version in versions] == [f"-{n}" for n in range(1, 6)]
    assert left.weight_version() == versions[-1].name
    assert [any(each.glob("model*")) for each in versions] == [True] + [False] * 4
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
    assert len(differences) == 4 and max(differences) < 0.05
    sent = [
        (each["reshard/bytes_sent"], each["reshard/changed_fraction"])
        for each in records
        if "reshard/bytes_sent_whole" in each
    ]
    whole = sum(path.stat().st_size for path in versions[0].glob("*.safetensors"))
    # The version before the first step is whole.
    assert len(sent) == 4
    assert all(nbytes < 0.2 * whole and 0 < share < 0.15 for nbytes, share in sent)
    # The second server reads all changes so far when it joins.
    read = [each.get("reshard/bytes_received", 0.0) for each in records]
    assert sum(nbytes for nbytes, _ in sent) < sum(read) < 3 * sum(dict(sent))


def test_killed_while_changes_are_written(
    launch: Launcher,
    inputs: Path,
    ports: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... the actor of a run, started again each time: it ends with the bits of one that was left alone.

    No server reads a version that is not complete, and none of them is left.
    """
    monkeypatch.setenv("POOL_TOKEN", TOKEN)
    url = f"http://127.0.0.1:{ports[1]}"
    server = VLLMServer(url, TOKEN, generating=60.0, loading=60.0)
    settings = with_server(url, "POOL_TOKEN")
    ended = run_on(
        launch, inputs, tmp_path / "untouched", *settings, nodes=CHANGES_RANKS
    )
    assert ended.codes == [0] * CHANGES_RANKS, ended.text
    expected = remains(tmp_path / "untouched" / "run")
    folder = tmp_path / "hit" / "run" / "rollout_weights"
    # `tools/fault_campaign.py --changes` tries each point by itself, and another one.
    for name in ("inside a file of changes", "before changes are published"):
        found = hit(
            launch,
            inputs,
            tmp_path / "hit",
            CHANGES_POINTS[name],
            *settings,
            nodes=CHANGES_RANKS,
        )
        assert found.happened and found.wrong == [], (name, found)
        complete = {path.parent.name for path in folder.glob("*/fingerprint.json")}
        half = {path.name for path in folder.iterdir()} - complete
        assert len(half) == 1 and server.weight_version() in complete, name
    ended, wrong = finish(
        launch, inputs, tmp_path / "hit", expected, *settings, nodes=CHANGES_RANKS
    )
    assert wrong == [], ended
    run_name, _, last = server.weight_version().rpartition("-")
    left = {path.name for path in folder.iterdir()}
    assert left == {f"{run_name}-{number + 1}" for number in range(int(last))}
    assert all((folder / version / "fingerprint.json").exists() for version in left)
