"""Proof that a plan is right: each element written once, none fetched that is held, sends match receives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megaverl.errors import ReshardError
from megaverl.layout.boxes import Box, contains, intersect, subtract, whole
from megaverl.layout.layout import Layout
from megaverl.reshard.plan import Plan, Transfer


def check_plan(plan: Plan) -> None:
    """Prove one rank's plan against its own two layouts.

    Every element that the destination layout needs is written exactly once and nothing else is written, from
    elements that the sender's layout holds as far as this rank can see; and no element comes from another
    rank that this rank holds itself.

    Raises:
        ReshardError: names tensor, box and rank.
    """
    incoming = [*plan.copies, *(t for transfers in plan.receives.values() for t in transfers)]
    for transfer in incoming:
        if transfer.dest != plan.rank:
            raise ReshardError(f"{_where(transfer, plan.rank)} is meant for rank {transfer.dest}.")
    _written_once(incoming, plan.dest_layout, plan.rank)
    for transfer in [*plan.copies, *(t for transfers in plan.sends.values() for t in transfers)]:
        _held_by_source(transfer, plan.source_layout, plan.rank)
    for transfer in (t for transfers in plan.receives.values() for t in transfers):
        for piece in plan.source_layout.by_tensor.get(transfer.tensor, ()):
            if common := intersect(piece.box, transfer.box):
                raise ReshardError(
                    f"{_where(transfer, plan.rank)} fetches {common} from rank {transfer.source}, "
                    f"but holds it itself in {piece.local}."
                )


def check_plans(plans: Sequence[Plan]) -> None:
    """Prove the plans of all ranks, and that each sends exactly what the other receives, in the same order.

    Raises:
        ReshardError: names tensor, box and both ranks.
    """
    for plan in plans:
        check_plan(plan)
    for plan in plans:
        for peer, received in plan.receives.items():
            _same(plans[peer].sends.get(plan.rank, ()), received, sender=peer, receiver=plan.rank)
        for peer, sent in plan.sends.items():
            _same(sent, plans[peer].receives.get(plan.rank, ()), sender=plan.rank, receiver=peer)


def _written_once(incoming: Iterable[Transfer], layout: Layout, rank: int) -> None:
    written: dict[str, list[Transfer]] = {}
    for transfer in incoming:
        written.setdefault(transfer.dest_local, []).append(transfer)
    needed: dict[str, list[tuple[str, Box]]] = {name: [] for name in layout.local_shapes}
    for piece in layout.pieces:
        needed[piece.local].append((piece.tensor, piece.local_box))
    for local, transfers in written.items():
        if local not in needed:
            raise ReshardError(f"{_where(transfers[0], rank)}: the destination has no tensor {local}.")
        transfers.sort(key=lambda transfer: transfer.dest_box)
        for i, transfer in enumerate(transfers):
            if not contains(whole(layout.local_shapes[local]), transfer.dest_box):
                raise ReshardError(f"{_where(transfer, rank)} lies outside {layout.local_shapes[local]}.")
            for other in transfers[i + 1 :]:
                if other.dest_box.start[0] >= transfer.dest_box.stop[0]:
                    break
                if common := intersect(transfer.dest_box, other.dest_box):
                    raise ReshardError(f"{_where(transfer, rank)}: {common} is written twice.")
    for local, pieces in needed.items():
        got = written.get(local, ())
        count = 0
        for tensor, box in pieces:
            rest = [box]
            for transfer in got:
                common = intersect(box, transfer.dest_box)
                if transfer.tensor == tensor and common:
                    count += common.numel
                    rest = [r for part in rest for r in subtract(part, transfer.dest_box)]
            if rest:
                raise ReshardError(f"{tensor}: rank {rank} never gets {rest[0]} of {local}.")
        extra = sum(transfer.dest_box.numel for transfer in got) - count
        if extra:
            raise ReshardError(f"{local}: rank {rank} writes {extra} elements that no weight asks for.")


def _held_by_source(transfer: Transfer, layout: Layout, rank: int) -> None:
    if transfer.source != rank:
        raise ReshardError(f"{_where(transfer, rank)} is sent by rank {transfer.source}.")
    rest = [transfer.box]
    for piece in layout.by_tensor.get(transfer.tensor, ()):
        if piece.local == transfer.source_local:
            rest = [r for part in rest for r in subtract(part, piece.box)]
    if rest:
        raise ReshardError(f"{_where(transfer, rank)}: rank {rank} does not hold {rest[0]}.")


def _same(sent: Sequence[Transfer], received: Sequence[Transfer], *, sender: int, receiver: int) -> None:
    if list(sent) == list(received):
        return
    for a, b in zip(sent, received, strict=False):
        if a != b:
            raise ReshardError(
                f"rank {sender} sends {a.tensor} {a.box} where rank {receiver} expects {b.tensor} {b.box}."
            )
    raise ReshardError(f"rank {sender} sends {len(sent)} boxes to rank {receiver}, which expects {len(received)}.")


def _where(transfer: Transfer, rank: int) -> str:
    return f"{transfer.tensor} {transfer.box} -> {transfer.dest_local} {transfer.dest_box} on rank {rank}"
