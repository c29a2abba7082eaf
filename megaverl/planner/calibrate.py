"""This machine's rates: products, attention, memory and messages, measured by all of its ranks at once, and what a step
costs besides, from a few steps of tiny models through the real trainer. `megaverl plan --calibrate FILE`.

What is measured here is what the steps of small models are made of; on GPUs it needs no model larger than these either,
as the rates of large products are measured by themselves.
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
LEAST = 1e-3  # where a range begins at 0
BETWEEN_MESSAGES = 8  # products, some tenths of a millisecond
STEPS = 10  # of a probe
QUIET = 0.1  # processors of other programs that a measurement bears
TURNS = 200  # with a message
RESPONSE = 32  # tokens
Clock = Callable[[], float]
PROMPT = 12  # about as many have the task's prompts
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


def calibrate(name: str, *, engine: str = "hf", tell: Callable[[str], object] = lambda line: None) -> Hardware:
    """Measure for about two minutes, with nothing else at work.

    Args:
        engine: `rollout.engine` of the steps.
        tell: called with a line on what is measured next.

    Raises:
        MegaverlError: a measurement failed; with its last words.
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
        probes.append(Probe.run(Path(folder), PROBE_LAYERS[-1], 2, engine, "actor.tp=2", "reference.tp=2"))
        if (others := max(probe.others for probe in probes)) > QUIET:
            said = f"other programs had {others:.1f} processors meanwhile: measure again when they have ended"
            hardware = _doubted(hardware, said, tell)
        hardware = fit(hardware, probes)
        if hardware.node_latency_us <= LEAST:
            said = "node_latency_us: nothing, as two ranks were no slower than one lets expect: measure again"
            hardware = _doubted(hardware, said, tell)
        return hardware


def _doubted(hardware: Hardware, said: str, tell: Callable[[str], object]) -> Hardware:
    """With a word among its sources on why it may be wrong."""
    tell(said)
    return replace(hardware, sources=(*hardware.sources, said))


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Probe:
    """Steps of a tiny model, and the job that they were.

    Attributes:
        measured: operator -> median over the steps.
        others: processors that other programs had meanwhile.
    """

    job: PlannedJob
    measured: dict[str, MeasuredOperator]
    others: float = 0.0

    @classmethod
    def run(cls, folder: Path, layers: int, ranks: int, engine: str, *more: str) -> Probe:
        from megaverl.config import load_config

        inputs = make_inputs(folder / f"model_{layers}", PROBE | {"num_hidden_layers": layers})
        keys = [*PROBE_KEYS, *sampling(engine, RESPONSE), *inputs, *more]
        found = real_steps(folder / f"run_{len(list(folder.iterdir()))}", keys, ranks, STEPS)
        config = load_config(None, keys, check_paths=False, world_size=ranks)
        machine = Machine(gpus_per_node=ranks, on_gpus=count_gpus() > 0)
        return cls(make_job(config, find_spec(config), ranks, machine), found.operators, found.others)

    def beyond(self, name: str, hardware: Hardware) -> float:
        """Seconds of an operator that its prediction lacks; negative where that is too much."""
        found = operations(StepLoad(self.job, hardware, LengthDistribution.fixed(PROMPT, RESPONSE), None))
        (operator,) = (each for each in found if each.name == name)
        measured = self.measured[name]
        alone = hardware.cores is not None and len(operator.ranks) == 1  # it waits for nobody: its own work is its time
        return (measured.work if alone else measured.seconds) - operator.seconds


def sampling(engine: str, tokens: int) -> list[str]:
    """Keys for responses that are all so long."""
    return [f"rollout={{engine: {engine}, sampling: {{max_tokens: {tokens}, ignore_eos: true}}}}"]


def make_inputs(folder: Path, model: dict[str, Any], kind: str = "Qwen3ForCausalLM") -> list[str]:
    """A tiny model with its tokenizer, and prompts; the keys that name them."""
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    if not (folder / "model").is_dir():
        task = make_task("reverse", num_digits=3, num_train=256, num_held_out=16)
        task.save(folder)
        tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
        special: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": tokenizer.vocab_size}
        make_tiny_folder(folder / "model", kind, **model | special)
        tokenizer.save(folder / "model")
    return [f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}"]


