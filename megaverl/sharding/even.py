"""Even chunks along axis 0 as a layout: what each rank holds under FSDP2.

Rule (torch 2.13, `distributed/fsdp/_fully_shard/_fsdp_param.py` and `_fsdp_common.py`, which follow `torch.chunk`):
every chunk has ceil(rows / ranks) rows, so the last ranks may hold fewer, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megaverl.sharding.boxes import cut
from megaverl.sharding.layout import Layout, LayoutBuilder, stack
from megaverl.sharding.weight import Weight


def even_layout(weights: Sequence[Weight], world: int, rank: int) -> Layout:
    """What `rank` of `world` holds, under the global names. A tensor of which it holds nothing has no rows."""
    builder = LayoutBuilder()
    for weight in weights:
        rows = weight.shape[0]
        chunk = -(-rows // world)
        low = min(rank * chunk, rows)
        part = cut(weight.shape, 0, low, min(low + chunk, rows))
        builder.add(weight.name, [weight], stack([(0, part)]))
    return builder.build()


def even_layouts(weights: Sequence[Weight], world: int) -> Callable[[int], Layout]:
    """`rank -> layout`, each made once."""
    layouts: dict[int, Layout] = {}

    def layout_of(rank: int) -> Layout:
        if rank not in layouts:
            layouts[rank] = even_layout(weights, world, rank)
        return layouts[rank]

    return layout_of
