"""The equal parts into which tensor parallelism cuts a weight, and what cannot be cut so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megaverl.sharding.boxes import Box, cut, whole
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Split, Weight


def even_part(weight: Weight, tp: int, tp_rank: int) -> Box:
    """One of `tp` equal parts, which must exist: columns of a ROW weight, all of a REPLICATED one, rows of others."""
    if weight.split is Split.REPLICATED:
        return whole(weight.shape)
    axis = 1 if weight.split is Split.ROW else 0
    run = weight.shape[axis] // tp
    return cut(weight.shape, axis, tp_rank * run, (tp_rank + 1) * run)


def uneven(weights: Iterable[Weight], spec: ModelSpec, tp: int, etp: int, keys: tuple[str, str]) -> Iterator[str]:
    """What `tp` (`etp` inside routed experts) does not divide, one message for all weights of a kind.

    Args:
        keys: the settings that `tp` and `etp` come from, as the user knows them.
    """
    seen = set()
    for weight in weights:
        is_expert = weight.expert is not None
        kind = (weight.split, weight.shape, is_expert)
        if kind in seen:
            continue
        seen.add(kind)
        size, key = (etp, keys[1]) if is_expert else (tp, keys[0])
        if weight.split is Split.COLUMN and spec.num_heads % size:
            yield (
                f"{weight.name}: its {spec.num_heads} heads cannot be divided over {key} {size} ranks. "
                "Choose one that divides them."
            )
        if weight.split in (Split.COLUMN, Split.ROW, Split.GATE, Split.UP):
            axis = 1 if weight.split is Split.ROW else 0
            if weight.shape[axis] % size:
                yield (
                    f"{weight.name}: its {weight.shape[axis]} {'columns' if axis else 'rows'} cannot be divided "
                    f"over {key} {size} ranks. Choose a {key} that divides them."
                )
