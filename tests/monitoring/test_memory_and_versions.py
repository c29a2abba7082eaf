"""Memory numbers, and what a run was made with."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import megaverl
from megaverl.monitoring import timeline
from megaverl.monitoring.timeline import memory_metrics, process_memory_mb
from megaverl.monitoring.tracker import collect_versions, git_commit, write_versions


def test_memory_is_in_megabytes_and_grows_with_what_is_held() -> None:
    before = process_memory_mb()
    held = bytearray(b"x" * (64 * 2**20))
    assert 50 < process_memory_mb() - before < 200
    assert len(held) == 64 * 2**20


def test_memory_metric_names_the_role() -> None:
    metrics = memory_metrics("critic")
    assert metrics["memory/critic_gpu_mem_mb"] > 0
    assert (
        metrics["memory/process_peak_rss_mb"]
        >= 0.9 * metrics["memory/process_rss_mb"]
        > 1
    )


def test_metrics_load_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; import megaverl.monitoring as m; m.memory_metrics(); m.collect_versions();"
        "print([n for n in ('torch', 'vllm', 'megatron', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_versions_of_the_stack(tmp_path: Path) -> None:
    versions = json.loads(write_versions(tmp_path / "run").read_text())
    assert versions == collect_versions()
    assert versions["megaverl"] == megaverl.__version__
    assert versions["torch"] == metadata.version("torch")
    assert versions["megatron-core"] == metadata.version("megatron-core")
    assert versions["vllm"] != "absent"


def test_what_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none_installed)
    versions = collect_versions()
    assert versions["torch"] == versions["transformer-engine"] == "absent"


def test_the_commit_is_that_of_the_checkout() -> None:
    root = Path(megaverl.__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    expected = subprocess.run(command, capture_output=True, text=True, check=False)
    if not (root / ".git").exists() or expected.returncode != 0:
        assert git_commit() is None
    else:
        commit = git_commit()
        assert (
            commit is not None
            and commit.removesuffix("+changes") == expected.stdout.strip()
        )


def test_power_and_utilization_are_means_between_two_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of counters as NVML's: energy in mJ, samples with a time of their own; of a driver that has none, nothing."""

    class NVMLError(Exception):
        pass

    def sample(stamp: int, value: int) -> SimpleNamespace:
        return SimpleNamespace(
            timeStamp=stamp, sampleValue=SimpleNamespace(uiVal=value)
        )

    energy, clock = iter([5_000, 305_000]), iter([10.0, 12.0])
    # One without a time was never taken.
    later = [sample(2, 30), sample(3, 50), sample(0, 90)]
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_GPU_UTILIZATION_SAMPLES=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(energy),
        nvmlDeviceGetSamples=lambda handle, kind, since: (
            1,
            later if since == 1 else [sample(1, 100)],
        ),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(timeline.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(timeline, "_GPUS", {})
    assert timeline.gpu_metrics("a") == {}
    assert timeline.gpu_metrics("a") == {"gpu/power_w": 150.0, "gpu/utilization": 0.4}

    def none(handle: str) -> int:
        raise NVMLError

    nvml.nvmlDeviceGetTotalEnergyConsumption = none
    assert timeline.gpu_metrics("b") == {}
