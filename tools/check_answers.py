"""Check that an engine answers alike with resharded and with loaded weights: one line for each architecture.

torchrun --nproc-per-node 2 tools/check_answers.py [ARCHITECTURE ...] [--tp 2]

For each architecture, transformers makes a tiny model and writes its folder. An FSDP2 actor loads that folder, sharded
over all ranks, and its weights are resharded into vLLM as in a run. No architecture has a table here. Verdicts:

same: at temperature 0 the engine gives the same tokens as one that has loaded the folder, and transformers gives these
    tokens the same log-probs in float32.
differs: the tokens differ.
wrong: transformers' log-probs differ, so vLLM computes another model.
refused: the model could not be built, loaded or resharded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

# Torchrun has the folder of a script there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import check_layouts

if TYPE_CHECKING:
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.rollout.vllm_engine import VLLMEngine

# Heads as vLLM's CPU attention has kernels for, and weights so large that no two tokens
# are as likely.
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "vocab_size": 150,
    "initializer_range": 0.1,
}
GPT2: dict[str, Any] = {"initializer_range": 0.3} | {
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 256,
    "vocab_size": 150,
}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 512, "head_dim": 64} | dict.fromkeys(
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64
)
MORE: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "GPTJForCausalLM": GPT2 | {"rotary_dim": 16},
    "BloomForCausalLM": {
        "n_layer": 2,
        "n_head": 4,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
    },
    # Else vLLM believes it.
    "GPTNeoXForCausalLM": {"num_key_value_heads": check_layouts.LEFT_OUT},
    "OPTForCausalLM": {
        "word_embed_proj_dim": 128,
        "init_std": 0.3,
        "tie_word_embeddings": False,
    },
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 32},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 32, "initializer_range": 0.3},
    "Lfm2ForCausalLM": {"block_dim": 128, "conv_dim": 128},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "MiniCPM3ForCausalLM": LATENT,
}
# Different in how they are cut, fused, transposed, tied and computed.
CHOSEN = (
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "FalconForCausalLM",
    "BloomForCausalLM",
    "OPTForCausalLM",
    "GPTNeoXForCausalLM",
    "StableLmForCausalLM",
    "Olmo2ForCausalLM",
    "CohereForCausalLM",
    "Starcoder2ForCausalLM",
    "Glm4ForCausalLM",
    "NemotronForCausalLM",
    "GraniteMoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "OlmoeForCausalLM",
    "Exaone4ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "Llama4ForCausalLM",
    "Qwen3NextForCausalLM",
)
PROMPTS = [[2 + i, 7, 5 * i + 3, 11, 4] * (1 + i % 3) for i in range(6)]
MAX_TOKENS = 12
TOLERANCE = 1e-3  # of a log-prob


class Line(NamedTuple):
    """One architecture's line of the table."""

    architecture: str
    verdict: str
    detail: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--tp", type=int, default=2)
    parsed = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = []
    for architecture in parsed.architectures or CHOSEN:
        line = compare(architecture, parsed.tp)
        lines.append(line)
        if dist.get_rank() == 0:
            print(
                f"{line.architecture:<28} {line.verdict:<8} {line.detail}", flush=True
            )
    if dist.get_rank() == 0:
        same = sum(line.verdict == "same" for line in lines)
        print(f"tp{parsed.tp}: {same} of {len(lines)} answer as a fresh engine")
    dist.destroy_process_group()


def compare(architecture: str, tp: int) -> Line:
    """Return the line of one architecture. Collective over all ranks."""
    from megaverl.distributed.collectives import on_first_rank

    with shared_folder() as folder:
        try:
            on_first_rank(lambda: write(architecture, folder))
            with engine(folder, tp, load_weights=True) as fresh:
                wanted = ask(fresh)
            with engine(folder, tp, load_weights=False) as filled:
                reshard(folder, filled)
                answer = ask(filled)
            reference = log_probs_of(folder, wanted[0])
        except Exception as error:
            text = " ".join(str(error).split())
            return Line(
                architecture, "refused", f"{type(error).__name__}: {text[:300]}"
            )
    (ours, our_log_probs), (theirs, their_log_probs) = answer, wanted
    agree = sum(a == b for a, b in zip(ours, theirs, strict=True))
    apart = max(abs(a - b) for a, b in zip(our_log_probs, their_log_probs, strict=True))
    wrong = max(abs(a - b) for a, b in zip(their_log_probs, reference, strict=True))
    detail = f"{agree} of {len(theirs)} tokens, {len({*theirs})} distinct; log-probs apart by at most {apart:.1e}"
    detail += f", from transformers' by {wrong:.1e}"
    same = "same" if agree == len(theirs) else "differs"
    return Line(architecture, same if wrong < TOLERANCE else "wrong", detail)


