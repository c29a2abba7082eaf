"""Whole runs on real parts: two processes, Megatron-core and vLLM, from the command to the exported folder."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megaverl.monitoring.profiler import collective_lines, write_step_trace
from tests.docs.pages import ROOT, table_names
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments

Metrics = dict[int, dict[str, float]]
LOGPROB_LIMIT = 1e-3

PPO = [
    "algorithm={name: ppo, num_mini_batches: 2, kl: {in: reward, kind: k1, coef: 0.01}}",
    "critic={tp: 1, pp: 2, optimizer: {lr: 1.0e-3}}",
    "trainer={steps: 3, validate_every: 2, validation_samples: 2, pass_at: [1, 2]}",
    "checkpoint.save_interval=2",
    "run.profile.steps=3",
    "alerts=[{when: reward/mean > 1e6}]",
]
GRPO = [
    "algorithm={name: grpo, group_size: 4, kl: {in: loss, kind: k3, coef: 0.01}}",
    "actor={tp: 1, pp: 2}",
    "rollout.tp=2",
    "trainer={steps: 2, validate_every: 0}",
    "run.stragglers_every=2",
]
# What somebody who watches a run relies on.
PROMISED = {
    "rollout/throughput_tokens_per_sec",
    "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max",
    "rollout/response_length_mean",
    "reward/latency_ms",
    "reward/mean",
    "reward/accuracy",
    "train/step_time_ms",
    "train/tokens_per_sec",
    "train/tokens_per_gpu_per_sec",
    "train/tflop_per_gpu_per_sec",
    "train/kl",
    "memory/actor_gpu_mem_mb",
    "actor/loss",
    "actor/grad_norm",
    "actor/lr",
    "actor/clip_fraction",
    "reshard/seconds",
    "reshard/bytes_received",
    "rollout/staleness",
    "busy/actor",
    "busy/rollout",
    "busy/reward",
    "memory/process_rss_mb",
}
PROMISED_OF_A_CRITIC = {
    "critic/loss",
    "critic/grad_norm",
    "critic/explained_variance",
    "train/advantage_mean",
}
VALIDATION = {
    "validation/reward",
    "validation/accuracy",
    "validation/pass@1",
    "validation/pass@2",
}


def metrics_of(run: Path) -> Metrics:
    """By step; a step's training and validation records together."""
    found: Metrics = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found.setdefault(record.pop("step"), {}).update(record)
    return found


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its arguments and what its ranks said."""

    folder: Path
    arguments: list[str]
    said: str


def train(launch: Launcher, arguments: list[str], logs: Path, ranks: int = 2) -> str:
    """What the ranks of `megaverl train` say, which all end well; they start in a moment, as copies."""
    ended = launch.command(["train", *arguments], logs=logs, ranks=ranks)
    assert ended.codes == [0] * ranks, ended.text
    return ended.text


@pytest.fixture(scope="module")
def ppo(
    launch: Launcher, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    runs = tmp_path_factory.mktemp("ppo")
    arguments = [
        *command_arguments(inputs, runs),
        f"data.validation={inputs / 'held_out.jsonl'}",
        *PPO,
    ]
    return Run(runs / "run", arguments, train(launch, arguments, runs / "output"))


def test_every_metric_of_a_run_is_documented(ppo: Run) -> None:
    """By its own line in docs/reference.md, not by what is left of its family; rewards have names of their own."""
    documented = table_names(ROOT / "docs" / "reference.md", "Every metric")
    lines = [
        name
        for name in documented
        if not name.endswith("/*") or name.startswith(("reward", "busy"))
    ]
    written = {name for metrics in metrics_of(ppo.folder).values() for name in metrics}
    assert {
        name for name in written if not any(fnmatch(name, line) for line in lines)
    } == set()


def test_a_person_sees_a_line_per_step_and_no_library(ppo: Run) -> None:
    lines = ppo.said.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    assert all(
        word in line for line in steps for word in ("reward", "accuracy", "tok/s")
    )
    validations = [line for line in lines if line.startswith("validation after step")]
    assert [line.split()[3].rstrip(":") for line in validations] == ["0", "2", "3"]
    assert lines[0].startswith(
        "accuracy counts responses to which the reward 'letters' gives 1 or more."
    )
    assert len(lines) == 1 + len(steps) + len(validations) + 1
    assert lines[-1] == f"model written to {ppo.folder / 'hf'}"


def test_metrics_are_those_that_were_promised(ppo: Run) -> None:
    metrics = metrics_of(ppo.folder)
    assert sorted(metrics) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        missing = (PROMISED | PROMISED_OF_A_CRITIC) - metrics[step].keys()
        assert not missing
        assert all(math.isfinite(value) for value in metrics[step].values())
    assert [metrics[step].keys() >= VALIDATION for step in range(4)] == [
        True,
        False,
        True,
        True,
    ]


def test_engine_and_actor_agree_after_every_reshard(ppo: Run) -> None:
    metrics = metrics_of(ppo.folder)
    for step in (1, 2, 3):
        assert 0 < metrics[step]["rollout/logprob_diff_max"] < LOGPROB_LIMIT
        assert metrics[step]["actor/grad_norm"] > 0, "there was something to reshard"
        assert metrics[step]["reshard/bytes_received"] > 0
    assert [metrics[step]["rollout/weight_version"] for step in (1, 2, 3)] == [1, 2, 3]


def test_the_run_folder_tells_the_whole_story(ppo: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    resolved = yaml.safe_load((ppo.folder / "train.yaml").read_text())
    assert (
        resolved["actor"]["tp"],
        resolved["critic"]["pp"],
        resolved["trainer"]["steps"],
    ) == (2, 2, 3)
    versions = json.loads((ppo.folder / "versions.json").read_text())
    assert "megatron-core" in versions and versions["torch"] == metadata.version(
        "torch"
    )
    records = [
        json.loads(line)
        for line in (ppo.folder / "samples.jsonl").read_text().splitlines()
    ]
    assert {(record["split"], record["step"]) for record in records} == {
        *(("train", step) for step in (1, 2, 3)),
        *(("validation", step) for step in (0, 2, 3)),
    }
    for record in records:
        assert record["prompt"].startswith("reverse ") and isinstance(
            record["response"], str
        )
        assert record["reference"] == record["prompt"].split()[1][::-1]
    events = EventAccumulator(str(ppo.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
    logs = {path.name for path in (ppo.folder / "logs").iterdir()}
    assert {"rank_0.log", "rank_1.log"} <= logs


def test_a_profiled_step_is_one_trace_of_all_ranks(ppo: Run) -> None:
    assert sorted(path.name for path in (ppo.folder / "profile").iterdir()) == [
        "step_3"
    ]
    path, _ = write_step_trace(ppo.folder)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    for rank in range(2):
        mine = [
            event
            for event in events
            if event["ph"] == "X" and event["pid"] // 1000 == rank
        ]
        stages = {event["name"]: event for event in mine if event["pid"] == rank * 1000}
        assert stages.keys() >= {
            "step",
            "rollout",
            "reward",
            "actor_update",
            "critic_update",
            "reshard",
        }
        # Of vLLM's own, and of a gradient.
        for stage, part in (("rollout", "_C::"), ("actor_update", "Backward")):
            begin, end = stages[stage]["ts"], stages[stage]["ts"] + stages[stage]["dur"]
            inside = [
                event["name"]
                for event in mine
                if begin <= event["ts"] and event["ts"] + event["dur"] <= end
            ]
            assert any(part in name for name in inside), stage
    assert {beat["rank"] for beat in _ranks_of(ppo.folder)} == {0, 1}
    tp = [line.split() for line in collective_lines(ppo.folder) if "actor tp" in line]
    assert {(line[0], line[1]) for line in tp} == {("rank", "0"), ("rank", "1")}, (
        "the actor is at TP2, on both"
    )
    assert any(line[2] == "all_reduce" and float(line[5]) > 0 for line in tp)


def _ranks_of(run: Path) -> list[dict[str, Any]]:
    found = json.loads((run / "ranks.json").read_text())["ranks"]
    return [{"rank": int(rank), **beat} for rank, beat in found.items()]


TOKENS = torch.randint(
    0, 30, (3, 12), generator=torch.Generator().manual_seed(1)
).tolist()


def test_the_export_is_what_was_trained(
    launch: Launcher, ppo: Run, inputs: Path
) -> None:
    """Hugging Face's logits of the exported folder, and Megatron's of the last checkpoint, on another grid."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def logits(folder: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor(TOKENS)).logits

    exported = logits(ppo.folder / "hf")
    assert (exported - logits(inputs / "model")).abs().max() > 1e-2, (
        "training changed it"
    )
    checkpoint = ppo.folder / "checkpoints" / "step_00000003"
    for found in launch.world(
        2,
        "tests.trainer.ranks:checkpoint_logits",
        arguments=ppo.arguments,
        checkpoint=checkpoint,
        tokens=TOKENS,
    ):
        assert (torch.tensor(found) - exported).abs().max() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(str(ppo.folder / "hf"))
    assert (
        tokenizer.decode(tokenizer.encode("reverse 123 =")).strip() == "reverse 123 ="
    )


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(
    ppo: Run, tmp_path: Path, launch: Launcher
) -> None:
    """Killed after step 3, before its checkpoint: step 3 is taken again, to the same numbers, and then step 4."""
    killed = tmp_path / "runs" / "run"
    shutil.copytree(ppo.folder, killed)
    shutil.rmtree(killed / "checkpoints" / "step_00000003")
    shutil.rmtree(killed / "hf")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewa')
    changed = [
        f"run.dir={tmp_path / 'runs'}",
        "trainer.steps=4",
        "run.profile.steps=[]",
    ]
    said = train(launch, [*ppo.arguments, *changed], tmp_path / "logs")
    assert "checkpoints/step_00000002: 2 of 4 steps are done" in said
    assert [
        line.split()[1] for line in said.splitlines() if line.startswith("step ")
    ] == ["3/4", "4/4"]
    before, after = metrics_of(ppo.folder), metrics_of(killed)
    assert sorted(after) == [0, 1, 2, 3, 4]
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    trained = [json.loads(line)["step"] for line in lines if "reward/mean" in line]
    assert trained == [1, 2, 3, 4], "no step stands there twice"
    assert after[2] == before[2]
    for name in PROMISED | PROMISED_OF_A_CRITIC:
        if not name.endswith(("_ms", "_sec", "seconds", "_mb")) and not name.startswith(
            ("busy/", "comm/")
        ):
            assert after[3][name] == pytest.approx(
                before[3][name], rel=1e-4, abs=1e-6
            ), name
    assert after[4]["rollout/logprob_diff_max"] < LOGPROB_LIMIT
    assert (killed / "hf" / "config.json").exists()


