"""The installation: where uv looks for packages, and what happens where uv cannot be had."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
uv_settings = runpy.run_path(str(LAUNCH / "pip_settings.py"))["uv_settings"]
PROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """import shutil

def build_editable(folder, settings=None, metadata=None):
    return shutil.copy("megaverl-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""
BEST = ["--index-strategy", "unsafe-best-match"]


def test_uv_looks_where_pip_does() -> None:
    lines = [
        ":env:.find-links='/own'",
        "global.cert='/ca.crt'",
        "global.constraint='/constraints.txt'",
        "global.default-timeout='60'",
        "global.extra-index-url='https://a.example/index\\nfile:///b/index'",
        "global.find-links='/wheels'",
        "global.index-url='https://own.example/index'",
        "install.trusted-host='own.example'",
        "list.format='columns'",
    ]
    assert list(uv_settings(lines)) == [
        *(
            "SSL_CERT_FILE=/ca.crt",
            "UV_HTTP_TIMEOUT=60",
            "--default-index",
            "https://own.example/index",
        ),
        *("--index", "https://a.example/index", "--index", "file:///b/index"),
        *("--find-links", "/own", "--allow-insecure-host", "own.example", *BEST),
    ], "what the environment says replaces what a file says, as in pip"


@pytest.mark.parametrize(
    ("value", "options"), [("1", ["--no-index"]), ("true", ["--no-index"]), ("0", [])]
)
def test_no_index(value: str, options: list[str]) -> None:
    assert list(uv_settings([f":env:.no-index='{value}'"])) == [*options, *BEST]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one wheel and one source distribution, with the launch folder; no index."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the lock is for Python 3.11")
    wheels, project = tmp_path / "wheels", tmp_path / "project"
    wheels.mkdir()
    write_wheel(wheels / "tiny_thing-1.0-py3-none-any.whl")
    write_source(wheels / "built_thing-1.0.tar.gz")
    (project / "requirements").mkdir(parents=True)
    (project / "requirements" / "cpu-py311.lock").write_text("tiny-thing==1.0\n")
    pins = [
        "built-thing==1.0  # no wheel: built from its source",
        "cuda-toolkit==13.0",
        "tiny-thing==1.0",
    ]
    write_wheel(wheels / "cuda_toolkit-13.0-py3-none-any.whl")
    (project / "requirements" / "cuda-py311.lock").write_text("\n".join(pins) + "\n")
    write_wheel(project / "megaverl-1.0-py3-none-any.whl")
    (project / "pyproject.toml").write_text(PROJECT)
    (project / "backend.py").write_text(BACKEND)
    shutil.copytree(LAUNCH, project / "launch")
    # For GPUs too with the Python that is here.
    script = project / "launch" / "bootstrap.sh"
    script.write_text(script.read_text().replace("cuda-py312", "cuda-py311"))
    return project


def environment(project: Path, **given: str) -> dict[str, str]:
    found = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "MEGAVERL_", "CUDA"))
    }
    wheels = str(project.parent / "wheels")
    return found | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": wheels,
        **given,
    }


def bootstrap(
    project: Path, *arguments: str, **given: str
) -> subprocess.CompletedProcess[str]:
    command = [project / "launch" / "bootstrap.sh", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(project, **given),
        timeout=300,
    )


def imports(project: Path, *names: str) -> bool:
    imported = [
        project / ".venv" / "bin" / "python",
        "-c",
        f"import {', '.join(names)}",
    ]
    return (
        subprocess.run(imported, cwd=project.parent, capture_output=True).returncode
        == 0
    )


def write_program(path: Path, prints: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)


def test_pip_serves_where_uv_cannot_be_had(project: Path) -> None:
    """uv is not found, and the wheel and the project are installed."""
    done = bootstrap(project)
    assert done.returncode == 0, done.stderr
    assert "uv could not be fetched" in done.stderr
    assert imports(project, "tiny_thing", "megaverl")
    again = bootstrap(project)
    assert again.returncode == 0 and "installing" not in again.stderr
    (project / "requirements" / "cuda-py311.lock").write_text(
        "megatron-core==9.0\ntriton==1.0\n"
    )
    script = f"source {project}/launch/bootstrap.sh; _install_newer && $_newer/bin/python -c 'import "
    newer = ["bash", "-c", script + "megatron_core, triton, tiny_thing, megaverl'"]
    failed = subprocess.run(
        newer, capture_output=True, text=True, env=environment(project)
    )
    assert (
        failed.returncode == 1
        and "megatron-core==9.0 triton==1.0 could not be installed" in failed.stderr
    )
    for name in ("megatron_core-9.0", "triton-1.0"):
        write_wheel(
            project.parent / "wheels" / f"{name}-py3-none-any.whl",
            "Requires-Python: >=3.99\n",
        )
    for installs in (True, False):
        done = subprocess.run(
            newer, capture_output=True, text=True, env=environment(project)
        )
        assert (
            done.returncode == 0
            and ("into .venv/newer, once" in done.stderr) == installs
        ), done.stderr


