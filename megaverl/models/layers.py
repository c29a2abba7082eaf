"""Custom parts of a GPTModel: RMSNorm, a biased router, value heads, hooks, and differentiable sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megaverl.platform import platform
from megaverl.platform.batch_invariant import inverse_rms
from megaverl.platform.float32_linear import float32_linear

platform.adapt_megatron()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last dimension (arXiv 1910.07467, eq. 4).

    megatron-core's own wrapper refuses sequence parallelism. This one marks its weight
    so that `finalize_model_grads` sums the gradient over tensor-parallel ranks, each of
    which saw a part of the sequence. With `layernorm_zero_centered_gamma` (Gemma) the
    factor is 1 + weight, added in float32: in 16 bits a small weight would vanish
    beside the one.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.hidden_size = (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden]; the result has the same shape and dtype."""
        factor = 1.0 + self.weight.float() if self.zero_centred else self.weight
        # PyTorch has no fused kernel for CPUs.
        if hidden.device.type == "cpu":
            return rms_norm(hidden, factor, self.eps)
        if self.zero_centred:
            return F.rms_norm(hidden.float(), self.hidden_size, factor, self.eps).to(
                hidden.dtype
            )
        return F.rms_norm(hidden, self.hidden_size, factor, self.eps)


class NormAfterRope(RMSNorm):
    """RMSNorm over each query or key head after the rotary embedding, as in HunYuan.

    megatron-core's attention (0.16 to 0.19) normalizes before it. A hook before core
    attention calls `normalize` (`models/build.py`), so Transformer Engine's attention
    reads normalized heads too.
    """

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the heads unchanged, because megatron-core calls the norm before the rotary embedding."""
        return heads

    def normalize(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize [..., head_dim]; the result has the same shape and dtype."""
        return super().forward(heads)


