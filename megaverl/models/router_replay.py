"""Routing replay: expert routers that take given experts (arXiv 2510.11370), and statistics of their choices.

If engine and trainer compute a token's router logits slightly differently, the token
may go to other experts, and its log-prob changes a lot. With replay the trainer takes
the engine's experts and weights them by its own logits, through which the gradient
flows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megaverl.data.routed_experts import ROUTERS_CHOICE
from megaverl.distributed.groups import Grid
from megaverl.models.packing import MicroBatch
from megaverl.platform import platform

platform.adapt_megatron()

from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# Columns that follow the load of each expert in `ReplayedRouter.counts`.
TOKENS, ENTROPY, COMPARED, DIFFERENT = range(4)

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def why_not_replayed(config: TransformerConfig) -> str | None:
    """Return why the model's routers cannot replay experts, or None if they can."""
    if config.num_moe_experts is None:
        return "the model has no routed experts"
    if config.moe_router_fusion:
        return "megatron.moe_router_fusion chooses experts in one kernel, which takes none. Leave it out"
    if config.enable_cuda_graph or config.cuda_graph_impl != "none":
        return "megatron.cuda_graph_impl: a captured graph takes the experts of the batch that it was captured with"
    if "sinkhorn" in str(config.moe_router_load_balancing_type):
        return "megatron.moe_router_load_balancing_type=sinkhorn chooses experts for a batch as a whole"
    return None


