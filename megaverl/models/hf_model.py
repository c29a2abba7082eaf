"""A Hugging Face causal language model as a policy or a critic, built without data and sharded by FSDP2."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megaverl.errors import ConfigError, ModelError
from megaverl.models.freezing import frozen_names
from megaverl.models.hf_attention import NAME, RowReading, register, row_reading
from megaverl.models.hf_shards import (
    VALUE_HEAD,
    VALUE_WEIGHT,
    check_in_transformers,
    not_built,
)
from megaverl.models.vision import (
    VisionInputs,
    VisionReader,
    auto_class_of,
    tower_of,
    zero_of_tower,
)
from megaverl.models.vocab_parallel import capped
from megaverl.platform import flash_attention, platform
from megaverl.platform.hf_mamba import correct_mamba
from megaverl.sharding.model_config import instead_of
from megaverl.sharding.tracing import weights_of_module
from megaverl.user_code import describe, user_code

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


QUANTISED = "quantization_config"


class RootModule(nn.Module):
    """Root module that FSDP shards, around a model of transformers."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


class HeadModule(RootModule):
    """Root module around the head of a speculative decoder."""

    def forward(self, observed: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Run `DraftHead.forward`."""
        states: torch.Tensor = self.model(observed, num_steps)
        return states


class PolicyModule(RootModule):
    """Root module of a causal language model, and a value head instead of its logits or beside them.

    Args:
        model: model of transformers.
        num_values: values per position of the value head. 0: no value head.
        gives_hidden: return hidden states instead of logits, because logits are computed later or only values are
            wanted.
        dtype: dtype of the value head.
        router_loss: the load-balancing loss of experts' routers may be requested.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_values: int,
        gives_hidden: bool,
        dtype: torch.dtype,
        router_loss: bool = False,
    ) -> None:
        super().__init__(model)
        self.gives_hidden = gives_hidden
        backbone = model.base_model
        # transformers returns the model itself where a class names no
        # `base_model_prefix`.
        if backbone is model and (num_values or gives_hidden):
            raise ModelError(
                f"{type(model).__name__}: transformers does not say which of its modules is the backbone."
            )
        # Some architectures compute positions themselves and refuse the argument.
        self._positions = (
            "position_ids" in inspect.signature(type(backbone).forward).parameters
        )
        self._seen: torch.Tensor | None = None
        if num_values:
            # Zero: an untrained critic predicts 0, whatever the scale of the backbone.
            head = nn.Linear(
                model.config.get_text_config().hidden_size, num_values, bias=False
            )
            nn.init.zeros_(head.weight)
            self.add_module(VALUE_HEAD, head.to(dtype))
        # The value head and the router loss need the hidden states, whichever module is
        # called.
        if num_values or (router_loss and gives_hidden):
            backbone.register_forward_hook(self._look)
        self._takes_images = tower_of(model) is not None
        self._drawn: torch.Tensor | None = None
        self._sees_none = False
        if self._takes_images:
            model.get_input_embeddings().register_forward_pre_hook(self._embed_drawn)
            # FSDP gathers the tower's weights collectively, so every rank must run the
            # tower the same number of times.
            model.base_model.language_model.register_forward_pre_hook(
                self._look_at_none, with_kwargs=True
            )

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the backbone's hidden states."""
        self._seen = output[0]

    def _embed_drawn(self, module: nn.Module, args: Any) -> Any:
        """Embed the tokens as sampled.

        An image token that a response sampled has an ordinary embedding and no image.
        """
        return args if self._drawn is None else (self._drawn,)

    def _look_at_none(
        self, module: nn.Module, args: Any, options: dict[str, Any]
    ) -> Any:
        """Run the vision tower on a micro-batch without images, at the point where other ranks run it on theirs."""
        if self._sees_none:
            embedded = options["inputs_embeds"]
            zero = zero_of_tower(tower_of(self.model), embedded.device)
            options = {**options, "inputs_embeds": embedded + zero.to(embedded.dtype)}
        return args, options

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seen: VisionInputs | None = None,
        *,
        router_loss: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Run the model on tokens and positions [b, s].

        Args:
            seen: images, and the positions that follow from them, for a model that takes images.
            router_loss: compute the routers' load-balancing loss too.

        Returns:
            Logits [b, s, vocabulary] or hidden states [b, s, hidden]; values [b, s, num_values] float32 or None; and
                the routers' loss or None.
        """
        # In a packed row every token has its position in its own sequence.
        options: dict[str, Any] = {"position_ids": positions} if self._positions else {}
        module = self.model.base_model if self.gives_hidden else self.model
        self._drawn = None
        if self._takes_images and seen is not None:
            options = {"position_ids": seen.positions, **seen.given}
            self._drawn = tokens
            # The tower finds its places by the image token, so sampled image tokens are
            # hidden from it.
            tokens = seen.places
        self._sees_none = "pixel_values" not in options
        loss = None
        # Only the whole model computes the router loss, and it insists on logits: one
        # position is the fewest.
        if router_loss:
            module, options["output_router_logits"] = self.model, True
            options |= {"logits_to_keep": 1} if self.gives_hidden else {}
        outputs = module(input_ids=tokens, use_cache=False, **options)
        hidden = self._seen
        # Dropped at once: hidden states are as large as the activations of a layer.
        self._seen = None
        if router_loss:
            loss = outputs.aux_loss
        output: Any = outputs[0] if self.gives_hidden else outputs.logits
        if self.gives_hidden and router_loss:
            output = hidden
        if not hasattr(self, VALUE_HEAD):
            return output, None, loss
        # The hook on the backbone has run in this forward pass.
        assert hidden is not None
        weight: torch.Tensor = self.get_submodule(VALUE_HEAD).weight  # type: ignore[assignment]
        return output, nn.functional.linear(hidden.float(), weight.float()), loss


def read_config(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return transformers' configuration of a folder.

    Raises:
        ModelError: transformers does not know the model.
    """
    from transformers import AutoConfig

    # Code that comes with a model may raise anything.
    with user_code(lambda error: not_built(folder, error), keep=ModelError):
        check_in_transformers(folder, trust_remote_code=trust_remote_code)
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
    return config


