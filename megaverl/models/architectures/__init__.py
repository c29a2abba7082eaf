"""Each architecture's table of weights, and the registry that finds it by its Hugging Face name."""

from megaverl.errors import ModelError
from megaverl.models.architectures import deepseek_v3, gpt_oss, llama
from megaverl.models.architectures.llama import ATTENTION, MLP, QK_NORMS, QKV_BIAS, experts
from megaverl.models.architectures.table import Layers, build
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Weight

LAYERS = {
    "LlamaForCausalLM": llama.LAYERS,
    "Qwen2ForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "Qwen3ForCausalLM": Layers(dense=ATTENTION + QK_NORMS + MLP),
    "MistralForCausalLM": llama.LAYERS,
    "GemmaForCausalLM": llama.LAYERS,
    "MixtralForCausalLM": Layers(routed=ATTENTION + experts("block_sparse_moe", "w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": Layers(routed=ATTENTION + QK_NORMS + experts()),
    "DeepseekV3ForCausalLM": deepseek_v3.LAYERS,
    "Glm4MoeForCausalLM": Layers(
        dense=ATTENTION + QKV_BIAS + QK_NORMS + MLP,
        routed=ATTENTION + QKV_BIAS + QK_NORMS + experts() + deepseek_v3.ROUTER_BIAS + deepseek_v3.SHARED_EXPERTS,
    ),
    "GptOssForCausalLM": gpt_oss.LAYERS,
}
WITH_QKV_BIAS = ("Qwen2ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM")


def weights_of(spec: ModelSpec, *, value_head: int = 0, beside_logits: bool = False) -> list[Weight]:
    """All global arrays of a model, named as Hugging Face names them.

    With `value_head` the critic of this model: `score.weight` `[value_head, hidden]` in place of the language-model
    head, embeddings not tied; `beside_logits` that of an actor and its critic on one backbone, with both heads.

    Raises:
        ModelError: an architecture without a table, or attention biases where the table has none.
    """
    if spec.architecture not in LAYERS:
        raise ModelError(f"architecture {spec.architecture!r} has no table of weights. Supported: {', '.join(LAYERS)}.")
    if spec.qkv_bias and spec.architecture not in WITH_QKV_BIAS:
        raise ModelError(
            f"{spec.architecture} with `attention_bias: true` is not supported: only {', '.join(WITH_QKV_BIAS)} may "
            "have biases on their attention projections."
        )
    return build(LAYERS[spec.architecture], spec, value_head=value_head, beside_logits=beside_logits)
