"""The lines of the memory benchmark are configurations, and the planner says that each of them saves something."""

from __future__ import annotations

from pathlib import Path

from tools.bench_memory import (
    LINES,
    configure,
    make_model,
    parse,
    planned_bytes,
    world_of,
)


def test_every_line_is_planned_to_save_memory(tmp_path: Path) -> None:
    options = parse(["--hidden", "128", "--layers", "3", "--vocab", "65536"])
    model = str(make_model(tmp_path, options))
    planned = {}
    for line, settings in LINES.items():
        world = world_of(settings)
        planned[line] = planned_bytes(
            *configure(options, model, settings, world), world
        )
    most = planned["everything kept"]
    assert planned["a reference"] > most > planned["a reference, lora: {rank: 16}"]
    at_rest_only = ("offload: {gradients: true}",)
    for line, each in planned.items():
        if line not in ("everything kept", "a reference", *at_rest_only):
            assert each < most, line
    assert planned["all of these"] == min(planned.values())
