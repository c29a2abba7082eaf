"""vLLM's layout: against its rules written as slices, and against vLLM's own `load_weights`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaverl.errors import GridError
from megaverl.models.architectures import weights_of
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from megaverl.sharding.vllm import VOCAB_PADDING, vllm_layouts
from tests.launcher import Launcher
from tests.sharding.specs import (
    ALWAYS_TIED,
    CONFIGS,
    DENSE,
    NEMOTRON_EXPERTS,
    NEVER_TIED,
    ROUTED,
    element_ids,
    fill,
    make_experts,
    make_spec,
    separated,
    specs,
)

NEMOTRON = "NemotronHForCausalLM"


@settings(max_examples=40, deadline=None)
@example((4, make_spec(num_kv_heads=2, vocab_size=130)))
@given(
    st.sampled_from([1, 2, 4]).flatmap(
        lambda tp: st.tuples(st.just(tp), specs([tp], DENSE))
    )
)
def test_fused_parameters_and_the_vocabulary(case: tuple[int, ModelSpec]) -> None:
    tp, spec = case
    weights = weights_of(spec)
    ids = element_ids(weights)
    separate = separated(ids, spec)
    padded = -(-spec.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    for rank in range(tp):
        tensors = fill(vllm_layouts(weights, spec, tp)(rank), ids)
        layer = "model.layers.0."
        q, k, v = (separate[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
        if spec.num_kv_heads < tp:
            # neighbours share a head: each has a whole copy
            k, v = (
                np.repeat(
                    a.reshape(spec.num_kv_heads, spec.head_dim, -1),
                    tp // spec.num_kv_heads,
                    axis=0,
                )
                for a in (k, v)
            )
        shards = [np.split(a.reshape(-1, a.shape[-1]), tp)[rank] for a in (q, k, v)]
        assert (
            tensors[f"{layer}self_attn.qkv_proj.weight"] == np.concatenate(shards)
        ).all()
        if spec.is_gated:
            shards = [
                np.split(separate[f"{layer}mlp.{part}_proj.weight"], tp)[rank]
                for part in ("gate", "up")
            ]
            assert (
                tensors[f"{layer}mlp.gate_up_proj.weight"] == np.concatenate(shards)
            ).all()
        table = np.pad(
            ids["model.embed_tokens.weight"], ((0, padded - spec.vocab_size), (0, 0))
        )
        assert (tensors["model.embed_tokens.weight"] == np.split(table, tp)[rank]).all()
        assert ("lm_head.weight" in tensors) == (not spec.tie_embeddings)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        (
            {},
            3,
            "rollout.tp=3 does not divide the model's 4 attention heads and 2 key-value heads",
        ),
        (
            {"num_heads": 6, "num_kv_heads": 6},
            4,
            "6 attention heads and 6 key-value heads",
        ),
        ({"num_heads": 6, "num_kv_heads": 2}, 4, "6 attention heads"),
        (
            {"num_heads": 12, "num_kv_heads": 6},
            4,
            "does not divide the model's 6 key-value heads",
        ),
        (
            {"num_heads": 3, "num_kv_heads": 3, "ffn_hidden_size": 18},
            3,
            "50 to 64, which rollout.tp 3 does not",
        ),
    ],
)
def test_what_tp_does_not_divide_is_named(
    changes: dict[str, int], tp: int, message: str
) -> None:
    spec = make_spec(**changes)
    weights = weights_of(spec)
    if "heads" in message:
        weights = [weight for weight in weights if weight.stage == 0]
    with pytest.raises(GridError, match=message):
        vllm_layouts(weights, spec, tp)(0)


@pytest.mark.parametrize(
    ("architecture", "experts", "tp", "parallel", "message"),
    [
        (
            "MixtralForCausalLM",
            (4, 6),
            4,
            False,
            "rollout.tp=4 does not divide the model's 6 units of an expert",
        ),
        (
            "Qwen3MoeForCausalLM",
            (2, 8),
            4,
            True,
            "the layer's 2 experts are fewer than the rollout.tp 4",
        ),
        ("DeepseekV3ForCausalLM", (4, 3), 4, True, "6 units of the shared experts"),
        (
            "GptOssForCausalLM",
            (4, 8),
            4,
            True,
            "rollout.tp=4 does not divide the model's 2 key-value heads",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_named(
    architecture: str, experts: tuple[int, int], tp: int, parallel: bool, message: str
) -> None:
    spec = make_spec(architecture, moe=make_experts(architecture, *experts))
    with pytest.raises(GridError, match=message):
        vllm_layouts(weights_of(spec), spec, tp, expert_parallel=parallel)(0)


def test_expert_parallel_ranks_need_not_divide_an_expert() -> None:
    spec = make_spec("MixtralForCausalLM", moe=make_experts("MixtralForCausalLM", 4, 6))
    layout = vllm_layouts(weights_of(spec), spec, 4, expert_parallel=True)(3)
    fused = "model.layers.0.block_sparse_moe.experts.routed_experts."
    assert layout.local_shapes[fused + "w13_weight"] == (1, 12, 8)
    assert {
        piece.tensor.split(".experts.")[1]
        for piece in layout.pieces
        if piece.local == fused + "w2_weight"
    } == {"3.w2.weight"}


def test_a_critics_head_is_nothing_to_vllm() -> None:
    spec = make_spec()
    layout = vllm_layouts(weights_of(spec, value_head=True), spec, 1)(0)
    assert "score.weight" not in layout.by_tensor


def test_vllm_itself_places_the_elements_there(
    launch: Launcher, tmp_path: Path
) -> None:
    """Every architecture, tied and untied, at TP 1, 2 and 4 (more ranks than key-value
    heads), with a vocabulary of 130 that needs padding; experts (6, so that 4 ranks
    hold unequal numbers) with and without expert parallelism.
    """
    folders = [
        make_tiny_folder(
            tmp_path / f"{architecture}-{tied}",
            architecture,
            **{
                "tie_embeddings": tied,
                "vocab_size": 130,
                "num_hidden_layers": 2,
                **CONFIGS.get(architecture, {}),
            },
        )
        # vLLM makes its expert-parallel group only if the first model of a TP has
        # experts
        for architecture in sorted(
            ARCHITECTURES, key=lambda architecture: architecture not in ROUTED
        )
        for tied in (False, True)
        if architecture not in (NEVER_TIED if tied else ALWAYS_TIED)
    ]
    folders.append(
        make_tiny_folder(
            tmp_path / "DeepseekV3ForCausalLM-direct",
            "DeepseekV3ForCausalLM",
            **{
                **CONFIGS["DeepseekV3ForCausalLM"],
                "q_lora_rank": None,
                "num_hidden_layers": 2,
            },
        )
    )
    # All ranks have a copy of B and C.
    for architecture, groups in (
        (NEMOTRON, "n_groups"),
        ("FalconH1ForCausalLM", "mamba_n_groups"),
    ):
        folder = tmp_path / f"{architecture}-one-group"
        folders.append(make_tiny_folder(folder, architecture, **{groups: 1}))
    folder = tmp_path / f"{NEMOTRON}-experts"
    folders.append(make_tiny_folder(folder, NEMOTRON, **NEMOTRON_EXPERTS))
    parallel_experts = (*ROUTED, folder.name)
    cases = [
        {
            "folder": str(folder),
            "tp": tp,
            "expert_parallel": parallel,
            "placement": placement,
        }
        for tp in (4, 2, 1)
        for folder in folders
        for parallel, placement in (
            (False, "linear"),
            (True, "linear"),
            (True, "round_robin"),
        )
        if not parallel or (tp > 1 and folder.name.startswith(parallel_experts))
    ]
    results = launch.world(
        4,
        "tests.sharding.ranks:compare_with_vllm",
        cases=cases,
        # vLLM's process-wide state must not meet the engines of other tests.
        fresh=True,
    )
    for rank, wrong in enumerate(results):
        assert len(wrong) == len(cases)
        assert [
            (case, names) for case, names in zip(cases, wrong, strict=True) if names
        ] == [], f"rank {rank}"
