"""Checks of the roles' parallel grids and placement against the model and the number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megaverl.config.errors import ConfigIssue, InvalidConfig
from megaverl.config.global_model import (
    global_model_issues,
    global_section,
    replica_issues,
)
from megaverl.config.roles import (
    ActorConfig,
    GridConfig,
    PlacementConfig,
    RolloutConfig,
)
from megaverl.config.rollout_and_draft import read_draft
from megaverl.config.schema import Config
from megaverl.config.wording import divisors, listed
from megaverl.distributed.grid import Sizes, grid_problem
from megaverl.distributed.placement import (
    ROLES,
    Node,
    PlacementError,
    ResolvedPlacement,
)
from megaverl.distributed.placement_resolver import problems_of, resolve
from megaverl.distributed.placement_resolver import (
    smallest_world as smallest_placed_world,
)
from megaverl.sharding.model_spec import (
    ModelSpec,
    misfits,
    why_no_drafts,
    why_not_in_transformers,
    why_not_in_vllm,
    why_not_quantised,
    why_rows_not_cut,
)
from megaverl.sharding.quantization import (
    GROUP_FORMATS,
    straddled_groups,
    why_no_groups,
)

if TYPE_CHECKING:
    from megaverl.distributed.grid import GridSizes


# Commands that run the training loop with rollouts, and so build every role.
REINFORCING = ("train", "quickstart")
# Commands that train on given data and generate nothing.
OfflineCommand = Literal["sft", "dpo", "reward"]
OFFLINE: tuple[OfflineCommand, ...] = ("sft", "dpo", "reward")

# Fields of TransformerConfig that distribute layers unevenly over pipeline stages. With
# one of them the stage count need not divide the number of layers.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


# Environment variable with the roles that this node takes (`--role`).
CLAIMS = "MEGAVERL_ROLE"
# Tokens of a block of vLLM's cache: 32 without a GPU (`platform/vllm_cpu.py`), vLLM's 16
# with one.
LARGEST_DEFAULT_BLOCK = 32


def used_roles(config: Config, command: str) -> list[str]:
    """Return the trained or scoring roles that a command builds. Rollout and rule-based rewards are not among them."""
    if command == "reward":
        return ["reward_model"]
    if command == "dpo":
        return ["actor"] + ["reference"] * config.preference_needs_reference
    if command not in REINFORCING:
        return ["actor"] if command in ("sft", "tinker") else []
    roles = (
        ["actor"]
        + ["critic"] * config.uses_critic
        + ["reference"] * config.uses_reference
    )
    return (
        roles
        + ["reward_model"] * config.uses_reward_model
        + ["draft"] * config.draft.train
    )


def is_placed(config: Config, command: str = "train") -> bool:
    """Return whether roles run on their own ranks, by `placement` or by `--role` of each node.

    Only `megaverl train` supports that.
    """
    is_given = config.placement.is_given or bool(os.environ.get(CLAIMS))
    return command == "train" and is_given and not config.trainer.rollout_only


def megatron_sections(config: Config, command: str) -> dict[str, Any]:
    """Return the sections of the roles that `command` builds on megatron-core, by role."""
    sections = {role: getattr(config, role) for role in used_roles(config, command)}
    return {
        role: section
        for role, section in sections.items()
        if section.engine == "megatron"
    }


def smallest_world(config: Config, command: str = "train") -> int:
    """Return the smallest number of ranks that all grids of the run fill evenly."""
    if is_placed(config, command):
        wanted, _ = config.placement.wanted()
        grids = role_grids(config, used_roles(config, command))
        if size := smallest_placed_world(
            wanted, grids, islands=config.placement.actor_islands
        ):
            return size
    sizes = [1 if command in OFFLINE else config.rollout.tp]
    for role in used_roles(config, command):
        grid: GridConfig = getattr(config, role)
        # The dense grid (tp x cp) and the expert grid (etp x ep) cover the same ranks
        # of a stage, so both must divide them.
        dense = grid.tp * grid.cp
        expert = (grid.etp or grid.tp) * grid.ep
        sizes.append(grid.pp * math.lcm(dense, expert))
    return math.lcm(*sizes)


def grid_mistakes(
    config: Config,
    command: str,
    spec: ModelSpec | None,
    world_size: int | None,
) -> Iterator[ConfigIssue]:
    """Yield mistakes in grids and placement.

    Args:
        spec: the model's sizes, or None if they are not known yet.
        world_size: number of ranks, or None if it is not known yet.
    """
    placed = is_placed(config, command)
    if placed:
        yield from placement_mistakes(
            config.placement,
            role_grids(config, used_roles(config, command)),
            world_size,
        )
        if (placement := _placed(config, command, world_size)) is not None:
            yield from placed_mistakes(config, placement)
    elif command == "train" and config.rollout.async_rollout:
        yield ConfigIssue(
            "rollout.async_rollout",
            "is set, and the engines share the actor's ranks. Give them ranks of their own: placement.rollout.",
        )
    elif command == "quickstart" and config.placement.is_given:
        yield ConfigIssue(
            "placement",
            "is set; the quickstart has all roles on all ranks. Leave it out.",
        )
    roles = used_roles(config, command)
    for role in roles:
        grid: GridConfig = getattr(config, role)
        if grid.engine == "fsdp" and world_size and not placed:
            is_inherited = (
                role != "actor"
                and "actor" in roles
                and grid.engine == config.actor.engine
            )
            yield from _fsdp_against_world(
                config, role, world_size, is_inherited=is_inherited
            )
        # The mistakes of a grid that is the actor's are reported for the actor, if the
        # command builds one.
        has_actors_grid = (
            role != "actor"
            and "actor" in roles
            and _sizes(grid) == _sizes(config.actor)
        )
        if grid.engine == "fsdp":
            if spec and not has_actors_grid:
                yield from _fsdp_against_model(role, grid, spec)
            continue
        is_draft = role == "draft"
        model = read_draft(config) if spec and is_draft else spec
        if model and (is_draft or not has_actors_grid):
            yield from _against_model(role, grid, model)
        if has_actors_grid:
            continue
        if spec and isinstance(grid, ActorConfig) and grid.fake_quantization:
            yield from _rounding_against_model(grid.fake_quantization, grid.tp, spec)
        if world_size and not placed:
            yield from _against_world(role, grid, world_size)
    if spec and not config.model.trust_remote_code:
        yield from _not_in_transformers(config, command, roles, spec.architecture)
    if command in OFFLINE:
        return
    yield from global_model_issues(config, spec)
    if config.aggregates_gradients and spec:
        section = global_section(config.actor, config.coordinator)
        yield from _against_model("coordinator", section, spec)
    if spec and config.rollout.engine == "vllm" and (reason := why_not_in_vllm(spec)):
        text = f"found 'vllm'; of {spec.architecture}, {reason}. Use rollout.engine=hf."
        yield ConfigIssue("rollout.engine", text, involves=("model.path",))
    if spec and spec.is_tabled and config.rollout.engine == "vllm":
        yield from _engine_against_model(config.rollout, spec)
        yield from _blocks_against_model(config.rollout, spec)
        yield from _speculation_against_model(config.rollout, spec)
    if config.rollout.engine == "hf" and config.rollout.tp > 1:
        yield ConfigIssue(
            "rollout.tp",
            f"found {config.rollout.tp}; rollout.engine=hf has no tensor parallelism: use 1.",
        )
    elif world_size and not placed and world_size % config.rollout.tp:
        yield ConfigIssue(
            "rollout.tp",
            f"found {config.rollout.tp}, which does not divide the {world_size} ranks. "
            f"Sizes that fit: {listed(divisors(world_size))}.",
            involves=("run.nproc",),
        )


def _not_in_transformers(
    config: Config, command: str, roles: list[str], architecture: str
) -> Iterator[ConfigIssue]:
    """Yield engines that need transformers' class of the model, if transformers has none."""
    reason = why_not_in_transformers(architecture)
    if not reason:
        return
    engines = {
        role: getattr(config, role).engine
        for role in ("actor", "critic", "reference")
        if role in roles
    }
    for role, engine in engines.items():
        # An engine that is the actor's is reported for the actor.
        if engine == "fsdp" and (role == "actor" or engines.get("actor") != "fsdp"):
            yield ConfigIssue(
                f"{role}.engine", f"found 'fsdp'; {reason}", involves=("model.path",)
            )
    if command not in OFFLINE and config.rollout.engine == "hf":
        yield ConfigIssue(
            "rollout.engine", f"found 'hf'; {reason}", involves=("model.path",)
        )


