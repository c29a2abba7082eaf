"""With `rollout.batch_invariant` engine and actor agree to the bit, and responses do not depend on their batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "vocab_size": 150,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    # Large weights, so that rounding shows in the log-probs.
    "initializer_range": 0.15,
}


def compare(
    launch: Launcher,
    path: Path,
    architecture: str,
    *,
    num_ranks: int = 1,
    tp: int = 1,
    dtype: str = "float32",
    sizes: dict[str, Any] | None = None,
    shape: dict[str, int] | None = None,
    **options: Any,
) -> None:
    folder = make_tiny_folder(path / "model", architecture, **SIZES, **(sizes or {}))
    for found in launch.world(
        num_ranks,
        "tests.workers.batch_invariant_ranks:train_and_compare",
        folder=folder,
        shape=shape or {},
        tp=tp,
        dtype=dtype,
        **options,
    ):
        assert found == {
            "kl": [0.0, 0.0],
            "changed": True,
            "differences": [0, 0],
            "short": [0, 0],
            "alone": [True] * 3,
            "others": [True] * 4,
            "still_on": False,
        }


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU alone")


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        # Biases of queries, keys and values.
        ("Qwen2ForCausalLM", {}),
        # Norms of queries and keys, and tied embeddings.
        ("Qwen3ForCausalLM", {"tie_embeddings": True}),
        # A window that most tokens exceed.
        ("MistralForCausalLM", {"sliding_window": 20}),
    ],
)
def test_on_one_rank(
    launch: Launcher, architecture: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    compare(launch, tmp_path, architecture, sizes=sizes)


def test_in_bfloat16(launch: Launcher, tmp_path: Path) -> None:
    compare(launch, tmp_path, "Qwen2ForCausalLM", dtype="bfloat16")


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("Qwen2ForCausalLM", "bfloat16"), ("Qwen3ForCausalLM", "float32")],
)
def test_under_fsdp(
    launch: Launcher, tmp_path: Path, architecture: str, dtype: str
) -> None:
    """Layers of transformers' models are replaced. Weights are float32, and gathered in the dtype of the engine."""
    compare(
        launch,
        tmp_path,
        architecture,
        num_ranks=2,
        shape={"dp": 2},
        dtype=dtype,
        fsdp={},
    )


def test_with_chunked_logits(launch: Launcher, tmp_path: Path) -> None:
    """The output layer is outside of the model then. In float32, other layers are not."""
    compare(
        launch,
        tmp_path,
        "Qwen3ForCausalLM",
        sizes={"tie_embeddings": True},
        dtype="bfloat16",
        fp32_lm_head=True,
        chunked_logits=True,
    )


@pytest.mark.parametrize(
    ("tp", "shape"),
    # A sum of two ranks' parts is the same in either order.
    [(2, {"tp": 2}), (1, {"pp": 2})],
)
def test_on_two_ranks(
    launch: Launcher, tp: int, shape: dict[str, int], tmp_path: Path
) -> None:
    compare(launch, tmp_path, "LlamaForCausalLM", num_ranks=2, tp=tp, shape=shape)
