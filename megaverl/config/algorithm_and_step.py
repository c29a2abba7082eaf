"""Rules that span `algorithm` and the rest of a training step: its data, length, rewards, generation and placement."""

from __future__ import annotations

from megaverl.config.algorithm import BY_AGGREGATION, BY_NAME
from megaverl.config.errors import ConfigIssue, conflict_issues
from megaverl.config.schema import Config
from megaverl.config.section import Issues
from megaverl.config.wording import did_you_mean, divisors, listed, yaml_text


def algorithm_and_step_issues(config: Config) -> Issues:
    """Yield mistakes in how `algorithm` fits the step that feeds it."""
    yield from _batch_issues(config)
    yield from _estimator_issues(config)
    yield from _length_issues(config)
    yield from _dynamic_sampling_issues(config)
    yield from _greedy_rule_issues(config)
    yield from _opponent_issues(config)
    if config.algorithm.entropy_target is not None and config.placement.changed():
        text = "is set, and so is placement: its state would not be in checkpoints of roles on ranks of their own. Use "
        key = "algorithm.entropy_target"
        yield ConfigIssue(
            key, f"{text}algorithm.entropy_coef alone.", involves=("placement",)
        )


def _batch_issues(config: Config) -> Issues:
    """Yield a mistake if the samples of a step are too few, or if the mini-batches do not divide them."""
    algorithm = config.algorithm
    samples = config.samples_per_step
    if samples % algorithm.num_mini_batches:
        yield ConfigIssue(
            "algorithm.num_mini_batches",
            f"found {algorithm.num_mini_batches}, not a divisor of the {samples} samples of a step "
            f"(data.prompts_per_step={config.data.prompts_per_step} x algorithm.group_size={algorithm.group_size}). "
            f"Sizes that fit: {listed(divisors(samples))}.",
            involves=("data.prompts_per_step", "algorithm.group_size"),
        )
    if algorithm.advantage_name == "reinforce_plus_plus" and samples < 2:
        text = "found 1; reinforce_plus_plus compares a response with the others of its step, and needs at least 2."
        yield ConfigIssue(
            "data.prompts_per_step", text, involves=("algorithm.group_size", *BY_NAME)
        )


def _estimator_issues(config: Config) -> Issues:
    """Yield a mistake for inputs of the advantage estimator that this step does not have."""
    name = config.algorithm.advantage_name
    key = "algorithm.advantage"
    if config.estimator_reads("turn_ids") and config.environment.name is None:
        text = f"found {yaml_text(name)}, which reads turn_ids; without environment.name a response has no turns. Name "
        text += "an environment, or use another estimator."
        yield ConfigIssue(key, text, involves=("algorithm.name", "environment.name"))
    if (
        config.estimator_reads("greedy_rewards")
        and config.trainer.replay_rollouts is not None
    ):
        text = f"found {yaml_text(name)}, whose baseline is a greedy rollout; trainer.replay_rollouts has no engine to "
        text += "make one. Use another estimator, or generate."
        yield ConfigIssue(
            key, text, involves=("algorithm.name", "trainer.replay_rollouts")
        )
    if config.estimator_reads("greedy_rewards") and config.environment.name is not None:
        text = f"found {yaml_text(config.environment.name)}, but {name} takes a greedy response for its baseline, and "
        text += "there is none of an episode. Use another estimator, such as turn_grpo or grpo."
        yield ConfigIssue("environment.name", text, involves=BY_NAME)
    if name == "none" and not _has_another_loss(config):
        text = "found 'none', and nothing else trains: no algorithm.distillation, no algorithm.kl in: loss to another "
        text += "reference, no algorithm.entropy_coef or positive_coef, no mix. Name an estimator, or one of these."
        yield ConfigIssue(key, text, involves=("algorithm.name",))


def _has_another_loss(config: Config) -> bool:
    """Return whether the actor has a loss besides that of the advantages."""
    algorithm = config.algorithm
    # While the actor equals its reference, the KL between them has no gradient.
    differs_from_start = config.reference.path not in (None, config.model.path)
    return (
        algorithm.divergence_name is not None
        or (algorithm.kl.place == "loss" and differs_from_start)
        or algorithm.entropy_coef > 0
        or algorithm.entropy_target is not None
        or algorithm.positive_coef > 0
        or any(entry.update != "reward_model" for entry in config.mix)
    )


