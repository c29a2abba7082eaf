"""`rollout`: how responses are generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megaverl.config.section import Passthrough, Positive, PositiveFloat, Section, over

SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 256}


class RolloutConfig(Section):
    """`rollout`."""

    engine: Literal["vllm", "hf"] = Field(
        default="vllm", description="vllm, or hf: plain transformers, slow, for tests and for comparison."
    )
    tp: Positive = Field(
        default=1, description="Tensor-parallel size of an engine; the world holds world / tp replicas."
    )
    sampling: Annotated[Passthrough, over(SAMPLING)] = Field(
        default_factory=lambda: dict(SAMPLING),
        description="Fields of vLLM's SamplingParams, under their own names.",
    )
    vllm: Passthrough = Field(default_factory=dict, description="Fields of vLLM's EngineArgs, under their own names.")
    sleep: bool = Field(
        default=False,
        description="Free the engine's cache (and weights) while training (GPU; vLLM's sleep mode).",
    )
    logprob_tolerance: PositiveFloat | None = Field(
        default=None,
        description="Largest difference between the engine's and Megatron's log-probs that the first reshard "
        "may show. null: 1e-3 in float32; 1.0, with a mean of 0.05, in 16 bits.",
    )