def test_engines_on_a_rank_of_their_own(
    ppo: Run, tmp_path: Path, launch: Launcher
) -> None:
    """Actor and critic on two ranks, vLLM and the rewards on a third: the same numbers as with all on two."""
    placement = [
        "run.nproc=3",
        "placement={actor: 0-1, rollout: 2}",
        f"run.dir={tmp_path}",
    ]
    said = train(launch, [*ppo.arguments, *placement], tmp_path / "logs", ranks=3)
    before, after = metrics_of(ppo.folder), metrics_of(tmp_path / "run")
    assert sorted(after) == sorted(before)
    # what depends on the clock, the memory or the way
    others = (
        "time/",
        "_ms",
        "_sec",
        "seconds",
        "_mb",
        "reshard/bytes",
        "queue/",
        "busy/",
        "comm/",
    )
    for step, found in before.items():
        for name, value in found.items():
            if not any(part in name for part in others):
                assert after[step][name] == pytest.approx(value, rel=1e-4, abs=1e-4), (
                    step,
                    name,
                )
    assert after[3]["reshard/bytes_received"] > 0, (
        "the engine's rank gets the weights from the others"
    )
    assert {"busy/actor", "busy/critic", "busy/reward", "busy/rollout"} <= after[
        3
    ].keys()
    assert [
        line.split()[1] for line in said.splitlines() if line.startswith("step ")
    ] == ["1/3", "2/3", "3/3"]
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())
    ranks = {event["name"]: event["pid"] for event in trace["traceEvents"]}
    assert (ranks["rollout"], ranks["reward"], ranks["actor_update"]) == (2, 2, 0)


