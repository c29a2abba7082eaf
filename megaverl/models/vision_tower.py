"""transformers' vision tower beside the embedding of a Megatron-core model, on its first pipeline stage.

The tower is a module of the first stage's embedding, `embedding.visual`. A hook on the
embedding replaces the embeddings of image tokens with the tower's features:

    tokens [b, s] -> embedding [s, b, hidden] -> features at image tokens -> decoder
    images -> embedding.visual -> features [image tokens, hidden] --^

Every tensor-parallel rank holds the whole tower and computes the features of all
images of a micro-batch. The gradient of a decoder's input is equal on these ranks, and
so is the tower's: it needs no sum. With sequence parallelism each rank places the
features of its own part of the row and gets the gradient of these. The parameters are
then marked `sequence_parallel`, and megatron-core sums their gradients over the ranks
(0.16 to 0.19, `distributed/finalize_model_grads.py`), as those of norms.
Data-parallel ranks reduce them like all others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from megaverl.distributed.groups import Grid
from megaverl.errors import ModelError
from megaverl.models.hf_model import checkpoint_block, fill_buffers
from megaverl.models.vision import VisionInputs, zero_of_tower
from megaverl.platform import platform
from megaverl.sharding.model_spec import ModelSpec, VisionSpec

# Name of the tower among the embedding's modules.
NAME = "visual"
# Family -> transformers' class of the tower. AutoModel (5.19) does not know all of them.
TOWERS = {
    "qwen2_vl": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}


def build_tower(vision: VisionSpec, dtype: torch.dtype, *, seed: int | None) -> Any:
    """Build transformers' vision tower on the host, or on the meta device with its buffers in place.

    Args:
        seed: initialize random weights. None: leave parameters uninitialized, on the platform's device.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = vision.family
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    tower_class: Any = getattr(models, TOWERS[family])
    whole: Any = CONFIG_MAPPING[family].from_dict({"vision_config": vision.values})
    # Patches of one image all see each other, which the decoder's kernel would forbid.
    options = {"attn_implementation": "sdpa", "dtype": dtype}
    if seed is not None:
        # The seed decides the initial weights only: random numbers of the process go on
        # as before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return tower_class._from_config(whole.vision_config, **options)
    with torch.device("meta"):
        tower = tower_class._from_config(whole.vision_config, **options)
    fill_buffers(tower)
    for module in tower.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device=platform.device)
            setattr(module, name, nn.Parameter(empty))
    return tower


def check_deepstack(spec: ModelSpec, num_layers: int, *, recomputes: bool) -> None:
    """Check that the tower's further features can be added to the outputs of layers. Every rank checks it alike.

    Args:
        num_layers: decoder layers of the first stage.
        recomputes: layers are recomputed as a whole in the backward pass.

    Raises:
        ModelError: some of these layers are on another stage, or are recomputed.
    """
    count = 0 if spec.vision is None else spec.vision.deepstack
    if count > num_layers:
        raise ModelError(
            f"{spec.architecture} adds features of images to the outputs of its first {count} layers, and the first "
            f"stage has {num_layers}. Lower pp or vpp, or give the first stage more layers."
        )
    # The features would be outside of the recomputed graph, and the tower's backward
    # pass would run once for each layer.
    if count and recomputes:
        raise ModelError(
            f"{spec.architecture} adds features of images to the outputs of its first {count} layers, which cannot be "
            "recomputed. Leave activation_checkpointing: full (recompute_granularity) out, or take selective."
        )


class VisionTower:
    """Hooks that place the features of images in the hidden states of a first stage.

    Example:
        tower = VisionTower(model, spec, grid, seed=0)
        with tower.sees(vision_inputs):
            output = model(tokens, positions, None)

    Args:
        model: chunk of the first stage.
        seed: seed of random initial weights, equal on all ranks. None: weights will be loaded.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, grid: Grid, *, seed: int | None
    ) -> None:
        assert spec.vision is not None, "the model takes no images"
        config = model.config
        self._vision = spec.vision
        self._inputs: VisionInputs | None = None
        # Features for the outputs of the first layers, from the embedding of this
        # forward pass.
        self._deepstack: list[torch.Tensor] = []
        self._place: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tp = (grid.coords.tp, grid.shape.tp) if config.sequence_parallel else None
        self.module = build_tower(spec.vision, config.params_dtype, seed=seed)
        if config.recompute_granularity == "full":
            for block in self.module.blocks:
                checkpoint_block(block, "full")
        for parameter in self.module.parameters():
            parameter.sequence_parallel = bool(config.sequence_parallel)
        model.embedding.add_module(NAME, self.module)
        model.embedding.register_forward_hook(self._replace)
        for number in range(spec.vision.deepstack):
            model.decoder.layers[number].register_forward_hook(
                partial(self._add, number)
            )

    @contextmanager
    def sees(self, inputs: VisionInputs) -> Iterator[None]:
        """Use these images for the forward pass inside."""
        self._inputs = inputs
        try:
            yield
        finally:
            self._inputs = None
            self._deepstack = []
            self._place = None

    @property
    def _is_trained(self) -> bool:
        return torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in self.module.parameters()
        )

    def _replace(
        self, embedding: nn.Module, args: Any, output: torch.Tensor
    ) -> torch.Tensor:
        """Replace embeddings of image tokens: forward hook of the embedding, [s, b, hidden] or a part of s."""
        inputs = self._inputs
        if inputs is None or not inputs.given:
            # megatron-core may wait for the gradient of every parameter before it
            # reduces a bucket, so that of a trained tower must come.
            if not self._is_trained:
                return output
            zero = zero_of_tower(self.module, output.device)
            return output + zero.to(output.dtype)
        is_image = inputs.places == self._vision.image_token
        # Number of each image token among all, in the order of the rows.
        number = is_image.flatten().cumsum(0).sub(1).clamp(min=0).view_as(is_image)
        # Contiguous: `torch.where` gives its result the strides of the mask, and
        # megatron-core's router (0.16 to 0.19) takes views of hidden states.
        self._place = (
            self._own(is_image.T.contiguous()),
            self._own(number.T.contiguous()),
        )
        features = self.module(inputs.pixel_values, grid_thw=inputs.image_grid_thw)
        self._deepstack = list(getattr(features, "deepstack_features", None) or ())
        mask, placed = self._placed(features.pooler_output, output)
        return torch.where(mask, placed, output)

    def _add(self, number: int, layer: nn.Module, args: Any, output: Any) -> Any:
        """Add further features to image tokens: forward hook of decoder layer `number`, (hidden, context)."""
        if self._place is None:
            return output
        hidden, *others = output
        mask, placed = self._placed(self._deepstack[number], hidden)
        return hidden + torch.where(mask, placed, 0.0), *others

    def _placed(
        self, features: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mask of image tokens [s, b, 1], and features at their places [s, b, hidden].

        Other places hold some feature. Nothing here waits for the device, which a
        selection by the mask would.
        """
        assert self._place is not None, "the embedding has run before"
        is_image, number = self._place
        rows = features.to(hidden.dtype).index_select(0, number.flatten())
        return is_image.unsqueeze(-1), rows.view_as(hidden)

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of [s, b] with sequence parallelism, else all of it."""
        if self._tp is None:
            return rows
        rank, size = self._tp
        return rows.chunk(size)[rank]
