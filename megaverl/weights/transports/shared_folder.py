"""File transport: nodes without a fast network exchange boxes as safetensors files in a shared folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megaverl.distributed.collectives import broadcast_json
from megaverl.errors import ReshardError
from megaverl.sharding.plan import Transfer
from megaverl.weights.transports import (
    Message,
    Moved,
    TransferJob,
    copy_boxes,
    messages,
)

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 1800.0  # longest wait for a file if no timeout is set


class SharedFolder:
    """Takes transfers between nodes if the options name a folder.

    A sender writes a file for every message, and renames it when it is complete. The
    receiver waits for it, reads it into place and removes it. No rank waits before it
    has written all of its own files, so ranks cannot deadlock.
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
        self._sends = [
            (peer, i, m)
            for peer in sends
            for i, m in enumerate(messages(sends[peer], job.wire_of, size))
        ]
        self._receives = [
            (peer, i, m)
            for peer in receives
            for i, m in enumerate(messages(receives[peer], job.wire_of, size))
        ]

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
        self._version = version
        for peer, number, message in self._sends:
            file = self._file(version, self._job.plan.rank, peer, number)
            temporary = file.with_suffix(".tmp")
            try:
                save_file(
                    self._boxes(message), temporary, metadata={"boxes": str(message)}
                )
                temporary.rename(file)
            except (SafetensorError, OSError) as error:
                temporary.unlink(missing_ok=True)
                raise ReshardError(
                    f"{file}: cannot be written for rank {peer} ({error}). Make room, or name another reshard.folder."
                ) from error

    def finish(self) -> Moved:
        for peer, number, message in self._receives:
            file = self._file(self._version, peer, self._job.plan.rank, number)
            self._wait_for(file, peer, message)
            try:
                stored = load_file(file)
                boxes = [stored[str(i)] for i in range(len(message.transfers))]
                file.unlink()
            except (SafetensorError, OSError, KeyError) as error:
                raise ReshardError(
                    f"{file}: cannot be read as rank {peer} wrote it ({error!r}): {message}."
                ) from error
            copy_boxes(self._job.targets(message.transfers), boxes)
        return Moved(
            sent=sum(message.nbytes for *_, message in self._sends),
            received=sum(message.nbytes for *_, message in self._receives),
            messages=len(self._sends) + len(self._receives),
        )

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
