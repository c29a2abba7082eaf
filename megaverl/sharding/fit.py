"""Whether tensor and expert parallelism cut a model into equal parts: one rule, for Megatron's grids and for vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from megaverl.sharding.model_spec import ModelSpec


class Misfit(NamedTuple):
    """A size that does not fit a model.

    Attributes:
        parts: what it does not divide, such as "6 key-value heads".
        fitting: the sizes that divide all that this one should.
    """

    axis: Literal["tp", "etp", "ep"]
    size: int
    parts: list[str]
    fitting: list[int]

    @property
    def reason(self) -> str:
        fitting = ", ".join(map(str, self.fitting))
        return f"does not divide the model's {' and '.join(self.parts)}. Sizes that fit: {fitting}."

    def __str__(self) -> str:
        return f"{self.axis}={self.size} {self.reason}"


def shares_kv_heads(spec: ModelSpec, tp: int) -> bool:
    """Whether several of `tp` ranks compute with the same key-value head, as there are fewer heads than ranks."""
    return spec.mla is None and spec.num_kv_heads < tp


def no_adapters(spec: ModelSpec, tp: int) -> str:
    """Why a model cannot have low-rank adapters at this `tp`; empty: it can."""
    if not shares_kv_heads(spec, tp):
        return ""
    return (
        f"tp={tp} is more than the model's {spec.num_kv_heads} key-value heads: some ranks then hold no row of a "
        "projection, and adapters cannot follow. Lower tp, or leave lora out."
    )


def misfits(spec: ModelSpec, *, tp: int, etp: int = 1, ep: int = 1, engine: bool = False) -> list[Misfit]:
    """What `tp`, `etp` (inside routed experts) and `ep` do not divide; with `engine` of vLLM's, which divides experts
    that have biases: megatron-core (0.16 to 0.19) does not.

    There may be fewer key-value heads than tensor-parallel ranks, if they divide these: vLLM gives each rank a copy of
    its head, and Megatron cuts the rows of `linear_qkv` evenly, wherever in a head that is.
    """
    moe, kv_heads = spec.moe, spec.num_kv_heads

    def fits_kv(size: int) -> bool:
        return not kv_heads % size or not (size % kv_heads or 2 * kv_heads * spec.head_dim % size)

    by_tp = {f"{spec.num_heads} attention heads": _divides(spec.num_heads)}
    if spec.mla is None:
        # vLLM's gpt-oss (0.32, `gpt_oss.py`) gives no rank a copy of a head
        by_tp[f"{kv_heads} key-value heads"] = _divides(kv_heads) if engine and spec.attention_sinks else fits_kv
    if moe is None or moe.num_dense_layers:
        by_tp[f"{spec.ffn_hidden_size} feed-forward units"] = _divides(spec.ffn_hidden_size)
    if moe is not None and (shared := moe.shared_ffn_hidden_size):
        by_tp[f"{shared} units of the shared experts"] = _divides(shared)
    found = [_misfit("tp", tp, by_tp, spec.num_heads)]
    if moe is not None:
        width, experts = moe.ffn_hidden_size, moe.num_experts
        by_etp = {f"{width} units of an expert": _divides(width)}
        if spec.linear_bias and not engine:
            by_etp = {"experts, which stay whole as they have biases": lambda size: size == 1}
        found.append(_misfit("etp", etp, by_etp, width))
        found.append(_misfit("ep", ep, {f"{experts} experts": _divides(experts)}, experts))
    return [misfit for misfit in found if misfit is not None]


def _divides(number: int) -> Callable[[int], bool]:
    return lambda size: number % size == 0


def _misfit(
    axis: Literal["tp", "etp", "ep"], size: int, parts: dict[str, Callable[[int], bool]], largest: int
) -> Misfit | None:
    broken = [words for words, fits in parts.items() if not fits(size)]
    if not broken:
        return None
    return Misfit(
        axis, size, broken, [each for each in range(1, largest + 1) if all(fits(each) for fits in parts.values())]
    )
