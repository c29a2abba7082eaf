"""Proof that a plan is correct: each element is written once, none is fetched needlessly, and sends match receives.

The proof is independent of how plans are made. It works tensor by tensor, and a result
is reused for other tensors whose pieces and transfers have the same boxes. Thousands of
layers and experts need only a few proofs.
"""

from __future__ import annotations

from collections.abc import Sequence

from megaverl.errors import ReshardError
from megaverl.sharding.boxes import (
    Box,
    carry,
    contains,
    first_overlap,
    intersect,
    same_up_to_ones,
    subtract_all,
    whole,
)
from megaverl.sharding.layout import Layout, Piece
from megaverl.sharding.plan import Plan, Transfer


def check_plan(plan: Plan) -> None:
    """Prove one rank's plan against its own two layouts.

    - Every element that the destination layout needs is written exactly once, and nothing else is written.
    - Every box sent is the part of the source layout that the transfer names.
    - No element that this rank holds itself comes from another rank.
    - Every box forwarded in a hop of a fan-out has been received in an earlier hop. So no rank forwards what it has not
      received, and no ranks can wait for each other in a circle.

    Raises:
        ReshardError: names tensor, box and rank.
    """
    _Checker().check(plan)


def check_plans(plans: Sequence[Plan]) -> None:
    """Prove the plans of all ranks, and that each rank sends exactly what the other receives, in the same order.

    Each plan is used once and not kept, so `make_plans` may create it on the fly. The
    two ranks' lists are compared by 64-bit hashes, and box by box only to report a
    difference.

    Raises:
        ReshardError: names tensor, box and both ranks.
    """
    checker = _Checker()
    # (hop, sender, receiver) -> hash of the list of whichever side comes first.
    digests: dict[tuple[int, int, int], int] = {}
    for rank, plan in enumerate(plans):
        if (plan.rank, plan.world) != (rank, len(plans)):
            raise ReshardError(
                f"plan {rank} of {len(plans)} is that of rank {plan.rank} of {plan.world}."
            )
        checker.check(plan)
        traffic = []
        for number, hop in enumerate(plan.hops):
            traffic += [
                ((number, rank, peer), transfers)
                for peer, transfers in hop.sends.items()
            ]
            traffic += [
                ((number, peer, rank), transfers)
                for peer, transfers in hop.receives.items()
            ]
        for pair, transfers in traffic:
            if transfers:
                # Hashes of strings differ between processes. Both sides are hashed in
                # this one.
                digest = hash(transfers)
                earlier = digests.pop(pair, None)
                if earlier is None:
                    digests[pair] = digest
                elif earlier != digest:
                    _refuse_difference(plans, *pair)
    # For the remaining pairs, only the sender or only the receiver expects a message.
    for pair in digests:
        _refuse_difference(plans, *pair)


class _PlaceIndex:
    """Layout with a number for each tensor's places, so that tensors in equal places can be recognized."""

    def __init__(self, layout: Layout, numbers: dict[object, int]) -> None:
        self.layout = layout
        self._numbers = numbers
        self._places: dict[str, tuple[int, tuple[str, ...]]] = {}

    def places(self, tensor: str) -> tuple[int, tuple[str, ...]]:
        """Return the number of a tensor's places and the local names in them.

        Tensors with the same number lie in the same boxes, up to the names of local
        tensors.
        """
        places = self._places.get(tensor)
        if places is None:
            pieces = self.layout.by_tensor.get(tensor, ())
            locals_ = tuple(dict.fromkeys(piece.local for piece in pieces))
            key = tuple(
                (piece.box, locals_.index(piece.local), piece.local_box)
                for piece in pieces
            )
            places = self._places[tensor] = (
                self._numbers.setdefault(key, len(self._numbers)),
                locals_,
            )
        return places


