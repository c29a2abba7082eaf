"""Commands for the time before a run.

`plan` predicts memory and time of a configuration, and `flow` shows the operators of
its training step. `check-plugin` tests a user's reward or other plug-in, and `data
check` a user's data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megaverl.cli.options import (
    Subcommand,
    UsageError,
    add_config,
    add_json,
    add_nproc,
    read_config,
)
from megaverl.config import Config, load_config, smallest_world
from megaverl.config.errors import InvalidConfig
from megaverl.config.field_needs import FieldMachine
from megaverl.config.grids import OFFLINE, OfflineCommand
from megaverl.config.loader import layered, load_any
from megaverl.config.run import DataConfig, SourceConfig
from megaverl.config.typed_yaml import BadYaml, read_argument
from megaverl.errors import FAILED, MISTAKE, ConfigError, MegaverlError, ModelError
from megaverl.planner.hardware import Hardware, known
from megaverl.planner.job import GB, Machine, find_spec, make_job
from megaverl.trainer.contracts import KINDS, check
from megaverl.trainer.preflight import field_mistakes_on
from megaverl.user_code import exits_raise

PLAN = (
    "Memory of every rank, bytes and time of a weight sync, what would not fit and, with --hardware, what a step "
    "takes. Needs no weights, no GPU and no cluster."
)
PLAN_EXAMPLES = """\
examples:
  megaverl plan --config configs/llama3_70b/grpo_128_nodes.yaml --nodes 128
  megaverl plan --config FILE --nodes 16 actor.tp=8 actor.pp=4 --picture plan.png
  megaverl plan --config FILE --nodes 16 --hardware h100 --response-tokens 1500   also predict the time of a step
  megaverl plan --calibrate here.json                     measure this machine, for --hardware here.json
  megaverl plan --config FILE --auto --nodes 16 --write chosen.yaml     choose grids, micro-batches and engines"""
PICTURES = (".svg", ".png")
# Required keys of `train` that configurations of other commands leave empty.
ONLY_TRAIN_NEEDS = ("data.train", "reward")
# Fields of `Machine` that are options given in GB or GB/s, with their help.
MACHINE = {
    "memory": "memory of a GPU, GB of 1e9 bytes",
    "reserve": "part of it for CUDA's context, NCCL, workspaces and graphs; default: computed per rank",
    "nvlink": "GB/s between a GPU and its node, each direction",
    "network": "GB/s of a GPU to other nodes, each way",
    "hbm": "GB/s of a GPU's memory",
    "disk": "GB/s of a node to the file system of checkpoints, each way",
}
FLOW = """\
Show the training step of a configuration: operators, their roles, inputs and outputs, which run at the same time, and
what is sent between ranks if roles have ranks of their own (`placement`).

  megaverl flow show --config configs/gsm8k_smollm2/ppo.yaml
  megaverl flow show --config FILE --nproc 4 'placement={actor: [0, 1], rollout: [2, 3]}'
  megaverl flow show --config FILE --format mermaid       a picture for Markdown
