"""The commands as a person types them: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaverl import __version__
from megaverl.cli.main import COMMANDS, main
from megaverl.processes import ending_with_parent

ROOT = Path(__file__).parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM has a kernel for it on a CPU
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return [
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "reward=exact_match",
        f"run.dir={tmp_path / 'runs'}",
    ]


def megaverl(
    *arguments: str, module: str = "megaverl.cli.main", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ending_with_parent([sys.executable, "-m", module, *arguments]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_version_and_usage(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)
    assert main([]) == 2


def test_a_reader_that_has_read_enough_is_no_failure():
    """`megaverl keys | head`"""
    command = [sys.executable, "-m", "megaverl", "keys"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, b"")


def test_an_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "no command `trian`. Did you mean `train`?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples(command, capsys):
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    usage, *rest = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"usage: megaverl {command}")
    assert any(line.startswith("  ") and f"megaverl {command}" in line for line in rest)


def test_dry_run_prints_the_resolved_configuration(files, capsys):
    """Options may stand between overrides."""
    assert (
        main(
            [
                "train",
                files[0],
                "--dry-run",
                "--print",
                "actor.tp=2",
                "--nproc",
                "2",
                *files[1:],
            ]
        )
        == 0
    )
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["run"]["nproc"] == 2
    assert resolved["critic"]["tp"] == 2


def test_dry_run_imports_no_torch_and_no_engine(files):
    code = (
        "import sys; from megaverl.cli.main import main; code = main(['train', '--dry-run', *sys.argv[1:]]); "
        "print(sorted({'torch', 'vllm', 'megatron', 'transformers'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_mistakes_end_in_one_message_and_exit_code_2(files):
    done = megaverl(
        *files, "actor.tpp=2", "trainer.steps=x", module="megaverl.cli.train"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("2 mistakes in the configuration (command line):\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("rank", "tells"), [("0", True), ("1", False)])
def test_under_torchrun_only_the_first_rank_tells(files, rank, tells):
    done = megaverl(
        "train", *files, "actor.tp=3", RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank
    )
    assert done.returncode == 2
    assert bool(done.stderr) is tells
    if tells:
        assert (
            "actor: tp=3 x cp=1 x pp=1 = 3 does not divide the 2 ranks" in done.stderr
        )


def test_a_number_of_processes_that_does_not_fill_the_grid(files):
    done = megaverl("train", *files, "--nproc", "3", "actor.tp=2")
    assert done.returncode == 2
    assert (
        "does not divide the 3 ranks" in done.stderr and "Traceback" not in done.stderr
    )


def test_gpus_that_do_not_fill_the_grid(files):
    """run.nproc is not given: the number of GPUs is what the grids must fill."""
    done = megaverl("train", *files, "actor.tp=2", CUDA_VISIBLE_DEVICES="0,1,2")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "actor: tp=2 x cp=1 x pp=1 = 2 does not divide the 3 ranks."
    )


def test_a_failure_inside_the_ranks_is_told_once(files, tmp_path, launch):
    """Two real ranks; the model folder has no tokenizer, which only they can find out."""
    ended = launch.command(["train", *files], logs=tmp_path / "output")
    assert ended.codes == [1, 1]
    assert "Traceback" not in ended.text and "tokenizer" in ended.text
    assert ended.text.count("error:") == 1, ended.text
    logs = sorted(
        path.name for path in (tmp_path / "runs" / "run" / "logs").glob("rank_*.log")
    )
    assert logs == ["rank_0.log", "rank_1.log"]


def test_generate_wants_prompts(files, tmp_path, capsys):
    wrong = tmp_path / "prompts.csv"
    wrong.write_text("a\n")
    for arguments, said in (
        ([], "give --prompt TEXT or --prompts FILE"),
        (["--prompts", str(wrong)], ".jsonl or .parquet"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["generate", *files, *arguments])
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    assert (
        main(["generate", *files, "--prompt", "a", "--prompt", "b", "--dry-run"]) == 0
    )


def test_file_checks_can_be_left_out_of_a_dry_run_only(capsys):
    arguments = [
        "train",
        "model.path=/not/here",
        "data.train=x.jsonl",
        "reward=gsm8k",
        "--no-file-checks",
    ]
    assert main([*arguments, "--dry-run"]) == 0
    assert main(arguments) == 2
    assert "only with --dry-run" in capsys.readouterr().err


def test_keys(capsys):
    assert main(["keys", "algorithm.kl"]) == 0
    out = capsys.readouterr().out
    assert 'algorithm.kl.in: none | reward | loss = "none"' in out
    assert "algorithm.gamma" not in out
    assert main(["keys", "rollout.sampling"]) == 0
    out = capsys.readouterr().out
    assert "rollout.sampling.top_p: float = 1.0" in out
    assert "rollout.sampling.seed" not in out, "megaverl owns it"
    assert main(["keys", "algorthm"]) == 2


@pytest.mark.parametrize(
    ("given", "patterns"),
    [
        (["--track_metrics"], ["*"]),
        (["--track_metrics", "reward/*,actor/*"], ["reward/*", "actor/*"]),
        (["--track-metrics", "run.seed=5"], ["*"]),
    ],
)
def test_which_metrics_trackers_get(
    files: list[str],
    given: list[str],
    patterns: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--dry-run", "--print", *files, *given]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)["run"]
    assert resolved["track_metrics"] == patterns
    assert resolved["seed"] == (5 if "run.seed=5" in given else 0)


def test_a_node_says_all_that_it_is(
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With commas, or with an option for each."""
    monkeypatch.setenv("MEGAVERL_ROLE", "")
    for given in (
        ["--role", "rollout,reward"],
        ["--role", "rollout", "--role", "reward"],
    ):
        assert main(["train", *given, *files, "--dry-run"]) == 0, (
            capsys.readouterr().err
        )
        assert os.environ["MEGAVERL_ROLE"] == "rollout,reward"
    with pytest.raises(SystemExit):
        main(["train", "--role", "rollout", "--role", "rewards", *files, "--dry-run"])
    assert (
        "--role: found 'rollout,rewards'; expected one or more of train, actor"
        in capsys.readouterr().err
    )
