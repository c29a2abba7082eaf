"""How an architecture's table of rules becomes the list of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.weight import Split, Weight


@dataclass(frozen=True)
class Rule:
    """One line of a table.

    Attributes:
        name: Hugging Face name; in a decoder layer, the part after `model.layers.N.`. With `{}` in the place of
            a number, the rule is for every routed expert of a layer.
        axes: the sizes of the axes, by the words of `_sizes`. Where one of them is 0, the model has no such weight.
        split: how tensor parallelism divides it.
        megatron: GPTModel's name; in a decoder layer, the part after `decoder.layers.N.`, `{}` for the number of
            an expert on its rank.
        vllm: vLLM's name; in a decoder layer, the part after `model.layers.N.`. None: vLLM has no use for it.
        stage: `layer`, or the pipeline stage of a weight that stands outside the layers.
        transformer_engine: GPTModel's name under Transformer Engine's layer spec, where it differs.
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
LM_HEAD = Rule("lm_head.weight", ("vocab", "hidden"), Split.VOCAB, "output_layer.weight", "lm_head.weight", "last")
VALUE_HEAD = Rule("score.weight", ("value_heads", "hidden"), Split.REPLICATED, "output_layer.weight", None, "last")
VALUES_BESIDE = replace(VALUE_HEAD, megatron="value_head.weight")  # where the language-model head stays


class Layers(NamedTuple):
    """The rules of a decoder layer with a plain MLP, and of one with routed experts; and of the embedding."""

    dense: tuple[Rule, ...] = ()
    routed: tuple[Rule, ...] = ()
    embedding: Rule = EMBEDDING


def build(layers: Layers, spec: ModelSpec, *, value_head: int, beside_logits: bool = False) -> list[Weight]:
    """All weights of a decoder whose layers follow these rules, in the order of the forward pass.

    With `value_head` the model is a critic: `score.weight` `[value_head, hidden]` in the place of the language-model
    head, and nothing tied; `beside_logits` it keeps that head, and has values as well.
    """
    sizes = {"value_heads": int(value_head), **_sizes(spec)}
    has_logits = beside_logits or not value_head
    tied = spec.tie_embeddings and has_logits
    num_dense = spec.num_layers if spec.moe is None else spec.moe.num_dense_layers
    dense, routed = (_templates(rules, sizes, spec) for rules in (layers.dense, layers.routed))
    weights = [_outside(layers.embedding, sizes, tied=tied)]
    for layer in range(spec.num_layers):
        weights += _in_layer(layer, dense if layer < num_dense else routed)
    weights.append(_outside(FINAL_NORM, sizes))
    if has_logits and not tied:
        weights.append(_outside(LM_HEAD, sizes))
    if value_head:
        weights.append(_outside(VALUES_BESIDE if beside_logits else VALUE_HEAD, sizes))
    return weights


def _sizes(spec: ModelSpec) -> dict[str, int]:
    sizes = {
        "one": 1,
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "head": spec.head_dim,
        "heads": spec.num_heads,
        "q": spec.num_heads * spec.head_dim,
        "kv": spec.num_kv_heads * spec.head_dim,
    }
    sizes |= {
        "q_bias": sizes["q"] * spec.qkv_bias,
        "kv_bias": sizes["kv"] * spec.qkv_bias,
        "head_norm": spec.head_dim * spec.qk_norm,
    }
    if spec.moe is not None:
        sizes |= {
            "experts": spec.moe.num_experts,
            "expert_bias": spec.moe.num_experts if spec.moe.router_bias else 0,
            "expert_ffn": spec.moe.ffn_hidden_size,
            "gate_up": 2 * spec.moe.ffn_hidden_size,
            "shared_ffn": spec.moe.shared_ffn_hidden_size,
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
    """A rule with its names and sizes filled in, but for the number of the layer."""

    name: str
    rule: Rule
    shape: tuple[int, ...]
    expert: int | None


def _templates(rules: Sequence[Rule], sizes: dict[str, int], spec: ModelSpec) -> list[_Template]:
    """The weights of one layer, those of the routed experts expert by expert."""
    held: list[_Template] = []
    routed: list[_Template] = []
    for rule in rules:
        shape = tuple(sizes[axis] for axis in rule.axes)
        if 0 not in shape:
            (routed if "{}" in rule.name else held).append(_Template(rule.name, rule, shape, None))
    if spec.moe is not None:
        for expert in range(spec.moe.num_experts):
            held += [each._replace(name=each.name.format(expert), expert=expert) for each in routed]
    return held


def _in_layer(layer: int, templates: Sequence[_Template]) -> list[Weight]:
    prefix = f"model.layers.{layer}."
    # the experts of a layer share vLLM's parameter, and so its name
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
    """A weight that stands before or after the layers."""
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
