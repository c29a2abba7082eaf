"""What the launcher's tests run in each rank: meet the other, then end as told. Without torch, which takes seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def main(folder: str, how: str) -> int:
    if how == "leave":  # before the other can send any
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rank = int(os.environ["RANK"])
    other = connection(rank, f"{folder}/{how}")
    meet(other)
    report = {
        name: os.environ[name]
        for name in ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    }
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(report))
    if rank == 1 and how.startswith("exit"):
        print("rank 1 says why", file=sys.stderr, flush=True)
        os._exit(int(how.removeprefix("exit")))
    if rank == 1 and how in ("killed", "lost"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lost":
        meet(other)  # fails, as rank 1 has left
    if how == "leave":
        for number in SIGNALS:
            os.write(1, b"ready\n")  # in one piece, as two ranks write there
            signal.sigwait([number])
        meet(other)  # both have heard
        os._exit(75)
    if how != "well":
        signal.pause()  # until the launcher ends it
    return 0


def connection(rank: int, path: str) -> socket.socket:
    if rank == 0:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        return server.accept()[0]
    client = socket.socket(socket.AF_UNIX)
    while client.connect_ex(path) != 0:  # rank 0 may not listen yet
        time.sleep(0.01)
    return client


def meet(other: socket.socket) -> None:
    other.sendall(b".")
    if not other.recv(1):
        raise ConnectionError("the other rank has left")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
