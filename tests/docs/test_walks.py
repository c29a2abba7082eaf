"""The walks of a weight and of a batch in docs/architecture.md: short, connected, and
true of the code as it is; and the places that CONTRIBUTING.md names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megaverl"
MAX_MODULES = 15
ARROW = re.compile(r"^- `([\w/.]+):([\w.]+)` → `([\w/.]+):([\w.]+)`", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Arrow(NamedTuple):
    """One step of a walk: the code of `caller` in `source` refers to `callee`, which stands in `target`."""

    source: str
    caller: str
    target: str
    callee: str


def walk(heading: str) -> list[Arrow]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [Arrow(*found.groups()) for found in ARROW.finditer(section)]


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def definition(file: str, name: str) -> Function | ast.ClassDef | None:
    """The function, method ("Class.method") or class of that name at the top of a module."""
    nodes: list[ast.stmt] = tree(file).body
    found: Function | ast.ClassDef | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next(
            (node for node in nodes if isinstance(node, kinds) and node.name == part),
            None,
        )
        nodes = found.body if found is not None else []
    return found


def names_in(node: ast.AST) -> set[str]:
    return {
        child.id if isinstance(child, ast.Name) else child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Name | ast.Attribute)
    }


def registries(file: str, name: str) -> set[str]:
    """The registries that a function is entered in, by which it is called: `@policy_losses.register("ppo_clip")`."""
    found = definition(file, name)
    decorators = found.decorator_list if found is not None else []
    return {
        node.func.value.id
        for node in decorators
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
    }


def reached(file: str, name: str) -> set[str]:
    """Names that the code of a function refers to, with the code of what it refers to in its own module."""
    own = {
        node.name: node
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    start = definition(file, name)
    assert start is not None
    names, todo, seen = set[str](), [start], set[str]()
    while todo:
        found = names_in(todo.pop())
        names |= found
        todo += [own[other] for other in found & own.keys() - seen]
        seen |= found
    return names


def imported(file: str) -> Iterator[str]:
    """Every dotted name that a module imports anywhere, for types too."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(file: str) -> str:
    return ".".join(("megaverl", *Path(file).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def imports(source: str, target: str) -> bool:
    """Whether a module imports another, or takes a name of it from the package that it is in."""
    homes = (dotted(target), dotted(target).rpartition(".")[0])
    return any(
        name in homes[:1] or name.rpartition(".")[0] in homes
        for name in imported(source)
    )


def is_called_through_a_protocol(arrow: Arrow) -> bool:
    """Whether a Protocol that the caller's module has or imports has that method, with the same parameters."""
    method = arrow.callee.split(".")[-1]
    modules = {name.rpartition(".")[0] for name in imported(arrow.source)} | {
        dotted(arrow.source)
    }
    files = [
        "/".join(name.split(".")[1:]) + ".py"
        for name in modules
        if name.startswith("megaverl.")
    ]
    protocols = [
        (file, node.name)
        for file in files
        if (PACKAGE / file).is_file()
        for node in tree(file).body
        if isinstance(node, ast.ClassDef)
        and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]
    wanted = parameters(definition(arrow.target, arrow.callee))
    return wanted is not None and any(
        parameters(definition(file, f"{name}.{method}")) == wanted
        for file, name in protocols
    )


def parameters(found: Function | ast.ClassDef | None) -> list[str] | None:
    if not isinstance(found, Function):
        return None
    return [
        argument.arg
        for argument in (
            *found.args.posonlyargs,
            *found.args.args,
            *found.args.kwonlyargs,
        )
    ]


WALKS = (
    "A weight, from a file to Megatron to vLLM",
    "A batch, through one step of GRPO",
)


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_crosses_at_most_fifteen_modules_and_hangs_together(
    heading: str,
) -> None:
    arrows = walk(heading)
    assert len(arrows) >= 8, "the list is there"
    modules = {file for arrow in arrows for file in (arrow.source, arrow.target)}
    assert len(modules) <= MAX_MODULES, sorted(modules)
    known = {arrows[0].source}
    for arrow in arrows:
        assert arrow.source in known, f"nothing before leads to {arrow.source}"
        known.add(arrow.target)


@pytest.mark.parametrize(
    "arrow",
    [arrow for heading in WALKS for arrow in walk(heading)],
    ids=lambda a: f"{a[1]}-{a[3]}",
)
def test_an_arrow_is_a_call_and_an_import(arrow: Arrow) -> None:
    for file, name in ((arrow.source, arrow.caller), (arrow.target, arrow.callee)):
        assert definition(file, name) is not None, f"{file} has no {name}"
    names = reached(arrow.source, arrow.caller)
    interface = is_called_through_a_protocol(arrow)
    called = {
        arrow.callee.split(".")[-1],
        *registries(arrow.target, arrow.callee),
    } & names
    assert called or (interface and arrow.callee.endswith(".__call__")), (
        "the caller does not call it"
    )
    assert imports(arrow.source, arrow.target) or interface, (
        f"{arrow.source} does not import {arrow.target}"
    )


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_places_that_are_named_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    packages = "|".join(
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()
    )
    named = re.findall(rf"`((?:{packages})/[\w/]*(?:\.py)?)(?::([\w.]+))?`", text)
    assert len(named) >= 10
    for file, name in named:
        assert (PACKAGE / file).exists(), file
        assert not name or definition(file, name) is not None, f"{file}:{name}"
