"""Generation engines: token ids in, token ids and log-probs out.

This module makes the engine that `rollout` names, splits prompts between its replicas, and derives a seed for each
sample. Splits and seeds are pure arithmetic, so every rank computes the same ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaverl.errors import RolloutError
from megaverl.rollout.engine import Engine, Generation, InFlight, OnLoad, SamplingOptions

if TYPE_CHECKING:
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.config.run import ImagesConfig

__all__ = [
    "Engine",
    "Generation",
    "SamplingOptions",
    "make_engine",
    "sample_seed",
    "split_prompts",
    "turn_seed",
]


def split_prompts(
    lengths: Sequence[int], num_replicas: int, group_size: int = 1, conversations: Sequence[int] | None = None
) -> list[list[int]]:
    """Split prompts between replicas so that all of them finish at about the same time.

    Replicas get the same number of samples, plus or minus one, as that decides how long decoding takes; then about the
    same number of prompt tokens. The `group_size` samples of one prompt stay on one replica, which computes their
    prefix
    once. Only the last groups are split, if the number of groups is not a multiple of the replicas.

    Args:
        lengths: tokens of each prompt.
        num_replicas: engines that share them.
        group_size: samples per prompt; the samples of a prompt are neighbours.
        conversations: conversation number of each prompt. Prompts with the same number go to the same replica in every
            call, since that replica has the conversation so far in its cache.

    Returns:
        For each replica the indices of its prompts, ascending. Every index occurs exactly once.
    """
    if conversations is not None:
        return [
            [i for i, number in enumerate(conversations) if number % num_replicas == r] for r in range(num_replicas)
        ]
    groups = [range(start, min(start + group_size, len(lengths))) for start in range(0, len(lengths), group_size)]
    num_whole = len(groups) // num_replicas * num_replicas
    units = sorted(groups[:num_whole], key=lambda group: (-sum(lengths[i] for i in group), group.start))
    singles = [range(i, i + 1) for group in groups[num_whole:] for i in group]
    units += sorted(singles, key=lambda group: (-lengths[group.start], group.start))

    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    num_tokens = [0] * num_replicas
    for unit in units:
        replica = min(range(num_replicas), key=lambda r: (len(shares[r]), num_tokens[r], r))
        shares[replica] += unit
        num_tokens[replica] += sum(lengths[i] for i in unit)
    return [sorted(share) for share in shares]


def sample_seed(run_seed: int, step: int, sample: int, purpose: str = "rollout") -> int:
    """Return the seed of one sample: 63 bits, equal on every machine and in every Python version.

    The seed is a keyed BLAKE2b hash of (run seed, step, sample), so neighbouring steps and samples get unrelated seeds.
    Its
    low 32 bits are as random as the rest, which matters because torch's CPU generator uses only those.

    Args:
        run_seed: `run.seed`.
        step: training step.
        sample: index of the sample within the step, over all replicas.
        purpose: separates draws that share the three numbers, e.g. "rollout" and "validation".
    """
    message = struct.pack("<qqq", run_seed, step, sample)
    digest = hashlib.blake2b(message, digest_size=8, key=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1


def turn_seed(run_seed: int, step: int, sample: int, turn: int, agent: str = "", purpose: str = "rollout") -> int:
    """Return the seed of one turn of an episode. The first turn of a single agent has the sample's own seed."""
    who = f"{purpose}/{turn}/{agent}" if turn or agent else purpose
    # A BLAKE2b key has at most 64 bytes.
    if len(who) > 64:
        who = f"{purpose}/{turn}/{hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()}"
    return sample_seed(run_seed, step, sample, who)


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
    asked: dict[str, Any] = {
        "seed": seed,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "stop_token_ids": stop_token_ids,
        "load_weights": load_weights,
    }
    engine: Engine
    if config.engine == "hf":
        from megaverl.rollout.hf_engine import HFEngine

        if images is not None:
            raise RolloutError(f"rollout.engine=hf answers text alone, and {model_folder} takes images. Use vllm.")

        # The hf engine draws with the samples' seeds alone, and always reads its weights from the folder.
        unused = ("seed", "load_weights")
        wanted = {name: value for name, value in asked.items() if name not in unused}
        engine = HFEngine(
            model_folder, **wanted, trust_remote_code=trust_remote_code, reference_folder=reference_folder
        )
    elif ":" in config.engine:
        from megaverl.plugins import calling, load_function

        make_own = load_function(config.engine, "rollout.engine")
        with calling(config.engine, "rollout.engine"):
            engine = make_own(model_folder, config, **asked)
    else:
        from megaverl.rollout.vllm_engine import VLLMEngine
        from megaverl.rollout.vllm_requests import image_arguments

        asked |= {"trust_remote_code": trust_remote_code, "num_sequences": num_sequences, "on_load": on_load}
        if images is not None:
            asked["images"] = image_arguments(images, tokenizer or str(model_folder))
        engine = VLLMEngine(model_folder, config, **asked, routed_experts=routed_experts)
    if config.use_dynamic_batching:
        budget = None if config.memory_budget_mb is None else config.memory_budget_mb * 2**20
        # vLLM knows the free blocks of its own cache; other engines measure the free memory.
        measures = budget is None and config.engine != "vllm"
        engine.in_flight = InFlight(config.min_sequences, config.max_sequences, budget, measures)
    return engine
