"""Options of a vLLM engine that come from the run and its model, beside those of `rollout`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaverl.rollout.engine_options import EngineOptions


@dataclass(frozen=True)
class VLLMOptions(EngineOptions):
    """Options of a `VLLMEngine` beside `rollout`.

    Attributes:
        images: EngineArgs of a model that takes images (`image_arguments`); None for other models.
    """

    images: Mapping[str, Any] | None = None
