"""Adapters: their layouts follow the weights', and merging where weights land gives W + alpha / rank * B A."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megaverl.distributed.grid import GridShape
from megaverl.errors import ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.lora import (
    factor_weights,
    low_ranks,
    trained_factors,
    with_landed_factors,
    with_trained_factors,
)
from megaverl.models.lora.adapter_set import Merge, add_product
from megaverl.models.tiny import FAMILIES, make_tiny_folder, make_tiny_vision_folder
from megaverl.sharding.boxes import cut as cut_box
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import Layout, Piece, whole_layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_config import NOT_IN_TRANSFORMERS
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.sharding.plan import make_plans
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import Split, Weight
from megaverl.weights.reshard import Resharder
from megaverl.weights.transports import viewed
from tests.sharding.specs import expert_tp, make_spec

RANK, SCALING = 2, 1.5
Tensors = dict[str, torch.Tensor]


def cut(layout: Layout, full: Tensors) -> Tensors:
    """A rank's local tensors, out of the global ones."""
    local = {name: torch.zeros(shape) for name, shape in layout.local_shapes.items()}
    held = viewed(layout, local)
    for piece in layout.pieces:
        place = held[piece.local][piece.local_box.slices]
        place.copy_(full[piece.tensor][piece.box.slices].reshape(place.shape))
    return local


@pytest.mark.parametrize(
    ("architecture", "grid", "tp"),
    [
        *((name, {"tp": 2, "pp": 2}, tp) for name in ARCHITECTURES for tp in (1, 2)),
        # More ranks than key-value heads: some hold no row of k_proj.
        ("LlamaForCausalLM", {"tp": 4}, 2),
    ],
)
def test_merged_in_the_layout_of_the_engine(
    architecture: str, grid: dict[str, int], tp: int
) -> None:
    """Factors are global arrays like others, so that one plan brings them and the weights."""
    spec = make_spec(architecture)
    weights = weights_of(spec)
    adapters = low_ranks(weights, "all-linear", RANK, "actor.lora")
    generator = torch.Generator().manual_seed(0)
    full = {
        w.name: torch.randn(w.shape, generator=generator)
        for w in (*weights, *factor_weights(adapters))
    }
    shape = GridShape(**grid, **expert_tp(architecture))
    megatron = megatron_layouts(weights, spec, shape, padded_vocab_size=64)
    source = with_trained_factors(megatron, adapters)
    engine: Callable[[int], Layout] = vllm_layouts(weights, spec, tp)
    dest = with_landed_factors(engine, adapters)
    plans = make_plans(source, dest, 4)
    held = [viewed(source(rank), cut(source(rank), full)) for rank in range(4)]
    for rank in range(4):
        merge = Merge(
            engine(rank), adapters, SCALING, torch.float32, torch.device("cpu")
        )
        tensors = {
            name: torch.zeros(shape)
            for name, shape in engine(rank).local_shapes.items()
        } | merge.factors
        landed = viewed(engine(rank), tensors)
        arriving = [(rank, plans[rank].copies), *plans[rank].receives.items()]
        for peer, transfers in arriving:
            for t in transfers:
                place = landed[t.dest_local][t.dest_box.slices]
                place.copy_(
                    held[peer][t.source_local][t.source_box.slices].reshape(place.shape)
                )
        merge.apply(lambda local, box, landed=landed: landed[local][box.slices])
        merged = dict(full)
        for name, adapter in adapters.items():
            merged[name] = full[name] + SCALING * full[adapter.b] @ full[adapter.a]
        for name, expected in cut(engine(rank), merged).items():
            torch.testing.assert_close(
                landed[name], expected, atol=1e-5, rtol=1e-5, msg=f"rank {rank} {name}"
            )
        assert merge.written == {
            piece.local for piece in engine(rank).pieces if piece.tensor in adapters
        }


def test_merged_into_parts_that_an_engine_holds_twice_or_apart() -> None:
    """vLLM may compute from a weight that it also copies: that goes whole beside its parts."""
    weight = Weight(
        "model.layers.0.in_proj.weight", (6, 4), Split.REPLICATED, 0, "", None
    )
    [adapter] = low_ranks([weight], "all-linear", RANK, "actor.lora").values()
    shape, beside = weight.shape, "load_weights: in_proj"
    pieces = (
        Piece(weight.name, cut_box(shape, 0, 4, 6), "fused", cut_box((3, 4), 0, 0, 2)),
        Piece(weight.name, cut_box(shape, 0, 1, 2), "fused", cut_box((3, 4), 0, 2, 3)),
        Piece(weight.name, whole(shape), beside, whole(shape)),
    )
    engine = Layout(pieces, {"fused": (3, 4), beside: shape}, {weight.name: shape})
    full = {
        w.name: torch.randn(w.shape)
        for w in (weight, *factor_weights({weight.name: adapter}))
    }
    for layout in (engine, Layout(pieces[:2], {"fused": (3, 4)}, {weight.name: shape})):
        landed = cut(layout, full)
        merge = Merge(
            layout, {weight.name: adapter}, SCALING, torch.float32, torch.device("cpu")
        )
        factors = with_landed_factors(
            lambda rank, layout=layout: layout, {weight.name: adapter}
        )(0)
        merge.factors.update(
            {n: t for n, t in cut(factors, full).items() if n in (adapter.a, adapter.b)}
        )
        merge.apply(lambda local, box, landed=landed: landed[local][box.slices])
        merged = full | {
            weight.name: full[weight.name] + SCALING * full[adapter.b] @ full[adapter.a]
        }
        for name, expected in cut(layout, merged).items():
            torch.testing.assert_close(landed[name], expected)


