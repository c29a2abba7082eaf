"""Helpers of the checks in tools/gpu_check_parts.py.

They make a small model, train it, put an engine beside it, cut a run and resume it, and time work on the device.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from tools.same_numbers import is_cost

if TYPE_CHECKING:
    from megaverl.config.roles import OffloadConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout.engine import Engine, Generation
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.weight_sync import WeightSync

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "vocab_size": 1000,
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13] * 9, [14, 15]]
Steps = dict[int, dict[str, float]]  # metrics of a run by step and name

REHEARSAL = "MEGAVERL_GPU_CHECK_REHEARSAL"  # set by `--rehearsal`


class Outcome(NamedTuple):
    """Result of a check.

    Attributes:
        expected: the expected result, in words.
        elsewhere: whether other processes did the work, and reported that they did it on the device.
    """

    passed: bool
    measured: str
    expected: str
    elsewhere: bool = False


def is_rehearsal() -> bool:
    return REHEARSAL in os.environ


def on_cuda() -> bool:
    return device().type == "cuda"


def device() -> torch.device:
    from megaverl.platform import platform

    return platform.device


def load_model(folder: Path, tp: int = 1, **options: Any) -> tuple[MegatronModel, Path]:
    """Return a small Qwen3 of the platform's dtype, data parallel over the ranks that `tp` leaves, and its folder."""
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.platform import platform
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions

    path = folder / "model"
    if dist.get_rank() == 0 and not path.exists():
        make_tiny_folder(path, "Qwen3ForCausalLM", tie_embeddings=True, **SIZES)
    dist.barrier()
    grid = ProcessGroupManager().grid(GridShape(tp=tp, dp=dist.get_world_size() // tp))
    model = MegatronModel(
        ModelSpec.from_folder(path),
        grid,
        ModelOptions(dtype=platform.default_dtype, seed=0, **options),
    )
    model.load(path)
    return model, path


def forward(model: MegatronModel) -> torch.Tensor:
    """Return [4, 128, vocabulary] logits in float32 of tokens that are always the same."""
    tokens = (
        torch.arange(4 * 128, device=device()).reshape(4, 128) * 7 % SIZES["vocab_size"]
    )
    positions = torch.arange(128, device=device()).expand_as(tokens)
    with torch.no_grad():
        logits: torch.Tensor = model.chunks[0](tokens, positions, None)
    return logits[..., : SIZES["vocab_size"]].float()


def logit_errors(model: MegatronModel, path: Path) -> tuple[float, float]:
    """Return the mean errors against Hugging Face in float32: the model's, and those of Hugging Face in bfloat16."""
    from transformers import AutoModelForCausalLM

    tokens = (
        torch.arange(4 * 128, device=device()).reshape(4, 128) * 7 % SIZES["vocab_size"]
    )
    with torch.no_grad():
        exact = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            .to(device())(tokens)
            .logits
        )
        plain = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
            .to(device())(tokens)
            .logits.float()
        )
    return float((forward(model) - exact).abs().mean()), float(
        (plain - exact).abs().mean()
    )