@contextmanager
def shared_folder() -> Iterator[str]:
    """Make a temporary folder that all ranks know, and keep it until the last of them has finished."""
    made = tempfile.mkdtemp() if dist.get_rank() == 0 else None
    known = [made]
    dist.broadcast_object_list(known)
    try:
        yield str(known[0])
    finally:
        dist.barrier()
        if made is not None:
            import shutil

            shutil.rmtree(made, ignore_errors=True)


def write(architecture: str, folder: str) -> None:
    """Write a model with random weights. Norms are random too, as they would otherwise all be ones."""
    import transformers

    model_class = getattr(transformers, architecture)
    sizes = (
        check_layouts.BASE
        | SIZES
        | check_layouts.MORE.get(architecture, {})
        | MORE.get(architecture, {})
    )
    fields = {
        key: value
        for key, value in sizes.items()
        if value is not check_layouts.LEFT_OUT
    }
    config = model_class.config_class(**fields)
    config.architectures = [architecture]
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    # Else the likeliest token is the one that was read last.
    if config.get_text_config().tie_word_embeddings:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.data *= 0.1
    model.save_pretrained(folder)


@contextmanager
def engine(folder: str, tp: int, *, load_weights: bool) -> Iterator[VLLMEngine]:
    from megaverl.config.roles import RolloutConfig
    from megaverl.rollout.vllm_engine import VLLMEngine
    from megaverl.rollout.vllm_options import VLLMOptions

    made = VLLMEngine(
        folder,
        RolloutConfig(tp=tp),
        VLLMOptions(
            seed=0,
            dtype=torch.float32,
            max_model_len=64,
            load_weights=load_weights,
            num_sequences=16,
        ),
    )
    try:
        yield made
    finally:
        made.close()


def ask(made: VLLMEngine) -> tuple[list[int], list[float]]:
    """Return the tokens of all responses, and their log-probs."""
    from megaverl.rollout.engine import SamplingOptions

    greedy = SamplingOptions(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    generations = made.generate(PROMPTS, greedy, [0] * len(PROMPTS))
    return [token for generation in generations for token in generation.token_ids], [
        p for generation in generations for p in generation.log_probs
    ]


@torch.no_grad()
def log_probs_of(folder: str, tokens: list[int]) -> list[float]:
    """Return transformers' log-probs of all responses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    log_probs: list[float] = []
    for prompt, response in zip(
        PROMPTS, torch.tensor(tokens).split(MAX_TOKENS), strict=True
    ):
        ids = torch.cat([torch.tensor(prompt), response])
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs += logits.log_softmax(-1).gather(1, response[:, None])[:, 0].tolist()
    return log_probs


def reshard(folder: str, made: VLLMEngine) -> None:
    """Load the folder into an FSDP2 actor on all ranks and reshard it into the engine, as a run does."""
    from megaverl.config.fsdp import FsdpConfig
    from megaverl.distributed.grid import GridShape
    from megaverl.sharding.weight import shapes_of
    from megaverl.workers.fsdp_model import FSDPModel
    from megaverl.workers.model_options import ModelOptions
    from megaverl.workers.weight_sync import ActorWeights, WeightSync

    groups = group_manager()
    model = FSDPModel(
        folder,
        groups.grid(GridShape(dp=dist.get_world_size())),
        groups,
        ModelOptions(dtype=torch.float32, seed=0, trained=True, initialize=False),
        fsdp=FsdpConfig(),
    )
    model.load(folder)
    WeightSync(
        ActorWeights.of(model),
        made.layouts(shapes_of(model.weights)),
        made,
        model.grid.world,
    ).reshard()


@cache
def group_manager() -> ProcessGroupManager:
    """Return the process's group manager, so that all architectures share one set of groups."""
    from megaverl.distributed.groups import ProcessGroupManager

    return ProcessGroupManager()


if __name__ == "__main__":
    main()
