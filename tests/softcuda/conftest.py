"""For tests on the software device: `device` starts ranks that have one each."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.softcuda.build import build
from tests.softcuda.ranks import SoftwareDevice
from tests.trainer.conftest import inputs  # noqa: F401 (a fixture)

CACHE = Path(__file__).parents[2] / ".venv" / "softcuda"


@pytest.fixture(scope="package", autouse=True)
def strict_products() -> Iterator[None]:
    """MKL whose products do not depend on strides and alignment of their operands, as they do on some AMD processors.

    An operator of the device may hand MKL a contiguous copy of what the CPU's own
    operator reads in place.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKL_CBWR", "AUTO,STRICT")
        yield


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the device's libraries, compiled once for each version of its sources."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which("g++") is None or not headers.exists():
        pytest.skip("the software CUDA device wants g++ and Python's headers")
    return build(
        CACHE if CACHE.parent.is_dir() else tmp_path_factory.mktemp("softcuda")
    )


@pytest.fixture(scope="session")
def device(libraries: Path) -> Iterator[SoftwareDevice]:
    """Ranks on software devices: `device.ranks(2, "tests.module:function")`, `device.command(["train", ...])`."""
    with SoftwareDevice(libraries) as ranks:
        yield ranks