def build_module(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    seed: int | None,
    attention: str = "auto",
    liger: bool = False,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, RowReading]:
    """Build the causal language model of a folder's config.json. Returns it and how it reads rows.

    Args:
        dtype: dtype of its parameters.
        seed: initialize random weights on the host. None: parameters are on the meta device, and buffers that no folder
            stores are initialized.
        attention: transformers' attn_implementation. "auto": megaverl's, if it supports the model.
        liger: use Liger's kernels.
        trust_remote_code: allow Python code in the folder to run.

    Raises:
        ModelError: transformers cannot build it, or its weights are quantized.
        ConfigError: Liger's kernels cannot be used here, or `attention` does not compute the model.
    """
    register()
    # Read on every rank. Nothing is downloaded here.
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if quantised := getattr(config, QUANTISED, None):
        problem = (
            "its weights are quantised, and only floating-point weights can be trained."
        )
        raise ModelError(f"{folder}: {problem} {instead_of(QUANTISED, quantised)}")
    if attention == "sdpa" and flash_attention.score_softcap(config) is not None:
        raise ConfigError(
            f"fsdp.attention=sdpa: transformers' sdpa leaves out the soft cap on scores of {config.model_type} models. "
            "Leave it at auto."
        )
    with torch.device("meta"):
        # A copy on the meta device shows how the model reads rows, and takes no memory.
        # There torch (2.13) has the grouped product of experts in bfloat16 only.
        model = _from_config(folder, config, NAME, torch.bfloat16, trust_remote_code)
    reading = RowReading(f"attention is {attention}", attention)
    if attention == "auto":
        try:
            reading = row_reading(model, len(blocks_of(model)), dtype)
        except AttributeError as error:
            raise not_built(folder, error, in_forward=True) from error
    if seed is not None:
        # The seed decides the initial weights only: random numbers of the process go on
        # as before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _from_config(
                folder, config, reading.attention, dtype, trust_remote_code
            )
    else:
        with torch.device("meta"):
            model = _from_config(
                folder, config, reading.attention, dtype, trust_remote_code
            )
        with user_code(lambda error: not_built(folder, error), keep=ModelError):
            fill_buffers(model)
    if liger:
        _use_liger(model)
    return model, reading


def _use_liger(model: PreTrainedModel) -> None:
    """Apply Liger's norms, rotary embeddings and MLPs.

    Its losses are not needed: the model's own loss is never computed.
    """
    key = "fsdp.liger"
    if not platform.is_cuda:
        raise ConfigError(
            f"{key}: Liger's kernels need a GPU, and there is none. Leave it out."
        )
    try:
        monkey_patch = importlib.import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise ConfigError(
            f"{key}: liger-kernel is not installed ({error}). pip install liger-kernel."
        ) from error
    if model.config.model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"{key}: Liger has no kernels for {model.config.model_type} models. Leave it out."
        )
    monkey_patch._apply_liger_kernel_to_instance(
        model=model,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
        rms_norm=True,
    )


