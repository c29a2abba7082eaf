"""Cost of a checkpoint: a save in the background compared with a blocking one, and a resume to the next training step.

    python tools/bench_checkpoint.py                       # 0.49 B parameters, two ranks, bfloat16: 15 GB of memory
    python tools/bench_checkpoint.py --layers 8 --rounds 5 --json bench.json
    python tools/bench_checkpoint.py --only save
    python tools/bench_checkpoint.py --only count          # at 8, 64 and 1,024 ranks, by arithmetic, in seconds

save      one model with its optimizer, in one run: every round takes a step without a save, a step with a blocking
          save, and steps during a save in the background until it is written. A save costs the time by which its steps
          are longer than the step without one. The disk is synced before every round.
resume    `megaverl train` itself: one step of GRPO with vLLM and a checkpoint; then the same command again, timed
          from its start until it has resumed (weights, optimizer, engine resharded) and until its first step is done.
count     bytes that a save makes a rank write and hold at sizes that cannot run here, computed from the planner's
          buffers; beside them the bytes for megatron-core 0.16 (`get_parameter_state_dp_zero`), which gathers the
          optimizer's state bucket by bucket on the first data-parallel rank, and that rank writes for all.

The model is a randomly initialised Qwen2 with the layers of Qwen2.5-0.5B (hidden 896, ffn 4864, 14 heads, 2 KV
heads), more of them, and a vocabulary of a few tokens in its place.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

from megaverl.planner.job import PlannedJob
from megaverl.processes import ending_with_parent

MODEL: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_embeddings": True,
    "dtype": "bfloat16",
}

LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--layers", type=int, default=33, help="33 make 0.49 B parameters"
    )
    parser.add_argument(
        "--batch", type=int, default=32, help="samples of a step, 24 tokens each"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of saves")
    parser.add_argument("--nproc", type=int, default=2, help="ranks; tensor parallel")
    parser.add_argument(
        "--engine",
        default="vllm",
        choices=("vllm", "hf"),
        help="rollout.engine of the resume",
    )
    parser.add_argument(
        "--only", choices=("save", "resume", "count"), help="one of them"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="for model and checkpoints (default: a temporary one)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        return _save_rank(options)
    if options.only == "count":
        return _count(options.json)
    folder = options.folder or Path(
        tempfile.mkdtemp(prefix="megaverl_bench_checkpoint_")
    )
    try:
        _inputs(folder, options.layers)
        result: dict[str, Any] = {}
        if options.only != "resume":
            result["save"] = measure_saves(folder, options)
        if options.only != "save":
            result["resume"] = measure_resume(folder, options)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _count(file: Path | None) -> int:
    """Print the bytes that the busiest rank writes and holds at each size."""
    rows = [_counted(*named_job) for named_job in _jobs()]
    print(f"{'GB of the busiest rank':54}{'before':>10}{'now':>10}")
    for row in rows:
        print(f"{row['what']}: {row['together'] / 1e9:,.0f} GB")
        print(
            f"  {'ranks that write':52}{row['writers'][0]:>10,}{row['writers'][1]:>10,}"
        )
        for name in ("written", "host memory, at most", "the GPU's, for a moment"):
            before, now = (figure / 1e9 for figure in row[name])
            print(f"  {name:52}{before:>10.2f}{now:>10.2f}")
    if file:
        file.write_text(json.dumps({"count": rows}, indent=1) + "\n")
    return 0


def _jobs() -> list[tuple[str, PlannedJob]]:
    from megaverl.config import load_config
    from megaverl.planner.job import find_spec, make_job
    from megaverl.sharding.model_spec import ModelSpec

    needed = ["model.path=absent", "data.train=absent.jsonl", "reward=exact_match"]
    config = load_config(
        None,
        [*needed, "model.dtype=bfloat16", "actor.tp=2"],
        check_paths=False,
        world_size=8,
    )
    jobs = [
        (
            "Llama-3 8B at TP2 with `ddp: {}`, 8 ranks",
            make_job(config, ModelSpec.from_config(LLAMA3_8B), 8),
        )
    ]
    for name, world, grid in (
        ("grpo_8_nodes", 64, []),
        ("grpo_128_nodes", 1024, ["actor={tp: 8, pp: 8}"]),
    ):
        path = ROOT / "configs" / "llama3_70b" / f"{name}.yaml"
        config = load_config(path, grid, check_paths=False, world_size=world)
        jobs.append(
            (
                f"llama3_70b/{name}, {world:,} ranks",
                make_job(config, find_spec(config, fallback=str(path)), world),
            )
        )
    return jobs


def _counted(label: str, job: PlannedJob) -> dict[str, Any]:
    """Return each figure of the actor as [with gathering, now]."""
    from megaverl.planner.buffers import BufferOptions, make_buffer, parameters_of
    from megaverl.planner.memory import MemoryModel

    actor, memory = job.actor, MemoryModel(job)
    assert actor.trained is not None
    replicas = actor.grid.dp * actor.grid.cp
    options = BufferOptions.read(
        actor.trained.ddp, getattr(actor.config, "optimizer", {}), replicas
    )
    saved = {rank: memory.trained(actor, rank) for rank in actor.ranks}
    # (tp, pp) -> what all its replicas write: weights, states.
    group: dict[tuple[int, int], tuple[int, int]] = {}
    bucket = 0
    for rank, rank_bytes in saved.items():
        coords = actor.grid.coords(actor.place(rank) or 0)
        weights, states = group.get((coords.tp, coords.pp), (0, 0))
        group[coords.tp, coords.pp] = (
            weights + rank_bytes.saved_weights,
            states + rank_bytes.saved_optimizer,
        )
    for stage in range(actor.grid.pp):
        [parameters] = parameters_of(
            actor.layout_of(actor.grid.rank(pp=stage)),
            expert_parallel=False,
            tied=False,
        )
        buffer = make_buffer(
            parameters, replicas, options.bucket_size if stage == 0 else None, options
        )
        bucket = max(
            bucket, *(high - low for low, high in pairwise((0, *buffer.bucket_ends)))
        )
    now = max(
        rank_bytes.saved_weights + rank_bytes.saved_optimizer
        for rank_bytes in saved.values()
    )
    return {
        "what": label,
        "together": sum(map(sum, group.values())),
        "writers": [len(group), len(saved)],
        "written": [max(map(sum, group.values())), now],
        # besides, a bucket's float32 state in parts and joined; now what the next
        # update finds unwritten, in copies
        "host memory, at most": [
            max(states for _, states in group.values()) + 2 * 4 * bucket,
            now,
        ],
        "the GPU's, for a moment": [4 * bucket, 0],
    }


def measure_saves(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of the save benchmark and print their results."""
    from megaverl.trainer.elastic_agent import start_ranks

    more = [
        "--batch",
        str(options.batch),
        "--rounds",
        str(options.rounds),
        "--folder",
        str(folder),
    ]
    if start_ranks([__file__, *more], options.nproc):
        raise SystemExit("the ranks of the save benchmark failed")
    medians: dict[str, Any] = json.loads((folder / "save.json").read_text())
    lines = (
        ("a step without a save", f"{medians['plain']:8.2f}"),
        ("blocking: the step waits", f"{medians['blocking']:8.2f}"),
        (
            "background: the step waits",
            f"{medians['copy']:8.2f}   to start, and to copy before the update",
        ),
        (
            "  later steps take longer by",
            f"{medians['slower']:8.2f}   over the {medians['steps']:.0f} while it is written",
        ),
        ("background / blocking", f"{medians['ratio']:8.1%}   of the step's wait"),
        ("  with the later steps", f"{medians['all']:8.1%}"),
    )
    print(
        f"save: {medians['gigabytes']:.2f} GB, {options.nproc} ranks; medians of {options.rounds} rounds, seconds"
    )
    for label, figure in lines:
        print(f"  {label:28} {figure}")
    return medians


