"""Measure this machine for predictions: `megaverl plan --calibrate FILE`.

All ranks measure the rates of matrix products, attention, memory and messages at once,
as they compete for the machine in a run. A few steps of tiny models through the real
trainer then give the overheads of a step that rates do not explain. Tiny models suffice
on GPUs too, since the rates of large products are measured directly.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaverl.errors import MegaverlError
from megaverl.gpus import count_gpus
from megaverl.planner.costs import FORWARD_KERNELS
from megaverl.planner.generation import LengthDistribution
from megaverl.planner.hardware import RANGES, Hardware
from megaverl.planner.job import Machine, PlannedJob, find_spec, make_job
from megaverl.planner.operators import StepLoad, operations
from megaverl.planner.trial_steps import MeasuredOperator, real_steps

ROUNDS = 8
BISECTIONS = 40
# Lower bound of a bisection on a logarithmic scale, for ranges that begin at 0.
LEAST = 1e-3
# Matrix products between two messages, together some tenths of a millisecond.
BETWEEN_MESSAGES = 8
STEPS = 10  # steps of each probe run
# Processors that other programs may use before the result is marked as doubtful.
QUIET = 0.1
TURNS = 200  # repetitions of a measured message
RESPONSE = 32  # tokens
Clock = Callable[[], float]
PROMPT = 12  # tokens, about the length of the task's prompts
PROBE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
PROBE_LAYERS = (2, 6)
PROBE_KEYS = (
    "data={max_prompt_tokens: 16, prompts_per_step: 8}",
    "algorithm={name: grpo, group_size: 4, num_mini_batches: 2, kl: {in: loss, kind: k3, coef: 0.001}}",
    "actor.micro_batch_tokens=256",
    "reference.micro_batch_tokens=256",
    "reward=exact_match",
)


def calibrate(
    name: str, *, engine: str = "hf", tell: Callable[[str], object] = lambda line: None
) -> Hardware:
    """Measure this machine for about two minutes. No other program should be running.

    Args:
        engine: `rollout.engine` of the probe steps.
        tell: called with a line that names the next measurement.

    Raises:
        MegaverlError: a measurement failed; the message ends with its last output.
    """
    tell("products, attention, memory and messages")
    measured = measure_rates(ranks := max(2, min(8, available_cores())))
    hardware = describe(name, measured, ranks)
    with tempfile.TemporaryDirectory() as folder:
        probes = []
        for layers in PROBE_LAYERS:
            tell(f"steps of a model of {layers} layers on one rank")
            probes.append(Probe.run(Path(folder), layers, 1, engine))
        tell("the same on two ranks, tensor-parallel")
        probes.append(
            Probe.run(
                Path(folder),
                PROBE_LAYERS[-1],
                2,
                engine,
                "actor.tp=2",
                "reference.tp=2",
            )
        )
        if (others := max(probe.others for probe in probes)) > QUIET:
            doubt = f"other programs had {others:.1f} processors meanwhile: measure again when they have ended"
            hardware = _doubted(hardware, doubt, tell)
        hardware = fit(hardware, probes)
        if hardware.node_latency_us <= LEAST:
            doubt = "node_latency_us: nothing, as two ranks were no slower than one lets expect: measure again"
            hardware = _doubted(hardware, doubt, tell)
        return hardware


def _doubted(hardware: Hardware, doubt: str, tell: Callable[[str], object]) -> Hardware:
    """Return the description with a reason to distrust it added to its sources, and print that reason."""
    tell(doubt)
    return replace(hardware, sources=(*hardware.sources, doubt))


def available_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Probe:
    """Measured steps of a tiny model, with the job that predicts them.

    Attributes:
        measured: operator -> median over the steps.
        others: processors that other programs used meanwhile.
    """

    job: PlannedJob
    measured: dict[str, MeasuredOperator]
    others: float = 0.0

    @classmethod
    def run(
        cls, folder: Path, layers: int, ranks: int, engine: str, *more: str
    ) -> Probe:
        """Run the steps of a tiny model with `layers` layers on `ranks` ranks, and return their times.

        Args:
            more: further `key=value` overrides of the configuration.
        """
        from megaverl.config import load_config

        inputs = make_inputs(
            folder / f"model_{layers}", PROBE | {"num_hidden_layers": layers}
        )
        keys = [*PROBE_KEYS, *sampling(engine, RESPONSE), *inputs, *more]
        measured = real_steps(
            folder / f"run_{len(list(folder.iterdir()))}", keys, ranks, STEPS
        )
        config = load_config(None, keys, check_paths=False, world_size=ranks)
        machine = Machine(gpus_per_node=ranks, on_gpus=count_gpus() > 0)
        return cls(
            make_job(config, find_spec(config), ranks, machine),
            measured.operators,
            measured.others,
        )

    def beyond(self, name: str, hardware: Hardware) -> float:
        """Return the measured seconds of an operator less its predicted seconds;
        negative if the prediction is too long.
        """
        predicted = operations(
            StepLoad(
                self.job, hardware, LengthDistribution.fixed(PROMPT, RESPONSE), None
            )
        )
        (operator,) = (operation for operation in predicted if operation.name == name)
        measured = self.measured[name]
        # A single rank waits for no other, so its processor time is its time without
        # other programs' disturbance.
        is_single = hardware.cores is not None and len(operator.ranks) == 1
        return (measured.work if is_single else measured.seconds) - operator.seconds


def sampling(engine: str, tokens: int) -> list[str]:
    """Return the keys that make every response exactly `tokens` long."""
    return [
        f"rollout={{engine: {engine}, sampling: {{max_tokens: {tokens}, ignore_eos: true}}}}"
    ]


def make_inputs(
    folder: Path, model: dict[str, Any], kind: str = "Qwen3ForCausalLM"
) -> list[str]:
    """Write a tiny model with its tokenizer and prompts, and return the keys that name them."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    if not (folder / "model").is_dir():
        task = make_task("reverse", num_digits=3, num_train=256, num_held_out=16)
        task.save(folder)
        tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
        special: dict[str, Any] = {
            "eos_token_id": tokenizer.eos_token_id,
            "vocab_size": tokenizer.vocab_size,
        }
        make_tiny_folder(folder / "model", kind, **model | special)
        tokenizer.save(folder / "model")
    return [f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}"]


