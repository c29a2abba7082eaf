"""Training. The public names of `megaverl.trainer.api` are imported on first access."""

from typing import TYPE_CHECKING

from megaverl.lazy_names import lazy_getattr

if TYPE_CHECKING:
    from megaverl.trainer.api.trainers import (
        PPOTrainer,
        RLTrainer,
        RoleBasedDistributedStrategy,
        init_distributed,
    )

__all__ = [
    "PPOTrainer",
    "RLTrainer",
    "RoleBasedDistributedStrategy",
    "init_distributed",
]

__getattr__ = lazy_getattr(
    __name__, dict.fromkeys(__all__, "megaverl.trainer.api.trainers")
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
