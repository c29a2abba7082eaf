"""Megatron-core's logits equal Hugging Face's, for every architecture, grid, tied and untied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec
from tests.launcher import Launcher
from tests.references import load_reference
from tests.sharding.specs import (
    NEMOTRON_EXPERTS,
    TRANSFORMERS_ATTENTION,
    UNCUT,
    expert_tp,
    make_spec,
)

TOKENS = torch.randint(
    0, 100, (3, 17), generator=torch.Generator().manual_seed(5)
).tolist()
GRIDS: list[dict[str, int]] = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]
# By whether the output layer is the embedding: both are cut in both ways, and no grid is left out.
GRIDS_OF = {True: [{}, {"tp": 2, "pp": 2}], False: [{"tp": 2}, {"pp": 2}]}
EXPERT_GRIDS: list[dict[str, int]] = [
    {"ep": 2},
    {"ep": 4},
    {"ep": 2, "pp": 2},
    # Experts cut by tensor parallelism too: uneven rows go between its ranks.
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
]
WITH_EXPERTS = [a for a in ARCHITECTURES if make_spec(a).moe]


@pytest.fixture(
    scope="module",
    params=[(a, t) for a in ARCHITECTURES for t in (True, False)],
    ids=str,
)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bool]:
    """A model, and whether its embeddings are tied."""
    architecture, tied = request.param
    shard_bytes = 40_000 if tied else None  # sharded with an index, and one file
    path = make_tiny_folder(
        tmp_path_factory.mktemp(architecture),
        architecture,
        tie_embeddings=tied,
        shard_bytes=shard_bytes,
    )
    return path, tied


def reference_logits(folder: Path) -> torch.Tensor:
    attention = TRANSFORMERS_ATTENTION.get(ModelSpec.from_folder(folder).architecture)
    model = load_reference(folder, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def assert_parity(
    launch: Launcher,
    folder: Path,
    expected: torch.Tensor,
    grid: dict[str, int],
    **options: Any,
) -> None:
    results = launch.world(
        4, "tests.models.ranks:logits", folder=folder, tokens=TOKENS, **grid, **options
    )
    found = [torch.tensor(result) for result in results if result]
    assert len(found) == 4 // grid.get("pp", 1)
    # Sequence parallelism pads the sequence to a multiple of tp.
    width = expected.shape[1]
    for each in found:
        assert (each[:, :width] - expected).abs().max() < 1e-4, grid


def test_logits_equal_hugging_faces(
    launch: Launcher, folder: tuple[Path, bool]
) -> None:
    path, tied = folder
    expected = reference_logits(path)
    for grid in GRIDS_OF[tied]:
        assert_parity(
            launch,
            path,
            expected,
            grid | expert_tp(ModelSpec.from_folder(path).architecture),
        )


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MistralForCausalLM", {"sliding_window": 5}),
        ("Qwen2ForCausalLM", QWEN_WINDOW | {"max_window_layers": 2}),
        (
            "Qwen3ForCausalLM",
            QWEN_WINDOW
            | {"layer_types": ["sliding_attention", *["full_attention"] * 3]},
        ),
        ("MixtralForCausalLM", {"sliding_window": 5}),
        ("Qwen3MoeForCausalLM", QWEN_WINDOW),
        ("CwmForCausalLM", {"sliding_window": 5}),
        ("Phi3ForCausalLM", {"sliding_window": 5}),
        (
            "MinistralForCausalLM",
            {
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_logits_with_windows_shorter_than_the_sequence(
    launch: Launcher, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Whole and cut: a stage knows which of the model's layers it has."""
    folder = make_tiny_folder(tmp_path / "windowed", architecture, **config)
    expected = reference_logits(folder)
    full = {"sliding_window": 256, "use_sliding_window": False, "layer_types": None}
    without = make_tiny_folder(
        tmp_path / "full",
        architecture,
        **{key: full[key] for key in config if key in full},
    )
    # The window is felt.
    assert (reference_logits(without) - expected).abs().max() > 0.01
    for grid in ({}, {"tp": 2, "pp": 2}):
        assert_parity(launch, folder, expected, grid | expert_tp(architecture))


def test_logits_of_stages_with_unequal_layers(launch: Launcher, tmp_path: Path) -> None:
    """A stage knows which kinds of layers it has."""
    folder = make_tiny_folder(tmp_path, "NemotronHForCausalLM")
    uneven = {"pp": 2, "num_layers_in_first_pipeline_stage": 1}
    assert_parity(launch, folder, reference_logits(folder), uneven)


