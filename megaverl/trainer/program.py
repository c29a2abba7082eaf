"""Programs of a run: the training loop and its steps, written as ordinary async functions.

Only the coordinator's rank runs a program. It calls methods of worker groups, and every
rank serves these calls in the order in which they were made. A call returns
immediately. Awaiting it gives its result, which is either a small value or a reference
to a value that stays on the ranks. The same program runs whether roles share ranks or
have their own.

    train                               the loop
      take_step                         one step, its records, validation and checkpoint
        policy_step                     sample, train_on, send_weights
        asynchronous_step               the same, on samples that were generated ahead of training
        given_step                      the same, on samples that a Python program provides
        flow_step                       the same, with the operators that the configuration adds
        agents_step                     sample, then train each agent of a game separately
    sample                              responses and their rewards
      sample_informative_groups         in rounds, with dynamic sampling
    train_on                            log-probs, values, advantages, updates
    finish_updates                      decisions over gradients that belong together
    send_weights                        new weights for the engines
    validate                            responses to held-out prompts and their rewards; tasks of harnesses
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from megaverl.controller.references import PendingCall, Ref
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.role_groups import (
    AGENT,
    Run,
    Samples,
    TrainedGroup,
    changes_prompts,
)
from megaverl.trainer.rollouts_ahead import EarlySamples
from megaverl.trainer.sample_rows import Fields
from megaverl.trainer.update_decisions import decide_together
from megaverl.workers.decisions import Rules
from megaverl.workers.reward import Scores


class RunLeft(Exception):
    """Signal that the run has saved a checkpoint and that its ranks exit before the last step."""


def until_left(
    program: Callable[[Run, int], Awaitable[None]],
) -> Callable[[Run, int], Coroutine[Any, Any, None]]:
    """Return a program that ends without an error when the run is left."""

    @functools.wraps(program)
    async def run_until_left(run: Run, step: int) -> None:
        try:
            await program(run, step)
        except RunLeft:
            return

    return run_until_left


@until_left
async def train(run: Run, first_step: int) -> None:
    """Run the remaining steps. After each step, validate, save or leave if that is due.

    Args:
        first_step: index of the next step, which is the number of steps completed before this start.
    """
    last_step = run.config.trainer.steps
    try:
        await begin(run, first_step)
        for step in range(first_step, last_step):
            await take_step(run, step)
            if step + 1 < last_step:
                await leave_if_asked(run)
    finally:
        if run.ahead is not None:
            # The task would otherwise start samples of further steps while the ranks
            # leave.
            run.ahead.stop()


async def begin(run: Run, first_step: int) -> None:
    """Run the initial validation if `trainer.validate_at_start` is set and no step has been taken."""
    if run.config.trainer.validate_at_start and first_step == 0 and run.validates:
        await validate(run, 0)
    await leave_if_asked(run)


async def take_step(run: Run, step: int) -> None:
    """Run one step, then report it, validate if due and save if due."""
    # Not awaited, because the engines may still be generating samples of a later step.
    run.session.begin_step(step)
    samples = await run.step(run, step)
    # These calls are not awaited one by one. Every rank executes them in the order in
    # which they are sent.
    run.recorder.take(*samples)
    run.session.report_step(step + 1)
    if run.validates and is_validation_due(run, step + 1):
        await validate(run, step + 1)
    await run.session.save_if_due(step + 1)


async def validate(run: Run, done: int) -> None:
    """Generate responses to the held-out prompts, score them and record the result. Evaluate the tasks of harnesses.

    Args:
        done: number of completed steps.
    """
    if run.config.data.validation:
        await validate_held_out(run, done)
    if run.evaluate_tasks is not None:
        await run.evaluate_tasks(run, done)


async def validate_held_out(run: Run, done: int) -> None:
    """Generate responses to the held-out prompts, score them and record the result."""
    responses = await run.rollout.generate_held_out()
    scores = await run.held_out_reward.score_held_out(responses)
    result = await run.rollout.measure_held_out(responses, scores)
    run.session.record_validation(done, result)


def is_validation_due(run: Run, done: int) -> bool:
    """Return whether the run validates after `done` steps."""
    trainer = run.config.trainer
    return done % trainer.validate_every == 0 or done == trainer.steps


async def policy_step(run: Run, step: int) -> Samples:
    """Run one step of PPO, GRPO, or another policy-gradient algorithm."""
    samples = await sample(run, step)
    updates = await train_on(run, step, samples)
    await send_weights(run, step, updates)
    return samples


async def asynchronous_step(run: Run, step: int) -> Samples:
    """Run one step on samples that the engines generated up to `max_staleness` steps ahead of training."""
    assert run.ahead is not None, "the engines' ranks are none of the actor's"
    rollouts, scores = await run.ahead.take(step)
    samples = Samples(rollouts, scores or await run.reward.score(rollouts, step))
    updates = await train_on(run, step, samples)
    await send_weights(run, step, updates)
    return samples


async def given_step(run: Run, step: int) -> Samples:
    """Run one step on a Python program's samples, while the engines generate those of the next step.

        engines    gen 0 | gen 1 | sync | .         | gen 2 | sync | .
        actor      .     | train 0 -----^           | train 1 -----^
        program    rollout, update ------, rollout, update --------,

    `rollout` of the next step then returns at once. The responses are those of the
    built-in run with max_staleness 1: the weights before a step's update generate the
    step after it.
    """
    samples = await sample(run, step)
    assert run.may_generate_next is not None, "chosen for rollout.async_rollout"
    if run.may_generate_next(step):
        # Sent before the updates, and thus before the new weights: the engines' ranks
        # execute calls in the order in which they are sent.
        run.next_rollouts = run.rollout.generate(step + 1)
    updates = await train_on(run, step, samples)
    await send_weights(run, step, updates)
    return samples


async def train_on(run: Run, step: int, samples: Samples) -> list[PendingCall[bool]]:
    """Compute log-probs, values and advantages, then start the updates.

    Roles that the algorithm does not use are None: GRPO has no critic, and a run
    without a KL term has no reference.

    Returns:
        The pending updates. Ranks are still working on them, and may report gradients (`finish_updates`).
    """
    config = run.config
    rollouts, scores = samples

    # Send all calls before awaiting any, so that different roles compute at the same
    # time. A rank that serves several of these roles executes their calls in this
    # order.
    signals: list[PendingCall[Ref[Fields]]] = [run.actor.old_log_probs(rollouts, step)]
    if run.reference is not None:
        signals.append(run.reference.log_probs(rollouts))
    if run.critic is not None:
        signals.append(run.critic.values(rollouts))
    if config.estimator_reads("greedy_rewards"):  # used by ReMax
        greedy = await run.rollout.generate_greedy(rollouts, step)
        signals.append(run.reward.score_greedy(greedy))
    if config.estimator_reads("score_norms"):  # used by the optimal baseline
        signals.append(run.actor.score_norms(rollouts))
    # PRIME learns from the reference's log-probs, which `signals[1]` refers to.
    if config.estimator_reads("implicit_rewards"):
        signals.append(run.actor.implicit_rewards(rollouts, scores, await signals[1]))
    experience = await run.actor.advantages(
        rollouts, scores, [await signal for signal in signals]
    )

    # Actor and critic train in parallel if they have separate ranks. The critic's
    # update is sent first, so that its samples leave the actor's ranks before these
    # start to train. On shared ranks with `reshard.overlap`, the actor trains first:
    # its new weights are transferred while the critic trains.
    updates: list[PendingCall[bool]] = []
    is_critic_last = (
        config.reshard.overlap and run.critic is not None and not run.is_critic_apart
    )
    if run.critic is not None and not is_critic_last:
        updates.append(run.critic.begin_update(rollouts, experience, step))
    updates.append(run.actor.begin_update(rollouts, experience, step))
    if run.critic is not None and is_critic_last:
        updates.append(run.critic.begin_update(rollouts, experience, step))
    for index in range(len(config.mix)):
        run.actor.update_mix(rollouts, scores, index, step)
    if config.draft.train:
        run.actor.update_draft(rollouts, step)
    return updates


async def finish_updates(run: Run, updates: Sequence[PendingCall[Any]]) -> None:
    """Decide on the gradients of all updates, and wait until the updates have ended."""
    rules = Rules.from_config(run.config)
    if run.is_critic_apart:
        await decide_together(updates, rules)
    else:
        # Updates on the same ranks run one after the other.
        for update in updates:
            await decide_together([update], rules)
    for update in updates:
        await update


async def send_weights(
    run: Run, step: int, updates: Sequence[PendingCall[bool]]
) -> None:
    """Finish the updates of a step and transfer the new weights to the engines.

    With `reshard.overlap`, the transfer starts while the updates are still running.
    """
    if run.config.reshard.overlap:
        await asyncio.gather(finish_updates(run, updates), transfer_weights(run, step))
    else:
        await finish_updates(run, updates)
        await transfer_weights(run, step)


async def transfer_weights(run: Run, step: int) -> None:
    """Transfer the actor's weights to the engines.

    Engines that generate ahead receive the weights only after they have begun all
    samples that the previous weights are to generate. A resumed run therefore generates
    every response with the same weights as an uninterrupted run.
    """
    if run.ahead is not None:
        await run.ahead.until_begun(step)
    if run.has_engines:
        # The engines already have the actor's weights while only the critic warms up.
        only_critic_trains = step < run.config.algorithm.critic_warmup_steps
        await run.actor.sync_weights(run.rollout, is_updated=not only_critic_trains)


async def sample_ahead(run: Run, step: int) -> EarlySamples:
    """Generate the samples of a later step, and score them if the reward ranks do not train meanwhile.

    Reward ranks that train would score at an unpredictable time, before or after an
    update of the model that scores. Two runs could then differ. In that case the
    rewards are left to the step itself.
    """
    if run.scores_ahead or run.has_rounds:
        return EarlySamples(*await sample(run, step))
    rollouts = await generate(run, step)
    await run.assign(rollouts)
    return EarlySamples(rollouts, None)


async def generate(run: Run, step: int) -> Ref[RolloutBatch]:
    """Return the responses of a step, from the engines or from the Python program that drives `PPOTrainer`.

    With `rollout.in_flight_updates` each response is generated in two parts, with a
    weight update in between.
    """
    if run.is_given:
        return await run.session.given(step)
    if not run.config.rollout.in_flight_updates:
        return await run.rollout.generate(step)
    assert run.ahead is not None, "the engines' ranks are none of the actor's"
    await run.rollout.begin_responses(step)
    await run.ahead.until_new_weights(step)
    return await run.rollout.finish_responses(step)


async def sample(run: Run, step: int) -> Samples:
    """Generate the responses of a step and score them.

    This is a safe point: if the run was asked to leave, it saves the samples made so
    far.

    Raises:
        RunLeft: the run saved a checkpoint and its ranks exit.
    """
    if run.has_rounds and step not in run.restored_steps:
        samples = await sample_informative_groups(run, step)
        await leave_if_asked(run, *samples)
        return samples
    if run.scores_arriving:
        # Sent before the generation, so that the reward ranks receive samples while the
        # engines still generate.
        run.reward.score_arriving(step)
    rollouts = await generate(run, step)
    await run.assign(rollouts)
    await leave_if_asked(run, rollouts)
    scores = await run.reward.score(rollouts, step)
    await run.deliver(rollouts, scores)
    await leave_if_asked(run, rollouts, scores)
    return Samples(rollouts, scores)


async def sample_informative_groups(run: Run, step: int) -> Samples:
    """Generate and score in rounds until enough groups have differing rewards.

    Source: dynamic sampling of DAPO, arXiv 2503.14476.
    """
    num_prompts = await run.rollout.begin_rounds(step)
    while num_prompts:
        rollouts = await run.rollout.generate_round(step, num_prompts)
        await run.assign(rollouts)
        scores = await run.reward.score(rollouts, step)
        num_prompts = await run.rollout.add_round(rollouts, scores, step)
    rollouts = await run.rollout.informative_rollouts(step)
    await run.assign(rollouts)
    scores = await run.rollout.informative_scores()
    await run.deliver(rollouts, scores)
    return Samples(rollouts, scores)


async def leave_if_asked(
    run: Run,
    rollouts: Ref[RolloutBatch] | None = None,
    scores: Ref[Scores] | None = None,
) -> None:
    """Save and end the program if a rank has received a signal to leave.

    Args:
        rollouts, scores: samples of the running step so far. The resumed run continues with them.

    Raises:
        RunLeft: the run has saved a checkpoint.
    """
    signal = run.controller.signal
    # Roles on separate ranks are left between steps, because their ranks may be working
    # on different steps.
    is_inside = rollouts is not None
    if not signal or (is_inside and not run.may_leave_inside):
        return
    await run.session.leave(signal, rollouts, scores)
    raise RunLeft


# Begins a run whose steps a Python program takes.
begin_given = until_left(begin)


@until_left
async def give_rollouts(run: Run, step: int) -> None:
    """Generate the responses of a step and copy them to every rank, for a Python program that trains on them."""
    rollouts = await run.rollout.generate(step)
    await leave_if_asked(run, rollouts)
    await run.session.share(rollouts)


@until_left
async def take_given_step(run: Run, step: int) -> None:
    """Run one step on responses that a Python program provides on every rank."""
    # The program would change the responses of a checkpoint once more when it goes on.
    run.may_leave_inside = False
    await take_step(run, step)
    if run.next_rollouts is not None:
        await run.session.share(await run.next_rollouts)
    if step + 1 < run.config.trainer.steps:
        await leave_if_asked(run)


async def agents_step(run: Run, step: int) -> Samples:
    """Run one step of a game in which each agent has its own actor and critic.

    Source: independent PPO, arXiv 2011.09533.
    """
    samples = await sample(run, step)
    for agent in run.agents.values():
        await agent.train(*samples, step)
    return samples


async def flow_step(run: Run, step: int) -> Samples:
    """Run the operators of the compiled flow, including those that `trainer.operators` adds, in order.

    An operator may replace a value that an earlier operator produced. Each name refers
    to the latest value.
    """
    operators = run.operators
    values = await start_of_flow(run, step)
    for name in await operators.begin(step, list(values)):
        values.setdefault(name, await operators.given(name))
    # Operators whose outputs exist, from a checkpoint or from dynamic sampling, do not
    # run again.
    remaining = [
        operator
        for operator in operators.plan.operators
        if not operator.gives or any(name not in values for name in operator.gives)
    ]
    trained: dict[str, TrainedGroup] = {"actor_update": run.actor}
    if run.critic is not None:
        trained["critic_update"] = run.critic
    num_updates = sum(operator.name in trained for operator in remaining)
    updates: list[PendingCall[Ref[Any]]] = []
    for operator in remaining:
        if operator.name == "reshard" and run.ahead is not None:
            await run.ahead.until_begun(step)
        agent = run.agents.get(operator.name.removeprefix(AGENT))
        if agent is not None:
            await agent.train(values["rollouts"], values["scores"], step)
            continue
        inputs = [values[name] for name in operator.takes]
        model = trained.get(operator.name)
        if model is not None:
            model.join_islands(step)
        reporting = () if model is None else model.reporting
        call = operators.call(operator.name, values.get("rollouts"), inputs, reporting)
        if model is not None:
            updates.append(call)
            is_last = len(updates) == num_updates
            if run.actor.reporting and (is_last or not run.is_critic_apart):
                await finish_updates(run, updates)
        # An operator without outputs (the critic's update) is not awaited. The critic
        # can then train in parallel with the actor.
        for name in operator.gives:
            values[name] = await operators.pick(await call, name)
        # Safe point: nothing has been trained yet.
        if operator.name in ("rollout", "reward"):
            await leave_if_asked(run, values["rollouts"], values.get("scores"))
    return Samples(values["rollouts"], values["scores"])


async def start_of_flow(run: Run, step: int) -> dict[str, Ref[Any]]:
    """Return the values that exist before the flow's operators run.

    These are the responses, and also their rewards after dynamic sampling or if rewards
    were computed ahead of training. The result is empty if an operator changes the
    prompts first, because the flow then generates the responses itself.
    """
    if run.ahead is not None:
        early = await run.ahead.take(step)
        return {"rollouts": early.rollouts} | (
            {"scores": early.scores} if early.scores is not None else {}
        )
    if run.has_rounds:
        samples = await sample(run, step)
        return {"rollouts": samples.rollouts, "scores": samples.scores}
    if changes_prompts(run.operators.plan) and not run.is_given:
        return {}
    rollouts = await generate(run, step)
    await run.assign(rollouts)
    await leave_if_asked(run, rollouts)
    return {"rollouts": rollouts}