class _Checker:
    """Proofs, and everything proven so far."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._indexes: dict[int, _PlaceIndex] = {}
        # Layouts are kept because their identities are the keys.
        self._sound: dict[int, Layout] = {}
        self._written: set[object] = set()
        self._read: set[object] = set()
        self._fetched: set[object] = set()
        self._forwarded: set[object] = set()

    def check(self, plan: Plan) -> None:
        """Prove one plan."""
        if id(plan.dest_layout) not in self._sound:
            _check_layout(plan.dest_layout, plan.rank)
            self._sound[id(plan.dest_layout)] = plan.dest_layout
        source = self._index_of(plan.source_layout)
        dest = self._index_of(plan.dest_layout)
        written: dict[str, list[Transfer]] = {
            tensor: [] for tensor in plan.dest_layout.by_tensor
        }
        read: set[tuple[object, ...]] = set()
        for relayed, sender, receiver, transfers in _traffic(plan):
            # Plans hold tens of thousands of transfers. Fields are read by number and
            # without calls, to save time.
            for transfer in transfers:
                if transfer[2] != sender or transfer[5] != receiver:
                    raise ReshardError(
                        f"{_where(transfer)}: rank {plan.rank} has it among what goes "
                        f"from rank {sender} to rank {receiver}."
                    )
            if sender == plan.rank:
                # Forwarded boxes are read where they have been received.
                side = dest if relayed else source
                for transfer in transfers:
                    # Several ranks may receive the same box. It is checked once.
                    key = (relayed, transfer[0], transfer[3], transfer[1], transfer[4])
                    if key not in read:
                        self._check_read(transfer, side)
                        read.add(key)
            if receiver == plan.rank:
                for transfer in transfers:
                    into = written.get(transfer[0])
                    if into is None:
                        raise ReshardError(
                            f"{_where(transfer)}: the destination has no place for {transfer.tensor}."
                        )
                    into.append(transfer)
        self._check_forwards(plan)
        # Reads are proven above. What remains is that every place is written once, and
        # that nothing is fetched needlessly.
        for tensor, transfers in written.items():
            self._check_written(tensor, transfers, dest, plan.rank)
            if tensor in plan.source_layout.by_tensor:
                self._check_needed(tensor, transfers, source, plan.rank)

    def _check_forwards(self, plan: Plan) -> None:
        """Check that what a rank forwards has come from other ranks in earlier hops."""
        received: dict[str, tuple[Box, ...]] = {}
        # Number of hops whose receives are in `received` so far.
        arrived = 0
        for number, hop in enumerate(plan.relays):
            if hop.after is None:
                continue
            if not 0 <= hop.after < number:
                raise ReshardError(
                    f"rank {plan.rank} forwards in hop {number} what comes in hop {hop.after}."
                )
            # Only hops up to `after` count. Later ones may still be under way when the
            # box is forwarded.
            for earlier in plan.relays[arrived : hop.after + 1]:
                for transfers in earlier.receives.values():
                    for transfer in transfers:
                        received[transfer.tensor] = (
                            *received.get(transfer.tensor, ()),
                            transfer.box,
                        )
            arrived = max(arrived, hop.after + 1)
            for transfers in hop.sends.values():
                for transfer in transfers:
                    boxes = received.get(transfer.tensor, ())
                    key = (boxes, transfer.box)
                    if key in self._forwarded:
                        continue
                    if rest := subtract_all(transfer.box, boxes):
                        raise ReshardError(
                            f"{_where(transfer)}: rank {plan.rank} forwards {rest[0]} before it has received that."
                        )
                    self._forwarded.add(key)

    def _index_of(self, layout: Layout) -> _PlaceIndex:
        """Return the layout's `_PlaceIndex`, created once per layout."""
        index = self._indexes.get(id(layout))
        if index is None:
            index = self._indexes[id(layout)] = _PlaceIndex(layout, self._numbers)
        return index

    def _check_read(self, transfer: Transfer, source: _PlaceIndex) -> None:
        """Check that the box sent is the one that the transfer names."""
        number, locals_ = source.places(transfer.tensor)
        local = transfer.source_local
        key = (
            number,
            locals_.index(local) if local in locals_ else None,
            transfer.box,
            transfer.source_box,
        )
        if key not in self._read:
            pieces = source.layout.by_tensor.get(transfer.tensor, ())
            _prove_place(transfer, local, transfer.source_box, pieces, transfer.source)
            self._read.add(key)

    def _check_written(
        self, tensor: str, transfers: Sequence[Transfer], dest: _PlaceIndex, rank: int
    ) -> None:
        """Check that every element of a tensor's places is written once, with the right contents."""
        number, locals_ = dest.places(tensor)
        key: tuple[object, ...]
        # Most tensors lie in a single local tensor, where comparing names is faster
        # than looking them up.
        if len(locals_) == 1:
            (local,) = locals_
            key = (
                number,
                *[(t[1], t[7]) if t[6] == local else None for t in transfers],
            )
        else:
            key = (
                number,
                *[
                    (t[1], t[7], locals_.index(t[6]) if t[6] in locals_ else None)
                    for t in transfers
                ],
            )
        if key not in self._written:
            _prove_written(tensor, transfers, dest.layout.by_tensor[tensor], rank)
            self._written.add(key)

    def _check_needed(
        self, tensor: str, transfers: Sequence[Transfer], source: _PlaceIndex, rank: int
    ) -> None:
        """Check that nothing that the rank holds comes from another rank."""
        number, _ = source.places(tensor)
        for transfer in transfers:
            key = (number, transfer.box)
            if transfer.source == rank or key in self._fetched:
                continue
            for piece in source.layout.by_tensor[tensor]:
                if common := intersect(piece.box, transfer.box):
                    raise ReshardError(
                        f"{_where(transfer)} fetches {common} from rank {transfer.source}, "
                        f"but holds it itself in {piece.local}."
                    )
            self._fetched.add(key)


