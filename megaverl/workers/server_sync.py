"""Weight synchronisation with inference servers: they read a folder for each version, or receive it shard to shard."""

from __future__ import annotations

import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.roles import ServersConfig
from megaverl.data.batch import RolloutBatch
from megaverl.distributed.collectives import (
    broadcast_json,
    on_first_rank,
    raise_together,
    reduce_json,
    together,
)
from megaverl.errors import ReshardError
from megaverl.outside import read_json_file
from megaverl.platform import platform
from megaverl.rollout import sample_seed
from megaverl.rollout.engine import Generation
from megaverl.rollout.server_api import is_loopback
from megaverl.rollout.server_engine import ServerEngine
from megaverl.rollout.server_pool import ChangesFolder, PublishedWeights
from megaverl.sharding.box_fingerprints import join_fingerprints
from megaverl.sharding.deltas import AUTO_ITEMSIZE
from megaverl.sharding.weight import shapes_of
from megaverl.weights.change_files import ChangeWriter, Written
from megaverl.weights.reshard import RankTotals, ReshardStats
from megaverl.weights.transports import DeltaMode, agree_on_dtypes, viewed
from megaverl.weights.transports.sent_weights import PAYS_BELOW, VERSIONS_WITHOUT
from megaverl.workers.model import TrainingModel
from megaverl.workers.policy import Policy
from megaverl.workers.server_transfer import GRACE_SECONDS, DeliveryBoard, ShardTransfer
from megaverl.workers.weight_sender import WeightSender

FINGERPRINT = "fingerprint.json"
NUM_TOKENS = 16  # number of tokens whose log-probs are compared
# Token limit of the comparison's micro-batch; large enough to hold it in one.
FINGERPRINT_BATCH = 4096
TOLERANCE = {torch.float32: 1e-3}
ROUGH = 0.1  # nats; in 16 bits engine and trainer round differently


