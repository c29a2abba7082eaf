"""Placeholder for a role that lives on other ranks."""

from __future__ import annotations

from typing import Never, TypeVar

T = TypeVar("T")


class RemoteWorker:
    """Placeholder for a role that lives on other ranks. Any attribute access raises `RuntimeError`."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __getattr__(self, name: str) -> Never:
        raise RuntimeError(f"this rank has no {self.role}: asked for its '{name}'")


def local(worker: T | RemoteWorker) -> T:
    """Return `worker` if this rank has the role.

    Raises:
        RuntimeError: the role is on other ranks.
    """
    if isinstance(worker, RemoteWorker):
        raise RuntimeError(f"this rank has no {worker.role}")
    return worker
