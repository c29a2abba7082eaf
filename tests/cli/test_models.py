"""`megaverl models`: each line is true of a tiny model of that architecture."""

from __future__ import annotations

import ast
import dataclasses
import json
from inspect import signature
from math import prod
from pathlib import Path

import pytest

from megaverl.cli.main import main
from megaverl.models.architectures import weights_of
from megaverl.models.support import (
    ANY,
    NAMED,
    Support,
    support_by_table,
    support_of,
)
from megaverl.models.tiny import TINY, make_tiny_folder
from megaverl.platform import platform
from megaverl.sharding.model_config import NOT_IN_TRANSFORMERS
from megaverl.sharding.model_spec import (
    ARCHITECTURES,
    IMAGE_ARCHITECTURES,
    NO_TABLE,
    ModelSpec,
)

# The test that each word of `megaverl models` stands on, of every architecture that it
# lists.
PROOFS = {
    "megatron": "tests.models.test_parity:test_logits_equal_hugging_faces",
    "fsdp": "tests.cli.test_models:test_every_architecture_with_a_name",
    "vllm": "tests.sharding.test_vllm:test_vllm_itself_places_the_elements_there",
    "convert": "tests.checkpoint.convert.test_round_trips:test_the_same_bytes_come_back",
}
GPT2 = """{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4,
"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0}"""


def found(folder: Path) -> dict[str, Support]:
    return {support.feature: support for support in support_of(folder)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_with_a_name(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_folder(tmp_path / "model", architecture)
    support = found(folder)
    assert [(support.feature, support.works) for support in support.values()] == [
        (support.feature, support.works) for support in support_by_table(architecture)
    ]
    if architecture in NOT_IN_TRANSFORMERS:
        for said in (architecture, "actor.engine=megatron", "trust_remote_code=true"):
            assert said in support["fsdp"].reason
        return
    numel = sum(
        prod(weight.shape) for weight in weights_of(ModelSpec.from_folder(folder))
    )
    assert support["fsdp"].reason.startswith(f"{numel:,} parameters"), (
        "transformers builds what the table says"
    )


@pytest.mark.parametrize("what", [support.feature for support in NAMED])
def test_what_is_said_of_them_has_a_test_of_each(what: str) -> None:
    """By parameters, or by a loop, over `ARCHITECTURES` itself: one that joins it is tried as well."""
    module, _, name = PROOFS[what].partition(":")
    source = ast.parse(Path(*module.split(".")).with_suffix(".py").read_text())
    functions = {
        node.name: node for node in source.body if isinstance(node, ast.FunctionDef)
    }
    test = functions[name]
    # And its fixtures.
    asked = [
        test,
        *(functions[each.arg] for each in test.args.args if each.arg in functions),
    ]
    iterated = [
        *(
            node.iter
            for each in asked
            for node in ast.walk(each)
            if isinstance(node, ast.comprehension)
        ),
        *(
            mark.args[1]
            for mark in test.decorator_list
            if isinstance(mark, ast.Call) and len(mark.args) > 1
        ),
    ]
    assert any(
        "ARCHITECTURES" in {n.id for n in ast.walk(each) if isinstance(n, ast.Name)}
        for each in iterated
    )


def test_why_megatron_core_cannot_build_what_is_asked_for_most(tmp_path: Path) -> None:
    """The reasons are told, and true of the version that is installed: whoever meets one that is not, gives a table."""
    platform.adapt_megatron()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    for architecture, reason in NO_TABLE.items():
        model_type = architecture.removesuffix("ForCausalLM").lower()
        config = {"architectures": [architecture], "model_type": model_type, **TINY}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert (
            reason in found(tmp_path)["megatron"].reason
            and not found(tmp_path)["megatron"].works
        )
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert not {
        name
        for name in fields
        if "attention_chunk" in name or "temperature" in name or "local_base" in name
    }
    assert not {
        name
        for name in vars(TransformerLayerSubmodules())
        if name.startswith("post_") and "norm" in name
    }
    assert [
        name
        for name in signature(GPTModel.__init__).parameters
        if name.endswith("_base")
    ] == ["rotary_base"]


def test_what_a_table_does_not_describe_is_told_of_fsdp2_all_the_same(
    tmp_path: Path,
) -> None:
    """A mixture of experts whose config.json asks for what Megatron's table lacks; and folders that are quantised."""
    folder = make_tiny_folder(tmp_path / "model", "Qwen3MoeForCausalLM")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    assert not found(folder)["megatron"].works and found(folder)["fsdp"].works
    for method, said in (
        ("fp8", "Use a folder of the model that is not"),
        ("mxfp4", "Mxfp4Config(dequantize=True)"),
    ):
        path.write_text(
            json.dumps(config | {"quantization_config": {"quant_method": method}})
        )
        for engine in ("megatron", "fsdp"):
            assert (
                said in found(folder)[engine].reason and not found(folder)[engine].works
            )


def test_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(GPT2)
    support = found(tmp_path)
    assert [(support.feature, support.works) for support in support.values()] == [
        (support.feature, support.works) for support in ANY
    ]
    assert "has no table of GPT2LMHeadModel" in support["megatron"].reason
    (tmp_path / "config.json").write_text(
        GPT2.replace("gpt2", "nothing").replace("GPT2LMHeadModel", "NoneSuch")
    )
    assert not any(each.works for each in found(tmp_path).values())
    assert main(["models", str(tmp_path)]) == 0
    assert "fsdp      no " in capsys.readouterr().out
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tabled = [*ARCHITECTURES, *IMAGE_ARCHITECTURES]
    assert [line.split()[0] for line in lines[1 : len(tabled) + 1]] == tabled
    assert main(["models", str(tmp_path / "absent")]) == 1
