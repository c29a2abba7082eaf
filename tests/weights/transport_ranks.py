"""What the ranks do in the tests of aliases, overlap, files, and of ranks that die or stall."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaverl.distributed.collectives import gather_json
from megaverl.distributed.grid import GridShape
from megaverl.errors import ReshardError
from megaverl.models.architectures import weights_of
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.plan import make_plan
from megaverl.sharding.vllm import vllm_layouts
from megaverl.weights.reshard import FinalParts, Resharder, parts_of
from megaverl.weights.transports import TransportOptions
from tests.sharding.specs import element_ids, fill, make_spec
from tests.weights.ranks import as_parameters

Parameters = dict[str, torch.nn.Parameter]


class Sides:
    """Megatron's tensors on a grid, vLLM's at a TP, and what vLLM's must hold once they are moved."""

    def __init__(self, grid: dict[str, int], vllm_tp: int, **spec: Any) -> None:
        rank, shape, model = dist.get_rank(), GridShape(**grid), make_spec(**spec)
        weights = weights_of(model)
        source_layouts = megatron_layouts(weights, model, shape, padded_vocab_size=64)
        dest_layouts = vllm_layouts(weights, model, vllm_tp)
        self.plan = make_plan(source_layouts, dest_layouts, shape.world_size, rank)
        ids = {name: array % 251 + 1 for name, array in element_ids(weights).items()}
        self.source = as_parameters(fill(source_layouts(rank), ids), torch.float32)
        self.moved = as_parameters(fill(dest_layouts(rank), ids), torch.float32)
        self.dest = as_parameters(
            fill(dest_layouts(rank), {k: v * 0 for k, v in ids.items()}), torch.float32
        )

    def multiply(self, factor: int) -> None:
        """The next version: all of the source's elements times `factor`."""
        for tensor in self.source.values():
            tensor.data.mul_(factor)

    def wrong(self, factor: int) -> list[str]:
        """Destination tensors that are not the first version times `factor`; padding does not count."""
        out = []
        for name, tensor in self.dest.items():
            used = self.moved[name] != 0
            if not torch.equal(tensor[used], self.moved[name][used] * factor):
                out.append(name)
        return out

    def shared(self) -> int:
        """Bytes of destination tensors that lie in the source's storage."""
        storages = {
            tensor.untyped_storage().data_ptr() for tensor in self.source.values()
        }
        shared = [
            t for t in self.dest.values() if t.untyped_storage().data_ptr() in storages
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in shared)


def refusal(resharder: Resharder) -> str:
    try:
        resharder.check_whole()
    except ReshardError as error:
        return str(error)
    return ""


def alias(grid: dict[str, int], vllm_tp: int, may_rebind: bool) -> dict[str, Any]:
    sides = Sides(grid, vllm_tp, num_kv_heads=2, vocab_size=64)
    options = TransportOptions(alias=True, may_rebind=may_rebind)
    resharder = Resharder(sides.plan, sides.source, sides.dest, options=options)
    unset = refusal(resharder)
    first = resharder.run()
    found: dict[str, Any] = {
        "unset": unset,
        "wrong": sides.wrong(1),
        "aliased": first.bytes_aliased,
        "copied": first.bytes_local,
        "shared": sides.shared(),
        "whole": refusal(resharder),
    }
    resharder.source_changes()
    found["changed"] = refusal(resharder)
    sides.multiply(2)
    resharder.run()
    found["wrong"] += sides.wrong(2)
    # as offloading does: the weights leave, and come back to another place
    for tensor in sides.source.values():
        tensor.data = tensor.data.clone().mul_(3)
    found["unmoved"] = sides.wrong(2)
    resharder.run()
    found["wrong"] += sides.wrong(6)
    found["shared_again"] = sides.shared()
    # storage that is freed under the engine: its weights are gone, and it says so
    for tensor in sides.source.values():
        tensor.untyped_storage().resize_(0)
    found["freed"] = refusal(resharder)
    return found


