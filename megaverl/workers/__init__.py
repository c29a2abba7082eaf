"""Workers of the roles on this rank, and the placeholder for a role that lives on other ranks."""

from megaverl.workers.remote import RemoteWorker, local

__all__ = ["RemoteWorker", "local"]
