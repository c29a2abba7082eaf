"""`algorithm`: how rewards become gradients."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.section import Fraction, NonNegative, Positive, PositiveFloat, Section


class KLConfig(Section):
    """`algorithm.kl`: what keeps the policy near the reference model."""

    place: Literal["none", "reward", "loss"] = Field(
        default="none",
        alias="in",
        description="Where the penalty enters: in the reward of each token, in the loss, or nowhere.",
    )
    kind: Literal["k1", "k2", "k3"] = Field(
        default="k3",
        description="Estimator of the KL (joschu.net/blog/kl-approx.html). k1 has no gradient in a loss.",
    )
    coef: float = Field(default=0.0, ge=0, description="Coefficient of the penalty; where an adaptive one starts.")
    target: PositiveFloat | None = Field(
        default=None,
        description="KL per token, in nats, that coef is steered to (arXiv 1909.08593). null: coef is fixed.",
    )
    gain: PositiveFloat = Field(default=0.1, description="How fast the adaptive coefficient moves, per step.")


class AlgorithmConfig(Section):
    """`algorithm`."""

    name: Literal["ppo", "grpo"] = Field(
        default="ppo",
        description="ppo: critic, GAE (arXiv 1707.06347). grpo: groups, no critic (arXiv 2402.03300).",
    )
    group_size: Positive = Field(default=1, description="Responses sampled for each prompt; grpo needs at least 2.")
    gamma: Fraction = Field(default=1.0, description="Discount per token (ppo).")
    lam: Fraction = Field(default=0.95, description="Lambda of generalised advantage estimation (ppo).")
    clip_range: PositiveFloat = Field(default=0.2, description="The policy ratio is clipped to 1 - this .. 1 + this.")
    clip_range_high: PositiveFloat | None = Field(
        default=None, description="Another limit above 1 (arXiv 2503.14476). null: the same as clip_range."
    )
    value_clip_range: PositiveFloat | None = Field(
        default=0.2,
        description="How far a value may move before its loss is clipped (ppo). null: no clip.",
    )
    value_loss_coef: PositiveFloat = Field(default=1.0, description="Factor on the value loss (ppo).")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus in the policy loss.")
    kl: KLConfig = Field(default_factory=KLConfig, description="Penalty on leaving the reference model.")
    num_epochs: Positive = Field(default=1, description="Passes over the samples of one step.")
    num_mini_batches: Positive = Field(
        default=1, description="Optimizer steps in one epoch; divides the samples of a step."
    )
    normalize_advantages: bool = Field(default=True, description="Shift and scale advantages over all tokens (ppo).")
    normalize_by_std: bool = Field(default=True, description="Divide by the group's standard deviation (grpo).")
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = Field(
        default="token_mean", description="How token losses are averaged over the global mini-batch."
    )
    critic_warmup_steps: NonNegative = Field(
        default=0, description="First steps, in which only the critic is updated (ppo)."
    )
