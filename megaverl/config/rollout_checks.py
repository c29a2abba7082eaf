"""Checks of response generation: lengths against the model's context, sampling, environments, and rollout servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from megaverl.config.errors import ConfigIssue, did_you_mean, is_number, listed, yaml_text
from megaverl.config.grids import used_roles
from megaverl.config.roles import SAMPLING, RolloutConfig
from megaverl.config.run import DataConfig
from megaverl.config.schema import Config
from megaverl.config.yaml_source import MISSING
from megaverl.errors import ConfigError, ModelError
from megaverl.rollout.environments import agents_of, check_options, environment_names
from megaverl.rollout.server_api import SGLANG_SAMPLING, is_loopback, url_problem
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import QUANTIZATIONS

_KEY = "rollout.sampling_rules"
PROMPT = "data.max_prompt_tokens"
RESPONSE = "rollout.sampling.max_tokens"
# Lengths that `fitted_lengths` may lower if the user sets none.
DEFAULTS: dict[str, int] = {
    PROMPT: DataConfig.model_fields["max_prompt_tokens"].default,
    RESPONSE: SAMPLING["max_tokens"],
}
# Command that learns responses from data -> the key for their length, which takes precedence over RESPONSE.
OWN_RESPONSE = {
    "sft": "sft.max_answer_tokens",
    "dpo": "preference.max_response_tokens",
    "reward": "preference.max_response_tokens",
}


def sampling_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in sampling by prompt length (`sampling_rules`) and in the limits of dynamic batching."""
    rollout = config.rollout
    yield from _bounds(rollout)
    if not rollout.adaptive_sampling:
        if rollout.changed("sampling_rules"):
            yield ConfigIssue(_KEY, "is set, but rollout.adaptive_sampling is false. Use adaptive_sampling: true.")
        return
    if not rollout.sampling_rules:
        yield ConfigIssue(_KEY, "is empty, and rollout.adaptive_sampling is set. Give rules, or leave both out.")
    if rollout.function is not None:
        yield ConfigIssue(
            "rollout.adaptive_sampling",
            "is set, and rollout.function draws in its own way. Use one of the two.",
            involves=("rollout.function",),
        )
    yield from _rules(config)


def _bounds(rollout: RolloutConfig) -> Iterator[ConfigIssue]:
    """Yield mistakes in the settings of dynamic batching."""
    if rollout.use_dynamic_batching and rollout.min_sequences > rollout.max_sequences:
        yield ConfigIssue(
            "rollout.min_sequences",
            f"found {rollout.min_sequences}, more than rollout.max_sequences={rollout.max_sequences}. Lower it, or "
            "raise the other.",
            involves=("rollout.max_sequences",),
        )
    if rollout.engine == "vllm" and rollout.use_dynamic_batching and rollout.memory_budget_mb is not None:
        yield ConfigIssue(
            "rollout.memory_budget_mb",
            "is set, and vLLM has a cache of its own, of the size that rollout.vllm.gpu_memory_utilization (on a CPU "
            "kv_cache_memory_bytes) says. Leave it out.",
            involves=("rollout.engine",),
        )
    unused = () if rollout.use_dynamic_batching else ("min_sequences", "max_sequences", "memory_budget_mb")
    for name in rollout.changed(*unused) if unused else ():
        text = "is set, but rollout.use_dynamic_batching is false. Use use_dynamic_batching: true."
        yield ConfigIssue(f"rollout.{name}", text)