@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_logits_with_experts_on_ranks_of_their_own(
    launch: Launcher, architecture: str, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, architecture, num_hidden_layers=2)
    expected = reference_logits(folder)
    for grid in EXPERT_GRIDS:
        if architecture == UNCUT and "tp" in grid and "etp" not in grid:
            continue
        assert_parity(launch, folder, expected, grid)


def test_logits_of_layers_of_experts_alone(launch: Launcher, tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "NemotronHForCausalLM", **NEMOTRON_EXPERTS)
    expected = reference_logits(folder)
    for grid in ({}, *EXPERT_GRIDS):
        assert_parity(launch, folder, expected, grid)


def test_weights_of_chosen_experts_that_are_not_divided_by_their_sum(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen3MoeForCausalLM", norm_topk_prob=False)
    assert_parity(launch, folder, reference_logits(folder), {"tp": 2, "ep": 2})


def test_latent_attention_without_a_query_latent_and_with_yarn(
    launch: Launcher, tmp_path: Path
) -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    folder = make_tiny_folder(
        tmp_path, "DeepseekV3ForCausalLM", q_lora_rank=None, rope_parameters=yarn
    )
    assert ModelSpec.from_folder(folder).rope_scaling is not None
    assert_parity(launch, folder, reference_logits(folder), {"tp": 2, "pp": 2})


def test_yarn(launch: Launcher, tmp_path: Path) -> None:
    """As Qwen's folders turn it on: bounds that are rounded, and the usual factor on queries and keys."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM", rope_parameters=yarn)
    assert_parity(launch, folder, reference_logits(folder), {"tp": 2, "pp": 2})


def test_virtual_stages_and_sequence_parallel(launch: Launcher, tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM", tie_embeddings=True)
    expected = reference_logits(folder)
    for options in ({"vpp": 2}, {"sequence_parallel": True}):
        assert_parity(launch, folder, expected, {"tp": 2, "pp": 2}, **options)


def test_critic_is_the_backbone_with_a_value_head(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen2ForCausalLM", tie_embeddings=True)
    file = folder / "model.safetensors"
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file(
        {**load_file(file), "score.weight": head}, file, metadata={"format": "pt"}
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(TOKENS)).last_hidden_state
    expected = (hidden @ head.T)[:, :-1, 0]
    for grid in GRIDS:
        for result in launch.world(
            4, "tests.models.ranks:values", folder=folder, tokens=TOKENS, **grid
        ):
            assert (torch.tensor(result) - expected).abs().max() < 1e-4


def test_critic_from_a_language_model_starts_at_zero(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, "LlamaForCausalLM", tie_embeddings=False)
    for result in launch.world(
        4, "tests.models.ranks:values", folder=folder, tp=2, pp=2, tokens=TOKENS
    ):
        assert torch.tensor(result).abs().max() == 0


# With biases; with norms of heads; fused in the file; with a norm over all heads; with
# gates on outputs of heads.
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "Olmo2ForCausalLM",
        "Qwen3NextForCausalLM",
    ],
)
def test_several_ranks_share_a_key_value_head(
    launch: Launcher, architecture: str, tmp_path: Path
) -> None:
    for kv_heads, sizes in ((2, {"tp": 4}), (1, {"tp": 2, "pp": 2})):
        folder = make_tiny_folder(
            tmp_path / str(kv_heads), architecture, num_key_value_heads=kv_heads
        )
        expected = reference_logits(folder)
        assert_parity(launch, folder, expected, sizes)
        assert_parity(launch, folder, expected, sizes, sequence_parallel=True)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("GemmaForCausalLM", {}),
        ("Gemma3ForCausalLM", {}),
        ("GraniteForCausalLM", {"embedding_multiplier": 5.6569}),
        ("FalconH1ForCausalLM", {"embedding_multiplier": 5.6569}),
    ],
)
def test_embeddings_are_scaled_as_in_transformers(
    launch: Launcher, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    """To the bit in bfloat16: Gemma rounds the factor first, the others do not."""
    folder = make_tiny_folder(tmp_path, architecture, **changes)
    [(ours, theirs)] = launch.world(
        1, "tests.models.ranks:embeddings", folder=folder, tokens=list(range(3, 40))
    )
    assert ours == theirs
