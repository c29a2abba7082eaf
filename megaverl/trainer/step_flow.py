"""Training step as a flow of operators, for `megaverl flow show` and for the functions of `trainer.operators`.

The program (`program.py`) runs a step. It runs it operator by operator
(`program.flow_step`) only if functions of `trainer.operators` add operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from megaverl.config import Config
from megaverl.config.grids import is_placed, resolve_placement, role_grids, used_roles
from megaverl.dataflow import DataFlow, Operator
from megaverl.dataflow.plan import CompiledFlow, Places
from megaverl.plugins import call_object
from megaverl.rollout.environments import agents_of
from megaverl.trainer.elastic_agent import default_nproc
from megaverl.trainer.mix import name_of_mix
from megaverl.trainer.role_groups import AGENT
from megaverl.trainer.roles import Roles
from megaverl.trainer.step import RLStep
from megaverl.trainer.stored_rollouts import RolloutFolder


def make_flow(step: RLStep, places: Places | None = None) -> DataFlow:
    """Compile the flow of a step with the operators that `trainer.operators` adds. It is given `prompts` and `step`.

    Roles that a configuration does not use (critic, reference) have no operators. The
    roles are accessed only when an operator runs, so a flow can be compiled without
    them.

    Args:
        places: ranks of each role, or None if all roles share all ranks.

    Raises:
        ConfigError: a function does not exist, or the flow is not valid with the operators that it added.
    """
    config = step.config
    flow = DataFlow(_sampling(step))
    if config.environment.agents == "own":
        for agent in agents_of(str(config.environment.name)):
            inputs = ("rollouts", "scores", "step")
            flow.add_operator(
                Operator(AGENT + agent, _train_agent, inputs, (), role="actor")
            )
    else:
        for operator in training_operators(step, places):
            flow.add_operator(operator)
    before = ("reshard",) if step.replayed is None else ()
    for index in range(len(config.mix)):
        update = Operator(
            name_of_mix(config, index),
            partial(_update_mix, step, index),
            ("rollouts", "scores", "step"),
            (),
            role="actor",
        )
        flow.add_operator(update, after="actor_update", before=before)
    for name in config.trainer.operators:
        call_object(name, "trainer.operators", flow)
    return flow.compile(given=("prompts", "step"), places=places)


def make_plan(config: Config, world_size: int | None = None) -> CompiledFlow:
    """Return the compiled flow of the trainer for this configuration, without creating any role.

    Args:
        world_size: number of ranks of the job, for roles on separate ranks. None: `run.nproc`, or as many as needed.
    """
    places = None
    if is_placed(config):
        size = world_size or config.run.nproc or default_nproc(config, "train")
        grids = role_grids(config, used_roles(config, "train"))
        places = resolve_placement(config.placement, grids, size).ranks
    replay = config.trainer.replay_rollouts
    no_roles = cast(Roles, None)
    step = RLStep(config, no_roles, RolloutFolder(replay) if replay else None)
    return make_flow(step, places).plan


def _sampling(step: RLStep) -> Iterator[Operator]:
    """Yield the operators that make a step's samples."""
    is_replay = step.replayed is not None
    source = step.replay if is_replay else step.generate
    of_rollout: str | tuple[str, ...] = "rollout"
    of_reward: str | tuple[str, ...] = "reward"
    # Samples from dynamic sampling or from a replay folder are available on the ranks
    # of both roles.
    if is_replay or step.config.samples_in_rounds:
        of_rollout, of_reward = ("reward", "rollout"), ("rollout", "reward")
    yield Operator(
        "rollout", source, ("prompts", "step"), ("rollouts",), role=of_rollout
    )
    yield Operator("reward", step.score, ("rollouts",), ("scores",), role=of_reward)


def training_operators(
    step: RLStep, places: Places | None = None
) -> Iterator[Operator]:
    """Yield the operators that train on a step's samples."""
    config = step.config
    signals = list(_signals(step))
    yield from signals
    # Each signal is a value of the advantages, except those that only lead to another.
    names = [name for signal in signals for name in signal.gives if name != "greedy"]
    inputs = ("rollouts", "scores", *names)
    yield Operator("advantages", step.advantages, inputs, ("experience",), role="actor")
    inputs = ("experience", "step")
    actor = Operator(
        "actor_update", step.update_actor, inputs, ("updated",), role="actor"
    )
    updates = [actor]
    if config.uses_critic:
        critic = Operator(
            "critic_update", step.update_critic, inputs, (), role="critic"
        )
        # If both update on the same ranks with `reshard.overlap`, the actor goes first.
        # Its weights can then be transferred while the critic trains.
        is_apart = places is not None and (
            tuple(places["critic"]) != tuple(places["actor"])
        )
        is_actor_first = config.reshard.overlap and not is_apart
        updates = [actor, critic] if is_actor_first else [critic, actor]
    yield from updates
    if config.draft.train:
        inputs = ("rollouts", "step")
        yield Operator("draft_update", step.update_draft, inputs, (), role="actor")
    if step.replayed is None:
        yield Operator(
            "reshard", step.reshard, ("updated",), (), role=("actor", "rollout")
        )


def _signals(step: RLStep) -> Iterator[Operator]:
    """Yield the operators of what the advantages are computed from, in addition to samples and rewards."""
    config = step.config
    rollouts = ("rollouts",)
    of_critic = ("values", "last_values")
    if config.shares_backbone:
        score, scored = step.log_probs_and_values, ("old_log_probs", *of_critic)
        yield _actor_operator("old_log_probs", score, ("rollouts", "step"), scored)
    else:
        yield _actor_operator("old_log_probs", step.old_log_probs, ("rollouts", "step"))
    if config.uses_ref_log_probs:
        yield Operator("ref_log_probs", step.ref_log_probs, rollouts, role="reference")
    if config.uses_critic:
        yield Operator("values", step.values, rollouts, of_critic, role="critic")
    if config.estimator_reads("greedy_rewards"):
        yield Operator("greedy", step.greedy, ("rollouts", "step"), role="rollout")
        yield Operator(
            "greedy_rewards", step.greedy_rewards, ("greedy",), role="reward"
        )
    if config.estimator_reads("score_norms"):
        yield _actor_operator("score_norms", step.score_norms, rollouts)
    if config.estimator_reads("implicit_rewards"):
        inputs = ("rollouts", "scores", "ref_log_probs")
        yield _actor_operator("implicit_rewards", step.implicit_rewards, inputs)


def _actor_operator(
    name: str,
    function: Any,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...] | None = None,
) -> Operator:
    return Operator(name, function, inputs, outputs, role="actor")


def _update_mix(operators: RLStep, index: int, **inputs: Any) -> None:
    operators.mix.update(index, **inputs)


def _train_agent(**inputs: Any) -> None:
    raise AssertionError("`program.flow_step` runs the training of an agent")
