"""Checks of `megaverl doctor --gpu`: faults in the driver's and the kernel's reports on GPUs and links.

The sources are `nvidia-smi -q -x` (the tags of nvsmi_device_v12.dtd and v13), `nvidia-smi topo -m`,
`nvidia-smi nvlink -s`, and for InfiniBand the files that `ibstat` reads too: /sys/class/infiniband (the kernel's stable
ABI), which containers have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from megaverl.monitoring.doctor import Finding, Status
from megaverl.monitoring.doctor.network import INFINIBAND

SECTION = "hardware"
ABSENT = ("", "N/A", "None", "Requested functionality has been deprecated")
# GPU and adapter share a PCIe host bridge, so RDMA does not pass through the processor.
NEAR = ("PIX", "PXB")
MODULES = Path("/proc/modules")


def hardware() -> Iterator[Finding]:
    """Yield every finding about this machine's GPUs and links."""
    if shutil.which("nvidia-smi") is None:
        fix = (
            "install NVIDIA's driver; in a container: docker run --gpus all, with "
            "nvidia-container-toolkit on the host"
        )
        yield Finding(
            SECTION,
            "driver",
            "fail",
            "no nvidia-smi: no driver can be seen from here",
            fix,
        )
        return
    try:
        # Without a working driver, each of these commands fails with an explanation.
        query, topology, links = ask("-q", "-x"), ask("topo", "-m"), ask("nvlink", "-s")
    except subprocess.CalledProcessError as error:
        output = (error.stdout + error.stderr).strip().splitlines() or [
            f"exit code {error.returncode}"
        ]
        fix = (
            "after an update of the driver: reboot; else look at dmesg for NVRM and Xid"
        )
        yield Finding(SECTION, "driver", "fail", f"nvidia-smi: {output[-1]}", fix)
        return
    yield from gpu_findings(query, torch.version.cuda)
    yield from topology_findings(read_topology(topology))
    yield from link_findings(read_links(links))
    yield from adapter_findings(
        read_adapters(INFINIBAND), MODULES.read_text() if MODULES.exists() else ""
    )