def placed_mistakes(
    config: Config, placement: ResolvedPlacement
) -> Iterator[ConfigIssue]:
    """Yield mistakes in which roles share ranks: roles that read or update the same state must be colocated."""

    def shares(role: str) -> bool:
        """Return whether a role shares the actor's ranks."""
        return placement.colocated(role, "actor")

    islands = len(placement.islands)
    if config.environment.agents == "own" and not placement.is_colocated:
        message = "is own, several actors on one engine: all roles on the same ranks. Leave it, or the placement, out."
        yield ConfigIssue("environment.agents", message, involves=("placement",))
    if islands > 1:
        yield from _island_mistakes(config, placement)
    if config.trains_reward_model and not placement.is_colocated:
        ranks = placement.ranks["actor"]
        if problem := grid_problem(
            config.reward_model,
            len(ranks),
            f"{len(ranks)} ranks, which are the actor's",
        ):
            yield ConfigIssue("reward_model", problem)
    if config.draft.train and not placement.is_colocated:
        ranks = placement.ranks["actor"]
        text = f"{len(ranks)} ranks, which are the actor's"
        if problem := grid_problem(config.draft, len(ranks), text):
            yield ConfigIssue("draft", problem)
    if config.algorithm.divergence_name is not None and (
        not shares("reference") or islands > 1
    ):
        message = (
            "is not where the actor is, as a whole: algorithm.distillation compares "
            "the teacher's logits with its."
        )
        yield ConfigIssue(
            "placement.reference",
            f"{message} Leave it out.",
            involves=("algorithm.distillation.divergence",),
        )
    is_apart = config.mixes_reward_model and not shares("reward")
    if is_apart:
        message = "are not the actor's ranks, where `mix` trains the reward model. Set placement.reward: actor."
        yield ConfigIssue("placement.reward", message, involves=("mix",))
    needs_reference = config.preference_needs_reference and any(
        entry.update == "preference" for entry in config.mix
    )
    # Updates of `mix` run inside the actor's own step, so every role that they involve
    # must be on the actor's ranks.
    for key, refused, reason in (
        (
            "critic",
            config.uses_critic and not shares("critic"),
            "is decided on together with the actor",
        ),
        (
            "reference",
            needs_reference and not shares("reference"),
            "is read by the loss of pairs beside the actor",
        ),
        ("actor_islands", islands > 1, "each train on a part of every update"),
    ):
        if config.mix and refused:
            message = f"is set, and so is mix, whose updates run on the actor's ranks; what is placed there {reason}."
            yield ConfigIssue(
                f"placement.{key}",
                f"{message} Leave one of the two out.",
                involves=("mix",),
            )


