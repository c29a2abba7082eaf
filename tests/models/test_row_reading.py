"""How models of transformers read rows under FSDP2: packed, but for a few that say why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megaverl.models.hf_model import build_module
from megaverl.models.tiny import make_tiny_folder
from megaverl.sharding.model_config import NOT_IN_TRANSFORMERS
from megaverl.sharding.model_spec import ARCHITECTURES, ModelSpec

PADDED = {
    "GptOssForCausalLM": "sinks",
    # transformers' default
    "SeedOssForCausalLM": "dropout",
    "Llama4ForCausalLM": "place in a row",
    # Frequencies may depend on the longest position.
    "HunYuanDenseV1ForCausalLM": "without data",
}


@pytest.mark.parametrize(
    "architecture", [name for name in ARCHITECTURES if name not in NOT_IN_TRANSFORMERS]
)
def test_rows_are_packed_or_the_reason_is_said(
    architecture: str, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, architecture)
    _, reading = build_module(folder, dtype=torch.float32, seed=None)
    state = "in other ways than attention"
    is_recurrent = ModelSpec.from_folder(folder).is_recurrent
    expected = state if is_recurrent else PADDED.get(architecture, "")
    assert expected in reading.padded_because
    assert (reading.pack is None) == bool(expected)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("has_chunks", [True, False])
def test_rows_of_llama_4_are_packed_without_its_own_attention(
    has_chunks: bool, is_scaled: bool, tmp_path: Path
) -> None:
    folder = make_tiny_folder(
        tmp_path,
        "Llama4ForCausalLM",
        no_rope_layers=[int(has_chunks), 0, 0, 0],
        attn_temperature_tuning=is_scaled,
    )
    _, reading = build_module(folder, dtype=torch.float32, seed=None)
    assert (reading.pack is None) == (has_chunks or is_scaled)
