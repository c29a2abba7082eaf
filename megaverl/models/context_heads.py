"""Context parallelism of layers with a state: every rank computes some of the heads, over whole rows.

A state passes from token to token, so ranks cannot compute the chunks of a row
(`context_attention.py`) side by side. They can compute heads side by side. Before the
layer's convolution the ranks exchange tokens for heads, and behind the state they
exchange them back, with one all-to-all each:

    cp = 2       rank 0                      rank 1
    before       tokens 0 1 6 7, all heads   tokens 2 3 4 5, all heads
    exchanged    tokens 0 to 7, first half   tokens 0 to 7, second half of the heads
    afterwards   tokens 0 1 6 7, all heads   tokens 2 3 4 5, all heads

DeepSpeed-Ulysses (arXiv 2309.14509, section 3.1) does this for attention. A rank sends
each head of a token at most once, and never holds all heads of all tokens. The
projections before and after treat tokens independently and need no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megaverl.models.context_attention import places_by_rank
from megaverl.models.packing import Packing, RowOrder, WholeRow
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    all_to_all_hp2sp,
    all_to_all_sp2hp,
)


class HeadExchange:
    """Exchange of tokens for heads between the ranks of a context-parallel group.

    With a single rank, every method returns what it gets.

    Args:
        group: the context-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def whole_row(self, packing: Packing | None) -> Packing | None:
        """Return the packing of the whole row, whose tokens `to_heads` returns. None: each row is one sequence."""
        if packing is None or self.size == 1:
            return packing
        return _whole(packing).packing

    def of_own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of values of all heads, such as a parameter: [heads, ...] -> [heads / cp, ...]."""
        return values.chunk(self.size)[self.rank]

    def repeat_groups(self, groups: torch.Tensor) -> torch.Tensor:
        """Repeat values of each group of heads for all ranks that compute some of its heads.

        [..., groups, d] -> [..., n, d], where cp divides n, as `to_heads` takes it.
        """
        num_copies = max(1, self.size // groups.shape[-2])
        return groups.repeat_interleave(num_copies, dim=-2)

    def to_heads(
        self, parts: Sequence[torch.Tensor], packing: Packing | None
    ) -> Sequence[torch.Tensor]:
        """Exchange tokens for heads, [s / cp, b, heads, d] -> [s, b, heads / cp, d], with tokens in the row's order.

        All parts travel in one message. Collective over the group, also in the backward
        pass.

        Args:
            parts: tensors of one dtype. Each may have another number of heads, which cp divides, and another d.
            packing: this rank's part of a packed row (b is 1). None: each row is one sequence.
        """
        if self.size == 1:
            return parts
        by_rank = [part.unflatten(2, (self.size, -1)).flatten(3) for part in parts]
        widths = [part.shape[-1] for part in by_rank]
        # [s / cp, b, cp, all widths] -> [s * b, all widths], first the tokens of rank 0.
        sent = torch.cat(by_rank, dim=-1)
        tokens, rows = sent.shape[:2]
        received = all_to_all_sp2hp(sent.flatten(2).flatten(0, 1), group=self._group)
        received = received.unflatten(0, (tokens * self.size, rows))
        order = self._order(tokens, packing, sent.device)
        in_order = received.index_select(0, order.of_tokens)
        return [
            own.unflatten(-1, (part.shape[2] // self.size, part.shape[3]))
            for own, part in zip(in_order.split(widths, dim=-1), parts, strict=True)
        ]

    def to_tokens(self, heads: torch.Tensor, packing: Packing | None) -> torch.Tensor:
        """Exchange heads for tokens, the inverse of `to_heads`: [s, b, heads / cp, d] -> [s / cp, b, heads, d].

        Collective over the group, also in the backward pass.
        """
        if self.size == 1:
            return heads
        tokens, rows, _, width = heads.shape
        order = self._order(tokens // self.size, packing, heads.device)
        by_rank = heads.index_select(0, order.by_rank).flatten(2).flatten(0, 1)
        received: torch.Tensor = all_to_all_hp2sp(by_rank, group=self._group)
        return received.view(tokens // self.size, rows, -1, width)

    def _order(
        self, tokens: int, packing: Packing | None, device: torch.device
    ) -> RowOrder:
        if packing is not None:
            return _whole(packing).order
        places = places_by_rank(tokens * self.size, self.size)
        return RowOrder.from_ranks(places).to(device)


def _whole(packing: Packing) -> WholeRow:
    """Return the row of which a packing has a part."""
    assert packing.whole is not None, "packed for a model without states"
    return packing.whole
