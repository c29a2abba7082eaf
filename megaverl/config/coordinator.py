"""`coordinator`: which updates are applied, which are skipped, and which end the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaverl.config.section import Fraction, NonNegative, Positive, PositiveFloat, Section


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
    islands_every: Positive = Field(
        default=1,
        description="With placement.actor_islands: updates between meetings of the islands. 1: their gradients are "
        "added up at every update; more: each goes its own way, and an outer optimizer takes the mean (DiLoCo).",
    )
    islands_compress: Literal["none", "bfloat16"] = Field(
        default="none",
        description="What goes from the islands to the coordinator: as it is, or rounded, with what "
        "rounding took away added to the next.",
    )
    outer_lr: PositiveFloat = Field(default=0.7, description="Of the outer optimizer, SGD with Nesterov momentum.")
    outer_momentum: Fraction = Field(default=0.9, description="Of the outer optimizer.")
