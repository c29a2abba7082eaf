"""One conversion, from the checks to the final rename, with an optional proof that nothing changed.

The proof compares every weight byte by byte, and the logits (or the values of a value
head). For logits, transformers runs a Hugging Face folder and megatron-core a
checkpoint, in float32 in this process. All functions are collective over the default
group.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ByteSize, TypeAdapter

from megaverl.checkpoint.convert import (
    ArrayPart,
    FileItem,
    Item,
    bar,
    differing_items,
    in_threads,
    parts_of,
    share_of,
    slabs,
    write_items,
)
from megaverl.checkpoint.convert.packed import packed_target
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
from megaverl.config.run import is_hub_name
from megaverl.distributed.collectives import on_first_rank, raise_together, together
from megaverl.distributed.grid import GridShape
from megaverl.distributed.store import job_store
from megaverl.errors import CheckpointError, ConfigError, ModelError
from megaverl.models.hub import find_model
from megaverl.models.options import padded_vocab_size
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.model_spec import why_not_in_transformers
from megaverl.sharding.plan import MAX_NAMED
from megaverl.weights.export import SHARD_BYTES
from megaverl.weights.load import (
    BESIDE_KEY,
    clear_padding,
    fill,
    further_predictors,
)
from megaverl.weights.safetensors_writer import cannot_write, replace_folder
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.torch_dist import check_checksums
from megaverl.weights.torch_dist_index import read_arrays


def compare_bytes(
    source: ModelSource,
    reader: StoredArrayReader,
    written: ModelSource,
    written_reader: StoredArrayReader,
    *,
    shown: bool,
) -> None:
    """Compare this rank's share of the weights bit by bit, in the dtype that was written.

    Raises:
        CheckpointError: lists the weights that differ, and the number of elements.
    """
    shapes = {weight.name: weight.shape for weight in source.weights}
    plain = whole_layout(shapes.items())
    before, after = (parts_of(model.layout, plain) for model in (source, written))
    dtypes = written.dtypes
    # Items are only read here, so they need no file and no offset.
    items = [
        Item(name, "", 0, shape, dtypes[name], before[name])
        for name, shape in shapes.items()
    ]
    differing: dict[str, int] = {}
    # Every rank compares its own share, and nothing is communicated.
    own_items = share_of(items, dist.get_rank(), dist.get_world_size())
    with bar("compared", sum(item.nbytes for item in own_items), shown=shown) as count:

        def compare(item: Item) -> None:
            pairs = zip(
                slabs(reader, item.shape, item.dtype, item.parts),
                slabs(written_reader, item.shape, item.dtype, after[item.name]),
                strict=True,
            )
            for before, rewritten in pairs:
                if not torch.equal(_bits(before), _bits(rewritten)):
                    # [elements]: whether any byte of the element differs.
                    number = int((_bits(before) != _bits(rewritten)).any(dim=-1).sum())
                    differing[item.name] = differing.get(item.name, 0) + number
                count(before.numel() * before.itemsize)

        # Threads write different keys of `differing`, since each item belongs to one
        # thread.
        in_threads(compare, own_items, threading.Event())
    if differing:
        named = [
            f"{name}: {number} of {whole(shapes[name]).numel} elements"
            for name, number in sorted(differing.items())
        ]
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        raise CheckpointError(
            f"{source.folder}: what was written differs from it: {'; '.join(named[:MAX_NAMED])}{more}. Nothing "
            "is kept; try again, and look at the disk if it happens again."
        )


def compare_twins(source: ModelSource, reader: StoredArrayReader) -> None:
    """Check that a stored copy of a tied weight equals that weight; otherwise the conversion would lose something.

    Raises:
        ModelError: they differ.
    """
    for name, of in source.twins.items():
        # A Megatron checkpoint only records that there was a copy.
        if name not in source.arrays:
            continue
        array = source.arrays[name]
        box = whole(array.shape)
        same = array.shape == source.arrays[of].shape and all(
            torch.equal(_bits(before), _bits(after))
            for before, after in zip(
                *(
                    slabs(reader, array.shape, array.dtype, [ArrayPart(twin, box, box)])
                    for twin in (name, of)
                ),
                strict=True,
            )
        )
        if not same:
            raise ModelError(
                f"{source.folder}: {name} differs from {of}, but config.json says that they are tied "
                "(tie_word_embeddings). Set that to false, or remove the tensor."
            )


def _bits(slab: torch.Tensor) -> torch.Tensor:
    """View a slab as bytes [elements, bytes], so that NaN equals NaN, and 0 differs from -0."""
    return slab.reshape(-1).view(torch.uint8).view(-1, slab.itemsize)


# Relative to the largest logit; float32 sums in another order differ by 1e-6.
TOLERANCE = 1e-4


def compare_logits(source: ModelSource, written: ModelSource, *, shown: bool) -> None:
    """Compare the outputs of both models on tokens drawn with a fixed seed.

    Raises:
        CheckpointError: they differ by more than rounding; names the position and both values.
        ConfigError: there are several ranks.
    """
    if dist.get_world_size() > 1:
        raise ConfigError(
            "--logits: the model is run in one process; leave torchrun away, or leave --logits out."
        )
    # [samples, positions]
    tokens = torch.randint(
        source.spec.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)
    )
    # Only one of the two models is in memory at a time.
    before, after = _outputs(source, tokens), _outputs(written, tokens)
    difference = (before - after).abs()
    scale = float(before.abs().max())
    # Written with `not` so that NaN counts as a difference.
    if not float(difference.max()) <= TOLERANCE * max(scale, 1e-6):
        at = tuple(
            int(i)
            for i in torch.unravel_index(
                difference.nan_to_num(torch.inf).argmax(), difference.shape
            )
        )
        raise CheckpointError(
            f"{source.folder}: the converted model gives different outputs: at [sample, position, output] {list(at)} "
            f"{float(before[at]):.6g} became {float(after[at]):.6g}. The output was removed. Please report this model."
        )
    if shown:
        compared = "values" if source.value_head else "logits"
        print(
            f"{compared} agree: they differ by at most {float(difference.max()):.1e} of {scale:.1e}",
            file=sys.stderr,
        )


def _outputs(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [b, s, vocab], or values [b, s, 1] of a value head; float32."""
    with torch.no_grad():
        return (
            _by_transformers(source, tokens)
            if source.kind == "hugging_face"
            else _by_megatron(source, tokens)
        )


