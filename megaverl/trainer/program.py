"""Programs of reinforcement learning: what happens in a run and in each of its steps, as ordinary async functions.

The coordinator's rank runs them. All ranks serve the calls that they make, in the order in which they make them. A call
returns at once; awaiting it gives its result: a small value, or a reference to a value that stays on the ranks. The
same text runs where roles share ranks and where they have ranks of their own.

    train                               the loop
      take_step                         one step, its records, validation and checkpoint
        policy_step                     sample, train_on, send_weights
        asynchronous_step               the same, on samples that were generated ahead
        flow_step                       the same, where operators were added to it
        agents_step                     sample, and each agent of a game trains by itself
    sample                              responses and their rewards
      sample_informative_groups         in rounds, with dynamic sampling
    train_on                            log-probs, values, advantages, updates
    send_weights                        new weights for the engines
    validate                            responses to held-out prompts and their rewards
"""

from __future__ import annotations

from typing import Any

from megaverl.controller.references import PendingCall, Ref
from megaverl.data.batch import RolloutBatch
from megaverl.trainer.role_groups import EarlySamples, Run, Samples, StepFlow
from megaverl.trainer.sample_rows import Fields
from megaverl.workers.reward import Scores

UPDATES = ("critic_update", "actor_update")  # operators that islands of the actor join


class RunLeft(Exception):
    """The run has saved, and its ranks leave before the last step."""


async def train(run: Run, first_step: int) -> None:
    """Take steps until the last one; after each, validate, save or leave where that is due.

    Args:
        first_step: steps that the run has behind it, from before it was interrupted.
    """
    last_step = run.config.trainer.steps
    try:
        await begin(run, first_step)
        for step in range(first_step, last_step):
            await take_step(run, step)
            if step + 1 < last_step:
                await leave_if_asked(run)
    except RunLeft:
        return
    finally:
        if run.ahead is not None:
            run.ahead.stop()


async def begin(run: Run, first_step: int) -> None:
    """Validate before the first step, where that is wanted."""
    if run.config.trainer.validate_at_start and first_step == 0 and run.validates:
        await validate(run, 0)
    await leave_if_asked(run)


async def take_step(run: Run, step: int) -> None:
    """Take one step, and do what follows it."""
    run.session.begin_step(step)  # not awaited: engines may be in the middle of later samples
    samples = await run.step(run, step)
    # The calls are sent at once; ranks take them in this order.
    run.recorder.take(*samples)
    run.session.report_step(step + 1)
    if run.validates and is_validation_due(run, step + 1):
        await validate(run, step + 1)
    if await run.session.save_if_due(step + 1):
        raise RunLeft


async def validate(run: Run, done: int) -> None:
    """Score responses of the engines to held-out prompts, after `done` steps."""
    responses = await run.rollout.generate_held_out()
    scores = await run.held_out_reward.score_held_out(responses)
    result = await run.rollout.measure_held_out(responses, scores)
    run.session.record_validation(done, result)


def is_validation_due(run: Run, done: int) -> bool:
    """Return whether the run validates after `done` steps."""
    trainer = run.config.trainer
    return done % trainer.validate_every == 0 or done == trainer.steps


async def policy_step(run: Run, step: int) -> Samples:
    """Take one step of PPO, GRPO, or another algorithm that follows the policy's gradient."""
    samples = await sample(run, step)
    updates = await train_on(run, step, samples)
    await send_weights(run, step, updates)
    return samples


async def asynchronous_step(run: Run, step: int) -> Samples:
    """Take one step on samples that the engines have generated up to `max_staleness` steps ahead."""
    assert run.ahead is not None, "the engines' ranks are none of the actor's"
    rollouts, scores = await run.ahead.take(step)
    samples = Samples(rollouts, scores or await run.reward.score(rollouts, step))
    updates = await train_on(run, step, samples)
    await send_weights(run, step, updates)
    return samples


