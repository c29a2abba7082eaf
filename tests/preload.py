"""What ranks find imported: multiprocessing's fork server imports this once, and each rank is a copy of the server.

torch, megatron-core, transformers and vLLM, adapted to a CPU, take an interpreter some
fifteen seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

from megaverl.processes import end_with_parent, freeze_objects

MODULES = (
    "megaverl.cli.train",
    "megaverl.trainer.run",
    "megaverl.trainer.loop",
    "megaverl.rollout.hf_engine",
    "megaverl.rollout.vllm_engine",
    "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.checkpoint",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)


def import_everything() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU's driver does not outlive a copy
    from megaverl.platform import platform
    from megaverl.rollout.vllm_engine import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    usual = gc.get_threshold()
    gc.set_threshold(100_000)
    platform.adapt_megatron()
    platform.adapt_vllm()
    for name in MODULES:
        importlib.import_module(name)
    sys.stdout.flush()  # what is left in it would be written by every copy
    # Copies share these pages, and need not look through them for garbage.
    freeze_objects()
    gc.set_threshold(*usual)


end_with_parent(os.getppid())
# As the test of how such processes end sets it.
if "MEGAVERL_TEST_PRELOADS_NOTHING" not in os.environ:
    import_everything()
