"""Commands that run on ranks: `train`, `sft`, `dpo`, `reward` and `quickstart` train; `generate` and `eval` do not.

Each command checks the configuration. Under torchrun it then runs this process's rank,
otherwise it starts the ranks. `train` also runs as `python -m megaverl.cli.train`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megaverl.cli.options import (
    Subcommand,
    UsageError,
    add_config,
    add_dry_run,
    add_nproc,
    add_resume,
    read_config,
)
from megaverl.config import Config, load_config, smallest_world
from megaverl.config.evaluation import HARNESS_NAMES, SUITE_NAMES
from megaverl.config.files_and_packages import DATA_SUFFIXES
from megaverl.config.grids import CLAIMS, REINFORCING
from megaverl.config.loader import Command, Make
from megaverl.config.run import is_hub_name
from megaverl.config.yaml_source import recipe
from megaverl.distributed.placement import parse_claims
from megaverl.errors import (
    FAILED,
    INTERRUPTED,
    MISTAKE,
    SAVED_AND_LEFT,
    ConfigError,
    MegaverlError,
)
from megaverl.temporary import remove_temporary_folder
from megaverl.trainer.code_checks import Preflight
from megaverl.trainer.preflight import (
    check_before_ranks,
    check_builds,
    check_code_and_data,
    check_dry_run,
    check_fields,
    check_packages,
    prepare_environment,
)
from megaverl.trainer.resuming import check_resume

UNDER_TORCHRUN = (
    "Under torchrun the command is one of its ranks; otherwise it starts them itself."
)
# Commands that write checkpoints and can resume from them.
RESUMED = ("train", "sft", "dpo", "reward")
# Number of new objects between two garbage collections, until the training loop sets
# its own.
STARTING_THRESHOLD = 100_000


# Function that turns a command's own options into overrides. It may return options for
# `megaverl.trainer.run.main`.
Apply = Callable[[argparse.Namespace], dict[str, Any] | None]


def rank_command(
    command: Command,
    description: str,
    examples: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    apply: Apply | None = None,
    note: str = "",
) -> Subcommand:
    """Build a command with the options that all commands of this module take.

    Args:
        command: name of the command.
        description: first lines of its --help.
        examples: indented lines for the end of its --help.
        add_options: adds the command's own options.
        apply: see `Apply`.
        note: last sentence of its --help.
    """

    def all_options(parser: argparse.ArgumentParser) -> None:
        add_config(parser)
        add_nproc(parser)
        add_dry_run(parser)
        if command in RESUMED:
            add_resume(parser)
        if add_options is not None:
            add_options(parser)

    def run(arguments: argparse.Namespace) -> int:
        return run_command(command, arguments, apply)

    return Subcommand(
        description,
        all_options,
        run,
        f"examples:\n{examples}\n\n{UNDER_TORCHRUN}{note}",
    )


def run_command(
    command: Command,
    arguments: argparse.Namespace,
    apply: Apply | None,
    words: tuple[str, ...] | None = None,
) -> int:
    """Check everything, then run the command.

    Under torchrun this process runs its rank. Otherwise it starts the ranks and waits
    for them.

    Args:
        words: first words of the command line that runs a rank. None: the command's name.

    Returns:
        The exit code of the command.
    """
    rank = (
        int(os.environ["RANK"])
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ
        else None
    )
    try:
        if not arguments.dry_run:
            check_builds()
        options = (apply(arguments) if apply else None) or {}
        choose = _choose if command in REINFORCING else None
        config = read_config(
            arguments, command, check_paths=not arguments.no_file_checks, choose=choose
        )
        if rank is not None and not arguments.dry_run:
            # Variables such as CUDA's must be set before user code may import torch.
            prepare_environment(config, command)
        if arguments.dry_run:
            warning = check_dry_run(
                config, command, with_files=not arguments.no_file_checks
            )
        else:
            warning = check_before_ranks(config, command, is_rank=rank is not None)
        with_trials = not arguments.no_file_checks and rank is None
        notes = check_fields(
            config, command, dry_run=arguments.dry_run, with_trials=with_trials
        )
        checked = None
        # Ranks of a torchrun job check code and data after they have connected, once
        # for all of them.
        reports = rank is None or (arguments.dry_run and rank == 0)
        if reports and not arguments.no_file_checks:
            checked = check_code_and_data(config, command)
    except ConfigError as error:
        if not rank:
            # All ranks of a job find the same mistakes. Only the first reports them.
            print(error, file=sys.stderr)
        return MISTAKE
    if warning and rank is None:
        print(f"warning: {warning}", file=sys.stderr)
    if rank is None:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if arguments.dry_run:
        if not rank:
            print(
                config.to_yaml()
                if arguments.print
                else f"{summary(config, command, checked)}\n",
                end="",
            )
            for line in [
                *(f"warning: {warning}" for warning in config.warnings),
                *config.choices,
            ]:
                print(line, file=sys.stderr)
        return 0
    if rank is not None:
        return run_rank(
            config, command, options, rank, checks_files=not arguments.no_file_checks
        )
    from megaverl.trainer.elastic_agent import launch

    try:
        argv = [*(words or (command,)), *arguments.argv]
        return launch(config, command, argv, arguments.nproc)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return exit_code(error)


def summary(config: Config, command: str, checked: Preflight | None) -> str:
    """Return the last line of a successful dry run: the size of the run, and what was not checked.

    Args:
        checked: result of the checks of code and data. None: they were skipped.
    """
    planned = {
        "sft": config.sft.steps,
        "dpo": config.preference.steps,
        "reward": config.preference.steps,
    }
    ranks = config.run.nproc or smallest_world(config, command)
    parts = [f"{ranks:,} rank{'s' if ranks > 1 else ''}"]
    if checked is not None and checked.num_rows is not None:
        parts.append(f"{checked.num_rows:,} training rows")
    if command not in ("generate", "eval", "tinker"):
        parts.append(f"{planned.get(command, config.trainer.steps):,} steps")
    parts += planned_memory(config, command, ranks)
    left_out = (
        ["prompts in tokens (megaverl data check)", "weights"]
        if checked is not None
        else []
    )
    if is_hub_name(config.model.path):
        left_out.insert(
            0, f"whether {config.model.path}, which is no folder here, is on the hub"
        )
    left_out = [
        *(
            checked.not_checked
            if checked
            else ["files, code and data (--no-file-checks)"]
        ),
        *left_out,
    ]
    return f"{command}: the configuration is good: {', '.join(parts)}. Not looked at: {', '.join(left_out)}."


def planned_memory(config: Config, command: str, ranks: int) -> list[str]:
    """Return the predicted memory of the fullest rank, as a list of one phrase.

    The list is empty for other commands than `train`, for a model that is not on this
    machine, and if the planner fails.
    """
    if command != "train" or not (Path(config.model.path) / "config.json").is_file():
        return []
    from megaverl.planner.job import GB, find_spec, make_job
    from megaverl.planner.memory import MemoryModel

    try:
        spec = find_spec(config)
        memory = MemoryModel(make_job(config, spec, ranks, builds_engine=False)).ranks()
    except MegaverlError:
        return []
    # The cache takes whatever its share of a GPU leaves, and the reserve is the
    # driver's.
    moments = [used for rank in memory for used in rank.moments.values()]
    # The KV cache fills whatever its share of the GPU leaves free, and the reserve
    # belongs to the driver. Neither is a mistake in the configuration.
    peak = max(
        sum(size for part, size in used.items() if part not in ("KV cache", "reserve"))
        for used in moments
    )
    return [f"{peak / GB:.3g} GB on the fullest rank besides the engine's cache"]


def _choose(
    make: Make, keys: tuple[str, ...], world: int
) -> tuple[dict[str, Any], str]:
    """Choose values for keys that are `auto`. The planner is imported only if there are such keys."""
    from megaverl.planner.search import choose

    return choose(make, keys, world)


def run_rank(
    config: Config,
    command: str,
    options: dict[str, Any],
    rank: int,
    *,
    checks_files: bool = True,
) -> int:
    """Run `megaverl.trainer.run.main` on this rank, and return only if it succeeds.

    Otherwise the process reports the error and exits at once, without waiting for
    threads: other ranks may be waiting for this process to end. For a MegaverlError the
    message is shown. For any other exception the terminal shows the rank, the exception
    and the log file that has the traceback.
    """
    # Starting imports thousands of modules that stay in memory. Collecting garbage at
    # the usual rate takes a fifth of the start, and finds almost nothing.
    gc.set_threshold(STARTING_THRESHOLD)
    try:
        from megaverl.planner.placed_run import check_memory
        from megaverl.trainer.run import main

        check = check_memory if command == "train" else None
        code = main(config, command, options, check, checks_files=checks_files)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        # SystemExit is caught too: whatever code it carries, the run did not reach its
        # end.
        _report(config, rank, error)
        _leave(exit_code(error))
    if code:
        _leave(code)
    return 0


def exit_code(error: BaseException) -> int:
    """Return the exit code for an error: MISTAKE for an error of the configuration, FAILED for all others."""
    return MISTAKE if isinstance(error, ConfigError) else FAILED


def _report(config: Config, rank: int, error: BaseException) -> None:
    """Report an error through the exception hook of `redirect_output`.

    The hook writes the traceback to the rank's log, and one message per machine to the
    terminal.
    """
    if sys.excepthook is sys.__excepthook__:
        # The run failed before it redirected its output, so that is done now.
        from megaverl.monitoring.console import redirect_output

        try:
            redirect_output(config.run_dir / "logs", rank)
        except OSError as unwritable:
            print(
                f"error: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr
            )
            print(f"(no log of it: {unwritable})", file=sys.stderr)
            return
    if not isinstance(error, MegaverlError) and hasattr(error, "add_note"):
        error.add_note(f"on rank {rank} of {os.environ.get('WORLD_SIZE', '1')}")
    sys.excepthook(type(error), error, error.__traceback__)


def _leave(code: int) -> NoReturn:
    """Exit at once, without waiting for engines, process groups and their threads, which may wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    remove_temporary_folder()
    os._exit(code)


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; can be given several times",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSONL or Parquet; data.prompt_key names the column",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="JSONL file to write; default: print text"
    )


