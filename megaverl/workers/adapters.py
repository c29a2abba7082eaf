"""A model's adapters as a folder of the `peft` library, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaverl.distributed.collectives import together
from megaverl.models.lora import Adapters
from megaverl.sharding.low_rank import ALL_LINEAR, adapter_names, with_factors
from megaverl.weights.adapters import load_adapter, save_adapter
from megaverl.workers.megatron_model import MegatronModel


def save_adapter_folder(model: MegatronModel, folder: str | Path, *, base: str) -> None:
    """Write what `lora` trains of a model as a peft adapter. Every rank of its grid takes part.

    Args:
        base: the model that the adapter belongs to, as peft's `base_model_name_or_path`.
    """
    adapters = _adapters(model)
    with model.resident:
        save_adapter(
            folder,
            config=peft_config(adapters, base, value_head=bool(model.value_head)),
            weights=adapters.weights,
            layouts=adapters.layout_of,
            tensors=adapters.parameters,
            group=model.grid.world,
        )


def load_adapter_folder(model: MegatronModel, folder: str | Path) -> None:
    """Fill a model's adapters from a peft folder. Every rank of its grid takes part, and all fail if one does.

    Raises:
        ModelError: the folder has other adapters than the model, or none.
    """
    adapters = _adapters(model)
    with together(model.grid.world):
        load_adapter(
            folder,
            adapters.layout_of(model.grid.rank),
            adapters.parameters,
            weights=adapters.weights,
            rank=adapters.config.rank,
            alpha=adapters.config.alpha,
            key=f"{model.role}.lora",
        )


def merged_model(model: MegatronModel) -> dict[str, Any]:
    """What `save_folder` is given of a model: all its weights, its adapters merged into them on the way."""
    merged: dict[str, Any] = {
        "weights": model.weights,
        "layouts": model.layout_of,
        "tensors": model.parameters,
        "group": model.grid.world,
    }
    if (adapters := model.adapters) is not None:
        merged |= {
            "layouts": with_factors(model.layout_of, adapters.low_ranks, adapter_names),
            "tensors": model.parameters | adapters.parameters,
            "adapters": adapters.low_ranks,
            "scaling": adapters.scaling,
        }
    return merged


def peft_config(adapters: Adapters, base: str, *, value_head: bool = False) -> dict[str, Any]:
    """The fields of peft's LoraConfig that this run decides."""
    lora = adapters.config
    targets: Any = lora.targets
    if targets == ALL_LINEAR:
        targets = sorted({low_rank.projection for low_rank in adapters.low_ranks.values()})
    return {
        "base_model_name_or_path": base,
        "task_type": "TOKEN_CLS" if value_head else "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "modules_to_save": ["score"] if value_head else None,
    }


def _adapters(model: MegatronModel) -> Adapters:
    assert model.adapters is not None, "the model was made without lora"
    return model.adapters