"""


def _plan_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--model-config",
        metavar="FILE",
        help="a config.json, if model.path is not on this machine",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="default: run.nproc, or as few ranks as possible",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"{', '.join(known())}, or a file: predict a step's time",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure this machine for --hardware FILE; takes minutes",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean length; default: half of the limit",
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        metavar="N",
        help="mean length; default: 40 %% of the limit",
    )
    parser.add_argument(
        "--share-at-limit",
        type=float,
        metavar="F",
        help="share of responses that run to max_tokens: 1 - rollout/finished_fraction of a run; default: 1/64 or more",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="default: 8, or the hardware's number",
    )
    for name, meaning in MACHINE.items():
        default = getattr(Machine, name)
        described = "" if name == "disk" else ", or the hardware's"
        text = (
            meaning if default is None else f"{meaning} ({default / GB:g}{described})"
        )
        parser.add_argument(f"--{name}", type=float, metavar="GB", help=text)
    parser.add_argument(
        "--auto",
        action="store_true",
        help="search for the best layouts by predicted time",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        default=0,
        metavar="N",
        help="--auto: also try engines on ranks of their own, N steps ahead",
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="--auto: write a configuration with the best layout, based on --config",
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="draw placement and traffic as .svg or .png"
    )
    add_json(parser, "the same for machines: bytes and seconds")


def _calibrate(path: Path) -> int:
    """Measure this machine, and write the result for `--hardware`."""
    if path.suffix != ".json":
        raise UsageError(
            f"--calibrate: found {path}; expected a file that ends in .json"
        )
    from megaverl.planner.calibrate import calibrate

    try:
        calibrate(
            path.stem,
            tell=lambda line: print(f"measuring {line}", file=sys.stderr, flush=True),
        ).write(path)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"{path} describes this machine: megaverl plan --hardware {path}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    """Print what a configuration needs in memory, bytes and time."""
    if arguments.calibrate is not None:
        return _calibrate(Path(arguments.calibrate))
    for name in (
        "nodes",
        "gpus_per_node",
        "prompt_tokens",
        "response_tokens",
        *MACHINE,
    ):
        value = getattr(arguments, name)
        if value is not None and not (value > 0 or (name == "reserve" and value == 0)):
            raise UsageError(
                f"--{name.replace('_', '-')}: found {value:g}; expected a number above 0"
            )
    share = arguments.share_at_limit
    if share is not None and not 0 <= share < 1:
        raise UsageError(
            f"--share-at-limit: found {share:g}; expected a share, from 0 to below 1"
        )
    if arguments.picture is not None and Path(arguments.picture).suffix not in PICTURES:
        raise UsageError(
            f"--picture: found {arguments.picture}; expected a file that ends in {' or '.join(PICTURES)}"
        )
    if arguments.write is not None and not (arguments.auto and arguments.config):
        raise UsageError(
            "--write: goes with --auto and --config FILE, over which the choice is laid"
        )
    from megaverl.planner.report import as_dict, as_text, survey
    from megaverl.planner.simulator import default_lengths

    machine_fields = {
        name: getattr(arguments, name) * GB
        for name in MACHINE
        if getattr(arguments, name) is not None
    }
    machine_fields |= (
        {"gpus_per_node": arguments.gpus_per_node} if arguments.gpus_per_node else {}
    )
    try:
        hardware = Hardware.read(arguments.hardware) if arguments.hardware else None
        machine = (
            hardware.machine(**machine_fields)
            if hardware
            else Machine(**machine_fields)
        )
        world = (arguments.nodes or 0) * machine.gpus_per_node or None
        if commands := _offline_commands(arguments, world):
            return _plan_offline(arguments, commands, hardware, machine, world)
        if arguments.auto:
            return _auto(arguments, machine_fields)
        # Not checked against a number of ranks here: `survey` judges the layout
        # together with the model.
        config = read_config(arguments)
        if hardware is not None:
            _check_fields(config, hardware)
        spec = find_spec(config, arguments.model_config, fallback=arguments.config)
        world = world or config.run.nproc or smallest_world(config)
        job = make_job(config, spec, world, machine)
        capacity = survey(
            job,
            hardware,
            default_lengths(
                job,
                arguments.prompt_tokens,
                arguments.response_tokens,
                arguments.share_at_limit,
            ),
        )
        if arguments.picture is not None:
            from megaverl.planner.picture import draw

            draw(capacity, arguments.picture)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return MISTAKE if isinstance(error, ConfigError | ModelError) else FAILED
    print(
        json.dumps(as_dict(capacity), indent=2) if arguments.json else as_text(capacity)
    )
    if arguments.picture is not None:
        print(f"picture written to {arguments.picture}", file=sys.stderr)
    return 0


def _check_fields(config: Config, hardware: Hardware) -> None:
    """Refuse fields of megatron-core that the planned machine cannot compute.

    Raises:
        InvalidConfig: lists them.
    """
    machine = FieldMachine(
        has_gpu=hardware.cores is None, has_fp8="float8" in hardware.tflops
    )
    if mistakes := [*field_mistakes_on(config, "train", machine)]:
        raise InvalidConfig(mistakes, f"what {hardware.name} can compute")


def _offline_commands(
    arguments: argparse.Namespace, world: int | None
) -> list[OfflineCommand]:
    """Return the commands without rollouts, such as `sft`, for which a configuration is complete, but not for `train`.

    Args:
        world: ranks of `--nodes`; None: those of the configuration.

    Raises:
        ConfigError: there is one, and an option asks for what has no meaning without rollouts.
    """
    try:
        load_config(
            arguments.config, arguments.overrides, check_paths=False, world_size=world
        )
    except InvalidConfig as error:
        if any(mistake.key not in ONLY_TRAIN_NEEDS for mistake in error.mistakes):
            # Mistakes that have another cause are reported by the caller, together with
            # those of the model and the ranks.
            return []
    else:
        return []
    commands: list[OfflineCommand] = []
    for command in OFFLINE:
        with suppress(ConfigError):
            load_config(
                arguments.config,
                arguments.overrides,
                command=command,
                check_paths=False,
                world_size=world,
            )
            commands.append(command)
    if commands and (arguments.auto or arguments.picture is not None):
        names = " or ".join(f"`megaverl {command}`" for command in commands)
        option = "--auto" if arguments.auto else "--picture"
        raise ConfigError(
            f"{option}: this is a configuration of {names}, which has no rollouts, and only steps of `megaverl train` "
            f"are searched and drawn. Leave {option} out to see communication and time of a step, or plan a "
            "configuration of `megaverl train` with the same section `actor`."
        )
    return commands


def _plan_offline(
    arguments: argparse.Namespace,
    commands: Sequence[OfflineCommand],
    hardware: Hardware | None,
    machine: Machine,
    world: int | None,
) -> int:
    """Print communication and time of a step of each command.

    Args:
        hardware: None: an H100.
        world: as in `_offline_commands`.
    """
    from megaverl.planner.job import make_offline_job
    from megaverl.planner.offline import offline_as_dict, offline_as_text, with_rows
    from megaverl.planner.simulator import default_lengths

    hardware = hardware or Hardware.read("h100")
    plans = {}
    for command in commands:
        config = load_config(
            arguments.config,
            arguments.overrides,
            command=command,
            check_paths=False,
            world_size=world,
        )
        spec = find_spec(config, arguments.model_config, fallback=arguments.config)
        ranks = world or config.run.nproc or smallest_world(config, command)
        job = make_offline_job(
            with_rows(config, command), command, spec, ranks, machine
        )
        lengths = default_lengths(
            job,
            arguments.prompt_tokens,
            arguments.response_tokens,
            arguments.share_at_limit,
        )
        plans[command] = offline_as_dict(job, command, hardware, lengths)
    print(
        json.dumps(plans, indent=2)
        if arguments.json
        else "\n\n".join(
            offline_as_text(command, plan) for command, plan in plans.items()
        )
    )
    return 0


def _auto(arguments: argparse.Namespace, machine_fields: dict[str, Any]) -> int:
    """Print the five best layouts (`plan --auto`), and write the best one as a recipe if `--write` is given.

    Args:
        machine_fields: fields of `Machine` from the command line, in bytes or bytes per second.
    """
    from megaverl.planner.search import LayoutSearch, as_text, chosen_recipe
    from megaverl.planner.simulator import likely_lengths

    hardware = Hardware.read(arguments.hardware or "h100")
    machine = hardware.machine(**machine_fields)
    make = layered(arguments.config, arguments.overrides)
    config = make({})
    _check_fields(config, hardware)
    spec = find_spec(config, arguments.model_config, fallback=arguments.config)
    world = (arguments.nodes or 1) * machine.gpus_per_node
    lengths = likely_lengths(
        config,
        arguments.prompt_tokens,
        arguments.response_tokens,
        arguments.share_at_limit,
    )
    began = time.monotonic()
    search = LayoutSearch(
        make,
        spec,
        world,
        hardware,
        machine=machine,
        lengths=lengths,
        staleness=arguments.staleness,
    )
    layouts = search.best()
    print(as_text(layouts, time.monotonic() - began, hardware))
    if arguments.write is not None:
        text = chosen_recipe(
            layouts,
            arguments.config,
            arguments.write,
            arguments.overrides,
            hardware,
            world,
        )
        Path(arguments.write).write_text(text, encoding="utf-8")
        # Loaded again the way a run will load it, so that a recipe that cannot run is
        # reported now.
        load_config(arguments.write, [], check_paths=False, world_size=world)
        print(f"recipe written to {arguments.write}", file=sys.stderr)
    return 0


def _flow_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show",))
    add_config(parser)
    add_nproc(parser, "ranks of the job (run.nproc)")
    parser.add_argument("--format", choices=("text", "json", "mermaid"), default="text")


def _flow(arguments: argparse.Namespace) -> int:
    """Print the operators of a configuration's training step."""
    from megaverl.dataflow.plan import as_dict, as_mermaid, as_text
    from megaverl.trainer.step_flow import make_plan

    try:
        config = read_config(arguments)
        if config.trainer.program is not None:
            raise ConfigError(
                f"trainer.program: the step is {config.trainer.program}, a function and no flow. Leave it out to see "
                "the built-in step."
            )
        plan = make_plan(config, arguments.nproc)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    if arguments.format == "json":
        print(json.dumps(as_dict(plan), indent=2))
    else:
        print(as_text(plan) if arguments.format == "text" else as_mermaid(plan))
    return 0


