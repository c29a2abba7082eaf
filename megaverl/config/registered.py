"""What `megaverl.algorithms` registers, read from its source: a configuration is checked without importing torch.

A registered function's positional parameters are its inputs, those after the `*` its options (see
`megaverl.algorithms.registry`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megaverl.config.installed import External, SourceModule, source_file, source_module

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
