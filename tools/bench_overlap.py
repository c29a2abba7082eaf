#!/usr/bin/env python3
"""Gain of doing a step's work at the same time: roles on ranks of their own, and rollouts ahead of training.

    python tools/bench_overlap.py                                    # operators that sleep as long as stages would take
    python tools/bench_overlap.py --costs rollout=1,reward=0.3,actor_update=1
    python tools/bench_overlap.py --real                             # the work itself: a tiny model, engine and actor
    python tools/bench_overlap.py --partial --staleness 8            # responses of very different lengths, one rank
    python tools/bench_overlap.py --reshard                          # weights that travel while the critic updates

Every run is a real one of `megaverl train` on a tiny model. With simulated costs each operator does its work and then
sleeps until its time is over. Prints the median of the last steps beside the longest stage, that is, the work that one
role group does in a step. An asynchronous run reaches its aim if its step takes at most 1.1 times the longest stage.

--partial: runs GRPO with and without `rollout.partial`, one after the other on one rank with vLLM. The model has many
small layers, so that a decoding step costs much the same for few sequences and for many. Response lengths are drawn
from a log-normal distribution whose 99th percentile is ten times its median. Counts trained tokens per second of whole
steps, after the first steps, whose lengths do not follow the distribution yet; the aim is a factor of 1.8.

--reshard: runs PPO without and with `reshard.overlap`, one after the other on two ranks that have all roles. The actor
is cut in two, and each rank's engine has the whole model, so half of the weights travel and the rest is copied
(`reshard.alias: never`). Prints for each run the median time for which a step waits for the reshard, and the hidden
share 1 - (with / without) beside the run's own figure. The aim is 70 %; losses and rewards of both runs must be the
same to the bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SLEEPING = {
    "rollout": 0.6,
    "reward": 0.2,
    "ref_log_probs": 0.2,
    "values": 0.2,
    "critic_update": 0.3,
    "actor_update": 0.6,
}
# Methods of RLStep by operator.
METHODS = {
    "rollout": "generate",
    "reward": "score",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
    "critic_update": "update_critic",
    "actor_update": "update_actor",
}
APART = "placement={rollout: 0, reward: 1, critic: 2, reference: 3, actor: 4, coordinator: actor}"
LIMIT = 1.1
FIRST = 5  # steps until the pipeline is full and every kernel was used once
MEDIAN, LONGEST = 48, 960  # tokens of a response, with --partial
# Of the logarithms: the 99th percentile is ten times the median.
SIGMA = math.log(10) / 2.3263
GAIN = 1.8
HIDDEN = 0.7


def main() -> int:
    arguments = parse()
    if arguments.as_rank is not None:
        return be_rank(json.loads(arguments.as_rank), arguments.rest)
    if arguments.partial:
        return compare_partial(arguments)
    if arguments.reshard:
        return compare_reshard(arguments)
    costs = {} if arguments.real else parse_costs(arguments.costs)
    with tempfile.TemporaryDirectory(prefix="megaverl_overlap_") as folder:
        settings = make_arguments(Path(folder), arguments)
        rows = [
            measure(kind, Path(folder), settings, costs, arguments)
            for kind in kinds_of(arguments)
        ]
    print(
        f"{'':<26}{'step, s':>9}{'longest stage, s':>18}{'ratio':>8}{'all work, s':>13}"
    )
    for row in rows:
        print(
            f"{row['kind']:<26}{row['step']:>9.3f}{row['longest']:>18.3f}{row['ratio']:>8.3f}{row['work']:>13.3f}"
        )
    best = rows[-1]
    verdict = "reached" if best["ratio"] <= LIMIT else "not reached"
    print(f"aim for asynchronous rollouts, a ratio of at most {LIMIT}: {verdict}")
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"costs": costs, "rows": rows}, indent=2) + "\n",
            encoding="utf-8",
        )
    return 0


def parse() -> argparse.Namespace:
    described = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    described.add_argument(
        "--costs",
        default="",
        metavar="STAGE=SECONDS,...",
        help="what the operators take",
    )
    described.add_argument(
        "--real", action="store_true", help="no sleeping: engine and actor on two ranks"
    )
    described.add_argument(
        "--partial",
        action="store_true",
        help="rollout.partial against waiting for all responses",
    )
    described.add_argument(
        "--reshard",
        action="store_true",
        help="reshard.overlap against waiting for the reshard",
    )
    more = "of both, with --partial or --reshard"
    described.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=more
    )
    described.add_argument("--steps", type=int, default=16)
    described.add_argument(
        "--staleness",
        type=int,
        default=3,
        help="rollout.max_staleness of the asynchronous run",
    )
    described.add_argument(
        "--over-sample",
        type=float,
        default=2.0,
        help="rollout.partial.over_sample, with --partial",
    )
    described.add_argument("--json", metavar="FILE")
    described.add_argument("--as-rank", help=argparse.SUPPRESS)
    described.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return described.parse_args()


def parse_costs(text: str) -> dict[str, float]:
    by_stage = dict(part.split("=") for part in text.split(",") if part)
    if unknown := sorted(set(by_stage) - set(METHODS)):
        raise SystemExit(
            f"--costs: no stage {unknown[0]}; there are {', '.join(METHODS)}"
        )
    return (
        {name: float(by_stage[name]) for name in by_stage}
        if by_stage
        else dict(SLEEPING)
    )


def kinds_of(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Return the kinds of runs to compare, as (name, settings)."""
    placement = "placement={rollout: 0, actor: rest}" if arguments.real else APART
    ahead = f"rollout={{async_rollout: true, max_staleness: {arguments.staleness}}}"
    return [
        ("shared ranks", []),
        ("roles on their own", [placement]),
        (f"rollouts ahead by {arguments.staleness}", [placement, ahead]),
    ]


