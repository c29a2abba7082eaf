"""megaverl: reinforcement-learning post-training of language models on Megatron-core and vLLM.

Public names are imported when they are first used, so `import megaverl` itself loads nothing.
"""

import sys

# A checkout has no installer that checks python_requires.
if sys.version_info < (3, 11):  # noqa: UP036
    _major, _minor = sys.version_info[:2]
    _problem = f"megaverl needs Python 3.11 or 3.12; this is Python {_major}.{_minor} ({sys.executable})."
    # In a command, show the sentence without a traceback.
    if sys.argv[:1] == ["-m"]:
        raise SystemExit(_problem)
    raise ImportError(_problem)

from megaverl.version import __version__

TYPE_CHECKING = False  # type checkers assume True; importing typing's constant would load typing
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

_PUBLIC = {
    "DataFlow": "megaverl.dataflow",
    "DataParallelConfig": "megaverl.trainer.api",
    "Operator": "megaverl.dataflow",
    "RolloutBatch": "megaverl.data.batch",
    "TrainerConfig": "megaverl.trainer.api.settings",
    "register_reward": "megaverl.rewards",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'megaverl' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    from importlib import import_module

    value: object = getattr(import_module(_PUBLIC[name]), name)
    return value


class _Renamed:
    """Import hook that names the new module to programs that import a module by its old name."""

    moved = {
        "megaverl.api": "megaverl.trainer.api",
        "megaverl.capacity": "megaverl.planner",
        "megaverl.cli.agent": "megaverl.trainer.elastic_agent",
        "megaverl.cli.launch": "megaverl.trainer.elastic_agent",
        "megaverl.contracts": "megaverl.trainer.contracts",
        "megaverl.convert": "megaverl.checkpoint.convert",
        "megaverl.doctor": "megaverl.monitoring.doctor",
        "megaverl.environments": "megaverl.rollout.environments",
        "megaverl.fabric": "megaverl.distributed, and what moves batches megaverl.dataflow",
        "megaverl.layout": "megaverl.sharding, and its module weights megaverl.sharding.weight",
        "megaverl.metrics": "megaverl.monitoring",
        "megaverl.models.classifier": "megaverl.models.folder",
        "megaverl.models.spec": "megaverl.sharding.model_spec",
        "megaverl.models.supported": "megaverl.models.folder",
        "megaverl.monitoring.watch": "megaverl.monitoring.report",
        "megaverl.parallel": "megaverl.distributed",
        "megaverl.placement": "megaverl.distributed.placement",
        "megaverl.planner.activations": "megaverl.planner.stages",
        "megaverl.planner.replan": "megaverl.trainer.replanning",
        "megaverl.report": "megaverl.monitoring.report",
        "megaverl.reshard": "megaverl.weights, and its plans megaverl.sharding",
        "megaverl.roles": "megaverl.workers",
        "megaverl.rollout.environments.registry": "megaverl.rollout.environments.environment",
        "megaverl.trainer.mix": "megaverl.trainer.roles",
        "megaverl.trainer.stored_rollouts": "megaverl.trainer.schedule",
        "megaverl.workers.fsdp_trainable": "megaverl.workers.optimizers",
        "megaverl.workers.megatron_trainable": "megaverl.workers.optimizers",
    }

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name in cls.moved:
            raise ModuleNotFoundError(f"{name} is now {cls.moved[name]}", name=name)


# First in the list, since an old folder that holds nothing but __pycache__ would be found as a namespace package.
sys.meta_path.insert(0, _Renamed)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
