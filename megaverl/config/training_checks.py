"""Checks of what is trained: optimizers, schedules, preference pairs, `mix`, a shared backbone, and distillation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megaverl.config.algorithm import FILTERS
from megaverl.config.errors import (
    ConfigIssue,
    did_you_mean,
    is_number,
    listed,
    loss_mistakes,
    named_function,
    option_mistakes,
    yaml_text,
)
from megaverl.config.grids import is_placed, used_roles
from megaverl.config.roles import SHARED_BY_CRITIC, ActorConfig, CriticConfig
from megaverl.config.run import MixConfig, PreferenceConfig, SFTConfig
from megaverl.config.schema import Config
from megaverl.config.signatures import signature_of
from megaverl.sharding.model_spec import ModelSpec

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
KEY = "critic.share_backbone"
DIVERGENCE_INPUTS = ("student_log_probs", "teacher_log_probs")


def scheduler_mistakes(name: str, role: ActorConfig | CriticConfig, num_updates: int) -> Iterator[ConfigIssue]:
    """Yield mistakes in a role's scheduler that megatron-core would only refuse by an assertion, after startup.

    Args:
        name: the role.
        role: the role's section.
        num_updates: optimizer steps in the whole run.
    """
    at = f"{name}.scheduler"
    scheduler = role.scheduler
    for key, allowed in (
        ("lr_decay_style", DECAY_STYLES),
        ("lr_wsd_decay_style", WSD_STYLES),
        ("wd_incr_style", WEIGHT_DECAY_STYLES),
    ):
        style = scheduler.get(key)
        if style is not None and style not in allowed:
            hint = did_you_mean(style, allowed) if isinstance(style, str) else ""
            yield ConfigIssue(f"{at}.{key}", f"found {yaml_text(style)}; allowed: {listed(allowed)}.{hint}")
    counts = [scheduler.get(key, 0) for key in ("lr_warmup_steps", "lr_decay_steps")]
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
        yield ConfigIssue(at, "lr_warmup_steps and lr_decay_steps must be integers of at least 0.")
        return
    warmup = scheduler.get("lr_warmup_steps", 0)
    decay = scheduler.get("lr_decay_steps", num_updates)
    if warmup and warmup >= decay:
        source = "lr_decay_steps" if "lr_decay_steps" in scheduler else "the run's optimizer steps"
        yield ConfigIssue(
            f"{at}.lr_warmup_steps", f"found {warmup}; expected below {source}, {decay}.", involves=("trainer.steps",)
        )
    if scheduler.get("lr_decay_style") == "WSD":
        missing = [key for key in ("wsd_decay_steps", "lr_wsd_decay_style") if scheduler.get(key) is None]
        if missing:
            yield ConfigIssue(at, f"lr_decay_style WSD needs {listed(missing)}.")
    start, end = (scheduler.get(key, role.optimizer.get("weight_decay", 0.0)) for key in ("start_wd", "end_wd"))
    if start != end and scheduler.get("wd_incr_style", "constant") == "constant":
        yield ConfigIssue(f"{at}.wd_incr_style", f"found constant, but start_wd={start} and end_wd={end} differ.")


def router_replay_mistakes(config: Config, spec: ModelSpec | None) -> Iterator[ConfigIssue]:
    """Yield settings that rule out router replay: the engine reports no experts, or the actor cannot replay them."""
    key = "actor.router_replay"
    mode = config.actor.router_replay
    if mode == "off":
        return
    for wrong, involved, why in (
        (config.actor.engine != "megatron", "actor.engine", "routers are told by megatron-core alone"),
        (config.rollout.engine != "vllm", "rollout.engine", "vLLM in the run's own processes alone says what it took"),
        (config.environment.name is not None, "environment.name", "experts of turns are not put together"),
        (config.rollout.function is not None, "rollout.function", "a function's responses come without experts"),
        (
            bool(config.rollout.vllm.get("speculative_config")),
            "rollout.vllm.speculative_config",
            "experts of drafts that are not taken come between the others",
        ),
        (config.rollout.partial is not None, "rollout.partial", "experts of a response's parts are not put together"),
        (
            config.rollout.in_flight_updates,
            "rollout.in_flight_updates",
            "experts of a response's parts are not put together",
        ),
    ):
        if wrong:
            yield ConfigIssue(key, f"found {yaml_text(mode)}, and {why}. Leave it out.", involves=(involved,))
            return
    if spec is not None and spec.is_tabled and spec.moe is None:
        yield ConfigIssue(key, f"found {yaml_text(mode)}, and the model has no routed experts. Leave it out.")
    one_update = config.algorithm.num_epochs == config.algorithm.num_mini_batches == 1
    if mode == "old_log_probs" and one_update and config.algorithm.kl.place != "reward":
        text = "found old_log_probs, and a step of one update computes none. Use router_replay: update."
        yield ConfigIssue(key, text, involves=("algorithm.num_mini_batches",))


def optimizer_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in the optimizers and schedulers of all trained roles."""
    trained = {"actor": True, "critic": config.uses_critic, "reward_model": config.trains_reward_model}
    for role in (role for role, is_used in trained.items() if is_used):
        section = getattr(config, role)
        lr = section.optimizer.get("lr")
        min_lr = section.optimizer.get("min_lr")
        if lr is None or not (is_number(lr) and lr > 0):
            yield ConfigIssue(f"{role}.optimizer.lr", f"found {yaml_text(lr)}; expected a number above 0.")
        elif min_lr is not None and is_number(min_lr) and not 0 <= min_lr <= lr:
            yield ConfigIssue(
                f"{role}.optimizer.min_lr", f"found {min_lr}; expected from 0 to {role}.optimizer.lr={lr}."
            )
        # megatron-core has these fields in both classes, and reads one or the other.
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            values = [part[name] for part in (section.optimizer, section.ddp) if name in part]
            if len(values) == 2 and values[0] != values[1]:
                yield ConfigIssue(
                    f"{role}.ddp.{name}",
                    f"found {yaml_text(values[1])}, but {role}.optimizer.{name} is {yaml_text(values[0])}.",
                    involves=(f"{role}.optimizer.{name}",),
                )
        is_sharded = section.ddp.get("use_distributed_optimizer", True)
        if section.engine == "megatron" and section.optimizer.get("optimizer") == "sgd" and is_sharded:
            yield ConfigIssue(
                f"{role}.optimizer.optimizer",
                f"found 'sgd', which megatron-core does not shard. Set {role}.ddp.use_distributed_optimizer: false, or "
                "use adam.",
                involves=(f"{role}.ddp.use_distributed_optimizer",),
            )
        yield from scheduler_mistakes(role, section, config.total_updates)