def test_grpo_on_a_pipeline_with_a_tensor_parallel_engine(
    arguments: list[str], inputs: Path, tmp_path: Path, launch: Launcher
) -> None:
    """... that checks drafts: what it says of the tokens that it takes is what the actor says."""
    drafts = f"{{model: {inputs / 'model'}, num_speculative_tokens: 2}}"
    train(
        launch,
        [*arguments, *GRPO, f"rollout.vllm.speculative_config={drafts}"],
        tmp_path / "logs",
    )
    metrics = metrics_of(tmp_path / "runs" / "run")
    assert sorted(metrics) == [1, 2]
    for found in metrics.values():
        assert not PROMISED - found.keys()
        assert not any(name.startswith("critic/") for name in found)
        assert all(math.isfinite(value) for value in found.values())
        assert 0 < found["rollout/logprob_diff_max"] < LOGPROB_LIMIT
        assert 0 <= found["rollout/draft_acceptance_rate"] < 1
    # the two ranks have stages of their own, and neither does what the other does
    assert (
        "stragglers/count" not in metrics[1] and metrics[2]["stragglers/count"] == 0.0
    )
    assert metrics[1]["train/kl"] == pytest.approx(0, abs=1e-5), (
        "the reference is where the actor starts"
    )
    assert metrics[2]["train/kl"] > 1e-5, "and the actor leaves it"


