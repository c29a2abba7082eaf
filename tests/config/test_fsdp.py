"""`engine: fsdp`: what it takes of a role's section, and what is refused, all at once and by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import load_config
from megaverl.errors import ModelError
from megaverl.sharding.model_spec import UNLIMITED, ModelSpec
from tests.config.conftest import LLAMA

FSDP = "actor.engine=fsdp"
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 3,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 512,
    "vocab_size": 90,
}


def test_roles_follow_the_actor_but_for_what_another_engine_reads(load):
    config = load(
        FSDP,
        "actor.fsdp={sharding_strategy: shard_grad_op}",
        "actor.gradient_accumulation=2",
    )
    for role in (config.critic, config.reference, config.reward_model):
        assert (role.engine, role.fsdp.sharding_strategy) == ("fsdp", "shard_grad_op")
    config = load(
        "actor={tp: 2, ddp: {bucket_size: 1}, gradient_accumulation: 2}",
        "critic.engine=fsdp",
    )
    assert (config.actor.tp, config.critic.tp, config.critic.ddp) == (2, 1, {})
    assert config.critic.gradient_accumulation == 2
    config = load(FSDP, "actor.fsdp.compile=true", "critic.engine=megatron")
    assert config.actor.fsdp.compile and not config.critic.fsdp.compile
    assert load_config(config.to_dict(), check_paths=False) == config, (
        "what a run writes down can be read again"
    )


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            [FSDP, "actor.tp=2", "run.nproc=3"],
            "actor.tp",
            "does not divide the 3 ranks. Sizes that fit: 1, 3.",
        ),
        (
            [FSDP, "actor={tp: 2, lora: {rank: 2}}"],
            "actor.lora",
            "with actor.tp=1 alone",
        ),
        (
            [FSDP, "actor={tp: 2, fsdp: {compile: true}}"],
            "actor.fsdp.compile",
            "with actor.tp=1 alone",
        ),
        (
            [FSDP, "actor.cp=2", "run.nproc=3"],
            "actor.cp",
            "does not divide the 3 ranks. Sizes that fit: 1, 3.",
        ),
        (
            [FSDP, "actor={cp: 2, fsdp: {compile: true}}", "run.nproc=2"],
            "actor.fsdp.compile",
            "with actor.cp=1 alone",
        ),
        ([FSDP, "actor.pp=2"], "actor.pp", "no pipeline-parallel groups"),
        ([FSDP, "actor={ep: 2}"], "actor.ep", "no expert-parallel groups"),
        ([FSDP, "actor={etp: 2}"], "actor.etp", "no expert-tensor-parallel groups"),
        ([FSDP, "actor={vpp: 2}"], "actor.vpp", "no virtual pipeline groups"),
        (
            [FSDP, "actor.megatron.sequence_parallel=true"],
            "actor.megatron.sequence_parallel",
            "Hugging Face model",
        ),
        (
            [FSDP, "actor.ddp.bucket_size=7"],
            "actor.ddp.bucket_size",
            "reads actor.fsdp instead",
        ),
        (
            [FSDP, "actor.optimizer.loss_scale=1.0"],
            "actor.optimizer.loss_scale",
            "which reads optimizer, lr, min_lr",
        ),
        (
            [FSDP, "actor.optimizer.optimizer=sgd"],
            "actor.optimizer.optimizer",
            "found 'sgd'",
        ),
        (
            [FSDP, "actor.fsdp.shard_size=2"],
            "actor.fsdp.shard_size",
            "use hybrid_shard",
        ),
        (
            [
                FSDP,
                "actor.fsdp={sharding_strategy: hybrid_shard, shard_size: 3}",
                "run.nproc=4",
            ],
            "actor.fsdp.shard_size",
            "found 3, which does not divide the 4 data-parallel ranks. Sizes that fit: 1, 2, 4.",
        ),
        (
            [FSDP, "actor.fsdp.sharding_strategy=zero3"],
            "actor.fsdp.sharding_strategy",
            "allowed: full_shard",
        ),
        ([FSDP, "model.dtype=float16"], "model.dtype", "losses are not scaled"),
        (
            [FSDP, "actor.fsdp.param_dtype=float16"],
            "actor.fsdp.param_dtype",
            "Use bfloat16",
        ),
        (
            ["actor.fsdp.compile=true"],
            "actor.fsdp.compile",
            "actor.engine is megatron, which does not read it",
        ),
        (["actor.engine=deepspeed"], "actor.engine", "allowed: megatron, fsdp"),
    ],
)
def test_what_an_engine_does_not_read(mistakes, overrides, key, said):
    found = mistakes(*overrides)
    assert set(found) == {key}, "an inherited mistake is said once"
    assert said in found[key]


def test_a_model_that_is_never_trained_may_be_in_half_precision(load, mistakes):
    """float16 needs losses scaled, and there are none."""
    half = "{engine: fsdp, fsdp: {param_dtype: float16}}"
    scoring = load(
        f"reward_model={half}", "reward.0={path: models/judge, engine: megatron}"
    )
    assert scoring.reward_model.fsdp.param_dtype == "float16"
    assert (
        load(
            f"reference={half}", "algorithm.kl={in: loss, coef: 0.1}"
        ).reference.fsdp.param_dtype
        == "float16"
    )
    assert "reward_model.fsdp.param_dtype" in mistakes(
        f"reward_model={half}", command="reward"
    )


def test_all_at_once(mistakes):
    section = (
        "{engine: fsdp, tp: 2, pp: 2, ddp: {bucket_size: 1}, megatron: {fp8: e4m3}}"
    )
    found = mistakes(
        f"actor={section}", "critic.tp=4", "critic.optimizer.loss_scale=2.0"
    )
    fields = {"actor.pp", "actor.ddp.bucket_size", "actor.megatron.fp8"}
    assert fields | {"critic.optimizer.loss_scale"} <= set(found)


def test_any_architecture_under_fsdp_alone(load, mistakes, tmp_path: Path):
    (tmp_path / "model" / "config.json").write_text(json.dumps(GPT2))
    model = f"model.path={tmp_path / 'model'}"
    assert load(model, FSDP, "data.max_prompt_tokens=100").max_tokens == 356
    too_long = mistakes(
        model, FSDP, "data.max_prompt_tokens=400", "rollout.sampling.max_tokens=256"
    )
    assert "exceeds the model's context of 512" in too_long["data.max_prompt_tokens"]
    refused = mistakes(
        model, FSDP, "data.max_prompt_tokens=100", "critic.engine=megatron"
    )["model.path"]
    assert (
        "architecture 'GPT2LMHeadModel' is not supported" in refused
        and "actor.engine=fsdp" in refused
    )


def test_a_model_that_vllm_computes_otherwise_is_refused_before_a_start(
    load, mistakes, tmp_path: Path
):
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(GPT2 | {"architectures": ["Gemma3nForCausalLM"]})
    )
    given = [f"model.path={tmp_path / 'model'}", FSDP, "data.max_prompt_tokens=100"]
    assert (
        "leaves out the embeddings of tokens that each layer has"
        in mistakes(*given)["rollout.engine"]
    )
    load(*given, "rollout.engine=hf")


def test_a_model_that_only_megatron_and_vllm_know(mistakes, load, tmp_path):
    """InternLM 3 without the code of its folder; with that code, FSDP2 tries it."""
    folder = tmp_path / "internlm3"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(LLAMA | {"architectures": ["InternLM3ForCausalLM"]})
    )
    given = [f"model.path={folder}"]
    load(*given)
    found = mistakes(*given, "actor.engine=fsdp", "rollout.engine=hf")
    assert found.keys() == {"actor.engine", "rollout.engine"}
    for message in found.values():
        assert "has no class of InternLM3ForCausalLM" in message
    assert "critic.engine" in mistakes(
        *given, "algorithm.name=ppo", "critic.engine=fsdp"
    )
    load(*given, "actor.engine=fsdp", "model.trust_remote_code=true")


def test_the_outline_of_a_model() -> None:
    spec = ModelSpec.outline_of(GPT2)
    sizes = (
        spec.num_layers,
        spec.hidden_size,
        spec.ffn_hidden_size,
        spec.num_heads,
        spec.vocab_size,
    )
    assert sizes == (3, 32, 128, 4, 90)
    assert (spec.max_positions, spec.is_tabled, spec.tie_embeddings) == (
        512,
        False,
        True,
    )
    of_text = {
        "architectures": ["X"],
        "text_config": {"hidden_size": 8, "vocab_size": 5, "num_hidden_layers": 2},
    }
    spec = ModelSpec.outline_of(of_text)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.max_positions) == (
        2,
        8,
        5,
        UNLIMITED,
    )
    with pytest.raises(
        ModelError, match="none of vocab_size, padded_vocab_size is a number above 0"
    ):
        ModelSpec.outline_of({"architectures": ["X"]}, "a.json")
