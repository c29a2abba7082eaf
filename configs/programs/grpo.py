"""Plain GRPO as a step of one's own: trainer.program=configs/programs/grpo.py:step"""

from megaverl.trainer.role_groups import Run, Samples


async def step(run: Run, step: int) -> Samples:
    """Generate, score, compare each response with its group, update, and give the engines the new weights."""
    rollouts = await run.rollout.generate(step)
    # Who works on which samples, where roles have ranks of their own.
    await run.assign(rollouts)
    scores = await run.reward.score(rollouts, step)
    old_log_probs = await run.actor.old_log_probs(rollouts, step)
    experience = await run.actor.advantages(rollouts, scores, [old_log_probs])
    is_updated = await run.actor.update(rollouts, experience, step)
    await run.actor.sync_weights(run.rollout, is_updated)
    return Samples(rollouts, scores)
