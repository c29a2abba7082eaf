"""Candidate settings for a layout search, limited to those that the model, the ranks and the run's rules allow."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaverl.config import Config
from megaverl.config.grids import is_placed
from megaverl.config.passthrough import recompute_fields
from megaverl.config.wording import divisors
from megaverl.distributed.grid import Sizes, grid_problem
from megaverl.outside import read_json_file
from megaverl.sharding.model_spec import ModelSpec, misfits

OFFLOAD, SHARE, ROLLOUT = (
    "actor.offload",
    "rollout.vllm.gpu_memory_utilization",
    "placement.rollout",
)
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
LEVELS = ("none", "selective", "full")
SHARES = range(90, 15, -5)  # percent of a GPU's memory for the engine
# Fractions of the ranks for engines that do not share the actor's ranks.
SPLITS = (0.25, 0.5, 0.75)
LONGEST_ROW = 65536  # upper limit of proposed micro-batch tokens
SHORTEST_CUT = 4096  # least tokens of the longest sample on each context-parallel rank
Settings = dict[str, Any]
Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SearchSpace:
    """Limits of a layout search.

    Attributes:
        world: ranks of the job.
        node: ranks of a node.
        keys: keys that are chosen; all others keep the recipe's value.
        away: ranks of the recipe's own placement that the actor does not have.
        staleness: steps that engines on separate ranks may be ahead; 0 proposes no separate engines.
        counts_memory: whether memory is counted. If not, neither recomputation nor offload is proposed.
        further: whether offload and the engine's share of the memory are chosen too.
    """

    world: int
    node: int
    keys: Collection[str]
    away: int = 0
    staleness: int = 0
    counts_memory: bool = False
    further: bool = False


class Candidates:
    """Grids, micro-batches, recomputation, engines and placements to try, as settings laid over a recipe."""

    def __init__(self, config: Config, spec: ModelSpec, space: SearchSpace) -> None:
        self.config = config
        self.spec = spec
        self.world = space.world
        self.node = space.node
        self.keys = set(space.keys)
        self.away = space.away
        self.staleness = space.staleness
        self.counts_memory = space.counts_memory
        self.further = space.further

    def groups(self) -> list[tuple[list[Settings], list[Settings]]]:
        """List (training settings from the fastest to those with the least memory, engine settings), in fixed order."""
        groups = []
        for placed in self._placements():
            ranks = self.world - self._engine_ranks(placed)
            engines = list(self._engines(placed))
            for grid in self._grids(ranks):
                for tokens in self._row_tokens():
                    rungs = [placed | rung for rung in self._rungs(grid | tokens)]
                    groups.append((rungs, engines))
        return sorted(groups, key=lambda group: key_of(group[0][0]))

    def apart(self, name: str, ranks: int) -> Iterator[Settings]:
        """Yield grids for a role that does not share the actor's grid. Experts keep the actor's ep and etp."""
        for tp in divisors(self.node):
            for pp in divisors(ranks):
                if pp > self.spec.num_layers:
                    continue
                if misfits(self.spec, tp=tp) or grid_problem(
                    Sizes(tp=tp, pp=pp), ranks, ""
                ):
                    continue
                uneven = uneven_split(self.spec.num_layers, pp, None)
                if uneven is None:
                    continue
                grid: Settings = {
                    f"{name}.tp": tp,
                    f"{name}.pp": pp,
                    f"{name}.vpp": None,
                    f"{name}.cp": 1,
                }
                yield grid | self._dealt(name, uneven)

    def _placements(self) -> Iterator[Settings]:
        """Yield the recipe's own placement, and placements with engines on ranks of their own."""
        yield {}
        # Separate engines only pay off if they generate while the actor trains. A
        # recipe's own placement is kept.
        if not self.staleness or is_placed(self.config):
            return
        for share in SPLITS:
            # Whole nodes, so that an engine and a pipeline stage never share one.
            ranks = int(self.world * share) // self.node * self.node
            if ranks:
                yield {
                    ROLLOUT: {"num_ranks": ranks},
                    "rollout.async_rollout": True,
                    "rollout.max_staleness": self.staleness,
                }

    def _engine_ranks(self, placed: Settings) -> int:
        """Return the number of ranks for engines that the actor does not have."""
        return int(placed[ROLLOUT]["num_ranks"]) if ROLLOUT in placed else self.away

    def _sizes(self, key: str, sizes: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try for a key: `sizes`, or only the recipe's value if the key is not to be chosen."""
        if key in self.keys:
            return sizes
        section, name = key.split(".")
        return [getattr(getattr(self.config, section), name)]

    def _grids(self, ranks: int) -> Iterator[Settings]:
        """Yield the grids that the model and the number of ranks allow."""
        spec = self.spec
        config = self.config
        samples = config.rows_per_step // config.algorithm.num_mini_batches
        context_sizes = [
            cp
            for cp in (1, 2, 4, 8)
            if cp == 1 or config.max_tokens >= cp * SHORTEST_CUT
        ]
        expert_sizes = divisors(spec.moe.num_experts) if spec.moe else [1]
        # Tensor parallelism exchanges activations in every layer, so it stays inside a
        # node.
        for tp in self._sizes("actor.tp", divisors(self.node)):
            expert_tensor_sizes = [1, tp] if spec.moe and tp > 1 else [None]
            for ep in self._sizes("actor.ep", expert_sizes):
                for etp in self._sizes("actor.etp", expert_tensor_sizes):
                    if misfits(spec, tp=tp, etp=etp or tp, ep=ep):
                        continue
                    for pp in self._sizes(
                        "actor.pp",
                        [pp for pp in divisors(ranks) if pp <= spec.num_layers],
                    ):
                        for cp in self._sizes("actor.cp", context_sizes):
                            if grid_problem(
                                Sizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp), ranks, ""
                            ):
                                continue
                            if (
                                ranks // (tp * cp * pp) > samples
                                and "actor.pp" in self.keys
                            ):
                                # Some replicas would have no sample of a mini-batch.
                                continue
                            yield from self._staged(
                                {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
                            )

    def _staged(self, sizes: dict[str, int | None]) -> Iterator[Settings]:
        """Yield a grid with each number of virtual stages; layers that do not divide evenly get an uneven split."""
        pp = sizes["pp"] or 1
        for vpp in self._sizes("actor.vpp", [None, 2, 4] if pp > 2 else [None]):
            every = {
                f"actor.{name}": size for name, size in (sizes | {"vpp": vpp}).items()
            }
            grid = {key: size for key, size in every.items() if key in self.keys}
            if not self.keys & {"actor.pp", "actor.vpp"}:
                yield grid
                continue
            uneven = uneven_split(self.spec.num_layers, pp, vpp)
            if uneven is not None:
                yield grid | self._dealt("actor", uneven)

    def _dealt(self, role: str, uneven: Mapping[str, int]) -> Settings:
        """Return the keys for an uneven split of a role's layers. null removes a value that the role would inherit."""
        fields = getattr(self.config, role).megatron
        # Other roles inherit the actor's fields. If some grid needs an uneven split,
        # each role must set or clear them.
        inherited = role != "actor" and self.spec.num_layers % 8 != 0
        names = [
            name
            for name in UNEVEN
            if name in uneven or fields.get(name) is not None or inherited
        ]
        return {f"{role}.megatron.{name}": uneven.get(name) for name in names}

    def _row_tokens(self) -> Iterator[Settings]:
        name = "actor.micro_batch_tokens"
        if name not in self.keys:
            yield {}
            return
        most = self.config.max_tokens
        for tokens in (most, 2 * most, 4 * most):
            if tokens <= max(most, LONGEST_ROW):
                yield {name: tokens}

    def _rungs(self, grid: Settings) -> Iterator[Settings]:
        """Yield the grid with more and more recomputation, then with offload: slower each time, with less memory."""
        levels: tuple[str | None, ...] = (None,)
        if "actor.activation_checkpointing" in self.keys:
            levels = LEVELS if self.counts_memory else LEVELS[:1]
        rung = grid
        for level in levels:
            rung = grid if level is None else grid | self._recomputed(level)
            yield rung
        if (
            self.further
            and self.counts_memory
            and not self.config.actor.offload.optimizer
        ):
            yield rung | {OFFLOAD: {"optimizer": True, "gradients": True}}

    def _recomputed(self, level: str) -> Settings:
        """Return the settings of one level of recomputation.

        A recipe that sets `actor.megatron.recompute_*` gets the same level in these
        fields, since they override `actor.activation_checkpointing`.
        """
        configured = self.config.actor.megatron
        if not any(configured.get(name) is not None for name in RECOMPUTE):
            return {"actor.activation_checkpointing": level}
        moe = self.spec.moe
        dense = moe is None or bool(self.spec.count_layers("mlp"))
        fields = recompute_fields(
            level, dense=dense, experts=moe is not None, fused_attention=True
        )
        return {
            f"actor.megatron.{name}": fields.get(name)
            for name in RECOMPUTE
            if name in fields or name in configured
        }

    def _engines(self, placed: Settings) -> Iterator[Settings]:
        ranks = self._engine_ranks(placed) or self.world
        sizes = [tp for tp in (1, 2, 4, 8, 16) if ranks % tp == 0]
        if self.config.rollout.engine != "vllm":
            sizes = [1]
        for tp in self._sizes("rollout.tp", sizes):
            engine: Settings = {"rollout.tp": tp} if "rollout.tp" in self.keys else {}
            if self.further and self.counts_memory:
                engine[SHARE] = SHARES[0] / 100
            yield engine


def key_of(settings: Mapping[str, Any]) -> Key:
    """Return a sort key of settings, so that ties between equally fast layouts do not
    depend on the order of the search.
    """
    return tuple(sorted((key, repr(value)) for key, value in settings.items()))


def uneven_split(num_layers: int, pp: int, vpp: int | None) -> dict[str, int] | None:
    """Return the fields that give the first and the last stage fewer layers; {} if
    layers divide, None if this fails too.
    """
    if num_layers % (pp * (vpp or 1)) == 0:
        return {}
    if vpp is not None or pp < 3:
        return None
    between = -(-num_layers // pp)
    ends, odd = divmod(num_layers - (pp - 2) * between, 2)
    return dict.fromkeys(UNEVEN, ends) if not odd and 0 < ends <= between else None


def shown(settings: Settings) -> Settings:
    """Drop the settings that equal the default of their key."""
    plain = {"actor.vpp": None, "actor.etp": None, "actor.cp": 1, "actor.ep": 1}
    return {
        key: value
        for key, value in settings.items()
        if not (key in plain and plain[key] == value)
    }


def read_choice(config: Config, world: int) -> Settings | None:
    """Return the settings in `chosen.json` for this number of ranks.

    None if the file is missing, damaged or for another number of ranks, or if the run
    does not resume.
    """
    # A run that torchrun restarts resumes from its own checkpoint, even with `resume:
    # never`.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if config.checkpoint.resume == "never" and not restarted:
        return None
    try:
        choice = read_json_file(config.chosen_file)
        settings = choice["settings"] if choice["ranks"] == world else None
    except (ValueError, KeyError, TypeError, OSError):
        return None
    return settings if isinstance(settings, dict) else None


def write_choice(config: Config, world: int, settings: Settings) -> Path:
    """Write the settings to `chosen.json`, so that a resumed run on as many ranks uses them again.

    The file is replaced atomically.
    """
    choice = {"ranks": world, "settings": settings}
    part = config.chosen_file.with_name(f"{config.chosen_file.name}.part")
    part.write_text(json.dumps(choice, indent=2) + "\n", encoding="utf-8")
    os.replace(part, config.chosen_file)
    return config.chosen_file
