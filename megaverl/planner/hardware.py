"""Descriptions of hardware that a prediction reads, from data sheets or from `megaverl plan --calibrate`.

A description is a YAML or JSON file with the fields of `Hardware`, whose names end in
their units, or the name of a description that comes with megaverl (`machines/`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megaverl.config.typed_yaml import BadYaml, read_untyped
from megaverl.errors import ConfigError
from megaverl.planner.job import GB, Machine

FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Hardware:
    """A kind of node and the network between nodes.

    Rates are per rank (a GPU, or a process on CPU cores) and in one direction.

    Attributes:
        sources: source of each number.
        ranks_per_node: neighbouring ranks that share a node.
        memory_gb: memory of a rank.
        tflops: dtype -> peak of matrix products, 1e12 floating-point operations a second, without sparsity.
        matmul_efficiency: (floating-point operations of one product, fraction of the peak that it reaches), ascending;
            interpolated linearly over the logarithm of the operations.
        attention_efficiency: fraction of the peak that attention's kernel reaches.
        memory_gb_s, memory_efficiency: memory bandwidth, and the fraction of it that is reached.
        elementwise_efficiency: the same fraction for norms, activations and similar work; None: memory_efficiency.
        weights_gb_s: rate at which a CPU's products read their weights. This time adds to that of the operations, since
            the CPU first copies weights into blocks. None: weights are read at memory bandwidth while operations run.
        node_gb_s, node_latency_us: bandwidth and latency of messages to ranks of the same node.
        network_gb_s, network_latency_us: bandwidth and latency of messages to ranks of other nodes.
        send_latency_us: latency of a message from one rank to another; None: the latency of collectives.
        message_work: where ranks share cores, the fraction of a message's time in which its rank's processor works.
        link_efficiency: fraction of a link's bandwidth that collectives reach.
        host_gb_s: bandwidth to host memory, for offload.
        map_gb_s: rate at which an engine that wakes gets memory from the driver; None: in no time.
        kernel_us: fixed cost of each kernel.
        launch_us: the host's time to launch an operation, for operations that the GPU waits for (no CUDA graph).
        backward_factor: elementwise work and kernels of a backward pass divided by those of a forward pass.
        cores: processor cores that all ranks of a node share; None: every rank has its own processor.
        decode_step_ms: the engine's overhead per decoding step, for the whole batch.
        decode_sequence_us: the engine's overhead per decoding step and sequence.
        sample_ms: overhead per sample of a rank: rewards, packing, advantages, records.
        step_ms: overhead per step on each rank, without that of the operators (`operator_ms`).
        operator_ms: overhead of each operator on each rank.
        micro_batch_ms: overhead of each forward or backward pass, without its kernels.
        update_ms: overhead of each optimizer step, without its memory traffic: the ranks synchronise.
    """

    name: str
    sources: tuple[str, ...]
    ranks_per_node: int
    memory_gb: float
    tflops: Mapping[str, float] = dataclasses.field(hash=False)
    matmul_efficiency: tuple[tuple[float, float], ...]
    attention_efficiency: float
    memory_gb_s: float
    node_gb_s: float
    node_latency_us: float
    network_gb_s: float
    network_latency_us: float
    host_gb_s: float
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.75
    map_gb_s: float | None = None
    kernel_us: float = 4.0
    launch_us: float = 0.0
    elementwise_efficiency: float | None = None
    backward_factor: float = 2.0
    cores: int | None = None
    weights_gb_s: float | None = None
    send_latency_us: float | None = None
    message_work: float = 0.5
    decode_step_ms: float = 0.0
    decode_sequence_us: float = 0.0
    sample_ms: float = 0.0
    step_ms: float = 0.0
    operator_ms: float = 0.0
    micro_batch_ms: float = 0.0
    update_ms: float = 0.0

    def __post_init__(self) -> None:
        if problems := list(_problems(self)):
            raise ConfigError(f"{self.name}: " + "; ".join(problems))

    @classmethod
    def read(cls, name: str | Path) -> Hardware:
        """Read a description from a file, or by a name such as h100.

        Raises:
            ConfigError: the file or name does not exist, the file is not YAML or JSON, or keys or values are wrong.
        """
        path = Path(name)
        if path.suffix not in (".yaml", ".yml", ".json"):
            if name not in known():
                raise ConfigError(
                    f"hardware: unknown name {name}. Known: {', '.join(known())}; or give a file of yours."
                )
            path = FOLDER / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(
                f"hardware: {path} does not exist. Known names: {', '.join(known())}."
            )
        try:
            fields = read_untyped(path.read_text(encoding="utf-8"))
        except (BadYaml, UnicodeDecodeError) as error:
            raise ConfigError(
                f"hardware: {path} is neither YAML nor JSON ({error})."
            ) from error
        return cls.of(fields, str(path))

    @classmethod
    def of(cls, fields: Any, source: str) -> Hardware:
        """Build a description from the contents of a file.

        Raises:
            ConfigError: keys are unknown or missing, or values have a wrong type or are out of range; all problems at
                once.
        """
        if not isinstance(fields, dict):
            raise ConfigError(
                f"{source}: expected keys and values, found {type(fields).__name__}."
            )
        known = {field.name: field for field in dataclasses.fields(cls)}
        wrong = [
            f"unknown key {key} (keys: {', '.join(known)})"
            for key in fields
            if key not in known
        ]
        needed = [
            name
            for name, field in known.items()
            if field.default is dataclasses.MISSING
        ]
        wrong += [f"{name} is missing" for name in needed if name not in fields]
        if not wrong:
            wrong = list(_wrong_types(fields))
        if wrong:
            raise ConfigError(f"{source}: " + "; ".join(wrong) + ".")
        curve = tuple(
            (float(flops), float(share)) for flops, share in fields["matmul_efficiency"]
        )
        return cls(
            **fields | {"sources": tuple(fields["sources"]), "matmul_efficiency": curve}
        )

    def write(self, path: str | Path) -> Path:
        """Write the description as JSON, which `read` accepts."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8"
        )
        return path

    @property
    def on_gpus(self) -> bool:
        """True if a rank is a GPU, False if it is a process on cores that all ranks of a node share."""
        return self.cores is None

    def machine(self, **overrides: Any) -> Machine:
        """Return the `Machine` with which the planner counts memory and bytes.

        Args:
            overrides: fields that the user has set, which override the description.
        """
        described = {
            "gpus_per_node": self.ranks_per_node,
            "memory": self.memory_gb * GB,
            "nvlink": self.node_gb_s * GB,
            "network": self.network_gb_s * GB,
            "hbm": self.memory_gb_s * GB,
            "on_gpus": self.on_gpus,
        }
        return Machine(**described | overrides)

    def peak(self, dtype: str) -> float:
        """Return the peak of matrix products in floating-point operations a second.

        Raises:
            ConfigError: the description has no peak for this dtype.
        """
        if dtype not in self.tflops:
            raise ConfigError(
                f"{self.name}: tflops has no {dtype}; it has {', '.join(self.tflops)}."
            )
        return self.tflops[dtype] * 1e12

    def matmul_share(self, flops: float) -> float:
        """Return the fraction of the peak that one product of `flops` operations reaches."""
        sizes, shares = self._curve
        if flops <= 0 or not sizes:
            return shares[0] if shares else 1.0
        at = math.log(flops)
        place = bisect_left(sizes, at)
        if place == 0:
            # A smaller product than the smallest measured one takes the same time:
            # launch overhead dominates.
            return shares[0] * math.exp(at - sizes[0])
        if place == len(sizes):
            return shares[-1]
        low, high = sizes[place - 1], sizes[place]
        return shares[place - 1] + (shares[place] - shares[place - 1]) * (at - low) / (
            high - low
        )

    @cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        return [math.log(size) for size, _ in self.matmul_efficiency], [
            share for _, share in self.matmul_efficiency
        ]


