"""AdamW whose moments take 2 bytes or 1 byte per element, for shards that torch's AdamW would update.

Updates are computed in float32 from moments that are rounded when they are stored:

    stored -> float32 -> new moments in float32 -> update of the weights
                                    \\-> rounded, stored

bfloat16 rounds to the nearest. 8 bits are the dynamic, block-wise code of Dettmers et
al. 2021 (arXiv 2110.02861): 256 levels, and one float32 scale for every 256 elements.
Unlike there, the square root of the second moment is encoded, which halves its range in
decades. Otherwise gradients below 1/2500 of the largest in their block would have a
second moment of zero, and several times too large an update.

Checkpoints contain moments in float32, so a run can be resumed with other dtypes and on
other ranks. Storing what was read from such a checkpoint gives the same bits again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megaverl.config.moment_dtypes import BLOCK, MOMENTS, SMALLEST_NUMEL

# Elements that are updated at a time, which bounds the float32 copies.
SLICE_NUMEL = BLOCK * 2**14
_SCALE = "_scale"


class SmallMomentAdamW(torch.optim.Optimizer):
    """AdamW on local shards, with moments stored in given dtypes.

    Args:
        groups: parameter groups.
        dtypes: of `exp_avg` and `exp_avg_sq`: float32, bfloat16, or uint8 for 8-bit codes. Tensors with fewer than
            `SMALLEST_NUMEL` elements have float32 instead of 8 bits.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        self._dtypes = dict(dtypes)
        self._loaded: list[tuple[torch.Tensor, str, torch.Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self,
        parameter: torch.Tensor,
        gradient_of_shard: torch.Tensor,
        group: Mapping[str, Any],
    ) -> None:
        state = self.allocated(parameter)
        state["step"] += 1
        step = float(state["step"])
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        root_of_correction = (1 - beta2**step) ** 0.5
        weights = _local(parameter).view(-1)
        gradients = _local(gradient_of_shard).reshape(-1)
        for begin in range(0, weights.numel(), SLICE_NUMEL):
            span = slice(begin, min(begin + SLICE_NUMEL, weights.numel()))
            gradient = gradients[span].float()
            exp_avg = self._read(state, "exp_avg", span)
            exp_avg_sq = self._read(state, "exp_avg_sq", span)
            exp_avg = exp_avg.lerp(gradient, 1 - beta1)
            exp_avg_sq = exp_avg_sq.mul(beta2).addcmul_(
                gradient, gradient, value=1 - beta2
            )
            self._write(state, "exp_avg", span, exp_avg)
            self._write(state, "exp_avg_sq", span, exp_avg_sq)
            denominator = exp_avg_sq.sqrt_().div_(root_of_correction)
            denominator.add_(group["eps"])
            weight = weights[span]
            weight.mul_(1 - rate * group["weight_decay"])
            weight.addcdiv_(exp_avg, denominator, value=-rate / (1 - beta1**step))

    def allocated(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter: `step`, and local tensors of the moments. Missing state is created."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if state:
            return state
        weights = _local(parameter)
        state["step"] = torch.tensor(0.0)
        for name in MOMENTS:
            dtype = self._dtypes[name]
            if dtype == torch.uint8 and weights.numel() < SMALLEST_NUMEL:
                dtype = torch.float32
            state[name] = torch.zeros_like(weights, dtype=dtype)
            if dtype == torch.uint8:
                num_blocks = -(-weights.numel() // BLOCK)
                state[name + _SCALE] = weights.new_zeros(num_blocks)
                state[name].fill_(_code_of_zero(name))
        return state

    def moment(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a moment of the local shard in float32: the stored tensor, or a copy if it is stored smaller."""
        state = self.allocated(parameter)
        stored = state[name]
        if stored.dtype == torch.float32:
            return stored
        return self._read(state, name, slice(0, stored.numel())).view_as(stored)

    def to_load(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor that a moment is read into in float32. `store_loaded` stores what was read."""
        moment = self.moment(parameter, name)
        self._loaded.append((parameter, name, moment))
        return moment

    @torch.no_grad()
    def store_loaded(self) -> None:
        """Store the moments that were read into the tensors of `to_load`."""
        for parameter, name, value in self._loaded:
            state = self.state[parameter]
            # A moment in float32 has been read in place.
            if state[name] is not value:
                self._write(state, name, slice(0, value.numel()), value.view(-1))
        self._loaded.clear()

    @staticmethod
    def _read(
        state: Mapping[str, torch.Tensor], name: str, span: slice
    ) -> torch.Tensor:
        stored = state[name].view(-1)[span]
        if stored.dtype != torch.uint8:
            return stored.float()
        scales = state[name + _SCALE][_blocks_of(span)]
        if name == "exp_avg":
            return decoded(stored, scales, signed=True)
        # The square root of a square is exact in binary floating point, so storing what
        # was read gives the same bits.
        return decoded(stored, scales, signed=False).square_()

    @staticmethod
    def _write(
        state: Mapping[str, torch.Tensor], name: str, span: slice, value: torch.Tensor
    ) -> None:
        stored = state[name].view(-1)[span]
        if stored.dtype != torch.uint8:
            stored.copy_(value)
            return
        if name == "exp_avg":
            codes, scales = encoded(value, signed=True)
        else:
            codes, scales = encoded(value.sqrt(), signed=False)
        stored.copy_(codes)
        state[name + _SCALE][_blocks_of(span)] = scales


def encoded(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit codes of a flat float32 tensor, and the scale of each block.

    The scale is the element with the largest magnitude, with its sign: it is encoded as
    exactly 1, so that encoding decoded values gives the same codes and scales.
    """
    blocks = _padded(values).view(-1, BLOCK)
    places = blocks.abs().argmax(dim=1, keepdim=True)
    scales = blocks.gather(1, places)
    normalised = blocks / torch.where(scales == 0, 1.0, scales)
    codes = torch.bucketize(
        normalised, _midpoints(signed).to(values.device), out_int32=True
    )
    return codes.to(torch.uint8).view(-1)[: values.numel()], scales.view(-1)


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return the float32 values of flat 8-bit codes, of which each block has a scale."""
    levels = dynamic_levels(signed).to(codes.device)
    blocks = levels[_padded(codes).view(-1, BLOCK).int()]
    return (blocks * scales.view(-1, 1)).view(-1)[: codes.numel()]


@functools.cache
def dynamic_levels(signed: bool) -> torch.Tensor:
    """Return the 256 levels in [-1, 1] (or [0, 1]), ascending: decades that are the finer the larger they are.

    Source: Dettmers et al. 2021, section 1.3 (dynamic tree quantisation).
    """
    levels = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        # Without a sign, its bit gives twice as many levels.
        count = 2**exponent if signed else 2 ** (exponent + 1)
        bounds = torch.linspace(0.1, 1.0, count + 1)
        means = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (exponent - 6)
        levels.append(means)
        if signed:
            levels.append(-means)
    return torch.cat(levels).sort().values


@functools.cache
def _midpoints(signed: bool) -> torch.Tensor:
    levels = dynamic_levels(signed)
    return (levels[:-1] + levels[1:]) / 2


def _code_of_zero(name: str) -> int:
    levels = dynamic_levels(name == "exp_avg")
    return int((levels == 0).nonzero()[0, 0])


def _padded(flat: torch.Tensor) -> torch.Tensor:
    missing = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _blocks_of(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