def _generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the prompts that `generate` is given, and return them as options of the run."""
    if arguments.prompt is None and arguments.prompts is None:
        raise UsageError("give --prompt TEXT or --prompts FILE")
    if arguments.prompts is not None:
        path = Path(arguments.prompts)
        if path.suffix not in DATA_SUFFIXES:
            raise UsageError(
                f"--prompts: found {path}; expected a file that ends in {' or '.join(DATA_SUFFIXES)}"
            )
        if not path.is_file():
            raise UsageError(f"--prompts: {path} does not exist")
    return {name: getattr(arguments, name) for name in ("prompt", "prompts", "output")}


def _eval_options(parser: argparse.ArgumentParser) -> None:
    suites = ", ".join(SUITE_NAMES)
    parser.add_argument(
        "--suite", metavar="NAMES", help=f"published data sets, with commas: {suites}"
    )
    parser.add_argument(
        "--harness",
        choices=HARNESS_NAMES,
        help="harness of the tasks: inspect-ai, or EleutherAI's lm-evaluation-harness",
    )
    parser.add_argument(
        "--task",
        action="append",
        metavar="TASK",
        help="task of the harness, such as gsm8k or my_task.py@my_task; several with commas or several options; "
        "evaluation.harness_options has the harness's options",
    )
    parser.add_argument(
        "--run",
        metavar="RUN",
        help="folder of a run: evaluate the model that it has written",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="evaluate the model that this vLLM or SGLang server serves",
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="folder of an earlier evaluation of suites to compare with",
    )


def _eval(arguments: argparse.Namespace) -> dict[str, Any]:
    """Turn the options of `eval` into overrides, and return those of the run."""
    if (
        arguments.against is not None
        and arguments.suite is None
        and arguments.task is None
        and arguments.config is None
    ):
        raise UsageError(
            "--against compares suites and tasks; give --suite NAMES or --task TASK too"
        )
    if (arguments.harness is None) != (arguments.task is None):
        raise UsageError(
            f"give both --harness NAME and --task TASK; harnesses are {' and '.join(HARNESS_NAMES)}"
        )
    overrides = []
    if arguments.run is not None:
        overrides += _model_of_run(arguments)
    if arguments.suite is not None:
        overrides.append(f"evaluation.suites={json.dumps(arguments.suite.split(','))}")
    if arguments.task is not None:
        names = [name for text in arguments.task for name in text.split(",")]
        tasks = [f"{arguments.harness}:{name.strip()}" for name in names]
        overrides.append(f"evaluation.tasks={json.dumps(tasks)}")
    if arguments.url is not None:
        overrides += [
            "rollout.engine=server",
            f"rollout.servers.urls={json.dumps([arguments.url])}",
        ]
    # The user's own key=value stand last, and so win.
    arguments.overrides = [*overrides, *arguments.overrides]
    return {"against": arguments.against}


def _model_of_run(arguments: argparse.Namespace) -> list[str]:
    """Take the configuration of a run, and return the overrides that name its trained model."""
    folder = Path(arguments.run)
    if not (folder / "hf" / "config.json").is_file():
        raise UsageError(
            f"--run: {folder} has no model in {folder / 'hf'}. Give the folder of a finished run"
        )
    if arguments.config is None:
        files = [folder / f"{command}.yaml" for command in (*RESUMED, "quickstart")]
        arguments.config = next((str(file) for file in files if file.is_file()), None)
    # The evaluation has a folder of its own inside the run's, where reports look for
    # it.
    return [f"model.path={folder / 'hf'}", f"run.dir={folder}", "run.name=eval"]


EXIT_CODES = (
    " Exit codes: 0 finished; 1 failed; 2 mistake in the configuration; 130 interrupted; "
    f"{SAVED_AND_LEFT} saved and left after SIGTERM or SIGUSR1, start it again to resume."
)


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rollout-only",
        action="store_true",
        help="generate, score and store without training",
    )
    parser.add_argument(
        "--replay-rollouts",
        metavar="PATH",
        help="train on stored rollouts, without an engine",
    )
    parser.add_argument(
        "--track_metrics",
        "--track-metrics",
        nargs="?",
        const="*",
        metavar="PATTERNS",
        help="metrics that trackers receive, such as 'reward/*,actor/*'; without a value: all (run.track_metrics)",
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="ROLES",
        help="roles of this node, under torchrun: train, rollout, reward, critic, reference, coordinator; several with "
        "commas or several options; if no node has the role train, the rollout's nodes train too",
    )


def _train(arguments: argparse.Namespace) -> None:
    """Turn the options of `train` into overrides, and put the roles of this node into the environment."""
    if arguments.role is not None:
        roles = ",".join(arguments.role)
        try:
            parse_claims(roles)
        except ValueError as error:
            raise UsageError(f"--role: {error}") from error
        os.environ[CLAIMS] = roles
    if arguments.rollout_only:
        arguments.overrides.append("trainer.rollout_only=true")
    if arguments.replay_rollouts is not None:
        arguments.overrides.append(
            f"trainer.replay_rollouts={arguments.replay_rollouts}"
        )
    if arguments.track_metrics is not None:
        if "=" in arguments.track_metrics:
            # `--track_metrics key=value`: argparse took the next override for the
            # option's value. So the option was given alone.
            arguments.overrides.append(arguments.track_metrics)
            arguments.track_metrics = "*"
        arguments.overrides.append(
            f"run.track_metrics={json.dumps(arguments.track_metrics.split(','))}"
        )


def not_yet(
    make: Make, keys: tuple[str, ...], world: int
) -> tuple[dict[str, Any], str]:
    """Leave keys that are `auto` at their defaults: the quickstart's model does not exist yet."""
    return {}, ""


