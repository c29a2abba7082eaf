"""megaverl: reinforcement-learning post-training of language models on Megatron-core and vLLM.

Public names are imported when they are first used, so `import megaverl` itself loads
nothing.
"""

from megaverl.python_version import check_python

check_python()

from megaverl.lazy_names import lazy_getattr  # noqa: E402
from megaverl.version import __version__  # noqa: E402

# Type checkers assume True; importing typing's constant would load typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch
    from megaverl.dataflow import DataFlow, Operator
    from megaverl.rewards import register_reward
    from megaverl.trainer.api import DataParallelConfig
    from megaverl.trainer.api.settings import TrainerConfig

__all__ = [
    "DataFlow",
    "DataParallelConfig",
    "Operator",
    "RolloutBatch",
    "TrainerConfig",
    "__version__",
    "register_reward",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "DataFlow": "megaverl.dataflow",
        "DataParallelConfig": "megaverl.trainer.api",
        "Operator": "megaverl.dataflow",
        "RolloutBatch": "megaverl.data.batch",
        "TrainerConfig": "megaverl.trainer.api.settings",
        "register_reward": "megaverl.rewards",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