def _rules(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `rollout.sampling_rules`."""
    rules = config.rollout.sampling_rules
    group_size = config.algorithm.group_size
    for number, rule in enumerate(rules):
        key = f"{_KEY}.{number}"
        if not rule.changes:
            yield ConfigIssue(key, "changes nothing. Give temperature, top_k, or both.")
        if rule.under is not None and rule.over is not None and rule.under <= rule.over + 1:
            yield ConfigIssue(key, f"holds for no prompt: under {rule.under} and over {rule.over} tokens.")
        if rule.under is rule.over is None and number < len(rules) - 1:
            yield ConfigIssue(key, "holds for every prompt, so that no rule after it is looked at. Put it last.")
        if rule.temperature == 0 and group_size > 1:
            yield ConfigIssue(
                f"{key}.temperature",
                f"found 0; with algorithm.group_size={group_size} all responses of a greedy prompt are the same, and "
                "teach nothing. Give rollout.sampling_rules whose temperatures are above 0, such as "
                "[{over: 512, temperature: 0.7, top_k: 50}].",
                involves=("algorithm.group_size", "algorithm.name"),
            )


_PARTIAL = "rollout.partial"
_IN_FLIGHT = "rollout.in_flight_updates"
# Sampling fields that mean the same if a response is continued in a second request. Others, such as min_tokens, count
# within one request.
_GOES_ON = {*SAMPLING, "top_k", "min_p", "stop_token_ids", "ignore_eos", "repetition_penalty", "logit_bias"}


def partial_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `rollout.partial` and `rollout.in_flight_updates`.

    Both continue unfinished responses after an update.
    """
    rollout = config.rollout
    partial = rollout.partial
    wanted = config.data.prompts_per_step
    limit = rollout.max_staleness
    if not rollout.in_flight_updates and rollout.in_flight_tokens is not None:
        yield ConfigIssue("rollout.in_flight_tokens", "is set, but in_flight_updates is false. Use true.")
    if partial is not None:
        yield from _cannot_go_on(config, _PARTIAL)
        if partial.when_stale == "finish" and partial.num_groups(wanted) > (limit + 1) * wanted:
            yield ConfigIssue(
                f"{_PARTIAL}.over_sample",
                f"found {partial.over_sample}; a group that begins is to be taken at most {limit} steps later "
                f"(rollout.max_staleness), so no more than {limit + 1} groups for each of a step can be in progress. "
                "Lower it, or raise rollout.max_staleness.",
                involves=("rollout.max_staleness",),
            )
        if config.placement.is_given:
            yield ConfigIssue(
                _PARTIAL,
                "is set, and so is placement: engines and actor take turns on the same ranks. Leave one of the two "
                "out; engines of their own ranks have rollout.async_rollout and rollout.in_flight_updates.",
                involves=("placement",),
            )
    if rollout.in_flight_updates:
        yield from _cannot_go_on(config, _IN_FLIGHT)
        if not rollout.async_rollout or not limit:
            yield ConfigIssue(
                _IN_FLIGHT,
                "is set, and the engines are not ahead of training. Use async_rollout: true and a max_staleness of at "
                "least 1.",
                involves=("rollout.async_rollout", "rollout.max_staleness"),
            )


def _cannot_go_on(config: Config, switch: str) -> Iterator[ConfigIssue]:
    """Yield settings whose responses cannot be continued across an update.

    Args:
        switch: the key that asks for it.
    """
    for key, used, why in (
        ("environment.name", config.environment.name is not None, "an episode's turns go on by themselves"),
        ("rollout.function", config.rollout.function is not None, "a function of your own returns whole responses"),
        ("rollout.engine", config.rollout.engine == "server", "servers are not asked to go on with a response"),
        ("algorithm.dynamic_sampling.metric", config.algorithm.dynamic_sampling.metric is not None, "its rounds end"),
        ("trainer.rollout_only", config.trainer.rollout_only, "there is no update after which responses go on"),
        ("trainer.replay_rollouts", config.trainer.replay_rollouts is not None, "stored responses are whole"),
    ):
        if used:
            yield ConfigIssue(switch, f"is set, and so is {key}: {why}. Leave one of the two out.", involves=(key,))
    for name in sorted(config.rollout.sampling.keys() - _GOES_ON):
        text = f"looks at a whole response, and with {switch} one may be made in parts. Leave one of the two out."
        yield ConfigIssue(f"rollout.sampling.{name}", text, involves=(switch,))


def temperature_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield a mistake if the sampling temperature is not above 0."""
    temperature = config.rollout.sampling["temperature"]
    if not (is_number(temperature) and temperature > 0):
        yield ConfigIssue(
            "rollout.sampling.temperature",
            f"found {yaml_text(temperature)}; expected above 0, since the loss divides logits by it. "
            "For greedy validation use trainer.validation_sampling.temperature=0.",
        )


def quantisation_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in the quantization of the engine's weights, which are quantized on arrival from the actor."""
    key = "rollout.vllm.quantization"
    method = config.rollout.vllm.get("quantization")
    if method is None:
        return
    if not isinstance(method, str) or method not in QUANTIZATIONS:
        hint = did_you_mean(method, QUANTIZATIONS) if isinstance(method, str) else ""
        text = f"found {yaml_text(method)}; weights that come from an actor can be {listed(QUANTIZATIONS)}.{hint}"
        yield ConfigIssue(key, text)
    if config.model.dtype == "float32":
        text = f"found {yaml_text(method)}, and vLLM quantises engines of 16 bits only. Set model.dtype=bfloat16."
        yield ConfigIssue(key, text, involves=("model.dtype",))


def speculation_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield sampling fields that vLLM does not support with speculative decoding."""
    key = "rollout.vllm.speculative_config"
    if not config.rollout.vllm.get("speculative_config"):
        return
    for at in ("rollout.sampling", "trainer.validation_sampling"):
        section, _, part = at.partition(".")
        for name in ("min_p", "logit_bias"):
            if getattr(getattr(config, section), part).get(name):
                text = f"is set, and vLLM does not know it together with {key}. Leave one of the two out."
                yield ConfigIssue(f"{at}.{name}", text, involves=(key,))


def stored_rollout_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in generating without training, and in training on stored rollouts."""
    trainer = config.trainer
    resume = config.checkpoint.resume
    if trainer.rollout_only and trainer.replay_rollouts is not None:
        yield ConfigIssue("trainer.rollout_only", "is set, and so is trainer.replay_rollouts. Use one of them.")
    if trainer.rollout_only and resume not in ("auto", "unfinished", "never"):
        yield ConfigIssue(
            "checkpoint.resume",
            f"found {yaml_text(resume)}; trainer.rollout_only generates with the weights of model.path. "
            "Name a checkpoint's Hugging Face folder there.",
        )


def dynamic_sampling_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm.dynamic_sampling`."""
    dynamic = config.algorithm.dynamic_sampling
    key = "algorithm.dynamic_sampling"
    if dynamic.metric is None:
        for name in dynamic.changed():
            yield ConfigIssue(f"{key}.{name}", f"is set, but {key}.metric is null. Use metric: accuracy.")
        return
    names = ["accuracy", "reward", *(entry.label for entry in config.reward)]
    if dynamic.metric not in names:
        hint = did_you_mean(dynamic.metric, names)
        yield ConfigIssue(f"{key}.metric", f"found {yaml_text(dynamic.metric)}; there are: {listed(names)}.{hint}")
    if config.algorithm.group_size < 2:
        yield ConfigIssue(
            "algorithm.group_size",
            f"found {config.algorithm.group_size}; {key} keeps groups whose responses differ, which needs at least 2.",
            involves=(f"{key}.metric",),
        )
    if dynamic.prompts_per_round is not None:
        most = dynamic.prompts_per_round * dynamic.max_rounds
        if most < config.data.prompts_per_step:
            yield ConfigIssue(
                f"{key}.prompts_per_round",
                f"found {dynamic.prompts_per_round}; in max_rounds={dynamic.max_rounds} rounds that is {most} prompts, "
                f"fewer than data.prompts_per_step={config.data.prompts_per_step}.",
                involves=(f"{key}.max_rounds", "data.prompts_per_step"),
            )
    if config.trainer.replay_rollouts is not None:
        yield ConfigIssue(
            f"{key}.metric",
            f"found {yaml_text(dynamic.metric)}, but trainer.replay_rollouts trains on what was kept before. "
            "Leave it out.",
            involves=("trainer.replay_rollouts",),
        )


def fitted_lengths(values: dict[str, Any], command: str) -> tuple[dict[str, int], str]:
    """Choose lengths that fit the model's context, for those of PROMPT and RESPONSE that are not set.

    If neither is set, they share the context 2 : 1. If one is set, the other gets the rest, at most its default.

    Args:
        values: values of the file and the overrides. If they are wrong, or name no folder of a model, nothing is
            chosen.

    Returns:
        The chosen lengths by key, and a sentence for the user; both empty if the defaults fit.
    """
    prompt = _at(values, PROMPT)
    response = _at(values, RESPONSE)
    command_limit = _at(values, OWN_RESPONSE.get(command, RESPONSE))
    limit = response if command_limit is None or command_limit is MISSING else command_limit
    known_lengths = [length for length in (prompt, response, limit) if length is not MISSING]
    context = _context(_at(values, "model.path"))
    if context is None or not all(isinstance(length, int) and length > 0 for length in known_lengths):
        return {}, ""
    fitted = {}
    if prompt is MISSING:
        left = context - (0 if limit is MISSING else limit)
        both = limit is MISSING and sum(DEFAULTS.values()) > context
        fitted[PROMPT] = prompt = context * 2 // 3 if both else min(DEFAULTS[PROMPT], left)
    if limit is MISSING:
        fitted[RESPONSE] = min(DEFAULTS[RESPONSE], context - prompt)
    chosen = {key: length for key, length in fitted.items() if length != DEFAULTS[key]}
    if not chosen or min(chosen.values()) < 1:
        return {}, ""
    shown = " and ".join(f"{key}={length}" for key, length in chosen.items())
    return chosen, f"{shown}, not given, chosen to fit the model's context of {context} tokens"


def length_mistakes(config: Config, command: str, spec: ModelSpec | None) -> Iterator[ConfigIssue]:
    """Yield a mistake if the longest sample exceeds the model's context or a role's micro-batch."""
    max_tokens = config.rollout.sampling["max_tokens"]
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        yield ConfigIssue(RESPONSE, f"found {yaml_text(max_tokens)}; expected an integer of at least 1.")
        return
    response = RESPONSE
    length = max_tokens
    if command in OWN_RESPONSE:
        section, _, name = OWN_RESPONSE[command].partition(".")
        if (command_limit := getattr(getattr(config, section), name)) is not None:
            response = OWN_RESPONSE[command]
            length = command_limit
    longest = config.data.max_prompt_tokens + length
    both = f"{PROMPT}={config.data.max_prompt_tokens} + {response}={length} = {longest}"
    if spec and longest > spec.max_positions:
        yield ConfigIssue(
            PROMPT,
            f"{both} exceeds the model's context of {spec.max_positions} tokens. Lower one of the two.",
            involves=("model.path", PROMPT, response),
        )
    actors_cap = config.actor.micro_batch_tokens
    for role in used_roles(config, command):
        cap = getattr(config, role).micro_batch_tokens
        # An inherited cap is reported for the actor alone.
        if cap < longest and (role == "actor" or cap != actors_cap):
            yield ConfigIssue(
                f"{role}.micro_batch_tokens",
                f"found {cap}, less than the longest sample, which must fit: {both} tokens.",
                involves=(PROMPT, response),
            )


def _at(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or MISSING.

    A value that is not a mapping is returned for every key inside it.
    """
    for part in key.split("."):
        if not isinstance(values, dict):
            return values
        if part not in values:
            return MISSING
        values = values[part]
    return values


def _context(folder: Any) -> int | None:
    """Return the context length of the model in a folder, or None if there is no readable model."""
    try:
        return ModelSpec.outline(folder).max_positions if folder and isinstance(folder, str) else None
    except ModelError:
        return None


def _own_agents(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings that need a single actor, and so cannot be combined with `environment.agents=own`."""
    if config.environment.name in environment_names() and len(agents_of(str(config.environment.name))) == 1:
        yield ConfigIssue(
            "environment.agents", f"found 'own', but {config.environment.name} has one agent only. Leave it out."
        )
    for name, used in (
        ("trainer.replay_rollouts", config.trainer.replay_rollouts is not None),
        ("trainer.rollout_only", config.trainer.rollout_only),
        ("actor.lora", config.actor.lora is not None),
        ("mix", bool(config.mix)),
        ("algorithm.advantage", config.estimator_reads("implicit_rewards")),
    ):
        if used:
            yield ConfigIssue(
                name, "does not go with environment.agents=own, which has no one actor. Use agents: shared."
            )


def environment_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `environment`, and settings that cannot be combined with it."""
    environment = config.environment
    if environment.name is None:
        for key in environment.changed():
            yield ConfigIssue(f"environment.{key}", "is set, but environment.name is null. Name an environment.")
        return
    total = config.rollout.sampling["max_tokens"]
    turn = environment.max_turn_tokens
    if turn is not None and isinstance(total, int) and turn > total:
        yield ConfigIssue(
            "environment.max_turn_tokens",
            f"found {turn}, more than rollout.sampling.max_tokens={total}, which all turns together have.",
            involves=("rollout.sampling.max_tokens",),
        )
    if turn is None and isinstance(total, int) and total < environment.max_turns:
        yield ConfigIssue(
            "environment.max_turns",
            f"found {environment.max_turns}, more than rollout.sampling.max_tokens={total}: no token for each turn.",
            involves=("rollout.sampling.max_tokens",),
        )
    if environment.agents == "own":
        yield from _own_agents(config)
    if config.estimator_reads("greedy_rewards"):
        yield ConfigIssue(
            "environment.name",
            f"found {yaml_text(environment.name)}, but {config.algorithm.advantage_name} takes a greedy response for "
            "its baseline, and there is none of an episode. Use another estimator, such as turn_grpo or grpo.",
            involves=("algorithm.name", "algorithm.advantage"),
        )
    # A user's environment is not imported here: its module may need things that only a started rank has.
    if ":" in environment.name:
        return
    names = environment_names()
    if environment.name not in names:
        hint = did_you_mean(environment.name, names)
        yield ConfigIssue(
            "environment.name",
            f"found {yaml_text(environment.name)}; there are: {listed(names)}, or a class of your own as "
            f"module:object.{hint}",
        )
        return
    try:
        check_options(environment.name, environment.options)
    except ConfigError as error:
        yield ConfigIssue("environment.options", str(error))


_SERVERS = "rollout.servers"
# Sampling fields that both vLLM's and SGLang's servers accept.
_ALL_SERVERS_KNOW = {*SAMPLING, "top_k", "stop_token_ids", "ignore_eos"}


def server_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `rollout.servers`, and settings that cannot be combined with external servers."""
    rollout = config.rollout
    servers = rollout.servers
    if rollout.engine != "server":
        for name in servers.changed():
            yield ConfigIssue(
                f"{_SERVERS}.{name}", f"is set, but rollout.engine is {rollout.engine}. Use engine: server."
            )
        return
    named = [(f"{_SERVERS}.urls.{number}", url) for number, url in enumerate(servers.urls)]
    if servers.dns is not None:
        named.append((f"{_SERVERS}.dns", servers.dns))
    for key, url in named:
        if problem := url_problem(url):
            yield ConfigIssue(key, problem)
        elif servers.token_env is None and not is_loopback(url):
            yield ConfigIssue(
                f"{_SERVERS}.token_env",
                f"is null, and {url} is not on the loopback: anybody in its network could use the server. Start it "
                "with a token, and name the environment variable that has it.",
                involves=(key,),
            )
    if servers.dns is not None and urlsplit(servers.dns).scheme == "https":
        yield ConfigIssue(f"{_SERVERS}.dns", "found https; a certificate is of a name, not of the addresses behind it.")
    for name, text in (
        ("tp", "servers lay their models out themselves: start them with --tensor-parallel-size (SGLang: --tp)."),
        ("vllm", "servers have options of their own: start them with these."),
        ("sleep", "servers have devices of their own."),
        ("use_dynamic_batching", "servers choose by themselves; see rollout.servers.max_requests."),
    ):
        if rollout.changed(name):
            yield ConfigIssue(f"rollout.{name}", f"is set, but rollout.engine is server: {text} Leave it out.")
    if config.environment.agents == "own":
        yield ConfigIssue(
            "environment.agents",
            "found 'own'; servers hold one actor's weights. Use agents: shared.",
            involves=("rollout.engine",),
        )
    yield from _server_sampling(config)


def _server_sampling(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings that SGLang's servers do not support."""
    if config.rollout.servers.kind != "sglang":
        return
    if config.rollout.servers.transfer == "nccl":
        yield ConfigIssue(
            "rollout.servers.transfer",
            "found 'nccl', which SGLang's servers are not sent weights by. Use transfer: folder.",
            involves=("rollout.servers.kind",),
        )
    known = {*_ALL_SERVERS_KNOW, *SGLANG_SAMPLING}
    for key, sampling in (
        ("rollout.sampling", config.rollout.sampling),
        ("trainer.validation_sampling", config.trainer.validation_sampling),
    ):
        for name in sampling.keys() - known:
            text = f"is not among what SGLang's server is asked for: {listed(sorted(known))}. Leave it out."
            yield ConfigIssue(f"{key}.{name}", text, involves=("rollout.servers.kind",))
