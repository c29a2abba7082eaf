"""Where the recipes of `configs/` are: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import megaverl
from megaverl.errors import ConfigError


def recipe(name: str) -> Path:
    """The path of `configs/name.yaml`.

    Raises:
        ConfigError: no such recipe.
    """
    package = Path(megaverl.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(f"there is no recipe {name}.yaml in {package.parent / 'configs'}.")
