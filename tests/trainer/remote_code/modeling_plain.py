"""A decoder that transformers does not have: learned positions, squared ReLU."""

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_plain import PlainConfig


class PlainAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim, self.scaling, self.num_key_value_groups = (
            config.head_dim,
            config.head_dim**-0.5,
            1,
        )
        self.mix_in = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3)
        )
        self.mix_out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask, cache, **more):
        q, k, v = (
            each(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in self.mix_in
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        made, _ = function(
            self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **more
        )
        # vLLM's attention gives rows of tokens alone.
        return self.mix_out(made.reshape(hidden.shape))


class PlainBlock(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attention = PlainAttention(config, layer_idx)
        self.before, self.between = (
            nn.LayerNorm(config.hidden_size),
            nn.LayerNorm(config.hidden_size),
        )
        self.wide, self.narrow = (
            nn.Linear(config.hidden_size, 2 * config.hidden_size),
            nn.Linear(2 * config.hidden_size, config.hidden_size),
        )

    def forward(self, hidden, mask, cache, **more):
        hidden = hidden + self.attention(self.before(hidden), mask, cache, **more)
        return hidden + self.narrow(self.wide(self.between(hidden)).relu().square())


class PlainPreTrainedModel(PreTrainedModel):
    config_class = PlainConfig
    base_model_prefix = "body"
    _no_split_modules = ["PlainBlock"]
    _supports_sdpa = _supports_attention_backend = True


class PlainModel(PlainPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(
            PlainBlock(config, n) for n in range(config.num_hidden_layers)
        )
        self.last = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def set_input_embeddings(self, value):
        self.tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **more,
    ):
        hidden = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            first = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(
                first, first + hidden.shape[1], device=hidden.device
            )[None]
        mask = create_causal_mask(
            self.config,
            hidden,
            attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
        )
        hidden = hidden + self.places(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask, cache, **more)
        return BaseModelOutputWithPast(
            last_hidden_state=self.last(hidden), past_key_values=cache
        )


class PlainForCausalLM(PlainPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.body = PlainModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **more):
        made = self.body(input_ids, position_ids=position_ids, **more)
        logits = self.lm_head(
            made.last_hidden_state[:, -logits_to_keep if logits_to_keep else 0 :]
        )
        return CausalLMOutputWithPast(
            logits=logits, past_key_values=made.past_key_values
        )