def measure_rates(ranks: int) -> dict[str, Any]:
    """Run `main` on `ranks` ranks at once and return its measurements.

    Raises:
        MegaverlError: the ranks ended without an answer.
    """
    from megaverl.monitoring.doctor.trials import Trial

    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    trial = Trial(
        "rates",
        "megaverl.planner.calibrate",
        ranks,
        "its last words say why",
        environment,
    )
    finding = trial.finish(time.monotonic() + 90)
    try:
        rates: dict[str, Any] = json.loads(finding.found)
    except json.JSONDecodeError as error:
        raise MegaverlError(
            f"calibrate: rates were not measured: {finding.found}"
        ) from error
    return rates


def describe(name: str, measured: dict[str, Any], ranks: int) -> Hardware:
    """Return a hardware description with the measured rates and no overheads."""
    import psutil

    peak = max(flops / seconds for flops, seconds in measured["products"])
    shares = sorted(
        (flops, min(1.0, flops / seconds / peak))
        for flops, seconds in measured["products"]
    )
    link = measured["all_reduce_gb_s"]
    on_gpu = measured["device"] == "cuda"
    dtypes = {dtype: peak * ratio / 1e12 for dtype, ratio in measured["dtypes"].items()}
    return Hardware(
        name=name,
        sources=(
            f"measured on this machine by {ranks} ranks at once, {time.strftime('%Y-%m-%d')}",
        ),
        ranks_per_node=ranks if on_gpu else 1024,
        memory_gb=psutil.virtual_memory().total / 1e9 / ranks
        if not on_gpu
        else measured["memory_gb"],
        tflops=dtypes,
        matmul_efficiency=tuple(shares),
        attention_efficiency=min(1.0, measured["attention"] / peak),
        memory_gb_s=measured["memory_gb_s"],
        memory_efficiency=1.0,
        node_gb_s=link,
        node_latency_us=measured["all_reduce_us"],
        send_latency_us=measured.get("send_us"),
        message_work=measured["message_work"],
        weights_gb_s=measured.get("weights_gb_s"),
        network_gb_s=link,
        network_latency_us=measured["all_reduce_us"],
        link_efficiency=1.0,
        host_gb_s=measured["memory_gb_s"],
        kernel_us=0.0,
        cores=None if on_gpu else available_cores(),
    )


