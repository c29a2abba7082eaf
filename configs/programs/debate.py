"""Two actors that debate, and learn in turn, as a step of one's own.

    environment={name: 'configs/programs/debate.py:Debate', agents: own} trainer.program=configs/programs/debate.py:step

The first side answers the row's question; the second reads this and answers, too. Who
alone is right wins. Each side trains every second step, against one that stands still.
"""

from collections.abc import Mapping, Sequence

from megaverl.rollout.environments import Game, Outcome, Start
from megaverl.trainer.role_groups import Run, Samples


class Debate(Game):
    agents = ("first", "second")

    def reset(self, start: Start) -> Mapping[str, Sequence[int]]:
        self.answer, self.said = str(start.reference).strip(), dict[str, bool]()
        return dict.fromkeys(self.agents, start.token_ids)

    def acting(self) -> Sequence[str]:
        return (self.agents[len(self.said)],)

    def step(self, turns: Mapping[str, Sequence[int]]) -> Mapping[str, Outcome]:
        [(side, tokens)] = turns.items()
        self.said[side] = self.codec.decode(tokens).strip() == self.answer
        if len(self.said) == 1:
            return {"second": Outcome([*tokens, *self.codec.encode("=")])}
        lead = float(self.said["first"]) - float(self.said["second"])
        rewards = {"first": lead, "second": -lead}
        return {side: Outcome(reward=rewards[side], done=True) for side in rewards}


async def step(run: Run, step: int) -> Samples:
    rollouts = await run.rollout.generate(step)
    scores = await run.reward.score(rollouts, step)
    sides = list(run.agents.values())
    await sides[step % 2].train(rollouts, scores, step)
    return Samples(rollouts, scores)
