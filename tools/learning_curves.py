"""Does every on-policy algorithm learn? All on the quickstart's task from the same warm starts, with one budget.

    python tools/learning_curves.py run --out runs/learning_curves --seconds 280     # again and again, until done
    python tools/learning_curves.py report --out runs/learning_curves --docs docs

`run` trains what is not done yet, one after the other in one process (Megatron-core, generation by transformers), and
begins nothing that would last longer than `--seconds`; told to leave by SIGTERM, it goes on from there the next time.
Nothing is tuned for an algorithm: the same learning rate, batch and number of steps for all, its published constants
for the rest. `report` draws one picture and writes one table, into docs/learning_curves.md and between two marks of the
README; a run that failed or did not learn stands there like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

STEPS, WANTED_GAIN = 100, 0.30
ACCURACY, WANTED_SEEDS = "validation/accuracy", 3
MARKS = ("<!-- learning curves -->", "<!-- end of learning curves -->")  # the table's place in the README
GROUP = 8  # responses to a prompt, as in the quickstart
PASS = f"validation/pass@{GROUP}"
# Those that are paid for one right response in several, and one to compare them with: pass@8 is measured as well.
OF_GROUPS = ("grpo", "pass_at_k", "best_of_group")
# The quickstart's recipe on one process, with half of its samples a step and without a KL penalty, which not every
# estimator can read.
COMMON = [
    "run.nproc=1",
    "run.log_with=jsonl",
    "actor.tp=1",
    "rollout.engine=hf",
    "data.prompts_per_step=32",
    "algorithm.kl={in: none, coef: 0.0}",
    "algorithm.num_mini_batches=2",
    f"trainer={{steps: {STEPS}, validate_every: 20}}",
    "checkpoint={export_hf: false, async_save: false, resume: auto}",
]
# What a name alone leaves open.
ALGORITHMS: dict[str, list[str]] = {
    "ppo": [],
    "grpo": [],
    "dr_grpo": ["algorithm.loss_length=12"],
    "dapo": ["algorithm.dynamic_sampling={metric: accuracy, max_rounds: 3}"],
    "gspo": [],
    "sapo": [],
    "cispo": [],
    "gmpo": [],
    "dppo_tv": [],
    "dppo_kl": [],
    "clip_cov": [],
    "kl_cov": [],
    "rloo": [],
    "remax": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "opo": [],
    "gpg": [],
    "gdpo": [],
    "pass_at_k": ["algorithm.advantage_options={k: 4}"],
    "best_of_group": [],
    "optimal_token_baseline": [],
    "prime": [],
    "raft": [],
}
# What is known of those that gained less than was wanted, shown where they did.
BELOW = {
    "remax": "its baseline is the reward of the greedy response, and after the warm-up the greedy response is far "
    "better than a sampled one (rewards of 1.5 to 2.0 against 0.5 to 0.8). So nearly every response is pushed down at "
    "first, with gradient norms of 20 to 25 (RLOO from the same start: 5) of which clipping leaves 1, and accuracy "
    "falls for 20 steps on every seed before it climbs. It is still climbing at step 100. This is the algorithm as "
    "published; a longer budget or a policy nearer to its greedy one suits it better.",
    "best_of_group": f"it does not optimise accuracy; see pass@{GROUP} below.",
}

# What this task cannot show, measured once by `megaverl quickstart --config configs/guessing_game.yaml run.nproc=1
# actor.tp=1 rollout.engine=hf algorithm.name=NAME`; with a teacher also `reference.path=DIR trainer.steps=40`.
ELSEWHERE = (
    "Four are not here: `turn_ppo` and `turn_grpo` need turns, `distillation` and `gkd` a teacher. On the guessing "
    "game (`configs/guessing_game.yaml`; one seed) accuracy goes from 32.3% to 62.3% with `turn_ppo` and to 60.0% "
    "with `turn_grpo` in 80 steps; with the model of the former for a teacher, from 32.3% to 50.0% with "
    "`distillation` and to 63.1% with `gkd` in 40."
)


class Result(NamedTuple):
    """One run: accuracy on held-out prompts by step, and what ended it early, if anything did.

    passes: pass@8 by step, where it was measured.
    """

    algorithm: str
    seed: int
    curve: list[tuple[int, float]]
    seconds: float
    error: str | None
    passes: list[tuple[int, float]] = []

    @property
    def gain(self) -> float:
        return self.curve[-1][1] - self.curve[0][1] if len(self.curve) > 1 else 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--out", type=Path, required=True, help="folder of results; what is there is not done again")
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would last longer")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the picture and the table go")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="which shows the table as well")
    options = parser.parse_args(arguments)
    wanted = [(name, seed) for seed in options.seeds for name in options.algorithms]
    if options.what == "run":
        return run(options.out, wanted, options.seconds)
    results = [result for result in stored(options.out) if (result.algorithm, result.seed) in wanted]
    if not results:
        parser.error(f"{options.out} holds no results: run them first")
    draw(results, options.docs / "learning_curves.png")
    (options.docs / "learning_curves.md").write_text(page(results), encoding="utf-8")
    options.readme.write_text(with_table(options.readme.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(table(results))
    return 0


def run(out: Path, wanted: list[tuple[str, int]], seconds: float) -> int:
    """Train what is missing; returns 0 when all is there, 3 where time ran out."""
    start, longest = time.monotonic(), 0.0
    missing = [(name, seed) for name, seed in wanted if not result_file(out, name, seed).exists()]
    if not missing:
        return 0
    join_world()
    for number, (name, seed) in enumerate(missing):
        if time.monotonic() - start + longest > seconds:
            print(f"{len(missing) - number} runs are left")
            return 3
        began = time.monotonic()
        result = train(out, name, seed)
        if result is None:
            print(f"{name} seed {seed}: goes on the next time")
            return 3
        longest = max(longest, time.monotonic() - began)
        write(out, result)
        print(f"{name} seed {seed}: {result.error or result.curve} in {result.seconds:.0f} s", flush=True)
    return 0


def train(out: Path, name: str, seed: int) -> Result | None:
    """One algorithm from the warm start of its seed, or from where it left; None if it is told to leave again."""
    from megaverl.checkpoint.random_state import seed_generators
    from megaverl.errors import MegaverlError
    from megaverl.metrics.console import Console
    from megaverl.trainer.rl import RLTrainer
    from megaverl.trainer.signals import Leaving

    warm = warm_start(out, seed)
    error = None
    seed_generators(seed)
    folder = out / "runs" / f"{name}_{seed}"
    trainer = RLTrainer(configuration(out, seed, folder.name, name, warm), Console(rank=1))
    try:
        trainer.train()
    except Leaving:
        return None
    except MegaverlError as failed:  # what stops a run is a result too
        error = f"{type(failed).__name__}: {failed}"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve, passes = ([(r["step"], r[key]) for r in records if key in r] for key in (ACCURACY, PASS))
    seconds = sum(record.get("train/step_time_ms", 0.0) for record in records) / 1e3
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return Result(name, seed, curve, seconds, error, passes)


def warm_start(out: Path, seed: int) -> Path:
    """The quickstart's model of this seed after its supervised warm-up, made once for all algorithms."""
    from megaverl.checkpoint.random_state import seed_generators
    from megaverl.metrics.console import Console
    from megaverl.trainer.build import Builder
    from megaverl.trainer.export import export_model
    from megaverl.trainer.quickstart import prepare
    from megaverl.trainer.sft import warm_up

    inputs = out / "runs" / f"warm_{seed}" / "inputs"
    if not (inputs / "warm" / "config.json").exists():
        config = configuration(out, seed, f"warm_{seed}", "ppo", inputs / "model", check_paths=False)
        prepare(config)
        seed_generators(seed)
        builder = Builder(config)
        export_model(warm_up(config, builder, Console(rank=1)), builder, inputs / "warm")
    return inputs / "warm"


