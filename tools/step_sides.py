"""The two sides of `bench_step.py`: one rank of a megaverl run and one of a TRL run, which take steps in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation of megaverl

KL_COEF = 0.04
LEARNING_RATE = 1e-6


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of both sides: sizes in tokens, counts per step."""

    layers: int = 8
    hidden: int = 256
    ffn: int = 1024
    heads: int = 8
    kv_heads: int = 2
    vocab: int = 1024
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 32
    response_tokens: int = 64
    warmup: int = 2
    steps: int = 7
    nproc: int = 2
    trl_nproc: int = 2
    trl_micro_batches: int = 1
    micro_batch_tokens: int = 2048
    dtype: str = "float32"
    device: str = "cpu"
    pack_samples: bool = True
    trl_checkpointing: bool = False

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens that each part's rate counts: response tokens, or whole
        sequences in the parts that read them.
        """
        sequence = self.prompt_tokens + self.response_tokens
        whole = self.responses * sequence
        return {
            "rollout": self.responses * self.response_tokens,
            "log_probs": whole,
            "update": whole,
            "step": whole,
        }

    @property
    def gflop(self) -> dict[str, float]:
        """Return the GFLOP of each part's matrix products with weights, the least work
        that computes every token of every sequence.

        2 per weight and token forward and 4 backward; in the rollout a prompt counts
        once for its group.
        """
        kv_width = self.hidden * self.kv_heads // self.heads
        layer = (
            2 * self.hidden * self.hidden
            + 2 * self.hidden * kv_width
            + 3 * self.hidden * self.ffn
        )
        weights = self.layers * layer + self.hidden * self.vocab
        forward = 2e-9 * weights * self.tokens["update"]
        generated = (
            self.responses * self.response_tokens + self.prompts * self.prompt_tokens
        )
        by_part = {
            "rollout": 2e-9 * weights * generated,
            "log_probs": forward,
            "update": 3 * forward,
        }
        return by_part | {"step": sum(by_part.values())}


def unique_words(prompt: str, response: str, reference: Any, extra: Any) -> float:
    """Return the share of different words, a reward that costs nothing to compute."""
    words = response.split()
    return len(set(words)) / max(len(words), 1)


def prepare(job: Job, folder: Path) -> None:
    """Write the model with its tokenizer, and prompts of exactly `prompt_tokens` tokens, for both sides."""
    import random

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    from megaverl.models.tiny import make_tiny_folder

    logging.disable_progress_bar()
    make_tiny_folder(
        folder / "model",
        "Qwen2ForCausalLM",
        tie_embeddings=True,
        hidden_size=job.hidden,
        intermediate_size=job.ffn,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        vocab_size=job.vocab,
        max_position_embeddings=max(512, job.prompt_tokens + job.response_tokens),
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    words = ["<eos>", *(f"w{i}" for i in range(1, job.vocab))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(str(folder / "model"))
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(draw.choices(words[1:], k=job.prompt_tokens)), "answer": ""}
        for _ in range(job.prompts * (job.warmup + job.steps))
    ]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    (folder / "job.json").write_text(
        json.dumps(dataclasses.asdict(job)), encoding="utf-8"
    )


class Turns:
    """Files through which both sides' ranks wait for their turn and report their measurements.

    The processes of the two sides share nothing but files, and a look every 5 ms costs
    neither side anything.
    """

    def __init__(self, folder: Path, side: str, rank: int = 0) -> None:
        self.folder, self.side, self.rank = folder / "turns", side, rank
        self.folder.mkdir(exist_ok=True)

    @staticmethod
    def end(folder: Path) -> None:
        """End the turns: every rank that waits for one stops."""
        (folder / "turns").mkdir(exist_ok=True)
        (folder / "turns" / "end").touch()

    def wait(self, step: int) -> None:
        """Return when it is this side's turn to take `step`."""
        self._write(f"{self.side}.{step}.ready.{self.rank}", {})
        while not (self.folder / f"{self.side}.{step}.go").exists():
            if (self.folder / "end").exists():
                raise SystemExit("the other side failed, or the benchmark was stopped")
            time.sleep(0.005)

    def report(self, step: int, seconds: Mapping[str, float]) -> None:
        """Write this rank's seconds per part of `step`."""
        self._write(f"{self.side}.{step}.done.{self.rank}", seconds)

    def take(
        self, step: int, num_ranks: int, process: subprocess.Popen[bytes], log: Path
    ) -> dict[str, float]:
        """Let the side take `step`; return for each part the seconds of the rank that took longest.

        Processor seconds (`cpu_...`) and `gflops` are sums over the ranks.
        """
        self._await(
            [f"{self.side}.{step}.ready.{rank}" for rank in range(num_ranks)],
            process,
            log,
        )
        self._write(f"{self.side}.{step}.go", {})
        ranks = self._await(
            [f"{self.side}.{step}.done.{rank}" for rank in range(num_ranks)],
            process,
            log,
        )
        return {
            name: (sum if name.startswith(("cpu_", "gflops")) else max)(
                seconds[name] for seconds in ranks
            )
            for name in ranks[0]
        }

    def _await(
        self, names: Sequence[str], process: subprocess.Popen[bytes], log: Path
    ) -> list[dict[str, float]]:
        while not all((self.folder / name).exists() for name in names):
            if process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                raise SystemExit(
                    f"{self.side} ended with {process.returncode} before its step was done:\n{tail}"
                )
            time.sleep(0.02)
        return [json.loads((self.folder / name).read_text()) for name in names]

    def _write(self, name: str, content: Mapping[str, float]) -> None:
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(content))
        part.rename(self.folder / name)


