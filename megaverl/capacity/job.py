"""A configuration as roles on ranks: each with a grid, a model and the layout of every one of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megaverl.capacity.buffers import ITEMSIZE
from megaverl.capacity.machine import Machine
from megaverl.capacity.stages import layer_split, padded_vocab_size
from megaverl.config import Config, InvalidConfig
from megaverl.config.grids import grid_mistakes
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.layout.layout import Layout
from megaverl.layout.megatron import megatron_layouts
from megaverl.layout.vllm import vllm_layouts
from megaverl.models.architectures import weights_of
from megaverl.models.spec import ModelSpec
from megaverl.parallel.grid import GridShape


@dataclass(frozen=True)
class Role:
    """A Megatron model on its ranks.

    Attributes:
        ranks: of the world; the grid counts them from 0.
        split: decoder layers of every (virtual) stage in model order.
        layout_of: rank in the grid -> what it holds.
    """

    name: str
    ranks: range
    grid: GridShape
    spec: ModelSpec
    config: GridConfig
    split: tuple[int, ...]
    layout_of: Callable[[int], Layout]
    value_head: bool = False

    @property
    def trained(self) -> TrainedConfig | None:
        """Its settings as a role with an optimizer, or None."""
        return self.config if isinstance(self.config, TrainedConfig) else None

    def layers(self, stage: int) -> tuple[int, int]:
        """(dense, mixture-of-experts) decoder layers that a rank of this pipeline stage holds."""
        num_dense = self.spec.moe.num_dense_layers if self.spec.moe else self.spec.num_layers
        dense = moe = first = 0
        for number, count in enumerate(self.split):
            if number % self.grid.pp == stage:
                held = max(0, min(num_dense - first, count))
                dense, moe = dense + held, moe + count - held
            first += count
        return dense, moe


@dataclass(frozen=True)
class RolloutRole:
    """Engines of `tp` neighbouring ranks each."""

    ranks: range
    tp: int
    expert_parallel: bool
    layout_of: Callable[[int], Layout]


@dataclass(frozen=True)
class Job:
    """All roles of a run; today every role has every rank."""

    config: Config
    spec: ModelSpec
    machine: Machine
    world: int
    roles: tuple[Role, ...]
    rollout: RolloutRole

    @property
    def itemsize(self) -> int:
        """Bytes of a weight: `model.dtype`, and auto is what a GPU takes."""
        return ITEMSIZE["bfloat16" if self.config.model.dtype == "auto" else self.config.model.dtype]

    @property
    def aliases(self) -> bool:
        """Whether engine weights may be the actor's own storage."""
        return self.config.reshard.alias == "auto" and not self.config.reshard.overlap

    @property
    def actor(self) -> Role:
        return self.roles[0]


def make_job(config: Config, spec: ModelSpec, world: int, machine: Machine | None = None) -> Job:
    """Lay the configuration's roles over `world` ranks.

    Raises:
        InvalidConfig: grids that the model or the world does not divide; all of them.
        GridError: what only shows when layers and heads are dealt out.
    """
    mistakes = list(grid_mistakes(config, "train", spec, world))
    if mistakes:
        raise InvalidConfig(mistakes, "the configuration, the model and the world")
    sections = {"actor": config.actor} | ({"critic": config.critic} if config.uses_critic else {})
    roles = [_role(name, section, spec, world) for name, section in sections.items()]
    if config.uses_reference:
        roles.append(_role("reference", config.reference, spec, world))
    expert_parallel = spec.moe is not None and bool(config.rollout.vllm.get("enable_expert_parallel", False))
    layouts = _engine_layouts(spec, config.rollout.tp, expert_parallel)
    rollout = RolloutRole(range(world), config.rollout.tp, expert_parallel, layouts)
    return Job(config, spec, machine or Machine(), world, tuple(roles), rollout)


def _role(name: str, config: GridConfig, spec: ModelSpec, world: int) -> Role:
    path = getattr(config, "path", None)
    if path and (Path(path) / "config.json").is_file():
        spec = ModelSpec.from_folder(path)
    value_head = name == "critic"
    grid = GridShape.fit(
        world, tp=config.tp, cp=config.cp, ep=config.ep, pp=config.pp, vpp=config.vpp, etp=config.etp, role=name
    )
    split = tuple(layer_split(spec.num_layers, grid.pp, grid.vpp, config.megatron, name))
    layouts = _model_layouts(spec, grid, split, value_head)
    return Role(name, range(world), grid, spec, config, split, layouts, value_head)


# Kept, since a search for settings that fit asks for the same ones again and again.
@lru_cache(maxsize=64)
def _model_layouts(
    spec: ModelSpec, grid: GridShape, split: tuple[int, ...], value_head: bool
) -> Callable[[int], Layout]:
    weights = weights_of(spec, value_head=value_head)
    padded = padded_vocab_size(spec.vocab_size, grid.tp)
    return megatron_layouts(weights, spec, grid, padded_vocab_size=padded, layer_split=split)


@lru_cache(maxsize=16)
def _engine_layouts(spec: ModelSpec, tp: int, expert_parallel: bool) -> Callable[[int], Layout]:
    return vllm_layouts(weights_of(spec), spec, tp, expert_parallel=expert_parallel)
