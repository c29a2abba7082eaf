"""`reshard`: how the engine's weights are brought up to the actor's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaverl.config.section import Positive, PositiveFloat, Section


class ReshardConfig(Section):
    """`reshard`."""

    bucket_mb: Positive = Field(
        default=64, description="MiB of buffer for each of sending and receiving; all the extra memory of a reshard."
    )
    alias: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: an engine's weight is the actor's own storage where layout and dtype agree. "
        "never: always a copy, as an actor that is moved out of device memory between steps needs.",
    )
    ipc: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: processes of one node read each other's memory where they can (CUDA IPC; on a CPU Linux's "
        "process_vm_readv). never: all that travels goes through the process group.",
    )
    overlap: bool = Field(
        default=False,
        description="Move the next weights into a second set of the engine's weights, in the background; implies "
        "alias: never. Every loop of this version waits for the move at once: it costs the memory of the second set "
        "and hides nothing.",
    )
    check_every: Annotated[int, Field(ge=-1)] = Field(
        default=0,
        description="Reshards between comparisons of fingerprints of all weights on both sides; 0: the first only. "
        "-1: never.",
    )
    timeout_minutes: PositiveFloat | None = Field(
        default=None,
        description="How long a rank waits for another in a reshard before it stops. null: run.timeout_minutes.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="Shared folder through which weights go between nodes that have no fast network. null: none.",
    )
