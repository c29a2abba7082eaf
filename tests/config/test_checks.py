"""Numbers that must fit together, and files that must be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaverl.config import InvalidConfig, load_config, smallest_world

ADAPTIVE = "rollout.adaptive_sampling=true"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (
            ["algorithm.name=grpo"],
            "algorithm.group_size",
            "found 1; grpo compares the responses of a group",
        ),
        (
            ["data.prompts_per_step=6", "algorithm.num_mini_batches=4"],
            "algorithm.num_mini_batches",
            "found 4, not a divisor of the 6 samples",
        ),
        (["algorithm.kl.coef=0.1"], "algorithm.kl.in", "algorithm.kl.coef is set"),
        (["algorithm.kl.target=0.1"], "algorithm.kl.in", "algorithm.kl.target is set"),
        (["algorithm.kl.in=reward"], "algorithm.kl.coef", "must be above 0"),
        (
            ["algorithm.kl={in: loss, coef: 0.1, kind: k1}"],
            "algorithm.kl.kind",
            "Use k2 or k3",
        ),
        (
            ["algorithm.kl={in: reward, coef: 0.1, kind: k3}"],
            "algorithm.kl.kind",
            "only k1 has the gradient",
        ),
        (
            ["algorithm.kl={in: loss, coef: 0.1, allow_biased: true}"],
            "algorithm.kl.allow_biased",
            "in the reward",
        ),
        (["model.path="], "model.path", "is not set"),
        (
            ["model.path=nowhere"],
            "model.path",
            "found 'nowhere', which is neither a folder nor a model on a hub",
        ),
        (["data.train=[]"], "data.train", "is empty"),
        (["data.train=nowhere.jsonl"], "data.train.0", "does not exist"),
        (
            ["data.train=nowhere/*.jsonl"],
            "data.train.0",
            "a pattern that no file matches",
        ),
        (
            ["data.validation=[]", "trainer.validate_every=5"],
            "trainer.validate_every",
            "data.validation is empty",
        ),
        (["trainer.pass_at=[1, 4]"], "trainer.pass_at", "trainer.validation_samples=1"),
        (["reward=[]"], "reward", "is empty"),
        (
            ["run.profile.steps=[1, 999]"],
            "run.profile.steps",
            "found [999]; the run has",
        ),
        (
            ["run.profile.steps=1", "trainer.rollout_only=true"],
            "run.profile.steps",
            "rollout_only trains no step",
        ),
        (
            ["alerts=[{when: reward/mean is low}]"],
            "alerts.0.when",
            "expected something like",
        ),
        (
            ["alerts=[{when: a < 1, post: slack}]"],
            "alerts.0.post",
            "expected http://... or https://...",
        ),
        (
            ["alerts=[{when: a < 1, post: $NO_SUCH_NAME}]"],
            "alerts.0.post",
            "which is not set",
        ),
        (["reward={weight: 1}"], "reward.0", "neither name nor function"),
        (["reward={function: score}"], "reward.0.function", "expected module:function"),
        (
            ["reward={name: gsm8k, options: {method: magic}}"],
            "reward.0.options",
            "strict or flexible",
        ),
        (
            ["reward={name: gsm8k, options: {mthod: strict}}"],
            "reward.0.options",
            "mthod",
        ),
        (
            ["rollout.sampling.temperature=0"],
            "rollout.sampling.temperature",
            "the loss divides logits by it",
        ),
        (
            ["actor.router_replay=update", "rollout.engine=hf"],
            "actor.router_replay",
            "only vLLM in the run's own processes reports",
        ),
        (
            ["actor={router_replay: update, engine: fsdp}"],
            "actor.router_replay",
            "told by megatron-core alone",
        ),
        (
            ["actor.router_replay=update"],
            "actor.router_replay",
            "the model has no routed experts",
        ),
        (
            ["actor.router_replay=old_log_probs"],
            "actor.router_replay",
            "one update computes none",
        ),
        (
            ["model.fp32_lm_head=true", "rollout.engine=server"],
            "model.fp32_lm_head",
            "servers are started by themselves",
        ),
        (
            ["model.fp32_lm_head=true", "rollout.engine=some.module:engine"],
            "model.fp32_lm_head",
            "rollout.engine=some.module:engine does not know of it",
        ),
        (
            ["rollout={batch_invariant: true, engine: hf}"],
            "rollout.batch_invariant",
            "have no such mode",
        ),
        (
            ["rollout={batch_invariant: true, engine: server}"],
            "rollout.batch_invariant",
            "SGLang: --enable-deterministic-inference",
        ),
        (
            ["rollout={batch_invariant: true, tp: 2}", "actor={engine: fsdp, tp: 2}"],
            "rollout.batch_invariant",
            "under engine: fsdp actor.tp=2 has not been compared",
        ),
        (
            [
                "rollout.batch_invariant=true",
                "actor={engine: fsdp, fsdp: {attention: sdpa}}",
            ],
            "rollout.batch_invariant",
            "only megaverl's attention adds blocks of keys in one order",
        ),
        (
            ["rollout={batch_invariant: true, vllm: {quantization: fp8}}"],
            "rollout.batch_invariant",
            "quantised products",
        ),
        (
            ["rollout={batch_invariant: true, sampling: {top_p: 0.9}}"],
            "rollout.batch_invariant",
            "leave rollout.sampling.top_p out",
        ),
        (
            ["rollout={batch_invariant: true, tp: 2}"],
            "rollout.batch_invariant",
            "actor.tp=1 adds up parts of other widths than rollout.tp=2",
        ),
        (
            ["rollout.sampling_rules=[{over: 9, top_k: 5}]"],
            "rollout.sampling_rules",
            "adaptive_sampling is false",
        ),
        (
            ["rollout.min_sequences=2"],
            "rollout.min_sequences",
            "use_dynamic_batching is false",
        ),
        (
            ["rollout={use_dynamic_batching: true, memory_budget_mb: 64}"],
            "rollout.memory_budget_mb",
            "rollout.vllm.gpu_memory_utilization",
        ),
        (
            [
                "rollout={use_dynamic_batching: true, min_sequences: 9, max_sequences: 4}"
            ],
            "rollout.min_sequences",
            "more than rollout.max_sequences=4",
        ),
        (
            ["rollout.vllm.quantization=fp8_per_channel"],
            "rollout.vllm.quantization",
            "can be fp8_per_block, fp8_per_tensor, fp8, int4_g32",
        ),
        (
            ["rollout.vllm.quantization=fp8", "model.dtype=float32"],
            "rollout.vllm.quantization",
            "Set model.dtype=bfloat16",
        ),
        (
            ["rollout.vllm.quantization=fp8_per_block", "reshard.overlap=true"],
            "reshard.overlap",
            "cannot be combined with rollout.vllm.quantization: weights are quantised, and compared, where they land",
        ),
        (
            ["rollout.sleep=true", "reshard.overlap=true"],
            "reshard.overlap",
            "cannot be combined with rollout.sleep",
        ),
        (
            ["actor.offload=true", "reshard.overlap=true"],
            "reshard.overlap",
            "weights leave the device after its",
        ),
        (
            [
                "mix=[{update: rejection}]",
                "algorithm.group_size=4",
                "reshard.overlap=true",
            ],
            "reshard.overlap",
            "the actor is updated once more",
        ),
        (
            [
                "rollout={async_rollout: true}",
                "placement={rollout: 0, actor: 1}",
                "reshard.overlap=true",
            ],
            "reshard.overlap",
            "engines generate with the old weights all the time",
        ),
        (
            [
                "rollout.vllm.speculative_config={method: ngram, num_speculative_token: 3}"
            ],
            "rollout.vllm.speculative_config.num_speculative_token",
            "Did you mean `num_speculative_tokens`?",
        ),
        (
            [
                "rollout.vllm.speculative_config={method: ngram, synthetic_acceptance_length: 2.0}"
            ],
            "rollout.vllm.speculative_config.synthetic_acceptance_length",
            "the model's own distribution",
        ),
        (
            [
                "rollout.vllm.speculative_config={method: ngram}",
                "rollout.sampling.min_p=0.1",
            ],
            "rollout.sampling.min_p",
            "vLLM does not know it together with",
        ),
        (
            ["actor.megatron={fp8: hybrid, fp8_param: true}"],
            "actor.megatron.fp8_param",
            "actor.megatron.fp8 computes",
        ),
        (
            ["actor.megatron={fp8: e4m3, fp8_recipe: delayed}"],
            "actor.megatron.fp8_recipe",
            "a checkpoint does not",
        ),
        (
            ["model.dtype=float32", "actor.megatron.fp8=e4m3"],
            "actor.megatron.fp8",
            "are bfloat16",
        ),
        (
            ["actor.ddp.fp8_param_gather=true"],
            "actor.ddp.fp8_param_gather",
            "Parameters stay in model.dtype",
        ),
        ([ADAPTIVE, "rollout.sampling_rules=[]"], "rollout.sampling_rules", "is empty"),
        (
            [ADAPTIVE, "rollout.function=a:b"],
            "rollout.adaptive_sampling",
            "draws in its own way",
        ),
        (
            [ADAPTIVE, "rollout.sampling_rules=[{under: 9}]"],
            "rollout.sampling_rules.0",
            "changes nothing",
        ),
        (
            [ADAPTIVE, "rollout.sampling_rules=[{under: 9, over: 8, top_k: 1}]"],
            "rollout.sampling_rules.0",
            "holds for no prompt",
        ),
        (
            [ADAPTIVE, "rollout.sampling_rules=[{top_k: 1}, {over: 8, top_k: 2}]"],
            "rollout.sampling_rules.0",
            "Put it last",
        ),
        (
            [ADAPTIVE, "algorithm={name: grpo, group_size: 4}"],
            "rollout.sampling_rules.0.temperature",
            "all responses of a greedy prompt are the same",
        ),
        (
            ["rollout.sampling.max_tokens=null"],
            "rollout.sampling.max_tokens",
            "an integer of at least 1",
        ),
        (
            ["data.max_prompt_tokens=1000", "rollout.sampling.max_tokens=256"],
            "data.max_prompt_tokens",
            "= 1256 exceeds the model's context of 1024",
        ),
        (
            ["data.max_prompt_tokens=1024"],
            "data.max_prompt_tokens",
            "= 1280 exceeds the model's context of 1024",
        ),
        (["actor.micro_batch_tokens=767"], "actor.micro_batch_tokens", "found 767"),
        (
            ["critic.micro_batch_tokens=767"],
            "critic.micro_batch_tokens",
            "512 + rollout.sampling.max_tokens=256 = 768",
        ),
        (["actor.optimizer.lr=0"], "actor.optimizer.lr", "above 0"),
        (["actor.optimizer.min_lr=1"], "actor.optimizer.min_lr", "expected from 0 to"),
        (
            [
                "actor.ddp.overlap_param_gather=true",
                "actor.optimizer.overlap_param_gather=false",
            ],
            "actor.ddp.overlap_param_gather",
            "actor.optimizer.overlap_param_gather is false",
        ),
        (
            ["actor.scheduler.lr_decay_style=cosin"],
            "actor.scheduler.lr_decay_style",
            "Did you mean `cosine`?",
        ),
        (
            ["actor.scheduler.lr_warmup_steps=100"],
            "actor.scheduler.lr_warmup_steps",
            "expected below",
        ),
        (
            ["critic.scheduler.lr_decay_style=WSD"],
            "critic.scheduler",
            "wsd_decay_steps, lr_wsd_decay_style",
        ),
        (["actor.scheduler.end_wd=0.1"], "actor.scheduler.wd_incr_style", "differ"),
        (
            ["checkpoint.resume=elsewhere"],
            "checkpoint.resume",
            "auto, latest, unfinished, never, or the folder",
        ),
        (["critic.path=nowhere"], "critic.path", "not a Hugging Face folder"),
        (["model.tokenizer=nowhere"], "model.tokenizer", "does not exist"),
        (
            ["actor.tp=4", "critic.tp=1"],
            "actor.tp",
            "does not divide the model's 6 key-value heads",
        ),
        (["actor.tp=5", "critic.tp=1"], "actor.tp", "Sizes that fit: 1, 2, 3, 6, 12."),
        (
            ["critic.pp=4"],
            "critic.pp",
            "found 4, which does not divide the model's 6 layers",
        ),
        (["actor={pp: 2, vpp: 2}"], "actor.pp", "2 x vpp=2 = 4"),
        (["actor.vpp=2"], "actor.vpp", "need actor.pp above 1"),
        (["rollout.tp=8"], "rollout.tp", "Sizes that fit: 1, 2, 3, 6, 12."),
        (["rollout={engine: hf, tp: 2}"], "rollout.tp", "no tensor parallelism"),
        (
            ["run.nproc=4", "actor.tp=3"],
            "actor",
            "tp=3 x cp=1 x pp=1 = 3 does not divide the 4 ranks",
        ),
        (
            ["run.nproc=2", "actor.cp=4"],
            "actor",
            "cp=4 x pp=1 = 4 does not divide the 2 ranks. Products that fit: 1, 2;",
        ),
        (
            ["run.nproc=4", "rollout.tp=3"],
            "rollout.tp",
            "does not divide the 4 ranks. Sizes that fit: 1, 2, 4.",
        ),
        (["run.nproc=4", "actor.ep=3"], "actor.ep", "Sizes of ep that fit: 1, 2, 4."),
    ],
)
def test_what_does_not_fit(mistakes, overrides, key, said):
    found = mistakes(*overrides)
    assert said in found[key]
    assert set(found) == {key}


def test_an_inherited_grid_is_told_once(mistakes):
    assert set(mistakes("actor.tp=5", "run.nproc=6")) == {"actor", "actor.tp"}


def test_layers_may_be_spread_unevenly(load):
    uneven = {
        "num_layers_in_first_pipeline_stage": 0,
        "num_layers_in_last_pipeline_stage": 2,
    }
    config = load(
        "actor={pp: 4, megatron: {num_layers_in_first_pipeline_stage: 0, num_layers_in_last_pipeline_stage: 2}}"
    )
    assert config.actor.megatron == uneven


def test_vllm_may_hold_a_key_value_head_several_times(load):
    assert load("rollout.tp=12").rollout.tp == 12


def test_an_engine_whose_experts_lie_transposed_is_not_quantised(mistakes, tmp_path):
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    gpt_oss = {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | gpt_oss))
    found = mistakes("rollout.vllm.quantization=fp8", "model.dtype=bfloat16")
    assert (
        "vLLM transposes the model's experts" in found["rollout.vllm.quantization"]
        and len(found) == 1
    )


def test_what_an_engine_of_attention_within_chunks_cannot_do(
    load, mistakes, tmp_path
) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 48}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = mistakes(
        "rollout.vllm={quantization: fp8, speculative_config: {method: ngram, num_speculative_tokens: 2}}",
        "actor.fake_quantization=fp8_per_block",
        "model.dtype=bfloat16",
    )
    assert "transposes the experts" in found["rollout.vllm.quantization"]
    assert "transposes the experts" in found["actor.fake_quantization"]
    assert "drafts were not tested" in found["rollout.vllm.speculative_config"]
    assert "is 32, and attention_chunk_size=48" in found["rollout.vllm.block_size"]
    assert len(found) == 4
    assert load("rollout.vllm.block_size=16").rollout.vllm == {"block_size": 16}


def test_what_an_engine_of_gated_delta_nets_cannot_do(mistakes, tmp_path) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = mistakes(
        "rollout.vllm={quantization: fp8, speculative_config: {method: ngram, num_speculative_tokens: 2}}",
        "model.dtype=bfloat16",
        "actor={tp: 2, cp: 16}",
        "run.nproc=32",
    )
    assert "not compared in few bits" in found["rollout.vllm.quantization"]
    assert "refused draft" in found["rollout.vllm.speculative_config"]
    assert "8 key heads of gated delta nets that each of tp=2" in found["actor.cp"]


def test_what_models_with_mamba_layers_cannot_do(mistakes, tmp_path):
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    nemotron = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 8,
        "n_groups": 4,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | nemotron))
    assert "4 Mamba groups" in mistakes("actor.tp=3", "run.nproc=3")["actor.tp"]
    under_fsdp = mistakes("actor={engine: fsdp, cp: 2}", "run.nproc=2")["actor.cp"]
    assert "no rank passes on the state" in under_fsdp
    # Each engine is checked by itself, also with equal sizes.
    mixed = ("algorithm.name=ppo", "actor.cp=8", "critic={engine: fsdp, cp: 8}")
    found = mistakes(*mixed, "run.nproc=8")
    assert found.keys() == {"critic.cp"}
    mixed = ("algorithm.name=ppo", "actor={engine: fsdp}", "actor.tp=3")
    found = mistakes(*mixed, "critic={engine: megatron, tp: 3}", "run.nproc=3")
    assert "4 Mamba groups" in found["critic.tp"]
    for override, said in (
        ("actor.cp=3", "Sizes that fit: 1, 2, 4, 8."),
        ("rollout.vllm.quantization=fp8", "not compared in few bits"),
        ("actor.fake_quantization=fp8_per_block", "not compared in few bits"),
        ("rollout.batch_invariant=true", "in different chunks"),
    ):
        found = mistakes(override, "run.nproc=6", "model.dtype=bfloat16")
        assert said in found[override.partition("=")[0]], override


def test_groups_of_columns_that_no_rank_has_whole(mistakes, tmp_path) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    widths = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4}
    config |= widths | {"num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = mistakes("rollout.vllm.quantization=int4_g128")
    assert "intermediate_size=320. Use a" in found["rollout.vllm.quantization"]
    found = mistakes(
        "rollout.vllm.quantization=int4_g64", "rollout.tp=2", "run.nproc=2"
    )
    assert "intermediate_size=320 over 2 ranks" in found["rollout.vllm.quantization"]
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | experts))
    found = mistakes("rollout.vllm.quantization=nvfp4")
    assert "routed experts" in found["rollout.vllm.quantization"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor.fake_quantization=int3"], "found 'int3'; formats that can be"),
        (["actor.fake_quantization=int4_g32"], "engine's weights are not quantised"),
        (
            ["actor.fake_quantization=mxfp8", "rollout.vllm.quantization=nvfp4"],
            "engine's weights are in 'nvfp4'. Set rollout.vllm.quantization: mxfp8",
        ),
        (
            [
                "actor.fake_quantization=nvfp4",
                "rollout.vllm.quantization=nvfp4",
                "actor.engine=fsdp",
            ],
            "separate under engine: fsdp",
        ),
        (
            [
                "actor.fake_quantization=nvfp4",
                "rollout.vllm.quantization=nvfp4",
                "actor.lora={rank: 4}",
            ],
            "adapters are merged before",
        ),
    ],
)
def test_rounding_that_would_not_be_sampled(mistakes, overrides, said) -> None:
    assert said in mistakes(*overrides)["actor.fake_quantization"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "config.json: not found"),
        (lambda path: path.write_text("{"), "not valid JSON"),
        (
            lambda path: path.write_text('{"architectures": ["GPT2LMHeadModel"]}'),
            "'GPT2LMHeadModel' is not supported",
        ),
        (
            lambda path: path.write_text(
                '{"architectures": ["LlamaForCausalLM"], "vocab_size": 0}'
            ),
            "vocab_size is 0",
        ),
    ],
)
def test_a_model_folder_that_cannot_be_read(mistakes, tmp_path, damage, said):
    damage(tmp_path / "model" / "config.json")
    assert said in mistakes()["model.path"]


def test_a_package_that_is_not_installed(mistakes, load, monkeypatch):
    monkeypatch.setattr(
        "megaverl.config.files_and_packages.find_spec", lambda name: None
    )
    found = mistakes()
    assert (
        "pip install 'megaverl[vllm]'" in found["rollout.engine"]
        and "megaverl[megatron]" in found["actor"]
    )
    assert set(mistakes(command="sft")) == {"actor"}


def test_an_empty_data_file(mistakes, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    assert mistakes()["data.train.0"].endswith("which is an empty file.")


def test_a_run_folder_that_cannot_be_made(mistakes, load, tmp_path):
    (tmp_path / "taken").write_text("")
    assert "taken is a file" in mistakes(f"run.dir={tmp_path / 'taken'}")["run.dir"]
    assert (
        "taken is a file"
        in mistakes(f"run.dir={tmp_path / 'taken' / 'below'}")["run.dir"]
    )
    load(f"run.dir={tmp_path / 'new' / 'folders'}")
    assert not (tmp_path / "new").exists()


def test_without_path_checks_nothing_need_be_here(load):
    config = load(
        "model.path=/elsewhere/model",
        "data.train=/elsewhere/*.parquet",
        "actor.tp=5",
        check_paths=False,
    )
    assert config.model.path == "/elsewhere/model"


def test_what_each_command_needs(load, mistakes):
    assert set(mistakes("data.train=[]", command="sft")) == {"sft.train"}
    assert set(mistakes("data.validation=[]", command="eval")) == {"data.validation"}
    assert set(mistakes("sft={steps: 5, lr_warmup_steps: 5}", command="sft")) == {
        "sft.lr_warmup_steps"
    }
    assert set(mistakes("sft.max_answer_tokens=4000", command="sft")) == {
        "data.max_prompt_tokens",
        "actor.micro_batch_tokens",
    }
    load(
        "data.train=[]",
        "data.validation=[]",
        "reward=[]",
        "actor.tp=5",
        command="generate",
    )
    load("rollout.sampling.temperature=0", command="eval")
    load("reward=[]", "rollout.tp=5", command="sft")


def test_the_world_of_torchrun_counts_before_nproc(mistakes, load, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert set(mistakes("run.nproc=3", "actor.tp=3")) == {"actor"}
    monkeypatch.setenv("WORLD_SIZE", "6")
    load("run.nproc=4", "actor.tp=3")


@pytest.mark.parametrize(
    ("overrides", "command", "world"),
    [
        ([], "train", 1),
        (["actor={tp: 2, pp: 3}", "rollout.tp=3"], "train", 6),
        (["actor.tp=2", "critic.tp=3"], "train", 6),
        (
            ["actor.tp=2", "critic.tp=3", "algorithm={name: grpo, group_size: 2}"],
            "train",
            2,
        ),
        (["actor={tp: 2, etp: 1, ep: 3}"], "train", 6),
        (["actor.tp=2", "rollout.tp=3"], "sft", 2),
        (["actor.tp=2", "rollout.tp=3"], "generate", 3),
    ],
)
def test_the_smallest_world_that_all_grids_fill(load, overrides, command, world):
    assert smallest_world(load(*overrides, command=command), command) == world


def test_batch_invariant_models(files: list[str], tmp_path: Path) -> None:
    """On a CPU: a compared model is taken, one with experts or scaled rotary embeddings is refused."""
    wanted = [*files, "rollout.batch_invariant=true"]
    load_config(None, wanted)
    path = tmp_path / "model" / "config.json"
    given = json.loads(path.read_text())
    for changes, reason in (
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotary"),
        ({"architectures": ["GraniteForCausalLM"]}, "was not compared"),
    ):
        path.write_text(json.dumps({**given, **changes}))
        with pytest.raises(InvalidConfig, match=f"rollout.batch_invariant.*{reason}"):
            load_config(None, wanted)
