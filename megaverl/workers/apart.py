"""The actor and the engines on ranks of their own: each side of the reshard where the other is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.roles import LoraConfig
from megaverl.distributed.grid import GridShape
from megaverl.errors import RolloutError
from megaverl.models.architectures import weights_of
from megaverl.models.build import layers_per_stage, uses_transformer_engine
from megaverl.models.options import padded_vocab_size, transformer_config
from megaverl.rollout.engine import Generation, InFlight, Sampling, Told
from megaverl.sharding.layout import EMPTY, Layout
from megaverl.sharding.low_rank import low_ranks
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec

LayoutOf = Callable[[int], Layout]


@dataclass(frozen=True)
class Between:
    """The ranks that take part in a reshard from one world to another.

    Attributes:
        group: all of them; its ranks are their places in `members`.
        members, actor, rollout: ranks of the job.
        node_of: of a member, by its place.
    """

    group: dist.ProcessGroup
    members: tuple[int, ...]
    actor: tuple[int, ...]
    rollout: tuple[int, ...]
    node_of: Callable[[int], int]

    def from_actor(self, layout_of: LayoutOf) -> LayoutOf:
        """A member's place -> what it holds of the actor: by its place among the actor's ranks, or nothing."""
        return self._side(self.actor, layout_of)

    def to_engines(self, layout_of: LayoutOf) -> LayoutOf:
        """A member's place -> what it holds of an engine."""
        return self._side(self.rollout, layout_of)

    def _side(self, ranks: Sequence[int], layout_of: LayoutOf) -> LayoutOf:
        places = {self.members.index(rank): number for number, rank in enumerate(ranks)}
        return lambda place: layout_of(places[place]) if place in places else EMPTY


def actor_seen_from(
    between: Between,
    spec: ModelSpec,
    shape: GridShape,
    dtype: torch.dtype,
    options: Any,
    lora: LoraConfig | None = None,
) -> Any:
    """What stands for the actor on ranks that have none: its layouts, as a MegatronModel there says them."""
    config = transformer_config(spec, shape, dtype, options)
    layouts = megatron_layouts(
        weights_of(spec),
        spec,
        shape,
        padded_vocab_size=padded_vocab_size(spec.vocab_size, shape.tp),
        transformer_engine=uses_transformer_engine(),
        layer_split=layers_per_stage(config, shape),
    )
    return ActorElsewhere(between.from_actor(layouts), config, None if lora is None else AdaptersElsewhere(spec, lora))


class ActorElsewhere:
    """In a MegatronModel's place, for a Rollout whose weights come from other ranks: it holds none."""

    leaves = False
    parameters: Mapping[str, torch.Tensor] = {}

    def __init__(self, layout_of: LayoutOf, config: Any, adapters: AdaptersElsewhere | None) -> None:
        self.layout_of, self.config, self.adapters = layout_of, config, adapters
        self.resident: AbstractContextManager[Any] = nullcontext()


class AdaptersElsewhere:
    """In the place of a MegatronModel's adapters: which there are, so that an engine can have them merged."""

    parameters: Mapping[str, torch.Tensor] = {}

    def __init__(self, spec: ModelSpec, lora: LoraConfig) -> None:
        self.low_ranks = low_ranks(weights_of(spec), lora.targets, lora.rank, "actor.lora")
        self.scaling = lora.alpha / lora.rank


class SeenFrom:
    """A MegatronModel under the layouts of another group of ranks, for a Rollout whose engines are elsewhere."""

    def __init__(self, model: Any, layout_of: LayoutOf) -> None:
        self._model, self.layout_of = model, layout_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class EngineElsewhere:
    """In an engine's place on the actor's ranks: it has no weights, and nothing to say."""

    tp_size, tp_rank, replica, num_replicas = 1, 0, 0, 1
    may_rebind = True
    max_model_len = 0
    in_flight: InFlight | None = None
    told: Told | None = None

    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {}

    def layouts(self, weights: Sequence[Any], spec: ModelSpec) -> LayoutOf:
        return lambda rank: EMPTY

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Generation]:
        raise RolloutError("the engines are on other ranks (placement.rollout)")

    def reset_prefix_cache(self) -> None:
        """Nothing is cached here."""

    def sleep(self) -> None:
        """Nothing is held here."""

    def wake_up(self) -> None:
        """Nothing sleeps here."""

    def close(self) -> None:
        """Nothing is to be freed."""


class Elsewhere:
    """A role that the run has, on other ranks; using it here is a mistake of the program."""

    def __init__(self, role: str) -> None:
        self.__dict__["_role"] = role

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"this rank has no {self._role}: asked for its '{name}'")


class FilledByOthers(Elsewhere):
    """The engines, on ranks of an actor whose weights they do not take: another island's, which has the same."""

    weight_version = 0

    def source_changes(self) -> None:
        """Nothing of this rank's is shared."""
