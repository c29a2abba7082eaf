"""Options of an engine that come from the run and its model, beside those of `rollout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class EngineOptions:
    """Options of any engine beside `rollout`.

    Attributes:
        seed: seed of the engine; requests have their own seeds.
        dtype: dtype of weights, activations and cache.
        max_model_len: most tokens of prompt and response together.
        stop_token_ids: tokens that end a response.
        load_weights: False: a reshard must write all of them before the first `generate`.
        trust_remote_code: run Python code from the model folder.
        num_sequences: responses that are requested at once, to size the cache; None: unknown.
        fp32_lm_head: compute logits in float32, also with weights of 16 bits (`model.fp32_lm_head`).
        routed_experts: record which experts each token took; vLLM only.
    """

    seed: int
    dtype: torch.dtype
    max_model_len: int
    stop_token_ids: tuple[int, ...] = ()
    load_weights: bool = True
    trust_remote_code: bool = False
    num_sequences: int | None = None
    fp32_lm_head: bool = False
    routed_experts: bool = False
