"""Rules that span generation and training: what engines, environments and weights in flight rule out."""

from __future__ import annotations

from megaverl.config.errors import ConfigIssue, conflict_issues
from megaverl.config.schema import Config
from megaverl.config.section import Issues, is_number
from megaverl.config.wording import yaml_text
from megaverl.gpus import has_usable_gpu
from megaverl.sharding.model_spec import ModelSpec, why_not_batch_invariant
from megaverl.sharding.quantization import GROUP_FORMATS

# Sampling fields that only the engine applies, with the values that change nothing.
ENGINE_ONLY = {
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
}


def rollout_and_training_issues(config: Config, spec: ModelSpec | None) -> Issues:
    """Yield mistakes in combinations of rollout settings with other sections.

    Args:
        spec: the model's sizes, or None if they are not known.
    """
    yield from _training_sampling_issues(config)
    yield from _fake_quantization_issues(config)
    yield from _stored_rollout_issues(config)
    yield from _continuation_issues(config)
    yield from _overlap_issues(config)
    yield from _environment_issues(config)
    yield from _router_replay_issues(config, spec)
    yield from _batch_invariant_issues(config, spec)
    yield from _fp32_lm_head_issues(config)
    yield from _harness_issues(config)


def _harness_issues(config: Config) -> Issues:
    """Yield settings of a training run that rule out tasks of other harnesses at its validations."""
    if not config.evaluation.tasks:
        return
    yield from conflict_issues(
        "evaluation.tasks",
        (
            (
                "rollout.async_rollout",
                config.rollout.async_rollout,
                "a harness sends its calls at any time, and the samples of later steps would depend on when; "
                "evaluate the checkpoints with megaverl eval",
            ),
            (
                "environment.agents",
                config.environment.agents == "own",
                "each agent has weights of its own, and a harness evaluates one model",
            ),
            (
                "trainer.replay_rollouts",
                config.trainer.replay_rollouts is not None,
                "such a run has no engine",
            ),
            (
                "trainer.rollout_only",
                config.trainer.rollout_only,
                "such a run does not validate",
            ),
        ),
        at_switch=True,
    )


def validation_sampling_issues(config: Config) -> Issues:
    """Yield fields of `trainer.validation_sampling` that the engine does not support."""
    yield from config.rollout.sampling_issues(
        "trainer.validation_sampling", config.trainer.validation_sampling
    )


def server_issues(config: Config) -> Issues:
    """Yield settings that cannot be combined with external servers."""
    if config.rollout.engine == "server" and config.environment.agents == "own":
        text = "found 'own'; servers hold one actor's weights. Use agents: shared."
        yield ConfigIssue("environment.agents", text, involves=("rollout.engine",))
    if (
        config.rollout.engine == "server"
        and config.rollout.servers.transfer == "direct"
        and config.actor.lora
    ):
        text = "found 'direct', which sends no adapters. Use transfer: folder, for which they are merged."
        yield ConfigIssue("rollout.servers.transfer", text, involves=("actor.lora",))


def _training_sampling_issues(config: Config) -> Issues:
    """Yield a mistake for sampling and weights of the engine that a loss cannot follow."""
    temperature = config.rollout.sampling["temperature"]
    if not (is_number(temperature) and temperature > 0):
        text = f"found {yaml_text(temperature)}; expected above 0, since the loss divides logits by it. "
        text += "For greedy validation use trainer.validation_sampling.temperature=0."
        yield ConfigIssue("rollout.sampling.temperature", text)
    method = config.rollout.vllm.get("quantization")
    if (
        method is not None
        and method not in GROUP_FORMATS
        and config.model.dtype == "float32"
    ):
        text = f"found {yaml_text(method)}, which vLLM has for engines of 16 bits only. Set model.dtype=bfloat16."
        yield ConfigIssue("rollout.vllm.quantization", text, involves=("model.dtype",))


def _fake_quantization_issues(config: Config) -> Issues:
    """Yield a mistake if the engine samples with other weights than the actor's forward pass rounds to."""
    trained, method = config.actor.fake_quantization, None
    if config.rollout.engine == "vllm":
        method = config.rollout.vllm.get("quantization")
    # An unknown format has a mistake of its own.
    if trained not in GROUP_FORMATS or trained == method:
        return
    text = f"found {yaml_text(trained)}, and the engine's weights are "
    text += f"in {yaml_text(method)}. " if method else "not quantised in groups. "
    text += f"Set rollout.vllm.quantization: {trained}, or leave this key out."
    involves = ("rollout.vllm.quantization", "rollout.engine")
    yield ConfigIssue("actor.fake_quantization", text, involves=involves)


def _stored_rollout_issues(config: Config) -> Issues:
    """Yield a mistake if a run without training is to resume from trained weights."""
    resume = config.checkpoint.resume
    if config.trainer.rollout_only and resume not in ("auto", "unfinished", "never"):
        text = f"found {yaml_text(resume)}; trainer.rollout_only generates with the weights of model.path. "
        yield ConfigIssue(
            "checkpoint.resume", f"{text}Name a checkpoint's Hugging Face folder there."
        )


