"""Dtypes of Adam's moments under FSDP2, and the bytes that they take, shared by training and planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOMENTS = ("exp_avg", "exp_avg_sq")
SWITCH = "use_precision_aware_optimizer"
MOMENT_FIELDS = (SWITCH, *(f"{name}_dtype" for name in MOMENTS))
# Names of dtypes, as megatron-core's OptimizerConfig takes them, that torch's shards
# can have -> the dtype.
FSDP_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "uint8": "uint8",
}
BLOCK = 256  # elements that share a scale of 4 bytes
# Smaller tensors stay in float32 instead of 8 bits, as in bitsandbytes and torchao.
SMALLEST_NUMEL = 4096
# A change below this share of a bfloat16 number may be rounded away.
BFLOAT16_STEP = 2.0**-8


def moment_dtypes(optimizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the dtype of each moment under FSDP2 by name, from a role's `optimizer` mapping.

    Values that the configuration's checks refuse are float32.
    """
    is_on = bool(optimizer.get(SWITCH, False))
    written = {
        name: str(optimizer.get(f"{name}_dtype", "float32")).removeprefix("torch.")
        for name in MOMENTS
    }
    return {
        name: FSDP_DTYPES.get(dtype, "float32") if is_on else "float32"
        for name, dtype in written.items()
    }


def moment_bytes(dtype: str, numel: int) -> int:
    """Return the bytes of one moment of a tensor with `numel` elements."""
    if dtype == "bfloat16":
        return 2 * numel
    if dtype == "uint8" and numel >= SMALLEST_NUMEL:
        return numel + 4 * -(-numel // BLOCK)
    return 4 * numel
