"""Islands that take steps of their own, on real ranks in bfloat16: what they have after they have met."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaverl.models.tiny import make_tiny_folder
from tests.launcher import Launcher
from tests.trainer.island_program import GLOBAL_DTYPES, VARIANTS

PROGRAM = str(Path(__file__).with_name("island_program.py"))
# DiLoCo's first step on the mean of the islands' ways, Nesterov's momentum in it.
OUTER = 0.7 * (1 + 0.9)


@pytest.fixture(scope="module")
def ended(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("islands")
    make_tiny_folder(folder / "model", "Qwen3ForCausalLM", dtype="bfloat16")
    done = launch.command([PROGRAM, str(folder)], logs=folder / "output", ranks=5)
    assert done.codes == [0] * 5, done.text
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_meet_in_float32(ended: Path, variant: str) -> None:
    """The outer step is that of the optimizer's own float32 weights, and the model's
    follow on every rank: rounded, or under FSDP2 themselves.
    """
    fsdp = variant == "fsdp"
    ranks = [load_file(ended / f"{variant}_{rank}.safetensors") for rank in range(4)]
    for place in range(2):
        islands = [ranks[place], ranks[place + 2]]
        starts, alone, joined, read = (
            parts(islands, name) for name in ("start", "alone", "joined", "read")
        )
        assert starts[0] and all(map(torch.equal, starts[0], starts[1])), (
            "they begin alike"
        )
        small = moved = 0
        for number, start in enumerate(starts[0]):
            ways = [start - own[number] for own in alone]
            assert not torch.equal(*ways), "each has gone its own way"
            after = joined[0][number]
            torch.testing.assert_close(
                after, start - OUTER * (ways[0] + ways[1]) / 2, rtol=0, atol=2e-7
            )
            assert torch.equal(after, joined[1][number]), "all islands are where one is"
            for island in read:
                assert torch.equal(
                    island[number], after if fsdp else after.bfloat16().float()
                ), "the model's weights"
            small += int(
                ((after != start) & (after.bfloat16() == start.bfloat16())).sum()
            )
            moved += int((after != start).sum())
        assert small > moved / 3 > 0, (
            "much of the way is below a unit of bfloat16 (an adapter's B comes from zero)"
        )
    weights = [
        {name: tensor for name, tensor in rank.items() if name.startswith("weights.")}
        for rank in ranks
    ]
    for rank, other in enumerate(weights[1:], 1):
        # Of FSDP2's ranks each has its own rows.
        first = weights[rank % 2 if fsdp else 0]
        assert all(torch.equal(other[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", GLOBAL_DTYPES)
def test_a_global_model_takes_the_islands_steps(ended: Path, dtype: str) -> None:
    """Replicas of two data-parallel ranks have the global model's weights, which are
    those of islands that add their gradients and step themselves.
    """
    summed, aggregated = (
        [load_file(ended / f"{dtype}_{kind}_{rank}.safetensors") for rank in range(5)]
        for kind in ("statistics", "gradients")
    )
    untrained = summed[4]
    for rank in aggregated[1:]:
        assert all(torch.equal(rank[name], aggregated[0][name]) for name in rank)
    moved = max(
        float((untrained[name] - aggregated[0][name]).abs().max()) for name in untrained
    )
    assert moved > 1e-3
    # A sum in another order may round a weight in bfloat16 to its neighbour.
    tolerance = (
        {"rtol": 0.0, "atol": 1e-6}
        if dtype == "float32"
        else {"rtol": 2**-7, "atol": 1e-5}
    )
    for name, weight in summed[0].items():
        torch.testing.assert_close(aggregated[0][name], weight, **tolerance)


def parts(
    islands: list[Mapping[str, torch.Tensor]], prefix: str
) -> list[list[torch.Tensor]]:
    count = sum(name.startswith("start.") for name in islands[0])
    return [
        [island[f"{prefix}.{number}"] for number in range(count)] for island in islands
    ]