def _continuation_issues(config: Config) -> Issues:
    """Yield settings of other sections that rule out continuing unfinished responses after an update."""
    rollout = config.rollout
    switches = {
        "rollout.partial": rollout.partial is not None,
        "rollout.in_flight_updates": rollout.in_flight_updates,
    }
    rounds = config.samples_in_rounds
    for switch in (key for key, is_set in switches.items() if is_set):
        yield from conflict_issues(
            switch,
            (
                (
                    "environment.name",
                    config.environment.name is not None,
                    "an episode's turns go on by themselves",
                ),
                ("algorithm.dynamic_sampling.metric", rounds, "its rounds end"),
                (
                    "trainer.rollout_only",
                    config.trainer.rollout_only,
                    "there is no update after which responses go on",
                ),
                (
                    "trainer.replay_rollouts",
                    config.trainer.replay_rollouts is not None,
                    "stored responses are whole",
                ),
            ),
            at_switch=True,
        )
    if rollout.partial is not None and config.placement.is_given:
        text = "is set, and so is placement: engines and actor take turns on the same ranks. Leave one of the two out; "
        text += "engines of their own ranks have rollout.async_rollout and rollout.in_flight_updates."
        yield ConfigIssue("rollout.partial", text, involves=("placement",))


def _overlap_issues(config: Config) -> Issues:
    """Yield settings that cannot be combined with `reshard.overlap`.

    With it, engine weights are overwritten while the actor's optimizer step is still
    running.
    """
    if not config.reshard.overlap:
        return
    rollout = config.rollout
    is_quantized = rollout.vllm.get("quantization") is not None
    updates_again = any(entry.update != "reward_model" for entry in config.mix)
    has_own_agents = config.environment.agents == "own"
    yield from conflict_issues(
        "reshard.overlap",
        (
            (
                "rollout.async_rollout",
                rollout.async_rollout,
                "engines generate with the old weights all the time",
            ),
            (
                "rollout.sleep",
                rollout.sleep,
                "the engine's memory is for training until both updates are over",
            ),
            (
                "rollout.engine",
                rollout.engine == "server",
                "servers read their weights from a folder",
            ),
            (
                "rollout.vllm.quantization",
                is_quantized,
                "weights are quantised, and compared, where they land part by part",
            ),
            (
                "actor.offload",
                config.actor.offload.parameters,
                "the actor's weights leave the device after its update",
            ),
            ("environment.agents", has_own_agents, "actors take turns on one engine"),
            ("mix", updates_again, "the actor is updated once more"),
        ),
        at_switch=True,
    )


def _environment_issues(config: Config) -> Issues:
    """Yield mistakes in the length of turns, and settings that cannot be combined with an actor for each agent."""
    environment = config.environment
    if environment.name is None:
        return
    total = config.rollout.sampling["max_tokens"]
    turn = environment.max_turn_tokens
    involves = ("rollout.sampling.max_tokens",)
    if turn is not None and isinstance(total, int) and turn > total:
        text = f"found {turn}, more than rollout.sampling.max_tokens={total}, which all turns together have."
        yield ConfigIssue("environment.max_turn_tokens", text, involves=involves)
    if turn is None and isinstance(total, int) and total < environment.max_turns:
        text = f"found {environment.max_turns}, more than rollout.sampling.max_tokens={total}: no token for each turn."
        yield ConfigIssue("environment.max_turns", text, involves=involves)
    if environment.agents != "own":
        return
    reason = "each agent has an actor of its own. Use agents: shared"
    conflicts = (
        ("trainer.replay_rollouts", config.trainer.replay_rollouts is not None, reason),
        ("trainer.rollout_only", config.trainer.rollout_only, reason),
        ("actor.lora", config.actor.lora is not None, reason),
        ("mix", bool(config.mix), reason),
        ("algorithm.advantage", config.estimator_reads("implicit_rewards"), reason),
    )
    yield from conflict_issues("environment.agents", conflicts)


def _router_replay_issues(config: Config, spec: ModelSpec | None) -> Issues:
    """Yield settings that rule out router replay: the engine reports no experts, or the actor cannot replay them."""
    key = "actor.router_replay"
    mode = config.actor.router_replay
    rollout = config.rollout
    if mode == "off":
        return
    is_drafted = bool(rollout.vllm.get("speculative_config"))
    parts = "experts of a response's parts are not put together"
    for wrong, involved, reason in (
        (
            config.actor.engine != "megatron",
            "actor.engine",
            "routers are told by megatron-core alone",
        ),
        (
            rollout.engine != "vllm",
            "rollout.engine",
            "only vLLM in the run's own processes reports the experts that tokens took",
        ),
        (
            config.environment.name is not None,
            "environment.name",
            "experts of turns are not put together",
        ),
        (
            rollout.function is not None,
            "rollout.function",
            "a function's responses come without experts",
        ),
        (
            is_drafted,
            "rollout.vllm.speculative_config",
            "experts of drafts that are not taken come between the others",
        ),
        (rollout.partial is not None, "rollout.partial", parts),
        (rollout.in_flight_updates, "rollout.in_flight_updates", parts),
    ):
        if wrong:
            yield ConfigIssue(
                key,
                f"found {yaml_text(mode)}, and {reason}. Leave it out.",
                involves=(involved,),
            )
            return
    if spec is not None and spec.is_tabled and spec.moe is None:
        yield ConfigIssue(
            key,
            f"found {yaml_text(mode)}, and the model has no routed experts. Leave it out.",
        )
    is_one_update = (
        config.algorithm.num_epochs == config.algorithm.num_mini_batches == 1
    )
    if (
        mode == "old_log_probs"
        and is_one_update
        and config.algorithm.kl.place != "reward"
    ):
        text = "found old_log_probs, and a step of one update computes none. Use router_replay: update."
        yield ConfigIssue(key, text, involves=("algorithm.num_mini_batches",))


