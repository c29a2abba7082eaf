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
    """Where the penalty enters: in the reward of each token, in the loss, or nowhere."""
    kind: str | None = None
    """Estimator of the KL (joschu.net/blog/kl-approx.html): k1 (no gradient in a loss), k2, k3, abs, low_variance, or
    module:function. null: k3; k1 with score_function and in the reward, where no other one has the KL's gradient."""
    allow_biased: bool = False
    """In the reward: take a kind other than k1, whose gradient is not the KL's (arXiv 2510.01555)."""
    straight_through: bool = False
    """In the loss: the value of `kind`, with k2's gradient, that of the KL itself."""
    importance_weighted: bool = False
    """In the loss: times the token's ratio to the policy that sampled, as in DeepSeek-V3.2 (arXiv 2512.02556): with k1
    and k3 the gradient is that of the KL itself, for samples of an older policy too."""
    score_function: bool = False
    """In the loss: the gradient of the KL of whole responses, in which a token answers for those after it too
    (arXiv 2506.09477). Of k1."""
    coef: NonNegativeFloat = 0.0
    """Coefficient of the penalty; where an adaptive one starts."""
    target: PositiveFloat | None = None
    """KL per token, in nats, that coef is steered to (arXiv 1909.08593). null: coef is fixed."""
    gain: PositiveFloat = 0.1
    """How fast the adaptive coefficient moves, per step."""

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
    """none, token_truncate, token_mask, sequence_truncate, sequence_mask, geometric_mask, reject, off_policy_mask, or
    module:function."""
    low: float | None = None
    """Lower limit of the ratio; of reject, of the estimate in nats. null: the kind's own."""
    high: PositiveFloat | None = None
    """Upper limit of the ratio; of reject, of the estimate in nats; of off_policy_mask, nats per token. null: the
    kind's own."""
    options: Passthrough = {}
    """Other options, of reject estimator (k1, k2, k3: of the KL from the engine's policy) and over (token, or sum, mean
    or max of a response's tokens)."""


class CorrectionConfig(CorrectionPart):
    """`algorithm.correction`: factors that correct for the difference between the engine's policy and Megatron's."""

    also: list[CorrectionPart] = []
    """Further ones; all factors are multiplied. So truncated weights can go together with a rejection."""


class DynamicSamplingConfig(Section):
    """`algorithm.dynamic_sampling` (DAPO): replaces groups whose responses all score alike."""

    metric: Text | None = None
    """What a group's responses must differ in for it to be kept: accuracy, reward (the weighted sum), or one reward by
    its name. null: every group is kept."""
    max_rounds: Positive = 4
    """Most rounds of generation in one step."""
    prompts_per_round: Positive | None = None
    """Prompts of each round. null: data.prompts_per_step in the first, then as many as are missing."""
    if_short: Literal["fill", "stop"] = "fill"
    """Too few groups after max_rounds: fill takes some that are all alike, stop ends the run."""


class DistillationConfig(Section):
    """`algorithm.distillation`: the actor learns a teacher's whole distributions on its own responses.

    The teacher is the frozen `reference` (`reference.path`).
    """

    divergence: str | None = None
    """How far the actor is from the teacher, token by token over the whole vocabulary: forward_kl, reverse_kl,
    jensen_shannon, or module:function. null: that of name, which has one for gkd alone."""
    options: Passthrough = {}
    """Options of the divergence, such as beta."""
    top_k: Positive | None = None
    """Compare only the teacher's so many likeliest tokens; both distributions are scaled to sum to 1 over them. null:
    the whole vocabulary."""
    coef: PositiveFloat = 1.0
    """Factor on it in the policy's loss."""


