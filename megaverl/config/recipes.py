"""Where the recipes of `configs/` are: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

import re
from pathlib import Path

import megaverl
from megaverl.errors import ConfigError


def recipes_folder() -> Path:
    """The folder of all recipes."""
    package = Path(megaverl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe(name: str) -> Path:
    """The path of `configs/name.yaml`, such as `gsm8k_smollm2/ppo`.

    Raises:
        ConfigError: no such recipe.
    """
    path = recipes_folder() / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"there is no recipe {name}.yaml in {path.parent}.")
    return path


def all_recipes() -> list[Path]:
    """Every file that can be run as it stands: not what a family, or several, are laid over."""
    files = recipes_folder().rglob("*.yaml")
    return sorted(path for path in files if path.name != "base.yaml" and path.parent.name != "bases")


def similar_recipes(path: Path) -> list[str]:
    """Recipes in whose path every word of a file's name stands, those with the fewest other words; such as
    configs/gsm8k_smollm2/ppo.yaml for ppo_gsm8k_smollm2.yaml.
    """
    words = _words(path.stem)
    others = {each: _words(str(each.relative_to(recipes_folder()).with_suffix(""))) for each in all_recipes()}
    fitting = {each: len(other - words) for each, other in others.items() if words and words <= other}
    best = [each for each, extra in fitting.items() if extra == min(fitting.values())]
    return [str(each.relative_to(Path.cwd()) if each.is_relative_to(Path.cwd()) else each) for each in best[:3]]


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
