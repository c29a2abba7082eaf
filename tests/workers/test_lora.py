"""LoRA on Megatron's layers: peft's numbers, on every grid, and nothing but adapters trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaverl.distributed.grid import GridShape
from megaverl.models.tiny import FAMILIES, make_tiny_folder, make_tiny_vision_folder
from tests.launcher import Launcher
from tests.workers.test_parallel_invariance import ACTOR, CRITIC

LORA = {"rank": 4, "alpha": 8.0}
SHAPES: dict[str, dict[str, Any]] = {
    "dp4": {"dp": 4},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    # More ranks than the model's two key-value heads: some hold no row of k_proj.
    "tp4": {"tp": 4},
    "pp2 vpp2 dp2": {"pp": 2, "vpp": 2, "dp": 2},
}
FSDP: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 4, "fsdp": {}},
    "fsdp in two groups": {
        "dp": 4,
        "fsdp": {"sharding_strategy": "hybrid_shard", "shard_size": 2},
    },
    "fsdp, rows cut": {"cp": 2, "dp": 2, "fsdp": {}},
}
RANKS = "tests.workers.lora_ranks:"
# Files hold several projections in one array, or megatron-core several of files' arrays.
FUSED = (
    "Phi3ForCausalLM",
    "Glm4ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
)
TARGETS = {
    "Qwen2ForCausalLM": "q_proj k_proj v_proj o_proj gate_proj down_proj",
    "DeepseekV3ForCausalLM": "q_b_proj kv_a_proj_with_mqa o_proj",
    "Phi3ForCausalLM": "qkv_proj gate_up_proj",
    "Glm4ForCausalLM": "k_proj o_proj gate_up_proj down_proj",
    "Qwen3NextForCausalLM": "in_proj_qkvz in_proj_ba out_proj q_proj v_proj",
    "Qwen3_5ForCausalLM": "in_proj_qkv in_proj_z in_proj_a out_proj q_proj up_proj",
    "NemotronHForCausalLM": "in_proj v_proj up_proj",
    "FalconH1ForCausalLM": "in_proj k_proj v_proj gate_proj down_proj",
    "qwen3_5": "in_proj_qkv in_proj_z in_proj_a out_proj q_proj up_proj",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_folder(
        tmp_path_factory.mktemp("model"), "Qwen2ForCausalLM", tie_embeddings=True
    )


def updated(
    launch: Launcher,
    folder: Path,
    output: Path,
    shapes: dict[str, dict[str, Any]],
    **options: Any,
) -> dict[str, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Grid -> (metrics, adapter) after an update."""
    first = next(iter(shapes.values()))
    size = GridShape(
        **{name: of_grid for name, of_grid in first.items() if name != "fsdp"}
    ).world_size
    metrics = launch.world(
        size, f"{RANKS}update", folder=folder, shapes=shapes, output=output, **options
    )[0]
    return {
        name: (metrics[name], load_file(output / name / "adapter_model.safetensors"))
        for name in shapes
    }


@pytest.mark.parametrize(
    ("targets", "rank", "options"),
    # of a factor of rank 2, two of four FSDP2 ranks hold nothing
    [
        ("all-linear", 4, ACTOR),
        (["q_proj", "down_proj"], 2, ACTOR),
        ("all-linear", 4, CRITIC),
    ],
    ids=["actor", "some targets", "critic"],
)
def test_same_update_on_every_grid(
    launch: Launcher,
    folder: Path,
    tmp_path: Path,
    targets: str | list[str],
    rank: int,
    options: dict[str, Any],
) -> None:
    lora = {**LORA, "targets": targets, "rank": rank}
    role = {"value_head": True, "role": "critic"} if options.get("critic") else {}
    start = {"output": tmp_path / "start", "shape": SHAPES["dp4"]}
    launch.world(4, f"{RANKS}random_adapter", folder=folder, lora=lora, **start, **role)
    given = {"adapter": tmp_path / "start", "lora": lora, **options}
    found = updated(launch, folder, tmp_path, SHAPES, **given)
    expected_metrics, expected = found.pop("dp4")
    before = load_file(tmp_path / "start" / "adapter_model.safetensors")
    assert all(not torch.equal(before[name], expected[name]) for name in before), (
        "every factor takes part"
    )
    parallel = {**given, "megatron": {"sequence_parallel": True}}
    if not role:
        found |= updated(launch, folder, tmp_path, FSDP, **given)
    found |= updated(
        launch,
        folder,
        tmp_path,
        {"sequence parallel": SHAPES["tp2 pp2"], "tp4, the same": SHAPES["tp4"]},
        **parallel,
    )
    for grid, (metrics, adapter) in found.items():
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (
                grid,
                name,
            )
        assert adapter.keys() == expected.keys()
        for name, factor in expected.items():
            torch.testing.assert_close(
                adapter[name], factor, atol=1e-5, rtol=0, msg=f"{grid} {name}"
            )


