"""What is refused before any rank starts: the same from the command line and from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaverl.cli.main import main
from megaverl.config import files_and_packages, load_config
from megaverl.errors import MISTAKE, ConfigError
from megaverl.rollout.cpu_kernels import cpu_head_sizes, why_no_kernel
from megaverl.trainer import RLTrainer, init_distributed, preflight
from megaverl.trainer.api import trainers
from megaverl.utils.config import get_ppo_config

MISSING = "is trained by megatron-core, which is not installed here: pip install 'megaverl[megatron]'"


@pytest.fixture
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    real = files_and_packages.find_spec
    monkeypatch.setattr(
        files_and_packages,
        "find_spec",
        lambda name: None if name.startswith("megatron") else real(name),
    )


@pytest.mark.usefixtures("without_megatron")
def test_a_missing_megatron_core_is_named_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is made for the run, by the small run of the Python API and by the quickstart."""
    small = get_ppo_config(output_dir=tmp_path, run_name="small")
    for start in (
        lambda: RLTrainer(small),
        lambda: init_distributed(small),
        small.to_config,
    ):
        with pytest.raises(ConfigError) as error:
            start()
        assert MISSING in str(error.value)
    assert not (tmp_path / "small").exists()
    assert main(["quickstart", f"run.dir={tmp_path}", "run.name=quick"]) == MISTAKE
    assert MISSING in capsys.readouterr().err and not (tmp_path / "quick").exists()
    given = load_config(
        None,
        ["model.path=m", "data.train=t.jsonl", "reward=exact_match"],
        check_paths=False,
    )
    with pytest.raises(ConfigError, match="megatron-core, which is not installed here"):
        init_distributed(given)  # checked by nobody before


def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    pytest.importorskip("vllm", reason="pip install 'megaverl[vllm]'")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(cpu_head_sizes()) == CPUAttentionBackend.get_supported_head_sizes()
    assert why_no_kernel(64) == "" and "heads have 24 dimensions" in why_no_kernel(24)


