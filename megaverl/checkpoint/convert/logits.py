"""The same model twice: logits (values, where there is a value head) of source and target, each computed its own way.

A Hugging Face folder is run by transformers, a distributed checkpoint by megatron-core's GPTModel; both in float32,
whole in this process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from megaverl.checkpoint.convert.source import ModelSource
from megaverl.errors import CheckpointError, ConfigError
from megaverl.sharding.boxes import whole
from megaverl.sharding.layout import padded_tensors
from megaverl.sharding.plan import intersect_layouts
from megaverl.weights.stored import StoredArrayReader
from megaverl.weights.views import view

TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order differ by 1e-6


def compare_logits(source: ModelSource, written: ModelSource, *, shown: bool) -> None:
    """Compare on tokens drawn from a fixed seed.

    Raises:
        CheckpointError: they differ by more than rounding; names the position and both values.
        ConfigError: under torchrun with several ranks.
    """
    if dist.get_world_size() > 1:
        raise ConfigError("--logits: the model is run in one process; leave torchrun away, or leave --logits out.")
    tokens = torch.randint(source.spec.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    before, after = _outputs(source, tokens), _outputs(written, tokens)
    difference = (before - after).abs()
    scale = float(before.abs().max())
    if not float(difference.max()) <= TOLERANCE * max(scale, 1e-6):  # not >: NaN must not pass
        at = tuple(int(i) for i in torch.unravel_index(difference.nan_to_num(torch.inf).argmax(), difference.shape))
        raise CheckpointError(
            f"{source.folder}: the converted model computes something else: at [sample, position, output] {list(at)} "
            f"{float(before[at]):.6g} became {float(after[at]):.6g}. Nothing is kept. Please report this model."
        )
    if shown:
        what = "values" if source.value_head else "logits"
        print(f"{what} agree: they differ by at most {float(difference.max()):.1e} of {scale:.1e}", file=sys.stderr)


def _outputs(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab], or [b, s, 1] of a value head; float32."""
    with torch.no_grad():
        return _by_transformers(source, tokens) if source.kind == "hugging_face" else _by_megatron(source, tokens)


def _by_transformers(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.model_folder, local_files_only=True)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
    if not source.value_head:
        model = AutoModelForCausalLM.from_pretrained(source.folder, **options).eval()
        return model(tokens).logits
    backbone = AutoModel.from_pretrained(source.folder, **options).eval()
    score = torch.empty(1, source.spec.hidden_size)
    with StoredArrayReader(source.arrays) as reader:
        reader.read("score.weight", whole((1, source.spec.hidden_size)), score)
    return torch.nn.functional.linear(backbone(tokens).last_hidden_state, score)


def _by_megatron(source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    from megaverl.distributed.grid import GridShape
    from megaverl.distributed.groups import ProcessGroupManager
    from megaverl.workers.megatron_model import MegatronModel, MicroBatch

    grid = ProcessGroupManager().grid(GridShape())
    model = MegatronModel(source.spec, grid, dtype=torch.float32, seed=0, value_head=source.value_head)
    layout = model.layout_of(0)
    with StoredArrayReader(source.arrays) as reader:
        for name in padded_tensors(layout):
            model.parameters[name].zero_()
        for transfer in intersect_layouts(source.layout, layout):
            target = view(model.parameters[transfer.dest_local], transfer.dest_box)
            on_cpu = torch.empty(target.shape, dtype=target.dtype)
            reader.read(transfer.source_local, transfer.source_box, on_cpu)
            target.copy_(on_cpu)
    length = tokens.shape[1]
    lengths = torch.full((len(tokens),), length - 1)
    batch = MicroBatch(torch.arange(len(tokens)), tokens, torch.ones_like(lengths), lengths)
    found: list[torch.Tensor] = []

    def keep(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        found.append(output[..., : source.spec.vocab_size].float().cpu())
        return output.new_zeros(micro.response_mask.shape)

    model.score([batch], keep, (len(tokens), length - 1))
    return found[0]
