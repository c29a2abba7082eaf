"""The command `megaverl convert SOURCE OUTPUT`, which converts a model between formats.

Formats: Hugging Face to and from Megatron's distributed checkpoint, Megatron to another
Megatron grid, and GGUF to Hugging Face.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megaverl.cli.options import Subcommand
from megaverl.errors import FAILED, INTERRUPTED, ConfigError, MegaverlError

DESCRIPTION = """\
Convert a model, with its configuration, tokenizer and chat template. The output appears only when it is complete.

  megaverl convert models/Qwen3-8B out/megatron --tp 4 --pp 2     Hugging Face to Megatron (torch_dist)
  megaverl convert Qwen/Qwen3-8B out/megatron                     the same, from the hub
  megaverl convert runs/mine out/hf --verify                      newest checkpoint of a run to Hugging Face
  megaverl convert out/megatron out/other --to megatron --ep 8    Megatron to Megatron, on another grid
  megaverl convert runs/mine out/int4 --quantization int4_g32     the same in 4 bits, as vLLM loads it
  megaverl convert model.Q8_0.gguf out/hf --dtype bfloat16        GGUF to Hugging Face

Critics and reward models (score.weight) are recognised by their files. torchrun is not needed; under torchrun
(--nproc-per-node N, one or more machines on one file system) the ranks share the work.
"""
GRID = ("tp", "pp", "ep", "etp", "vpp")
DTYPES = ("float32", "bfloat16", "float16")


def _options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument(
        "source",
        type=Path,
        help="a Hugging Face folder or its name on the hub, a distributed checkpoint, a run, or a .gguf file",
    )
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument(
        "--to",
        choices=("megatron", "hf"),
        help="default: megatron from a Hugging Face folder, hf from all others",
    )
    grid = parser.add_argument_group(
        "a Megatron target's grid (any other grid can read the checkpoint too)"
    )
    for name in GRID:
        grid.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            default=None if name in ("etp", "vpp") else 1,
        )
    grid.add_argument(
        "--prefix", default="", help="prefix of every key, such as actor."
    )
    grid.add_argument(
        "--layer-spec",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="layer spec whose names the keys use (%(default)s)",
    )
    parser.add_argument(
        "--role",
        help="role whose weights to convert from a run's checkpoint (actor, critic)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the weights; default: as stored"
    )
    parser.add_argument(
        "--quantization",
        metavar="FORMAT",
        help="write the linear layers of a Hugging Face target in 4 or 8 bits (compressed-tensors): int4_g128, mxfp8, "
        "nvfp4, or another value of rollout.vllm.quantization with groups",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="folder with config.json, if it is not in the source",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a model on the hub"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="use this tokenizer instead"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        help="maximum size of a file, such as 5GB; default: as in the source",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify checksums, read the output again and compare every byte",
    )
    parser.add_argument(
        "--logits",
        action="store_true",
        help="run both models and compare logits (implies --verify)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the output if it exists"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def _run(arguments: argparse.Namespace) -> int:
    """Run a conversion on this rank. Only the first rank reports an error or the result."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        _convert(arguments)
    except MegaverlError:
        if first:
            # All ranks raise the same error, so one report is enough.
            raise
        return FAILED
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return INTERRUPTED
    if first:
        print(f"{arguments.source} -> {arguments.output}")
    return 0


def _convert(arguments: argparse.Namespace) -> None:
    """Check the arguments, and convert with the converter for the source's format."""
    import torch

    from megaverl.checkpoint.convert.run import (
        ConversionRequest,
        convert_named,
        kind_of_name,
        parse_size,
        target_grid,
    )

    # torch and the converters are imported here rather than at the top, so that --help
    # is fast.
    kind = kind_of_name(arguments.source)
    to = arguments.to or ("megatron" if kind == "hugging_face" else "hf")
    shard_bytes = parse_size(arguments.shard_size) if arguments.shard_size else None
    _check(arguments, kind, to)
    request = ConversionRequest(
        source=arguments.source,
        output=arguments.output,
        to="hugging_face" if to == "hf" else to,
        shape=target_grid(**{name: getattr(arguments, name) for name in GRID}),
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        role=arguments.role,
        prefix=arguments.prefix,
        model_folder=arguments.model,
        tokenizer=arguments.tokenizer,
        shard_bytes=shard_bytes,
        transformer_engine=arguments.layer_spec == "transformer_engine",
        verify=arguments.verify,
        logits=arguments.logits,
        force=arguments.force,
        quiet=arguments.quiet,
        quantization=arguments.quantization,
    )
    if kind != "gguf":
        convert_named(request, revision=arguments.revision)
        return
    from megaverl.checkpoint.convert.gguf import convert_gguf
    from megaverl.weights.export import SHARD_BYTES

    convert_gguf(
        request.source,
        request.output,
        dtype=request.dtype or torch.float32,
        tokenizer_folder=request.tokenizer,
        model_folder=request.model_folder,
        force=request.force,
        quiet=request.quiet,
        shard_bytes=shard_bytes or SHARD_BYTES,
    )


def _check(arguments: argparse.Namespace, kind: str, to: str) -> None:
    """Check that the arguments fit together, and with the source's format.

    Args:
        kind: format of the source, as `kind_of_name` returns it.
        to: "megatron" or "hf".

    Raises:
        ConfigError: lists everything that does not fit.
    """
    mistakes = []
    if kind == "gguf" and to == "megatron":
        mistakes.append(
            "--to megatron from a .gguf file: convert it to hf first, then that folder"
        )
    if kind == "gguf" and (arguments.verify or arguments.logits):
        mistakes.append(
            "--verify, --logits: dequantised weights have nothing to be compared with, leave these out"
        )
    if kind == "gguf" and "RANK" in os.environ:
        mistakes.append(
            "torchrun: a .gguf file is converted by one process, leave it away"
        )
    if arguments.quantization is not None:
        mistakes += _quantization_mistakes(arguments, kind, to)
    megatron_options = [
        f"--{name}" for name in GRID if getattr(arguments, name) not in (None, 1)
    ]
    megatron_options += ["--prefix"] if arguments.prefix else []
    if to == "hf" and megatron_options:
        mistakes.append(
            f"{', '.join(megatron_options)}: only for a Megatron target (--to megatron)"
        )
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _quantization_mistakes(
    arguments: argparse.Namespace, kind: str, to: str
) -> Iterator[str]:
    from megaverl.sharding.quantization import GROUP_FORMATS

    option = f"--quantization {arguments.quantization}"
    if arguments.quantization not in GROUP_FORMATS:
        yield f"{option}: unknown; use one of {', '.join(GROUP_FORMATS)}"
    if kind == "gguf":
        yield f"{option} from a .gguf file: convert it to hf first, then that folder"
    elif to == "megatron":
        yield f"{option}: only for a Hugging Face target (--to hf)"
    if arguments.logits:
        yield f"--logits: quantised weights give other logits; leave it out, or leave {option} out"


COMMANDS = {"convert": Subcommand(DESCRIPTION, _options, _run)}
