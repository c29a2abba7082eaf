"""What a model is, read from a Hugging Face `config.json`: plain numbers, no torch; and whether tensor and expert
parallelism cut it into equal parts: one rule, for Megatron's grids and for vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megaverl.errors import ModelError
from megaverl.sharding.model_config import (
    AGAIN,
    MORE_WHOLE_NUMBERS,
    NUM_EXPERTS,
    PARTLY_ROTARY,
    SIGMOID_ROUTED,
    WIDTH_OF_EXPERTS,
    computed_otherwise,
    wrong_numbers,
)

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
)
# Why others that are asked for are not among them (megatron-core 0.16).
NO_TABLE = {
    "Qwen3NextForCausalLM": "megatron-core's GatedDeltaNet (0.16 to 0.19) needs flash-linear-attention and Transformer "
    "Engine, both for GPUs alone, and reads packed rows from 0.19 on",
    "Llama4ForCausalLM": "megatron-core (0.16 to 0.19) has no attention within chunks, nor its queries' growing "
    "temperature",
    "Gemma3ForCausalLM": "megatron-core's GPTModel (0.16 to 0.19) has one rotary base where it needs two, and no norms "
    "behind attention and MLP",
}
# Whose model in vLLM is another than transformers', as read in 0.32.
NOT_IN_VLLM = {
    "Gemma3nForCausalLM": "vLLM's (0.32) leaves out the embeddings of tokens that each layer has "
    "(`embed_tokens_per_layer`) where there are no images, and answers as another model"
}
# Other names of the numbers of an `outline`, by the most usual one.
OTHER_NAMES = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    ),
}
TEXT_PARTS = ("text_config", "llm_config", "language_config")
UNLIMITED = 2**31 - 1  # positions of a model that counts none, such as Mamba


@dataclass(frozen=True)
class MoESpec:
    """The routed experts of a decoder's layers.

    Attributes:
        num_experts, experts_per_token: routed experts of a layer, and how many a token goes to.
        ffn_hidden_size: inner width of one routed expert.
        normalize_weights: the chosen experts' weights are divided by their sum.
        num_dense_layers: the first layers, which have a plain MLP of `ModelSpec.ffn_hidden_size` instead.
        shared_ffn_hidden_size: inner width of all shared experts together; 0: none.
        router: how scores become probabilities.
        router_bias: a bias that only takes part in choosing the experts (DeepSeek-V3's
            `e_score_correction_bias`), not in weighing them.
        num_groups, groups_per_token: experts stand in groups, and a token chooses within its best groups.
        scaling: factor on the routed experts' output.
        aux_loss_coef: weight of the load-balancing loss in training.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalize_weights: bool
    num_dense_layers: int = 0
    shared_ffn_hidden_size: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    aux_loss_coef: float = 0.0


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): ranks of the latents and sizes inside a head.

    `q_lora_rank` is None where queries come straight from the hidden state.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """The dimensions of a decoder-only transformer, in Hugging Face's meaning of each.

    Attributes:
        rope_scaling: None for plain rotary embeddings, else the Hugging Face dictionary (`rope_type`, ...).
        moe: the routed experts; None: every layer has a plain MLP.
        mla: multi-head latent attention; None: plain attention.
        activation: of the gate in the MLP; `gelu_tanh` is Hugging Face's `gelu_pytorch_tanh`; `clamped_swiglu`
            (gpt-oss): gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up within 7 of zero.
        norm_plus_one: norms multiply by weight + 1 (Gemma), Megatron's `layernorm_zero_centered_gamma`.
        rotary_fraction: of each head, from its first dimension on, that rotary embeddings turn.
        scale_embeddings: embeddings are multiplied by sqrt(hidden_size) (Gemma).
        sliding_window: tokens of attention's window; None: full attention.
        full_attention_every: counted from one, so many-th layers have no window; None: all have it.
        linear_bias: all linear layers of the decoder have a bias, experts and routers among them.
        attention_sinks: attention's softmax has one more score for each head, learned, of nothing.
        is_tabled: whether all of this was read as Megatron's tables need it. False: an `outline`, whose numbers are
            as good as the config.json tells them.
        source: the config.json of an outline.
        trusts_code: Python files beside that may be run, as `model.trust_remote_code` says.
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
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    norm_plus_one: bool = False
    scale_embeddings: bool = False
    sliding_window: int | None = None
    full_attention_every: int | None = None
    linear_bias: bool = False
    attention_sinks: bool = False
    is_tabled: bool = True
    source: str = ""
    trusts_code: bool = False

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json`, of a model that Megatron-core builds.

        Raises:
            ModelError: no such file, not JSON, an unsupported architecture, or a missing key.
        """
        return cls.from_config(*_config_of(folder))

    @classmethod
    def outline(cls, folder: str | Path) -> ModelSpec:
        """Read `folder/config.json`, of any model that transformers builds: as `from_folder` where that can, else what
        lengths and memory are reckoned with.

        Raises:
            ModelError: no such file, not JSON, or no size of the vocabulary.
        """
        return cls.outline_of(*_config_of(folder))

    @classmethod
    def outline_of(cls, config: dict[str, Any], source: str = "config.json") -> ModelSpec:
        """The same, from the dictionary of a `config.json`."""
        try:
            return cls.from_config(config, source)
        except ModelError:
            if not isinstance(config, dict):
                raise
            return cls(**_outlined(config, source))

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str = "config.json") -> ModelSpec:
        """Build the spec from the dictionary of a Hugging Face `config.json`.

        Raises:
            ModelError: as `from_folder`; also for what would be computed otherwise than its author meant. Names
                everything that is wrong at once.
        """
        if not isinstance(config, dict):
            raise ModelError(f"{source}: expected a JSON object, found {type(config).__name__}. {AGAIN}")
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in ARCHITECTURES:
            why = f" by Megatron: {NO_TABLE[architecture]}" if architecture in NO_TABLE else ""
            raise ModelError(
                f"{source}: architecture {architecture!r} is not supported{why}. Supported: "
                f"{', '.join(ARCHITECTURES)}. "
                "Under actor.engine=fsdp any architecture trains that transformers builds."
            )
        problems = [*wrong_numbers(architecture, config)] or [*computed_otherwise(architecture, config)]
        if problems:
            raise ModelError("\n".join(f"{source}: {problem}" for problem in problems))
        return cls(**_read(architecture, config))