def fit(hardware: Hardware, probes: Sequence[Probe]) -> Hardware:
    """Fit the overheads of a description to the steps of three probes: few layers, many layers, tensor-parallel.

    Elementwise work is fitted to scoring passes. The cost of a kernel is fitted to the
    difference between few and many layers in decoding. The remainder becomes overheads
    of a sample, a token, an update and a step. The latency of a message is fitted to
    the tensor-parallel steps.
    """
    few, many, tensor_parallel = probes
    layers = many.job.spec.num_layers - few.job.spec.num_layers
    updates = few.job.config.algorithm.num_mini_batches

    def mean(name: str, candidate: Hardware) -> float:
        return statistics.mean(probe.beyond(name, candidate) for probe in (few, many))

    # Elementwise work and kernel time affect both measurements, so fit them in turn
    # until they settle.
    for _ in range(ROUNDS):
        hardware = _settled(
            hardware,
            "elementwise_efficiency",
            lambda candidate: mean("ref_log_probs", candidate),
            -1,
        )
        slope = many.beyond("rollout", hardware) - few.beyond("rollout", hardware)
        more = slope / (layers * FORWARD_KERNELS * RESPONSE) * 1e6
        hardware = _with(hardware, kernel_us=hardware.kernel_us + more)
    hardware = _with(
        hardware,
        sample_ms=mean("reward", hardware) / few.job.config.samples_per_step * 1e3,
    )
    hardware = _with(hardware, step_ms=mean("advantages", hardware) * 1e3)
    hardware = _with(
        hardware, decode_step_ms=mean("rollout", hardware) / RESPONSE * 1e3
    )
    hardware = _settled(
        hardware, "backward_factor", lambda candidate: mean("actor_update", candidate)
    )
    hardware = _with(hardware, update_ms=mean("actor_update", hardware) / updates * 1e3)
    return _settled(
        hardware,
        "node_latency_us",
        lambda candidate: tensor_parallel.beyond("ref_log_probs", candidate),
    )


def _settled(
    hardware: Hardware,
    field: str,
    shortfall: Callable[[Hardware], float],
    sign: int = 1,
) -> Hardware:
    """Return the description with `field` set so that the prediction matches the measurement, found by bisection.

    Args:
        shortfall: seconds that the prediction lacks; negative if it is too long.
        sign: 1 if a larger value makes the prediction slower, otherwise -1.
    """
    low, high = (math.log(max(limit, LEAST)) for limit in RANGES[field])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_slow = shortfall(_with(hardware, **{field: math.exp(middle)})) < 0
        low, high = (low, middle) if too_slow == (sign > 0) else (middle, high)
    return _with(hardware, **{field: math.exp(high)})


def _with(hardware: Hardware, **fields: float) -> Hardware:
    """Return the description with these fields, clipped to the ranges that are allowed."""
    clipped: dict[str, Any] = {}
    for name, value in fields.items():
        low, high = RANGES[name]
        clipped[name] = min(high, max(low, value))
    return replace(hardware, **clipped)


def main() -> None:
    """Measure this rank's rates together with all other ranks; rank 0 prints the answer as JSON."""
    import torch

    from megaverl.monitoring.doctor.trials import answer, join

    torch.set_num_threads(1)
    rank, _, device = join(torch.cuda.device_count())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates: dict[str, Any] = {
        "device": device.type,
        "products": _products(device, dtype),
    }
    best = max(flops / seconds for flops, seconds in rates["products"])
    rates["dtypes"] = {str(dtype).removeprefix("torch."): 1.0}
    for further_dtype in (torch.float32, torch.bfloat16):
        name = str(further_dtype).removeprefix("torch.")
        if name not in rates["dtypes"]:
            rates["dtypes"][name] = (
                max(f / s for f, s in _products(device, further_dtype, large=True))
                / best
            )
    size = 64 * 2**20 if device.type == "cuda" else 8 * 2**20
    whole = torch.ones(size, device=device)
    rates["memory_gb_s"] = (
        2 * whole.nbytes / _seconds(lambda: whole.add_(1.0), device) / 1e9
    )
    if device.type == "cpu":
        rates["weights_gb_s"] = _weights_rate()
    queries = torch.randn(1, 4, 256, 64, device=device, dtype=dtype)
    mask = torch.ones(256, 256, device=device, dtype=torch.bool).tril()
    attend = torch.nn.functional.scaled_dot_product_attention
    taken = _seconds(lambda: attend(queries, queries, queries, attn_mask=mask), device)
    rates["attention"] = 4 * 256 * 256 * 4 * 64 / taken
    rates |= _messages(device)
    if device.type == "cuda":
        rates["memory_gb"] = torch.cuda.get_device_properties(device).total_memory / 1e9
    if rank == 0:
        answer(json.dumps(rates))
    torch.distributed.destroy_process_group()


