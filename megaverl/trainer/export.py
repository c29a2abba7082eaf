"""The trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megaverl.parallel.collectives import on_first_rank
from megaverl.reshard.export import save_folder
from megaverl.roles.megatron_model import MegatronModel
from megaverl.trainer.build import Builder


def export_model(model: MegatronModel, builder: Builder, folder: Path) -> None:
    """Write `folder` with weights, configuration and tokenizer; replaces an older one. Every rank takes part."""
    tokenizer = builder.run_dir / "tokenizer"

    def save_tokenizer() -> None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        builder.tokenizer.save(tokenizer)

    on_first_rank(save_tokenizer, model.grid.world)
    save_folder(
        folder,
        source_folder=builder.folder,
        weights=model.weights,
        layouts=model.layout_of,
        tensors=model.parameters,
        group=model.grid.world,
        tokenizer_folder=tokenizer,
        overwrite=True,
    )
