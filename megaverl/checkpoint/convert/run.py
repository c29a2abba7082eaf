"""One conversion, from the checks to the rename. Every rank of the default group takes part."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ByteSize, TypeAdapter

from megaverl.checkpoint.convert.items import bar, share_of, write_items
from megaverl.checkpoint.convert.source import (
    ModelSource,
    carry_files,
    check_tokenizer,
    converted_config,
    kind_of,
    open_source,
    write_conversion,
)
from megaverl.checkpoint.convert.target import (
    MegatronOptions,
    ModelTarget,
    hugging_face_target,
    make_files,
    megatron_target,
)
from megaverl.checkpoint.convert.verify import compare_bytes, compare_twins
from megaverl.config.run import is_hub_name
from megaverl.distributed.collectives import on_first_rank, raise_together, together
from megaverl.distributed.grid import GridShape
from megaverl.distributed.store import job_store
from megaverl.errors import CheckpointError, ConfigError
from megaverl.models.hub import find_model
from megaverl.models.options import padded_vocab_size
from megaverl.weights.export import SHARD_BYTES
from megaverl.weights.load import BESIDE_KEY
from megaverl.weights.safetensors_writer import cannot_write, replace_folder
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.torch_dist import check_checksums
from megaverl.weights.torch_dist_index import read_arrays


@dataclass(frozen=True)
class ConversionRequest:
    """What is to be converted into what.

    Attributes:
        to: `hugging_face` or `megatron`.
        shape: the grid of a Megatron target.
        dtype: of the target; None: as stored.
        role: of the source, where it holds several.
        prefix: of the target's keys.
        model_folder: where config.json is, if not with the source.
        tokenizer: a folder or sentencepiece file with a tokenizer to carry instead of the model's own.
        shard_bytes: largest file; None: as the model's files were, or 5 GB.
        verify: compare the source with its checksums, where it has any; read the target again and compare every
            byte, before it gets its name.
        logits: compare logits (values, of a critic) too.
        force: replace a target that exists.
        quiet: show no progress.
    """

    source: Path
    output: Path
    to: str
    shape: GridShape = GridShape()
    dtype: torch.dtype | None = None
    role: str | None = None
    prefix: str = ""
    model_folder: Path | None = None
    tokenizer: Path | None = None
    shard_bytes: int | None = None
    transformer_engine: bool = True
    verify: bool = False
    logits: bool = False
    force: bool = False
    quiet: bool = False


@contextmanager
def process_group() -> Iterator[None]:
    """The default group: torchrun's ranks over gloo, or this process alone."""
    if dist.is_initialized():
        yield
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        timeout = timedelta(hours=2)
        store, rank, size = job_store(timeout)
        dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def kind_of_name(source: Path) -> str:
    """`kind_of` a path; of a name on a hub, `hugging_face`."""
    kind = kind_of(source)
    return "hugging_face" if kind != "gguf" and is_hub_name(str(source)) else kind


def target_grid(*, tp: int, pp: int, ep: int, etp: int | None, vpp: int | None) -> GridShape:
    """The smallest grid with these sizes: as many data-parallel ranks as the experts ask for."""
    etp = etp or tp
    dp = next((dp for dp in range(1, max(1, ep * etp) + 1) if tp * dp % (ep * etp) == 0), 1)
    return GridShape(tp=tp, pp=pp, ep=ep, dp=dp, vpp=vpp, etp=etp)


def convert_named(request: ConversionRequest, *, revision: str | None = None) -> None:
    """`convert`, as torchrun's ranks or alone, of what may be a model on a hub: it is downloaded first.

    Args:
        revision: of a model on a hub.
    """

    def fetched(path: Path, *, with_weights: bool = True) -> Path:
        if path.suffix == ".gguf" or not is_hub_name(str(path)):
            return path
        return find_model(str(path), revision=revision, with_weights=with_weights).wait()

    with process_group():
        with together():
            check_output(request.output, request.source, force=request.force)
        source, model = fetched(request.source), request.model_folder
        model = model and fetched(model, with_weights=False)
        convert(replace(request, source=source, model_folder=model))


