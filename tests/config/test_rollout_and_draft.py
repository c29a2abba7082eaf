"""A draft model that is to be trained: what it needs, and what rules it out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaverl.config import Config
from megaverl.config.grids import used_roles
from megaverl.config.resuming import changes
from tests.config.conftest import LLAMA

SPECULATION = "rollout.vllm.speculative_config"
TRAIN = "draft.train=true"


@pytest.fixture
def draft(tmp_path: Path) -> Callable[..., str]:
    """`draft(size=...)`: the override that names a draft model with these sizes."""

    def make(**sizes: object) -> str:
        folder = tmp_path / "draft"
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps({**LLAMA, "num_hidden_layers": 1, **sizes})
        )
        return f"{SPECULATION}={{model: {folder}, num_speculative_tokens: 2}}"

    return make


def test_a_draft_model_has_the_actors_grid_and_a_rate_of_its_own(load, draft):
    config: Config = load(draft(), TRAIN, "actor={tp: 2, micro_batch_tokens: 2048}")
    assert (config.draft.tp, config.draft.micro_batch_tokens) == (2, 2048)
    assert config.draft.optimizer["lr"] == 1e-4
    assert used_roles(config, "train") == ["actor", "critic", "draft"]
    assert used_roles(load(), "train") == ["actor", "critic"]


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["draft.optimizer.lr=0.1"], "draft.optimizer", "draft.train is false"),
        ([TRAIN], "draft.train", f"is set, and {SPECULATION} is not"),
        (
            [TRAIN, f"{SPECULATION}={{method: eagle3, model: org/head}}"],
            f"{SPECULATION}.method",
            "found 'eagle3', and draft.train trains draft models only",
        ),
        (
            [TRAIN, f"{SPECULATION}={{method: ngram, num_speculative_tokens: 2}}"],
            f"{SPECULATION}.method",
            "n-grams have no weights",
        ),
        (
            [TRAIN, f"{SPECULATION}={{model: nowhere, num_speculative_tokens: 2}}"],
            f"{SPECULATION}.model",
            "found 'nowhere', which is not a Hugging Face folder",
        ),
        (
            [TRAIN, "rollout={engine: hf}"],
            "draft.train",
            "rollout.engine is hf: only vLLM",
        ),
    ],
)
def test_what_a_trained_draft_model_needs(mistakes, overrides, key, said):
    found = mistakes(*overrides)
    assert said in found[key]
    assert set(found) == {key}


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["draft.lora={}"], "draft.lora", "all of its weights are trained"),
        (["draft.optimizer.lr=0"], "draft.optimizer.lr", "expected above 0"),
        (["draft.tp=4", "run.nproc=4"], "draft.tp", "does not divide the model's 6"),
        (
            [f"{SPECULATION}.quantization=fp8"],
            f"{SPECULATION}.quantization",
            "could not take the weights",
        ),
        (
            ["placement.actor_islands=2"],
            "placement.actor_islands",
            "the draft model learns from one",
        ),
    ],
)
def test_what_rules_out_a_trained_draft_model(mistakes, draft, overrides, key, said):
    found = mistakes(draft(), TRAIN, *overrides)
    assert said in found[key]


def test_a_draft_model_that_does_not_fit_the_actor(mistakes, draft):
    found = mistakes(draft(vocab_size=99, max_position_embeddings=16), TRAIN)
    assert set(found) == {f"{SPECULATION}.model"}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"vocab_size": 99}, "with 99 tokens, and the actor has 100"),
        ({"max_position_embeddings": 16}, "with a context of 16 tokens"),
    ],
)
def test_sizes_of_a_draft_model_that_do_not_fit(mistakes, draft, sizes, said):
    assert said in mistakes(draft(**sizes), TRAIN)[f"{SPECULATION}.model"]


def test_an_architecture_without_a_table_trains_under_fsdp(mistakes, load, draft):
    override = draft(architectures=["BloomForCausalLM"])
    said = mistakes(override, TRAIN)[f"{SPECULATION}.model"]
    assert "BloomForCausalLM" in said and "Or set draft.engine: fsdp." in said
    assert load(override, TRAIN, "draft.engine=fsdp").draft.engine == "fsdp"


def test_a_resumed_run_keeps_the_trained_draft_model(load, draft):
    override = draft()
    before = load(override, TRAIN).to_dict()
    other = load(override.replace("/draft,", "/model,"), TRAIN)
    assert [
        (change.key, change.outcome) for change in changes(before, other, "train")
    ] == [(f"{SPECULATION}.model", "kept")]
    without = changes(before, load(override), "train")
    assert ("draft.train", "refused") in [
        (change.key, change.outcome) for change in without
    ]
