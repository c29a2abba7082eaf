"""Conversion of models between Hugging Face folders, Megatron's distributed checkpoints and GGUF files.

`items` has the arrays to write, the parts that fill them, and the threads that copy.
"""

from megaverl.checkpoint.convert.items import (
    ArrayPart,
    FileBytes,
    FileItem,
    Item,
    Parts,
    bar,
    bytes_of,
    differing_items,
    in_threads,
    parts_of,
    share_of,
    slabs,
    stored_box,
    transposed_name,
    write_items,
)

__all__ = [
    "ArrayPart",
    "Item",
    "Parts",
    "FileBytes",
    "FileItem",
    "bar",
    "bytes_of",
    "differing_items",
    "in_threads",
    "parts_of",
    "share_of",
    "slabs",
    "stored_box",
    "transposed_name",
    "write_items",
]
