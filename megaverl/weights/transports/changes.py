"""Encoding of the elements that changed between two versions of a message, as positions and values.

The changed elements of n elements are encoded in one of these ways, whichever takes the
fewest bytes. The values always come first, in order, and the positions behind them:

    MASK             one bit for each of the n elements
    GAPS8, GAPS16    for each changed element, the number of unchanged elements before it
    RUNS8, RUNS16    for each run of changed elements, the number of unchanged elements before it, and its length

Gaps and runs are numbers of any size in digits of 8 or 16 bits. The largest digit M
stands for "M, and more follows", so that 600 is 255, 255, 90 in 8 bits. Elements are
compared as bits: NaNs with equal bits are equal, and 0.0 differs from -0.0.

With 1 % of bfloat16 values changed at random, an element takes 3.1 bytes (2 of them its
value), so that a message has 1.5 % of its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from megaverl.errors import ReshardError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# From one changed element in so many on, a mask takes no more bytes than gaps do. Denser
# changes are not searched for runs either, which bounds the memory for positions.
MASK_FROM = 8


class Encoding(IntEnum):
    """Ways to send a message. WHOLE: all elements, whether they changed or not."""

    WHOLE = 0
    MASK = 1
    GAPS8 = 2
    GAPS16 = 3
    RUNS8 = 4
    RUNS16 = 5


DIGITS = {
    Encoding.GAPS8: torch.uint8,
    Encoding.GAPS16: torch.int16,
    Encoding.RUNS8: torch.uint8,
    Encoding.RUNS16: torch.int16,
}
OF_GAPS = (Encoding.GAPS8, Encoding.GAPS16)
OF_RUNS = (Encoding.RUNS8, Encoding.RUNS16)


class Changes(NamedTuple):
    """Changed elements of a message.

    Attributes:
        encoding: how they are encoded. WHOLE: encoding them would take as many bytes as all elements.
        num_changed: number of changed elements.
        nbytes: bytes of the message.
        payload: the encoded bytes, uint8 [nbytes]; None if the encoding is WHOLE.
    """

    encoding: Encoding
    num_changed: int
    nbytes: int
    payload: torch.Tensor | None


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the values as integers of their own width, sharing their storage."""
    return values.view(BITS[values.element_size()])


