"""Training. What a Python program imports from here are the doors of `megaverl.api`, looked up when they are used."""

from typing import Any

__all__ = ["PPOTrainer", "RLTrainer", "RoleBasedDistributedStrategy", "init_distributed"]

_DOORS = {
    "PPOTrainer": "megaverl.api.trainers",
    "RLTrainer": "megaverl.api.trainers",
    "RoleBasedDistributedStrategy": "megaverl.api.strategy",
    "init_distributed": "megaverl.api.world",
}


def __getattr__(name: str) -> Any:
    if name not in _DOORS:
        raise AttributeError(f"module 'megaverl.trainer' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_DOORS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