def measure_rates(ranks: int) -> dict[str, Any]:
    """What `main` finds in so many processes at once."""
    from megaverl.monitoring.doctor.trials import Trial

    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    trial = Trial("rates", "megaverl.planner.calibrate", ranks, "its last words say why", environment)
    finding = trial.finish(time.monotonic() + 90)
    try:
        found: dict[str, Any] = json.loads(finding.found)
    except json.JSONDecodeError as error:
        raise MegaverlError(f"calibrate: rates were not measured: {finding.found}") from error
    return found


def describe(name: str, measured: dict[str, Any], ranks: int) -> Hardware:
    """A description by measured rates alone."""
    import psutil

    peak = max(flops / seconds for flops, seconds in measured["products"])
    shares = sorted((flops, min(1.0, flops / seconds / peak)) for flops, seconds in measured["products"])
    link = measured["all_reduce_gb_s"]
    on_gpu = measured["device"] == "cuda"
    dtypes = {dtype: peak * ratio / 1e12 for dtype, ratio in measured["dtypes"].items()}
    return Hardware(
        name=name,
        sources=(f"measured on this machine by {ranks} ranks at once, {time.strftime('%Y-%m-%d')}",),
        ranks_per_node=ranks if on_gpu else 1024,
        memory_gb=psutil.virtual_memory().total / 1e9 / ranks if not on_gpu else measured["memory_gb"],
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
    """What measured steps take beyond the rates: elementwise work by passes over samples, kernels by the difference
    between a few layers and more when tokens are decoded, what is left as overheads of a token, an update and a step,
    and a message by the tensor-parallel steps."""
    few, many, tensor_parallel = probes
    layers = many.job.spec.num_layers - few.job.spec.num_layers
    updates = few.job.config.algorithm.num_mini_batches

    def mean(name: str, found: Hardware) -> float:
        return statistics.mean(probe.beyond(name, found) for probe in (few, many))

    for _ in range(ROUNDS):  # each of the two is fitted with the other as it is
        hardware = _settled(hardware, "elementwise_efficiency", lambda found: mean("ref_log_probs", found), -1)
        slope = many.beyond("rollout", hardware) - few.beyond("rollout", hardware)
        more = slope / (layers * FORWARD_KERNELS * RESPONSE) * 1e6
        hardware = _with(hardware, kernel_us=hardware.kernel_us + more)
    hardware = _with(hardware, sample_ms=mean("reward", hardware) / few.job.config.samples_per_step * 1e3)
    hardware = _with(hardware, step_ms=mean("advantages", hardware) * 1e3)
    hardware = _with(hardware, decode_step_ms=mean("rollout", hardware) / RESPONSE * 1e3)
    hardware = _settled(hardware, "backward_factor", lambda found: mean("actor_update", found))
    hardware = _with(hardware, update_ms=mean("actor_update", hardware) / updates * 1e3)
    return _settled(hardware, "node_latency_us", lambda found: tensor_parallel.beyond("ref_log_probs", found))


def _settled(hardware: Hardware, field: str, lacking: Callable[[Hardware], float], sign: int = 1) -> Hardware:
    """With the value of a field at which the prediction lacks nothing, by bisection.

    Args:
        lacking: seconds, negative where a prediction is too long.
        sign: 1 where a larger value is slower, otherwise -1.
    """
    low, high = (math.log(max(limit, LEAST)) for limit in RANGES[field])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_slow = lacking(_with(hardware, **{field: math.exp(middle)})) < 0
        low, high = (low, middle) if too_slow == (sign > 0) else (middle, high)
    return _with(hardware, **{field: math.exp(high)})


def _with(hardware: Hardware, **fields: float) -> Hardware:
    """With these, where they can be meant."""
    return replace(hardware, **{n: min(RANGES[n][1], max(RANGES[n][0], value)) for n, value in fields.items()})  # type: ignore[arg-type]


def main() -> None:
    """One of the ranks that measure at once."""
    import torch

    from megaverl.monitoring.doctor.trials import answer, join

    torch.set_num_threads(1)
    rank, _, device = join(torch.cuda.device_count())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, Any] = {"device": device.type, "products": _products(device, dtype)}
    best = max(flops / seconds for flops, seconds in found["products"])
    found["dtypes"] = {str(dtype).removeprefix("torch."): 1.0}
    for other in (torch.float32, torch.bfloat16):
        name = str(other).removeprefix("torch.")
        if name not in found["dtypes"]:
            found["dtypes"][name] = max(f / s for f, s in _products(device, other, large=True)) / best
    size = 64 * 2**20 if device.type == "cuda" else 8 * 2**20
    whole = torch.ones(size, device=device)
    found["memory_gb_s"] = 2 * whole.nbytes / _seconds(lambda: whole.add_(1.0), device) / 1e9
    if device.type == "cpu":
        found["weights_gb_s"] = _weights_rate()
    queries = torch.randn(1, 4, 256, 64, device=device, dtype=dtype)
    mask = torch.ones(256, 256, device=device, dtype=torch.bool).tril()
    attend = torch.nn.functional.scaled_dot_product_attention
    taken = _seconds(lambda: attend(queries, queries, queries, attn_mask=mask), device)
    found["attention"] = 4 * 256 * 256 * 4 * 64 / taken
    found |= _messages(device)
    if device.type == "cuda":
        found["memory_gb"] = torch.cuda.get_device_properties(device).total_memory / 1e9
    if rank == 0:
        answer(json.dumps(found))
    torch.distributed.destroy_process_group()