def differ(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return which elements [n] have other bits than before, bool [n]."""
    bits, bits_before = as_bits(values.detach()), as_bits(before.detach())
    if values.is_cuda:
        return bits != bits_before
    # On a CPU numpy compares ten times faster than torch.
    return torch.from_numpy(bits.numpy() != bits_before.numpy())


@torch.no_grad()
def encode(values: torch.Tensor, changed: torch.Tensor) -> Changes:
    """Encode the changed elements of a message.

    Args:
        values: all elements [n], contiguous.
        changed: bool [n], on the same device.
    """
    numel, width = values.numel(), values.element_size()
    count = int(torch.count_nonzero(changed))
    encoding, code_bytes = Encoding.MASK, -(-numel // 8)
    numbers: dict[Encoding, torch.Tensor] = {}
    positions = None
    if count * MASK_FROM < numel:
        positions = find_true(changed)
        gaps, runs = _gaps_and_runs(positions)
        numbers |= dict.fromkeys(OF_GAPS, gaps) | dict.fromkeys(OF_RUNS, runs)
        for candidate, of_candidate in numbers.items():
            nbytes = _code_bytes(of_candidate, DIGITS[candidate])
            if nbytes < code_bytes:
                encoding, code_bytes = candidate, nbytes
    nbytes = count * width + code_bytes
    if nbytes >= numel * width:
        return Changes(Encoding.WHOLE, count, numel * width, None)
    codes = (
        pack_bits(changed)
        if encoding is Encoding.MASK
        else _encode_numbers(numbers[encoding], DIGITS[encoding])
    )
    bits = as_bits(values)
    changed_bits = bits[changed if positions is None else positions]
    payload = torch.cat([changed_bits.view(torch.uint8), codes])
    return Changes(encoding, count, nbytes, payload)


@torch.no_grad()
def decode(
    payload: torch.Tensor,
    encoding: Encoding,
    count: int,
    numel: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions (int64 [count], increasing) and the values [count] of changed elements.

    Args:
        payload: uint8, from `encode`.
        numel: number of elements of the message, changed or not.
        dtype: of the elements.

    Raises:
        ReshardError: the bytes do not describe `count` of `numel` elements.
    """
    end_of_values = count * dtype.itemsize
    values = payload[:end_of_values].view(dtype)
    codes = payload[end_of_values:]
    if encoding is Encoding.MASK:
        positions = find_true(unpack_bits(codes, numel))
    else:
        ends = _decode_sums(codes, DIGITS[encoding])
        places = torch.arange(count, device=payload.device)
        if encoding in OF_GAPS:
            # Before element i lie all gaps so far, and i changed elements.
            positions = ends + places if ends.numel() == count else ends
        else:
            positions = _positions_in_runs(ends, places)
    in_range = count == 0 or (positions.numel() and int(positions[-1]) < numel)
    if positions.numel() != count or not in_range:
        raise ReshardError(
            f"a message of changed weights is damaged: its {encoding.name} positions do not fit {count} changed of "
            f"{numel} elements. Check the network; reshard.delta=off sends whole weights."
        )
    return positions, values


def _gaps_and_runs(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gap before each changed element, and (gap, length) of each run after each other."""
    before = torch.cat([positions.new_tensor([-1]), positions[:-1]])
    gaps = positions - before - 1
    starts_run = gaps > 0
    starts_run[:1] = True
    firsts = starts_run.nonzero().flatten()
    ends = torch.cat([firsts[1:], firsts.new_tensor([len(gaps)])[: len(firsts)]])
    return gaps, torch.stack([gaps[firsts], ends - firsts], dim=1).flatten()


def _positions_in_runs(ends: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the positions of changed elements from the sums of (gap, length) up to each number."""
    stops = ends[1::2]
    starts = ends[::2][: len(stops)]
    lengths = stops - starts
    # Elements of run r lie at its start plus their place among all changed elements,
    # less the elements of the runs before it.
    shifts = starts - (torch.cumsum(lengths, 0) - lengths)
    shifts = shifts.repeat_interleave(lengths)
    return shifts + places if len(shifts) == len(places) else shifts


def _largest(digit: torch.dtype) -> int:
    """Return the digit that announces further digits. int16 holds unsigned digits."""
    largest: int = 2 ** (8 * digit.itemsize) - 1
    return largest


def _code_bytes(numbers: torch.Tensor, digit: torch.dtype) -> int:
    """Return the bytes that the numbers take in such digits."""
    further = torch.div(numbers, _largest(digit), rounding_mode="floor").sum()
    return (numbers.numel() + int(further)) * digit.itemsize


def _encode_numbers(numbers: torch.Tensor, digit: torch.dtype) -> torch.Tensor:
    """Return the numbers in digits, as uint8."""
    largest = _largest(digit)
    further = torch.div(numbers, largest, rounding_mode="floor")
    last_digits = torch.cumsum(further + 1, 0) - 1
    total = int(last_digits[-1]) + 1 if numbers.numel() else 0
    digits = torch.full((total,), largest, dtype=torch.int32, device=numbers.device)
    digits[last_digits] = (numbers - further * largest).to(torch.int32)
    return digits.to(digit).view(torch.uint8)


def _decode_sums(codes: torch.Tensor, digit: torch.dtype) -> torch.Tensor:
    """Return the sum of all numbers up to each of them, int64."""
    largest = _largest(digit)
    # Bytes of a message may start anywhere, but 16-bit digits must be aligned.
    digits = codes.clone().view(digit).to(torch.int64) & largest
    return torch.cumsum(digits, 0)[digits != largest]


def find_true(flags: torch.Tensor) -> torch.Tensor:
    """Return the places of the true flags, int64 in increasing order."""
    if flags.is_cuda:
        return flags.nonzero().flatten()
    # Several times faster than torch on a CPU.
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Return bools [n] as uint8 [ceil(n / 8)], the first in the lowest bit."""
    if not flags.is_cuda:
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8))
    places = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the first `numel` bits of `pack_bits` as bools."""
    if not packed.is_cuda:
        bits = np.unpackbits(packed.numpy(), count=numel, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).flatten()[:numel].to(torch.bool)


def indices_at(
    positions: torch.Tensor, shape: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return the index along each dimension of places counted in row-major order.

    `torch.unravel_index` returns the same, but its first call imports 500 modules,
    while all ranks of the reshard wait for this one.

    Args:
        positions: int64, `[places]`.
        shape: of the box.
    """
    indices: list[torch.Tensor] = []
    for size in reversed(shape):
        indices.append(positions % size)
        positions = positions // size
    return tuple(reversed(indices))