class ServerSync:
    """Counterpart of `WeightSync` for servers. Every rank of the actor and of the rollout takes part in each reshard.

    The actor's ranks export the weights to a folder, together with the actor's
    log-probs of a few tokens. The first rank of the rollout makes the servers read the
    folder (`ServerEngine.use`), compares their log-probs with the actor's, and
    broadcasts the result to the other ranks. With `reshard.delta`, most folders have
    changes only (`VersionChain`).

    With `direct`, there is no folder: while the first rank of the rollout calls the
    servers, the actor's ranks send their shards (`WeightSender`).

    Args:
        model: the actor on this rank. None: it lives on other ranks, or the run has no actor and a constant folder.
        engine: this rank's connection to the servers, or None.
        world: the ranks of this rank's role.
        group: the ranks of actor and rollout.
        folder: versions are written here.
        source_folder: folder of the original model, whose small files are copied.
        dtype: of the actor's weights.
        tolerance: largest allowed log-prob difference in nats. None: a default for `dtype`.
        max_tokens: smallest number of tokens that every server accepts.
        direct: send weights shard to shard. None: through the folder.
        delta: `reshard.delta`.
        check_every: `reshard.check_every`, for versions that are changes.

    Attributes:
        weight_version: number of times that the servers' weights have changed.
    """

    def __init__(
        self,
        model: TrainingModel | None,
        engine: ServerEngine | None,
        world: dist.ProcessGroup,
        group: dist.ProcessGroup,
        *,
        folder: Path,
        source_folder: Path,
        dtype: torch.dtype,
        tolerance: float | None,
        max_tokens: int,
        direct: ServersConfig | None = None,
        delta: DeltaMode = "off",
        check_every: int = 0,
    ) -> None:
        self.weight_version = 0
        self._model, self._engine, self._world, self._group = (
            model,
            engine,
            world,
            group,
        )
        self._folder, self._source_folder = folder, source_folder
        self._tolerance = tolerance or TOLERANCE.get(dtype, ROUGH)
        # Leave room for one sampled token.
        self._num_tokens = min(NUM_TOKENS, max_tokens - 2)
        # Prefix of folder names that is unique among runs and restarts.
        # All ranks use the name that the first rank drew. Collective over actor and
        # rollout.
        self._run = broadcast_json(os.urandom(6).hex(), 0, group)
        self._number, self._whole = 0, False
        self._board: DeliveryBoard | None = None
        self._sender: WeightSender | None = None
        self._transfer: ShardTransfer | None = None
        self._counted = 0  # of the bytes that servers have received
        self._chain = VersionChain()
        self._writer: ChangeWriter | None = None
        self._servers_take_changes = False
        # Number of the version of which the actor's ranks have copies.
        self._copied = 0
        self._check_every, self._num_changes = check_every, 0
        # Ranks without an actor follow the actor's.
        self._delta: DeltaMode = "off"
        if direct is not None:
            self._prepare_direct(direct, delta)
        elif delta != "off":
            modes = reduce_json(
                None if model is None else _mode_of(model, delta), list, group
            )
            self._delta = min(filter(None, modes), key=MODES.index, default="off")
            if self._speaks and engine is not None:
                engine.pool.prepares_changes = self._delta != "off"

    def _prepare_direct(self, config: ServersConfig, delta: DeltaMode) -> None:
        """Create this rank's part in direct transfers. Collective over actor and rollout."""
        # Collective: every rank learns whether the run has an actor.
        num_senders = reduce_json(int(self._model is not None), sum, self._group)
        # Without an actor, servers keep the weights of a folder.
        if not num_senders:
            return
        store = dist.distributed_c10d._get_process_group_store(self._group)
        self._board = DeliveryBoard(store, self._run)
        limits = config.load_timeout_seconds, config.wait_seconds
        if self._model is not None:
            self._sender = WeightSender(
                self._model, self._board, sum(limits) + GRACE_SECONDS
            )
        if self._speaks:
            assert self._engine is not None
            # A worker without a GPU could not join NCCL; servers and actor are of one
            # kind.
            self._transfer = ShardTransfer(
                self._board, num_senders, platform.backend, limits[0], delta
            )
            self._engine.pool.transfer = self._transfer

    def source_changes(self) -> None:
        """Do nothing: servers share no memory with the actor. Called before the actor's weights change."""

    def reshard(self) -> ReshardStats:
        """Write the actor's weights, and make all servers read them. Collective over actor and rollout.

        Raises:
            CheckpointError: the folder cannot be written.
            RolloutError: no server could read the weights.
            ReshardError: the actor's ranks could not send their weights.
        """
        start = perf_counter()
        self._number += 1
        self._whole = False
        if self._board is not None:
            # Direct transfers write no folder.
            return self._send(self._board, start)
        folder = self._folder / f"{self._run}-{self._number}"
        written = self._write_changes(folder) if self._may_write_changes() else None
        if written is None:
            self._write_whole(folder)
        self._use(folder)
        self._whole = True
        self.weight_version += 1
        sent = self._chain.whole_bytes if written is None else written.nbytes
        stats = ReshardStats(
            bytes_local=0,
            bytes_sent=sent if self._speaks else 0,
            bytes_received=self._newly_read(),
            seconds=perf_counter() - start,
            num_messages=0,
            version=self.weight_version,
            busiest_sent=sent,
        )
        if written is None:
            return stats
        return replace(
            stats,
            busiest_whole=written.whole,
            changed_fraction=written.changed / max(1, written.compared),
        )

    def _newly_read(self) -> int:
        """Return the bytes of changes that servers have read since the last call, late servers included."""
        if not self._speaks or self._engine is None:
            return 0
        counted = self._counted
        self._counted = sum(self._engine.pool.changes_read.values())
        return self._counted - counted

    def _may_write_changes(self) -> bool:
        """Return whether this version is compared with the last one. Collective over actor and rollout."""
        if self._delta == "off":
            return False
        takes = True
        if self._speaks and self._engine is not None:
            pool = self._engine.pool
            takes = pool.takes_changes()
            # Servers on this machine read whole weights about as fast as weights are
            # compared.
            if self._delta == "auto" and all(map(is_loopback, pool.members)):
                takes = False
        # Only the rank that talks to the servers knows them.
        self._servers_take_changes = reduce_json(takes, all, self._group)
        is_copied = self._copied == self._number - 1
        return self._servers_take_changes and is_copied and self._chain.is_due()

    def _write_changes(self, folder: Path) -> Written | None:
        """Write the changes since the last version; return None if this version must be whole.

        Collective over actor and rollout.
        """
        error: Exception | None = None
        written = Written()
        model, writer = self._model, self._writer
        if model is not None:
            assert writer is not None, "whole weights came first"
            try:
                with model.on_device:
                    written = writer.write(folder, shapes_of(model.weights))
            # Only the actor's ranks have the error here.
            except Exception as caught:  # raised on every rank below
                error = caught
        raise_together(error, self._group)
        total = Written(*reduce_json(written, _sum_written, self._group))
        if not self._chain.add(folder, total):
            # The whole version replaces the folder, changes included.
            return None
        self._num_changes += 1
        if model is not None:
            try:
                self._describe(model, folder, self._is_checked())
            except Exception as caught:  # raised on every rank below
                error = caught
        raise_together(error, self._group)
        self._copied = self._number
        return total

    def _is_checked(self) -> bool:
        """Return whether servers compare all weights after this version's changes."""
        every = self._check_every
        if every <= 0:
            return every == 0 and self._num_changes == 1
        return self._num_changes % every == 0

    def _write_whole(self, folder: Path) -> None:
        """Write all weights. Collective over actor and rollout."""
        error: Exception | None = None
        nbytes = 0
        model = self._model
        keeps = self._servers_take_changes and self._chain.is_due(after_whole=True)
        if model is not None:
            try:
                model.export(folder, source_folder=self._source_folder, overwrite=True)
                self._describe(model, folder, checked=False)
                nbytes = _bytes_of(folder, model)
                if keeps:
                    self._keep(model)
            # Only the actor's ranks have the error here; `raise_together` passes it to
            # the rollout's ranks.
            except Exception as caught:
                error = caught
        # Collective over actor and rollout: no rank goes on before all servers have the
        # folder.
        raise_together(error, self._group)
        self._chain.begin(folder, reduce_json(nbytes, max, self._group))
        if keeps:
            self._copied = self._number

    def _keep(self, model: TrainingModel) -> None:
        """Copy the weights that the next version's changes build on. Collective over the actor's ranks."""
        if self._writer is None:
            grid = model.grid
            layout = model.layout_of(grid.rank)
            own = {name: model.parameters[name] for name in layout.local_shapes}
            held = viewed(layout, own)
            # Ranks without a tensor do not know its dtype.
            of_model = agree_on_dtypes({"model": (layout, held)}, grid.world)["model"]
            self._writer = ChangeWriter(
                model.layout_of,
                model.parameters,
                grid.rank,
                dist.get_world_size(grid.world),
                model.files_dtype or of_model.common,
            )
        with model.on_device:
            self._writer.keep()

    def _send(self, board: DeliveryBoard, start: float) -> ReshardStats:
        """Send the actor's weights to all servers, shard to shard. Collective over actor and rollout."""
        name = f"{self._run}-{self._number}"
        sender, engine = self._sender, self._engine
        before = (0, 0) if sender is None else (sender.bytes_sent, sender.num_messages)
        with ExitStack() as stack:
            # No server may still be receiving the version whose copies are overwritten
            # below.
            if self._speaks and engine is not None:
                stack.enter_context(engine.pool.only_reshard_delivers())
            fingerprint: dict[str, Any] | None = None
            error: Exception | None = None
            try:
                fingerprint = self._fingerprint()
            except Exception as caught:  # raised on every rank below
                error = caught
            # Every rank raises if one of the actor's ranks could not compute its
            # log-probs.
            raise_together(error, self._group)
            # The rollout's first rank lives elsewhere and needs the actor's tokens and
            # log-probs.
            known = reduce_json(fingerprint, _first_given, self._group)
            weights = PublishedWeights(
                None,
                name,
                tuple(known["tokens"]),
                tuple(known["log_probs"]),
                self._tolerance,
            )
            try:
                # Weights and their copies are on the device while they are sent.
                if self._model is not None:
                    stack.enter_context(self._model.on_device)
                # No late server is served meanwhile, which would read tensors that
                # change.
                if sender is not None:
                    stack.enter_context(sender.exclusive())
                self._serve(board, sender, weights)
            except Exception as caught:  # raised on every rank below
                error = caught
            raise_together(error, self._group)
        # Other ranks of the rollout record the version, without a call to the servers.
        if engine is not None and not self._speaks:
            engine.use(PublishedWeights(None, name))
        self._whole = True
        self.weight_version += 1
        sent, messages = (
            (0, 0) if sender is None else (sender.bytes_sent, sender.num_messages)
        )
        # The total includes servers that joined since the last reshard.
        counted, self._counted = (
            self._counted,
            0 if self._transfer is None else self._transfer.bytes_received,
        )
        totals = RankTotals() if self._transfer is None else self._transfer.last
        return ReshardStats(
            bytes_local=0,
            bytes_sent=sent - before[0],
            bytes_received=self._counted - counted,
            seconds=perf_counter() - start,
            num_messages=messages - before[1],
            version=self.weight_version,
            busiest_sent=totals.busiest_sent,
            busiest_whole=totals.busiest_whole,
            changed_fraction=totals.changed_fraction,
        )

    def _serve(
        self,
        board: DeliveryBoard,
        sender: WeightSender | None,
        weights: PublishedWeights,
    ) -> None:
        """Do this rank's part while servers get the weights: call them, send to them, or both at the same time."""
        engine = self._engine

        def call_servers() -> None:
            assert engine is not None
            try:
                engine.use(weights, live=True)
            finally:
                # Even if the servers failed: the actor's ranks stop serving when the
                # version is finished.
                board.finish(weights.name)

        # Sending stays on the main thread, which has the device's collectives.
        with ThreadPoolExecutor(1, "servers") as threads:
            called = threads.submit(call_servers) if self._speaks else None
            if sender is not None:
                sender.serve(lambda: board.is_finished(weights.name))
                # For servers that come later, once this version is complete.
                sender.keep_copy()
            if called is not None:
                called.result()

    def _fingerprint(self) -> dict[str, Any] | None:
        """Return tokens and the actor's log-probs of them, or None on a rank without an actor."""
        if self._model is None:
            return None
        tokens = fingerprint_tokens(self._model.vocab_size, self._num_tokens)
        return {"tokens": tokens, "log_probs": self._log_probs(self._model, tokens)}

    @property
    def _speaks(self) -> bool:
        """Return whether this rank talks to the servers for its role."""
        return self._engine is not None and dist.get_rank(self._world) == 0

    def _describe(self, model: TrainingModel, folder: Path, checked: bool) -> None:
        """Write the actor's log-probs, and the fingerprints of its weights if servers compare them.

        Collective over the actor's ranks.
        """
        described: dict[str, Any] = dict(self._fingerprint() or {})
        if checked:
            assert self._writer is not None
            with model.on_device:
                own = self._writer.fingerprints()
            described["weights"] = reduce_json(own, join_fingerprints, model.grid.world)

        def write() -> None:
            (folder / FINGERPRINT).write_text(json.dumps(described), encoding="utf-8")

        on_first_rank(write, model.grid.world)

    def _log_probs(self, model: TrainingModel, tokens: list[int]) -> list[float]:
        """Return the actor's log-probs of these tokens, after the first one. Collective over the actor's ranks."""
        generation = Generation(tokens[1:], [0.0] * (len(tokens) - 1), "length")
        batch = RolloutBatch.from_generations([tokens[:1]], [generation])
        # All tokens fit one micro-batch, and temperature 1 is what servers report.
        policy = Policy(model, temperature=1.0, micro_batch_tokens=FINGERPRINT_BATCH)
        with model.on_device, torch.no_grad():
            log_probs: list[float] = policy.log_probs(batch)[0].tolist()
        return log_probs

    def _use(self, folder: Path) -> None:
        """Make the servers read the folder, and remove older versions."""
        if self._engine is None:
            return
        engine = self._engine
        with together(self._world):
            if self._speaks:
                engine.use(self._published(folder))
                # Only after all servers have read the newer version.
                self._remove_old()
        if not self._speaks:
            engine.use(PublishedWeights(str(folder), folder.name))

    def _remove_old(self) -> None:
        """Remove outdated versions that no server is reading.

        These are versions before the last whole one, and versions from before a restart
        of the run. A newer version may already be in the folder.
        """
        assert self._engine is not None
        kept = self._engine.pool.being_read()
        for folder in self._folder.glob("*-*"):
            # A name of this run has the run's prefix and a number. Exports that were
            # cut off end in `.tmp`.
            match = re.fullmatch(r"([0-9a-f]{12})-(\d+)(\.tmp)?", folder.name)
            oldest = self._number - len(self._chain.changes)
            is_old = match and (match[1] != self._run or int(match[2]) < oldest)
            if is_old and str(folder.absolute()) not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _published(self, folder: Path) -> PublishedWeights:
        try:
            published = read_json_file(folder / FINGERPRINT)
        except OSError as error:
            raise ReshardError(
                f"{folder}: the actor's first rank has written the weights there, and this rank cannot read them "
                f"({error}). Set rollout.servers.folder to a folder that all ranks and servers share."
            ) from error
        tokens, log_probs = tuple(published["tokens"]), tuple(published["log_probs"])
        chain = self._chain
        assert chain.whole is not None
        return PublishedWeights(
            str(chain.whole.absolute()),
            folder.name,
            tokens,
            log_probs,
            self._tolerance,
            chain.whole.name,
            tuple(
                ChangesFolder(changes.name, str(changes.absolute()))
                for changes in chain.changes
            ),
            published.get("weights", {}),
        )

    def use_folder(self, folder: Path) -> None:
        """Load a constant folder into the servers. Collective over the role's ranks."""
        weights = PublishedWeights(str(folder.absolute()), f"{self._run}-0")
        assert self._engine is not None
        with together(self._world):
            if self._speaks:
                self._engine.use(weights)
        if not self._speaks:
            self._engine.use(weights)
        self._whole = True

    def wake(self) -> None:
        """Do nothing: servers are always awake."""

    def sleep(self) -> None:
        """Do nothing: servers are always awake."""

    def check_whole(self) -> None:
        """Check that the servers hold the actor's weights. Called before anything is generated.

        Raises:
            ReshardError: the last reshard failed.
        """
        if not self._whole:
            raise ReshardError(
                "the servers' weights are not those of the actor: the last reshard failed. Nothing can be generated "
                "until a whole one has passed."
            )


