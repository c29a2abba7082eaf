"""The checks of tools/gpu_check.py, and what one of their ranks runs: `python -m tools.gpu_check_parts NAME FOLDER`.

A check is a function that every one of its ranks calls in a process group of their own; what rank 0 returns is the
finding. All go the way that a run goes: the same models, engines, transports and commands.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megaverl.config.roles import OffloadConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout.engine import Engine, Generation
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.weight_sync import WeightSync

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9, [14, 15]]
# Reported means of the difference between vLLM and Megatron in bfloat16 are 0.01 to 0.06, and this is the largest;
# in float32 only the order of sums differs.
CLOSE = {torch.bfloat16: 0.1, torch.float32: 1e-3}


class Outcome(NamedTuple):
    """What a check found; `expected` in words."""

    passed: bool
    measured: str
    expected: str


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        world: on how many ranks: one, two, or all GPUs of this machine (on a CPU: two).
        cuda_only: there is nothing of it on a CPU.
        needs: modules without which it cannot be run.
    """

    function: Callable[[Path], Outcome]
    world: Literal["one", "two", "all"]
    cuda_only: bool
    needs: tuple[str, ...]

    def ranks(self, device: str, gpus: int) -> int:
        return {"one": 1, "two": 2, "all": gpus if device == "cuda" else 2}[self.world]

    def why_not(self, device: str, gpus: int) -> str:
        """Why it cannot be run here; empty if it can."""
        if self.cuda_only and device != "cuda":
            return "it needs a GPU"
        if device == "cuda" and self.world != "one" and gpus < 2:
            return "it needs two GPUs"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""


CHECKS: dict[str, Check] = {}