def test_where_the_first_python_is_not_the_next_one_serves(project: Path) -> None:
    """As 3.12 does where there is no 3.11; and it stays the choice."""
    script = project / "launch" / "bootstrap.sh"
    written = script.read_text().replace("cpu-py311", "cpu-py399")
    script.write_text(written.replace("cpu-py312", "cpu-py399"))
    (project / "requirements" / "cpu-py399.lock").write_text("tiny-thing==1.0\n")
    refused = bootstrap(project)
    assert (
        refused.returncode == 1
        and "needs Python 3.11 or 3.12 with the venv module" in refused.stderr
    )
    script.write_text(written.replace("cpu-py312", "cpu-py311"))
    done = bootstrap(project)
    assert (
        done.returncode == 0
        and "pinned packages (cpu-py311) into .venv, once; log: " in done.stderr
    ), done.stderr
    assert imports(project, "tiny_thing", "megaverl")
    again = bootstrap(project)
    assert again.returncode == 0 and "installing" not in again.stderr


def test_for_a_gpu_what_has_no_wheel_is_built(project: Path, tmp_path: Path) -> None:
    """Without a toolkit, or with another's, nothing is touched; then everything is there, and stays the choice."""
    refused = bootstrap(
        project,
        "--gpu",
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
        CUDA_HOME=str(tmp_path),
    )
    assert (
        refused.returncode == 1
        and "for CUDA 13 as torch is; nvcc is absent." in refused.stderr
    )
    assert "docker/Dockerfile" in refused.stderr and not (project / ".venv").exists()
    write_program(
        tmp_path / "toolkit" / "bin" / "nvcc",
        "Cuda compilation tools, release 12.4, V12.4.131",
    )
    other = bootstrap(project, "--gpu", CUDA_HOME=str(tmp_path / "toolkit"))
    assert other.returncode == 1 and "nvcc is of CUDA 12." in other.stderr
    write_program(
        tmp_path / "toolkit" / "bin" / "nvcc",
        "Cuda compilation tools, release 13.0, V13.0.88",
    )
    write_program(tmp_path / "shims" / "nvidia-smi", "9.0")
    path = f"{tmp_path / 'shims'}:{os.environ['PATH']}"
    done = bootstrap(project, "--gpu", CUDA_HOME=str(tmp_path / "toolkit"), PATH=path)
    assert done.returncode == 0, done.stderr
    assert imports(project, "tiny_thing", "built_thing", "megaverl")
    assert "FLASH_ATTN_CUDA_ARCHS=90" in (project / "architectures").read_text()
    again = bootstrap(project)
    assert again.returncode == 0 and "installing" not in again.stderr, (
        "without --gpu, too, it stays a GPU's"
    )


def test_what_cannot_be_imported_is_named(project: Path) -> None:
    """All is installed, and the lock is not taken for done; after the next run's repair it is."""
    lock = project / "requirements" / "cpu-py311.lock"
    lock.write_text("megatron-core==9.0\ntiny-thing==1.0\ntransformers==1.0\n")
    wheels = project.parent / "wheels"
    write_wheel(wheels / "transformers-1.0-py3-none-any.whl")
    broken = "import cuda.bindings.runtime as r; r.cudaLibrary_t"
    write_wheel(
        wheels / "megatron_core-9.0-py3-none-any.whl",
        module="megatron/core/__init__",
        source=broken,
    )
    done = bootstrap(project)
    assert done.returncode == 1, done.stderr
    assert (
        "import megatron.core fails: ModuleNotFoundError: No module named 'cuda'"
        in done.stderr
    )
    assert "import transformers fails" not in done.stderr
    assert not (project / ".venv" / "stamps" / "cpu-py311").exists()
    assert not (project / ".venv" / ".installing").exists(), "what was built stays"
    lock.write_text("tiny-thing==1.0\ntransformers==1.0\n")
    again = bootstrap(project)
    assert again.returncode == 0, again.stderr


