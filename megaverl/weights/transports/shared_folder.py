"""File transport: nodes without a fast network exchange boxes as safetensors files in a shared folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megaverl.distributed.collectives import broadcast_json
from megaverl.errors import ReshardError
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports import (
    Message,
    Moved,
    TransferJob,
    copy_boxes,
    messages,
    messages_by_dtype,
)
from megaverl.weights.transports.changes import Encoding
from megaverl.weights.transports.deltas import (
    DeltaMessages,
    MessageSizes,
    Outgoing,
)
from megaverl.weights.transports.sent_weights import is_compared

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 1800.0  # longest wait for a file if no timeout is set
CHANGES = "changes"  # name of the encoded bytes, and of their metadata


class File(NamedTuple):
    """A message that goes through a file, and the rank that reads or writes it."""

    peer: int
    number: int
    message: Message


class SharedFolder:
    """Takes transfers between nodes if the options name a folder.

    A sender writes a file for every message, and renames it when it is complete. The
    receiver waits for it, reads it into place and removes it. No rank waits before it
    has written all of its own files, so ranks cannot deadlock.

    A file whose message moves as changes has one tensor, the encoded bytes. Its metadata
    says how they are encoded, and on which version they build.
    """

    def __init__(
        self,
        job: TransferJob,
        folder: Path,
        sends: Mapping[int, Sequence[Transfer]],
        receives: Mapping[int, Sequence[Transfer]],
    ) -> None:
        size = job.options.bucket_bytes
        self._job, self._folder, self._version = job, folder, 0
        self._sends, self._receives = (
            [
                File(peer, number, message)
                for peer, transfers in lists.items()
                for number, message in enumerate(_messages(job, transfers, size))
            ]
            for lists in (sends, receives)
        )
        self._deltas: DeltaMessages | None = None
        if job.sent is not None:
            self._deltas = DeltaMessages(
                job.sent,
                (job.origins, job.forwarded, job.targets),
                job.wire_of,
                [
                    Outgoing(file.message, forwards=False)
                    for file in self._sends
                    if self._compares(file.message)
                ],
                [file.message for file in self._receives],
                size,
            )
        self._moved = Moved()

    @classmethod
    def take(cls, job: TransferJob) -> SharedFolder | None:
        folder, rank = job.options.folder, job.plan.rank
        if folder is None or job.plan.world == 1:
            return None
        # The random name keeps files of other runs and of other resharders apart.
        token = broadcast_json(os.urandom(8).hex(), 0, job.group)
        sends, receives = job.take_peers(
            lambda peer: not job.options.same_node(rank, peer)
        )
        reshard_folder = folder / f"reshard-{token}"
        try:
            reshard_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReshardError(
                f"reshard.folder={folder}: cannot be written ({error}). Name another folder."
            ) from error
        return cls(job, reshard_folder, sends, receives) if sends or receives else None

    def start(self, version: int) -> None:
        """Write all files that other ranks wait for, with one message in memory at a time."""
        # A failed run may have left files.
        for peer, number, _ in self._sends:
            self._file(self._version, self._job.plan.rank, peer, number).unlink(
                missing_ok=True
            )
        self._version, self._moved = version, Moved()
        if self._deltas is not None:
            self._deltas.begin(version)
        for peer, number, message in self._sends:
            file = self._file(version, self._job.plan.rank, peer, number)
            temporary = file.with_suffix(".tmp")
            tensors, metadata = self._contents(message)
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            try:
                save_file(
                    tensors, temporary, metadata={"boxes": str(message)} | metadata
                )
                temporary.rename(file)
            except (SafetensorError, OSError) as error:
                temporary.unlink(missing_ok=True)
                raise ReshardError(
                    f"{file}: cannot be written for rank {peer} ({error}). Make room, or name another reshard.folder."
                ) from error
            self._moved = self._moved.plus(
                Moved(sent=nbytes, messages=1, unsent=message.nbytes - nbytes)
            )

    def finish(self) -> Moved:
        for peer, number, message in self._receives:
            file = self._file(self._version, peer, self._job.plan.rank, number)
            self._wait_for(file, peer, message)
            try:
                with safe_open(file, framework="pt") as stored:
                    metadata = stored.metadata()
                    names = stored.keys()
                    tensors = {name: stored.get_tensor(name) for name in names}
                    nbytes = sum(tensor.nbytes for tensor in tensors.values())
                self._take(message, tensors, metadata)
                file.unlink()
            except (SafetensorError, OSError, KeyError, ValueError) as error:
                raise ReshardError(
                    f"{file}: cannot be read as rank {peer} wrote it ({error!r}): {message}."
                ) from error
            self._moved = self._moved.plus(Moved(received=nbytes, messages=1))
        if self._deltas is not None:
            compared, changed = self._deltas.compared, self._deltas.changed
            return self._moved._replace(compared=compared, changed=changed)
        return self._moved

    def _compares(self, message: Message) -> bool:
        """Return whether a message is compared with the last version. Files are for other nodes only."""
        dtype = self._job.wire_of(message.transfers[0])
        return is_compared(self._job.options.delta, dtype, same_node=False)

    def _contents(
        self, message: Message
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors and the metadata of a message's file."""
        sent, deltas = self._job.sent, self._deltas
        if sent is None or deltas is None or not sent.due:
            return self._boxes(message), {}
        if not self._compares(message):
            return self._boxes(message), {}
        _, encoding, count, nbytes = deltas.announce(MessageSizes((message,)))
        if encoding == Encoding.WHOLE:
            deltas.is_sent(message)
            return self._boxes(message), {}
        payload = deltas.payload(message).cpu()
        deltas.is_sent(message)
        numbers = [self._version, encoding, count, nbytes]
        return {CHANGES: payload}, {CHANGES: ",".join(map(str, numbers))}

    def _take(
        self,
        message: Message,
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        """Write a file's contents into place."""
        if CHANGES not in tensors:
            boxes = [tensors[str(i)] for i in range(len(message.transfers))]
            copy_boxes(self._job.targets(message.transfers), boxes)
            return
        assert self._deltas is not None and self._job.sent is not None
        numbers = list(map(int, metadata[CHANGES].split(",")))
        self._deltas.expect(MessageSizes((message,)), numbers)
        payload = tensors[CHANGES].to(self._job.sent.device)
        self._deltas.apply(message, payload)

    def _boxes(self, message: Message) -> dict[str, torch.Tensor]:
        boxes, dtypes = (
            self._job.origins(message.transfers),
            map(self._job.wire_of, message.transfers),
        )
        return {
            str(i): box.to(
                "cpu", dtype, copy=True, memory_format=torch.contiguous_format
            )
            for i, (box, dtype) in enumerate(zip(boxes, dtypes, strict=True))
        }

    def _file(self, version: int, source: int, dest: int, number: int) -> Path:
        return (
            self._folder
            / f"version{version}-from{source}-to{dest}-{number}.safetensors"
        )

    def _wait_for(self, file: Path, peer: int, message: Message) -> None:
        timeout = self._job.options.timeout
        end = time.monotonic() + (
            PATIENCE_SECONDS if timeout is None else timeout.total_seconds()
        )
        while not file.exists():
            if time.monotonic() > end:
                doing = f"reading {message} of rank {peer} from {file.name}"
                raise self._job.failures.blame(
                    self._version, peer, doing, TimeoutError("no such file came")
                )
            time.sleep(POLL_SECONDS)


def _messages(
    job: TransferJob, transfers: Sequence[Transfer], size: int
) -> list[Message]:
    """Pack boxes into messages, of one dtype each if messages may be compared."""
    if job.sent is None:
        return messages(transfers, job.wire_of, size)
    return messages_by_dtype(transfers, job.wire_of, size)
