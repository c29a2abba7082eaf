"""Generation engines: token ids in, token ids and log-probabilities out."""

from megaverl.rollout.engine import Engine, Generation, SamplingOptions
from megaverl.rollout.make import make_engine
from megaverl.rollout.replicas import sample_seed, split_prompts, turn_seed

__all__ = [
    "Engine",
    "Generation",
    "SamplingOptions",
    "make_engine",
    "sample_seed",
    "split_prompts",
    "turn_seed",
]
