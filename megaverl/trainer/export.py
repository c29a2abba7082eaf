"""The trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megaverl.distributed.collectives import on_first_rank
from megaverl.trainer.build import Builder
from megaverl.weights.export import save_folder
from megaverl.workers.adapters import merged_model, save_adapter_folder
from megaverl.workers.megatron_model import MegatronModel


def export_model(model: MegatronModel, builder: Builder, folder: Path) -> None:
    """Write `folder` with weights, configuration and tokenizer; replaces an older one. Every rank takes part.

    Adapters are merged into these weights, and stand by themselves in `folder`_adapter, as peft has them.
    """
    tokenizer = builder.run_dir / "tokenizer"

    def save_tokenizer() -> None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        builder.tokenizer.save(tokenizer)

    on_first_rank(save_tokenizer, model.grid.world)
    with model.resident:
        save_folder(
            folder,
            source_folder=builder.folder,
            tokenizer_folder=tokenizer,
            overwrite=True,
            **merged_model(model),
        )
    if model.adapters is not None:
        save_adapter_folder(model, folder.with_name(f"{folder.name}_adapter"), base=builder.config.model.path)
