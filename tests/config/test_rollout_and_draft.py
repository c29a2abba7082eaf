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
            [TRAIN, f"{SPECULATION}={{method: medusa, model: org/head}}"],
            f"{SPECULATION}.method",
            "found 'medusa', and draft.train trains draft models, EAGLE-3 heads and MTP heads only",
        ),
        (
            [TRAIN, f"{SPECULATION}={{method: mtp, num_speculative_tokens: 1}}"],
            f"{SPECULATION}.model",
            "MTP layers inside the actor's folder cannot be trained: make a head with `megaverl draft-head --kind mtp`",
        ),
        (
            [
                TRAIN,
                "draft.engine=fsdp",
                f"{SPECULATION}={{method: eagle3, model: org/head}}",
            ],
            f"{SPECULATION}.num_speculative_tokens",
            "needs the number of drafts",
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


HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_aux_hidden_state_layer_ids": [1, 2],
}

MTP_HEAD = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., list[str]]:
    """`head(key=...)`: the overrides that train a head with such a config.json."""

    def make(method: str = "eagle3", **config: object) -> list[str]:
        folder = tmp_path / "head"
        folder.mkdir()
        kind = HEAD if method == "eagle3" else MTP_HEAD
        (folder / "config.json").write_text(
            json.dumps({**LLAMA, "num_hidden_layers": 1, **kind, **config})
        )
        drafts = f"{{method: {method}, model: {folder}, num_speculative_tokens: 2}}"
        return [f"{SPECULATION}={drafts}", TRAIN, "draft.engine=fsdp"]

    return make


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_trains_under_fsdp_on_the_actors_grid(load, head, method):
    config: Config = load(*head(method), "actor.tp=2", "draft.tp=2")
    assert config.trains_head and (config.draft.engine, config.draft.tp) == ("fsdp", 2)


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["draft.engine=megatron"], "draft.engine", "trained under FSDP2"),
        (
            ["actor.pp=2", "run.nproc=2"],
            "actor.pp",
            "needs hidden states of all layers",
        ),
        (["actor.cp=2", "run.nproc=2"], "actor.cp", "a head needs whole rows"),
        (["actor.tp=2"], "draft.tp", "found 1, and actor.tp is 2"),
        (["draft.fsdp.attention=sdpa"], "draft.fsdp.attention", "its own attention"),
    ],
)
def test_what_rules_out_a_trained_head(mistakes, head, overrides, key, said):
    assert said in mistakes(*head(), *overrides)[key]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 24}, "with hidden_size 24, and the actor has 48"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 9]},
            "reads the states after layer 9",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1]}, "ascending and each once"),
        ({"draft_vocab_size": 50}, "draft_vocab_size is 50 (a reduced vocabulary"),
        (
            {"norm_before_residual": True},
            "norm_before_residual is set (the residual follows the norm)",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "expected the architecture LlamaForCausalLMEagle3",
        ),
        ({"vocab_size": 99}, "with 99 tokens, and the actor has 100"),
    ],
)
def test_heads_that_do_not_fit_or_cannot_be_trained(mistakes, head, config, said):
    assert said in mistakes(*head(**config))[f"{SPECULATION}.model"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"num_hidden_layers": 36}, "A whole model with num_nextn_predict_layers is"),
        (HEAD, "a head for the method eagle3, and method is mtp"),
        (
            {"intermediate_size": 64, "rope_theta": 5e5},
            "with ffn_hidden_size 64 and not 96, rope_theta 500000.0 and not 10000.0",
        ),
        ({"hidden_size": 24}, "with hidden_size 24, and the actor has 48"),
        ({"vocab_size": 99}, "with 99 tokens, and the actor has 100"),
    ],
)
def test_mtp_heads_that_do_not_fit_or_cannot_be_trained(mistakes, head, config, said):
    assert said in mistakes(*head("mtp", **config))[f"{SPECULATION}.model"]


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"head_dim": 8}, "has 12 heads of 8 dimensions"),
        ({"architectures": ["MistralForCausalLM"]}, "is a MistralForCausalLM"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "has a config.json that cannot be read in full",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 16,
                "max_window_layers": 0,
            },
            "has a sliding window",
        ),
    ],
)
def test_actors_that_cannot_have_an_mtp_head(mistakes, head, tmp_path, actor, said):
    roles = [f"{role}.engine=fsdp" for role in ("actor", "critic", "reference")]
    overrides = [*head("mtp"), *roles]
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, **actor}))
    assert said in mistakes(*overrides)[f"{SPECULATION}.model"]


def test_a_model_with_mamba_layers_has_no_head(mistakes, head, tmp_path):
    nemotron = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*-",
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, **nemotron}))
    assert "carry a state" in mistakes(*head())[f"{SPECULATION}.model"]


def test_an_mtp_head_is_not_quantised_with_the_engine(mistakes, head):
    overrides = [*head("mtp"), "rollout.vllm.quantization=fp8"]
    key = "rollout.vllm.quantization"
    assert "would quantise an MTP head too" in mistakes(*overrides)[key]


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
