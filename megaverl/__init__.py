"""megaverl: reinforcement-learning post-training of language models on Megatron-core and vLLM.

What a program imports from here is looked up when it is used: `import megaverl` itself loads nothing.
"""

from megaverl.version import __version__

TYPE_CHECKING = False  # typing's own would load typing
if TYPE_CHECKING:
    from megaverl.api.devices import DataParallelConfig
    from megaverl.api.settings import TrainerConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.dataflow import DataFlow, Operator
    from megaverl.rewards import register_reward

__all__ = [
    "DataFlow",
    "DataParallelConfig",
    "Operator",
    "RolloutBatch",
    "TrainerConfig",
    "__version__",
    "register_reward",
]

_DOORS = {
    "DataFlow": "megaverl.dataflow",
    "DataParallelConfig": "megaverl.api.devices",
    "Operator": "megaverl.dataflow",
    "RolloutBatch": "megaverl.data.batch",
    "TrainerConfig": "megaverl.api.settings",
    "register_reward": "megaverl.rewards",
}


def __getattr__(name: str) -> object:
    if name not in _DOORS:
        raise AttributeError(f"module 'megaverl' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    from importlib import import_module

    found: object = getattr(import_module(_DOORS[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