def _island_mistakes(
    config: Config, placement: ResolvedPlacement
) -> Iterator[ConfigIssue]:
    """Yield mistakes that arise only if the actor is split into several islands."""
    count = len(placement.islands)
    if config.aggregates_gradients:
        yield from replica_issues(config, placement)
    if placement.colocated("rollout", "actor"):
        yield ConfigIssue(
            "placement.rollout",
            f"names the actor's ranks, and the actor has {count} islands. Give the engines ranks of their own.",
            involves=("placement.actor_islands",),
        )
    if others := [
        role
        for role in placement.ranks
        if role != "coordinator"
        and not set(placement.ranks[role]).isdisjoint(placement.ranks["coordinator"])
    ]:
        yield ConfigIssue(
            "placement.coordinator",
            f"rank {placement.coordinator} has {', '.join(others)} as well; with actor_islands={count} it joins "
            "gradients, and needs a rank of its own.",
            involves=("placement.actor_islands",),
        )
    if config.trains_reward_model:
        message = "is trained by the run, beside the actor, which has islands. Leave one of the two out."
        yield ConfigIssue(
            "reward_model", message, involves=("placement.actor_islands",)
        )
    replicated = ["actor", "critic"] if config.coordinator.islands_every > 1 else []
    for role in replicated:
        for key in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            set_here = role in placement.ranks and placement.colocated(role, "actor")
            if set_here and getattr(config, role).optimizer.get(key):
                message = "is true: such an optimizer has its float32 weights elsewhere than islands average them."
                message = (
                    f"{message} Leave it out, or set coordinator.islands_every to 1."
                )
                yield ConfigIssue(
                    f"{role}.optimizer.{key}",
                    message,
                    involves=("coordinator.islands_every",),
                )


