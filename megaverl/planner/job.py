"""A configuration laid out on ranks: every role with its grid, its model and the layout of each of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from megaverl.config import Config, InvalidConfig
from megaverl.config.global_model import global_section
from megaverl.config.grids import (
    OfflineCommand,
    grid_mistakes,
    is_placed,
    resolve_placement,
    role_grids,
    used_roles,
)
from megaverl.config.passthrough import recompute_fields
from megaverl.config.roles import GridConfig, TrainedConfig
from megaverl.config.rollout_and_draft import read_draft
from megaverl.config.signatures import signature_of
from megaverl.distributed.grid import GridShape
from megaverl.distributed.placement import Node, ResolvedPlacement
from megaverl.distributed.placement_resolver import resolve
from megaverl.errors import ConfigError, ModelError
from megaverl.models.architectures import weights_of
from megaverl.models.folder import read_model
from megaverl.models.lora import LowRank, low_ranks
from megaverl.outside import read_json_file
from megaverl.planner.buffers import ITEMSIZE
from megaverl.planner.fsdp import Shards, described, fsdp_layouts, shards_of
from megaverl.planner.stages import layer_split, padded_vocab_size
from megaverl.sharding.layout import Layout, even_layout
from megaverl.sharding.megatron import megatron_layouts
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.vllm import vllm_layouts
from megaverl.sharding.weight import shapes_of


@dataclass(frozen=True)
class Role:
    """A model on its ranks.

    Attributes:
        ranks: global ranks, ascending, of all islands.
        islands: number of replica groups that the ranks are split into. Each group has a grid of its own.
        split: decoder layers of every (virtual) stage in model order.
        layout_of: rank in the grid -> layout of its weights.
        shards: how weights are sharded with engine: fsdp; otherwise None.
        part: with `coordinator.aggregates: gradients`, which part of a trained role this is: the replicas on islands,
            which have no optimizer, or the global model, which has one and computes no gradients.
    """

    name: str
    ranks: tuple[int, ...]
    grid: GridShape
    spec: ModelSpec
    config: GridConfig
    split: tuple[int, ...]
    layout_of: Callable[[int], Layout]
    value_head: bool = False
    islands: int = 1
    shards: Shards | None = None
    part: Literal["whole", "replica", "global"] = "whole"

    def place(self, rank: int) -> int | None:
        """Return the rank's index in its grid, or None if it has no part in the role."""
        return self._places.get(rank)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {
            rank: number % self.grid.world_size
            for number, rank in enumerate(self.ranks)
        }

    @property
    def trained(self) -> TrainedConfig | None:
        """The role's settings if it has an optimizer, else None."""
        return self.config if isinstance(self.config, TrainedConfig) else None

    @property
    def ddp(self) -> dict[str, Any]:
        """Fields of megatron-core's DistributedDataParallelConfig. A replica has no optimizer that could be sharded."""
        assert self.trained is not None
        if self.part != "replica":
            return self.trained.ddp
        return {**self.trained.ddp, "use_distributed_optimizer": False}

    @property
    def adapters(self) -> dict[str, LowRank]:
        """The role's LoRA adapters by the name of the weight; empty if all weights are trained, or none.

        Raises:
            ModelError: `lora.targets` names a weight that the model does not have.
        """
        lora = self.trained.lora if self.trained is not None else None
        if lora is None:
            return {}
        weights = described(self.spec, self.value_head)
        return low_ranks(weights, lora.targets, lora.rank, f"{self.name}.lora")

    @property
    def recompute(self) -> dict[str, Any]:
        """megatron-core's fields: those that `activation_checkpointing` stands for, overridden by the role's own."""
        if self.trained is None:
            return self.config.megatron
        kind = self.trained.activation_checkpointing
        # `hf_model.checkpoint_block` keeps the results of all products and repeats only
        # the work between them.
        if self.shards is not None and kind == "selective":
            return {
                "recompute_granularity": "selective",
                "recompute_modules": ["layernorm"],
            }
        dense = self.spec.moe is None or bool(self.spec.count_layers("mlp"))
        fields = recompute_fields(
            kind,
            dense=dense,
            experts=self.spec.moe is not None,
            fused_attention=True,
        )
        return fields | self.config.megatron

    def layers(self, stage: int) -> tuple[int, int]:
        """Return the numbers of (dense, mixture-of-experts) decoder layers on a rank of this pipeline stage."""
        routed = self.spec.routed_layers
        dense = moe = first = 0
        for number, count in enumerate(self.split):
            if number % self.grid.pp == stage:
                held = sum(routed[first : first + count])
                dense, moe = dense + count - held, moe + held
            first += count
        return dense, moe


