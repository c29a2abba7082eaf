"""`megaverl convert SOURCE OUTPUT`: Hugging Face <-> Megatron distributed checkpoint, Megatron <-> Megatron, GGUF."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megaverl.config.run import is_hub_name
from megaverl.errors import FAILED, MISTAKE, ConfigError, MegaverlError

DESCRIPTION = """\
Convert a model. The output appears only when it is whole, and takes configuration, tokenizer and chat template along.

  megaverl convert models/Qwen3-8B out/megatron --tp 4 --pp 2     Hugging Face to Megatron (torch_dist)
  megaverl convert Qwen/Qwen3-8B out/megatron                     the same, from the hub
  megaverl convert runs/mine out/hf --verify                      the newest checkpoint of a run, to Hugging Face
  megaverl convert out/megatron out/other --to megatron --ep 8    Megatron to Megatron, on another grid
  megaverl convert model.Q8_0.gguf out/hf --dtype bfloat16        GGUF to Hugging Face

A critic or reward model (score.weight) is known by its files. Runs without torchrun; under torchrun (--nproc-per-node
N, one or more machines on one file system) the ranks share the work.
"""
DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    first = os.environ.get("RANK", "0") == "0"
    try:
        _convert(arguments)
    except MegaverlError as error:
        if first:  # all ranks raise the same
            print(f"error: {error}", file=sys.stderr)
        return MISTAKE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 130
    if first:
        print(f"{arguments.source} -> {arguments.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megaverl convert", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        type=Path,
        help="a Hugging Face folder or its name on the hub, a distributed checkpoint, a run, or a .gguf file",
    )
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument(
        "--to", choices=("megatron", "hf"), help="default: megatron from a Hugging Face folder, hf from all others"
    )
    grid = parser.add_argument_group("a Megatron target's grid (any other grid can read the checkpoint too)")
    for name in ("tp", "pp", "ep", "etp", "vpp"):
        grid.add_argument(f"--{name}", type=int, metavar="N", default=None if name in ("etp", "vpp") else 1)
    grid.add_argument("--prefix", default="", help="in front of every key, such as actor.")
    grid.add_argument(
        "--layer-spec",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="whose names the keys have, where they differ (%(default)s)",
    )
    parser.add_argument("--role", help="whose weights to take from a run's checkpoint (actor, critic)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as stored")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="where config.json is, if not with the source")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit, of a model on the hub")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="carry this tokenizer instead")
    parser.add_argument("--shard-size", metavar="SIZE", help="largest file, such as 5GB; default: as the model came")
    parser.add_argument(
        "--verify", action="store_true", help="read checksums and the output too, and compare every byte"
    )
    parser.add_argument("--logits", action="store_true", help="run both models and compare logits (implies --verify)")
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _convert(arguments: argparse.Namespace) -> None:
    import torch

    from megaverl.checkpoint.convert.run import ConversionRequest, check_output, convert, parse_size, process_group
    from megaverl.checkpoint.convert.source import kind_of
    from megaverl.distributed.collectives import together

    kind = kind_of(arguments.source)
    if kind != "gguf" and is_hub_name(str(arguments.source)):
        kind = "hugging_face"
    to = arguments.to or ("megatron" if kind == "hugging_face" else "hf")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    shard_bytes = parse_size(arguments.shard_size) if arguments.shard_size else None
    _check(arguments, kind, to)
    if kind == "gguf":
        from megaverl.checkpoint.convert.gguf import convert_gguf

        options = {"shard_bytes": shard_bytes} if shard_bytes else {}
        convert_gguf(
            arguments.source,
            arguments.output,
            dtype=dtype or torch.float32,
            tokenizer_folder=arguments.tokenizer,
            model_folder=arguments.model,
            force=arguments.force,
            quiet=arguments.quiet,
            **options,
        )
        return
    request = partial(
        ConversionRequest,
        output=arguments.output,
        to="hugging_face" if to == "hf" else to,
        shape=_shape(arguments),
        dtype=dtype,
        role=arguments.role,
        prefix=arguments.prefix,
        tokenizer=arguments.tokenizer,
        shard_bytes=shard_bytes,
        transformer_engine=arguments.layer_spec == "transformer_engine",
        verify=arguments.verify,
        logits=arguments.logits,
        force=arguments.force,
        quiet=arguments.quiet,
    )
    with process_group():
        with together():
            check_output(arguments.output, arguments.source, force=arguments.force)
        source = _fetched(arguments.source, arguments.revision)
        model = arguments.model and _fetched(arguments.model, arguments.revision, with_weights=False)
        convert(request(source=source, model_folder=model))


def _fetched(path: Path, revision: str | None, *, with_weights: bool = True) -> Path:
    """A folder; a model on a hub is downloaded first. Every rank takes part."""
    from megaverl.models.hub import find_model

    if path.suffix == ".gguf" or not is_hub_name(str(path)):
        return path
    return find_model(str(path), revision=revision, with_weights=with_weights).wait()


def _check(arguments: argparse.Namespace, kind: str, to: str) -> None:
    """All that does not go together, at once."""
    mistakes = []
    if kind == "gguf" and to == "megatron":
        mistakes.append("--to megatron from a .gguf file: convert it to hf first, then that folder")
    if kind == "gguf" and (arguments.verify or arguments.logits):
        mistakes.append("--verify, --logits: dequantised weights have nothing to be compared with, leave these out")
    if kind == "gguf" and "RANK" in os.environ:
        mistakes.append("torchrun: a .gguf file is converted by one process, leave it away")
    given = [f"--{name}" for name in ("tp", "pp", "ep", "etp", "vpp") if getattr(arguments, name) not in (None, 1)]
    given += ["--prefix"] if arguments.prefix else []
    if to == "hf" and given:
        mistakes.append(f"{', '.join(given)}: only for a Megatron target (--to megatron)")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _shape(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]  # its module is imported late
    """The smallest grid with these sizes: as many data-parallel ranks as the experts ask for."""
    from megaverl.distributed.grid import GridShape

    tp, ep, etp = arguments.tp, arguments.ep, arguments.etp or arguments.tp
    dp = next((dp for dp in range(1, max(1, ep * etp) + 1) if tp * dp % (ep * etp) == 0), 1)
    return GridShape(tp=tp, pp=arguments.pp, ep=ep, dp=dp, vpp=arguments.vpp, etp=arguments.etp)


if __name__ == "__main__":
    sys.exit(main())
