"""Cost of `rollout.batch_invariant`, and the mismatch that it removes: generation and log-probs without and with it.

    python tools/bench_batch_invariant.py [--dtype bfloat16]

A random Qwen2 generates with vLLM, and Megatron-core computes the log-probs of the same tokens with the same weights.
Times are the best of several repetitions, and of one process. `differ` is the share of tokens whose log-probs differ in
any bit between engine and trainer. `alone` is the share of a few responses whose log-probs differ in any bit if the
prompt is sent by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

Result = TypeVar("Result")


class Side(NamedTuple):
    """Measurements of one mode: seconds, and shares from 0 to 1."""

    generation: float
    log_probs: float
    differ: float
    alone: float


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    start_one_rank()
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            measure(options, Path(folder) / str(is_on), is_on)
            for is_on in (False, True)
        ]
    off, on = sides
    tokens = options.prompts * options.tokens
    print(
        f"Qwen2, {options.layers} layers of width {options.hidden}, {options.dtype}, {options.prompts} responses of "
        f"{options.tokens} tokens"
    )
    print(
        f"{'':16}{'generation':>14}{'tokens/s':>10}{'log-probs':>12}{'differ':>9}{'alone':>9}"
    )
    for name, side in (("default", off), ("batch-invariant", on)):
        print(
            f"{name:16}{side.generation:12.2f} s{tokens / side.generation:10.0f}{side.log_probs:10.2f} s"
            f"{100 * side.differ:8.1f}%{100 * side.alone:8.1f}%"
        )
    print(
        f"{'ratio':16}{on.generation / off.generation:13.2f}x{'':10}{on.log_probs / off.log_probs:11.2f}x"
    )
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", type=int, default=4, help="prompts sent alone")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, folder: Path, is_on: bool) -> Side:
    """Return the measurements of one mode, with an engine and a trainer of its own."""
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.rollout import EngineOptions, make_engine
    from megaverl.rollout.engine import SamplingOptions
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.policy import Policy

    dtype = getattr(torch, options.dtype)
    longest = 32 + options.tokens
    model_folder = make_tiny_folder(
        folder,
        "Qwen2ForCausalLM",
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        vocab_size=options.vocab,
        head_dim=options.hidden // 4,
        max_position_embeddings=longest,
        initializer_range=0.1,
    )
    engine = make_engine(
        RolloutConfig(batch_invariant=is_on),
        model_folder,
        EngineOptions(
            seed=0,
            dtype=dtype,
            max_model_len=longest,
            num_sequences=options.prompts,
        ),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, options.vocab, (8 + i % 24,), generator=generator).tolist()
        for i in range(options.prompts)
    ]
    sampling = SamplingOptions(options.tokens, ignore_eos=True)

    def generate(numbers: list[int]) -> list[Any]:
        return engine.generate([prompts[i] for i in numbers], sampling, numbers)

    everything = list(range(options.prompts))
    generation, responses = best(options.repeats, lambda: generate(everything))
    alone = [
        list(generate([i])[0].log_probs) != list(responses[i].log_probs)
        for i in everything[: options.alone]
    ]
    engine.close()
    batch = RolloutBatch.from_generations(prompts, responses)
    model = MegatronModel(
        ModelSpec.from_folder(model_folder),
        ProcessGroupManager(None).grid(GridShape()),
        ModelOptions(dtype=dtype, seed=0, batch_invariant=is_on),
    )
    model.load(model_folder)
    policy = Policy(model, temperature=1.0, micro_batch_tokens=4 * longest)
    seconds, log_probs = best(options.repeats, lambda: policy.log_probs(batch).cpu())
    mask = batch.response_mask
    differ = (log_probs != batch.rollout_log_probs)[mask].double().mean()
    return Side(generation, seconds, float(differ), sum(alone) / len(alone))


def best(repeats: int, run: Callable[[], Result]) -> tuple[float, Result]:
    """Return the shortest time of `run` in seconds, and its last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return min(times), result


if __name__ == "__main__":
    sys.exit(main())
