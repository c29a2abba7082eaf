"""Show the contents of a checkpoint within a second: reads only its manifest and index, and does not need torch.

    python tools/inspect_checkpoint.py runs/mine                       # every checkpoint of a run, a line each
    python tools/inspect_checkpoint.py runs/mine/checkpoints/step_00000100
    python tools/inspect_checkpoint.py FOLDER --tensors "*.linear_qkv.*"   # names, shapes, dtypes, shards, bytes
    python tools/inspect_checkpoint.py FOLDER --verify                 # reads every byte and compares checksums

FOLDER may also be a Megatron distributed checkpoint (`torch_dist`), such as `megaverl convert` writes; that has no
checksums, and only the sizes of its files can be checked. Ends with 1 if anything is missing or damaged.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.checkpoint import (
    MANIFEST_FILE,
    USE_ANOTHER,
    Manifest,
    checkpoint_folders,
    read_json,
)
from megaverl.errors import CheckpointError
from megaverl.weights.torch_dist_index import (
    INDEX_FILE,
    CheckpointIndex,
    IndexedArray,
    read_index,
)

# Sizes of a grid in the order in which people say them; those of 1 are left out.
GRID = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")
OPTIMIZER = ".optimizer."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="a checkpoint, a `checkpoints` folder, or a run folder",
    )
    parser.add_argument(
        "--tensors",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="list tensors by name",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare checksums"
    )
    options = parser.parse_args(argv)
    try:
        lines, wrong = describe(options.folder, options.tensors, options.verify)
    except CheckpointError as error:
        lines, wrong = [], [str(error)]
    print("\n".join(lines))
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if wrong else 0


def describe(
    folder: Path, tensors: str | None, verify: bool
) -> tuple[list[str], list[str]]:
    """Return lines for a person, and the faults found.

    Raises:
        CheckpointError: the folder is no checkpoint, or cannot be read.
    """
    if (folder / MANIFEST_FILE).is_file() or (folder / INDEX_FILE).is_file():
        return _one(folder, tensors, verify)
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    folders = checkpoint_folders(root)
    if not folders:
        raise CheckpointError(
            f"{folder}: {'no checkpoint in it' if folder.is_dir() else 'no such folder'}."
        )
    return _list(root, folders, verify)


def _list(
    root: Path, folders: Iterable[Path], verify: bool
) -> tuple[list[str], list[str]]:
    """Return the lines and faults of every checkpoint of a run, oldest first."""
    best = (
        read_json(root / "best.json")["folder"]
        if (root / "best.json").is_file()
        else None
    )
    rows: list[tuple[int, str]] = []
    wrong: list[str] = []
    for folder in folders:
        try:
            manifest = Manifest.read(folder)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        problems = _problems(folder, manifest, verify)
        wrong += [f"{folder}: {problem}" for problem in problems]
        notes = ["best"] * (folder.name == best) + ["damaged"] * bool(problems)
        size, grids = sum(size for size, _ in manifest.files.values()), _grids(manifest)
        line = f"{folder.name:22} step {manifest.step:>6}  {_size(size):>9}  {grids}  {' '.join(notes)}"
        rows.append((manifest.serial, line.rstrip()))
    return [
        f"{root}: {len(rows)} checkpoints, oldest first",
        *(line for _, line in sorted(rows)),
    ], wrong


def _one(
    folder: Path, tensors: str | None, verify: bool
) -> tuple[list[str], list[str]]:
    index = read_index(folder, USE_ANOTHER)
    lines = [str(folder)]
    if (folder / MANIFEST_FILE).is_file():
        manifest = Manifest.read(folder)
        wrong = _problems(folder, manifest, verify)
        files = {name: size for name, (size, _) in manifest.files.items()}
        lines += _manifest_lines(folder, manifest, index)
        checked = (
            "checksums agree"
            if verify and not wrong
            else "checksums not compared (--verify)"
        )
    else:
        wrong = index.wrong_sizes()
        files = {
            path.name: path.stat().st_size
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
        lines += _megatron_lines(folder, index)
        checked = "it has no checksums"
    state = "damaged" if wrong else f"every file has its size; {checked}"
    lines.append(f"files       {len(files)}, {_size(sum(files.values()))}: {state}")
    lines += [f"  {name:28} {_size(size):>10}" for name, size in files.items()]
    if tensors is not None:
        lines.append("tensors")
        lines += _tensors(index, tensors)
    return lines, [f"{folder}: {problem}" for problem in wrong]


def _manifest_lines(
    folder: Path, manifest: Manifest, index: CheckpointIndex
) -> Iterator[str]:
    yield f"step        {manifest.step}, written by {manifest.world_size} ranks; format {manifest.format}"
    yield "versions    " + ", ".join(
        f"{name} {version}" for name, version in manifest.versions.items()
    )
    for role, described in manifest.roles.items():
        yield f"{role:11} {_model(described['model'])}{', value head' if described['value_head'] else ''}"
        yield f"            on {_grid(described['grid'])}"
        role_arrays = {
            name: tensor
            for name, tensor in index.arrays.items()
            if name.startswith(f"{role}.")
        }
        yield f"            weights    {_sum(t for name, t in role_arrays.items() if OPTIMIZER not in name)}"
        yield f"            optimizer  {_sum(t for name, t in role_arrays.items() if OPTIMIZER in name)}"
    path = folder / "state.json"
    for name, value in (read_json(path) if path.is_file() else {}).items():
        text = json.dumps(value) if not isinstance(value, dict) else _pairs(value)
        yield f"{'state' if name == 'next_step' else '':11} {name}: {text}"


def _megatron_lines(folder: Path, index: CheckpointIndex) -> Iterator[str]:
    kind = (
        read_json(folder / "metadata.json")
        if (folder / "metadata.json").is_file()
        else {}
    )
    backend = f"{kind.get('sharded_backend', 'torch_dist')} {kind.get('sharded_backend_version', '')}".rstrip()
    yield f"format      Megatron distributed checkpoint, {backend}"
    config = folder / "config.json"
    if config.is_file():
        content = read_json(config)
        sizes = {
            key: content.get(key)
            for key in ("num_hidden_layers", "hidden_size", "vocab_size")
        }
        yield f"model       {(content.get('architectures') or ['?'])[0]}, {_pairs(sizes)}"
    yield f"weights     {_sum(t for name, t in index.arrays.items() if 'optimizer.' not in name)}"
    yield f"optimizer   {_sum(t for name, t in index.arrays.items() if 'optimizer.' in name)}"


def _problems(folder: Path, manifest: Manifest, verify: bool) -> list[str]:
    wrong = manifest.wrong_sizes(folder)
    return wrong or (manifest.wrong_bytes(folder) if verify else [])


def _tensors(index: CheckpointIndex, pattern: str) -> Iterator[str]:
    for name, tensor in index.arrays.items():
        if fnmatch.fnmatch(name, pattern):
            shape = " x ".join(map(str, tensor.shape)) or "scalar"
            yield f"  {name}  [{shape}] {tensor.dtype}, {len(tensor.chunks)} shards, {_size(tensor.nbytes)}"


def _sum(tensors: Iterable[IndexedArray]) -> str:
    arrays = list(tensors)
    if not arrays:
        return "none"
    by_dtype: Counter[str] = Counter()
    for tensor in arrays:
        by_dtype[tensor.dtype] += tensor.numel
    elements = ", ".join(
        f"{count:,} {dtype}" for dtype, count in by_dtype.most_common()
    )
    return f"{len(arrays)} tensors: {elements}; {_size(sum(tensor.nbytes for tensor in arrays))}"


def _grids(manifest: Manifest) -> str:
    return "  ".join(
        f"{role} {_grid(described['grid'])}"
        for role, described in manifest.roles.items()
    )


def _grid(sizes: dict[str, Any]) -> str:
    return (
        " ".join(f"{name}{sizes[name]}" for name in GRID if (sizes.get(name) or 1) != 1)
        or "one rank"
    )


def _model(model: dict[str, Any]) -> str:
    keys = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size")
    return f"{model.get('architecture', '?')}, {_pairs({key: model[key] for key in keys if key in model})}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _size(num_bytes: int) -> str:
    for unit, limit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.2f} {unit}"
    return f"{num_bytes} B"


if __name__ == "__main__":
    sys.exit(main())
