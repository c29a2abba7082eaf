"""Layouts derived from vLLM's own loaders: against the rules, and against what vLLM loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaverl.models.tiny import FAMILIES, make_tiny_folder, make_tiny_vision_folder
from megaverl.sharding.model_spec import ARCHITECTURES
from tests.launcher import Launcher
from tests.sharding.specs import ALWAYS_TIED, CONFIGS, ROUTED

RANKS = "tests.rollout.tracing_ranks"
# Plain, transposed (GPT-2, gpt-oss, Llama 4), fused in the file, interleaved,
# normalised by heads, with constants
EXACT = [
    "GPT2LMHeadModel",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Phi3ForCausalLM",
    "FalconForCausalLM",
]
EXACT += [
    "BloomForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Glm4MoeForCausalLM",
]


def test_the_rules_are_what_vllm_does(launch: Launcher, tmp_path: Path) -> None:
    """Every architecture that has rules, at TP 1, 2 and 4; experts with and without expert parallelism."""
    folders = [
        make_tiny_folder(
            tmp_path / architecture,
            architecture,
            **{
                "vocab_size": 130,
                "num_hidden_layers": 2,
                **CONFIGS.get(architecture, {}),
            },
            tie_embeddings=architecture in ALWAYS_TIED,
        )
        for architecture in ARCHITECTURES
    ]
    cases = [
        {
            "folder": str(folder),
            "tp": tp,
            "expert_parallel": parallel,
            "placement": placement,
        }
        for folder in folders
        for tp in (1, 2, 4)
        for parallel, placement in (
            (False, "linear"),
            (True, "linear"),
            (True, "round_robin"),
        )
        if not parallel or (tp > 1 and folder.name.startswith(ROUTED))
    ]
    [found] = launch.world(1, f"{RANKS}:compare_with_rules", cases=cases)
    assert [
        (case, wrong) for case, wrong in zip(cases, found, strict=True) if wrong
    ] == []


def test_the_rules_of_models_with_images(launch: Launcher, tmp_path: Path) -> None:
    """At TP 1 and 2: the tower has two heads."""
    cases = [
        {"folder": str(folder), "tp": tp, "expert_parallel": False}
        | {"placement": "linear"}
        for family in FAMILIES
        for folder in [
            make_tiny_vision_folder(tmp_path / family, family, weights=False)
        ]
        for tp in (1, 2)
    ]
    [found] = launch.world(1, f"{RANKS}:compare_with_rules", cases=cases)
    assert found == [[]] * len(cases)


def test_architectures_without_rules(launch: Launcher) -> None:
    others = ["MambaForCausalLM", "PersimmonForCausalLM"]
    [found] = launch.world(
        1, f"{RANKS}:check_architectures", architectures=[*EXACT, *others]
    )
    assert found[:-2] == [[architecture, "exact", ""] for architecture in EXACT]
    assert found[-2] == ["MambaForCausalLM", "computed", "backbone.layers.N.mixer.A"]
    assert (
        found[-1][1] == "refused"
        and "cut model.layers.0.self_attn over 2 ranks" in found[-1][2]
    ), found[-1]


def test_transformers_classes_stay_as_they_are(launch: Launcher) -> None:
    """vLLM has no GPT-NeoX of its own and makes transformers' compile: the trainer's is of the same class."""
    [found] = launch.world(
        1, f"{RANKS}:built_from_transformers", architecture="GPTNeoXForCausalLM"
    )
    assert found == {
        "class": True,
        "made before": True,
        "made after": True,
        "engine's compiles": True,
    }


@pytest.mark.parametrize(
    "architecture",
    ["GPT2LMHeadModel", "Phi3ForCausalLM", "Qwen2MoeForCausalLM", "Lfm2ForCausalLM"],
)
def test_engines_filled_from_sharded_modules_answer_as_fresh_ones(
    launch: Launcher, architecture: str
) -> None:
    """Of architectures that no table describes, from parameters cut by rows:
    transposed, fused, routed, with states; and as transformers computes them.
    """
    for [found] in launch.world(2, f"{RANKS}:answers", architectures=[architecture]):
        assert found[:2] == [architecture, "same"], found


@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "MambaForCausalLM", "GPT2LMHeadModel"]
)
def test_one_layer_of_each_kind_stands_for_all(
    launch: Launcher, architecture: str
) -> None:
    """Hybrid ones, whose layers alternate, a computed parameter, a transposed one."""
    [found] = launch.world(
        1, f"{RANKS}:layers_are_repeated", architecture=architecture, fresh=True
    )
    assert found["same"] and found["traced"] < found["of"]
    assert found["dtype"] == "torch.float32"


def test_an_engine_that_loads_otherwise_is_refused(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = make_tiny_folder(tmp_path / "model", hidden_size=128)
    [said] = launch.world(1, f"{RANKS}:other_layout", folder=str(folder), fresh=True)
    assert "loads Qwen2ForCausalLM differently with data than without data" in said, (
        said
    )
    assert "model.layers.0.mlp.gate_proj.weight" in said and "rollout.engine=hf" in said
