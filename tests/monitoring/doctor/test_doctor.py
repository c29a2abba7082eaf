"""The doctor: what it says of a machine, and that everything wrong comes with its fix."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megaverl.monitoring.doctor import Finding, as_dict, as_text, examine
from megaverl.monitoring.doctor.examine import KERNELS, SECTIONS, kernels, versions
from megaverl.monitoring.doctor.network import is_free, network
from megaverl.monitoring.doctor.storage import storage
from megaverl.monitoring.doctor.trials import Trial
from megaverl.platform import Platform
from tests.launcher import Launcher

ROOT = Path(__file__).parents[3]


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


def named(findings: Iterable[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_the_whole_report_of_this_machine(launch: Launcher, tmp_path: Path) -> None:
    """The real command: all sections, and a right sum over two ranks."""
    ended = launch.command(
        ["doctor", "--json", "--no-generation", "--timeout", "240"],
        ranks=1,
        logs=tmp_path,
    )
    report = json.loads(ended.text)
    assert tuple(report["sections"]) == SECTIONS
    assert report["healthy"] == (ended.codes == [0])
    trials = {finding["name"]: finding for finding in report["sections"]["trials"]}
    assert trials["all-reduce of two ranks"]["status"] == "ok", trials
    assert trials["all-reduce of two ranks"]["found"].startswith(
        "right, over gloo: 16 MiB"
    )
    for findings in report["sections"].values():
        assert all(
            finding["fix"]
            for finding in findings
            if finding["status"] in ("warn", "fail")
        )


def test_a_token_is_generated(launch: Launcher) -> None:
    """On the plain engine, which starts at once; tests/rollout has vLLM."""
    (found,) = launch.world(1, "tests.monitoring.doctor.ranks:one_token")
    assert (
        found.startswith("token ") and " from hf on cpu: engine ready after " in found
    )


def test_what_is_wrong_cannot_be_said_without_its_mend() -> None:
    with pytest.raises(ValueError, match="without a fix"):
        Finding("network", "x", "fail", "broken")


def test_text_and_json_say_the_same() -> None:
    findings = [
        Finding("versions", "torch", "ok", "2.0"),
        Finding("storage", "runs", "fail", "full\nreally", "free some space"),
    ]
    text = as_text(findings)
    assert "FAIL  runs   full" in text and "-> free some space" in text
    assert text.endswith(
        "1 failing, 0 warnings: the lines that begin with -> say what to do."
    )
    shown = as_dict(findings)
    assert shown["healthy"] is False
    assert shown["sections"]["storage"] == [
        {
            "name": "runs",
            "status": "fail",
            "found": "full\nreally",
            "fix": "free some space",
        }
    ]
    assert as_text(findings[:1]).endswith("Nothing is wrong.")


def test_a_trial_that_fails_shows_its_last_words() -> None:
    trial = Trial(
        "sum", "megaverl.monitoring.doctor.nothing_of_that_name", 1, "fix it", {}
    )
    finding = trial.finish(time.monotonic() + 60)
    assert finding.status == "fail" and finding.fix == "fix it"
    assert (
        "rank 0 ended with 1" in finding.found
        and "nothing_of_that_name" in finding.found
    )


def test_a_trial_that_hangs_is_ended() -> None:
    trial = Trial("sum", "http.server", 1, "fix it", {"PYTHONUNBUFFERED": "1"})
    finding = trial.finish(time.monotonic())
    assert finding.status == "fail" and "and ended" in finding.found
    assert "--timeout 120" in finding.fix
    assert all(process.poll() is not None for process in trial._processes)


ANSWERING = "tests.monitoring.doctor.answering"


def test_trials_run_one_after_the_other_each_with_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM raises if another process gives memory back while it measures what is free."""
    events, deadlines = list[str](), list[float]()

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name
            events.append(f"{name} starts")

        def finish(self, deadline: float) -> Finding:
            deadlines.append(deadline)
            events.append(f"{self.name} ends")
            return Finding("trials", self.name, "ok", "")

    def start(generate: bool) -> Iterator[Recorded]:
        yield Recorded("sums")
        yield Recorded("token")

    monkeypatch.setattr(examine, "start_trials", start)
    for look in ("versions", "devices", "kernels", "network", "storage"):
        monkeypatch.setattr(examine, look, lambda *_: iter(()))
    found = list(examine.examine(tmp_path))
    assert [finding.name for finding in found] == ["sums", "token"]
    assert events == ["sums starts", "sums ends", "token starts", "token ends"]
    assert deadlines[0] < deadlines[1]


@pytest.mark.parametrize(
    ("first", "other"),
    [("exits", "exits"), ("fails", "fails"), ("exits", "stays"), ("stays", "fails")],
)
def test_an_answer_counts_however_its_process_ends(first: str, other: str) -> None:
    trial = Trial("sum", ANSWERING, 2, "fix it", {}, arguments=[first, other])
    finding = trial.finish(deadline_after_answers(trial))
    assert (finding.status, finding.found) == ("ok", "right")


