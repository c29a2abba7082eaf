"""Settings of each algorithm's learning curve: the same for all, except those that its name leaves open."""

from __future__ import annotations

from pathlib import Path

STEPS = 100
GROUP = 8  # responses to a prompt, as in the quickstart
# Those that are paid for one right response in several, and one to compare them with:
# pass@8 is measured as well.
OF_GROUPS = ("grpo", "pass_at_k", "best_of_group")
# The quickstart's recipe on one process, with half of its samples a step and without a
# KL penalty, which not every estimator can read.
COMMON = [
    "run.nproc=1",
    "run.log_with=jsonl",
    "actor.tp=1",
    "rollout.engine=hf",
    "data.prompts_per_step=32",
    "algorithm.kl={in: none, coef: 0.0}",
    "algorithm.num_mini_batches=2",
    f"trainer={{steps: {STEPS}, validate_every: 20}}",
    "checkpoint={export_hf: false, async_save: false, resume: auto}",
]
TURNS = Path(__file__).with_name("learning_curves_turns.py")
# The same rewards, paid turn by turn: see there.
TURN_BY_TURN = [
    f"environment={{name: '{TURNS}:DigitsInTurns', max_turns: 6, max_turn_tokens: 2}}",
    f"reward=[{{name: whole, function: '{TURNS}:whole_answer'}}]",
]
# What a name alone leaves open.
ALGORITHMS: dict[str, list[str]] = {
    "ppo": [],
    "grpo": [],
    "dr_grpo": ["algorithm.loss_length=12"],
    "dapo": ["algorithm.dynamic_sampling={metric: accuracy, max_rounds: 3}"],
    "gspo": [],
    "sapo": [],
    "cispo": [],
    "gmpo": [],
    "dppo_tv": [],
    "dppo_kl": [],
    "clip_cov": [],
    "kl_cov": [],
    "rloo": [],
    "remax": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "opo": [],
    "gpg": [],
    "gdpo": [],
    "pass_at_k": ["algorithm.advantage_options={k: 4}"],
    "best_of_group": [],
    "optimal_token_baseline": [],
    "prime": [],
    "raft": [],
    "distillation": [],
    "gkd": [],
    "turn_ppo": TURN_BY_TURN,
    "turn_grpo": TURN_BY_TURN,
}
IN_TURNS = ("turn_ppo", "turn_grpo")
# Who learns from a model that another algorithm has made.
TAUGHT, TEACHER = ("distillation", "gkd"), "ppo"