PLUGIN = """\
Run the contract tests of a plug-in: a reward, loss, environment, ... of your own.

  megaverl check-plugin reward my_rewards.py:score
  megaverl check-plugin reward my_rewards.py:score_many batched=true
  megaverl check-plugin loss my_package.losses:soft_clip clip=0.3
  megaverl check-plugin data my_data.py:rows prompt_key=question

Kinds, and the keys that name them in a configuration:
{kinds}

Exit code: 0 if all tests pass, 1 if one fails, 2 for a mistake in the command.
"""
DATA = """\
Read every row of a data set and list problems: missing columns, wrong types, lengths, duplicate prompts, held-out
prompts in the training data. With a tokenizer, prompts are rendered and counted in tokens, as in a run. Rows without an
answer may have a chosen and a rejected response, or a completion and its label.

  megaverl data check train.jsonl
  megaverl data check 'data/*.parquet' --prompt-key question --answer-key solution --tokenizer models/small
  megaverl data check --config run.yaml                    data and preference files of a run, with its settings
  megaverl data check org/name --json > found.json         a data set on the hub

Exit code: 0 if every row can be used, 1 if some cannot, 2 for a mistake in the command.
"""
# Number of problems per data source that are printed without --all.
SHOWN = 20


def _plugin_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), metavar="KIND")
    parser.add_argument(
        "name", metavar="module:object", help="or path/to/file.py:object"
    )
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="options to call it with"
    )