def test_a_rank_without_an_answer_fails_a_trial(tmp_path: Path) -> None:
    for other, said in (
        ("silent", "rank 1 ended with 1:\nbroken"),
        ("hangs", "not done after"),
    ):
        trial = Trial("sum", ANSWERING, 2, "fix it", {}, arguments=["exits", other])
        scratch = trial._scratch
        finding = trial.finish(deadline_after_answers(trial))
        assert finding.status == "fail" and said in finding.found
        assert not scratch.exists(), "a rank that was cut off leaves nothing"
    trial = Trial("sum", ANSWERING, 1, "fix it", {}, arguments=["leaves"])
    assert "without an answer" in trial.finish(time.monotonic() + 60).found


def deadline_after_answers(trial: Trial) -> float:
    """Wait until every rank has said something; return the time."""
    while not all(os.fstat(log.fileno()).st_size for log in trial._logs):
        time.sleep(0.01)
    for process, what in zip(
        trial._processes, trial._processes[0].args[-2:], strict=True
    ):  # type: ignore[index]
        if what not in ("stays", "hangs"):
            process.wait()
    return time.monotonic()


def test_what_is_absent_is_named_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "python": "3.9.1",
        "torch": "absent",
        "vllm": "absent",
        "megatron-core": "0.12.0",
        "transformers": "5",
    }
    monkeypatch.setattr(examine, "collect_versions", lambda: found)
    findings = list(versions())
    assert named(findings, "python").status == "fail"
    assert "pip install torch" in named(findings, "torch").fix
    assert "rollout.engine=hf" in named(findings, "vllm").fix
    assert "megatron-core>=0.16" in named(findings, "megatron-core").fix.replace(
        "<0.20,", ""
    )
    assert named(findings, "transformers").status == "ok"


def test_a_cuda_build_beside_a_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = examine.metadata.version
    there = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(examine.torch, "__version__", there["torch"])
    monkeypatch.setattr(
        examine.metadata, "version", lambda name: there.get(name) or real(name)
    )
    finding = named(versions(), "torchvision")
    assert finding.status == "fail" and "pip uninstall -y torchvision" in finding.fix


def test_kernels_on_a_gpu_without_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fallback, what it costs and how to get the fast one; with all modules, nothing to fix."""
    monkeypatch.setattr(examine, "platform", Platform(is_cuda=True))
    monkeypatch.setattr(examine.importlib.util, "find_spec", lambda name: None)
    poor = {finding.name: finding for finding in kernels()}
    for kernel in KERNELS:
        finding = poor[kernel.computation]
        assert (finding.status, finding.fix) == ("warn", kernel.fix)
        assert kernel.fallback in finding.found and kernel.costs in finding.found
    monkeypatch.setattr(examine.importlib.util, "find_spec", lambda name: object())
    rich = {finding.name: finding for finding in kernels()}
    assert all(rich[kernel.computation].found == kernel.fast for kernel in KERNELS)


def test_network_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "l")  # NCCL takes a prefix
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    findings = list(network())
    assert named(findings, "GLOO_SOCKET_IFNAME").status == "fail"
    assert "lo" in named(findings, "GLOO_SOCKET_IFNAME").fix
    assert not [finding for finding in findings if finding.name == "NCCL_SOCKET_IFNAME"]
    assert named(findings, "MASTER_ADDR").status == "fail"
    assert "GLOO_SOCKET_IFNAME=nosuch0" in named(findings, "settings").found


@pytest.mark.parametrize(
    ("seconds", "status", "asked"), [(0.002, "ok", 32), (5.0, "warn", 1)]
)
def test_a_name_service_that_answers_late(
    monkeypatch: pytest.MonkeyPatch, seconds: float, status: str, asked: int
) -> None:
    now, addresses = [0.0], list[str]()

    def look_up(address: tuple[str, int, int, int], flags: int) -> None:
        now[0] += seconds
        addresses.append(address[0])
        raise socket.gaierror("no name")

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "getnameinfo", look_up)
    monkeypatch.setattr(
        "megaverl.monitoring.doctor.network.time.perf_counter", lambda: now[0]
    )
    finding = named(network(), "name service")
    assert addresses == ["::ffff:127.0.0.1"] * asked
    assert (finding.status, "::ffff:127.0.0.1 NAME" in finding.fix) == (
        status,
        status == "warn",
    )
    assert f"{seconds * 1e3:.0f} ms the longest" in finding.found


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_free(port)
        monkeypatch.setenv("MASTER_PORT", str(port))
        finding = named(network(), f"port {port}")
    assert finding.status == "warn" and "--master-port" in finding.fix


def test_a_full_disk_and_small_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: DiskUsage(64 * 2**20, 0, 2**20)
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1000))
    findings = list(storage(tmp_path / "not" / "there" / "yet"))
    assert (
        named(findings, "runs").status == "fail"
        and "run.dir" in named(findings, "runs").fix
    )
    assert "--shm-size" in named(findings, "shared memory").fix
    files = named(findings, "open files")
    assert (files.status, files.found) == (
        "warn",
        "hard limit 1000",
    ) and "--ulimit nofile" in files.fix