def fp8_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield mistakes in `megatron.fp8` of the roles that a command builds."""
    for role in used_roles(config, command):
        megatron = getattr(config, role).megatron
        # A mistake in inherited fields is reported for the actor alone.
        if megatron.get("fp8") is None or (role != "actor" and megatron == config.actor.megatron):
            continue
        if config.model.dtype in ("float32", "float16"):
            text = (
                f"found {yaml_text(megatron['fp8'])}; weights that are quantised for products are bfloat16. Set that."
            )
            yield ConfigIssue(f"{role}.megatron.fp8", text, involves=("model.dtype",))
        if megatron.get("fp8_recipe") == "delayed":
            yield ConfigIssue(
                f"{role}.megatron.fp8_recipe",
                "found 'delayed', whose scales come from the steps before: scoring would depend on them, and a "
                "checkpoint does not hold them. Use tensorwise (the default here), blockwise or mxfp8.",
            )


def warmup_mistakes(name: str, section: SFTConfig | PreferenceConfig) -> Iterator[ConfigIssue]:
    """Yield a mistake if the learning rate's warm-up is not shorter than the training."""
    if section.lr_warmup_steps >= section.steps:
        text = f"found {section.lr_warmup_steps}; expected below {name}.steps={section.steps}."
        yield ConfigIssue(f"{name}.lr_warmup_steps", text, involves=(f"{name}.steps",))


