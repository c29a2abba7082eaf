"""Difference between engine and trainer log-probs of a mixture of experts in 16 bits, with and without router replay.

    python tools/bench_router_replay.py [--layers 8 --experts 32 --chosen 2 --expert-scale 64]

A random Qwen3-MoE generates with vLLM, and Megatron-core scores the same tokens with the same weights: once with the
experts that its own routers choose, once with the engine's experts (`actor.router_replay`). Both sides come from one
run. `beyond 2x` is the share of tokens whose two probabilities differ by more than a factor of 2.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

AIM = 5.0
RANGE = 0.02  # the standard deviation of all matrices, before they are scaled


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        compared = compare(options, Path(folder))
    print(
        f"Qwen3-MoE of {options.layers} layers, {options.experts} experts, {options.chosen} for each token, "
        f"{options.dtype}: {compared['tokens']} tokens, {compared['bytes']:.0f} bytes of experts each; "
        f"engine and trainer choose differently in {100 * compared['differ']:.2f} % of tokens and layers"
    )
    print(
        f"{'':16}{'mean |difference|':>20}{'p99.9':>10}{'largest':>10}{'beyond 2x':>12}"
    )
    for name in ("own choice", "replayed"):
        mean, p999, largest, beyond = compared[name]
        print(f"{name:16}{mean:20.2e}{p999:10.3f}{largest:10.3f}{100 * beyond:11.3f}%")
    ratios = [
        without_replay / max(with_replay, 1e-12)
        for without_replay, with_replay in zip(
            compared["own choice"], compared["replayed"], strict=True
        )
    ]
    beyond = "none left" if not compared["replayed"][3] else f"{ratios[3]:.1f}x fewer"
    print(f"replay: mean {ratios[0]:.1f}x smaller, beyond 2x {beyond}; aim {AIM:g}x")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument(
        "--expert-scale",
        type=float,
        default=64.0,
        help="of the experts' output weights",
    )
    parser.add_argument(
        "--contrast", type=float, default=8.0, help="of the language-model head"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return `tokens`, `bytes` of experts a token, the share of choices that `differ`, and both sides' differences."""
    import torch
    import torch.distributed as dist

    start_one_rank()
    from megaverl.config.roles import RolloutConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.rollout import EngineOptions, make_engine
    from megaverl.rollout.engine import SamplingOptions
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.policy import Policy

    dtype = getattr(torch, options.dtype)
    model_folder = make_model(options, folder)
    engine = make_engine(
        RolloutConfig(),
        model_folder,
        EngineOptions(
            seed=0,
            dtype=dtype,
            max_model_len=options.tokens + 16,
            num_sequences=options.prompts,
            routed_experts=True,
        ),
    )
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(
        0, options.vocab, (options.prompts, 8), generator=generator
    ).tolist()
    sampling = SamplingOptions(options.tokens, ignore_eos=True)
    batch = RolloutBatch.from_generations(
        prompts, engine.generate(prompts, sampling, list(range(len(prompts))))
    )
    engine.close()
    grid = ProcessGroupManager(None).grid(GridShape())
    model = MegatronModel(
        ModelSpec.from_folder(model_folder), grid, ModelOptions(dtype=dtype, seed=0)
    )
    model.load(model_folder)
    [item] = batch.columns["routed_experts"][0]
    compared: dict[str, Any] = {"tokens": int(batch.response_mask.sum())}
    compared["bytes"] = item.tensors["routed_experts"][0].nbytes
    for name, replays in (("own choice", False), ("replayed", True)):
        policy = Policy(
            model,
            temperature=1.0,
            micro_batch_tokens=options.tokens + 16,
            replays=replays,
        )
        difference = (
            (policy.log_probs(batch).cpu() - batch.rollout_log_probs)[
                batch.response_mask
            ]
            .abs()
            .double()
        )
        beyond = float((difference > math.log(2)).double().mean())
        compared[name] = [
            float(difference.mean()),
            float(difference.quantile(0.999)),
            float(difference.max()),
            beyond,
        ]
    compared["differ"] = model.router_metrics()["moe/routes_differ"]
    dist.destroy_process_group()
    return compared


def make_model(options: argparse.Namespace, folder: Path) -> Path:
    """Write a model of random weights, scaled so that routing matters.

    Attention adds little to the residual stream and experts add much; the next token's
    probabilities are far from even.
    """
    from safetensors.torch import load_file, save_file

    from megaverl.models.tiny import make_tiny_folder

    made = make_tiny_folder(
        folder / "model",
        "Qwen3MoeForCausalLM",
        seed=options.seed,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=options.vocab,
        num_experts=options.experts,
        num_local_experts=options.experts,
        num_experts_per_tok=options.chosen,
        moe_intermediate_size=options.hidden // 2,
        initializer_range=RANGE,
        max_position_embeddings=options.tokens + 16,
    )
    weights = load_file(made / "model.safetensors")
    for name, weight in weights.items():
        if name == "model.embed_tokens.weight":
            weight /= RANGE  # a residual stream of ones
        elif name == "lm_head.weight":
            weight *= options.contrast
        elif ".experts." in name and "down_proj" in name:
            weight *= options.expert_scale
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


if __name__ == "__main__":
    sys.exit(main())
