"""Formats in which an engine holds quantised weights: their names, groups and bytes.

An FP8 engine (`BlockFormat`) has float8_e4m3fn numbers and float32 scales for blocks of
a matrix. The other formats (`GroupFormat`) have one scale for adjacent columns of a row,
as compressed-tensors stores them and vLLM loads them:

- INT4 (`pack-quantized`): integers from -8 to 7, eight in an int32; scales, and for asymmetric formats zero points of
  four bits, for 32, 64 or 128 columns.
- MXFP8 (OCP Microscaling Formats 1.0, section 5): float8_e4m3fn numbers, and a power of two (E8M0) for 32 columns.
- NVFP4: E2M1 numbers, two in a byte; a float8_e4m3fn scale for 16 columns, and a float32 scale for the whole matrix.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megaverl.sharding.model_spec import ModelSpec

# Columns that share an E8M0 scale (MXFP8), and an E4M3 scale (NVFP4).
MX_GROUP, NVFP4_GROUP = 32, 16
FP32_BYTES = 4
# What stays in floating point besides embeddings: the output layer, and routers.
IGNORED = [r"re:.*lm_head", r"re:.*\.gate$"]


@dataclass(frozen=True)
class BlockFormat:
    """FP8 numbers with float32 scales for blocks of a matrix.

    Attributes:
        block: rows and columns of a block. None: one scale for a rank's matrix.
    """

    block: int | None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the scales of one matrix."""
        block = self.block
        return (1,) if block is None else (-(-rows // block), -(-columns // block))

    def num_bytes(self, rows: int, columns: int, itemsize: int) -> int:
        """Return the bytes of one matrix and its scales."""
        return rows * columns + FP32_BYTES * prod(self.scale_shape(rows, columns))


@dataclass(frozen=True)
class GroupFormat:
    """Numbers of 4 or 8 bits with a scale for `group` adjacent columns of a row.

    Attributes:
        kind: dtype of the numbers.
        group: columns that share a scale.
        symmetric: int4 without zero points. The floating-point kinds are symmetric.
    """

    kind: Literal["int4", "mxfp8", "nvfp4"]
    group: int
    symmetric: bool = True

    @property
    def bits(self) -> int:
        """Bits of a number, without its scale."""
        return 8 if self.kind == "mxfp8" else 4

    def num_bytes(self, rows: int, columns: int, itemsize: int) -> int:
        """Return the bytes of one matrix, its scales and its zero points.

        Args:
            itemsize: bytes of an activation. Scales of int4 have the dtype of activations.
        """
        groups = columns // self.group
        scale_bytes = rows * groups * (itemsize if self.kind == "int4" else 1)
        if not self.symmetric:
            # Eight zero points of a column of groups are in one int32.
            scale_bytes += 4 * -(-rows // 8) * groups
        if self.kind == "nvfp4":
            scale_bytes += FP32_BYTES
        return rows * columns * self.bits // 8 + scale_bytes


INT4_GROUPS = (32, 64, 128)
# Names of `rollout.vllm.quantization`. vLLM treats `fp8` as `fp8_per_tensor` if the
# model's folder is not quantised (`model_executor/model_loader/weight_utils.py`).
GROUP_FORMATS: dict[str, GroupFormat] = {
    **{f"int4_g{group}": GroupFormat("int4", group) for group in INT4_GROUPS},
    **{
        f"int4_asym_g{group}": GroupFormat("int4", group, symmetric=False)
        for group in INT4_GROUPS
    },
    "mxfp8": GroupFormat("mxfp8", MX_GROUP),
    "nvfp4": GroupFormat("nvfp4", NVFP4_GROUP),
}
FORMATS: dict[str, BlockFormat | GroupFormat] = {
    "fp8_per_block": BlockFormat(128),
    "fp8_per_tensor": BlockFormat(None),
    "fp8": BlockFormat(None),
    **GROUP_FORMATS,
}


def compressed_config(method: str) -> dict[str, Any]:
    """Return the `quantization_config` that a compressed-tensors folder in this format has in its config.json."""
    form = GROUP_FORMATS[method]
    weights = {
        "num_bits": form.bits,
        "type": "int" if form.kind == "int4" else "float",
        "symmetric": form.symmetric,
        "strategy": "tensor_group" if form.kind == "nvfp4" else "group",
        "group_size": form.group,
        "dynamic": False,
    }
    formats = {
        "int4": "pack-quantized",
        "mxfp8": "mxfp8-quantized",
        "nvfp4": "nvfp4-pack-quantized",
    }
    activations = None
    if form.kind == "mxfp8":
        # vLLM has MXFP8 with activations in MXFP8 only.
        weights["scale_dtype"] = "torch.uint8"
        activations = {**weights, "dynamic": True}
    if form.kind == "nvfp4":
        weights["scale_dtype"] = "torch.float8_e4m3fn"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": formats[form.kind],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": formats[form.kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
    }


def bytes_per_weight(method: str | None, itemsize: int) -> float:
    """Return the bytes of a matrix's element in this format, with its share of scales; `itemsize` without a format."""
    if method is None or method not in FORMATS:
        return itemsize
    # Formats with one scale for a matrix have almost no bytes of scales.
    rows = columns = 1024
    return FORMATS[method].num_bytes(rows, columns, itemsize) / (rows * columns)


def why_no_groups(spec: ModelSpec) -> str | None:
    """Return why a model's matrices cannot be quantised in groups, or None.

    vLLM's fused experts have kernels and parameters of their own, latent attention
    multiplies with a dequantised copy of `kv_b_proj`, and a vision tower's widths are
    not checked.
    """
    if spec.moe is not None:
        return "it has routed experts, of which only dense layers' formats (fp8_per_block, fp8_per_tensor) are written"
    if spec.mla is not None:
        return "vLLM keeps a copy of latent attention's kv_b_proj that a reshard does not write"
    if spec.vision is not None:
        return "it has a vision tower, whose matrices are not quantised in groups"
    return None


def straddled_groups(spec: ModelSpec, tp: int, group: int) -> list[str]:
    """Return the inputs of matrices, on one of `tp` ranks, that are not whole groups, in words.

    A matrix whose rows are split over the ranks has whole groups if its width is a
    multiple of the group. Columns are split in `o_proj` and `down_proj`.
    """
    widths = {
        "hidden_size": (spec.hidden_size, 1),
        "the attention heads' outputs": (spec.num_heads * spec.head_dim, tp),
        "intermediate_size": (spec.ffn_hidden_size, tp),
    }
    return [
        f"{name}={width}" + (f" over {ranks} ranks" if ranks > 1 else "")
        for name, (width, ranks) in widths.items()
        if width % (group * ranks)
    ]
