"""Fields of installed classes and signatures of registered functions, read from source without importing it.

Importing megatron-core, vLLM or torch takes seconds; a configuration is checked before that.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


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


ALGORITHMS = "megaverl.algorithms"


@dataclass(frozen=True)
class Registered:
    """A function's signature. inputs: those without a default. required: options without a default."""

    inputs: tuple[str, ...]
    optional_inputs: tuple[str, ...]
    options: dict[str, External]
    required: tuple[str, ...]


@cache
def registered(registry: str) -> dict[str, Registered]:
    """The functions under `@{registry}.register("name")`, by name.

    Args:
        registry: as the code names it: `advantage_estimators`, `policy_losses`, `aggregations`, `corrections`, ...
    """
    package = source_file(ALGORITHMS)
    assert package is not None, "megaverl is not installed as source"
    found: dict[str, Registered] = {}
    for path in sorted(package[0].parent.glob("*.py")):
        module = source_module(f"{ALGORITHMS}.{path.stem}")
        for function in _functions(module):
            for name in _names(function, registry):
                assert module is not None
                found[name] = _signature(function, module)
    return found


def of_the_users_own(path: str) -> Registered | None:
    """The signature of `module:function`; None where it cannot be told without importing it.

    Raises:
        LookupError: there is no such module, or nothing of that name in it.
    """
    module_name, _, function_name = path.partition(":")
    module = source_module(module_name)
    if module is None:
        raise LookupError(f"module '{module_name}' is not found in {Path.cwd()} or among what is installed")
    for function in _functions(module):
        if function.name == function_name:
            return _signature(function, module)
    names = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    imported = (node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom))
    names |= {alias.asname or alias.name for node in imported for alias in node.names}
    if function_name not in names and "*" not in names:
        raise LookupError(f"module '{module_name}' has no function '{function_name}'")
    return None


# Where a function of these registries is named in a configuration.
_PLACES = {
    "advantage_estimators": "algorithm.advantage",
    "policy_losses": "algorithm.policy_loss",
    "token_selectors": "algorithm.token_selector",
    "aggregations": "algorithm.loss_aggregation",
    "value_losses": "algorithm.value_loss",
    "corrections": "algorithm.correction.kind",
    "kl_estimators": "algorithm.kl.kind",
    "divergences": "algorithm.distillation.divergence",
    "preference_losses": "preference.loss",
    "reward_model_losses": "reward_model.loss",
}
_COMMANDS = {"preference.loss": " of `megaverl dpo`", "reward_model.loss": " of `megaverl reward`"}


def place_of(name: str) -> str:
    """Of a function that was taken for a whole algorithm, a sentence on where it is named; "" where there is none."""
    for registry, key in _PLACES.items():
        if name in registered(registry):
            return f" It is a part: {key}: {name}{_COMMANDS.get(key, '')}."
    return ""


def estimator_inputs(name: str) -> tuple[str, ...]:
    """The inputs of an advantage estimator, registered or `module:function`; none where that cannot be told."""
    try:
        signature = of_the_users_own(name) if ":" in name else registered("advantage_estimators").get(name)
    except LookupError:
        return ()
    return signature.inputs if signature is not None else ()


def _functions(module: SourceModule | None) -> Iterator[ast.FunctionDef]:
    if module is not None:
        yield from (node for node in module.tree.body if isinstance(node, ast.FunctionDef))


def _names(function: ast.FunctionDef, registry: str) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"{registry}.register":
            argument = decorator.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def _signature(function: ast.FunctionDef, module: SourceModule) -> Registered:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = len(positional) - len(arguments.defaults)
    options = {
        argument.arg: External(argument.arg, argument.annotation, default, "", module)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    required = tuple(name for name, option in options.items() if option.default is None)
    return Registered(tuple(positional[:needed]), tuple(positional[needed:]), options, required)


def loss_inputs(registry: str, name: str) -> tuple[str, ...]:
    """The inputs of a loss, registered or `module:function`; none where that cannot be told."""
    try:
        signature = of_the_users_own(name) if ":" in name else registered(registry).get(name)
    except LookupError:
        return ()
    return signature.inputs + signature.optional_inputs if signature is not None else ()