def test_fine_tune_then_evaluate_then_generate(
    launch: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """Each command on what the one before has left."""
    target = "tests.trainer.ranks:attempt"
    (tmp_path / "one.jsonl").write_text(
        '{"prompt": "reverse 123 =", "answer": "321"}\n' * 4
    )
    common = [*command_arguments(inputs, tmp_path), "actor={tp: 1, pp: 2}"]
    data = [
        f"data.train={tmp_path / 'one.jsonl'}",
        f"data.validation={tmp_path / 'one.jsonl'}",
    ]
    options = [
        *common,
        *data,
        "run.name=sft",
        "sft={steps: 30, batch_size: 4, lr: 1.0e-2}",
    ]
    assert launch.world(2, target, command="sft", arguments=options) == [{}, {}]
    losses = [found["sft/loss"] for found in metrics_of(tmp_path / "sft").values()]
    assert len(losses) == 30 and losses[-1] < 0.05 < losses[0]

    tuned = [f"model.path={tmp_path / 'sft' / 'hf'}", "rollout.sampling.temperature=0"]
    options = [
        *common,
        *data,
        *tuned,
        "run.name=eval",
        "rollout.tp=2",
        "reward=exact_match",
    ]
    assert launch.world(2, target, command="eval", arguments=options) == [{}, {}]
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert result["validation/accuracy"] == 1.0

    output = tmp_path / "out.jsonl"
    given = {"prompt": ["reverse 123 ="], "output": str(output)}
    options = [*common, *tuned, "run.name=gen", "rollout.engine=hf"]
    assert launch.world(
        2, target, command="generate", arguments=options, options=given
    ) == [{}, {}]
    assert json.loads(output.read_text()) == {
        "prompt": "reverse 123 =",
        "response": "321",
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_wrong_first_reshard_stops_the_run(
    launch: Launcher, arguments: list[str], tmp_path: Path, wrong_rank: int
) -> None:
    """One rank's engine gets one wrong row; every rank stops before the first update."""
    given = [*arguments, "rollout.engine=hf"]
    target = "tests.trainer.ranks:train_with_a_wrong_engine"
    heard: list[dict[str, Any]] = launch.world(
        2, target, arguments=given, wrong_rank=wrong_rank
    )
    assert heard[0] == heard[1]
    assert heard[0]["class"] == "TrainingStopped"
    for text in (
        "the same tokens differ by",
        "allowed are 0.001",
        "rollout.logprob_tolerance",
        "top_p",
    ):
        assert text in heard[0]["text"]
    assert not (tmp_path / "runs" / "run" / "hf").exists()
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()


def test_the_tolerance_of_the_first_reshard_is_the_users(
    launch: Launcher, arguments: list[str]
) -> None:
    given = [
        *arguments,
        "rollout.engine=hf",
        "rollout.logprob_tolerance=50",
        "trainer.steps=1",
    ]
    target = "tests.trainer.ranks:train_with_a_wrong_engine"
    heard = launch.world(2, target, arguments=given, wrong_rank=1)
    assert ["warning" in each["said"] for each in heard] == [False, False]


def test_in_sixteen_bits_a_difference_is_warned_of_or_absurd(
    launch: Launcher, arguments: list[str]
) -> None:
    given = [*arguments, "rollout.engine=hf", "model.dtype=bfloat16", "trainer.steps=1"]
    target = "tests.trainer.ranks:train_with_a_wrong_engine"
    faults: list[dict[str, Any]] = [
        {"by": 0.0},
        {"by": 2.0},
        {"by": 10.0, "layer": "embed_tokens"},
    ]
    right, wrong, absurd = (
        launch.world(
            2, target, arguments=[*given, f"run.name=run{n}"], wrong_rank=0, **fault
        )
        for n, fault in enumerate(faults)
    )
    assert "warning" not in right[0]["said"] and "step 1/1" in right[0]["said"]
    assert (
        "warning: the log-probs that hf reports" in wrong[0]["said"]
        and "step 1/1" in wrong[0]["said"]
    )
    assert wrong[1]["said"] == "", "one rank speaks"
    assert absurd[0] == absurd[1] and "allowed are 0.12 in the mean" in absurd[0].get(
        "text", ""
    ), absurd
