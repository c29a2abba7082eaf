"""Construction of the engine that `rollout` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megaverl.errors import RolloutError
from megaverl.rollout.engine import Engine, InFlight, OnLoad

if TYPE_CHECKING:
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.config.run import ImagesConfig


def make_engine(
    config: RolloutConfig,
    model_folder: str | Path,
    *,
    seed: int,
    dtype: torch.dtype,
    max_model_len: int,
    stop_token_ids: Sequence[int] = (),
    load_weights: bool = True,
    trust_remote_code: bool = False,
    num_sequences: int | None = None,
    on_load: OnLoad | None = None,
    images: ImagesConfig | None = None,
    tokenizer: str | None = None,
    routed_experts: bool = False,
    reference_folder: str | Path | None = None,
) -> Engine:
    """Make this rank's part of the engine that `config.engine` names. Collective over all ranks of the rollout.

    Args:
        config: `rollout`.
        model_folder: a Hugging Face folder.
        seed: seed of the engine itself; samples have their own seeds.
        dtype: dtype of weights, activations and cache.
        max_model_len: most tokens of prompt and response together.
        stop_token_ids: tokens that end a response.
        load_weights: False leaves the weights unset, to be filled by a reshard, which must cover all of them.
        trust_remote_code: run Python code from the model folder.
        num_sequences: responses that are asked of an engine at once, to size its cache; None: unknown.
        on_load: called with the engine's parameters and its `Engine.layouts` before graphs are captured. After that,
            parameters can no longer move to an actor's storage.
        images: `data.images` for a model that takes images; None for other models.
        tokenizer: the run's tokenizer, if it is not the model folder's.
        routed_experts: record the experts that each token took; vLLM only.
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
            dtype=dtype,
            max_model_len=max_model_len,
            stop_token_ids=stop_token_ids,
            trust_remote_code=trust_remote_code,
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
                seed=seed,
                dtype=dtype,
                max_model_len=max_model_len,
                stop_token_ids=stop_token_ids,
                load_weights=load_weights,
            )
    else:
        from megaverl.rollout.vllm_engine import VLLMEngine
        from megaverl.rollout.vllm_images import image_arguments
        from megaverl.rollout.vllm_options import VLLMOptions

        of_images = None
        if images is not None:
            of_images = image_arguments(images, tokenizer or str(model_folder))
        options = VLLMOptions(
            seed=seed,
            dtype=dtype,
            max_model_len=max_model_len,
            stop_token_ids=tuple(stop_token_ids),
            load_weights=load_weights,
            trust_remote_code=trust_remote_code,
            num_sequences=num_sequences,
            images=of_images,
            routed_experts=routed_experts,
        )
        engine = VLLMEngine(model_folder, config, options, on_load=on_load)
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