def _by_transformers(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoConfig, AutoModel

    from megaverl.models.vision import auto_class_of
    from megaverl.platform import flash_attention

    config = AutoConfig.from_pretrained(source.model_folder, local_files_only=True)
    options: dict[str, Any] = {
        "config": config,
        "dtype": torch.float32,
        "local_files_only": True,
    }
    if not source.value_head:
        model_class = auto_class_of(config)
        model = model_class.from_pretrained(source.folder, **options).eval()
        flash_attention.use_in(model)
        logits: torch.Tensor = model(tokens).logits
        return logits
    backbone = AutoModel.from_pretrained(source.folder, **options).eval()
    flash_attention.use_in(backbone)
    # [1, hidden]. It is applied here to the hidden states of the backbone.
    score = torch.empty(1, source.spec.hidden_size)
    with StoredArrayReader(source.arrays) as reader:
        reader.read("score.weight", whole((1, source.spec.hidden_size)), score)
    return torch.nn.functional.linear(backbone(tokens).last_hidden_state, score)


def _by_megatron(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.packing import MicroBatch
    from megaverl.models.vocab_parallel import capped
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions

    grid = ProcessGroupManager().grid(GridShape())
    model = MegatronModel(
        source.spec,
        grid,
        ModelOptions(dtype=torch.float32, seed=0, value_head=source.value_head),
    )
    layout = model.layout_of(0)
    # Rows of vocabulary padding exist in no file, and would keep their initial values.
    clear_padding(layout, model.parameters)
    fill(source.layout, source.arrays, layout, model.parameters)
    length = tokens.shape[1]
    # The first token is the prompt, and the others are the response.
    lengths = torch.full((len(tokens),), length - 1)
    batch = MicroBatch(
        torch.arange(len(tokens)), tokens, torch.ones_like(lengths), lengths
    )
    outputs: list[torch.Tensor] = []

    def keep(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        # Logits of padded tokens do not exist in the other format.
        logits = output[..., : source.spec.vocab_size]
        outputs.append(capped(logits, model.logit_softcap).float().cpu())
        return output.new_zeros(micro.response_mask.shape)

    model.score([batch], keep, (len(tokens), length - 1))
    return outputs[0]


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion to run.

    Attributes:
        to: `hugging_face` or `megatron`.
        shape: grid of a Megatron target.
        dtype: dtype of the target; None: as stored.
        role: role to convert, if the source holds several.
        prefix: prefix of the target's keys.
        model_folder: folder of config.json, if it is not with the source.
        tokenizer: folder or sentencepiece file of a tokenizer to use instead of the model's own.
        shard_bytes: size of the largest file; None: as the model's files were, or 5 GB.
        verify: compare the source with its checksums, if it has any, and read the target again to compare every byte
            before it gets its name.
        logits: also compare logits (values, for a critic).
        force: replace an existing target.
        quiet: show no progress.
        quantization: format of `GROUP_FORMATS` for the linear layers of a Hugging Face target. None: not quantised.
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
    quantization: str | None = None


@contextmanager
def process_group() -> Iterator[None]:
    """Open the default group: torchrun's ranks over gloo, or this process alone."""
    if dist.is_initialized():
        yield
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # Ranks wait for the slowest one, which may write hundreds of GB to a slow disk.
        timeout = timedelta(hours=2)
        store, rank, size = job_store(timeout)
        dist.init_process_group(
            "gloo", timeout=timeout, store=store, rank=rank, world_size=size
        )
    else:
        # A store in memory: one process needs no rendezvous.
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def kind_of_name(source: Path) -> str:
    """Return `kind_of` of a path, or `hugging_face` for a name on a hub.

    Raises:
        ModelError, CheckpointError: as `kind_of`.
    """
    return (
        "hugging_face"
        if source.suffix != ".gguf" and is_hub_name(str(source))
        else kind_of(source)
    )


def target_grid(
    *, tp: int, pp: int, ep: int, etp: int | None, vpp: int | None
) -> GridShape:
    """Return the smallest grid with these sizes; its number of data-parallel ranks follows from the experts."""
    etp = etp or tp
    num_expert_ranks = ep * etp
    dp = 1
    # It ends: with dp = ep * etp the experts' ranks always divide tp * dp.
    while num_expert_ranks > 0 and tp * dp % num_expert_ranks:
        dp += 1
    return GridShape(tp=tp, pp=pp, ep=ep, dp=dp, vpp=vpp, etp=etp)


def convert_named(request: ConversionRequest, *, revision: str | None = None) -> None:
    """Run `convert` under torchrun or alone; a model on a hub is downloaded first.

    Args:
        revision: revision of a model on a hub.
    """

    def fetched(path: Path, *, with_weights: bool = True) -> Path:
        if path.suffix == ".gguf" or not is_hub_name(str(path)):
            return path
        return find_model(
            str(path), revision=revision, with_weights=with_weights
        ).wait()

    with process_group():
        # Checked before a model of many GB is downloaded.
        with together():
            check_output(request.output, request.source, force=request.force)
        source, model = fetched(request.source), request.model_folder
        model = model and fetched(model, with_weights=False)
        convert(replace(request, source=source, model_folder=model))


def convert(request: ConversionRequest) -> None:
    """Convert a model. The output appears only when it is complete, and nothing else is changed.

    Raises:
        MegaverlError: on every rank: the source, the request or the disk has a problem. Nothing is left behind, and an
            older output is unchanged.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    with together():
        check_output(request.output, request.source, force=request.force)
        source = open_source(
            request.source, role=request.role, model_folder=request.model_folder
        )
        reason = why_not_in_transformers(source.spec.architecture)
        if reason and request.logits and "hugging_face" in (source.kind, request.to):
            raise ConfigError(
                f"--logits: {reason.partition(',')[0]}. Leave --logits out; --verify compares every byte."
            )
        if request.tokenizer is not None:
            check_tokenizer(request.tokenizer, source.spec, source.model_folder)
        target = _target(source, request)
        if request.verify and source.kind == "megatron":
            index = read_arrays(source.folder)
            check_checksums(
                {name: index[name] for name in source.layout.local_shapes}, rank, world
            )
    # Beside the output, hence on the same disk: the rename at the end copies nothing.
    draft = request.output.with_name(f".{request.output.name}.partial")
    shown = rank == 0 and not request.quiet
    try:
        with StoredArrayReader(source.arrays) as reader:
            _say_what_is_left(source, shown)
            # The first rank creates all files in full size. Afterwards, every rank
            # writes its own items into them.
            on_first_rank(lambda: _prepare(draft, target))
            own_items = share_of(target.items, rank, world)
            with (
                together(),
                writing(draft),
                bar(
                    "converted", sum(i.nbytes for i in own_items), shown=shown
                ) as count,
            ):
                compare_twins(source, reader)
                write_items(draft, own_items, reader, count)
            # All weights are on the disk here: `together` has waited for all ranks.
            on_first_rank(lambda: _finish(draft, source, target, request))
            if request.quantization is not None and request.verify:
                _verify_items(draft, own_items, reader, shown=shown)
            elif request.verify or request.logits:
                _verify(draft, source, reader, request, shown=shown)
        # Only a complete and verified folder gets the name of the output.
        on_first_rank(lambda: commit(draft, request.output))
    # Also after Ctrl-C.
    except BaseException:
        if rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def check_output(output: Path, source: Path, *, force: bool) -> None:
    """Raise a CheckpointError if the output would overwrite something, or lies within the source."""
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output}: a file, not a folder. Name another output.")
    if output.resolve() == source.resolve() or source.resolve().is_relative_to(
        output.resolve()
    ):
        raise CheckpointError(
            f"{output}: the output would replace the source. Name another output."
        )
    if output.exists() and any(output.iterdir()) and not force:
        raise CheckpointError(
            f"{output}: exists already. Name another output, or replace this one with --force."
        )


def _target(source: ModelSource, request: ConversionRequest) -> ModelTarget:
    if request.quantization is not None:
        shard_bytes = request.shard_bytes or SHARD_BYTES
        return packed_target(source, request.dtype, shard_bytes, request.quantization)
    if request.to == "hugging_face":
        return hugging_face_target(
            source, request.dtype, request.shard_bytes, SHARD_BYTES
        )
    options = MegatronOptions(
        request.shape,
        padded_vocab_size(source.spec.vocab_size, request.shape.tp),
        request.prefix,
        request.transformer_engine,
    )
    return megatron_target(
        source, request.dtype, request.shard_bytes or SHARD_BYTES, options
    )


def _say_what_is_left(source: ModelSource, shown: bool) -> None:
    names = [
        name
        for name in source.left_out
        if source.kind == "hugging_face" or "optimizer." not in name
    ]
    predictors = further_predictors(source.folder, source.weights)
    if further := [name for name in names if name.startswith(predictors)]:
        names = [name for name in names if name not in further]
        if shown:
            print(
                f"skipped: {len(further)} arrays of layers that predict further tokens ({further[0]}, ...). The "
                "converted model has none",
                file=sys.stderr,
            )
    # A value head beside the logits gets its own message, since the user may want it.
    if any(name.endswith(BESIDE_KEY) for name in names):
        names = [name for name in names if not name.endswith(BESIDE_KEY)]
        if shown:
            print(
                "skipped: the critic's value head. --role critic converts it with its backbone",
                file=sys.stderr,
            )
    if shown and names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        print(
            f"skipped, because they are not weights: {', '.join(names[:3])}{more}",
            file=sys.stderr,
        )


def _prepare(draft: Path, target: ModelTarget) -> None:
    """Create an empty folder beside the output, with files of full size."""
    with writing(draft):
        shutil.rmtree(draft, ignore_errors=True)
        draft.parent.mkdir(parents=True, exist_ok=True)
        # Otherwise a full disk would be noticed only after hours.
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
    """Convert an OSError of the block to a CheckpointError with the folder and advice."""
    try:
        yield
    except OSError as error:
        raise cannot_write(draft, error) from error


def _finish(
    draft: Path, source: ModelSource, target: ModelTarget, request: ConversionRequest
) -> None:
    """Write everything that is not weights."""
    with writing(draft):
        target.write_index(draft)
        carry_files(source.model_folder, request.tokenizer or source.tokenizer, draft)
        to_hugging_face = request.to == "hugging_face"
        config = converted_config(
            source.config,
            value_head=source.value_head and to_hugging_face,
            dtype=request.dtype,
            quantization=request.quantization,
        )
        if config is not None:
            (draft / "config.json").write_text(
                json.dumps(config, indent=2) + "\n", encoding="utf-8"
            )
        if not to_hugging_face:
            write_conversion(draft, source)


def _verify(
    draft: Path,
    source: ModelSource,
    reader: StoredArrayReader,
    request: ConversionRequest,
    *,
    shown: bool,
) -> None:
    """Read the written model from the disk, and compare it with the source."""
    # Read like any other source, so headers and index are verified as well.
    with together():
        written = open_source(
            draft, role=request.prefix.removesuffix(".") if request.prefix else None
        )
        with StoredArrayReader(written.arrays) as written_reader:
            compare_bytes(source, reader, written, written_reader, shown=shown)
    if request.logits:
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                compare_logits(source, written, shown=shown)
            except Exception as caught:
                # raise_together raises it on every rank.
                error = caught
        raise_together(error)


def _verify_items(
    draft: Path,
    items: Sequence[FileItem],
    reader: StoredArrayReader,
    *,
    shown: bool,
) -> None:
    """Compute this rank's items again and compare them with the files: `open_source` reads no quantised folder."""
    total = sum(item.nbytes for item in items)
    with together(), bar("compared", total, shown=shown) as count:
        if differing := differing_items(draft, items, reader, count):
            raise CheckpointError(
                f"{draft}: what was written differs from what was computed: {', '.join(differing[:MAX_NAMED])}. "
                "Nothing is kept; try again, and look at the disk if it happens again."
            )


def commit(draft: Path, output: Path) -> None:
    """Flush the finished folder to the disk and rename it; an older folder of that name is removed afterwards."""
    with writing(output):
        for file in draft.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            # A rename may reach the disk before the data of the files does.
            os.fsync(descriptor)
            os.close(descriptor)
    replace_folder(draft, output)


def parse_size(text: str) -> int:
    """Parse a size such as `5GB`, `512MB` or `1_000_000` into bytes.

    Raises:
        ConfigError: the text is not such a size.
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(text.replace("_", ""))
    except ValueError:
        raise ConfigError(
            f"--shard-size {text}: expected a size such as 5GB or 500MB."
        ) from None
    if size < 1:
        raise ConfigError(f"--shard-size {text}: expected a size above 0.")
    return size
