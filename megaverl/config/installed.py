"""What the installed megatron-core and vLLM accept, read from their source without importing them.

Importing either takes seconds and pulls in torch; a configuration is checked before that. So the fields of a
class, their annotations and defaults are parsed with `ast` from the file that `importlib` locates.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class SourceModule:
    """A parsed module: its dotted name and its top-level statements."""

    name: str
    tree: ast.Module
    is_package: bool

    def resolve(self, name: str, depth: int = 4) -> tuple[ast.expr | ast.ClassDef, SourceModule] | None:
        """What `name` is at the top level, following imports of other modules; None where it is unclear."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node, self
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return node.value, self
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return (node.value, self) if node.value is not None else None
        for imported in (node for node in self.tree.body if isinstance(node, ast.ImportFrom)):
            for alias in imported.names:
                if (alias.asname or alias.name) == name and depth:
                    module = source_module(self._absolute(imported))
                    return module.resolve(alias.name, depth - 1) if module else None
        return None

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class External:
    """A field or argument of another library's class."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None
    description: str
    module: SourceModule

    @property
    def type_text(self) -> str:
        return ast.unparse(self.annotation) if self.annotation is not None else "Any"


@cache
def source_file(module: str) -> tuple[Path, bool] | None:
    """The file of a dotted module name, and whether it is a package; no parent package is executed."""
    if module.endswith(".py"):  # a file of the user's own
        return (Path(module), False) if Path(module).is_file() else None
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return (Path(spec.origin), bool(spec.submodule_search_locations)) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder, *rest)
        if base.with_suffix(".py").is_file():
            return base.with_suffix(".py"), False
        if (base / "__init__.py").is_file():
            return base / "__init__.py", True
    return None


@cache
def source_module(module: str) -> SourceModule | None:
    """The parsed module, or None where it is not installed as Python source."""
    file = source_file(module)
    if file is None:
        return None
    path, is_package = file
    return SourceModule(module, ast.parse(path.read_text(encoding="utf-8")), is_package)


@cache
def class_fields(module: str, name: str) -> dict[str, External] | None:
    """The annotated fields of a class and of its bases, by name; None where the module is not installed."""
    located = _class(module, name)
    if located is None:
        return None
    node, source = located
    fields: dict[str, External] = {}
    for base in reversed(node.bases):
        inherited = source.resolve(base.id) if isinstance(base, ast.Name) else None
        if inherited and isinstance(inherited[0], ast.ClassDef):
            fields |= class_fields(inherited[1].name, inherited[0].name) or {}
    body = node.body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" in ast.unparse(statement.annotation):
                continue
            field = statement.target.id
            fields[field] = External(
                field, statement.annotation, _default(statement.value), _docline(following), source
            )
    return fields


@cache
def init_arguments(module: str, name: str) -> dict[str, External] | None:
    """The arguments of a class's `__init__`, without `self`; None where the module is not installed."""
    located = _class(module, name)
    if located is None:
        return None
    node, source = located
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            arguments = [*statement.args.posonlyargs, *statement.args.args][1:]
            defaults = [None] * (len(arguments) - len(statement.args.defaults)) + list(statement.args.defaults)
            pairs = list(zip(arguments, defaults, strict=True))
            pairs += list(zip(statement.args.kwonlyargs, statement.args.kw_defaults, strict=True))
            return {arg.arg: External(arg.arg, arg.annotation, default, "", source) for arg, default in pairs}
    return {}


def installed_version(*distributions: str) -> str:
    """ "name version" of the first distribution that is installed, or the first name alone."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0]


def _class(module: str, name: str) -> tuple[ast.ClassDef, SourceModule] | None:
    source = source_module(module)
    found = source.resolve(name) if source else None
    return (found[0], found[1]) if found and isinstance(found[0], ast.ClassDef) else None


def _default(value: ast.expr | None) -> ast.expr | None:
    """The default behind `field(default=...)`; a factory counts as unknown."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        function = value.func.id if isinstance(value.func, ast.Name) else value.func.attr
        if function == "field":
            return next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    return value


def _docline(following: ast.stmt | None) -> str:
    """The first line of the string that documents the field before it."""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        text = following.value.value
        return str(text).strip().split("\n")[0] if isinstance(text, str) else ""
    return ""