async def train_on(run: Run, step: int, samples: Samples) -> list[PendingCall[bool]]:
    """Compute what the advantages depend on and the advantages; send the updates.

    A role that the algorithm does without is None: GRPO has no critic, and without a KL term there is no reference.

    Returns:
        The updates, which ranks may still be at.
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

    # Actor and critic train side by side where they have ranks of their own; the critic's samples leave the actor's
    # ranks before these train. On the same ranks the actor comes first with `reshard.overlap`: its new weights travel
    # while the critic trains.
    updates: list[PendingCall[bool]] = []
    if run.islands is not None:
        updates.append(run.islands.join_updates(step))
    is_critic_last = config.reshard.overlap and run.critic is not None and run.critic.ranks == run.actor.ranks
    if run.critic is not None and not is_critic_last:
        updates.append(run.critic.update(rollouts, experience, step))
    updates.append(run.actor.update(rollouts, experience, step))
    if run.critic is not None and is_critic_last:
        updates.append(run.critic.update(rollouts, experience, step))
    for index in range(len(config.mix)):
        run.actor.update_mix(rollouts, scores, index, step)
    return updates


async def send_weights(run: Run, step: int, updates: list[PendingCall[bool]]) -> None:
    """Wait for the updates of a step, and bring the new weights into the engines.

    Engines that are ahead receive them once they have begun what the weights before are to generate, so a resumed run
    generates every response with the weights that an uninterrupted run does. With `reshard.overlap` they begin to
    receive while the updates run.
    """
    if not run.config.reshard.overlap:
        for update in updates:
            await update
    if run.ahead is not None:
        await run.ahead.until_begun(step)
    if run.has_engines:
        only_critic_trains = step < run.config.algorithm.critic_warmup_steps
        await run.actor.sync_weights(run.rollout, is_updated=not only_critic_trains)
    for update in updates:
        await update


async def sample_ahead(run: Run, step: int) -> EarlySamples:
    """Generate the responses of a later step; score them unless that is for ranks which train meanwhile.

    These would score at one moment in one run and at another in the next, before or after an update of what scores.
    """
    if run.scores_ahead or run.has_rounds:
        return EarlySamples(*await sample(run, step))
    rollouts = await generate(run, step)
    await run.assign(rollouts)
    return EarlySamples(rollouts, None)


async def generate(run: Run, step: int) -> Ref[RolloutBatch]:
    """Return the responses of a step, which the engines generate, or which a Python program gives (`PPOTrainer`).

    With `rollout.in_flight_updates` they come in two parts, with new weights between them.
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
    """Generate the responses of a step and score them. A run that is asked to leave does so here, with what it has."""
    if run.has_rounds and step not in run.restored_steps:
        samples = await sample_informative_groups(run, step)
        await leave_if_asked(run, *samples)
        return samples
    if run.scores_arriving:
        run.reward.score_arriving(step)
    rollouts = await generate(run, step)
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
    if not signal or (is_inside and (run.is_given or not run.may_leave_inside)):
        return
    await run.session.leave(signal, rollouts, scores)
    raise RunLeft


async def begin_given(run: Run, first_step: int) -> None:
    """Begin a run whose steps a Python program takes."""
    try:
        await begin(run, first_step)
    except RunLeft:
        return


async def give_rollouts(run: Run, step: int) -> None:
    """Generate the responses of a step, and give them to every rank, for a Python program that trains on them."""
    try:
        rollouts = await run.rollout.generate(step)
        await leave_if_asked(run, rollouts)
        await run.session.share(rollouts)
    except RunLeft:
        return


async def take_given_step(run: Run, step: int) -> None:
    """Take one step on the responses that a Python program gives on every rank."""
    try:
        await take_step(run, step)
        if step + 1 < run.config.trainer.steps:
            await leave_if_asked(run)
    except RunLeft:
        return


async def agents_step(run: Run, step: int) -> Samples:
    """Take one step of a game whose agents have an actor and a critic each: independent PPO (arXiv 2011.09533)."""
    samples = await sample(run, step)
    for agent in run.agents.values():
        await agent.train(*samples, step)
    return samples


async def flow_step(run: Run, step: int) -> Samples:
    """Run the operators of the compiled flow, to which `trainer.operators` has added some, in their order.

    An operator may change a value that another one has made, so a name refers to the value as its last maker gave it.
    """
    operators = run.operators
    values = await start_of_flow(run, step)
    start = await operators.begin(step, list(values))
    flow = start.describe(StepFlow)
    for name in flow.given:
        values.setdefault(name, await operators.pick(start, name))
    first_update = next((each.name for each in flow.operators if each.name in UPDATES), None)
    for operator in flow.operators:
        if operator.name == "reshard" and run.ahead is not None:
            await run.ahead.until_begun(step)
        if operator.name == first_update and run.islands is not None:
            run.islands.join_updates(step)
        inputs = [values[name] for name in operator.takes]
        call = operators.call(operator, values.get("rollouts"), inputs)
        # One without outputs is not awaited: the critic trains beside the actor, and both are decided on together.
        for name in operator.gives:
            values[name] = await operators.pick(await call, name)
        if operator.name in ("rollout", "reward"):  # nothing is trained yet
            await leave_if_asked(run, values["rollouts"], values.get("scores"))
    return Samples(values["rollouts"], values["scores"])


async def start_of_flow(run: Run, step: int) -> dict[str, Ref[Any]]:
    """Return what a flow's operators start from: the responses; after dynamic sampling their rewards as well."""
    if run.ahead is not None:
        early = await run.ahead.take(step)
        return {"rollouts": early.rollouts} | ({"scores": early.scores} if early.scores is not None else {})
    if run.has_rounds:
        samples = await sample(run, step)
        return {"rollouts": samples.rollouts, "scores": samples.scores}
    if run.operators.change_prompts and not run.is_given:
        return {}
    rollouts = await generate(run, step)
    await run.assign(rollouts)
    await leave_if_asked(run, rollouts)
    return {"rollouts": rollouts}