def _save_rank(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from megaverl.checkpoint.commit import Retention
    from megaverl.checkpoint.store import CheckpointStore
    from megaverl.config import load_config
    from megaverl.monitoring.console import redirect_output
    from megaverl.platform import platform
    from megaverl.trainer.build import Builder
    from megaverl.trainer.job import alone, kept_objects
    from megaverl.trainer.supervised import SFTTrainer

    rank = int(os.environ["RANK"])
    console = redirect_output(options.folder / "logs", rank)
    platform.start()
    dist.init_process_group(platform.backend)
    config = load_config(
        None,
        [
            *_arguments(options.folder, dist.get_world_size()),
            f"sft={{batch_size: {options.batch}}}",
        ],
        command="sft",
    )
    trainer = SFTTrainer(config, Builder(config), console, alone(config))
    roles = trainer.trained
    store = CheckpointStore(
        options.folder / "saves", retention=Retention(keep_last_k=1)
    )
    taken = 0

    def step() -> float:
        nonlocal taken
        start = time.perf_counter()
        trainer.one_step(
            [trainer.data[i] for i in trainer.sampler.indices(taken)], taken
        )
        dist.barrier()
        taken += 1
        return time.perf_counter() - start

    rounds: list[dict[str, float]] = []
    with kept_objects():
        step()
        # Takes its memory, as the first save of a run does.
        store.start(taken, roles, {})
        store.finish()
        for _ in range(options.rounds):
            os.sync()
            dist.barrier()
            plain = step()
            start = time.perf_counter()
            store.save(taken, roles, {})
            blocking = time.perf_counter() - start
            os.sync()
            plain = statistics.mean([plain, step()])
            start = time.perf_counter()
            store.start(taken, roles, {})
            copy = started = time.perf_counter() - start
            settle = trainer.updates.trainable.before_step

            def timed_settle(settle: Callable[[], None] = settle) -> None:
                nonlocal copy
                start = time.perf_counter()
                settle()
                copy += time.perf_counter() - start

            trainer.updates.trainable.before_step = timed_settle
            during = [step()]
            while store.finish(wait=False) is None:
                during.append(step())
            slower = sum(during) - len(during) * plain - (copy - started)
            measured = {
                "plain": plain,
                "blocking": blocking,
                "copy": copy,
                "slower": slower,
                "steps": len(during),
            }
            rounds.append(
                {
                    **measured,
                    "ratio": copy / blocking,
                    "all": (copy + max(0.0, slower)) / blocking,
                }
            )
    if rank == 0:
        newest = store.latest()
        assert newest is not None
        result = {
            name: statistics.median(measured[name] for measured in rounds)
            for name in rounds[0]
        }
        result["gigabytes"] = (
            sum(path.stat().st_size for path in newest.iterdir()) / 1e9
        )
        (options.folder / "save.json").write_text(
            json.dumps({**result, "rounds": rounds})
        )
    else:
        store.latest()
    dist.destroy_process_group()
    return 0


def measure_resume(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train one step, start the same run again, and print how long the second start took."""
    # As the actor's: the engine then lives in its weights.
    tp = options.nproc if options.engine == "vllm" else 1
    arguments = [
        *_arguments(folder, options.nproc),
        f"rollout={{engine: {options.engine}, tp: {tp}, logprob_tolerance: 50, sampling: {{max_tokens: 8}}}}",
        "algorithm={name: grpo, group_size: 4, kl: {coef: 0.0}}",
        'reward={"function": "' + str(folder / "reward.py") + ':letters"}',
        "trainer={validate_every: 0}",
        "checkpoint.export_hf=false",
    ]
    _timed([*arguments, "trainer.steps=1"])
    seconds = _timed([*arguments, "trainer.steps=2"])
    print(
        f"resume: `megaverl train` on {options.nproc} ranks with {options.engine}, seconds from its start"
    )
    print(
        f"  the checkpoint is loaded, and the engine has the weights   {seconds['resumed']:8.2f}"
    )
    print(
        f"  the first training step is done                            {seconds['first step']:8.2f}"
    )
    return seconds


def _timed(arguments: Sequence[str]) -> dict[str, float]:
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    command = ending_with_parent(
        [sys.executable, "-m", "megaverl.cli.main", "train", *arguments]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            name = {"resumed": "resumed", "step": "first step"}.get(line.split(" ")[0])
            if name:
                seconds.setdefault(name, time.perf_counter() - start)
    if running.returncode:
        raise SystemExit(f"the run failed with exit code {running.returncode}")
    return seconds


def _arguments(folder: Path, nproc: int) -> list[str]:
    return [
        f"run={{name: run, dir: {folder / 'runs'}, log_with: jsonl, nproc: {nproc}}}",
        f"model.path={folder / 'model'}",
        f"data={{train: {folder / 'train.jsonl'}, max_prompt_tokens: 16, prompts_per_step: 2}}",
        f"actor={{tp: {nproc}, optimizer: {{lr: 1.0e-6}}, micro_batch_tokens: 1024}}",
        "rollout.sampling.max_tokens=8",
    ]


def _inputs(folder: Path, layers: int) -> None:
    from megaverl.data.tasks import make_task
    from megaverl.data.tokenizers import load_tokenizer
    from megaverl.models.tiny import make_tiny_folder

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "model" / "config.json").exists():
        return
    task = make_task("reverse", num_digits=3, num_train=64, num_held_out=16)
    task.save(folder)
    tokenizer = load_tokenizer(task.train_tokenizer(folder / "tokenizer.model"))
    special: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": tokenizer.vocab_size,
    }
    make_tiny_folder(
        folder / "model",
        "Qwen2ForCausalLM",
        num_hidden_layers=layers,
        **MODEL,
        **special,
    )
    tokenizer.save(folder / "model")
    (folder / "reward.py").write_text(
        "def letters(prompt, response, reference, extra):\n    return sum(ord(c) % 7 for c in response) / 40\n"
    )


if __name__ == "__main__":
    sys.exit(main())
