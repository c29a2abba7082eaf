"""Generation engines: token ids in, token ids and log-probs out.

`engine_factory` makes the engine that `rollout` names; `sample_seeds` splits prompts
between its replicas and derives a seed for each sample.
"""

from megaverl.rollout.engine import Engine, Generation, SamplingOptions
from megaverl.rollout.engine_factory import make_engine
from megaverl.rollout.engine_options import EngineOptions
from megaverl.rollout.sample_seeds import sample_seed, split_prompts, turn_seed

__all__ = [
    "Engine",
    "EngineOptions",
    "Generation",
    "SamplingOptions",
    "make_engine",
    "sample_seed",
    "split_prompts",
    "turn_seed",
]
