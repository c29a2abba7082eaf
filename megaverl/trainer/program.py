"""Programs of reinforcement learning: what happens in a run and in each of its steps, as ordinary async functions.

The coordinator's rank runs them. All ranks serve the calls that they make, in the order in which they make them. A call
returns at once; awaiting it gives its result: a small value, or a reference to a value that stays on the ranks. The
same text runs where roles share ranks and where they have ranks of their own.

    train                               the loop
      policy_step                       one step: sample, train_on, new weights for the engines
      asynchronous_step                 the same, on samples that were generated ahead
      flow_step                         the same, where operators were added to it
    sample                              responses and their rewards
      sample_informative_groups         in rounds, with dynamic sampling
    train_on                            log-probs, values, advantages, updates
"""

from __future__ import annotations

from megaverl.controller.references import PendingCall, Ref
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.role_groups import EarlySamples, Run, Samples, StepFlow
from megaverl.trainer.sample_rows import Fields
from megaverl.workers.reward import Scores


class RunLeft(Exception):
    """The run has saved, and its ranks leave before the last step."""


async def train(run: Run, first_step: int) -> None:
    """Take steps until the last one; after each, validate, save or leave where that is due.

    Args:
        first_step: steps that the run has behind it, from before it was interrupted.
    """
    last_step = run.config.trainer.steps
    try:
        if run.config.trainer.validate_at_start and first_step == 0:
            await run.session.validate(0)
        await leave_if_asked(run)
        for step in range(first_step, last_step):
            run.session.begin_step(step)  # not awaited: engines may be in the middle of later samples
            samples = await run.step(run, step)
            await run.recorder.take(*samples)
            await run.session.report_step(step + 1)
            await run.session.validate_if_due(step + 1)
            if await run.session.save_if_due(step + 1):
                raise RunLeft
            if step + 1 < last_step:
                await leave_if_asked(run)
    except RunLeft:
        return
    finally:
        if run.ahead is not None:
            run.ahead.stop()


async def policy_step(run: Run, step: int) -> Samples:
    """Take one step of PPO, GRPO, or another algorithm that follows the policy's gradient."""
    samples = await sample(run, step)
    is_updated = await train_on(run, step, samples)
    if run.has_engines:
        await run.actor.sync_weights(run.rollout, is_updated)
    return samples


async def asynchronous_step(run: Run, step: int) -> Samples:
    """Take one step on samples that the engines have generated up to `max_staleness` steps ahead.

    The engines receive the new weights once they have finished what the weights before are to generate, so a resumed
    run generates every response with the weights that an uninterrupted run does.
    """
    assert run.ahead is not None, "the engines' ranks are none of the actor's"
    rollouts, scores = await run.ahead.take(step)
    samples = Samples(rollouts, scores or await run.reward.score(rollouts, step))
    is_updated = await train_on(run, step, samples)
    await run.ahead.until_begun(step)
    await run.actor.sync_weights(run.rollout, is_updated)
    return samples


async def train_on(run: Run, step: int, samples: Samples) -> bool:
    """Compute what the advantages depend on, the advantages, and the updates.

    A role that the algorithm does without is None: GRPO has no critic, and without a KL term there is no reference.

    Returns:
        Whether the actor was updated; False while only the critic warms up.
    """
    config = run.config
    rollouts, scores = samples

    # The calls are sent at once. Ranks that several of them share take them in this order.
    signals: list[PendingCall[Ref[Fields]]] = [run.actor.old_log_probs(rollouts, step)]
    if run.reference is not None:
        signals.append(run.reference.log_probs(rollouts))
    if run.critic is not None:
        signals.append(run.critic.values(rollouts))
    if config.estimator_reads("greedy_rewards"):  # ReMax
        greedy = await run.rollout.generate_greedy(rollouts, step)
        signals.append(run.reward.score_greedy(greedy))
    if config.estimator_reads("score_norms"):  # the optimal baseline
        signals.append(run.actor.score_norms(rollouts))
    if config.estimator_reads("implicit_rewards"):  # PRIME, which learns from the reference's log-probs
        signals.append(run.actor.implicit_rewards(rollouts, scores, await signals[1]))
    experience = await run.actor.advantages(rollouts, scores, [await signal for signal in signals])

    # Sent at once: actor and critic train side by side where they have ranks of their own. With `reshard.overlap` the
    # actor comes first, and its new weights travel while the critic trains.
    updates: list[PendingCall[bool]] = []
    if run.critic is not None and not config.reshard.overlap:
        updates.append(run.critic.update(rollouts, experience, step))
    actor_update = run.actor.update(rollouts, experience, step)
    if run.critic is not None and config.reshard.overlap:
        updates.append(run.critic.update(rollouts, experience, step))
    for index in range(len(config.mix)):
        await run.actor.update_mix(rollouts, scores, index, step)
    for update in updates:
        await update
    return await actor_update


async def sample_ahead(run: Run, step: int) -> EarlySamples:
    """Generate the responses of a later step; score them unless that is for ranks which train meanwhile.

    These would score at one moment in one run and at another in the next, before or after an update of what scores.
    """
    has_rounds = run.config.algorithm.dynamic_sampling.metric is not None
    if run.scores_ahead or has_rounds:
        return EarlySamples(*await sample(run, step))
    rollouts = await run.rollout.generate(step)
    await run.assign(rollouts)
    return EarlySamples(rollouts, None)


async def sample(run: Run, step: int) -> Samples:
    """Generate the responses of a step and score them. A run that is asked to leave does so here, with what it has."""
    has_rounds = run.config.algorithm.dynamic_sampling.metric is not None and run.has_engines
    if has_rounds and step not in run.restored_steps:
        samples = await sample_informative_groups(run, step)
        await leave_if_asked(run, *samples)
        return samples
    rollouts = await run.rollout.generate(step)
    await run.assign(rollouts)
    await leave_if_asked(run, rollouts)
    scores = await run.reward.score(rollouts, step)
    await run.deliver(rollouts, scores)
    await leave_if_asked(run, rollouts, scores)
    return Samples(rollouts, scores)


async def sample_informative_groups(run: Run, step: int) -> Samples:
    """Generate and score in rounds until enough groups have responses whose rewards differ (DAPO, arXiv 2503.14476)."""
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
    run: Run, rollouts: Ref[RolloutBatch] | None = None, scores: Ref[Scores] | None = None
) -> None:
    """Save and end the program if a rank has received a signal to leave.

    Args:
        rollouts, scores: what the running step has generated and scored so far; the run goes on with it.

    Raises:
        RunLeft: the run has saved.
    """
    signal = run.controller.signal
    is_inside = rollouts is not None
    if not signal or (is_inside and not run.may_leave_inside):
        return
    await run.session.leave(signal, rollouts, scores)
    raise RunLeft


async def flow_step(run: Run, step: int) -> Samples:
    """Run the operators of the compiled flow in their order: `trainer.operators` has added some, or agents train apart.

    An operator may change a value that another one has made, so a name refers to the value as its last maker gave it.
    """
    start = await run.operators.begin(step)
    flow = start.describe(StepFlow)
    values = {name: await run.operators.pick(start, name) for name in flow.given}
    for operator in flow.operators:
        outputs = await run.operators.call(operator.name, [values[name] for name in operator.takes])
        for name in operator.gives:
            values[name] = await run.operators.pick(outputs, name)
        if operator.name in ("rollout", "reward"):  # nothing is trained yet
            await leave_if_asked(run, values["rollouts"], values.get("scores"))
    return Samples(values["rollouts"], values["scores"])