class AlgorithmConfig(Section):
    """`algorithm`: the algorithm, its parts and their options."""

    name: AlgorithmName = "ppo"
    """Says what advantage, policy_loss and loss_aggregation leave open. ppo: critic, GAE (arXiv 1707.06347). grpo:
    groups, no critic (arXiv 2402.03300)."""
    advantage: str | None = None
    """Advantage estimator: a registered name, or module:function. null: that of name."""
    advantage_options: Passthrough = {}
    """Options of the advantage estimator."""
    policy_loss: str | None = None
    """Policy loss: a registered name, or module:function. null: that of name."""
    policy_loss_options: Passthrough = {}
    """Options of the policy loss, and of its token selector if it has one."""
    token_selector: str | None = None
    """Tokens that a policy loss which reads `selected` treats apart: kl_cov, clip_cov, or module:function. null: the
    policy loss's own."""
    group_size: Several = 1
    """Responses sampled for each prompt; grpo needs at least 2."""
    opponent_beta: Fraction | None = None
    """Of advantage nash_md, with rollout.engine: hf. The second half of each group are opponents, drawn token by token
    from the geometric mixture of policy and reference, policy^(1 - beta) reference^beta; they do not train. 0: the
    policy plays itself; 1: the reference. null: no opponents."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Refilling groups that tell nothing."""
    rollout_filter: Annotated[str, known_or_own(FILTERS, "module:function")] | None = None
    """Which samples train: best_and_worst or best_and_random of each group (PF-PPO, arXiv 2409.06957), or your own
    choice as module:function: called with the batch and its scores, it returns true or false for each. null: all."""
    gamma: Fraction = 1.0
    """Discount per token, where the estimator has one."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation (ppo)."""
    clip_range: PositiveFloat | None = None
    """The policy ratio is clipped to 1 - this .. 1 + this. null: the loss's own, 0.2 for ppo_clip."""
    clip_range_high: PositiveFloat | None = None
    """Another limit above 1 (arXiv 2503.14476). null: the same as clip_range."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights of samples that the engine drew."""
    value_loss: str = "clipped"
    """The critic's loss: clipped, or module:function."""
    value_loss_options: Passthrough = {}
    """Options of the value loss."""
    value_clip_range: PositiveFloat | None = 0.2
    """How far a value may move before its loss is clipped (clip_range of value_loss). null: no clip."""
    value_loss_coef: PositiveFloat = 1.0
    """Factor on the value loss (ppo)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy loss; where an adaptive one starts."""
    entropy_target: PositiveFloat | None = None
    """Entropy per token, in nats, that the weight is steered to: it rises while the entropy is below, and is 0 while it
    is above (Skywork-OR1, arXiv 2505.22312, has 0.2). null: it is fixed."""
    entropy_step: PositiveFloat = 0.005
    """How much the adaptive weight moves, per step."""
    top_entropy: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Only this share of a mini-batch's tokens, those of the highest entropy before the step's updates, have the policy
    loss's gradient; arXiv 2506.01939 has 0.2. null: all."""
    positive_coef: NonNegativeFloat = 0.0
    """Weight of the cross-entropy on correct responses beside the policy loss; VAPO (arXiv 2504.05118) has 0.1."""
    kl: KLConfig = KLConfig()
    """Penalty on leaving the reference model."""
    distillation: DistillationConfig = DistillationConfig()
    """A teacher over the whole vocabulary (arXiv 2306.13649)."""
    num_epochs: Several = 1
    """Passes over the samples of one step."""
    num_mini_batches: Positive = 1
    """Optimizer steps in one epoch; divides the samples of a step. Responses to one prompt lie in the same one, as far
    as its size allows."""
    normalize_advantages: bool = True
    """Shift and scale advantages over all tokens (ppo)."""
    normalize_by_std: bool = True
    """Divide by the group's standard deviation (grpo)."""
    loss_aggregation: str | None = None
    """How token losses are averaged over the global mini-batch: token_mean, token_sum, seq_mean_token_mean,
    seq_mean_token_sum, fixed_length, or module:function. null: that of name."""
    loss_length: Positive | None = None
    """Tokens that fixed_length divides by, such as rollout.sampling.max_tokens."""
    bootstrap_truncated: bool = False
    """For gae and turn_gae a response that the length limit cut off has not ended: what would have followed counts as
    the critic's value after its last token. For rewards that come token by token, with gamma below 1; a score of the
    whole response is the outcome of one that was cut off as well, and would count twice."""
    critic_warmup_steps: NonNegative = 0
    """First steps, in which only the critic is updated (ppo)."""

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
