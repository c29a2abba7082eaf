"""Dimensions of a model, read from a Hugging Face `config.json` as plain numbers without torch.

Also, which sizes of tensor and expert parallelism divide a model: one rule for
Megatron's grids and for vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megaverl.errors import ModelError
from megaverl.outside import read_json_file
from megaverl.sharding.model_config import (
    AGAIN,
    ALTERNATING_AXES,
    ATTENTION_BESIDE_MAMBA,
    EXPERT_KEYS,
    GRANITE_SCALES,
    IMAGE_MODEL_TYPES,
    LATENT_SIZES,
    LINEAR,
    MAMBA_LAYERS,
    MAYBE_NORMALIZED,
    MODEL_TYPES,
    NORM_EPS,
    NOT_IN_TRANSFORMERS,
    OTHER_ACTIVATION,
    PARTLY_ROTARY,
    ROTARY_BY_LAYER,
    ROTARY_IN_WINDOWS,
    ROTATED_IN_PAIRS,
    SCALES,
    SLIDING,
    SOFTCAPS,
    SOMETIMES_ROTARY,
    WITH_ATTENTION_BIAS,
    WITH_CHUNKS,
    WITH_DELTA_NET,
    WITH_LATENT_ATTENTION,
    Described,
    not_computed,
    num_dense_layers,
    tower_not_computed,
    windows_of,
    wrong_types,
)
from megaverl.sharding.transformers_config import is_model_type, read_by_transformers

# Supported language models, and supported models that take images as well.
ARCHITECTURES = tuple(MODEL_TYPES)
IMAGE_ARCHITECTURES = tuple(IMAGE_MODEL_TYPES)
# Reasons why other requested architectures are not supported (megatron-core 0.16).
NO_TABLE = {
    "DeepseekV32ForCausalLM": "megatron-core's sparse attention (0.16 to 0.19) needs fast-hadamard-transform, which is "
    "for GPUs alone, and reads packed rows from 0.19 on",
}
# Likewise for other models with images.
NO_TOWER = (
    "megaverl joins transformers' vision tower to megatron-core's GPTModel for "
    f"{', '.join(IMAGE_ARCHITECTURES)} only"
)
# Architectures whose vLLM implementation (0.32) differs from transformers'.
NOT_IN_VLLM = {
    "Gemma3nForCausalLM": "vLLM's (0.32) leaves out the embeddings of tokens that each layer has "
    "(`embed_tokens_per_layer`) where there are no images, and answers as another model"
}
# Alternative names of an `outline`'s numbers, by the most common one.
OTHER_NAMES = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "d_ff",
    ),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    ),
}
# vLLM's Phi-3 (0.32, `phi3.py`) has no windows. Its Transformers backend, which runs
# StarCoder2, has them only for models with `layer_types`.
NO_WINDOW_IN_VLLM = ("Phi3ForCausalLM", "Starcoder2ForCausalLM")
# Norms over the outputs of attention and MLP, besides those over their inputs.
WITH_NORMS_AFTER = (
    "Glm4ForCausalLM",
    "Olmo2ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
)
# No norms over the inputs of attention and MLP.
WITHOUT_NORMS_BEFORE = ("Olmo2ForCausalLM", "Exaone4ForCausalLM")
# Norms over each query and key head: always, or if `use_qk_norm` is true.
WITH_QK_NORM = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "HunYuanDenseV1ForCausalLM",
    *WITH_DELTA_NET,
)
# These norms follow the rotary embedding.
WITH_QK_NORM_AFTER_ROPE = ("HunYuanDenseV1ForCausalLM",)
MAYBE_QK_NORM = ("Glm4MoeForCausalLM", "BailingMoeV2ForCausalLM")
# Norms over all query heads together, and over all key heads together.
WITH_PROJECTION_NORM = (
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "MiniMaxM2ForCausalLM",
)
# Norms that subtract the mean, with a bias and without.
WITH_LAYER_NORM = ("NemotronForCausalLM", "Starcoder2ForCausalLM")
WITH_CENTRED_NORM = ("Cohere2ForCausalLM",)
# Norms that multiply by weight + 1.
NORM_PLUS_ONE = (
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "NemotronForCausalLM",
    *WITH_DELTA_NET,
)
# A sigmoid of a further projection scales the output of each attention head.
WITH_OUTPUT_GATE = WITH_DELTA_NET
# The MLP has no gate.
WITHOUT_GATE = (
    "ArceeForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "Starcoder2ForCausalLM",
)
# Attention and MLP read the same norm's output.
WITH_PARALLEL_LAYERS = ("Cohere2ForCausalLM",)
# vLLM's own models (0.32, `qwen2.py` and `qwen3.py`) have a window in all layers or in
# none.
NO_WINDOW_BY_LAYER_IN_VLLM = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MiMoForCausalLM",
)
# vLLM's windows (0.32) are one token longer than transformers'.
LONGER_WINDOW_IN_VLLM = ("Cohere2ForCausalLM",)
TEXT_PARTS = ("text_config", "llm_config", "language_config")
# Positions of a model that does not count them, such as Mamba.
UNLIMITED = 2**31 - 1
# Rotary base of models that do not have one.
DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class MoESpec:
    """Routed experts of a decoder's layers.

    Attributes:
        num_experts: routed experts of a layer.
        experts_per_token: experts that each token goes to.
        ffn_hidden_size: inner width of one routed expert.
        normalize_weights: divide the chosen experts' weights by their sum.
        num_dense_layers: number of first layers that have a plain MLP of `ModelSpec.ffn_hidden_size` instead, if
            `ModelSpec.layer_kinds` is empty.
        interval: of each run of this many layers, only the last one has experts (Llama 4's 2).
        shared_ffn_hidden_size: inner width of all shared experts together. 0: none.
        shared_gate: a sigmoid of one more projection of the hidden state scales the shared expert's output (Qwen2-MoE).
        router: function that turns scores into probabilities.
        router_bias: the router has a bias for choosing experts, which does not affect their weights (DeepSeek-V3's
            `e_score_correction_bias`).
        num_groups, groups_per_token: experts are in groups, and a token chooses within its best groups.
        scaling: factor on the routed experts' output.
        scales_input: a probability multiplies an expert's input instead of its output (Llama 4).
        aux_loss_coef: weight of the load-balancing loss in training.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalize_weights: bool
    num_dense_layers: int = 0
    interval: int = 1
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    scales_input: bool = False
    aux_loss_coef: float = 0.0

    def is_in(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has routed experts."""
        return layer >= self.num_dense_layers and (layer + 1) % self.interval == 0


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the latents and sizes inside a head.

    `q_lora_rank` is None if queries are projected from the hidden state directly.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class QueryScaling(NamedTuple):
    """Factor on queries that grows with their position p (Llama 4): 1 + strength ln(1 + floor((p + 1) / floor)).

    Positions are counted from 0. The idea is that of arXiv 2501.19399.
    """

    floor: float
    strength: float


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated delta nets in place of attention in some layers (arXiv 2412.06464).

    Attributes:
        num_key_heads: heads of queries and of keys.
        num_value_heads: heads of values, of which neighbours share a key head.
        key_head_dim, value_head_dim: sizes of a head.
        conv_width: taps of the causal convolution over queries, keys and values.
        layers: whether each layer is one.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    layers: tuple[bool, ...]

    @property
    def key_width(self) -> int:
        """Width of all key heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class MambaSpec:
    """Mamba-2 layers (arXiv 2405.21060).

    Attributes:
        num_heads: heads of the state space model.
        head_dim: width of a head.
        num_groups: groups of heads that share B and C, and the norm of the gated output if there is one.
        state_size: width of a head's state.
        conv_size: tokens that the causal convolution reads.
        conv_bias: the convolution has a bias.
        chunk_size: tokens of a chunk, within which outputs are computed as attention is. It does not change the result.
        has_norm: the gated output is normalized.
        in_scale, out_scale: factors on the layer's input and output.
        part_scales: factors on the parts of the input projection: the gate, x, B, C and the time steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_size: int
    conv_bias: bool
    chunk_size: int
    has_norm: bool = True
    in_scale: float = 1.0
    out_scale: float = 1.0
    part_scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def group_rows(self) -> int:
        """Rows of B, and of C, over all groups."""
        return self.num_groups * self.state_size

    @property
    def conv_rows(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.group_rows

    @property
    def in_rows(self) -> int:
        """Rows of the input projection: the gate, the convolution's channels, and a time step for each head."""
        return self.inner_size + self.conv_rows + self.num_heads


LayerKind = Literal["mamba", "attention", "mlp", "moe"]


@dataclass(frozen=True)
class VisionSpec:
    """Vision tower of a model that takes images: transformers' module, whose output replaces image tokens' embeddings.

    Attributes:
        family: transformers' `model_type` of the whole model.
        values: `vision_config`, from which transformers builds the tower.
        image_token: token that stands for a part of an image.
        depth: blocks of the tower.
        width: hidden size inside the tower.
        ffn: inner width of a block's MLP.
        num_heads: attention heads.
        patch: shape of a patch: channels, pictures in time, height, width.
        merge: one token covers merge x merge patches.
        num_positions: learned positions of patches. 0: none.
        deepstack: number of first decoder layers to whose outputs at image tokens further features are added
            (arXiv 2406.04334).
    """

    family: str
    values: dict[str, Any] = field(hash=False, repr=False)
    image_token: int
    depth: int
    width: int
    ffn: int
    num_heads: int
    patch: tuple[int, int, int, int]
    merge: int
    num_positions: int = 0
    deepstack: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions of a decoder-only transformer, with the meanings of Hugging Face.

    Attributes:
        rope_scaling: Hugging Face's dictionary (`rope_type`, ...). None: plain rotary embeddings.
        moe: the routed experts. None: every layer has a plain MLP.
        mla: multi-head latent attention. None: plain attention.
        delta_net: gated delta nets in some layers. None: every layer has attention.
        output_gate: a sigmoid of a further projection scales the output of each attention head (Qwen3-Next,
            Qwen3.5).
        mamba: Mamba-2 layers, beside attention in every layer if `layer_kinds` is empty. None: there are none.
        layer_kinds: the only part of each layer. Empty: every layer has attention and an MLP.
        has_rope: attention has rotary embeddings.
        activation: activation of the MLP's gate. `gelu_tanh` is Hugging Face's `gelu_pytorch_tanh`, `squared_relu` its
            `relu2`. `clamped_swiglu` (gpt-oss) is gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up
            between -7 and 7.
        is_gated: the MLP multiplies the activation by a second projection. False: it has one projection.
        norm: `rms` is RMSNorm, `layer` LayerNorm with a bias, `centred` LayerNorm without (Cohere).
        norm_plus_one: norms multiply by weight + 1 (Gemma), Megatron's `layernorm_zero_centered_gamma`.
        norms_before: norms over the inputs of attention and MLP. OLMo-2 has none.
        norms_after: norms over the outputs of attention and MLP, before they are added (GLM-4).
        parallel_layers: the MLP reads the same norm's output as attention does, and both outputs are added (Cohere).
        qk_norm_spans_heads: `qk_norm` is over all query heads together, and all key heads together (OLMo-2).
        qk_norm_after_rope: `qk_norm` follows the rotary embedding (HunYuan). False: it precedes it.
        qk_l2_norm: rotated queries and keys of each head are divided by their root mean square, without weights, in
            layers with rotary embeddings (Llama 4).
        query_scaling: factor on queries of the layers without rotary embeddings. None: none, or it stays 1 for all
            positions.
        rotary_fraction: fraction of each head, from its first dimension on, that rotary embeddings rotate.
        rotary_pairs: rotary embeddings rotate pairs of neighbouring dimensions of a head, as in GLM-4. False: each
            dimension of a head's first half with that of its second half.
        layers_without_rope: whether each layer has no rotary embeddings. Empty: all have them.
        local_rope_theta: rotary base of the layers in `local_rope_layers` (Gemma 3). None: all have `rope_theta`.
        local_rope_layers: whether each layer has `local_rope_theta`.
        embedding_scale: factor on embeddings, sqrt(hidden_size) in Gemma.
        softmax_scale: factor on attention's scores. None: 1 / sqrt(head_dim).
        gate_scale: factor on the MLP's gates before their activation (Falcon-H1).
        attention_out_scale, mlp_out_scale: factors on the outputs of attention and MLP (Granite, Falcon-H1).
        logit_scale: factor on logits.
        attention_softcap: cap c of attention's scores s, which become c tanh(s / c) (Gemma 2). None: no cap.
        logit_softcap: the same for logits.
        sliding_window: attention's window in tokens. None: full attention.
        windowed_layers: whether each layer attends within the window. Empty: all layers do.
        attention_chunk: tokens of a chunk. In layers with rotary embeddings a token attends only to tokens of its own
            chunk (Llama 4). None: there are no chunks.
        linear_bias: all linear layers of the decoder have a bias, including experts and routers.
        attention_sinks: attention's softmax has one more learned score per head, with a value of zero.
        vision: the vision tower. None: the model takes no images.
        rope_axes: axis (0 time, 1 height, 2 width) whose position rotates each dimension of a head's first half. Empty:
            positions have one axis.
        is_tabled: all of this was read as Megatron's tables need it. False: an `outline`, as accurate as config.json.
        source: path of the config.json.
        trusts_code: Python files beside `source` may run (`model.trust_remote_code`).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    rotary_fraction: float = 1.0
    rotary_pairs: bool = False
    layers_without_rope: tuple[bool, ...] = ()
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    delta_net: DeltaNetSpec | None = None
    output_gate: bool = False
    mamba: MambaSpec | None = None
    layer_kinds: tuple[LayerKind, ...] = ()
    has_rope: bool = True
    activation: Literal["silu", "gelu_tanh", "squared_relu", "clamped_swiglu"] = "silu"
    is_gated: bool = True
    norm: Literal["rms", "layer", "centred"] = "rms"
    norm_plus_one: bool = False
    norms_before: bool = True
    norms_after: bool = False
    parallel_layers: bool = False
    qk_norm_spans_heads: bool = False
    qk_norm_after_rope: bool = False
    qk_l2_norm: bool = False
    query_scaling: QueryScaling | None = None
    local_rope_theta: float | None = None
    local_rope_layers: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    softmax_scale: float | None = None
    gate_scale: float = 1.0
    attention_out_scale: float = 1.0
    mlp_out_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    attention_chunk: int | None = None
    linear_bias: bool = False
    attention_sinks: bool = False
    vision: VisionSpec | None = None
    rope_axes: tuple[int, ...] = ()
    is_tabled: bool = True
    source: str = ""
    trusts_code: bool = False

    @property
    def mlp_matrices(self) -> int:
        """Number of an MLP's matrices: gate, up and down, or up and down without gates."""
        return 3 if self.is_gated else 2

    @property
    def has_mamba_beside_attention(self) -> bool:
        """Return whether every layer adds the outputs of attention and of a Mamba-2 layer (Falcon-H1)."""
        return self.mamba is not None and not self.layer_kinds

    def rotates(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has rotary embeddings."""
        return self.has_rope and not (
            self.layers_without_rope and self.layers_without_rope[layer]
        )

    @property
    def is_recurrent(self) -> bool:
        """Return whether layers carry a state from token to token, so that samples cannot share tokens of a row."""
        return self.mamba is not None or self.delta_net is not None

    @property
    def routed_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has routed experts."""
        if self.layer_kinds:
            return tuple(kind == "moe" for kind in self.layer_kinds)
        moe = self.moe
        return tuple(
            moe is not None and moe.is_in(layer) for layer in range(self.num_layers)
        )

    def count_layers(self, kind: LayerKind) -> int:
        """Return the number of layers that have this part."""
        if self.layer_kinds:
            return self.layer_kinds.count(kind)
        if kind == "mamba":
            return self.num_layers * self.has_mamba_beside_attention
        if kind in ("mlp", "moe"):
            num_routed = sum(self.routed_layers)
            return num_routed if kind == "moe" else self.num_layers - num_routed
        num_nets = sum(self.delta_net.layers) if self.delta_net else 0
        return self.num_layers - num_nets * (kind == "attention")

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json` of a model that Megatron-core can build.

        Raises:
            ModelError: the file is missing or not JSON, the architecture is not supported, or a key is missing.
        """
        return cls.from_config(*_config_of(folder))

    @classmethod
    def outline(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json` of any model that transformers can build.

        The result is that of `from_folder` if possible, else only what lengths and
        memory are estimated from.

        Raises:
            ModelError: the file is missing, is not JSON, or has no vocabulary size.
        """
        return cls.outline_of(*_config_of(folder))

    @classmethod
    def outline_of(
        cls, config: dict[str, Any], source: str = "config.json"
    ) -> ModelSpec:
        """Return the outline of a `config.json` given as a dictionary."""
        try:
            return cls.from_config(config, source)
        except ModelError:
            # `from_config` also refuses values that are no JSON object, which have no
            # outline either.
            if not isinstance(config, dict):
                raise
            return cls(**_outlined(config, source))

    @classmethod
    def from_config(
        cls, config: dict[str, Any], source: str = "config.json"
    ) -> ModelSpec:
        """Return the spec of a `config.json` given as a dictionary.

        Raises:
            ModelError: as `from_folder`, or the model would be computed differently from its author's intention. Lists
                everything that is wrong.
        """
        if not isinstance(config, dict):
            raise ModelError(
                f"{source}: expected a JSON object, found {type(config).__name__}. {AGAIN}"
            )
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in (*ARCHITECTURES, *IMAGE_ARCHITECTURES):
            reason = NO_TABLE.get(architecture)
            if config.get("vision_config") is not None:
                reason = NO_TOWER
            remark = "" if reason is None else f" by Megatron: {reason}"
            raise ModelError(
                f"{source}: architecture {architecture!r} is not supported{remark}. `megaverl models` lists those that "
                f"are. {_under_fsdp(config)}"
            )
        written_type = config.get("model_type")
        model_type = (MODEL_TYPES | IMAGE_MODEL_TYPES)[architecture]
        if written_type != model_type and is_model_type(written_type):
            raise ModelError(
                f"{source}: model_type is {written_type!r} and the architecture {architecture}, whose type is "
                f"{model_type!r}: transformers would build the former, vLLM the latter. {AGAIN}"
            )
        # The first folders of models with images have the decoder's fields beside the
        # tower's.
        decoder = config.get("text_config")
        written = decoder if isinstance(decoder, dict) else config
        problems = [*wrong_types(architecture, written)]
        if not problems:
            values = read_by_transformers(model_type, config, source)
            vision = values if architecture in IMAGE_ARCHITECTURES else None
            if vision is not None:
                tied = {"tie_word_embeddings": values["tie_word_embeddings"]}
                values = values["text_config"] | tied
            described = Described(architecture, values, written=written)
            problems = [*not_computed(described)]
            if vision is not None:
                problems += tower_not_computed(described, vision)
        if problems:
            raise ModelError("\n".join(f"{source}: {problem}" for problem in problems))
        fields = _read(described)
        if vision is not None:
            fields |= _read_vision(described, vision)
        return cls(**fields, source=source)


def _under_fsdp(config: dict[str, Any]) -> str:
    """Return a sentence on whether FSDP2 can train a model that Megatron cannot: whether transformers can build it."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    model_type = str(config.get("model_type"))
    # `models.vision.auto_class_of` decides in the same way.
    has_images = config.get("vision_config") is not None
    built = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if has_images
        else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if model_type in built:
        return f"transformers builds {model_type} models: set actor.engine=fsdp."
    if config.get("auto_map"):
        return (
            f"transformers {__version__} builds no policy of {model_type}. The folder brings code of its own: "
            "actor.engine=fsdp with model.trust_remote_code=true trains it if that code runs with this version of "
            "transformers. `megaverl models FOLDER` tries it."
        )
    return (
        f"actor.engine=fsdp does not train it either: transformers {__version__} builds no policy of {model_type}. "
        "Choose another model."
    )


def _config_of(folder: str | Path) -> tuple[dict[str, Any], str]:
    """Return a folder's config.json and its path."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: not found. `model.path` must name a Hugging Face folder with config.json, "
            "safetensors weights and a tokenizer."
        )
    try:
        config = read_json_file(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}). {AGAIN}") from error
    return config, str(path)


def _outlined(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of an outline, from the few names that most config.json files use.

    A model with images has its decoder's fields in `text_config`.
    """
    config = _with_defaults(config)
    parts = [
        config,
        *(part for key in TEXT_PARTS if isinstance(part := config.get(key), dict)),
    ]

    def number(name: str, default: int) -> int:
        # Names are tried from the most common one on, each in the model's own part and
        # then in its text part.
        values = (
            part[key] for key in OTHER_NAMES[name] for part in parts if key in part
        )
        return next(
            (value for value in values if type(value) is int and value > 0), default
        )

    vocab_size = number("vocab_size", 0)
    if not vocab_size:
        raise ModelError(
            f"{source}: none of {', '.join(OTHER_NAMES['vocab_size'])} is a number above 0. {AGAIN}"
        )
    hidden = number("hidden_size", 0)
    heads = number("num_attention_heads", 1)
    tied = next(
        (part[key] for part in parts if (key := "tie_word_embeddings") in part), True
    )
    return {
        "architecture": str((config.get("architectures") or ["unnamed"])[0]),
        "num_layers": number("num_hidden_layers", 1),
        "hidden_size": hidden,
        "ffn_hidden_size": number("intermediate_size", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": number("num_key_value_heads", heads),
        "head_dim": number("head_dim", hidden // heads or 1),
        "vocab_size": vocab_size,
        "tie_embeddings": bool(tied),
        "qkv_bias": False,
        "qk_norm": False,
        "norm_eps": 1e-5,
        "rope_theta": DEFAULT_ROPE_THETA,
        "max_positions": number("max_position_embeddings", UNLIMITED),
        "is_tabled": False,
        "source": source,
    }


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the defaults of transformers' class, or unchanged if transformers cannot read it."""
    architecture = (config.get("architectures") or [None])[0]
    model_type = config.get("model_type") or MODEL_TYPES.get(architecture)
    if not isinstance(model_type, str) or not is_model_type(model_type):
        return config
    try:
        return {**config, **read_by_transformers(model_type, config)}
    except ModelError:
        return config


def _read(described: Described) -> dict[str, Any]:
    """Return the fields of `ModelSpec`."""
    architecture = described.architecture
    values = described.values
    rope = described.rope
    num_heads = values["num_attention_heads"]
    is_gpt_oss = architecture == "GptOssForCausalLM"
    is_partly_rotary = architecture in PARTLY_ROTARY
    fields = {
        "architecture": architecture,
        "num_layers": values.get("num_hidden_layers"),
        "hidden_size": values["hidden_size"],
        # Qwen3.5's class with experts alone has no plain MLP, and no such key.
        # Experts of Llama 4 are `intermediate_size` wide.
        "ffn_hidden_size": values.get("intermediate_size_mlp")
        or values.get("intermediate_size")
        or values["moe_intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": values["num_key_value_heads"],
        # Some classes lack this key, or have null.
        "head_dim": values.get("head_dim") or values["hidden_size"] // num_heads,
        "vocab_size": values["vocab_size"],
        "tie_embeddings": bool(values["tie_word_embeddings"]),
        "qkv_bias": _has_qkv_bias(described),
        "qk_norm": architecture in (*WITH_QK_NORM, *WITH_PROJECTION_NORM)
        or (architecture in MAYBE_QK_NORM and bool(values["use_qk_norm"])),
        "qk_norm_spans_heads": architecture in WITH_PROJECTION_NORM,
        "qk_norm_after_rope": architecture in WITH_QK_NORM_AFTER_ROPE,
        "norm_eps": values[NORM_EPS.get(architecture, "rms_norm_eps")],
        "rope_theta": _rotary_base(described),
        "rope_scaling": _rope_scaling(rope),
        "rotary_fraction": float(rope.get("partial_rotary_factor", 1.0))
        if is_partly_rotary
        else 1.0,
        "rotary_pairs": architecture in ROTATED_IN_PAIRS,
        "layers_without_rope": _layers_without_rope(described),
        "max_positions": values["max_position_embeddings"],
        "activation": OTHER_ACTIVATION.get(architecture, ("silu", "silu"))[1],
        "is_gated": architecture not in WITHOUT_GATE,
        "norm_plus_one": architecture in NORM_PLUS_ONE,
        "norms_before": architecture not in WITHOUT_NORMS_BEFORE,
        "norms_after": architecture in WITH_NORMS_AFTER,
        "parallel_layers": architecture in WITH_PARALLEL_LAYERS,
        "output_gate": architecture in WITH_OUTPUT_GATE,
        **_scales(described),
    }
    if architecture in SOFTCAPS:
        caps = [values[key] for key in SOFTCAPS[architecture]]
        of_scores, of_logits = (None if cap is None else float(cap) for cap in caps)
        fields |= {"attention_softcap": of_scores, "logit_softcap": of_logits}
    if architecture in WITH_CHUNKS:
        fields |= _read_chunks(described)
    if architecture in WITH_LAYER_NORM:
        fields["norm"] = "layer"
    elif architecture in WITH_CENTRED_NORM:
        fields["norm"] = "centred"
    if architecture == "Starcoder2ForCausalLM":
        fields["linear_bias"] = bool(values["use_bias"])
    if architecture in ROTARY_BY_LAYER:
        fields |= {
            "local_rope_theta": float(described.local_rope["rope_theta"]),
            "local_rope_layers": tuple(
                kind == SLIDING for kind in values["layer_types"]
            ),
        }
    if architecture in MAMBA_LAYERS:
        fields |= _read_mamba(described)
        return fields
    if architecture in ATTENTION_BESIDE_MAMBA:
        fields["mamba"] = _read_mamba_beside_attention(values)
    if architecture in EXPERT_KEYS:
        moe = _read_experts(described)
        # Fewer layers than an interval have no experts.
        has_experts = any(map(moe.is_in, range(values["num_hidden_layers"])))
        fields["moe"] = moe if has_experts else None
    if architecture in WITH_LATENT_ATTENTION:
        mla = MLASpec(values["q_lora_rank"], *(values[key] for key in LATENT_SIZES))
        # Every head has its own keys and values, whatever num_key_value_heads is.
        fields |= {
            "mla": mla,
            "num_kv_heads": num_heads,
            "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        }
    if architecture in WITH_DELTA_NET:
        fields["delta_net"] = DeltaNetSpec(
            num_key_heads=values["linear_num_key_heads"],
            num_value_heads=values["linear_num_value_heads"],
            key_head_dim=values["linear_key_head_dim"],
            value_head_dim=values["linear_value_head_dim"],
            conv_width=values["linear_conv_kernel_dim"],
            layers=tuple(kind == LINEAR for kind in values["layer_types"]),
        )
    window, windowed_layers = windows_of(described)
    fields |= {"sliding_window": window, "windowed_layers": windowed_layers}
    if is_gpt_oss:
        fields |= {
            "activation": "clamped_swiglu",
            "linear_bias": True,
            "attention_sinks": True,
        }
    return fields


def _read_vision(described: Described, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that only models with images have.

    Args:
        values: keys of the whole config.json, with defaults.
    """
    tower = values["vision_config"]
    family = IMAGE_MODEL_TYPES[described.architecture]
    # In Qwen2-VL `hidden_size` is the width of the tower's output.
    width = tower["embed_dim"] if family == "qwen2_vl" else tower["hidden_size"]
    ffn = (
        int(width * tower["mlp_ratio"])
        if family == "qwen2_vl"
        else tower["intermediate_size"]
    )
    size = tower["patch_size"]
    vision = VisionSpec(
        family,
        tower,
        image_token=values["image_token_id"],
        depth=tower["depth"],
        width=width,
        ffn=ffn,
        num_heads=tower["num_heads"],
        patch=(tower["in_channels"], tower["temporal_patch_size"], size, size),
        merge=tower["spatial_merge_size"],
        num_positions=tower.get("num_position_embeddings") or 0,
        deepstack=len(tower.get("deepstack_visual_indexes") or ()),
    )
    sections = described.rope["mrope_section"]
    return {
        "vision": vision,
        "rope_axes": _axes_in_turn(sections)
        if described.architecture in ALTERNATING_AXES
        else tuple(axis for axis, count in enumerate(sections) for _ in range(count)),
    }


def _axes_in_turn(sections: list[int]) -> tuple[int, ...]:
    """Return the axis of each dimension of half a head, where axes alternate until height and width are used up."""
    return tuple(
        dimension % 3 if dimension < 3 * sections[dimension % 3] else 0
        for dimension in range(sum(sections))
    )


def _read_chunks(described: Described) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that a model with attention within chunks has.

    What no position of the model reaches is left out.
    """
    values = described.values
    longest = values["max_position_embeddings"]
    chunk = values["attention_chunk_size"]
    floor = float(values["floor_scale"])
    is_scaled = bool(values["attn_temperature_tuning"]) and floor <= longest
    return {
        "attention_chunk": chunk if chunk < longest else None,
        "qk_l2_norm": bool(values["use_qk_norm"]),
        "query_scaling": QueryScaling(floor, float(values["attn_scale"]))
        if is_scaled
        else None,
    }


def _read_mamba(described: Described) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that a model with Mamba-2 layers has."""
    values = described.values
    kinds = MAMBA_LAYERS[described.architecture]
    layer_kinds = tuple(kinds[name] for name in values["layers_block_type"])
    return {
        "num_layers": len(layer_kinds),
        "layer_kinds": layer_kinds,
        "moe": _read_experts(described) if "moe" in layer_kinds else None,
        "mamba": MambaSpec(
            num_heads=values["mamba_num_heads"],
            head_dim=values["mamba_head_dim"],
            num_groups=values["n_groups"],
            state_size=values["ssm_state_size"],
            conv_size=values["conv_kernel"],
            conv_bias=bool(values["use_conv_bias"]),
            chunk_size=values["chunk_size"],
        ),
        "has_rope": False,
        # Neither transformers' class (5.19) nor vLLM's (0.32) reads the key.
        "tie_embeddings": False,
    }


def _read_mamba_beside_attention(values: dict[str, Any]) -> MambaSpec:
    """Return the Mamba-2 part of Falcon-H1's layers."""
    return MambaSpec(
        num_heads=values["mamba_n_heads"],
        head_dim=values["mamba_d_head"],
        num_groups=values["mamba_n_groups"],
        state_size=values["mamba_d_state"],
        conv_size=values["mamba_d_conv"],
        conv_bias=bool(values["mamba_conv_bias"]),
        chunk_size=values["mamba_chunk_size"],
        has_norm=bool(values["mamba_rms_norm"]),
        in_scale=float(values["ssm_in_multiplier"]),
        out_scale=float(values["ssm_out_multiplier"]),
        part_scales=tuple(map(float, values["ssm_multipliers"])),
    )


def _scales(described: Described) -> dict[str, float]:
    """Return the factors on embeddings, scores of attention, outputs of layers and logits, if there are any."""
    values = described.values
    architecture = described.architecture
    if SCALES.get(architecture) == GRANITE_SCALES:
        return {
            "embedding_scale": float(values["embedding_multiplier"]),
            "softmax_scale": float(values["attention_multiplier"]),
            "attention_out_scale": float(values["residual_multiplier"]),
            "mlp_out_scale": float(values["residual_multiplier"]),
            "logit_scale": 1.0 / float(values["logits_scaling"]),
        }
    if architecture in ATTENTION_BESIDE_MAMBA:
        return _falcon_scales(values)
    if architecture == "Cohere2ForCausalLM":
        return {"logit_scale": float(values["logit_scale"])}
    if architecture not in (
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    ):
        return {}
    scales = {"embedding_scale": values["hidden_size"] ** 0.5}
    if architecture != "GemmaForCausalLM":
        scales["softmax_scale"] = values["query_pre_attn_scalar"] ** -0.5
    return scales


def _falcon_scales(values: dict[str, Any]) -> dict[str, float]:
    """Return Falcon-H1's factors outside the Mamba-2 layers.

    The factor on attention's input reaches queries, keys and values. Scores are
    proportional to queries and keys, and the output to values.
    """
    num_heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // num_heads
    of_input = float(values["attention_in_multiplier"])
    gate, down = values["mlp_multipliers"]
    return {
        "embedding_scale": float(values["embedding_multiplier"]),
        "softmax_scale": of_input**2 * values["key_multiplier"] * head_dim**-0.5,
        "attention_out_scale": of_input * values["attention_out_multiplier"],
        "gate_scale": float(gate),
        "mlp_out_scale": float(down),
        "logit_scale": float(values["lm_head_multiplier"]),
    }


# Architectures whose key of biases on queries, keys and values is not `attention_bias`.
QKV_BIAS_KEYS = {
    "Qwen2MoeForCausalLM": "qkv_bias",
    "InternLM3ForCausalLM": "qkv_bias",
    "Starcoder2ForCausalLM": "use_bias",
}


def _has_qkv_bias(described: Described) -> bool:
    """Return whether the projections to queries, keys and values have biases."""
    if described.architecture in WITH_ATTENTION_BIAS:
        return True
    key = QKV_BIAS_KEYS.get(described.architecture, "attention_bias")
    return bool(described.values.get(key))


def _layers_without_rope(described: Described) -> tuple[bool, ...]:
    """Return whether each layer has no rotary embeddings; empty if all have them."""
    values = described.values
    if described.architecture in ROTARY_IN_WINDOWS:
        if values["sliding_window"] is None:
            return ()
        without_rope = tuple(kind != SLIDING for kind in values["layer_types"])
        return without_rope if any(without_rope) else ()
    if described.architecture not in SOMETIMES_ROTARY:
        return ()
    with_rope = described.values["no_rope_layers"][
        : described.values["num_hidden_layers"]
    ]
    return () if all(with_rope) else tuple(not entry for entry in with_rope)


def _rotary_base(described: Described) -> float:
    """Return the base of the rotary embedding, multiplied by alpha^(d / (d - 2)) for scaling "dynamic" with alpha."""
    rope = described.rope
    if described.architecture in MAMBA_LAYERS:
        return DEFAULT_ROPE_THETA
    base = float(rope["rope_theta"])
    if rope["rope_type"] != "dynamic" or "alpha" not in rope:
        return base
    head_dim = described.values["head_dim"]
    factor: float = rope["alpha"] ** (head_dim / (head_dim - 2))
    return base * factor


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of the rotary embedding under its new name `rope_type`, or None without scaling.

    `_rotary_base` contains the scaling "dynamic".
    """
    if rope.get("rope_type", "default") in ("default", "dynamic"):
        return None
    # `type` is the old name of `rope_type`. The other two are fields of ModelSpec.
    elsewhere = ("type", "rope_theta", "partial_rotary_factor")
    return {key: value for key, value in rope.items() if key not in elsewhere}


def _read_experts(described: Described) -> MoESpec:
    """Return the routed experts."""
    values = described.values
    keys = EXPERT_KEYS[described.architecture]
    width = values[keys.width]
    moe = MoESpec(
        num_experts=values[keys.number],
        experts_per_token=values[keys.per_token],
        ffn_hidden_size=width,
        # The classes of Mixtral, gpt-oss, Granite MoE and Ernie 4.5 have no such key;
        # their weights always sum to one.
        normalize_weights=bool(values["norm_topk_prob"])
        if described.architecture in MAYBE_NORMALIZED
        else True,
        # transformers applies the coefficient only if the router's outputs are requested.
        aux_loss_coef=float(values["router_aux_loss_coef"])
        if keys.has_aux_loss and values["output_router_logits"]
        else 0.0,
    )
    if keys.shared_width:
        moe = replace(
            moe, shared_ffn_hidden_size=values[keys.shared_width], shared_gate=True
        )
    if keys.has_shared:
        moe = replace(
            moe,
            num_dense_layers=num_dense_layers(values),
            shared_ffn_hidden_size=values[keys.shared_number] * width,
            scaling=float(values["routed_scaling_factor"]),
        )
    if keys.shared_alone:
        moe = replace(
            moe,
            shared_ffn_hidden_size=values[keys.shared_alone],
            scaling=float(values["routed_scaling_factor"]),
        )
    if keys.num_shared:
        moe = replace(
            moe,
            num_dense_layers=values["moe_layer_start_index"],
            shared_ffn_hidden_size=values[keys.num_shared] * width,
        )
    if keys.scales_input:
        moe = replace(
            moe,
            interval=values["interleave_moe_layer_step"],
            shared_ffn_hidden_size=width,
            router="sigmoid",
            normalize_weights=False,
            scales_input=True,
        )
    if keys.by_sigmoid:
        moe = replace(moe, router="sigmoid", router_bias=True)
    elif keys.by_biased_softmax:
        moe = replace(moe, router_bias=True)
    if keys.has_groups:
        moe = replace(
            moe,
            num_groups=values["n_group"],
            groups_per_token=values["topk_group"],
        )
    return moe


class Misfit(NamedTuple):
    """Size of a parallel axis that does not divide a model.

    Attributes:
        axis: the parallel axis.
        size: its size.
        parts: what it does not divide, such as "6 key-value heads".
        fitting: sizes that divide everything on this axis.
    """

    axis: Literal["tp", "etp", "ep"]
    size: int
    parts: list[str]
    fitting: list[int]

    @property
    def reason(self) -> str:
        """Sentence that says what is not divided, and which sizes fit."""
        fitting = ", ".join(map(str, self.fitting))
        return f"does not divide the model's {' and '.join(self.parts)}. Sizes that fit: {fitting}."

    def __str__(self) -> str:
        return f"{self.axis}={self.size} {self.reason}"


# Models whose engine and trainer were compared to the bit, by tests/workers/test_batch_invariant.py.
BATCH_INVARIANT = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def why_not_batch_invariant(spec: ModelSpec) -> str:
    """Return why engine and trainer cannot agree to the bit on a CPU (`rollout.batch_invariant`), or "" if they can."""
    if spec.is_recurrent:
        return f"engine and trainer add up the states of {spec.architecture}'s layers in different chunks"
    if spec.moe is not None:
        return "vLLM's CPU kernel for experts adds their outputs in an order of its own"
    if spec.rope_scaling and spec.rope_scaling.get("rope_type") != "default":
        return "vLLM and megatron-core round scaled rotary frequencies differently"
    if spec.architecture not in BATCH_INVARIANT:
        return (
            f"{spec.architecture} was not compared; {', '.join(BATCH_INVARIANT)} were"
        )
    return ""


def why_not_in_vllm(spec: ModelSpec) -> str:
    """Return why vLLM computes this model differently from the trainer, or "" if it does not."""
    if reason := NOT_IN_VLLM.get(spec.architecture):
        return reason
    if spec.architecture in NO_WINDOW_IN_VLLM and spec.sliding_window is not None:
        return (
            f"vLLM's {spec.architecture} (0.32) has no sliding window, and this model has one of {spec.sliding_window} "
            f"tokens. If no sample is longer, set max_position_embeddings to {spec.sliding_window} in config.json"
        )
    if spec.architecture in LONGER_WINDOW_IN_VLLM and spec.sliding_window is not None:
        return (
            f"vLLM's {spec.architecture} (0.32, `commandr.py`) attends to {spec.sliding_window + 1} tokens in layers "
            f"with a window, transformers to {spec.sliding_window}. If no sample is longer, set "
            f"max_position_embeddings to {spec.sliding_window} in config.json"
        )
    if spec.architecture in NO_WINDOW_BY_LAYER_IN_VLLM and spec.windowed_layers:
        return (
            "vLLM's (0.32, `qwen2.py`) has no sliding window in some layers only, and this model has one of "
            f"{spec.sliding_window} tokens in {sum(spec.windowed_layers)} of its {spec.num_layers} layers"
        )
    return ""


def why_not_in_transformers(architecture: str) -> str:
    """Return why transformers cannot build a model without the code in its folder, or "" if it can."""
    if architecture not in NOT_IN_TRANSFORMERS:
        return ""
    return (
        f"transformers (5.19) has no class of {architecture}, so that actor.engine=fsdp and rollout.engine=hf cannot "
        "build it. Use actor.engine=megatron and rollout.engine=vllm. If you trust the Python files that come with the "
        "model, model.trust_remote_code=true tries them instead."
    )


def why_not_quantised(spec: ModelSpec) -> str:
    """Return why an engine's weights cannot be quantised, or trained for that, in any format, or "" if they can."""
    if spec.is_recurrent:
        return (
            f"{spec.architecture} has layers with a state, whose projections were not compared in few bits. Leave it "
            "out"
        )
    if spec.moe is not None and spec.moe.scales_input:
        return (
            f"vLLM transposes the experts of {spec.architecture} as it loads, which were not compared in few bits. "
            "Leave it out"
        )
    return ""


def why_no_drafts(spec: ModelSpec) -> str:
    """Return why an engine cannot propose tokens to this model (`rollout.vllm.speculative_config`), or ""."""
    if spec.is_recurrent:
        return (
            f"layers of {spec.architecture} carry a state, which a refused draft must be taken out of again; that has "
            "not been tested"
        )
    if spec.attention_chunk is not None:
        return (
            f"drafts were not tested with the chunks of {spec.architecture}'s attention"
        )
    return ""


def shares_kv_heads(spec: ModelSpec, tp: int) -> bool:
    """Return whether several of `tp` ranks use the same key-value head, since there are fewer heads than ranks."""
    return spec.mla is None and spec.num_kv_heads < tp


def why_rows_not_cut(spec: ModelSpec, *, cp: int, tp: int) -> str:
    """Return why context parallelism cannot split this model's rows, or "" if it can.

    Layers with a state divide the heads of each of `tp` ranks over `cp` ranks
    (`models/context_heads.py`).
    """
    if cp == 1:
        return ""
    if spec.vision is not None:
        return f"images of {spec.architecture} are not cut over ranks. Use cp=1"
    heads, groups = 0, 1
    parts = ""
    if (net := spec.delta_net) is not None:
        heads = net.num_key_heads // tp
        parts = f"{heads} key heads of gated delta nets"
    elif (mamba := spec.mamba) is not None:
        heads = mamba.num_heads // tp
        # If there are fewer groups than tensor-parallel ranks, each has a part of one.
        groups = max(1, mamba.num_groups // tp)
        parts = f"{heads} Mamba heads in {groups} group{'s' * (groups > 1)}"

    def fits(size: int) -> bool:
        # Ranks that compute heads of the same group have a copy of its rows each.
        return heads % size == 0 and (groups % size == 0 or size % groups == 0)

    if fits(cp):
        return ""
    fitting = ", ".join(str(size) for size in range(1, heads + 1) if fits(size))
    return f"it does not divide the {parts} that each of tp={tp} ranks has. Sizes that fit: {fitting}"


def misfits(
    spec: ModelSpec, *, tp: int, etp: int = 1, ep: int = 1, engine: bool = False
) -> list[Misfit]:
    """Return the sizes that do not divide the model.

    There may be fewer key-value heads than tensor-parallel ranks if their number
    divides the ranks: vLLM gives each rank a copy of its head, and Megatron splits the
    rows of `linear_qkv` evenly, even inside a head.

    Args:
        tp: tensor-parallel size.
        etp: tensor-parallel size inside routed experts.
        ep: expert-parallel size.
        engine: check vLLM's sizes instead: vLLM can split experts with biases, megatron-core (0.16 to 0.19) cannot.
    """
    moe = spec.moe
    kv_heads = spec.num_kv_heads

    # Either the ranks divide the heads, or the heads divide the ranks and the rows of
    # keys and values can be split evenly.
    def fits_kv(size: int) -> bool:
        return not kv_heads % size or not (
            size % kv_heads or 2 * kv_heads * spec.head_dim % size
        )

    by_tp = {f"{spec.num_heads} attention heads": _divides(spec.num_heads)}
    if spec.mamba is not None:
        by_tp |= _mamba_parts(spec.mamba, engine)
    if spec.mla is None:
        # vLLM's gpt-oss (0.32, `gpt_oss.py`) cannot copy heads to several ranks.
        by_tp[f"{kv_heads} key-value heads"] = (
            _divides(kv_heads) if engine and spec.attention_sinks else fits_kv
        )
    if spec.delta_net is not None:
        # Each rank has whole key heads, with the value heads that share them.
        heads = spec.delta_net.num_key_heads
        by_tp[f"{heads} key heads of gated delta nets"] = _divides(heads)
    if moe is None or spec.count_layers("mlp"):
        by_tp[f"{spec.ffn_hidden_size} feed-forward units"] = _divides(
            spec.ffn_hidden_size
        )
    if moe is not None and (shared := moe.shared_ffn_hidden_size):
        by_tp[f"{shared} units of the shared experts"] = _divides(shared)
    checked = [_misfit("tp", tp, by_tp, spec.num_heads)]
    if moe is not None:
        width = moe.ffn_hidden_size
        experts = moe.num_experts
        by_etp = {f"{width} units of an expert": _divides(width)}
        if spec.linear_bias and not engine:
            by_etp = {
                "experts, which stay whole as they have biases": lambda size: size == 1
            }
        checked.append(_misfit("etp", etp, by_etp, width))
        checked.append(
            _misfit("ep", ep, {f"{experts} experts": _divides(experts)}, experts)
        )
    return [misfit for misfit in checked if misfit is not None]


def _mamba_parts(mamba: MambaSpec, engine: bool) -> dict[str, Callable[[int], bool]]:
    """Return which sizes of tensor parallelism divide a Mamba-2 layer.

    Several ranks can share a group. In vLLM each of them then has a copy of its rows,
    which works for a single group whose convolution has a bias (0.32,
    `mamba_mixer2.py`). In Megatron they divide its rows.
    """
    groups = mamba.num_groups

    def fits_groups(size: int) -> bool:
        if not groups % size:
            return True
        if engine:
            return groups == 1 and mamba.conv_bias
        return not (size % groups or mamba.group_rows % size)

    words = f"{groups} Mamba group{'s' * (groups > 1)}"
    if engine and groups == 1 and not mamba.conv_bias:
        words += ", which vLLM copies only with a bias of the convolution"
    return {
        f"{mamba.num_heads} Mamba heads": _divides(mamba.num_heads),
        words: fits_groups,
    }


def _divides(number: int) -> Callable[[int], bool]:
    """Return a predicate for sizes that divide `number`."""
    return lambda size: number % size == 0


def _misfit(
    axis: Literal["tp", "etp", "ep"],
    size: int,
    parts: dict[str, Callable[[int], bool]],
    largest: int,
) -> Misfit | None:
    """Return the misfit of one axis, or None if `size` divides all parts."""
    broken = [words for words, fits in parts.items() if not fits(size)]
    if not broken:
        return None
    return Misfit(
        axis,
        size,
        broken,
        [
            divisor
            for divisor in range(1, largest + 1)
            if all(fits(divisor) for fits in parts.values())
        ],
    )
