"""What the launcher's tests run in each rank: join the others over gloo, then end as told."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def main(folder: str, how: str) -> int:
    if how == "leave":  # before there are other threads, which could get them
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    report = {"sum": int(total), "world": dist.get_world_size(), "threads": os.environ["OMP_NUM_THREADS"]}
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(report))
    if rank == 1 and how.startswith("exit"):
        print("rank 1 says why", file=sys.stderr, flush=True)
        os._exit(int(how.removeprefix("exit")))
    if rank == 1 and how in ("killed", "lost"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lost":
        dist.barrier()  # fails, as rank 1 has left
    if how == "leave":
        for number in SIGNALS:
            os.write(1, b"ready\n")  # in one piece, as two ranks write there
            signal.sigwait([number])
        dist.barrier()  # both have heard
        os._exit(75)
    if how != "well":
        signal.pause()  # until the launcher ends it
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
