"""`megaverl models`: each line is true of a tiny model of that architecture."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from megaverl.cli.main import main
from megaverl.models.architectures import weights_of
from megaverl.models.supported import ANY, NAMED, Support, support_of
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec

GPT2 = """{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4,
"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}"""


def found(folder: Path) -> dict[str, Support]:
    return {each.what: each for each in support_of(folder)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_with_a_name(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_folder(tmp_path / "model", architecture)
    support = found(folder)
    assert [(each.what, each.works) for each in support.values()] == [(each.what, each.works) for each in NAMED]
    numel = sum(prod(weight.shape) for weight in weights_of(ModelSpec.from_folder(folder)))
    assert support["fsdp"].why.startswith(f"{numel:,} parameters"), "transformers builds what the table says"


def test_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(GPT2)
    support = found(tmp_path)
    assert [(each.what, each.works) for each in support.values()] == [(each.what, each.works) for each in ANY]
    assert "has no table of GPT2LMHeadModel" in support["megatron"].why
    (tmp_path / "config.json").write_text(GPT2.replace("gpt2", "nothing").replace("GPT2LMHeadModel", "NoneSuch"))
    assert not any(each.works for each in found(tmp_path).values())
    assert main(["models", str(tmp_path)]) == 0
    assert "fsdp      no " in capsys.readouterr().out
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(ARCHITECTURES) + 1]] == list(ARCHITECTURES)
    assert main(["models", str(tmp_path / "absent")]) == 1
