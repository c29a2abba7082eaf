"""What is refused before any rank starts: the same from the command line and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.cli.main import main
from megaverl.config import checks, load_config
from megaverl.errors import MISTAKE, ConfigError
from megaverl.rollout.cpu_kernels import cpu_head_sizes, why_no_kernel
from megaverl.trainer import RLTrainer, init_distributed, preflight
from megaverl.trainer.api import trainers
from megaverl.utils.config import get_ppo_config

MISSING = "is trained by megatron-core, which is not installed here: pip install 'megaverl[megatron]'"


@pytest.fixture
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name.startswith("megatron") else real(name))


@pytest.mark.usefixtures("without_megatron")
def test_a_missing_megatron_core_is_named_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is made for the run, by the small run of the Python API and by the quickstart."""
    small = get_ppo_config(output_dir=tmp_path, run_name="small")
    for start in (lambda: RLTrainer(small), lambda: init_distributed(small), small.to_config):
        with pytest.raises(ConfigError) as error:
            start()
        assert MISSING in str(error.value)
    assert not (tmp_path / "small").exists()
    assert main(["quickstart", f"run.dir={tmp_path}", "run.name=quick"]) == MISTAKE
    assert MISSING in capsys.readouterr().err and not (tmp_path / "quick").exists()
    given = load_config(None, ["model.path=m", "data.train=t.jsonl", "reward=exact_match"], check_paths=False)
    with pytest.raises(ConfigError, match="megatron-core, which is not installed here"):
        init_distributed(given)  # checked by nobody before


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm", reason="pip install 'megaverl[vllm]'")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(cpu_head_sizes()) == CPUAttentionBackend.get_supported_head_sizes()
    assert why_no_kernel(64) == "" and "heads have 24 dimensions" in why_no_kernel(24)


def test_a_head_size_is_refused_before_ranks_start(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "count_gpus", lambda: 0)
    monkeypatch.setattr("megaverl.rollout.cpu_kernels.cpu_head_sizes", lambda: (64, 128))
    said = "the model's heads have 32 dimensions; vLLM's CPU attention has kernels for 64, 128 only."
    settings: dict[str, Any] = {
        "actor_model": inputs / "model",
        "train_data": inputs / "train.jsonl",
        "reward_function": "exact_match",
        "max_prompt_tokens": 16,
        "max_response_tokens": 6,
        "output_dir": tmp_path,
        "use_vllm": True,
    }
    for start in (
        lambda: RLTrainer(**settings, num_gpus=2).train(),
        lambda: init_distributed(get_ppo_config(**settings)),
    ):
        with pytest.raises(ConfigError) as error:
            start()
        assert said in str(error.value)
    assert trainers._Joined.job is None
    command = [f"model.path={inputs / 'model'}", f"data.train={inputs / 'train.jsonl'}", "reward=exact_match"]
    command += ["data.max_prompt_tokens=16", "rollout.sampling.max_tokens=6", f"run.dir={tmp_path}"]
    for option in ([], ["--dry-run"]):
        assert main(["train", *command, *option]) == MISTAKE
        assert said in capsys.readouterr().err
    preflight.check_head_size(load_config(None, [*command, "rollout.engine=hf"]), "train")
