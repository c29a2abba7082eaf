"""Any Hugging Face causal language model without its data: what its folder holds, and where that lies in a module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.errors import ModelError
from megaverl.models.vision import auto_class_of
from megaverl.sharding.module_weights import ModuleWeights, weights_of_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRUST = "If you trust the Python files that come with the model, set model.trust_remote_code=true."

__all__ = ["ModuleWeights", "module_without_data", "weights_of_module"]


def module_without_data(folder: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a folder's config.json, on the meta device: its attention layers and weights have
    shapes and no elements.

    Raises:
        ModelError: transformers knows no such model, or cannot build it so.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: PreTrainedModel = auto_class_of(config).from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, NotImplementedError) as error:
        trust = "" if trust_remote_code or "trust_remote_code" not in str(error) else f" {TRUST}"
        raise ModelError(
            f"{folder}: transformers does not build a causal language model of it: {error}{trust}"
        ) from error
    return model