def _length_issues(config: Config) -> Issues:
    """Yield a mistake for lengths of the run and of responses that `algorithm` contradicts."""
    algorithm = config.algorithm
    if algorithm.aggregation_name == "fixed_length" and algorithm.loss_length is None:
        text = "is not set; fixed_length divides by it. Give rollout.sampling.max_tokens: loss_length: "
        longest = config.rollout.sampling["max_tokens"]
        yield ConfigIssue(
            "algorithm.loss_length", f"{text}{longest}.", involves=BY_AGGREGATION
        )
    warmup = algorithm.critic_warmup_steps
    steps = config.trainer.steps
    if config.estimator_reads("values") and warmup >= steps:
        text = f"found {warmup}, and trainer.steps={steps}: the actor would never be updated. Use fewer."
        yield ConfigIssue(
            "algorithm.critic_warmup_steps", text, involves=("trainer.steps",)
        )


def _dynamic_sampling_issues(config: Config) -> Issues:
    """Yield mistakes in `algorithm.dynamic_sampling` for these rewards and prompts."""
    dynamic = config.algorithm.dynamic_sampling
    key = "algorithm.dynamic_sampling"
    if dynamic.metric is None:
        return
    names = ["accuracy", "reward", *(entry.label for entry in config.reward)]
    if dynamic.metric not in names:
        hint = did_you_mean(dynamic.metric, names)
        yield ConfigIssue(
            f"{key}.metric",
            f"found {yaml_text(dynamic.metric)}; there are: {listed(names)}.{hint}",
        )
    wanted = config.data.prompts_per_step
    if (
        dynamic.prompts_per_round is not None
        and dynamic.prompts_per_round * dynamic.max_rounds < wanted
    ):
        most = dynamic.prompts_per_round * dynamic.max_rounds
        text = f"found {dynamic.prompts_per_round}; in max_rounds={dynamic.max_rounds} rounds that is {most} prompts, "
        text += f"fewer than data.prompts_per_step={wanted}."
        yield ConfigIssue(
            f"{key}.prompts_per_round",
            text,
            involves=(f"{key}.max_rounds", "data.prompts_per_step"),
        )
    if config.trainer.replay_rollouts is not None:
        text = f"found {yaml_text(dynamic.metric)}, but trainer.replay_rollouts trains on what was kept before. Leave "
        yield ConfigIssue(
            f"{key}.metric", f"{text}it out.", involves=("trainer.replay_rollouts",)
        )


def _greedy_rule_issues(config: Config) -> Issues:
    """Yield a mistake for a sampling rule under which all responses of a group are the same."""
    size = config.algorithm.group_size
    if not config.rollout.adaptive_sampling or size == 1:
        return
    for index, entry in enumerate(config.rollout.sampling_rules):
        if entry.temperature == 0:
            text = f"found 0; with algorithm.group_size={size} all responses of a greedy prompt are the same, and "
            text += "teach nothing. Give rollout.sampling_rules whose temperatures are above 0, such as "
            yield ConfigIssue(
                f"rollout.sampling_rules.{index}.temperature",
                f"{text}[{{over: 512, temperature: 0.7, top_k: 50}}].",
                involves=("algorithm.group_size", "algorithm.name"),
            )


def _opponent_issues(config: Config) -> Issues:
    """Yield settings that cannot be combined with opponents of a mixture of policy and reference (Nash-MD)."""
    algorithm = config.algorithm
    rollout = config.rollout
    if algorithm.opponent_beta is None or algorithm.advantage_name != "nash_md":
        return
    own_start = "a response that is continued is the policy's own"
    yield from conflict_issues(
        "algorithm.opponent_beta",
        (
            (
                "rollout.engine",
                rollout.engine != "hf",
                f"{rollout.engine} draws from one model. Use hf",
            ),
            (
                "rollout.function",
                rollout.function is not None,
                "a function of your own draws no opponents",
            ),
            ("environment.name", config.environment.name is not None, own_start),
            ("rollout.partial", rollout.partial is not None, own_start),
            ("rollout.in_flight_updates", rollout.in_flight_updates, own_start),
        ),
    )
