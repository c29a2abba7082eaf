"""Plans of micro-batches: made once for all roles that plan alike, and never another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaverl.data.prefix_packing import SequenceLengths
from megaverl.distributed.grid import GridShape
from megaverl.models.packing import pack
from megaverl.workers.micro_batches import plan_for


def lengths() -> SequenceLengths:
    prompts = [number // 3 for number in range(16)]
    return SequenceLengths([5 + prompt for prompt in prompts], [1 + 3 * n % 11 for n in range(16)], prompts)


def model(role: str = "actor", *, packs: bool = True, multiple: int = 1, each: int = 1, **shape: int) -> Any:
    grid = SimpleNamespace(shape=GridShape(**{"dp": 2, **shape}))
    return SimpleNamespace(
        role=role, grid=grid, pack=pack if packs else None, token_multiple=multiple, sequence_multiple=each
    )


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows of their own": (model(packs=False), {}),
    "fuller rows": (model(multiple=48), {}),
    "sequences that are cut": (model(each=4), {}),
    "more ranks": (model(dp=4), {}),
    "an interleaved pipeline": (model(pp=3, vpp=2), {}),
    "a smaller budget": (model(), {"max_tokens": 32}),
    "a mini-batch": (model(), {"samples": [0, 1, 2, 3, 8, 9]}),
    "more micro-batches": (model(), {"least": 4}),
    "pairs": (model(), {"unit": 2}),
    "islands": (model(), {"parts": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_planned_otherwise_is_not_taken_from_before(name: str) -> None:
    known = lengths()
    first = plan_for(model(), known, 64)
    assert plan_for(model("reference"), known, 64) is first
    other, given = OTHERS[name]
    options = {"max_tokens": 64, **given}
    found = plan_for(other, known, **options)
    assert found == plan_for(other, lengths(), **options) and found != first
    assert plan_for(model(), known, 64) is first == plan_for(model(), lengths(), 64)