def make_arguments(
    folder: Path,
    arguments: argparse.Namespace,
    *,
    hidden: int | None = None,
    positions: int = 256,
    layers: int | None = None,
) -> list[str]:
    """Write a tiny model and its data, and return the settings that train it.

    Args:
        hidden, layers: the model's hidden size and depth; None takes the sizes that the kind of run needs.
        positions: the longest sample that the model takes.
    """
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    task = make_task("reverse", num_digits=3, num_train=64, num_held_out=16)
    task.save(folder)
    tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
    size = hidden or (256 if arguments.real else 64)
    make_tiny_folder(
        folder / "model",
        "Qwen3ForCausalLM",
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers or (4 if arguments.real else 2),
        num_attention_heads=size // 32,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=tokenizer.vocab_size,
    )
    tokenizer.save(folder / "model")
    tokens = 48 if arguments.real else 6
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        "reward=exact_match",
        f"rollout={{engine: hf, sampling: {{max_tokens: {tokens}}}}}",
        "algorithm={name: ppo, kl: {in: reward, kind: k1, coef: 0.01}}",
        f"data={{max_prompt_tokens: 16, prompts_per_step: {64 if arguments.real else 8}}}",
        f"trainer={{steps: {arguments.steps}, validate_every: 0, save_samples: 0}}",
        f"run.dir={folder}",
        "run.log_with=jsonl",
        "checkpoint.export_hf=false",
    ]


