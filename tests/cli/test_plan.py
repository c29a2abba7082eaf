"""`megaverl plan` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megaverl.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPE = [
    "plan",
    "--config",
    str(ROOT / "configs" / "llama3_70b" / "grpo_8_nodes.yaml"),
    "--nodes",
    "8",
]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """A model that is not here, but for its config.json."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    keys = [
        "model.path=absent",
        "data.train=absent.jsonl",
        "reward=exact_match",
        "actor.pp=2",
        "rollout.tp=2",
    ]
    return ["plan", *keys, "--model-config", str(tmp_path / "config.json")]


def test_a_recipe_is_planned_without_its_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(RECIPE) == 0
    out = capsys.readouterr().out
    assert "64 ranks: 8 nodes of 8 GPUs" in out and "70.6 billion parameters" in out
    assert "fits: " in out and "arXiv 2205.05198" in out
    assert max(map(len, out.splitlines())) <= 120


def test_json_holds_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RECIPE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["world"] == {
        "ranks": 64,
        "nodes": 8,
        "gpus_per_node": 8,
    }
    assert found["memory"]["actor"].keys() == {
        "weights",
        "gradients",
        "optimizer",
        "activations",
    }
    assert found["reshard"]["received"].keys() == {
        "alias",
        "local",
        "nvlink",
        "network",
    }
    assert 0.9 < found["reshard"]["share_of_wire_limit"] <= 1


def test_seconds_of_a_save_and_of_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RECIPE, "--disk", "4", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    found = planned["checkpoint"]
    # Eight ranks of a node write what only they have to write, and each of them reads
    # its own weights.
    assert found["save_seconds"] == pytest.approx(
        8 * found["written"][-1] / 4e9, rel=0.05
    )
    read = found["resume_seconds"] - planned["reshard"]["seconds"]
    assert read == pytest.approx(8 * found["read"][-1] / 4e9, rel=0.05)
    assert found["read"][-1] > found["written"][-1]
    assert main([*RECIPE, "--disk", "4", "checkpoint.async_save=false"]) == 0
    out = capsys.readouterr().out
    assert (
        f"at 4 GB/s a node: save {found['save_seconds']:.1f} s while the run waits, resume"
        in out
    )