def _traffic(plan: Plan) -> list[tuple[bool, int, int, Sequence[Transfer]]]:
    """Return (whether it is forwarded, sender, receiver, transfers) of everything in a plan."""
    traffic: list[tuple[bool, int, int, Sequence[Transfer]]] = [
        (False, plan.rank, plan.rank, plan.copies)
    ]
    for hop in plan.hops:
        relayed = hop.after is not None
        for relation, peers in (
            ("sends to", hop.sends),
            ("receives from", hop.receives),
        ):
            for peer in peers:
                if peer == plan.rank or not 0 <= peer < plan.world:
                    raise ReshardError(
                        f"rank {plan.rank} {relation} rank {peer}, which is none of its peers."
                    )
        traffic += [
            (relayed, plan.rank, peer, transfers)
            for peer, transfers in hop.sends.items()
        ]
        traffic += [
            (relayed, peer, plan.rank, transfers)
            for peer, transfers in hop.receives.items()
        ]
    return traffic


def _check_layout(layout: Layout, rank: int) -> None:
    """Check that the pieces of a layout lie inside their local tensors and do not overlap."""
    by_local: dict[str, list[Piece]] = {}
    for piece in layout.pieces:
        by_local.setdefault(piece.local, []).append(piece)
    for local, pieces in by_local.items():
        shape = (
            layout.shape_of(local)
            if layout.stored_in(local) in layout.local_shapes
            else None
        )
        for piece in pieces:
            if (
                shape is None
                or len(shape) != len(piece.local_box.start)
                or not contains(whole(shape), piece.local_box)
            ):
                raise ReshardError(
                    f"{piece.tensor}: on rank {rank}, {local} {piece.local_box} lies outside {shape}."
                )
        both = first_overlap([piece.local_box for piece in pieces])
        if both is not None:
            a, b = (pieces[i] for i in both)
            raise ReshardError(
                f"on rank {rank} two weights have the same place in {local}: "
                f"{a.tensor} {a.local_box} and {b.tensor} {b.local_box}."
            )


def _prove_written(
    tensor: str, transfers: Sequence[Transfer], pieces: Sequence[Piece], rank: int
) -> None:
    """Check that the transfers write every place of a tensor once."""
    for transfer in transfers:
        _prove_place(transfer, transfer.dest_local, transfer.dest_box, pieces, rank)
    for local in dict.fromkeys(piece.local for piece in pieces):
        boxes = [
            transfer.dest_box for transfer in transfers if transfer.dest_local == local
        ]
        both = first_overlap(boxes)
        if both is not None:
            a, b = (boxes[i] for i in both)
            raise ReshardError(
                f"{tensor}: on rank {rank}, {local} {intersect(a, b)} is written twice."
            )
        for piece in pieces:
            if piece.local == local and (rest := subtract_all(piece.local_box, boxes)):
                raise ReshardError(
                    f"{tensor}: rank {rank} never gets {rest[0]} of {local}."
                )


def _prove_place(
    transfer: Transfer, local: str, box: Box, pieces: Sequence[Piece], rank: int
) -> None:
    """Check that `box` of the local tensor holds exactly the transfer's global box."""
    if not same_up_to_ones(transfer.box.shape, box.shape):
        raise ReshardError(
            f"{_where(transfer)}: {transfer.box} and {local} {box} differ in shape."
        )
    # Pieces do not overlap (`_check_layout`), so the box is covered if the elements
    # found add up to its size.
    inside = 0
    for piece in pieces:
        alike = piece.local == local and len(piece.local_box.start) == len(box.start)
        common = intersect(piece.local_box, box) if alike else None
        if common is not None:
            inside += common.numel
            here = carry(common, piece.local_box, piece.box)
            source_box = carry(common, box, transfer.box)
            if here != source_box:
                raise ReshardError(
                    f"{_where(transfer)}: {local} {common} on rank {rank} is the place of {here}, not of {source_box}."
                )
    if inside != box.numel:
        on_rank = (
            ", ".join(
                f"{piece.box} in {piece.local} {piece.local_box}" for piece in pieces
            )
            or "none of it"
        )
        raise ReshardError(
            f"{_where(transfer)}: {local} {box} lies outside what rank {rank} has of {transfer.tensor}: {on_rank}."
        )


def _refuse_difference(
    plans: Sequence[Plan], hop: int, sender: int, receiver: int
) -> None:
    """Raise ReshardError with the first difference between what one rank sends in a hop and the other expects."""
    sent = (
        plans[sender].hops[hop].sends.get(receiver, ())
        if hop < len(plans[sender].hops)
        else ()
    )
    expected = (
        plans[receiver].hops[hop].receives.get(sender, ())
        if hop < len(plans[receiver].hops)
        else ()
    )
    for a, b in zip(sent, expected, strict=False):
        if a != b:
            raise ReshardError(
                f"rank {sender} sends {_where(a)}, where rank {receiver} expects {_where(b)}."
            )
    more = sent[len(expected) :] or expected[len(sent) :]
    raise ReshardError(
        f"rank {sender} sends {len(sent)} boxes to rank {receiver}, which expects {len(expected)}; "
        f"the first that only one of them knows: {_where(more[0])}."
    )


def _where(transfer: Transfer) -> str:
    """Return a transfer in words."""
    return (
        f"{transfer.tensor} {transfer.box} from {transfer.source_local} {transfer.source_box} of rank "
        f"{transfer.source} to {transfer.dest_local} {transfer.dest_box} of rank {transfer.dest}"
    )
