"""`megaverl plan`: what a configuration will need on a given machine, before there is one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megaverl.config import Config, load_config, smallest_world
from megaverl.errors import ConfigError, MegaverlError, ModelError
from megaverl.planner.job import GB, Machine, PlannedJob, make_job
from megaverl.sharding.model_spec import ModelSpec

PICTURES = (".svg", ".png")
# Dataclass fields that are given in GB or GB/s: flag, help
MACHINE = {
    "memory": "memory of a GPU, GB of 1e9 bytes",
    "reserve": "of it, kept for CUDA's context, NCCL and fragments",
    "nvlink": "GB/s of a GPU to its node, each way",
    "network": "GB/s of a GPU to other nodes, each way",
    "hbm": "GB/s of a GPU's memory",
}


EXAMPLES = """\
examples:
  megaverl plan --config configs/llama3_70b/grpo_128_nodes.yaml --nodes 128
  megaverl plan --config FILE --nodes 16 actor.tp=8 actor.pp=4 --picture plan.png"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="megaverl plan",
        description="Memory of every rank, bytes and time of a weight sync, and what would not fit. Needs no weights, "
        "no GPU and no cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--config", metavar="FILE", help="YAML file; configs/ holds recipes")
    result.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the file, such as actor.tp=2")
    result.add_argument("--model-config", metavar="FILE", help="a config.json, where model.path is not here")
    result.add_argument("--nodes", type=int, metavar="N", help="without it run.nproc, or the fewest ranks that do")
    result.add_argument("--gpus-per-node", type=int, default=Machine.gpus_per_node, metavar="N", help="default 8")
    for name, meaning in MACHINE.items():
        default = getattr(Machine, name) / GB
        result.add_argument(f"--{name}", type=float, default=default, metavar="GB", help=f"{meaning} ({default:g})")
    result.add_argument("--picture", metavar="FILE", help="placement and traffic, as .svg or .png")
    result.add_argument("--json", action="store_true", help="the same for machines: bytes and seconds")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    described = parser()
    arguments = described.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    _check(described, arguments)
    try:
        return _plan(arguments)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelError) else 1


def _check(described: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name in ("nodes", "gpus_per_node", *MACHINE):
        value = getattr(arguments, name)
        if value is not None and not (value > 0 or (name == "reserve" and value == 0)):
            described.error(f"--{name.replace('_', '-')}: found {value:g}; expected a number above 0")
    if arguments.picture is not None and Path(arguments.picture).suffix not in PICTURES:
        described.error(f"--picture: found {arguments.picture}; expected a file that ends in {' or '.join(PICTURES)}")


def _plan(arguments: argparse.Namespace) -> int:
    from megaverl.planner.report import as_dict, as_text, survey

    job = _job(arguments)
    capacity = survey(job)
    if arguments.picture is not None:
        from megaverl.planner.picture import draw

        draw(capacity, arguments.picture)
    print(json.dumps(as_dict(capacity), indent=2) if arguments.json else as_text(capacity))
    if arguments.picture is not None:
        print(f"picture written to {arguments.picture}", file=sys.stderr)
    return 0


def _job(arguments: argparse.Namespace) -> PlannedJob:
    world = arguments.nodes * arguments.gpus_per_node if arguments.nodes else None
    # the grids are judged below, against the world and the model together
    config = load_config(arguments.config, arguments.overrides, check_paths=False)
    machine = Machine(
        gpus_per_node=arguments.gpus_per_node, **{name: getattr(arguments, name) * GB for name in MACHINE}
    )
    return make_job(config, _spec(config, arguments), world or _world(config), machine)


def _world(config: Config) -> int:
    return config.run.nproc or smallest_world(config)


def _spec(config: Config, arguments: argparse.Namespace) -> ModelSpec:
    """The model: of `--model-config`, of the model folder, or of the recipe's `model.config`."""
    if arguments.model_config is not None:
        return _read("--model-config", Path(arguments.model_config))
    if (Path(config.model.path) / "config.json").is_file():
        return ModelSpec.from_folder(config.model.path)
    if config.model.config is not None:
        return _read("model.config", Path(arguments.config or "").parent / config.model.config)
    raise ConfigError(
        f"model.path: {config.model.path} is not here. Give the model's config.json: --model-config FILE, or "
        "model.config in the recipe (configs/llama3_70b/config.json is one)."
    )


def _read(key: str, path: Path) -> ModelSpec:
    if not path.is_file():
        raise ConfigError(f"{key}: {path} does not exist. Give the path of a model's config.json.")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} is not valid JSON ({error}).") from error
    return ModelSpec.from_config(described, source=str(path))


if __name__ == "__main__":
    sys.exit(main())
