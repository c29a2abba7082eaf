"""A model's own configuration, as a folder on a hub brings it along."""

from transformers import PretrainedConfig


class PlainConfig(PretrainedConfig):
    model_type = "megaverl_plain"

    def __init__(
        self,
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        **more,
    ):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = (
            num_hidden_layers,
            num_attention_heads,
        )
        self.num_key_value_heads, self.head_dim = (
            num_attention_heads,
            hidden_size // num_attention_heads,
        )
        self.max_position_embeddings = more.pop("max_position_embeddings", 64)
        super().__init__(**more)
