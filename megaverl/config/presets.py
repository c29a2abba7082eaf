"""`algorithm.name`: what each published algorithm is made of. Every part can be set by itself as well."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

AlgorithmName = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "sapo",
    "cispo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "pass_at_k",
    "best_of_group",
    "optimal_token_baseline",
    "distillation",
    "gkd",
    "turn_ppo",
    "turn_grpo",
    "prime",
    "raft",
]


class Preset(NamedTuple):
    """Registered names: of the advantage estimator, the policy loss and the loss aggregation.

    loss_options: options of the policy loss, where they are not the function's own defaults.
    divergence: from a teacher, over the whole vocabulary.
    """

    advantage: str
    policy_loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    loss_options: Mapping[str, float] = MappingProxyType({})
    divergence: str | None = None


PRESETS: dict[AlgorithmName, Preset] = {
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