def train(
    folder: Path, offload: OffloadConfig | None = None, **options: Any
) -> tuple[list[float], int]:
    """Return the losses of ten updates of a small model, and the bytes that are allocated for it afterwards."""
    from megaverl.models.packing import MicroBatch
    from megaverl.workers.optimizers import MegatronTrainable

    # What an earlier call has left would be given back in the middle of this one.
    gc.collect()
    before = torch.cuda.memory_allocated() if on_cuda() else 0
    model, _ = load_model(folder, pack_samples=False, **options)
    trainable = MegatronTrainable(
        model,
        optimizer={"lr": 1e-3},
        scheduler={},
        ddp={},
        total_updates=10,
        offload=offload,
    )
    tokens = torch.randint(
        0, SIZES["vocab_size"], (8, 64), generator=torch.Generator().manual_seed(0)
    )
    ones = torch.ones(8, dtype=torch.int64)
    batch = MicroBatch(torch.arange(8), tokens, ones, ones * 63)

    def loss(
        output: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        value = -model.log_probs(output, micro)[0].sum() / (8 * 63)
        return value, {
            "loss": torch.stack(
                [torch.ones_like(value), value.detach(), value.detach() ** 2]
            ).double()
        }

    losses = []
    for _ in range(10):
        with trainable.updating():
            losses.append(float(trainable.update([batch], loss).sums["loss"][1]))
    return losses, (torch.cuda.memory_allocated() if on_cuda() else 0) - before


def actor_and_engine(
    folder: Path, **rollout: Any
) -> tuple[MegatronModel, WeightSync, Engine]:
    """Return an actor, and an engine beside it that shares the storage it can and waits for the other weights."""
    from megaverl.config.roles import ReshardConfig, RolloutConfig
    from megaverl.rollout import EngineOptions, make_engine
    from megaverl.sharding.weight import shapes_of
    from megaverl.workers.weight_sync import ActorWeights, WeightSync, adopting

    model, path = load_model(folder)
    of_vllm: dict[str, Any] = {"gpu_memory_utilization": 0.3} if on_cuda() else {}
    if is_rehearsal():
        of_vllm = {"enforce_eager": True, "kv_cache_memory_bytes": 50_000_000}
    config = RolloutConfig.model_validate({"vllm": of_vllm, **rollout})
    dtype = model.config.params_dtype
    made = make_engine(
        config,
        path,
        EngineOptions(
            seed=0,
            dtype=dtype,
            max_model_len=64,
            load_weights=False,
            num_sequences=8,
        ),
        on_load=adopting(model, model.grid.world, None, ReshardConfig()),
    )
    sync = WeightSync(
        ActorWeights.of(model),
        made.layouts(shapes_of(model.weights)),
        made,
        model.grid.world,
    )
    return model, sync, made


def captured_graphs(made: Engine) -> str:
    """Return which CUDA graphs vLLM has captured, or nothing."""
    from megaverl.rollout.vllm_engine import VLLMEngine

    assert isinstance(made, VLLMEngine)
    mode = made.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    return "" if not on_cuda() or not mode or mode.name == "NONE" else str(mode.name)


def free_memory() -> int:
    """Return the bytes that the driver could give to anybody; on a CPU 0."""
    return int(torch.cuda.mem_get_info()[0]) if on_cuda() else 0


def generate(made: Engine, sync: WeightSync) -> list[Generation]:
    """Wake the engine and return greedy responses of twelve tokens."""
    from megaverl.rollout.engine import SamplingOptions

    sync.wake()
    sync.check_whole()
    return made.generate(
        PROMPTS,
        SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True),
        [0] * len(PROMPTS),
    )


def disagreement(model: MegatronModel, generations: list[Generation]) -> float:
    """Return the largest difference between the engine's log-probs of its responses and the actor's."""
    from megaverl.workers.policy import Policy

    batch = responses_batch(
        PROMPTS, [generation.token_ids for generation in generations]
    )
    # An engine's greedy log-probs are those at 1.
    policy = Policy(model, temperature=1.0, micro_batch_tokens=256)
    engine_log_probs = torch.tensor(
        [generation.log_probs for generation in generations]
    )
    return float((policy.log_probs(batch).cpu() - engine_log_probs).abs().max())


