"""`algorithm`: settings that turn rewards into gradients, and the parts of which each published algorithm is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from megaverl.config.errors import ConfigIssue
from megaverl.config.named_functions import (
    AGGREGATION_INPUTS,
    CORRECTION_INPUTS,
    DIVERGENCE_INPUTS,
    ESTIMATOR_INPUTS,
    KL_INPUTS,
    LOSS_INPUTS,
    OPTIONAL_LOSS_INPUTS,
    SELECTOR_INPUTS,
    VALUE_LOSS_INPUTS,
    find_function,
    function_and_option_issues,
    function_issues,
    option_issues,
    out_of_order,
    out_of_range,
)
from megaverl.config.section import (
    Fraction,
    Issues,
    NonNegative,
    NonNegativeFloat,
    Passthrough,
    Positive,
    PositiveFloat,
    Section,
    Several,
    Text,
    known_or_own,
    rule,
)
from megaverl.config.signatures import Registered, registered
from megaverl.config.wording import listed, yaml_text

FILTERS = ("best_and_worst", "best_and_random")
# Keys that choose the estimator, the policy loss and the aggregation: the `involves` of
# mistakes about them.
BY_NAME = ("algorithm.name", "algorithm.advantage")
BY_LOSS = ("algorithm.name", "algorithm.policy_loss")
BY_AGGREGATION = ("algorithm.name", "algorithm.loss_aggregation")
# Policy losses without a ratio to the sampling policy, and estimators for which that is
# no problem: raft learns kept samples like answers, and none has no advantages.
WITHOUT_RATIO = ("policy_gradient", "gpg")
NOT_OF_SAMPLES = ("raft", "none")
WITH_RATIO = (
    "Use 1, or a policy loss with a ratio, such as importance_sampling or ppo_clip."
)
# Settings of the value loss, which only an estimator with a critic has.
OF_CRITIC = (
    "value_loss",
    "value_loss_options",
    "value_loss_coef",
    "value_clip_range",
    "critic_warmup_steps",
)


class Preset(NamedTuple):
    """Registered names of the parts of an algorithm.

    Attributes:
        advantage: advantage estimator.
        policy_loss: policy loss.
        aggregation: aggregation of token losses.
        loss_options: options of the policy loss that differ from the function's defaults.
        divergence: divergence from a teacher over the whole vocabulary. None: no teacher.
    """

    advantage: str
    policy_loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    loss_options: Mapping[str, float] = MappingProxyType({})
    divergence: str | None = None


PRESETS: dict[str, Preset] = {
    "ppo": Preset("gae"),
    "grpo": Preset("grpo"),
    "dr_grpo": Preset("dr_grpo", aggregation="fixed_length"),
    "dapo": Preset("grpo", loss_options={"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": Preset("grpo", "gspo", "seq_mean_token_mean"),
    "sapo": Preset("grpo", "sapo", "seq_mean_token_mean"),
    "cispo": Preset("grpo", "cispo"),
    "gmpo": Preset("grpo", "gmpo", "seq_mean_token_mean"),
    "dppo_tv": Preset("grpo", "dppo_tv"),
    "dppo_kl": Preset("grpo", "dppo_kl"),
    "clip_cov": Preset("grpo", "clip_cov"),
    "kl_cov": Preset("grpo", "kl_cov"),
    "rloo": Preset("rloo", aggregation="seq_mean_token_sum"),
    "remax": Preset("remax", aggregation="seq_mean_token_sum"),
    "reinforce_plus_plus": Preset("reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": Preset("reinforce_plus_plus_baseline"),
    "opo": Preset("opo"),
    "gpg": Preset("gpg", "gpg"),
    "gdpo": Preset("gdpo"),
    "pass_at_k": Preset("pass_at_k"),
    "best_of_group": Preset("best_of_group"),
    "optimal_token_baseline": Preset("optimal_token_baseline"),
    "distillation": Preset("distillation", "policy_gradient"),
    "gkd": Preset("none", "policy_gradient", divergence="jensen_shannon"),
    "turn_ppo": Preset("turn_gae"),
    "turn_grpo": Preset("turn_grpo"),
    "prime": Preset("prime"),
    "raft": Preset("raft", "policy_gradient"),
}
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]


class KLConfig(Section):
    """`algorithm.kl`: the penalty that keeps the policy near the reference model."""

    place: Literal["none", "reward", "loss"] = Field(default="none", alias="in")
    """Where the KL penalty enters. none: no penalty. reward: subtracted from the reward of every token, so that it
    passes through the advantages. loss: added to the policy loss. Both need a reference model, which costs its memory
    and one forward pass over every sample."""
    kind: str | None = None
    """Estimator of the KL (joschu.net/blog/kl-approx.html): k1, k2, k3, abs, low_variance, or module:function. k1 has
    no gradient in a loss. null: k3; k1 in the reward and with score_function, because only k1 then has the gradient of
    the KL."""
    allow_biased: bool = False
    """Allow an estimator other than k1 in the reward. Its gradient is not the gradient of the KL (arXiv 2510.01555)."""
    straight_through: bool = False
    """In the loss: report the value of `kind`, but use the gradient of k2, which is the gradient of the KL."""
    importance_weighted: bool = False
    """In the loss: multiply the penalty by the token's ratio to the policy that sampled it, as DeepSeek-V3.2 does
    (arXiv 2512.02556). With k1 and k3 the gradient is then that of the KL, also for samples of an older policy."""
    score_function: bool = False
    """In the loss: use the gradient of the KL of whole responses, in which a token also accounts for the tokens after
    it (arXiv 2506.09477). Requires k1."""
    coef: NonNegativeFloat = 0.0
    """Coefficient of the penalty. With `target` this is only the initial value. Larger values keep the policy closer to
    the reference and slow down learning."""
    target: PositiveFloat | None = None
    """KL per token, in nats, that `coef` is adjusted towards (arXiv 1909.08593). A run cannot change between a fixed
    and an adaptive coefficient when it resumes. null: coef is fixed."""
    gain: PositiveFloat = 0.1
    """Rate at which the adaptive coefficient changes per step. Used only with `target`."""

    @property
    def kind_name(self) -> str:
        """Name of the KL estimator: a registered one, or module:function."""
        return self.kind or (
            "k1" if self.place == "reward" or self.score_function else "k3"
        )

    @property
    def gradient(self) -> str:
        """Kind of gradient that `kl_loss` computes: straight_through, importance, score or value."""
        chosen = {
            "straight_through": self.straight_through,
            "importance": self.importance_weighted,
        }
        return next(
            (name for name, is_set in chosen.items() if is_set),
            "score" if self.score_function else "value",
        )

    @rule
    def check_place(self, at: str) -> Issues:
        """Refuse a penalty that enters nowhere, and a place for a penalty without a coefficient."""
        if self.place == "none" and (self.coef > 0 or self.target is not None):
            name = "coef" if self.coef > 0 else "target"
            text = f"found none, yet {at}.{name} is set. Use in: reward or in: loss, or leave {name} out."
            yield ConfigIssue(f"{at}.in", text)
        if self.place != "none" and self.coef == 0:
            yield ConfigIssue(
                f"{at}.coef",
                f"found 0.0; with {at}.in={self.place} it must be above 0.",
            )

    @rule
    def check_kind(self, at: str) -> Issues:
        """Refuse an unknown estimator of the KL, and k1 in a loss, where it has no gradient."""
        yield from function_issues(
            f"{at}.kind", "kl_estimators", self.kind_name, KL_INPUTS, ()
        )
        if self.place == "loss" and self.kind == "k1" and self.gradient == "value":
            text = f"found 'k1', whose gradient is 0 on average in a loss. Use k2 or k3, or {at}.straight_through, "
            yield ConfigIssue(
                f"{at}.kind", f"{text}importance_weighted or score_function."
            )

    @rule
    def check_gradient(self, at: str) -> Issues:
        """Refuse kinds of gradients outside a loss, and more than one of them."""
        gradients = [
            *self.changed("straight_through", "importance_weighted", "score_function")
        ]
        if self.place != "loss":
            for name in gradients:
                yield ConfigIssue(
                    f"{at}.{name}",
                    f"is about gradients, and {at}.in={self.place} has none.",
                )
        elif len(gradients) > 1:
            yield ConfigIssue(
                f"{at}.{gradients[1]}",
                f"is set, and so is {gradients[0]}. Use one of them.",
            )
        elif self.score_function and self.kind_name != "k1":
            text = f"found {yaml_text(self.kind)}; score_function leaves out the gradient of the estimate itself, "
            yield ConfigIssue(
                f"{at}.kind", f"{text}which is 0 on average for k1 alone. Leave it out."
            )

    @rule
    def check_bias(self, at: str) -> Issues:
        """Refuse estimators in the reward whose gradient is not that of the KL, unless they are allowed."""
        # Only registered kinds are known to be biased. A user's own estimator is the
        # user's decision.
        biased = self.kind_name != "k1" and self.kind_name in registered(
            "kl_estimators"
        )
        if self.place == "reward" and biased and not self.allow_biased:
            text = f"found {yaml_text(self.kind_name)}; in the reward only k1 has the gradient of the KL on average: "
            text += "that of others is far too small near the reference, or points elsewhere. Leave it out, use "
            yield ConfigIssue(
                f"{at}.kind", f"{text}in: loss, or {at}.allow_biased: true."
            )
        if self.place != "reward" and self.allow_biased:
            yield ConfigIssue(
                f"{at}.allow_biased",
                f"is about kinds in the reward, and {at}.in={self.place}.",
            )

    @rule
    def check_gain(self, at: str) -> Issues:
        """Refuse the speed of an adaptive coefficient if the coefficient is fixed."""
        if self.place != "none" and self.target is None and self.changed("gain"):
            text = f"found {self.gain}, but {at}.target is null: coef is fixed. Set a target."
            yield ConfigIssue(f"{at}.gain", text)


class CorrectionPart(Section):
    """One entry of `algorithm.correction.also`."""

    kind: str = "none"
    """Importance correction for the difference between the engine's and the trainer's log-probs: none, token_truncate,
    token_mask, sequence_truncate, sequence_mask, geometric_mask, reject, off_policy_mask, or module:function.
    Recommended with asynchronous or partial rollouts and with a quantised engine."""
    low: float | None = None
    """Lower limit of the ratio; for reject, of the estimate in nats. null: the default of the kind."""
    high: PositiveFloat | None = None
    """Upper limit of the ratio; for reject, of the estimate in nats; for off_policy_mask, in nats per token. null: the
    default of the kind."""
    options: Passthrough = {}
    """Further options of the kind. reject takes estimator (k1, k2 or k3, of the KL from the engine's policy) and over
    (token, or the sum, mean or max of a response's tokens)."""

    @rule
    def check_kind_and_options(self, at: str) -> Issues:
        """Refuse an unknown kind of correction, and options that it does not have or lacks."""
        if self.kind == "none":
            yield from self.unused(at, f"{at}.kind is none.", "options", "low", "high")
            return
        yield from function_issues(
            f"{at}.kind", "corrections", self.kind, CORRECTION_INPUTS
        )
        function = find_function("corrections", self.kind)
        if function is None:
            return
        yield from self._limit_issues(at, function)
        limits = ("low", "high")
        values = {
            name: value for name, value in self.options.items() if name not in limits
        }
        options = {
            name: option
            for name, option in function.options.items()
            if name not in limits
        }
        required = tuple(name for name in function.required if name not in limits)
        without_limits = replace(function, options=options, required=required)
        yield from option_issues(
            f"{at}.options", self.kind, values, without_limits, f"{at}.kind"
        )

    def _limit_issues(self, at: str, function: Registered) -> Issues:
        """Yield mistakes in `low` and `high`, which are options of the correction with keys of their own."""
        limits = {"low": self.low, "high": self.high}
        if out_of_order(limits):
            text = f"found {self.low}; expected below high, {self.high}."
            yield ConfigIssue(f"{at}.low", text, involves=(f"{at}.high",))
        if self.low is not None and self.low < 0 and self.kind != "reject":
            yield ConfigIssue(f"{at}.low", f"found {self.low}; a ratio is at least 0.")
        for name, limit in limits.items():
            if limit is not None and name not in function.options:
                yield ConfigIssue(
                    f"{at}.{name}", f"is set, but {self.kind} has no such limit."
                )
            if limit is None and name in function.required:
                yield ConfigIssue(
                    f"{at}.{name}", f"is not set, and {self.kind} needs it."
                )
            if name in self.options:
                yield ConfigIssue(
                    f"{at}.options.{name}", f"is a key of its own: {at}.{name}."
                )


class CorrectionConfig(CorrectionPart):
    """`algorithm.correction`: factors that correct for the difference between the engine's policy and Megatron's."""

    also: list[CorrectionPart] = []
    """Further corrections. All factors are multiplied, so that truncated weights can be combined with a rejection."""

    @rule
    def check_further_corrections(self, at: str) -> Issues:
        """Refuse further corrections without a first one, and entries that correct nothing."""
        if self.also and self.kind == "none":
            yield ConfigIssue(
                f"{at}.kind", f"is none, and {at}.also is set. Name the first one here."
            )
        for index, part in enumerate(self.also):
            if part.kind == "none":
                yield ConfigIssue(
                    f"{at}.also.{index}.kind",
                    "is none. Name one, or leave the entry out.",
                )


class DynamicSamplingConfig(Section):
    """`algorithm.dynamic_sampling` (DAPO): replaces groups whose responses all score alike."""

    metric: Text | None = None
    """Keep a group only if its responses differ in this metric: accuracy, reward (the weighted sum), or one reward by
    its name. Each further round costs another generation. null: keep every group."""
    max_rounds: Positive = 4
    """Maximum number of generation rounds in one step."""
    prompts_per_round: Positive | None = None
    """Prompts in each round. null: data.prompts_per_step in the first round, then as many as are still missing."""
    if_short: Literal["fill", "stop"] = "fill"
    """Action if max_rounds did not give enough groups. fill: use some groups whose responses do not differ. stop:
    end the run."""

    @rule
    def check_metric(self, at: str) -> Issues:
        """Refuse settings of dynamic sampling without a metric."""
        if self.metric is None:
            yield from self.unused(at, f"{at}.metric is null. Use metric: accuracy.")


class DistillationConfig(Section):
    """`algorithm.distillation`: the actor learns a teacher's whole distributions on its own responses.

    The teacher is the frozen `reference` (`reference.path`).
    """

    divergence: str | None = None
    """Distance between actor and teacher, computed per token over the whole vocabulary: forward_kl, reverse_kl,
    jensen_shannon, or module:function. null: the default of algorithm.name; only gkd has one."""
    options: Passthrough = {}
    """Options of the divergence, such as beta."""
    top_k: Positive | None = None
    """Compare only this many of the teacher's likeliest tokens. Both distributions are renormalised over them. null:
    the whole vocabulary."""
    coef: PositiveFloat = 1.0
    """Factor of the divergence in the policy loss."""


class AlgorithmConfig(Section):
    """`algorithm`: the algorithm, its parts and their options."""

    name: AlgorithmName = "ppo"
    """Preset for advantage, policy_loss and loss_aggregation. A key that is set overrides the preset. ppo trains a
    critic and uses GAE (arXiv 1707.06347). grpo compares the responses of a group and needs no critic (arXiv
    2402.03300)."""
    advantage: str | None = None
    """Advantage estimator: a registered name, or module:function. Its parameters decide whether the run needs a critic
    or a reference. null: the estimator of `name`."""
    advantage_options: Passthrough = {}
    """Options of the advantage estimator. An unknown option is an error."""
    policy_loss: str | None = None
    """Policy loss: a registered name, or module:function. null: the loss of `name`."""
    policy_loss_options: Passthrough = {}
    """Options of the policy loss, and of its token selector if it has one. An unknown option is an error."""
    token_selector: str | None = None
    """Selects the tokens that a policy loss with a parameter `selected` treats separately: kl_cov, clip_cov, or
    module:function. null: the selector of the policy loss."""
    group_size: Several = 1
    """Number of responses per prompt. A step generates data.prompts_per_step times this many samples. grpo and other
    group estimators need at least 2; larger groups give a better baseline and cost more generation."""
    opponent_beta: Fraction | None = None
    """For advantage nash_md with rollout.engine: hf. The second half of each group are opponents, which do not train.
    They are sampled from the geometric mixture policy^(1 - beta) reference^beta. 0: the policy plays against itself. 1:
    against the reference. null: no opponents."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replace groups whose responses all score the same, because they have no gradient."""
    rollout_filter: Annotated[str, known_or_own(FILTERS, "module:function")] | None = (
        None
    )
    """Choose which samples train: best_and_worst or best_and_random of each group (PF-PPO, arXiv 2409.06957), or
    module:function, which gets the batch and its scores and returns a boolean per sample. Every rank then reads the
    whole batch. null: all samples train."""
    gamma: Fraction = 1.0
    """Discount per token, for estimators that have one."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation (ppo). Lower values reduce variance and rely more on the critic."""
    clip_range: PositiveFloat | None = None
    """Clip the policy ratio to 1 - clip_range .. 1 + clip_range. Smaller values limit how far one step moves the
    policy. null: the default of the loss, 0.2 for ppo_clip."""
    clip_range_high: PositiveFloat | None = None
    """Separate upper limit, 1 + clip_range_high (arXiv 2503.14476). A larger one lets unlikely tokens grow and slows
    the loss of entropy. null: clip_range."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights for samples whose engine log-probs differ from the trainer's."""
    value_loss: str = "clipped"
    """Loss of the critic: clipped, or module:function."""
    value_loss_options: Passthrough = {}
    """Options of the value loss."""
    value_clip_range: PositiveFloat | None = 0.2
    """How far a value may move in one step before its loss is clipped. null: no clipping."""
    value_loss_coef: PositiveFloat = 1.0
    """Factor of the value loss (ppo). With a critic of its own it scales the critic's gradient; with
    critic.share_backbone it weighs the value loss against the policy loss."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy loss. With `entropy_target` this is only the initial value."""
    entropy_target: PositiveFloat | None = None
    """Entropy per token, in nats, that the weight is adjusted towards. The weight rises while the entropy is below the
    target and is 0 while it is above. Skywork-OR1 uses 0.2 (arXiv 2505.22312). null: the weight is fixed."""
    entropy_step: PositiveFloat = 0.005
    """Change of the adaptive weight per step. Used only with `entropy_target`."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Give the gradient of the policy loss only to this share of a mini-batch's tokens: those with the highest entropy
    before the updates of the step. arXiv 2506.01939 uses 0.2. null: all tokens."""
    positive_coef: NonNegativeFloat = 0.0
    """Weight of a cross-entropy loss on correct responses, added to the policy loss. VAPO uses 0.1 (arXiv
    2504.05118)."""
    kl: KLConfig = KLConfig()
    """Penalty for moving away from the reference model."""
    distillation: DistillationConfig = DistillationConfig()
    """Distillation from a teacher over the whole vocabulary (arXiv 2306.13649)."""
    num_epochs: Several = 1
    """Passes over the samples of one step. Above 1, samples are used off-policy and old log-probs cost one more forward
    pass."""
    num_mini_batches: Positive = 1
    """Optimizer steps in one epoch. Must divide the number of samples in a step. Above 1, old log-probs cost one more
    forward pass. Responses to one prompt stay in one mini-batch if its size allows."""
    normalize_advantages: bool = True
    """Shift and scale the advantages over all tokens of a step (ppo)."""
    normalize_by_std: bool = True
    """Divide advantages by the standard deviation of the group (grpo)."""
    loss_aggregation: str | None = None
    """How token losses are averaged over the global mini-batch: token_mean, token_sum, seq_mean_token_mean,
    seq_mean_token_sum, fixed_length, or module:function. token_mean weighs long responses more than seq_mean_token_mean
    does. null: the aggregation of `name`."""
    loss_length: Positive | None = None
    """Number of tokens that fixed_length divides by, such as rollout.sampling.max_tokens."""
    bootstrap_truncated: bool = False
    """For gae and turn_gae: treat a response that reached the length limit as unfinished, and add the critic's value
    after its last token. Use it for rewards per token with gamma below 1. A score of the whole response already covers
    a truncated response; with gamma 1, responses can then grow without bound."""
    critic_warmup_steps: NonNegative = 0
    """Number of first steps in which only the critic is updated (ppo). Generation and scoring cost the same in them."""

    @property
    def advantage_name(self) -> str:
        """Name of the advantage estimator: a registered one, or module:function."""
        return self.advantage or PRESETS[self.name].advantage

    @property
    def policy_loss_name(self) -> str:
        """Name of the policy loss: a registered one, or module:function."""
        return self.policy_loss or PRESETS[self.name].policy_loss

    @property
    def token_selector_name(self) -> str:
        """Name of the token selector, for a policy loss that reads `selected`: a registered one, or module:function."""
        return self.token_selector or self.policy_loss_name

    @property
    def preset_loss_options(self) -> Mapping[str, float]:
        """Options that `name` sets for its own policy loss. Empty if another policy loss is configured."""
        return PRESETS[self.name].loss_options if self.policy_loss is None else {}

    @property
    def divergence_name(self) -> str | None:
        """Name of the divergence from the teacher: a registered one, or module:function. None: no teacher."""
        return self.distillation.divergence or PRESETS[self.name].divergence

    @property
    def aggregation_name(self) -> str:
        """Name of the loss aggregation: a registered one, or module:function."""
        return self.loss_aggregation or PRESETS[self.name].aggregation

    @property
    def wants_on_policy(self) -> bool:
        """Return whether the policy loss is correct only for samples of the current policy."""
        return (
            self.policy_loss_name in WITHOUT_RATIO
            and self.advantage_name not in NOT_OF_SAMPLES
        )

    def estimator(self) -> Registered | None:
        """Return the signature of the advantage estimator, or None if it is unknown."""
        return find_function("advantage_estimators", self.advantage_name)

    @rule
    def check_advantage(self, at: str) -> Issues:
        """Refuse an unknown advantage estimator, and inputs and options that it cannot have."""
        name = self.advantage_name
        yield from function_and_option_issues(
            f"{at}.advantage",
            "advantage_estimators",
            name,
            ESTIMATOR_INPUTS,
            f"{at}.advantage_options",
            self.advantage_options,
        )
        estimator = self.estimator()
        if estimator is not None:
            yield from self._unread_by_estimator(at, estimator)

    def _unread_by_estimator(self, at: str, estimator: Registered) -> Issues:
        """Yield keys that this estimator does not read, and options that are set by a key of the section too."""
        name = self.advantage_name
        # Key -> whether the estimator reads it.
        is_read = {
            "gamma": "gamma" in estimator.options,
            "lam": "lam" in estimator.options,
            "normalize_by_std": "normalize_std" in estimator.options,
            "normalize_advantages": "values" in estimator.inputs,
            "bootstrap_truncated": "last_values" in estimator.optional_inputs,
        }
        for key, value in self.changed(*is_read).items():
            option = "normalize_std" if key == "normalize_by_std" else key
            if not is_read[key]:
                text = f"found {yaml_text(value)}, which {name} does not read. Leave it out, or use another estimator."
                yield ConfigIssue(f"{at}.{key}", text, involves=BY_NAME)
            elif option in self.advantage_options:
                yield _set_twice(at, f"advantage_options.{option}", key)

    @rule
    def check_group_size(self, at: str) -> Issues:
        """Refuse groups that are too small for what compares the responses of a group."""
        size = self.group_size
        estimator = self.estimator()
        if estimator is not None and "group_ids" in estimator.inputs and size < 2:
            text = f"found {size}; {self.advantage_name} compares the responses of a group and needs at least 2."
            yield ConfigIssue(f"{at}.group_size", text, involves=BY_NAME)
        if self.dynamic_sampling.metric is not None and size < 2:
            text = f"found {size}; {at}.dynamic_sampling keeps groups whose responses differ, which needs at least 2."
            yield ConfigIssue(
                f"{at}.group_size", text, involves=(f"{at}.dynamic_sampling.metric",)
            )
        if self.rollout_filter in FILTERS and size < 3:
            text = f"found {yaml_text(self.rollout_filter)}, which keeps two responses of each group, and "
            text += f"{at}.group_size={size}: nothing is dropped. Use 3 or more."
            yield ConfigIssue(
                f"{at}.rollout_filter", text, involves=(f"{at}.group_size",)
            )

    @rule
    def check_kept_responses(self, at: str) -> Issues:
        """Refuse an estimator that keeps more responses than a group has, or all of them."""
        estimator = self.estimator()
        size = self.group_size
        reasons = {
            "k": "pass@k needs k responses",
            "keep": "so many responses of a group are kept",
        }
        for option, reason in reasons.items():
            count = self.advantage_options.get(option)
            is_option = estimator is not None and option in estimator.options
            if is_option and isinstance(count, int) and count > size > 1:
                yield ConfigIssue(
                    f"{at}.advantage_options.{option}",
                    f"found {count}; {reason}, and {at}.group_size={size}.",
                    involves=(f"{at}.group_size",),
                )
        options = self.advantage_options
        keeps_all = options.get("keep") == size and options.get("right_from") is None
        if self.advantage_name == "raft" and keeps_all:
            yield ConfigIssue(
                f"{at}.advantage_options.keep",
                f"found {size}, all of the group: nothing is rejected, and the policy learns to stay as it is. Keep "
                "fewer, or set right_from.",
                involves=(f"{at}.group_size",),
            )

    @rule
    def check_penalty_in_reward(self, at: str) -> Issues:
        """Refuse a KL in the reward of an estimator that does not read it, or that compares it with a threshold."""
        estimator = self.estimator()
        if estimator is None or self.kl.place != "reward":
            return
        name = self.advantage_name
        if not {"token_rewards", "rewards"} & set(estimator.inputs):
            text = f"found reward, but {name} reads neither rewards nor token_rewards. Use in: loss."
            yield ConfigIssue(f"{at}.kl.in", text, involves=BY_NAME)
        has_threshold = (
            name == "pass_at_k" or self.advantage_options.get("right_from") is not None
        )
        if "right_from" in estimator.options and has_threshold:
            text = f"found reward, and {name} asks whether a reward reaches right_from: with the penalty in it a right "
            yield ConfigIssue(
                f"{at}.kl.in",
                f"{text}response counts as wrong. Use in: loss.",
                involves=BY_NAME,
            )

    @rule
    def check_policy_loss(self, at: str) -> Issues:
        """Refuse an unknown policy loss, and options that it cannot have."""
        name = self.policy_loss_name
        key = f"{at}.policy_loss"
        yield from function_issues(
            key, "policy_losses", name, LOSS_INPUTS, optional=OPTIONAL_LOSS_INPUTS
        )
        loss = find_function("policy_losses", name)
        if loss is None:
            return
        yield from self._selector_issues(at, loss)
        selector = self._selector(loss)
        both = loss
        if selector is not None:
            required = (*loss.required, *selector.required)
            both = replace(
                loss, options=loss.options | selector.options, required=required
            )
            yield from option_issues(
                f"{at}.policy_loss_options", name, self.policy_loss_options, both
            )
        yield from self._clip_issues(at, both.options)
        yield from self._dual_clip_issues(at, loss)

    def _selector(self, loss: Registered) -> Registered | None:
        """Return the signature of the loss's token selector: empty without one, and None if it is unknown."""
        if "selected" not in loss.inputs:
            return Registered()
        return find_function("token_selectors", self.token_selector_name)

    def _selector_issues(self, at: str, loss: Registered) -> Issues:
        """Yield mistakes in the token selector of a policy loss."""
        loss_name = self.policy_loss_name
        name = self.token_selector_name
        if "selected" not in loss.inputs:
            if self.token_selector is not None:
                text = f"found {yaml_text(self.token_selector)}, but {loss_name} does not read selected. Leave it out."
                yield ConfigIssue(f"{at}.token_selector", text, involves=BY_LOSS)
        elif self.token_selector is None and name not in registered("token_selectors"):
            text = f"found {yaml_text(name)}, which reads selected, and has no selector of its own. Name one: "
            yield ConfigIssue(f"{at}.policy_loss", f"{text}{at}.token_selector.")
        else:
            yield from function_issues(
                f"{at}.token_selector", "token_selectors", name, SELECTOR_INPUTS
            )

    def _clip_issues(self, at: str, options: Mapping[str, Any]) -> Issues:
        """Yield mistakes in the clip ranges, which are options of the policy loss with keys of their own."""
        name = self.policy_loss_name
        ranges = (
            ("clip_range", "clip_low", self.clip_range),
            ("clip_range_high", "clip_high", self.clip_range_high),
        )
        for key, option, value in ranges:
            if value is None:
                continue
            if option not in options:
                text = f"found {value}, but {name} has no {option}. Leave it out; {name} has: "
                known = listed(sorted(options)) or "no options"
                yield ConfigIssue(f"{at}.{key}", f"{text}{known}.", involves=BY_LOSS)
                continue
            if option in self.policy_loss_options:
                yield _set_twice(at, f"policy_loss_options.{option}", key)
            if expected := out_of_range(option, value):
                yield ConfigIssue(
                    f"{at}.{key}",
                    f"found {value}; as {option} of {name} expected {expected}.",
                )

    def _dual_clip_issues(self, at: str, loss: Registered) -> Issues:
        """Yield a mistake if the floor of a dual clip cuts off tokens that the upper clip lets through."""
        if "clip_dual" not in loss.options:
            return
        options = self.policy_loss_options
        high = options.get("clip_high", self.clip_range_high or self.clip_range or 0.2)
        dual = options.get("clip_dual", 3.0)
        if (
            isinstance(dual, int | float)
            and isinstance(high, int | float)
            and dual <= 1.0 + high
        ):
            yield ConfigIssue(
                f"{at}.policy_loss_options.clip_dual",
                f"found {dual}; expected above 1 + clip_high, {1.0 + high:g}: below it the floor would cut off tokens "
                "that the clip lets through.",
                involves=(f"{at}.clip_range", f"{at}.clip_range_high"),
            )

    @rule
    def check_epochs(self, at: str) -> Issues:
        """Refuse a second pass over samples with a policy loss that is correct for the sampling policy alone."""
        if self.wants_on_policy and self.num_epochs > 1:
            text = f"found {self.num_epochs}, but {self.policy_loss_name} has no ratio to the policy that sampled: in "
            text += "a second pass its gradient is no longer that of the expected reward, and nothing bounds how far "
            yield ConfigIssue(
                f"{at}.num_epochs", f"{text}it goes. {WITH_RATIO}", involves=BY_LOSS
            )

    @rule
    def check_correction(self, at: str) -> Issues:
        """Refuse a correction for a policy loss whose ratio is to the engine's policy already."""
        correction = self.correction
        loss = find_function("policy_losses", self.policy_loss_name)
        reads_engine = loss is not None and "rollout_log_probs" in loss.inputs
        kinds = {part.kind for part in (correction, *correction.also)}
        if reads_engine and kinds - {"none", "off_policy_mask", "reject"}:
            text = f"found {yaml_text(correction.kind)}; the ratio of {self.policy_loss_name} is to the engine's policy"
            yield ConfigIssue(
                f"{at}.correction.kind", f"{text} already. Use none.", involves=BY_LOSS
            )

    @rule
    def check_value_loss(self, at: str) -> Issues:
        """Refuse an unknown value loss, its options, and its settings for an estimator without a critic."""
        estimator = self.estimator()
        if estimator is None:
            return
        if "values" not in estimator.inputs:
            for key, value in self.changed(*OF_CRITIC).items():
                text = f"found {yaml_text(value)}, but {self.advantage_name} has no critic, and so no value loss. "
                text += "Leave it out, or use an estimator with one: advantage: gae."
                yield ConfigIssue(f"{at}.{key}", text, involves=BY_NAME)
            return
        name = self.value_loss
        yield from function_and_option_issues(
            f"{at}.value_loss",
            "value_losses",
            name,
            VALUE_LOSS_INPUTS,
            f"{at}.value_loss_options",
            self.value_loss_options,
        )
        loss = find_function("value_losses", name)
        if loss is None:
            return
        if self.changed("value_clip_range") and "clip_range" in self.value_loss_options:
            yield _set_twice(at, "value_loss_options.clip_range", "value_clip_range")
        elif self.changed("value_clip_range") and "clip_range" not in loss.options:
            text = f"found {yaml_text(self.value_clip_range)}, but {name} has no clip_range. Leave it out."
            yield ConfigIssue(
                f"{at}.value_clip_range", text, involves=(f"{at}.value_loss",)
            )

    @rule
    def check_aggregation(self, at: str) -> Issues:
        """Refuse an unknown aggregation of token losses, and a length that it does not read."""
        name = self.aggregation_name
        yield from function_issues(
            f"{at}.loss_aggregation",
            "aggregations",
            name,
            AGGREGATION_INPUTS,
            settable=("max_tokens",),
        )
        aggregation = find_function("aggregations", name)
        if (
            self.loss_length is not None
            and aggregation is not None
            and "max_tokens" not in aggregation.options
        ):
            text = f"found {self.loss_length}, which {name} does not read. Leave it out, or use loss_aggregation: "
            yield ConfigIssue(
                f"{at}.loss_length", f"{text}fixed_length.", involves=BY_AGGREGATION
            )

    @rule
    def check_entropy_step(self, at: str) -> Issues:
        """Refuse the speed of an adaptive entropy bonus if the bonus is fixed."""
        if self.entropy_target is None and self.changed("entropy_step"):
            text = f"found {self.entropy_step}, but {at}.entropy_target is null: the weight is fixed. Set a target."
            yield ConfigIssue(f"{at}.entropy_step", text)

    @rule
    def check_distillation(self, at: str) -> Issues:
        """Refuse an unknown divergence from the teacher, its options, and settings without a divergence."""
        key = f"{at}.distillation"
        name = self.divergence_name
        options = self.distillation.options
        if name is None:
            yield from self.distillation.unused(
                key, f"{key}.divergence is null. Use jensen_shannon."
            )
            return
        yield from function_and_option_issues(
            f"{key}.divergence",
            "divergences",
            name,
            DIVERGENCE_INPUTS,
            f"{key}.options",
            options,
        )
        beta = options.get("beta")
        if (
            name == "jensen_shannon"
            and isinstance(beta, int | float)
            and not 0 < beta < 1
        ):
            text = f"found {beta}; expected above 0 and below 1. At 0 it is forward_kl, at 1 reverse_kl: name these."
            yield ConfigIssue(f"{key}.options.beta", text)

    @rule
    def check_opponents(self, at: str) -> Issues:
        """Refuse opponents for another advantage than nash_md, and settings under which they cannot be compared."""
        key = f"{at}.opponent_beta"
        name = self.advantage_name
        if (self.opponent_beta is None) != (name != "nash_md"):
            text = f"found {yaml_text(self.opponent_beta)}, and the advantage is {name}: only nash_md compares with "
            yield ConfigIssue(key, f"{text}opponents.", involves=(f"{at}.advantage",))
        if self.opponent_beta is None or name != "nash_md":
            return
        if self.group_size % 2 == 1:
            text = f"found {self.group_size}, and with {key} half of each group are opponents. Use an even number."
            yield ConfigIssue(f"{at}.group_size", text, involves=(key,))
        if self.kl.place == "reward":
            text = f"found reward; with {key} the penalty would count in who is preferred. Use in: loss, kind: k1, "
            yield ConfigIssue(
                f"{at}.kl.in", f"{text}score_function: true.", involves=(key,)
            )

    def advice(self, at: str) -> list[str]:
        """Return warnings about settings that run, and whose result is probably not what is wanted."""
        warnings = []
        if self.wants_on_policy and self.num_mini_batches > 1:
            warnings.append(
                f"{at}.num_mini_batches={self.num_mini_batches}: {self.policy_loss_name} has no ratio to the policy "
                "that sampled, so from the second update of a step on its gradient is off-policy and nothing corrects "
                f"it. {WITH_RATIO}"
            )
        if self.bootstrap_truncated and self.gamma == 1.0:
            warnings.append(
                f"{at}.bootstrap_truncated=true with {at}.gamma=1: a response that is cut off earns its score and the "
                "value of what follows it, so values grow without bound once responses learn to be cut off. Lower "
                "gamma, or leave it out."
            )
        return warnings


def _set_twice(at: str, option: str, key: str) -> ConfigIssue:
    """Return a mistake for an option that a key of the section sets as well."""
    return ConfigIssue(
        f"{at}.{option}", f"is set, and so is {at}.{key}. Use one of the two."
    )