class Stopwatch:
    """Adds up seconds by part of the running step; `cpu_` and the part: of all processors, without waiting."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time a part, including its work on the device."""
        from megaverl.platform import platform

        platform.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        yield
        platform.synchronize()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
        self.seconds[f"cpu_{part}"] = (
            self.seconds.get(f"cpu_{part}", 0.0) + time.process_time() - cpu
        )

    def wrap(self, owner: Any, method: str, part: Callable[[], str | None]) -> None:
        """Count calls of `owner.method` under the name that `part` returns; not if it returns None."""
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            name = part()
            if name is None:
                return function(*args, **kwargs)
            with self.measure(name):
                return function(*args, **kwargs)

        setattr(owner, method, timed)


def run_megaverl(job: Job, folder: Path) -> None:
    """Run one rank of a megaverl training in which every step waits for its turn."""
    import torch.distributed as dist

    from megaverl.config import load_config
    from megaverl.monitoring.console import redirect_output
    from megaverl.platform import platform
    from megaverl.trainer.job import alone
    from megaverl.trainer.loop import Trainer

    check_device(job)
    rank = int(os.environ["RANK"])
    config = load_config(None, megaverl_settings(job, folder), command="train")
    console = redirect_output(folder / "logs", rank)
    turns = Turns(folder, "megaverl", rank)
    platform.start()
    dist.init_process_group(platform.backend, timeout=datetime.timedelta(minutes=10))

    class Bench(Trainer):
        def begin_step(self, step: int) -> None:
            if step == 0:
                self.watch = watch_roles(self)
            turns.wait(step)
            self.gflops = matmul_gflops(job)
            dist.barrier()
            self.watch.seconds.clear()
            self.measured_step = ExitStack()
            self.measured_step.enter_context(self.watch.measure("step"))
            super().begin_step(step)

        def report(self, done: int) -> dict[str, float]:
            self.measured_step.close()
            metrics = self.step.metrics
            assert metrics["rollout/response_length_mean"] == job.response_tokens
            seconds = self.watch.seconds | {
                "reward": metrics["reward/latency_ms"] / 1e3,
                "gflops": self.gflops,
            }
            turns.report(done - 1, seconds)
            return super().report(done)

    Bench(config, console, alone(config)).train()
    dist.destroy_process_group()


def check_device(job: Job) -> None:
    """Raise where this process would compute on another device than the job names."""
    from megaverl.platform import platform

    if platform.device.type != job.device:
        where = platform.device.type
        raise SystemExit(
            f"this process computes on {where}, not on {job.device}. Give --device {where}."
        )


def matmul_gflops(job: Job) -> float:
    """Return this rank's GFLOP/s now, on its threads or its GPU, in the model's largest matrix product."""
    import torch

    from megaverl.platform import platform

    tokens = 2048
    options: dict[str, Any] = {
        "dtype": getattr(torch, job.dtype),
        "device": platform.device,
    }
    a, b = (
        torch.ones(tokens, job.hidden, **options),
        torch.ones(2 * job.ffn, job.hidden, **options),
    )
    best = float("inf")
    for _ in range(5):
        platform.synchronize()
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        platform.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2e-9 * tokens * a.shape[1] * b.shape[0] / best


def watch_roles(trainer: Any) -> Stopwatch:
    """Time the roles of an RLTrainer; everything but generation, forward and backward passes is overhead."""
    watch, roles = Stopwatch(), trainer.roles
    watch.wrap(roles.rollout.engine, "generate", lambda: "rollout")
    for policy in (roles.actor, roles.reference):
        watch.wrap(policy.model, "score", lambda: "log_probs")
    watch.wrap(roles.actor.model, "forward_backward", lambda: "update")
    watch.wrap(roles.actor.trainable, "update", lambda: "update_and_optimizer")
    watch.wrap(roles.sync, "reshard", lambda: "reshard")
    return watch