def ask(*arguments: str) -> str:
    """Return the output of nvidia-smi.

    Raises:
        subprocess.CalledProcessError: it did not end with 0.
    """
    return subprocess.run(
        ["nvidia-smi", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


@dataclass(frozen=True)
class Check:
    """A check that is made on every GPU.

    Attributes:
        wrong: returns the problem of a `gpu` element; empty if there is none.
        status: status if some GPU has the problem.
        fine: text if no GPU has it.
    """

    name: str
    wrong: Callable[[ElementTree.Element], str]
    status: Status
    fine: str
    fix: str


def gpu_findings(query: str, torch_cuda: str | None) -> Iterator[Finding]:
    """Yield the finding about the driver, and one for each check over all GPUs.

    Args:
        query: output of `nvidia-smi -q -x`.
        torch_cuda: CUDA version that torch is built for, such as "13.0".
    """
    root = ElementTree.fromstring(query)
    gpus = root.findall("gpu")
    newest = _text(root, "cuda_version")
    names = {_text(gpu, "product_name") for gpu in gpus}
    summary = f"{_text(root, 'driver_version')}, for CUDA up to {newest}; {len(gpus)} x {', '.join(sorted(names))}"
    if (
        torch_cuda
        and newest
        # Within a major version, CUDA runs on older drivers.
        and int(newest.split(".")[0]) < int(torch_cuda.split(".")[0])
    ):
        fix = f"update the driver to one for CUDA {torch_cuda.split('.')[0]}, or install cuda-compat of that version"
        yield Finding(
            SECTION,
            "driver",
            "fail",
            f"{summary}; torch is built for CUDA {torch_cuda}",
            fix,
        )
    elif len(names) > 1:
        fix = "train on GPUs of one kind (CUDA_VISIBLE_DEVICES): the slowest one sets the pace"
        yield Finding(SECTION, "driver", "warn", summary, fix)
    else:
        yield Finding(SECTION, "driver", "ok", summary)
    for check in CHECKS:
        wrong = {
            number: text
            for number, gpu in enumerate(gpus)
            if (text := check.wrong(gpu))
        }
        if wrong:
            summary = "; ".join(
                f"GPU {number}: {text}" for number, text in wrong.items()
            )
            yield Finding(SECTION, check.name, check.status, summary, check.fix)
        else:
            yield Finding(SECTION, check.name, "ok", check.fine)


def _text(element: ElementTree.Element, path: str) -> str:
    """Return the text of a tag; empty if the GPU does not have it."""
    text = (element.findtext(path) or "").strip()
    return "" if text in ABSENT else text


def _memory_errors(gpu: ElementTree.Element) -> str:
    counts = {
        tag.tag: int(text)
        for tag in gpu.iterfind("ecc_errors/volatile/*")
        if "uncorrectable" in tag.tag and (text := (tag.text or "").strip()).isdigit()
    }
    errors = [
        f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count
    ]
    # The GPU replaces broken rows of its memory by spare ones, until there are none
    # left.
    if _text(gpu, "remapped_rows/remapped_row_failure") == "Yes":
        errors.append("no rows left to remap")
    return ", ".join(errors)


def _slowdown(gpu: ElementTree.Element) -> str:
    # The tag has two names, of newer and of older drivers.
    reasons = [
        *gpu.iterfind("clocks_event_reasons/*"),
        *gpu.iterfind("clocks_throttle_reasons/*"),
    ]
    active = [
        reason.tag
        for reason in reasons
        if "slowdown" in reason.tag and (reason.text or "").strip() == "Active"
    ]
    names = [
        re.sub("clocks_(event|throttle)_reason_", "", name).replace("_", " ")
        for name in active
    ]
    clock = (
        f" at {_text(gpu, 'clocks/sm_clock')} of {_text(gpu, 'max_clocks/sm_clock')}"
        if names
        else ""
    )
    return ", ".join(names) + clock


def _power(gpu: ElementTree.Element) -> str:
    # The second name is that of older drivers.
    for section in ("gpu_power_readings", "power_readings"):
        now, usual = (
            _text(gpu, f"{section}/{which}")
            for which in ("current_power_limit", "default_power_limit")
        )
        if now and usual and float(now.split()[0]) < float(usual.split()[0]):
            return f"limited to {now} of {usual}"
    return ""


def _pcie(gpu: ElementTree.Element) -> str:
    widths = "pci/pci_gpu_link_info/link_widths"
    now, most = (
        _text(gpu, f"{widths}/{which}_link_width") for which in ("current", "max")
    )
    return f"{now} of {most} lanes" if now and most and now != most else ""


def _fabric(gpu: ElementTree.Element) -> str:
    # `fabric` is the tag in nvidia-smi's output, and has nothing to do with our own names.
    state, status = _text(gpu, "fabric/state"), _text(gpu, "fabric/status")
    if state in ("", "Completed") and status in ("", "Success"):
        return ""
    return ", ".join(word for word in (state, status) if word)


CHECKS = (
    Check(
        "recovery",
        lambda gpu: _text(gpu, "gpu_recovery_action"),
        "fail",
        "no GPU asks for a reset",
        "drain the node, then nvidia-smi --gpu-reset -i N or reboot; dmesg has the Xid that led to it",
    ),
    Check(
        "memory errors",
        _memory_errors,
        "fail",
        "none uncorrected since the driver was loaded",
        "reset the GPU (nvidia-smi --gpu-reset -i N, or reboot); where they come again, have it replaced",
    ),
    Check(
        "row remapping",
        lambda gpu: (
            "pending"
            if _text(gpu, "remapped_rows/remapped_row_pending") == "Yes"
            else ""
        ),
        "warn",
        "nothing pending",
        "reset the GPU before the next long run: nvidia-smi --gpu-reset -i N",
    ),
    Check(
        "ECC",
        lambda gpu: "off" if _text(gpu, "ecc_mode/current_ecc") == "Disabled" else "",
        "warn",
        "on",
        "nvidia-smi -e 1, then reboot: without it a flipped bit trains along unseen",
    ),
    Check(
        "clocks",
        _slowdown,
        "warn",
        "not held back by heat or power",
        "look at cooling and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER); one slow GPU slows all",
    ),
    Check(
        "power limit",
        _power,
        "warn",
        "the default",
        "nvidia-smi -pl WATTS, with the default, on every GPU",
    ),
    Check(
        "MIG",
        lambda gpu: "on" if _text(gpu, "mig_mode/current_mig") == "Enabled" else "",
        "warn",
        "off",
        "nvidia-smi -mig 0 and a reset: NCCL does not join slices of GPUs",
    ),
    Check(
        "persistence",
        lambda gpu: "off" if _text(gpu, "persistence_mode") == "Disabled" else "",
        "note",
        "on",
        "nvidia-smi -pm 1, or the service nvidia-persistenced: each start otherwise waits for the driver",
    ),
    Check(
        "PCIe",
        _pcie,
        "warn",
        "all lanes",
        "seat the card and its riser anew; lspci -vv shows LnkSta (downgraded)",
    ),
    Check(
        "NVSwitch fabric",
        _fabric,
        "fail",
        "ready, or none",
        "systemctl restart nvidia-fabricmanager, in exactly the driver's version; without it no NVLink is used",
    ),
)


class Topology(NamedTuple):
    """Links between devices: `between["GPU0", "NIC1"]` is PIX, PXB, PHB, NODE, SYS, or NV and a number of links."""

    gpus: list[str]
    adapters: list[str]
    between: dict[tuple[str, str], str]


def read_topology(text: str) -> Topology:
    """Parse the matrix of `nvidia-smi topo -m`.

    Adapters are NIC0 and so on; older drivers name them mlx5_0 and so on.
    """
    lines = [
        line
        # Column names are underlined by escape sequences, even when the output is not a
        # terminal.
        for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        if line.strip()
    ]
    names = (
        re.findall(
            r"\b(?:GPU\d+|NIC\d+|mlx\d_\w+)\b", lines[0].split("CPU Affinity")[0]
        )
        if lines
        else []
    )
    between = {}
    for line in lines[1:]:
        first, *cells = line.split()
        if first in names:
            between.update(
                {
                    (first, peer): cell
                    # Rows end with affinities of the processor, which have no name
                    # here.
                    for peer, cell in zip(names, cells, strict=False)
                    if cell != "X"
                }
            )
    gpus = [name for name in names if name.startswith("GPU")]
    return Topology(gpus, [name for name in names if name not in gpus], between)


def topology_findings(topology: Topology) -> Iterator[Finding]:
    """Yield findings about the paths from GPU to GPU and to the network."""
    gpus, adapters, between = topology
    pairs = {between[a, b] for a in gpus for b in gpus if (a, b) in between}
    if not pairs:
        yield Finding(SECTION, "GPU to GPU", "note", "one GPU")
    elif all(link.startswith("NV") for link in pairs):
        yield Finding(
            SECTION,
            "GPU to GPU",
            "ok",
            f"NVLink between all pairs ({', '.join(sorted(pairs))})",
        )
    else:
        text = f"{', '.join(sorted(pairs))}: not all pairs have NVLink, the others go over PCIe"
        fix = "keep tp (and ep) among GPUs with NVLink, or small; use pp and dp across PCIe"
        yield Finding(SECTION, "GPU to GPU", "note", text, fix)
    if gpus and adapters:
        far = [
            gpu
            for gpu in gpus
            if not any(between.get((gpu, adapter)) in NEAR for adapter in adapters)
        ]
        if far:
            text = f"{', '.join(far)} without an adapter below the same PCIe bridge: RDMA goes through the processor"
            fix = "expose the real PCIe topology to the machine (on a cloud: its NCCL_TOPO_FILE), or move the adapters"
            yield Finding(SECTION, "GPU to network", "warn", text, fix)
        else:
            yield Finding(
                SECTION,
                "GPU to network",
                "ok",
                "each GPU has an adapter below its own PCIe bridge",
            )


def read_links(text: str) -> list[list[float | None]]:
    """Parse GB/s in one direction of every NVLink of every GPU (`nvidia-smi nvlink -s`); None: the link is inactive."""
    gpus: list[list[float | None]] = []
    for line in text.splitlines():
        if line.startswith("GPU "):
            gpus.append([])
        elif gpus and (
            link := re.match(r"\s*Link \d+: (?:([\d.]+) GB/s|<inactive>)", line)
        ):
            gpus[-1].append(float(link[1]) if link[1] else None)
    return gpus


def link_findings(links: list[list[float | None]]) -> Iterator[Finding]:
    """Yield a finding on whether all NVLinks of every GPU are up."""
    active = [sum(rate is not None for rate in gpu) for gpu in links]
    if not any(active):
        yield Finding(
            SECTION, "NVLink", "note", "none: GPUs of this node talk over PCIe"
        )
        return
    most = max(active)
    fewer = [
        f"GPU {number}: {count}" for number, count in enumerate(active) if count < most
    ]
    down = [
        f"GPU {number}: link {link}"
        for number, gpu in enumerate(links)
        for link, rate in enumerate(gpu)
        if not rate
    ]
    if fewer or down:
        text = (
            f"{most} links on the best GPU; {'; '.join(fewer or down)} down or missing"
        )
        fix = "nvidia-smi nvlink -e shows their errors; reset the GPUs together, or have the baseboard looked at"
        yield Finding(SECTION, "NVLink", "warn", text, fix)
    else:
        yield Finding(
            SECTION,
            "NVLink",
            "ok",
            f"{most} links a GPU, {link_rate(links):.0f} GB/s in one direction",
        )


def link_rate(links: list[list[float | None]]) -> float:
    """Return the total GB/s in one direction of the GPU with the fewest links; 0 without NVLink."""
    return min((sum(rate or 0.0 for rate in gpu) for gpu in links), default=0.0)


def pair_rate(topology: Topology, links: list[list[float | None]]) -> float:
    """Return GB/s in one direction over the NVLinks of the pair with the fewest; 0 if a pair has none."""
    counts = [
        int(link[2:]) if link.startswith("NV") else 0
        for (a, b), link in topology.between.items()
        if "GPU" in a and "GPU" in b
    ]
    link_rate = min((rate for gpu in links for rate in gpu if rate), default=0.0)
    return min(counts, default=0) * link_rate


class Port(NamedTuple):
    """A port of an adapter: `rate` in Gb/s, `state` and `link_layer` as the kernel names them."""

    name: str
    state: str
    rate: float
    link_layer: str


def read_adapters(folder: Path) -> list[Port]:
    """Read every port in /sys/class/infiniband, whose files hold "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        state, rate, layer = (
            (port / name).read_text().strip() if (port / name).exists() else ""
            for name in ("state", "rate", "link_layer")
        )
        gigabits = re.match(r"[\d.]+", rate)
        number = float(gigabits[0]) if gigabits else 0.0
        ports.append(
            Port(
                f"{port.parts[-3]}:{port.name}", state.partition(": ")[2], number, layer
            )
        )
    return ports


def adapter_findings(ports: list[Port], modules: str) -> Iterator[Finding]:
    """Yield findings about active ports, their total rate, and direct access to GPU memory.

    Args:
        modules: the text of /proc/modules.
    """
    if not ports:
        return
    active = [port for port in ports if port.state == "ACTIVE"]
    waiting = [port.name for port in ports if port.state in ("INIT", "ARMED")]
    rates = sorted({port.rate for port in active})
    ports_text = (
        f"{len(active)} of {len(ports)} ports active, "
        f"{sum(port.rate for port in active) / 8:.0f} GB/s together"
    )
    if waiting:
        fix = "the port has a link and no address: a subnet manager must run (opensm, or the switch's)"
        yield Finding(
            SECTION, "adapters", "warn", f"{ports_text}; {', '.join(waiting)} wait", fix
        )
    # NCCL would silently use TCP.
    elif not active:
        fix = "look at cables and switch: ibstat, or ip link for RoCE"
        yield Finding(
            SECTION, "adapters", "fail", f"{ports_text}: nodes talk over TCP", fix
        )
    elif len(rates) > 1:
        fix = "name the fast ones with NCCL_IB_HCA, such as =mlx5_0,mlx5_1; a slow cable also shows as a lower rate"
        text = f"{ports_text}, of different rates: " + ", ".join(
            f"{port.name} {port.rate:.0f} Gb/s" for port in active
        )
        yield Finding(SECTION, "adapters", "warn", text, fix)
    else:
        yield Finding(
            SECTION, "adapters", "ok", f"{ports_text} ({active[0].link_layer})"
        )
    if "nvidia_peermem" in modules or "nv_peer_mem" in modules:
        yield Finding(SECTION, "GPUDirect RDMA", "ok", "nvidia_peermem is loaded")
    else:
        ports_text = (
            "nvidia_peermem is not loaded: only DMA-BUF (open kernel modules, Linux "
            "5.12) lets adapters read GPUs"
        )
        fix = "modprobe nvidia-peermem; NCCL_DEBUG=INFO says GDRDMA where it is used"
        yield Finding(SECTION, "GPUDirect RDMA", "note", ports_text, fix)
