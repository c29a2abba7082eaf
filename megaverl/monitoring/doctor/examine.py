"""All sections of the report, in order; the trials run beside the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megaverl.monitoring.doctor.finding import Finding
from megaverl.monitoring.doctor.hardware import hardware
from megaverl.monitoring.doctor.kernels import kernels
from megaverl.monitoring.doctor.network import network, storage
from megaverl.monitoring.doctor.stack import devices, python_of_this_report, versions
from megaverl.monitoring.doctor.trials import measure_rates, start_trials

SECTIONS = ("versions", "devices", "kernels", "network", "storage", "trials")


def examine(
    run_dir: Path = Path("runs"),
    *,
    trials: bool = True,
    generate: bool = True,
    gpu: bool = False,
    timeout: float = 28.0,
) -> Iterator[Finding]:
    """Every finding, as soon as it is there.

    Args:
        run_dir: where runs would write.
        trials: False starts no other process.
        generate: False leaves the engine out of the trials.
        gpu: also what the driver says of GPUs and links, and NCCL's rates between all of them.
        timeout: seconds after which a trial that is not done is ended and called failed.
    """
    deadline = time.monotonic() + timeout
    running = list(start_trials(generate=generate)) if trials else []

    def version_findings() -> Iterator[Finding]:
        yield python_of_this_report()
        yield from versions()

    looks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": version_findings,
        "devices": devices,
        **({"hardware": hardware} if gpu else {}),
        "kernels": kernels,
        "network": network,
        "storage": lambda: storage(run_dir),
    }
    for section, look in looks.items():
        try:
            yield from look()
        except Exception as error:  # whatever an odd machine raises: the other sections still count
            found = f"{type(error).__name__}: {error}"
            yield Finding(section, "the look itself", "warn", found, "this is a bug of the doctor: please report it")
    for trial in running:
        yield trial.finish(deadline)
    if gpu and trials:
        yield measure_rates(timeout)
