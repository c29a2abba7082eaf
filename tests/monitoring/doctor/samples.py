"""What the driver and the kernel print on machines with GPUs, in their formats: eight
H100 with NVSwitch, four H100 linked directly, and machines with something wrong.
Written by hand after published output: tags of nvsmi_device_v12.dtd and v13 in
influxdata/telegraf (plugins/inputs/nvidia_smi/testdata), matrices in NVIDIA/nccl issue
1617, links in Azure/azhpc-diagnostics issue 73, ports in the kernel's
Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

from pathlib import Path

# The tags that are read, with values of a healthy GPU, and some beside them.
HEALTHY = {
    "product_name": "NVIDIA H100 80GB HBM3",
    "persistence_mode": "Enabled",
    "mig_mode/current_mig": "Disabled",
    "gpu_recovery_action": "None",
    "pci/pci_gpu_link_info/pcie_gen/max_link_gen": "5",
    "pci/pci_gpu_link_info/link_widths/max_link_width": "16x",
    "pci/pci_gpu_link_info/link_widths/current_link_width": "16x",
    "performance_state": "P0",
    "clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
    "clocks_event_reasons/clocks_event_reason_sw_power_cap": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_slowdown": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown": "Not Active",
    "clocks_event_reasons/clocks_event_reason_sw_thermal_slowdown": "Not Active",
    "ecc_mode/current_ecc": "Enabled",
    "ecc_mode/pending_ecc": "Enabled",
    "ecc_errors/volatile/sram_correctable": "0",
    "ecc_errors/volatile/sram_uncorrectable_parity": "0",
    "ecc_errors/volatile/sram_uncorrectable_secded": "0",
    "ecc_errors/volatile/dram_correctable": "12",
    "ecc_errors/volatile/dram_uncorrectable": "0",
    "ecc_errors/aggregate/dram_uncorrectable": "1",
    "remapped_rows/remapped_row_corr": "0",
    "remapped_rows/remapped_row_unc": "1",
    "remapped_rows/remapped_row_pending": "No",
    "remapped_rows/remapped_row_failure": "No",
    "gpu_power_readings/current_power_limit": "700.00 W",
    "gpu_power_readings/default_power_limit": "700.00 W",
    "clocks/sm_clock": "345 MHz",
    "max_clocks/sm_clock": "1980 MHz",
    "fabric/state": "Completed",
    "fabric/status": "Success",
}


def query(
    *gpus: dict[str, str],
    driver: str = "580.95.05",
    cuda: str = "13.0",
    dtd: str = "nvsmi_device_v12.dtd",
) -> str:
    """`nvidia-smi -q -x` of healthy GPUs, each changed by a dictionary."""
    body = "".join(
        f'\t<gpu id="0000000{n}:18:00.0">\n{_tags(HEALTHY | gpu)}\t</gpu>\n'
        for n, gpu in enumerate(gpus)
    )
    return (
        f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "{dtd}">\n<nvidia_smi_log>\n'
        f"\t<timestamp>Mon Nov 23 10:00:00 2026</timestamp>\n\t<driver_version>{driver}</driver_version>\n"
        f"\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(gpus)}</attached_gpus>\n{body}</nvidia_smi_log>\n"
    )


def _tags(values: dict[str, str]) -> str:
    """Nested tags of paths."""
    leaves = {name: text for name, text in values.items() if "/" not in name}
    inner = {name.partition("/")[0] for name in values if "/" in name}
    text = "".join(f"\t\t<{name}>{value}</{name}>\n" for name, value in leaves.items())
    for outer in sorted(inner):
        below = {
            name.partition("/")[2]: value
            for name, value in values.items()
            if name.startswith(f"{outer}/")
        }
        text += f"\t\t<{outer}>\n{_tags(below)}\t\t</{outer}>\n"
    return text


UNDERLINED = "\x1b[4m{}\x1b[0m"  # the header, where the driver writes to a terminal
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def topology(gpus: list[list[str]], adapters: list[list[str]]) -> str:
    """`nvidia-smi topo -m`: rows of GPU to GPU, and rows of GPU to adapter."""
    names = [f"GPU{n}" for n in range(len(gpus))] + [
        f"NIC{n}" for n in range(len(adapters[0]) if adapters else 0)
    ]
    header = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    lines = [UNDERLINED.format(header)]
    for number, row in enumerate(gpus):
        cells = [*row, *(adapters[number] if adapters else [])]
        lines.append(
            f"GPU{number}\t"
            + "\t".join(f" {cell} " if cell == "X" else cell for cell in cells)
            + "\t0-51\t0\t\tN/A"
        )
    for number in range(len(names) - len(gpus)):
        cells = [row[number] for row in adapters] + [
            "X" if n == number else "SYS" for n in range(len(adapters[0]))
        ]
        lines.append(f"NIC{number}\t" + "\t".join(cells))
    return "\n".join(lines) + "\n" + LEGEND


def switched(count: int = 8, adapter: str = "PIX") -> str:
    """GPUs behind NVSwitch, each with an adapter of its own, at the given distance."""
    gpus = [["X" if a == b else "NV18" for b in range(count)] for a in range(count)]
    return topology(
        gpus,
        [[adapter if a == b else "SYS" for b in range(count)] for a in range(count)],
    )


def links(*gpus: list[str], name: str = "NVIDIA H100 80GB HBM3") -> str:
    """`nvidia-smi nvlink -s`."""
    lines = []
    for number, rates in enumerate(gpus):
        lines.append(
            f"GPU {number}: {name} (UUID: GPU-715daa1d-db6f-9e69-ab48-{number:012d})"
        )
        lines += [f"\t Link {link}: {rate}" for link, rate in enumerate(rates)]
    return "\n".join(lines) + "\n"


def write_ports(folder: Path, **ports: tuple[str, str, str]) -> Path:
    """/sys/class/infiniband with one port for each adapter: (state, rate, link_layer)."""
    for adapter, values in ports.items():
        port = folder / adapter / "ports" / "1"
        port.mkdir(parents=True)
        for name, value in zip(("state", "rate", "link_layer"), values, strict=True):
            (port / name).write_text(value + "\n")
    return folder
