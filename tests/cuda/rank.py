"""The process whose copies are ranks on fake devices.

    python -m tests.cuda.rank LIBRARY CASES OUT      CASES: [{"recipe": ..., "world": ..., "rank": ...}, ...] as JSON

What a rank is stands in environment variables that many modules read, and torch's
default process group is there once: so each case has a process, made after everything
has been imported.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.cuda import fake_device

AT_ONCE = 2  # ranks
# Bytes of addresses that a rank may have besides page-locked memory
# (`DeviceMode._reserve`): no copy of a model's state may grow beyond.
HOST_MEMORY = 14 << 30


def import_everything(library: Path) -> None:
    os.environ.update(
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE=str(fake_device.NUM_DEVICES),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    fake_device.install(library)
    from tests.cuda import engine_optimizers, experts
    from tests.models import engine_stub

    sys.modules["transformer_engine.pytorch.optimizers"] = engine_optimizers
    experts.install()
    engine_stub.install()
    _same_on_all_ranks()
    from transformers import AutoTokenizer  # noqa: F401

    import tests.cuda.recipes  # noqa: F401
    from megaverl.platform import flash_attention

    # not in sys.modules, where transformers would look for all of the package
    flash_attention.importlib = SimpleNamespace(
        import_module=lambda name: engine_stub.flash_attn
    )
    experts.route_evenly()


def _same_on_all_ranks() -> None:
    """In the agreements between ranks all others say what this one says."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.utils import _DistWrapper

    from megaverl.distributed import collectives, job_context

    def conclude(
        value: bytes,
        answer: Callable[[list[bytes]], bytes],
        group: dist.ProcessGroup | None = None,
        kind: str = "",
        root: int = 0,
    ) -> bytes:
        return answer([value] * dist.get_world_size(group))

    collectives.conclude = conclude
    _DistWrapper.reduce_scatter = lambda self, step, of_each, of_all: of_all(
        [of_each()]
    )[0]
    collectives.broadcast_json = lambda value, source, group=None: value
    collectives.on_rank = lambda function, rank, group=None: function()
    collectives.gather_host_rows = lambda rows, group=None: OTHERS.gather_host_rows(
        rows
    )
    job_context._hosts_of_all = lambda timeout: dist.new_group(backend="fake")
    job_context.HostMessages = lambda *given: OwnMessages()
    # Takes these functions by name, as what it imports does.
    from tests.cuda.others import OTHERS

    OTHERS.install()


class OwnMessages:
    """From host to host: what comes under a name is what this rank has sent under it."""

    def __init__(self) -> None:
        self._sent: dict[str, list[Any]] = {}

    def send(self, dest: int, name: str, parts: Any) -> Future[None]:
        self._sent[name] = [part for part in parts if not isinstance(part, bytes)]
        taken = Future[None]()
        taken.set_result(None)
        return taken

    def receive(self, source: int, name: str, timeout: object) -> list[Any]:
        return self._sent[name]


def main(library: Path, cases: list[dict[str, Any]], out: Path) -> None:
    import_everything(library)
    running = 0
    for number, case in enumerate(cases):
        if running == AT_ONCE:
            os.wait()
            running -= 1
        if os.fork() == 0:
            _run(case, out / f"{number}.json")
        running += 1
    for _ in range(running):
        os.wait()


def _run(case: dict[str, Any], into: Path) -> None:
    from tests.cuda.recipes import run

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (HOST_MEMORY, most))
    try:
        found = run(**case)
    except BaseException:
        found = {"error": traceback.format_exc()}
    into.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
