"""A tiny model made on the spot, an engine for it, one token out of it."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaverl.config.roles import RolloutConfig
from megaverl.monitoring.doctor.trials import answer, scratch
from megaverl.platform import platform

# heads of 64 dimensions, which every attention kernel has
MODEL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


def main() -> None:
    platform.start()
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    answer(generate_one("vllm" if importlib.util.find_spec("vllm") is not None else "hf"))
    dist.destroy_process_group()


def generate_one(engine_name: str) -> str:
    """Make the model and the engine, draw a token, and say how long each took. A process group must be there."""
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.rollout import make_engine
    from megaverl.rollout.engine import SamplingOptions

    begin = time.perf_counter()
    limits = {"gpu_memory_utilization": 0.2} if platform.is_cuda else {}
    options = {"engine": engine_name, "vllm": {"enforce_eager": True, **limits}}
    with scratch() as folder:
        make_tiny_folder(Path(folder), "Qwen2ForCausalLM", **MODEL)
        engine = make_engine(
            RolloutConfig.model_validate(options), folder, seed=0, dtype=platform.default_dtype, max_model_len=16
        )
        ready = time.perf_counter()
        generation = engine.generate([[1, 2, 3]], SamplingOptions(1, temperature=0.0), [0])[0]
    done = time.perf_counter()
    engine.close()
    return (
        f"token {generation.token_ids[0]} from {engine_name} on {platform.device.type}: "
        f"engine ready after {ready - begin:.1f} s, token after {done - ready:.1f} s more"
    )


if __name__ == "__main__":
    main()
