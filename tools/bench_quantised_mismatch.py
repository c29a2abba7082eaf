"""Difference between engine and trainer log-probs by format of the engine's weights, with and without rounding actors.

    python tools/bench_quantised_mismatch.py [--formats int4_g32,nvfp4] [--dtype bfloat16]

A random Qwen3 model generates with vLLM in each format, and Megatron-core scores the same tokens with the same weights:
once as they are, once rounded as the engine does it (`actor.fake_quantization`). The first row is an engine without
quantisation. Weights are drawn with a standard deviation of 0.1. `p99.9` is the 99.9th percentile of the absolute
difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

DIMENSIONS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "vocab_size": 1024,
}


def main(arguments: list[str] | None = None) -> int:
    from megaverl.sharding.quantization import GROUP_FORMATS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", default=",".join(GROUP_FORMATS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    options = parser.parse_args(arguments)
    start_one_rank()
    formats = [None, *options.formats.split(",")]
    print(f"{options.dtype}, mean and p99.9 of |difference| in nats")
    print(f"{'engine':>16} {'actor as it is':>20} {'rounding actor':>20}")
    with tempfile.TemporaryDirectory() as folder:
        for method in formats:
            columns = measure(options, Path(folder), method)
            shown = [f"{mean:.2g} / {high:.2g}" for mean, high in columns]
            print(
                f"{method or options.dtype:>16} " + " ".join(f"{s:>20}" for s in shown)
            )
    return 0


def measure(
    options: argparse.Namespace, folder: Path, method: str | None
) -> list[tuple[float, float]]:
    """Return (mean, p99.9) for an actor as it is, and for a rounding one if the engine is quantised."""
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.models.tiny import make_tiny_folder
    from megaverl.rollout.engine import SamplingOptions
    from megaverl.rollout.vllm_engine import VLLMEngine
    from megaverl.rollout.vllm_options import VLLMOptions
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.sharding.weight import shapes_of
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.policy import Policy
    from megaverl.workers.weight_sync import ActorWeights, WeightSync

    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    sizes = {**DIMENSIONS, "num_hidden_layers": options.layers}
    path = make_tiny_folder(
        folder, "Qwen3ForCausalLM", dtype=options.dtype, initializer_range=0.1, **sizes
    )
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(
        DIMENSIONS["vocab_size"], (options.prompts, 8), generator=generator
    )
    grid = ProcessGroupManager().grid(GridShape())
    models = []
    for rounding in [None] if method is None else [None, method]:
        made = ModelOptions(dtype=dtype, seed=0, fake_quantization=rounding)
        model = MegatronModel(ModelSpec.from_folder(path), grid, made)
        model.load(path)
        models.append(model)
    engine = VLLMEngine(
        path,
        RolloutConfig(tp=1, vllm={"quantization": method} if method else {}),
        VLLMOptions(
            seed=0,
            dtype=dtype,
            max_model_len=8 + options.tokens,
            load_weights=False,
            num_sequences=options.prompts,
        ),
    )
    layouts = engine.layouts(shapes_of(models[0].weights))
    WeightSync(ActorWeights.of(models[0]), layouts, engine, grid.world).reshard()
    sampling = SamplingOptions(temperature=1.0, max_tokens=options.tokens)
    responses = engine.generate(prompts.tolist(), sampling, range(options.prompts))
    engine.close()
    # Responses end early at a stop token of the model; only the common length counts.
    length = min(len(response.token_ids) for response in responses)
    batch = RolloutBatch(
        {
            "input_ids": prompts,
            "prompt_lengths": torch.full((options.prompts,), 8),
            "generated_ids": torch.tensor([r.token_ids[:length] for r in responses]),
            "response_mask": torch.ones(options.prompts, length, dtype=torch.bool),
        }
    )
    reported = torch.tensor([r.log_probs[:length] for r in responses])
    found = []
    for model in models:
        policy = Policy(model, temperature=1.0, micro_batch_tokens=4096)
        difference = (policy.log_probs(batch) - reported).abs().flatten()
        found.append((float(difference.mean()), float(difference.quantile(0.999))))
    return found


if __name__ == "__main__":
    sys.exit(main())
