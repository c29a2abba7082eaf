"""`megaverl models`: each line is true of a tiny model of that architecture."""

from __future__ import annotations

import ast
from math import prod
from pathlib import Path

import pytest

from megaverl.cli.main import main
from megaverl.models.architectures import weights_of
from megaverl.models.supported import ANY, NAMED, Support, support_of
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec

# The test that each word of `megaverl models` stands on, of every architecture that it lists.
PROOFS = {
    "megatron": "tests.models.test_parity:test_logits_equal_hugging_faces",
    "fsdp": "tests.cli.test_models:test_every_architecture_with_a_name",
    "vllm": "tests.sharding.test_vllm:test_vllm_itself_places_the_elements_there",
    "convert": "tests.checkpoint.convert.test_round_trips:test_the_same_bytes_come_back",
}
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


@pytest.mark.parametrize("what", [each.what for each in NAMED])
def test_what_is_said_of_them_has_a_test_of_each(what: str) -> None:
    """By parameters, or by a loop, over `ARCHITECTURES` itself: one that joins it is tried as well."""
    module, _, name = PROOFS[what].partition(":")
    source = ast.parse(Path(*module.split(".")).with_suffix(".py").read_text())
    functions = {node.name: node for node in source.body if isinstance(node, ast.FunctionDef)}
    test = functions[name]
    asked = [test, *(functions[each.arg] for each in test.args.args if each.arg in functions)]  # and its fixtures
    iterated = [
        *(node.iter for each in asked for node in ast.walk(each) if isinstance(node, ast.comprehension)),
        *(mark.args[1] for mark in test.decorator_list if isinstance(mark, ast.Call) and len(mark.args) > 1),
    ]
    assert any("ARCHITECTURES" in {n.id for n in ast.walk(each) if isinstance(n, ast.Name)} for each in iterated)


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