class VersionChain:
    """The last version that was written whole, and the versions since then that are changes.

    A late server reads all of them, in order. So a whole version is written again
    before the changes take more than `PAYS_BELOW` of the bytes of whole weights. If one
    version's changes take that much alone, the next `VERSIONS_WITHOUT` versions are
    whole, without a comparison.

    Attributes:
        whole: folder of the last whole version; None: there is none.
        changes: folders of the versions since then.
        whole_bytes: bytes of the whole version.
    """

    def __init__(self) -> None:
        self.whole: Path | None = None
        self.changes: list[Path] = []
        self.whole_bytes = 0
        self._bytes = 0
        self._without = 0

    def begin(self, whole: Path, nbytes: int) -> None:
        """Begin with a whole version."""
        self.whole, self.whole_bytes = whole, nbytes
        self.changes, self._bytes = [], 0
        self._without = max(0, self._without - 1)

    def add(self, folder: Path, written: Written) -> bool:
        """Add a version's changes; return False if it must be written whole instead."""
        limit = PAYS_BELOW * written.whole
        if written.nbytes > limit:
            # The whole version that follows counts as one.
            self._without = VERSIONS_WITHOUT + 1
        if self._bytes + written.nbytes > limit:
            return False
        self._bytes += written.nbytes
        self.changes.append(folder)
        return True

    def is_due(self, *, after_whole: bool = False) -> bool:
        """Return whether the next version is compared with the last one.

        Args:
            after_whole: ask while a whole version is written.
        """
        if after_whole:
            return self._without <= 1
        return self.whole is not None and not self._without


