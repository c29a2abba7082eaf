"""Tables of all supported architectures, by the Hugging Face name of the architecture."""

from megaverl.errors import ModelError
from megaverl.models.architectures import llama
from megaverl.models.architectures.bailing import BAILING_MOE_V2
from megaverl.models.architectures.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE_ROUTER_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    router_bias,
)
from megaverl.models.architectures.falcon_h1 import FALCON_H1
from megaverl.models.architectures.gpt_oss import GPT_OSS
from megaverl.models.architectures.granite_moe import GRANITE_MOE
from megaverl.models.architectures.llama import (
    ATTENTION,
    MLP,
    QK_NORMS,
    QKV_BIAS,
    SHARED_GATE,
    experts,
    shared_expert,
)
from megaverl.models.architectures.llama4 import LLAMA4
from megaverl.models.architectures.nemotron_h import NEMOTRON_H
from megaverl.models.architectures.qwen3_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from megaverl.models.architectures.qwen_vl import (
    QWEN2_5_VL,
    QWEN2_VL,
    QWEN3_5_MOE_VL,
    QWEN3_5_VL,
    QWEN3_VL,
)
from megaverl.models.architectures.table import Layers, build
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Split, Weight

LAYERS = {
    "LlamaForCausalLM": llama.LAYERS,
    "Llama4ForCausalLM": LLAMA4,
    "Qwen2ForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "Qwen3ForCausalLM": Layers(dense=ATTENTION + QK_NORMS + MLP),
    "MistralForCausalLM": llama.LAYERS,
    "GemmaForCausalLM": llama.LAYERS,
    "MixtralForCausalLM": Layers(
        routed=ATTENTION + experts("block_sparse_moe", "w1", "w3", "w2")
    ),
    "Qwen3MoeForCausalLM": Layers(routed=ATTENTION + QK_NORMS + experts()),
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": Layers(
        dense=ATTENTION + QKV_BIAS + QK_NORMS + MLP,
        routed=ATTENTION
        + QKV_BIAS
        + QK_NORMS
        + experts()
        + ROUTER_BIAS
        + SHARED_EXPERTS,
    ),
    "GptOssForCausalLM": GPT_OSS,
    "SeedOssForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "SmolLM3ForCausalLM": llama.LAYERS,
    "Ernie4_5ForCausalLM": llama.LAYERS,
    "Ernie4_5_MoeForCausalLM": Layers(
        dense=ATTENTION + MLP,
        routed=ATTENTION + experts() + ERNIE_ROUTER_BIAS + SHARED_EXPERTS,
    ),
    "MinistralForCausalLM": llama.LAYERS,
    "CwmForCausalLM": llama.LAYERS,
    "Phi3ForCausalLM": Layers(dense=llama.FUSED_ATTENTION + llama.FUSED_MLP),
    "Glm4ForCausalLM": Layers(
        dense=ATTENTION + QKV_BIAS + llama.FUSED_MLP + llama.NORMS_AFTER
    ),
    "Qwen2MoeForCausalLM": Layers(
        routed=ATTENTION
        + QKV_BIAS
        + experts()
        + shared_expert("mlp.shared_expert")
        + SHARED_GATE
    ),
    "GraniteForCausalLM": llama.LAYERS,
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "ArceeForCausalLM": Layers(dense=ATTENTION + llama.plain_mlp()),
    "NemotronForCausalLM": Layers(
        dense=ATTENTION + llama.plain_mlp() + llama.NORM_BIASES,
        final_norm=llama.FINAL_NORM_WITH_BIAS,
    ),
    "NemotronHForCausalLM": NEMOTRON_H,
    "FalconH1ForCausalLM": FALCON_H1,
    "Starcoder2ForCausalLM": Layers(
        dense=ATTENTION
        + QKV_BIAS
        + llama.OUT_BIAS
        + llama.plain_mlp("mlp.c_fc", "mlp.c_proj")
        + llama.NORM_BIASES,
        final_norm=llama.FINAL_NORM_WITH_BIAS,
    ),
    "Olmo2ForCausalLM": Layers(
        dense=llama.PROJECTIONS
        + llama.projection_norms()
        + llama.MLP_PROJECTIONS
        + llama.NORMS_AFTER_BOTH
    ),
    "Exaone4ForCausalLM": Layers(
        dense=llama.PROJECTIONS
        + QK_NORMS
        + llama.MLP_PROJECTIONS
        + llama.NORMS_AFTER_BOTH
    ),
    "Gemma2ForCausalLM": Layers(dense=ATTENTION + llama.MLP_BETWEEN_NORMS),
    "Gemma3ForCausalLM": Layers(dense=ATTENTION + QK_NORMS + llama.MLP_BETWEEN_NORMS),
    # Attention and MLP read the output of the same norm.
    "Cohere2ForCausalLM": Layers(
        dense=(llama.norm("input_layernorm", "input_layernorm"),)
        + llama.PROJECTIONS
        + llama.MLP_PROJECTIONS
    ),
    "OlmoeForCausalLM": Layers(routed=ATTENTION + llama.projection_norms() + experts()),
    "MiniMaxM2ForCausalLM": Layers(
        routed=ATTENTION
        + llama.projection_norms(Split.HEADS_IN_VLLM)
        + experts("block_sparse_moe", "w1", "w3", "w2")
        + router_bias("block_sparse_moe.e_score_correction_bias")
    ),
    "HunYuanDenseV1ForCausalLM": Layers(
        dense=ATTENTION + llama.head_norms("query_layernorm", "key_layernorm") + MLP
    ),
    "InternLM3ForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "MiMoForCausalLM": Layers(dense=ATTENTION + QKV_BIAS + MLP),
    "BailingMoeV2ForCausalLM": BAILING_MOE_V2,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "Glm4MoeLiteForCausalLM": DEEPSEEK_V3,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5_MOE,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5_VL,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE_VL,
}
WITH_QKV_BIAS = (
    "Qwen2ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "SeedOssForCausalLM",
    "Qwen2MoeForCausalLM",
    "Starcoder2ForCausalLM",
    "InternLM3ForCausalLM",
    "MiMoForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)


def weights_of(
    spec: ModelSpec, *, value_head: int = 0, beside_logits: bool = False
) -> list[Weight]:
    """Return all global arrays of a model, under their Hugging Face names.

    Args:
        value_head: number of values per position. Above 0, the model is a critic: `score.weight` `[value_head, hidden]`
            replaces the language-model head, and embeddings are not tied.
        beside_logits: keep the language-model head beside the value head, for an actor and critic on one backbone.

    Raises:
        ModelError: the architecture has no table, or has attention biases that the table lacks.
    """
    if spec.architecture not in LAYERS:
        raise ModelError(
            f"architecture {spec.architecture!r} has no table of weights. Supported: {', '.join(LAYERS)}."
        )
    if spec.qkv_bias and spec.architecture not in WITH_QKV_BIAS:
        raise ModelError(
            f"{spec.architecture} with `attention_bias: true` is not supported: only {', '.join(WITH_QKV_BIAS)} may "
            "have biases on their attention projections."
        )
    return build(
        LAYERS[spec.architecture],
        spec,
        value_head=value_head,
        beside_logits=beside_logits,
    )
