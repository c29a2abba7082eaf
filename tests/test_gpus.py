"""A GPU that the installed torch cannot use: found without torch, and refused by what trains."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megaverl import gpus
from megaverl.cli import main as cli
from megaverl.cli import train
from megaverl.monitoring.doctor import Finding, examine
from megaverl.trainer import elastic_agent, quickstart

DRY = [
    "--no-file-checks",
    "model.path=m",
    "data.train=t.jsonl",
    "data.validation=t.jsonl",
    "reward=gsm8k",
]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def write_torch(folder: Path, version: str, cuda: str) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(
        f"from typing import Optional\n__version__ = {version!r}\ncuda: Optional[str] = {cuda}\n"
        "hip: Optional[str] = None\n"
    )


@pytest.mark.parametrize(
    ("version", "cuda", "wrong"),
    [("2.13.0+cpu", "None", True), ("2.13.0+cu130", "'13.0'", False)],
)
def test_the_version_file_says_what_torch_is_built_for(
    version: str,
    cuda: str,
    wrong: bool,
    one_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_torch(tmp_path / "site", version, cuda)
    origin = tmp_path / "site" / "torch" / "__init__.py"
    spec = gpus.importlib.util.spec_from_file_location("torch", origin)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: spec)
    found = gpus.cpu_torch_beside_gpus()
    assert bool(found) == wrong
    if found:
        assert (
            f"torch {version} here is built without CUDA" in found
            and "./launch/bootstrap.sh --gpu" in found
        )


@pytest.fixture
def driver(tmp_path: Path) -> Callable[[int], str]:
    """A library that answers as a driver's for a CUDA version does: 12080 is 12.8."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(version: int) -> str:
        source, library = tmp_path / "driver.c", tmp_path / f"libcuda_{version}.so"
        source.write_text(
            f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n"
        )
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", library, source], check=True
        )
        return str(library)

    return build


@pytest.mark.parametrize(
    ("version", "cuda", "wrong"),
    [
        (12080, "'13.0'", True),
        (12020, "'13.0'", True),
        (13000, "'13.0'", False),
        (13000, "'13.1'", False),
    ]
    + [(13000, "'12.8'", False), (12080, "None", False)],
)
def test_a_driver_that_is_too_old_for_torch_is_named(
    version: int,
    cuda: str,
    wrong: bool,
    driver: Callable[[int], str],
    one_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """570 beside CUDA 13, for instance; the version of CUDA is one of a major number (minor version compatibility)."""
    served = gpus.driver_cuda_version(driver(version))
    assert served == (version // 1000, version % 1000 // 10)
    assert gpus.driver_cuda_version(str(tmp_path / "none.so")) is None
    write_torch(tmp_path / "site", "2.13.0", cuda)
    origin = tmp_path / "site" / "torch" / "__init__.py"
    spec = gpus.importlib.util.spec_from_file_location("torch", origin)
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n"
    )
    monkeypatch.setattr(gpus, "DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(gpus, "driver_cuda_version", lambda: served)
    found = gpus.driver_older_than_torch()
    assert bool(found) == wrong
    if found:
        assert (
            "The NVIDIA driver 570.86.15 serves CUDA up to 12." in found
            and "580 or newer" in found
        )
        assert examine_versions()[0].status == "fail", "the first line of the report"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.driver_older_than_torch() is None, "the processor is meant"


def examine_versions() -> list[Finding]:
    return list(examine.versions())


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_nothing_trains_on_the_processor_of_a_machine_with_a_gpu(
    command: str,
    one_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpus, "_cpu_torch", lambda: "2.13.0+cpu")
    monkeypatch.delenv("RANK", raising=False)
    real = train.read_config
    monkeypatch.setattr(
        train,
        "read_config",
        lambda given, name, **_: real(given, name, check_paths=False),
    )
    assert cli.main([command, *DRY[1:]]) == 2
    assert "built without CUDA" in capsys.readouterr().err
    assert cli.main([command, "--dry-run", *DRY]) == 0, "a dry run warns"
    assert "warning: This machine has a GPU" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.cpu_torch_beside_gpus() is None, "the processor is meant"


def test_nothing_trains_on_the_processor_beside_an_old_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torch.cuda.is_available()` is False then, and decides the branch."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        gpus, "_torch_facts", lambda: {"cuda": "'13.0'", "__version__": "'2.13.0'"}
    )
    monkeypatch.setattr(gpus, "driver_cuda_version", lambda: (12, 8))
    monkeypatch.delenv("RANK", raising=False)
    real = train.read_config
    monkeypatch.setattr(
        train,
        "read_config",
        lambda given, name, **_: real(given, name, check_paths=False),
    )
    assert cli.main(["train", *DRY[1:]]) == 2
    assert (
        "serves CUDA up to 12.8, and torch here is built for CUDA 13.0"
        in capsys.readouterr().err
    )


def test_the_doctor_fails_it(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_cpu_torch", lambda: "2.13.0+cpu")
    monkeypatch.setattr(examine.torch.version, "cuda", None)
    (finding,) = examine._no_gpu()
    assert finding.status == "fail" and "bootstrap.sh --gpu" in finding.fix


@pytest.mark.parametrize(
    ("torch", "vision", "wrong"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
    ],
)
def test_a_package_for_another_torch_is_named_before_anything_starts(
    torch: str,
    vision: str,
    wrong: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """vLLM's CPU wheel asks for torchvision, and an index may give its CUDA build: importing models fails with it."""
    versions = {"torch": torch, "torchvision": vision, "torchaudio": ""}
    monkeypatch.setattr(gpus, "_installed", lambda name: versions.get(name, ""))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    assert [
        finding.name
        for finding in examine._foreign_builds()
        if finding.status == "fail"
    ] == ["torchvision"] * wrong
    started: list[str] = []
    prepare = quickstart.prepare
    monkeypatch.setattr(
        quickstart,
        "prepare",
        lambda config: (started.append("inputs"), prepare(config))[1],
    )
    monkeypatch.setattr(
        elastic_agent, "launch", lambda *given: started.append("ranks") or 0
    )
    assert (cli.main(["quickstart"]), started) == (
        (2, []) if wrong else (0, ["inputs", "ranks"])
    )
    said = f"torchvision {vision}: these are CUDA builds, but torch is a CPU build"
    assert (said in (error := capsys.readouterr().err)) == wrong and (
        "pip uninstall -y torchvision" in error
    ) == wrong
