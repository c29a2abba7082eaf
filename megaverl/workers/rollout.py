"""The rollout role: prompts in, responses out, on weights that are resharded in place from the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

from megaverl.config.reshard import ReshardConfig
from megaverl.distributed.collectives import gather_rows, together
from megaverl.errors import ReshardError
from megaverl.platform import platform
from megaverl.rollout.engine import Engine, Generation, OnLoad, Sampling, of_some
from megaverl.rollout.replicas import split_prompts
from megaverl.sharding.layout import Layout
from megaverl.sharding.low_rank import adapter_names, with_factors, written_to
from megaverl.sharding.plan import make_plan
from megaverl.weights.adapters import Merge
from megaverl.weights.fingerprint import ReshardCheck
from megaverl.weights.reshard import Resharder, ReshardStats
from megaverl.weights.transports.local import adopt
from megaverl.workers.megatron_model import MegatronModel

# Called with a prompt's number and its response.
Finished = Callable[[int, Generation], None]

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
        between: the ranks of a reshard, where the model or the engine is on ranks of another world; None: `world`.
            The layouts are then those of these ranks, and `node_of` speaks of them.
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
        between: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine, self.world = engine, world
        self.config = config or ReshardConfig()
        self.weight_version = 0
        self._stays_awake = False
        self._resharder: Resharder | None = None
        self._check: ReshardCheck | None = None
        self._merge: Merge | None = None
        self._model, self._reading = model, ExitStack()
        if model is not None and layout_of is not None:
            group = between or world
            rank, size = dist.get_rank(group), dist.get_world_size(group)
            source_layouts, source = model.layout_of, dict(model.parameters)
            dest_layouts, dest = layout_of, engine.named_parameters()
            if (adapters := model.adapters) is not None:
                dtype, device = model.config.params_dtype, platform.device
                self._merge = Merge(layout_of(rank), adapters.low_ranks, adapters.scaling, dtype, device)
                source_layouts = with_factors(source_layouts, adapters.low_ranks, adapter_names)
                source |= adapters.parameters
                dest_layouts, dest = with_factors(layout_of, adapters.low_ranks), dest | self._merge.factors
            self._dest = dest
            self._resharder = Resharder(
                make_plan(source_layouts, dest_layouts, size, rank, node_of=node_of),
                source,
                dest,
                group,
                bucket_bytes=self.config.bucket_mb * 2**20,
                alias=may_alias(self.config, model),
                may_rebind=engine.may_rebind,
                overlap=self.config.overlap,
                node_of=node_of,
                timeout=timeout,
                folder=self.config.folder,
                ipc=self.config.ipc == "auto",
                apart=self._merge.written if self._merge is not None else (),
                changing=self._merge.brought if self._merge is not None else None,
            )
            if self.config.check_every >= 0:
                self._check = ReshardCheck(source_layouts, dest_layouts, source, dest, group)

    def reshard(self) -> ReshardStats:
        """Bring the engine's weights up to the actor's, in place, and forget what was cached of the old ones."""
        self.start_reshard()
        return self.finish_reshard()

    def start_reshard(self) -> None:
        """Send the actor's weights on their way; they must not change until `finish_reshard`.

        With `reshard.overlap` they gather beside the engine's, which can generate with the old ones meanwhile.
        """
        self.engine.wake_up()
        self._reading.enter_context(self._model.resident if self._model is not None else nullcontext())
        self._source_and_engine.start()

    def finish_reshard(self) -> ReshardStats:
        """The engine has the new weights, all of them, from here on.

        Raises:
            ReshardError: a rank died or stalled, or the weights differ from the actor's.
        """
        resharder = self._source_and_engine
        with self._reading:
            stats = resharder.finish()
            self._compare(resharder)
        with together(self.world):
            stats = replace(stats, seconds=stats.seconds + self._merge_adapters(resharder))
            self.engine.reset_prefix_cache()
        self.weight_version += 1
        return stats

    def _merge_adapters(self, resharder: Resharder) -> float:
        """The actor's adapters go into the weights that have just arrived, if it has any; seconds that it took."""
        if self._merge is None:
            return 0.0
        start = perf_counter()
        resharder.torn = f"the adapters of version {resharder.version} are being merged into its weights"
        self._merge.apply(self._dest)
        if platform.is_cuda:
            torch.cuda.current_stream().synchronize()
        resharder.torn = None
        return perf_counter() - start

    def source_changes(self) -> None:
        """To be called before the actor's weights change: what the engine shares with it changes as well, so that
        nothing is generated before the next reshard. An actor that trains adapters shares only what never changes."""
        if self._resharder is not None and self._merge is None:
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

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine does not sleep between requests: what it has cached of a conversation is still there."""
        self._stays_awake = True
        try:
            yield
        finally:
            self._stays_awake = False
            self.engine.sleep()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        group_size: int = 1,
        conversations: Sequence[int] | None = None,
        finished: Finished | None = None,
    ) -> list[Generation]:
        """One response per prompt, in order, the same list on every rank.

        Args:
            prompts: token ids; a prompt that is to be answered several times stands there several times.
            sampling: for all prompts, or one for each.
            seeds: one per prompt; what is generated depends on the prompt and its seed, not on its place.
            group_size: how often a prompt stands in a row; its responses are made where its prefix is cached.
            conversations: see `split_prompts`.
            finished: called, on the first rank of each engine, with the prompt's number and the response, as soon as
                that is there; once for each response of that engine.

        Raises:
            ReshardError: the engine holds parts of two versions of the weights.
        """
        engine = self.engine
        engine.wake_up()
        if engine.in_flight is not None and engine.in_flight.measures:
            engine.in_flight.fit(self._least_free_memory())
        lengths = [len(prompt) for prompt in prompts]
        mine = split_prompts(lengths, engine.num_replicas, group_size, conversations)[engine.replica]
        speaks = engine.tp_rank == 0  # the ranks of a replica hold the same responses: its first one speaks for it
        found: list[Generation] = []
        with together(self.world), _telling(engine, mine, finished if speaks else None) as rest:
            if self._resharder is not None:
                self._resharder.check_whole()
            given = [list(prompts[i]) for i in mine]
            found = engine.generate(given, of_some(sampling, mine), [seeds[i] for i in mine])
            rest(found)
        if not self._stays_awake:
            engine.sleep()
        packed = pack_generations(mine, found) if speaks else torch.empty(0, dtype=torch.int32)
        return unpack_generations(gather_rows(packed.to(platform.device), self.world).cpu(), len(prompts))

    def _least_free_memory(self) -> int:
        """Bytes, on the rank that has the least; every rank takes part."""
        free = torch.tensor(platform.free_memory(), device=platform.device)
        dist.all_reduce(free, dist.ReduceOp.MIN, group=self.world)
        return int(free)


@contextmanager
def _telling(
    engine: Engine, numbers: Sequence[int], finished: Finished | None
) -> Iterator[Callable[[Sequence[Generation]], None]]:
    """Inside, `finished` hears of the engine's responses; what is yielded tells it of those that it has not heard of.

    Args:
        numbers: of the engine's prompts.
    """
    heard: set[int] = set()

    def tell(place: int, generation: Generation) -> None:
        heard.add(place)
        if finished is not None:
            finished(numbers[place], generation)

    def rest(found: Sequence[Generation]) -> None:
        for place, generation in enumerate(found):
            if place not in heard:
                tell(place, generation)

    engine.told = tell if finished is not None else None
    try:
        yield rest
    finally:
        engine.told = None


def adopting(
    model: MegatronModel, world: dist.ProcessGroup, node_of: Callable[[int], int] | None, config: ReshardConfig
) -> OnLoad | None:
    """For `make_engine`: let the engine's weights take the actor's storage before their addresses are captured.

    The Rollout that is made with both then finds them aliased. None where `reshard` wants no aliases.
    """
    if not may_alias(config, model) or config.overlap:
        return None

    def on_load(parameters: Mapping[str, torch.Tensor], layouts: Callable[..., Callable[[int], Layout]]) -> None:
        layout_of = layouts(model.weights, model.spec)
        rank, size = dist.get_rank(world), dist.get_world_size(world)
        plan = make_plan(model.layout_of, layout_of, size, rank, node_of=node_of)
        apart = written_to(layout_of(rank), model.adapters.low_ranks) if model.adapters is not None else ()
        adopt(plan.copies, plan.receives, model.parameters, parameters, apart)

    return on_load


def may_alias(config: ReshardConfig, model: MegatronModel) -> bool:
    """Whether an engine may live in the actor's storage, which is there at all times."""
    return config.alias == "auto" and not model.leaves


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
