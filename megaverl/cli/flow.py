"""`megaverl flow show`: the operators of a configuration's training step, as the trainer runs them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from megaverl.config import Config, load_config
from megaverl.config.grids import is_placed, resolve_placement, role_grids, used_roles
from megaverl.distributed.placement import ranks_text
from megaverl.errors import MegaverlError
from megaverl.trainer.launcher import default_nproc

if TYPE_CHECKING:
    from megaverl.dataflow.plan import CompiledFlow

DESCRIPTION = """\
Show the training step of a configuration: its operators, on which role each runs, what it takes and gives, which run
side by side, and what moves between ranks where roles have ranks of their own (`placement`).

  megaverl flow show --config configs/gsm8k_smollm2/ppo.yaml
  megaverl flow show --config FILE --nproc 4 'placement={actor: [0, 1], rollout: [2, 3]}'
  megaverl flow show --config FILE --format mermaid       a picture for Markdown
"""


def main(argv: Sequence[str] | None = None) -> int:
    described = argparse.ArgumentParser(
        prog="megaverl flow", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    described.add_argument("action", choices=("show",))
    described.add_argument("--config", metavar="FILE", help="YAML file; configs/ holds recipes")
    described.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the file")
    described.add_argument("--nproc", type=int, metavar="N", help="ranks of the job (run.nproc)")
    described.add_argument("--format", choices=("text", "json", "mermaid"), default="text")
    arguments = described.parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    overrides = [*arguments.overrides, *([f"run.nproc={arguments.nproc}"] if arguments.nproc else [])]
    try:
        config = load_config(arguments.config, overrides, check_paths=False)
        plan = plan_of(config, arguments.nproc)
    except MegaverlError as error:
        print(error, file=sys.stderr)
        return 2
    show = {"text": as_text, "json": lambda plan: json.dumps(as_dict(plan), indent=2), "mermaid": as_mermaid}
    print(show[arguments.format](plan))
    return 0


def plan_of(config: Config, world_size: int | None = None) -> CompiledFlow:
    """The compiled flow of the trainer that this configuration makes; no role is built.

    Args:
        world_size: ranks of the job, where roles have ranks of their own; None: `run.nproc`, or as many as needed.
    """
    from megaverl.trainer.agents import AgentsStep
    from megaverl.trainer.roles import Roles
    from megaverl.trainer.step import RLStep
    from megaverl.trainer.stored_rollouts import RolloutFolder

    places = None
    if is_placed(config):
        size = world_size or config.run.nproc or default_nproc(config, "train")
        grids = role_grids(config, used_roles(config, "train"))
        places = resolve_placement(config.placement, grids, size).ranks
    replay = config.trainer.replay_rollouts
    nobody = cast(Roles, None)  # the roles are only needed when the flow runs
    make_step = AgentsStep if config.environment.agents == "own" else RLStep
    return make_step(config, nobody, RolloutFolder(replay) if replay else None).flow(places).plan


def as_dict(plan: CompiledFlow) -> dict[str, Any]:
    """The flow as JSON."""
    return {
        "operators": [
            {
                "name": each.name,
                "roles": list(each.roles),
                "takes": list(each.takes),
                "gives": list(each.gives),
                "ranks": None if plan.ranks[each.name] is None else list(plan.ranks[each.name] or ()),
            }
            for each in plan.operators
        ],
        "stages": [list(stage) for stage in plan.stages],
        "moves": [
            {"value": edge.value, "from": list(edge.source), "to": list(edge.dest), "for": list(edge.takers)}
            for edge in plan.edges
        ],
    }


def as_text(plan: CompiledFlow) -> str:
    """A line for each operator, stage by stage; what stands in one stage can run side by side."""
    rows = []
    by_name = {each.name: each for each in plan.operators}
    for number, stage in enumerate(plan.stages, start=1):
        for place, name in enumerate(stage):
            each, ranks = by_name[name], plan.ranks[name]
            where = ", ".join(each.roles) or "all"
            if ranks is not None:
                where += f" (ranks {ranks_text(ranks)})"
            takes, gives = ", ".join(each.takes), ", ".join(each.gives) or "-"
            rows.append((str(number) if place == 0 else "", name, where, f"{takes} -> {gives}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    ]
    moves = [
        f"  {edge.value}: ranks {ranks_text(edge.source)} -> {ranks_text(edge.dest)}, for {', '.join(edge.takers)}"
        for edge in plan.edges
    ]
    return "\n".join([*lines, *(["", "moves:", *moves] if moves else [])])


def as_mermaid(plan: CompiledFlow) -> str:
    """A flow chart that GitHub and MkDocs draw."""
    lines = ["flowchart LR"]
    for each in plan.operators:
        label = f"{each.name}<br/><small>{', '.join(each.roles)}</small>" if each.roles else each.name
        lines.append(f'    {each.name}["{label}"]')
    for each in plan.operators:
        for value, maker in plan.makers[each.name].items():
            if maker:
                lines.append(f"    {maker} -- {value} --> {each.name}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
