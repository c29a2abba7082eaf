"""GGUF to Hugging Face: the same logits, the same tokens, and no half-written folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaverl.checkpoint.convert.gguf import convert_gguf, find_in_package
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError, ModelError
from megaverl.sharding.model_spec import ModelSpec
from tests.checkpoint.convert.folders import make_tokenizer
from tools.convert_gguf import main

gguf = pytest.importorskip("gguf")

# whose configuration a GGUF file does not tell apart, or transformers does not read
# from it
NEED_CONFIG = ("mistral", "mixtral", "gemma")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
SPACE = "\u0120"  # how a byte-level vocabulary writes a space


def tiny_llama(tie: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tie,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def vocabulary() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [
        "<|end|>",
        "<s>",
        "</s>",
        *bytes_to_unicode().values(),
        SPACE + SPACE,
        SPACE + "1",
        "12",
    ]


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A model whose every weight says something, norms and biases too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": len(vocabulary()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **shape | changes)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write_gguf(path: Path, model: Any, split: str, architecture: str = "llama") -> None:
    """What llama.cpp's converter writes, by its own table of names: rotary weights of
    `llama` re-ordered, experts stacked, one added to Gemma's norms.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    num_experts = getattr(config, "num_local_experts", None) or getattr(
        config, "num_experts", 0
    )
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{SPACE} {SPACE}", f"{SPACE} 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, tensor in stacked(model.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy().astype(np.float32)
        if architecture == "llama" and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            heads = (
                config.num_attention_heads
                if "q_proj" in name
                else config.num_key_value_heads
            )
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if architecture == "gemma" and name.endswith("norm.weight"):
            array = array + 1
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert place is not None, name
        writer.add_tensor(place, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers holds experts as one tensor, gate and up in one; llama.cpp names each of the three."""
    found = {}
    for name, tensor in state.items():
        stem, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif part == "down_proj":
            found[f"{stem}.down_proj.weight"] = tensor
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("tie", [True, False])
def test_the_folder_gives_the_logits_of_the_model(tmp_path: Path, tie: bool) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tie)
    write_gguf(tmp_path / "tiny.gguf", model, "smollm")
    output = tmp_path / "models" / "tiny"
    assert main(["--input", str(tmp_path / "tiny.gguf"), "--output", str(output)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(output).eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0
        )
    with safe_open(output / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tie)  # noqa: SIM118 (not a mapping)
    spec = ModelSpec.from_folder(output)
    assert (spec.tie_embeddings, spec.norm_eps, spec.rope_theta) == (tie, 1e-5, 50000.0)
    config = json.loads((output / "config.json").read_text())
    assert config["rope_theta"] == 50000.0 and "quantization_config" not in config


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
# llama.cpp normalises the weights of the chosen experts of every Qwen3, and its files
# do not say so
QWEN_EXPERTS = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes"),
    [
        ("mistral", "llama", {"sliding_window": None}),
        ("qwen2", "qwen2", {}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
        ("qwen3", "qwen3", {"head_dim": 8, "hidden_size": 48}),
        ("gemma", "gemma", {}),
        ("mixtral", "llama", EXPERTS),
        ("qwen3_moe", "qwen3moe", QWEN_EXPERTS),
    ],
)
def test_every_architecture_that_gguf_names(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model_type: str,
    architecture: str,
    changes: dict[str, Any],
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(model_type, **changes)
    write_gguf(tmp_path / "tiny.gguf", model, "smollm", architecture)
    model.config.save_pretrained(tmp_path / "original")
    arguments = (
        ["--model", str(tmp_path / "original")] if model_type in NEED_CONFIG else []
    )
    if model_type == "gemma":
        assert (
            main(
                [
                    "--input",
                    str(tmp_path / "tiny.gguf"),
                    "--output",
                    str(tmp_path / "out"),
                    *arguments,
                ]
            )
            == 1
        )
        assert "--tokenizer" in capsys.readouterr().err
        write_gguf(tmp_path / "llama.gguf", tiny_llama(True), "smollm")
        convert_gguf(tmp_path / "llama.gguf", tmp_path / "llama")
        arguments += ["--tokenizer", str(tmp_path / "llama")]
    assert (
        main(
            [
                "--input",
                str(tmp_path / "tiny.gguf"),
                "--output",
                str(tmp_path / "out"),
                *arguments,
            ]
        )
        == 0
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0
        )
    assert ModelSpec.from_folder(tmp_path / "out").architecture == type(model).__name__


def test_the_tokenizer_splits_as_its_vocabulary_was_learned(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), "smollm")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    # digits are cut off before the spaces are: "a  12" is a, two spaces, 1, 2, and never " 1" or "12"
    pieces = tokenizer.convert_ids_to_tokens(
        tokenizer.encode("a  12</s>", add_special_tokens=False)
    )
    assert pieces == ["a", SPACE + SPACE, "1", "2", "</s>"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (
        tokenizer.apply_chat_template(
            [{"content": "hi", "role": "user"}], tokenize=False
        )
        == "<s>hi</s>"
    )
    assert ModelSpec.from_folder(tmp_path / "out").vocab_size == len(vocabulary())
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
        == "bfloat16"
    )


def test_an_unknown_split_is_refused_and_another_tokenizer_may_be_given(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "good.gguf", tiny_llama(True), "gpt-2")
    write_gguf(tmp_path / "odd.gguf", tiny_llama(True), "never-heard-of")
    convert_gguf(tmp_path / "good.gguf", tmp_path / "good")
    with pytest.raises(ModelError, match="'never-heard-of'.*--tokenizer"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "odd")
    convert_gguf(
        tmp_path / "odd.gguf", tmp_path / "odd", tokenizer_folder=tmp_path / "good"
    )
    assert (tmp_path / "odd" / "tokenizer.json").is_file()
    # as many tokens as the model has rows: transformers puts one of its own behind a
    # vocabulary like this one
    assert load_tokenizer(tmp_path / "odd").vocab_size == len(vocabulary())


def test_a_tokenizer_that_differs_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), "gpt-2")
    make_tokenizer(tmp_path / "other")
    with pytest.raises(
        DataError,
        match=r"ids mean another token, the first is 0: '</s>' instead of '<.end.>'",
    ):
        convert_gguf(
            tmp_path / "tiny.gguf",
            tmp_path / "out",
            tokenizer_folder=tmp_path / "other",
        )
    assert not (tmp_path / "out").exists()


def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), "smollm")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "header.gguf").write_bytes(whole[:5000])
    (tmp_path / "tensors.gguf").write_bytes(whole[:-5000])
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for name, output, said in [
        ("none.gguf", "out", "not found"),
        ("text.gguf", "out", "not a GGUF file"),
        ("header.gguf", "out", "truncated or damaged"),
        ("tensors.gguf", "out", "truncated or damaged"),
        ("tiny.gguf", "used", "exists already"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        arguments = [
            "--input",
            str(tmp_path / name),
            "--output",
            str(tmp_path / output),
        ]
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert (
            said in shown
            and str(tmp_path / (output if output == "used" else name)) in shown
        )
        assert sorted(tmp_path.rglob("*")) == before


def test_a_package_that_holds_no_gguf_is_named() -> None:
    with pytest.raises(
        ModelError, match="'no-such-package' is not installed. Run: pip install"
    ):
        find_in_package("no-such-package")
    with pytest.raises(ModelError, match="should hold one .gguf file; found: none"):
        find_in_package("numpy")
