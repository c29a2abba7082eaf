"""When a run looks at its held-out prompts, what it remembers of that, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megaverl.config import Config
from megaverl.data.datasets import PromptDataset
from megaverl.distributed.collectives import together
from megaverl.monitoring.console import Console
from megaverl.trainer.evaluate import Evaluation, evaluate
from megaverl.trainer.records import Records
from megaverl.trainer.step import Roles


@dataclass
class Best:
    """The best validation so far."""

    step: int = -1
    value: float = float("-inf")


class Validation:
    """The validations of a run.

    Args:
        data: held-out prompts; None: there is nothing to look at.

    Attributes:
        best: by `trainer.best_metric`.
    """

    def __init__(self, config: Config, data: PromptDataset | None, records: Records, console: Console) -> None:
        self.config, self.data, self.records, self.console = config, data, records, console
        self.best = Best()

    @property
    def happens(self) -> bool:
        """Whether the run validates at all."""
        return self.data is not None and bool(self.config.trainer.validate_every)

    def is_due(self, done: int) -> bool:
        """After so many steps."""
        trainer = self.config.trainer
        return self.happens and (done % trainer.validate_every == 0 or done == trainer.steps)

    def evaluate(self, roles: Roles) -> Evaluation:
        """Of the weights that the engines hold now; all of their ranks take part.

        A resumed run has not validated here: nothing of this may be found again by the next step.
        """
        assert self.data is not None and roles.rollout is not None
        most = self.config.trainer.validation_prompts
        prompts = [self.data[i] for i in range(len(self.data) if most is None else min(len(self.data), most))]
        found = evaluate(self.config, roles.rollout, roles.reward, prompts, roles.player)
        with together():
            roles.rollout.engine.reset_prefix_cache()
        return found

    def note(self, done: int, evaluation: Evaluation) -> None:
        """Remember the best; write and show what was found."""
        metrics = evaluation.metrics
        value = metrics[f"validation/{self.config.trainer.best_metric}"]
        if value > self.best.value:
            self.best = Best(done, value)
        self.records.log(done, metrics)
        self.records.log_samples(done, evaluation.samples, split="validation")
        self.console.print(
            f"validation after step {done}: "
            + "  ".join(f"{name.removeprefix('validation/')} {value:.3f}" for name, value in metrics.items())
        )

    def state_dict(self) -> dict[str, Any]:
        """The best, for a checkpoint."""
        return asdict(self.best)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        self.best = Best(int(state["step"]), float(state["value"]))
