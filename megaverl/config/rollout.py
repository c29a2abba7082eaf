"""`rollout`, `environment`, `reshard`: how responses are generated, and with which weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megaverl.config.section import (
    Function,
    NonNegative,
    NonNegativeFloat,
    Passthrough,
    Positive,
    PositiveFloat,
    Section,
    Text,
    known_or_own,
    over,
)

ENGINES = ("vllm", "hf")
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 256}


class SamplingRule(Section):
    """An entry of `rollout.sampling_rules`."""

    under: Positive | None = None
    """For prompts of fewer tokens than this."""
    over: NonNegative | None = None
    """For prompts of more tokens than this."""
    temperature: NonNegativeFloat | None = None
    """Instead of rollout.sampling.temperature. 0: greedy."""
    top_k: NonNegative | None = None
    """Instead of rollout.sampling.top_k: draw from the k likeliest tokens. 0: all."""

    def holds(self, length: int) -> bool:
        """Whether it is for prompts of so many tokens."""
        return (self.under is None or length < self.under) and (self.over is None or length > self.over)

    @property
    def changes(self) -> dict[str, Any]:
        """Sampling fields that are other than `rollout.sampling` has them."""
        changed = {"temperature": self.temperature, "top_k": self.top_k}
        return {name: value for name, value in changed.items() if value is not None}


def short_greedy_long_narrow() -> list[SamplingRule]:
    """The default rules."""
    return [SamplingRule(under=64, temperature=0), SamplingRule(over=512, temperature=0.7, top_k=50)]


class RolloutConfig(Section):
    """`rollout`."""

    engine: Annotated[str, known_or_own(ENGINES, "module:function")] = "vllm"
    """vllm; hf: plain transformers, slow, for tests and for comparison; or your own as module:function, see
    docs/extend/engine.md."""
    tp: Positive = 1
    """Tensor-parallel size of an engine; the world holds world / tp replicas."""
    sampling: Annotated[Passthrough, over(SAMPLING)] = SAMPLING
    """Fields of vLLM's SamplingParams, under their own names."""
    adaptive_sampling: bool = False
    """Draw the responses that train by the length of their prompt, as sampling_rules say; log-probs are then of each
    sample's own distribution, the trainer's as well."""
    sampling_rules: list[SamplingRule] = short_greedy_long_narrow()
    """With adaptive_sampling: the first rule that holds for a prompt; without one, rollout.sampling."""
    function: Function | None = None
    """Your own way to generate, as module:function: called with the engine's generate, prompts, sampling and seeds, it
    returns the responses that train. null: one call of the engine."""
    vllm: Passthrough = {}
    """Fields of vLLM's EngineArgs, under their own names."""
    sleep: bool = False
    """Free the engine's cache (and weights) while training (GPU; vLLM's sleep mode)."""
    logprob_tolerance: PositiveFloat | None = None
    """Largest difference between the engine's and Megatron's log-probs of a token, in nats, at the first comparison
    after a start; a larger one stops the run. null: 1e-3 in float32 on a CPU. Elsewhere mean and 99.9th percentile are
    warned of where rounding does not explain them, and a mean above 0.5 stops the run."""
    async_rollout: bool = False
    """Generate for the next steps while the actor trains; the engines need ranks of their own (placement.rollout)."""
    max_staleness: NonNegative = 1
    """With async_rollout: how many updates the weights that generate a step may be behind it. 0: as without."""
    use_dynamic_batching: bool = False
    """Choose at every generation how many sequences are worked on at once, by the memory for their keys and values:
    vLLM's free cache, or memory_budget_mb; shown as rollout/sequences_in_flight."""
    min_sequences: Positive = 1
    """With use_dynamic_batching: at least so many."""
    max_sequences: Positive = 256
    """With use_dynamic_batching: at most so many."""
    memory_budget_mb: Positive | None = None
    """With use_dynamic_batching and rollout.engine=hf: memory for keys and values. null: half of the free memory of the
    device that has the least; measured again when less than that is left, and kept on resume."""


class EnvironmentConfig(Section):
    """`environment`: what answers the model's turns."""

    name: Text | None = None
    """tools, guess, signals, or a class of your own as module:object. null: one response to each prompt."""
    options: Passthrough = {}
    """Keyword arguments of the environment."""
    agents: Literal["shared", "own"] = "shared"
    """Of a game. shared: one actor plays everybody, and the critic has a value head for each. own: each agent has an
    actor and a critic of its own (IPPO); they take turns on one engine."""
    max_turns: Positive = 8
    """Most turns of an agent in one episode."""
    max_turn_tokens: Positive | None = None
    """Most tokens of one turn; rollout.sampling.max_tokens is for all turns and answers of an episode together. null:
    that over max_turns."""


class ReshardConfig(Section):
    """`reshard`."""

    bucket_mb: Positive = 64
    """MiB of buffer for each of sending and receiving; all the extra memory of a reshard."""
    alias: Literal["auto", "never"] = "auto"
    """auto: an engine's weight is the actor's own storage where layout and dtype agree. never: always a copy, as an
    actor that is moved out of device memory between steps needs."""
    ipc: Literal["auto", "never"] = "auto"
    """auto: processes of one node read each other's memory where they can (CUDA IPC; on a CPU Linux's
    process_vm_readv). never: all that travels goes through the process group."""
    overlap: bool = False
    """Move the next weights into a second set of the engine's weights, in the background; implies alias: never. Every
    loop of this version waits for the move at once: it costs the memory of the second set and hides nothing."""
    check_every: Annotated[int, Field(ge=-1)] = 0
    """Reshards between comparisons of fingerprints of all weights on both sides; 0: the first only. -1: never."""
    timeout_minutes: PositiveFloat | None = None
    """How long a rank waits for another in a reshard before it stops. null: run.timeout_minutes."""
    folder: Text | None = None
    """Shared folder through which weights go between nodes that have no fast network. null: none."""
