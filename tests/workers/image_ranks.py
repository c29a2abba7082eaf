"""What the ranks do in tests/workers/test_images.py: models against transformers, on prompts with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.tensor import DTensor

from megaverl.config.fsdp import FsdpConfig
from megaverl.config.run import ImagesConfig
from megaverl.data.batch import RolloutBatch
from megaverl.data.images import Images, image_column
from megaverl.data.prompts import PromptEncoder, RowColumns
from megaverl.data.tokenizers import load_tokenizer
from megaverl.distributed.grid import GridShape
from megaverl.errors import ConfigError, ModelError
from megaverl.models.packing import MicroBatch
from megaverl.rollout.engine import Generation
from megaverl.sharding.model_spec import ModelSpec
from megaverl.sharding.tracing import weights_of_module
from megaverl.weights.transports.tensor_views import view
from megaverl.workers.fsdp_model import FSDPModel
from megaverl.workers.megatron_model import MegatronModel
from megaverl.workers.micro_batches import micro_batches_for
from megaverl.workers.model_options import ModelOptions
from megaverl.workers.optimizers import MegatronTrainable
from tests.models.ranks import manager


def samples(folder: str, order: list[int]) -> tuple[RolloutBatch, int]:
    """Prompts with one image, two, and none, in this order, and the image token, which some responses draw."""
    tokenizer = load_tokenizer(folder)
    reader = Images.of(ImagesConfig(), folder, tokenizer)
    assert reader is not None
    token, mark = reader.processor.token_id, reader.processor.written
    encoder, drawn = (
        PromptEncoder(tokenizer, image_token=token),
        numpy.random.default_rng(0),
    )
    images = [
        reader.read(
            Image.fromarray(drawn.integers(0, 255, size, dtype=numpy.uint8)),
            "image",
            "here",
        )
        for size in ((60, 60, 3), (70, 90, 3), (112, 56, 3))
    ]
    prompts = [
        ("which colour " + mark, images[:1]),
        (mark + " and " + mark + " is", images[1:]),
        ("red and", []),
    ]
    rows, tokens = [], []
    for text, own in (prompts[number] for number in order):
        encoded = encoder.encode(text, images=own)
        assert encoded is not None
        rows.append(RowColumns(text, "", None, {}, own))
        tokens.append(encoded.token_ids)
    responses = [[11, 12, 13], [14, token, 12, 11], [12], [13, 14], [token, token, 3]][
        : len(order)
    ]
    generations = [Generation(each, [0.0] * len(each), "stop") for each in responses]
    return RolloutBatch.from_generations(
        tokens, generations, columns=image_column(row.images for row in rows)
    ), token


def reference(model: Any, batch: RolloutBatch, token: int) -> torch.Tensor:
    """[B, R]: log-probs by transformers, sample by sample, with a gradient."""
    found = []
    lengths = zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    )
    for row, (prompt, response) in enumerate(lengths):
        tokens = torch.cat(
            [batch.input_ids[row, :prompt], batch.generated_ids[row, :response]]
        )[None]
        places, images = tokens.clone(), batch.columns["images"][row]
        places[0, prompt:][places[0, prompt:] == token] = 0
        given: dict[str, Any] = {}
        if images:
            given = {
                name: [image.tensors[name] for image in images]
                for name in ("pixel_values", "image_grid_thw")
            }
            given = {
                "pixel_values": torch.cat(given["pixel_values"]),
                "mm_token_type_ids": (places == token).int(),
            } | {"image_grid_thw": torch.stack(given["image_grid_thw"])}
        embed = model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args, own=tokens: (own,)
        )
        logits = model(input_ids=places, **given).logits[0, prompt - 1 : -1]
        embed.remove()
        log_probs = logits.log_softmax(-1).gather(1, tokens[0, prompt:, None])[:, 0]
        found.append(
            torch.nn.functional.pad(log_probs, (0, batch.response_shape[1] - response))
        )
    return torch.stack(found)


def against_transformers(
    folder: str, order: list[int], packs: bool, freeze: list[str]
) -> dict[str, Any]:
    """Largest differences of log-probs and, relatively, of any parameter's gradient; and what is trained."""
    from transformers import AutoModelForImageTextToText

    batch, token = samples(folder, order)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    expected = reference(model, batch, token)
    (-expected.sum()).backward()
    size, groups = dist.get_world_size(), manager()
    made = FSDPModel(
        folder,
        groups.grid(GridShape.fit(size)),
        groups,
        ModelOptions(
            dtype=torch.float32,
            seed=0,
            trained=True,
            initialize=False,
            pack_samples=packs,
        ),
        fsdp=FsdpConfig(),
        freeze=freeze,
    )
    made.load(folder)
    micro = micro_batches_for(made, batch, 200)
    found = made.score(
        micro, lambda output, one: made.log_probs(output, one)[0], batch.response_shape
    )
    made.forward_backward(
        micro, lambda output, one: (-made.log_probs(output, one)[0].sum(), {})
    )
    worst, trained = 0.0, []
    for (name, parameter), (_, other) in zip(
        made.module.model.named_parameters(), model.named_parameters(), strict=True
    ):
        if parameter.requires_grad:
            trained.append(name)
            assert isinstance(parameter.grad, DTensor) and other.grad is not None, name
            difference = (
                parameter.grad.full_tensor() - other.grad
            ).abs().max() / other.grad.abs().max().clamp(min=1e-3)
            worst = max(worst, float(difference))
    return {
        "log_probs": float((found - expected.detach()).abs().max()),
        "gradients": worst,
        "trained": trained,
        "packed": made.pack is not None,
        "rows": [len(each.tokens) for each in micro],
    }