def l2_normalize(heads: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each head of [..., head_dim] by its root mean square, in float32; shape and dtype stay (Llama 4)."""
    wide = heads.to(_wide(heads))
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse).to(heads.dtype)


def scale_queries(
    query: torch.Tensor, positions: torch.Tensor, floor: float, strength: float
) -> torch.Tensor:
    """Multiply queries by a factor that grows with their position, 1 + strength ln(1 + floor((p + 1) / floor)).

    Args:
        query: [s, b, heads, head_dim].
        positions: [s], position of each token in its sample.

    Returns:
        [s, b, heads, head_dim], dtype of `query`.
    """
    steps = torch.floor((positions.float() + 1.0) / floor)
    factors = 1.0 + strength * torch.log1p(steps)
    return (query * factors.view(-1, 1, 1, 1)).to(query.dtype)


class CentredNorm(nn.Module):
    """LayerNorm without a bias (arXiv 1607.06450), as in Cohere's models, computed in float32.

    Its weight is marked like that of `RMSNorm`, and has the same options.
    """

    bias: torch.Tensor | None

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.hidden_size = (hidden_size,)
        self.zero_centred = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centred else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter("bias", None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden]; the result has the same shape and dtype."""
        wide = hidden.to(_wide(hidden))
        weight = self.weight.to(wide.dtype)
        factor = 1.0 + weight if self.zero_centred else weight
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        normed = F.layer_norm(wide, self.hidden_size, factor, bias, self.eps)
        return normed.to(hidden.dtype)


class LayerNorm(CentredNorm):
    """LayerNorm with a bias (arXiv 1607.06450)."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection, which tensor-parallel ranks share (OLMo-2, arXiv 2501.00656).

    Each rank has the whole weight [heads * head_dim], and normalizes its own heads by
    the mean square over the heads of all ranks. megatron-core sums the weight's gradient
    over tp, found by the parameter's name (`q_layernorm`, `k_layernorm`), like that of a
    norm per head. If several ranks share a key-value head, each has a copy of it.

    `group` is set by `models/build.py`, since megatron-core passes no process group to
    norms.
    """

    group: dist.ProcessGroup

    def __init__(self, config: TransformerConfig, num_heads: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.num_heads = num_heads
        self.head_dim: int = config.kv_channels
        self.weight = nn.Parameter(
            torch.ones(num_heads * self.head_dim, dtype=config.params_dtype)
        )

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's heads [s, b, heads, head_dim]; the result has the same shape and dtype."""
        tp_size = self.group.size()
        num_local = heads.shape[2]
        num_copies = num_local * tp_size // self.num_heads
        wide = heads.to(_wide(heads))
        squares = wide.square().sum(dim=(2, 3), keepdim=True)
        # Every rank's heads depend on the sum, so its gradients are summed as well.
        total = sum_gradients(sum_values(squares, self.group), self.group)
        mean = total / (num_copies * self.num_heads * self.head_dim)
        first_head = self.group.rank() // num_copies * num_local
        weight = self.weight.view(self.num_heads, self.head_dim)[
            first_head : first_head + num_local
        ]
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(heads.dtype)


class QueryProjectionNorm(ProjectionNorm):
    """`ProjectionNorm` over all query heads."""

    def __init__(self, config: TransformerConfig, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, config.num_attention_heads, eps)


class KeyProjectionNorm(ProjectionNorm):
    """`ProjectionNorm` over all key heads."""

    def __init__(self, config: TransformerConfig, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, config.num_query_groups, eps)


class SharedNormOutput(nn.Module):
    """Replacement for the norm before an MLP that reads the output of the norm before attention (Cohere).

    `keep` is a forward hook of that norm. The kept output belongs to the same forward
    pass of the layer, also if the layer is recomputed.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._kept: torch.Tensor | None = None

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """Keep the output of the norm before attention."""
        self._kept = output

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the kept output, [s, b, hidden], whatever `hidden` is."""
        kept = self._kept
        assert kept is not None, "the norm before attention runs first"
        self._kept = None
        return kept


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x * weight / rms(x) over the last dimension (arXiv 1910.07467, eq. 4), on a CPU.

    It is computed in float32 or wider.

    Args:
        x: [..., width].
        weight: [width], dtype of `x` or wider.
        eps: added to the mean of squares.

    Returns:
        [..., width], dtype of `x`.
    """
    result: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return result


class _RMSNorm(torch.autograd.Function):
    """Autograd function of RMSNorm, with half the operators that PyTorch would run on a CPU.

    With n = x / rms(x) and h = dL/dy * weight: dL/dx = (h - n mean(h n)) / rms(x), and
    dL/dweight = sum dL/dy n. PyTorch has no fused CPU kernel and runs eight operators
    forward and more backward. Here most operators write in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        inverse = inverse_rms(x, eps, _wide(x))
        ctx.save_for_backward(x, weight, inverse)
        return _scaled(x, inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = _scaled(x, inverse)
        # Gradients may be of 16 bits, and products are summed over all tokens.
        wide = grad.to(_wide(grad))
        product = (wide * normed).reshape(-1, x.shape[-1])
        by_weight = (
            product.sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        # [tokens, 1]: mean of h n over the last dimension, needed for every element.
        mean = product.mv(weight.to(product.dtype)).div_(x.shape[-1]).view_as(inverse)
        by_x = (wide * weight).sub_(normed.mul_(mean)).mul_(inverse)
        return by_x.to(x.dtype), by_weight, None


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in float32, or unchanged if its dtype is wider."""
    return x.to(_wide(x))


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return float32, or the dtype of `x` if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x * factor as a new tensor of the dtype of `factor`, which is float32 or wider."""
    return x * factor if x.dtype == factor.dtype else x.to(factor.dtype).mul_(factor)


class BiasedRouter(TopKRouter):  # type: ignore[misc]  # megatron-core has no complete types
    """megatron-core's router with DeepSeek-V3's bias (arXiv 2412.19437, eq. 16).

    The bias affects the choice of experts, but not their weights. megatron-core keeps
    it as a buffer and adjusts it after every batch by the load. Here it is a frozen
    weight that is loaded, resharded and saved like the others: the engine samples with
    the same bias, and the loss does not depend on it.
    """

    def __init__(self, config: TransformerConfig, **arguments: Any) -> None:
        """Create the router.

        Args:
            arguments: process groups and further arguments, which differ between versions of megatron-core.
        """
        super().__init__(config=config, **arguments)
        bias = torch.zeros(config.num_moe_experts, dtype=torch.float32)
        self.expert_bias = nn.Parameter(bias, requires_grad=False)


class BiasedSoftmaxRouter(BiasedRouter):
    """`BiasedRouter` with softmax scores, as in Ernie 4.5.

    megatron-core (0.16 to 0.19) adds a bias to sigmoid scores only. It passes logits to
    `router_replay`, which chooses experts, and weighs these by the softmax of their
    logits. So only the choice is replaced.

    Attributes:
        replay: object that may take other experts, such as a `ReplayedRouter`. None: none.
    """

    def __init__(self, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._choice = BiasedChoice(self)

    @property
    def router_replay(self) -> BiasedChoice:
        """Object that chooses experts by biased scores, or takes those of `replay`."""
        return self._choice

    @router_replay.setter
    def router_replay(self, replay: Any) -> None:
        self.replay = replay


class BiasedChoice:
    """Choice of experts by softmax scores plus a bias, with the interface of megatron-core's `RouterReplay`.

    Attributes:
        layer_number: number of the router's layer, which megatron-core (0.19) sets.
    """

    def __init__(self, router: BiasedSoftmaxRouter) -> None:
        self._router = router
        self.layer_number: int | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for logits [tokens, experts]. Return logits and numbers of the chosen ones, [tokens, k]."""

        def choose(
            logits: torch.Tensor, topk: int, **groups: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            probabilities = torch.softmax(logits.to(_wide(logits)), dim=-1)
            biased = probabilities + self._router.expert_bias
            _, experts = default_compute_topk(biased, topk, **groups)
            return logits.gather(1, experts), experts

        groups = {"num_groups": num_groups, "group_topk": group_topk}
        replay = self._router.replay
        if replay is None:
            return choose(scores, topk, **groups)
        chosen: tuple[torch.Tensor, torch.Tensor] = replay.get_replay_topk(
            scores, topk, **groups, default_compute_topk=choose
        )
        return chosen


class ValueHead(nn.Module):
    """Linear map from hidden states to values at every position, in place of GPTModel's output layer.

    It gives one value, or one for each of several agents. Its weight [num_values,
    hidden] is the same on every tensor-parallel rank, and it computes in float32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        num_values: int = 1,
    ) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        # Zero: an untrained critic predicts 0, whatever the scale of the backbone.
        self.weight = nn.Parameter(
            torch.zeros(num_values, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # megatron-core gives output layers to Adam when it trains matrices by Muon, and
        # `optimizer.decoupled_lr`.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Map [s, b, hidden] to ([s, b, num_values] float32, no bias). Signature of ColumnParallelLinear."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        # The output layer would gather the sequence itself. The value head replaces it.
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None


class ValuesBesideLogits(ValueHead):
    """Value head on the hidden states that a model's output layer receives. The output layer stays unchanged.

    One forward pass gives logits as usual, and `take` returns the values for them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        output_layer: nn.Module,
        num_values: int = 1,
    ) -> None:
        super().__init__(config, tp_group, num_values)
        self._seen: torch.Tensor | None = None
        output_layer.register_forward_pre_hook(self._look)

    def _look(self, layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._seen = args[0]

    @property
    def waits(self) -> bool:
        """Return whether the values of the last forward pass have not been taken yet."""
        return self._seen is not None

    def take(self) -> torch.Tensor:
        """Return the values of the last forward pass, [b, s, num_values] float32. Can be called once per pass."""
        assert self._seen is not None, (
            "there was no forward pass, or its values were taken"
        )
        # Taken once, so that no hidden states of an earlier pass are used by mistake.
        hidden = self._seen
        self._seen = None
        values: torch.Tensor = self(hidden)[0]
        return values.transpose(0, 1)


class _SumGradients(torch.autograd.Function):
    """Identity in the forward pass; all-reduce in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The all-reduce works in place and needs a contiguous gradient.
        total = grads[0].contiguous()
        if dist.get_world_size(ctx.group) > 1:
            dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_gradients(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `values` unchanged; in the backward pass their gradients are summed over the group.

    `values` must be equal on all ranks. megatron-core's
    `copy_to_tensor_model_parallel_region` (0.16) silently skips the sum for a gradient
    that is not contiguous, such as that of a transposed tensor.
    """
    summed: torch.Tensor = _SumGradients.apply(values, group)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return summed


class _SumValues(torch.autograd.Function):
    """All-reduce in the forward pass; identity in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        # Copied, because the all-reduce overwrites its input, which autograd may need.
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def sum_values(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of `values` over the group.

    In the backward pass every rank gets the gradient of the sum, which is equal on all
    ranks.
    """
    if dist.get_world_size(group) == 1:
        return values
    summed: torch.Tensor = _SumValues.apply(values, group)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return summed


class HiddenHead:
    """Replacement for an output layer's `forward` that returns the hidden states and keeps the weight for later.

    In the backward pass the gradient is summed over tensor-parallel ranks, as the layer
    itself would do.
    """

    def __init__(self, layer: Any, group: dist.ProcessGroup) -> None:
        self._layer = layer
        self._group = group
        self._tied: torch.Tensor | None = None
        # The layer's weight stays a parameter of the layer, and only its forward pass
        # is replaced.
        layer.forward = self

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the last forward pass, [padded_vocab / tp, hidden]."""
        weight: torch.Tensor = self._layer.weight if self._tied is None else self._tied
        return weight

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states [s, b, hidden] of the whole sequence, and no bias.

        Signature of ColumnParallelLinear.
        """
        # With tied embeddings megatron-core passes the weight in each pass.
        self._tied = weight
        if self._layer.sequence_parallel:
            whole = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self._group
            )
        else:
            whole = sum_gradients(hidden, self._group)
        return whole, None


class Float32Head(HiddenHead):
    """Replacement for an output layer's `forward` that computes logits in float32 from a weight of 16 bits."""

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return this rank's part of the logits, [s, b, padded_vocab / tp] float32, and no bias."""
        whole, _ = super().__call__(hidden, weight, runtime_gather_output)
        return float32_linear(whole, self.weight), None


def to_float32(
    layer: nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Forward pre-hook that converts a layer's first argument to float32."""
    return args[0].float(), *args[1:]


class AtPositions:
    """Hooks that make rotary embeddings follow the tokens' own positions instead of 0, 1, 2, ...

    Args:
        axes: axis whose position rotates each dimension of a head's first half, for positions in time, height and
            width (arXiv 2409.12191, section 2.1). megatron-core has such an embedding (`position_embedding_type:
            mrope`, 0.16 to 0.19), but not Qwen3-VL's, whose axes alternate, and not for scaled frequencies.

    Attributes:
        positions: [t] int64 of the current packed row, or of a context-parallel rank's tokens; [3, b, s] int64 with
            `axes`. None: a row is one sequence.
    """

    def __init__(self, axes: Sequence[int] = ()) -> None:
        self.positions: torch.Tensor | None = None
        # Both halves of a head are rotated by the same angles.
        self._axes = torch.tensor([*axes, *axes], dtype=torch.int64)

    def attach(self, rotary: torch.nn.Module) -> None:
        """Register the hooks on a rotary embedding."""
        rotary.register_forward_pre_hook(self._whole, with_kwargs=True)
        rotary.register_forward_hook(self)

    def _whole(
        self, module: object, args: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Keep megatron-core from splitting the embeddings over context-parallel ranks.

        It would split them as for a row of one sequence.
        """
        return (
            None if self.positions is None else (args, {**options, "packed_seq": True})
        )

    @contextmanager
    def at(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Use these positions for forward passes inside."""
        self.positions = positions
        try:
            # Positions are set for a whole forward pass. Recomputed layers set them
            # again.
            yield
        finally:
            self.positions = None

    def __call__(self, module: object, args: object, output: Any) -> Any:
        if self.positions is None:
            return output
        # YaRN's embedding returns a tuple of the table and a scaling factor.
        if isinstance(output, tuple):
            return self._rows(output[0], self.positions), *output[1:]
        return self._rows(output, self.positions)

    def _rows(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles of tokens, [s, 1, 1, d] or [s, b, 1, d], from those of all positions, [n, 1, 1, d]."""
        if positions.dim() == 1:
            return table.index_select(0, positions)
        # Copied to the device once.
        self._axes = axes = self._axes.to(positions.device)
        # [3, b, s] -> [d, b, s] -> [s, b, d]: the position that rotates each dimension.
        places = positions.index_select(0, axes).permute(2, 1, 0)
        angles = table[:, 0, 0].gather(0, places.flatten(0, 1))
        return angles.view(places.shape).unsqueeze(2)


def as_one_row(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of embeddings that gives [t, 1, hidden] the strides of a tensor created with that shape.

    A transposed [1, t, hidden] is contiguous with other strides. If the following
    weights are frozen, `torch.matmul` would then multiply token by token.
    """
    return output.squeeze(1).unsqueeze(1) if output.shape[1] == 1 else output
