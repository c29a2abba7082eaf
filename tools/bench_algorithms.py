"""Share of a training step that the algorithm itself takes: advantages, token weights, losses and their gradients.

    python tools/bench_algorithms.py --out runs/learning_curves [--algorithms grpo ppo] [--steps 6]

Takes real steps with every algorithm of `tools/learning_curves.py`, on the same task and model, in one process. Timed
are the operator `advantages`; token weights and token selection of every mini-batch; and for every micro-batch the loss
from log-probs (or values) on, with its backward pass down to them. The model has two layers and a vocabulary of 32, so
its steps are short and the printed share is an upper bound: a larger model's is lower. Prints medians over all steps
after the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.learning_curves import ALGORITHMS, configuration, join_world, warm_start

LIMIT = 0.02


class Clock:
    """Adds up the seconds that the algorithm takes within the running step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0.0  # of a loss, what was the model's

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts as the algorithm's."""

        def counted(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return counted

    def loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss so that its own time and its backward pass count, without the time of `model` calls inside it."""

        def counted(*args: Any) -> Any:
            self._inside, start = 0.0, time.perf_counter()
            value, sums = function(*args)
            self.seconds += time.perf_counter() - start - self._inside
            return _Mark.apply(value, self), sums

        return counted

    def model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that computes log-probs or values from the model's output, so
        that a loss around it does not count it.
        """

        def counted(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            for tensor in result if isinstance(result, tuple) else (result,):
                if tensor.requires_grad:
                    tensor.register_hook(self._reached)
            self._inside += time.perf_counter() - start
            return result

        return counted

    def _reached(self, gradient: torch.Tensor) -> None:
        now = time.perf_counter()
        self.seconds += now - self.backward_began
        self.backward_began = now  # a second tensor's gradient comes later

    backward_began = 0.0


class _Mark(torch.autograd.Function):
    """Autograd function that changes nothing and notes when the backward pass of a loss begins."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.backward_began = time.perf_counter()
        return grads[0], None


def watch(trainer: Any, clock: Clock) -> None:
    """Wrap the methods of a trainer whose time is the algorithm's."""
    from megaverl.workers.micro_batches import Weighting

    step, roles = trainer.step, trainer.roles
    step.credit.assign_each = clock.timed(step.credit.assign_each)
    for role in (roles.actor, roles.critic, roles.implicit):
        if role is None:
            continue
        role._loss = clock.loss(role._loss)
        for name in ("log_probs", "values"):
            setattr(role.model, name, clock.model(getattr(role.model, name)))
    roles.actor._select = clock.timed(roles.actor._select)
    if not hasattr(Weighting, "plain"):
        Weighting.plain = Weighting.weights  # type: ignore[attr-defined]
    Weighting.weights = clock.timed(Weighting.plain)  # type: ignore[attr-defined,method-assign]


def measure(out: Path, name: str, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step, and of the algorithm's part in it."""
    from megaverl.checkpoint.training_state import seed_generators
    from megaverl.config import load_config
    from megaverl.monitoring.console import Console
    from megaverl.trainer.job import alone
    from megaverl.trainer.loop import Trainer

    warm = warm_start(out, 0)
    seed_generators(0)
    settings = configuration(out, 0, f"cost_{name}", name, warm).to_dict()
    settings["trainer"] |= {"steps": steps, "validate_every": 0}
    settings["checkpoint"] |= {"resume": "never"}
    settings["data"] |= {"validation": []}
    config = load_config(settings, world_size=1)
    trainer, clock = Trainer(config, Console(rank=1), alone(config)), Clock()
    watch(trainer, clock)
    times: list[tuple[float, float]] = []
    begin_step, report = trainer.begin_step, trainer.report

    def watched(step: int) -> None:
        clock.seconds = 0.0
        begin_step(step)

    def noted(done: int) -> dict[str, float]:
        times.append(
            (trainer.timeline.step_metrics()["time/step_ms"] / 1e3, clock.seconds)
        )
        return report(done)

    trainer.begin_step = watched  # type: ignore[method-assign]
    trainer.report = noted  # type: ignore[method-assign]
    trainer.train()
    kept = times[1:] or times
    return statistics.median(step for step, _ in kept), statistics.median(
        algorithm_seconds for _, algorithm_seconds in kept
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of tools/learning_curves.py, or an empty one",
    )
    parser.add_argument(
        "--algorithms",
        nargs="*",
        default=list(ALGORITHMS),
        choices=list(ALGORITHMS),
        metavar="NAME",
    )
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    join_world()
    shares = {}
    print(
        "| algorithm | step, ms | advantages and losses, ms | share |\n| --- | --- | --- | --- |"
    )
    for name in options.algorithms:
        step, algorithm_seconds = measure(options.out, name, options.steps)
        shares[name] = algorithm_seconds / step
        print(
            f"| {name} | {step * 1e3:.0f} | {algorithm_seconds * 1e3:.2f} | {algorithm_seconds / step:.2%} |",
            flush=True,
        )
    over = [name for name, share in shares.items() if share >= LIMIT]
    print(
        f"\nmost: {max(shares.values()):.2%}; {'all under' if not over else ', '.join(over) + ' not under'} {LIMIT:.0%}"
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
