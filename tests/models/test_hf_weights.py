"""Names, shapes and places of a Hugging Face module's weights, against the files that transformers saves of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megaverl.errors import ConfigError, ModelError
from megaverl.models.hf_model import build_module
from megaverl.models.hf_shards import module_without_data, weights_of_module
from megaverl.sharding.boxes import Box, whole
from megaverl.sharding.layout import Layout
from tools import check_layouts

# Tied; tied and transposed; experts in one tensor; the same under other names; views in
# steps of a saved tensor.
ARCHITECTURES = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "HrmTextForCausalLM",
]


def save(architecture: str, folder: Path) -> transformers.PreTrainedModel:
    """A tiny model whose elements all have different numbers."""
    model_class = getattr(transformers, architecture)
    sizes = (
        check_layouts.BASE
        | check_layouts.MORE.get(architecture, {})
        | {"tie_word_embeddings": "GPT2" in architecture}
    )
    config = model_class.config_class(
        **{
            key: size
            for key, size in sizes.items()
            if size is not check_layouts.LEFT_OUT
        }
    )
    with torch.device("meta"):
        model = model_class(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    first = 0
    for tensor in dict.fromkeys(model.state_dict(keep_vars=True).values()):
        tensor.data = torch.arange(
            first, first + tensor.numel(), dtype=torch.float32
        ).reshape(tensor.shape)
        first += tensor.numel()
    assert first < 2**24, "float32 must hold every number"
    model.save_pretrained(folder)
    return model


def rebuilt(
    layouts: list[tuple[Layout, dict[str, torch.Tensor]]],
) -> dict[str, torch.Tensor]:
    """What a folder holds, from what each of some ranks holds."""
    found = {}
    for layout, tensors in layouts:
        for piece in layout.pieces:
            name = layout.stored_in(piece.local)
            assert tuple(tensors[name].shape) == layout.local_shapes[name]
            local = (
                layout.views[piece.local][1].apply(tensors[name])
                if piece.local in layout.views
                else tensors[name]
            )
            assert tuple(local.shape) == layout.shape_of(piece.local)
            empty = torch.full(layout.global_shapes[piece.tensor], -1.0)
            target = found.setdefault(piece.tensor, empty)[piece.box.slices]
            target.copy_(local[piece.local_box.slices].reshape(target.shape))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_transformers_saves_it(tmp_path: Path, architecture: str) -> None:
    state = save(architecture, tmp_path).state_dict()
    weights = weights_of_module(module_without_data(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert weights.shapes == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert {name: state[name].data_ptr() for name in weights.tied} == {
        name: state[other].data_ptr() for name, other in weights.tied.items()
    }
    assert weights.layout.local_shapes.keys() == state.keys() - weights.tied.keys()
    found = rebuilt([(weights.layout, state)])
    assert found.keys() == saved.keys() and all(
        torch.equal(found[name], saved[name]) for name in saved
    )
    assert all(
        torch.equal(state[name], saved[other])
        for name, other in weights.renamed.items()
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cut_over_ranks(tmp_path: Path, architecture: str) -> None:
    """Three uneven parts along the first axis, and along the last, of every parameter."""
    state = save(architecture, tmp_path).state_dict()
    weights, saved = (
        weights_of_module(module_without_data(tmp_path)),
        load_file(tmp_path / "model.safetensors"),
    )
    for axis in (0, -1):
        parts = []
        for rank in range(3):
            held = {}
            for name, shape in weights.layout.local_shapes.items():
                chunk = math.ceil(shape[axis] / 3)
                low, high = (min(n * chunk, shape[axis]) for n in (rank, rank + 1))
                start, stop = list(whole(shape).start), list(shape)
                start[axis], stop[axis] = low, high
                held[name] = Box(tuple(start), tuple(stop))
            tensors = {name: state[name][box.slices] for name, box in held.items()}
            parts.append((weights.layout.shard(held), tensors))
        found = rebuilt(parts)
        assert found.keys() == saved.keys() and all(
            torch.equal(found[name], saved[name]) for name in saved
        )
        assert sum(layout.numel for layout, _ in parts) == weights.layout.numel
        for layout, _ in parts:
            told = Layout.from_json(json.loads(json.dumps(layout.to_json())))
            assert vars(told) == vars(layout), "another rank has it from JSON"


def test_a_folder_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    with pytest.raises(ModelError, match="does not build a causal language model"):
        module_without_data(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_liger_kernels_need_a_gpu(tmp_path: Path) -> None:
    save("LlamaForCausalLM", tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"^fsdp\.liger: Liger's kernels need a GPU, and there is none\.",
    ):
        build_module(tmp_path, dtype=torch.float32, seed=None, liger=True)


def test_the_line_that_writes_mxfp4_in_bfloat16(tmp_path: Path) -> None:
    """Gives the numbers that the format's definition gives, and a folder that is no longer refused."""
    save("GptOssForCausalLM", tmp_path / "plain")
    tensors, wanted = load_file(tmp_path / "plain" / "model.safetensors"), {}
    four_bits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    four_bits = torch.cat([four_bits, -four_bits])
    generator = torch.Generator().manual_seed(0)
    for name in [
        name
        for name in tensors
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(
            256,
            (experts, outputs, inputs // 32, 16),
            generator=generator,
            dtype=torch.uint8,
        )
        scales = torch.randint(
            120, 130, blocks.shape[:3], generator=generator, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack(
            [four_bits[(blocks & 15).long()], four_bits[(blocks >> 4).long()]], -1
        ).flatten(-2)
        wanted[name] = (
            (pairs * 2.0 ** (scales.float() - 127)[..., None])
            .flatten(-2)
            .transpose(1, 2)
        )
    quantised = tmp_path / "mxfp4"
    quantised.mkdir()
    save_file(tensors, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "plain" / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens"],
    }
    (quantised / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="quantization_config=Mxfp4Config") as refused:
        build_module(quantised, dtype=torch.float32, seed=None)
    said = str(refused.value)
    call = said[said.index("from_pretrained(") : said.index(", and the tokenizer")]
    names = {
        "Mxfp4Config": transformers.Mxfp4Config,
        "PATH": quantised,
        "FOLDER": tmp_path / "written",
    }
    eval(
        f"AutoModelForCausalLM.{call}",
        {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, **names},
    )
    build_module(tmp_path / "written", dtype=torch.float32, seed=None)
    found = load_file(tmp_path / "written" / "model.safetensors")
    assert len(wanted) == 6 and all(
        torch.equal(found[name].float(), wanted[name]) for name in wanted
    )
    assert all(
        torch.equal(found[name], tensors[name].bfloat16())
        for name in found.keys() - wanted.keys()
    )
