"""A model that neither transformers nor vLLM has: its folder brings the code, which runs where that is allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megaverl.models.support import Support, support_of
from tests.launcher import Launcher
from tests.trainer.conftest import command_arguments
from tests.trainer.test_end_to_end import LOGPROB_LIMIT, metrics_of

CODE = Path(__file__).parent / "remote_code"
CONFIG = {
    "architectures": ["PlainForCausalLM"],
    "model_type": "megaverl_plain",
    "auto_map": {
        "AutoConfig": "configuration_plain.PlainConfig",
        "AutoModel": "modeling_plain.PlainModel",
        "AutoModelForCausalLM": "modeling_plain.PlainForCausalLM",
    },
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, the code, and the tokenizer of `inputs`."""
    made = tmp_path_factory.mktemp("remote") / "plain"
    shutil.copytree(
        inputs / "model",
        made,
        ignore=shutil.ignore_patterns("config.json", "*.safetensors*"),
    )
    of_inputs = json.loads((inputs / "model" / "config.json").read_text())
    special = {key: of_inputs[key] for key in ("vocab_size", "eos_token_id")}
    (made / "config.json").write_text(json.dumps(CONFIG | special))
    for file in CODE.glob("*.py"):
        shutil.copy(file, made)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(made, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(
        made
    )
    # all that it says: vLLM reads the file, not the class's defaults
    (made / "config.json").write_text(
        json.dumps({**config.to_dict(), **CONFIG, **special})
    )
    return made


def test_it_trains_with_consent_and_is_refused_without(
    launch: Launcher, folder: Path, inputs: Path, tmp_path: Path
) -> None:
    arguments = [
        *command_arguments(inputs, tmp_path),
        f"model.path={folder}",
        "actor={engine: fsdp, tp: 1}",
        "algorithm={name: grpo, group_size: 4, kl: {in: loss, kind: k3, coef: 0.01}}",
    ]
    refused = launch.world(
        2, "tests.trainer.ranks:attempt", command="train", arguments=arguments
    )
    for heard in refused:
        assert "trust the Python files that come with the model" in heard["text"]
        assert "model.trust_remote_code=true" in heard["text"]
    consent = [*arguments, "model.trust_remote_code=true", "run.name=trusted"]
    assert launch.world(
        2, "tests.trainer.ranks:attempt", command="train", arguments=consent
    ) == [{}, {}]
    metrics = metrics_of(tmp_path / "trusted")
    assert sorted(metrics) == [1, 2]
    for found in metrics.values():
        assert (
            0 < found["rollout/logprob_diff_max"] < LOGPROB_LIMIT
            and found["actor/grad_norm"] > 0
        )
    assert metrics[2]["train/kl"] > 1e-5


def test_what_its_code_says_is_told(folder: Path, tmp_path: Path) -> None:
    support = {
        support.feature: support
        for support in support_of(folder, trust_remote_code=True)
    }
    assert support["fsdp"].works and "packed rows" in support["fsdp"].reason
    code = (folder / "modeling_plain.py").read_text()

    def broken(name: str, was: str, now: str) -> Support:
        """A folder of its own each time: transformers keeps what it has imported from one."""
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "modeling_plain.py").write_text(code.replace(was, now))
        return {
            support.feature: support
            for support in support_of(tmp_path / name, trust_remote_code=True)
        }["fsdp"]

    found = broken("unbuilt", "config.num_hidden_layers", "config.max_length")
    assert (
        not found.works
        and "has no attribute 'max_length'" in found.reason
        and "written for another" in found.reason
    )
    found = broken("unrun", "hidden = self.tokens", "hidden = self.get_head_mask")
    assert not found.works and "its forward pass does not run" in found.reason
    assert "has no attribute 'get_head_mask'" in found.reason
