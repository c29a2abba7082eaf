"""Heads of speculative decoders as modules that can be trained.

A head proposes several tokens. Its first step reads hidden states of the target at
position i and the embedding of token i+1, and predicts token i+2. Each further step
reads the head's own state of the step before and the embedding of the next token. Both
kinds of heads (`megaverl.sharding.draft_head`) share the steps and their attention.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from megaverl.sharding.draft_head import EAGLE3, MTP, HeadSpec

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
# Those of the steps before. A tuple, because FSDP2 passes copies of lists to a layer,
# and recomputation calls a layer twice.
Cache = tuple[KeysAndValues, ...]


class HeadAttention(nn.Module):
    """Attention of a head's layer.

    Args:
        config: of the head.
        width: size of the inputs.
        bias: queries, keys and values have biases.
    """

    def __init__(self, config: LlamaConfig, width: int, *, bias: bool) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        inputs: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Attend to the first step's tokens up to the own one, and to the own column of each later step.

        Args:
            inputs: [b, s, width].
            rotation: cosine and sine of the positions.

        Returns:
            [b, s, hidden], and the keys and values of this step.
        """
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        cache = (*cache, (key, value))
        length = inputs.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=inputs.device)
        column = torch.eye(length, dtype=torch.bool, device=inputs.device)
        # [s, steps * s]: the keys of all steps lie side by side.
        mask = torch.cat([causal.tril(), *[column] * (len(cache) - 1)], dim=1)
        output = functional.scaled_dot_product_attention(
            query,
            torch.cat([keys for keys, _ in cache], dim=2),
            torch.cat([values for _, values in cache], dim=2),
            attn_mask=mask,
            enable_gqa=True,
        )
        # A copy, because FSDP2's hooks on what a layer returns warn about views.
        kept = key, value.clone()
        return self.o_proj(output.transpose(1, 2).flatten(2)), kept


class Eagle3Layer(nn.Module):
    """Decoder layer of an EAGLE-3 head, whose input is an embedding and a state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config, 2 * size, bias=False)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Return the states of the next step, [b, s, hidden], before the last norm, and this step's keys and values."""
        inputs = torch.cat(
            [self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1
        )
        attended, kept = self.self_attn(inputs, rotation, cache)
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states)), kept


class DraftHead(PreTrainedModel):  # type: ignore[misc]  # transformers is untyped here
    """Base of a head. It has no embeddings: it reads the target's.

    transformers writes the name of the class into config.json, where vLLM looks for it.
    """

    config_class = LlamaConfig
    # Rows are padded, because a step attends to the columns of the steps before.
    padded_because = "a head reads its own states of earlier drafts"
    # Every tensor-parallel rank holds the whole head.
    is_whole_on_tensor_ranks = True
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.spec = HeadSpec.from_config(config.to_dict(), "config.json")
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @classmethod
    def from_config(
        cls, config: LlamaConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> Self:
        """Build a head, with the signature of transformers' auto classes. No code of the folder is run."""
        head: Self = cls._from_config(config, **options)
        return head

    def get_input_embeddings(self) -> None:
        """Return None: the embeddings are the target's."""
        return None

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the output layer, or None if it is the target's."""
        return None

    @abstractmethod
    def first_inputs(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split `observed` into the embeddings of the tokens and the states that the first step reads."""

    @abstractmethod
    def step(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor, KeysAndValues]:
        """Run the layer once.

        Returns:
            States that the output layer reads, states that the next step reads, each [b, s, hidden], and this step's
            keys and values.
        """

    def forward(self, observed: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Run the steps in which drafts are proposed on every position at once.

        Args:
            observed: [b, s, hidden_size * (1 + aux layers)]: the target's embeddings and hidden states.
            num_steps: number of drafts.

        Returns:
            [num_steps, b, s, hidden]: states from which the output layer computes logits. Those of step k at position
                i predict token i + k + 2.
        """
        embeddings, states = self.first_inputs(observed)
        places = torch.arange(observed.shape[1], device=observed.device)
        cache: Cache = ()
        outputs = []
        for step in range(num_steps):
            # The token behind the position of this step. Wrapped ones predict tokens
            # beyond the row.
            following = embeddings.roll(-1 - step, dims=1)
            rotation = self.rotary_emb(states, (places + step).unsqueeze(0))
            output, states, kept = self.step(following, states, rotation, cache)
            cache = (*cache, kept)
            outputs.append(output)
        return torch.stack(outputs)


class LlamaForCausalLMEagle3(DraftHead):
    """EAGLE-3 head (arXiv 2503.01840) with a layer of Llama's kind and the target's whole vocabulary.

    Names of weights are those that vLLM loads.
    """

    _no_split_modules = ["Eagle3Layer"]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(len(self.spec.aux_layers) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def first_inputs(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.spec.hidden_size
        return observed[..., :size], self.fc(observed[..., size:])

    def step(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor, KeysAndValues]:
        states, kept = self.layers[0](embeddings, states, rotation, cache)
        return self.norm(states), states, kept


class MTPLayer(nn.Module):
    """Layer of an MTP head: a projection of embedding and state, a decoder layer of Qwen2's kind and a norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_layernorm = LlamaRMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.self_attn = HeadAttention(config, size, bias=True)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.mlp = LlamaMLP(config)
        self.final_layernorm = LlamaRMSNorm(size, eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Return the states after the last norm, [b, s, hidden], and this step's keys and values."""
        inputs = [self.hidden_layernorm(states), self.token_layernorm(embeddings)]
        states = self.input_proj(torch.cat(inputs, dim=-1))
        attended, kept = self.self_attn(self.input_layernorm(states), rotation, cache)
        states = states + attended
        states = states + self.mlp(self.post_attention_layernorm(states))
        return self.final_layernorm(states), kept


class MiMoForCausalLM(DraftHead):
    """MTP head whose steps share one layer, as in vLLM's `MiMoMTP`. Names of weights are those that vLLM loads.

    The output layer is the target's: the states of each step are those that the target's
    logits would be computed from.
    """

    _no_split_modules = ["MTPLayer"]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.mtp_layers = nn.ModuleList([MTPLayer(config)])
        self.post_init()

    def first_inputs(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.spec.hidden_size
        embeddings, states = observed.split(size, dim=-1)
        # vLLM reads zeros in place of the embedding at position 0, which is that of
        # token 1. No other step reads this embedding.
        second = torch.arange(observed.shape[1], device=observed.device) == 1
        return embeddings.masked_fill(second.view(1, -1, 1), 0.0), states

    def step(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor, KeysAndValues]:
        layers: Any = self.model.mtp_layers
        states, kept = layers[0](embeddings, states, rotation, cache)
        return states, states, kept


# Class of a head by vLLM's method.
HEADS: dict[str, type[DraftHead]] = {
    EAGLE3: LlamaForCausalLMEagle3,
    MTP: MiMoForCausalLM,
}
