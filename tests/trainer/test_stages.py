"""Stages beside plain reinforcement, as whole commands on two ranks: pairs, reward models, PRIME, mixes of updates."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_folder
from tests.faults.injector import Fault
from tests.faults.runs import arguments, metrics
from tests.launcher import Ended, Launcher
from tests.trainer.conftest import MODEL, make_inputs
from tests.workers.tokenizers_made import of_bytes

RANKS = 2
SHORT = [
    "trainer={steps: 2, validate_every: 0}",
    "data.validation=[]",
    "checkpoint={save_interval: 0, export_hf: false}",
    "actor.optimizer.lr=1.0e-3",
    "actor.tp=1",
    f"critic.pp={RANKS}",
    f"run.nproc={RANKS}",
]
NO_KL = "algorithm.kl={in: none, coef: 0.0, target: null}"
PAIRS = [
    f"run={{name: run, nproc: {RANKS}, log_with: jsonl, timeout_minutes: 2}}",
    f"actor={{tp: 1, pp: {RANKS}, optimizer: {{lr: 1.0e-3}}}}",
    "preference={steps: 6, batch_size: 8, lr: 2.0e-3, max_response_tokens: 8}",
    "checkpoint={save_interval: 2, resume: auto, async_save: false}",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of `tests.trainer.conftest`, with pairs: the answer is better than the digits as they stood."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    for name in ("train", "held_out"):
        rows = [
            json.loads(line)
            for line in (folder / f"{name}.jsonl").read_text().splitlines()
        ]
        pairs = [
            {"prompt": row["prompt"], "chosen": "1 2", "rejected": "3", "margin": 0.5}
            for row in rows
        ]
        (folder / f"{name}_pairs.jsonl").write_text(
            "".join(json.dumps(pair) + "\n" for pair in pairs)
        )
    return folder


def on_pairs(inputs: Path, runs: Path, command: str, *more: str) -> list[str]:
    return [
        command,
        f"model.path={inputs / 'model'}",
        f"preference.train={inputs / 'train_pairs.jsonl'}",
        f"preference.validation={inputs / 'held_out_pairs.jsonl'}",
        f"run.dir={runs}",
        *PAIRS,
        *more,
    ]


def rewarded(inputs: Path, runs: Path, *more: str) -> list[str]:
    """Arguments with other rewards than those of the inputs."""
    return [
        each
        for each in arguments(inputs, runs, *more)
        if each in more or not each.startswith("reward=")
    ]


def run(
    launch: Launcher, command: list[str], logs: Path, fault: Fault | None = None
) -> Ended:
    environment = fault.environment() if fault else None
    return launch.command(command, ranks=RANKS, logs=logs, environment=environment)


def exported(runs: Path) -> dict[str, torch.Tensor]:
    return load_file(runs / "run" / "hf" / "model.safetensors")


def test_preferences_are_learned_and_a_killed_run_ends_with_the_same_bits(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    ended = run(launch, on_pairs(inputs, whole, "dpo"), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    assert (
        ended.text.count(
            "data.max_prompt_tokens=56, not given, chosen to fit the model's context of 64"
        )
        == 1
    )
    found = metrics(whole / "run")
    assert (
        found[-1]["dpo/loss"] < found[0]["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)
    )
    assert found[-1]["validation/accuracy"] == 1.0
    fault = Fault("kill", RANKS - 1, "dpo", 4, mark=str(tmp_path / "mark"))
    run(launch, on_pairs(inputs, hit, "dpo"), tmp_path / "logs", fault)
    ended = run(launch, on_pairs(inputs, hit, "dpo"), tmp_path / "logs")
    assert (
        (tmp_path / "mark").exists()
        and ended.codes == [0] * RANKS
        and "2 of 6 steps are done" in ended.text
    )
    assert metrics(hit / "run") == found
    assert [
        (runs / "run" / "dpo.yaml").read_text().count("max_prompt_tokens: 56")
        for runs in (whole, hit)
    ] == [1, 1]
    expected = exported(whole)
    assert all(
        torch.equal(expected[name], tensor) for name, tensor in exported(hit).items()
    )


def test_fine_tuning_goes_on_like_any_run(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Killed after its first checkpoint and started again."""

    def sft(runs: Path, *more: str) -> list[str]:
        paths = [
            f"model.path={inputs / 'model'}",
            f"data.train={inputs / 'train.jsonl'}",
            f"run.dir={runs}",
        ]
        return [
            "sft",
            *paths,
            *PAIRS,
            "sft={steps: 5, batch_size: 8, lr: 1.0e-2, max_answer_tokens: 8}",
            *more,
        ]

    whole, hit = tmp_path / "whole", tmp_path / "hit"
    ended = run(launch, sft(whole), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    found = metrics(whole / "run")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5] and found[-1][
        "sft/loss"
    ] < found[0]["sft/loss"]
    spans = json.loads((whole / "run" / "timeline.json").read_text())["traceEvents"]
    assert sum(span["name"] == "sft" for span in spans) == 5
    last = json.loads((whole / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["memory/actor_gpu_mem_mb"] > 1
    ended = run(
        launch, sft(tmp_path / "cut", "actor.pp=1", "actor.cp=2"), tmp_path / "logs"
    )
    assert ended.codes == [0] * RANKS, ended.text
    for cut, one in zip(metrics(tmp_path / "cut" / "run"), found, strict=True):
        assert cut["sft/loss"] == pytest.approx(one["sft/loss"], abs=1e-5), (
            "rows cut over ranks change nothing"
        )
    run(
        launch,
        sft(hit),
        tmp_path / "logs",
        Fault("kill", RANKS - 1, "sft", 4, mark=str(tmp_path / "mark")),
    )
    ended = run(launch, sft(hit, "--resume=latest"), tmp_path / "logs")
    assert (
        (tmp_path / "mark").exists()
        and ended.codes == [0] * RANKS
        and "2 of 5 steps are done" in ended.text
    )
    assert metrics(hit / "run") == found
    expected = exported(whole)
    assert all(
        torch.equal(expected[name], tensor) for name, tensor in exported(hit).items()
    )


def test_single_responses_beside_pairs(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """KTO on rows of both kinds."""
    rows = [
        json.loads(line)
        for line in (inputs / "train_pairs.jsonl").read_text().splitlines()
    ]
    for number, row in enumerate(rows):
        if number % 3:  # one of the two, at times the better one
            response = row.pop("chosen"), row.pop("rejected")
            row |= {"completion": response[number % 2], "label": number % 2 == 0}
    (tmp_path / "judged.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    files = [
        f"preference.{part}={tmp_path / 'judged.jsonl'}"
        for part in ("train", "validation")
    ]
    ended = run(
        launch,
        on_pairs(inputs, tmp_path, "dpo", *files, "preference.loss=kto"),
        tmp_path / "logs",
    )
    assert ended.codes == [0] * RANKS, ended.text
    found = metrics(tmp_path / "run")
    assert found[-1]["dpo/loss"] < found[0]["dpo/loss"] == pytest.approx(0.5, abs=1e-3)
    assert found[-1]["dpo/desirable_reward"] > found[-1]["dpo/undesirable_reward"]
    assert found[-1]["validation/accuracy"] > 0.8


def test_a_reward_model_scores_as_hugging_face_does_and_as_the_reward_role(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    command = on_pairs(
        inputs,
        tmp_path,
        "reward",
        "preference.margin_key=margin",
        "reward_model.options={center_coef: 0.01}",
    )
    ended = run(launch, command, tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    assert metrics(tmp_path / "run")[-1]["validation/accuracy"] == 1.0
    folder = tmp_path / "run" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(
        str(folder), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    # on Megatron, and on transformers, on two ranks of their own, each of which reads its own responses: what a
    # validation generates goes there and back as well
    # on transformers once more with a chat template of its own, which the conversation is then written in
    chat = tmp_path / "chat"
    shutil.copytree(folder, chat)
    (chat / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}=={% endfor %}"
    )
    both = f"{{name: learned, path: '{folder}'}}, {{name: half, weight: 0.5, path: '{folder}', engine: transformers}}"
    both += f", {{name: chat, weight: 2.0, path: '{chat}', engine: transformers}}"
    apart = [
        "run.nproc=4",
        "placement={rollout: 0, reward: 1-2, actor: 3}",
        "critic.pp=1",
        "trainer.save_samples=16",
    ]
    apart += [
        "trainer={validate_every: 1}",
        f"data.validation={inputs / 'held_out.jsonl'}",
    ]
    command = rewarded(
        inputs,
        tmp_path / "rl",
        *SHORT,
        *apart,
        f"reward=[{both}, {{name: exact_match}}]",
    )
    ended = launch.command(command, logs=tmp_path / "logs", ranks=4)
    assert ended.codes == [0] * 4, ended.text
    lines = (tmp_path / "rl" / "run" / "samples.jsonl").read_text().splitlines()
    records = [
        record for record in map(json.loads, lines) if record["finish_reason"] == "stop"
    ]
    text = [
        tokenizer.encode(r["prompt"]) + tokenizer.encode(r["response"]) for r in records
    ]
    ends = [tokenizer.eos_token_id]
    checked, seen = Counter[str](), Counter[str]()
    for record, ids in zip(records, text, strict=True):
        with torch.no_grad():
            score = float(model(torch.tensor([[*ids, *ends]])).logits)
            written = tokenizer.encode(
                f"{record['prompt']}=={record['response']}==", add_special_tokens=False
            )
            score = 1.5 * score + 2.0 * float(model(torch.tensor([written])).logits)
        checked[record["split"]] += record["reward"] == pytest.approx(score, abs=1e-4)
        seen[record["split"]] += 1
    assert len(seen) == 2, "of training and of validation"
    assert all(checked[split] >= count // 2 for split, count in seen.items()), (
        "but for text that has other tokens"
    )
    found = next(
        r for r in metrics(tmp_path / "rl" / "run")[::-1] if "reward/mean" in r
    )
    parts = (
        found["reward/learned"]
        + 0.5 * found["reward/half"]
        + 2.0 * found["reward/chat"]
    )
    parts += found["reward/exact_match"]
    assert found["reward/mean"] == pytest.approx(parts, abs=1e-5)
    assert found["reward/half"] == pytest.approx(found["reward/learned"], abs=1e-4)


@pytest.mark.parametrize("name", ["prime", "raft", "gkd"])
def test_estimators_with_a_loop_of_their_own(
    launch: Launcher, inputs: Path, tmp_path: Path, name: str
) -> None:
    letters = f"reward={{function: '{inputs / 'reward.py'}:letters', accuracy: true}}"
    algorithm = f"algorithm={{name: {name}, group_size: 4, num_mini_batches: 1}}"
    more = []
    if name == "gkd":
        teacher = make_teacher(inputs, tmp_path / "teacher")
        more = [f"reference.path={teacher}", "trainer.steps=8"]
    ended = run(
        launch,
        arguments(inputs, tmp_path, *SHORT, algorithm, NO_KL, letters, *more),
        tmp_path / "logs",
    )
    assert ended.codes == [0] * RANKS, ended.text
    first, *_, last = metrics(tmp_path / "run")
    assert last["actor/grad_norm"] > 0
    if name == "gkd":
        found = [record["actor/distillation_divergence"] for record in (first, last)]
        assert 0 < found[1] < 0.7 * found[0] and "train/kl" not in last, (
            "the teacher alone is learned from"
        )
    # The reward model, or the teacher, is beside the actor, wherever the others are.
    if name in ("prime", "gkd"):
        apart = arguments(
            inputs, tmp_path / "apart", *SHORT, algorithm, NO_KL, letters, *more
        )
        placed = [
            *apart,
            f"run.nproc={RANKS + 1}",
            "placement={rollout: 0, actor: rest}",
        ]
        ended = launch.command(placed, logs=tmp_path / "logs", ranks=RANKS + 1)
        assert ended.codes == [0] * (RANKS + 1), ended.text
        for before, after in zip(
            metrics(tmp_path / "run"), metrics(tmp_path / "apart" / "run"), strict=True
        ):
            own = {
                key: value
                for key, value in before.items()
                if not key.startswith(("reshard", "busy", "memory"))
            }
            assert {key: after[key] for key in own} == pytest.approx(
                own, abs=1e-5, rel=1e-5
            )
    if name == "prime":
        assert (
            last["reward_model/grad_norm"] > 0
            and last["reward_model/loss"] < first["reward_model/loss"]
        )
        assert first["reward_model/loss"] == pytest.approx(0.6931, abs=1e-3), (
            "phi begins as the reference"
        )


def test_a_teacher_with_another_tokenizer_is_learned_from(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Bytes and pairs of them against the student's pieces, on a grid of its own;
    killed and started again it ends with the same bits, and on a rank of its own it
    says the same numbers.
    """
    texts = [
        json.loads(line)["prompt"]
        for line in (inputs / "train.jsonl").read_text().splitlines()
    ]
    own = of_bytes([*texts, "0 1 2 3 4 5 6 7 8 9"], size=40, all_bytes=False)
    shape = MODEL | {
        "hidden_size": 32,
        "max_position_embeddings": 128,
        "tie_embeddings": False,
    }
    teacher = make_tiny_folder(
        tmp_path / "teacher",
        "Qwen3ForCausalLM",
        seed=7,
        **shape,
        vocab_size=own.vocab_size,
    )
    own.save(teacher)
    taught = [
        f"reference={{path: '{teacher}', tp: {RANKS}}}",
        "algorithm={name: distillation, num_mini_batches: 1}",
    ]
    taught += [
        NO_KL,
        "trainer.steps=12",
        "actor.optimizer.lr=1.0e-2",
        "data.prompts_per_step=64",
    ]
    saves = "checkpoint={save_interval: 4, export_hf: true, resume: auto, async_save: false}"
    ended = run(
        launch,
        arguments(inputs, tmp_path / "whole", *SHORT, *taught, saves),
        tmp_path / "logs",
    )
    assert ended.codes == [0] * RANKS, ended.text
    found = metrics(tmp_path / "whole" / "run")
    curve = [record["reference/kl_per_token"] for record in found]
    assert sum(curve[-3:]) < 0.6 * sum(curve[:3])
    assert (
        found[0]["reference/impossible_samples"]
        > 5
        > found[-1]["reference/impossible_samples"]
    )
    assert (
        found[-1]["reference/compared_fraction"] > 0.9
        and found[0]["reference/tokens_per_chunk"] > 1.0
    )
    command = arguments(inputs, tmp_path / "hit", *SHORT, *taught, saves)
    run(
        launch,
        command,
        tmp_path / "logs",
        Fault("kill", 0, "ref_log_probs", 6, mark=str(tmp_path / "mark")),
    )
    ended = run(launch, command, tmp_path / "logs")
    assert (tmp_path / "mark").exists() and ended.codes == [0] * RANKS, ended.text
    assert metrics(tmp_path / "hit" / "run") == found
    expected = exported(tmp_path / "whole")
    assert all(
        torch.equal(expected[name], tensor)
        for name, tensor in exported(tmp_path / "hit").items()
    )
    apart = [
        "reference.tp=1",
        f"run.nproc={RANKS + 1}",
        "placement={reference: 0, actor: rest}",
        "trainer.steps=2",
    ]
    ended = launch.command(
        arguments(inputs, tmp_path / "apart", *SHORT, *taught, *apart),
        logs=tmp_path / "logs",
        ranks=RANKS + 1,
    )
    assert ended.codes == [0] * (RANKS + 1), ended.text
    for before, after in zip(
        found[:2], metrics(tmp_path / "apart" / "run"), strict=True
    ):
        same = {
            name: value
            for name, value in before.items()
            if name.startswith(("reference/", "actor/", "train/kl"))
        }
        assert {name: after[name] for name in same} == pytest.approx(
            same, abs=1e-4, rel=1e-4
        )


def test_nash_md_beats_its_opponents(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """The policy writes what is preferred ever more; where engines have ranks of their own the numbers are the same."""
    given = "group_size: 8, num_mini_batches: 1, opponent_beta: 0.25, loss_aggregation: seq_mean_token_sum"
    kl = "kl: {in: loss, kind: k1, score_function: true, coef: 0.01, target: null}"
    nash = [
        f"algorithm={{name: grpo, advantage: nash_md, policy_loss: policy_gradient, {given}, {kl}}}"
    ]
    nash += ["trainer.steps=10", "actor.optimizer.lr=5.0e-3"]
    ended = run(launch, arguments(inputs, tmp_path, *SHORT, *nash), tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    found = metrics(tmp_path / "run")
    curve = [record["reward/mean"] for record in found]
    assert sum(curve[-3:]) > 1.1 * sum(curve[:3]), curve
    assert found[0]["rollout/response_length_mean"] > 3.5, (
        "of the policy's own, not of opponents as empty ones"
    )
    assert (
        found[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5)
        and found[-1]["actor/grad_norm"] > 0
    )
    apart = [
        f"run.nproc={RANKS + 1}",
        "placement={rollout: 0, actor: rest}",
        "trainer.steps=2",
    ]
    command = arguments(inputs, tmp_path / "apart", *SHORT, *nash, *apart)
    ended = launch.command(command, logs=tmp_path / "logs", ranks=RANKS + 1)
    assert ended.codes == [0] * (RANKS + 1), ended.text
    for before, after in zip(
        found[:2], metrics(tmp_path / "apart" / "run"), strict=True
    ):
        same = {
            name: value
            for name, value in before.items()
            if name.startswith(("reward/", "actor/", "train/adv"))
        }
        assert {name: after[name] for name in same} == pytest.approx(
            same, abs=1e-4, rel=1e-4
        )


def make_teacher(inputs: Path, folder: Path) -> Path:
    """Another model over the same vocabulary."""
    vocab_size = json.loads((inputs / "model" / "config.json").read_text())[
        "vocab_size"
    ]
    return make_tiny_folder(
        folder, "Qwen3ForCausalLM", seed=7, **MODEL, vocab_size=vocab_size
    )


def test_one_flow_with_ppo_a_reward_model_rejection_sampling_pairs_and_answers(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """And killed inside and started again, it ends with the same bits; engines of their own give the same numbers."""
    run(
        launch,
        on_pairs(inputs, tmp_path / "rm", "reward", "preference.steps=1"),
        tmp_path / "logs",
    )
    mixed = [
        f"reward=[{{function: '{inputs / 'reward.py'}:letters'}}, {{name: learned, path: '{tmp_path / 'rm/run/hf'}'}}]",
        "mix=[{update: rejection, judge: letters}, {update: preference, judge: letters, weight: 0.5}, "
        "{update: reward_model, judge: letters}, {update: sft, every: 2}]",
        "algorithm.group_size=2",
        "data.prompts_per_step=4",
        "checkpoint={save_interval: 1, export_hf: true, resume: auto, async_save: false}",
        "preference.loss=dpo",
    ]
    command = rewarded(inputs, tmp_path / "whole", *SHORT, *mixed)
    ended = run(launch, command, tmp_path / "logs")
    assert ended.codes == [0] * RANKS, ended.text
    first, last = metrics(tmp_path / "whole" / "run")
    for name in ("rejection", "preference", "reward_model"):
        assert last[f"mix_{name}/grad_norm"] > 0 and last[f"mix_{name}/samples"] > 0
    assert "mix_sft/loss" in last and "mix_sft/loss" not in first
    command = rewarded(inputs, tmp_path / "hit", *SHORT, *mixed)
    run(
        launch,
        command,
        tmp_path / "logs",
        Fault("kill", 0, "mix_1_preference", 2, mark=str(tmp_path / "mark")),
    )
    ended = run(launch, command, tmp_path / "logs")
    assert (tmp_path / "mark").exists() and ended.codes == [0] * RANKS, ended.text
    assert metrics(tmp_path / "hit" / "run") == [first, last]
    expected = exported(tmp_path / "whole")
    assert all(
        torch.equal(expected[name], tensor)
        for name, tensor in exported(tmp_path / "hit").items()
    )
    placed = [
        f"run.nproc={RANKS + 1}",
        "placement={rollout: 0, reward: actor, actor: rest}",
    ]
    command = rewarded(
        inputs,
        tmp_path / "apart",
        *SHORT,
        *mixed,
        *placed,
        "checkpoint={save_interval: 0}",
    )
    ended = launch.command(command, logs=tmp_path / "logs", ranks=RANKS + 1)
    assert ended.codes == [0] * (RANKS + 1), ended.text
    for before, after in zip(
        [first, last], metrics(tmp_path / "apart" / "run"), strict=True
    ):
        own = {
            name: value
            for name, value in before.items()
            if not name.startswith(("reshard", "memory"))
        }
        assert {name: after[name] for name in own} == pytest.approx(
            own, abs=1e-6, rel=1e-6
        )