def test_a_head_size_is_refused_before_ranks_start(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(preflight, "has_usable_gpu", lambda: False)
    monkeypatch.setattr(
        "megaverl.rollout.cpu_kernels.cpu_head_sizes", lambda: (64, 128)
    )
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
    command = [
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        "reward=exact_match",
    ]
    command += [
        "data.max_prompt_tokens=16",
        "rollout.sampling.max_tokens=6",
        f"run.dir={tmp_path}",
    ]
    for option in ([], ["--dry-run"]):
        assert main(["train", *command, *option]) == MISTAKE
        assert said in capsys.readouterr().err
    assert (
        preflight.check_fields(
            load_config(None, [*command, "rollout.engine=hf"]), "train"
        )
        == []
    )


def _command(inputs: Path, tmp_path: Path, *more: str) -> list[str]:
    given = [
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        "reward=exact_match",
    ]
    given += [
        "data.max_prompt_tokens=16",
        "rollout.sampling.max_tokens=6",
        f"run.dir={tmp_path}",
    ]
    return ["train", *given, *more]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            ["actor.megatron.fp8=hybrid", "model.dtype=bfloat16"],
            "actor.megatron.fp8: found 'hybrid', which",
        ),
        (["actor.megatron.attention_backend=flash"], "Leave it at auto."),
        (
            ["actor.optimizer.optimizer_cpu_offload=true"],
            "Use actor.offload.optimizer.",
        ),
        (
            ["rollout.vllm.enforce_eager=false"],
            "rollout.vllm.enforce_eager: found false: a compiled model",
        ),
        (
            ["rollout.vllm.speculative_config={method: suffix}"],
            "found suffix: of vLLM's speculators",
        ),
        (
            ["actor.optimizer.optimizer=sgd"],
            "Set actor.ddp.use_distributed_optimizer: false",
        ),
    ],
)
@pytest.mark.parametrize("is_dry", [True, False])
def test_what_this_machine_cannot_compute_is_refused_before_ranks_start(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: list[str],
    said: str,
    is_dry: bool,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(_command(inputs, tmp_path, *fields, *["--dry-run"] * is_dry)) == MISTAKE
    assert said in capsys.readouterr().err


def test_a_dry_run_may_be_of_a_run_on_a_machine_with_gpus(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "has_usable_gpu", lambda: False)
    command = _command(
        inputs, tmp_path, "actor.megatron.fp8=hybrid", "model.dtype=bfloat16"
    )
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "the configuration is good" in shown.out
    assert "note: actor.megatron.fp8: found 'hybrid'" in shown.err
    assert (
        "A run on this machine would be refused; one on another machine may not be."
        in shown.err
    )
    assert main(command) == MISTAKE


def test_megatron_core_itself_judges_a_small_model(
    inputs: Path, tmp_path: Path
) -> None:
    """Of fields that no table knows: what it raises while it builds, on a grid of several ranks too."""
    import megaverl.trainer.trial_build as trial_build

    def tried(*more: str) -> trial_build.TrialResult:
        config = load_config(
            None, _command(inputs, tmp_path, *more)[1:], check_paths=False
        )
        return trial_build.try_roles(config, "train")

    refused = tried(
        "actor.tp=2", "actor.pp=2", "actor.megatron.delay_wgrad_compute=true"
    )
    [issue] = refused.issues
    assert (
        issue.key == "actor.megatron"
        and "actor.megatron.delay_wgrad_compute" in issue.message
    )
    good = tried(
        "actor.tp=2",
        "actor.megatron.sequence_parallel=true",
        "actor.optimizer.weight_decay=0.1",
    )
    assert good == trial_build.TrialResult([], [])
    stepped = tried(
        "actor.megatron.fp32_residual_connection=true", "model.dtype=bfloat16"
    )
    assert (
        "RuntimeError: expected m1 and m2 to have the same dtype"
        in stepped.issues[0].message
    )


def test_an_end_of_the_trial_is_no_judgement(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megaverl.trainer.trial_build as trial_build

    config = load_config(
        None, _command(inputs, tmp_path, "actor.megatron.sequence_parallel=false")[1:]
    )
    result = trial_build.try_roles(config, "train", deadline=0.01)
    assert (
        result.issues == []
        and "did not finish within 0.01 s as its model is built" in result.not_tried[0]
    )
    plain = load_config(
        None, _command(inputs, tmp_path, "actor.megatron.hidden_dropout=0.0")[1:]
    )
    assert trial_build.unusual_fields(plain, "train") == {}


def test_fields_may_have_lists_and_mappings_as_values(
    inputs: Path, tmp_path: Path
) -> None:
    import megaverl.trainer.trial_build as trial_build

    fields = [
        "actor.megatron.recompute_modules=[core_attn]",
        "rollout.vllm.compilation_config={mode: 0}",
    ]
    config = load_config(None, _command(inputs, tmp_path, *fields)[1:])
    assert trial_build.unusual_fields(config, "train")["actor"] == {
        "megatron": ["recompute_modules"]
    }
    assert trial_build.unusual_engine_fields(config) == ["compilation_config"]


def test_vllm_itself_judges_its_fields(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fields of which each is right, and which do not go together; and fields that do, on two ranks."""
    import megaverl.trainer.trial_build as trial_build

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    together = [
        "rollout.vllm.max_num_seqs=64",
        "rollout.vllm.max_num_batched_tokens=32",
    ]
    assert main(_command(inputs, tmp_path, *together)) == MISTAKE
    said = capsys.readouterr().err
    assert (
        "rollout.vllm: vLLM refuses to start on" in said
        and "max_num_batched_tokens (32)" in said
    )
    assert (
        "Fields that may be the cause: rollout.vllm.max_num_seqs, rollout.vllm.max_num_batched_tokens."
        in said
    )
    good = [
        "rollout.tp=2",
        "run.nproc=2",
        "rollout.vllm.max_num_seqs=8",
        "rollout.vllm.enforce_eager=true",
    ]
    config = load_config(None, _command(inputs, tmp_path, *good)[1:], check_paths=False)
    assert trial_build.try_roles(
        config, "train", generates=True
    ) == trial_build.TrialResult([], [])
    plain = load_config(
        None, _command(inputs, tmp_path, "rollout.vllm.gpu_memory_utilization=0.5")[1:]
    )
    assert trial_build.unusual_engine_fields(plain) == []
