"""EAGLE-3 head as a module that can be trained, and new heads for a target model.

The head proposes several tokens (arXiv 2503.01840). Its first step reads hidden states
of the target at position i and the embedding of token i+1, and predicts token i+2. Each
further step reads the head's own state of the step before and the embedding of the next
token. Names of weights are those that vLLM loads (`LlamaForCausalLMEagle3`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from megaverl.errors import ModelError
from megaverl.sharding.draft_head import (
    ARCHITECTURES,
    AUX_LAYERS,
    HeadSpec,
    default_aux_layers,
)
from megaverl.sharding.model_spec import ModelSpec
from megaverl.weights.safetensors_writer import cannot_write

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
# Those of the steps before. A tuple, because FSDP2 passes copies of lists to a layer,
# and recomputation calls a layer twice.
Cache = tuple[KeysAndValues, ...]


class Eagle3Attention(nn.Module):
    """Attention of the head's layer, whose input is an embedding and a state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        width = 2 * config.hidden_size
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        inputs: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: Cache,
    ) -> tuple[torch.Tensor, KeysAndValues]:
        """Attend to the first step's tokens up to the own one, and to the own column of each later step.

        Args:
            inputs: [b, s, 2 * hidden].
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
    """The head's decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Eagle3Attention(config)
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


class LlamaForCausalLMEagle3(PreTrainedModel):  # type: ignore[misc]  # transformers is untyped here
    """EAGLE-3 head with a layer of Llama's kind and the target's whole vocabulary.

    It has no embeddings: it reads the target's. transformers writes the name of the
    class into config.json, where vLLM looks for it.
    """

    config_class = LlamaConfig
    # Rows are padded, because a step attends to the columns of the steps before.
    padded_because = "an EAGLE-3 head reads its own states of earlier drafts"
    # Every tensor-parallel rank holds the whole head.
    is_whole_on_tensor_ranks = True
    _no_split_modules = ["Eagle3Layer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.spec = HeadSpec.from_config(config.to_dict(), "config.json")
        size = config.hidden_size
        self.fc = nn.Linear(len(self.spec.aux_layers) * size, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    @classmethod
    def from_config(
        cls, config: LlamaConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> LlamaForCausalLMEagle3:
        """Build a head, with the signature of transformers' auto classes. No code of the folder is run."""
        head: LlamaForCausalLMEagle3 = cls._from_config(config, **options)
        return head

    def get_input_embeddings(self) -> None:
        """Return None: the embeddings are the target's."""
        return None

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, observed: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Run the steps in which drafts are proposed on every position at once.

        Args:
            observed: [b, s, hidden_size * (1 + aux layers)]: the target's embeddings and hidden states.
            num_steps: number of drafts.

        Returns:
            [num_steps, b, s, hidden]: states from which `lm_head` computes logits. Those of step k at position i
                predict token i + k + 2.
        """
        size, length = self.spec.hidden_size, observed.shape[1]
        embeddings, states = observed[..., :size], self.fc(observed[..., size:])
        places = torch.arange(length, device=observed.device)
        cache: Cache = ()
        outputs = []
        for step in range(num_steps):
            # The token behind the position of this step. Wrapped ones predict tokens
            # beyond the row.
            following = embeddings.roll(-1 - step, dims=1)
            rotation = self.rotary_emb(states, (places + step).unsqueeze(0))
            states, kept = self.layers[0](following, states, rotation, cache)
            cache = (*cache, kept)
            outputs.append(self.norm(states))
        return torch.stack(outputs)


def make_draft_head(
    folder: str | Path,
    target: str | Path,
    *,
    seed: int = 0,
    intermediate_size: int | None = None,
) -> Path:
    """Write an untrained head for a target model: config.json and safetensors.

    The output layer is the target's, and all other weights are random. The head has the
    target's heads and rotary embeddings.

    Args:
        folder: must not contain a model yet.
        target: Hugging Face folder of the target.
        seed: seed of the weights.
        intermediate_size: of the MLP. None: the target's.

    Raises:
        ModelError: the target has no folder with weights, is of another kind than Llama, or scales its embeddings;
            `folder` exists; `intermediate_size` is below 1.
        CheckpointError: `folder` cannot be written.
    """
    folder, target = Path(folder), Path(target)
    if intermediate_size is not None and intermediate_size < 1:
        raise ModelError(
            f"intermediate_size={intermediate_size}: a head's MLP has a width of 1 or more."
        )
    if (folder / "config.json").exists():
        raise ModelError(f"{folder}: there is a model already. Name a new folder.")
    config = _config_for(target, intermediate_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = LlamaForCausalLMEagle3(config)
    output = _output_layer(target)
    if output.shape != head.lm_head.weight.shape:
        raise ModelError(
            f"{target}: its output layer has the shape {tuple(output.shape)}, and config.json describes "
            f"{tuple(head.lm_head.weight.shape)}. Use the config.json that belongs to the weights."
        )
    with torch.no_grad():
        head.lm_head.weight.copy_(output)
    try:
        head.to(output.dtype).save_pretrained(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def _config_for(target: Path, intermediate_size: int | None) -> LlamaConfig:
    """Return the configuration of a head for a target."""
    spec = ModelSpec.outline(target)
    if spec.embedding_scale != 1.0:
        raise ModelError(
            f"{target}: {spec.architecture} scales its embeddings, which vLLM's heads read unscaled. Train a draft "
            "model instead."
        )
    try:
        of_target = AutoConfig.from_pretrained(str(target)).get_text_config()
        sizes = {
            name: getattr(of_target, name)
            for name in (
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
                "rms_norm_eps",
                "max_position_embeddings",
                "rope_parameters",
            )
        }
        intermediate_size = intermediate_size or of_target.intermediate_size
        num_layers = int(of_target.num_hidden_layers)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{target}: an EAGLE-3 head needs a target of Llama's kind in a Hugging Face folder ({error}). Train a "
            "draft model instead."
        ) from error
    config = LlamaConfig(
        **sizes,
        head_dim=getattr(of_target, "head_dim", None)
        or sizes["hidden_size"] // sizes["num_attention_heads"],
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        hidden_act="silu",
        tie_word_embeddings=False,
        bos_token_id=of_target.bos_token_id,
        eos_token_id=of_target.eos_token_id,
        pad_token_id=of_target.pad_token_id,
        draft_vocab_size=sizes["vocab_size"],
        **{AUX_LAYERS: list(default_aux_layers(num_layers))},
    )
    config.architectures = [ARCHITECTURES[0]]
    return config


def _output_layer(target: Path) -> torch.Tensor:
    """Return the target's output layer, or its embeddings if these are tied."""
    from safetensors import safe_open

    index = target / "model.safetensors.index.json"
    files = (
        json.loads(index.read_text())["weight_map"]
        if index.is_file()
        else dict.fromkeys(
            ("lm_head.weight", "model.embed_tokens.weight"), "model.safetensors"
        )
    )
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        file = target / files.get(name, "")
        if not file.is_file():
            continue
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  # not a dictionary
                weight: torch.Tensor = tensors.get_tensor(name)
                return weight
    raise ModelError(
        f"{target}: neither lm_head.weight nor model.embed_tokens.weight is in its safetensors files. Name a "
        "folder with the whole model."
    )
