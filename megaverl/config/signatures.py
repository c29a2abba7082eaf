"""Read fields of installed classes and signatures of registered functions from their source, without importing them.

A configuration is checked before megatron-core, vLLM or torch are imported: the imports
take half a minute and fail on a machine without a GPU's libraries. The annotations
found become types that pydantic checks values against.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from megaverl.plugins import search_working_folder
from megaverl.user_code import describe

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
# Name in an annotation -> type that a value from YAML must have. A function is written
# module:function.
_TYPES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, float, int, str)},
    **dict.fromkeys(
        ("List", "list", "Sequence", "Iterable", "Set", "set", "frozenset"), list
    ),
    **dict.fromkeys(("Dict", "dict", "Mapping"), dict),
    **dict.fromkeys(("Tuple", "tuple"), tuple),
    "Callable": Annotated[str, Field(pattern=":")],
    "torch.dtype": Annotated[str, Field(pattern=rf"^(torch\.)?({'|'.join(DTYPES)})$")],
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
}
ALGORITHMS = "megaverl.algorithms"
# Registry -> key that names one of its functions.
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
# Keys that only one command reads -> that command, for a message.
_COMMANDS = {
    "preference.loss": " of `megaverl dpo`",
    "reward_model.loss": " of `megaverl reward`",
}


@dataclass(frozen=True)
class SourceModule:
    """Parsed Python module.

    Attributes:
        name: dotted name, or the path of a user's .py file.
        tree: syntax tree.
        is_package: whether the module is a package's `__init__`, which decides what relative imports mean.
    """

    name: str
    tree: ast.Module
    is_package: bool

    def resolve(
        self, name: str, depth: int = 4
    ) -> tuple[ast.expr | ast.ClassDef, SourceModule] | None:
        """Return the class or the value that `name` is at module level, with the module that defines it.

        Follows `from module import name` through at most `depth` modules. Returns None
        if the definition is unclear.
        """
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node, self
            if isinstance(node, ast.Assign):
                names = {
                    target.id for target in node.targets if isinstance(target, ast.Name)
                }
                if name in names:
                    return node.value, self
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == name
            ):
                return (node.value, self) if node.value is not None else None
        package = self.name if self.is_package else self.name.rpartition(".")[0]
        for imported in (
            node for node in self.tree.body if isinstance(node, ast.ImportFrom)
        ):
            for alias in imported.names:
                if (alias.asname or alias.name) == name and depth:
                    dotted = "." * imported.level + (imported.module or "")
                    try:
                        module = source_module(
                            importlib.util.resolve_name(dotted, package)
                        )
                    # A relative import in a file that belongs to no package.
                    except ImportError:
                        return None
                    return module.resolve(alias.name, depth - 1) if module else None
        return None

    def class_named(self, name: str) -> tuple[ast.ClassDef, SourceModule] | None:
        """Return the class `name` and the module that defines it, or None."""
        resolved = self.resolve(name)
        return (
            (resolved[0], resolved[1])
            if resolved and isinstance(resolved[0], ast.ClassDef)
            else None
        )

    @property
    def functions(self) -> Iterator[ast.FunctionDef]:
        """Functions at module level."""
        yield from (
            node for node in self.tree.body if isinstance(node, ast.FunctionDef)
        )


@dataclass(frozen=True)
class External:
    """Field or constructor argument of another library's class, or an option of a function."""

    name: str
    annotation: ast.expr | None
    default: ast.expr | None
    description: str
    module: SourceModule

    @property
    def type_text(self) -> str:
        """Annotation as written in the source; "Any" if there is none."""
        return ast.unparse(self.annotation) if self.annotation is not None else "Any"

    @cached_property
    def type(self) -> Any:
        """Annotation as a type for values from YAML. Parts that cannot be resolved are Any."""
        try:
            kind = _type(self.annotation, self.module)
        except (TypeError, ValueError, SyntaxError, RecursionError):
            return Any
        # `x: int = None` is common, and means an optional int.
        is_none = isinstance(self.default, ast.Constant) and self.default.value is None
        return kind | None if is_none and kind is not None else kind

    def accepts(self, value: Any) -> bool:
        """Return whether a value from YAML fits the annotation."""
        adapter = TypeAdapter(self.type, config=ConfigDict(strict=True))
        # Validate as JSON, where a list stands for a tuple and keys of mappings are
        # text, as in YAML.
        try:
            adapter.validate_json(to_json(value, inf_nan_mode="constants"))
        except (ValidationError, PydanticSerializationError):
            return False
        return True

    @property
    def choices(self) -> list[Any]:
        """Values allowed by a Literal or Enum annotation; empty for other annotations."""
        return _choices(self.type)


