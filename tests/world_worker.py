"""One rank of a test world: joins a gloo process group, then runs the jobs that `tests.worlds` sends it.

Jobs come as JSON lines on standard input, answers go as JSON lines to the file descriptor given as the only
argument. Standard output and error are the rank's log file. Not imported by tests.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import Any

# The parent cuts a hang long before this; it only frees ranks whose parent was killed outright.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Import `job["target"]` ("package.module:function"), call it with `job["kwargs"]` and wrap what it did."""
    try:
        module_name, function_name = job["target"].split(":")
        function = getattr(importlib.import_module(module_name), function_name)
        answer = {"id": job["id"], "result": function(**job["kwargs"])}
        json.dumps(answer)  # a result that is not JSON is the job's error, not the worker's
        return answer
    except BaseException as error:  # every failure, SystemExit included, is reported to the test
        return {
            "id": job["id"],
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }


def main() -> None:
    faulthandler.enable()
    gc.set_threshold(100_000)  # a fifth less time for imports
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        answers.write(json.dumps({"ready": os.getpid()}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(run_job(json.loads(line))) + "\n")
            sys.stdout.flush()
    # Gloo's and an engine's destructors may wait for peers that are already gone: leave without them.
    os._exit(0)


if __name__ == "__main__":
    main()
