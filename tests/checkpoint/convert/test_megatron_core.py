"""megatron-core itself loads what was converted, and what it saves is converted; runs start from both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.checkpoint.convert.source import open_source
from megaverl.errors import CheckpointError
from tests.checkpoint.convert.folders import (
    as_reward_model,
    assert_same_files,
    converted,
    make_model,
)
from tests.launcher import Launcher

DENSE, EXPERTS = {"tp": 2, "pp": 2}, {"ep": 2, "pp": 2}
CASES = [
    # tied embeddings over pipeline stages need megatron-core's global groups: see the
    # run below
    ("Qwen2ForCausalLM", True, {"tp": 2}),
    ("Qwen3ForCausalLM", False, DENSE),
    ("GemmaForCausalLM", True, {"tp": 2}),
    ("MixtralForCausalLM", False, EXPERTS),
    ("DeepseekV3ForCausalLM", False, EXPERTS),
    ("Phi3ForCausalLM", False, DENSE),
    ("Glm4ForCausalLM", False, DENSE),
    ("Qwen2MoeForCausalLM", False, EXPERTS),
    ("Qwen3NextForCausalLM", False, DENSE),
]

RANKS = "tests.checkpoint.convert.ranks"


@pytest.mark.parametrize(
    ("architecture", "tied", "grid"), CASES, ids=[case[0] for case in CASES]
)
def test_megatron_core_loads_and_saves(
    launch: Launcher,
    architecture: str,
    tied: bool,
    grid: dict[str, int],
    tmp_path: Path,
) -> None:
    folder = make_model(
        tmp_path / "hf", architecture, tie_embeddings=tied, vocab_size=101
    )
    there = converted(
        folder, tmp_path / "there", "megatron", grid={"tp": 2}, transformer_engine=False
    )
    # strict: a key too many or too few would raise
    assert (
        launch.world(
            4, f"{RANKS}:mcore_loads", folder=folder, checkpoint=there, grid=grid
        )
        == [[]] * 4
    )
    assert (
        launch.world(
            4,
            f"{RANKS}:start_from_checkpoint",
            folder=folder,
            checkpoint=there,
            grid=grid,
        )
        == [[]] * 4
    )
    saved = tmp_path / "saved"
    assert (
        launch.world(
            4, f"{RANKS}:mcore_saves", folder=folder, checkpoint=saved, grid=grid
        )
        == [[]] * 4
    )
    back = converted(
        saved, tmp_path / "back", "hugging_face", model_folder=folder, verify=True
    )
    expected, found = (load_file(each / "model.safetensors") for each in (folder, back))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_value_head_in_megatron_core(launch: Launcher, tmp_path: Path) -> None:
    causal = make_model(tmp_path / "causal", "LlamaForCausalLM")
    reward = as_reward_model(causal, tmp_path / "reward")
    there = converted(
        reward, tmp_path / "there", "megatron", grid={"pp": 2}, transformer_engine=False
    )
    # the spec is the backbone's; the weights are the reward model's
    (reward / "config.json").write_bytes((causal / "config.json").read_bytes())
    options = {"folder": reward, "grid": DENSE, "value_head": True}
    assert (
        launch.world(4, f"{RANKS}:mcore_loads", checkpoint=there, **options) == [[]] * 4
    )
    assert (
        launch.world(
            4, f"{RANKS}:mcore_saves", checkpoint=tmp_path / "saved", **options
        )
        == [[]] * 4
    )
    back = converted(
        tmp_path / "saved",
        tmp_path / "back",
        "hugging_face",
        model_folder=causal,
        verify=True,
    )
    expected, found = (load_file(each / "model.safetensors") for each in (reward, back))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_ranks_share_a_conversion(launch: Launcher, tmp_path: Path) -> None:
    """As under torchrun: four ranks, each writes its part."""
    folder = make_model(
        tmp_path / "hf", tie_embeddings=True, dtype="bfloat16", shard_bytes=40_000
    )
    launch.world(
        4,
        f"{RANKS}:convert_there_and_back",
        source=folder,
        middle=tmp_path / "there",
        output=tmp_path / "back",
        grid={"tp": 2, "pp": 2},
    )
    assert_same_files(folder, tmp_path / "back")
    alone = converted(folder, tmp_path / "alone", "megatron", grid={"tp": 2, "pp": 2})
    assert_same_files(alone, tmp_path / "there", but=())


def test_a_run_is_converted_by_role(launch: Launcher, tmp_path: Path) -> None:
    """The newest checkpoint of a run, optimizer states left out; the configuration and the model beside it."""
    causal = make_model(tmp_path / "causal", tie_embeddings=True)
    root = tmp_path / "run"
    launch.world(
        4,
        f"{RANKS}:save_run",
        folder=causal,
        root=root / "checkpoints",
        grid={"pp": 2},
        roles=["actor", "critic"],
    )
    (root / "train.yaml").write_text(f"model: {{path: {causal}}}\n")
    actor = converted(root, tmp_path / "actor", "hugging_face", verify=True)
    expected, found = (
        load_file(each / "model.safetensors") for each in (causal, actor)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    critic = converted(
        root, tmp_path / "critic", "hugging_face", verify=True, role="critic"
    )
    score = load_file(critic / "model.safetensors")["score.weight"]
    assert torch.equal(score, torch.arange(32.0)[None] / 7)
    with pytest.raises(
        CheckpointError, match=r"no role 'judge' in it. It holds: actor, critic"
    ):
        open_source(root, role="judge")