class ReplayedRouter:
    """Replay for one router, in place of megatron-core's `RouterReplay`.

    Layers recomputed for the backward pass must get the same experts as in their
    forward pass. On one stage micro-batches run their backward passes in the order of
    their forward passes, so a queue suffices.

    Attributes:
        counts: [experts + 4] float64 on the device: tokens of each expert, then the columns from `TOKENS` on.
    """

    def __init__(self, router: TopKRouter) -> None:
        self._by_sigmoid = router.score_function == "sigmoid"
        self._scores_are_logits = not (
            self._by_sigmoid or router.config.moe_router_pre_softmax
        )
        num_experts = router.config.num_moe_experts
        self.counts = torch.zeros(
            num_experts + 4, dtype=torch.float64, device=platform.device
        )
        self._expected: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        self._to_recompute: deque[tuple[torch.Tensor | None, torch.Tensor | None]] = (
            deque()
        )
        self._is_kept = False

    def expect(
        self,
        experts: torch.Tensor | None,
        weights: torch.Tensor | None,
        *,
        is_kept: bool,
    ) -> None:
        """Set the experts for the next forward pass.

        Args:
            experts: [tokens, k] experts to take; negative where the router chooses. None: the router chooses for every
                token.
            weights: [tokens], 1 for tokens that count in the statistics. None: no statistics.
            is_kept: whether a backward pass follows.
        """
        self._expected = (experts, weights)
        self._is_kept = is_kept

    def forget(self) -> None:
        """Drop everything that is still expected, as after a failed pass."""
        self._expected = None
        self._to_recompute.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts; called by megatron-core in place of its own choice.

        Args:
            scores: [tokens, experts].

        Returns:
            Scores and numbers of the chosen experts, [tokens, k].
        """
        assert default_compute_topk is not None
        # Computed even if experts are given, because the statistics compare both
        # choices.
        values, router_choice = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        is_forward = self._expected is not None
        if is_forward:
            expected = self._expected
            self._expected = None
            # A forward pass without gradients that has a backward pass is activation
            # checkpointing: it will be recomputed.
            if self._is_kept and not torch.is_grad_enabled():
                self._to_recompute.append(expected)  # type: ignore[arg-type]
        else:
            expected = (
                self._to_recompute.popleft()
                if self._to_recompute and torch.is_grad_enabled()
                else (None, None)
            )
        assert expected is not None
        experts, weights = expected
        if experts is None:
            chosen = router_choice
        else:
            chosen = torch.where(experts < 0, router_choice, experts)
            # Weights of the given experts, by this router's own scores. The gradient
            # flows through them.
            values = scores.gather(1, chosen)
        if is_forward and weights is not None:
            with torch.no_grad():
                self._count(scores, router_choice, chosen, experts, weights)
        return values, chosen

    def _count(
        self,
        scores: torch.Tensor,
        router_choice: torch.Tensor,
        chosen: torch.Tensor,
        experts: torch.Tensor | None,
        weights: torch.Tensor,
    ) -> None:
        """Add one forward pass to the statistics."""
        num_experts = scores.shape[1]
        # Added on the device. Nothing is read back before `metrics`.
        load = self.counts.new_zeros(num_experts)
        load.index_add_(
            0, chosen.flatten(), weights.double().repeat_interleave(chosen.shape[1])
        )
        # A bias may make scores negative. Such experts are never chosen.
        exact_scores = scores.double()
        shares = (
            exact_scores.softmax(dim=-1)
            if self._scores_are_logits
            else _shares(exact_scores.clamp(min=0))
        )
        entropy = -torch.special.xlogy(shares, shares).sum(dim=-1)
        compared = (
            torch.zeros_like(entropy)
            if experts is None
            else weights * (experts >= 0).all(dim=1)
        )
        # Order does not matter, so sorted choices are compared.
        differs = (router_choice.sort(dim=1).values != chosen.sort(dim=1).values).any(
            dim=1
        )
        sums = torch.stack(
            [
                column.double().sum()
                for column in (weights, entropy * weights, compared, compared * differs)
            ]
        )
        self.counts += torch.cat([load, sums])


class RouterReplay:
    """All routers of this rank's model chunks.

    Args:
        chunks: the model's chunks.
        config: their configuration.
        grid: the model's grid.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: TransformerConfig, grid: Grid
    ) -> None:
        self._grid = grid
        self._is_sequence_parallel = config.sequence_parallel
        self._num_layers = config.num_layers
        self._num_experts = config.num_moe_experts
        # Keyed by the layer's number, counted from 0.
        self._routers: dict[int, ReplayedRouter] = {}
        self._layers_by_model: dict[int, list[int]] = {}
        for chunk in chunks:
            for router in _routers_of(chunk):
                router.router_replay = self._routers[router.layer_number - 1] = (
                    # megatron-core's router asks this object when it chooses.
                    ReplayedRouter(router)
                )

    def expect(
        self, model: torch.nn.Module, batch: MicroBatch, width: int, *, is_kept: bool
    ) -> None:
        """Set the experts of a chunk's routers for the next forward pass.

        Args:
            batch: micro-batch of the pass. Tokens that predict a response token count in the statistics.
            width: length of the rows that the model reads, at least that of the batch's rows.
            is_kept: whether a backward pass follows.
        """
        rows = batch.tokens.shape[0]
        weights = torch.zeros(rows, width, device=batch.tokens.device)
        # A token counts if its output predicts a response token.
        weights[batch.predicting.row, batch.predicting.position] = 1.0
        routed = batch.routed_experts
        if routed is not None and routed.shape[1] < width:
            # Pairs for the last dimensions first: choices, layers, tokens.
            padding = (0, 0, 0, 0, 0, width - routed.shape[1])
            routed = torch.nn.functional.pad(routed, padding, value=ROUTERS_CHOICE)
        own_weights = self._as_seen(weights)
        for layer in self._layers_of(model):
            experts = (
                None if routed is None else self._as_seen(routed[:, :, layer].long())
            )
            self._routers[layer].expect(experts, own_weights, is_kept=is_kept)

    def _layers_of(self, model: torch.nn.Module) -> list[int]:
        """Return the layer numbers of a chunk, or of a module that wraps one."""
        if id(model) not in self._layers_by_model:
            self._layers_by_model[id(model)] = [
                router.layer_number - 1 for router in _routers_of(model)
            ]
        return self._layers_by_model[id(model)]

    def _as_seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [b, s, ...] as [tokens, ...], in the order in which routers on this rank see tokens."""
        # Routers see [s, b] in megatron-core's order: position by position.
        by_place = rows.transpose(0, 1)
        if self._is_sequence_parallel:
            by_place = by_place.chunk(self._grid.shape.tp)[self._grid.coords.tp]
        return by_place.flatten(0, 1)

    # A failed pass may leave entries in the queues.
    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surround all micro-batches of a batch. On exit, routers drop what they still expect."""
        try:
            yield
        finally:
            for router in self._routers.values():
                router.forget()

    def metrics(self) -> dict[str, float]:
        """Return the statistics since the last call. Collective over all ranks of the grid.

        - `moe/load_max`: tokens of the busiest expert divided by the mean, in the worst layer.
        - `moe/overflow`: share of choices above an even load.
        - `moe/idle_experts`: share of experts without any token.
        - `moe/router_entropy`: in nats, mean over tokens and layers.
        - `moe/routes_differ`: share of tokens and layers in which the router's own choice differs from the given
          experts.
        """
        assert self._num_experts is not None
        counts = torch.zeros(
            self._num_layers,
            self._num_experts + 4,
            dtype=torch.float64,
            device=platform.device,
        )
        # Layers of other stages stay zero here, so the sum over ranks is complete.
        for layer, router in self._routers.items():
            counts[layer] = router.counts
            router.counts.zero_()
        dist.all_reduce(counts, group=self._grid.world)
        return counted(counts.cpu())


def _shares(scores: torch.Tensor) -> torch.Tensor:
    """Return scores normalized to sum to 1."""
    return scores / scores.sum(dim=-1, keepdim=True)


def _routers_of(model: torch.nn.Module) -> Iterator[TopKRouter]:
    """Return the routers inside a module."""
    return (module for module in model.modules() if isinstance(module, TopKRouter))


def counted(counts: torch.Tensor) -> dict[str, float]:
    """Convert counts [layers, experts + 4] to the metrics of `RouterReplay.metrics`; empty if no token was counted."""
    sums = counts[:, -4:]
    # Layers that were never used would count as unbalanced.
    counts = counts[sums[:, TOKENS] > 0]
    if not len(counts):
        return {}
    load = counts[:, :-4]
    sums = counts[:, -4:].sum(dim=0)
    even = load.mean(dim=1, keepdim=True)
    metrics = {
        "moe/load_max": float((load / even).max()),
        "moe/overflow": float((load - even).clamp(min=0).sum() / load.sum()),
        "moe/idle_experts": float((load == 0).double().mean()),
        "moe/router_entropy": float(sums[ENTROPY] / sums[TOKENS]),
    }
    if sums[COMPARED] > 0:
        metrics["moe/routes_differ"] = float(sums[DIFFERENT] / sums[COMPARED])
    return metrics
