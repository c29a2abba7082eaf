"""What ranks find imported: multiprocessing's fork server imports this once, and each rank is a copy of the server.

torch, megatron-core, transformers and vLLM, adapted to a CPU, take an interpreter some
fifteen seconds. What they compute at their first use in a process, and then keep, is
computed here as well: without it, each rank of a short run would compute for as long as
it trains.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

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
    # What an engine imports when it starts.
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.transformers",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.pool.flash_maxsim",
)
CONFIGURATION = Path(__file__).parents[1] / "configs" / "gsm8k_smollm2" / "base.yaml"


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
    compute_what_is_kept()
    sys.stdout.flush()  # what is left in it would be written by every copy
    # Copies share these pages, and need not look through them for garbage.
    freeze_objects()
    gc.set_threshold(*usual)


def compute_what_is_kept() -> None:
    """Fill the caches of modules, of which none depends on a rank, a file or a setting."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from megaverl.config import load_config

    # Patterns of the names of weights.
    get_checkpoint_conversion_mapping("qwen3")
    # For each of vLLM's loggers it goes through all loggers.
    configure_logging_if_needed(LoggingConfig())
    # They read the list of packages, and the attributes of vLLM's modules.
    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    # Signatures in megaverl's sources, and pydantic's of its classes.
    load_config(CONFIGURATION, ["run.nproc=2"], check_paths=False)


end_with_parent(os.getppid())
# As the test of how such processes end sets it.
if "MEGAVERL_TEST_PRELOADS_NOTHING" not in os.environ:
    import_everything()
