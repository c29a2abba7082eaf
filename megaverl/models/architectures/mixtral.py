"""Mixtral: Llama with routed experts in the place of every MLP (as Mistral, it has no biases)."""

from megaverl.models.architectures import experts, llama
from megaverl.models.architectures.table import Layers

LAYERS = Layers(routed=llama.ATTENTION + experts.routed("block_sparse_moe", "w1", "w3", "w2"))