def _config_of(folder: str | Path) -> tuple[dict[str, Any], str]:
    """A folder's config.json, and its path."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: not found. `model.path` must name a Hugging Face folder with config.json, "
            "safetensors weights and a tokenizer."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}). {AGAIN}") from error
    return config, str(path)


def _outlined(config: dict[str, Any], source: str) -> dict[str, Any]:
    """What most config.json say under one of a few names; a model with images has its decoder's in `text_config`."""
    parts = [config, *(part for key in TEXT_PARTS if isinstance(part := config.get(key), dict))]

    def number(name: str, default: int) -> int:
        found = (part[key] for key in OTHER_NAMES[name] for part in parts if key in part)
        return next((value for value in found if type(value) is int and value > 0), default)

    vocab_size = number("vocab_size", 0)
    if not vocab_size:
        raise ModelError(f"{source}: none of {', '.join(OTHER_NAMES['vocab_size'])} is a number above 0. {AGAIN}")
    hidden, heads = number("hidden_size", 0), number("num_attention_heads", 1)
    tied = next((part[key] for part in parts if (key := "tie_word_embeddings") in part), True)
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
        "rope_theta": 10000.0,
        "max_positions": number("max_position_embeddings", UNLIMITED),
        "is_tabled": False,
        "source": source,
    }


