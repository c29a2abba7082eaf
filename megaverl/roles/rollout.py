"""The rollout role: prompts in, responses out, on weights that are resharded in place from the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megaverl.layout.layout import Layout
from megaverl.parallel.collectives import gather_rows, together
from megaverl.platform import platform
from megaverl.reshard.plan import make_plan
from megaverl.reshard.reshard import Resharder, ReshardStats
from megaverl.roles.megatron_model import MegatronModel
from megaverl.rollout.engine import Engine, Generation, SamplingOptions
from megaverl.rollout.replicas import split_prompts

FINISH_REASONS = ("stop", "length")


class Rollout:
    """An engine on every rank; its replicas share the prompts, and every rank gets all responses.

    Args:
        engine: this rank's part of an engine.
        layout_of: rank -> the engine's layout there; needed with a model.
        model: the actor's, whose weights the engine takes over; None: the engine keeps those it loaded.
        world: the ranks that both live on.
    """

    def __init__(
        self,
        engine: Engine,
        layout_of: Callable[[int], Layout] | None,
        model: MegatronModel | None,
        world: dist.ProcessGroup,
        node_of: Callable[[int], int] | None = None,
    ) -> None:
        self.engine, self.world = engine, world
        self.weight_version = 0
        self.num_checked = 0  # how often the engine's log-probs were compared with the actor's
        self._resharder: Resharder | None = None
        if model is not None and layout_of is not None:
            plan = make_plan(
                model.layout_of, layout_of, dist.get_world_size(world), dist.get_rank(world), node_of=node_of
            )
            self._resharder = Resharder(plan, model.parameters, engine.named_parameters(), world)

    def reshard(self) -> ReshardStats:
        """Bring the engine's weights up to the actor's, in place, and forget what was cached of the old ones."""
        assert self._resharder is not None, "this rollout has no actor to take weights from"
        self.engine.wake_up()
        stats = self._resharder.run()
        with together(self.world):
            self.engine.reset_prefix_cache()
        self.weight_version += 1
        return stats

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingOptions,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
    ) -> list[Generation]:
        """One response per prompt, in order, the same list on every rank.

        Args:
            prompts: token ids; a prompt that is to be answered several times stands there several times.
            seeds: one per prompt; what is generated depends on the prompt and its seed, not on its place.
            group_size: how often a prompt stands in a row; its responses are made where its prefix is cached.
        """
        engine = self.engine
        engine.wake_up()
        mine = split_prompts([len(prompt) for prompt in prompts], engine.num_replicas, group_size)[engine.replica]
        found: list[Generation] = []
        with together(self.world):
            found = engine.generate([list(prompts[i]) for i in mine], sampling, [seeds[i] for i in mine])
        engine.sleep()
        # The ranks of a replica hold the same responses: its first one speaks for it.
        speaks = engine.tp_rank == 0
        packed = pack_generations(mine, found) if speaks else torch.empty(0, dtype=torch.int32)
        return unpack_generations(gather_rows(packed.to(platform.device), self.world).cpu(), len(prompts))


def pack_generations(indices: Sequence[int], generations: Sequence[Generation]) -> torch.Tensor:
    """One int32 vector: for each response [index, length, finish reason, tokens..., log-probs as float32 bits...]."""
    parts = []
    for index, generation in zip(indices, generations, strict=True):
        reason = FINISH_REASONS.index(generation.finish_reason)
        parts.append(torch.tensor([index, len(generation.token_ids), reason, *generation.token_ids], dtype=torch.int32))
        parts.append(torch.tensor(generation.log_probs, dtype=torch.float32).view(torch.int32))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)


def unpack_generations(packed: torch.Tensor, count: int) -> list[Generation]:
    """Undo `pack_generations` for several replicas' vectors, one after the other; `count` responses in all."""
    found: dict[int, Generation] = {}
    place = 0
    while place < packed.numel():
        index, length, reason = packed[place : place + 3].tolist()
        tokens = packed[place + 3 : place + 3 + length]
        log_probs = packed[place + 3 + length : place + 3 + 2 * length].contiguous().view(torch.float32)
        found[index] = Generation(tokens.tolist(), log_probs.tolist(), FINISH_REASONS[reason])
        place += 3 + 2 * length
    return [found[i] for i in range(count)]


def sampling_options(given: Mapping[str, Any], **changes: Any) -> SamplingOptions:
    """The configuration's sampling fields, with changes, as the engine takes them."""
    return SamplingOptions(**{**given, **changes})