def configuration(out: Path, seed: int, run: str, name: str, model: Path, *, check_paths: bool = True) -> Any:
    """The recipe of the quickstart with one algorithm."""
    from megaverl.cli.recipes import recipe
    from megaverl.config import load_config

    inputs = out / "runs" / f"warm_{seed}" / "inputs"
    overrides = [
        *COMMON,
        f"run.dir={out / 'runs'}",
        f"run.name={run}",
        f"run.seed={seed}",
        f"model.path={model}",
        f"data.train={inputs / 'train.jsonl'}",
        f"data.validation={inputs / 'held_out.jsonl'}",
        f"algorithm.name={name}",
        *ALGORITHMS[name],
        *([f"trainer={{validation_samples: {GROUP}, pass_at: [1, {GROUP}]}}"] if name in OF_GROUPS else []),
    ]
    return load_config(recipe("quickstart"), overrides, check_paths=check_paths, world_size=1)


def join_world() -> None:
    """A world of this process alone."""
    import torch.distributed as dist

    from megaverl.platform import platform

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    platform.start()
    folder = tempfile.mkdtemp(prefix="megaverl_curves_")
    dist.init_process_group(platform.backend, init_method=f"file://{folder}/store", rank=0, world_size=1)


def result_file(out: Path, name: str, seed: int) -> Path:
    return out / "results" / f"{name}_{seed}.json"


