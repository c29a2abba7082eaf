"""Head sizes that vLLM's CPU attention supports, read from its source text. Importing vLLM would take many seconds."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_MODULE = Path("v1", "attention", "backends", "cpu_attn.py")
_FUNCTION = "get_supported_head_sizes"


def cpu_head_sizes() -> tuple[int, ...]:
    """Return the head sizes of the installed vLLM's CPU attention; empty if they cannot be read."""
    spec = find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder) / _MODULE
        if path.is_file():
            return _listed_in(ast.parse(path.read_text(encoding="utf-8")))
    return ()


def _listed_in(tree: ast.Module) -> tuple[int, ...]:
    """Return the list that the function returns; empty if it is more than one `return` of numbers."""
    # Read as text: importing the module would import vLLM, which takes many seconds.
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION:
            returned = [
                part.value for part in node.body if isinstance(part, ast.Return)
            ]
            try:
                [value] = returned
                return tuple(int(size) for size in ast.literal_eval(value))  # type: ignore[arg-type]
            except (ValueError, TypeError, SyntaxError):
                return ()
    return ()


def why_no_kernel(head_dim: int) -> str:
    """Return why vLLM's CPU attention cannot compute heads of this size; empty if it can, or if that is unknown."""
    sizes = cpu_head_sizes()
    if not sizes or head_dim in sizes:
        return ""
    return (
        f"the model's heads have {head_dim} dimensions; vLLM's CPU attention has kernels for "
        f"{', '.join(map(str, sizes))} only. Choose another model (head_dim, or hidden_size / num_attention_heads, in "
        "config.json), or rollout.engine=hf."
    )
