"""`algorithm`: settings that turn rewards into gradients, and the parts of which each published algorithm is made."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from megaverl.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Passthrough,
    Positive,
    PositiveFloat,
    Section,
    Several,
    Text,
    known_or_own,
)

FILTERS = ("best_and_worst", "best_and_random")


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
        return self.kind or ("k1" if self.place == "reward" or self.score_function else "k3")

    @property
    def gradient(self) -> str:
        """Kind of gradient that `kl_loss` computes: straight_through, importance, score or value."""
        chosen = {"straight_through": self.straight_through, "importance": self.importance_weighted}
        return next((name for name, is_set in chosen.items() if is_set), "score" if self.score_function else "value")


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


class CorrectionConfig(CorrectionPart):
    """`algorithm.correction`: factors that correct for the difference between the engine's policy and Megatron's."""

    also: list[CorrectionPart] = []
    """Further corrections. All factors are multiplied, so that truncated weights can be combined with a rejection."""


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
    """What happens if max_rounds did not give enough groups. fill: use some groups whose responses do not differ. stop:
    end the run."""


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
    rollout_filter: Annotated[str, known_or_own(FILTERS, "module:function")] | None = None
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
