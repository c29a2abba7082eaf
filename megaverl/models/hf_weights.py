"""Any Hugging Face causal language model without its data: what its folder holds, and where that lies in a module."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaverl.errors import ModelError
from megaverl.models.vision import auto_class_of
from megaverl.sharding.module_weights import ModuleWeights, weights_of_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRUST = "If you trust the Python files that come with the model, set model.trust_remote_code=true."

__all__ = ["ModuleWeights", "module_without_data", "not_built", "weights_of_module"]


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
    except Exception as error:  # a model's own code may raise anything
        raise not_built(folder, error) from error
    return model


def not_built(folder: str | Path, error: Exception, *, in_forward: bool = False) -> ModelError:
    """What to say where transformers, or code that a folder brings along, does not build a model; or builds one whose
    forward pass does not run."""
    what = (
        "builds the model, but its forward pass does not run"
        if in_forward
        else "does not build a causal language model of it"
    )
    said = f"{folder}: transformers {what}: {error}"
    if "trust_remote_code=True" in str(error):
        said += f" {TRUST}"
    if isinstance(error, AttributeError | TypeError | NameError | AssertionError):
        said += (
            f" ({type(error).__name__}). Where its code comes with its folder, it was written for another version of "
            f"transformers than {version('transformers')}."
        )
    return ModelError(said)