def _batch_invariant_issues(config: Config, spec: ModelSpec | None) -> Issues:
    """Yield settings with which responses would depend on their batch, or engine and trainer would differ."""
    key = "rollout.batch_invariant"
    rollout = config.rollout
    if not rollout.batch_invariant:
        return
    on_cpu = not has_usable_gpu()
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    own_text = "plain transformers and engines of your own have no such mode"
    server_text = "servers are started with it: VLLM_BATCH_INVARIANT=1 (SGLang: --enable-deterministic-inference)"
    yield from conflict_issues(
        key,
        (
            (
                "rollout.engine",
                rollout.engine != "vllm",
                server_text if rollout.engine == "server" else own_text,
            ),
            (
                "actor.fsdp.compile",
                on_cpu and config.actor.fsdp.compile,
                "compiled blocks add up in orders of their own",
            ),
            (
                "actor.fsdp.attention",
                on_cpu and config.actor.fsdp.attention != "auto",
                "only megaverl's attention adds blocks of keys in one order",
            ),
            (
                "actor.fsdp.param_dtype",
                on_cpu and config.actor.fsdp.param_dtype not in (None, dtype),
                f"the engine computes in {dtype}",
            ),
            (
                "rollout.vllm.quantization",
                bool(rollout.vllm.get("quantization")),
                "quantised products are not those of the trainer",
            ),
            (
                "rollout.vllm.kv_cache_dtype",
                rollout.vllm.get("kv_cache_dtype", "auto") != "auto",
                "the trainer keeps keys and values in the model's dtype",
            ),
            (
                "rollout.vllm.speculative_config",
                bool(rollout.vllm.get("speculative_config")),
                "which drafts fit into a step of the engine depends on the other requests",
            ),
            (
                "actor.lora",
                config.actor.lora is not None,
                "the trainer adds an adapter's output to the layer's, and the engine has the merged weights",
            ),
            (
                "actor.cp",
                config.actor.cp > 1,
                "ranks exchange parts of attention's sums",
            ),
        ),
        at_switch=True,
    )
    for name, neutral in ENGINE_ONLY.items():
        if rollout.sampling.get(name, neutral) not in (neutral, None):
            text = f"is set, and the trainer's log-probs leave rollout.sampling.{name} out. Leave one of the two out."
            yield ConfigIssue(key, text, involves=(f"rollout.sampling.{name}",))
    if on_cpu and config.actor.engine == "fsdp" and config.actor.tp > 1:
        text = f"is set, and under engine: fsdp actor.tp={config.actor.tp} has not been compared with an engine. Use "
        text += "tp 1, or engine: megatron."
        yield ConfigIssue(key, text, involves=("actor.tp", "actor.engine"))
    elif on_cpu and config.actor.tp != rollout.tp:
        text = f"is set, and actor.tp={config.actor.tp} adds up parts of other widths than rollout.tp={rollout.tp}. "
        text += "Use the same tp for both."
        yield ConfigIssue(key, text, involves=("actor.tp", "rollout.tp"))
    elif on_cpu and rollout.tp > 2:
        text = f"is set, and with rollout.tp={rollout.tp} gloo and vLLM add the ranks' parts in different orders. Use "
        yield ConfigIssue(key, f"{text}tp 1 or 2.", involves=("rollout.tp",))
    if spec is None or not (on_cpu or spec.is_recurrent):
        return
    if reason := why_not_batch_invariant(spec):
        place = "on a CPU " if on_cpu else ""
        text = f"is set, and {place}{reason}. Leave it out, or choose another model."
        yield ConfigIssue(key, text, involves=("model.path",))


def _fp32_lm_head_issues(config: Config) -> Issues:
    """Yield a mistake if logits in float32 are wanted of an engine that the run cannot set up."""
    engine = config.rollout.engine
    if not config.model.fp32_lm_head or engine in ("vllm", "hf"):
        return
    if engine == "server":
        text = "is set, and servers are started by themselves, so that engine and trainer could differ. Leave it out."
    else:
        text = f"is set, and rollout.engine={engine} does not know of it. Leave it out, or use rollout.engine: vllm."
    yield ConfigIssue("model.fp32_lm_head", text, involves=("rollout.engine",))