def preference_mistakes(config: Config, command: str, check_paths: bool) -> Iterator[ConfigIssue]:
    """Yield mistakes in `preference`, for `megaverl dpo` and `megaverl reward`."""
    preference = config.preference
    yield from warmup_mistakes("preference", preference)
    if preference.validate_every and not preference.validation:
        yield ConfigIssue(
            "preference.validate_every", "is set, but preference.validation is empty. Give held-out pairs."
        )
    crosses = "reference_kl" in signature_of("preference_losses", preference.loss).reads
    if command == "dpo" and crosses and preference.batch_size < 2:
        yield ConfigIssue(
            "preference.batch_size",
            f"found 1; {preference.loss} compares every prompt with another row's response, and needs at least 2 rows.",
            involves=("preference.loss",),
        )
    if command == "dpo":
        if preference.margin_key is not None:
            yield ConfigIssue("preference.margin_key", "is of `megaverl reward`; no preference loss reads a margin.")
        yield from loss_mistakes("preference", "preference_losses", preference.loss, preference.options)
    if check_paths:
        for key, paths in (("train", preference.train), ("validation", preference.validation)):
            for index, name in enumerate(paths):
                if not any(mark in name for mark in "*?[") and not Path(name).exists():
                    yield ConfigIssue(f"preference.{key}.{index}", f"found {yaml_text(name)}, which does not exist.")


def reward_model_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield mistakes in the loss of `reward_model`.

    Checked for every command, since one file serves several commands.
    """
    section = config.reward_model
    has_margins = config.preference.margin_key is not None and (command == "reward" or not config.mixes_reward_model)
    yield from loss_mistakes(
        "reward_model",
        "reward_model_losses",
        section.loss,
        section.options,
        has_margins=has_margins,
    )


def mix_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in the entries of `mix`."""
    names = ["reward", "accuracy", *(entry.label for entry in config.reward)]
    for index, entry in enumerate(config.mix):
        key = f"mix.{index}"
        if entry.update is None:
            yield ConfigIssue(f"{key}.update", "is not set. Known: rejection, preference, reward_model, sft.")
        if entry.update == "sft" and entry.judge != MixConfig().judge:
            yield ConfigIssue(
                f"{key}.judge", "is set, and sft learns the rows' own answers: nothing is judged. Leave it out."
            )
        elif entry.judge not in names:
            hint = did_you_mean(entry.judge, names)
            yield ConfigIssue(f"{key}.judge", f"found {yaml_text(entry.judge)}; there are: {listed(names)}.{hint}")
        if entry.update not in (None, "sft") and config.algorithm.group_size < 2:
            yield ConfigIssue(
                "algorithm.group_size",
                f"found {config.algorithm.group_size}; mix with {entry.update} takes the best response of a group, "
                "which needs at least 2.",
                involves=(f"{key}.update",),
            )
        if entry.update == "preference":
            yield from loss_mistakes(
                "preference",
                "preference_losses",
                config.preference.loss,
                config.preference.options,
            )
            if "desirable" in signature_of("preference_losses", config.preference.loss).reads:
                text = f"found {yaml_text(config.preference.loss)}, which is not of pairs, and mix has pairs. Use dpo."
                yield ConfigIssue("preference.loss", text)
        learned = [reward for reward in config.reward if reward.path is not None and reward.engine == "megatron"]
        if entry.update == "reward_model" and len(learned) != 1:
            yield ConfigIssue(
                f"{key}.update",
                f"found 'reward_model', but {len(learned)} entries of reward have a path; it trains the one that has. "
                "Add {name: learned, path: FOLDER} to reward.",
            )
        if entry.update == "reward_model" and config.estimator_reads("implicit_rewards"):
            yield ConfigIssue(
                f"{key}.update",
                f"found 'reward_model', but algorithm.advantage={config.algorithm.advantage_name} trains reward_model "
                "already, as an implicit one. Use one of the two.",
                involves=("algorithm.name", "algorithm.advantage"),
            )
        if entry.update == "reward_model" and learned and entry.judge in ("reward", learned[0].label):
            yield ConfigIssue(
                f"{key}.judge",
                f"found {yaml_text(entry.judge)}: the learned reward would be its own judge. Name another reward.",
            )


