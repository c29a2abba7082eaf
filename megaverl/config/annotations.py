"""Does a value from YAML fit an annotation that was parsed from source? What is unclear accepts anything."""

from __future__ import annotations

import ast
from typing import Any

from megaverl.config.installed import External, SourceModule

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "float64",
    "fp32",
    "fp16",
    "bf16",
    "float8_e4m3fn",
    "uint8",
    "int8",
)

_SEQUENCES = {"List", "list", "Sequence", "Set", "set", "frozenset", "Iterable", "Tuple", "tuple"}
_MAPPINGS = {"Dict", "dict", "Mapping"}


def fits(value: Any, field: External) -> bool:
    """True where `value` can be given to the field."""
    if field.annotation is None:
        return True
    # `x: int = None` is common, and means an optional int.
    if value is None and isinstance(field.default, ast.Constant) and field.default.value is None:
        return True
    return _fits(value, field.annotation, field.module)


def choices(field: External) -> list[Any]:
    """The values that a field's Literal or Enum names; empty where it is neither."""
    return _choices(field.annotation, field.module) if field.annotation is not None else []


def _fits(value: Any, node: ast.expr, module: SourceModule) -> bool:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _fits(value, ast.parse(node.value, mode="eval").body, module)
        return node.value is not None or value is None
    if isinstance(node, ast.BinOp):
        return _fits(value, node.left, module) or _fits(value, node.right, module)
    if isinstance(node, ast.Subscript):
        return _fits_subscript(value, node, module)
    if isinstance(node, ast.Attribute):
        return _is_dtype(value) if ast.unparse(node) == "torch.dtype" else _fits_name(value, node.attr, module)
    return _fits_name(value, node.id, module) if isinstance(node, ast.Name) else True


def _fits_name(value: Any, name: str, module: SourceModule) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    plain: dict[str, bool] = {
        "int": number,
        "float": number or isinstance(value, float),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "None": value is None,
        # a function is named as module:function
        "Callable": isinstance(value, str) and ":" in value,
    }
    if name in plain:
        return plain[name]
    if name in _SEQUENCES:
        return isinstance(value, list)
    if name in _MAPPINGS:
        return isinstance(value, dict)
    found = module.resolve(name)
    if found is None:
        return True
    node, where = found
    if isinstance(node, ast.ClassDef):
        members = _members(node)
        return value in members if members else True
    return _fits(value, node, where)


def _fits_subscript(value: Any, node: ast.Subscript, module: SourceModule) -> bool:
    outer = ast.unparse(node.value).rsplit(".", 1)[-1]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional":
        return value is None or _fits(value, inner[0], module)
    if outer == "Union":
        return any(_fits(value, part, module) for part in inner)
    if outer == "Literal":
        return any(value == choice and type(value) is type(choice) for choice in _choices(node, module))
    if outer == "Annotated":
        return _fits(value, inner[0], module)
    if outer in ("Tuple", "tuple"):
        if not isinstance(value, list):
            return False
        if isinstance(inner[-1], ast.Constant) and inner[-1].value is Ellipsis:
            return all(_fits(item, inner[0], module) for item in value)
        return len(value) == len(inner) and all(
            _fits(item, part, module) for item, part in zip(value, inner, strict=True)
        )
    if outer in _SEQUENCES:
        return isinstance(value, list) and all(_fits(item, inner[0], module) for item in value)
    if outer in _MAPPINGS:
        return isinstance(value, dict) and all(_fits(item, inner[-1], module) for item in value.values())
    return _fits_name(value, "Callable", module) if outer == "Callable" else True


def _choices(node: ast.expr, module: SourceModule) -> list[Any]:
    if isinstance(node, ast.BinOp):
        return [*_choices(node.left, module), *_choices(node.right, module)]
    if isinstance(node, ast.Subscript):
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        outer = ast.unparse(node.value).rsplit(".", 1)[-1]
        if outer == "Literal":
            return [part.value for part in inner if isinstance(part, ast.Constant)]
        return [c for part in inner for c in _choices(part, module)] if outer in ("Optional", "Union") else []
    if isinstance(node, ast.Name):
        found = module.resolve(node.id)
        if found and isinstance(found[0], ast.ClassDef):
            return _members(found[0])
        return _choices(found[0], found[1]) if found and isinstance(found[0], ast.expr) else []
    return []


def _members(node: ast.ClassDef) -> list[str]:
    """Names of an Enum's members; empty for any other class."""
    keywords = [ast.unparse(keyword.value) for keyword in node.keywords]
    if not any(ast.unparse(base).endswith("Enum") for base in node.bases) and not any("Enum" in k for k in keywords):
        return []
    return [
        target.id
        for statement in node.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value.removeprefix("torch.") in DTYPES
