"""GGUF to Hugging Face: the same logits, the same tokens, and no half-written folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaverl.convert.gguf import convert_gguf, find_in_package
from megaverl.data.tokenizers import load_tokenizer
from megaverl.errors import DataError, ModelError
from megaverl.models.spec import ModelSpec
from tests.convert.folders import make_tokenizer
from tools.convert_gguf import main

gguf = pytest.importorskip("gguf")

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

    return ["<|end|>", "<s>", "</s>", *bytes_to_unicode().values(), SPACE + SPACE, SPACE + "1", "12"]


def write_gguf(path: Path, model: Any, split: str) -> None:
    """What llama.cpp's converter writes: rotary weights re-ordered, norms as float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges([f"{SPACE} {SPACE}", f"{SPACE} 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        array = tensor.numpy().astype(np.float32)
        if stem in tops:
            writer.add_tensor(f"{tops[stem]}.weight", array)
            continue
        _, _, layer, part = stem.split(".", 3)
        if part.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)
    with safe_open(output / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tie)  # noqa: SIM118 (not a mapping)
    spec = ModelSpec.from_folder(output)
    assert (spec.tie_embeddings, spec.norm_eps, spec.rope_theta) == (tie, 1e-5, 50000.0)
    config = json.loads((output / "config.json").read_text())
    assert config["rope_theta"] == 50000.0 and "quantization_config" not in config


def test_the_tokenizer_splits_as_its_vocabulary_was_learned(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), "smollm")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    # digits are cut off before the spaces are: "a  12" is a, two spaces, 1, 2, and never " 1" or "12"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12</s>", add_special_tokens=False))
    assert pieces == ["a", SPACE + SPACE, "1", "2", "</s>"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.apply_chat_template([{"content": "hi", "role": "user"}], tokenize=False) == "<s>hi</s>"
    assert ModelSpec.from_folder(tmp_path / "out").vocab_size == len(vocabulary())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_unknown_split_is_refused_and_another_tokenizer_may_be_given(tmp_path: Path) -> None:
    write_gguf(tmp_path / "good.gguf", tiny_llama(True), "gpt-2")
    write_gguf(tmp_path / "odd.gguf", tiny_llama(True), "never-heard-of")
    convert_gguf(tmp_path / "good.gguf", tmp_path / "good")
    with pytest.raises(ModelError, match="'never-heard-of'.*--tokenizer"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "odd")
    convert_gguf(tmp_path / "odd.gguf", tmp_path / "odd", tokenizer_folder=tmp_path / "good")
    assert (tmp_path / "odd" / "tokenizer.json").is_file()
    # as many tokens as the model has rows: transformers puts one of its own behind a vocabulary like this one
    assert load_tokenizer(tmp_path / "odd").vocab_size == len(vocabulary())


def test_a_tokenizer_that_differs_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), "gpt-2")
    make_tokenizer(tmp_path / "other")
    with pytest.raises(DataError, match=r"ids mean another token, the first is 0: '</s>' instead of '<.end.>'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", tokenizer_folder=tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_bad_input_is_named_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        arguments = ["--input", str(tmp_path / name), "--output", str(tmp_path / output)]
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert said in shown and str(tmp_path / (output if output == "used" else name)) in shown
        assert sorted(tmp_path.rglob("*")) == before


def test_a_package_that_holds_no_gguf_is_named() -> None:
    with pytest.raises(ModelError, match="'no-such-package' is not installed. Run: pip install"):
        find_in_package("no-such-package")
    with pytest.raises(ModelError, match="should hold one .gguf file; found: none"):
        find_in_package("numpy")
