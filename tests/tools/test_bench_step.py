"""The benchmark's arguments and arithmetic; what it measures is not asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.data.tokenizers import load_tokenizer
from megaverl.sharding.model_spec import ModelSpec
from tools.bench_step import parse, summarise, table
from tools.step_sides import (
    Job,
    Stopwatch,
    Turns,
    check_device,
    megaverl_settings,
    prepare,
)

STEP = {
    "rollout": 1.0,
    "log_probs": 0.5,
    "update": 2.0,
    "step": 4.0,
    "reshard": 0.1,
    "reward": 0.2,
}
STEP |= {
    "update_and_optimizer": 2.15,
    "cpu_rollout": 2.0,
    "cpu_log_probs": 1.0,
    "cpu_update": 4.0,
    "cpu_step": 8.0,
}


def test_defaults_are_the_issues_size() -> None:
    job = parse([]).job
    assert (job.layers, job.hidden, job.ffn, job.responses, job.response_tokens) == (
        8,
        256,
        1024,
        64,
        64,
    )
    assert job == Job()


def test_options_reach_the_job() -> None:
    arguments = parse(
        [
            "--prompts",
            "2",
            "--group",
            "4",
            "--response-tokens",
            "256",
            "--no-trl",
            "--json",
            "x.json",
        ]
    )
    assert arguments.job.responses == 8
    assert arguments.job.tokens["rollout"] == 8 * 256
    assert arguments.job.tokens["update"] == 8 * (256 + 32)
    assert arguments.no_trl and arguments.json == Path("x.json")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--layers", "-1"], "--layers is -1"),
        (
            ["--prompts", "1", "--group", "3"],
            "3 responses cannot be shared by 2 (see --nproc)",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(
    wrong: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert named in capsys.readouterr().err


def test_overhead_is_what_generation_forward_and_backward_leave() -> None:
    found = summarise([STEP, {**STEP, "step": 3.6}, {**STEP, "step": 9.0}])
    assert found["step"] == 4.0 and (found["step_min"], found["step_max"]) == (3.6, 9.0)
    assert found["overhead"] == pytest.approx(0.5)
    assert found["overhead_share"] == pytest.approx(0.125)
    assert found["optimizer"] == pytest.approx(0.15)
    assert found["other"] == pytest.approx(0.05)


def test_table_shows_both_sides_of_a_ratio() -> None:
    ours = summarise([STEP])
    trl = summarise(
        [
            {
                name: 3 * seconds
                for name, seconds in STEP.items()
                if name != "update_and_optimizer"
            }
        ]
    )
    whole = table(Job(), {"megaverl": ours, "trl": trl}).splitlines()
    [step] = [line for line in whole if line.startswith("step")]
    assert "4,000.0" in step and "12,000.0" in step and "3.00 x" in step
    [rollout] = [line for line in whole if line.startswith("rollout")]
    assert f"{64 * 64:,}" in rollout  # in one second
    assert "trl" not in table(Job(), {"megaverl": ours})


def test_limit_counts_the_weights_of_the_model() -> None:
    """Against transformers' own model: tied embeddings, whose lookup is no product; norms and biases are none."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    job = Job()
    config = Qwen2Config(
        hidden_size=job.hidden,
        intermediate_size=job.ffn,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        vocab_size=job.vocab,
        tie_word_embeddings=True,
    )
    matrices = sum(
        p.numel() for p in Qwen2ForCausalLM(config).parameters() if p.dim() == 2
    )
    assert job.gflop["update"] == pytest.approx(6e-9 * matrices * 64 * (64 + 32))
    assert job.gflop["step"] == pytest.approx(
        2e-9 * matrices * (4 * 64 * 96 + 64 * 64 + 8 * 32)
    )


def test_stopwatch_adds_what_it_wraps() -> None:
    class Owner:
        def work(self, value: int) -> int:
            return value + 1

    owner, watch = Owner(), Stopwatch()
    watch.wrap(owner, "work", lambda: "working")
    assert owner.work(1) == 2
    first = watch.seconds["working"]
    owner.work(2)
    assert watch.seconds["working"] > first
    skipped = Stopwatch()
    skipped.wrap(owner, "work", lambda: None)
    assert owner.work(3) == 4 and not skipped.seconds


def test_a_step_is_what_its_ranks_report(tmp_path: Path) -> None:
    import subprocess

    for rank, seconds in enumerate(
        ({"step": 1.0, "cpu_step": 0.5}, {"step": 2.0, "cpu_step": 0.25})
    ):
        turns = Turns(tmp_path, "megaverl", rank)
        turns.report(0, seconds)
        (turns.folder / f"megaverl.0.ready.{rank}").write_text("{}")
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert Turns(tmp_path, "megaverl").take(0, 2, process, tmp_path) == {
        "step": 2.0,
        "cpu_step": 0.75,
    }
    process.wait()


def test_a_side_ends_when_the_other_one_fails(tmp_path: Path) -> None:
    """It would wait for its turn for ever, and the benchmark for it: this test would hang."""
    Turns.end(tmp_path)
    with pytest.raises(SystemExit, match="the other side failed"):
        Turns(tmp_path, "megaverl").wait(1)


def test_inputs_fit_both_sides(tmp_path: Path) -> None:
    """The configuration passes every check, and each prompt has the length that was asked for."""
    job = Job(
        layers=1,
        hidden=32,
        ffn=64,
        heads=1,
        kv_heads=1,
        vocab=50,
        prompts=2,
        prompt_tokens=7,
        steps=1,
        warmup=0,
    )
    prepare(job, tmp_path)
    config = load_config(None, megaverl_settings(job, tmp_path), command="train")
    assert config.samples_per_step == job.responses
    assert ModelSpec.from_folder(tmp_path / "model").num_layers == 1
    tokenizer = load_tokenizer(tmp_path / "model")
    rows = [
        json.loads(line)
        for line in (tmp_path / "prompts.jsonl").read_text().splitlines()
    ]
    assert [len(tokenizer.encode(row["prompt"])) for row in rows] == [7, 7]


def test_a_side_refuses_to_measure_another_device_than_it_was_asked_for() -> None:
    assert parse([]).job.device == "cpu"
    check_device(parse(["--device", "cpu"]).job)
    with pytest.raises(
        SystemExit, match=r"computes on cpu, not on cuda\. Give --device cpu"
    ):
        check_device(parse(["--device", "cuda"]).job)