def test_parts_of_a_weight_that_are_no_whole_rows_have_no_adapter() -> None:
    weight = Weight(
        "model.layers.0.in_proj.weight", (6, 4), Split.REPLICATED, 0, "", None
    )
    adapters = low_ranks([weight], "all-linear", RANK, "actor.lora")
    shape = weight.shape
    pieces = tuple(
        Piece(weight.name, cut_box(shape, 1, n, n + 1), "in_proj.weight", place)
        for n, place in ((0, cut_box((6, 2), 1, 0, 1)), (3, cut_box((6, 2), 1, 1, 2)))
    )
    held = Layout(pieces, {"in_proj.weight": (6, 2)}, {weight.name: shape})
    with pytest.raises(ModelError, match="parts of it that are not whole rows"):
        trained_factors(held, adapters)


def test_sixteen_bits_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaverl.models.lora.adapter_set.CHUNK", 100)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 20, generator=generator).bfloat16()
    a, b = (
        torch.randn(*size, generator=generator).bfloat16()
        for size in ((3, 20), (30, 3))
    )
    expected = (weight.float() + 0.7 * (b.float() @ a.float())).bfloat16()
    add_product(weight, a, b, 0.7)
    torch.testing.assert_close(weight.float(), expected.float(), atol=0, rtol=2**-8)
    assert (weight != expected).float().mean() < 0.01, (
        "float32 sums in another order may round otherwise"
    )


def test_targets_are_pefts() -> None:
    weights = weights_of(make_spec("LlamaForCausalLM"))

    def chosen(targets: str | list[str]) -> set[str]:
        return {
            a.module for a in low_ranks(weights, targets, RANK, "actor.lora").values()
        }

    assert chosen(["q_proj"]) == {
        f"model.layers.{i}.self_attn.q_proj" for i in range(4)
    }
    assert chosen(["layers.1.mlp.up_proj", "o_proj"]) >= {
        "model.layers.1.mlp.up_proj",
        "model.layers.3.self_attn.o_proj",
    }
    assert chosen(r".*layers\.[01]\.self_attn\.[qv]_proj") == {
        f"model.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qv"
    }
    assert len(chosen("all-linear")) == 4 * 7
    for routed in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "Llama4ForCausalLM"):
        found = low_ranks(weights_of(make_spec(routed)), "all-linear", 1, "")
        assert found and all(".self_attn." in name for name in found)
    for wrong in (["q_proj", "c_attn"], "nothing", ["lm_head"], ["embed_tokens"]):
        with pytest.raises(
            ModelError, match=r"actor\.lora\.targets.*Choose from.*q_proj"
        ):
            chosen(wrong)
    with pytest.raises(ModelError, match=r"actor\.lora\.rank=99"):
        low_ranks(weights, "all-linear", 99, "actor.lora")


def test_names_are_pefts() -> None:
    adapters = low_ranks(weights_of(make_spec()), ["down_proj"], RANK, "actor.lora")
    first = adapters["model.layers.0.mlp.down_proj.weight"]
    assert first.a == "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert first.shapes == {first.a: (RANK, 16), first.b: (8, RANK)}
    assert [whole(w.shape).numel for w in factor_weights(adapters)][:2] == [
        RANK * 16,
        8 * RANK,
    ]


@pytest.mark.parametrize(
    "architecture",
    [name for name in ARCHITECTURES if name not in NOT_IN_TRANSFORMERS] + [*FAMILIES],
)
def test_modules_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """peft looks for them by these names."""
    if architecture in FAMILIES:
        folder = make_tiny_vision_folder(tmp_path, architecture)
        auto = transformers.AutoModelForImageTextToText
    else:
        folder = make_tiny_folder(tmp_path, architecture)
        auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
    weights = weights_of(ModelSpec.from_folder(folder))
    for adapter in low_ranks(weights, "all-linear", RANK, "actor.lora").values():
        assert isinstance(model.get_submodule(adapter.module), torch.nn.Linear)


def test_what_never_changes_travels_until_it_has_arrived() -> None:
    layout = whole_layout([("still", (4, 3)), ("moves", (2, 3))])
    source = {
        name: torch.full(shape, 1.0) for name, shape in layout.local_shapes.items()
    }
    dest = {name: torch.zeros(shape) for name, shape in layout.local_shapes.items()}
    plan = make_plans(lambda rank: layout, lambda rank: layout, 1)[0]
    resharder = Resharder(plan, source, dest, changing=["moves"])
    assert resharder.run().bytes_local == 4 * 18
    dest["still"].zero_()  # nobody does that to an engine: it shows what is written
    source["moves"].fill_(2.0)
    assert resharder.run().bytes_local == 4 * 6
    assert not dest["still"].any() and torch.equal(dest["moves"], source["moves"])
    dest["moves"].resize_(0)  # a run that fails
    with pytest.raises(IndexError):
        resharder.run()
    dest["moves"].resize_(2, 3)
    assert resharder.run().bytes_local == 4 * 18, (
        "after that, nothing is taken for granted"
    )
    assert torch.equal(dest["still"], source["still"])
