"""Megatron-core's logits equal Hugging Face's, for every architecture, grid, tied and untied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaverl.models.spec import ARCHITECTURES
from megaverl.models.tiny import make_tiny_folder
from tests.worlds import run_world

TOKENS = torch.randint(0, 100, (3, 17), generator=torch.Generator().manual_seed(5)).tolist()
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module", params=[(a, t) for a in ARCHITECTURES for t in (True, False)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, tied = request.param
    shard_bytes = 40_000 if tied else None  # sharded with an index, and one file
    return make_tiny_folder(
        tmp_path_factory.mktemp(architecture), architecture, tie_embeddings=tied, shard_bytes=shard_bytes
    )


def reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


@pytest.mark.parametrize(("tp", "pp"), GRIDS)
def test_logits_equal_hugging_faces(folder: Path, tp: int, pp: int) -> None:
    results = run_world(4, "tests.models.ranks:logits", folder=folder, tp=tp, pp=pp, tokens=TOKENS)
    expected = reference_logits(folder)
    found = [torch.tensor(result) for result in results if result]
    assert len(found) == 4 // pp
    for each in found:
        assert (each - expected).abs().max() < 1e-4


def test_virtual_stages_and_sequence_parallel(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen3ForCausalLM", tie_embeddings=True)
    expected = reference_logits(folder)
    for options in ({"vpp": 2}, {"sequence_parallel": True}):
        results = run_world(4, "tests.models.ranks:logits", folder=folder, tp=2, pp=2, tokens=TOKENS, **options)
        found = [torch.tensor(result) for result in results if result]
        assert len(found) == 2
        width = expected.shape[1]  # sequence parallelism pads the sequence to a multiple of tp
        assert all((each[:, :width] - expected).abs().max() < 1e-4 for each in found)


def test_critic_is_the_backbone_with_a_value_head(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "Qwen2ForCausalLM", tie_embeddings=True)
    file = folder / "model.safetensors"
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file({**load_file(file), "score.weight": head}, file, metadata={"format": "pt"})
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(TOKENS)).last_hidden_state
    expected = (hidden @ head.T)[:, :-1, 0]
    for tp, pp in GRIDS:
        for result in run_world(4, "tests.models.ranks:values", folder=folder, tp=tp, pp=pp, tokens=TOKENS):
            assert (torch.tensor(result) - expected).abs().max() < 1e-4


def test_critic_from_a_language_model_starts_at_zero(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, "LlamaForCausalLM", tie_embeddings=False)
    for result in run_world(4, "tests.models.ranks:values", folder=folder, tp=2, pp=2, tokens=TOKENS):
        assert torch.tensor(result).abs().max() == 0