def known() -> list[str]:
    """List the names of the descriptions that come with megaverl."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


# Field -> plausible (minimum, maximum) in the unit of its name. Values outside are most
# likely in another unit.
RANGES: dict[str, tuple[float, float]] = {
    "ranks_per_node": (1, 1024),
    "memory_gb": (0.1, 10_000),
    "attention_efficiency": (0.001, 1),
    "memory_gb_s": (0.1, 100_000),
    "memory_efficiency": (0.01, 1),
    "elementwise_efficiency": (0.0001, 1),
    "weights_gb_s": (0.01, 100_000),
    "send_latency_us": (0, 1e6),
    "message_work": (0, 1),
    "node_gb_s": (0.01, 10_000),
    "node_latency_us": (0, 1e6),
    "network_gb_s": (0.001, 10_000),
    "network_latency_us": (0, 1e6),
    "host_gb_s": (0.01, 10_000),
    "link_efficiency": (0.01, 1),
    "map_gb_s": (0.1, 100_000),
    "kernel_us": (0, 1e5),
    "launch_us": (0, 1e4),
    "backward_factor": (0.1, 5),
    "decode_step_ms": (0, 1e4),
    "decode_sequence_us": (0, 1e6),
    "sample_ms": (0, 1e4),
    "step_ms": (0, 1e6),
    "operator_ms": (0, 1e5),
    "micro_batch_ms": (0, 1e5),
    "update_ms": (0, 1e6),
}
TFLOPS = (1e-4, 1e5)


def _wrong_types(fields: Mapping[str, Any]) -> Iterator[str]:
    for key in (*RANGES, "cores"):
        value = fields.get(key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            yield f"{key}: expected a number, found {value!r}"
    if not isinstance(fields["tflops"], dict) or not all(
        _is_number(v) for v in fields["tflops"].values()
    ):
        yield f"tflops: expected dtype: number, found {fields['tflops']!r}"
    if not isinstance(fields["sources"], list) or not all(
        isinstance(source, str) for source in fields["sources"]
    ):
        yield "sources: expected a list of texts"
    curve = fields["matmul_efficiency"]
    pairs = isinstance(curve, list | tuple) and all(
        isinstance(p, Sequence) and len(p) == 2 for p in curve
    )
    if not pairs or not all(_is_number(number) for pair in curve for number in pair):
        yield "matmul_efficiency: expected pairs [operations of a product, share of the peak]"


def _is_number(value: Any) -> bool:
    try:
        # YAML 1.1 reads 1e9 as a string, so accept strings that are numbers.
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def _problems(hardware: Hardware) -> Iterator[str]:
    """Yield a message for every value that is implausible in its unit."""
    for name, (least, most) in RANGES.items():
        value = getattr(hardware, name)
        if value is not None and not least <= value <= most:
            yield f"{name}: found {value:g}, expected {least:g} to {most:g} (is it in the unit of its name?)"
    for dtype, value in hardware.tflops.items():
        if not TFLOPS[0] <= value <= TFLOPS[1]:
            yield f"tflops.{dtype}: found {value:g}, expected {TFLOPS[0]:g} to {TFLOPS[1]:g}, in 1e12 a second"
    if hardware.cores is not None and hardware.cores < 1:
        yield f"cores: found {hardware.cores}, expected 1 or more"
    if not hardware.sources:
        yield "sources: say where the numbers are from"
    sizes = [size for size, _ in hardware.matmul_efficiency]
    if not sizes or sizes != sorted(set(sizes)) or sizes[0] <= 0:
        yield "matmul_efficiency: the first numbers of the pairs ascend from above 0"
    elif not all(0 < share <= 1 for _, share in hardware.matmul_efficiency):
        yield "matmul_efficiency: shares lie between 0 and 1"