def _placed(
    config: Config, command: str, world_size: int | None
) -> ResolvedPlacement | None:
    """Return which ranks each role will have, or None if that is unknown before the nodes have met, or impossible."""
    wanted, mistakes = config.placement.wanted()
    unknown = bool(os.environ.get(CLAIMS)) or any(
        place.nodes or place.num_nodes for place in wanted.values()
    )
    grids = role_grids(config, used_roles(config, command))
    islands = config.placement.actor_islands
    size = world_size or (
        None
        if mistakes or unknown
        else smallest_placed_world(wanted, grids, islands=islands)
    )
    if (
        mistakes
        or unknown
        or size is None
        or problems_of(wanted, size, grids, islands=islands)
    ):
        return None
    return resolve(wanted, size, grids, islands=islands)


def _fsdp_against_world(
    config: Config,
    role: str,
    world_size: int,
    *,
    is_inherited: bool,
) -> Iterator[ConfigIssue]:
    """Yield a mistake if sizes of FSDP's groups do not divide the number of ranks.

    Args:
        is_inherited: whether mistakes in values that equal the actor's are reported for the actor.
    """
    grid: GridConfig = getattr(config, role)
    num_left = world_size
    for name in ("tp", "cp"):
        size = getattr(grid, name)
        if num_left % size:
            text = f"found {size}, which does not divide the {num_left} ranks. Sizes that fit: "
            if not (is_inherited and size == getattr(config.actor, name)):
                yield ConfigIssue(
                    f"{role}.{name}",
                    f"{text}{listed(divisors(num_left))}.",
                    involves=("run.nproc",),
                )
            return
        num_left //= size
    size = grid.fsdp.shard_size
    replicas = world_size // grid.tp
    if (
        size is None
        or grid.fsdp.sharding_strategy != "hybrid_shard"
        or replicas % size == 0
    ):
        return
    if not (is_inherited and grid.fsdp == config.actor.fsdp):
        text = f"found {size}, which does not divide the {replicas} data-parallel ranks. Sizes that fit: "
        yield ConfigIssue(
            f"{role}.fsdp.shard_size",
            f"{text}{listed(divisors(replicas))}.",
            involves=("run.nproc",),
        )


