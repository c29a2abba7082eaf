"""The wheels of the GPUs' lock, in an empty environment: do they work together where there is no GPU.

9 GB, so only by hand or at night: `MEGAVERL_TEST_GPU_LOCK=1 ./launch/test.sh
tests/cli/test_gpu_lock.py`. It last ran and passed on 2026-11-26.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "cuda-py312.lock"
BUILT = "# no wheel"
# Packages whose compiled half has no wheel. megatron-core and vLLM do without them;
# half of one would be an error.
HIDDEN = ("flash_attn", "transformer_engine", "transformer_engine_torch")

pytestmark = pytest.mark.skipif(
    os.environ.get("MEGAVERL_TEST_GPU_LOCK") != "1",
    reason="9 GB: MEGAVERL_TEST_GPU_LOCK=1 installs them",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The interpreter of an environment with all wheels of the lock."""
    source = f"source {ROOT}/launch/bootstrap.sh; _find_python cuda-py312"
    given = {**os.environ, "MEGAVERL_PYTHON": sys.executable}
    found = subprocess.run(
        ["bash", "-c", source], capture_output=True, text=True, env=given, check=False
    )
    if found.returncode:
        pytest.skip("no Python 3.12 here")
    folder = tmp_path_factory.mktemp("gpu_lock")
    subprocess.run(
        [found.stdout.strip(), "-m", "venv", "--without-pip", folder / "venv"],
        check=True,
    )
    python = folder / "venv" / "bin" / "python"
    lines = [
        line
        for line in LOCK.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    wheels = folder / "wheels.txt"
    wheels.write_text("\n".join(line for line in lines if BUILT not in line) + "\n")
    update_lock = runpy.run_path(
        str(ROOT / "tools" / "update_lock.py"), run_name="update_lock"
    )
    settings = update_lock["installer_settings"]()
    variables = dict(
        setting.split("=", 1) for setting in settings if setting[0].isupper()
    )
    uv = Path(sys.executable).with_name("uv")
    command = [
        str(uv),
        "pip",
        "install",
        "--python",
        str(python),
        "--no-deps",
        "--requirements",
        str(wheels),
    ]
    command += [setting for setting in settings if not setting[0].isupper()]
    # A cache on the same disk, so that files are linked and not written twice.
    environment = os.environ | variables | {"UV_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, env=environment, check=True)
    yield python
    shutil.rmtree(folder)


def modules() -> list[str]:
    every = runpy.run_path(str(ROOT / "launch" / "check_imports.py"))["modules_of"](
        LOCK
    )
    return [module for module in every if module.partition(".")[0] not in HIDDEN]


@pytest.mark.parametrize(
    "module",
    [
        *modules(),
        "megatron.core.models.gpt",
        "cuda.bindings.runtime",
        "vllm.engine.arg_utils",
    ],
)
def test_it_can_be_imported(module: str, python: Path) -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in HIDDEN)
    program = f"import sys; {hidden}; import torch, {module}"
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", program],
        capture_output=True,
        text=True,
        cwd=python.parent,
        env=given,
    )
    assert done.returncode == 0, done.stderr
