"""`coordinator`: which updates are applied, which are skipped, and which end the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.section import NonNegative, PositiveFloat, Section


class CoordinatorConfig(Section):
    """`coordinator`: its rules; where it sits says `placement.coordinator`."""

    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="What a NaN or inf in a loss or gradient does: end the run, or skip the update."
    )
    skip_above: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Role -> gradient norm above which an update is skipped, as {actor: 10.0}.",
    )
    max_skips: NonNegative = Field(default=10, description="Skipped updates in a row after which the run ends.")
