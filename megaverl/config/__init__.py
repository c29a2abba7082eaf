"""Typed configuration of a run, loaded from YAML and `key=value` overrides, with all mistakes reported at once."""

from megaverl.config.algorithm import AlgorithmConfig, KLConfig
from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.grids import smallest_world
from megaverl.config.loader import load_config
from megaverl.config.roles import (
    ActorConfig,
    CriticConfig,
    GridConfig,
    ReferenceConfig,
    ReshardConfig,
    RolloutConfig,
    TrainedConfig,
)
from megaverl.config.run import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    SFTConfig,
)
from megaverl.config.schema import Config

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "GridConfig",
    "InvalidConfig",
    "KLConfig",
    "ConfigIssue",
    "ModelConfig",
    "ReferenceConfig",
    "ReshardConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "TrainedConfig",
    "LoopConfig",
    "load_config",
    "smallest_world",
]
