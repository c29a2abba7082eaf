"""How an architecture's table of rules becomes the list of a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaverl.layout.weights import Split, Weight
from megaverl.models.spec import ModelSpec


@dataclass(frozen=True)
class Rule:
    """One line of a table.

    Attributes:
        name: Hugging Face name; in a decoder layer, the part after `model.layers.N.`.
        axes: the sizes of the axes, by the words of `_sizes`.
        split: how tensor parallelism divides it.
        megatron: GPTModel's name; in a decoder layer, the part after `decoder.layers.N.`.
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
VALUE_HEAD = Rule("score.weight", ("one", "hidden"), Split.REPLICATED, "output_layer.weight", None, "last")


def build(layer_rules: Sequence[Rule], spec: ModelSpec, *, value_head: bool) -> list[Weight]:
    """All weights of a decoder whose layers follow `layer_rules`, in the order of the forward pass.

    With `value_head` the model is a critic: `score.weight` `[1, hidden]` in the place of the language-model
    head, and nothing tied.
    """
    sizes = _sizes(spec)
    tied = spec.tie_embeddings and not value_head
    weights = [_weight(EMBEDDING, sizes, tied=tied)]
    for layer in range(spec.num_layers):
        weights += [_weight(rule, sizes, layer) for rule in layer_rules]
    weights.append(_weight(FINAL_NORM, sizes))
    if value_head:
        weights.append(_weight(VALUE_HEAD, sizes))
    elif not tied:
        weights.append(_weight(LM_HEAD, sizes))
    return weights


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "one": 1,
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "head": spec.head_dim,
        "q": spec.num_heads * spec.head_dim,
        "kv": spec.num_kv_heads * spec.head_dim,
    }


def _weight(rule: Rule, sizes: dict[str, int], layer: int | None = None, *, tied: bool = False) -> Weight:
    prefix = "" if layer is None else f"model.layers.{layer}."
    return Weight(
        name=prefix + rule.name,
        shape=tuple(sizes[axis] for axis in rule.axes),
        split=rule.split,
        stage=layer if layer is not None else ("first" if rule.stage == "first" else "last"),
        megatron=rule.megatron,
        vllm=None if rule.vllm is None else prefix + rule.vllm,
        transformer_engine=rule.transformer_engine,
        megatron_tied=LM_HEAD.megatron if tied else None,
    )