def check(
    world: Literal["one", "two", "all"] = "one", *, cuda_only: bool = False, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """What decorates a check; its name is the function's."""

    def add(function: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        CHECKS[function.__name__] = Check(function, world, cuda_only, needs)
        return function

    return add


@check("all")
def collectives(folder: Path) -> Outcome:
    """Sums and gathers of all ranks, through the helpers that a run uses."""
    from megaverl.distributed.collectives import gather_json, gather_rows

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((3, 2), float(rank + 1), device=device())
    total = rows.clone()
    dist.all_reduce(total)
    gathered = gather_rows(rows)
    right = bool((total == size * (size + 1) / 2).all())
    right &= gathered.shape == (3 * size, 2) and bool((gathered[-1] == size).all())
    right &= gather_json([rank]) == [[other] for other in range(size)]
    return Outcome(right, f"{size} ranks, {'right' if right else 'wrong'}", "right")


@check("all")
def point_to_point(folder: Path) -> Outcome:
    """Every rank sends every other a message of its own, batched as a reshard does; all arrive as they left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(size) if other != rank]
    sent = {other: torch.full((1 << 20,), float(rank * size + other), device=device()) for other in others}
    got = {other: torch.zeros(1 << 20, device=device()) for other in others}
    operations = [dist.P2POp(dist.isend, sent[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, got[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    wrong = [f"{other} to {rank}" for other in others if not bool((got[other] == other * size + rank).all())]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, wrong)
    bad: list[str] = sum(found, [])
    return Outcome(not bad, f"{size * (size - 1)} pairs, wrong: {', '.join(bad) or 'none'}", "all as they left")


@check()
def local_transport(folder: Path) -> Outcome:
    """Boxes within a device, against plain copies of as many bytes: 2 GiB in bfloat16 (on a CPU 8 MiB)."""
    from megaverl.sharding.boxes import whole
    from megaverl.sharding.plan import Transfer
    from megaverl.weights.transports.local import copy_local

    width = 8192 if on_cuda() else 512
    source = {str(i): torch.randn(width, width, device=device()).bfloat16() for i in range(16)}
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    box = whole((width, width))
    transfers = [Transfer(name, box, 0, name, box, 0, name, box) for name in source]
    transport = median_seconds(lambda: copy_local(transfers, source, target))
    plain = median_seconds(lambda: [target[name].copy_(tensor) for name, tensor in source.items()])
    num_bytes = 2 * sum(tensor.nbytes for tensor in source.values())  # read and written
    same = all(torch.equal(source[name], target[name]) for name in source)
    measured = f"{num_bytes / transport / 1e9:.0f} GB/s, plain copies {num_bytes / plain / 1e9:.0f} GB/s"
    fast = transport < 1.25 * plain or not on_cuda()  # a CPU's clock is another matter
    return Outcome(same and fast, measured, "equal, at least 0.8 of plain copies")


@check()
def logits(folder: Path) -> Outcome:
    """Logits in 16 bits against Hugging Face's in float32: as far off as Hugging Face's own in 16 bits."""
    model, path = load_model(folder)
    ours, theirs = logit_errors(model, path)
    return Outcome(ours < 2 * theirs, f"mean error {ours:.2e}", f"under twice {theirs:.2e}")


@check(cuda_only=True, needs=("transformer_engine",))
def transformer_engine(folder: Path) -> Outcome:
    """Transformer Engine's layers and megatron-core's local ones in bfloat16: as near to the truth, and how fast."""
    from megaverl.models import build, options

    with_engine, path = load_model(folder)
    ours, theirs = logit_errors(with_engine, path)
    with (
        mock.patch.object(build, "uses_transformer_engine", lambda: False),
        mock.patch.object(options, "uses_transformer_engine", lambda: False),
    ):
        local, _ = load_model(folder)
        plain, _ = logit_errors(local, path)
    times = [median_seconds(functools.partial(forward, model)) for model in (with_engine, local)]
    measured = f"mean error {ours:.2e}, local {plain:.2e}; {times[0] * 1e3:.2f} ms, local {times[1] * 1e3:.2f} ms"
    return Outcome(max(ours, plain) < 2 * theirs, measured, f"both under twice {theirs:.2e}")


@check()
def packing(folder: Path) -> Outcome:
    """Log-probs of samples laid end to end (on a GPU: THD) against those of padded rows."""
    from megaverl.workers.policy import Policy

    packed, _ = load_model(folder)
    if packed.pack is None:
        return Outcome(True, "not checked: this build of the model does not pack (padded rows are used)", "equal")
    padded, _ = load_model(folder, pack_samples=False)
    batch = responses_batch([[int(i) % 900 for i in range(10 * n, 10 * n + 3 * n + 2)] for n in range(8)])
    found = [Policy(model, temperature=1.0, micro_batch_tokens=256).log_probs(batch) for model in (packed, padded)]
    difference = float((found[0] - found[1]).abs().max())
    limit = CLOSE[packed.config.params_dtype]
    return Outcome(difference < limit, f"largest difference {difference:.1e}", f"under {limit}")


@check()
def training(folder: Path) -> Outcome:
    """Ten updates with float32 master weights: the loss falls as a language model's should."""
    losses, _ = train(folder)
    return Outcome(losses[-1] < 0.8 * losses[0], f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", "falls by a fifth")


@check(cuda_only=True)
def saving_memory(folder: Path) -> Outcome:
    """Offload to pinned memory and activation checkpointing: the same losses, and less memory between updates; and
    adapters alone, which learn as well."""
    from megaverl.config.roles import LoraConfig, OffloadConfig

    offload = OffloadConfig(parameters=True, optimizer=True, gradients=True)
    kept, held = train(folder)
    away, left = train(folder, offload=offload, activation_checkpointing="full")
    adapted, small = train(folder, lora=LoraConfig(rank=8, alpha=16.0))
    passed = kept == away and left < held / 4 and adapted[-1] < adapted[0] and small < held
    measured = f"losses {'equal' if kept == away else 'different'}, {held / 2**20:.1f} -> {left / 2**20:.1f} MiB; "
    measured += f"adapters {adapted[0]:.3f} -> {adapted[-1]:.3f} with {small / 2**20:.1f} MiB"
    return Outcome(passed, measured, "equal losses, a quarter of the memory; adapters learn")


@check(cuda_only=True)
def graphs(folder: Path) -> Outcome:
    """A captured forward pass sees weights that are copied in place after the capture, as a reshard does."""
    weight = torch.zeros(256, 256, device=device())
    given = torch.randn(8, 256, device=device())
    (given @ weight).sum()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = given @ weight
    new = torch.randn_like(weight)
    weight.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    error = float((result - given @ new).abs().max())
    return Outcome(error < 1e-4, f"difference {error:.1e}", "0")


@check(needs=("vllm",))
def engine(folder: Path) -> Outcome:
    """vLLM in this process, without weights of its own: it gets the actor's, and agrees with it on its responses."""
    model, sync, made = actor_and_engine(folder)
    stats = sync.reshard()
    difference = disagreement(model, generate(made, sync))
    limit = CLOSE[model.config.params_dtype]
    measured = f"largest difference of log-probs {difference:.1e}; {stats.bytes_aliased / 2**20:.1f} MiB shared"
    return Outcome(difference < limit, measured, f"under {limit}")


@check(needs=("vllm",))
def aliasing(folder: Path) -> Outcome:
    """With equal layouts the engine's parameters are the actor's storage, and answers follow an update at once."""
    model, sync, made = actor_and_engine(folder)
    sync.reshard()
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters.values()}
    theirs = made.named_parameters().values()
    shared = sum(tensor.nbytes for tensor in theirs if tensor.untyped_storage().data_ptr() in ours)
    before = generate(made, sync)
    sync.source_changes()
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.data.mul_(1.05)
    sync.reshard()
    after = generate(made, sync)
    changed = any(a.log_probs != b.log_probs for a, b in zip(before, after, strict=True))
    difference = disagreement(model, after)
    whole = sum(tensor.nbytes for tensor in theirs)
    measured = f"{shared / 2**20:.1f} of {whole / 2**20:.1f} MiB shared; after an update {difference:.1e} apart"
    passed = shared > 0 and changed and difference < CLOSE[model.config.params_dtype]
    return Outcome(passed, measured, "some shared; the engine follows")


@check(cuda_only=True, needs=("vllm",))
def sleep(folder: Path) -> Outcome:
    """Asleep the engine gives memory back; awake, with the actor's weights, it answers as before."""
    _, sync, made = actor_and_engine(folder, sleep=True)
    sync.reshard()
    before, free = generate(made, sync), torch.cuda.mem_get_info()[0]
    made.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    made.wake_up()
    sync.reshard()
    after = generate(made, sync)
    same = [each.token_ids for each in before] == [each.token_ids for each in after]
    measured = f"{(asleep - free) / 2**30:.2f} GiB given back; answers {'equal' if same else 'different'}"
    return Outcome(same and asleep > free, measured, "memory given back; the same answers")


@check("two")
def ipc(folder: Path) -> Outcome:
    """Weights of TP2 to one full copy on each rank, straight out of the other process's memory; then without."""
    from megaverl.models.architectures import weights_of
    from megaverl.sharding.plan import make_plan
    from megaverl.sharding.vllm import vllm_layouts
    from megaverl.weights.fingerprint import ReshardCheck
    from megaverl.weights.reshard import Resharder
    from megaverl.weights.transports import TransportOptions

    model, _ = load_model(folder, tp=2)
    layouts = vllm_layouts(weights_of(model.spec), model.spec, 1)
    rank, told = dist.get_rank(), []
    for through_ipc in (True, False):
        shapes = layouts(rank).local_shapes
        dtype = model.config.params_dtype
        dest = {name: torch.zeros(shape, dtype=dtype, device=device()) for name, shape in shapes.items()}
        plan = make_plan(model.layout_of, layouts, 2, rank)
        resharder = Resharder(plan, model.parameters, dest, options=TransportOptions(ipc=through_ipc))
        stats = resharder.run()
        ReshardCheck(model.layout_of, layouts, model.parameters, dest, dist.group.WORLD).compare()  # raises if wrong
        told.append(f"{'IPC' if through_ipc else 'point to point'} {stats.bytes_received / 2**20:.1f} MiB received")
    return Outcome(True, f"{', '.join(told)}; fingerprints equal", "equal fingerprints")


@check()
def synchronous_save(folder: Path) -> Outcome:
    """The whole command: four steps, and two with a save and two more after it, the save before training goes on."""
    return resumed(folder, "false")


@check()
def asynchronous_save(folder: Path) -> Outcome:
    """As before, with saves in the background."""
    return resumed(folder, "true")


@check(needs=("trl", "vllm"))
def beside_trl(folder: Path) -> Outcome:
    """A GRPO step with the sizes of Qwen2.5-0.5B beside TRL's, in bfloat16, in turn (on a CPU: of a tiny model)."""
    shape = {"layers": 24, "hidden": 896, "ffn": 4864, "heads": 14, "kv-heads": 2, "vocab": 151936}
    work = {"response-tokens": 256, "prompt-tokens": 64, "steps": 5, "micro-batch-tokens": 16384}
    if not on_cuda():
        shape, work = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2, "kv-heads": 2}, {"steps": 2, "warmup": 1}
    sizes = [word for name, value in (shape | work).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "tools/bench_step.py", "--nproc", "1", "--trl-nproc", "1", *sizes]
    command += ["--dtype", "bfloat16" if on_cuda() else "float32", "--json", str(folder / "step.json")]
    subprocess.run(command, cwd=ROOT, env=outside(), check=True, stdout=subprocess.DEVNULL)
    medians = json.loads((folder / "step.json").read_text())["medians"]
    ours, theirs = medians["megaverl"], medians["trl"]
    parts = ", ".join(f"{part} {theirs[part] / ours[part]:.2f}" for part in ("rollout", "log_probs", "update"))
    measured = f"{ours['step']:.2f} s, TRL {theirs['step']:.2f} s: {theirs['step'] / ours['step']:.2f} x ({parts})"
    return Outcome(ours["step"] <= theirs["step"], measured, "not slower")


def on_cuda() -> bool:
    return device().type == "cuda"


def device() -> torch.device:
    from megaverl.platform import platform

    return platform.device


def load_model(folder: Path, tp: int = 1, **options: Any) -> tuple[MegatronModel, Path]:
    """A small Qwen3 of the platform's dtype, data parallel over what `tp` leaves of the world, and its folder."""
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.platform import platform
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel

    path = folder / "model"
    if dist.get_rank() == 0 and not path.exists():
        make_tiny_folder(path, "Qwen3ForCausalLM", tie_embeddings=True, **SIZES)
    dist.barrier()
    grid = ProcessGroupManager().grid(GridShape(tp=tp, dp=dist.get_world_size() // tp))
    model = MegatronModel(ModelSpec.from_folder(path), grid, dtype=platform.default_dtype, seed=0, **options)
    model.load(path)
    return model, path


def forward(model: MegatronModel) -> torch.Tensor:
    """[4, 128, vocabulary] logits, in float32, of tokens that are always the same."""
    tokens = torch.arange(4 * 128, device=device()).reshape(4, 128) * 7 % SIZES["vocab_size"]
    positions = torch.arange(128, device=device()).expand_as(tokens)
    with torch.no_grad():
        found: torch.Tensor = model.chunks[0](tokens, positions, None)
    return found[..., : SIZES["vocab_size"]].float()


def logit_errors(model: MegatronModel, path: Path) -> tuple[float, float]:
    """Mean errors against Hugging Face in float32: of the model, and of Hugging Face's in bfloat16."""
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(4 * 128, device=device()).reshape(4, 128) * 7 % SIZES["vocab_size"]
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device())(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device())(tokens).logits.float()
    return float((forward(model) - exact).abs().mean()), float((plain - exact).abs().mean())


def train(folder: Path, offload: OffloadConfig | None = None, **options: Any) -> tuple[list[float], int]:
    """The losses of ten updates of a small model, and the bytes that are allocated for it afterwards."""
    from megaverl.models.packing import MicroBatch
    from megaverl.workers.optimizers import MegatronTrainable

    before = torch.cuda.memory_allocated() if on_cuda() else 0
    model, _ = load_model(folder, pack_samples=False, **options)
    trainable = MegatronTrainable(
        model, optimizer={"lr": 1e-3}, scheduler={}, ddp={}, total_updates=10, offload=offload
    )
    tokens = torch.randint(0, SIZES["vocab_size"], (8, 64), generator=torch.Generator().manual_seed(0))
    ones = torch.ones(8, dtype=torch.int64)
    batch = MicroBatch(torch.arange(8), tokens, ones, ones * 63)

    def loss(output: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        value = -model.log_probs(output, micro)[0].sum() / (8 * 63)
        return value, {"loss": torch.stack([torch.ones_like(value), value.detach(), value.detach() ** 2]).double()}

    losses = []
    for _ in range(10):
        with trainable.updating():
            losses.append(float(trainable.update([batch], loss).sums["loss"][1]))
    return losses, (torch.cuda.memory_allocated() if on_cuda() else 0) - before


def actor_and_engine(folder: Path, **rollout: Any) -> tuple[MegatronModel, WeightSync, Engine]:
    """An actor, and an engine beside it that waits for its weights."""
    from megaverl.config.roles import RolloutConfig
    from megaverl.rollout import make_engine
    from megaverl.sharding.weight import shapes_of
    from megaverl.workers.weight_sync import ActorWeights, WeightSync

    model, path = load_model(folder)
    config = RolloutConfig.model_validate(
        {"sleep": False, "vllm": {"gpu_memory_utilization": 0.3} if on_cuda() else {}, **rollout}
    )
    dtype = model.config.params_dtype
    made = make_engine(config, path, seed=0, dtype=dtype, max_model_len=64, load_weights=False, num_sequences=8)
    sync = WeightSync(ActorWeights.of(model), made.layouts(shapes_of(model.weights)), made, model.grid.world)
    return model, sync, made


def generate(made: Engine, sync: WeightSync) -> list[Generation]:
    """Greedy responses of twelve tokens."""
    from megaverl.rollout.engine import SamplingOptions

    sync.check_whole()
    return made.generate(PROMPTS, SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True), [0] * len(PROMPTS))


def disagreement(model: MegatronModel, generations: list[Generation]) -> float:
    """Largest difference between the engine's log-probs of its responses and the actor's."""
    from megaverl.workers.policy import Policy

    batch = responses_batch(PROMPTS, [each.token_ids for each in generations])
    policy = Policy(model, temperature=1.0, micro_batch_tokens=256)  # an engine's greedy log-probs are those at 1
    theirs = torch.tensor([each.log_probs for each in generations])
    return float((policy.log_probs(batch).cpu() - theirs).abs().max())


def responses_batch(prompts: list[list[int]], responses: list[list[int]] | None = None) -> RolloutBatch:
    """Prompts and responses of equal lengths; by default twelve tokens that follow from the prompt."""
    from megaverl.data.batch import RolloutBatch

    longest = max(map(len, prompts))
    given = responses or [[(7 * prompt[0] + i) % 900 for i in range(12)] for prompt in prompts]
    return RolloutBatch(
        {
            "input_ids": torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts]),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "generated_ids": torch.tensor(given),
            "response_mask": torch.ones(len(prompts), len(given[0]), dtype=torch.bool),
        }
    )