def megaverl_settings(job: Job, folder: Path) -> list[str]:
    """Return the run's configuration: data parallel, one engine per rank."""
    values: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder), "nproc": job.nproc},
        "model": {"path": str(folder / "model"), "dtype": job.dtype},
        "algorithm": {
            "name": "grpo",
            "group_size": job.group,
            "kl": {"in": "loss", "kind": "k3", "coef": KL_COEF},
        },
        "actor": {
            "micro_batch_tokens": job.micro_batch_tokens,
            "pack_samples": job.pack_samples,
            "optimizer": {"lr": LEARNING_RATE},
        },
        "rollout": {
            "tp": 1,
            "sampling": {
                "temperature": 1.0,
                "max_tokens": job.response_tokens,
                "ignore_eos": True,
            },
            # beside the other side's process, on the same GPU
            **(
                {"vllm": {"gpu_memory_utilization": 0.3}}
                if job.device == "cuda"
                else {}
            ),
        },
        "data": {
            "train": [str(folder / "prompts.jsonl")],
            "chat_template": "none",
            "max_prompt_tokens": job.prompt_tokens,
            "prompts_per_step": job.prompts,
        },
        "reward": [
            {
                "name": "unique_words",
                "function": f"{Path(__file__).resolve()}:unique_words",
            }
        ],
        "trainer": {"steps": job.warmup + job.steps, "validate_every": 0},
        "checkpoint": {"resume": "never", "export_hf": False},
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def run_trl(job: Job, folder: Path) -> None:
    """Run one rank of TRL's side."""
    import torch
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rank = int(os.environ.get("RANK", 0))
    check_device(job)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.trl_nproc))
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=job.device == "cpu",
        ddp_backend="gloo" if job.trl_nproc > 1 and job.device == "cpu" else None,
        bf16=job.dtype == "bfloat16",
        beta=KL_COEF,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_generations=job.group,
        per_device_train_batch_size=job.responses
        // job.trl_nproc
        // job.trl_micro_batches,
        gradient_accumulation_steps=job.trl_micro_batches,
        gradient_checkpointing=job.trl_checkpointing,
        max_completion_length=job.response_tokens,
        # the end of sequence must not come early; top_k and top_p are off by default
        generation_kwargs={"min_new_tokens": job.response_tokens},
        temperature=1.0,
        max_steps=job.warmup + job.steps,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [
            unique_words("", text, None, None) for text in completions
        ],
        args=arguments,
        train_dataset=load_dataset(
            "json",
            data_files=str(folder / "prompts.jsonl"),
            split="train",
            cache_dir=str(folder / f"cache{rank}"),
        ),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            str(folder / "model"), padding_side="left"
        ),
    )
    parameter = next(trainer.model.parameters())
    assert parameter.dtype == torch.float32
    assert parameter.device.type == job.device, (
        f"TRL computes on {parameter.device}, not on {job.device}"
    )
    turns, watch = Turns(folder, "trl", rank), Stopwatch()
    watch.wrap(trainer, "_generate_single_turn", lambda: "rollout")
    watch.wrap(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda: None if torch.is_grad_enabled() else "log_probs",
    )
    watch.wrap(trainer, "_generate_and_score_completions", lambda: "experience")
    watch.wrap(trainer, "_calculate_rewards", lambda: "reward")
    lengths: list[float] = trainer._metrics["train"]["completions/mean_length"]

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.wait(state.global_step)
            watch.seconds.clear()
            self.whole = watch.measure("step")
            self.whole.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.whole.__exit__(None, None, None)
            seconds = watch.seconds
            for prefix in ("", "cpu_"):
                seconds[f"{prefix}update"] = seconds[f"{prefix}step"] - seconds.pop(
                    f"{prefix}experience"
                )
            turns.report(state.global_step - 1, seconds)
            if lengths and lengths[-1] != job.response_tokens:
                raise SystemExit(
                    f"TRL's responses have {lengths[-1]} tokens, not {job.response_tokens}"
                )

    trainer.add_callback(TakeTurns())
    trainer.train()


SIDES: dict[str, Callable[[Job, Path], None]] = {
    "megaverl": run_megaverl,
    "trl": run_trl,
}


def main(side: str, folder: Path) -> int:
    """Run as one rank of a side, or start its ranks."""
    job = Job(**json.loads((folder / "job.json").read_text()))
    if "RANK" in os.environ:
        SIDES[side](job, folder)
        return 0
    from megaverl.trainer.elastic_agent import start_ranks

    return start_ranks(
        [__file__, side, str(folder)],
        job.nproc if side == "megaverl" else job.trl_nproc,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
