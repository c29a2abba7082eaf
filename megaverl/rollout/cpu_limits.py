"""Limits of vLLM's CPU build that training must respect, checked from the configuration alone.

`megaverl` checks them before ranks start, and the engine checks again. This module
imports neither torch nor vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megaverl.errors import ModelError, RolloutError
from megaverl.sharding.draft_head import MTP, HeadSpec
from megaverl.sharding.model_spec import DeltaNetSpec

LATENT_ATTENTION = "CPU_MLA"
# These models attend to all tokens of an image at once, but vLLM's CPU attention is
# causal over them.
NOT_CAUSAL = ("Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration")


def check_images_run_here(architecture: str) -> None:
    """Refuse a model whose images vLLM's CPU build would compute differently.

    Raises:
        RolloutError: names the architecture.
    """
    if architecture in NOT_CAUSAL:
        raise RolloutError(
            f"{architecture}: vLLM's CPU build attends causally over the tokens of an image, and the model does not: "
            "its answers would be wrong. Generate on a GPU, or use a Qwen-VL model."
        )


def check_runs_here(
    arguments: dict[str, Any],
    *,
    experts: bool,
    is_recurrent: bool = False,
    has_gates: bool = True,
) -> None:
    """Refuse settings that vLLM's CPU build cannot train with: each would fail, or
    compute wrong results, in the first batches.

    Args:
        arguments: EngineArgs.
        experts: whether the model has routed experts.
        is_recurrent: whether layers carry a state from token to token.
        has_gates: whether MLPs, and so experts, have gates.

    Raises:
        RolloutError: for quantised experts; for experts without gates, which the CPU build does not compute (0.32,
            `fused_moe/config.py`); for cached prefixes of recurrent layers, whose kernels return the last
            state only (0.32, `layers/mamba/ops/cpu/mamba_ssm.py`); for compiled models, which would keep old weights;
            for asynchronous scheduling, which vLLM would silently turn off (0.32, `platforms/cpu.py`); and for a
            backend of latent attention that discards the weights which an update writes, and does not support float32.
    """
    if not arguments["enforce_eager"]:
        raise RolloutError(
            "rollout.vllm.enforce_eager=false: a compiled model would not see updated weights on a CPU. Leave it out."
        )
    if arguments.get("async_scheduling"):
        raise RolloutError(
            "rollout.vllm.async_scheduling=true: on a CPU there is no device to schedule ahead of. Leave it out."
        )
    if arguments.get("attention_backend") == "AMX_MLA":
        raise RolloutError(
            "rollout.vllm.attention_backend=AMX_MLA: it drops weights that updates must write. Remove the key, to use "
            f"{LATENT_ATTENTION}."
        )
    if is_recurrent and arguments.get("enable_prefix_caching"):
        raise RolloutError(
            "rollout.vllm.enable_prefix_caching=true: vLLM's CPU build cannot keep a state in "
            "the middle of a prompt. Leave it out on a CPU."
        )
    if experts and not has_gates:
        raise RolloutError(
            "rollout.engine=vllm: vLLM's CPU build has no experts without gates, which this model has. Set "
            "rollout.engine=hf on a CPU."
        )
    if experts and arguments.get("quantization"):
        raise RolloutError(
            "rollout.vllm.quantization: vLLM's CPU build has kernels for quantised experts only where there is AMX, "
            "and these reorder the weights that an update is written to. Leave it out on a CPU, or use a dense model."
        )


# Sizes of key and value heads for which the CPU build (0.32) has kernels.
DELTA_NET_HEADS = (64, 128)
DELTA_NET_TAPS = 4


def check_delta_net_runs_here(net: DeltaNetSpec, dtype: str) -> None:
    """Refuse gated delta nets for which vLLM's CPU build has no kernels.

    Args:
        dtype: name of the engine's dtype, such as `bfloat16`.

    Raises:
        RolloutError: names the dtype or the sizes.
    """
    if dtype != "bfloat16":
        raise RolloutError(
            f"model.dtype={dtype}: vLLM's CPU build computes gated delta nets in bfloat16 only. Use bfloat16, or "
            "rollout.engine=hf."
        )
    heads = net.key_head_dim, net.value_head_dim
    if heads not in [(size, size) for size in DELTA_NET_HEADS]:
        raise RolloutError(
            f"model.path: its gated delta nets have key heads of {heads[0]} and value heads of {heads[1]} dimensions; "
            f"vLLM's CPU build has kernels for equal sizes of {' or '.join(map(str, DELTA_NET_HEADS))} only. Use "
            "rollout.engine=hf."
        )
    if net.conv_width != DELTA_NET_TAPS:
        raise RolloutError(
            f"model.path: linear_conv_kernel_dim is {net.conv_width}; vLLM's CPU build has kernels for "
            f"{DELTA_NET_TAPS} only. Use rollout.engine=hf."
        )


SPECULATORS = ("ngram", "draft_model", "eagle3", MTP)


def speculation_here(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rollout.vllm.speculative_config` with a workaround for a bug of vLLM's CPU build (0.32).

    If all but one token of a prompt are cached, vLLM pads the request with draft tokens
    -1; its kernels then read beyond their rows and accept them. A table of draft
    numbers by batch size, with the same number everywhere, avoids this.

    Raises:
        RolloutError: this build cannot run the speculator.
    """
    if config["method"] not in SPECULATORS:
        raise RolloutError(
            f"rollout.vllm.speculative_config.method={config['method'] or None}: of vLLM's speculators, "
            f"{', '.join(SPECULATORS)} are known to draw right on a CPU. Use one of them there, or "
            "leave speculative_config out."
        )
    if config["method"] == MTP:
        _check_mtp_head(config.get("model"))
    if config.get("rejection_sample_method", "standard") != "standard":
        raise RolloutError(
            "rollout.vllm.speculative_config.rejection_sample_method: vLLM's CPU build has kernels for `standard` "
            "alone. Leave it out."
        )
    number = config.get("num_speculative_tokens")
    return (
        {**config, "num_speculative_tokens_per_batch_size": [[1, sys.maxsize, number]]}
        if number
        else dict(config)
    )


def _check_mtp_head(folder: Any) -> None:
    """Refuse MTP heads other than those in a folder of their own, which `megaverl draft-head` makes.

    Raises:
        RolloutError: names what is wrong with the folder.
    """
    key = "rollout.vllm.speculative_config.model"
    advice = "Make a head with `megaverl draft-head --kind mtp`."
    if not folder:
        raise RolloutError(
            f"{key}: is not set. On a CPU, MTP layers inside a model have not been run. {advice}"
        )
    try:
        head = HeadSpec.from_folder(str(folder))
    except ModelError as error:
        raise RolloutError(f"{key}: {error}") from error
    if head.method != MTP:
        raise RolloutError(
            f"{key}={folder}: a head for the method {head.method}, and method is {MTP}. {advice}"
        )
