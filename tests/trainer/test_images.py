"""A run on prompts with images and without: killed and resumed it ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_vision_folder
from tests.faults.injector import Fault
from tests.faults.runs import differences, remains
from tests.launcher import Launcher
from tests.published import stack_experts
from tests.rollout.test_images import served
from tests.trainer.conftest import REWARD
from tests.trainer.test_end_to_end import metrics_of
from tools.learning_shapes import make_pictures

SETTINGS = """
run: {name: run, nproc: 2, log_with: [jsonl]}
algorithm: {name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01, target: 0.01}}
actor: {tp: 2, freeze: ["visual.blocks.1.*"], micro_batch_tokens: 128, optimizer: {lr: 1.0e-3}}
critic: {engine: fsdp, freeze: ["visual.*"], optimizer: {lr: 1.0e-3}}
rollout: {sampling: {max_tokens: 3}}
data: {chat_template: none, max_prompt_tokens: 24, prompts_per_step: 6}
trainer: {steps: 2}
checkpoint: {save_interval: 1, async_save: false}
"""
UNDER_FSDP = ("actor.engine=fsdp", "actor.tp=1", "actor.freeze=[]")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return image_arguments(tmp_path)


def image_arguments(folder: Path, family: str = "qwen2_vl") -> list[str]:
    """Write a model, pictures and prompts to a folder, and return the arguments of a run on them.

    PPO with a reference, a critic under FSDP2 whose tower is frozen, and an actor on Megatron-core of whose tower a
    block is frozen; a third of the prompts has no image, so that ranks differ in what they see.
    """
    make_tiny_vision_folder(folder / "model", family, pixels=(56 * 56, 56 * 56))
    make_pictures(folder, seed=0, counts={"train": 12})
    rows = [
        json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()
    ]
    for row in rows[::3]:
        del row["images"]
        row["prompt"] = "which colour is the shape"
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(SETTINGS)
    (folder / "reward.py").write_text(REWARD)
    return [
        "train",
        f"--config={folder / 'run.yaml'}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"reward={json.dumps({'function': str(folder / 'reward.py') + ':letters'})}",
    ]


def test_killed_and_resumed_it_ends_with_the_same_bits(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    runs = {name: tmp_path / name for name in ("whole", "killed")}
    ended = launch.command(
        [*arguments, f"run.dir={runs['whole']}"], logs=tmp_path / "first"
    )
    assert ended.codes == [0, 0], ended.text
    metrics = metrics_of(runs["whole"] / "run")
    assert sorted(metrics) == [1, 2]
    for found in metrics.values():
        assert 0 < found["rollout/logprob_diff_max"] < 1e-4
        assert found["actor/grad_norm"] > 0 and found["critic/grad_norm"] > 0
    assert abs(metrics[1]["train/kl"]) < 1e-5 < abs(metrics[2]["train/kl"]), (
        "the reference stays where the actor began"
    )
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = {
        k: v
        for file in (runs["whole"] / "run" / "hf").glob("*.safetensors")
        for k, v in load_file(file).items()
    }
    assert before.keys() == after.keys()
    changed = {
        name for name, tensor in before.items() if not torch.equal(tensor, after[name])
    }
    frozen = {name for name in before if name.startswith("visual.blocks.1.")}
    assert frozen and changed == before.keys() - frozen

    fault = Fault(
        "kill", rank=1, stage="actor_update", step=2, mark=str(tmp_path / "happened")
    )
    again = [*arguments, f"run.dir={runs['killed']}"]
    ended = launch.command(
        again, logs=tmp_path / "second", environment=fault.environment()
    )
    assert ended.codes[1] == -9 and (tmp_path / "happened").exists(), ended.text
    ended = launch.command(
        again, logs=tmp_path / "third", environment=fault.environment()
    )
    assert ended.codes == [0, 0] and "1 of 2 steps" in ended.text, ended.text
    assert (
        differences(remains(runs["killed"] / "run"), remains(runs["whole"] / "run"))
        == []
    )

    placed = [
        "placement={rollout: 0, critic: 1, actor: 2, reference: actor}",
        "actor.tp=1",
        f"run.dir={tmp_path / 'split'}",
    ]
    ended = launch.command(
        [*arguments, *placed, "trainer.steps=1"], logs=tmp_path / "fourth", ranks=3
    )
    assert ended.codes == [0, 0, 0], ended.text
    split = metrics_of(tmp_path / "split" / "run")[1]
    for name in (
        "reward/mean",
        "actor/grad_norm",
        "critic/grad_norm",
        "critic/loss",
        "rollout/logprob_diff_max",
    ):
        assert split[name] == pytest.approx(metrics[1][name], abs=1e-5, rel=1e-3), name


def test_a_model_with_states_and_experts(launch: Launcher, tmp_path: Path) -> None:
    """Qwen3.5 from a folder as published: its actor has experts on either rank, and takes the engine's choices.

    It goes on from its checkpoint.
    """
    more = [
        "model.dtype=bfloat16",
        "actor.tp=1",
        "actor.ep=2",
        "actor.router_replay=update",
        "actor.freeze=[]",
    ]
    arguments = image_arguments(tmp_path, "qwen3_5_moe")
    before = load_file(tmp_path / "model" / "model.safetensors")
    stack_experts(tmp_path / "model")
    arguments += [*more, f"run.dir={tmp_path / 'runs'}"]
    ended = launch.command(arguments, logs=tmp_path / "logs")
    assert ended.codes == [0, 0], ended.text
    ended = launch.command([*arguments, "trainer.steps=3"], logs=tmp_path / "more")
    assert ended.codes == [0, 0] and "2 of 3 steps" in ended.text, ended.text
    steps = metrics_of(tmp_path / "runs" / "run")
    assert sorted(steps) == [1, 2, 3]
    for found in steps.values():
        assert 0 < found["rollout/logprob_diff_max"] < 0.05
        assert found["actor/grad_norm"] > 0 and found["critic/grad_norm"] > 0
    after = load_file(tmp_path / "runs" / "run" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    unchanged = [
        name for name, tensor in before.items() if torch.equal(tensor, after[name])
    ]
    assert not unchanged


def test_adapters_on_the_tower_are_merged_into_the_engine(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    """`all-linear` means the tower's layers too; from the second step on the engine reads images with theirs."""
    more = [
        "algorithm={name: grpo, group_size: 2}",
        *UNDER_FSDP,
        "actor.optimizer.lr=0.02",
    ]
    more.append("actor.lora={rank: 2, alpha: 8, targets: all-linear}")
    ended = launch.command(
        [*arguments, *more, f"run.dir={tmp_path / 'runs'}"], logs=tmp_path / "logs"
    )
    assert ended.codes == [0, 0], ended.text
    for found in metrics_of(tmp_path / "runs" / "run").values():
        assert (
            0 < found["rollout/logprob_diff_max"] < 1e-4
            and found["actor/grad_norm"] > 0
        )
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "runs" / "run" / "hf" / "model.safetensors")
    changed = {
        name for name, tensor in before.items() if not torch.equal(tensor, after[name])
    }
    assert {name.split(".")[0] for name in changed} >= {"visual", "model"}
    assert all(name.endswith("weight") and before[name].dim() == 2 for name in changed)


def test_servers_generate_for_a_run_with_images(
    launch: Launcher, arguments: list[str], tmp_path: Path
) -> None:
    """In the second step with the tower that the first one trained, which comes shard to shard."""
    more = ["algorithm={name: grpo, group_size: 2}", "run.nproc=1", "actor.tp=1"]
    more += ["checkpoint={save_interval: 0, export_hf: false}"]
    with served(tmp_path / "model", tmp_path) as url:
        servers = f"{{engine: server, servers: {{urls: ['{url}'], transfer: direct}}, sampling: {{max_tokens: 3}}}}"
        ended = launch.command(
            [*arguments, *more, f"rollout={servers}", f"run.dir={tmp_path / 'runs'}"],
            logs=tmp_path / "logs",
            ranks=1,
        )
    assert ended.codes == [0], ended.text
    steps = metrics_of(tmp_path / "runs" / "run")
    assert sorted(steps) == [1, 2]
    for found in steps.values():
        assert 0 < found["rollout/logprob_diff_max"] < 1e-4
