"""Expand an architecture's table of rules into the list of a model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megaverl.sharding.model_spec import LayerKind, ModelSpec, VisionSpec
from megaverl.sharding.weight import Split, Weight


@dataclass(frozen=True)
class Rule:
    """One row of an architecture's table: a weight and its name in each engine.

    Attributes:
        name: Hugging Face name. Inside a decoder layer, the part after `model.layers.N.`. `{}` stands for the number of
            a routed expert, and the rule then covers all experts.
        axes: sizes of the axes, by the names in `_sizes`. A size of 0 means that the model has no such weight.
        split: how tensor parallelism splits it.
        megatron: name in GPTModel. Inside a decoder layer, the part after `decoder.layers.N.`, with `{}` for the number
            of an expert on its rank.
        vllm: name in vLLM. Inside a decoder layer, the part after `model.layers.N.`. None: vLLM does not load it.
        stage: `layer`, or the pipeline stage of a weight outside the layers.
        transformer_engine: GPTModel's name under Transformer Engine's layer spec, if it differs.
    """

    name: str
    axes: tuple[str, ...]
    split: Split
    megatron: str
    vllm: str | None
    stage: Literal["first", "layer", "last"] = "layer"
    transformer_engine: str | None = None


EMBEDDING = Rule(
    "model.embed_tokens.weight",
    ("vocab", "hidden"),
    Split.VOCAB,
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    "first",
)
FINAL_NORM = Rule(
    "model.norm.weight",
    ("hidden",),
    Split.REPLICATED,
    "decoder.final_layernorm.weight",
    "model.norm.weight",
    "last",
)
LM_HEAD = Rule(
    "lm_head.weight",
    ("vocab", "hidden"),
    Split.VOCAB,
    "output_layer.weight",
    "lm_head.weight",
    "last",
)
VALUE_HEAD = Rule(
    "score.weight",
    ("value_heads", "hidden"),
    Split.REPLICATED,
    "output_layer.weight",
    None,
    "last",
)
# Used where the language-model head stays beside the value head.
VALUES_BESIDE = replace(VALUE_HEAD, megatron="value_head.weight")


# Name of the vision tower in GPTModel, and in vLLM's models of the Qwen-VL families.
# These have the decoder under another name.
TOWER = "embedding.visual."
TOWER_IN_VLLM = "visual."
DECODER_IN_VLLM = "language_model."


class Tower(NamedTuple):
    """Rules of a vision tower. Names are those inside the tower.

    Attributes:
        before, after: weights in front of its blocks and behind them.
        block: weights of one block, under the part of the name after `blocks.N.`.
        deepstack: weights of one further output, under the part after `deepstack_merger_list.N.`.
        prefix: name of the tower in files.
    """

    before: tuple[Rule, ...] = ()
    block: tuple[Rule, ...] = ()
    after: tuple[Rule, ...] = ()
    deepstack: tuple[Rule, ...] = ()
    prefix: str = "visual."


class Layers(NamedTuple):
    """Rules of a model's parts.

    Attributes:
        dense: a decoder layer with a plain MLP.
        routed: a decoder layer with routed experts.
        recurrent: a decoder layer with a gated delta net in place of attention (`ModelSpec.delta_net`).
        by_kind: a decoder layer of each of `ModelSpec.layer_kinds`, if layers have one part each.
        embedding: the embedding.
        final_norm: the norm behind the last layer.
        tower: the vision tower.
        prefix: what names in files have in place of the `model.` of a language model.
    """

    dense: tuple[Rule, ...] = ()
    routed: tuple[Rule, ...] = ()
    recurrent: tuple[Rule, ...] = ()
    by_kind: Mapping[LayerKind, tuple[Rule, ...]] = {}
    embedding: Rule = EMBEDDING
    final_norm: tuple[Rule, ...] = (FINAL_NORM,)
    tower: Tower = Tower()
    prefix: str = "model."


def build(
    layers: Layers, spec: ModelSpec, *, value_head: int, beside_logits: bool = False
) -> list[Weight]:
    """Return all weights of a decoder with these layers, in the order of the forward pass.

    Args:
        value_head: number of values per position. Above 0, `score.weight` `[value_head, hidden]` replaces the
            language-model head, and embeddings are not tied.
        beside_logits: keep the language-model head beside the value head.
    """
    sizes = {"value_heads": int(value_head), **_sizes(spec)}
    has_logits = beside_logits or not value_head
    tied = spec.tie_embeddings and has_logits
    weights = [_outside(layers.embedding, sizes, tied=tied)]
    for layer, templates in enumerate(_templates_by_layer(layers, sizes, spec)):
        weights += _in_layer(layer, templates)
    weights += [_outside(rule, sizes) for rule in layers.final_norm]
    if has_logits and not tied:
        weights.append(_outside(LM_HEAD, sizes))
    if value_head:
        weights.append(_outside(VALUES_BESIDE if beside_logits else VALUE_HEAD, sizes))
    weights = [_renamed(weight, layers.prefix) for weight in weights]
    if spec.vision is None:
        return weights
    return [
        *_in_tower(layers.tower, spec.vision, sizes),
        *(_beside_tower(weight) for weight in weights),
    ]


def _templates_by_layer(
    layers: Layers, sizes: dict[str, int], spec: ModelSpec
) -> list[list[_Template]]:
    """Return the weights of each layer, without its number."""
    if spec.layer_kinds:
        of_kind = {
            kind: _templates(layers.by_kind[kind], sizes, spec)
            for kind in set(spec.layer_kinds)
        }
        return [of_kind[kind] for kind in spec.layer_kinds]
    # A model with too few layers for experts has no sizes of them.
    with_experts = () if spec.moe is None else layers.routed
    dense, routed, recurrent = (
        _templates(rules, sizes, spec)
        for rules in (layers.dense, with_experts, layers.recurrent)
    )
    chosen = [routed if has_experts else dense for has_experts in spec.routed_layers]
    if spec.delta_net is None:
        return chosen
    return [
        recurrent if is_net else templates
        for is_net, templates in zip(spec.delta_net.layers, chosen, strict=True)
    ]


def _renamed(weight: Weight, prefix: str) -> Weight:
    """Return a weight under its name in files whose names start with `prefix` in place of `model.`."""
    inside = weight.name.removeprefix("model.")
    if prefix == "model." or inside == weight.name:
        return weight
    return weight._replace(name=prefix + inside)


def _beside_tower(weight: Weight) -> Weight:
    """Return a decoder's weight under vLLM's name for a model with a vision tower."""
    vllm = None if weight.vllm is None else DECODER_IN_VLLM + weight.vllm
    return weight._replace(vllm=vllm)


def _in_tower(tower: Tower, vision: VisionSpec, sizes: dict[str, int]) -> list[Weight]:
    """Return the weights of a vision tower. All are on the first stage."""
    channels, pictures, height, width = vision.patch
    merged = vision.width * vision.merge**2
    sizes = sizes | {
        "vision": vision.width,
        "vision_qkv": 3 * vision.width,
        "vision_ffn": vision.ffn,
        "vision_merged": merged,
        "vision_positions": vision.num_positions,
        "channels": channels,
        "pictures": pictures,
        "patch_height": height,
        "patch_width": width,
    }
    parts = [
        ("", tower.before),
        *((f"blocks.{number}.", tower.block) for number in range(vision.depth)),
        ("", tower.after),
        *(
            (f"deepstack_merger_list.{number}.", tower.deepstack)
            for number in range(vision.deepstack)
        ),
    ]
    return [
        Weight(
            name=f"{tower.prefix}{part}{rule.name}",
            shape=tuple(sizes[axis] for axis in rule.axes),
            split=rule.split,
            stage="first",
            megatron=f"{TOWER}{part}{rule.megatron}",
            vllm=f"{TOWER_IN_VLLM}{part}{rule.vllm}",
        )
        for part, rules in parts
        for rule in rules
    ]


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the size behind every axis name that rules use."""
    sizes = {
        "one": 1,
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "head": spec.head_dim,
        "heads": spec.num_heads,
        "q": spec.num_heads * spec.head_dim,
        "gated_q": 2 * spec.num_heads * spec.head_dim,
        "kv": spec.num_kv_heads * spec.head_dim,
    }
    sizes |= {
        "q_bias": sizes["q"] * spec.qkv_bias,
        "kv_bias": sizes["kv"] * spec.qkv_bias,
        "qkv": sizes["q"] + 2 * sizes["kv"],
        "gate_and_up": 2 * spec.ffn_hidden_size,
        "head_norm": spec.head_dim * spec.qk_norm,
        "bias": spec.hidden_size * spec.linear_bias,
        "ffn_bias": spec.ffn_hidden_size * spec.linear_bias,
    }
    if spec.moe is not None:
        sizes |= {
            "experts": spec.moe.num_experts,
            "expert_bias": spec.moe.num_experts if spec.moe.router_bias else 0,
            "expert_ffn": spec.moe.ffn_hidden_size,
            "gate_up": 2 * spec.moe.ffn_hidden_size,
            "shared_ffn": spec.moe.shared_ffn_hidden_size,
            "shared_gate": int(spec.moe.shared_gate),
        }
    if (net := spec.delta_net) is not None:
        convolved = 2 * net.key_width + net.value_width
        sizes |= {
            "net_qkvz": convolved + net.value_width,
            "net_ba": 2 * net.num_value_heads,
            "net_qkv": convolved,
            "net_taps": net.conv_width,
            "net_heads": net.num_value_heads,
            "net_head": net.value_head_dim,
            "net_values": net.value_width,
        }
    if (mamba := spec.mamba) is not None:
        sizes |= {
            "mamba_in": mamba.in_rows,
            "mamba_conv": mamba.conv_rows,
            "mamba_conv_bias": mamba.conv_rows * mamba.conv_bias,
            "mamba_kernel": mamba.conv_size,
            "mamba_inner": mamba.inner_size,
            "mamba_norm": mamba.inner_size * mamba.has_norm,
            "mamba_heads": mamba.num_heads,
        }
    if spec.mla is not None:
        kv_a = spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim
        sizes |= {
            "q_latent": spec.mla.q_lora_rank or 0,
            "q_direct": 0 if spec.mla.q_lora_rank else sizes["q"],
            "kv_latent": spec.mla.kv_lora_rank,
            "kv_a_fused": kv_a if spec.mla.q_lora_rank else 0,
            "kv_a_alone": 0 if spec.mla.q_lora_rank else kv_a,
            "kv_up": spec.num_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim),
            "values": spec.num_heads * spec.mla.v_head_dim,
        }
    return sizes


