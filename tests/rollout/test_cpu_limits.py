"""Speculators that vLLM's CPU build runs, and what is said of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.errors import RolloutError
from megaverl.models.new_heads import make_draft_head
from megaverl.models.tiny import make_tiny_folder
from megaverl.rollout.cpu_limits import speculation_here
from megaverl.sharding.draft_head import HEAD_METHODS


def test_mtp_heads_have_folders_of_their_own(tmp_path: Path) -> None:
    """... and other speculators are refused in words."""
    model = make_tiny_folder(tmp_path / "model")
    heads = {
        method: make_draft_head(tmp_path / method, model, method=method)
        for method in HEAD_METHODS
    }
    mtp = {"method": "mtp", "num_speculative_tokens": 3}
    taken = speculation_here({**mtp, "model": heads["mtp"]})
    assert taken.pop("num_speculative_tokens_per_batch_size")
    assert taken == {**mtp, "model": heads["mtp"]}
    for config, said in (
        ({"method": "medusa"}, "ngram, draft_model, eagle3, mtp are known"),
        (mtp, "model: is not set. On a CPU, MTP layers inside a model have not"),
        ({**mtp, "model": heads["eagle3"]}, "a head for the method eagle3, and method"),
        ({**mtp, "model": model}, "expected the architecture"),
        ({**mtp, "model": "none"}, "none/config.json: not found"),
    ):
        with pytest.raises(RolloutError, match=f"^rollout.vllm.*{said}"):
            speculation_here(config)
