"""Draft models and heads that are trained with the policy, in whole runs with real engines that speculate with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaverl.data.tokenizers import load_tokenizer
from megaverl.models.new_heads import make_draft_head
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.draft_head import HEAD_METHODS, Method
from tests.faults.runs import metrics
from tests.launcher import Launcher
from tests.trainer.conftest import MODEL, command_arguments

STEPS = 8
# The actor hardly changes, so that the acceptance follows from the draft model alone. At this
# temperature the model repeats tokens, which a draft model learns in a few steps.
RUN = [
    "algorithm={name: grpo, group_size: 4}",
    "actor={tp: 2, optimizer: {lr: 1.0e-6}}",
    "rollout={tp: 2, sampling: {max_tokens: 16, temperature: 0.1, ignore_eos: true}}",
    f"trainer={{steps: {STEPS}, validate_every: 0}}",
    f"checkpoint={{save_interval: {STEPS // 2}, keep_last_k: 3}}",
    # Compare the engine's draft model with the trainer's after every step.
    "reshard.check_every=1",
]
TRAINED = ["draft={train: true, optimizer: {lr: 1.0e-2}}"]
# The head's grid is the actor's.
HEAD = [
    "draft={train: true, engine: fsdp, tp: 2, optimizer: {lr: 3.0e-3}}",
    "algorithm.num_epochs=4",
]
APART = [
    "actor={tp: 1, engine: fsdp}",
    "rollout={tp: 1, async_rollout: true, max_staleness: 1}",
    "placement={actor: [0], rollout: [1]}",
]


@pytest.fixture(scope="module")
def draft(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft model that knows nothing: one layer, with the tokenizer of `inputs`."""
    folder = tmp_path_factory.mktemp("draft")
    tokenizer = load_tokenizer(inputs / "model")
    # Without tied embeddings it does not repeat its input by itself.
    sizes = {**MODEL, "num_hidden_layers": 1, "tie_embeddings": False}
    make_tiny_folder(
        folder,
        "Qwen3ForCausalLM",
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size,
        **sizes,
    )
    return folder


def train(
    launch: Launcher,
    inputs: Path,
    runs: Path,
    draft: Path,
    *more: str,
    method: str = "draft_model",
) -> list[dict[str, float]]:
    """The metrics of each step."""
    drafts = f"rollout.vllm.speculative_config={{method: {method}, model: {draft}, num_speculative_tokens: 3}}"
    arguments = ["train", *command_arguments(inputs, runs), *RUN, drafts, *more]
    ended = launch.command(arguments, ranks=2, logs=runs / "logs")
    assert ended.codes == [0, 0], ended.text
    return metrics(runs / "run")


def accepted(records: list[dict[str, float]]) -> float:
    """The mean acceptance of the last three steps."""
    last = [record["rollout/draft_acceptance_rate"] for record in records[-3:]]
    return sum(last) / len(last)


