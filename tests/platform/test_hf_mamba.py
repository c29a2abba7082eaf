"""Corrected Mamba-2 layers of transformers: time steps shorter than `time_step_min`, and rows of one token."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megaverl.models.hf_model import build_module
from megaverl.models.tiny import make_tiny_folder
from megaverl.platform.hf_mamba import correct_mamba

TOKENS = torch.arange(60).view(2, 30)


def test_short_steps_are_left_as_they_are(tmp_path: Path) -> None:
    """As in a model whose limit is lower, and token by token."""
    folders = [
        make_tiny_folder(
            tmp_path / name, "NemotronHForCausalLM", time_step_min=shortest
        )
        for name, shortest in (("low", 1e-9), ("high", 0.9))
    ]
    low, high = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    with torch.no_grad():
        expected = low(TOKENS).logits
        assert (high(TOKENS).logits - expected).abs().max() > 1e-4
        correct_mamba(high)
        torch.testing.assert_close(high(TOKENS).logits, expected)
        first = high(TOKENS[:, :-1], use_cache=True)
        last = high(TOKENS[:, -1:], past_key_values=first.past_key_values).logits
        torch.testing.assert_close(last, expected[:, -1:], atol=1e-5, rtol=0)
    model, reading = build_module(folders[1], dtype=torch.float32, seed=0)
    assert {
        m.time_step_limit[0] for m in model.modules() if hasattr(m, "time_step_limit")
    } == {0.0}
    # transformers' layers carry their state over to the next sample of a packed row.
    assert reading.padded_because and reading.pack is None


def test_rows_of_one_token_stay_apart(tmp_path: Path) -> None:
    """Falcon-H1 with a norm over the gated output, token by token."""
    folder = make_tiny_folder(tmp_path / "model", "FalconH1ForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(TOKENS).logits
        first = model(TOKENS[:, :-1], use_cache=True)
        correct_mamba(model)
        last = model(TOKENS[:, -1:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last, expected[:, -1:], atol=1e-5, rtol=0)