def _from_config(
    folder: str | Path,
    config: PretrainedConfig,
    attention: str | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Build the model with random or no data, depending on the current default device."""
    kinds: Any = attention
    # Patches of one image all see each other, which the kernel's causal mask would
    # forbid.
    if VisionReader.of(config) is not None:
        kinds = {"text_config": attention or "sdpa", "vision_config": "sdpa"}
    # Code that comes with a model may raise anything.
    with user_code(lambda error: not_built(folder, error)):
        model: PreTrainedModel = auto_class_of(config).from_config(
            config,
            attn_implementation=kinds,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    correct_mamba(model)
    return model


def fill_buffers(model: PreTrainedModel) -> None:
    """Initialize buffers that no folder stores (rotary frequencies, scales), as `from_pretrained` does."""
    saved = model.state_dict(keep_vars=True)
    for tensor in saved.values():
        # transformers skips tensors with this mark, so that only the missing buffers
        # are initialized.
        tensor._is_hf_initialized = True
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if (f"{path}.{name}" if path else name) not in saved:
                # Buffers on the meta device have no values, so they get memory first.
                setattr(module, name, torch.empty_like(buffer, device=platform.device))
    model.initialize_weights()


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder blocks, which FSDP gathers one at a time: the longest list of modules of one kind.

    Raises:
        ModelError: there is no such list.
    """
    # transformers names the block classes that must not be split over devices.
    named = set(getattr(model, "_no_split_modules", None) or ())
    # In a model with images, the vision tower has a list of blocks too, which may be
    # longer.
    text = getattr(model.base_model, "language_model", model)
    module_lists = [
        list(module) for module in text.modules() if isinstance(module, nn.ModuleList)
    ]
    block_lists = [modules for modules in module_lists if modules]
    named_lists = [
        modules for modules in block_lists if type(modules[0]).__name__ in named
    ]
    if not block_lists:
        raise ModelError(
            f"{type(model).__name__}: no list of decoder layers was found in it."
        )
    return max(named_lists or block_lists, key=len)


def vision_blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of the vision tower, or an empty list."""
    tower = tower_of(model)
    return [] if tower is None else list(tower.get_submodule("blocks").children())


def freeze_weights(model: PreTrainedModel, patterns: Sequence[str], role: str) -> None:
    """Freeze all weights whose names in the folder match a pattern. Errors are those of `frozen_names`."""
    # Patterns are of names in the files, which may differ from the module's.
    renamed = weights_of_module(model).renamed if patterns else {}
    names = {
        renamed.get(name, name): parameter
        for name, parameter in model.named_parameters()
    }
    for name in frozen_names(names, patterns, role):
        names[name].requires_grad_(False)


def router_loss_coef(model: PreTrainedModel, wanted: float | None, role: str) -> float:
    """Return the weight of the experts' load-balancing loss. 0: the loss is not computed.

    Args:
        wanted: the configured weight. None: that of config.json if it has `output_router_logits`, as in transformers'
            own training.

    Raises:
        ConfigError: transformers has no such loss for this model.
    """
    if wanted is None:
        config = model.config.get_text_config()
        makes = getattr(config, "output_router_logits", False)
        wanted = (
            float(getattr(config, "router_aux_loss_coef", None) or 0.0)
            if makes
            else 0.0
        )
    if (
        wanted
        and "output_router_logits"
        not in inspect.signature(type(model).forward).parameters
    ):
        raise ConfigError(
            f"{role}.fsdp.router_aux_loss_coef={wanted:g}: transformers' {type(model).__name__} makes no loss of "
            "routers. Set it to 0."
        )
    return wanted


def logits_are_plain(model: PreTrainedModel, softcap: float | None = None) -> bool:
    """Return whether logits are exactly the last hidden states times the output layer's weight, with a soft cap.

    Found by a forward pass in which backbone and output layer return made-up tensors. A
    model that scales its logits, or caps them otherwise, changes them.

    Args:
        softcap: the cap. None: no cap.
    """
    head: nn.Module = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return False
    # Values that a soft cap, a scale or a norm between the hidden states and the logits
    # changes.
    hidden = torch.linspace(-3.0, 3.0, 2 * head.in_features).view(1, 2, -1)
    logits = torch.linspace(-50.0, 50.0, 2 * 8).view(1, 2, -1)
    seen: list[torch.Tensor] = []

    def backbone(*args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        outputs: Any = BaseModelOutputWithPast(last_hidden_state=hidden)
        # Models that take images read this field.
        outputs.rope_deltas = None
        return outputs

    def output_layer(hidden_states: torch.Tensor) -> torch.Tensor:
        seen.append(hidden_states)
        return logits

    # No weight is read, so that the model may be on the meta device.
    with _forwards({model.base_model: backbone, head: output_layer}):
        try:
            with user_code(lambda error: ModelError(describe(error))):
                result = model(
                    input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False
                ).logits
        # Code that comes with a model may need more than these inputs.
        except ModelError:
            return False
    return (
        len(seen) == 1
        and torch.equal(seen[0], hidden)
        and torch.equal(result, capped(logits, softcap))
    )


@contextmanager
def _forwards(functions: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward functions of modules inside."""
    for module, function in functions.items():
        module.forward = function
    try:
        yield
    finally:
        for module in functions:
            # The instance's attribute hides the class's method, which shows again once
            # it is deleted.
            del module.forward


# Operators whose results selective activation checkpointing keeps: matrix products and
# attention. All others are cheap to recompute.
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def checkpoint_block(block: nn.Module, kind: str) -> None:
    """Recompute a block's activations in the backward pass: all of them (full), or the cheap ones (selective)."""
    forward = block.forward

    def kept(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operator in KEPT
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # Without a backward pass there is nothing to recompute.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kind == "full":
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        context = lambda: create_selective_checkpoint_contexts(kept)  # noqa: E731
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=context, **kwargs
        )

    block.forward = checkpointed


def shard_module(
    module: RootModule,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    cpu_offload: bool,
) -> FSDPModule:
    """Apply `fully_shard` in place to each decoder block, to embeddings that are not tied, and to the rest.

    Gradients are summed over the ranks, not averaged. Parameters on the meta device get
    uninitialized memory, which the caller may fill right away.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=platform.is_cuda)
        if cpu_offload
        else OffloadPolicy(),
    }
    model = module.model
    # Inner modules first: `fully_shard` leaves parameters of units inside a module to
    # them.
    for block in [*vision_blocks_of(model), *blocks_of(model)]:
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    # A tied weight belongs to two modules, so only the root may own it. A draft head has
    # no embeddings.
    if (
        embeddings is not None
        and getattr(head, "weight", None) is not embeddings.weight
    ):
        fully_shard(embeddings, reshard_after_forward=reshard_after_forward, **options)
    # The rest (norms, heads) is gathered first and used last, so it stays gathered from
    # the forward to the backward pass.
    fully_shard(module, reshard_after_forward=False, **options)
    place = torch.device("cpu") if cpu_offload else platform.device
    # `to_empty` would allocate buffers anew that have values already, such as rotary
    # frequencies.
    module._apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        lambda tensor: (
            torch.empty_like(tensor, device=place) if tensor.is_meta else tensor
        )
    )
    for unit in sharded(module):
        # Losses are normalized over the global batch, so FSDP must not divide by the
        # number of ranks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # The first unshard fixes where the parameters lie in memory; layouts and the
        # optimizer refer to that place.
        unit.unshard()
        unit.reshard()
    if cpu_offload:
        # unshard() copies pinned parameters to the device asynchronously, and the
        # caller overwrites them next.
        platform.synchronize()
    return module  # type: ignore[return-value]  # `fully_shard` has changed its class


def sharded(module: nn.Module) -> list[FSDPModule]:
    """Return all FSDP units inside a module, the module itself first."""
    return [
        submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)
    ]


def local_tensors(module: RootModule) -> dict[str, torch.Tensor]:
    """Return this rank's shards of parameters and its saved buffers, each once, by transformers' names.

    A parameter with fewer rows than ranks has empty shards on some of them. These are
    left out, as in layouts (`Layout.local_shapes`).
    """
    return {name: shard for name, shard in all_shards(module).items() if shard.numel()}


def all_shards(module: RootModule) -> dict[str, torch.Tensor]:
    """Return what `local_tensors` returns and the empty shards, whose storage is not empty: FSDP2 pads it."""
    state = module.model.state_dict(keep_vars=True)
    if hasattr(module, VALUE_HEAD):
        state = {**state, VALUE_WEIGHT: module.get_submodule(VALUE_HEAD).weight}
    shards: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # FSDP2 keeps parameters as DTensors, of which only this rank's shard counts.
    for name, tensor in state.items():
        # A tied parameter appears under several names; its first name stands for all.
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shards[name] = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor
            ).detach()
    return shards
