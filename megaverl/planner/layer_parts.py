"""Parts that a model's decoder layers have, for plans that count layers of equal parts together."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

from megaverl.sharding.model_spec import ModelSpec


class LayerParts(NamedTuple):
    """Parts of a decoder layer: 1 for a part that it has, or the mean over several layers.

    Attributes:
        experts: routed experts, with the shared ones.
    """

    attention: float = 0.0
    delta_net: float = 0.0
    mamba: float = 0.0
    mlp: float = 0.0
    experts: float = 0.0

    @property
    def num_norms(self) -> float:
        """Number of norms, each with a residual sum. Attention and Mamba-2 side by side read the same norm's output."""
        mixers = self.attention + self.delta_net + self.mamba
        return min(1.0, mixers) + self.mlp + self.experts

    @property
    def num_outputs(self) -> float:
        """Number of projections back to the hidden size, whose outputs tensor-parallel ranks sum."""
        return sum(self)

    @property
    def num_states(self) -> float:
        """Number of parts that carry a state along a row."""
        return self.delta_net + self.mamba

    @classmethod
    def mean(cls, layers: Counter[LayerParts]) -> Self:
        """Return the mean over layers, or no parts if there are none."""
        total = layers.total()
        columns = zip(
            *(tuple(count * part for part in parts) for parts, count in layers.items()),
            strict=True,
        )
        return cls(*(sum(column) / total for column in columns))


def layers_by_parts(spec: ModelSpec) -> Counter[LayerParts]:
    """Count the layers that have the same parts."""
    return Counter(
        _parts_of_layer(spec, layer, is_routed=is_routed)
        for layer, is_routed in enumerate(spec.routed_layers)
    )


def mean_parts(spec: ModelSpec, *, is_moe: bool | None = None) -> LayerParts:
    """Return the mean over layers with routed experts, over those without, or over all layers (None)."""
    layers = layers_by_parts(spec)
    return LayerParts.mean(
        Counter(
            {
                parts: count
                for parts, count in layers.items()
                if is_moe is None or bool(parts.experts) == is_moe
            }
        )
    )


def _parts_of_layer(spec: ModelSpec, layer: int, *, is_routed: bool) -> LayerParts:
    if spec.layer_kinds:
        kind = spec.layer_kinds[layer]
        return LayerParts(**{"experts" if kind == "moe" else kind: 1.0})
    is_net = spec.delta_net is not None and spec.delta_net.layers[layer]
    return LayerParts(
        attention=float(not is_net),
        delta_net=float(is_net),
        mamba=float(spec.has_mamba_beside_attention),
        mlp=float(not is_routed),
        experts=float(is_routed),
    )