class _Template(NamedTuple):
    """Rule with all names and sizes filled in except the layer number."""

    name: str
    rule: Rule
    shape: tuple[int, ...]
    expert: int | None


def _templates(
    rules: Sequence[Rule], sizes: dict[str, int], spec: ModelSpec
) -> list[_Template]:
    """Return the weights of one layer, with routed experts expanded one after the other."""
    templates: list[_Template] = []
    routed: list[_Template] = []
    for rule in rules:
        shape = tuple(sizes[axis] for axis in rule.axes)
        if 0 not in shape:
            (routed if "{}" in rule.name else templates).append(
                _Template(rule.name, rule, shape, None)
            )
    if spec.moe is not None:
        for expert in range(spec.moe.num_experts):
            templates += [
                template._replace(name=template.name.format(expert), expert=expert)
                for template in routed
            ]
    return templates


def _in_layer(layer: int, templates: Sequence[_Template]) -> list[Weight]:
    """Return the weights of layer number `layer`."""
    prefix = f"model.layers.{layer}."
    # All experts of a layer share one vLLM parameter. Sharing its name string as well
    # saves memory in models with many experts.
    vllm_names: dict[str | None, str | None] = {None: None}
    weights = []
    for name, rule, shape, expert in templates:
        if rule.vllm not in vllm_names:
            vllm_names[rule.vllm] = f"{prefix}{rule.vllm}"
        weights.append(
            Weight(
                prefix + name,
                shape,
                rule.split,
                layer,
                rule.megatron,
                vllm_names[rule.vllm],
                rule.transformer_engine,
                None,
                expert,
            )
        )
    return weights


def _outside(rule: Rule, sizes: dict[str, int], *, tied: bool = False) -> Weight:
    """Return a weight that belongs to no decoder layer."""
    return Weight(
        name=rule.name,
        shape=tuple(sizes[axis] for axis in rule.axes),
        split=rule.split,
        stage="first" if rule.stage == "first" else "last",
        megatron=rule.megatron,
        vllm=rule.vllm,
        transformer_engine=rule.transformer_engine,
        megatron_tied=LM_HEAD.megatron if tied else None,
    )