def _quickstart(arguments: argparse.Namespace) -> None:
    """Take the quickstart's recipe, and make its model and data before the ranks start."""
    arguments.config = arguments.config or str(recipe("quickstart"))
    if arguments.dry_run:
        # The files are made by the run, so a dry run cannot check them.
        arguments.no_file_checks = True
    # Only the process that starts the ranks makes their files. Under torchrun the ranks
    # would race for them.
    elif "RANK" not in os.environ:
        config = load_config(
            arguments.config,
            arguments.overrides,
            command="quickstart",
            check_paths=False,
            choose=not_yet,
        )
        check_builds()
        check_packages(config, "quickstart")
        # Checked before the files are made anew: a run that would not be resumed must
        # not replace them.
        check_resume(config, "quickstart")
        from megaverl.trainer.quickstart import prepare

        prepare(config)


COMMANDS = {
    "generate": rank_command(
        "generate",
        "Generate responses; rollout.sampling has the settings.",
        """\
  megaverl generate model.path=DIR --prompt "What is 2+3?" rollout.sampling.temperature=0
  megaverl generate --config FILE --prompts questions.jsonl --output answers.jsonl""",
        _generate_options,
        _generate,
    ),
    "eval": rank_command(
        "eval",
        "Score a model on data.validation, on published data sets, or by inspect-ai and lm-eval.",
        """\
  megaverl eval --config FILE model.path=runs/mine/hf trainer.validation_samples=4 'trainer.pass_at=[1, 4]'
  megaverl eval --suite aime,gsm8k model.path=DIR evaluation.data.gsm8k=test.jsonl rollout.sampling.max_tokens=8192
  megaverl eval --suite math --run runs/mine --against runs/before
  megaverl eval --suite gpqa --url http://127.0.0.1:8000 model.path=DIR
  megaverl eval --harness inspect --task my_task.py@my_task --run runs/mine
  megaverl eval --harness lm-eval --task gsm8k,arc_easy --run runs/mine evaluation.limit=100""",
        _eval_options,
        _eval,
    ),
    "train": rank_command(
        "train",
        "Reinforcement learning: PPO or GRPO.",
        """\
  megaverl train --config configs/gsm8k_smollm2/ppo.yaml model.path=DIR 'data.train=[train.jsonl]'
  megaverl train --config FILE actor.tp=2 rollout.tp=2 --nproc 4
  megaverl train --config FILE --dry-run""",
        _train_options,
        _train,
        EXIT_CODES,
    ),
    "sft": rank_command(
        "sft",
        "Supervised fine-tuning on prompt/answer pairs; the section `sft` has its settings.",
        """\
  megaverl sft --config configs/gsm8k_smollm2/sft.yaml model.path=DIR 'data.train=[train.jsonl]' sft.steps=200""",
    ),
    "dpo": rank_command(
        "dpo",
        "A policy from pairs of responses (DPO, IPO, KTO, SimPO, ORPO); settings in `preference`.",
        """\
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]'
  megaverl dpo --config configs/preferences_smollm2/dpo.yaml model.path=DIR 'preference.train=[pairs.jsonl]' \\
      preference.loss=simpo""",
    ),
    "reward": rank_command(
        "reward",
        "A reward model from pairs of responses; settings in `preference` and `reward_model`.",
        """\
  megaverl reward --config configs/preferences_smollm2/reward_model.yaml model.path=DIR \\
      'preference.train=[pairs.jsonl]'""",
    ),
    "quickstart": rank_command(
        "quickstart",
        "Teach a tiny model from nothing: warm-up, then PPO. Downloads nothing.",
        """\
  megaverl quickstart
  megaverl quickstart run.seed=1 trainer.steps=50""",
        apply=_quickstart,
    ),
}

if __name__ == "__main__":
    from megaverl.cli.main import main

    sys.exit(main(["train", *sys.argv[1:]]))
