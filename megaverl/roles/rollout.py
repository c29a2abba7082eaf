"""The rollout role: prompts in, responses out, on weights that are resharded in place from the actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megaverl.config.reshard import ReshardConfig
from megaverl.errors import ReshardError
from megaverl.layout.layout import Layout
from megaverl.parallel.collectives import gather_rows, together
from megaverl.platform import platform
from megaverl.reshard.fingerprint import ReshardCheck
from megaverl.reshard.movers.alias import adopt
from megaverl.reshard.plan import make_plan
from megaverl.reshard.reshard import Resharder, ReshardStats
from megaverl.roles.megatron_model import MegatronModel
from megaverl.rollout.engine import Engine, Generation, OnLoad, SamplingOptions
from megaverl.rollout.replicas import split_prompts

FINISH_REASONS = ("stop", "length")


class Rollout:
    """An engine on every rank; its replicas share the prompts, and every rank gets all responses.

    Args:
        engine: this rank's part of an engine.
        layout_of: rank -> the engine's layout there; needed with a model.
        model: the actor's, whose weights the engine takes over; None: the engine keeps those it loaded.
        world: the ranks that both live on.
        node_of: the node of a rank; None: all on one.
        config: `reshard`.
        timeout: how long a reshard waits for another rank; None: as long as the world's group.
    """

    def __init__(
        self,
        engine: Engine,
        layout_of: Callable[[int], Layout] | None,
        model: MegatronModel | None,
        world: dist.ProcessGroup,
        node_of: Callable[[int], int] | None = None,
        config: ReshardConfig | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.engine, self.world = engine, world
        self.config = config or ReshardConfig()
        self.weight_version = 0
        self.num_checked = 0  # how often the engine's log-probs were compared with the actor's
        self._resharder: Resharder | None = None
        self._check: ReshardCheck | None = None
        if model is not None and layout_of is not None:
            rank, size = dist.get_rank(world), dist.get_world_size(world)
            parameters = engine.named_parameters()
            self._resharder = Resharder(
                make_plan(model.layout_of, layout_of, size, rank, node_of=node_of),
                model.parameters,
                parameters,
                world,
                bucket_bytes=self.config.bucket_mb * 2**20,
                alias=self.config.alias == "auto",
                may_rebind=engine.may_rebind,
                overlap=self.config.overlap,
                node_of=node_of,
                timeout=timeout,
                folder=self.config.folder,
                ipc=self.config.ipc == "auto",
            )
            if self.config.check_every >= 0:
                self._check = ReshardCheck(model.layout_of, layout_of, model.parameters, parameters, world)

    def reshard(self) -> ReshardStats:
        """Bring the engine's weights up to the actor's, in place, and forget what was cached of the old ones."""
        self.start_reshard()
        return self.finish_reshard()

    def start_reshard(self) -> None:
        """Send the actor's weights on their way; they must not change until `finish_reshard`.

        With `reshard.overlap` they gather beside the engine's, which can generate with the old ones meanwhile.
        """
        self.engine.wake_up()
        self._source_and_engine.start()

    def finish_reshard(self) -> ReshardStats:
        """The engine has the new weights, all of them, from here on.

        Raises:
            ReshardError: a rank died or stalled, or the weights differ from the actor's.
        """
        resharder = self._source_and_engine
        stats = resharder.finish()
        with together(self.world):
            self.engine.reset_prefix_cache()
        self._compare(resharder)
        self.weight_version += 1
        return stats

    def source_changes(self) -> None:
        """To be called before the actor's weights change: what the engine shares with it changes as well, so that
        nothing is generated before the next reshard."""
        if self._resharder is not None:
            self._resharder.source_changes()

    def _compare(self, resharder: Resharder) -> None:
        """Fingerprints of both sides, where `reshard.check_every` asks for them."""
        every, before = self.config.check_every, resharder.version - 1
        if self._check is None or (before % every if every else before):
            return
        try:
            self._check.compare()
        except ReshardError as error:
            resharder.torn = f"version {resharder.version} did not arrive as it left ({error})"
            raise

    @property
    def _source_and_engine(self) -> Resharder:
        assert self._resharder is not None, "this rollout has no actor to take weights from"
        return self._resharder

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

        Raises:
            ReshardError: the engine holds parts of two versions of the weights.
        """
        engine = self.engine
        engine.wake_up()
        mine = split_prompts([len(prompt) for prompt in prompts], engine.num_replicas, group_size)[engine.replica]
        found: list[Generation] = []
        with together(self.world):
            if self._resharder is not None:
                self._resharder.check_whole()
            found = engine.generate([list(prompts[i]) for i in mine], sampling, [seeds[i] for i in mine])
        engine.sleep()
        # The ranks of a replica hold the same responses: its first one speaks for it.
        speaks = engine.tp_rank == 0
        packed = pack_generations(mine, found) if speaks else torch.empty(0, dtype=torch.int32)
        return unpack_generations(gather_rows(packed.to(platform.device), self.world).cpu(), len(prompts))


def adopting(
    model: MegatronModel, world: dist.ProcessGroup, node_of: Callable[[int], int] | None, config: ReshardConfig
) -> OnLoad | None:
    """For `make_engine`: let the engine's weights take the actor's storage before their addresses are captured.

    The Rollout that is made with both then finds them aliased. None where `reshard` wants no aliases.
    """
    if config.alias == "never" or config.overlap:
        return None

    def on_load(parameters: Mapping[str, torch.Tensor], layouts: Callable[..., Callable[[int], Layout]]) -> None:
        layout_of = layouts(model.weights, model.spec)
        rank, size = dist.get_rank(world), dist.get_world_size(world)
        plan = make_plan(model.layout_of, layout_of, size, rank, node_of=node_of)
        adopt(plan.copies, plan.receives, model.parameters, parameters)

    return on_load


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