def _type(node: ast.AST | None, module: SourceModule) -> Any:
    """Return the type for an annotation's syntax tree; Any if it cannot be resolved."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _type(ast.parse(text, mode="eval").body, module)
        case ast.Constant(value=value) if value is ...:
            return value
        case ast.BinOp(left=left, right=right):
            return _TYPES["Union"][_type(left, module), _type(right, module)]
        case ast.Subscript(value=outer, slice=inner):
            return _generic(ast.unparse(outer).rpartition(".")[2], inner, module)
        case ast.Name() | ast.Attribute():
            return _named(ast.unparse(node), module)
    return Any


def _generic(name: str, inner: ast.expr, module: SourceModule) -> Any:
    """Return the type for a subscripted annotation such as `list[int]`; `name` is the part before the brackets."""
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        # Literal members may be names of enum members, which become texts.
        one_by_one = [
            Literal[part.value]
            if isinstance(part, ast.Constant)
            else _type(part, module)
            for part in parts
        ]
        return _TYPES["Union"][tuple(one_by_one)]
    if name == "Annotated":
        return _type(parts[0], module)
    if name == "Callable" or name not in _TYPES:
        return _TYPES.get(name, Any)
    arguments = tuple(_type(part, module) for part in parts)
    return _TYPES[name][arguments if len(arguments) > 1 else arguments[0]]


def _named(name: str, module: SourceModule) -> Any:
    """Return the type for an annotation that is a plain name: a built-in type, an alias, or an Enum."""
    name = name if name in _TYPES else name.rpartition(".")[2]
    if name in _TYPES:
        return _TYPES[name]
    node, where = module.resolve(name) or (None, module)
    if not isinstance(node, ast.ClassDef):
        return _type(node, where)
    members = _members(node)
    return _TYPES["Literal"][tuple(members)] if members else Any


def _members(node: ast.ClassDef) -> list[str]:
    """Return the names of an Enum's members; empty for any other class."""
    # `class Kind(str, Enum)` and `class Kind(metaclass=EnumMeta)`
    bases = [*node.bases, *(keyword.value for keyword in node.keywords)]
    if not any("Enum" in ast.unparse(base) for base in bases):
        return []
    assignments = [
        statement for statement in node.body if isinstance(statement, ast.Assign)
    ]
    targets = [target for assignment in assignments for target in assignment.targets]
    return [
        target.id
        for target in targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    ]


def _choices(kind: Any) -> list[Any]:
    """Return the values of all Literals in a type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return [choice for part in parts for choice in _choices(part)]


@cache
def source_file(module: str) -> tuple[Path, bool] | None:
    """Return the file of a module and whether it is a package, or None if there is no Python source.

    Parent packages are located without executing them, unlike with `find_spec` of a
    dotted name.
    """
    # A file of the user, not a module on the path.
    if module.endswith(".py"):
        return (Path(module), False) if Path(module).is_file() else None
    top, *rest = module.split(".")
    search_working_folder()
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for part in rest:
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, folders) if folders else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin), bool(spec.submodule_search_locations)


@cache
def source_module(module: str) -> SourceModule | None:
    """Return the parsed module, or None if it is not installed as Python source."""
    file = source_file(module)
    if file is None:
        return None
    path, is_package = file
    return SourceModule(module, ast.parse(path.read_text(encoding="utf-8")), is_package)


@cache
def class_fields(module: str, name: str) -> dict[str, External] | None:
    """Return the annotated fields of a class and its bases by name; without any, the arguments of its `__init__`.

    Returns None if the module is not installed.
    """
    source = source_module(module)
    located = source.class_named(name) if source else None
    if located is None:
        return None
    node, source = located
    fields: dict[str, External] = {}
    for base in reversed(node.bases):
        inherited = source.class_named(base.id) if isinstance(base, ast.Name) else None
        if inherited:
            fields |= class_fields(inherited[1].name, inherited[0].name) or {}
    body = node.body
    # A field's documentation is the string statement right after it.
    for statement, following in zip(body, [*body[1:], None], strict=True):
        match statement:
            case ast.AnnAssign(target=ast.Name(id=key)) if (
                "ClassVar" not in ast.unparse(statement.annotation)
            ):
                fields[key] = External(
                    key,
                    statement.annotation,
                    _default(statement.value),
                    _docline(following),
                    source,
                )
    constructors = (
        statement
        for statement in body
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
    )
    return fields or {
        key: argument
        for constructor in constructors
        for key, argument in _arguments(constructor, source).items()
    }


def _arguments(function: ast.FunctionDef, module: SourceModule) -> dict[str, External]:
    """Return the arguments of a method by name, without `self`."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = (
        [None] * (len(positional) - len(arguments.defaults))
        + arguments.defaults
        + arguments.kw_defaults
    )
    pairs = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return {
        argument.arg: External(argument.arg, argument.annotation, default, "", module)
        for argument, default in [*pairs][1:]
    }


