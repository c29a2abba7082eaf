"""Proof that nothing changed on the way: every weight byte by byte, and the same logits (values of a value head).

For logits a Hugging Face folder is run by transformers, a checkpoint by megatron-core; in float32, in this process.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.convert.items import ArrayPart, Item, bar, in_threads, parts_of, share_of, slabs
from megaverl.checkpoint.convert.source import ModelSource
from megaverl.errors import CheckpointError, ConfigError, ModelError
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import whole_layout
from megaverl.sharding.plan import MAX_NAMED
from megaverl.weights.load import clear_padding, fill
from megaverl.weights.stored import StoredArrayReader


def compare_bytes(
    source: ModelSource, reader: StoredArrayReader, written: ModelSource, again: StoredArrayReader, *, shown: bool
) -> None:
    """Compare this rank's share of the weights, in the dtype that was written, bit by bit.

    Raises:
        CheckpointError: names the weights that differ, and by how many elements.
    """
    shapes = {weight.name: weight.shape for weight in source.weights}
    plain = whole_layout(shapes.items())
    before, after = (parts_of(each.layout, plain) for each in (source, written))
    dtypes = written.dtypes
    items = [Item(name, "", 0, shape, dtypes[name], before[name]) for name, shape in shapes.items()]
    differing: dict[str, int] = {}
    mine = share_of(items, dist.get_rank(), dist.get_world_size())
    with bar("compared", sum(item.nbytes for item in mine), shown=shown) as count:

        def compare(item: Item) -> None:
            pairs = zip(
                slabs(reader, item.shape, item.dtype, item.parts),
                slabs(again, item.shape, item.dtype, after[item.name]),
                strict=True,
            )
            for one, other in pairs:
                if not torch.equal(_bits(one), _bits(other)):
                    number = int((_bits(one) != _bits(other)).any(dim=-1).sum())
                    differing[item.name] = differing.get(item.name, 0) + number
                count(one.numel() * one.itemsize)

        in_threads(compare, mine, threading.Event())
    if differing:
        named = [
            f"{name}: {number} of {whole(shapes[name]).numel} elements" for name, number in sorted(differing.items())
        ]
        more = f"; and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        raise CheckpointError(
            f"{source.folder}: what was written differs from it: {'; '.join(named[:MAX_NAMED])}{more}. Nothing "
            "is kept; try again, and look at the disk if it happens again."
        )


def compare_twins(source: ModelSource, reader: StoredArrayReader) -> None:
    """A tensor that is stored besides the weight that it is tied to must equal it, or something would be lost.

    Raises:
        ModelError: they differ.
    """
    for name, of in source.twins.items():
        if name not in source.arrays:  # a Megatron checkpoint only remembers that there was one
            continue
        array = source.arrays[name]
        box = whole(array.shape)
        same = array.shape == source.arrays[of].shape and all(
            torch.equal(_bits(one), _bits(other))
            for one, other in zip(
                *(slabs(reader, array.shape, array.dtype, [ArrayPart(each, box, box)]) for each in (name, of)),
                strict=True,
            )
        )
        if not same:
            raise ModelError(
                f"{source.folder}: {name} differs from {of}, but config.json says that they are tied "
                "(tie_word_embeddings). Set that to false, or remove the tensor."
            )


def _bits(slab: torch.Tensor) -> torch.Tensor:
    """[elements, bytes]: so that NaN equals NaN, and 0 differs from -0."""
    return slab.reshape(-1).view(torch.uint8).view(-1, slab.itemsize)


TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order differ by 1e-6


def compare_logits(source: ModelSource, written: ModelSource, *, shown: bool) -> None:
    """Compare on tokens drawn from a fixed seed.

    Raises:
        CheckpointError: they differ by more than rounding; names the position and both values.
        ConfigError: under torchrun with several ranks.
    """
    if dist.get_world_size() > 1:
        raise ConfigError("--logits: the model is run in one process; leave torchrun away, or leave --logits out.")
    tokens = torch.randint(source.spec.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    before, after = _outputs(source, tokens), _outputs(written, tokens)
    difference = (before - after).abs()
    scale = float(before.abs().max())
    if not float(difference.max()) <= TOLERANCE * max(scale, 1e-6):  # not >: NaN must not pass
        at = tuple(int(i) for i in torch.unravel_index(difference.nan_to_num(torch.inf).argmax(), difference.shape))
        raise CheckpointError(
            f"{source.folder}: the converted model computes something else: at [sample, position, output] {list(at)} "
            f"{float(before[at]):.6g} became {float(after[at]):.6g}. Nothing is kept. Please report this model."
        )
    if shown:
        what = "values" if source.value_head else "logits"
        print(f"{what} agree: they differ by at most {float(difference.max()):.1e} of {scale:.1e}", file=sys.stderr)


def _outputs(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab], or [b, s, 1] of a value head; float32."""
    with torch.no_grad():
        return _by_transformers(source, tokens) if source.kind == "hugging_face" else _by_megatron(source, tokens)


def _by_transformers(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.model_folder, local_files_only=True)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
    if not source.value_head:
        model = AutoModelForCausalLM.from_pretrained(source.folder, **options).eval()
        return model(tokens).logits
    backbone = AutoModel.from_pretrained(source.folder, **options).eval()
    score = torch.empty(1, source.spec.hidden_size)
    with StoredArrayReader(source.arrays) as reader:
        reader.read("score.weight", whole((1, source.spec.hidden_size)), score)
    return torch.nn.functional.linear(backbone(tokens).last_hidden_state, score)


def _by_megatron(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.packing import MicroBatch
    from megaverl.workers.megatron_model import MegatronModel

    grid = ProcessGroupManager().grid(GridShape())
    model = MegatronModel(source.spec, grid, dtype=torch.float32, seed=0, value_head=source.value_head)
    layout = model.layout_of(0)
    clear_padding(layout, model.parameters)
    fill(source.layout, source.arrays, layout, model.parameters)
    length = tokens.shape[1]
    lengths = torch.full((len(tokens),), length - 1)
    batch = MicroBatch(torch.arange(len(tokens)), tokens, torch.ones_like(lengths), lengths)
    found: list[torch.Tensor] = []

    def keep(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        found.append(output[..., : source.spec.vocab_size].float().cpu())
        return output.new_zeros(micro.response_mask.shape)

    model.score([batch], keep, (len(tokens), length - 1))
    return found[0]