@pytest.fixture(scope="module")
def trained(
    launch: Launcher,
    inputs: Path,
    draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run that trains its draft model, on Megatron-core and an engine with tensor parallelism."""
    runs = tmp_path_factory.mktemp("trained")
    train(launch, inputs, runs, draft, *TRAINED)
    return runs / "run"


def test_a_trained_draft_model_is_accepted_more_often_than_a_frozen_one(
    trained: Path,
) -> None:
    """... and ends in a folder that transformers reads."""
    learned = metrics(trained)
    # The frozen model is what the trained one was in the first step.
    frozen = learned[0]["rollout/draft_acceptance_rate"]
    assert 0 < frozen < 0.1 and accepted(learned) > 0.3
    assert learned[-1]["draft/loss"] < learned[0]["draft/loss"] / 2
    assert all(record["rollout/logprob_diff_max"] < 1e-3 for record in learned)
    folder = trained / "hf_draft"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_hidden_layers == 1
    assert load_tokenizer(folder).vocab_size == model.config.vocab_size


def test_a_resumed_run_ends_with_the_same_draft_model(
    launch: Launcher, inputs: Path, draft: Path, trained: Path, tmp_path: Path
) -> None:
    """Bit for bit, and with the same drafts accepted on the way."""
    resumed = train(launch, inputs, tmp_path, draft, *TRAINED, resuming(trained))
    assert_continued(resumed, tmp_path / "run", trained)


def resuming(run: Path) -> str:
    """The override that continues a run from its middle."""
    return f"checkpoint.resume={run / 'checkpoints' / f'step_{STEPS // 2:08}'}"


def assert_continued(resumed: list[dict[str, float]], run: Path, whole: Path) -> None:
    """A resumed run ends with the bits of the one that was not interrupted."""
    assert [record["step"] for record in resumed][-1] == STEPS
    names = ("draft/loss", "rollout/draft_acceptance_rate", "actor/grad_norm")
    before = {record["step"]: record for record in metrics(whole)}
    for record in resumed:
        assert [record[name] for name in names] == [
            before[record["step"]][name] for name in names
        ]
    for name in ("hf", "hf_draft"):
        assert weights_of_folder(whole / name) == weights_of_folder(run / name)


def test_a_draft_model_under_fsdp_reaches_engines_on_other_ranks(
    launch: Launcher, inputs: Path, draft: Path, trained: Path, tmp_path: Path
) -> None:
    """... while these generate the responses of the next step."""
    records = train(launch, inputs, tmp_path, draft, *APART, *TRAINED, NO_CHECKPOINT)
    assert accepted(records) > 0.3
    # No grid and no engine changes the first loss, before any update.
    first = metrics(trained)[0]["draft/loss"]
    assert records[0]["draft/loss"] == pytest.approx(first, rel=1e-5)
    assert weights_of_folder(tmp_path / "run" / "hf_draft") != weights_of_folder(draft)


NO_CHECKPOINT = "checkpoint.save_interval=0"


@pytest.fixture(scope="module", params=HEAD_METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    """Kind of the head."""
    kind: Method = request.param
    return kind


@pytest.fixture(scope="module")
def head(
    inputs: Path, method: Method, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An untrained head of the model in `inputs`."""
    folder = tmp_path_factory.mktemp(method) / "head"
    return make_draft_head(folder, inputs / "model", method=method)


@pytest.fixture(scope="module")
def with_head(
    launch: Launcher,
    inputs: Path,
    method: Method,
    head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run that trains its head, with an actor and an engine with tensor parallelism."""
    runs = tmp_path_factory.mktemp("with_head")
    train(launch, inputs, runs, head, *HEAD, method=method)
    return runs / "run"


def test_a_trained_head_is_accepted_more_often_than_a_frozen_one(
    head: Path, with_head: Path
) -> None:
    """... and keeps the names and shapes of its weights."""
    learned = metrics(with_head)
    frozen = learned[0]["rollout/draft_acceptance_rate"]
    assert frozen < 0.1 and accepted(learned) > 0.3
    assert learned[-1]["draft/loss"] < learned[0]["draft/loss"] / 2
    assert all(record["rollout/logprob_diff_max"] < 1e-3 for record in learned)
    before, after = weights_of_folder(head), weights_of_folder(with_head / "hf_draft")
    assert before.keys() == after.keys()
    # Every weight has moved.
    assert all(before[name] != after[name] for name in before)


def test_a_resumed_run_ends_with_the_same_head(
    launch: Launcher,
    inputs: Path,
    method: Method,
    head: Path,
    with_head: Path,
    tmp_path: Path,
) -> None:
    resumed = train(
        launch, inputs, tmp_path, head, *HEAD, resuming(with_head), method=method
    )
    assert_continued(resumed, tmp_path / "run", with_head)


def test_an_exported_head_is_loaded_afresh_and_trained_under_fsdp_beside_engines(
    launch: Launcher, inputs: Path, method: Method, with_head: Path, tmp_path: Path
) -> None:
    """The engines have ranks of their own, and read the head from the folder that the run before has written."""
    afresh = [f"model.path={with_head / 'hf'}", "trainer.steps=2", "draft.tp=1"]
    head = with_head / "hf_draft"
    records = train(
        launch, inputs, tmp_path, head, *APART, *HEAD, *afresh, NO_CHECKPOINT,
        method=method,
    )  # fmt: skip
    assert all(record["rollout/draft_acceptance_rate"] > 0.3 for record in records)
    learned = metrics(with_head)
    assert records[0]["draft/loss"] < learned[0]["draft/loss"] / 2


def weights_of_folder(folder: Path) -> dict[str, bytes]:
    """The bytes of every weight, by name."""
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
