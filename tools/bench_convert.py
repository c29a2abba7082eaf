"""Time and peak memory of converting a 0.5 B bfloat16 model each way, compared with copying the same files.

    python tools/bench_convert.py [--folder DIR] [--layers 24] [--repeat 5] [--tp 1 --pp 1]

The model has Qwen2-0.5B's dimensions and random weights. Conversions and copies take turns in one run, and each ends
with its files on the disk (fsync). The source was just written, so both read it from the page cache. Both are limited
by the disk and the kernel's copying, since they write the same number of bytes; Megatron's format needs a checksum in
addition.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint  # what a conversion imports, once for a process

from megaverl.checkpoint.convert.run import ConversionRequest, convert, process_group
from megaverl.distributed.grid import GridShape
from megaverl.models.architectures import weights_of
from megaverl.processes import ending_with_parent
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.safetensors_writer import FolderWriter

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def make_model(folder: Path, num_layers: int) -> int:
    """Write a folder with random weights and return their size in bytes."""
    config = {**CONFIG, "num_hidden_layers": num_layers}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = weights_of(ModelSpec.from_config(config))
    generator = torch.Generator().manual_seed(0)
    with FolderWriter(folder, weights, torch.bfloat16, 10**9, writes=True) as writer:
        for weight in weights:
            writer.write(
                [
                    torch.randint(
                        -(2**15),
                        2**15,
                        weight.shape,
                        dtype=torch.int16,
                        generator=generator,
                    )
                ]
            )
        error = writer.finish()
    if error is not None:
        raise error
    return sum(file.stat().st_size for file in folder.iterdir())


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files and sync them to the disk."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def seconds_of(work: Callable[[], None], output: Path) -> float:
    """Remove `output` and return the seconds that `work` takes to make it."""
    shutil.rmtree(output, ignore_errors=True)
    os.sync()  # what others wrote must not be paid for here
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_of(arguments: list[str]) -> tuple[float, float]:
    """Return peak resident memory in MB: of a process that only imports what a
    conversion needs, and of `megaverl convert`.
    """
    code = (
        "import re, sys\n{}\n"
        # ru_maxrss counts the parent's.
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    idle = "import torch.distributed.checkpoint, megaverl.cli.convert; from megaverl.checkpoint.convert import run"
    busy = f"from megaverl.cli.main import main\nassert main({['convert', *arguments]!r}) == 0"
    peaks = []
    for body in (idle, busy):
        command = ending_with_parent([sys.executable, "-c", code.format(body)])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout.split()[-1]) * 1024 / 1e6)
    return peaks[0], peaks[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to work; it needs four times the model (default: a new one)",
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    options = parser.parse_args()
    shape = GridShape(tp=options.tp, pp=options.pp)
    with tempfile.TemporaryDirectory(dir=options.folder) as name, process_group():
        work = Path(name)
        nbytes = make_model(work / "hf", options.layers)
        print(
            f"{nbytes / 1e9:.3f} GB, TP{options.tp} x PP{options.pp}, {len(os.sched_getaffinity(0))} cores"
        )
        print(f"{'':24}{'copy':>9}{'convert':>10}{'speed of the copy':>20}")
        requests = [
            (
                "Hugging Face -> Megatron",
                ConversionRequest(
                    work / "hf", work / "m", "megatron", shape, quiet=True
                ),
            ),
            (
                "Megatron -> Hugging Face",
                ConversionRequest(
                    work / "m", work / "back", "hugging_face", quiet=True
                ),
            ),
        ]
        for label, request in requests:
            copied, converted = [], []
            # In turn, so that both meet the same machine.
            for _ in range(options.repeat):
                copy_request = functools.partial(copy, request.source, work / "copy")
                copied.append(seconds_of(copy_request, work / "copy"))
                convert_request = functools.partial(convert, request)
                converted.append(seconds_of(convert_request, request.output))
            copy_seconds, convert_seconds = min(copied), min(converted)
            print(
                f"{label:24}{copy_seconds:8.2f}s{convert_seconds:9.2f}s{copy_seconds / convert_seconds:19.0%}"
            )
        same = all(
            (work / "back" / file.name).read_bytes() == file.read_bytes()
            for file in (work / "hf").iterdir()
        )
        print(f"there and back: {'the same bytes' if same else 'DIFFERENT BYTES'}")
        shutil.rmtree(work / "m")
        idle, busy = peak_of(
            [
                str(work / "hf"),
                str(work / "m"),
                f"--tp={options.tp}",
                f"--pp={options.pp}",
                "--quiet",
            ]
        )
        print(
            f"peak memory of `megaverl convert`: {busy:.0f} MB, {busy - idle:.0f} MB of it beyond the imports"
        )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
