"""Options of a role's model that do not depend on the engine that trains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megaverl.config.roles import LoraConfig


@dataclass(frozen=True)
class ModelOptions:
    """Options of a role's model, on Megatron-core as well as under FSDP2.

    Attributes:
        dtype: of the weights. Under FSDP2 trained weights are float32, and this is the dtype of the computation.
        seed: of random initial weights and of adapters.
        role: name of the role, for messages.
        trained: whether the model takes updates. A model that only scores needs no float32 weights under FSDP2.
        value_head: number of values per position that a critic returns instead of logits, one for each agent; 0 for a
            model with logits.
        beside_logits: the actor is its own critic and returns logits as well as values.
        lora: train only adapters, and a critic's head.
        activation_checkpointing: none, selective or full.
        chunked_logits: the model returns hidden states, from which log-probs are computed in chunks.
        fp32_lm_head: compute logits in float32, also with weights of 16 bits.
        fake_quantization: the format in `GROUP_FORMATS` to which linear layers round their weights in every forward
            pass. None: they do not.
        initialize: draw random weights. False: leave them uninitialised, because all of them will be loaded.
        pack_samples: concatenate the samples of a micro-batch and store a shared prompt once, if the model can read
            packed rows.
        batch_invariant: compute so that log-probs equal those of an engine with `rollout.batch_invariant`.
    """

    dtype: torch.dtype
    seed: int
    role: str = "actor"
    trained: bool = True
    value_head: int = 0
    beside_logits: bool = False
    lora: LoraConfig | None = None
    activation_checkpointing: str = "none"
    chunked_logits: bool = False
    fp32_lm_head: bool = False
    fake_quantization: str | None = None
    initialize: bool = True
    pack_samples: bool = True
    batch_invariant: bool = False