@pytest.mark.parametrize("architecture", FUSED)
def test_same_update_of_projections_that_files_hold_fused(
    launch: Launcher, tmp_path: Path, architecture: str
) -> None:
    folder = make_tiny_folder(tmp_path / "model", architecture)
    start = {"output": tmp_path / "start", "shape": {"dp": 2}}
    launch.world(2, f"{RANKS}random_adapter", folder=folder, lora=LORA, **start)
    given = {"adapter": tmp_path / "start", "lora": LORA, **ACTOR}
    shapes: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}
    found = updated(launch, folder, tmp_path, shapes, **given)
    parallel = given | {"megatron": {"sequence_parallel": True}}
    shapes = {"sequence parallel": {"tp": 2}}
    found |= updated(launch, folder, tmp_path, shapes, **parallel)
    _, expected = found.pop("dp2")
    before = load_file(tmp_path / "start" / "adapter_model.safetensors")
    assert all(not torch.equal(before[name], expected[name]) for name in before)
    for grid, (_, adapter) in found.items():
        for name, factor in expected.items():
            torch.testing.assert_close(
                adapter[name], factor, atol=1e-5, rtol=0, msg=f"{grid} {name}"
            )


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("Qwen2ForCausalLM", {"tp": 2}),
        ("Qwen2ForCausalLM", {"dp": 2, "fsdp": {}}),
        ("DeepseekV3ForCausalLM", {"tp": 2}),
        ("Qwen3MoeForCausalLM", {"tp": 2}),
        ("GptOssForCausalLM", {"tp": 2, "etp": 1}),
        *((architecture, {"tp": 2}) for architecture in FUSED),
        ("Llama4ForCausalLM", {"tp": 2}),
        # Models with a vision tower, which has no adapters.
        ("qwen3_vl", {"tp": 2}),
        ("qwen3_5", {"tp": 2}),
    ],
)
def test_an_adapter_of_peft_there_and_back(
    launch: Launcher, architecture: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    """Made by peft, loaded on two ranks, saved and merged: peft's numbers each time."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto: Any = AutoModelForCausalLM
    if architecture in FAMILIES:
        auto = AutoModelForImageTextToText
        words = [f"word{number}" for number in range(90)]
        sizes: dict[str, Any] = {"words": words, "num_key_value_heads": 2}
        folder = make_tiny_vision_folder(tmp_path / "model", architecture, **sizes)
    else:
        folder = make_tiny_folder(tmp_path / "model", architecture)
    targets = TARGETS.get(architecture, "q_proj v_proj o_proj").split()
    torch.manual_seed(0)
    made = peft.get_peft_model(
        auto.from_pretrained(folder, dtype=torch.float32),
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=targets,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        ),
    )
    made.save_pretrained(tmp_path / "made")
    # The first tokens stand for images in models that take some.
    tokens = torch.randint(10, 100, (3, 17), generator=torch.Generator().manual_seed(5))
    paths = {
        "adapter": tmp_path / "made",
        "saved": tmp_path / "saved",
        "merged": tmp_path / "merged",
    }
    lora = {**LORA, "targets": targets}
    found = launch.world(
        2,
        f"{RANKS}through_megaverl",
        folder=folder,
        shape=shape,
        lora=lora,
        tokens=tokens.tolist(),
        **paths,
    )
    with torch.no_grad():
        logits = made(tokens).logits
        expected = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[
            ..., 0
        ]
        for each in found:
            assert (torch.tensor(each) - expected).abs().max() < 1e-5
        base = auto.from_pretrained(folder, dtype=torch.float32)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
        assert torch.equal(again(tokens).logits, logits)
        theirs = made.merge_and_unload()
        ours = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        for (name, weight), (_, merged) in zip(
            theirs.named_parameters(), ours.named_parameters(), strict=True
        ):
            assert (merged - weight).norm() <= 1e-5 * weight.norm(), name
        assert (ours(tokens).logits - logits).abs().max() < 1e-4


def test_an_adapter_of_other_layers_is_refused(
    launch: Launcher, folder: Path, tmp_path: Path
) -> None:
    launch.world(
        2,
        f"{RANKS}random_adapter",
        folder=folder,
        lora=LORA,
        output=tmp_path / "all",
        shape={"tp": 2},
    )
    changes = [{"rank": 2}, {"alpha": 1.0}, {"targets": ["q_proj"]}, {}]
    for found in launch.world(
        2,
        f"{RANKS}refusals",
        folder=folder,
        lora=LORA,
        changes=changes,
        adapter=tmp_path / "all",
    ):
        assert "r is 4" in found[0] and "actor.lora.rank=2" in found[0]
        assert "lora_alpha 8" in found[1] and "actor.lora.alpha=1" in found[1]
        assert "k_proj.lora_A.weight" in found[2] and "actor.lora.targets" in found[2]
        assert found[3] == ""