def shared_critic_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with `critic.share_backbone`.

    These are settings of a separate critic model, and settings that would let a value loss alone move the policy.
    """
    critic = config.critic
    actor = config.actor
    algorithm = config.algorithm
    if not critic.share_backbone:
        return
    if not config.estimator_reads("values"):
        yield ConfigIssue(
            KEY,
            f"is set, but {algorithm.advantage_name} has no critic. Leave it out, or use an estimator with one: "
            "advantage: gae.",
            involves=("algorithm.name", "algorithm.advantage"),
        )
        return
    if critic.path is not None:
        yield ConfigIssue("critic.path", f"is set, and so is {KEY}: the backbone is the actor's. Use one of the two.")
    for name in SHARED_BY_CRITIC:
        if getattr(critic, name) != getattr(actor, name):
            yield ConfigIssue(
                f"critic.{name}",
                f"found {yaml_text(getattr(critic, name))}, and with {KEY} the critic is the actor's model, whose "
                f"actor.{name} is {yaml_text(getattr(actor, name))}. Leave it out.",
                involves=(KEY,),
            )
    for name in critic.changed("lora", "optimizer", "scheduler"):
        text = f"is set, and with {KEY} there is one optimizer: set actor.{name}."
        yield ConfigIssue(f"critic.{name}", text, involves=(KEY,))
    for key in config.placement.changed("critic", "critic_devices"):
        text = f"is set, and with {KEY} the critic is the actor's model, on the actor's ranks. Use one of the two."
        yield ConfigIssue(f"placement.{key}", text, involves=(KEY,))
    if algorithm.critic_warmup_steps:
        yield ConfigIssue(
            "algorithm.critic_warmup_steps",
            f"found {algorithm.critic_warmup_steps}; with {KEY} a value loss alone would move the policy. Leave it "
            "out, or give the critic a model of its own.",
            involves=(KEY,),
        )


def bonus_and_filter_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in the adaptive entropy bonus and in the rollout filter."""
    algorithm = config.algorithm
    key = "algorithm.entropy_target"
    if algorithm.entropy_target is None and algorithm.changed("entropy_step"):
        text = f"found {algorithm.entropy_step}, but {key} is null: the weight is fixed. Set a target."
        yield ConfigIssue("algorithm.entropy_step", text)
    if algorithm.entropy_target is not None and config.placement.changed():
        text = "is set, and so is placement: its state would not be in checkpoints of roles on ranks of their own. Use "
        yield ConfigIssue(key, f"{text}algorithm.entropy_coef alone.", involves=("placement",))
    if algorithm.rollout_filter in FILTERS and algorithm.group_size < 3:
        yield ConfigIssue(
            "algorithm.rollout_filter",
            f"found {yaml_text(algorithm.rollout_filter)}, which keeps two responses of each group, and "
            f"algorithm.group_size={algorithm.group_size}: nothing is dropped. Use 3 or more.",
            involves=("algorithm.group_size",),
        )


