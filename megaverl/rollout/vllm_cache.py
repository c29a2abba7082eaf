"""Size of the engine's KV cache: no larger than the responses of a step can use.

vLLM gives its cache all the memory that `gpu_memory_utilization` leaves. A small model
on a large GPU then has millions of blocks, and the reset of the prefix cache after each
weight update visits every one (0.32: v1/core/block_pool.py): calculated, about 0.65 s a
step on an H200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# The cache holds this many times the responses of a step at full length: cached
# prefixes, and validations with more responses than a step.
HEADROOM = 1.25
# EngineArgs that set the size of the cache, which is then left alone.
SIZES = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
GB = 1e9


@contextmanager
def cache_limited(
    num_sequences: int | None,
    arguments: Mapping[str, Any],
    announce: Callable[[str], None],
) -> Iterator[None]:
    """Limit the cache of an engine that is made inside, after vLLM has measured the memory that it may take.

    The limit is computed from vLLM's own cache layout of the model, so it holds for any
    kind of attention. Caches of several kinds of layers share blocks in groups, and
    stay as they are.

    Args:
        num_sequences: responses that are requested at once. None: not known, no limit.
        arguments: EngineArgs. A size among them is kept, whether it comes from the user or from a CPU's defaults.
        announce: called with a sentence if the cache is smaller than it could be.
    """
    if num_sequences is None or any(arguments.get(name) for name in SIZES):
        yield
        return
    from vllm.v1.core.kv_cache_utils import max_memory_usage_bytes
    from vllm.v1.executor.abstract import Executor

    # Called by vLLM between loading and allocating the cache.
    measure = Executor.determine_available_memory

    def measure_and_limit(self: Any) -> list[int]:
        measured: list[int] = measure(self)
        limits = []
        # One entry per worker. This process has one.
        for nbytes, layers in zip(measured, self.get_kv_cache_specs(), strict=True):
            one_kind = len({type(layer) for layer in layers.values()}) == 1
            full_length = (
                max_memory_usage_bytes(self.vllm_config, layers.values())
                if one_kind
                else 0
            )
            # Each layer keeps a block for itself.
            spare = sum(layer.page_size_bytes for layer in layers.values())
            usable = math.ceil(HEADROOM * num_sequences * full_length) + spare
            # Never more than vLLM has measured.
            limits.append(min(nbytes, usable) if one_kind else nbytes)
        if limits != measured:
            announce(
                f"vLLM's KV cache takes {limits[0] / GB:.2f} GB, enough for {num_sequences} responses of full length "
                f"and a quarter more; {measured[0] / GB:.2f} GB would be free. To set another size: "
                "rollout.vllm.kv_cache_memory_bytes"
            )
        return limits

    Executor.determine_available_memory = measure_and_limit
    try:
        yield
    finally:
        Executor.determine_available_memory = measure