def _products(device: Any, dtype: Any, *, large: bool = False) -> list[tuple[float, float]]:
    """(operations, seconds) of products of rows with a layer's weights; the fastest shape of each size."""
    import torch

    best: dict[float, float] = {}
    widths = (4096, 8192) if device.type == "cuda" else (64, 192, 384, 768)
    for rows in (4096, 16384) if device.type == "cuda" and large else (16, 64, 256, 1024):
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
    """GB/s at which a product of one row reads its weights: others than those of the product before."""
    import torch

    weights = [torch.randn(1152, 384) for _ in range(32)]
    row = torch.randn(1, 384)

    def over_all() -> None:
        for each in weights:
            torch.nn.functional.linear(row, each)

    return sum(each.nbytes for each in weights) / _seconds(over_all, row.device) / 1e9


def _messages(device: Any) -> dict[str, float]:
    """Latency and bandwidth of messages, and which part of their time a processor works on them.

    Where ranks share processors a message comes after work, as in a step: who waited has to be woken, which takes
    longer than a message takes that follows another.
    """
    import torch

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    small, large = torch.ones(2**13, device=device), torch.ones(2**21, device=device)
    reduce, other = torch.distributed.all_reduce, rank ^ 1
    rows = torch.randn(128, 256, device=device)

    def work() -> None:
        for _ in range(BETWEEN_MESSAGES if device.type == "cpu" else 0):
            rows @ rows.T

    def there_and_back() -> None:
        for sends in (rank < other, rank > other):
            if other < world:
                torch.distributed.send(small, other) if sends else torch.distributed.recv(small, other)

    def together() -> None:
        work()
        reduce(small)

    def taken(turn: Callable[[], object], clock: Clock = time.perf_counter) -> float:
        """Of its message: the lower quartile of single turns, as other programs hold some of them up."""
        if device.type == "cuda":
            return _seconds(turn, device, clock)
        both = []
        for each in (turn, work):
            torch.distributed.barrier()
            times = []
            for _ in range(TURNS):
                begin = clock()
                each()
                times.append(clock() - begin)
            both.append(statistics.quantiles(times, n=4)[0])
        return max(1e-5, both[0] - both[1])

    reduced = taken(together)
    share = taken(together, time.process_time) / reduced if device.type == "cpu" else 0.0
    rate = 2 * large.nbytes * (world - 1) / world / _seconds(lambda: reduce(large), device, time.perf_counter) / 1e9
    found = {"all_reduce_us": reduced * 1e6, "message_work": min(1.0, share), "all_reduce_gb_s": rate}
    # where ranks share processors, either takes as long as it takes to wake who waits
    return found | ({"send_us": taken(there_and_back) / 2 * 1e6} if device.type == "cuda" else {})


def _seconds(work: Callable[[], object], device: Any, clock: Clock = time.process_time) -> float:
    """The fastest of some rounds of enough turns, with all ranks at it at once: other programs only make it slower.

    Args:
        clock: on a CPU; of this process's own work alone, or that on the wall where ranks wait for each other.
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
