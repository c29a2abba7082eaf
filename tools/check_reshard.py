"""Reshard once from a configuration's actor into its engine and compare the fingerprints of all weights.

    python tools/check_reshard.py configs/quickstart.yaml actor.tp=2 rollout.tp=1
    python tools/check_reshard.py configs/llama3_70b/grpo_8_nodes.yaml --plan-only --world 1024
    torchrun ... tools/check_reshard.py CONFIG       # on several nodes: each process is then one of the ranks

Prints for every kind of tensor its bytes in the engines, how many of them each way brought there, and whether all
copies are right; ends with 1 and names tensor, box and rank where one is not. With `--plan-only` nothing is built:
layouts and plans of all ranks are made and proved, for any number of ranks; only a config.json (`model.path`'s, or
`model.config`) is read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

# A checkout needs no installation of megaverl.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megaverl.config import Config, load_config, smallest_world
from megaverl.errors import ConfigError, MegaverlError, ReshardError

MB = 2**20
MAX_NAMED = 64
# What moves an element; of a class of tensors, the elements that each has brought.
WAYS = ("local", "received")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_intermixed_args(words)
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        config = _load(arguments)
        if arguments.plan_only:
            print(
                check_plans_only(
                    config,
                    arguments.world or _world(config),
                    Path(arguments.config).parent,
                )
            )
            return 0
        if not is_rank:
            from megaverl.trainer.elastic_agent import (
                check_world,
                default_nproc,
                start_ranks,
            )

            nproc = (
                arguments.world or config.run.nproc or default_nproc(config, "train")
            )
            check_world(config, "train", nproc)
            return start_ranks(
                [__file__, *words], nproc, log_hint=str(config.run_dir / "logs")
            )
    except MegaverlError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same mistakes
            print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return run_rank(config, flip_a_bit=arguments.flip_a_bit)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    result.add_argument("config", metavar="CONFIG", help="a training configuration")
    result.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="laid over the file, such as actor.tp=2",
    )
    result.add_argument(
        "--plan-only",
        action="store_true",
        help="prove layouts and plans; needs no weights",
    )
    result.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="ranks; by default run.nproc, or the fewest that do",
    )
    result.add_argument(
        "--flip-a-bit",
        action="store_true",
        help="on the last rank, before comparing: the check must then fail",
    )
    return result


def _load(arguments: argparse.Namespace) -> Config:
    # the comparison here names more than the one that a run makes after its first
    # reshard
    overrides = [*arguments.overrides, "reshard.check_every=-1"]
    return load_config(
        arguments.config,
        overrides,
        command="train",
        check_paths=not arguments.plan_only,
        world_size=arguments.world if arguments.plan_only else None,
    )


def _world(config: Config) -> int:
    return config.run.nproc or smallest_world(config)


def check_plans_only(config: Config, world: int, folder: Path) -> str:
    """Make and prove layouts and plans of `world` ranks, and return the table.

    Args:
        folder: folder of the configuration file, to which `model.config` is relative.

    Raises:
        MegaverlError: a layout or a pair of layouts is impossible, or a plan is not exact.
    """
    from megaverl.planner.job import make_job
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.sharding.plan import make_plans
    from megaverl.sharding.proof import check_plans

    start = time.perf_counter()
    described = Path(config.model.path)
    if config.model.config is not None and not (described / "config.json").is_file():
        spec = ModelSpec.from_config(
            json.loads((folder / config.model.config).read_text(encoding="utf-8"))
        )
    else:
        spec = ModelSpec.from_folder(described)
    job = make_job(config, spec, world)
    plans = make_plans(job.actor.layout_of, job.rollout.layout_of, world)
    check_plans(plans)
    seconds = time.perf_counter() - start
    elements = add_up(count_elements(plans[rank]) for rank in range(world))
    received = [plans[rank].num_received * job.itemsize for rank in range(world)]
    return (
        table(elements, job.itemsize, {})
        + f"\nreceived by a rank: {min(received) / MB:,.1f} to {max(received) / MB:,.1f} MB"
        + f"\n{world} plans are exact: made and proved in {seconds:.1f} s; no weight was read or moved"
    )


def kind_of(tensor: str) -> str:
    """Return a tensor's name without its numbers, so that the same weights of all layers and experts count together."""
    return re.sub(r"\.\d+(?=\.)", ".*", tensor)


def count_elements(plan: Any) -> dict[str, dict[str, int]]:
    """Count one rank's engine weights by kind of tensor: elements held, and elements brought each way."""
    by_kind: dict[str, dict[str, int]] = {}

    def add(tensor: str, column: str, count: int) -> None:
        row = by_kind.setdefault(kind_of(tensor), dict.fromkeys(("held", *WAYS), 0))
        row[column] += count

    for piece in plan.dest_layout.pieces:
        add(piece.tensor, "held", piece.box.numel)
    for transfer in plan.copies:
        add(transfer.tensor, "local", transfer.box.numel)
    for transfer in (t for transfers in plan.receives.values() for t in transfers):
        add(transfer.tensor, "received", transfer.box.numel)
    return by_kind


