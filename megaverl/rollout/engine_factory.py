"""Construction of the engine that `rollout` names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaverl.errors import RolloutError
from megaverl.rollout.engine import Engine, InFlight, OnLoad
from megaverl.rollout.engine_options import EngineOptions

if TYPE_CHECKING:
    from megaverl.config.roles import RolloutConfig
    from megaverl.config.run import ImagesConfig


def make_engine(
    config: RolloutConfig,
    model_folder: str | Path,
    options: EngineOptions,
    *,
    on_load: OnLoad | None = None,
    images: ImagesConfig | None = None,
    tokenizer: str | None = None,
    reference_folder: str | Path | None = None,
) -> Engine:
    """Make this rank's part of the engine that `config.engine` names. Collective over all ranks of the rollout.

    Args:
        config: `rollout`.
        model_folder: a Hugging Face folder.
        on_load: called with the engine's parameters and its `Engine.layouts` before graphs are captured. After that,
            parameters can no longer move to an actor's storage.
        images: `data.images` for a model that takes images; None for other models.
        tokenizer: the run's tokenizer, if it is not the model folder's.
        reference_folder: a second, frozen model for `SamplingOptions.reference_share`; hf only.

    Raises:
        RolloutError: the engine cannot work with this number of ranks, this model or this machine.
    """
    engine: Engine
    if config.engine == "hf":
        from megaverl.rollout.hf_engine import HFEngine

        if images is not None:
            raise RolloutError(
                f"rollout.engine=hf supports only text, and {model_folder} takes images. Use vllm."
            )

        # The hf engine draws with the samples' seeds alone, and always reads its
        # weights from the folder.
        engine = HFEngine(
            model_folder,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            stop_token_ids=options.stop_token_ids,
            trust_remote_code=options.trust_remote_code,
            fp32_lm_head=options.fp32_lm_head,
            reference_folder=reference_folder,
        )
    # `module:function`, a user's own engine.
    elif ":" in config.engine:
        from megaverl.plugins import calling, load_function

        make_own = load_function(config.engine, "rollout.engine")
        with calling(config.engine, "rollout.engine"):
            engine = make_own(
                model_folder,
                config,
                seed=options.seed,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                stop_token_ids=options.stop_token_ids,
                load_weights=options.load_weights,
            )
    else:
        from megaverl.rollout.vllm_engine import VLLMEngine
        from megaverl.rollout.vllm_images import image_arguments
        from megaverl.rollout.vllm_options import VLLMOptions

        of_images = None
        if images is not None:
            of_images = image_arguments(images, tokenizer or str(model_folder))
        of_vllm = VLLMOptions(**vars(options), images=of_images)
        engine = VLLMEngine(model_folder, config, of_vllm, on_load=on_load)
    # Any engine may decode fewer sequences than it is asked for.
    if config.use_dynamic_batching:
        budget = (
            None if config.memory_budget_mb is None else config.memory_budget_mb * 2**20
        )
        # vLLM knows the free blocks of its own cache; other engines measure the free
        # memory.
        measures = budget is None and config.engine != "vllm"
        engine.in_flight = InFlight(
            config.min_sequences, config.max_sequences, budget, measures
        )
    return engine