@dataclass(frozen=True)
class RolloutRole:
    """Rollout engines, each on `tp` neighbouring ranks."""

    ranks: tuple[int, ...]
    tp: int
    expert_parallel: bool
    layout_of: Callable[[int], Layout]

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self.ranks) // self.tp


# Beginning of the name of a role's global model.
GLOBAL = "global_"

# Inputs of advantage estimators that need only the rewards of a group, not every token
# of all samples.
OF_GROUPS = {"rewards", "group_ids", "response_mask"}


@dataclass(frozen=True)
class PlannedJob:
    """All roles of a run, laid out on its ranks.

    Attributes:
        world: number of ranks of the job.
        placement: ranks of each role.
    """

    config: Config
    spec: ModelSpec
    machine: Machine
    world: int
    roles: tuple[Role, ...]
    rollout: RolloutRole
    placement: ResolvedPlacement

    @property
    def itemsize(self) -> int:
        """Bytes of a weight in `model.dtype`; `auto` counts as bfloat16, its meaning on GPUs."""
        return ITEMSIZE[
            "bfloat16" if self.config.model.dtype == "auto" else self.config.model.dtype
        ]

    @property
    def aliases(self) -> bool:
        """True if engine weights may share the actor's storage."""
        away = self.config.actor.offload.parameters
        shared = self.placement.colocated("actor", "rollout")
        # FSDP keeps float32 weights, so a 16-bit engine cannot read them in place.
        alike = (
            self.config.actor.engine == "megatron"
            or self.itemsize == ITEMSIZE["float32"]
        )
        return shared and alike and self.config.reshard.alias == "auto" and not away

    @property
    def actor(self) -> Role:
        """The actor, which is always the first role."""
        return self.roles[0]

    def role(self, name: str) -> Role:
        """Return the role of this name."""
        return next(role for role in self.roles if role.name == name)

    @property
    def weight_source(self) -> Role:
        """The role whose weights the engines receive: the actor, or its global model on the coordinator's ranks."""
        return self.global_models.get("actor", self.actor)

    @property
    def global_models(self) -> dict[str, Role]:
        """Global models on the coordinator's ranks, by the role whose optimizer they have."""
        return {
            role.name.removeprefix(GLOBAL): role
            for role in self.roles
            if role.part == "global"
        }

    @cached_property
    def opponent_bytes(self) -> int:
        """Bytes of the second copy of the reference that each engine's rank holds under `algorithm.opponent_beta`."""
        if self.config.algorithm.opponent_beta is None:
            return 0
        spec = _spec_of(
            self.config.reference.path, self.spec, self.config.reference.engine
        )
        return sum(prod(weight.shape) for weight in described(spec)) * self.itemsize

    def field_bytes(self, rank: int) -> float:
        """Return an upper bound of the bytes that a step's per-token fields take on a rank until the updates are over.

        Fields are log-probs, values, advantages and returns, with 4 bytes for each
        token of the longest response. Critic and reference also hold the fields of the
        steps that they are ahead of the actor (`trainer/schedule.py`).
        """
        config = self.config
        roles = [role for role in self.roles if role.place(rank) is not None]
        names = {role.name for role in roles}
        samples = config.rows_per_step
        # The actor's rank also receives what critic and reference compute.
        if "actor" in names:
            fields = 2 + config.uses_ref_log_probs + 2 * config.uses_critic
        elif "critic" in names:
            fields = 3
        elif "reference" in names:
            fields = 1
        else:
            fields = 0
        if config.rollout.async_rollout and "actor" not in names:
            ahead = config.rollout.max_staleness - (rank not in self.rollout.ranks)
            # A critic's update waits for the actor's advantages, so it is at most one
            # step ahead.
            if "critic" in names:
                ahead = min(ahead, 1)
            fields += max(0, ahead) * len(names & {"critic", "reference"})
        signature = signature_of(
            "advantage_estimators", config.algorithm.advantage_name
        )
        made_together = (
            config.environment.name is not None or config.rollout.function is not None
        )
        if (
            self.placement.is_colocated
            and set(signature.inputs) <= OF_GROUPS
            and not (made_together or config.samples_in_rounds)
        ):
            # A rank then holds only its equal part of the samples, and those that each
            # role works on (`trainer/sample_routing.py`).
            equal_part = -(-samples // self.world)
            worked_on = sum(-(-samples // role.grid.dp) for role in roles)
            samples = min(samples, equal_part + worked_on)
        return 4.0 * fields * samples * config.max_response_tokens

    def stage_ranks(self) -> list[int]:
        """List the first rank of every pipeline stage of every role. Other ranks of a stage differ only by padding."""
        ranks = {self.rollout.ranks[0]}
        for role in self.roles:
            for stage in range(role.grid.pp):
                ranks.add(role.ranks[role.grid.rank(pp=stage)])
        return sorted(ranks)


def find_spec(
    config: Config, model_config: str | None = None, *, fallback: str | None = None
) -> ModelSpec:
    """Read the model that a plan is for, from `--model-config`, the model folder, or the recipe's `model.config`.

    Args:
        model_config: `--model-config`.
        fallback: path of the recipe, which its `model.config` is relative to.

    Raises:
        ConfigError: none of them exists, or the file cannot be read.
    """
    read = ModelSpec.outline if config.actor.engine == "fsdp" else ModelSpec.from_folder
    if model_config is not None:
        spec = _read_spec("--model-config", Path(model_config), config.actor.engine)
    elif (Path(config.model.path) / "config.json").is_file():
        spec = read(config.model.path)
    elif config.model.config is not None:
        spec = _read_spec(
            "model.config",
            Path(fallback or "").parent / config.model.config,
            config.actor.engine,
        )
    else:
        raise _no_model(config)
    return replace(spec, trusts_code=config.model.trust_remote_code)


def _no_model(config: Config) -> ConfigError:
    return ConfigError(
        f"model.path: {config.model.path} is not here. Give the model's config.json: --model-config FILE, or "
        "model.config in the recipe (configs/llama3_70b/config.json is one)."
    )


def _read_spec(key: str, path: Path, engine: str) -> ModelSpec:
    if not path.is_file():
        raise ConfigError(
            f"{key}: {path} does not exist. Give the path of a model's config.json."
        )
    try:
        config = read_json_file(path, not_finite=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} is not valid JSON ({error}).") from error
    read = ModelSpec.outline_of if engine == "fsdp" else ModelSpec.from_config
    return read(config, source=str(path))


def make_job(
    config: Config,
    spec: ModelSpec,
    world: int,
    machine: Machine | None = None,
    *,
    deal_later: bool = False,
    builds_engine: bool = True,
) -> PlannedJob:
    """Lay out the configuration's roles on `world` ranks.

    Args:
        deal_later: compute layouts only when one is asked for. A search drops most jobs before that.
        builds_engine: read the engine's layout of a model without rules from vLLM's own module, whose import takes half
            a minute. False: count equal parts of the weights, which is the least that an engine's rank can hold.

    Raises:
        InvalidConfig: grids that the model or the number of ranks does not divide; all of them at once.
        GridError: layers or heads cannot be divided over the grid.
    """
    mistakes = list(grid_mistakes(config, "train", spec, world))
    if mistakes:
        raise InvalidConfig(mistakes, "the configuration, the model and the world")
    machine = machine or Machine()
    placement = _placement(config, world, machine)
    sections = {"actor": config.actor} | (
        {"critic": config.critic} if config.uses_critic else {}
    )
    roles = [
        _role(name, section, spec, placement, machine, value_head=name == "critic")
        for name, section in sections.items()
    ]
    if config.aggregates_gradients:
        roles = list(_with_global_models(roles, config, placement, machine))
    if config.uses_reference and not config.reference_is_actor:
        roles.append(_role("reference", config.reference, spec, placement, machine))
    roles += _reward_models(config, spec, placement, machine)
    # The actor's model cannot stand for a draft model that is not on this machine, because
    # draft models are much smaller.
    if config.draft.train and read_draft(config) is not None:
        model = _spec_of(config.draft_path, spec, config.draft.engine)
        roles.append(
            _role("draft", config.draft, model, placement, machine, on="actor")
        )
    may_have_experts = spec.moe is not None or not spec.is_tabled
    expert_parallel = may_have_experts and bool(
        config.rollout.vllm.get("enable_expert_parallel", False)
    )
    dealt = (
        spec,
        config.rollout.tp,
        expert_parallel,
        config.rollout.vllm.get("quantization"),
    )
    layouts = _Dealt(
        _engine_layouts if spec.is_tabled or builds_engine else _equal_parts, dealt
    )
    if not deal_later:
        for role in roles:
            role.layout_of(0)
        layouts(0)
    rollout = RolloutRole(
        placement.ranks["rollout"], config.rollout.tp, expert_parallel, layouts
    )
    return PlannedJob(config, spec, machine, world, tuple(roles), rollout, placement)


def make_offline_job(
    config: Config,
    command: OfflineCommand,
    spec: ModelSpec,
    world: int,
    machine: Machine | None = None,
) -> PlannedJob:
    """Lay out the models of a command that trains on a data set, as a job whose steps have no rollouts.

    Args:
        config: with the stage's samples in place of those of a training step (`planner.offline`).

    Raises:
        InvalidConfig, GridError: as in `make_job`.
    """
    mistakes = list(grid_mistakes(config, command, spec, world))
    if mistakes:
        raise InvalidConfig(mistakes, "the configuration, the model and the world")
    machine = machine or Machine()
    names = used_roles(config, command)
    # All models are on all ranks.
    placement = _everywhere(
        world, ("actor", "rollout", "reward"), _nodes(config, world, machine)
    )
    if config.reference_is_actor and "reference" in names:
        names.remove("reference")
    roles = tuple(
        _role(
            name,
            getattr(config, name),
            spec,
            placement,
            machine,
            on="actor",
            value_head=name == "reward_model",
        )
        for name in names
    )
    rollout = RolloutRole((), 1, False, _Dealt(_equal_parts, (spec, 1, False, None)))
    return PlannedJob(config, spec, machine, world, roles, rollout, placement)


def _with_global_models(
    roles: Sequence[Role],
    config: Config,
    placement: ResolvedPlacement,
    machine: Machine,
) -> Iterator[Role]:
    """Yield the trained roles, replicas marked as such, then the global models of the replicas."""
    replicas = [role for role in roles if placement.colocated(role.name, "actor")]
    for role in roles:
        yield replace(role, part="replica") if role in replicas else role
    for role in replicas:
        assert role.trained is not None
        section = global_section(role.trained, config.coordinator)
        model = _role(
            GLOBAL + role.name,
            section,
            role.spec,
            placement,
            machine,
            on="coordinator",
            value_head=role.value_head,
        )
        yield replace(model, part="global")


def _placement(config: Config, world: int, machine: Machine) -> ResolvedPlacement:
    """Return the ranks of each role, on nodes that have the names of `placement`, or else their numbers."""
    nodes = _nodes(config, world, machine)
    if is_placed(config):
        return resolve_placement(
            config.placement,
            role_grids(config, used_roles(config, "train")),
            world,
            list(nodes),
        )
    return _everywhere(
        world, (*used_roles(config, "train"), "rollout", "reward"), nodes
    )


def _nodes(config: Config, world: int, machine: Machine) -> tuple[Node, ...]:
    """Return the nodes of the job: full ones, and a last one with the remaining ranks."""
    sizes = [
        min(machine.gpus_per_node, world - first)
        for first in range(0, world, machine.gpus_per_node)
    ]
    names = _node_names(config, len(sizes))
    return tuple(Node(name, size) for name, size in zip(names, sizes, strict=True))


@lru_cache(maxsize=8)
def _everywhere(
    world: int, roles: tuple[str, ...], nodes: tuple[Node, ...]
) -> ResolvedPlacement:
    return resolve({}, world, dict.fromkeys(roles), list(nodes))


def _node_names(config: Config, count: int) -> list[str]:
    """Name the nodes. Names in `placement` go to the first nodes that it does not refer
    to by number: all nodes are alike.
    """
    wanted, _ = config.placement.wanted()
    wanted_nodes = [node for place in wanted.values() for node in place.nodes or ()]
    named = dict.fromkeys(node for node in wanted_nodes if isinstance(node, str))
    unnumbered = (number for number in range(count) if number not in wanted_nodes)
    places = dict(zip(unnumbered, named, strict=False))
    return [places.get(number, f"node {number}") for number in range(count)]


def _reward_models(
    config: Config, spec: ModelSpec, placement: ResolvedPlacement, machine: Machine
) -> Iterator[Role]:
    """Yield reward models that run on Megatron: those in `reward`, and PRIME's, which has no value head."""
    section = config.reward_model
    scoring = GridConfig(
        **{name: getattr(section, name) for name in GridConfig.model_fields}
    )
    is_implicit = config.estimator_reads("implicit_rewards")
    if is_implicit:
        yield _role("reward_model", section, spec, placement, machine, on="actor")
    for entry in config.reward:
        if entry.path is not None and entry.engine == "megatron":
            trained = config.trains_reward_model and not is_implicit
            model = _spec_of(entry.path, spec, entry.engine)
            chosen = section if trained else scoring
            yield _role(
                entry.label,
                chosen,
                model,
                placement,
                machine,
                on="reward",
                value_head=True,
            )


def _spec_of(path: str | None, spec: ModelSpec, engine: str) -> ModelSpec:
    """Read the model of a role's own folder. If the folder does not exist yet, the actor's model stands for it."""
    folder = Path(path) if path else None
    if folder is None or not (folder / "config.json").is_file():
        return spec
    try:
        return read_model(folder)[1]
    except ModelError:
        if engine != "fsdp":
            raise
        return replace(ModelSpec.outline(folder), trusts_code=spec.trusts_code)


def _role(
    name: str,
    config: GridConfig,
    spec: ModelSpec,
    placement: ResolvedPlacement,
    machine: Machine,
    *,
    on: str = "",
    value_head: bool = False,
) -> Role:
    """Return a role on its ranks.

    Args:
        on: the role whose ranks it uses; empty: the ranks that the placement gives to `name`.
    """
    spec, ranks = (
        _spec_of(getattr(config, "path", None), spec, config.engine),
        placement.ranks[on or name],
    )
    islands = len(placement.islands) if placement.colocated(on or name, "actor") else 1
    sizes = {
        size: getattr(config, size) for size in ("tp", "cp", "ep", "pp", "vpp", "etp")
    }
    grid = GridShape.fit(len(ranks) // islands, **sizes, role=name)
    if config.engine == "fsdp":
        shards = shards_of(
            config.fsdp, grid.dp * grid.cp, max(machine.gpus_per_node // grid.tp, 1)
        )
        held = fsdp_layouts(spec, value_head, shards.size, grid.tp)
        return Role(
            name,
            ranks,
            grid,
            spec,
            config,
            (spec.num_layers,),
            held,
            value_head,
            islands,
            shards,
        )
    split = tuple(
        layer_split(spec.num_layers, grid.pp, grid.vpp, config.megatron, name)
    )
    layouts = _Dealt(_model_layouts, (spec, grid, split, value_head))
    return Role(name, ranks, grid, spec, config, split, layouts, value_head, islands)


@dataclass(frozen=True)
class _Dealt:
    """Layouts of all ranks, computed when the first one is asked for.

    Caches compare instances by value, so that equal grids share one entry.
    """

    deal: Callable[..., Callable[[int], Layout]]
    of: tuple[Any, ...]

    @cached_property
    def _layouts(self) -> Callable[[int], Layout]:
        return self.deal(*self.of)

    def __call__(self, rank: int) -> Layout:
        return self._layouts(rank)


# A search for settings that fit asks for the same layouts again and again.
@lru_cache(maxsize=64)
def _model_layouts(
    spec: ModelSpec, grid: GridShape, split: tuple[int, ...], value_head: bool
) -> Callable[[int], Layout]:
    weights = weights_of(spec, value_head=value_head)
    padded = padded_vocab_size(spec.vocab_size, grid.tp)
    return megatron_layouts(
        weights, spec, grid, padded_vocab_size=padded, layer_split=split
    )


@lru_cache(maxsize=16)
def _engine_layouts(
    spec: ModelSpec, tp: int, expert_parallel: bool, quantization: str | None
) -> Callable[[int], Layout]:
    weights = described(spec)
    if spec.is_tabled:
        return vllm_layouts(
            weights,
            spec,
            tp,
            expert_parallel=expert_parallel,
            quantization=quantization,
        )
    # Only a model without rules needs vLLM, whose import takes half a minute.
    from megaverl.rollout.vllm_layouts import planned_layouts

    options = {
        "enable_expert_parallel": expert_parallel,
        "trust_remote_code": spec.trusts_code,
    }
    return planned_layouts(spec.source, tp, shapes_of(weights), **options)


@lru_cache(maxsize=16)
def _equal_parts(
    spec: ModelSpec, tp: int, expert_parallel: bool, quantization: str | None
) -> Callable[[int], Layout]:
    weights = described(spec)
    return lambda rank: even_layout(weights, tp, rank)


GB = 1e9


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes. Bytes and bytes per second are decimal, per GPU and in one direction.

    Attributes:
        gpus_per_node: neighbouring ranks share a node and its NVLink.
        memory: memory of a GPU. An "80 GB" H100 shows 85.5e9 bytes, of which the default counts 85e9.
        reserve: memory that roles and engines cannot use: CUDA's context, NCCL's buffers and the like; None: counted
            part by part for each rank (`megaverl.planner.reserve`).
        disk: bytes per second between a node and the file system of checkpoints.
        on_gpus: False where ranks are processes on CPU cores, which have other defaults.
        nvlink, network, hbm: bandwidths; NVLink 4 gives 450 GB/s each way, a 400 Gbit/s adapter 50 GB/s.
    """

    gpus_per_node: int = 8
    memory: float = 85 * GB
    reserve: float | None = None
    nvlink: float = 450 * GB
    network: float = 50 * GB
    hbm: float = 3350 * GB
    disk: float = 2 * GB
    on_gpus: bool = True

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.gpus_per_node