def _fsdp_against_model(
    role: str, grid: GridConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield a mistake if FSDP cannot cut the model's rows over ranks, as far as config.json says so."""
    if grid.cp > 1 and spec.is_recurrent:
        yield ConfigIssue(
            f"{role}.cp",
            f"found {grid.cp}; under {role}.engine=fsdp no rank passes on the state that layers of "
            f"{spec.architecture} carry along a row. Use 1, or {role}.engine=megatron.",
            involves=("model.path", f"{role}.engine"),
        )


def _sizes(grid: GridConfig) -> tuple[str, tuple[int | None, ...]]:
    """Return the engine and the parallel sizes, to compare two grids."""
    return grid.engine, (grid.tp, grid.pp, grid.cp, grid.ep, grid.etp, grid.vpp)


def _against_model(
    role: str, grid: GridConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield sizes of a role's grid that do not divide the model's dimensions."""
    misfitting = misfits(spec, tp=grid.tp, etp=grid.etp or grid.tp, ep=grid.ep)
    for misfit in misfitting:
        yield ConfigIssue(
            f"{role}.{misfit.axis}",
            f"found {misfit.size}, which {misfit.reason}",
            involves=("model.path",),
        )
    if why := why_rows_not_cut(spec, cp=grid.cp, tp=grid.tp):
        yield ConfigIssue(
            f"{role}.cp",
            f"found {grid.cp}, and {why}.",
            involves=("model.path", f"{role}.tp"),
        )
    stages = grid.pp * (grid.vpp or 1)
    if spec.num_layers % stages and not any(
        grid.megatron.get(name) for name in _UNEVEN
    ):
        product = f"{grid.pp} x vpp={grid.vpp} = {stages}" if grid.vpp else f"{grid.pp}"
        yield ConfigIssue(
            f"{role}.pp",
            f"found {product}, which does not divide the model's {spec.num_layers} layers. "
            f"Sizes that fit: {listed(divisors(spec.num_layers))}; or spread them unevenly with "
            f"{role}.megatron.{_UNEVEN[0]}.",
            involves=("model.path", f"{role}.vpp"),
        )


def _against_world(
    role: str, grid: GridConfig, world_size: int
) -> Iterator[ConfigIssue]:
    """Yield a mistake if the grid does not divide the number of ranks."""
    ranks = f"{world_size} ranks"
    if problem := grid_problem(
        grid, world_size, ranks, "the", "start a multiple of {} processes"
    ):
        # If the dense grid divides the ranks, the expert grid is at fault: name its
        # key.
        of_experts = world_size % (grid.tp * grid.cp * grid.pp) == 0
        involves = ("run.nproc", f"{role}.etp") if of_experts else ("run.nproc",)
        yield ConfigIssue(
            f"{role}.ep" if of_experts else role, problem, involves=involves
        )


def _engine_against_model(
    rollout: RolloutConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield mistakes in the rollout engine's tensor-parallel size and quantization for this model."""
    # With expert parallelism vLLM keeps each expert whole on one rank, so tp need not
    # divide an expert's dimensions.
    tp = rollout.tp
    experts_whole = bool(rollout.vllm.get("enable_expert_parallel"))
    for misfit in misfits(spec, tp=tp, etp=1 if experts_whole else tp, engine=True):
        yield ConfigIssue(
            "rollout.tp", f"found {tp}, which {misfit.reason}", involves=("model.path",)
        )
    method = rollout.vllm.get("quantization")
    if method and (reason := why_not_quantised(spec)):
        yield ConfigIssue(
            "rollout.vllm.quantization",
            f"found {method!r}, but {reason}.",
            involves=("model.path",),
        )
    elif isinstance(method, str) and method in GROUP_FORMATS:
        yield from _groups_against_model(
            "rollout.vllm.quantization", method, "rollout.tp", rollout.tp, spec
        )
    elif spec.attention_sinks and method:
        text = f"found {method!r}; vLLM transposes the model's experts as it loads: they cannot be quantised."
        yield ConfigIssue(
            "rollout.vllm.quantization",
            f"{text} Leave it out.",
            involves=("model.path",),
        )


def _blocks_against_model(
    rollout: RolloutConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield a mistake if a chunk of attention does not consist of whole blocks of vLLM's cache."""
    block = rollout.vllm.get("block_size") or LARGEST_DEFAULT_BLOCK
    chunk = spec.attention_chunk
    if chunk is None or chunk % block == 0:
        return
    yield ConfigIssue(
        "rollout.vllm.block_size",
        f"is {block}, and attention_chunk_size={chunk} of {spec.architecture} is no multiple of it, which vLLM needs. "
        "Use a size that divides the chunk, or rollout.engine=hf.",
        involves=("model.path",),
    )


def _speculation_against_model(
    rollout: RolloutConfig, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield a mistake if drafts are proposed to a model for which they were not tested."""
    if rollout.vllm.get("speculative_config") and (reason := why_no_drafts(spec)):
        yield ConfigIssue(
            "rollout.vllm.speculative_config",
            f"is set, and {reason}. Leave it out.",
            involves=("model.path",),
        )


def _rounding_against_model(
    method: str, tp: int, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield mistakes in the format to which the actor rounds its weights, for this model and number of ranks."""
    key = "actor.fake_quantization"
    if reason := why_not_quantised(spec):
        text = f"found {method!r}, but {reason}."
        yield ConfigIssue(key, text, involves=("model.path",))
    elif method in GROUP_FORMATS:
        yield from _groups_against_model(key, method, "actor.tp", tp, spec)


def _groups_against_model(
    key: str, method: str, tp_key: str, tp: int, spec: ModelSpec
) -> Iterator[ConfigIssue]:
    """Yield mistakes in a format with groups, the value of `key`, for this model and number of ranks."""
    group = GROUP_FORMATS[method].group
    if reason := why_no_groups(spec):
        text = f"found {method!r}, but {reason}. Leave it out."
        yield ConfigIssue(key, text, involves=("model.path",))
    elif straddled := straddled_groups(spec, tp, group):
        text = (
            f"found {method!r}, whose {group} columns share a scale; not whole groups on a rank are "
            f"{listed(straddled)}. Use a format with smaller groups or another {tp_key}."
        )
        yield ConfigIssue(key, text, involves=(tp_key, "model.path"))


def role_grids(
    config: Config, megatron_roles: Iterable[str]
) -> dict[str, GridSizes | None]:
    """Return the grid of every role, as `resolve` takes it. None stands for a role without a grid.

    Args:
        megatron_roles: the roles that the command builds (`used_roles`).
    """
    grids: dict[str, GridSizes | None] = {
        role: getattr(config, role) for role in megatron_roles if role in ROLES
    }
    models = config.reward_model if config.scores_by_megatron else None
    return grids | {
        "rollout": Sizes(tp=config.rollout.tp),
        "reward": models,
        "coordinator": global_model_grid(config),
    }


def global_model_grid(config: Config) -> Sizes | None:
    """Return the grid of the global model on the coordinator's ranks, or None if there is none."""
    coordinator = config.coordinator
    if not config.aggregates_gradients:
        return None
    return Sizes(tp=coordinator.tp, pp=coordinator.pp)


def placement_mistakes(
    placement: PlacementConfig,
    grids: Mapping[str, GridSizes | None],
    size: int | None,
    nodes: Sequence[Node] | None = None,
) -> list[ConfigIssue]:
    """Return the mistakes in a placement.

    If the number of ranks is unknown, or the placement names nodes and `nodes` is None,
    only its syntax is checked.

    Args:
        grids: from `role_grids`.
        size: number of ranks, or None.
        nodes: nodes of the run, or None before they have met.
    """
    wanted, mistakes = placement.wanted()
    names_nodes = any(place.nodes or place.num_nodes for place in wanted.values())
    if mistakes or size is None or (nodes is None and names_nodes):
        return mistakes
    try:
        resolve(wanted, size, grids, nodes, islands=placement.actor_islands)
    except PlacementError as error:
        return [
            ConfigIssue(placement.written_key(problem.key), problem.message)
            for problem in error.problems
        ]
    return []


def resolve_placement(
    placement: PlacementConfig,
    grids: Mapping[str, GridSizes | None],
    size: int,
    nodes: Sequence[Node] | None = None,
) -> ResolvedPlacement:
    """Return which ranks each role has.

    Raises:
        InvalidConfig: an entry of the placement cannot be read; lists all of them.
        PlacementError: the placement does not fit the ranks or grids; lists all problems.
    """
    wanted, mistakes = placement.wanted()
    if mistakes:
        raise InvalidConfig(mistakes, "placement")
    return resolve(wanted, size, grids, nodes, islands=placement.actor_islands)