def measure(
    kind: tuple[str, list[str]],
    folder: Path,
    settings: list[str],
    costs: dict[str, float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Run one kind and return its figures."""
    name, more = kind
    ranks = (2 if arguments.real else 5) if more else 1
    records = run_and_read(
        name.replace(" ", "_"), folder, [*settings, *more], costs, ranks
    )[:-1]
    step = statistics.median(record["train/step_time_ms"] for record in records) / 1e3
    stages = {
        stage: statistics.median(
            record.get(f"time/{stage}_ms", 0.0) for record in records
        )
        / 1e3
        for stage in (*METHODS, "old_log_probs", "advantages", "reshard")
    }
    longest = max(
        sum(stages[stage] for stage in world) for world in worlds_of(more, arguments)
    )
    return {
        "kind": name,
        "step": step,
        "longest": longest,
        "ratio": step / longest,
        "work": sum(stages.values()),
    }


def worlds_of(more: list[str], arguments: argparse.Namespace) -> list[tuple[str, ...]]:
    """Return the stages of each role group, which it does one after the other."""
    actor = ("old_log_probs", "advantages", "actor_update", "reshard")
    critic, reference = ("values", "critic_update"), ("ref_log_probs",)
    if not more:
        return [("rollout", "reward", *reference, *critic, *actor)]
    if arguments.real:
        return [("rollout", "reward"), (*actor, *critic, *reference)]
    return [("rollout",), ("reward",), critic, reference, actor]


def compare_partial(arguments: argparse.Namespace) -> int:
    """Run GRPO with and without `rollout.partial`, and print the ratio of tokens per second."""
    of_partial = f"{{chunk_tokens: 32, over_sample: {arguments.over_sample}}}"
    partial = f"rollout={{partial: {of_partial}, max_staleness: {arguments.staleness}}}"
    with tempfile.TemporaryDirectory(prefix="megaverl_partial_") as name:
        folder = Path(name)
        settings = [
            *make_arguments(folder, arguments, positions=2 * LONGEST, layers=8),
            f"rollout={{engine: vllm, sampling: {{max_tokens: {LONGEST}, ignore_eos: true}}}}",
            "algorithm={name: grpo, group_size: 4, correction: {kind: token_truncate}}",
            "data.prompts_per_step=8",
            "actor.micro_batch_tokens=4096",
            *arguments.set,
        ]
        rows = [
            long_tailed(name, folder, [*settings, *more])
            for name, more in (("waits", []), ("partial", [partial]))
        ]
    columns = (
        "tokens/s",
        "generation, s",
        "step, s",
        "mean length",
        "age, mean",
        "age, max",
    )
    print(f"{'':<10}" + "".join(f"{column:>15}" for column in columns))
    for row in rows:
        print(
            f"{row['kind']:<10}"
            + "".join(f"{row[column]:>15.2f}" for column in columns)
        )
    gain = rows[1]["tokens/s"] / rows[0]["tokens/s"]
    print(
        f"{gain:.2f} times as many tokens per second; aim {GAIN}: {'reached' if gain >= GAIN else 'not reached'}"
    )
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"rows": rows, "gain": gain}, indent=2) + "\n", encoding="utf-8"
        )
    return 0


def compare_reshard(arguments: argparse.Namespace) -> int:
    """Run PPO with and without `reshard.overlap`, and print the share of the reshard that is hidden."""
    with tempfile.TemporaryDirectory(prefix="megaverl_reshard_") as name:
        folder = Path(name)
        settings = [
            *make_arguments(folder, arguments, hidden=512, layers=6),
            "actor={tp: 2, ddp: {overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 2000000}}",
            "reshard.alias=never",
            *arguments.set,
        ]
        rows: list[dict[str, Any]] = []
        records = []
        for kind, overlap in (("waits", "false"), ("overlap", "true")):
            records.append(
                run_and_read(
                    kind, folder, [*settings, f"reshard.overlap={overlap}"], {}, ranks=2
                )
            )
            rows.append(
                {"kind": kind}
                | {
                    column: median(records[-1], key, scale)
                    for column, key, scale in COLUMNS
                }
            )
    print(f"{'':<10}" + "".join(f"{column:>18}" for column, *_ in COLUMNS))
    for row in rows:
        print(
            f"{row['kind']:<10}"
            + "".join(f"{row[column]:>18.3f}" for column, *_ in COLUMNS)
        )
    hidden = 1 - rows[1]["waits, s"] / rows[0]["waits, s"]
    learnt = [[[record[key] for key in LEARNT] for record in run] for run in records]
    same = learnt[0] == learnt[1]
    verdict = "reached" if hidden >= HIDDEN and same else "not reached"
    print(
        f"hidden: {hidden:.0%} of the reshard; losses the same to the bit: {same}; aim {HIDDEN:.0%}: {verdict}"
    )
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"rows": rows, "hidden": hidden}, indent=2) + "\n",
            encoding="utf-8",
        )
    return 0


COLUMNS = (
    ("waits, s", "time/reshard_ms", 1e-3),
    ("moves, s", "reshard/seconds", 1.0),
    ("says hidden", "reshard/hidden_fraction", 1.0),
    ("actor update, s", "time/actor_update_ms", 1e-3),
    ("critic update, s", "time/critic_update_ms", 1e-3),
    ("step, s", "train/step_time_ms", 1e-3),
)
LEARNT = (
    "actor/loss",
    "actor/grad_norm",
    "critic/loss",
    "critic/grad_norm",
    "reward/mean",
    "train/kl",
)


def median(records: list[Any], key: str, scale: float) -> float:
    return statistics.median(record.get(key, 0.0) for record in records) * scale


def long_tailed(kind: str, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Run once with drawn response lengths and return the figures."""
    records = run_and_read(kind, folder, settings, {"median": MEDIAN}, ranks=1)
    seconds = sum(record["train/step_time_ms"] for record in records) / 1e3
    lengths = [record["rollout/response_length_mean"] for record in records]
    return {
        "kind": kind,
        "tokens/s": sum(lengths) * 32 / seconds,
        "generation, s": statistics.mean(
            record["rollout/seconds"] for record in records
        ),
        "step, s": seconds / len(records),
        "mean length": statistics.mean(lengths),
        "age, mean": statistics.mean(
            record.get("rollout/token_staleness_mean", 0.0) for record in records
        ),
        "age, max": max(record["rollout/staleness"] for record in records),
    }


def run_and_read(
    label: str, folder: Path, settings: list[str], costs: dict[str, float], ranks: int
) -> list[Any]:
    """Start a run and return the records of its steps without the first ones."""
    from megaverl.trainer.elastic_agent import start_ranks

    command = [
        str(Path(__file__).resolve()),
        "--as-rank",
        json.dumps(costs),
        "train",
        *settings,
    ]
    code = start_ranks(
        [*command, f"run.name={label}"], ranks, log_hint=str(folder / label / "logs")
    )
    if code:
        raise SystemExit(f"{label}: the run ended with {code}")
    lines = (folder / label / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        record for record in map(json.loads, lines) if "train/step_time_ms" in record
    ][FIRST:]


def be_rank(costs: dict[str, float], argv: list[str]) -> int:
    """Run `megaverl train` as one rank, with operators that take their simulated time."""
    from megaverl.cli.main import main as command
    from megaverl.trainer.step import RLStep

    if median := costs.pop("median", None):
        sampling = functools.partialmethod(limited, RLStep._sampling, median)
        RLStep._sampling = sampling  # type: ignore[method-assign, assignment]
    for stage, seconds in costs.items():
        setattr(
            RLStep, METHODS[stage], taking(seconds, getattr(RLStep, METHODS[stage]))
        )
    return command(argv)


def limited(
    step: Any, sampling_of: Callable[..., Any], median: float, prompts: Any, draws: Any
) -> list[Any]:
    """Return the sampling parameters of each response, which end it at the length drawn for its step and number."""
    sampling = sampling_of(step, prompts, draws)
    options = []
    for sample in range(len(prompts) * draws.group_size):
        options.append(
            sampling.with_max_tokens(drawn_length(draws.seed(sample), median))
        )
    return options


def drawn_length(draw: int, median: float = MEDIAN) -> int:
    """Return the length of a response in tokens, which depends on the number `draw` alone."""
    return max(
        1,
        min(
            LONGEST, round(random.Random(draw).lognormvariate(math.log(median), SIGMA))
        ),
    )


def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it sleeps until `seconds` have passed since its start."""

    @functools.wraps(function)
    def slow(*values: Any, **named: Any) -> Any:
        end = time.perf_counter() + seconds
        result = function(*values, **named)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return slow


if __name__ == "__main__":
    sys.exit(main())
