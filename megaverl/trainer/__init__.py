"""Training. The public names of `megaverl.trainer.api` are imported on first access."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaverl.trainer.api.trainers import PPOTrainer, RLTrainer, RoleBasedDistributedStrategy, init_distributed

__all__ = ["PPOTrainer", "RLTrainer", "RoleBasedDistributedStrategy", "init_distributed"]

_PUBLIC = {
    "PPOTrainer": "megaverl.trainer.api.trainers",
    "RLTrainer": "megaverl.trainer.api.trainers",
    "RoleBasedDistributedStrategy": "megaverl.trainer.api.trainers",
    "init_distributed": "megaverl.trainer.api.trainers",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megaverl.trainer' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    public: object = getattr(import_module(_PUBLIC[name]), name)
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