def resumed(folder: Path, in_background: str) -> Outcome:
    """Four steps of the quickstart at once, against two, and two more that go on from what was saved."""
    options = [
        "run.nproc=1",
        "actor.tp=1",
        "sft.steps=2",
        "sft.lr_warmup_steps=0",
        "trainer.validate_every=4",
        "data.prompts_per_step=8",
    ]
    options += [f"run.dir={folder}", f"checkpoint.async_save={in_background}"]
    command = [sys.executable, "-m", "megaverl.cli.main", "quickstart", *options]
    runs = (
        ["run.name=whole", "trainer.steps=4"],
        ["run.name=cut", "trainer.steps=2", "checkpoint.save_interval=2"],
        ["run.name=cut", "trainer.steps=4", "checkpoint.save_interval=2", "checkpoint.resume=auto"],
    )
    for own in runs:
        done = subprocess.run([*command, *own], env=outside(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(own)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    whole, cut = (read_steps(folder / name / "metrics.jsonl") for name in ("whole", "cut"))
    apart = max(abs(whole[step][name] - cut[step][name]) for step in whole for name in whole[step])
    measured = f"steps {sorted(cut)} of {sorted(whole)}; metrics {apart:.1e} apart"
    # on a GPU the order of sums in a kernel may differ from run to run; on a CPU every bit is the same
    return Outcome(sorted(cut) == sorted(whole) and (on_cuda() or apart == 0), measured, "all steps, once; on a CPU 0")


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """Step -> rewards, losses and KL of a run."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = {
        row["step"]: {name: row[name] for name in row if name in ("reward/mean", "actor/loss", "actor/kl")}
        for row in rows
    }
    return {step: metrics for step, metrics in kept.items() if metrics and step > 0}


def outside() -> dict[str, str]:
    """The environment of a command that is no rank of this world."""
    from megaverl.monitoring.doctor.trials import KEPT_APART

    return {name: value for name, value in os.environ.items() if name not in KEPT_APART}


def median_seconds(work: Callable[[], object], runs: int = 10) -> float:
    """Median over `runs` of the time of `work` on the device, after a warm-up."""
    from megaverl.platform import platform

    work()
    times = []
    for _ in range(runs):
        platform.synchronize()
        start = time.perf_counter()
        work()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """This rank of the check that the command line names."""
    from datetime import timedelta

    from megaverl.distributed.store import job_store
    from megaverl.monitoring.doctor.trials import answer
    from megaverl.platform import platform

    name, folder = sys.argv[1:]
    platform.start()
    timeout = timedelta(seconds=300)
    store, rank, size = job_store(timeout)
    dist.init_process_group(platform.backend, timeout=timeout, store=store, rank=rank, world_size=size)
    outcome = CHECKS[name].function(Path(folder))
    dist.barrier()
    if rank == 0:
        more = {} if outcome.passed else {"status": "fail", "fix": f"run it alone: gpu_check.py --only {name}"}
        answer(f"{outcome.measured} (expected: {outcome.expected})", **more)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines and their threads may not end by themselves


if __name__ == "__main__":
    main()