def test_a_fan_out_is_reported_beside_the_plan_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """70B on 4 nodes of trainers and 12 of engines: what the busiest rank sends falls to what a rank receives."""
    apart = [
        *RECIPE,
        "--nodes",
        "16",
        "placement={actor: 0-31, rollout: rest}",
        "actor.pp=4",
    ]
    assert main(apart) == 0
    out = capsys.readouterr().out
    assert "fan-out: copies sent from the actor's ranks to other nodes: 4.0 (12." in out
    assert (
        "busiest link between nodes: 18.2 GB in 0.363 s (54.5 GB in 1.090 s without fan-out)"
        in out
    )
    assert (
        "delta: if 1% of the weights change in a step, the busiest link between nodes "
        "carries 0.28 GB in 0.006 s (1.6% of whole weights)"
    ) in out
    assert main([*apart, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["reshard"]
    # A changed bfloat16 element takes its 2 bytes and about one for its position.
    assert found["delta"]["bytes_share"] == pytest.approx(0.01 * 3.1 / 2)
    assert found["delta"]["busiest"] == pytest.approx(
        0.0155 * found["sent"]["network"][-1], rel=1e-6
    )
    assert (
        found["fan_out"]["busiest"]
        == found["sent"]["network"][-1]
        <= 1.1 * found["received"]["network"][-1]
    )
    assert main([*apart, "--json", "reshard.fan_out=never"]) == 0
    direct = json.loads(capsys.readouterr().out)["reshard"]
    assert direct["fan_out"] is None
    # Neither without deltas nor with weights in 32 bits.
    for kept_whole in ("reshard.delta=off", "model.dtype=float32"):
        assert main([*apart, "--json", kept_whole]) in (0, 1)
        found_whole = json.loads(capsys.readouterr().out)["reshard"]
        assert found_whole["delta"] is None
    assert direct["sent"]["network"][-1] == pytest.approx(
        found["fan_out"]["busiest_without"], rel=0.01
    )


def test_what_does_not_fit_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RECIPE, "rollout.vllm.gpu_memory_utilization=0.9"]) == 0
    out = capsys.readouterr().out
    assert "does not fit:" in out and "GB too much" in out
    assert "nearest that would: rollout.vllm.gpu_memory_utilization=" in out


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ("h100", ""),
        ("a100", "a GPU that multiplies in 8 bits, which this one does not"),
        ("cpu", "needs a GPU"),
    ],
)
def test_fields_that_the_hardware_cannot_compute_are_refused(
    hardware: str, said: str, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        *tiny,
        "actor.megatron.fp8=hybrid",
        "model.dtype=bfloat16",
        "--hardware",
        hardware,
    ]
    assert main(given) == (2 if said else 0)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture(suffix: str, tiny: list[str], tmp_path: Path) -> None:
    file = tmp_path / "made" / f"plan{suffix}"
    assert main([*tiny, "--nodes", "1", "--picture", str(file)]) == 0
    if suffix == ".svg":
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    else:
        assert file.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_world_is_the_fewest_ranks_without_nodes(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"]["ranks"] == 2
    assert main([*tiny, "run.nproc=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"]["ranks"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--nodes", "1", "actor.tp=3"],
            "actor.tp: found 3, which does not divide the model's 4 attention heads",
        ),
        (["--nodes", "3", "--gpus-per-node", "1"], "does not divide the 3 ranks"),
        (
            ["--nodes", "1", "actor.cp=3"],
            "actor: tp=1 x cp=3 x pp=2 = 6 does not divide the 8 ranks",
        ),
        (
            ["--model-config", "nowhere.json"],
            "--model-config: nowhere.json does not exist",
        ),
    ],
)
def test_mistakes_end_in_one_message(
    arguments: list[str], said: str, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_nothing_describes(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "model.path=absent", "data.train=x.jsonl", "reward=exact_match"])
        == 2
    )
    assert (
        "Give the model's config.json: --model-config FILE" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--picture", "plan.gif"], ".svg or .png"),
        (["--network", "0"], "a number above 0"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*RECIPE, *arguments])
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_no_heavy_library_is_imported() -> None:
    code = (
        "import sys; from megaverl.cli.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'vllm', 'megatron', 'transformers', 'matplotlib'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *RECIPE], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_a_search_reports_mistakes_as_a_run_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RECIPE, "--auto", "actor.tpp=3", "actor.fsdp=3"]) == 2
    said = capsys.readouterr().err
    assert "actor.tpp (command line): unknown key. Did you mean `tp`?" in said
    assert "actor.fsdp (command line): found 3; expected a mapping" in said


@pytest.mark.parametrize(
    ("recipe", "commands"),
    [
        ("gsm8k_smollm2/sft", ["sft"]),
        ("preferences_smollm2/kto", ["dpo", "reward"]),
    ],
)
def test_a_configuration_without_rollouts_is_planned_for_its_commands(
    recipe: str, commands: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "configs" / f"{recipe}.yaml"
    model = ROOT / "configs" / "llama3_70b" / "config.json"
    arguments = ["plan", "--config", str(path), "--model-config", str(model)]
    arguments += ["--nodes", "8", "actor={tp: 8, pp: 4}"]
    assert main([*arguments, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert list(plans) == commands
    for command, plan in plans.items():
        trained = "reward_model" if command == "reward" else "actor"
        # Pairs have two responses to a prompt; KTO's rows are single responses.
        assert plan["samples"] == (64 if command == "reward" else 32)
        assert plan["roles"][trained] == "tp8 pp4 dp2" and plan["ranks"] == 64
        received = plan["collective_bytes"][trained]
        assert set(received) == {"tp", "pp", "dp"} and min(received.values()) > 0
        assert all(seconds > 0 for seconds in plan["seconds"].values())
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert all(f"megaverl {command} on 64 ranks" in said for command in commands)


@pytest.mark.parametrize("option", [["--auto"], ["--picture", "plan.svg"]])
def test_a_step_without_rollouts_is_neither_searched_nor_drawn(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "configs" / "gsm8k_smollm2" / "sft.yaml"
    assert main(["plan", "--config", str(path), *option]) == 2
    said = capsys.readouterr().err
    assert f"{option[0]}: this is a configuration of `megaverl sft`" in said


def test_a_mistake_of_a_training_run_is_not_taken_for_another_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RECIPE, "reward=[]", "actor.tpp=3"]) == 2
    said = capsys.readouterr().err
    assert "actor.tpp" in said and "This is a configuration of" not in said
