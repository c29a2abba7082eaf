"""Training. The public names of `megaverl.trainer.api` are looked up here when a program asks for them."""

from typing import Any

__all__ = ["PPOTrainer", "RLTrainer", "RoleBasedDistributedStrategy", "init_distributed"]

_PUBLIC = {
    "PPOTrainer": "megaverl.trainer.api.trainers",
    "RLTrainer": "megaverl.trainer.api.trainers",
    "RoleBasedDistributedStrategy": "megaverl.trainer.api.strategy",
    "init_distributed": "megaverl.trainer.api.world",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megaverl.trainer' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