def _plugin(arguments: argparse.Namespace) -> int:
    """Run the contract tests of a plug-in, and print one line per promise."""
    broken = 0
    with exits_raise():
        # User code that calls sys.exit() would otherwise end this check with exit code
        # 0.
        for kept in check(
            arguments.kind, arguments.name, _key_values(arguments.options)
        ):
            broken += bool(kept.problem)
            print(f"{'FAIL' if kept.problem else 'ok  '}  {kept.promise}")
            if kept.problem:
                print(f"      {kept.problem}")
    print(f"{arguments.name}: {'all holds' if not broken else f'{broken} broken'}")
    return FAILED if broken else 0


def _key_values(texts: Sequence[str]) -> Mapping[str, object]:
    """Parse options of the form `key=value`.

    A value may be a number, a boolean, a list, a mapping or text: the types that a
    plug-in expects are not known here.

    Raises:
        ConfigError: an option without `=`, or a value that is not valid YAML.
    """
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: expected key=value.")
        try:
            options[key] = read_argument(value, Any, lambda path: Any, (key,))
        except BadYaml as error:
            raise ConfigError(f"{key}: {error}") from error
    return options


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",))
    parser.add_argument(
        "sources",
        nargs="*",
        help="files, patterns, folders or names on the hub; with --config: key=value",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="configuration of a run, whose data and settings are used",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="model folder or .model file; count in tokens",
    )
    parser.add_argument("--prompt-key", default="prompt", metavar="COLUMN")
    parser.add_argument(
        "--answer-key", default="answer", metavar="COLUMN", help="'' if there is none"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="report longer prompts"
    )
    parser.add_argument(
        "--split", default="train", help="split of a data set on the hub"
    )
    parser.add_argument("--subset", help="configuration of a data set on the hub")
    parser.add_argument(
        "--revision", help="commit, tag or branch of a data set on the hub"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"show all problems instead of the first {SHOWN}",
    )
    add_json(parser)