def overlap(ipc: bool, alias: bool) -> dict[str, Any]:
    """A version that moves part by part, each once it is said to have its new values, beside the ranks' own traffic."""
    sides = Sides({"tp": 2, "pp": 2}, 2)
    options = TransportOptions(alias=alias, bucket_bytes=1024, ipc=ipc)
    names = list(sides.source)
    # A part for each, as far as there are parts; the last is in none.
    in_order = [{name} for name in names[:-1]]
    resharder = Resharder(
        sides.plan,
        sides.source,
        sides.dest,
        None,
        options,
        background=dist.new_group(),
        in_order=in_order,
    )
    resharder.run()
    shared = sides.shared()
    final = FinalParts(resharder.num_parts, len(in_order))
    resharder.start(final)
    found: dict[str, Any] = {
        "unusable": refusal(resharder),
        "parts": resharder.num_parts,
    }
    total = torch.ones(1)
    for number, name in enumerate(names, start=1):
        sides.source[name].data.mul_(2)
        final.after(number if number < len(names) else None)
        if number <= 4:  # of every rank's
            dist.all_reduce(total)
    stats = resharder.finish()
    found |= {
        "wrong": sides.wrong(2),
        "shared": [shared, sides.shared()],
        "hidden": stats.hidden_seconds,
    }
    sides.multiply(2)
    again = resharder.run()  # nobody says what is final: all is
    found |= {
        "wrong_again": sides.wrong(4),
        "waited": again.hidden_seconds,
        "usable": refusal(resharder),
    }
    layout = sides.plan.source_layout
    early = frozenset[str]().union(*parts_of(layout, in_order, None))
    unordered = {
        piece.tensor
        for piece in layout.pieces
        if layout.stored_in(piece.local) == names[-1]
    }
    found |= {
        "unordered": len(unordered),
        "unordered_early": sorted(unordered & early),
        "early": len(early),
    }
    return found | {
        "bytes": [stats.bytes_received, again.bytes_received],
        "needs": sides.plan.num_received * 4,
    }


def lost() -> dict[str, Any]:
    """What is wrong after versions of which only some weights change: before and after the destination was lost."""
    sides = Sides({"tp": 2}, 2)
    names = sorted({piece.tensor for piece in sides.plan.dest_layout.pieces})
    changing = names[: len(names) // 2]
    resharder = Resharder(sides.plan, sides.source, sides.dest, changing=changing)

    def emptied(*, told: bool) -> list[str]:
        for tensor in sides.dest.values():
            tensor.data.zero_()
        if told:
            resharder.destination_lost()
        resharder.run()
        return sides.wrong(1)

    resharder.run()
    found = {
        "first": sides.wrong(1),
        "untold": emptied(told=False),
        "told": emptied(told=True),
    }
    return found | {"untold_again": emptied(told=False)}


def through_files(folder: str) -> dict[str, Any]:
    """Every rank on a node of its own; all that travels goes through the folder, which is empty afterwards."""
    sides = Sides({"tp": 2, "pp": 2}, 2)
    options = TransportOptions(
        bucket_bytes=1024, node_of=lambda rank: rank, folder=Path(folder)
    )
    resharder = Resharder(sides.plan, sides.source, sides.dest, options=options)
    wrong = []
    for factor in (1, 2):
        stats = resharder.run()
        wrong += sides.wrong(factor)
        sides.multiply(2)
    elements = sides.plan.num_received
    left = [str(path) for path in Path(folder).rglob("*") if path.is_file()]
    return {
        "wrong": wrong,
        "received": stats.bytes_received,
        "elements": elements,
        "left": left,
    }


def lose_a_rank(
    how: str,
    lost: int,
    seconds: float,
    folder: str,
    files: str | None = None,
    ipc: bool = False,
    background: bool = False,
) -> None:
    """Rank `lost` kills or stops itself in the middle of the second version; the others write what they say.

    A stopped rank is killed by the last of the others, so that the world can end.
    """
    rank = dist.get_rank()
    sides = Sides({"tp": 2, "pp": 2}, 2)
    options = TransportOptions(
        bucket_bytes=512,
        timeout=timedelta(seconds=seconds),
        node_of=None if ipc else lambda rank: rank,
        folder=None if files is None else Path(files),
        ipc=ipc,
    )
    own = dist.new_group() if background else None
    resharder = Resharder(
        sides.plan, sides.source, sides.dest, options=options, background=own
    )
    pids = gather_json(os.getpid())
    resharder.run()
    sides.multiply(2)
    if rank == lost:
        # what was written into files could be read without its writer, and a thread may
        # have sent all
        if files is None and not ipc and not background:
            resharder.start()
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    try:
        resharder.run()
        message = "no error"
    except ReshardError as error:
        message = str(error)
    mixed = {bool(sides.wrong(1)), bool(sides.wrong(2))} == {True}
    (Path(folder) / f"{rank}.txt").write_text(
        f"{message}\n{refusal(resharder)}\n{resharder.version}\n{mixed}\n"
    )
    while how == "stop" and len(list(Path(folder).glob("*.txt"))) < len(pids) - 1:
        signal.sigtimedwait([], 0.05)
    if how == "stop":
        os.kill(pids[lost], signal.SIGKILL)
