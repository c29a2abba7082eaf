"""`megaverl init`, `megaverl recipes` and `megaverl draft-head`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from megaverl.cli.main import main
from megaverl.config import load_config
from megaverl.config.yaml_source import all_recipes
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.draft_head import AFTER_LAST_NORM, HeadSpec, misfits_target
from megaverl.sharding.model_spec import ModelSpec
from tests.test_package import ROOT

ROWS = [
    {"question": f"{n} + 1 =", "solution": f"so it is\n#### {n + 1}"} for n in range(20)
]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows and a model's config.json, and the shell in it; no GPU, no terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    (tmp_path / "train.jsonl").write_text(
        "\n".join(map(json.dumps, ROWS)), encoding="utf-8"
    )
    (tmp_path / "llama").symlink_to(ROOT / "configs" / "llama3_70b")
    return tmp_path


def test_a_recipe_and_a_reward_are_written_and_can_be_run(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        "--model",
        "llama",
        "--data",
        "train.jsonl",
        "--reward",
        "function",
        "--algorithm",
        "ppo",
        "--nproc",
        "4",
    ]
    assert main(["init", "mine", *told]) == 0
    assert "megaverl train --config mine/train.yaml\n" in capsys.readouterr().out
    config = load_config("mine/train.yaml", [], check_paths=False)
    assert (config.run.nproc, config.algorithm.name, config.model.path) == (
        4,
        "ppo",
        str(desk / "llama"),
    )
    assert (config.data.prompt_key, config.data.answer_key) == ("question", "solution")
    assert main(["check-plugin", "reward", "mine/rewards.py:score"]) == 0
    lines = (desk / "mine" / "train.yaml").read_text(encoding="utf-8").splitlines()
    assert [
        line
        for line in lines
        if line.startswith("  ") and not line.endswith(":") and "  # " not in line
    ] == []
    with pytest.raises(SystemExit):  # what is there stays
        main(["init", "mine", *told])
    assert "mine/train.yaml already exists" in capsys.readouterr().err


def test_a_recipe_works_from_every_folder(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk / "rows.py").write_text("def train():\n    return []\n")
    for name, data in (
        ("a", "train.jsonl"),
        ("b", "*.jsonl"),
        ("c", "rows.py:train"),
        ("d", "org/name"),
    ):
        assert (
            main(
                [
                    "init",
                    name,
                    "--model",
                    "llama",
                    "--data",
                    data,
                    "--reward",
                    "function",
                    "--nproc",
                    "2",
                ]
            )
            == 0
        )
    monkeypatch.chdir("a")
    given = {}
    for name in "abcd":
        config = load_config(f"../{name}/train.yaml", [], check_paths=name == "a")
        given[name] = [source.path for source in config.data.train]
        assert config.reward[0].function == f"{desk / name / 'rewards.py'}:score"
    assert given == {
        "a": [f"{desk}/train.jsonl"],
        "b": [f"{desk}/*.jsonl"],
        "c": [f"{desk}/rows.py:train"],
        "d": ["org/name"],
    }
    assert main(["check-plugin", "reward", config.reward[0].function or ""]) == 0


def test_what_nobody_says_is_seen(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", "org/name", "--data", "train.jsonl"]) == 0
    written = yaml.safe_load((desk / "train.yaml").read_text(encoding="utf-8"))
    assert written["reward"] == [{"name": "gsm8k"}]  # the answers have ####
    assert (written["algorithm"]["name"], written["actor"]) == (
        "grpo",
        {"optimizer": {"lr": 1e-6}},
    )
    assert not (desk / "rewards.py").exists()


def test_a_terminal_is_asked_and_asked_again_what_is_wrong(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    asked = []
    given = [
        "",
        "nowhere",
        "llama",
        "tran.jsonl",
        "train.jsonl",
        "math",
        "math_verify",
        "",
        "none",
        "2",
    ]
    answers = iter(given)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(
        "builtins.input", lambda question: asked.append(question) or next(answers)
    )
    assert main(["init"]) == 0
    assert len(asked) == len(given) and asked[7].endswith("[grpo]: ")
    shown = capsys.readouterr().out
    for mistake in (
        "nowhere is not here",
        "tran.jsonl: not found",
        "there is no `math`",
        "found none; expected",
    ):
        assert shown.count(mistake) == 1
    config = load_config("train.yaml", [], check_paths=False)
    assert (config.reward[0].name, config.algorithm.name, config.run.nproc) == (
        "math_verify",
        "grpo",
        2,
    )


def test_gpus_get_a_layout_that_fits(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(8))))
    monkeypatch.setattr(
        "megaverl.planner.search.gpu_name", lambda: "NVIDIA H100 80GB HBM3"
    )
    small = json.loads(
        (ROOT / "configs/qwen2_5_7b/config.json").read_text(encoding="utf-8")
    )
    (desk / "qwen").mkdir()
    (desk / "qwen" / "config.json").write_text(json.dumps(small), encoding="utf-8")
    for model, fits in (("qwen", True), ("llama", False)):
        assert (
            main(["init", model + "_run", "--model", model, "--data", "train.jsonl"])
            == 0
        )
        config = load_config(f"{model}_run/train.yaml", [], check_paths=False)
        written = (desk / f"{model}_run" / "train.yaml").read_text(encoding="utf-8")
        assert config.run.nproc == 8
        assert ("of what fits the fastest" in written, "tp: " in written) == (
            fits,
            fits,
        )
        # Without a search the run derives the share of memory that the engine gets.
        assert "sleep: true" in written
        assert ("gpu_memory_utilization" in written) == fits


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "train.jsonl"], "--model: not given: model (a Hugging Face folder"),
        (
            ["--model", "nowhere", "--data", "train.jsonl"],
            "--model: nowhere is not here",
        ),
        (["--model", "llama", "--data", "tran.jsonl"], "tran.jsonl: not found"),
        (
            ["--model", "llama", "--data", "train.jsonl", "--algorithm", "grop"],
            "Did you mean `grpo`?",
        ),
        (
            ["--model", "llama", "--data", "train.jsonl", "--nproc", "0"],
            "--nproc: found 0; expected",
        ),
        (
            ["--model", "llama", "--data", "train.jsonl", "--answer-key", "x"],
            "--answer-key: there is no column x",
        ),
        (["--model", "llama", "--data", "odd.jsonl"], "which has text, label"),
        (
            ["--model", "llama", "--data", "train.jsonl", "--nproc", "-1"],
            "--nproc: found -1",
        ),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    desk: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "odd.jsonl").write_text('{"text": "a", "label": 1}\n', encoding="utf-8")
    try:
        code = main(["init", "mine", *words])
    except SystemExit as ended:
        code = ended.code
    assert code in (1, 2) and told in capsys.readouterr().err
    assert not (desk / "mine").exists()


def test_recipes_are_listed_each_with_what_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    for path in all_recipes():
        line = next(
            line for line in listed.splitlines() if line.split()[:1] == [path.stem]
        )
        assert len(line.split()) > 4, (
            f"{path} says nothing of itself in its first comment"
        )
    assert "gsm8k_smollm2: SmolLM2-135M-Instruct on GSM8K" in listed
    assert main(["recipes", "llama3_70b/ppo_16_nodes"]) == 0
    assert capsys.readouterr().out.endswith(
        (ROOT / "configs/llama3_70b/ppo_16_nodes.yaml").read_text(encoding="utf-8")
    )
    with pytest.raises(SystemExit):
        main(["recipes", "llama3_70b/ppo_16_node_"])
    assert "Did you mean `llama3_70b/ppo_16_nodes`?" in capsys.readouterr().err


def test_an_mtp_head_reads_the_last_norm_and_has_the_layers_that_vllm_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_folder(tmp_path / "model", tie_embeddings=True)
    folder = tmp_path / "head"
    assert main(["draft-head", str(model), str(folder), "--kind=mtp"]) == 0
    assert f"{{method: mtp, model: {folder}, num_spec" in capsys.readouterr().out
    head = HeadSpec.from_folder(folder)
    assert (head.method, head.aux_layers) == ("mtp", (AFTER_LAST_NORM,))
    assert misfits_target(head, ModelSpec.from_folder(model)) == []
    weights = load_file(folder / "model.safetensors")
    assert all(name.startswith("model.mtp_layers.0.") for name in weights)
    embeddings = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    beside = load_file(folder / "target.safetensors")
    assert set(beside) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(layer.equal(embeddings) for layer in beside.values())


@pytest.mark.parametrize(("num_layers", "read"), [(8, (2, 4, 5)), (2, (0, 1, 2))])
def test_a_head_reads_the_layers_that_vllm_would_choose_or_the_last_ones(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_layers: int,
    read: tuple[int, ...],
) -> None:
    model = make_tiny_folder(tmp_path / "model", num_hidden_layers=num_layers)
    command = ["draft-head", str(model), str(tmp_path / "head")]
    assert main(command) == 0
    assert HeadSpec.from_folder(tmp_path / "head") == HeadSpec(read, 32, 100)
    assert main(command) == 1
    assert "there is a model already" in capsys.readouterr().err
    gemma = make_tiny_folder(tmp_path / "gemma", "Gemma3ForCausalLM")
    make_tiny_folder(tmp_path / "wide", "Qwen3ForCausalLM", head_dim=16)
    of_kind = [str(model), "new", "--kind=mtp"]
    for arguments, said in (
        ([str(tmp_path / "none"), "new"], "none/config.json: not found"),
        ([str(gemma), "new"], "Gemma3ForCausalLM scales its embeddings"),
        ([str(model), "new", "--intermediate-size=-4"], "a width of 1 or more"),
        ([str(model), "/proc/new/head"], "/proc/new/head: cannot be written"),
        ([*of_kind, "--intermediate-size=4"], "an MTP head the target's MLP"),
        ([str(tmp_path / "wide"), "new", "--kind=mtp"], "has 4 heads of 16 dimensions"),
    ):
        assert main(["draft-head", *arguments]) == 1
        assert said in capsys.readouterr().err
    assert not Path("new").exists()
