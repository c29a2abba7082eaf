"""What a role does on its ranks; and a role that the run has, on other ranks than this one."""

from __future__ import annotations

from typing import Never, TypeVar

T = TypeVar("T")


class RemoteWorker:
    """In a role's place on ranks that do not have it: using it here is a mistake of the program, and says so."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __getattr__(self, name: str) -> Never:
        raise RuntimeError(f"this rank has no {self.role}: asked for its '{name}'")


def local(worker: T | RemoteWorker) -> T:
    """A role that this rank must have.

    Raises:
        RuntimeError: it is on other ranks.
    """
    if isinstance(worker, RemoteWorker):
        raise RuntimeError(f"this rank has no {worker.role}")
    return worker