def installed_version(*distributions: str) -> str:
    """Return "name version" for the first of the distributions that is installed, or the first name alone."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0]


def _default(value: ast.expr | None) -> ast.expr | None:
    """Return the default of a field, also from `field(default=...)`. A default factory counts as unknown."""
    if (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).rpartition(".")[2] == "field"
    ):
        return next(
            (keyword.value for keyword in value.keywords if keyword.arg == "default"),
            None,
        )
    return value


def _docline(following: ast.stmt | None) -> str:
    """Return the documentation string after a field, or ""."""
    match following:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text.strip()
    return ""


@dataclass(frozen=True)
class Registered:
    """Signature of a registered function. Positional parameters are inputs, keyword-only parameters are options.

    Attributes:
        inputs: inputs without a default.
        optional_inputs: inputs with a default.
        options: all options, by name.
        required: options without a default.
    """

    inputs: tuple[str, ...] = ()
    optional_inputs: tuple[str, ...] = ()
    options: dict[str, External] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """All inputs, those with a default included."""
        return self.inputs + self.optional_inputs


@cache
def registered(registry: str) -> dict[str, Registered]:
    """Return the functions registered under `@{registry}.register("name")` in `megaverl.algorithms`, by name.

    Args:
        registry: name of the registry's variable: `advantage_estimators`, `policy_losses`, `aggregations`, ...
    """
    package = source_file(ALGORITHMS)
    assert package is not None, "megaverl is not installed as source"
    modules = [
        source_module(f"{ALGORITHMS}.{path.stem}")
        for path in sorted(package[0].parent.glob("*.py"))
    ]
    return {
        name: _signature(function, module)
        for module in modules
        if module is not None
        for function in module.functions
        for name in _names(function, registry)
    }


def user_function_signature(path: str) -> Registered | None:
    """Return the signature of a user's function written module:function, or None if only an import could show it.

    Raises:
        LookupError: the module does not exist or cannot be read, or has nothing of that name.
    """
    module_name, _, function_name = path.rpartition(":")
    try:
        module = source_module(module_name)
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise LookupError(
            f"module '{module_name}' cannot be read: {describe(error)}"
        ) from error
    if module is None:
        raise LookupError(
            f"module '{module_name}' is not found in {Path.cwd()} or among what is installed"
        )
    for function in module.functions:
        if function.name == function_name:
            return _signature(function, module)
    # A name that is assigned or imported may still be a function. Only a name that does
    # not occur at all is an error.
    names = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    imported = (
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    names |= {alias.asname or alias.name for node in imported for alias in node.names}
    if function_name not in names and "*" not in names:
        raise LookupError(f"module '{module_name}' has no function '{function_name}'")
    return None


def signature_of(registry: str, name: str) -> Registered:
    """Return the signature of a function, registered or written module:function.

    Unknown functions have an empty one.
    """
    try:
        signature = (
            user_function_signature(name)
            if ":" in name
            else registered(registry).get(name)
        )
    except LookupError:
        signature = None
    return signature or Registered()


def place_of(name: str) -> str:
    """Return a sentence with the key that names `name`, for a function mistaken for a whole algorithm, else ""."""
    for registry, key in _PLACES.items():
        if name in registered(registry):
            return f" It is a part: {key}: {name}{_COMMANDS.get(key, '')}."
    return ""


def _names(function: ast.FunctionDef, registry: str) -> Iterator[str]:
    """Yield the names under which a function's decorators register it in `registry`."""
    for decorator in function.decorator_list:
        match decorator:
            case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(called) == f"{registry}.register":
                    yield name


def _signature(function: ast.FunctionDef, module: SourceModule) -> Registered:
    """Return a function's inputs and options."""
    arguments = function.args
    positional = [
        argument.arg for argument in (*arguments.posonlyargs, *arguments.args)
    ]
    needed = len(positional) - len(arguments.defaults)
    options = {
        argument.arg: External(argument.arg, argument.annotation, default, "", module)
        for argument, default in zip(
            arguments.kwonlyargs, arguments.kw_defaults, strict=True
        )
    }
    required = tuple(name for name, option in options.items() if option.default is None)
    return Registered(
        tuple(positional[:needed]), tuple(positional[needed:]), options, required
    )
