"""What the ranks of a test world compute with a layer that carries a state along rows cut over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaverl.data.prefix_tree import PrefixTree
from megaverl.distributed.grid import GridShape
from megaverl.models import context_attention
from megaverl.models.context_attention import Part, own_places
from megaverl.models.gated_delta_net import GatedDeltaNet
from megaverl.models.mamba import Mamba2Mixer
from megaverl.models.options import transformer_config
from tests.models.ranks import manager
from tests.sharding.specs import make_spec

# Shorter than the taps, longer than a chunk of Mamba, and none a multiple of 2 cp.
LENGTHS = [7, 1, 21, 3]


def _layer(architecture: str, shape: GridShape, changes: dict[str, Any]) -> Any:
    """With the same weights on every rank."""
    spec = make_spec(architecture)
    config = transformer_config(spec, shape, torch.float32)
    groups = manager().grid(shape).pg_collection
    layer: Any
    if spec.delta_net is not None:
        layer = GatedDeltaNet(
            config, 1, replace(spec.delta_net, **changes), pg_collection=groups
        )
    else:
        assert spec.mamba is not None
        layer = Mamba2Mixer(config, replace(spec.mamba, **changes), groups)
    torch.manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3)
    return layer.double()


def _gradients(loss: Tensor, layer: Any, tokens: Tensor) -> list[Tensor]:
    """Of the tokens and of all parameters."""
    return list(torch.autograd.grad(loss, [tokens, *layer.parameters()]))


def cut_row(architecture: str, laid: str, **changes: Any) -> dict[str, float]:
    """Largest differences between a cut row and its sequences, each computed by one rank alone.

    Args:
        laid: function of `context_attention` that packs the row, or "padded" for a row for each sequence.
        changes: sizes of the layer's heads.
    """
    size = dist.get_world_size()
    part = Part(dist.get_rank(), size)
    alone = _layer(architecture, GridShape(dp=size), changes)
    cut = _layer(architecture, GridShape(cp=size), changes)
    width = -(-max(LENGTHS) // (2 * size)) * 2 * size
    count = len(LENGTHS)
    hidden = make_spec(architecture).hidden_size
    generator = torch.Generator().manual_seed(2)
    # [sequences, width, hidden], with padding; and how much each output counts.
    tokens, factors = (
        torch.randn(count, width, hidden, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    tokens.requires_grad_()
    is_real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    rows = [
        alone(tokens[number, :length, None])[0][:, 0]
        for number, length in enumerate(LENGTHS)
    ]
    expected = torch.zeros_like(tokens).masked_scatter(
        is_real[..., None], torch.cat(rows)
    )
    if laid == "padded":
        own = own_places(width, part)
        found, _ = cut(tokens[:, own].transpose(0, 1))
        outputs = torch.zeros_like(tokens).index_copy(1, own, found.transpose(0, 1))
        is_here = torch.zeros_like(is_real).index_fill(1, own, True) & is_real
    else:
        packing = getattr(context_attention, laid)(
            LENGTHS,
            PrefixTree.apart(count),
            width=width,
            multiple_of=2 * size,
            part=part,
            with_whole=True,
        )
        own = packing.local_places
        row = tokens.flatten(0, 1)[packing.source[own], None]
        found, _ = cut(row, packed_seq_params=packing)
        whole = found.new_zeros(len(packing.source), hidden)
        outputs = whole.index_copy(0, own, found[:, 0])[packing.places]
        is_here = torch.isin(packing.places, own) & is_real
    difference = (outputs - expected)[is_here].abs().max()
    theirs = _gradients((expected * factors)[is_real].sum(), alone, tokens)
    ours = _gradients((outputs * factors)[is_here].sum(), cut, tokens)
    for gradient in ours:
        dist.all_reduce(gradient)
    worst = max(
        float((mine - right).abs().max() / right.abs().max())
        for mine, right in zip(ours, theirs, strict=True)
    )
    return {
        "tokens": int(is_here.sum()),
        "outputs": float(difference),
        "gradients": worst,
    }