def test_a_missing_driver_is_no_failure_of_an_import(project: Path) -> None:
    """An image is built where there is none."""
    (project / "requirements" / "cpu-py311.lock").write_text("transformers==1.0\n")
    without = "raise ImportError('libcuda.so.1: cannot open shared object file')"
    write_wheel(
        project.parent / "wheels" / "transformers-1.0-py3-none-any.whl", source=without
    )
    done = bootstrap(project)
    assert done.returncode == 0, done.stderr
    assert "libcuda.so.1" in done.stderr and "not checked" in done.stderr


@pytest.mark.parametrize(
    ("cores", "gigabytes", "jobs"),
    [(192, 1800, 96), (192, 100, 11), (16, 128, 8), (2, 24, 1), (1, 4, 1)],
)
def test_compilers_by_cores_and_by_memory(
    cores: int, gigabytes: int, jobs: int
) -> None:
    script = f"source {LAUNCH}/bootstrap.sh; _compilers {cores} {gigabytes * 1_000_000}; _free_kilobytes"
    given = {**os.environ, "MEGAVERL_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=given, check=True
    )
    found, free = map(int, done.stdout.split())
    assert found == jobs and free > 100_000


def test_packages_are_built_one_after_the_other(project: Path, tmp_path: Path) -> None:
    write_source(project.parent / "wheels" / "other_thing-1.0.tar.gz")
    lock = project / "requirements" / "cuda-py311.lock"
    lock.write_text(
        "other-thing==1.0  # no wheel: built from its source\n" + lock.read_text()
    )
    write_program(
        tmp_path / "toolkit" / "bin" / "nvcc",
        "Cuda compilation tools, release 13.0, V13.0.88",
    )
    done = bootstrap(
        project, "--gpu", CUDA_HOME=str(tmp_path / "toolkit"), MAX_JOBS="3"
    )
    assert done.returncode == 0, done.stderr
    said = [
        line
        for line in done.stderr.splitlines()
        if "building" in line and "MAX_JOBS=3" in line
    ]
    assert ["other-thing" in said[0], "built-thing" in said[1]] == [True, True], (
        done.stderr
    )


def test_a_cpu_environment_on_a_machine_with_a_gpu(
    project: Path, tmp_path: Path
) -> None:
    venv = project / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "stamps").mkdir()
    stamp = ["bash", "-c", f"source {project}/launch/bootstrap.sh; _stamp_of cpu-py311"]
    own = {**os.environ, "MEGAVERL_PYTHON": sys.executable}
    (venv / "stamps" / "cpu-py311").write_text(
        subprocess.run(stamp, capture_output=True, text=True, env=own).stdout
    )
    write_program(
        tmp_path / "shims" / "nvidia-smi", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)"
    )
    path = f"{tmp_path / 'shims'}:{os.environ['PATH']}"
    warned = bootstrap(project, PATH=path)
    assert (
        warned.returncode == 0 and "computes on the processor alone" in warned.stderr
    ), warned.stderr
    assert "./launch/bootstrap.sh --gpu" in warned.stderr
    assert (
        "processor" not in bootstrap(project, PATH=path, CUDA_VISIBLE_DEVICES="").stderr
    )


def write_source(path: Path) -> None:
    """The smallest source distribution: its backend copies a wheel that lies in it, and notes what it was told."""
    folder = path.name.removesuffix(".tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, folder)
        root.mkdir()
        write_wheel(root / f"{folder}-py3-none-any.whl")
        (root / "pyproject.toml").write_text(PROJECT)
        notes = path.parents[1] / "project" / "architectures"
        (root / "backend.py").write_text(
            "import os, shutil\n\ndef build_wheel(folder, settings=None, metadata=None):\n"
            f"    told = os.environ.get('FLASH_ATTN_CUDA_ARCHS')\n"
            f"    open({str(notes)!r}, 'w').write(f'FLASH_ATTN_CUDA_ARCHS={{told}}')\n"
            f"    return shutil.copy({folder + '-py3-none-any.whl'!r}, folder).rpartition('/')[2]\n"
        )
        with tarfile.open(path, "w:gz") as file:
            file.add(root, arcname=folder)


def write_wheel(
    path: Path, metadata: str = "", module: str = "", source: str = ""
) -> None:
    """The smallest wheel: one module, of its name unless another is given."""
    name, version = path.name.split("-")[:2]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{module or name}.py", source)
        file.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        )
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{info}/RECORD", "")
