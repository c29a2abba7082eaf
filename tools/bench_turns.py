"""Tokens and time of an update on conversations of an agent, with their shared turns computed once and without.

    python tools/bench_turns.py [--samples 8 --turns 5]

Every turn of an episode is a conversation of its own. With `--history whole` it continues the one before. With
`--history short` its program drops the reasoning of earlier turns, as chat templates of reasoning models do, so that
conversations share the answers only. Three sides are updated on the same samples by Megatron-core, from the same
weights: each conversation `alone`, equal `prompts` shared, and all `turns` shared. The sides are updated in turn, and
the medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

if TYPE_CHECKING:
    from megaverl.data.batch import RolloutBatch
    from megaverl.workers.policy import Actor

AIM = 2.5  # times fewer tokens, of 5 turns and 8 samples
ALONE, PROMPTS, TURNS = "alone", "prompts", "turns"
SIDES = (ALONE, PROMPTS, TURNS)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(options, Path(folder))
    print(
        f"{options.samples} episodes of {options.turns} turns, {options.history} history; a model of "
        f"{options.layers} layers and width {options.hidden} in float32"
    )
    print(
        f"{'shared':8}{'tokens':>10}{'update, s':>12}{'loss':>14}{'gradient norm':>16}"
    )
    for name, side in measured.items():
        print(
            f"{name:8}{side.tokens:10}{side.seconds:12.2f}{side.loss:14.7f}{side.grad_norm:16.7f}"
        )
    turns = measured[TURNS]
    for name in (ALONE, PROMPTS):
        other = measured[name]
        print(
            f"turns instead of {name}: {other.tokens / turns.tokens:.2f}x fewer tokens (aim {AIM:g}x), "
            f"{other.seconds / turns.seconds:.2f}x as fast; loss differs by {abs(other.loss - turns.loss):.1e}, the "
            f"gradient's norm by {abs(other.grad_norm - turns.grad_norm) / other.grad_norm:.1e} of itself"
        )
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=8, help="episodes of the prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--history", default="whole", choices=["whole", "short"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--reasoning", type=int, default=96, help="tokens a turn")
    parser.add_argument("--answer", type=int, default=48, help="tokens a turn")
    parser.add_argument("--observation", type=int, default=48, help="tokens a turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Side(NamedTuple):
    """Row tokens of an update, its median seconds, and its results from the initial weights."""

    tokens: int
    seconds: float
    loss: float
    grad_norm: float


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Side]:
    """Update each side in turn, and return what was measured by side."""
    import torch.distributed as dist

    from megaverl.data.prefix_packing import sequence_lengths
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.workers.micro_batches import micro_batches_for

    start_one_rank()
    model_folder = make_tiny_folder(
        folder / "model",
        "Qwen3ForCausalLM",
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        head_dim=64,
    )
    whole = conversations(options)
    batches = {
        ALONE: _without_episodes(whole, list(range(len(whole)))),
        PROMPTS: _without_episodes(whole, None),
        TURNS: whole,
    }
    actors = {name: make_actor(model_folder, options) for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    first: dict[str, dict[str, float]] = {}
    for number in range(options.rounds):
        for name in SIDES:
            begun = time.perf_counter()
            metrics = actors[name].update(batches[name], step=number, kl_coef=0.0)
            seconds[name].append(time.perf_counter() - begun)
            first.setdefault(name, metrics)
    measured = {}
    for name, batch in batches.items():
        micro = micro_batches_for(
            actors[name].trainable.model, batch, options.micro_batch_tokens
        )
        measured[name] = Side(
            sum(part.tokens.numel() for part in micro),
            statistics.median(seconds[name]),
            first[name]["loss"],
            first[name]["grad_norm"],
        )
        assert sequence_lengths(batch).lengths == sequence_lengths(whole).lengths
    dist.destroy_process_group()
    return measured


def make_actor(folder: Path, options: argparse.Namespace) -> Actor:
    """Build an actor with the weights of a folder."""
    import torch

    from megaverl.config.algorithm import AlgorithmConfig
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.optimizers import MegatronTrainable
    from megaverl.workers.policy import Actor

    model = MegatronModel(
        ModelSpec.from_folder(folder),
        ProcessGroupManager(None).grid(GridShape()),
        ModelOptions(dtype=torch.float32, seed=0),
    )
    model.load(folder)
    trainable = MegatronTrainable(
        model, optimizer={"lr": 1e-4}, scheduler={}, ddp={}, total_updates=100
    )
    return Actor(
        trainable,
        AlgorithmConfig(name="grpo"),
        temperature=1.0,
        micro_batch_tokens=options.micro_batch_tokens,
        seed=options.seed,
    )


def conversations(options: argparse.Namespace) -> RolloutBatch:
    """Return the conversations of one group of episodes, with random tokens and advantages."""
    import torch

    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout.engine import Generation

    generator = torch.Generator().manual_seed(options.seed)

    def draw(count: int) -> list[int]:
        return torch.randint(0, options.vocab, (count,), generator=generator).tolist()

    beginning = draw(options.prompt)
    prompts: list[list[int]] = []
    turns: list[list[int]] = []
    for _ in range(options.samples):
        history = beginning
        for _ in range(options.turns):
            reasoning, answer = draw(options.reasoning), draw(options.answer)
            prompts.append(history)
            turns.append(reasoning + answer)
            kept = reasoning + answer if options.history == "whole" else answer
            history = [*history, *kept, *draw(options.observation)]
    generations = [Generation(turn, [-1.0] * len(turn), "stop") for turn in turns]
    batch = RolloutBatch.from_generations(
        prompts, generations, group_ids=[0] * len(prompts)
    )
    shape = batch.response_mask.shape
    normal = torch.randn(shape, generator=generator)
    return batch.with_(
        episode_ids=torch.arange(len(prompts)) // options.turns,
        old_log_probs=normal * 0.1 - 7.6,
        advantages=torch.randn(shape, generator=generator),
    )


def _without_episodes(batch: RolloutBatch, prompts: list[int] | None) -> RolloutBatch:
    """Return the samples as if they were no conversations, with these numbers of equal prompts."""
    import torch

    from megaverl.data.batch import RolloutBatch

    kept = {
        name: tensor
        for name, tensor in batch.tensors.items()
        if name not in ("episode_ids", "group_ids")
    }
    if prompts is not None:
        kept["prompt_numbers"] = torch.tensor(prompts)
    return RolloutBatch(kept, batch.columns)


if __name__ == "__main__":
    raise SystemExit(main())