def _data(arguments: argparse.Namespace) -> int:
    """Check data sets. Rows may come from user code, which may call sys.exit()."""
    # A data set may be a user's function.
    with exits_raise():
        return _check_data(arguments)


def _check_data(arguments: argparse.Namespace) -> int:
    """Check the rows of data sets, or of a run's configuration, and print what is wrong.

    Returns:
        FAILED if a row cannot be used, else 0.
    """
    from megaverl.data.examine import encoder_of, examine, examine_run
    from megaverl.data.prompts import Columns
    from megaverl.data.sources import open_source

    if arguments.config is not None:
        results = examine_run(
            load_any(arguments.config, arguments.sources), arguments.tokenizer
        )
    elif arguments.sources:
        data = DataConfig(
            max_prompt_tokens=arguments.max_prompt_tokens or 2**31 - 1, too_long="drop"
        )
        encoder, images = (
            encoder_of(data, arguments.tokenizer)
            if arguments.tokenizer
            else (None, None)
        )
        # Without a tokenizer it is not known whether the model takes images, so that
        # column is not checked.
        ignored = () if encoder else (data.images.key,)
        columns = Columns(
            arguments.prompt_key,
            arguments.answer_key or None,
            images=images,
            ignored=ignored,
        )
        hub_options = {
            name: getattr(arguments, name) for name in ("split", "subset", "revision")
        }
        places = [SourceConfig(path=path, **hub_options) for path in arguments.sources]
        results = {
            place.path: examine(open_source(place), encoder, columns)
            for place in places
        }
    else:
        raise UsageError("give sources, or --config FILE")
    if arguments.json:
        print(
            json.dumps(
                {name: examined.as_dict() for name, examined in results.items()},
                indent=2,
                ensure_ascii=False,
            )
        )
    else:
        most = None if arguments.all else SHOWN
        print(
            "\n\n".join(
                examined.as_text(name, most) for name, examined in results.items()
            )
        )
    return FAILED if any(examined.errors for examined in results.values()) else 0


_WIDTH = max(map(len, KINDS))
_KINDS = "\n".join(
    f"  {name:<{_WIDTH}}  {kind.key}: {kind.summary}" for name, kind in KINDS.items()
)
COMMANDS = {
    "plan": Subcommand(PLAN, _plan_options, _plan, PLAN_EXAMPLES),
    "flow": Subcommand(FLOW, _flow_options, _flow),
    "check-plugin": Subcommand(PLUGIN.format(kinds=_KINDS), _plugin_options, _plugin),
    "data": Subcommand(DATA, _data_options, _data),
}
