"""Learning curves of every on-policy algorithm on the quickstart's task, from the same warm starts with one budget.

    python tools/learning_curves.py run --out runs/learning_curves --seconds 280     # again and again, until done
    python tools/learning_curves.py report --out runs/learning_curves --docs docs

`run` trains every run that is not finished, one after the other in one process (Megatron-core, generation by
transformers), and starts none that would last longer than `--seconds`. After SIGTERM it stops, and the next call
continues. Nothing is tuned for an algorithm: all have the same learning rate, batch and number of steps, and their
published constants for the rest. `report` draws one picture and writes one table into docs/learning_curves.md, which
also show runs that failed or did not learn. `--task shapes` trains one tiny model that sees pictures
(`learning_shapes.py`); `--task recipes` runs recipes unchanged (`learning_recipes.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import learning_recipes, learning_shapes
from tools.learning_curves_page import Result, draw, page, table
from tools.learning_curves_settings import (
    ALGORITHMS,
    COMMON,
    GROUP,
    OF_GROUPS,
    TAUGHT,
    TEACHER,
)

ACCURACY, PASS = "validation/accuracy", f"validation/pass@{GROUP}"
OTHER_TASKS = {"shapes": learning_shapes, "recipes": learning_recipes}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument(
        "--task",
        choices=["digits", *OTHER_TASKS],
        default="digits",
        help="what is learned",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of results; what is there is not done again",
    )
    parser.add_argument(
        "--algorithms",
        nargs="*",
        default=list(ALGORITHMS),
        choices=list(ALGORITHMS),
        metavar="NAME",
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no run that would last longer",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        default=Path("docs"),
        help="where the picture and the table go",
    )
    options = parser.parse_args(arguments)
    if options.task in OTHER_TASKS:
        task = OTHER_TASKS[options.task]
        if options.what == "run":
            return task.run(options.out, options.seeds, options.seconds)
        return task.report(options.out, options.docs, options.seeds)
    wanted = [(name, seed) for seed in options.seeds for name in options.algorithms]
    if options.what == "run":
        return run(options.out, wanted, options.seconds)
    results = [
        result
        for result in stored(options.out)
        if (result.algorithm, result.seed) in wanted
    ]
    if not results:
        parser.error(f"{options.out} holds no results: run them first")
    draw(results, options.docs / "learning_curves.png")
    file = options.docs / "learning_curves.md"
    file.write_text(page(results) + learning_recipes.section(file), encoding="utf-8")
    print(table(results))
    return 0


def run(out: Path, wanted: list[tuple[str, int]], seconds: float) -> int:
    """Train the missing runs. Returns 0 when all are there, 3 if time ran out."""
    start, longest = time.monotonic(), 0.0
    missing = [
        (name, seed)
        for name, seed in wanted
        if not result_file(out, name, seed).exists()
    ]
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
        print(
            f"{name} seed {seed}: {result.error or result.curve} in {result.seconds:.0f} s",
            flush=True,
        )
    return 0


def train(out: Path, name: str, seed: int) -> Result | None:
    """Train one algorithm from its warm start or its last checkpoint; return None if it is told to leave again."""
    from megaverl.trainer.job import Leaving

    run = f"{name}_{seed}"
    try:
        error = attempt(configuration(out, seed, run, name, warm_start(out, seed)))
    except Leaving:
        return None
    records = recorded(out, run)
    curve, passes = (
        [(r["step"], r[key]) for r in records if key in r] for key in (ACCURACY, PASS)
    )
    seconds = sum(record.get("train/step_time_ms", 0.0) for record in records) / 1e3
    shutil.rmtree(out / "runs" / run / "checkpoints", ignore_errors=True)
    taught_by = (
        recorded(out, teacher_run(seed))[-1][ACCURACY] if name in TAUGHT else None
    )
    return Result(name, seed, curve, seconds, error, passes, taught_by)


def attempt(config: Any) -> str | None:
    """Train from the start or the last checkpoint, and return the error that stopped the run, if any."""
    from megaverl.checkpoint.training_state import seed_generators
    from megaverl.errors import MegaverlError
    from megaverl.monitoring.console import Console
    from megaverl.trainer.job import alone
    from megaverl.trainer.loop import Trainer

    seed_generators(config.run.seed)
    try:
        Trainer(config, Console(rank=1), alone(config)).train()
    except MegaverlError as failed:
        return f"{type(failed).__name__}: {failed}"
    return None


def recorded(out: Path, run: str) -> list[dict[str, Any]]:
    """Return the metrics of a run, by step."""
    lines = (
        (out / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    )
    return [json.loads(line) for line in lines]


def warm_start(out: Path, seed: int) -> Path:
    """Return the quickstart's model of this seed after its supervised warm-up, made once for all algorithms."""
    from megaverl.checkpoint.training_state import seed_generators
    from megaverl.monitoring.console import Console
    from megaverl.trainer.build import Builder
    from megaverl.trainer.job import alone
    from megaverl.trainer.quickstart import prepare
    from megaverl.trainer.saving import export_model
    from megaverl.trainer.supervised import warm_up

    inputs = out / "runs" / f"warm_{seed}" / "inputs"
    if not (inputs / "warm" / "config.json").exists():
        config = configuration(
            out, seed, f"warm_{seed}", "ppo", inputs / "model", check_paths=False
        )
        prepare(config)
        seed_generators(seed)
        builder = Builder(config)
        export_model(
            warm_up(config, builder, Console(rank=1), alone(config)),
            builder,
            inputs / "warm",
        )
    return inputs / "warm"


