"""Versions of a shared folder that are changes: written by an actor's ranks, applied by an engine's, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding.box_fingerprints import join_fingerprints
from megaverl.sharding.layout import Layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of
from megaverl.weights.change_files import (
    ChangeWriter,
    apply_changes,
    box_fingerprints,
    file_name,
)
from tests.sharding.specs import element_ids, fill, make_spec

GRIDS = {
    "dense": (GridShape(tp=2, pp=2, dp=2), {}),
    "experts": (
        GridShape(tp=2, dp=2, ep=2, etp=1),
        {"architecture": "Qwen3MoeForCausalLM"},
    ),
}
# Share of the elements that each version changes, and the bits that it flips.
VERSIONS = ((16, 1), (50, 0x8000), (3, 2))

Tensors = dict[str, torch.Tensor]


class Actor:
    """All ranks of an actor, with weights whose bits are known."""

    def __init__(self, kind: str) -> None:
        self.grid, options = GRIDS[kind]
        self.spec = make_spec(num_layers=2, num_kv_heads=2, **options)
        self.weights = weights_of(self.spec)
        self.layout_of = megatron_layouts(
            self.weights, self.spec, self.grid, padded_vocab_size=64
        )
        self.bits = {
            name: (array % 251 + 1).astype(np.int64)
            for name, array in element_ids(self.weights).items()
        }
        self.tensors = [self._filled(self.layout_of(rank)) for rank in self._ranks]
        self.writers = [
            ChangeWriter(
                self.layout_of,
                self.tensors[rank],
                rank,
                self.grid.world_size,
                torch.bfloat16,
            )
            for rank in self._ranks
        ]

    @property
    def _ranks(self) -> range:
        return range(self.grid.world_size)

    def _filled(self, layout: Layout) -> Tensors:
        """Return bfloat16 tensors with the bits of this version."""
        filled = fill(layout, self.bits)
        return {
            name: torch.as_tensor(np.asarray(array))
            .to(torch.int16)
            .view(torch.bfloat16)
            for name, array in filled.items()
        }

    def change(self, every: int, flip: int) -> None:
        """Flip these bits of one element in `every`."""
        for array in self.bits.values():
            flat = array.reshape(-1)
            flat[::every] ^= flip
            flat[:] = (flat + 0x8000) % 0x10000 - 0x8000
        for rank in self._ranks:
            newer = self._filled(self.layout_of(rank))
            for name, tensor in self.tensors[rank].items():
                tensor.copy_(newer[name])

    def write(self, folder: Path) -> Any:
        """Write the version's changes on all ranks; return the sums."""
        shapes = shapes_of(self.weights)
        first, *others = [writer.write(folder, shapes) for writer in self.writers]
        for other in others:
            first = first.plus(other)
        return first

    def engine(self, tp: int) -> list[tuple[Layout, Tensors]]:
        """Return the layouts and tensors of an engine's ranks with this version."""
        layouts = vllm_layouts(self.weights, self.spec, tp)
        return [(layouts(rank), self._filled(layouts(rank))) for rank in range(tp)]


@pytest.mark.parametrize("kind", GRIDS)
def test_engines_get_every_bit(kind: str, tmp_path: Path) -> None:
    actor = Actor(kind)
    for writer in actor.writers:
        writer.keep()
    engines = {tp: actor.engine(tp) for tp in (1, 2)}
    late = actor.engine(2)
    numel = sum(array.size for array in actor.bits.values())
    for number, (every, flip) in enumerate(VERSIONS):
        actor.change(every, flip)
        written = actor.write(tmp_path / str(number))
        # A tied weight lies on two stages, and counts twice.
        assert numel <= written.compared <= 1.3 * numel
        assert written.whole == 2 * written.compared
        changed = sum(-(-array.size // every) for array in actor.bits.values())
        assert changed <= written.changed <= 1.3 * changed
        assert written.nbytes < 0.95 * written.whole
        expected = join_fingerprints(writer.fingerprints() for writer in actor.writers)
        assert expected.keys() == shapes_of(actor.weights).keys()
        for tp, ranks in engines.items():
            for (layout, tensors), (_, right) in zip(
                ranks, actor.engine(tp), strict=True
            ):
                read = apply_changes(tmp_path / str(number), layout, tensors)
                assert 0 < read <= written.nbytes
                _check_bits(tensors, right)
            found = join_fingerprints(
                box_fingerprints(layout, tensors, torch.bfloat16)
                for layout, tensors in ranks
            )
            assert found == expected
    # A late engine applies all versions, the first of them twice.
    for layout, tensors in late:
        for number in (0, 0, 1, 2):
            apply_changes(tmp_path / str(number), layout, tensors)
    for (_, tensors), (_, right) in zip(late, engines[2], strict=True):
        _check_bits(tensors, right)


def test_one_wrong_bit_shows() -> None:
    actor = Actor("dense")
    expected = join_fingerprints(writer.fingerprints() for writer in actor.writers)
    [(layout, tensors)] = actor.engine(1)
    name = layout.pieces[0].local
    tensors[name].view(torch.int16).view(-1)[0] ^= 1
    found = join_fingerprints([box_fingerprints(layout, tensors, torch.bfloat16)])
    wrong = [weight for weight in expected if found[weight] != expected[weight]]
    assert wrong == [layout.pieces[0].tensor]
    # In fewer bits the fingerprints would be others.
    assert box_fingerprints(layout, tensors, torch.float32) == {}


def test_damaged_versions_are_named(tmp_path: Path) -> None:
    actor = Actor("dense")
    for writer in actor.writers:
        writer.keep()
    actor.change(20, 1)
    actor.write(tmp_path / "1")
    [(layout, tensors)] = actor.engine(1)
    file = tmp_path / "1" / file_name(2)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ReshardError, match=r"changes-2.*as rank 2 of the actor wrote"):
        apply_changes(tmp_path / "1", layout, tensors)
    file.unlink()
    with pytest.raises(ReshardError, match="changes-2"):
        apply_changes(tmp_path / "1", layout, tensors)
    with pytest.raises(ReshardError, match=r"changes\.json.*rollout.servers.folder"):
        apply_changes(tmp_path / "2", layout, tensors)


def _check_bits(tensors: Tensors, right: Tensors) -> None:
    for name, tensor in tensors.items():
        same = torch.equal(tensor.view(torch.int16), right[name].view(torch.int16))
        assert same, name
