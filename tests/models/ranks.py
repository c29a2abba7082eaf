"""What the ranks of a test world do to a Megatron-core model."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megaverl.data.batch import RolloutBatch
from megaverl.distributed.grid import GridShape
from megaverl.distributed.groups import Grid, ProcessGroupManager
from megaverl.models.packing import MicroBatch
from megaverl.models.vocab_parallel import capped
from megaverl.sharding.model_spec import ModelSpec
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import micro_batches_for
from megaverl.workers.model_options import ModelOptions
from tests.references import model_class_of
from tests.sharding.specs import TRANSFORMERS_ATTENTION


@functools.cache
def manager() -> ProcessGroupManager:
    """One per world, as in a run."""
    return ProcessGroupManager()


def grid(**sizes: int) -> Grid:
    return manager().grid(GridShape.fit(dist.get_world_size(), **sizes))


def load(
    folder: str,
    *,
    value_head: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> MegatronModel:
    """The model of `folder` on a grid that fills the world; `options` are its sizes and TransformerConfig fields."""
    sizes = {
        name: options.pop(name)
        for name in ("tp", "pp", "vpp", "ep", "etp")
        if name in options
    }
    model = MegatronModel(
        ModelSpec.from_folder(folder),
        grid(**sizes),
        ModelOptions(dtype=dtype, seed=0, value_head=value_head),
        overrides=options,
    )
    model.load(folder)
    return model


def embeddings(folder: str, tokens: list[int]) -> tuple[Any, Any]:
    """What enters the first layer in bfloat16, [tokens, hidden], here and in transformers."""
    chunk = load(folder, dtype=torch.bfloat16).chunks[0]
    positions = torch.arange(len(tokens))[None]
    ours = chunk.embedding(torch.tensor([tokens]), positions)[:, 0]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    entered: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    theirs.model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        theirs(torch.tensor([tokens]))
    return ours.tolist(), entered[0][0].tolist()


def operators_of_a_gated_mlp(folder: str) -> list[str]:
    """What autograd recorded of the first layer's MLP."""
    mlp = next(
        module
        for module in load(folder).chunks[0].modules()
        if type(module).__name__ == "MLP"
    )
    output, _ = mlp(torch.randn(3, 1, mlp.config.hidden_size, requires_grad=True))
    return operators(output)


def operators(output: torch.Tensor) -> list[str]:
    """All that autograd recorded."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        seen.add(node.name())
        waiting += [before for before, _ in node.next_functions if before is not None]
    return sorted(seen)


def whole_rows(tokens: list[list[int]]) -> RolloutBatch:
    """[b][s] tokens as a batch whose responses are everything after the first token."""
    ids = torch.tensor(tokens)
    return RolloutBatch(
        {
            "input_ids": ids[:, :1],
            "prompt_lengths": torch.ones(len(ids), dtype=torch.int64),
            "generated_ids": ids[:, 1:],
            "response_mask": torch.ones_like(ids[:, 1:], dtype=torch.bool),
        }
    )


def logits(
    folder: str, tokens: list[list[int]], **options: Any
) -> list[list[list[float]]]:
    """[b, s, vocab] logits of every position, gathered over the tensor-parallel ranks; [] off the last stage."""
    model = load(folder, **options)
    tp, pp = model.grid.shape.tp, model.grid.shape.pp
    found: list[torch.Tensor] = []

    def score(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(tp)]
        dist.all_gather(parts, output.contiguous(), group=model.grid.tp_group)
        whole = torch.cat(parts, dim=-1)[..., : model.spec.vocab_size]
        found.append(capped(whole, model.logit_softcap))
        return output.new_zeros(micro.response_mask.shape)

    batch = whole_rows(tokens)
    micro = MicroBatch(
        torch.arange(len(batch)),
        batch.joined(),
        batch.prompt_lengths,
        batch.response_lengths,
    )
    # The same on every data-parallel rank.
    model.score([micro] * pp, score, tuple(batch.generated_ids.shape))
    return found[0].tolist() if found else []


def differences(configs: list[dict[str, Any]], tokens: list[list[int]]) -> list[float]:
    """Return how far logits are from transformers', for each config.json, which is read as it stands."""
    return [_difference(config, torch.tensor(tokens)) for config in configs]


def _difference(config: dict[str, Any], tokens: torch.Tensor) -> float:
    model_class = model_class_of(config["architectures"][0])
    model = model_class(
        model_class.config_class.from_dict(json.loads(json.dumps(config)))
    ).eval()
    if attention := TRANSFORMERS_ATTENTION.get(config["architectures"][0]):
        model.set_attn_implementation(attention)
    _draw_large(model)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(folder)
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return float(
            (torch.tensor(logits(folder, tokens.tolist())) - expected).abs().max()
        )


@torch.no_grad()
def _draw_large(model: torch.nn.Module) -> None:
    """Draw weights so large that attention looks at few tokens, and routers choose."""
    torch.manual_seed(0)
    stored_minus_one = ("Gemma", "Qwen3Next", "Qwen3_5")
    norms_at = 0.0 if type(model).__name__.startswith(stored_minus_one) else 1.0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("inv_freq", "mup_vector")) or not tensor.dim():
            continue
        if tensor.dim() == 1 or name.endswith("bias"):
            tensor.normal_(norms_at if name.endswith("norm.weight") else 0.0, 0.1)
        else:
            is_large = any(
                part in name
                for part in (
                    "q_proj",
                    "k_proj",
                    "_a_proj",
                    "_b_proj",
                    "gate.weight",
                    "router",
                )
            )
            tensor.normal_(0.0, 0.5 if is_large else 0.15)


def values(folder: str, tokens: list[list[int]], **options: Any) -> list[list[float]]:
    """[b, s - 1] values of a critic."""
    model = load(folder, value_head=True, **options)
    batch = whole_rows(tokens)

    def before(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        return model.values(output, micro)[0]

    return model.score(
        micro_batches_for(model, batch, 64), before, tuple(batch.generated_ids.shape)
    ).tolist()
