"""Difference between engine and trainer log-probs in 16 bits, by model family and by the settings that change it.

    python tools/bench_mismatch.py [--families llama,qwen3_moe] [--dtype bfloat16]

A random model of each family generates with vLLM, and Megatron-core scores the same tokens with the same weights. The
output layer is scaled so that the logits have a standard deviation of 3. Columns:

- `logits`: in the model's dtype, or in float32 on both sides (`model.fp32_lm_head`).
- `experts`: those that the trainer chooses, or the engine's (`actor.router_replay`).
- `router`: dtype of the router's products on the trainer's side (`actor.megatron.moe_router_dtype`).
- `p99.9`: the 99.9th percentile of the absolute difference.
- `beyond 2x`: the share of tokens whose two probabilities differ by more than a factor of 2.

Each family is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.one_rank import start_one_rank  # noqa: E402

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# Latent attention has kernels for the sizes of DeepSeek-V3 alone.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3")
LOGITS_STD = 3.0
# Experts add this much more to the residual stream than random weights do, so that
# routing matters.
EXPERTS_SCALE = 8.0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(options, Path(folder))))
        return 0
    chosen = options.families.split(",") if options.families else list(FAMILIES)
    print(f"{options.layers} layers of width {options.hidden}, {options.dtype}")
    print(
        f"{'family':14}{'logits':>10}{'experts':>10}{'router':>10}{'tokens':>8}{'mean':>10}{'p99.9':>9}"
        f"{'beyond 2x':>11}{'chosen otherwise':>18}"
    )
    for family in chosen:
        command = [
            sys.executable,
            __file__,
            "--one",
            family,
            *(arguments or sys.argv[1:]),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{family:14}failed: {done.stderr.strip().splitlines()[-1][:160]}")
            continue
        for side in json.loads(done.stdout.splitlines()[-1]):
            differ = side["differ"]
            print(
                f"{family:14}{side['logits']:>10}{side['experts']:>10}{side['router']:>10}{side['tokens']:8}"
                f"{side['mean']:10.2e}{side['p999']:9.4f}"
                f"{100 * side['beyond']:10.3f}%"
                + ("" if differ is None else f"{100 * differ:17.2f}%")
            )
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", default="", help="default: all")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the differences of one family, by the dtypes of logits and routers, and by whose experts are used."""
    import torch.distributed as dist

    start_one_rank()
    model_folder = make_model(options, folder)
    has_experts = options.one in WITH_EXPERTS
    sides = []
    for fp32_lm_head in (False, True):
        batch = generate(options, model_folder, fp32_lm_head)
        for router in ("fp32", None) if has_experts else ("",):
            sides += [
                {
                    "logits": "float32" if fp32_lm_head else options.dtype,
                    "router": router or (options.dtype if has_experts else ""),
                    **side,
                }
                for side in score(options, model_folder, batch, fp32_lm_head, router)
            ]
    dist.destroy_process_group()
    return sides


def generate(options: argparse.Namespace, folder: Path, fp32_lm_head: bool) -> Any:
    """Return a batch of responses to random prompts, with the engine's log-probs and experts."""
    import torch

    from megaverl.config.roles import RolloutConfig
    from megaverl.data.batch import RolloutBatch
    from megaverl.rollout import EngineOptions, make_engine
    from megaverl.rollout.engine import SamplingOptions

    engine = make_engine(
        RolloutConfig(),
        folder,
        EngineOptions(
            seed=0,
            dtype=getattr(torch, options.dtype),
            max_model_len=options.tokens + 16,
            num_sequences=options.prompts,
            fp32_lm_head=fp32_lm_head,
            routed_experts=options.one in WITH_EXPERTS,
        ),
    )
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(
        0, options.vocab, (options.prompts, 8), generator=generator
    ).tolist()
    sampling = SamplingOptions(options.tokens, ignore_eos=True)
    generations = engine.generate(prompts, sampling, list(range(len(prompts))))
    engine.close()
    return RolloutBatch.from_generations(prompts, generations)


def score(
    options: argparse.Namespace,
    folder: Path,
    batch: Any,
    fp32_lm_head: bool,
    router: str | None,
) -> list[dict[str, Any]]:
    """Return the differences of the trainer's log-probs, with its own experts and with the engine's."""
    import torch

    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.sharding.model_spec import ModelSpec
    from megaverl.workers.megatron_model import MegatronModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.policy import Policy

    has_experts = options.one in WITH_EXPERTS
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        ProcessGroupManager(None).grid(GridShape()),
        ModelOptions(
            dtype=getattr(torch, options.dtype), seed=0, fp32_lm_head=fp32_lm_head
        ),
        overrides={"moe_router_dtype": router} if has_experts else {},
    )
    model.load(folder)
    sides = []
    for name in ("own", "engine's") if has_experts else ("",):
        policy = Policy(
            model,
            temperature=1.0,
            micro_batch_tokens=options.tokens + 16,
            replays=name == "engine's",
        )
        log_probs = policy.log_probs(batch).cpu()
        mask = batch.response_mask
        difference = (log_probs - batch.rollout_log_probs)[mask].abs().double()
        beyond = (difference > math.log(2)).double().mean()
        sides.append(
            {
                "experts": name,
                "tokens": int(mask.sum()),
                "mean": float(difference.mean()),
                "p999": float(difference.quantile(0.999)),
                "beyond": float(beyond),
                "differ": None,
            }
        )
    if has_experts:
        sides[-1]["differ"] = model.router_metrics()["moe/routes_differ"]
    return sides


def make_model(options: argparse.Namespace, folder: Path) -> Path:
    """Write a random model of the family with unembedding and experts scaled."""
    from safetensors.torch import load_file, save_file

    from megaverl.models.tiny import make_tiny_folder

    made = make_tiny_folder(
        folder / "model",
        FAMILIES[options.one],
        seed=options.seed,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        vocab_size=options.vocab,
        max_position_embeddings=options.tokens + 16,
        **SIZES.get(options.one, {}),
    )
    weights = load_file(made / "model.safetensors")
    for name, weight in weights.items():
        if name == "lm_head.weight":
            weight *= LOGITS_STD / (float(weight.std()) * options.hidden**0.5)
        elif ".experts." in name and ("down_proj" in name or ".w2." in name):
            weight *= EXPERTS_SCALE
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


if __name__ == "__main__":
    sys.exit(main())
