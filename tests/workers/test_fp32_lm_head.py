"""With `model.fp32_lm_head` engines and trainers multiply by the output layer in float32, and the rest in bfloat16."""

from __future__ import annotations

from pathlib import Path

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher

SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    # Large logits, whose rounding to 16 bits shows.
    "initializer_range": 0.3,
}


def test_log_probs_and_gradients_are_those_of_float64(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path, "LlamaForCausalLM", dtype="bfloat16", **SIZES)
    for seen in launch.world(2, "tests.workers.fp32_head_ranks:compare", folder=folder):
        # Rounded logits are wrong by 0.03 here.
        assert seen["engine"] < 1e-5 and seen["hf"] < 1e-5
        assert set(seen["log_probs"]) == {
            f"{engine}, {logits}"
            for engine in ("tp2", "tp1", "fsdp")
            for logits in ("whole", "chunked")
        }
        assert max(seen["log_probs"].values()) < 1e-5
        for same in seen["gradients"].values():
            assert min(same) > 0.97
        norms = list(seen["norms"].values())
        # Weights of importance depend exponentially on log-probs in bfloat16.
        assert max(norms) < 1.2 * min(norms)
        assert seen["aliased"] and seen["unchanged"]