def megatron_model(
    folder: str, *, packs: bool = True, freeze: Sequence[str] = (), **options: Any
) -> MegatronModel:
    """An actor on the world's ranks; `options` are sizes of its grid and TransformerConfig fields."""
    sizes = {
        name: options.pop(name)
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp")
        if name in options
    }
    return MegatronModel(
        ModelSpec.from_folder(folder),
        manager().grid(GridShape.fit(dist.get_world_size(), **sizes)),
        ModelOptions(dtype=torch.float32, seed=0, initialize=False, pack_samples=packs),
        overrides=options,
        freeze=freeze,
    )


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """Return why each of these models cannot be made."""
    said = []
    for case in cases:
        try:
            megatron_model(**case)
            said.append("")
        except (ModelError, ConfigError) as refusal:
            said.append(str(refusal))
    return said


def stored_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of a transformers model under the names of its files, which hold experts one by one."""
    layout = weights_of_module(model).layout
    parameters = dict(model.named_parameters())
    gradients = {
        name: torch.zeros(shape) for name, shape in layout.global_shapes.items()
    }
    for piece in layout.pieces:
        # A tied output layer is the embedding.
        if piece.local in parameters:
            gradient = view(parameters[piece.local].grad, piece.local_box)
            target = view(gradients[piece.tensor], piece.box)
            target.copy_(gradient.reshape(target.shape))
    return gradients


def on_megatron(
    folder: str,
    order: list[int],
    grids: list[dict[str, Any]],
    freeze: list[str] | None = None,
) -> list[dict[str, Any]]:
    """The same of a Megatron-core model, on each grid of the world's ranks.

    Args:
        grids: sizes of the grid; also `packs`, and fields of TransformerConfig.
    """
    from transformers import AutoModelForImageTextToText

    batch, token = samples(folder, order)
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    expected = reference(model, batch, token)
    (-expected.sum()).backward()
    gradients = stored_gradients(model)
    found = []
    for options in grids:
        made = megatron_model(folder, **options, freeze=freeze or ())
        made.load(folder)
        micro = micro_batches_for(made, batch, 44)
        log_probs = made.score(
            micro,
            lambda output, one, made=made: made.log_probs(output, one)[0],  # type: ignore[misc]
            batch.response_shape,
        )
        trainable = MegatronTrainable(
            made,
            optimizer={"lr": 1e-3},
            scheduler={},
            # Every rank then has the sum of the gradients in full.
            ddp={"overlap_grad_reduce": True, "use_distributed_optimizer": False},
            total_updates=10,
        )

        def loss(
            output: torch.Tensor, one: MicroBatch, made: MegatronModel = made
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return -made.log_probs(output, one)[0].sum(), {}

        # Reductions overlap with the backward pass. In an update of text alone first,
        # megatron-core counts the gradients that it waits for in later ones.
        text, _ = samples(folder, [2, 2])
        for update in (micro_batches_for(made, text, 44), micro):
            trainable._zero_gradients()
            trainable._forward_backward(update, loss)
        worst = {"tower": 0.0, "decoder": 0.0}
        trained = []
        layout = made.held_layout_of(made.grid.rank)
        assert layout.local_shapes.keys() == made.held_parameters.keys()
        for piece in layout.pieces:
            parameter = made.held_parameters[layout.stored_in(piece.local)]
            if not parameter.requires_grad:
                continue
            trained.append(piece.tensor)
            theirs = view(gradients[piece.tensor], piece.box)
            ours = view(parameter.main_grad, piece.local_box)
            scale = gradients[piece.tensor].abs().max().clamp(min=1e-3)
            part = "tower" if "visual." in piece.tensor else "decoder"
            difference = float((ours - theirs.view_as(ours)).abs().max() / scale)
            worst[part] = max(worst[part], difference)
        found.append(
            {
                "log_probs": float((log_probs - expected.detach()).abs().max()),
                "gradients": worst,
                "trained": trained,
                "packed": made.pack is not None,
                "micro_batches": len(micro),
            }
        )
    return found