def responses_batch(
    prompts: list[list[int]], responses: list[list[int]] | None = None
) -> RolloutBatch:
    """Return a batch of prompts and responses of equal lengths; by default each
    response is twelve tokens after its prompt.
    """
    from megaverl.data.batch import RolloutBatch

    longest = max(map(len, prompts))
    token_ids = responses or [
        [(7 * prompt[0] + i) % 900 for i in range(12)] for prompt in prompts
    ]
    return RolloutBatch(
        {
            "input_ids": torch.tensor(
                [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
            ),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "generated_ids": torch.tensor(token_ids),
            "response_mask": torch.ones(
                len(prompts), len(token_ids[0]), dtype=torch.bool
            ),
        }
    )


# The second half of a run of four steps is run twice from the checkpoint in its middle.
MIDDLE, STEPS = 2, 4
# Metrics of the first resumed step that follow from the restored state by forward
# passes alone. Kernels of forward passes give the same bits every time, so these must
# be equal on every device.
BEFORE_UPDATES = (
    "reward/",
    "rollout/",
    "train/",
    "critic/values",
    "critic/returns",
    "actor/lr",
    "critic/lr",
)
# Largest difference of the other metrics of that step on a GPU, where backward passes
# may add in another order. Metrics of later steps are not judged there: one bit can
# change a sampled token, and with it all that follows.
AFTER_UPDATES = 0.02


def resumed(folder: Path) -> Outcome:
    """Resume a run of the quickstart from the checkpoint in its middle and compare metrics with the run's own.

    The run is repeated with checkpoints written at once and in the background. Both
    halves have the same `trainer.steps`: the learning rate decays over it, so a first
    half with fewer steps would train differently.
    """
    reports, passed, ran_there = [], True, True
    for name, in_background in (("at_once", "false"), ("in_background", "true")):
        command = _resumable_run(folder, name, in_background)
        _run_command([*command, "checkpoint.resume=never"])
        run = folder / name
        whole = read_steps(run / "metrics.jsonl")
        # the state of a run that was killed after its first checkpoint
        shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
        output = _run_command([*command, "checkpoint.resume=latest"])
        resumed = read_steps(run / "metrics.jsonl")

        complete = sorted(whole) == sorted(resumed) == list(range(1, STEPS + 1))
        resumes = f"{MIDDLE} of {STEPS} steps are done" in output
        deviations = differences(whole, resumed) if complete else {}
        exact = all(
            value == 0
            for metric, value in deviations.items()
            if _must_be_equal(*metric)
        )
        close = all(
            value <= AFTER_UPDATES
            for (step, _), value in deviations.items()
            if step == MIDDLE + 1
        )
        passed &= complete and resumes and exact and (close or not on_cuda())
        largest, where = max(
            ((value, metric) for metric, value in deviations.items()),
            default=(0.0, (0, "")),
        )
        at = f" (step {where[0]}, {where[1]})" if largest else ""
        reports.append(
            f"{name}: steps {sorted(resumed)}, {'' if resumes else 'not resumed, '}{largest:.1e} apart{at}"
        )
        # only a run on CUDA counts what torch has reserved there
        ran_there &= (
            '"memory/actor_gpu_reserved_mb"' in (run / "metrics.jsonl").read_text()
        )
    expected = "0 apart"
    if on_cuda() and not is_rehearsal():
        expected = f"0 apart before the first update of step {MIDDLE + 1}, up to {AFTER_UPDATES} after it"
    return Outcome(
        passed,
        "; ".join(reports),
        f"steps 1 to {STEPS}, {expected}",
        elsewhere=ran_there,
    )


def _must_be_equal(step: int, name: str) -> bool:
    """Return whether a metric of a resumed run must have the same bits as before."""
    if not on_cuda() or is_rehearsal():
        return True
    return step <= MIDDLE or (step == MIDDLE + 1 and name.startswith(BEFORE_UPDATES))


def _resumable_run(folder: Path, name: str, in_background: str) -> list[str]:
    """Return the command of a quickstart that writes a checkpoint in its middle."""
    options = [
        "run.nproc=1",
        "actor.tp=1",
        # Saves do not concern the engine, and three more starts of vLLM take minutes.
        "rollout.engine=hf",
        "sft.steps=2",
        "sft.lr_warmup_steps=0",
        "trainer.validate_every=4",
        "data.prompts_per_step=8",
        f"trainer.steps={STEPS}",
        f"checkpoint.save_interval={MIDDLE}",
        f"checkpoint.async_save={in_background}",
        # a run on a GPU takes it by default; so does the same check on a CPU
        "model.dtype=bfloat16",
        f"run.dir={folder}",
        f"run.name={name}",
    ]
    return [sys.executable, "-m", "megaverl.cli.main", "quickstart", *options]


def _run_command(command: list[str]) -> str:
    """Run a command outside of this check's process group, and return its output."""
    done = subprocess.run(
        command, env=outside(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout + done.stderr


def differences(whole: Steps, resumed: Steps) -> dict[tuple[int, str], float]:
    """Return by (step, metric) how far two runs are apart; infinity where only one of them has the metric."""
    deviations = {}
    for step in whole.keys() | resumed.keys():
        ours, theirs = whole.get(step, {}), resumed.get(step, {})
        for name in ours.keys() | theirs.keys():
            both = name in ours and name in theirs
            deviations[step, name] = (
                abs(ours[name] - theirs[name]) if both else float("inf")
            )
    return deviations


def read_steps(path: Path) -> Steps:
    """Return a run's metrics by step, without those of time and memory. A validated step has two records."""
    steps: Steps = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        values = {
            name: value
            for name, value in row.items()
            if isinstance(value, float | int) and not is_cost(name)
        }
        if row["step"] > 0:
            steps.setdefault(row["step"], {}).update(values)
    return steps


def outside() -> dict[str, str]:
    """Return the environment for a command that is no rank of this process group."""
    from megaverl.monitoring.doctor.trials import KEPT_APART

    return {name: value for name, value in os.environ.items() if name not in KEPT_APART}


def median_seconds(work: Callable[[], object], runs: int = 10) -> float:
    """Return the median over `runs` of the time of `work` on the device, after a warm-up."""
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