def write(out: Path, result: Result) -> None:
    path = result_file(out, result.algorithm, result.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result._asdict()), encoding="utf-8")
    part.replace(path)


def stored(out: Path) -> Iterator[Result]:
    for path in sorted((out / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        curves = {key: [(int(step), float(value)) for step, value in found.get(key, [])] for key in ("curve", "passes")}
        yield Result(**{**found, **curves})


def by_algorithm(results: list[Result]) -> dict[str, list[Result]]:
    """In the order of `ALGORITHMS`, each with its seeds in order."""
    found = {name: sorted((r for r in results if r.algorithm == name), key=lambda r: r.seed) for name in ALGORITHMS}
    return {name: runs for name, runs in found.items() if runs}


def table(results: list[Result]) -> str:
    """Markdown: before, after and gain of every seed."""
    lines = [
        "| algorithm | seeds | before | after, each seed | mean gain | least gain | 30 points on each seed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in by_algorithm(results).items():
        finished = [run for run in runs if run.error is None and len(run.curve) > 1]
        if not finished:
            lines.append(f"| {name} | {len(runs)} | | {runs[0].error} | | | no |")
            continue
        gains = [run.gain for run in runs]
        before = statistics.mean(run.curve[0][1] for run in finished)
        after = ", ".join(f"{run.curve[-1][1]:.1%}" if run.error is None else "failed" for run in runs)
        verdict = "yes" if enough(runs) else "NO"
        lines.append(
            f"| {name} | {len(runs)} | {before:.1%} | {after} | {statistics.mean(gains):+.1%} | {min(gains):+.1%} "
            f"| {verdict} |"
        )
    return "\n".join(lines)


def with_table(readme: str, results: list[Result]) -> str:
    """The README with the table of these results between its marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"the README has no place for the table: the lines {MARKS[0]} and {MARKS[1]}")
    return f"{before}{MARKS[0]}\n{table(results)}\n{MARKS[1]}{after}"


def summary(results: list[Result]) -> str:
    """How many gained what was wanted, in the mean and on each seed."""
    found = by_algorithm(results)
    means = sum(statistics.mean(run.gain for run in runs) >= WANTED_GAIN for runs in found.values())
    each = sum(enough(runs) for runs in found.values())
    wanted, number = f"{WANTED_GAIN * 100:.0f} points", len(found)
    return f"{means} of {number} gain {wanted} or more in the mean of their seeds, {each} of {number} on each seed."


def enough(runs: list[Result]) -> bool:
    """Whether every seed has gained what was wanted."""
    return all(run.error is None and len(run.curve) > 1 and run.gain >= WANTED_GAIN for run in runs)


def below(results: list[Result]) -> list[str]:
    """Of those that did not, what is known."""
    lines: list[str] = []
    for name, runs in by_algorithm(results).items():
        if name in BELOW and not enough(runs):
            lines += [*textwrap.wrap(f"`{name}` gains less than 30 points on some seed: {BELOW[name]}", 110), ""]
    return lines


def passes(results: list[Result]) -> list[str]:
    """What those that are paid for one right response in several are for, where it was measured."""
    found = {name: [r for r in runs if len(r.passes) > 1] for name, runs in by_algorithm(results).items()}
    lines = [
        f"| {name} | {', '.join(f'{run.passes[0][1]:.1%}' for run in runs)} "
        f"| {', '.join(f'{run.passes[-1][1]:.1%}' for run in runs)} "
        f"| {', '.join(f'{run.curve[-1][1]:.1%}' for run in runs)} |"
        for name, runs in found.items()
        if runs
    ]
    if not lines:
        return []
    text = (
        "`best_of_group` pays a response for what the group's maximum would lose without it: its lead over the second "
        f"best. Where two of the {GROUP} are right nobody is paid: at an accuracy p a share of (1 - p)^8 + 8 p "
        "(1 - p)^7 of the groups tells something, 74% at p = 12.5%, 4% at p = 50%. So its accuracy levels off as soon "
        "as most groups hold two right responses, and the gradient with it (on seed 0 it is 0 at the end). "
        "`pass_at_k` asks for one right response of 4, and levels off later. Nothing is wrong with either, and more "
        "steps would not help: accuracy is not what they optimise. "
        f"pass@{GROUP}, the chance that one of {GROUP} responses is right, is; for these runs accuracy is the mean of "
        f"{GROUP} responses to each prompt."
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
    """docs/learning_curves.md."""
    seconds = sum(result.seconds for result in results)
    failed = [result for result in results if result.error is not None]
    few = [name for name, runs in by_algorithm(results).items() if len(runs) < WANTED_SEEDS]
    unfinished = []
    if few:
        text = f"**Not finished**: fewer than {WANTED_SEEDS} seeds have run of {', '.join(few)}."
        unfinished = [*textwrap.wrap(text, 110), ""]
    said = [f"- {result.algorithm}, seed {result.seed}: {result.error}" for result in failed]
    return "\n".join(
        [
            "# Learning curves",
            "",
            "Every on-policy algorithm on the quickstart's task (write five digits backwards; a model of two layers",
            "after a short supervised warm-up), all from the same warm start of a seed, all with the same learning",
            f"rate, {STEPS} steps of 32 prompts x 8 responses and two mini-batches. Nothing is tuned for any of them.",
            "Accuracy on 256 held-out prompts, sampled at temperature 1. Steps are the budget: DAPO generates further",
            "groups in a step, ReMax a greedy response to each prompt, and PRIME trains a second model.",
            "",
            *unfinished,
            summary(results),
            "",
            "![accuracy by step](learning_curves.png)",
            "",
            table(results),
            "",
            *below(results),
            *passes(results),
            *textwrap.wrap(ELSEWHERE, 110, break_on_hyphens=False),
            "",
            *(["Runs that ended with an error:", "", *said, ""] if said else []),
            f"{len(results)} runs, {seconds / 60:.0f} minutes on one CPU core. Made by `tools/learning_curves.py`:",
            "`run` until all are done, then `report`.",
            "",
        ]
    )


def draw(results: list[Result], path: Path) -> None:
    """One panel per algorithm: the mean over the seeds, and a band from the worst to the best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = by_algorithm(results)
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes, (name, runs) in zip(panels, found.items(), strict=False):
        steps = [step for step, _ in max((run.curve for run in runs), key=len)]
        values = [[value for run in runs for at, value in run.curve if at == step] for step in steps]
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], alpha=0.25, linewidth=0)
        axes.plot(steps, [statistics.mean(v) for v in values], linewidth=1.5)
        axes.set_title(f"{name} ({len(runs)})", fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(True, alpha=0.3)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("accuracy on held-out prompts", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
