"""Values from YAML into what another library's class takes: dtypes, enum members, functions, dataclasses.

Called by the packages that build these objects, on classes that are already imported; nothing is imported here
but the functions that a configuration names.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from megaverl.errors import ConfigError

_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def coerce(cls: type, values: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """`values` as keyword arguments of `cls`.

    Text becomes a torch dtype, an enum member or a function (`module:function`) where the annotation of that
    name asks for one; a mapping becomes the dataclass that it asks for. All else is passed on as it is.

    Args:
        key: where the mapping stands in the configuration ("actor.megatron"), for messages.

    Raises:
        ConfigError: a function that cannot be imported.
    """
    hints = _hints(cls)
    return {name: _coerce(value, hints.get(name), f"{key}.{name}".strip(".")) for name, value in values.items()}


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except (NameError, TypeError):  # annotations that exist for type checkers only
        return dict(getattr(cls, "__annotations__", {}))


def _coerce(value: Any, hint: Any, key: str) -> Any:
    options = (hint, *get_args(hint))
    if isinstance(value, str):
        torch = sys.modules.get("torch")
        if torch is not None and torch.dtype in options:
            name = value.removeprefix("torch.")
            return getattr(torch, _SHORT_DTYPES.get(name, name))
        for option in options:
            if isinstance(option, type) and issubclass(option, enum.Enum) and value in option.__members__:
                return option[value]
        if ":" in value and any("Callable" in str(option) for option in options):
            return _function(value, key)
    if isinstance(value, dict):
        for option in options:
            if isinstance(option, type) and dataclasses.is_dataclass(option):
                return option(**coerce(option, value, key))
    return value


def _function(path: str, key: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: found '{path}', which cannot be imported: {error}.") from error