def convert(request: ConversionRequest) -> None:
    """Convert; the output appears only when it is whole, and nothing else is touched.

    Raises:
        MegaverlError: on every rank: whatever is wrong with the source, the request or the disk. Nothing is left
            behind, and an older output is as it was.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    with together():
        check_output(request.output, request.source, force=request.force)
        source = open_source(request.source, role=request.role, model_folder=request.model_folder)
        if request.tokenizer is not None:
            check_tokenizer(request.tokenizer, source.spec, source.model_folder)
        target = _target(source, request)
        if request.verify and source.kind == "megatron":
            index = read_arrays(source.folder)
            check_checksums({name: index[name] for name in source.layout.local_shapes}, rank, world)
    draft = request.output.with_name(f".{request.output.name}.partial")
    shown = rank == 0 and not request.quiet
    try:
        with StoredArrayReader(source.arrays) as reader:
            _say_what_is_left(source, shown)
            on_first_rank(lambda: _prepare(draft, target))
            mine = share_of(target.items, rank, world)
            with together(), writing(draft), bar("converted", sum(i.nbytes for i in mine), shown=shown) as count:
                compare_twins(source, reader)
                write_items(draft, mine, reader, count)
            on_first_rank(lambda: _finish(draft, source, target, request))
            if request.verify or request.logits:
                _verify(draft, source, reader, request, shown=shown)
        on_first_rank(lambda: commit(draft, request.output))
    except BaseException:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def check_output(output: Path, source: Path, *, force: bool) -> None:
    """Raise a CheckpointError where the output would overwrite something, or lie within the source."""
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output}: a file, not a folder. Name another output.")
    if output.resolve() == source.resolve() or source.resolve().is_relative_to(output.resolve()):
        raise CheckpointError(f"{output}: the output would replace the source. Name another output.")
    if output.exists() and any(output.iterdir()) and not force:
        raise CheckpointError(f"{output}: exists already. Name another output, or replace this one with --force.")


def _target(source: ModelSource, request: ConversionRequest) -> ModelTarget:
    if request.to == "hugging_face":
        return hugging_face_target(source, request.dtype, request.shard_bytes, SHARD_BYTES)
    options = MegatronOptions(
        request.shape,
        padded_vocab_size(source.spec.vocab_size, request.shape.tp),
        request.prefix,
        request.transformer_engine,
    )
    return megatron_target(source, request.dtype, request.shard_bytes or SHARD_BYTES, options)


def _say_what_is_left(source: ModelSource, shown: bool) -> None:
    names = [name for name in source.left_out if source.kind == "hugging_face" or "optimizer." not in name]
    if any(name.endswith(BESIDE_KEY) for name in names):
        names = [name for name in names if not name.endswith(BESIDE_KEY)]
        if shown:
            print("left out: the critic's value head; --role critic takes it, with its backbone", file=sys.stderr)
    if shown and names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(f"left out, for they are no weights: {', '.join(names[:3])}{more}", file=sys.stderr)


def _prepare(draft: Path, target: ModelTarget) -> None:
    """An empty folder beside the output, with files of the full size."""
    with writing(draft):
        shutil.rmtree(draft, ignore_errors=True)
        draft.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(target.files.values()), shutil.disk_usage(draft.parent).free
        if needed > free:
            raise CheckpointError(
                f"{draft.parent}: the output needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free. "
                "Free some, or choose another folder."
            )
        draft.mkdir()
        make_files(draft, target)


@contextmanager
def writing(draft: Path) -> Iterator[None]:
    """Turn an OSError of the body into a CheckpointError that says where and what to do."""
    try:
        yield
    except OSError as error:
        raise cannot_write(draft, error) from error


def _finish(draft: Path, source: ModelSource, target: ModelTarget, request: ConversionRequest) -> None:
    """All that is not weights."""
    with writing(draft):
        target.write_index(draft)
        carry_files(source.model_folder, request.tokenizer or source.tokenizer, draft)
        to_hugging_face = request.to == "hugging_face"
        config = converted_config(source.config, value_head=source.value_head and to_hugging_face, dtype=request.dtype)
        if config is not None:
            (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if not to_hugging_face:
            write_conversion(draft, source.twins, source.file_headers)


def _verify(
    draft: Path, source: ModelSource, reader: StoredArrayReader, request: ConversionRequest, *, shown: bool
) -> None:
    """Read what was written from the disk again."""
    with together():
        written = open_source(draft, role=request.prefix.removesuffix(".") if request.prefix else None)
        with StoredArrayReader(written.arrays) as again:
            compare_bytes(source, reader, written, again, shown=shown)
    if request.logits:
        from megaverl.checkpoint.convert.verify import compare_logits

        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                compare_logits(source, written, shown=shown)
            except Exception as caught:  # passed on to every rank
                error = caught
        raise_together(error)


def commit(draft: Path, output: Path) -> None:
    """Give the finished folder its name, all of it on the disk; an older one of that name goes only then."""
    with writing(output):
        for file in draft.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    replace_folder(draft, output)


def parse_size(text: str) -> int:
    """`5GB`, `512MB`, `1_000_000` -> bytes.

    Raises:
        ConfigError: not such a size.
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"--shard-size {text}: expected a size such as 5GB or 500MB.") from None
    if size < 1:
        raise ConfigError(f"--shard-size {text}: expected a size above 0.")
    return size