def _read(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    # transformers 5 writes `rope_parameters`; older files hold `rope_theta` and `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    is_gemma, is_gpt_oss = architecture == "GemmaForCausalLM", architecture == "GptOssForCausalLM"
    fields = {
        "architecture": architecture,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "vocab_size": config["vocab_size"],
        # Gemma's folders leave the key out, for theirs are always tied
        "tie_embeddings": bool(config.get("tie_word_embeddings", is_gemma)),
        "qkv_bias": architecture == "Qwen2ForCausalLM" or is_gpt_oss or bool(config.get("attention_bias", False)),
        "qk_norm": architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM") or bool(config.get("use_qk_norm")),
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope_scaling": None if rope_type == "default" else dict(rope),
        "rotary_fraction": float(
            rope.get("partial_rotary_factor")
            or config.get("partial_rotary_factor")
            or PARTLY_ROTARY.get(architecture, 1.0)
        ),
        "max_positions": config["max_position_embeddings"],
        "activation": "gelu_tanh" if is_gemma else "silu",
        "norm_plus_one": is_gemma,
        "scale_embeddings": is_gemma,
    }
    if architecture in MORE_WHOLE_NUMBERS:
        fields["moe"] = _read_experts(architecture, config)
    if architecture == "DeepseekV3ForCausalLM":
        mla = MLASpec(
            config.get("q_lora_rank"), *(config[key] for key in MORE_WHOLE_NUMBERS["DeepseekV3ForCausalLM"][2:])
        )
        # every head has keys and values of its own, whatever num_key_value_heads says
        fields |= {"mla": mla, "num_kv_heads": num_heads, "head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}
    if is_gpt_oss:
        fields |= {"sliding_window": config.get("sliding_window", 128), "full_attention_every": 2}
        fields |= {"activation": "clamped_swiglu", "linear_bias": True, "attention_sinks": True}
    return fields


def _read_experts(architecture: str, config: dict[str, Any]) -> MoESpec:
    by_sigmoid = architecture in SIGMOID_ROUTED
    width = config["intermediate_size" if architecture in WIDTH_OF_EXPERTS else "moe_intermediate_size"]
    return MoESpec(
        num_experts=next(config[key] for key in NUM_EXPERTS if key in config),
        experts_per_token=config["num_experts_per_tok"],
        ffn_hidden_size=width,
        # the defaults of transformers' own configurations
        normalize_weights=bool(config.get("norm_topk_prob", architecture != "Qwen3MoeForCausalLM")),
        num_dense_layers=config.get("first_k_dense_replace") or 0 if by_sigmoid else 0,
        shared_ffn_hidden_size=(config.get("n_shared_experts") or 0) * width if by_sigmoid else 0,
        router="sigmoid" if by_sigmoid else "softmax",
        router_bias=by_sigmoid,
        num_groups=config.get("n_group") or 1 if by_sigmoid else 1,
        groups_per_token=config.get("topk_group") or 1 if by_sigmoid else 1,
        scaling=float(config.get("routed_scaling_factor") or 1.0) if by_sigmoid else 1.0,
        # as in transformers, the coefficient counts only where the router's outputs are asked for
        aux_loss_coef=float(config.get("router_aux_loss_coef") or 0.0) if config.get("output_router_logits") else 0.0,
    )


class Misfit(NamedTuple):
    """A size that does not fit a model.

    Attributes:
        parts: what it does not divide, such as "6 key-value heads".
        fitting: the sizes that divide all that this one should.
    """

    axis: Literal["tp", "etp", "ep"]
    size: int
    parts: list[str]
    fitting: list[int]

    @property
    def reason(self) -> str:
        fitting = ", ".join(map(str, self.fitting))
        return f"does not divide the model's {' and '.join(self.parts)}. Sizes that fit: {fitting}."

    def __str__(self) -> str:
        return f"{self.axis}={self.size} {self.reason}"


def shares_kv_heads(spec: ModelSpec, tp: int) -> bool:
    """Whether several of `tp` ranks compute with the same key-value head, as there are fewer heads than ranks."""
    return spec.mla is None and spec.num_kv_heads < tp


def no_adapters(spec: ModelSpec, tp: int) -> str:
    """Why a model cannot have low-rank adapters at this `tp`; empty: it can."""
    if not shares_kv_heads(spec, tp):
        return ""
    return (
        f"tp={tp} is more than the model's {spec.num_kv_heads} key-value heads: some ranks then hold no row of a "
        "projection, and adapters cannot follow. Lower tp, or leave lora out."
    )


def misfits(spec: ModelSpec, *, tp: int, etp: int = 1, ep: int = 1, engine: bool = False) -> list[Misfit]:
    """What `tp`, `etp` (inside routed experts) and `ep` do not divide; with `engine` of vLLM's, which divides experts
    that have biases: megatron-core (0.16 to 0.19) does not.

    There may be fewer key-value heads than tensor-parallel ranks, if they divide these: vLLM gives each rank a copy of
    its head, and Megatron cuts the rows of `linear_qkv` evenly, wherever in a head that is.
    """
    moe, kv_heads = spec.moe, spec.num_kv_heads

    def fits_kv(size: int) -> bool:
        return not kv_heads % size or not (size % kv_heads or 2 * kv_heads * spec.head_dim % size)

    by_tp = {f"{spec.num_heads} attention heads": _divides(spec.num_heads)}
    if spec.mla is None:
        # vLLM's gpt-oss (0.32, `gpt_oss.py`) gives no rank a copy of a head
        by_tp[f"{kv_heads} key-value heads"] = _divides(kv_heads) if engine and spec.attention_sinks else fits_kv
    if moe is None or moe.num_dense_layers:
        by_tp[f"{spec.ffn_hidden_size} feed-forward units"] = _divides(spec.ffn_hidden_size)
    if moe is not None and (shared := moe.shared_ffn_hidden_size):
        by_tp[f"{shared} units of the shared experts"] = _divides(shared)
    found = [_misfit("tp", tp, by_tp, spec.num_heads)]
    if moe is not None:
        width, experts = moe.ffn_hidden_size, moe.num_experts
        by_etp = {f"{width} units of an expert": _divides(width)}
        if spec.linear_bias and not engine:
            by_etp = {"experts, which stay whole as they have biases": lambda size: size == 1}
        found.append(_misfit("etp", etp, by_etp, width))
        found.append(_misfit("ep", ep, {f"{experts} experts": _divides(experts)}, experts))
    return [misfit for misfit in found if misfit is not None]


def _divides(number: int) -> Callable[[int], bool]:
    return lambda size: number % size == 0


def _misfit(
    axis: Literal["tp", "etp", "ep"], size: int, parts: dict[str, Callable[[int], bool]], largest: int
) -> Misfit | None:
    broken = [words for words, fits in parts.items() if not fits(size)]
    if not broken:
        return None
    return Misfit(
        axis, size, broken, [each for each in range(1, largest + 1) if all(fits(each) for fits in parts.values())]
    )