def add_up(
    parts: Iterable[Mapping[str, Mapping[str, int]]],
) -> dict[str, dict[str, int]]:
    """Sum the counts of several ranks."""
    totals: dict[str, dict[str, int]] = {}
    for part in parts:
        for kind, row in part.items():
            total = totals.setdefault(kind, dict.fromkeys(row, 0))
            for column, count in row.items():
                total[column] += count
    return totals


def table(
    elements: Mapping[str, Mapping[str, int]], itemsize: int, results: Mapping[str, str]
) -> str:
    """Return one line for each kind of tensor: MB in all engines, MB from the same rank
    and from others, and the result.
    """
    width = max(len(kind) for kind in (*elements, "tensors of all engines"))
    lines = [
        f"{'tensors of all engines':{width}}{'MB':>12}{'same rank':>12}{'received':>12}"
    ]
    rows = [
        *elements.items(),
        ("all", add_up({"all": row} for row in elements.values())["all"]),
    ]
    for kind, row in rows:
        numbers = "".join(
            f"{row[column] * itemsize / MB:>12,.2f}" for column in ("held", *WAYS)
        )
        lines.append(f"{kind:{width}}{numbers}  {results.get(kind, '')}".rstrip())
    return "\n".join(lines)


def run_rank(config: Config, *, flip_a_bit: bool) -> int:
    """Build actor and engine on one rank, reshard and compare. Returns the exit code, the same on every rank."""
    import torch.distributed as dist

    from megaverl.cli.train import exit_code
    from megaverl.monitoring.console import redirect_output
    from megaverl.platform import platform

    console = redirect_output(config.run_dir / "logs", int(os.environ["RANK"]))
    try:
        platform.start()
        dist.init_process_group(
            platform.backend, timeout=timedelta(minutes=config.run.timeout_minutes)
        )
        report, differences = _reshard_and_compare(config, flip_a_bit)
        if dist.get_rank() == 0:
            console.print(report)
        if differences:
            raise ReshardError(differences)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without waiting for groups and engines, which may wait for other ranks.
        os._exit(exit_code(error))
    return 0


def _reshard_and_compare(config: Config, flip_a_bit: bool) -> tuple[str, str]:
    """Return the report and the differences (empty if there are none), the same on every rank."""
    import torch.distributed as dist

    from megaverl.distributed.collectives import gather_json
    from megaverl.sharding.plan import make_plan
    from megaverl.sharding.weight import shapes_of
    from megaverl.trainer.build import Builder
    from megaverl.weights.fingerprint import ReshardCheck

    builder = Builder(config)
    actor = builder.model(config.actor, "actor")
    rollout = builder.rollout(actor)
    assert rollout.sync is not None
    stats = rollout.sync.reshard()
    dest_of, dest = (
        rollout.engine.layouts(shapes_of(actor.weights)),
        rollout.engine.named_parameters(),
    )
    if flip_a_bit and dist.get_rank() == dist.get_world_size() - 1:
        _flip_a_bit(dest, actor.parameters)
    check, named, num_more = ReshardCheck(
        actor.layout_of, dest_of, actor.parameters, dest
    ).differences(MAX_NAMED)
    plan = make_plan(actor.layout_of, dest_of, dist.get_world_size(), dist.get_rank())
    elements = add_up(gather_json(count_elements(plan)))
    results = dict.fromkeys(elements, "equal") | {
        kind_of(difference.tensor): "DIFFERS" for difference in named
    }
    moved = gather_json(
        [stats.bytes_received, stats.bytes_local, stats.bytes_aliased, stats.seconds]
    )
    received, local, aliased, seconds = (
        list(column) for column in zip(*moved, strict=True)
    )
    report = (
        table(elements, next(iter(dest.values())).element_size(), results)
        + f"\n{dist.get_world_size()} ranks: {sum(received) / MB:,.2f} MB received, {sum(local) / MB:,.2f} MB copied "
        f"within ranks, {sum(aliased) / MB:,.2f} MB shared with the actor; {max(seconds):.2f} s"
        f"\n{check.num_tensors} tensors compared in {check.seconds:.2f} s"
    )
    more = f"\nand {num_more} more boxes" if num_more else ""
    return report, "".join(f"\n{difference}" for difference in named).lstrip(
        "\n"
    ) + more


def _flip_a_bit(tensors: Mapping[str, Any], sources: Mapping[str, Any]) -> None:
    """Flip a bit in the first element of the first engine weight that is not the actor's own storage."""
    import torch

    shared = {tensor.untyped_storage().data_ptr() for tensor in sources.values()}
    unshared = [
        tensor.detach()
        for tensor in tensors.values()
        if tensor.untyped_storage().data_ptr() not in shared
    ]
    if not unshared:
        raise ConfigError(
            "--flip-a-bit: every engine weight of the last rank is the actor's own storage, so they cannot differ. "
            "Add reshard.alias=never."
        )
    element = unshared[0].view(-1)[:1].clone()
    element.view({2: torch.int16, 4: torch.int32}[element.element_size()]).bitwise_xor_(
        1
    )
    unshared[0].view(-1)[:1].copy_(element)


if __name__ == "__main__":
    sys.exit(main())