def opponent_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm.opponent_beta`: opponents drawn from a mixture of policy and reference (Nash-MD)."""
    algorithm = config.algorithm
    rollout = config.rollout
    key = "algorithm.opponent_beta"
    beta = algorithm.opponent_beta
    name = algorithm.advantage_name
    if (beta is None) != (name != "nash_md"):
        text = f"found {yaml_text(beta)}, and the advantage is {name}: only nash_md compares with opponents."
        yield ConfigIssue(key, text, involves=("algorithm.advantage",))
    if beta is None or name != "nash_md":
        return
    refused = {
        "algorithm.group_size": (
            algorithm.group_size % 2 == 1,
            f"found {algorithm.group_size}, and half of each group are opponents. Use an even number",
        ),
        "rollout.engine": (
            rollout.engine != "hf",
            f"found {yaml_text(rollout.engine)}, which draws from one model. Use hf",
        ),
        "algorithm.kl.in": (
            algorithm.kl.place == "reward",
            "found reward: a penalty would count in who is preferred. Use in: loss, kind: k1, score_function: true",
        ),
        "rollout.function": (rollout.function is not None, "it draws by itself, and knows no opponents. Leave it out"),
    }
    not_own_start = "what goes on where it left off is the policy's own. Leave it out"
    refused |= {
        "environment.name": (config.environment.name is not None, not_own_start),
        "rollout.partial": (rollout.partial is not None, not_own_start),
        "rollout.in_flight_updates": (rollout.in_flight_updates, not_own_start),
    }
    for other, (is_set, why) in refused.items():
        if is_set:
            yield ConfigIssue(other, f"does not go together with {key}: {why}.", involves=(key,))


def program_mistakes(config: Config, command: str) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with a user-defined step (`trainer.program`)."""
    trainer = config.trainer
    rollout = config.rollout
    if trainer.program is None or command not in ("train", "quickstart"):
        return
    everywhere = {
        "trainer.operators": bool(trainer.operators),
        "trainer.rollout_only": trainer.rollout_only,
    }
    apart = {
        "rollout.in_flight_updates": rollout.in_flight_updates,
        "placement.actor_islands": config.placement.actor_islands > 1,
    }
    for key, is_set in everywhere.items():
        if is_set:
            text = "does not go together with trainer.program, which is the whole step. Leave one of them out."
            yield ConfigIssue(key, text, involves=("trainer.program",))
    for key, is_set in apart.items():
        if is_set and is_placed(config, command):
            text = "trainer.program cannot do it yet where roles have ranks of their own. Leave one of them out."
            yield ConfigIssue(key, text, involves=("trainer.program",))


def other_tokenizer_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield settings that cannot be combined with a teacher that has another tokenizer.

    Such a teacher reads the text of a single turn.
    """
    algorithm = config.algorithm
    key = "reference.tokenizer"
    tokens = "a teacher of other tokens"
    if algorithm.advantage_name != "distillation":
        yield ConfigIssue(
            key,
            f"is of a teacher that is compared by its text; {algorithm.advantage_name} reads log-probs of the model's "
            "own tokens. Use algorithm.advantage=distillation, or a reference with the model's tokenizer.",
            involves=("algorithm.name", "algorithm.advantage"),
        )
    refused = {
        "algorithm.distillation.divergence": (
            algorithm.divergence_name is not None,
            f"{tokens} has no probabilities of the student's tokens, top_k of them or all",
        ),
        "algorithm.kl.in": (algorithm.kl.place != "none", f"the KL to {tokens} is what distillation learns from"),
        "mix": (
            any(entry.update == "preference" for entry in config.mix) and config.preference_needs_reference,
            f"{tokens} has no log-probs of both responses of a pair in the student's tokens",
        ),
        "rollout.adaptive_sampling": (
            config.rollout.adaptive_sampling and any(rule.top_k for rule in config.rollout.sampling_rules),
            "its rules have top_k, and the teacher's log-probs are over all of its own tokens",
        ),
        "rollout.sampling.top_k": (
            int(config.rollout.sampling.get("top_k") or 0) > 0,
            "the student's log-probs would be over its k likeliest tokens, and the teacher's over all of its own",
        ),
        "environment.name": (
            config.environment.name is not None,
            "what an environment answers is written in the student's tokens and chat template",
        ),
        "data.tools": (config.data.tools is not None, f"{tokens} is given the messages alone, without tools"),
    }
    for other, (is_set, why) in refused.items():
        if is_set:
            yield ConfigIssue(
                other, f"does not go together with {key}: {why}. Leave one of the two out.", involves=(key,)
            )


def distillation_mistakes(config: Config) -> Iterator[ConfigIssue]:
    """Yield mistakes in `algorithm.distillation` and in the teacher."""
    algorithm = config.algorithm
    key = "algorithm.distillation"
    distillation = algorithm.distillation
    name = algorithm.divergence_name
    if config.reference.tokenizer is not None:
        yield from other_tokenizer_mistakes(config)
    if name is None:
        for option in distillation.changed():
            yield ConfigIssue(f"{key}.{option}", f"is set, but {key}.divergence is null. Use jensen_shannon.")
        return
    function, mistakes = named_function(f"{key}.divergence", "divergences", name, DIVERGENCE_INPUTS)
    yield from mistakes
    if function is not None:
        yield from option_mistakes(f"{key}.options", name, distillation.options, function)
    beta = distillation.options.get("beta")
    if name == "jensen_shannon" and isinstance(beta, int | float) and not 0 < beta < 1:
        yield ConfigIssue(
            f"{key}.options.beta",
            f"found {beta}; expected above 0 and below 1. At 0 it is forward_kl, at 1 reverse_kl: name these.",
        )
    if config.reference.path in (None, config.model.path):
        yield ConfigIssue(
            "reference.path",
            f"is {'not set' if config.reference.path is None else 'model.path'}; {name} compares the actor with a "
            "teacher, and this one would teach it to stay as it is. Name the teacher's folder; to stay near where "
            "training starts, use algorithm.kl.",
            involves=("algorithm.name", f"{key}.divergence"),
        )
    # Both models compute the same vocabulary part on each rank, so the divergence needs no exchange of logits.
    for grid in ("engine", "tp", "pp", "cp", "vpp"):
        actors = getattr(config.actor, grid)
        references = getattr(config.reference, grid)
        if actors != references:
            yield ConfigIssue(
                f"reference.{grid}",
                f"found {references}, and actor.{grid} is {actors}: {name} compares them rank by rank, vocabulary part "
                "by vocabulary part. Leave it out.",
                involves=(f"actor.{grid}", f"{key}.divergence"),
            )