# From the strongest restriction to none.
MODES: tuple[DeltaMode, ...] = ("off", "auto", "on")


def _mode_of(model: TrainingModel, delta: DeltaMode) -> DeltaMode:
    """Return `reshard.delta` as far as this model allows it, for folders."""
    # The export merges adapters into weights that this rank does not hold.
    if model.adapters is not None:
        return "off"
    # Weights are offloaded because memory is short, and so would be that of copies.
    is_narrow = (model.files_dtype or model.dtype).itemsize == AUTO_ITEMSIZE
    if delta == "auto" and (model.offloads or not is_narrow):
        return "off"
    return delta


def _sum_written(parts: list[Any]) -> Written:
    """Return the sum over all ranks."""
    total = Written()
    for part in parts:
        total = total.plus(part)
    return total


def _bytes_of(folder: Path, model: TrainingModel) -> int:
    """Return the bytes of a folder's weights on the actor's first rank, 0 on others, which may not see it yet."""
    if model.grid.rank:
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _first_given(fingerprints: list[Any]) -> Any:
    """Return the fingerprint of the first rank that has an actor."""
    return next(fingerprint for fingerprint in fingerprints if fingerprint is not None)


def fingerprint_tokens(vocab_size: int, count: int = NUM_TOKENS) -> list[int]:
    """Return a first token and `count` more, spread over the vocabulary; identical in every run."""
    return [
        sample_seed(0, 0, place, "fingerprint") % vocab_size
        for place in range(1 + count)
    ]
