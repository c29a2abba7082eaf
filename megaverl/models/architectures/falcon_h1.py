"""Table of Falcon-H1's weights: attention and a Mamba-2 layer that read the same norm's output, then an MLP.

Megatron's names inside the Mamba-2 layer are those of `models/mamba.py`. vLLM's names
come from `models/falcon_h1.py` and `mamba_mixer2.py`. It computes `A` from `A_log`.
"""

from dataclasses import replace

from megaverl.models.architectures import llama
from megaverl.models.architectures.nemotron_h import mamba_parts
from megaverl.models.architectures.table import FINAL_NORM, Layers
from megaverl.sharding.weight import Split

FC1 = ("mlp.linear_fc1", "feed_forward.gate_up_proj")
FC2 = ("mlp.linear_fc2", "feed_forward.down_proj")
FALCON_H1 = Layers(
    dense=(
        # Transformer Engine cannot fuse a norm whose output two layers read.
        llama.norm("input_layernorm", "input_layernorm"),
        *llama.PROJECTIONS,
        *mamba_parts("mamba", "mamba", "mamba.mamba"),
        llama.norm("pre_ff_layernorm", "pre_mlp_layernorm"),
        llama.linear("feed_forward.gate_proj", ("ffn", "hidden"), Split.GATE, FC1),
        llama.linear("feed_forward.up_proj", ("ffn", "hidden"), Split.UP, FC1),
        llama.linear("feed_forward.down_proj", ("hidden", "ffn"), Split.ROW, FC2),
    ),
    final_norm=(
        replace(
            FINAL_NORM,
            name="model.final_layernorm.weight",
            vllm="model.final_layernorm.weight",
        ),
    ),
)
