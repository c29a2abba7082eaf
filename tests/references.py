"""Reference models: transformers' classes, and the same mathematics for architectures that it has no class of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn

from megaverl.sharding.own_configs import OWN_CONFIGS


class InternLM3Reference(transformers.LlamaForCausalLM):
    """Llama, with biases on queries, keys and values but not on the output projection."""

    config_class = OWN_CONFIGS["InternLM3ForCausalLM"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers if config.qkv_bias else ():
            attention = layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                matrix = getattr(attention, name)
                biased = nn.Linear(matrix.in_features, matrix.out_features)
                setattr(attention, name, biased)
        self.post_init()


class MiMoReference(transformers.Qwen2ForCausalLM):
    """Qwen2."""

    config_class = OWN_CONFIGS["MiMoForCausalLM"]


class BailingMoeV2Reference(nn.Module):
    """Ling 2.0 from its equations, one token's experts after the other, under the names of its files."""

    config_class = OWN_CONFIGS["BailingMoeV2ForCausalLM"]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = BailingDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    @classmethod
    def from_pretrained(
        cls, folder: str, dtype: torch.dtype = torch.float32, **options: Any
    ) -> BailingMoeV2Reference:
        config = cls.config_class.from_pretrained(folder)
        files = [load_file(file) for file in Path(folder).glob("*.safetensors")]
        tensors = {name: x for file in files for name, x in file.items()}
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.word_embeddings.weight"]
        model = cls(config)
        model.load_state_dict(tensors)
        return model.to(dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        self.config.architectures = ["BailingMoeV2ForCausalLM"]
        self.config.save_pretrained(folder)
        tensors = dict(self.state_dict())
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_torch_state_dict(tensors, str(folder))

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        hidden = self.model(tokens).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))


class BailingDecoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(BailingLayer(config, layer) for layer in numbers)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        hidden = self.word_embeddings(tokens)
        for layer in self.layers:
            hidden = hidden + layer.attention(layer.input_layernorm(hidden))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class BailingLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.attention = BailingAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = (
            BailingMLP(size, config.intermediate_size)
            if layer < config.first_k_dense_replace
            else BailingExperts(config)
        )


class BailingAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head = head = config.head_dim
        rows = config.num_attention_heads + 2 * config.num_key_value_heads
        self.query_key_value = nn.Linear(config.hidden_size, rows * head, bias=False)
        inside = config.num_attention_heads * head
        self.dense = nn.Linear(inside, config.hidden_size, bias=False)
        if config.use_qk_norm:
            self.query_layernorm = nn.RMSNorm(head, config.rms_norm_eps)
            self.key_layernorm = nn.RMSNorm(head, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden]: attention of all heads to the tokens so far."""
        batch, length, _ = hidden.shape
        queries, shared = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
        )
        heads = self.query_key_value(hidden).view(batch, length, -1, self.head)
        q, k, v = heads.transpose(1, 2).split([queries, shared, shared], dim=1)
        if self.config.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (x.repeat_interleave(queries // shared, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * self.head**-0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """The first dimensions of each head, in pairs half of these apart, rotated by the token's position."""
        rope = self.config.rope_parameters
        size = int(self.head * rope["partial_rotary_factor"])
        steps = torch.arange(0, size, 2, dtype=torch.float64) / size
        frequencies = rope["rope_theta"] ** -steps / rope.get("factor", 1.0)
        angles = torch.arange(x.shape[2])[:, None] * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([size // 2, size // 2, self.head - size], dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return torch.cat(turned, dim=-1)


class BailingMLP(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BailingExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.moe_intermediate_size
        self.gate = nn.Linear(size, config.num_experts, bias=False)
        self.gate.register_buffer("expert_bias", torch.zeros(config.num_experts))
        self.experts = nn.ModuleList(
            BailingMLP(size, width) for _ in range(config.num_experts)
        )
        self.shared_experts = BailingMLP(size, width * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        chosen = self.chosen(scores.detach() + self.gate.expert_bias)
        weights = torch.where(chosen, scores, 0.0)
        if self.config.num_experts_per_tok > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * self.config.routed_scaling_factor
        outputs = [expert(x) for expert in self.experts]
        routed = (torch.stack(outputs, dim=-1) * weights[..., None, :]).sum(-1)
        return routed + self.shared_experts(x)

    def chosen(self, biased: torch.Tensor) -> torch.Tensor:
        """Whether a token goes to each expert: the best ones inside the groups with the best two."""
        groups = biased.unflatten(-1, (self.config.n_group, -1))
        of_groups = groups.topk(2, dim=-1).values.sum(-1)
        best = of_groups.topk(self.config.topk_group, dim=-1).indices
        is_open = torch.zeros_like(of_groups).scatter(-1, best, 1.0).bool()
        left = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
        experts = left.topk(self.config.num_experts_per_tok, dim=-1).indices
        return torch.zeros_like(biased).scatter(-1, experts, 1.0).bool()


REFERENCES: dict[str, Any] = {
    "InternLM3ForCausalLM": InternLM3Reference,
    "MiMoForCausalLM": MiMoReference,
    "BailingMoeV2ForCausalLM": BailingMoeV2Reference,
}


def model_class_of(architecture: str) -> Any:
    """The class that computes an architecture: transformers', or one of the references above."""
    return REFERENCES.get(architecture) or getattr(transformers, architecture)


def load_reference(folder: str | Path, **options: Any) -> Any:
    """The model of a folder, as `AutoModelForCausalLM.from_pretrained` would give it."""
    config = json.loads((Path(folder) / "config.json").read_text())
    kind = REFERENCES.get(config["architectures"][0], transformers.AutoModelForCausalLM)
    return kind.from_pretrained(str(folder), **options)
