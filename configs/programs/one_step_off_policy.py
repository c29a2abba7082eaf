"""One step off-policy as a step of one's own: trainer.program=configs/programs/one_step_off_policy.py:step

    placement={rollout: 0, actor: 1} rollout={async_rollout: true, max_staleness: 1}

While the actor trains on the samples of a step, the engines generate those of the next
one, with weights that are one update older. The roles have ranks of their own, so both
happen at once.
"""

from megaverl.trainer.program import send_weights, train_on
from megaverl.trainer.role_groups import Run, Samples


async def step(run: Run, step: int) -> Samples:
    """Train on samples of weights one update older, beside the generation of the next ones."""
    assert run.ahead is not None, (
        "rollout.async_rollout is off, or the roles share their ranks"
    )
    rollouts, scores = await run.ahead.take(step)
    samples = Samples(rollouts, scores or await run.reward.score(rollouts, step))
    updates = await train_on(run, step, samples)
    # Once the engines have begun the next samples.
    await send_weights(run, step, updates)
    return samples