def _products(
    device: Any, dtype: Any, *, large: bool = False
) -> list[tuple[float, float]]:
    """Return (operations, seconds) of products of token rows with a layer's weights; the fastest shape of each size."""
    import torch

    best: dict[float, float] = {}
    widths = (4096, 8192) if device.type == "cuda" else (64, 192, 384, 768)
    for rows in (
        (4096, 16384) if device.type == "cuda" and large else (16, 64, 256, 1024)
    ):
        for inner in widths:
            if large and rows < 256:
                continue
            left = torch.randn(rows, inner, device=device, dtype=dtype)
            right = torch.randn(inner, 3 * inner, device=device, dtype=dtype)
            flops = 2.0 * rows * inner * 3 * inner
            if flops > 2e9 and device.type == "cpu":
                continue
            taken = _seconds(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]
            best[flops] = min(best.get(flops, taken), taken)
    return sorted(best.items())


def _weights_rate() -> float:
    """Return the rate, in GB/s, at which products of one row read weights that are not in the processor's cache."""
    import torch

    # 56 MB in all: by the time a matrix is used again, the others have pushed it out of
    # the cache.
    weights = [torch.randn(1152, 384) for _ in range(32)]
    row = torch.randn(1, 384)

    def over_all() -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    return (
        sum(weight.nbytes for weight in weights) / _seconds(over_all, row.device) / 1e9
    )


def _messages(device: Any) -> dict[str, float]:
    """Return latency and bandwidth of messages, and the share of their time in which a processor works on them.

    Where ranks share processors, each message follows some work, as in a step. The
    waiting rank must then be woken, which takes longer than a message that directly
    follows another one.
    """
    import torch

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    small, large = torch.ones(2**13, device=device), torch.ones(2**21, device=device)
    reduce, peer = torch.distributed.all_reduce, rank ^ 1
    rows = torch.randn(128, 256, device=device)

    def work() -> None:
        for _ in range(BETWEEN_MESSAGES if device.type == "cpu" else 0):
            rows @ rows.T

    def there_and_back() -> None:
        for sends in (rank < peer, rank > peer):
            if peer < world:
                torch.distributed.send(
                    small, peer
                ) if sends else torch.distributed.recv(small, peer)

    def together() -> None:
        work()
        reduce(small)

    def taken(turn: Callable[[], object], clock: Clock = time.perf_counter) -> float:
        """Return the seconds of one message: the lower quartile of single turns, since
        other programs delay some of them.
        """
        if device.type == "cuda":
            return _seconds(turn, device, clock)
        both = []
        for function in (turn, work):
            torch.distributed.barrier()
            times = []
            for _ in range(TURNS):
                begin = clock()
                function()
                times.append(clock() - begin)
            both.append(statistics.quantiles(times, n=4)[0])
        return max(1e-5, both[0] - both[1])

    reduced = taken(together)
    share = (
        taken(together, time.process_time) / reduced if device.type == "cpu" else 0.0
    )
    rate = (
        2
        * large.nbytes
        * (world - 1)
        / world
        / _seconds(lambda: reduce(large), device, time.perf_counter)
        / 1e9
    )
    rates = {
        "all_reduce_us": reduced * 1e6,
        "message_work": min(1.0, share),
        "all_reduce_gb_s": rate,
    }
    # Where ranks share processors, waking the receiver dominates, so sends have the
    # same latency as collectives.
    return rates | (
        {"send_us": taken(there_and_back) / 2 * 1e6} if device.type == "cuda" else {}
    )


def _seconds(
    work: Callable[[], object], device: Any, clock: Clock = time.process_time
) -> float:
    """Return the seconds of one call, from the fastest of several rounds with all ranks at work.

    Other programs can only make a round slower, so the fastest round is closest to the
    truth.

    Args:
        clock: clock on a CPU: processor time of this process, or wall time where ranks wait for each other.
    """
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    clock = time.perf_counter if device.type == "cuda" else clock
    work()
    wait()
    begin = clock()
    work()
    wait()
    turns = max(1, min(200, int(0.02 / max(clock() - begin, 1e-6))))
    torch.distributed.barrier()
    rounds = []
    count = torch.tensor([turns])
    torch.distributed.broadcast(count, 0) if device.type == "cpu" else None
    for _ in range(ROUNDS):
        begin = clock()
        for _ in range(int(count)):
            work()
        wait()
        rounds.append((clock() - begin) / int(count))
    return min(rounds)


if __name__ == "__main__":
    main()
