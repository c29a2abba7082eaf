"""Page and picture of the learning curves: every run, including those that failed or did not learn."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import NamedTuple

from tools.learning_curves_settings import (
    ALGORITHMS,
    GROUP,
    IN_TURNS,
    STEPS,
    TAUGHT,
    TEACHER,
)

WANTED_GAIN, WANTED_SEEDS = 0.30, 3
# What is known of those that gained less than was wanted, shown where they did.
BELOW = {
    "remax": "its baseline is the reward of the greedy response, which is far better than a sampled one after the "
    "warm-up (rewards of 1.5 to 2.0 instead of 0.5 to 0.8). Nearly every response therefore has a negative advantage "
    "at first, with gradient norms of 20 to 25 before clipping (RLOO from the same start: 5). Accuracy falls for 20 "
    "steps on every seed before it rises, and is still rising at step 100. This is the published algorithm; it needs "
    "more steps, or a policy that is closer to its greedy one.",
    "best_of_group": f"it does not optimise accuracy; see pass@{GROUP} below.",
}

# What some algorithms need and the quickstart's task does not have.
ADDED = (
    f"`{'` and `'.join(TAUGHT)}` need a teacher: the model that `{TEACHER}` trained from the same warm start with the "
    "same number of steps. Their rewards are measured, and do not train. "
    f"`{'` and `'.join(IN_TURNS)}` need turns: the model writes the same answer in turns of two tokens, without "
    "replies, and receives the same rewards turn by turn (`tools/learning_curves_turns.py`)."
)
# What this task cannot show, measured once by `megaverl quickstart --config FILE
# run.nproc=1 actor.tp=1 rollout.engine=hf`.
ELSEWHERE = (
    "On the guessing game, whose turns have replies (`configs/games/guessing_game.yaml`, "
    "`turn_grpo_guessing_game.yaml`; one seed, one process), accuracy rises from 32.3% to 62.3% with `turn_ppo` and to "
    "60.0% with `turn_grpo` in 80 steps."
)
REMARKS = {
    "distillation": "credits a sampled token with the teacher's log-prob minus its own, down to -20. If the teacher is "
    "certain, nearly all tokens have a negative advantage at first. On seed 1 accuracy falls to 2% at step 20, with "
    "gradient norms of 13 to 31, before it rises. `gkd`, with the same teacher's whole distributions, does "
    "not show this.",
}


class Result(NamedTuple):
    """One run: accuracy on held-out prompts by step, and the error that ended it early, if any.

    Attributes:
        passes: pass@8 by step, if it was measured.
        teacher: accuracy of the model from which this run learned.
    """

    algorithm: str
    seed: int
    curve: list[tuple[int, float]]
    seconds: float
    error: str | None
    passes: list[tuple[int, float]] = []
    teacher: float | None = None

    @property
    def gain(self) -> float:
        return self.curve[-1][1] - self.curve[0][1] if len(self.curve) > 1 else 0.0


def by_algorithm(results: list[Result]) -> dict[str, list[Result]]:
    """Group results by algorithm, in the order of `ALGORITHMS`, each sorted by seed."""
    sorted_runs = {
        name: sorted((r for r in results if r.algorithm == name), key=lambda r: r.seed)
        for name in ALGORITHMS
    }
    return {name: runs for name, runs in sorted_runs.items() if runs}


def table(results: list[Result]) -> str:
    """Return the Markdown table of every algorithm's accuracy before and after, and its gain on every seed."""
    lines = [
        "| algorithm | seeds | before | after, each seed | mean gain | least gain | 30 points on each seed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in by_algorithm(results).items():
        finished = [run for run in runs if run.error is None and len(run.curve) > 1]
        if not finished:
            lines.append(
                f"| {label(name)} | {len(runs)} | | {runs[0].error} | | | no |"
            )
            continue
        gains = [run.gain for run in runs]
        before = statistics.mean(run.curve[0][1] for run in finished)
        after = ", ".join(
            f"{run.curve[-1][1]:.1%}" if run.error is None else "failed" for run in runs
        )
        verdict, mean, least = (
            "yes" if enough(runs) else "NO",
            statistics.mean(gains),
            min(gains),
        )
        gained = f"{mean:+.1%} | {least:+.1%} | {verdict}"
        lines.append(
            f"| {label(name)} | {len(runs)} | {before:.1%} | {after} | {gained} |"
        )
    return "\n".join(lines)


def label(name: str) -> str:
    """Return an algorithm's name for the table, with the teacher or turns that it needs."""
    addition = (
        f" (teacher: {TEACHER})"
        if name in TAUGHT
        else " (in turns)"
        if name in IN_TURNS
        else ""
    )
    return f"{name}{addition}"


def summary(results: list[Result]) -> str:
    """Return a sentence that counts the algorithms with the wanted gain in the mean, and on each seed."""
    runs_by_name = by_algorithm(results)
    means = sum(
        statistics.mean(run.gain for run in runs) >= WANTED_GAIN
        for runs in runs_by_name.values()
    )
    on_each_seed = sum(enough(runs) for runs in runs_by_name.values())
    wanted, number = f"{WANTED_GAIN * 100:.0f} points", len(runs_by_name)
    in_mean = f"{means} of {number} gain {wanted} or more in the mean of their seeds"
    return f"{in_mean}, {on_each_seed} of {number} on each seed."


def enough(runs: list[Result]) -> bool:
    """Return whether every seed has the wanted gain."""
    return all(
        run.error is None and len(run.curve) > 1 and run.gain >= WANTED_GAIN
        for run in runs
    )


def below(results: list[Result]) -> list[str]:
    """Return the known reasons of algorithms below the wanted gain."""
    lines: list[str] = []
    for name, runs in by_algorithm(results).items():
        if name in BELOW and not enough(runs):
            lines += [
                *textwrap.wrap(
                    f"`{name}` gains less than 30 points on at least one seed: {BELOW[name]}",
                    110,
                ),
                "",
            ]
    return lines


def remarks(results: list[Result]) -> list[str]:
    """Return the remarks on single algorithms, and the accuracy of teachers."""
    runs_by_name = by_algorithm(results)
    lines = [
        textwrap.wrap(f"`{name}` {text}", 110)
        for name, text in REMARKS.items()
        if name in runs_by_name
    ]
    taught = {
        run.seed: run.teacher
        for name in TAUGHT
        for run in runs_by_name.get(name, [])
        if run.teacher is not None
    }
    reached = (
        f" The teachers reach {', '.join(f'{taught[seed]:.1%}' for seed in sorted(taught))}."
        if taught
        else ""
    )
    first_lines = textwrap.wrap(ADDED + reached, 110, break_on_hyphens=False)
    return [line for part in (first_lines, *lines) for line in (*part, "")]


def passes(results: list[Result]) -> list[str]:
    """Return the section on algorithms that pay one right response of several, if pass@8 was measured."""
    measured = {
        name: [r for r in runs if len(r.passes) > 1]
        for name, runs in by_algorithm(results).items()
    }
    lines = [
        f"| {name} | {', '.join(f'{run.passes[0][1]:.1%}' for run in runs)} "
        f"| {', '.join(f'{run.passes[-1][1]:.1%}' for run in runs)} "
        f"| {', '.join(f'{run.curve[-1][1]:.1%}' for run in runs)} |"
        for name, runs in measured.items()
        if runs
    ]
    if not lines:
        return []
    text = (
        "`best_of_group` rewards only a single best response, with its lead over the second best. If two of the "
        f"{GROUP} responses are right, none is rewarded: at an accuracy p, a share of (1 - p)^8 + 8 p (1 - p)^7 of the "
        "groups has a gradient, 74% at p = 12.5% and 4% at p = 50%. Its accuracy therefore levels off as soon as most "
        "groups have two right responses. `pass_at_k` needs one right response of 4, and levels off later. More steps "
        f"would not help, because neither optimises accuracy. Both optimise pass@{GROUP}, the probability that one of "
        f"{GROUP} responses is right. In this table, accuracy is the mean of {GROUP} responses per prompt."
    )
    return [
        f"## pass@{GROUP}",
        "",
        *textwrap.wrap(text, 110),
        "",
        f"| algorithm | pass@{GROUP} before, each seed | pass@{GROUP} after | accuracy after |",
        "| --- | --- | --- | --- |",
        *lines,
        "",
    ]


def page(results: list[Result]) -> str:
    """Return the text of docs/learning_curves.md."""
    seconds = sum(result.seconds for result in results)
    failed = [result for result in results if result.error is not None]
    few = [
        name for name, runs in by_algorithm(results).items() if len(runs) < WANTED_SEEDS
    ]
    unfinished = []
    if few:
        text = f"**Not finished**: fewer than {WANTED_SEEDS} seeds have run of {', '.join(few)}."
        unfinished = [*textwrap.wrap(text, 110), ""]
    errors = [
        f"- {result.algorithm}, seed {result.seed}: {result.error}" for result in failed
    ]
    return "\n".join(
        [
            "# Learning curves",
            "",
            "This page shows every on-policy algorithm on the quickstart's task: write five digits backwards, with a",
            "model of two layers after a short supervised warm-up. For each seed, all algorithms start from the same",
            f"model and take {STEPS} steps of 32 prompts x 8 responses in two mini-batches, at one learning rate.",
            "No algorithm is tuned. Accuracy is measured on 256 held-out prompts at temperature 1. Some cost more:",
            "DAPO generates further groups, ReMax a greedy response per prompt, and PRIME trains a second model.",
            "",
            *unfinished,
            summary(results),
            "",
            "![accuracy by step](learning_curves.png)",
            "",
            table(results),
            "",
            *remarks(results),
            *below(results),
            *passes(results),
            *textwrap.wrap(ELSEWHERE, 110, break_on_hyphens=False),
            "",
            *(["Runs that ended with an error:", "", *errors, ""] if errors else []),
            f"{len(results)} runs took {seconds / 60:.0f} minutes on one CPU core. To repeat them, use",
            "`tools/learning_curves.py run` until all are done, then `tools/learning_curves.py report`.",
            "",
            "All of them train with Adam. `tools/bench_optimizers.py` trains GRPO from the same warm starts with",
            "[Muon beside Adam](benchmarks.md#muon-beside-adam).",
            "",
        ]
    )


def draw(results: list[Result], path: Path) -> None:
    """Draw one panel per algorithm: the mean over the seeds, and a band from the worst to the best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs_by_name = by_algorithm(results)
    columns = min(4, len(runs_by_name))
    rows = -(-len(runs_by_name) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(
        figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    )
    for axes, (name, runs) in zip(panels, runs_by_name.items(), strict=False):
        steps = [step for step, _ in max((run.curve for run in runs), key=len)]
        values = [
            [value for run in runs for at, value in run.curve if at == step]
            for step in steps
        ]
        axes.fill_between(
            steps,
            [min(v) for v in values],
            [max(v) for v in values],
            alpha=0.25,
            linewidth=0,
        )
        axes.plot(steps, [statistics.mean(v) for v in values], linewidth=1.5)
        axes.set_title(f"{name} ({len(runs)})", fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(True, alpha=0.3)
    for axes in panels[len(runs_by_name) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("accuracy on held-out prompts", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