def teacher(out: Path, seed: int) -> Path:
    """Return the model that `TEACHER` makes of the same warm start on the same budget, made once for all students."""
    folder = out / "runs" / teacher_run(seed) / "hf"
    if not (folder / "config.json").exists():
        warm, run = warm_start(out, seed), teacher_run(seed)
        if error := attempt(
            configuration(out, seed, run, TEACHER, warm, "checkpoint.export_hf=true")
        ):
            raise SystemExit(f"there is no teacher: {error}")
    return folder


def teacher_run(seed: int) -> str:
    return f"teacher_{seed}"


def configuration(
    out: Path,
    seed: int,
    run: str,
    name: str,
    model: Path,
    *overrides: str,
    check_paths: bool = True,
) -> Any:
    """Return the quickstart's configuration with one algorithm; `overrides` come last."""
    from megaverl.config import load_config
    from megaverl.config.yaml_source import recipe

    inputs = out / "runs" / f"warm_{seed}" / "inputs"
    settings = [
        *COMMON,
        f"run.dir={out / 'runs'}",
        f"run.name={run}",
        f"run.seed={seed}",
        f"model.path={model}",
        f"data.train={inputs / 'train.jsonl'}",
        f"data.validation={inputs / 'held_out.jsonl'}",
        f"algorithm.name={name}",
        *ALGORITHMS[name],
        *([f"reference.path={teacher(out, seed)}"] if name in TAUGHT else []),
        *(
            [f"trainer={{validation_samples: {GROUP}, pass_at: [1, {GROUP}]}}"]
            if name in OF_GROUPS
            else []
        ),
        *overrides,
    ]
    return load_config(
        recipe("quickstart"), settings, check_paths=check_paths, world_size=1
    )


def join_world() -> None:
    """Make a process group of this process alone."""
    import torch.distributed as dist

    from megaverl.platform import platform

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    platform.start()
    folder = tempfile.mkdtemp(prefix="megaverl_curves_")
    dist.init_process_group(
        platform.backend, init_method=f"file://{folder}/store", rank=0, world_size=1
    )


def result_file(out: Path, name: str, seed: int) -> Path:
    return out / "results" / f"{name}_{seed}.json"


def write(out: Path, result: Result) -> None:
    path = result_file(out, result.algorithm, result.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result._asdict()), encoding="utf-8")
    part.replace(path)


def stored(out: Path) -> Iterator[Result]:
    """Yield the algorithms' stored results, without those of other tasks in the same folder."""
    for path in sorted((out / "results").glob("*.json")):
        if path.stem.rpartition("_")[0] not in ALGORITHMS:
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        curves = {
            key: [(int(step), float(value)) for step, value in content.get(key, [])]
            for key in ("curve", "passes")
        }
        yield Result(**{**content, **curves})


if __name__ == "__main__":
    sys.exit(main())
